/* See reference.h. */
#include "reference.h"
#include "../shared/routes.h"
#include "launch.h"

#define MAX_BLOCKS INT64_C(0x7fffffff)
#define PLACE 16

static double larger(double a, double b) { return a > b ? a : b; }

/* A block for each query of each head, for each key, and for eight cells of dbias. */
fb_status fb__reference_lay_out(fb__cuda_state *s, const fb__problem *p) {
    const fb_desc *d = &p->d;
    const fb_shape *n = &d->bias_shape;
    const double batch = (double)d->batch, rows = (double)fb__launch_rows(p);
    double most =
        batch * larger((double)d->heads_q * (double)d->len_q, (double)d->heads_kv * (double)d->len_k);
    if (fb__has(p, FB_DBIAS))
        most = larger(most, (double)n->batch * (double)n->heads * (double)n->rows * (double)n->cols / 8);
    if (most > (double)MAX_BLOCKS)
        return fb__error(FB_UNSUPPORTED,
                         "route reference needs up to %.3g blocks of threads, a launch takes %lld; cut the "
                         "batch or the heads, or take route fused",
                         most, (long long)MAX_BLOCKS);
    s->at_delta = 0;
    s->workspace = (size_t)rows * sizeof(double) + PLACE; /* PLACE to align it */
    return FB_OK;
}

typedef struct call {
    const fb__cuda_state *s;
    fb__args a;
    fb__reference r;
    void *stream;
} call;

static fb_status start(call *c, int function, int64_t blocks) {
    void *parameters[] = {&c->a, &c->r};
    return fb__launch_kernel(c->s, c->s->reference_functions[function], blocks, 1,
                             c->s->kernels[FB__KERNEL_REFERENCE].spec.THREADS, 0, c->stream, parameters);
}

static fb_status start_dbias(call *c, const fb__problem *p) {
    const fb_shape *n = &p->d.bias_shape;
    const int64_t cells = n->batch * n->heads * n->rows * n->cols,
                  warps = c->s->kernels[FB__KERNEL_REFERENCE].spec.THREADS / 32;
    return start(c, FB__REFERENCE_DBIAS, (cells + warps - 1) / warps);
}

static fb_status backward(call *c, const fb__problem *p) {
    const fb_desc *d = &p->d;
    const int64_t queries = d->batch * d->heads_q * d->len_q, keys = d->batch * d->heads_kv * d->len_k;
    FB_TRY(start(c, FB__REFERENCE_DELTA, queries));
    if (!fb__has(p, FB_NO_DQ))
        FB_TRY(start(c, FB__REFERENCE_DQ, queries));
    if (!fb__has(p, FB_NO_DK) || !fb__has(p, FB_NO_DV))
        FB_TRY(start(c, FB__REFERENCE_DKDV, keys));
    if (fb__has(p, FB_DBIAS))
        FB_TRY(start_dbias(c, p));
    return fb__has(p, FB_DSINKS) ? start(c, FB__REFERENCE_DSINKS, d->heads_q) : FB_OK;
}

fb_status fb__reference_run(const fb__cuda_state *s, const fb__problem *p, fb__pass pass, const fb_io *io) {
    const fb_desc *d = &p->d;
    char *work = (char *)(((uintptr_t)fb__at(io->workspace) + PLACE - 1) / PLACE * PLACE);
    call c = {.s = s,
              .a = fb__launch_arguments(s, p, pass, io),
              .r = {(double *)(void *)work, d->scale, d->softcap},
              .stream = io->stream};
    return pass == FB__BACKWARD ? backward(&c, p)
                                : start(&c, FB__REFERENCE_FORWARD, d->batch * d->heads_q * d->len_q);
}
