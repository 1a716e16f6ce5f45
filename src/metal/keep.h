/* dS in the workspace, from dkdv to dq: five products instead of seven, for memory that grows with Lq Lk.
 * Only on request, FLASHBACK_DS_BYTES_MAX, and never beyond. The bits are the same. Floor: metal. */
#ifndef FB_METAL_KEEP_H
#define FB_METAL_KEEP_H

#include "abi.h"
#include "state.h"

/* Decides: s->ds_bytes, 0 where dS is not kept. s->stacked is known. */
fb_status fb__metal_keep(fb__metal_state *s, const fb__problem *p);

/* How dS lies there. */
fb__metal_view fb__metal_keep_view(const fb__problem *p);

#endif
