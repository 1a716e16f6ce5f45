/* Route unfused: the score matrices in the workspace, and products of whole matrices by
 * kernels/unfused.metal. The honest baseline: what a framework without a fused kernel does. Floor: metal.
 * Next: unfused.c. */
#ifndef FB_METAL_UNFUSED_H
#define FB_METAL_UNFUSED_H

#include "../base/text.h"
#include "encode.h"

/* Places in the workspace, or why they are too large; sets s->workspace. */
fb_status fb__metal_unfused_lay_out(fb__metal_state *s, const fb__problem *p);

fb_status fb__metal_unfused_forward(fb__metal_call *c, const fb__problem *p, fb__metal_args *a);

/* What comes of S and dP; delta and dsinks are launch.c's. */
fb_status fb__metal_unfused_backward(fb__metal_call *c, const fb__problem *p, fb__metal_args *a);

void fb__metal_unfused_explain(const fb__problem *p, fb__text *text);

#endif
