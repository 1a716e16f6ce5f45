// What lies around the matrix products of the route that materialises the scores. In this order, products by cuBLAS:
//
//     forward                                       backward
//     pack      Q K V, contiguous and padded        pack      and dO
//     (S = Q K^T)                                   (S = Q K^T, dP = dO V^T)
//     softmax   S -> P, LSE                         dbias     sums of dS
//     (O = P V)                                     gradient  S, dP -> P, dS
//     unpack    O -> out                            clean     Q K dO
//                                                   (dQ = dS K, dK = dS^T Q, dV = P^T dO)
//                                                   unpack    -> dq, dk, dv
//
// S is a product of every query with every key, as is dP; nothing is skipped. P and dS are elements and take the
// places of S and dP: they are what the next products want, and a cell that does not count is 0 in them.
//
// Where a product sums over cells, such a 0 must not meet an infinity or NaN of the other operand (R3), and one that
// counts must (R4). So there the packs have 0 in place of those (V at once, the others by `clean`, once S and dP are
// made), and `unpack` adds what is missing, cell by cell. It looks only where pack has found something.
#include "cells.cuh"

#define LANE (threadIdx.x % 32)
#define WARPS (FB_THREADS / 32)
#define ROW_OF_WARP ((fb_i64)blockIdx.x * WARPS + threadIdx.x / 32)
#define PARAMETERS const __grid_constant__ fb__args a, const __grid_constant__ fb__unfused u

// ---- Rows -----------------------------------------------------------------------------------------------------

// Row n of [batch, heads, len].
typedef struct place {
    fb_i64 b, h, i;
    bool exists;
} place;

FB_FN place place_of(fb_i64 n, fb_i64 batch, fb_i64 heads, fb_i64 len) {
    place p = {0, 0, 0, n < batch * heads * len};
    if (p.exists)
        p.i = n % len, p.h = n / len % heads, p.b = n / len / heads;
    return p;
}

FB_FN place place_of_query(const fb__args *a, fb_i64 n) { return place_of(n, a->batch, a->heads_q, a->len_q); }
FB_FN place place_of_key(const fb__args *a, fb_i64 n) { return place_of(n, a->batch, a->heads_kv, a->len_k); }

FB_FN element *cells_of(const fb__unfused *u, float *matrix, fb_i64 n) { return (element *)(matrix + n * u->row); }

// ---- Pack -----------------------------------------------------------------------------------------------------

FB_FN void pack_row(const element *from, fb_i64 columns, element *to, int wide, bool clean, fb_u8 *odd, fb_i32 *any) {
    bool found = false;
    for (int c = LANE; c < wide; c += 32) {
        element x = c < columns ? from[c] : 0;
        bool special = is_odd(x);
        found |= special;
        to[c] = clean && special ? 0 : x;
    }
    found = __any_sync(~0u, found);
    if (LANE == 0) {
        *odd = found;
        if (found)
            *any = 1; // every warp that writes here writes this
    }
}

// A warp has a row; blockIdx.y is the tensor.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_unfused_pack(PARAMETERS) {
    const int t = blockIdx.y;
    const bool keys = t == FB_PACK_K || t == FB_PACK_V, values = t == FB_PACK_V || t == FB_PACK_DOUT;
    const fb__view view = t == FB_PACK_Q ? a.q : t == FB_PACK_K ? a.k : t == FB_PACK_V ? a.v : a.dout;
    const int columns = values ? a.head_dim_v : a.head_dim, wide = values ? u.wide_v : u.wide;
    const fb_i64 n = ROW_OF_WARP;
    const place p = keys ? place_of_key(&a, n) : place_of_query(&a, n);
    if (!p.exists)
        return;
    const sequence s = sequence_of(&a, p.b);
    const bool exists = p.i < (keys ? s.len_k : s.len_q);
    const element *rows = keys ? key_rows(view, &s, p.h) : query_rows(view, &s, p.h);
    const fb_i64 kv = keys ? p.h : p.h / a.group;
    pack_row(rows + p.i * view.row, exists ? columns : 0, (element *)u.pack[t] + n * wide, wide,
             t == FB_PACK_V && !u.gradients, u.odd[t] + n, u.any[t] + p.b * a.heads_kv + kv);
}

