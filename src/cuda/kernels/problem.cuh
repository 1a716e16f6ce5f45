// Which part of the problem a block works on, and which of its cells count (R1, through shared/mask.h).
//
// Query rows of a block belong to one head; with FB_STACK to all heads of a group, side by side: row r is query
// r % len_q of head r / len_q of the group. Next: forward.cu.
#pragma once
#include "../../shared/args.h"
#include "product.cuh"

#define FB_LOG2E 1.4426950408889634f
#define FB_LOG2E_REST 1.9259629911266175e-8f // log2(e) - FB_LOG2E
#define FB_LN2 0.6931471805599453f
#define FB_LN2_REST -1.9046542e-9f // ln(2) - FB_LN2

FB_FN float to_log2(float x) { return fmaf(x, FB_LOG2E, x * FB_LOG2E_REST); }

// What to_log2 rounds off: f32 has use for it where logits are in the hundreds.
FB_FN float to_log2_rest(float x) {
    float high = to_log2(x), rest = fmaf(x, FB_LOG2E, -high) + x * FB_LOG2E_REST;
    return FB_TYPE == FB_TYPE_F32 && fabsf(rest) < 1 ? rest : 0;
}

// P = 2^(S - LSE), S times the factor.
FB_FN float probability(float s, float factor, float lse, float rest) {
    float x = fmaf(s, factor, -lse);
    return exp2_fast(FB_TYPE == FB_TYPE_F32 ? x - rest : x);
}

// U is FAST, or SMALL for the careful loop.
template <int U>
FB_FN void tile_scores(float (*c)[4], fb_u32 a, fb_u32 b, const int MI, const int N, const int COLUMNS) {
    if (U == FAST && FB_UNROLL_COLUMNS)
        scores(c, a, b, MI, N, COLUMNS);
    else
        scores_rolled<U>(c, a, b, MI, N, COLUMNS);
}

// A product of f32 is six of 16 bits: enough text without unrolling.
template <int U>
FB_FN void tile_accumulate(float (*c)[4], fb_u32 (*p)[4], fb_u32 b, const int MI, const int K, const int N,
                           const int COLUMNS) {
    if (U == FAST && FB_TYPE != FB_TYPE_F32)
        accumulate(c, p, b, MI, K, N, COLUMNS);
    else
        accumulate_rolled<U>(c, p, b, MI, K, N, COLUMNS);
}

#define FB_LEN (1 << 30) // most rows of a sequence

// Tiles that need no look at single cells: those within [lo, hi).
typedef struct whole {
    int lo, hi;
} whole;

FB_FN bool covers(whole x, int first, int n) { return first >= x.lo && first + n <= x.hi; }

typedef struct work {
    fb_i64 b, row_q, row_k; // sequence, and where its rows begin when packed
    fb_i64 stat;            // index of the first head's first row in lse, dlse and delta
    int len_q, len_k;       // rows that exist
    fb__band band;
    int lo_off, hi_off; // query i sees the keys max(0, i + lo_off) <= j < min(i + hi_off, band.len_k)
    int head, kv;       // first query head and key/value head
    int first;          // of this block's rows
    int rows;           // query rows that exist: len_q, or those of the whole group
    whole all;          // tiles of the other side
    int bound;          // its tiles that end there or before are loaded by streams
} work;

FB_FN int clamp(fb_i64 x, fb_i64 lo, fb_i64 hi) { return (int)(x < lo ? lo : x > hi ? hi : x); }

FB_FN void work_sequence(const fb__args *a, fb_i64 b, work *w) {
    w->b = b;
    w->row_q = w->row_k = 0;
    w->len_q = (int)a->len_q, w->len_k = (int)a->len_k;
    if (a->cu_q) {
        w->row_q = clamp(a->cu_q[b], 0, a->total_q), w->row_k = clamp(a->cu_k[b], 0, a->total_k);
        w->len_q = clamp(a->cu_q[b + 1] - w->row_q, 0, a->total_q - w->row_q);
        w->len_k = clamp(a->cu_k[b + 1] - w->row_k, 0, a->total_k - w->row_k);
    }
    w->band.len_q = a->lens_q ? clamp(a->lens_q[b], 0, w->len_q) : w->len_q;
    w->band.len_k = a->lens_k ? clamp(a->lens_k[b], 0, w->len_k) : w->len_k;
    w->band.off = (a->flags & FB_IS_TOP_LEFT ? 0 : w->len_k - w->len_q) + a->off;
    w->band.left = a->left, w->band.right = a->right;
    w->lo_off = clamp(w->band.off - a->left, -FB_LEN, FB_LEN);
    w->hi_off = clamp(w->band.off + a->right + 1, -FB_LEN, FB_LEN);
    w->rows = FB_STACK ? (int)a->group * w->len_q : w->len_q;
}

