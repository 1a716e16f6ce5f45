/* Forward, fused and vector routes. For one block of queries and one chunk of keys:
 *
 *     m = -inf, l = 0, O = 0
 *     for each tile of 64 keys that some query of the block may see:
 *         S = K Q^T
 *         softcap, bias, mask
 *         m' = max(m, S)   P = exp(scale (S - m'))   alpha = exp(scale (m - m'))   l = alpha l + sum P
 *         O = alpha O + V^T P
 *     out = O / l, lse = scale m + ln l
 *
 * Everything is transposed: a row of a tile is a key, a lane is a query. Where so few queries share keys that
 * most lanes would be empty (decoding), products run along the head dimension: attend_few. Keys are cut into
 * chunks only when there are fewer blocks than tasks wanted; then each chunk leaves (m, l, O) and a second
 * loop joins them in order. Chunks depend on the shape alone, so the bits do not depend on the threads.
 * Floor: cpu. */
#include "forward.h"
#include "product.h"
#include <math.h>
#include <string.h>

typedef struct scratch {
    void *q, *o, *s, *cells, *k, *v, *rows;
    void *m, *l, *alpha, *sinks, *lse;
    fb__mask_scratch mask;
    size_t bytes;
} scratch;

/* The thread's arrays, one behind the other; base NULL only counts. */
static scratch carve(const fb__cpu_state *state, const fb__problem *p, char *base) {
    scratch x = {.bytes = 0};
    bool bias = fb__has(p, FB_MASK | FB_BIAS), pairs = state->pairs;
    bool pack = state->few || (!state->native && !state->shared_keys);
    struct {
        void **to;
        int64_t count; /* of T */
    } arrays[] = {{&x.q, state->d_pad * FB__BR},
                  {&x.o, state->dv_pad * FB__BR},
                  {&x.s, FB__BC * FB__BR},
                  {&x.rows, state->few ? state->dv_pad * FB__FEW : 0},
                  {&x.cells, pairs ? FB__BC * FB__BR / 2 : 0},
                  {&x.k, pack ? FB__BC * state->d_pad : 0},
                  {&x.v, pack ? FB__BC * state->dv_pad : 0},
                  {&x.mask.clean, pairs ? FB__BC * state->dv_pad / 2 : 0},
                  {&x.mask.keep, FB__BC * FB__BR},
                  {&x.mask.bias, bias ? FB__BC * FB__BR : 0},
                  {&x.mask.lo, FB__BR},
                  {&x.mask.hi, FB__BR},
                  {&x.m, FB__BR},
                  {&x.l, FB__BR},
                  {&x.alpha, FB__BR},
                  {&x.sinks, FB__BR},
                  {&x.lse, FB__BR}};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        *arrays[i].to = base ? base + x.bytes : NULL;
        x.bytes += fb__t_bytes(state, arrays[i].count);
    }
    if (!pairs)
        x.cells = x.s; /* P takes the place of S */
    return x;
}

size_t fb__forward_scratch(const fb__cpu_state *state, const fb__problem *p) {
    return carve(state, p, NULL).bytes;
}

/* One partial result: m, l and O of a block. */
static int64_t partial_size(const fb__cpu_state *s) { return (2 + s->dv_k) * FB__BR; }

size_t fb__forward_partial(const fb__cpu_state *state, const fb__problem *p) {
    if (state->forward_chunks == 1)
        return 0;
    return fb__t_bytes(state, state->slots * p->d.heads_kv * state->forward_chunks * partial_size(state));
}

/* ---- K and V, packed once ---- */

/* Operands of one key block: K, then V. */
static size_t keys_size(const fb__cpu_state *s) {
    return fb__operand_bytes(s, FB__BC * s->d_pad) + fb__operand_bytes(s, FB__BC * s->dv_pad);
}

size_t fb__forward_keys(const fb__cpu_state *state, const fb__problem *p) {
    return state->shared_keys ? (size_t)(state->key_slots * p->d.heads_kv) * keys_size(state) : 0;
}

static char *keys_at(const fb__call *c, const fb__seq *seq, int64_t kv, int64_t k0) {
    int64_t slot = kv * c->s->key_slots + fb__key_slot_of(c, seq->b) + k0 / FB__BC;
    return c->base + c->s->at_keys + (size_t)slot * keys_size(c->s);
}

