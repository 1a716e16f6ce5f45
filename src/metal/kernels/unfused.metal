// The route that materialises the scores: the baseline. Products of whole matrices, 64 x 64 of the result by a
// threadgroup, and what lies between them row by row. In this order, with barriers where | stands:
//
//     forward     S = Q K^T | softmax: S -> P, LSE | O = P V
//     backward    S = Q K^T, dP = dO V^T | dbias: sums of dS | gradient: S, dP -> P, dS
//                 | dQ = dS K, dK = dS^T Q, dV = P^T dO
//
// S and dP are products of every query with every key; nothing is skipped. P and dS are elements and take the places
// of S and dP. A cell that does not count is a negative zero in them, and one that counts never is: so a product knows
// the cells whose 0 must not meet an infinity or NaN (R3), and works as the fused kernels do: as if there were none,
// and once more, carefully, if a sum is NaN.
// Threadgroup memory: A and B, of FB_BM (FB_BN) x FB_TERMS or the other way round.
#include "problem.msl"

#define FB_TERMS 32 // terms of a sum in threadgroup memory
#define WIDE_K FB_WIDE(FB_TERMS)
#define WIDE_A FB_WIDE(FB_BM)
#define WIDE_B FB_WIDE(FB_BN)
#define A_SIZE (FB_BM * WIDE_K > FB_TERMS * WIDE_A ? FB_BM * WIDE_K : FB_TERMS * WIDE_A)

// ---- Rows of scores -------------------------------------------------------------------------------------------

// Floats of a row of S, and row n of [batch, heads_q, len_q].
FB_FN fb_i64 score_row(constant fb__metal_args &a) { return (a.len_k + 7) / 8 * 8; }
FB_FN fb_i64 score_at(constant fb__metal_args &a, const thread work &w, int head) {
    return (w.b * a.heads_q + head) * a.len_q;
}

// P or dS of head's queries, as rows of elements in the place of floats.
FB_FN rows cells(constant fb__metal_args &a, const device float *matrix, const thread work &w, int head) {
    const fb_i64 row = score_row(a);
    return {(const device element *)(matrix + score_at(a, w, head) * row), row * 4 / (fb_i64)sizeof(element), 0,
            FB_LEN};
}

#if FB_TYPE == FB_TYPE_F32
FB_FN bool is_hidden(element x) { return as_type<uint>(x) == 0x80000000u; }
#else
FB_FN bool is_hidden(element x) { return as_type<ushort>(x) == 0x8000; }
#endif
FB_FN element hidden() { return (element)-0.0f; }
FB_FN element shown(float x) { // not a negative zero, also not by rounding
    const element y = (element)x;
    return is_hidden(y) ? (element)0.0f : y;
}

// A sequence, cut to what the workspace has room for.
FB_FN void find_sequence(constant fb__metal_args &a, lengths n, fb_i64 b, thread work &w) {
    work_sequence(a, n, b, w);
    w.len_q = min(w.len_q, (int)a.len_q), w.len_k = min(w.len_k, (int)a.len_k);
    w.band.len_q = min(w.band.len_q, (fb_i64)w.len_q), w.band.len_k = min(w.band.len_k, (fb_i64)w.len_k);
    w.rows = w.len_q;
}

// ---- Products -------------------------------------------------------------------------------------------------

// A threadgroup's part of a result: rows from `first` and columns from `column` on.
struct part {
    work w;
    int first, column;
};

// Threadgroup x: columns, then rows, then heads, then sequences.
FB_FN part part_of(constant fb__metal_args &a, lengths n, fb_i64 x, fb_i64 rows_, fb_i64 columns, bool keys) {
    const fb_i64 across = (columns + FB_BN - 1) / FB_BN, down = (rows_ + FB_BM - 1) / FB_BM;
    const fb_i64 heads = keys ? a.heads_kv : a.heads_q, head = x / across / down % heads;
    part p;
    find_sequence(a, n, x / across / down / heads, p.w);
    p.column = (int)(x % across) * FB_BN, p.first = (int)(x / across % down) * FB_BM;
    p.w.kv = (int)(keys ? head : head / a.group), p.w.head = (int)(keys ? head * a.group : head);
    return p;
}

