/* Kernels that a plan had compiled or found in the cache, as its explanation lists them: for warm and for the
 * costs that bench prints. Floor: cli. */
#ifndef CLI_KERNELS_H
#define CLI_KERNELS_H

#include "flashback.h"
#include <stdbool.h>

enum { KERNELS_MOST = 16 };

typedef struct kernel_line {
    char file[64];
    bool compiled; /* otherwise it came from the cache */
    double ms;
} kernel_line;

/* Lines "kernel: FILE, compiled in X ms, ..." and "kernel: FILE, from the cache in X ms, ..."; their number,
 * KERNELS_MOST at most. 0 where nothing is compiled at run time. */
int kernels_of(const fb_plan *plan, kernel_line *lines);

#endif
