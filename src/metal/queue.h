/* Command buffers and what becomes of them. Metal reports a failure on the command buffer alone, after the
 * call that made it has returned: on a caller's queue a handler leaves the first error there, until fb_sync
 * or a later call takes it. Floor: metal. Next: encode.c. */
#ifndef FB_METAL_QUEUE_H
#define FB_METAL_QUEUE_H

#include "objc.h"

/* What io.stream is. */
typedef enum fb__metal_stream {
    FB__METAL_OWN,    /* NULL: the plan's queue; a call returns when it is done */
    FB__METAL_QUEUE,  /* MTLCommandQueue: a call commits, and returns */
    FB__METAL_BUFFER, /* MTLCommandBuffer: a call encodes; the caller commits */
    FB__METAL_NEITHER
} fb__metal_stream;

fb__metal_stream fb__metal_stream_kind(const fb__objc *o, fb__id stream);

/* A new command buffer in the pool. */
fb_status fb__metal_buffer(const fb__objc *o, fb__id queue, fb__id *buffer);

/* Waits for a command buffer that was committed. `whose` is "this call", or "this stream". */
fb_status fb__metal_wait(const fb__objc *o, fb__id buffer, const char *whose);

/* Before a command buffer is committed: should it fail, its queue will know. */
void fb__metal_watch(const fb__objc *o, fb__id buffer);

/* What a watched command buffer of the queue has failed of; the queue forgets it. */
fb_status fb__metal_earlier(const fb__objc *o, fb__id queue);

/* Waits for all that was queued there, by whomever, and reports what failed of what was watched. */
fb_status fb__metal_finish(const fb__objc *o, fb__id queue);

#endif