// c += A B of tiles: A [FB_BM][FB_TERMS], or with TA the other way round; B [FB_TERMS][FB_BN], or likewise with TB.
template <bool TA, bool TB>
FB_FN void multiply(thread sums *c, const threadgroup element *A, const threadgroup element *B, place p) {
    const int row = (int)p.simd * FB_MI * 8;
    FB_UNROLL for (int k = 0; k < FB_TERMS; k += 8) {
        operand x[FB_MI];
        FB_UNROLL for (int m = 0; m < FB_MI; m++) {
            if (TA)
                simdgroup_load(x[m], A + k * WIDE_A + row + m * 8, WIDE_A, ulong2(0, 0), true);
            else
                simdgroup_load(x[m], A + (row + m * 8) * WIDE_K + k, WIDE_K);
        }
        FB_UNROLL for (int n = 0; n < FB_NS; n++) {
            operand y;
            if (TB)
                simdgroup_load(y, B + n * 8 * WIDE_K + k, WIDE_K, ulong2(0, 0), true);
            else
                simdgroup_load(y, B + k * WIDE_B + n * 8, WIDE_B);
            FB_UNROLL for (int m = 0; m < FB_MI; m++)
                simdgroup_multiply_accumulate(c[m * FB_NS + n], x[m], y, c[m * FB_NS + n]);
        }
    }
}

// What infinities and NaN of B do to cells that count.
template <bool TA>
FB_FN void add_odd(thread sums *c, const threadgroup element *A, const threadgroup element *B, place p) {
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int row = ((int)p.simd * FB_MI + m) * 8 + (int)FB_ROW(p.lane);
        for (int k = 0; k < FB_TERMS; k++) {
            const element weight = TA ? A[k * WIDE_A + row] : A[row * WIDE_K + k];
            const threadgroup element *at = B + k * WIDE_B + FB_COLUMN(p.lane);
            FB_UNROLL for (int n = 0; n < FB_NS; n++)
                FB_UNROLL for (int e = 0; e < 2; e++)
                    if (special(at[n * 8 + e]) && !is_hidden(weight))
                        c[m * FB_NS + n].thread_elements()[e] += (float)weight * (float)at[n * 8 + e];
        }
    }
}

// Rows of A by rows of B: S and dP. `columns` is what they have.
FB_FN void multiply_rows(constant fb__metal_args &a, const thread part &t, rows A, rows B, int columns, bool a16,
                         bool b16, device float *matrix, threadgroup element *memory, place p) {
    sums c[FB_MI * FB_NS];
    clear(c, FB_MI * FB_NS);
    for (int k = 0; k < columns; k += FB_TERMS) {
        tile_load<FB_BM, FB_TERMS, WIDE_K>(memory, A, t.first, t.w.len_q, k, columns, a16, p.thread_);
        tile_load<FB_BN, FB_TERMS, WIDE_K>(memory + A_SIZE, B, t.column, t.w.len_k, k, columns, b16, p.thread_);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        multiply<false, true>(c, memory, memory + A_SIZE, p);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    const fb_i64 row = score_row(a);
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int i = t.first + ((int)p.simd * FB_MI + m) * 8 + (int)FB_ROW(p.lane);
        device float *to = matrix + (score_at(a, t.w, t.w.head) + i) * row;
        FB_UNROLL for (int n = 0; n < FB_NS; n++)
            FB_UNROLL for (int e = 0; e < 2; e++) {
                const int j = t.column + n * 8 + (int)FB_COLUMN(p.lane) + e;
                if (i < a.len_q && j < row)
                    to[j] = c[m * FB_NS + n].thread_elements()[e];
            }
    }
}

// Weights by rows of B, summed over keys: O and dQ; or, with TA, over the queries of all heads of the group: dK and dV.
struct operands {
    const device float *weights;
    const device element *b;
    constant fb__metal_view *view; // of b
    int columns;
    bool pieces;
};

