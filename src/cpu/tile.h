/* Tiles: a block against 64 keys. What is live, what is masked, products. Floor: cpu. Next: forward.c. */
#ifndef FB_CPU_TILE_H
#define FB_CPU_TILE_H

#include "block.h"

/* A range of keys against a block. Partial ones know which cells count (fb__tile_select), and the live keys
 * of each panel of lanes. */
typedef struct fb__tile {
    int64_t k0, nk;
    bool partial;
    bool banded;                         /* partial by the band alone: no keep tile is made unless needed */
    fb__range panel[FB__BR / FB__PANEL]; /* live for some lane, relative to k0 */
    fb__range whole[FB__BR / FB__PANEL]; /* live for every lane; may be empty */
} fb__tile;

/* Keys k0 ... k0 + nk - 1 against the block; false when no cell counts. */
bool fb__tile_init(const fb__call *c, const fb__block *block, int64_t k0, int64_t nk, fb__tile *tile);

/* Scratch tiles of nk x n_pad, and two vectors, that masks and biases are made in. */
typedef struct fb__mask_scratch {
    void *keep, *bias, *derivative;
    void *lo, *hi;
} fb__mask_scratch;

/* q is packed with the sign of the scale only, and the softmax takes its size, without a rounding: it works
 * on factor * (S - m). Where T cannot hold it, q is packed times the scale, and the factor is 1, as it is
 * after softcap and bias. */
double fb__pack_factor(const fb__call *c);
double fb__score_factor(const fb__call *c);

/* Applies softcap and bias to a tile of scores, and finds which cells count if it is partial. With
 * `gradient`, the softcap's derivative is left in m->derivative. */
void fb__tile_scores(const fb__call *c, const fb__block *block, const fb__tile *tile,
                     const fb__mask_scratch *m, void *scores, bool gradient);
/* Cells that do not count become `fill`; of banded tiles only those in live rows of a panel, since no other
 * is read again. */
void fb__tile_select(const fb__call *c, const fb__block *block, const fb__tile *tile,
                     const fb__mask_scratch *m, void *cells, double fill);
/* The step of the running softmax, and that from S and dP to P and dS, on the rows that are live. */
bool fb__tile_softmax(const fb__call *c, const fb__block *block, const fb__tile *tile, void *s, void *m,
                      void *l, void *alpha);
void fb__tile_weights(const fb__call *c, const fb__block *block, const fb__tile *tile, void *s, void *dp,
                      const void *lse, const void *delta);

/* Products of a tile. S = A B for keys x lanes, leaving out dead panels; O += A^T P for cols x lanes, leaving
 * out dead keys, and, where a partial tile meets NaN or Inf in A, single cells. */
void fb__tile_scores_product(const fb__call *c, const fb__block *block, const fb__tile *tile, fb__operand a,
                             int64_t cols, const void *b, void *to, fb__ahead *ahead);
void fb__tile_lanes_product(const fb__call *c, const fb__block *block, const fb__tile *tile, fb__operand a,
                            int64_t cols, const void *cells, const fb__mask_scratch *m, void *to, bool add,
                            fb__ahead *ahead);
/* to[key][cols_pad] += cells B, B = [lane][cols_pad]: the way to dK and dV. */
void fb__tile_rows_product(const fb__call *c, const fb__block *block, const fb__tile *tile, const void *cells,
                           const fb__mask_scratch *m, fb__operand b, int64_t cols_pad, void *to,
                           fb__ahead *ahead);

#endif
