/* Makers of the API's structs: all defaults stand here.
 * Floor: core. Next: problem.c, which takes what users made of them. */
#include "flashback.h"
#include <math.h>
#include <string.h>

static size_t least(size_t a, size_t b) { return a < b ? a : b; }

void fb_desc_init(fb_desc *desc, size_t size) {
    if (!desc)
        return;
    fb_desc d;
    memset(&d, 0, sizeof d);
    d.size = (uint32_t)size; /* as told: a longer one is found out by the bytes behind sizeof d */
    d.window = fb_window_none();
    d.scale = (double)NAN;
    d.bias_shape = d.mask_shape = (fb_shape){1, 1, 1, 1};
    d.block_q = d.block_k = 64;
    d.block_batch = d.block_heads = 1;
    memset(desc, 0, size);
    memcpy(desc, &d, least(size, sizeof d));
}

void fb_io_init(fb_io *io, size_t size) {
    if (!io)
        return;
    memset(io, 0, size);
    io->size = (uint32_t)size;
}

fb_window fb_window_none(void) { return (fb_window){FB_UNBOUNDED, FB_UNBOUNDED}; }

fb_window fb_window_causal(void) { return (fb_window){FB_UNBOUNDED, 0}; }

fb_window fb_window_band(int64_t left, int64_t right) { return (fb_window){left, right}; }
