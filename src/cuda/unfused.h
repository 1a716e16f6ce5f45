/* Route unfused: the score matrices in the workspace, products by cuBLAS, and what lies around them by
 * kernels/unfused.cu. The honest baseline: what a framework without a fused kernel does. Floor: cuda.
 * Next: unfused.c. */
#ifndef FB_CUDA_UNFUSED_H
#define FB_CUDA_UNFUSED_H

#include "../base/text.h"
#include "../core/problem.h"
#include "../shared/routes.h"
#include "blas.h"

struct fb__cuda_state;

/* Functions of unfused.cu. */
#define FB__UNFUSED_FUNCTIONS(X)                                                                             \
    X(PACK, "fb_unfused_pack")                                                                               \
    X(CLEAN, "fb_unfused_clean")                                                                             \
    X(SOFTMAX, "fb_unfused_softmax")                                                                         \
    X(GRADIENT, "fb_unfused_gradient")                                                                       \
    X(DBIAS, "fb_unfused_dbias")                                                                             \
    X(UNPACK, "fb_unfused_unpack")

enum {
#define X(name, function) FB__UNFUSED_##name,
    FB__UNFUSED_FUNCTIONS(X)
#undef X
        FB__UNFUSED_COUNT
};

/* Its products: result, and the operands as kernels/unfused.cu names them. */
enum {
    FB__PRODUCT_S,
    FB__PRODUCT_O,
    FB__PRODUCT_DP,
    FB__PRODUCT_DQ,
    FB__PRODUCT_DK,
    FB__PRODUCT_DV,
    FB__PRODUCTS
};

/* Its part of a plan: how things lie in the workspace, and the products. */
typedef struct fb__unfused_plan {
    int64_t row;           /* floats of a row of scores */
    int64_t wide, wide_v;  /* columns of packs and sums */
    int64_t queries, keys; /* rows of all heads; padded to len_q and len_k in a packed batch */
    size_t at_any, any_bytes, at_odd[FB_PACKS], at_pack[FB_PACKS], at_scores[2], at_sum[FB_SUMS], at_factor,
        at_blas, bytes;
    fb__blas blas;
    void *handle;
    fb__product products[FB__PRODUCTS];
} fb__unfused_plan;

/* Sizes, or why they are too large; sets s->workspace and s->at_delta. */
fb_status fb__unfused_lay_out(struct fb__cuda_state *s, const fb__problem *p);

/* Finds cuBLAS and makes the products; their workspace joins s->workspace. The device's context is current.
 * After a failure fb__unfused_drop has to be called too. */
fb_status fb__unfused_prepare(struct fb__cuda_state *s, const fb__problem *p);

/* `in_context`: the device's context is current; without it the handle stays. */
void fb__unfused_drop(struct fb__cuda_state *s, bool in_context);

fb_status fb__unfused_run(const struct fb__cuda_state *s, const fb__problem *p, fb__pass pass,
                          const fb_io *io);

void fb__unfused_explain(const struct fb__cuda_state *s, const fb__problem *p, fb__text *text);

#endif
