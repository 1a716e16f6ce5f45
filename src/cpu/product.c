/* See product.h.
 *
 * In bf16, a product that has to leave out cells runs on a copy of A (or B) with 0 in place of NaN and Inf,
 * and what these do to the cells that count is added afterwards. A product with a 0 changes no bit of a sum,
 * and no sum is finite after a NaN or Inf, whenever it came. Floor: cpu. */
#include "product.h"
#include "../base/half.h"
#include <string.h>

/* Part of a tile for one product: lanes [lane, lane + width), rows `keys`. */
typedef struct piece {
    int64_t lane, width;
    fb__range keys;
} piece;

enum { MOST_PIECES = 1 + 2 * FB__BR / FB__PANEL };

/* The live part of a tile: the keys that live in all panels at once, in the full width of the register tiles,
 * then what each panel has besides. */
static int pieces_of(const fb__block *block, const fb__tile *tile, piece pieces[MOST_PIECES]) {
    const int64_t n = block->n_pad;
    fb__range common = {0, tile->rows};
    int count = 0;
    for (int64_t lane = 0; lane < n; lane += FB__PANEL) {
        common.lo = fb__max(common.lo, tile->panel[lane / FB__PANEL].lo);
        common.hi = fb__min(common.hi, tile->panel[lane / FB__PANEL].hi);
    }
    if (common.lo < common.hi)
        pieces[count++] = (piece){0, n, common};
    else
        common = (fb__range){tile->rows, tile->rows};
    for (int64_t lane = 0; lane < n; lane += FB__PANEL) {
        fb__range live = tile->panel[lane / FB__PANEL];
        int64_t width = fb__min(FB__PANEL, n - lane);
        if (live.lo < fb__min(live.hi, common.lo))
            pieces[count++] = (piece){lane, width, {live.lo, fb__min(live.hi, common.lo)}};
        if (fb__max(live.lo, common.hi) < live.hi)
            pieces[count++] = (piece){lane, width, {fb__max(live.lo, common.hi), live.hi}};
    }
    return count;
}

/* C[m][n] = or += A[m][k] B[k][n], A and B operands, A's columns `a_col` apart (1 in bf16). */
static void multiply(const fb__call *c, int64_t m, int64_t n, int64_t k, const void *a, ptrdiff_t a_row,
                     ptrdiff_t a_col, const void *b, ptrdiff_t b_row, void *to, ptrdiff_t to_row, bool add,
                     fb__ahead *ahead) {
    if (c->s->pairs)
        c->s->pairs->gemm(m, n, k, a, a_row, b, b_row, to, to_row, add, ahead);
    else
        c->s->k->gemm(m, n, k, a, a_row, a_col, b, b_row, to, to_row, add, ahead);
}

static bool operand_finite(const fb__call *c, int64_t rows, int64_t cols, fb__operand a) {
    if (c->s->pairs)
        return c->s->pairs->finite(rows, cols, a.at, a.row);
    return c->s->k->finite(rows, cols, a.at, a.row);
}

/* ---- bf16 beside NaN and Inf ---- */

static bool bf16_finite(uint16_t x) { return (x & 0x7f80) != 0x7f80; }

static void clean_copy(int64_t rows, int64_t cols, const uint16_t *from, ptrdiff_t from_row, uint16_t *to) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t col = 0; col < cols; col++) {
            uint16_t x = from[r * from_row + col];
            to[r * from_row + col] = bf16_finite(x) ? x : 0;
        }
}

static bool kept(const fb__mask_scratch *m, int64_t key, int64_t lane, int64_t n) {
    return ((const uint32_t *)m->keep)[key * n + lane] != 0;
}

/* A is columns [cols][keys], cells are pairs. */
static void add_nonfinite_lanes(const fb__block *block, const fb__tile *tile, fb__operand a, int64_t cols,
                                const uint16_t *cells, const fb__mask_scratch *m, float *to) {
    const int64_t n = block->n_pad;
    for (int64_t col = 0; col < cols; col++)
        for (int64_t key = 0; key < tile->rows; key++) {
            uint16_t x = ((const uint16_t *)a.at)[col * a.row + key];
            for (int64_t lane = 0; !bf16_finite(x) && lane < block->n; lane++)
                if (kept(m, key, lane, n))
                    to[col * n + lane] +=
                        fb__f32_from_bf16(cells[(key / 2 * n + lane) * 2 + key % 2]) * fb__f32_from_bf16(x);
        }
}

/* B is rows as pairs [lanes / 2][cols][2], cells are rows. */
static void add_nonfinite_rows(const fb__block *block, const fb__tile *tile, const uint16_t *cells,
                               const fb__mask_scratch *m, fb__operand b, int64_t cols, float *to) {
    const int64_t n = block->n_pad;
    for (int64_t lane = 0; lane < block->n; lane++)
        for (int64_t col = 0; col < cols; col++) {
            uint16_t x = ((const uint16_t *)b.at)[(lane / 2 * b.row + col) * 2 + lane % 2];
            for (int64_t key = 0; !bf16_finite(x) && key < tile->rows; key++)
                if (kept(m, key, lane, n))
                    to[key * cols + col] += fb__f32_from_bf16(cells[key * n + lane]) * fb__f32_from_bf16(x);
        }
}

