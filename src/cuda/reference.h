/* Route reference: the definition in double precision, kernels/reference.cu. Slow, and for comparison only.
 * Floor: cuda. Next: reference.c. */
#ifndef FB_CUDA_REFERENCE_H
#define FB_CUDA_REFERENCE_H

#include "../core/problem.h"

struct fb__cuda_state;

/* Functions of reference.cu. */
#define FB__REFERENCE_FUNCTIONS(X)                                                                           \
    X(FORWARD, "fb_reference_forward")                                                                       \
    X(DELTA, "fb_reference_delta")                                                                           \
    X(DQ, "fb_reference_dq")                                                                                 \
    X(DKDV, "fb_reference_dkdv")                                                                             \
    X(DBIAS, "fb_reference_dbias")                                                                           \
    X(DSINKS, "fb_reference_dsinks")

enum {
#define X(name, function) FB__REFERENCE_##name,
    FB__REFERENCE_FUNCTIONS(X)
#undef X
        FB__REFERENCE_COUNT
};

/* Sizes, or why they are too large; sets s->workspace and s->at_delta. */
fb_status fb__reference_lay_out(struct fb__cuda_state *s, const fb__problem *p);

fb_status fb__reference_run(const struct fb__cuda_state *s, const fb__problem *p, fb__pass pass,
                            const fb_io *io);

#endif
