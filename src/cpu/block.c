/* See block.h. */
#include "block.h"
#include <string.h>

size_t fb__t_bytes(const fb__cpu_state *s, int64_t count) {
    return (size_t)fb__round_up(count * s->k->size, 64);
}

size_t fb__operand_bytes(const fb__cpu_state *s, int64_t count) {
    return (size_t)fb__round_up(count * s->operand, 64);
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

/* The last sequence that starts at or before a slot. */
static int64_t sequence_at(const fb__call *c, int64_t (*slot_of)(const fb__call *, int64_t), int64_t slot) {
    int64_t lo = 0, hi = c->p->d.batch;
    while (hi - lo > 1) {
        int64_t middle = lo + (hi - lo) / 2;
        if (slot_of(c, middle) <= slot)
            lo = middle;
        else
            hi = middle;
    }
    return lo;
}

int64_t fb__key_block_at(const fb__call *c, int64_t index, fb__seq *seq, int64_t *kv) {
    int64_t slot = index % c->s->key_slots, b = sequence_at(c, fb__key_slot_of, slot);
    *kv = index / c->s->key_slots;
    *seq = fb__problem_seq(c->p, c->io, b);
    return slot - fb__key_slot_of(c, b);
}

/* Sequence, key/value head and t of a flat index. */
static int64_t block_find(const fb__call *c, int64_t index, fb__seq *seq, int64_t *kv_head) {
    int64_t kv = index / c->s->slots, slot = index % c->s->slots, lo = sequence_at(c, fb__slot_of, slot);
    *seq = fb__problem_seq(c->p, c->io, lo);
    *kv_head = kv;
    /* Late queries see the most keys under a causal mask: they come first, so that the last task is a short
     * one. One thread goes forward the other way, so that few keys are new to the cache with every block;
     * backward, where the order is that of sums, it must not matter how many threads there are. */
    int64_t blocks = fb__blocks_of(c, seq), t = slot - fb__slot_of(c, lo);
    bool upward = c->team.threads == 1 && c->pass == FB__FORWARD;
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
    block->n_pad = (int)fb__round_up(n, c->s->lanes);
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

/* ---- Operands ---- */

/* bf16 as it is, with 0 for what the products read besides. */
static void copy_rows_bf16(int64_t rows, int64_t rows_pad, int64_t cols, int64_t cols_pad,
                           const void *const *from, uint16_t *to) {
    for (int64_t r = 0; r < rows; r++) {
        memcpy(to + r * cols_pad, from[r], (size_t)cols * sizeof *to);
        memset(to + r * cols_pad + cols, 0, (size_t)(cols_pad - cols) * sizeof *to);
    }
    memset(to + rows * cols_pad, 0, (size_t)((rows_pad - rows) * cols_pad) * sizeof *to);
}

fb__operand fb__key_rows_pack(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides s,
                              int64_t k0, int64_t nk, int64_t cols, int64_t cols_pad, void *pack) {
    void *at[FB__BC];
    const void *const *rows = (const void *const *)at;
    for (int64_t r = 0; r < nk; r += FB__BC) {
        int64_t some = fb__min(FB__BC, nk - r);
        fb__key_rows(c, seq, kv, ref, s, k0 + r, some, at);
        if (c->s->pairs)
            copy_rows_bf16(some, fb__round_up(some, c->s->row_step), cols, cols_pad, rows, pack);
        else
            c->s->k->pack_rows(some, cols, rows, c->s->type, 1, fb__t(c, pack, r * cols_pad), cols_pad);
    }
    return (fb__operand){pack, cols_pad};
}

fb__operand fb__key_rows_operand(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides s,
                                 int64_t k0, int64_t nk, int64_t cols, int64_t cols_pad, void *pack) {
    /* Rows that lie far apart would meet in the same cache sets. */
    const int64_t step = c->s->row_step;
    bool as_it_lies = c->s->pairs && s.row == cols && cols % step == 0 && nk % step == 0;
    if (c->s->native || as_it_lies)
        return (fb__operand){fb__operand_at(c, fb__at(ref), fb__index(s, seq, seq->row_k, kv, k0)), s.row};
    return fb__key_rows_pack(c, seq, kv, ref, s, k0, nk, cols, cols_pad, pack);
}

fb__operand fb__key_columns_operand(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref,
                                    fb_strides s, int64_t k0, int64_t nk, int64_t cols, int64_t cols_pad,
                                    void *pack) {
    if (!c->s->pairs) /* the product walks along them */
        return fb__key_rows_operand(c, seq, kv, ref, s, k0, nk, cols, cols_pad, pack);
    void *rows[FB__BC];
    fb__key_rows(c, seq, kv, ref, s, k0, nk, rows);
    c->s->pairs->pack_columns(nk, fb__round_up(nk, c->s->pairs->lanes), cols, cols_pad,
                              (const void *const *)rows, pack, FB__BC);
    return (fb__operand){pack, FB__BC};
}

void fb__lanes_pack(const fb__call *c, const fb__block *block, fb_ref ref, fb_strides s, int64_t cols,
                    int64_t cols_pad, double factor, void *pack) {
    void *at[FB__BR];
    const void *const *rows = (const void *const *)at;
    fb__block_rows(c, block, ref, s, at);
    if (c->s->pairs)
        c->s->pairs->pack_lanes(block->n, block->n_pad, cols, cols_pad, rows, factor < 0, pack);
    else
        c->s->k->pack_lanes(block->n, block->n_pad, cols, rows, c->s->type, factor, pack);
}

/* Loads of whole vectors must be aligned, and rows that lie far apart would meet in the same cache sets. */
static bool rows_in_place(const fb__call *c, fb_strides s, int64_t cols, const void *first) {
    const int64_t lanes = c->s->k->lanes;
    return c->s->native && !c->s->stacked && cols % lanes == 0 && s.row == cols &&
           (uintptr_t)first % (uintptr_t)(lanes * c->s->k->size) == 0;
}

fb__operand fb__rows_of_t(const fb__call *c, const fb__block *block, fb_ref ref, fb_strides s, int64_t cols,
                          int64_t cols_pad, void *pack) {
    void *rows[FB__BR] = {NULL};
    fb__block_rows(c, block, ref, s, rows);
    if (rows_in_place(c, s, cols, rows[0]))
        return (fb__operand){rows[0], s.row};
    c->s->k->pack_rows(block->n, cols, (const void *const *)rows, c->s->type, 1, pack, cols_pad);
    return (fb__operand){pack, cols_pad};
}

fb__operand fb__rows_operand(const fb__call *c, const fb__block *block, fb_ref ref, fb_strides s,
                             int64_t cols, int64_t cols_pad, void *pack) {
    if (!c->s->pairs)
        return fb__rows_of_t(c, block, ref, s, cols, cols_pad, pack);
    void *rows[FB__BR];
    fb__block_rows(c, block, ref, s, rows);
    c->s->pairs->pack_rows(block->n, block->n_pad, cols, cols_pad, (const void *const *)rows, pack);
    return (fb__operand){pack, cols_pad};
}

/* ---- What is needed soon ---- */

static void ahead_add(fb__ahead *ahead, const void *at, int64_t step, int64_t rows, int64_t bytes) {
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
    ahead_add(ahead, (const char *)fb__at(ref) + first * bytes, s.row * bytes, block->n, cols * bytes);
}

void fb__ahead_keys(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides s, int64_t k0,
                    int64_t nk, int64_t cols, fb__ahead *ahead) {
    int64_t bytes = (int64_t)fb__dtype_bytes(c->p->d.dtype), first = fb__index(s, seq, seq->row_k, kv, k0);
    ahead_add(ahead, (const char *)fb__at(ref) + first * bytes, s.row * bytes, nk, cols * bytes);
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

void fb__fetch_keys(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides s, int64_t k0,
                    int64_t nk, int64_t cols) {
    fb__ahead ahead = {.parts = 0};
    fb__ahead_keys(c, seq, kv, ref, s, k0, nk, cols, &ahead);
    for (int64_t r = 0; ahead.parts && r < ahead.part[0].rows; r++)
        for (int64_t i = 0; i < ahead.part[0].bytes; i += 64)
            __builtin_prefetch(ahead.part[0].at + r * ahead.part[0].step + i, 0, 2);
}