template <bool TA>
FB_FN void sum_cells(constant fb__metal_args &a, const thread part &t, const thread operands &o, thread sums *c,
                     bool careful, threadgroup element *memory, place p) {
    const int terms = TA ? t.w.len_q : t.w.len_k, heads = TA ? (int)a.group : 1;
    threadgroup element *A = memory, *B = memory + A_SIZE;
    clear(c, FB_MI * FB_NS);
    for (int h = 0; h < heads; h++) {
        const rows weights = cells(a, o.weights, t.w, t.w.head + h);
        const rows b = TA ? query_rows(o.b, *o.view, t.w, t.w.head + h) : key_rows(o.b, *o.view, t.w);
        for (int k = 0; k < terms; k += FB_TERMS) {
            if (TA)
                tile_load<FB_TERMS, FB_BM, WIDE_A>(A, weights, k, t.w.len_q, t.first, t.w.len_k, true, p.thread_);
            else
                tile_load<FB_BM, FB_TERMS, WIDE_K>(A, weights, t.first, t.w.len_q, k, t.w.len_k, true, p.thread_);
            tile_load<FB_TERMS, FB_BN, WIDE_B>(B, b, k, terms, t.column, o.columns, o.pieces, p.thread_);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            if (careful) {
                add_odd<TA>(c, A, B, p);
                threadgroup_barrier(mem_flags::mem_threadgroup);
                tile_clean<FB_TERMS, FB_BN, WIDE_B>(B, p.thread_);
                threadgroup_barrier(mem_flags::mem_threadgroup);
            }
            multiply<TA, false>(c, A, B, p);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
    }
}

// Where a result goes, and what its rows are multiplied by.
struct result {
    device element *to;
    constant fb__metal_view *view;
    const device float *factors; // of rows, with FACTORS; negative: the row is 0
    float scale;
    unsigned pairs;
};

template <bool TA, bool FACTORS>
FB_FN void multiply_cells(constant fb__metal_args &a, const thread part &t, const thread operands &o,
                          const thread result &to, threadgroup uchar *memory, place p) {
    sums c[FB_MI * FB_NS];
    const int count = TA ? t.w.len_k : t.w.len_q;
    if (t.first >= count)
        return;
    for (bool careful = false;; careful = true) {
        sum_cells<TA>(a, t, o, c, careful, (threadgroup element *)memory, p);
        if (careful || !any_of_all(any_nan(c, FB_MI * FB_NS), memory, p))
            break;
    }
    device element *first = to.to + (TA ? key_place(*to.view, t.w) : query_place(*to.view, t.w, t.w.head));
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int r = t.first + ((int)p.simd * FB_MI + m) * 8 + (int)FB_ROW(p.lane);
        if (r >= count)
            continue;
        const float by = FACTORS ? to.factors[score_at(a, t.w, t.w.head) + r] : to.scale;
        FB_UNROLL for (int n = 0; n < FB_NS; n++) {
            float x[2];
            FB_UNROLL for (int e = 0; e < 2; e++)
                x[e] = FACTORS && by < 0 ? 0 : c[m * FB_NS + n].thread_elements()[e] * by;
            store_pair(first + r * to.view->row, t.column + n * 8 + (int)FB_COLUMN(p.lane), o.columns, x[0], x[1],
                       a.flags & to.pairs, !FACTORS && a.flags & FB_ADDS);
        }
    }
}

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_unfused_s(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]], const device element *q [[buffer(FB_AT_Q)]],
                         const device element *k [[buffer(FB_AT_K)]], device float *S [[buffer(FB_AT_PARTIAL)]],
                         const device int *cu_q [[buffer(FB_AT_CU_Q)]], const device int *cu_k [[buffer(FB_AT_CU_K)]],
                         const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                         const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                         threadgroup uchar *memory [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                         uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]]) {
    const part t = part_of(a, {cu_q, cu_k, lens_q, lens_k}, a.first + group.x, a.len_q, a.len_k, false);
    multiply_rows(a, t, query_rows(q, a.q, t.w, t.w.head), key_rows(k, a.k, t.w), a.head_dim, a.flags & FB_Q16,
                  a.flags & FB_K16, S, (threadgroup element *)memory, {group, thread_, lane, simd});
}

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_unfused_dp(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]],
                          const device element *dout [[buffer(FB_AT_DOUT)]],
                          const device element *v [[buffer(FB_AT_V)]], device float *dP [[buffer(FB_AT_DS)]],
                          const device int *cu_q [[buffer(FB_AT_CU_Q)]], const device int *cu_k [[buffer(FB_AT_CU_K)]],
                          const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                          const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                          threadgroup uchar *memory [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                          uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]]) {
    const part t = part_of(a, {cu_q, cu_k, lens_q, lens_k}, a.first + group.x, a.len_q, a.len_k, false);
    multiply_rows(a, t, query_rows(dout, a.dout, t.w, t.w.head), key_rows(v, a.v, t.w), a.head_dim_v,
                  a.flags & FB_DOUT16, a.flags & FB_V16, dP, (threadgroup element *)memory,
                  {group, thread_, lane, simd});
}

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_unfused_o(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]], const device element *v [[buffer(FB_AT_V)]],
                         device element *out [[buffer(FB_AT_OUT)]], const device float *P [[buffer(FB_AT_PARTIAL)]],
                         const device float *factors [[buffer(FB_AT_PARTIAL_LSE)]],
                         const device int *cu_q [[buffer(FB_AT_CU_Q)]], const device int *cu_k [[buffer(FB_AT_CU_K)]],
                         const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                         const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                         threadgroup uchar *memory [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                         uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]]) {
    const part t = part_of(a, {cu_q, cu_k, lens_q, lens_k}, a.first + group.x, a.len_q, a.head_dim_v, false);
    const operands o = {P, v, &a.v, a.head_dim_v, (a.flags & FB_V16) != 0};
    const result to = {out, &a.out, factors, 0, FB_OUT16};
    multiply_cells<false, true>(a, t, o, to, memory, {group, thread_, lane, simd});
}

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_unfused_dq(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]],
                          const device element *k [[buffer(FB_AT_K)]], device element *dq [[buffer(FB_AT_DQ)]],
                          const device float *dS [[buffer(FB_AT_DS)]], const device int *cu_q [[buffer(FB_AT_CU_Q)]],
                          const device int *cu_k [[buffer(FB_AT_CU_K)]],
                          const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                          const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                          threadgroup uchar *memory [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                          uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]]) {
    const part t = part_of(a, {cu_q, cu_k, lens_q, lens_k}, a.first + group.x, a.len_q, a.head_dim, false);
    const operands o = {dS, k, &a.k, a.head_dim, (a.flags & FB_K16) != 0};
    const result to = {dq, &a.dq, dS, a.scale, FB_DQ16};
    multiply_cells<false, false>(a, t, o, to, memory, {group, thread_, lane, simd});
}

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_unfused_dk(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]],
                          const device element *q [[buffer(FB_AT_Q)]], device element *dk [[buffer(FB_AT_DK)]],
                          const device float *dS [[buffer(FB_AT_DS)]], const device int *cu_q [[buffer(FB_AT_CU_Q)]],
                          const device int *cu_k [[buffer(FB_AT_CU_K)]],
                          const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                          const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                          threadgroup uchar *memory [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                          uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]]) {
    const part t = part_of(a, {cu_q, cu_k, lens_q, lens_k}, a.first + group.x, a.len_k, a.head_dim, true);
    const operands o = {dS, q, &a.q, a.head_dim, (a.flags & FB_Q16) != 0};
    const result to = {dk, &a.dk, dS, a.scale, FB_DK16};
    multiply_cells<true, false>(a, t, o, to, memory, {group, thread_, lane, simd});
}

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_unfused_dv(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]],
                          const device element *dout [[buffer(FB_AT_DOUT)]], device element *dv [[buffer(FB_AT_DV)]],
                          const device float *P [[buffer(FB_AT_PARTIAL)]],
                          const device int *cu_q [[buffer(FB_AT_CU_Q)]], const device int *cu_k [[buffer(FB_AT_CU_K)]],
                          const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                          const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                          threadgroup uchar *memory [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                          uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]]) {
    const part t = part_of(a, {cu_q, cu_k, lens_q, lens_k}, a.first + group.x, a.len_k, a.head_dim_v, true);
    const operands o = {P, dout, &a.dout, a.head_dim_v, (a.flags & FB_DOUT16) != 0};
    const result to = {dv, &a.dv, P, 1, FB_DV16};
    multiply_cells<true, false>(a, t, o, to, memory, {group, thread_, lane, simd});
}

