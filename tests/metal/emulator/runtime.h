/* What compiled kernels call: a table that schedule.cpp fills and every library is given. Floor: tests. */
#ifndef EMULATOR_RUNTIME_H
#define EMULATOR_RUNTIME_H

#include "emulator.h"

/* Where a kernel is: for messages, and to see that threads that meet do so at one place. */
typedef struct emulator_site {
    const char *file;
    int line;
    const char *what;
} emulator_site;

/* Values that a thread of a kernel knows about itself. */
typedef struct emulator_ids {
    unsigned group[3], groups[3];
    unsigned thread, threads; /* in the threadgroup */
} emulator_ids;

typedef struct emulator_pair {
    float x, y;
} emulator_pair;

typedef struct emulator_runtime {
    void (*barrier)(emulator_site site);      /* of the threadgroup; orders memory */
    void (*simd_barrier)(emulator_site site); /* of the simdgroup; orders memory */
    void (*note)(emulator_site site);         /* all lanes must pass here, without meeting */
    void (*shuffle)(void *value, size_t size, unsigned from, emulator_site site); /* at most 16 bytes */
    unsigned (*vote)(bool x, emulator_site site);                                 /* bit 0: any, bit 1: all */
    /* c + a b, each lane with its two elements of all of them. */
    emulator_pair (*multiply)(emulator_pair a, emulator_pair b, emulator_pair c, emulator_site site);
    unsigned (*lane)(void);
    void (*loaded)(const void *at, size_t bytes);
    void (*stored)(const void *at, size_t bytes);
} emulator_runtime;

/* What a kernel's glue is called with, once for each thread. */
typedef struct emulator_call {
    const emulator_dispatch *dispatch;
    const emulator_ids *ids;
    void *threadgroup;
} emulator_call;

/* The glue of a kernel, and where a library keeps the table. */
typedef void emulator_entry(const emulator_call *call);
typedef void emulator_attach(const emulator_runtime *runtime);

#ifdef __cplusplus
extern "C" {
#endif

/* Of schedule.cpp, for glue.cpp. */
extern const emulator_runtime emulator_the_runtime;
bool emulator_start(emulator_entry *entry, const char *name, const void *image,
                    const emulator_dispatch *dispatch, emulator_counts *counts, char *message, size_t size);

#ifdef __cplusplus
}
#endif

#endif
