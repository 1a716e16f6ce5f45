/* Forward of the fused and vector routes. Floor: cpu. */
#ifndef FB_CPU_FORWARD_H
#define FB_CPU_FORWARD_H

#include "tile.h"

/* Bytes of scratch per thread, of K and V where they are packed once, and of partial results when keys are
 * cut into chunks. */
size_t fb__forward_scratch(const fb__cpu_state *state, const fb__problem *problem);
size_t fb__forward_keys(const fb__cpu_state *state, const fb__problem *problem);
size_t fb__forward_partial(const fb__cpu_state *state, const fb__problem *problem);

void fb__forward_run(fb__call *call);

/* Writes the block's out and lse from unnormalised O (lanes), and m, l of its softmax; `factors` is scratch.
 * Shared with the unfused route. */
void fb__forward_write(const fb__call *call, const fb__block *block, const void *m, const void *l,
                       const void *o, void *sinks, void *factors, void *lse);

#endif
