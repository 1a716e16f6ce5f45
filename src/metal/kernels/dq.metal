// dQ of FB_BM query rows; the keys pass by in tiles of FB_BN.
//
//     for each tile of keys that some row may see, from the first on (problem.msl, key_tiles):
//         S = Q K^T   P = exp(S - LSE)   dP = dO V^T   dS = P (dP - delta)   dQ += dS K
//     dQ = scale dQ
//
// With FB_KEEP_DS dkdv.metal has left dS in memory, and the last product is all that is to be done.
// Simdgroups: FB_WM of MI x 8 rows, times FB_WN slabs of the columns of Q, K, V, dO and dQ. Q and dO stay in registers.
// Threadgroup memory: K [BN][D] and V [BN][DV], with one buffer V first and then K at the same place; then, with slabs,
// [WM * WN][MI * 8][BN] parts of S and the same of dP. Q and dO arrive by way of the first.
// Barriers: a tile is loaded by all, used by all. With one buffer K comes when all have dP.
// With args.chunks > 1 a threadgroup has one chunk of the keys and leaves its sum to fb_join_dq in rows.metal.
#include "problem.msl"

#define WIDE_Q FB_WIDE(FB_D)
#define WIDE_V FB_WIDE(FB_DV)
#define V_AT (FB_BUFFERS == 2 ? FB_BN * WIDE_Q : 0)
#define ROOM_AT (FB_BUFFERS == 2 ? V_AT + FB_BN * WIDE_V : FB_BN * (WIDE_Q > WIDE_V ? WIDE_Q : WIDE_V))

struct inputs {
    rows q, k, v, dout;
    extras x;
    const device float *lse, *delta;
    const device element *ds;
    threadgroup element *memory;
};

// S and dP become dS, in place of S; what does not count becomes a literal 0.
FB_FN void gradient(constant fb__metal_args &a, const thread inputs &t, const thread work &w, thread sums *s,
                    thread sums *dp, const thread float *lse, const thread float *delta, int row, int k0, bool covered,
                    uint lane) {
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int r = row + m * 8 + (int)FB_ROW(lane), i = query_of(w, r);
        const int2 seen = keys_of_row(w, r, k0);
        const extras x = extras_of(a, t.x, w.b, head_of(w, r));
        FB_UNROLL for (int n = 0; n < FB_NS; n++)
            FB_UNROLL for (int e = 0; e < 2; e++) {
                const int j = n * 8 + (int)FB_COLUMN(lane) + e;
                cell c = {0, 0, 1, false};
                if (covered || (j >= seen.x && j < seen.y))
                    c = cell_of(a, x, s[m * FB_NS + n].thread_elements()[e], dp[m * FB_NS + n].thread_elements()[e],
                                lse[m], delta[m], i, k0 + j);
                s[m * FB_NS + n].thread_elements()[e] = c.counts ? c.ds * c.slope : 0;
            }
    }
}

// dS as dkdv.metal has left it; where cells do not count there may be anything.
FB_FN void take_gradients(constant fb__metal_args &a, const thread inputs &t, const thread work &w, thread sums *s,
                          int row, int k0, bool covered, uint lane) {
    const device element *from = t.ds + w.b * a.ds.batch + w.head * a.ds.head + row * a.ds.row + k0;
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int r = row + m * 8 + (int)FB_ROW(lane);
        const int2 seen = keys_of_row(w, r, k0);
        const extras x = extras_of(a, t.x, w.b, w.head);
        FB_UNROLL for (int n = 0; n < FB_NS; n++) {
            operand kept;
            simdgroup_load(kept, from + m * 8 * a.ds.row + n * 8, (ulong)a.ds.row);
            FB_UNROLL for (int e = 0; e < 2; e++) {
                const int j = n * 8 + (int)FB_COLUMN(lane) + e;
                bool counts = covered && FB_PLAIN;
                if (!counts && j >= seen.x && j < seen.y)
                    counts = score_of(a, x, 0, r, k0 + j).counts;
                s[m * FB_NS + n].thread_elements()[e] = counts ? (float)kept.thread_elements()[e] : 0;
            }
        }
    }
}

