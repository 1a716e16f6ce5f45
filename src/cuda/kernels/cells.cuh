// Scores one by one: to what a row of them belongs, which of its cells count (R1, through shared/mask.h), what they
// come to. For kernels without tiles. Next: unfused.cu, reference.cu.
#pragma once
#include "../../shared/routes.h"
#include "element.cuh"

FB_FN fb_i64 within(fb_i64 x, fb_i64 lo, fb_i64 hi) { return x < lo ? lo : x > hi ? hi : x; }

// One sequence of the batch. What cu and lens hold is cut to what the tensors and the workspace have room for.
typedef struct sequence {
    fb_i64 b, row_q, row_k; // where its rows begin, when packed
    fb_i64 len_q, len_k;    // rows that exist
    fb__band band;
} sequence;

FB_FN sequence sequence_of(const fb__args *a, fb_i64 b) {
    sequence s;
    s.b = b, s.row_q = 0, s.row_k = 0, s.len_q = a->len_q, s.len_k = a->len_k;
    if (a->cu_q) {
        s.row_q = within(a->cu_q[b], 0, a->total_q), s.row_k = within(a->cu_k[b], 0, a->total_k);
        s.len_q = within(within(a->cu_q[b + 1] - s.row_q, 0, a->total_q - s.row_q), 0, a->len_q);
        s.len_k = within(within(a->cu_k[b + 1] - s.row_k, 0, a->total_k - s.row_k), 0, a->len_k);
    }
    s.band.len_q = a->lens_q ? within(a->lens_q[b], 0, s.len_q) : s.len_q;
    s.band.len_k = a->lens_k ? within(a->lens_k[b], 0, s.len_k) : s.len_k;
    s.band.off = (a->flags & FB_IS_TOP_LEFT ? 0 : s.len_k - s.len_q) + a->off;
    s.band.left = a->left, s.band.right = a->right;
    return s;
}

// Rows of one head of a tensor, in this sequence.
FB_FN const element *query_rows(fb__view t, const sequence *s, fb_i64 h) {
    return (const element *)t.at + s->b * t.batch + h * t.head + s->row_q * t.row;
}

FB_FN const element *key_rows(fb__view t, const sequence *s, fb_i64 kv) {
    return (const element *)t.at + s->b * t.batch + kv * t.head + s->row_k * t.row;
}

// One query of one head: where its row of bias and masks lies, and which keys its band has.
typedef struct query {
    bool exists;
    fb_i64 stat; // its place in lse, dlse and delta
    fb__range keys;
    const element *bias;
    const fb_u8 *mask, *blocks;
} query;

FB_FN query query_of(const fb__args *a, const sequence *s, fb_i64 h, fb_i64 i) {
    query q;
    q.exists = i < s->len_q;
    q.stat = a->cu_q ? h * a->total_q + s->row_q + i : (s->b * a->heads_q + h) * a->len_q + i;
    q.keys = fb__band_keys(s->band, i);
    q.bias = 0, q.mask = 0, q.blocks = 0;
    if (a->bias.at)
        q.bias = (const element *)a->bias.at + s->b * a->bias.batch + h * a->bias.head + i * a->bias.row;
    if (a->mask.at)
        q.mask = (const fb_u8 *)a->mask.at + s->b * a->mask.batch + h * a->mask.head + i * a->mask.row;
    if (a->block_mask) {
        fb_i64 across = (a->len_k + a->block_k - 1) / a->block_k;
        q.blocks = a->block_mask + s->b * a->block_batch + h * a->block_head + i / a->block_q * across;
    }
    return q;
}

// Does the cell count? Its bias goes to *bias.
FB_FN bool counts(const fb__args *a, const query *q, fb_i64 j, float *bias) {
    *bias = 0;
    if (j < q->keys.lo || j >= q->keys.hi)
        return false;
    if (q->mask && !q->mask[a->flags & FB_MASK_COLS ? j : 0])
        return false;
    if (q->blocks && !q->blocks[j / a->block_k])
        return false;
    if (q->bias)
        *bias = to_float(q->bias[a->flags & FB_BIAS_COLS ? j : 0]);
    return *bias != -FB_INFINITY;
}

// An infinity or NaN?
FB_FN bool is_odd(element x) {
    float f = to_float(x);
    return !(f - f == 0);
}
