/* Metal kernels on the processor, from their text: compiles a text as C++ with include/metal_stdlib in place
 * of Apple's, and runs its kernels with fibers for threads. A library for tests, in C.
 *
 * Next: schedule.cpp (how threads run), meet.cpp (what they do together), glue.cpp (text to library),
 * include/metal_stdlib. */
#ifndef EMULATOR_H
#define EMULATOR_H

#include <stdbool.h>
#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif

enum { EMULATOR_BUFFERS = 31, EMULATOR_THREADS = 1024, EMULATOR_THREADGROUP_BYTES = 32768 };

/* How a text is compiled. Besides, EMULATOR_CHECKED=1 in the environment checks all, and under
 * ThreadSanitizer all are for that. With EMULATOR_COUNTS=file every dispatch adds a line of JSON to it, the
 * counts below. */
#define EMULATOR_CHECKED                                                                                     \
    1u                    /* every load and store is looked at: counts bytes, refuses what is in no buffer */
#define EMULATOR_RACES 2u /* for a program that runs under ThreadSanitizer */

typedef struct emulator_library emulator_library;
typedef struct emulator_function emulator_function;

/* NULL if the text does not compile; *log, the caller's to free, then has the compiler's messages. A library
 * that was compiled before, with the same text, comes from the folder EMULATOR_CACHE if that is set. */
emulator_library *emulator_compile(const char *text, unsigned how, char **log);
void emulator_release(emulator_library *library);

/* NULL if there is no such kernel. The function is the library's. */
emulator_function *emulator_find(emulator_library *library, const char *name);

typedef struct emulator_buffer {
    void *at;
    size_t bytes; /* what a checked library may touch there; others do not look at it */
} emulator_buffer;

/* The order in which threads and threadgroups run; whatever is right gives the same bits in all of them. */
enum {
    EMULATOR_FORWARD = 0,
    EMULATOR_REVERSE = 1,
    EMULATOR_SHUFFLED = 2 /* and any larger number, a seed */
};

typedef struct emulator_dispatch {
    emulator_buffer buffers[EMULATOR_BUFFERS];
    unsigned long groups[3];
    unsigned threads;         /* of a threadgroup, in one dimension */
    size_t threadgroup_bytes; /* at index 0; more than EMULATOR_THREADGROUP_BYTES is refused */
    unsigned schedule;
} emulator_dispatch;

/* What a dispatch did, added to what is there. Bytes are counted in checked libraries only. */
typedef struct emulator_counts {
    unsigned long products; /* of 8 x 8 by 8 x 8, by a simdgroup */
    unsigned long barriers; /* of a threadgroup */
    unsigned long threadgroups;
    unsigned long shared_loads, shared_stores;                       /* bytes of threadgroup memory */
    unsigned long loads[EMULATOR_BUFFERS], stores[EMULATOR_BUFFERS]; /* bytes of each buffer */
} emulator_counts;

/* False, with a sentence in `message`, for what no GPU may be given: barriers that not all threads reach,
 * simdgroup functions that lanes reach apart, memory outside of all buffers or of threadgroup memory.
 * `counts` may be NULL. Any number of host threads may run dispatches at once. */
bool emulator_run(const emulator_function *function, const emulator_dispatch *dispatch,
                  emulator_counts *counts, char *message, size_t size);

#ifdef __cplusplus
}
#endif

#endif
