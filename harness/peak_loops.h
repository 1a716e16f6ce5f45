/* The loops that peak.c times. Floor: harness. */
#ifndef HARNESS_PEAK_LOOPS_H
#define HARNESS_PEAK_LOOPS_H

#include "peak.h"
#include <stddef.h>
#include <stdint.h>

/* Does n rounds over all accumulators; returns a value that depends on every one. */
typedef double fbh_flop_loop(int64_t n);

/* The widest of a type on this machine. */
typedef struct fbh_flop_kernel {
    const char *name;
    fbh_flop_loop *loop;    /* NULL = the machine has no such instructions, or does not permit them */
    double flops_per_round; /* 2 x accumulators x multiply-adds into each */
} fbh_flop_kernel;

fbh_flop_kernel fbh_flop_kernel_of(fbh_peak_type type);
/* Loops of instructions on pairs of bf16; peak_bf16.c. */
fbh_flop_kernel fbh_flop_kernel_vdpbf16ps(void);
fbh_flop_kernel fbh_flop_kernel_tdpbf16ps(void);

/* Loads `bytes` from `from`, which is aligned to 64, once, and returns a value that depends on every one;
 * bytes are a multiple of FBH_READ_STEP. peak_read.c. */
enum { FBH_READ_STEP = 4096 };
typedef uint64_t fbh_read_loop(const void *from, size_t bytes);
fbh_read_loop *fbh_read_widest(void);

#endif
