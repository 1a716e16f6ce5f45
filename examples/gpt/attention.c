/* See attention.h. All that a training program needs of flashback: a plan, made once, and two calls. */
#include "attention.h"

#include <stdlib.h>

struct attention {
    fb_plan *plan; /* the decision: which kernels, how much workspace */
    int64_t heads_q;
    bool sinks;
};

/* A token's row holds all heads side by side: [batch][context][heads][D]. */
static fb_strides heads_inside(const gpt_config *c, int64_t heads) {
    return (fb_strides){
        .batch = c->context * heads * c->head_dim, .head = c->head_dim, .row = heads * c->head_dim};
}

/* The problem in numbers. */
static fb_desc describe(const gpt_config *c, int64_t window) {
    fb_desc desc;
    fb_desc_init(&desc, sizeof desc); /* CPU, scale 1 / sqrt(D) */
    desc.dtype = c->dtype, desc.route = c->route;
    desc.batch = c->batch, desc.heads_q = c->heads_q, desc.heads_kv = c->heads_kv;
    desc.len_q = desc.len_k = c->context;
    desc.head_dim = desc.head_dim_v = c->head_dim;
    desc.window =
        window ? fb_window_band(window - 1, 0) : fb_window_causal(); /* the token itself is one of them */
    desc.softcap = (double)c->softcap;
    desc.q = desc.out = desc.dq = desc.dout = heads_inside(c, c->heads_q);
    desc.k = desc.v = desc.dk = desc.dv = heads_inside(c, c->heads_kv);
    if (c->sinks)
        desc.flags |= FB_SINKS | FB_DSINKS;
    desc.threads = c->threads;
    return desc;
}

bool attention_open(attention **a, const gpt_config *config, int64_t window, complaint *why) {
    *a = calloc(1, sizeof **a);
    if (!*a)
        return complain(why, "memory ran out for a plan of attention");
    (*a)->heads_q = config->heads_q;
    (*a)->sinks = config->sinks;
    const fb_desc desc = describe(config, window);
    if (fb_plan_create(&(*a)->plan, &desc) == FB_OK)
        return true;
    attention_close(*a);
    *a = NULL;
    return complain(why, "%s", fb_last_error());
}

void attention_close(attention *a) {
    if (a)
        fb_plan_destroy(a->plan);
    free(a);
}

/* The workspace begins with this call's gradient of the sinks. flashback gets the rest. */
static size_t share_bytes(const attention *a) { return a->sinks ? (size_t)a->heads_q * sizeof(float) : 0; }

size_t attention_workspace(const attention *a) { return share_bytes(a) + fb_plan_workspace(a->plan); }

void attention_explain(const attention *a, char *text, size_t size) { fb_plan_explain(a->plan, text, size); }

/* What both passes take. flashback has one type for pointers to what it reads and to what it writes. */
static fb_io both(const attention *a, const void *q, const void *k, const void *v, const float *sinks,
                  const void *out, const float *lse, void *workspace) {
    fb_io io;
    fb_io_init(&io, sizeof io);
    io.q.data = (void *)q, io.k.data = (void *)k, io.v.data = (void *)v;
    io.sinks.data = (void *)sinks;
    io.out.data = (void *)out, io.lse.data = (void *)lse;
    io.workspace = (fb_ref){workspace, share_bytes(a)};
    io.workspace_size = fb_plan_workspace(a->plan);
    return io;
}

bool attention_forward(const attention *a, const void *q, const void *k, const void *v, const float *sinks,
                       void *out, float *lse, void *workspace, complaint *why) {
    const fb_io io = both(a, q, k, v, sinks, out, lse, workspace);
    return fb_forward(a->plan, &io) == FB_OK || complain(why, "%s", fb_last_error());
}

bool attention_backward(const attention *a, const void *q, const void *k, const void *v, const float *sinks,
                        const void *out, const float *lse, const void *dout, void *dq, void *dk, void *dv,
                        float *dsinks, void *workspace, complaint *why) {
    float *share = workspace;
    fb_io io = both(a, q, k, v, sinks, out, lse, workspace);
    io.dout.data = (void *)dout;
    io.dq.data = dq, io.dk.data = dk, io.dv.data = dv;
    io.dsinks.data = a->sinks ? share : NULL;
    if (fb_backward(a->plan, &io) != FB_OK)
        return complain(why, "%s", fb_last_error());
    for (int64_t h = 0; a->sinks && h < a->heads_q; h++)
        dsinks[h] += share[h];
    return true;
}