// Backward, once S and dP are made: Q, K and dO.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_unfused_clean(PARAMETERS) {
    const int t = blockIdx.y == 2 ? FB_PACK_DOUT : blockIdx.y == 1 ? FB_PACK_K : FB_PACK_Q;
    const int wide = t == FB_PACK_DOUT ? u.wide_v : u.wide;
    const fb_i64 n = ROW_OF_WARP;
    const place p = t == FB_PACK_K ? place_of_key(&a, n) : place_of_query(&a, n);
    if (!p.exists || !u.odd[t][n])
        return;
    element *row = (element *)u.pack[t] + n * wide;
    for (int c = LANE; c < wide; c += 32)
        if (is_odd(row[c]))
            row[c] = 0;
}

// ---- Cells ----------------------------------------------------------------------------------------------------

// Scale, softcap, bias (R8). Each step is rounded, as a fused multiply-add would leave another number in one kernel
// than in the next, and LSE is made of these. *slope: the softcap's derivative.
FB_FN float score_of(const fb__args *a, float dot, float bias, float *slope) {
    float s = __fmul_rn(dot, a->scale);
    *slope = 1;
    if (a->softcap > 0) {
        float t = tanhf(__fmul_rn(s, a->softcap_inverse));
        s = __fmul_rn(a->softcap, t);
        *slope = 1 - t * t;
    }
    return __fadd_rn(s, bias);
}

// A thread has four neighbouring cells at a time.
#define CELLS 4

typedef struct cells {
    float score[CELLS], slope[CELLS]; // -inf where the cell does not count
    bool counts[CELLS];
} cells;

FB_FN void load4(const float *from, float *x) {
    float4 all = *(const float4 *)from;
    x[0] = all.x, x[1] = all.y, x[2] = all.z, x[3] = all.w;
}

FB_FN void store4(element *to, const float *x) {
#if FB_TYPE == FB_TYPE_F32
    *(float4 *)to = make_float4(x[0], x[1], x[2], x[3]);
#else
    *(uint2 *)to = make_uint2(pack(x[0], x[1]), pack(x[2], x[3]));
#endif
}

FB_FN cells cells_at(const fb__args *a, const query *q, const float *scores, fb_i64 j) {
    cells c;
    float dot[CELLS], bias;
    load4(scores + j, dot);
#pragma unroll
    for (int e = 0; e < CELLS; e++) {
        c.score[e] = -FB_INFINITY, c.slope[e] = 1;
        c.counts[e] = counts(a, q, j + e, &bias);
        if (c.counts[e])
            c.score[e] = score_of(a, dot[e], bias, &c.slope[e]);
    }
    return c;
}

// ---- Reductions of a block, in a fixed order ------------------------------------------------------------------

FB_FN float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

