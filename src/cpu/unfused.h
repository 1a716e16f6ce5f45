/* The unfused route: the honest baseline and the check of the fused one. Floor: cpu. */
#ifndef FB_CPU_UNFUSED_H
#define FB_CPU_UNFUSED_H

#include "tile.h"

size_t fb__unfused_scratch(const fb__cpu_state *state, const fb__problem *problem);
/* The score matrices: S for forward, S and dP for backward. */
size_t fb__unfused_scores(const fb__cpu_state *state, const fb__problem *problem);

void fb__unfused_forward(fb__call *call);
void fb__unfused_backward(fb__call *call);

#endif
