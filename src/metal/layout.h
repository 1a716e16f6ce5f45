/* Where the elements of a simdgroup's matrix lie. Apple leaves it open, and all its GPUs so far agree; the
 * kernels rely on it. Floor: metal. */
#ifndef FB_METAL_LAYOUT_H
#define FB_METAL_LAYOUT_H

#include "state.h"

/* Asks the GPU itself, by one small kernel. FB_UNSUPPORTED if its matrices lie otherwise. The state has its
 * queue and rows.metal. Needs a pool. */
fb_status fb__metal_check_layout(const fb__metal_state *s);

#endif
