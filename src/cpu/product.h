/* The five products of a tile, in T or with operands of bf16. Dead parts of a tile are left out, and where a
 * partial tile meets NaN or Inf, so are single cells. Floor: cpu. Next: forward.c. */
#ifndef FB_CPU_PRODUCT_H
#define FB_CPU_PRODUCT_H

#include "tile.h"

/* to[key][lane] = A B, A = rows of keys, B a pack of lanes: the way to S and dP. */
void fb__tile_scores_product(const fb__call *c, const fb__block *block, const fb__tile *tile, fb__operand a,
                             int64_t cols, const void *b, void *to, fb__ahead *ahead);
/* to[col][lane] = or += A^T cells, A = columns of keys, cells as the softmax or dS as pairs: to O and dQ. */
void fb__tile_lanes_product(const fb__call *c, const fb__block *block, const fb__tile *tile, fb__operand a,
                            int64_t cols, const void *cells, const fb__mask_scratch *m, void *to, bool add,
                            fb__ahead *ahead);
/* to[key][cols_pad] += cells B, B = rows of the block, cells as rows: to dK and dV. */
void fb__tile_rows_product(const fb__call *c, const fb__block *block, const fb__tile *tile, const void *cells,
                           const fb__mask_scratch *m, fb__operand b, int64_t cols_pad, void *to,
                           fb__ahead *ahead);

#endif