/* ---- Products ---- */

void fb__tile_scores_product(const fb__call *c, const fb__block *block, const fb__tile *tile, fb__operand a,
                             int64_t cols, const void *b, void *to, fb__ahead *ahead) {
    const int64_t n = block->n_pad;
    piece x[MOST_PIECES];
    int count = pieces_of(block, tile, x);
    for (int i = 0; i < count; i++)
        multiply(c, x[i].keys.hi - x[i].keys.lo, x[i].width, cols,
                 fb__operand_at(c, a.at, x[i].keys.lo * a.row), a.row, 1, fb__tc(c, b, x[i].lane), n,
                 fb__t(c, to, x[i].keys.lo * n + x[i].lane), n, false, ahead);
}

/* Where cells of (key, lane) lie; pairs of keys share a word. */
static const void *lanes_cell(const fb__call *c, const void *cells, int64_t key, int64_t lane, int64_t n) {
    return c->s->pairs ? (const uint16_t *)cells + key * n + 2 * lane : fb__tc(c, cells, key * n + lane);
}

void fb__tile_lanes_product(const fb__call *c, const fb__block *block, const fb__tile *tile, fb__operand a,
                            int64_t cols, const void *cells, const fb__mask_scratch *m, void *to, bool add,
                            fb__ahead *ahead) {
    const bool bf16 = c->s->pairs;
    int64_t n = block->n_pad, step = tile->partial ? FB__PANEL : n;
    bool careful = tile->partial &&
                   !(bf16 ? operand_finite(c, cols, tile->rows, a) : operand_finite(c, tile->nk, cols, a));
    fb__operand given = a;
    if (careful && tile->banded)
        fb__tile_keep(c, block, tile, m);
    if (careful && bf16) {
        clean_copy(cols, tile->rows, a.at, a.row, m->clean);
        a.at = m->clean;
    }
    const ptrdiff_t a_row = bf16 ? a.row : 1, a_col = bf16 ? 1 : a.row;
    for (int64_t lane = 0; lane < n; lane += step) {
        fb__range live = tile->panel[lane / FB__PANEL];
        int64_t width = fb__min(step, n - lane), keys = live.hi - live.lo;
        const void *from = fb__operand_at(c, a.at, live.lo * a_col);
        const void *cell = lanes_cell(c, cells, live.lo, lane, n);
        if (careful && !bf16)
            c->s->k->gemm_keep_lanes(cols, width, keys, from, a_row, a_col, cell, n, fb__t(c, to, lane), n,
                                     add, fb__tc(c, m->keep, live.lo * n + lane), n);
        else
            multiply(c, cols, width, keys, from, a_row, a_col, cell, n, fb__t(c, to, lane), n, add, ahead);
    }
    if (careful && bf16)
        add_nonfinite_lanes(block, tile, given, cols, cells, m, to);
}

void fb__tile_rows_product(const fb__call *c, const fb__block *block, const fb__tile *tile, const void *cells,
                           const fb__mask_scratch *m, fb__operand b, int64_t cols_pad, void *to,
                           fb__ahead *ahead) {
    const bool bf16 = c->s->pairs;
    const int64_t n = block->n_pad;
    bool careful =
        tile->partial && !(bf16 ? operand_finite(c, n / 2, 2 * cols_pad, (fb__operand){b.at, 2 * b.row})
                                : operand_finite(c, block->n, cols_pad, b));
    fb__operand given = b;
    if (careful && tile->banded)
        fb__tile_keep(c, block, tile, m);
    if (careful && bf16) {
        clean_copy(n / 2, 2 * cols_pad, b.at, 2 * b.row, m->clean);
        b.at = m->clean;
    }
    piece x[MOST_PIECES];
    int count = pieces_of(block, tile, x);
    for (int i = 0; i < count; i++) {
        int64_t first = x[i].keys.lo * n + x[i].lane, keys = x[i].keys.hi - x[i].keys.lo;
        int64_t rows = bf16 ? x[i].width : fb__min(x[i].width, block->n - x[i].lane);
        const void *from = fb__operand_at(c, b.at, x[i].lane * b.row);
        void *at = fb__t(c, to, x[i].keys.lo * cols_pad);
        if (rows <= 0)
            continue;
        if (careful && !bf16)
            c->s->k->gemm_keep_rows(keys, cols_pad, rows, fb__tc(c, cells, first), n, from, b.row, at,
                                    cols_pad, fb__tc(c, m->keep, first), n);
        else
            multiply(c, keys, cols_pad, rows, fb__operand_at(c, cells, first), n, 1, from, b.row, at,
                     cols_pad, true, ahead);
    }
    if (careful && bf16)
        add_nonfinite_rows(block, tile, cells, m, given, cols_pad, to);
}