// ---- Rows of scores -------------------------------------------------------------------------------------------
// A simdgroup has a row, and all its lanes step through it together: P is at most as wide as S, and takes the place of
// scores that all have read.


struct score_line {
    work w;
    int head, i;
    bool exists; // the query; its row of scores does in any case
    int2 keys;   // that its band has
    extras x;
    fb_i64 n, stat;
};

// Row n of [batch, heads_q, len_q].
FB_FN score_line line_of(constant fb__metal_args &a, lengths lens, extras x, fb_i64 n) {
    score_line r;
    find_sequence(a, lens, n / a.len_q / a.heads_q, r.w);
    r.n = n, r.head = (int)(n / a.len_q % a.heads_q), r.i = (int)(n % a.len_q);
    r.w.head = r.head;
    r.exists = r.i < r.w.len_q;
    r.keys = keys_of_row(r.w, r.i, 0);
    r.x = extras_of(a, x, r.w.b, r.head);
    r.stat = stat_of(a, r.w, r.head, r.i);
    return r;
}

FB_FN score score_in(constant fb__metal_args &a, const thread score_line &r, const device float *S, int j) {
    score s = {0, 1, false};
    if (j >= r.keys.x && j < r.keys.y)
        s = score_of(a, r.x, S[j], r.i, j);
    return s;
}

