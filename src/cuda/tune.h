/* Which tiles a kernel takes: a table of rows, first fit wins. Floor: cuda. */
#ifndef FB_CUDA_TUNE_H
#define FB_CUDA_TUNE_H

#include "../base/text.h"
#include "../jit/jit.h"
#include <stdbool.h>

/* Kernel files and their entry points: file, function. From ROWS on they have no tiles, and no rows in the
 * table; UNFUSED and REFERENCE take their sizes from the arguments alone. From HOPPER_FORWARD on they are for
 * sm_90a, and their rows are in hopper.c. */
#define FB__KERNELS(X)                                                                                       \
    X(FORWARD, "forward.cu", "fb_forward")                                                                   \
    X(DQ, "dq.cu", "fb_dq")                                                                                  \
    X(DKDV, "dkdv.cu", "fb_dkdv")                                                                            \
    X(DBIAS, "dbias.cu", "fb_dbias")                                                                         \
    X(ROWS, "rows.cu", "fb_delta")                                                                           \
    X(UNFUSED, "unfused.cu", "fb_unfused_pack")                                                              \
    X(REFERENCE, "reference.cu", "fb_reference_forward")                                                     \
    X(HOPPER_FORWARD, "hopper_forward.cu", "fb_hopper_forward")                                              \
    X(HOPPER_BACKWARD, "hopper_backward.cu", "fb_hopper_backward")                                           \
    X(HOPPER_SPLIT, "hopper_split.cu", "fb_hopper_split")                                                    \
    X(HOPPER_ROWS, "hopper_rows.cu", "fb_hopper_delta")

typedef enum fb__kernel {
#define X(name, file, function) FB__KERNEL_##name,
    FB__KERNELS(X)
#undef X
        FB__KERNEL_COUNT
} fb__kernel;

#define FB__KERNEL_HOPPER FB__KERNEL_HOPPER_FORWARD

const char *fb__kernel_file(fb__kernel kernel);
const char *fb__kernel_function(fb__kernel kernel);

/* The baked constants of a kernel: FB_<name>. What has few values only; lengths and options are arguments, so
 * that no new length compiles anything. */
#define FB__SPEC(X)                                                                                          \
    X(TYPE)           /* fb_dtype */                                                                         \
    X(D)              /* columns of Q and K, rounded up */                                                   \
    X(DV)             /* columns of V and O, rounded up */                                                   \
    X(PLAIN)          /* no softcap, bias, mask or block mask */                                             \
    X(OPTIONS)        /* which of these four there are: FB_SOFTCAP | FB_BIASED | FB_MASKED | FB_BLOCKED */   \
    X(STACK)          /* the heads of a group side by side: route vector */                                  \
    X(BM)             /* rows of a block: queries, or keys in dkdv */                                        \
    X(BN)             /* rows of a tile that passes by */                                                    \
    X(WM)             /* warps, by rows */                                                                   \
    X(WN)             /* warps, by columns of the result */                                                  \
    X(WK)             /* warps, by rows of the tile that passes by */                                        \
    X(MI)             /* pieces of 16 rows of a warp */                                                      \
    X(BUFFERS)        /* for tiles that pass by: 1, or more, where some arrive while another is used */      \
    X(THREADS)        /* of a block */                                                                       \
    X(BLOCKS)         /* of a multiprocessor, which registers must allow */                                  \
    X(UNROLL_COLUMNS) /* loops over columns */                                                               \
    X(MAX_MI)         /* sizes of arrays */                                                                  \
    X(MAX_CELLS)                                                                                             \
    X(REGISTERS)        /* sm_90a: of a thread that computes */                                              \
    X(LOADER_REGISTERS) /* and of one that does not */                                                       \
    X(POLY)             /* every how many-th fragment has its exponentials from products; 0: none */         \
    X(TURNS)            /* warpgroups take turns */

typedef struct fb__spec {
#define X(name) int name;
    FB__SPEC(X)
#undef X
    int shared_bytes;     /* of a block, at launch; not baked */
    const char *measured; /* where the row was measured */
} fb__spec;

enum {
#define X(name) FB__SPEC_##name,
    FB__SPEC(X)
#undef X
        FB__SPEC_COUNT
};

/* The first row for a kernel whose tiles fit into shared_bytes of shared memory; false if none does. */
bool fb__tune_choose(fb__kernel kernel, fb_dtype type, int64_t head_dim, int64_t head_dim_v, bool plain,
                     bool stack, int shared_bytes, fb__spec *spec);

/* What all specs of a type and head dims have in common. */
void fb__tune_common(fb_dtype type, int options, fb__spec *spec);

/* The spec as #defines; `defines` has room for FB__SPEC_COUNT. */
void fb__tune_defines(const fb__spec *spec, fb__define *defines);

/* Row number n of the table as a spec at its largest head dims, for tests that compile every row; false past
 * the end. */
bool fb__tune_row(int n, fb_dtype type, bool plain, fb__kernel *kernel, fb__spec *spec);

#endif
