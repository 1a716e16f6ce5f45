/* What a library of the mock of Metal holds: its text, or, with MOCK_MODEL, kernels that run on this
 * machine's processor: see tests/metal/emulator/emulate.c, which makes them. */
#ifndef TESTS_MOCK_MSL_H
#define TESTS_MOCK_MSL_H

#include <stdbool.h>
#include <stddef.h>

enum { MSL_BUFFERS = 31 };

typedef struct msl_launch {
    struct {
        void *at;
        size_t bytes;
    } buffers[MSL_BUFFERS];
    unsigned long groups[3];
    unsigned threads;
    size_t threadgroup_bytes;
} msl_launch;

#ifdef MOCK_MODEL
/* NULL with messages of the compiler in *log, from malloc. */
void *mock_msl_compile(const char *text, char **log);
void mock_msl_drop(void *library);
void *mock_msl_find(void *library, const char *name);
/* False with a sentence, where a GPU would have been lost. */
bool mock_msl_run(void *function, const msl_launch *launch, char *message, size_t size);
#else
static inline void *mock_msl_compile(const char *text, char **log) {
    static char nothing;
    (void)text, (void)log;
    return &nothing;
}
static inline void mock_msl_drop(void *library) { (void)library; }
static inline void *mock_msl_find(void *library, const char *name) {
    (void)name;
    return library;
}
static inline bool mock_msl_run(void *function, const msl_launch *launch, char *message, size_t size) {
    (void)function, (void)launch, (void)message, (void)size;
    return true;
}
#endif

#endif
