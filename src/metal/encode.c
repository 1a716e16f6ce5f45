/* See encode.h. */
#include "encode.h"

enum { CONCURRENT = 1, BUFFERS = 1 }; /* MTLDispatchTypeConcurrent, MTLBarrierScopeBuffers */

/* Positions of threads are counted in 32 bits. */
#define THREADS_MOST INT64_C(0x7fffffff)

/* Whatever is bound stays so for all dispatches of an encoder. */
static fb_status begin(fb__metal_call *c) {
    const fb__objc *o = &c->s->objc;
    if (c->kind != FB__METAL_BUFFER)
        FB_TRY(fb__metal_buffer(o, c->queue, &c->buffer));
    c->encoder = FB__SEND(o, encoder, c->buffer, CONCURRENT);
    if (!c->encoder)
        return fb__error(FB_DEVICE,
                         "computeCommandEncoderWithDispatchType: failed: the command buffer gave no "
                         "encoder; is another one still open on it, or was it committed?");
    for (fb__uint n = FB_AT_ARGS + 1; n < FB_AT_COUNT; n++)
        FB__SEND(o, set_buffer, c->encoder, c->at[n].data, c->at[n].offset, n);
    c->left = FB__METAL_WORK_MOST;
    return FB_OK;
}

static fb_status end(fb__metal_call *c) {
    const fb__objc *o = &c->s->objc;
    FB__GET(o, end, c->encoder);
    c->encoder = NULL;
    if (c->kind == FB__METAL_BUFFER)
        return FB_OK;
    if (c->kind == FB__METAL_QUEUE)
        fb__metal_watch(o, c->buffer);
    FB__GET(o, commit, c->buffer);
    return c->kind == FB__METAL_OWN ? fb__metal_wait(o, c->buffer, "this call") : FB_OK;
}

/* A queue of another device would be given buffers that it does not know. */
static fb_status check_device(const fb__metal_call *c, fb__id stream) {
    const fb__objc *o = &c->s->objc;
    fb__id device = FB__GET(o, device, stream);
    if (FB__GET(o, registry_id, device) == c->s->device.registry)
        return FB_OK;
    const char *name = FB__GET(o, utf8, FB__GET(o, name, device));
    return fb__error(FB_INVALID, "io.stream belongs to the device %s, but the plan is for device %d, %s",
                     name ? name : "?", c->s->device.ordinal, c->s->device.name);
}

fb_status fb__metal_call_open(fb__metal_call *c, const fb__metal_state *s, void *stream) {
    c->s = s;
    c->kind = fb__metal_stream_kind(&s->objc, stream);
    if (c->kind == FB__METAL_NEITHER)
        return fb__error(FB_INVALID,
                         "io.stream is neither an MTLCommandQueue nor an MTLCommandBuffer; NULL is "
                         "for a queue of the plan's own");
    if (c->kind != FB__METAL_OWN)
        FB_TRY(check_device(c, stream));
    if (c->kind == FB__METAL_QUEUE)
        FB_TRY(fb__metal_earlier(&s->objc, stream));
    c->queue = c->kind == FB__METAL_OWN ? s->queue : stream;
    c->buffer = c->kind == FB__METAL_BUFFER ? stream : NULL;
    return begin(c);
}

void fb__metal_call_barrier(const fb__metal_call *c) { FB__SEND(&c->s->objc, barrier, c->encoder, BUFFERS); }

/* A new command buffer, which the queue runs after the one that ends here. */
static fb_status turn(fb__metal_call *c) {
    FB_TRY(end(c));
    return begin(c);
}

fb_status fb__metal_call_dispatch(fb__metal_call *c, fb__id pipeline, const fb__metal_grid *g,
                                  fb__metal_args *args) {
    const fb__objc *o = &c->s->objc;
    const int64_t most = THREADS_MOST / g->threads;
    const double each = g->work / (double)(g->x ? g->x : 1);
    if (!g->y)
        return FB_OK;
    for (int64_t first = 0, count; first < g->x; first += count) {
        const bool full = c->left < each && c->left < FB__METAL_WORK_MOST;
        if (full && c->kind != FB__METAL_BUFFER)
            FB_TRY(turn(c));
        count = g->x - first < most ? g->x - first : most;
        if (c->kind != FB__METAL_BUFFER && (double)count * each > c->left)
            count = c->left > each ? (int64_t)(c->left / each) : 1;
        args->first = first;
        FB__SEND(o, set_pipeline, c->encoder, pipeline);
        FB__SEND(o, set_bytes, c->encoder, args, sizeof *args, FB_AT_ARGS);
        if (g->shared_bytes)
            FB__SEND(o, set_threadgroup, c->encoder, (fb__uint)g->shared_bytes, 0);
        FB__SEND(o, dispatch, c->encoder, ((fb__size){(fb__uint)count, (fb__uint)g->y, 1}),
                 ((fb__size){(fb__uint)g->threads, 1, 1}));
        c->left -= (double)count * each;
    }
    return FB_OK;
}

fb_status fb__metal_call_close(fb__metal_call *c) { return end(c); }
