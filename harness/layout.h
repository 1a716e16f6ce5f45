/* Between layout.c and problem.c: shapes and strides of a problem's tensors. Floor: harness. */
#ifndef FLASHBACK_HARNESS_LAYOUT_H
#define FLASHBACK_HARNESS_LAYOUT_H

#include "harness.h"

/* Is the tensor part of the problem at all? */
bool fbh_present(const fbh_problem *p, fbh_id id);

/* Which buffer a tensor lies in: its own, or that of the projection of which it is a slice. */
fbh_id fbh_buffer_of(const fbh_problem *p, fbh_id id);

/* Shape, strides and offset of a tensor; writes its strides into p->desc unless the layout is contiguous.
 * Returns the bytes that its buffer must have. */
size_t fbh_lay_out(fbh_problem *p, fbh_id id);

/* Lengths of packed and of padded sequences. */
int64_t fbh_sequence_length(int64_t b, int64_t longest, bool keys);

/* Place of an element in the row-major order of the shape, whatever the layout; packed sequences count as if
 * they were all the longest. */
uint64_t fbh_index(const fbh_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d);

/* FB_ACCUMULATE: what a gradient holds at logical index n before the pass. Exact, so the same in every dtype.
 */
double fbh_before(fbh_id id, uint64_t n);

#endif