FB_FN float warp_max(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        x = fmaxf(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

FB_FN float block_sum(float x, float *room) {
    x = warp_sum(x);
    __syncthreads();
    if (LANE == 0)
        room[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int n = 0; n < blockDim.x / 32; n++)
        x += room[n];
    return x;
}

FB_FN float block_max(float x, float *room) {
    x = warp_max(x);
    __syncthreads();
    if (LANE == 0)
        room[threadIdx.x / 32] = x;
    __syncthreads();
    for (int n = 0; n < blockDim.x / 32; n++)
        x = fmaxf(x, room[n]);
    return x;
}

// ---- Forward --------------------------------------------------------------------------------------------------

// LSE of a row whose largest score is top and whose exp(S - top) sum to l, and what its P V is multiplied by: negative
// if no cell counts, or all are -inf. The sink joins here.
FB_FN float close_row(float top, float l, float sink, float *factor) {
    if (l == 0) {
        *factor = -1;
        return sink;
    }
    float shift = fmaxf(top, sink);
    if (sink != sink)
        shift = sink;
    *factor = expf(top - shift);
    l = l * *factor + expf(sink - shift);
    *factor /= l;
    return shift + logf(l);
}

// A block has a row. P is exp(S - max S): with O divided at the end, it is at most 1 and never small as a whole, which
// matters in 16 bits.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_unfused_softmax(PARAMETERS) {
    __shared__ float room[WARPS];
    const fb_i64 n = blockIdx.x;
    const place p = place_of_query(&a, n);
    const sequence s = sequence_of(&a, p.b);
    const query q = query_of(&a, &s, p.h, p.i);
    const float *scores = u.scores + n * u.row;
    float top = -FB_INFINITY, l = 0;
    for (fb_i64 j = threadIdx.x * CELLS; j < u.row; j += blockDim.x * CELLS) {
        cells c = cells_at(&a, &q, scores, j);
#pragma unroll
        for (int e = 0; e < CELLS; e++)
            top = fmaxf(top, c.score[e]); // passes over NaN, which comes back in the exponential
    }
    top = block_max(top, room);
    const float shift = top == -FB_INFINITY ? 0 : top;
    for (fb_i64 first = 0; first < u.row; first += blockDim.x * CELLS) {
        const fb_i64 j = first + threadIdx.x * CELLS;
        float x[CELLS] = {0, 0, 0, 0};
        if (j < u.row) {
            cells c = cells_at(&a, &q, scores, j);
#pragma unroll
            for (int e = 0; e < CELLS; e++) {
                x[e] = c.counts[e] ? expf(c.score[e] - shift) : 0;
                l += x[e];
            }
        }
        __syncthreads(); // P is at most as wide as S: it takes the place of scores that all have read
        if (j < u.row)
            store4(cells_of(&u, u.scores, n) + j, x);
    }
    l = block_sum(l, room);
    if (threadIdx.x || !q.exists)
        return;
    float lse = close_row(top, l, a.sinks ? a.sinks[p.h] : -FB_INFINITY, &u.factor[n]);
    if (a.lse)
        a.lse[q.stat] = lse;
}

// ---- Backward -------------------------------------------------------------------------------------------------

// What a row of gradients needs besides its cells. A row that nothing comes from has no live cells.
typedef struct cotangent {
    float lse, delta;
    bool live;
} cotangent;

FB_FN cotangent cotangent_of(const fb__args *a, const query *q) {
    cotangent c = {0, 0, false};
    if (q->exists)
        c.lse = a->lse[q->stat], c.delta = a->delta[q->stat], c.live = c.lse != -FB_INFINITY;
    return c;
}

// P = exp(S - LSE)    dS = P (dP - delta), before softcap's factor
FB_FN float gradient_of(const cotangent *t, float score, float dp, float *p) {
    *p = expf(score - t->lse);
    return *p * (dp - t->delta);
}

// A block has a row.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_unfused_gradient(PARAMETERS) {
    const fb_i64 n = blockIdx.x;
    const place at = place_of_query(&a, n);
    const sequence s = sequence_of(&a, at.b);
    const query q = query_of(&a, &s, at.h, at.i);
    const cotangent t = cotangent_of(&a, &q);
    for (fb_i64 first = 0; first < u.row; first += blockDim.x * CELLS) {
        const fb_i64 j = first + threadIdx.x * CELLS;
        float p[CELLS] = {0, 0, 0, 0}, ds[CELLS] = {0, 0, 0, 0}, dp[CELLS];
        if (j < u.row && t.live) {
            cells c = cells_at(&a, &q, u.scores + n * u.row, j);
            load4(u.gradients + n * u.row + j, dp);
#pragma unroll
            for (int e = 0; e < CELLS; e++)
                if (c.counts[e])
                    ds[e] = gradient_of(&t, c.score[e], dp[e], &p[e]) * c.slope[e];
        }
        __syncthreads(); // as in the forward
        if (j < u.row) {
            store4(cells_of(&u, u.scores, n) + j, p);
            store4(cells_of(&u, u.gradients, n) + j, ds);
        }
    }
}