static void pack_keys_task(const void *context, int64_t index, int thread) {
    (void)thread;
    const fb__call *c = context;
    const fb_desc *d = &c->p->d;
    fb__seq seq;
    int64_t kv, k0 = FB__BC * fb__key_block_at(c, index, &seq, &kv),
                nk = fb__min(FB__BC, seq.band.len_k - k0);
    if (nk <= 0)
        return;
    char *to = keys_at(c, &seq, kv, k0);
    fb__key_rows_pack(c, &seq, kv, c->io->k, d->k, k0, nk, d->head_dim, c->s->d_pad, to);
    fb__key_columns_operand(c, &seq, kv, c->io->v, d->v, k0, nk, d->head_dim_v, c->s->dv_pad,
                            to + fb__operand_bytes(c->s, FB__BC * c->s->d_pad));
}

/* K and V of a tile: packed ahead, in place, or packed now. */
static fb__operand key_of(const fb__call *c, const fb__block *block, const fb__tile *tile, const scratch *x) {
    const fb_desc *d = &c->p->d;
    if (c->s->shared_keys)
        return (fb__operand){keys_at(c, &block->seq, block->kv, tile->k0), c->s->d_pad};
    return fb__key_rows_operand(c, &block->seq, block->kv, c->io->k, d->k, tile->k0, tile->nk, d->head_dim,
                                c->s->d_pad, x->k);
}

static fb__operand value_of(const fb__call *c, const fb__block *block, const fb__tile *tile,
                            const scratch *x) {
    const fb_desc *d = &c->p->d;
    if (c->s->shared_keys)
        return (fb__operand){keys_at(c, &block->seq, block->kv, tile->k0) +
                                 fb__operand_bytes(c->s, FB__BC * c->s->d_pad),
                             c->s->pairs ? FB__BC : c->s->dv_pad};
    return fb__key_columns_operand(c, &block->seq, block->kv, c->io->v, d->v, tile->k0, tile->nk,
                                   d->head_dim_v, c->s->dv_pad, x->v);
}

/* ---- A tile ---- */

/* From scores to P on a tile where all cells count and nothing is added to them, a strip of keys at a time,
 * which never leaves the nearest cache. False if m has to be raised: then l is as it was, and the tile is
 * made as a whole. */
static bool strips(const fb__call *c, const fb__block *block, const fb__tile *tile, fb__operand key,
                   const scratch *x) {
    const fb__pairs *pairs = c->s->pairs;
    const int64_t n = block->n_pad;
    float before[FB__BR];
    memcpy(before, x->l, sizeof before);
    for (int64_t r = 0; r < tile->rows; r += pairs->strip) {
        const int64_t rows = fb__min(pairs->strip, tile->rows - r);
        pairs->gemm(rows, n, c->s->d_k, fb__operand_at(c, key.at, r * key.row), key.row, x->q, n, x->s, n,
                    false, NULL);
        if (!pairs->softmax_strip(rows, n, x->s, n, fb__score_factor(c), x->m, x->l,
                                  (uint16_t *)x->cells + r * n, n)) {
            memcpy(x->l, before, sizeof before);
            return false;
        }
    }
    return true;
}

/* From S to P; returns whether O must be multiplied by alpha. The first tile has no maximum yet. */
static bool weights(const fb__call *c, const fb__block *block, const fb__tile *tile, fb__operand key,
                    bool first, fb__ahead *ahead, const scratch *x) {
    bool plain = !tile->partial && !fb__has(c->p, FB_BIAS) && c->p->d.softcap == 0;
    if (c->s->pairs && plain && !first && strips(c, block, tile, key, x))
        return false;
    fb__tile_scores_product(c, block, tile, key, c->s->d_k, x->q, x->s, ahead);
    fb__tile_scores(c, block, tile, &x->mask, x->s, false);
    fb__tile_select(c, block, tile, &x->mask, x->s, -HUGE_VAL);
    return fb__tile_softmax(c, block, tile, x->s, x->m, x->l, x->alpha, x->cells);
}

