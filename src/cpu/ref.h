/* The definition of attention and its gradients, in double: route FB_REFERENCE, and what every other route
 * is tested against. Work comes in units: no two units of a pass write the same element, and a unit sums in
 * one fixed order, so they may run in any order on any number of threads without a bit changing. Nothing is
 * allocated.
 * Floor: cpu. Next: ref.c. */
#ifndef FB_CPU_REF_H
#define FB_CPU_REF_H

#include "../core/problem.h"

/* Bytes of scratch that one running unit needs, for either pass; SIZE_MAX if they cannot be counted. Any
 * content, no alignment needed. O((len_q + len_k) * head_dim). */
size_t fb__ref_scratch(const fb__problem *problem);

/* How many units the pass has. Forward: one per (sequence, key/value head). Backward: those first, then one
 * per (batch, head) slice of dbias, then one per element of dsinks. */
int64_t fb__ref_units(const fb__problem *problem, fb__pass pass);

/* Computes one unit, 0 <= unit < fb__ref_units. The contents of io's cu and lens are already checked. */
void fb__ref_run(const fb__problem *problem, fb__pass pass, const fb_io *io, int64_t unit, void *scratch);

#endif
