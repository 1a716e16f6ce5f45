/* A call's dispatches on their way into command buffers. Long work is cut, so that no command buffer meets
 * the GPU's watchdog. Floor: metal. Next: encode.c. */
#ifndef FB_METAL_ENCODE_H
#define FB_METAL_ENCODE_H

#include "abi.h"
#include "queue.h"
#include "state.h"

typedef struct fb__metal_call {
    const fb__metal_state *s;
    fb_ref at[FB_AT_COUNT]; /* what is bound; every one is a buffer */
    fb__metal_stream kind;
    fb__id queue, buffer, encoder;
    double left; /* operations that the command buffer has room for */
} fb__metal_call;

/* Threadgroups: x of them, numbered from 0, by y. `work` are the floating-point operations of all. */
typedef struct fb__metal_grid {
    int64_t x, y;
    int threads, shared_bytes;
    double work;
} fb__metal_grid;

/* Operations in one command buffer. The watchdog ends what takes some seconds, less while the screen is busy;
 * an M1 does this many in about 0.3 s at a third of its 2.6 TFLOP/s. */
#define FB__METAL_WORK_MOST 2.5e11

/* Begins on a stream: io.stream, or NULL. `at` is set before. Needs a pool, which holds what is made here. */
fb_status fb__metal_call_open(fb__metal_call *c, const fb__metal_state *s, void *stream);

/* After all that was dispatched in this call, where the next reads what that wrote. */
void fb__metal_call_barrier(const fb__metal_call *c);

fb_status fb__metal_call_dispatch(fb__metal_call *c, fb__id pipeline, const fb__metal_grid *grid,
                                  fb__metal_args *args);

/* Ends it. Nothing of the call is left open when open or dispatch have failed. */
fb_status fb__metal_call_close(fb__metal_call *c);

#endif
