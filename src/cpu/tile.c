/* See tile.h. */
#include "tile.h"
#include <math.h>
#include <string.h>

size_t fb__t_bytes(const fb__cpu_state *s, int64_t count) {
    return (size_t)fb__round_up(count * s->k->size, 64);
}

/* ---- Where blocks lie ---- */

int64_t fb__blocks_of(const fb__call *c, const fb__seq *seq) {
    int64_t g = c->p->group;
    return c->s->stacked ? fb__ceil(g * seq->len_q, FB__BR) : g * fb__ceil(seq->len_q, FB__BR);
}

/* Blocks of packed sequences start at floor(cu/64) + b, which rises by at least ceil(length/64) from one
 * sequence to the next: no sum over sequences is needed, and at most one slot a sequence stays unused. */
static int64_t packed_slot(const int32_t *cu, int64_t b) { return cu[b] / FB__BR + b; }

int64_t fb__slot_of(const fb__call *c, int64_t b) {
    if (fb__has(c->p, FB_PACKED) && !c->s->stacked)
        return packed_slot(fb__at(c->io->cu_q), b) * c->p->group;
    return b * c->s->blocks;
}

int64_t fb__key_slot_of(const fb__call *c, int64_t b) {
    if (fb__has(c->p, FB_PACKED))
        return packed_slot(fb__at(c->io->cu_k), b);
    return b * c->s->key_blocks;
}

/* Sequence, key/value head and t of a flat index. */
static int64_t block_find(const fb__call *c, int64_t index, fb__seq *seq, int64_t *kv_head) {
    int64_t kv = index / c->s->slots, slot = index % c->s->slots, lo = 0, hi = c->p->d.batch;
    while (hi - lo > 1) { /* the last sequence that starts at or before the slot */
        int64_t middle = lo + (hi - lo) / 2;
        if (fb__slot_of(c, middle) <= slot)
            lo = middle;
        else
            hi = middle;
    }
    *seq = fb__problem_seq(c->p, c->io, lo);
    *kv_head = kv;
    /* Late queries see the most keys under a causal mask: they come first, so that the last task is a short
     * one. One thread goes forward the other way, so that few keys are new to the cache with every block;
     * backward, where the order is that of sums, it must not matter how many threads there are. */
    int64_t blocks = fb__blocks_of(c, seq), t = slot - fb__slot_of(c, lo);
    bool upward = c->threads == 1 && c->pass == FB__FORWARD;
    return upward || t >= blocks ? t : blocks - 1 - t;
}

/* ---- Blocks ---- */

static void block_ranges(fb__block *block) {
    const fb__band band = block->seq.band;
    block->keys = (fb__range){INT64_MAX, 0};
    block->inner = (fb__range){0, INT64_MAX};
    for (int r = 0; r < block->n; r++) {
        fb__range keys = fb__band_keys(band, block->query[r]);
        block->lo[r] = keys.lo;
        block->hi[r] = keys.hi;
        if (keys.lo < keys.hi) {
            block->keys.lo = fb__min(block->keys.lo, keys.lo);
            block->keys.hi = fb__max(block->keys.hi, keys.hi);
        }
        block->inner.lo = fb__max(block->inner.lo, keys.lo);
        block->inner.hi = fb__min(block->inner.hi, keys.hi);
    }
    if (block->keys.lo >= block->keys.hi)
        block->keys = (fb__range){0, 0};
    for (int r = block->n; r < block->n_pad; r++)
        block->lo[r] = block->hi[r] = 0;
}

/* Rows of block t: which head and query each is, and how many. */
static void block_place(const fb__call *c, const fb__seq *seq, int64_t kv, int64_t t, fb__block *block) {
    const int64_t g = c->p->group, len = seq->len_q;
    const int64_t first = (c->s->stacked ? t : t / g) * FB__BR, rows = c->s->stacked ? g * len : len;
    const int n = (int)fb__min(fb__max(rows - first, 0), FB__BR);
    block->n = n;
    if (!n)
        return;
    block->seq = *seq;
    block->kv = kv;
    block->slot = kv * c->s->slots + fb__slot_of(c, seq->b) + t;
    block->n_pad = (int)fb__round_up(n, c->s->k->lanes);
    int64_t head = kv * g + (c->s->stacked ? first / len : t % g);
    int64_t query = c->s->stacked ? first % len : first;
    for (int r = 0; r < n; r++, query++) {
        if (query == len)
            head++, query = 0;
        block->head[r] = head;
        block->query[r] = query;
    }
    block->stat = fb__index(fb__lse_strides(c->p), seq, seq->row_q, block->head[0], block->query[0]);
}

