/* See tile.h. */
#include "tile.h"
#include <math.h>
#include <string.h>

/* ---- Block masks ---- */

typedef struct block_mask {
    const uint8_t *at;
    int64_t batch, head, row; /* strides */
    int64_t q, k;             /* cells per block */
} block_mask;

static block_mask block_mask_of(const fb__call *c) {
    const fb_desc *d = &c->p->d;
    int64_t cols = fb__ceil(d->len_k, d->block_k), rows = fb__ceil(d->len_q, d->block_q);
    block_mask m = {fb__at(c->io->block_mask), 0, 0, cols, d->block_q, d->block_k};
    if (d->block_heads > 1)
        m.head = rows * cols;
    if (d->block_batch > 1)
        m.batch = d->block_heads * rows * cols;
    return m;
}

static const uint8_t *block_mask_row(const block_mask *m, const fb__block *block, int r) {
    return m->at + block->seq.b * m->batch + block->head[r] * m->head + block->query[r] / m->q * m->row;
}

/* How many mask blocks under the tile are set: 0 none, 1 some, 2 all. */
static int block_mask_covers(const fb__call *c, const fb__block *block, int64_t k0, int64_t nk) {
    block_mask m = block_mask_of(c);
    const uint8_t *seen = NULL;
    bool some = false, all = true;
    for (int r = 0; r < block->n; r++) {
        const uint8_t *row = block_mask_row(&m, block, r);
        if (row == seen)
            continue;
        seen = row;
        for (int64_t j = k0 / m.k; j * m.k < k0 + nk; j++) {
            some |= row[j] != 0;
            all &= row[j] != 0;
        }
    }
    return some ? all ? 2 : 1 : 0;
}

static void block_mask_keep(const fb__call *c, const fb__block *block, const fb__tile *tile, void *keep) {
    block_mask m = block_mask_of(c);
    for (int r = 0; r < block->n; r++) {
        const uint8_t *row = block_mask_row(&m, block, r);
        for (int64_t j = tile->k0 / m.k; j * m.k < tile->k0 + tile->nk; j++) {
            int64_t lo = fb__max(j * m.k - tile->k0, 0), hi = fb__min((j + 1) * m.k - tile->k0, tile->nk);
            if (!row[j])
                c->s->k->keep_clear(lo, hi, block->n_pad, r, keep);
        }
    }
}

/* ---- Tiles ---- */

static fb__range clip(fb__range x, int64_t end) {
    x = (fb__range){fb__max(x.lo, 0), fb__min(x.hi, end)};
    return x.lo < x.hi ? x : (fb__range){0, 0};
}

/* In whole steps. */
static fb__range widen(fb__range x, int64_t step) {
    return (fb__range){x.lo / step * step, fb__round_up(x.hi, step)};
}

/* Rows of the tile that some lane of the panel may see, and those that all may. */
static void panel_ranges(const fb__block *block, int lane, int64_t step, const fb__tile *tile,
                         fb__range *some, fb__range *all) {
    *some = *all = (fb__range){0, tile->nk};
    if (!tile->partial)
        return;
    *some = (fb__range){tile->nk, 0};
    for (int r = lane; r < fb__min(block->n, lane + FB__PANEL); r++) {
        int64_t lo = block->lo[r] - tile->k0, hi = block->hi[r] - tile->k0;
        some->lo = fb__min(some->lo, lo);
        some->hi = fb__max(some->hi, hi);
        all->lo = fb__max(all->lo, lo);
        all->hi = fb__min(all->hi, hi);
    }
    *some = widen(clip(*some, tile->nk), step);
    *all = clip(*all, tile->nk);
}

bool fb__tile_init(const fb__call *c, const fb__block *block, int64_t k0, int64_t nk, fb__tile *tile) {
    const int64_t step = c->s->row_step;
    *tile = (fb__tile){.k0 = k0, .nk = nk, .rows = fb__round_up(nk, step)};
    if (block->keys.hi <= k0 || block->keys.lo >= k0 + nk)
        return false;
    int covered = 2;
    if (fb__has(c->p, FB_BLOCK_MASK))
        covered = block_mask_covers(c, block, k0, nk);
    if (!covered)
        return false;
    tile->partial = tile->rows > nk || covered == 1 || fb__has(c->p, FB_MASK | FB_BIAS) ||
                    block->inner.lo > k0 || block->inner.hi < k0 + nk;
    tile->banded = tile->partial && !fb__has(c->p, FB_MASK | FB_BIAS | FB_BLOCK_MASK);
    for (int p = 0; p < FB__BR / FB__PANEL; p++)
        panel_ranges(block, p * FB__PANEL, step, tile, &tile->panel[p], &tile->whole[p]);
    return true;
}