FB_FN fb_i64 lines(constant fb__metal_args &a) { return a.batch * a.heads_q * a.len_q; }

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_unfused_softmax(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]],
                               device float *lse [[buffer(FB_AT_LSE)]],
                               const device float *sinks [[buffer(FB_AT_SINKS)]],
                               device float *S [[buffer(FB_AT_PARTIAL)]],
                               device float *factors [[buffer(FB_AT_PARTIAL_LSE)]],
                               const device element *bias [[buffer(FB_AT_BIAS)]],
                               const device uchar *mask [[buffer(FB_AT_MASK)]],
                               const device uchar *block_mask [[buffer(FB_AT_BLOCK_MASK)]],
                               const device int *cu_q [[buffer(FB_AT_CU_Q)]],
                               const device int *cu_k [[buffer(FB_AT_CU_K)]],
                               const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                               const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                               uint simd [[simdgroup_index_in_threadgroup]]) {
    const fb_i64 n = (a.first + group.x) * (FB_THREADS / 32) + simd;
    if (n >= lines(a))
        return;
    const score_line r = line_of(a, {cu_q, cu_k, lens_q, lens_k}, {bias, mask, block_mask}, n);
    device float *row = S + n * score_row(a);
    float top = -INFINITY, l = 0;
    for (int j = (int)lane; j < a.len_k; j += 32) {
        const score s = score_in(a, r, row, j);
        top = s.counts && s.x > top ? s.x : top; // passes over NaN, which comes back in the exponential
    }
    top = simd_max(top);
    const float shift = top == -INFINITY ? 0 : top;
    for (int j = (int)lane; j - (int)lane < score_row(a); j += 32) {
        const bool inside = j < score_row(a);
        score s = {0, 1, false};
        if (inside && j < a.len_k)
            s = score_in(a, r, row, j);
        const float P = s.counts ? power2((s.x - shift) * FB_LOG2E) : 0;
        l += P;
        simdgroup_barrier(mem_flags::mem_device);
        if (inside)
            ((device element *)row)[j] = s.counts ? shown(P) : hidden();
    }
    l = simd_sum(l);
    if (lane || !r.exists)
        return;
    const float sink = FB_HAS(SINKS) ? sinks[r.head] : -INFINITY;
    float end = sink, factor = -1; // no cell counts
    if (l != 0) {
        const float most = sink > top || sink != sink ? sink : top, from = most == -INFINITY ? 0 : most;
        factor = power2((top - from) * FB_LOG2E);
        l = l * factor + power2((sink - from) * FB_LOG2E);
        factor /= l;
        end = from + precise::log(l);
    }
    factors[n] = factor;
    if (FB_HAS(LSE))
        lse[r.stat] = end;
}

// What a row of gradients needs besides its cells. A row that nothing comes from has no live cells.
struct cotangent {
    float lse, delta;
    bool live;
};

FB_FN cotangent cotangent_of(const thread score_line &r, const device float *lse, const device float *delta) {
    cotangent c = {0, 0, false};
    if (r.exists)
        c.lse = lse[r.stat], c.delta = delta[r.stat], c.live = c.lse != -INFINITY;
    return c;
}