// Sequence b of a packed batch has the tiles from cu[b] / TILE + b on: room for as many as it can need, in an order
// that a search finds without a table.
FB_FN fb_i64 packed_sequence(const fb_i32 *cu, fb_i64 batch, fb_i64 slot, const int TILE) {
    fb_i64 lo = 0, hi = batch;
    while (hi - lo > 1) {
        fb_i64 mid = (lo + hi) / 2;
        if (cu[mid] / TILE + mid <= slot)
            lo = mid;
        else
            hi = mid;
    }
    return lo;
}

FB_FN int query_of(const work *w, int r) { return FB_STACK ? r % w->len_q : r; }
FB_FN int head_of(const work *w, int r) { return FB_STACK ? w->head + r / w->len_q : w->head; }

// Index of query row r in lse, dlse and delta.
FB_FN fb_i64 stat_of(const fb__args *a, const work *w, int head, int r) {
    fb_i64 h = head + head_of(w, r) - w->head, i = query_of(w, r);
    return a->cu_q ? h * a->total_q + w->row_q + i : (w->b * a->heads_q + h) * a->len_q + i;
}

// ---- Rows -----------------------------------------------------------------------------------------------------

// From `head` on, which is w->head but where a block goes through several.
FB_FN rows query_rows_of(fb__view t, const work *w, int head) {
    rows r = {(const element *)t.at + w->b * t.batch + head * t.head + w->row_q * t.row, t.row, t.head, w->len_q};
    return r;
}

FB_FN rows query_rows(fb__view t, const work *w) { return query_rows_of(t, w, w->head); }

FB_FN rows key_rows(fb__view t, const work *w) {
    rows r = {(const element *)t.at + w->b * t.batch + w->kv * t.head + w->row_k * t.row, t.row, 0, 1 << 30};
    return r;
}

FB_FN fb_i64 stat_at(const fb__args *a, const work *w, int r) { return stat_of(a, w, w->head, r); }

// Queries that the rows [first, first + n) stand for: all of them when stacked.
FB_FN fb__range queries_of(const work *w, int first, int n) {
    fb__range q = {first, first + n};
    if (FB_STACK)
        q.lo = 0, q.hi = w->len_q;
    if (q.hi > w->band.len_q)
        q.hi = w->band.len_q;
    return q;
}

// Keys that row r may see: [lo, hi), counted from `origin` on. The band in 32 bits, for every row of a tile.
FB_FN void keys_of_row(const work *w, int r, int origin, int *lo, int *hi) {
    int i = query_of(w, r);
    *lo = max(0, i + w->lo_off) - origin;
    *hi = r < w->rows && i < w->band.len_q ? min((int)w->band.len_k, i + w->hi_off) - origin : *lo;
}

// Queries that may see key j, likewise, from query `origin` on.
FB_FN void queries_of_key(const work *w, int j, int origin, int *lo, int *hi) {
    *lo = max(0, j - w->hi_off + 1) - origin;
    *hi = j < w->band.len_k ? min((int)w->band.len_q, j - w->lo_off + 1) - origin : *lo;
}

// Of keys, for the query rows [first, first + n).
FB_FN whole whole_keys(const work *w, int first, int n) {
    fb__range q = queries_of(w, first, n);
    whole x = {0, 0};
    if (first + n > w->rows || q.lo >= q.hi || q.hi - q.lo < (FB_STACK ? w->len_q : n))
        return x;
    x.lo = clamp(fb__band_lo(w->band, q.hi - 1), 0, w->len_k);
    x.hi = clamp(fb__band_hi(w->band, q.lo), 0, w->band.len_k);
    return x;
}

// Of query rows, for the keys [first, first + n).
FB_FN whole whole_queries(const work *w, int first, int n) {
    whole x = {0, 0};
    if (first + n > w->band.len_k)
        return x;
    x.lo = clamp(fb__band_first(w->band, first + n - 1), 0, w->len_q);
    x.hi = clamp(fb__band_past(w->band, first), 0, w->band.len_q);
    if (FB_STACK)
        x.hi = x.lo == 0 && x.hi == w->len_q ? w->rows : 0;
    return x;
}

