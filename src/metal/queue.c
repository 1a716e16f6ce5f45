/* See queue.h. The error is the queue's by association, so it goes with the queue; and nothing points from
 * the queue to a command buffer, which holds the queue. */
#include "queue.h"

enum { FAILED = 5 };                                                        /* MTLCommandBufferStatus */
enum { TIMEOUT = 2, PAGE_FAULT = 3, NOT_PERMITTED = 7, OUT_OF_MEMORY = 8 }; /* MTLCommandBufferError */

static const char failure = 0; /* its address is the key of the error */

fb__metal_stream fb__metal_stream_kind(const fb__objc *o, fb__id stream) {
    return !stream                                   ? FB__METAL_OWN
           : FB__RESPONDS(o, stream, command_buffer) ? FB__METAL_QUEUE
           : FB__RESPONDS(o, stream, encoder)        ? FB__METAL_BUFFER
                                                     : FB__METAL_NEITHER;
}

fb_status fb__metal_buffer(const fb__objc *o, fb__id queue, fb__id *buffer) {
    *buffer = FB__GET(o, command_buffer, queue);
    return *buffer ? FB_OK : fb__error(FB_DEVICE, "commandBuffer failed: the queue gave no command buffer");
}

/* ---- Errors ---- */

/* What helps, where Metal's own words do not say it. */
static const char *advice(fb__int code) {
    switch (code) {
    case TIMEOUT:
        return "; the GPU's watchdog ended it: something else keeps the GPU busy, or a kernel is far slower "
               "here than expected";
    case PAGE_FAULT:
        return "; was a buffer released, or is one of another device?";
    case NOT_PERMITTED:
        return "; programs in the background may not use the GPU";
    default:
        return "";
    }
}

static fb_status refuse(const fb__objc *o, fb__id error, const char *whose) {
    const fb__int code = FB__GET(o, code, error);
    return fb__error(code == OUT_OF_MEMORY ? FB_MEMORY : FB_DEVICE,
                     "the command buffer of %s failed: %s (%ld)%s", whose, fb__objc_reason(o, error), code,
                     advice(code));
}

fb_status fb__metal_wait(const fb__objc *o, fb__id buffer, const char *whose) {
    FB__GET(o, wait, buffer);
    return FB__GET(o, status, buffer) == FAILED ? refuse(o, FB__GET(o, error, buffer), whose) : FB_OK;
}

/* ---- The handler ---- */

/* A block, as clang's Block-ABI-Apple lays it out. Metal copies it from the stack: what it has besides its
 * head is plain bytes. */
typedef struct block {
    void *isa;
    int flags, reserved;
    void (*invoke)(struct block *self, fb__id buffer);
    const struct block_size { unsigned long reserved, bytes; } * size;
    fb__objc objc;
} block;

/* On a thread of Metal's. */
static void completed(block *self, fb__id buffer) {
    const fb__objc *o = &self->objc;
    void *pool = fb__objc_enter(o);
    fb__id queue = FB__GET(o, queue, buffer);
    if (FB__GET(o, status, buffer) == FAILED && !o->associated(queue, &failure))
        o->associate(queue, &failure, FB__GET(o, error, buffer), FB__OBJC_RETAIN);
    fb__objc_leave(o, pool);
}

void fb__metal_watch(const fb__objc *o, fb__id buffer) {
    static const struct block_size size = {0, sizeof(block)};
    const block handler = {.isa = o->stack_block, .invoke = completed, .size = &size, .objc = *o};
    FB__SEND(o, add_handler, buffer, &handler);
}

fb_status fb__metal_earlier(const fb__objc *o, fb__id queue) {
    fb__id error = o->associated(queue, &failure);
    if (!error)
        return FB_OK;
    o->associate(queue, &failure, NULL, FB__OBJC_RETAIN);
    return refuse(o, error, "an earlier call on this queue");
}

/* Command buffers of a queue are done in order, and so are their handlers. */
fb_status fb__metal_finish(const fb__objc *o, fb__id queue) {
    fb__id last;
    FB_TRY(fb__metal_buffer(o, queue, &last));
    FB__GET(o, commit, last);
    fb_status status = fb__metal_wait(o, last, "this wait");
    FB_TRY(fb__metal_earlier(o, queue));
    return status;
}
