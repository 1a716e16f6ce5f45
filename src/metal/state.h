/* The Metal backend's plan. Constant once it is made, so that any number of threads may run it. Floor: metal.
 * Next: compile.h (how it gets its kernels), launch.h (how it runs). */
#ifndef FB_METAL_STATE_H
#define FB_METAL_STATE_H

#include "../core/problem.h"
#include "device.h"
#include "tune.h"

/* Functions of rows.metal, in the order of FB__METAL_KERNELS. */
enum {
    FB__METAL_DELTA,
    FB__METAL_DSINKS,
    FB__METAL_JOIN,
    FB__METAL_JOIN_DQ,
    FB__METAL_MERGE,
    FB__METAL_LAYOUT
};

/* Most functions of a file. */
enum { FB__METAL_FUNCTIONS = 9 };

typedef struct fb__metal_loaded {
    bool used;
    fb__metal_spec spec;
    fb__id
        pipelines[FB__METAL_FUNCTIONS]; /* MTLComputePipelineState, held; one for each function of the file */
    int first;                          /* rows that fit and were to be passed over: FLASHBACK_TILES */
    int threads;                        /* that the compiler's choice of registers allows a threadgroup */
    int skipped;                        /* rows of the table that it allowed too few */
    bool kept;                          /* by the device, from an earlier plan */
    double ms;                          /* to get them */
} fb__metal_loaded;

typedef struct fb__metal_state {
    fb__objc objc;
    fb__metal_device device;
    fb__id queue; /* for calls without a stream; held */
    fb_route route;
    bool stacked;
    int options; /* of scores: FB_SOFTCAP | ... of shared/args.h */
    fb__metal_loaded kernels[FB__METAL_KERNEL_COUNT];
    int64_t chunks[2]; /* of the keys, for the passes' forward and dq kernels */
    size_t at_delta, at_partial[2], at_partial_lse, at_gradients;
    size_t ds_bytes; /* of dS that dkdv keeps for dq; 0: each makes its own */
    size_t workspace;
} fb__metal_state;

#endif