// Tile number x: of query rows, or, with `keys`, of keys. False if there is nothing.
FB_FN bool work_find(const fb__args *a, fb_u32 x, const int TILE, bool keys, work *w) {
    // 32 bits, as divisions of 64 would take longer than a tile.
    const fb_u32 heads = (fb_u32)(keys || FB_STACK ? a->heads_kv : a->heads_q), slots = (fb_u32)a->slots;
    const fb_i32 *cu = keys ? a->cu_k : FB_STACK ? 0 : a->cu_q;
    fb_u32 slot = x % slots, head = x / slots;
    fb_i64 b;
    if (cu) {
        b = packed_sequence(cu, a->batch, slot, TILE);
        slot -= cu[b] / TILE + (fb_u32)b;
    } else {
        if (a->section) { // long tiles first, over as many heads as the cache holds
            const fb_u32 section = (fb_u32)a->section, first = head / section * section;
            const fb_u32 wide = min(section, heads * (fb_u32)a->batch - first);
            x -= first * slots;
            slot = x / wide, head = first + x % wide;
            slot = keys ? slot : slots - 1 - slot;
        }
        b = head / heads, head %= heads;
    }
    work_sequence(a, b, w);
    w->kv = (int)(keys || FB_STACK ? head : head / (fb_u32)a->group);
    w->head = (int)(keys || FB_STACK ? head * (fb_u32)a->group : head);
    w->first = (int)slot * TILE;
    w->stat = stat_of(a, w, w->head, 0);
    w->all = keys ? whole_queries(w, w->first, TILE) : whole_keys(w, w->first, TILE);
    const unsigned pieces = keys ? FB_Q16 | FB_DOUT16 : FB_K16 | FB_V16;
    const bool streams = FB_STREAMS && row_group(FB_BN, FB_D / FB_PIECE) && row_group(FB_BN, FB_DV / FB_PIECE) &&
                         (a->flags & pieces) == pieces && a->head_dim == FB_D && a->head_dim_v == FB_DV;
    w->bound = !streams ? -1 : (int)(keys ? w->band.len_q : w->band.len_k);
    return w->first < (keys ? w->len_k : w->rows);
}

// That of this block by one thread for all, in shared memory: registers are short, and most of it is wanted rarely. 0
// if there is nothing.
FB_FN const work *work_shared(const fb__args *a, const int TILE, bool keys) {
    __shared__ work shared;
    __shared__ bool any;
    if (threadIdx.x == 0)
        any = work_find(a, blockIdx.x, TILE, keys, &shared);
    __syncthreads();
    return any ? &shared : 0;
}

// ---- Cells beyond the band ------------------------------------------------------------------------------------

#if !FB_PLAIN
// What one head adds to its cells.
typedef struct extras {
    const element *bias;
    const fb_u8 *mask, *blocks;
} extras;

FB_FN extras extras_of(const fb__args *a, fb_i64 b, fb_i64 h) {
    extras x = {0, 0, 0};
    if (FB_OPTIONS & FB_BIASED)
        x.bias = (const element *)a->bias.at + b * a->bias.batch + h * a->bias.head;
    if (FB_OPTIONS & FB_MASKED)
        x.mask = (const fb_u8 *)a->mask.at + b * a->mask.batch + h * a->mask.head;
    if (FB_OPTIONS & FB_BLOCKED)
        x.blocks = a->block_mask + b * a->block_batch + h * a->block_head;
    return x;
}

FB_FN int blocks_of_keys(const fb__args *a) { return (int)((a->len_k + a->block_k - 1) / a->block_k); }

// Of the blocks that queries [i0, i1) x keys [j0, j1) touch: 0 all dead, 2 all live, 1 both.
FB_FN int blocks_state(const fb__args *a, const fb_u8 *blocks, int i0, int i1, int j0, int j1) {
    int across = blocks_of_keys(a), bq = (int)a->block_q, bk = (int)a->block_k;
    bool live = false, dead = false;
    for (int i = i0 / bq; i <= (i1 - 1) / bq; i++)
        for (int j = j0 / bk; j <= (j1 - 1) / bk; j++)
            if (blocks[(fb_i64)i * across + j])
                live = true;
            else
                dead = true;
    return live ? dead ? 1 : 2 : 0;
}

// The score of a cell inside the band, in base 2, or -inf where it does not count. *slope becomes the derivative of
// the softcap.
FB_FN float score_of(const fb__args *a, const extras *x, float S, int i, int j, float *slope) {
    float s = S * a->scale;
    *slope = 1;
    if (FB_OPTIONS & FB_SOFTCAP) {
        float t = tanhf(s * a->softcap_inverse);
        s = a->softcap * t;
        *slope = 1 - t * t;
    }
    if (FB_OPTIONS & FB_BLOCKED && !x->blocks[(fb_i64)(i / (int)a->block_q) * blocks_of_keys(a) + j / (int)a->block_k])
        return -FB_INFINITY;
    if (FB_OPTIONS & FB_MASKED && !x->mask[i * a->mask.row + (a->flags & FB_MASK_COLS ? j : 0)])
        return -FB_INFINITY;
    if (FB_OPTIONS & FB_BIASED) {
        float bias = to_float(x->bias[i * a->bias.row + (a->flags & FB_BIAS_COLS ? j : 0)]);
        if (bias == -FB_INFINITY)
            return bias;
        s += bias;
    }
    return s * FB_LOG2E;
}
#endif

// ---- Tiles of keys --------------------------------------------------------------------------------------------

