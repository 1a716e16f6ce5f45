/* Which tiles a Metal kernel takes: a table of rows, first fit wins. Floor: metal. Next: abi.h. */
#ifndef FB_METAL_TUNE_H
#define FB_METAL_TUNE_H

#include "../jit/jit.h"
#include <stdbool.h>

/* Kernel files, and the functions in them: file, then functions as one text, separated by blanks. ROWS has no
 * tiles, and no rows in the table. */
#define FB__METAL_KERNELS(X)                                                                                 \
    X(FORWARD, "forward.metal", "fb_forward")                                                                \
    X(DQ, "dq.metal", "fb_dq")                                                                               \
    X(DKDV, "dkdv.metal", "fb_dkdv")                                                                         \
    X(DBIAS, "dbias.metal", "fb_dbias")                                                                      \
    X(ROWS, "rows.metal", "fb_delta fb_dsinks fb_join fb_join_dq fb_merge_parts fb_layout")                  \
    X(UNFUSED, "unfused.metal", FB__METAL_UNFUSED_FUNCTIONS)

#define FB__METAL_UNFUSED_FUNCTIONS                                                                          \
    ("fb_unfused_s fb_unfused_dp fb_unfused_softmax fb_unfused_o fb_unfused_dbias fb_unfused_gradient "      \
     "fb_unfused_dq fb_unfused_dk fb_unfused_dv")

typedef enum fb__metal_kernel {
#define X(name, file, functions) FB__METAL_##name,
    FB__METAL_KERNELS(X)
#undef X
        FB__METAL_KERNEL_COUNT
} fb__metal_kernel;

/* The baked constants of a kernel: FB_<name>. What has few values only; lengths and strides are arguments, so
 * that no new length compiles anything. */
#define FB__METAL_SPEC(X)                                                                                    \
    X(TYPE)    /* fb_dtype */                                                                                \
    X(D)       /* columns of Q and K, rounded up to 8 for each of WN */                                      \
    X(DV)      /* columns of V and O, likewise */                                                            \
    X(OPTIONS) /* FB_SOFTCAP | FB_BIASED | FB_MASKED | FB_BLOCKED of shared/args.h */                        \
    X(STACK)   /* the heads of a group side by side: route vector */                                         \
    X(BM)      /* rows of a threadgroup: queries, or keys in dkdv */                                         \
    X(BN)      /* rows of a tile that passes by */                                                           \
    X(WM)      /* simdgroups, by rows */                                                                     \
    X(WN)      /* simdgroups, by columns: each has its slab of D and of DV */                                \
    X(MI)      /* pieces of 8 rows of a simdgroup */                                                         \
    X(BUFFERS) /* 2: the two tensors that pass by have a tile each; 1: they take turns in one */             \
    X(KEEP_DS) /* dkdv leaves dS in memory, and dq takes it from there: 5 products of 7, O(L^2) memory */    \
    X(THREADS) /* of a threadgroup */

typedef struct fb__metal_spec {
#define X(name) int name;
    FB__METAL_SPEC(X)
#undef X
    int shared_bytes;     /* threadgroup memory, a multiple of 16; not baked */
    const char *measured; /* where the row was measured */
} fb__metal_spec;

enum {
#define X(name) FB__METAL_SPEC_##name,
    FB__METAL_SPEC(X)
#undef X
        FB__METAL_SPEC_COUNT
};

/* What a choice depends on. */
typedef struct fb__metal_need {
    fb_dtype type;
    int64_t head_dim, head_dim_v;
    int options; /* FB_SOFTCAP | ... */
    bool stack;
    bool keep_ds;
    int family;       /* of the GPU: 7 is M1, 8 M2, 9 M3 and M4 */
    int shared_bytes; /* threadgroup memory that there is, 32768 on all of them */
    int skip;         /* rows that fit, to be passed over: the compiler gave them too few threads */
} fb__metal_need;

/* The first row that fits, after `skip` others; false if there is none. */
bool fb__metal_tune(fb__metal_kernel kernel, const fb__metal_need *need, fb__metal_spec *spec);

/* The spec as #defines; `defines` has room for FB__METAL_SPEC_COUNT. */
void fb__metal_defines(const fb__metal_spec *spec, fb__define *defines);

/* Row number n of the table as a spec at its largest head dims, for tests of every row; false past the end.
 */
bool fb__metal_tune_row(int n, fb_dtype type, int options, fb__metal_kernel *kernel, fb__metal_spec *spec);

const char *fb__metal_file(fb__metal_kernel kernel);

#endif