// dS of one cell, 0 where it does not count.
FB_FN float cell_gradient(const fb__args *a, const fb__unfused *u, const query *q, const cotangent *t, fb_i64 n,
                          fb_i64 j) {
    float bias, slope, p;
    if (!counts(a, q, j, &bias))
        return 0;
    return gradient_of(t, score_of(a, u->scores[n * u->row + j], bias, &slope), u->gradients[n * u->row + j], &p);
}

FB_FN void write_dbias(const fb__args *a, fb_i64 b, fb_i64 h, fb_i64 i, fb_i64 j, float x) {
    element *to = (element *)a->dbias.at + b * a->dbias.batch + h * a->dbias.head + i * a->dbias.row + j;
    *to = to_element(a->flags & FB_ADDS ? to_float(*to) + x : x);
}

// dbias: dS summed over all batches, heads, rows and columns that share a cell, in that order. A block has a row of
// dbias and as many of its columns as threads; if there is one column only, the threads share the keys.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_unfused_dbias(PARAMETERS) {
    __shared__ float room[WARPS];
    const bool one_col = !(a.flags & FB_BIAS_COLS);
    const fb_i64 tiles = one_col ? 1 : (a.len_k + blockDim.x - 1) / blockDim.x, x = blockIdx.x / tiles;
    const fb_i64 row = x % a.bias_rows, head = x / a.bias_rows % a.bias_heads, batch = x / a.bias_rows / a.bias_heads;
    const fb_i64 first = blockIdx.x % tiles * blockDim.x + threadIdx.x, last = one_col ? a.len_k : first + 1;
    float sum = 0;
    for (fb_i64 b = a.bias_batches == 1 ? 0 : batch; b < (a.bias_batches == 1 ? a.batch : batch + 1); b++) {
        const sequence s = sequence_of(&a, b);
        for (fb_i64 h = a.bias_heads == 1 ? 0 : head; h < (a.bias_heads == 1 ? a.heads_q : head + 1); h++)
            for (fb_i64 i = a.bias_rows == 1 ? 0 : row; i < (a.bias_rows == 1 ? s.len_q : row + 1); i++) {
                const query q = query_of(&a, &s, h, i);
                const cotangent t = cotangent_of(&a, &q);
                if (t.live)
                    for (fb_i64 j = first; j < last; j += blockDim.x)
                        sum += cell_gradient(&a, &u, &q, &t, (b * a.heads_q + h) * a.len_q + i, j);
            }
    }
    if (one_col) {
        sum = block_sum(sum, room);
        if (threadIdx.x == 0)
            write_dbias(&a, batch, head, row, 0, sum);
    } else if (first < a.len_k)
        write_dbias(&a, batch, head, row, first, sum);
}

// ---- Unpack ---------------------------------------------------------------------------------------------------

// What is missing in column c of O (or dQ) of row n: cells that count times what is odd in V (or K).
FB_FN float missing_of_query(const fb__args *a, const fb__unfused *u, const sequence *s, const query *q, fb_i64 kv,
                             fb_i64 n, int c) {
    const bool backward = u->gradients;
    const int t = backward ? FB_PACK_K : FB_PACK_V;
    const fb__view view = backward ? a->k : a->v;
    const element *cell = cells_of(u, backward ? u->gradients : u->scores, n), *rows = key_rows(view, s, kv);
    const fb_u8 *odd = u->odd[t] + (s->b * a->heads_kv + kv) * a->len_k;
    float sum = 0, bias;
    if (backward && !cotangent_of(a, q).live)
        return 0;
    for (fb_i64 j = q->keys.lo; j < q->keys.hi; j++)
        if (odd[j] && counts(a, q, j, &bias)) {
            element x = rows[j * view.row + c];
            if (is_odd(x))
                sum += to_float(cell[j]) * to_float(x);
        }
    return sum;
}