/* Addresses of the block's rows in bias or mask, at key k0. */
static void option_rows(const fb__block *block, const char *base, fb_strides s, int64_t cols, int64_t k0,
                        size_t bytes, const void *rows[FB__BR]) {
    for (int r = 0; r < block->n; r++)
        rows[r] = base + (size_t)(block->seq.b * s.batch + block->head[r] * s.head + block->query[r] * s.row +
                                  (cols > 1 ? k0 : 0)) *
                             bytes;
}

/* The tile's cells of bias or mask, lanes = queries; a single column repeats. */
static void option_tile(const fb__call *c, const fb__block *block, const fb__tile *tile,
                        const void *const rows[FB__BR], int64_t cols, int type, void *to) {
    c->s->k->pack_lanes(block->n, block->n_pad, cols == 1 ? 1 : tile->nk, rows, type, 1, to);
    for (int64_t r = 1; cols == 1 && r < tile->nk; r++)
        memcpy(fb__t(c, to, r * block->n_pad), to, (size_t)(block->n_pad * c->s->k->size));
}

/* Each lane's live rows among `rows` of the tile from `first` on. */
static void band_bounds(const fb__call *c, const fb__block *block, const fb__tile *tile, int64_t first,
                        int64_t rows, const fb__mask_scratch *m) {
    const int64_t k0 = tile->k0 + first;
    for (int r = 0; r < block->n_pad; r++) {
        fb__put(c, m->lo, r, (double)fb__min(fb__max(block->lo[r] - k0, 0), rows));
        fb__put(c, m->hi, r, (double)fb__min(fb__max(block->hi[r] - k0, 0), rows));
    }
}

void fb__tile_keep(const fb__call *c, const fb__block *block, const fb__tile *tile,
                   const fb__mask_scratch *m) {
    for (int64_t first = 0; first < tile->rows; first += FB__RANGE_ROWS) {
        int64_t rows = fb__min(tile->rows - first, FB__RANGE_ROWS);
        band_bounds(c, block, tile, first, rows, m);
        c->s->k->keep_range(rows, block->n_pad, fb__t(c, m->keep, first * block->n_pad), m->lo, m->hi);
    }
}

bool fb__scale_in_exponent(const fb__problem *p) {
    double scale = fabs(p->d.scale), cap = p->d.softcap > 0 ? p->d.softcap : 1;
    return scale >= 0x1p-60 && scale <= 0x1p60 && scale / cap >= 0x1p-60 && scale / cap <= 0x1p60;
}

double fb__pack_factor(const fb__call *c) {
    return fb__scale_in_exponent(c->p) ? copysign(1, c->p->d.scale) : c->p->d.scale;
}

/* What is missing in a tile of products, and in one of scores. */
static double product_factor(const fb__call *c) {
    return fb__scale_in_exponent(c->p) ? fabs(c->p->d.scale) : 1;
}

double fb__score_factor(const fb__call *c) {
    return c->p->d.softcap > 0 || fb__has(c->p, FB_BIAS) ? 1 : product_factor(c);
}

void fb__tile_scores(const fb__call *c, const fb__block *block, const fb__tile *tile,
                     const fb__mask_scratch *m, void *scores, bool gradient) {
    const fb__kernels *k = c->s->k;
    const fb_desc *d = &c->p->d;
    const void *rows[FB__BR];
    if (d->softcap > 0)
        k->softcap(tile->nk, block->n_pad, scores, product_factor(c) / d->softcap, d->softcap,
                   gradient ? m->derivative : NULL);
    if (tile->banded)
        band_bounds(c, block, tile, 0, tile->rows, m);
    else if (tile->partial)
        fb__tile_keep(c, block, tile, m);
    if (fb__has(c->p, FB_MASK)) {
        option_rows(block, fb__at(c->io->mask), d->mask, d->mask_shape.cols, tile->k0, 1, rows);
        option_tile(c, block, tile, rows, d->mask_shape.cols, FB__U8, m->bias);
        k->keep_nonzero(tile->nk, block->n_pad, m->keep, m->bias);
    }
    if (fb__has(c->p, FB_BIAS)) {
        option_rows(block, fb__at(c->io->bias), d->bias, d->bias_shape.cols, tile->k0,
                    fb__dtype_bytes(d->dtype), rows);
        option_tile(c, block, tile, rows, d->bias_shape.cols, c->s->type, m->bias);
        k->add_bias(tile->nk, block->n_pad, scores, d->softcap > 0 ? 1 : product_factor(c), m->bias);
        k->keep_finite_bias(tile->nk, block->n_pad, m->keep, m->bias);
    }
    if (tile->partial && fb__has(c->p, FB_BLOCK_MASK))
        block_mask_keep(c, block, tile, m->keep);
}