// A bit for each cell that counts.
FB_FN void keep_cells(constant fb__metal_args &a, const thread inputs &t, const thread work &w, thread uint *keep,
                      int row, int k0, uint lane) {
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int r = row + m * 8 + (int)FB_ROW(lane), i = query_of(w, r);
        const int2 seen = keys_of_row(w, r, k0);
        const extras x = extras_of(a, t.x, w.b, head_of(w, r));
        keep[m] = 0;
        for (int n = 0; n < FB_NS; n++)
            for (int e = 0; e < 2; e++) {
                const int j = n * 8 + (int)FB_COLUMN(lane) + e;
                if (j >= seen.x && j < seen.y && score_of(a, x, 0, i, k0 + j).counts)
                    keep[m] |= 1u << (2 * n + e);
            }
    }
}

// All tiles of the threadgroup. With `careful` infinities and NaN of K reach only the rows that see them.
FB_FN void attend(constant fb__metal_args &a, const thread inputs &t, const thread work &w, thread sums *dq, int2 tiles,
                  bool careful, place p) {
    const int wm = (int)p.simd / FB_WN, wn = (int)p.simd % FB_WN, row = w.first + wm * FB_MI * 8;
    const int len_k = (int)w.band.len_k;
    const int2 whole = whole_keys(w, w.first, FB_BM);
    threadgroup element *K = t.memory, *V = t.memory + V_AT;
    threadgroup float *room = (threadgroup float *)(t.memory + ROOM_AT), *room_dp = room + FB_WM * FB_WN * FB_PARTS;

    clear(dq, FB_MI * FB_NQ);
    if (tiles.x >= tiles.y)
        return;
#if !FB_KEEP_DS
    operand q[FB_MI * FB_NQ], dout[FB_MI * FB_NV];
    float lse[FB_MI], delta[FB_MI];
    tile_load<FB_BM, FB_D, WIDE_Q>(K, t.q, w.first, query_end(w), 0, a.head_dim, a.flags & FB_Q16, p.thread_);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    take_rows<FB_NQ, WIDE_Q>(q, K + wm * FB_MI * 8 * WIDE_Q + wn * FB_NQ * 8);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_load<FB_BM, FB_DV, WIDE_V>(K, t.dout, w.first, query_end(w), 0, a.head_dim_v, a.flags & FB_DOUT16, p.thread_);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    take_rows<FB_NV, WIDE_V>(dout, K + wm * FB_MI * 8 * WIDE_V + wn * FB_NV * 8);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int r = row + m * 8 + (int)FB_ROW(p.lane);
        const fb_i64 at = stat_of(a, w, w.head, r < w.rows ? r : 0);
        lse[m] = t.lse[at], delta[m] = t.delta[at];
        if (lse[m] == -INFINITY) // nothing comes from this row
            lse[m] = INFINITY;
    }
