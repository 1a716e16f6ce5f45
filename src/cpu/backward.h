/* Backward of the fused and vector routes. Floor: cpu. */
#ifndef FB_CPU_BACKWARD_H
#define FB_CPU_BACKWARD_H

#include "tile.h"

/* Bytes: scratch per thread, lse and delta, partial dQ, dK and dV, sums for dbias. */
size_t fb__backward_scratch(const fb__cpu_state *state, const fb__problem *problem);
size_t fb__backward_delta(const fb__cpu_state *state, const fb__problem *problem);
size_t fb__backward_dq(const fb__cpu_state *state, const fb__problem *problem);
size_t fb__backward_dkdv(const fb__cpu_state *state, const fb__problem *problem);
size_t fb__backward_dbias(const fb__cpu_state *state, const fb__problem *problem);

void fb__backward_run(fb__call *call);

/* What the unfused route shares: the first loop (lse and delta - dlse for every block), the
 * step of a tile from S and dP to P and dS (in their places, or in `cells`), the loops around dbias, and
 * dsinks. */
void fb__backward_delta_run(fb__call *call);
/* That of one block; `scratch` has room for two packs of rows. */
void fb__backward_delta_block(const fb__call *call, const fb__block *block, char *scratch);
/* dQ (lanes) of rows that take no part becomes 0: dS is 0 there, but K may be infinite. */
void fb__clear_empty_rows(const fb__call *call, const fb__block *block, void *dq);
void fb__tile_gradient(const fb__call *call, const fb__block *block, const fb__tile *tile,
                       const fb__mask_scratch *m, void *s, void *dp, const fb__cells *cells);
/* The same in bf16 for part of a tile where all cells count and nothing is added to scores: rows and lanes of
 * cells, from strips of S and dP that are `width` wide. */
typedef struct fb__strip {
    int64_t row, rows, lane, width;
} fb__strip;
void fb__strip_gradient(const fb__call *call, const fb__block *block, fb__strip strip, const void *s,
                        const void *dp, const fb__cells *cells);
void fb__dbias_begin(fb__call *call);
void fb__dbias_end(fb__call *call);
void fb__dsinks_run(fb__call *call);

#endif
