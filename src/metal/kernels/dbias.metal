// dbias: a threadgroup has FB_BM x FB_BN cells of it, and sums dS (before softcap's slope) over all batches, heads,
// rows and columns that share them, in a fixed order. S and dP are made once more, so nothing of size Lq x Lk is kept
// and nothing is added up between threadgroups.
//
//     for each batch, head, tile of queries and of keys that share the cells:
//         S = Q K^T, dP = dO V^T, both slab by slab of SLAB columns        sum += P (dP - delta)
//
// Simdgroups: FB_WM of MI x 8 rows. Threadgroup memory: a slab of Q or dO [BM][SLAB] and one of K or V [BN][SLAB]; in
// the end the sums [BM][BN]. Barriers: a slab is loaded by all, used by all.
#include "problem.msl"

#define SLAB 64
#define WIDE FB_WIDE(SLAB)

struct inputs {
    const device element *q, *k, *v, *dout;
    extras x;
    const device float *lse, *delta;
    lengths n;
    threadgroup element *memory;
};

// c = A B^T, both from device memory: `columns` of FB_BM rows of A from q0 on, and of FB_BN rows of B from k0 on.
FB_FN void slabs(thread sums *c, const thread rows &A, const thread rows &B, const thread work &w, int q0, int k0,
                 int columns, bool a16, bool b16, threadgroup element *memory, place p) {
    threadgroup element *other = memory + FB_BM * WIDE;
    clear(c, FB_MI * FB_NS);
    for (int column = 0; column < columns; column += SLAB) {
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile_load<FB_BM, SLAB, WIDE>(memory, A, q0, (int)w.band.len_q, column, columns, a16, p.thread_);
        tile_load<FB_BN, SLAB, WIDE>(other, B, k0, (int)w.band.len_k, column, columns, b16, p.thread_);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        for (int k = 0; k < SLAB && column + k < columns; k += 8) {
            operand own[FB_MI];
            take_rows<1, WIDE>(own, memory + (int)p.simd * FB_MI * 8 * WIDE + k);
            FB_UNROLL for (int n = 0; n < FB_NS; n++) {
                operand x;
                simdgroup_load(x, other + n * 8 * WIDE + k, WIDE, ulong2(0, 0), true);
                FB_UNROLL for (int m = 0; m < FB_MI; m++)
                    simdgroup_multiply_accumulate(c[m * FB_NS + n], own[m], x, c[m * FB_NS + n]);
            }
        }
    }
}

FB_FN void add_tile(constant fb__metal_args &a, const thread inputs &t, const thread work &w, thread sums *sum, int q0,
                    int k0, place p) {
    sums s[FB_MI * FB_NS], dp[FB_MI * FB_NS];
    const extras x = extras_of(a, t.x, w.b, w.head);
    const rows q = query_rows(t.q, a.q, w, w.head), k = key_rows(t.k, a.k, w),
               dout = query_rows(t.dout, a.dout, w, w.head), v = key_rows(t.v, a.v, w);
    slabs(s, q, k, w, q0, k0, a.head_dim, a.flags & FB_Q16, a.flags & FB_K16, t.memory, p);
    slabs(dp, dout, v, w, q0, k0, a.head_dim_v, a.flags & FB_DOUT16, a.flags & FB_V16, t.memory, p);
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int r = q0 + ((int)p.simd * FB_MI + m) * 8 + (int)FB_ROW(p.lane);
        const int2 seen = keys_of_row(w, r, k0);
        if (seen.x >= seen.y)
            continue;
        const fb_i64 at = stat_of(a, w, w.head, r);
        const float lse = t.lse[at], delta = t.delta[at];
        if (lse == -INFINITY)
            continue;
        FB_UNROLL for (int n = 0; n < FB_NS; n++)
            FB_UNROLL for (int e = 0; e < 2; e++) {
                const int j = n * 8 + (int)FB_COLUMN(p.lane) + e;
                if (j < seen.x || j >= seen.y)
                    continue;
                const cell c = cell_of(a, x, s[m * FB_NS + n].thread_elements()[e],
                                       dp[m * FB_NS + n].thread_elements()[e], lse, delta, r, k0 + j);
                sum[m * FB_NS + n].thread_elements()[e] += c.ds;
            }
    }
}

// All tiles of one head that share this threadgroup's cells.
FB_FN void add_head(constant fb__metal_args &a, const thread inputs &t, const thread work &w, thread sums *sum,
                    int q_tile, int k_tile, place p) {
    const bool one_row = a.bias_rows == 1, one_column = !(a.flags & FB_BIAS_COLS);
    const int q_lo = one_row ? 0 : q_tile * FB_BM, q_hi = one_row ? w.len_q : q_lo + FB_BM,
              k_lo = one_column ? 0 : k_tile * FB_BN, k_hi = one_column ? w.len_k : k_lo + FB_BN;
    for (int q0 = q_lo; q0 < q_hi; q0 += FB_BM) {
        const fb__range seen = fb__band_keys_of(w.band, q0, q0 + FB_BM);
        for (int k0 = k_lo; k0 < k_hi; k0 += FB_BN)
            if (k0 < seen.hi && k0 + FB_BN > seen.lo)
                add_tile(a, t, w, sum, q0, k0, p);
    }
}