#endif
    for (int tile = tiles.x; tile < tiles.y; tile = live_keys(a, t.x, w, tile + 1, tiles.y)) {
        const int k0 = tile * FB_BN;
        const bool covered = covers(whole, k0, FB_BN);
        sums s[FB_MI * FB_NS];
#if FB_KEEP_DS
        tile_load<FB_BN, FB_D, WIDE_Q>(K, t.k, k0, len_k, 0, a.head_dim, a.flags & FB_K16, p.thread_);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        take_gradients(a, t, w, s, row, k0, covered, p.lane);
#else
        sums dp[FB_MI * FB_NS];
        tile_load<FB_BN, FB_DV, WIDE_V>(V, t.v, k0, len_k, 0, a.head_dim_v, a.flags & FB_V16, p.thread_);
#if FB_BUFFERS == 1
        threadgroup_barrier(mem_flags::mem_threadgroup);
        scores<FB_NV, WIDE_V>(dp, dout, V + wn * FB_NV * 8);
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
        tile_load<FB_BN, FB_D, WIDE_Q>(K, t.k, k0, len_k, 0, a.head_dim, a.flags & FB_K16, p.thread_);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        scores<FB_NQ, WIDE_Q>(s, q, K + wn * FB_NQ * 8);
#if FB_BUFFERS == 2
        scores<FB_NV, WIDE_V>(dp, dout, V + wn * FB_NV * 8);
#endif
        leave_part(s, room, p.simd);
        leave_part(dp, room_dp, p.simd);
#if FB_WN > 1
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
        join_parts(s, room, p.simd);
        join_parts(dp, room_dp, p.simd);
        gradient(a, t, w, s, dp, lse, delta, row, k0, covered, p.lane);
#endif
        if (careful) {
            uint keep[FB_MI];
            keep_cells(a, t, w, keep, row, k0, p.lane);
            add_specials<FB_NQ, WIDE_Q>(dq, s, keep, K + wn * FB_NQ * 8, p.lane);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            tile_clean<FB_BN, FB_D, WIDE_Q>(K, p.thread_);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        accumulate<FB_NQ, WIDE_Q>(dq, s, K + wn * FB_NQ * 8);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

FB_FN void write_rows(constant fb__metal_args &a, const thread work &w, thread sums *dq, device element *to,
                      device float *partial, place p) {
    const int row = w.first + (int)p.simd / FB_WN * FB_MI * 8, wn = (int)p.simd % FB_WN;
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int r = row + m * 8 + (int)FB_ROW(p.lane), column = wn * FB_NQ * 8 + (int)FB_COLUMN(p.lane);
        if (r >= w.rows)
            continue;
        if (a.chunks > 1) {
            device float *part = partial + partial_of(a, w, p.group.y, r) * FB_D + column;
            FB_UNROLL for (int n = 0; n < FB_NQ; n++)
                FB_UNROLL for (int e = 0; e < 2; e++)
                    part[n * 8 + e] = dq[m * FB_NQ + n].thread_elements()[e];
            continue;
        }
        device element *at = to + query_row(a.dq, w, r);
        FB_UNROLL for (int n = 0; n < FB_NQ; n++) {
            sums x = dq[m * FB_NQ + n];
            store_pair(at, column + n * 8, a.head_dim, x.thread_elements()[0] * a.scale,
                       x.thread_elements()[1] * a.scale, a.flags & FB_DQ16, a.flags & FB_ADDS);
        }
    }
}

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_dq(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]], const device element *q [[buffer(FB_AT_Q)]],
                  const device element *k [[buffer(FB_AT_K)]], const device element *v [[buffer(FB_AT_V)]],
                  const device float *lse [[buffer(FB_AT_LSE)]], const device element *dout [[buffer(FB_AT_DOUT)]],
                  device element *dq [[buffer(FB_AT_DQ)]], const device element *bias [[buffer(FB_AT_BIAS)]],
                  const device uchar *mask [[buffer(FB_AT_MASK)]],
                  const device uchar *block_mask [[buffer(FB_AT_BLOCK_MASK)]],
                  const device int *cu_q [[buffer(FB_AT_CU_Q)]], const device int *cu_k [[buffer(FB_AT_CU_K)]],
                  const device int *lens_q [[buffer(FB_AT_LENS_Q)]], const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                  const device float *delta [[buffer(FB_AT_DELTA)]], const device element *ds [[buffer(FB_AT_DS)]],
                  device float *partial [[buffer(FB_AT_PARTIAL)]],
                  threadgroup uchar *memory [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                  uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                  uint simd [[simdgroup_index_in_threadgroup]]) {
    const place p = {group, thread_, lane, simd};
    work w;
    if (!work_find(a, {cu_q, cu_k, lens_q, lens_k}, (uint)a.first + group.x, FB_BM, false, w))
        return;
    const inputs t = {query_rows(q, a.q, w, w.head),
                      key_rows(k, a.k, w),
                      key_rows(v, a.v, w),
                      query_rows(dout, a.dout, w, w.head),
                      {bias, mask, block_mask},
                      lse,
                      delta,
                      ds,
                      (threadgroup element *)memory};
    const int2 tiles = key_tiles(a, t.x, w, group.y);
    sums sum[FB_MI * FB_NQ];
    for (bool careful = false;; careful = true) {
        attend(a, t, w, sum, tiles, careful, p);
        if (careful || !any_of_all(any_nan(sum, FB_MI * FB_NQ), memory, p))
            break;
    }
    write_rows(a, w, sum, dq, partial, p);
}