void fb__block_init(const fb__call *c, const fb__seq *seq, int64_t kv, int64_t t, fb__block *block) {
    block_place(c, seq, kv, t, block);
    if (block->n)
        block_ranges(block);
}

void fb__block_at(const fb__call *c, int64_t index, fb__block *block) {
    fb__seq seq;
    int64_t kv, t = block_find(c, index, &seq, &kv);
    fb__block_init(c, &seq, kv, t, block);
}

/* Addresses of rows of head `head`, from row `first` on. */
static void row_addresses(const fb__call *c, const fb__seq *seq, fb_ref ref, fb_strides s, int64_t first_row,
                          int64_t head, int64_t first, int64_t count, void **rows) {
    const int64_t bytes = (int64_t)fb__dtype_bytes(c->p->d.dtype), step = s.row * bytes;
    char *at = (char *)fb__at(ref) + fb__index(s, seq, first_row, head, first) * bytes;
    for (int64_t r = 0; r < count; r++)
        rows[r] = at + r * step;
}

void fb__block_rows(const fb__call *c, const fb__block *block, fb_ref ref, fb_strides s, void *rows[FB__BR]) {
    int step = c->s->stacked ? 1 : block->n; /* rows of one head are evenly spaced */
    for (int r = 0; r < block->n; r += step)
        row_addresses(c, &block->seq, ref, s, block->seq.row_q, block->head[r], block->query[r], step,
                      rows + r);
}

void fb__key_rows(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides s, int64_t k0,
                  int64_t nk, void *rows[FB__BC]) {
    row_addresses(c, seq, ref, s, seq->row_k, kv, k0, nk, rows);
}

int64_t fb__stat_index(const fb__call *c, const fb__block *block, int r) {
    if (!c->s->stacked)
        return block->stat + r;
    return fb__index(fb__lse_strides(c->p), &block->seq, block->seq.row_q, block->head[r], block->query[r]);
}

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

/* Rows of the tile that some lane of the panel may see, and those that all may. */
static void panel_ranges(const fb__block *block, int lane, const fb__tile *tile, fb__range *some,
                         fb__range *all) {
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
    *some = clip(*some, tile->nk);
    *all = clip(*all, tile->nk);
}