// What is missing in column c of dK (or dV) of key j: cells that count times what is odd in Q (or dO).
FB_FN float missing_of_key(const fb__args *a, const fb__unfused *u, const sequence *s, fb_i64 kv, fb_i64 j, int c,
                           bool value) {
    const int t = value ? FB_PACK_DOUT : FB_PACK_Q;
    const fb__view view = value ? a->dout : a->q;
    float sum = 0, bias;
    for (fb_i64 h = kv * a->group; h < (kv + 1) * a->group; h++)
        for (fb_i64 i = 0; i < s->len_q; i++) {
            const fb_i64 n = (s->b * a->heads_q + h) * a->len_q + i;
            if (!u->odd[t][n])
                continue;
            const query q = query_of(a, s, h, i);
            const element x = query_rows(view, s, h)[i * view.row + c];
            if (is_odd(x) && cotangent_of(a, &q).live && counts(a, &q, j, &bias))
                sum += to_float(cells_of(u, value ? u->scores : u->gradients, n)[j]) * to_float(x);
        }
    return sum;
}

FB_FN void write_gradient(const fb__args *a, element *to, float x) {
    *to = to_element(a->flags & FB_ADDS ? to_float(*to) + x : x);
}

// O, or dQ.
FB_FN void unpack_query(const fb__args *a, const fb__unfused *u, fb_i64 n) {
    const bool backward = u->gradients;
    const fb__view view = backward ? a->dq : a->out;
    const place p = place_of_query(a, n);
    if (!p.exists || !view.at)
        return;
    const sequence s = sequence_of(a, p.b);
    const query q = query_of(a, &s, p.h, p.i);
    if (!q.exists)
        return;
    const int columns = backward ? a->head_dim : a->head_dim_v, wide = backward ? u->wide : u->wide_v;
    const fb_i64 kv = p.h / a->group;
    const bool careful = u->any[backward ? FB_PACK_K : FB_PACK_V][p.b * a->heads_kv + kv];
    const float factor = backward ? a->scale : u->factor[n];
    element *to = (element *)query_rows(view, &s, p.h) + p.i * view.row;
    for (int c = LANE; c < columns; c += 32) {
        float x = u->sum[FB_SUM_QUERIES] ? u->sum[FB_SUM_QUERIES][n * wide + c] : 0;
        if (careful)
            x += missing_of_query(a, u, &s, &q, kv, n, c);
        if (backward)
            write_gradient(a, to + c, x * factor);
        else
            to[c] = to_element(factor < 0 ? 0 : x * factor + 0.f); // out has no -0 where P V is 0
    }
}

// dK, or dV.
FB_FN void unpack_key(const fb__args *a, const fb__unfused *u, fb_i64 n, bool value) {
    const fb__view view = value ? a->dv : a->dk;
    const place p = place_of_key(a, n);
    if (!p.exists || !view.at)
        return;
    const sequence s = sequence_of(a, p.b);
    if (p.i >= s.len_k)
        return;
    const int columns = value ? a->head_dim_v : a->head_dim, wide = value ? u->wide_v : u->wide;
    const float *sum = u->sum[value ? FB_SUM_V : FB_SUM_K];
    const bool careful = u->any[value ? FB_PACK_DOUT : FB_PACK_Q][p.b * a->heads_kv + p.h];
    element *to = (element *)key_rows(view, &s, p.h) + p.i * view.row;
    for (int c = LANE; c < columns; c += 32) {
        float x = sum ? sum[n * wide + c] : 0;
        if (careful)
            x += missing_of_key(a, u, &s, p.h, p.i, c, value);
        write_gradient(a, to + c, value ? x : x * a->scale);
    }
}

// A warp has a row; blockIdx.y is the sum.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_unfused_unpack(PARAMETERS) {
    if (blockIdx.y == FB_SUM_QUERIES)
        unpack_query(&a, &u, ROW_OF_WARP);
    else
        unpack_key(&a, &u, ROW_OF_WARP, blockIdx.y == FB_SUM_V);
}