FB_FN cell gradient_in(constant fb__metal_args &a, const thread score_line &r, const thread cotangent &c,
                       const device float *S, const device float *dP, int j) {
    cell x = {0, 0, 1, false};
    if (c.live && j >= r.keys.x && j < r.keys.y)
        x = cell_of(a, r.x, S[j], dP[j], c.lse, c.delta, r.i, j);
    return x;
}

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_unfused_gradient(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]],
                                const device float *lse [[buffer(FB_AT_LSE)]],
                                const device float *delta [[buffer(FB_AT_DELTA)]],
                                device float *S [[buffer(FB_AT_PARTIAL)]], device float *dP [[buffer(FB_AT_DS)]],
                                const device element *bias [[buffer(FB_AT_BIAS)]],
                                const device uchar *mask [[buffer(FB_AT_MASK)]],
                                const device uchar *block_mask [[buffer(FB_AT_BLOCK_MASK)]],
                                const device int *cu_q [[buffer(FB_AT_CU_Q)]],
                                const device int *cu_k [[buffer(FB_AT_CU_K)]],
                                const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                                const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                                uint3 group [[threadgroup_position_in_grid]],
                                uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                                uint simd [[simdgroup_index_in_threadgroup]]) {
    const fb_i64 n = (a.first + group.x) * (FB_THREADS / 32) + simd;
    if (n >= lines(a))
        return;
    const score_line r = line_of(a, {cu_q, cu_k, lens_q, lens_k}, {bias, mask, block_mask}, n);
    const cotangent t = cotangent_of(r, lse, delta);
    device float *s = S + n * score_row(a), *d = dP + n * score_row(a);
    for (int j = (int)lane; j - (int)lane < score_row(a); j += 32) {
        const bool inside = j < score_row(a);
        cell c = {0, 0, 1, false};
        if (inside && j < a.len_k)
            c = gradient_in(a, r, t, s, d, j);
        simdgroup_barrier(mem_flags::mem_device);
        if (inside) {
            ((device element *)s)[j] = c.counts ? shown(c.p) : hidden();
            ((device element *)d)[j] = c.counts ? shown(c.ds * c.slope) : hidden();
        }
    }
}

// dbias: dS before the softcap's slope, summed over all batches, heads, rows and columns that share a cell, in that
// order. A thread has a cell of dbias.
[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_unfused_dbias(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]],
                             const device float *lse [[buffer(FB_AT_LSE)]],
                             const device float *delta [[buffer(FB_AT_DELTA)]],
                             device element *dbias [[buffer(FB_AT_DBIAS)]],
                             const device float *S [[buffer(FB_AT_PARTIAL)]],
                             const device float *dP [[buffer(FB_AT_DS)]],
                             const device element *bias [[buffer(FB_AT_BIAS)]],
                             const device uchar *mask [[buffer(FB_AT_MASK)]],
                             const device uchar *block_mask [[buffer(FB_AT_BLOCK_MASK)]],
                             const device int *cu_q [[buffer(FB_AT_CU_Q)]],
                             const device int *cu_k [[buffer(FB_AT_CU_K)]],
                             const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                             const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                             uint3 group [[threadgroup_position_in_grid]], uint thread_ [[thread_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    const bool columns = a.flags & FB_BIAS_COLS;
    const fb_i64 n = (a.first + group.x) * FB_THREADS + thread_, across = columns ? a.len_k : 1;
    const fb_i64 column = n % across, row = n / across % a.bias_rows, head = n / across / a.bias_rows % a.bias_heads,
                 batch = n / across / a.bias_rows / a.bias_heads;
    if (batch >= a.bias_batches)
        return;
    const bool batches = a.bias_batches == 1, heads = a.bias_heads == 1, rows_ = a.bias_rows == 1;
    float sum = 0;
    for (fb_i64 b = batches ? 0 : batch; b < (batches ? a.batch : batch + 1); b++)
        for (fb_i64 h = heads ? 0 : head; h < (heads ? a.heads_q : head + 1); h++)
            for (fb_i64 i = rows_ ? 0 : row; i < (rows_ ? a.len_q : row + 1); i++) {
                const fb_i64 line = (b * a.heads_q + h) * a.len_q + i;
                const score_line r = line_of(a, {cu_q, cu_k, lens_q, lens_k}, {bias, mask, block_mask}, line);
                const cotangent t = cotangent_of(r, lse, delta);
                const device float *s = S + line * score_row(a), *d = dP + line * score_row(a);
                for (fb_i64 j = columns ? column : 0; t.live && j < (columns ? column + 1 : a.len_k); j++) {
                    const cell c = gradient_in(a, r, t, s, d, (int)j);
                    sum += c.counts ? c.ds : 0;
                }
            }
    device element *to = dbias + batch * a.dbias.batch + head * a.dbias.head + row * a.dbias.row + column;
    *to = (element)(a.flags & FB_ADDS ? (float)*to + sum : sum);
}