/* K and V of nk keys from k0 on. */
static void ahead_keys(const fb__call *c, const fb__block *block, int64_t k0, int64_t nk, fb__ahead *ahead) {
    const fb_desc *d = &c->p->d;
    fb__ahead_keys(c, &block->seq, block->kv, c->io->k, d->k, k0, nk, d->head_dim, ahead);
    fb__ahead_keys(c, &block->seq, block->kv, c->io->v, d->v, k0, nk, d->head_dim_v, ahead);
}

/* ---- Few queries ---- */

/* K or V in whole vectors: in place, or packed as T. */
typedef struct vectors {
    const void *at;
    int64_t row; /* in elements of `type` */
    int type;
} vectors;

static int type_of_t(const fb__call *c) { return c->s->k->size == 4 ? FB_F32 : FB_F64; }

/* Of the tile's keys from `first` on. */
static vectors vectors_of(const fb__call *c, const fb__block *block, int64_t first, int64_t count, fb_ref ref,
                          fb_strides s, int64_t cols, bool in_place, void *pack) {
    const fb__kernels *k = c->s->k;
    void *rows[FB__BC];
    fb__key_rows(c, &block->seq, block->kv, ref, s, first, count, rows);
    if (in_place && cols % k->lanes == 0)
        return (vectors){rows[0], s.row, c->s->type};
    const int64_t wide = fb__round_up(cols, k->lanes);
    k->pack_rows(count, cols, (const void *const *)rows, c->s->type, 1, pack, wide);
    return (vectors){pack, wide, type_of_t(c)};
}

/* The keys after a tile, piece by piece while it is worked on. */
static fb__ahead next_keys(const fb__call *c, const fb__block *block, int64_t next, int64_t end) {
    fb__ahead ahead = {.lines = 1};
    ahead_keys(c, block, next, fb__min(FB__BC, end - next), &ahead);
    for (int i = 0; i < ahead.parts; i++)
        ahead.lines += (int)(ahead.part[i].bytes / 128);
    return ahead;
}

/* As attend, with vectors along the head dimension: a row of O for each query. */
static void attend_few(const fb__call *c, const fb__block *block, fb__range keys, const scratch *x) {
    const fb__kernels *k = c->s->k;
    const fb_desc *d = &c->p->d;
    const int64_t n = block->n_pad, full = fb__round_up(block->n, k->lanes);
    const int64_t d_wide = fb__round_up(d->head_dim, k->lanes),
                  dv_wide = fb__round_up(d->head_dim_v, k->lanes);
    void *rows[FB__BR];
    fb__block_rows(c, block, c->io->q, d->q, rows);
    k->pack_rows(block->n, d->head_dim, (const void *const *)rows, c->s->type, fb__pack_factor(c), x->q,
                 d_wide);
    memset(x->s, 0, (size_t)(FB__BC * n * k->size));
    bool first = true;
    for (int64_t k0 = keys.lo; k0 < keys.hi; k0 += FB__BC) {
        fb__tile tile;
        if (!fb__tile_init(c, block, k0, fb__min(FB__BC, block->seq.band.len_k - k0), &tile))
            continue;
        const int64_t lo = tile.panel[0].lo, live = fb__min(tile.panel[0].hi, tile.nk) - lo;
        if (live <= 0)
            continue;
        void *s = fb__t(c, x->s, lo * n);
        const void *keep = fb__tc(c, x->mask.keep, lo * n);
        fb__ahead ahead = next_keys(c, block, k0 + FB__BC, keys.hi);
        vectors key = vectors_of(c, block, k0 + lo, live, c->io->k, d->k, d->head_dim, true, x->k);
        k->dots(live, block->n, d_wide, key.at, key.row, key.type, x->q, d_wide, s, n, &ahead);
        fb__tile_scores(c, block, &tile, &x->mask, x->s, false);
        fb__tile_select(c, block, &tile, &x->mask, x->s, -HUGE_VAL);
        k->softmax(live, full, s, n, fb__score_factor(c), x->m, x->l, x->alpha);
        vectors value = vectors_of(c, block, k0 + lo, live, c->io->v, d->v, d->head_dim_v,
                                   c->s->native || !tile.partial, x->v);
        const bool careful = tile.partial && !k->finite(live, dv_wide, value.at, value.row);
        if (careful && tile.banded)
            fb__tile_keep(c, block, &tile, &x->mask);
        k->weigh(live, block->n, dv_wide, s, n, value.at, value.row, value.type, x->rows, dv_wide,
                 first ? NULL : x->alpha, careful ? keep : NULL, &ahead);
        first = false;
    }
    if (first)
        memset(x->rows, 0, (size_t)(block->n * dv_wide * k->size));
    for (int r = 0; r < block->n; r++)
        rows[r] = fb__t(c, x->rows, r * dv_wide);
    k->pack_lanes(block->n, n, d->head_dim_v, (const void *const *)rows, type_of_t(c), 1, x->o);
}