/* What a pass over the lanes from `lane` on covers: the whole tile, or a panel's live rows if it is banded.
 */
typedef struct span {
    int64_t first, rows, width;
} span;

static span span_at(const fb__block *block, const fb__tile *tile, int64_t lane) {
    if (!tile->banded)
        return (span){0, tile->rows, block->n_pad};
    fb__range live = tile->panel[lane / FB__PANEL];
    return (span){live.lo, live.hi - live.lo, fb__min(FB__PANEL, block->n_pad - lane)};
}

void fb__tile_select(const fb__call *c, const fb__block *block, const fb__tile *tile,
                     const fb__mask_scratch *m, void *cells, double fill) {
    const fb__kernels *k = c->s->k;
    const int64_t n = block->n_pad;
    if (tile->partial && !tile->banded)
        k->select(tile->rows, n, cells, m->keep, fill);
    for (int64_t lane = 0; tile->banded && lane < n; lane += FB__PANEL) {
        fb__range live = tile->panel[lane / FB__PANEL], whole = tile->whole[lane / FB__PANEL];
        const void *lo = fb__tc(c, m->lo, lane), *hi = fb__tc(c, m->hi, lane);
        void *at = fb__t(c, cells, lane);
        int64_t width = fb__min(FB__PANEL, n - lane);
        if (whole.lo == whole.hi)
            whole = (fb__range){live.hi, live.hi};
        k->select_range(live.lo, whole.lo, width, at, n, lo, hi, fill);
        k->select_range(whole.hi, live.hi, width, at, n, lo, hi, fill);
    }
}

bool fb__tile_softmax(const fb__call *c, const fb__block *block, const fb__tile *tile, void *s, void *m,
                      void *l, void *alpha, void *cells) {
    const fb__kernels *k = c->s->k;
    const fb__pairs *pairs = c->s->pairs;
    const int64_t n = block->n_pad;
    const double factor = fb__score_factor(c);
    bool moved = false;
    for (int64_t lane = 0; lane < n;) {
        span x = span_at(block, tile, lane);
        void *at = fb__t(c, s, x.first * n + lane);
        void *m_x = fb__t(c, m, lane), *l_x = fb__t(c, l, lane), *alpha_x = fb__t(c, alpha, lane);
        if (pairs)
            moved |= pairs->softmax(x.rows, x.width, at, n, factor, m_x, l_x, alpha_x,
                                    (uint16_t *)cells + x.first * n + 2 * lane, n);
        else
            moved |= k->softmax(x.rows, x.width, at, n, factor, m_x, l_x, alpha_x);
        lane += x.width;
    }
    return moved;
}

void fb__tile_weights(const fb__call *c, const fb__block *block, const fb__tile *tile, void *s, void *dp,
                      const void *lse, const void *delta) {
    const int64_t n = block->n_pad;
    for (int64_t lane = 0; lane < n;) {
        span x = span_at(block, tile, lane);
        int64_t at = x.first * n + lane;
        c->s->k->gradient(x.rows, x.width, fb__t(c, s, at), fb__t(c, dp, at), n, fb__score_factor(c),
                          fb__tc(c, lse, lane), fb__tc(c, delta, lane));
        lane += x.width;
    }
}

fb__cells fb__cells_at(const fb__cells *cells, int64_t row, int64_t lane, int64_t n) {
    return (fb__cells){(uint16_t *)cells->p + row * n + lane, (uint16_t *)cells->ds + row * n + lane,
                       (uint16_t *)cells->ds_pairs + row * n + 2 * lane};
}

void fb__tile_round(const fb__call *c, const fb__block *block, const fb__tile *tile, const void *p,
                    const void *ds, const fb__cells *to) {
    const int64_t n = block->n_pad;
    for (int64_t lane = 0; lane < n;) {
        span x = span_at(block, tile, lane);
        int64_t at = x.first * n + lane;
        fb__cells cells = fb__cells_at(to, x.first, lane, n);
        c->s->pairs->round(x.rows, x.width, fb__tc(c, p, at), fb__tc(c, ds, at), n, &cells);
        lane += x.width;
    }
}
