/* One pass of a plan as dispatches. Floor: metal. Next: launch.c, then encode.h. */
#ifndef FB_METAL_LAUNCH_H
#define FB_METAL_LAUNCH_H

#include "state.h"

fb_status fb__metal_forward(const fb__metal_state *s, const fb__problem *p, const fb_io *io);
fb_status fb__metal_backward(const fb__metal_state *s, const fb__problem *p, const fb_io *io);
fb_status fb__metal_merge(const fb__metal_state *s, const fb__problem *p, fb_ref out, fb_ref lse,
                          fb_ref other_out, fb_ref other_lse, void *stream);

/* Query rows of the problem: elements of lse. */
int64_t fb__metal_rows(const fb__problem *p);
/* Tiles of rows of one head, over all sequences when packed. */
int64_t fb__metal_slots(const fb__problem *p, bool keys, bool stacked, int tile);

#endif
