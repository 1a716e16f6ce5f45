/* The CUDA backend's plan, and one pass of it as launches. Floor: cuda. Next: launch.c. */
#ifndef FB_CUDA_LAUNCH_H
#define FB_CUDA_LAUNCH_H

#include "../core/problem.h"
#include "../jit/jit.h"
#include "../shared/args.h"
#include "driver.h"
#include "reference.h"
#include "tune.h"
#include "unfused.h"

/* Functions of rows.cu. */
#define FB__ROW_FUNCTIONS(X)                                                                                 \
    X(DELTA, "fb_delta")                                                                                     \
    X(DSINKS, "fb_dsinks")                                                                                   \
    X(JOIN, "fb_join")                                                                                       \
    X(JOIN_DQ, "fb_join_dq")                                                                                 \
    X(MERGE, "fb_merge_parts")

enum {
#define X(name, function) FB__ROW_##name,
    FB__ROW_FUNCTIONS(X)
#undef X
        FB__ROW_COUNT
};

typedef struct fb__loaded {
    bool used;
    fb__spec spec;
    void *module, *function;
    fb__jit_origin origin;
    double ms; /* to get its code */
    int registers, spilled;
} fb__loaded;

/* Functions of hopper_rows.cu. */
#define FB__HOPPER_FUNCTIONS(X)                                                                              \
    X(DELTA, "fb_hopper_delta")                                                                              \
    X(DQ, "fb_hopper_dq")

enum {
#define X(name, function) FB__HOPPER_##name,
    FB__HOPPER_FUNCTIONS(X)
#undef X
        FB__HOPPER_COUNT
};

/* Words, or "" where a kernel of sm_90a is taken. */
typedef char fb__why[160];

typedef struct fb__cuda_state {
    fb__driver driver;
    fb__gpu gpu;
    void *context;
    fb_route route;
    bool stacked;
    int options; /* of scores: FB_SOFTCAP | ... of shared/args.h */
    fb__loaded kernels[FB__KERNEL_COUNT];
    fb__kernel hopper_backward; /* which of the two that there are for sm_90a */
    uint64_t hopper_order[2];   /* device memory, or 0: for each pass, see fb__args.order */
    int64_t hopper_rounds[2];
    fb__why not_hopper[2]; /* for each pass: why the kernels for all GPUs run */
    void *row_functions[FB__ROW_COUNT], *unfused_functions[FB__UNFUSED_COUNT],
        *reference_functions[FB__REFERENCE_COUNT], *hopper_functions[FB__HOPPER_COUNT];
    fb__unfused_plan unfused;
    char compiler[48], arch[16];
    int64_t chunks[2]; /* of the keys, for the passes' forward and dq kernels */
    size_t at_delta, at_lse_log2, at_lse_rest, at_partial[2], at_partial_lse;
    size_t at_hopper_lse, at_hopper_delta, at_hopper_plain_delta, at_hopper_dq;
    size_t workspace;
} fb__cuda_state;

fb_status fb__launch_forward(const fb__cuda_state *s, const fb__problem *p, const fb_io *io);
fb_status fb__launch_backward(const fb__cuda_state *s, const fb__problem *p, const fb_io *io);
/* For routes with launches of their own: what all kernels are given, in both passes; one launch, of no blocks
 * too; delta and dsinks by rows.cu. */
fb__args fb__launch_arguments(const fb__cuda_state *s, const fb__problem *p, fb__pass pass, const fb_io *io);
fb_status fb__launch_kernel(const fb__cuda_state *s, void *function, int64_t blocks, int64_t across,
                            int threads, int shared_bytes, void *stream, void **parameters);
/* Counts the tiles of `tile` rows, of queries or keys, and says so in *a: so many blocks, or turns of blocks.
 */
int64_t fb__launch_tiles(const fb__cuda_state *s, const fb__problem *p, bool keys, int tile, fb__args *a);
fb_status fb__launch_delta(const fb__cuda_state *s, const fb__problem *p, void *stream, fb__args *a);
fb_status fb__launch_dsinks(const fb__cuda_state *s, const fb__problem *p, void *stream, fb__args *a);

fb_status fb__launch_merge(const fb__cuda_state *s, const fb__problem *p, fb_ref out, fb_ref lse,
                           fb_ref other_out, fb_ref other_lse, void *stream);

/* Query rows of the problem: elements of lse. */
int64_t fb__launch_rows(const fb__problem *p);
/* Blocks of rows of one head, over all sequences when packed. */
int64_t fb__launch_slots(const fb__problem *p, bool keys, bool stacked, int tile);

#endif
