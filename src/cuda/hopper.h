/* The kernels for sm_90a: which problems they take and with which tiles, and their launches. What they do not
 * take goes to the kernels for all GPUs, which a plan always has: where a pointer lies is known in a call
 * only. Floor: cuda. Next: kernels/hopper_forward.cu. */
#ifndef FB_CUDA_HOPPER_H
#define FB_CUDA_HOPPER_H

#include "launch.h"

/* Fills the specs of these kernels, or s->not_hopper. Needs device, route and options. */
void fb__hopper_choose(fb__cuda_state *s, const fb__problem *p);

/* Deals out the tiles of both passes to blocks, in memory of the plan's own; and frees that. In the context.
 */
fb_status fb__hopper_prepare(fb__cuda_state *s, const fb__problem *p);
void fb__hopper_drop(fb__cuda_state *s);

/* May the pass of a call take them: are they there, and do the tensors lie at multiples of 16 bytes? */
bool fb__hopper_can(const fb__cuda_state *s, fb__pass pass, const fb__args *a);

/* Places in the workspace of the backward, from *end on. */
void fb__hopper_lay_out(fb__cuda_state *s, const fb__problem *p, size_t *end);

fb_status fb__hopper_backward(const fb__cuda_state *s, const fb__problem *p, const fb_io *io, fb__args *a);
fb_status fb__hopper_forward(const fb__cuda_state *s, const fb__problem *p, void *stream, fb__args *a);

/* Row n of the table, for tests, with these options if it takes any; false past the end. */
bool fb__hopper_row(int n, fb_dtype type, int options, fb__kernel *kernel, fb__spec *spec);

#endif