/* ---- A task ---- */

/* Few queries finish a tile sooner than memory brings the next one, so that the one after it is asked for:
 * piece by piece by products of T, at once where those of bf16 are too short for it. */
static fb__ahead look_ahead(const fb__call *c, const fb__block *block, int64_t k0, int64_t end) {
    const fb_desc *d = &c->p->d;
    const int64_t next = k0 + (c->s->pairs ? 2 : 1) * FB__BC, nk = fb__min(FB__BC, end - next);
    fb__ahead ahead = {.lines = 1};
    if (c->s->pairs) {
        fb__fetch_keys(c, &block->seq, block->kv, c->io->k, d->k, next, nk, d->head_dim);
        fb__fetch_keys(c, &block->seq, block->kv, c->io->v, d->v, next, nk, d->head_dim_v);
        return ahead;
    }
    ahead_keys(c, block, next, nk, &ahead);
    for (int i = 0; i < ahead.parts; i++)
        ahead.lines += (int)(fb__ceil(ahead.part[i].bytes, 64) * nk / (FB__BC + d->head_dim_v));
    return ahead;
}

/* O, m and l of the block over keys [lo, hi). */
static void attend(const fb__call *c, const fb__block *block, fb__range keys, fb__ahead *ahead,
                   const scratch *x) {
    const fb__kernels *k = c->s->k;
    const fb_desc *d = &c->p->d;
    int64_t n = block->n_pad;
    for (int64_t r = 0; r < n; r++) {
        fb__put(c, x->m, r, -HUGE_VAL);
        fb__put(c, x->l, r, 0);
    }
    bool first = true;
    fb__ahead due;
    keys.lo = fb__max(keys.lo, block->keys.lo / FB__BC * FB__BC);
    keys.hi = fb__min(keys.hi, block->keys.hi);
    if (c->s->few) {
        attend_few(c, block, keys, x);
        return;
    }
    fb__lanes_pack(c, block, c->io->q, d->q, d->head_dim, c->s->d_pad, fb__pack_factor(c), x->q);
    for (int64_t k0 = keys.lo; k0 < keys.hi; k0 += FB__BC) {
        int64_t nk = fb__min(FB__BC, block->seq.band.len_k - k0);
        fb__tile tile;
        if (!fb__tile_init(c, block, k0, nk, &tile))
            continue;
        if (c->s->stacked) {
            due = look_ahead(c, block, k0, keys.hi);
            ahead = &due;
        }
        fb__operand key = key_of(c, block, &tile, x), value = value_of(c, block, &tile, x);
        if (weights(c, block, &tile, key, first, ahead, x) && !first)
            k->scale_lanes(d->head_dim_v, n, x->o, x->alpha);
        fb__tile_lanes_product(c, block, &tile, value, c->s->dv_k, x->cells, &x->mask, x->o, !first, ahead);
        first = false;
    }
    if (first)
        memset(x->o, 0, (size_t)(d->head_dim_v * n * k->size));
}

void fb__forward_write(const fb__call *c, const fb__block *block, const void *m, const void *l, const void *o,
                       void *sinks, void *factors, void *lse) {
    const fb_desc *d = &c->p->d;
    const size_t size = (size_t)c->s->k->size;
    void *rows[FB__BR];
    const bool sink = fb__has(c->p, FB_SINKS);
    for (int r = 0; sink && r < block->n_pad; r++)
        fb__put(c, sinks, r, r < block->n ? fb__get(c, fb__at(c->io->sinks), block->head[r]) : -HUGE_VAL);
    c->s->k->finish(block->n_pad, fb__score_factor(c), m, l, sink ? sinks : NULL, factors, lse);
    fb__block_rows(c, block, c->io->out, d->out, rows);
    c->s->k->unpack_lanes(block->n, block->n_pad, d->head_dim_v, o, factors, 1, rows, c->s->type, false);
    char *to = fb__at(c->io->lse);
    int step = c->s->stacked ? 1 : block->n; /* rows of one head lie side by side */
    for (int r = 0; to && r < block->n; r += step)
        memcpy(to + (size_t)fb__stat_index(c, block, r) * size, fb__tc(c, lse, r), (size_t)step * size);
}