// The next tile from t on that the block mask leaves alive.
FB_FN int live_keys(const fb__args *a, const work *w, int t, int end) {
#if FB_OPTIONS & FB_BLOCKED && !FB_STACK
    extras x = extras_of(a, w->b, w->head);
    int last = clamp(w->first + FB_BM, 0, w->len_q);
    while (t < end && blocks_state(a, x.blocks, w->first, last, t * FB_BN, clamp((t + 1) * FB_BN, 0, w->len_k)) == 0)
        t++;
#endif
    return t;
}

// The tiles [*tile, *end) of keys that the block's queries may see, or its chunk of them.
FB_FN void key_tiles(const fb__args *a, const work *w, int *tile, int *end) {
    fb__range queries = queries_of(w, w->first, FB_BM), seen = fb__band_keys_of(w->band, queries.lo, queries.hi);
    *end = (int)((seen.hi + FB_BN - 1) / FB_BN), *tile = (int)(seen.lo / FB_BN);
    if (FB_STACK && a->chunks > 1) {
        int each = (*end - *tile + a->chunks - 1) / a->chunks;
        *tile += blockIdx.y * each;
        *end = min(*tile + each, *end);
    }
    *tile = live_keys(a, w, *tile, *end);
}

// Where a thread's pieces of two tensors come from.
FB_FN streams streams_of(rows first, rows second) {
    streams s = {stream_of(first, FB_BN, FB_D), stream_of(second, FB_BN, FB_DV)};
    return s;
}

// FB_BN keys from k0 on, and values. Those beyond the sequence's own length are zeros, whatever is there.
FB_FN void load_keys(const fb__args *a, const work *w, streams from, int bound, fb_u32 to, int k0) {
    if (k0 + FB_BN <= bound)
        stream_load(to, from.first, k0 * a->k.row, a->k.row, FB_BN, FB_D);
    else
        tile_load_any(to, key_rows(a->k, w), k0, (int)w->band.len_k, a->head_dim, a->flags & FB_K16, FB_BN, FB_D);
}

FB_FN void load_values(const fb__args *a, const work *w, streams from, int bound, fb_u32 to, int k0) {
    if (k0 + FB_BN <= bound)
        stream_load(to, from.second, k0 * a->v.row, a->v.row, FB_BN, FB_DV);
    else
        tile_load_any(to, key_rows(a->v, w), k0, (int)w->band.len_k, a->head_dim_v, a->flags & FB_V16, FB_BN, FB_DV);
}

// ---- Output ---------------------------------------------------------------------------------------------------

// A thread's fragments of one row: c[N/8], of which it has columns 2 * half and 2 * half + 1.
typedef struct piece_of_row {
    float (*c)[4];
    int half;
    float factor; // of all
    bool zero;    // zeros instead
} piece_of_row;

FB_FN float2 pair_of(piece_of_row x, int n) {
    return x.zero ? make_float2(0, 0) : make_float2(x.c[n][2 * x.half] * x.factor, x.c[n][2 * x.half + 1] * x.factor);
}

// Straight to memory, if that takes no look: rows at multiples of 16 bytes, an even number of columns, nothing added.
FB_FN bool stores_straight(int columns, bool pieces, bool add) { return pieces && !add && columns % 2 == 0; }

FB_FN void store_row(element *row, piece_of_row x, int first, int columns, const int N) {
    const int c = first + FB_LANE % 4 * 2;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        const float2 y = pair_of(x, n);
        if (c + n * 8 < columns)
#if FB_TYPE == FB_TYPE_F32
            *(float2 *)(row + c + n * 8) = y;
#else
            *(fb_u32 *)(row + c + n * 8) = pack(y.x, y.y);
#endif
    }
}

// Otherwise through shared memory, as f32, in rows of COLUMNS: from there all threads write element by element.
#define FB_ROOM_ROW(columns) ((columns) + 4)

FB_FN void stage_row(float *room, piece_of_row x, int r, int first, const int N, const int COLUMNS) {
    float *to = room + r * FB_ROOM_ROW(COLUMNS) + first + FB_LANE % 4 * 2;
#pragma unroll
    for (int n = 0; n < N / 8; n++)
        *(float2 *)(to + n * 8) = pair_of(x, n);
}

// The staged rows of a block, BM or as many as there are before `end`, to rows first, ... of a tensor.
FB_FN void write_staged(const float *room, rows to, int first, int end, int columns, bool add, const int COLUMNS) {
    __syncthreads();
    for (int r = FB_WARP; r < FB_BM && first + r < end; r += FB_THREADS / 32) {
        element *row = (element *)row_at(to, first + r);
#pragma unroll 2
        for (int c = FB_LANE; c < columns; c += 32) {
            const float x = room[r * FB_ROOM_ROW(COLUMNS) + c];
            row[c] = to_element(add ? to_float(row[c]) + x : x);
        }
    }
}
