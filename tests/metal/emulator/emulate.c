/* Libraries of the mock of Metal that run: the emulator, behind what tests/mock/msl.h asks for. The kernels'
 * threadgroups run in the order that MOCK_SCHEDULE says, 0 unless it is set. */
#include "emulator.h"
#include "tests/mock/msl.h"
#include <stdlib.h>

void *mock_msl_compile(const char *text, char **log) { return emulator_compile(text, 0, log); }

void mock_msl_drop(void *library) { emulator_release(library); }

void *mock_msl_find(void *library, const char *name) { return emulator_find(library, name); }

bool mock_msl_run(void *function, const msl_launch *launch, char *message, size_t size) {
    emulator_dispatch d = {.threads = launch->threads, .threadgroup_bytes = launch->threadgroup_bytes};
    const char *schedule = getenv("MOCK_SCHEDULE");
    d.schedule = schedule ? (unsigned)atoi(schedule) : EMULATOR_FORWARD;
    for (int n = 0; n < MSL_BUFFERS; n++) {
        d.buffers[n].at = launch->buffers[n].at;
        d.buffers[n].bytes = launch->buffers[n].bytes;
    }
    for (int n = 0; n < 3; n++)
        d.groups[n] = launch->groups[n];
    return emulator_run(function, &d, NULL, message, size);
}