FB_FN void write_cell(constant fb__metal_args &a, device element *to, fb_i64 b, fb_i64 h, int i, int j, float x) {
    to += b * a.dbias.batch + h * a.dbias.head + i * a.dbias.row + j;
    *to = (element)(a.flags & FB_ADDS ? (float)*to + x : x);
}

// The tile's cells, summed over rows and columns where these share one, each by one thread.
FB_FN void write_cells(constant fb__metal_args &a, device element *to, const threadgroup float *sum, fb_i64 b, fb_i64 h,
                       int q_tile, int k_tile, place p) {
    const bool one_row = a.bias_rows == 1, one_column = !(a.flags & FB_BIAS_COLS);
    const int rows_ = one_row ? 1 : FB_BM, columns = one_column ? 1 : FB_BN;
    for (int n = (int)p.thread_; n < rows_ * columns; n += FB_THREADS) {
        const int r = n / columns, c = n % columns, i = q_tile * FB_BM + r, j = k_tile * FB_BN + c;
        float all = 0;
        for (int y = r; y < (one_row ? FB_BM : r + 1); y++)
            for (int x = c; x < (one_column ? FB_BN : c + 1); x++)
                all += sum[y * FB_BN + x];
        if ((one_row || i < a.len_q) && (one_column || j < a.len_k))
            write_cell(a, to, b, h, i, j, all);
    }
}

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_dbias(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]], const device element *q [[buffer(FB_AT_Q)]],
                     const device element *k [[buffer(FB_AT_K)]], const device element *v [[buffer(FB_AT_V)]],
                     const device float *lse [[buffer(FB_AT_LSE)]], const device element *dout [[buffer(FB_AT_DOUT)]],
                     const device element *bias [[buffer(FB_AT_BIAS)]], device element *dbias [[buffer(FB_AT_DBIAS)]],
                     const device uchar *mask [[buffer(FB_AT_MASK)]],
                     const device uchar *block_mask [[buffer(FB_AT_BLOCK_MASK)]],
                     const device int *cu_q [[buffer(FB_AT_CU_Q)]], const device int *cu_k [[buffer(FB_AT_CU_K)]],
                     const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                     const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                     const device float *delta [[buffer(FB_AT_DELTA)]], threadgroup uchar *memory [[threadgroup(0)]],
                     uint3 group [[threadgroup_position_in_grid]], uint thread_ [[thread_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    const place p = {group, thread_, lane, simd};
    const bool one_row = a.bias_rows == 1, one_column = !(a.flags & FB_BIAS_COLS);
    const int rows_ = one_row ? 1 : (int)a.len_q, columns = one_column ? 1 : (int)a.len_k;
    fb_i64 x = a.first + group.x;
    const fb_i64 across = (columns + FB_BN - 1) / FB_BN, down = (rows_ + FB_BM - 1) / FB_BM;
    const int k_tile = (int)(x % across), q_tile = (int)(x / across % down);
    x /= across * down;
    const fb_i64 h = x % a.bias_heads, b = x / a.bias_heads;
    const bool all_b = a.bias_batches == 1, all_h = a.bias_heads == 1;
    const inputs t = {q, k, v, dout, {bias, mask, block_mask}, lse, delta, {cu_q, cu_k, lens_q, lens_k},
                      (threadgroup element *)memory};
    sums sum[FB_MI * FB_NS];
    clear(sum, FB_MI * FB_NS);
    for (fb_i64 batch = all_b ? 0 : b; batch < (all_b ? a.batch : b + 1); batch++)
        for (fb_i64 head = all_h ? 0 : h; head < (all_h ? a.heads_q : h + 1); head++) {
            work w;
            work_sequence(a, t.n, batch, w);
            w.head = (int)head, w.kv = (int)(head / a.group), w.first = 0;
            add_head(a, t, w, sum, q_tile, k_tile, p);
        }
    threadgroup float *room = (threadgroup float *)memory;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    FB_UNROLL for (int m = 0; m < FB_MI; m++)
        FB_UNROLL for (int n = 0; n < FB_NS; n++)
            simdgroup_store(sum[m * FB_NS + n], room + ((int)p.simd * FB_MI + m) * 8 * FB_BN + n * 8, FB_BN);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    write_cells(a, dbias, room, b, h, q_tile, k_tile, p);
}
