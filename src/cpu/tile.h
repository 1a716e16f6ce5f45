/* Tiles: a block against 64 keys. What is live, what is masked, the passes over S and dP. Floor: cpu. Next:
 * product.h. */
#ifndef FB_CPU_TILE_H
#define FB_CPU_TILE_H

#include "block.h"

/* A range of keys against a block. Partial ones know which cells count (fb__tile_select), and the live keys
 * of each panel of lanes. */
typedef struct fb__tile {
    int64_t k0, nk;
    int64_t rows; /* nk, and rows that do not count where products need whole steps */
    bool partial;
    bool banded;                         /* partial by the band alone: no keep tile is made unless needed */
    fb__range panel[FB__BR / FB__PANEL]; /* live for some lane, relative to k0 */
    fb__range whole[FB__BR / FB__PANEL]; /* live for every lane; may be empty */
} fb__tile;

/* Keys k0 ... k0 + nk - 1 against the block; false when no cell counts. */
bool fb__tile_init(const fb__call *c, const fb__block *block, int64_t k0, int64_t nk, fb__tile *tile);

/* Scratch tiles of rows x n_pad, and two vectors, that masks and biases are made in; room for one pack. */
typedef struct fb__mask_scratch {
    void *keep, *bias, *derivative;
    void *lo, *hi;
    void *clean;
} fb__mask_scratch;

/* q is packed with the sign of the scale only, and the softmax takes its size, without a rounding: it works
 * on factor * (S - m). Where T cannot hold it, q is packed times the scale, and the factor is 1, as it is
 * after softcap and bias. */
bool fb__scale_in_exponent(const fb__problem *p);
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
/* The step of the running softmax on the rows that are live: S becomes P, in its place or, where operands are
 * bf16, in `cells` as pairs. */
bool fb__tile_softmax(const fb__call *c, const fb__block *block, const fb__tile *tile, void *s, void *m,
                      void *l, void *alpha, void *cells);
/* From S and dP to P and dS, in their places. */
void fb__tile_weights(const fb__call *c, const fb__block *block, const fb__tile *tile, void *s, void *dp,
                      const void *lse, const void *delta);
/* Cells from a row and lane on, in tiles of n lanes; pairs of rows share a word of a lane. */
fb__cells fb__cells_at(const fb__cells *cells, int64_t row, int64_t lane, int64_t n);
/* P and dS as cells of bf16. */
void fb__tile_round(const fb__call *c, const fb__block *block, const fb__tile *tile, const void *p,
                    const void *ds, const fb__cells *to);

/* The keep tile, for banded tiles, which have none yet. */
void fb__tile_keep(const fb__call *c, const fb__block *block, const fb__tile *tile,
                   const fb__mask_scratch *m);

#endif