/* Chunk `part` of a sequence's keys, in whole tiles. */
static fb__range chunk_keys(const fb__call *c, int64_t len_k, int64_t part) {
    int64_t per = fb__ceil(fb__ceil(len_k, FB__BC), c->s->forward_chunks) * FB__BC;
    return (fb__range){fb__min(part * per, len_k), fb__min((part + 1) * per, len_k)};
}

/* What the block's products pull while they run: its rows of out, the next block's q, and the keys that that
 * one is the first to see under a causal mask. With several threads none knows which block it gets next. */
static fb__ahead ahead_of(const fb__call *c, const fb__block *block, int64_t index) {
    fb__ahead ahead = {.lines = FB__AHEAD_LINES};
    if (c->s->forward_chunks > 1 || c->team.threads > 1)
        return ahead;
    const fb_desc *d = &c->p->d;
    int64_t k0 = block->keys.hi, nk = fb__min(FB__BC, block->seq.len_k - k0);
    fb__ahead_block(c, block, c->io->out, d->out, d->head_dim_v, &ahead);
    fb__ahead_index(c, index + 1, c->io->q, d->q, d->head_dim, &ahead);
    ahead_keys(c, block, k0, nk, &ahead);
    return ahead;
}

static void attend_task(const void *context, int64_t index, int thread) {
    const fb__call *c = context;
    int64_t chunks = c->s->forward_chunks;
    fb__block block;
    fb__block_at(c, index / chunks, &block);
    if (!block.n)
        return;
    scratch x = carve(c->s, c->p, c->base + (size_t)thread * c->slice);
    if (chunks > 1) {
        char *partial = c->base + c->s->at_partial;
        x.m = fb__t(c, partial, (block.slot * chunks + index % chunks) * partial_size(c->s));
        x.l = fb__t(c, x.m, FB__BR);
        x.o = fb__t(c, x.l, FB__BR);
    }
    fb__ahead ahead = ahead_of(c, &block, index);
    attend(c, &block, chunk_keys(c, block.seq.len_k, index % chunks), &ahead, &x);
    if (chunks == 1)
        fb__forward_write(c, &block, x.m, x.l, x.o, x.sinks, x.alpha, x.lse);
}

static void join_task(const void *context, int64_t index, int thread) {
    const fb__call *c = context;
    fb__block block;
    fb__block_at(c, index, &block);
    if (!block.n)
        return;
    scratch x = carve(c->s, c->p, c->base + (size_t)thread * c->slice);
    int64_t step = partial_size(c->s);
    void *m = fb__t(c, c->base + c->s->at_partial, block.slot * c->s->forward_chunks * step);
    void *l = fb__t(c, m, FB__BR), *o = fb__t(c, l, FB__BR);
    c->s->k->join(c->s->forward_chunks, block.n_pad, c->p->d.head_dim_v, fb__score_factor(c), m, l, step, o,
                  step);
    fb__forward_write(c, &block, m, l, o, x.sinks, x.alpha, x.lse);
}

/* Blocks of a head, or of one of its sequences, read the same K and V: they are a queue. */
void fb__forward_run(fb__call *c) {
    const int64_t sequences = fb__has(c->p, FB_PACKED) ? 1 : fb__max(c->p->d.batch, 1);
    const int64_t queues = sequences * c->p->d.heads_kv, blocks = c->s->slots / sequences;
    if (c->s->shared_keys)
        fb__team_run_queues(c->team, queues, c->s->key_slots / sequences, pack_keys_task, c);
    fb__team_run_queues(c->team, queues, blocks * c->s->forward_chunks, attend_task, c);
    if (c->s->forward_chunks > 1)
        fb__team_run(c->team, queues * blocks, join_task, c);
}