bool fb__tile_init(const fb__call *c, const fb__block *block, int64_t k0, int64_t nk, fb__tile *tile) {
    *tile = (fb__tile){.k0 = k0, .nk = nk};
    if (block->keys.hi <= k0 || block->keys.lo >= k0 + nk)
        return false;
    int covered = 2;
    if (fb__has(c->p, FB_BLOCK_MASK))
        covered = block_mask_covers(c, block, k0, nk);
    if (!covered)
        return false;
    tile->partial =
        covered == 1 || fb__has(c->p, FB_MASK | FB_BIAS) || block->inner.lo > k0 || block->inner.hi < k0 + nk;
    tile->banded = tile->partial && !fb__has(c->p, FB_MASK | FB_BIAS | FB_BLOCK_MASK);
    for (int p = 0; p < FB__BR / FB__PANEL; p++)
        panel_ranges(block, p * FB__PANEL, tile, &tile->panel[p], &tile->whole[p]);
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

static void keep_band(const fb__call *c, const fb__block *block, const fb__tile *tile,
                      const fb__mask_scratch *m) {
    for (int64_t first = 0; first < tile->nk; first += FB__RANGE_ROWS) {
        int64_t rows = fb__min(tile->nk - first, FB__RANGE_ROWS);
        band_bounds(c, block, tile, first, rows, m);
        c->s->k->keep_range(rows, block->n_pad, fb__t(c, m->keep, first * block->n_pad), m->lo, m->hi);
    }
}

/* Does T hold the size of the scale? */
static bool scale_in_exponent(const fb__call *c) {
    double scale = fabs(c->p->d.scale);
    return scale >= 0x1p-60 && scale <= 0x1p60;
}

double fb__pack_factor(const fb__call *c) {
    return scale_in_exponent(c) ? copysign(1, c->p->d.scale) : c->p->d.scale;
}

/* What is missing in a tile of products, and in one of scores. */
static double product_factor(const fb__call *c) { return scale_in_exponent(c) ? fabs(c->p->d.scale) : 1; }

static double score_factor(const fb__call *c) {
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
        band_bounds(c, block, tile, 0, tile->nk, m);
    else if (tile->partial)
        keep_band(c, block, tile, m);
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
        return (span){0, tile->nk, block->n_pad};
    fb__range live = tile->panel[lane / FB__PANEL];
    return (span){live.lo, live.hi - live.lo, fb__min(FB__PANEL, block->n_pad - lane)};
}

void fb__tile_select(const fb__call *c, const fb__block *block, const fb__tile *tile,
                     const fb__mask_scratch *m, void *cells, double fill) {
    const fb__kernels *k = c->s->k;
    const int64_t n = block->n_pad;
    if (tile->partial && !tile->banded)
        k->select(tile->nk, n, cells, m->keep, fill);
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
                      void *l, void *alpha) {
    const int64_t n = block->n_pad;
    bool moved = false;
    for (int64_t lane = 0; lane < n;) {
        span x = span_at(block, tile, lane);
        moved |= c->s->k->softmax(x.rows, x.width, fb__t(c, s, x.first * n + lane), n, score_factor(c),
                                  fb__t(c, m, lane), fb__t(c, l, lane), fb__t(c, alpha, lane));
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
        c->s->k->gradient(x.rows, x.width, fb__t(c, s, at), fb__t(c, dp, at), n, score_factor(c),
                          fb__tc(c, lse, lane), fb__tc(c, delta, lane));
        lane += x.width;
    }
}

/* ---- Operands and products ---- */

fb__operand fb__keys_in_place(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides s,
                              int64_t k0) {
    return (fb__operand){fb__tc(c, fb__at(ref), fb__index(s, seq, seq->row_k, kv, k0)), s.row};
}

void fb__ahead_add(fb__ahead *ahead, const void *at, int64_t step, int64_t rows, int64_t bytes) {
    if (rows <= 0 || ahead->parts == FB__AHEAD_PARTS)
        return;
    ahead->part[ahead->parts].at = at;
    ahead->part[ahead->parts].step = step;
    ahead->part[ahead->parts].rows = rows;
    ahead->part[ahead->parts++].bytes = bytes;
}

void fb__ahead_block(const fb__call *c, const fb__block *block, fb_ref ref, fb_strides s, int64_t cols,
                     fb__ahead *ahead) {
    if (c->s->stacked || !block->n)
        return;
    int64_t bytes = (int64_t)fb__dtype_bytes(c->p->d.dtype);
    int64_t first = fb__index(s, &block->seq, block->seq.row_q, block->head[0], block->query[0]);
    fb__ahead_add(ahead, (const char *)fb__at(ref) + first * bytes, s.row * bytes, block->n, cols * bytes);
}

void fb__ahead_keys(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides s, int64_t k0,
                    int64_t nk, int64_t cols, fb__ahead *ahead) {
    int64_t bytes = (int64_t)fb__dtype_bytes(c->p->d.dtype), first = fb__index(s, seq, seq->row_k, kv, k0);
    fb__ahead_add(ahead, (const char *)fb__at(ref) + first * bytes, s.row * bytes, nk, cols * bytes);
}

void fb__ahead_index(const fb__call *c, int64_t index, fb_ref ref, fb_strides s, int64_t cols,
                     fb__ahead *ahead) {
    fb__seq seq;
    fb__block block;
    if (index >= c->s->slots * c->p->d.heads_kv)
        return;
    int64_t kv, t = block_find(c, index, &seq, &kv);
    block_place(c, &seq, kv, t, &block);
    fb__ahead_block(c, &block, ref, s, cols, ahead);
}

fb__operand fb__keys_operand(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides s,
                             int64_t k0, int64_t nk, int64_t cols, int64_t cols_pad, void *pack) {
    if (c->s->native)
        return fb__keys_in_place(c, seq, kv, ref, s, k0);
    void *rows[FB__BC];
    for (int64_t r = 0; r < nk; r += FB__BC) {
        int64_t some = fb__min(FB__BC, nk - r);
        fb__key_rows(c, seq, kv, ref, s, k0 + r, some, rows);
        c->s->k->pack_rows(some, cols, (const void *const *)rows, c->s->type, 1, fb__t(c, pack, r * cols_pad),
                           cols_pad);
    }
    return (fb__operand){pack, cols_pad};
}

/* Loads of whole vectors must be aligned, and rows that lie far apart would meet in the same cache sets. */
static bool rows_in_place(const fb__call *c, fb_strides s, int64_t cols, const void *first) {
    const int64_t lanes = c->s->k->lanes;
    return c->s->native && !c->s->stacked && cols % lanes == 0 && s.row == cols &&
           (uintptr_t)first % (uintptr_t)(lanes * c->s->k->size) == 0;
}

fb__operand fb__rows_operand(const fb__call *c, const fb__block *block, fb_ref ref, fb_strides s,
                             int64_t cols, int64_t cols_pad, void *pack) {
    void *rows[FB__BR] = {NULL};
    fb__block_rows(c, block, ref, s, rows);
    if (rows_in_place(c, s, cols, rows[0]))
        return (fb__operand){rows[0], s.row};
    c->s->k->pack_rows(block->n, cols, (const void *const *)rows, c->s->type, 1, pack, cols_pad);
    return (fb__operand){pack, cols_pad};
}

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
    fb__range common = {0, tile->nk};
    int count = 0;
    for (int64_t lane = 0; lane < n; lane += FB__PANEL) {
        common.lo = fb__max(common.lo, tile->panel[lane / FB__PANEL].lo);
        common.hi = fb__min(common.hi, tile->panel[lane / FB__PANEL].hi);
    }
    if (common.lo < common.hi)
        pieces[count++] = (piece){0, n, common};
    else
        common = (fb__range){tile->nk, tile->nk};
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

void fb__tile_scores_product(const fb__call *c, const fb__block *block, const fb__tile *tile, fb__operand a,
                             int64_t cols, const void *b, void *to, fb__ahead *ahead) {
    const int64_t n = block->n_pad;
    piece x[MOST_PIECES];
    int count = pieces_of(block, tile, x);
    for (int i = 0; i < count; i++)
        c->s->k->gemm(x[i].keys.hi - x[i].keys.lo, x[i].width, cols, fb__tc(c, a.at, x[i].keys.lo * a.row),
                      a.row, 1, fb__tc(c, b, x[i].lane), n, fb__t(c, to, x[i].keys.lo * n + x[i].lane), n,
                      false, ahead);
}

void fb__tile_lanes_product(const fb__call *c, const fb__block *block, const fb__tile *tile, fb__operand a,
                            int64_t cols, const void *cells, const fb__mask_scratch *m, void *to, bool add,
                            fb__ahead *ahead) {
    const fb__kernels *k = c->s->k;
    int64_t n = block->n_pad, step = tile->partial ? FB__PANEL : n;
    bool careful = tile->partial && !k->finite(tile->nk, cols, a.at, a.row);
    if (careful && tile->banded)
        keep_band(c, block, tile, m);
    for (int64_t lane = 0; lane < n; lane += step) {
        fb__range live = tile->panel[lane / FB__PANEL];
        int64_t width = fb__min(step, n - lane), first = live.lo * n + lane, keys = live.hi - live.lo;
        const void *from = fb__tc(c, a.at, live.lo * a.row);
        if (careful)
            k->gemm_keep_lanes(cols, width, keys, from, 1, a.row, fb__tc(c, cells, first), n,
                               fb__t(c, to, lane), n, add, fb__tc(c, m->keep, first), n);
        else
            k->gemm(cols, width, keys, from, 1, a.row, fb__tc(c, cells, first), n, fb__t(c, to, lane), n, add,
                    ahead);
    }
}

void fb__tile_rows_product(const fb__call *c, const fb__block *block, const fb__tile *tile, const void *cells,
                           const fb__mask_scratch *m, fb__operand b, int64_t cols_pad, void *to,
                           fb__ahead *ahead) {
    const fb__kernels *k = c->s->k;
    const int64_t n = block->n_pad;
    bool careful = tile->partial && !k->finite(block->n, cols_pad, b.at, b.row);
    if (careful && tile->banded)
        keep_band(c, block, tile, m);
    piece x[MOST_PIECES];
    int count = pieces_of(block, tile, x);
    for (int i = 0; i < count; i++) {
        int64_t rows = fb__min(x[i].width, block->n - x[i].lane), first = x[i].keys.lo * n + x[i].lane;
        int64_t keys = x[i].keys.hi - x[i].keys.lo;
        const void *from = fb__tc(c, b.at, x[i].lane * b.row);
        void *at = fb__t(c, to, x[i].keys.lo * cols_pad);
        if (rows <= 0)
            continue;
        if (careful)
            k->gemm_keep_rows(keys, cols_pad, rows, fb__tc(c, cells, first), n, from, b.row, at, cols_pad,
                              fb__tc(c, m->keep, first), n);
        else
            k->gemm(keys, cols_pad, rows, fb__tc(c, cells, first), n, 1, from, b.row, at, cols_pad, true,
                    ahead);
    }
}
