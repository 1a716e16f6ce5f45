// dK and dV of FB_BM keys; the query rows of all heads of their group pass by in tiles of FB_BN.
//
//     for each head of the group, for each tile of queries that may see some key:
//         S' = K Q^T   P' = exp(S' - LSE)   dV += P' dO   dP' = V dO^T   dS' = P' (dP' - delta)   dK += dS' Q
//     dK = scale dK
//
// Everything is transposed (rows are keys), so that P' and dS' are in registers where the products want them. K and V
// are read once and stay in registers. A key belongs to one threadgroup: nothing is added up between threadgroups, and
// the order of sums is fixed.
// Simdgroups: FB_WM of MI x 8 keys, times FB_WN slabs of the columns of Q, K, V, dO, dK and dV.
// Threadgroup memory: Q [BN][D] and dO [BN][DV], with one buffer Q, dO, and Q again at the same place; LSE [BN] and
// delta [BN]; then, with slabs, [WM * WN][MI * 8][BN] parts of S' and the same of dP'. K and V arrive by way of the
// first.
// Barriers: a tile is loaded by all, used by all.
#include "problem.msl"

#define WIDE_Q FB_WIDE(FB_D)
#define WIDE_V FB_WIDE(FB_DV)
#define DOUT_AT (FB_BUFFERS == 2 ? FB_BN * WIDE_Q : 0)
#define STATS_AT (FB_BUFFERS == 2 ? DOUT_AT + FB_BN * WIDE_V : FB_BN * (WIDE_Q > WIDE_V ? WIDE_Q : WIDE_V))

struct inputs {
    const device element *q, *dout; // of all heads
    rows k, v;
    extras x;
    const device float *lse, *delta;
    device element *ds;
    threadgroup element *memory;
};

struct state {
    sums dk[FB_MI * FB_NQ], dv[FB_MI * FB_NV];
};

// Which tile of query rows comes next, over the heads of the group one after the other.
struct turn {
    int head, tile;
};

FB_FN turn live_queries(constant fb__metal_args &a, const thread inputs &t, const thread work &w, turn at, int2 tiles) {
    const int heads = FB_STACK ? 1 : (int)a.group;
    for (;; at.tile++) {
        if (at.tile >= tiles.y)
            at.head++, at.tile = tiles.x;
        if (at.head >= heads || tiles.x >= tiles.y)
            return {heads, 0};
#if FB_OPTIONS & FB_BLOCKED && !FB_STACK
        const device uchar *blocks = extras_of(a, t.x, w.b, w.head + at.head).blocks;
        if (!blocks_live(a, blocks, at.tile * FB_BN, min((at.tile + 1) * FB_BN, w.len_q), w.first,
                         min(w.first + FB_BM, w.len_k)))
            continue;
#endif
        return at;
    }
}

FB_FN void load_stats(constant fb__metal_args &a, const thread inputs &t, const thread work &w, int head, int q0,
                      threadgroup float *stats, uint thread_) {
    for (int r = (int)thread_; r < FB_BN; r += FB_THREADS) {
        const bool exists = q0 + r < w.rows;
        const fb_i64 at = stat_of(a, w, head, exists ? q0 + r : 0);
        const float lse = exists ? t.lse[at] : INFINITY;
        stats[r] = lse == -INFINITY ? INFINITY : lse; // nothing comes from an empty row
        stats[FB_BN + r] = exists ? t.delta[at] : 0;
    }
}

// S' and dP' become P' and dS'; what does not count becomes a literal 0.
FB_FN void gradient(constant fb__metal_args &a, const thread inputs &t, const thread work &w, thread sums *s,
                    thread sums *dp, const threadgroup float *stats, int head, int row, int q0, bool covered,
                    uint lane) {
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int j = row + m * 8 + (int)FB_ROW(lane);
        const int2 seen = queries_of_key(w, j, FB_STACK ? 0 : q0);
        FB_UNROLL for (int n = 0; n < FB_NS; n++)
            FB_UNROLL for (int e = 0; e < 2; e++) {
                const int column = n * 8 + (int)FB_COLUMN(lane) + e, r = q0 + column, i = query_of(w, r);
                const int at = FB_STACK ? i : column;
                cell c = {0, 0, 1, false};
                if (covered || (at >= seen.x && at < seen.y && r < w.rows)) {
                    const extras x = extras_of(a, t.x, w.b, head + head_of(w, r) - w.head);
                    c = cell_of(a, x, s[m * FB_NS + n].thread_elements()[e], dp[m * FB_NS + n].thread_elements()[e],
                                stats[column], stats[FB_BN + column], i, j);
                }
                s[m * FB_NS + n].thread_elements()[e] = c.p;
                dp[m * FB_NS + n].thread_elements()[e] = c.counts ? c.ds * c.slope : 0;
            }
    }
}

// A bit for each cell that counts.
FB_FN void keep_cells(constant fb__metal_args &a, const thread inputs &t, const thread work &w, thread uint *keep,
                      int head, int row, int q0, uint lane) {
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int j = row + m * 8 + (int)FB_ROW(lane);
        const int2 seen = queries_of_key(w, j, FB_STACK ? 0 : q0);
        keep[m] = 0;
        for (int n = 0; n < FB_NS; n++)
            for (int e = 0; e < 2; e++) {
                const int column = n * 8 + (int)FB_COLUMN(lane) + e, r = q0 + column, i = query_of(w, r);
                const int at = FB_STACK ? i : column;
                if (at < seen.x || at >= seen.y || r >= w.rows)
                    continue;
                if (score_of(a, extras_of(a, t.x, w.b, head + head_of(w, r) - w.head), 0, i, j).counts)
                    keep[m] |= 1u << (2 * n + e);
            }
    }
}

// dS to memory, for dq.metal: rows of queries there. Simdgroups of other columns have the same.
FB_FN void leave_gradients(constant fb__metal_args &a, const thread work &w, const thread sums *ds, device element *to,
                           int head, int row, int q0) {
    to += w.b * a.ds.batch + head * a.ds.head + q0 * a.ds.row + row;
    FB_UNROLL for (int m = 0; m < FB_MI; m++)
        FB_UNROLL for (int n = 0; n < FB_NS; n++)
            simdgroup_store(to_operand(ds[m * FB_NS + n]), to + n * 8 * a.ds.row + m * 8, (ulong)a.ds.row,
                            ulong2(0, 0), true);
}

// One tile's product into dK or dV; `careful` keeps infinities and NaN of the tile from keys that do not see them.
template <int N, int COLUMNS, int WIDE>
FB_FN void add_product(thread sums *c, const thread sums *p, const thread uint *keep, threadgroup element *tile, int wn,
                       bool careful, place at) {
    if (careful) {
        add_specials<N, WIDE>(c, p, keep, tile + wn * N * 8, at.lane);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile_clean<FB_BN, COLUMNS, WIDE>(tile, at.thread_);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
    accumulate<N, WIDE>(c, p, tile + wn * N * 8);
}

// All tiles of the threadgroup.
FB_FN void attend(constant fb__metal_args &a, const thread inputs &t, const thread work &w, thread state &o, turn at,
                  int2 tiles, bool careful, place p) {
    const int wm = (int)p.simd / FB_WN, wn = (int)p.simd % FB_WN, row = w.first + wm * FB_MI * 8;
    const int heads = FB_STACK ? 1 : (int)a.group, len_k = (int)w.band.len_k, end = query_end(w);
    const int2 whole = whole_queries(w, w.first, FB_BM);
    threadgroup element *Q = t.memory, *dO = t.memory + DOUT_AT;
    threadgroup float *stats = (threadgroup float *)(t.memory + STATS_AT), *room = stats + 2 * FB_BN,
                      *room_dp = room + FB_WM * FB_WN * FB_PARTS;
    operand k[FB_MI * FB_NQ], v[FB_MI * FB_NV];

    clear(o.dk, FB_MI * FB_NQ);
    clear(o.dv, FB_MI * FB_NV);
    if (at.head >= heads)
        return;
    tile_load<FB_BM, FB_D, WIDE_Q>(Q, t.k, w.first, len_k, 0, a.head_dim, a.flags & FB_K16, p.thread_);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    take_rows<FB_NQ, WIDE_Q>(k, Q + wm * FB_MI * 8 * WIDE_Q + wn * FB_NQ * 8);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tile_load<FB_BM, FB_DV, WIDE_V>(Q, t.v, w.first, len_k, 0, a.head_dim_v, a.flags & FB_V16, p.thread_);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    take_rows<FB_NV, WIDE_V>(v, Q + wm * FB_MI * 8 * WIDE_V + wn * FB_NV * 8);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    while (at.head < heads) {
        const int head = w.head + at.head, q0 = at.tile * FB_BN;
        const rows queries = query_rows(t.q, a.q, w, head), gradients = query_rows(t.dout, a.dout, w, head);
        sums s[FB_MI * FB_NS], dp[FB_MI * FB_NS];
        uint keep[FB_MI];
        load_stats(a, t, w, head, q0, stats, p.thread_);
        tile_load<FB_BN, FB_D, WIDE_Q>(Q, queries, q0, end, 0, a.head_dim, a.flags & FB_Q16, p.thread_);
#if FB_BUFFERS == 1
        threadgroup_barrier(mem_flags::mem_threadgroup);
        scores<FB_NQ, WIDE_Q>(s, k, Q + wn * FB_NQ * 8);
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
        tile_load<FB_BN, FB_DV, WIDE_V>(dO, gradients, q0, end, 0, a.head_dim_v, a.flags & FB_DOUT16, p.thread_);
        threadgroup_barrier(mem_flags::mem_threadgroup);
#if FB_BUFFERS == 2
        scores<FB_NQ, WIDE_Q>(s, k, Q + wn * FB_NQ * 8);
#endif
        scores<FB_NV, WIDE_V>(dp, v, dO + wn * FB_NV * 8);
        leave_part(s, room, p.simd);
        leave_part(dp, room_dp, p.simd);
#if FB_WN > 1
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
        join_parts(s, room, p.simd);
        join_parts(dp, room_dp, p.simd);
        gradient(a, t, w, s, dp, stats, head, row, q0, covers(whole, q0, FB_BN), p.lane);
#if FB_KEEP_DS
        if (wn == 0)
            leave_gradients(a, w, dp, t.ds, head, row, q0);
#endif
        if (careful)
            keep_cells(a, t, w, keep, head, row, q0, p.lane);
        add_product<FB_NV, FB_DV, WIDE_V>(o.dv, s, keep, dO, wn, careful, p);
#if FB_BUFFERS == 1
        threadgroup_barrier(mem_flags::mem_threadgroup);
        tile_load<FB_BN, FB_D, WIDE_Q>(Q, queries, q0, end, 0, a.head_dim, a.flags & FB_Q16, p.thread_);
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
        add_product<FB_NQ, FB_D, WIDE_Q>(o.dk, dp, keep, Q, wn, careful, p);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        at.tile++;
        at = live_queries(a, t, w, at, tiles);
    }
}

// dK or dV of the simdgroup's keys.
template <int N>
FB_FN void write_rows(constant fb__metal_args &a, const thread work &w, constant fb__metal_view &view,
                      device element *to, thread sums *x, int columns, float factor, bool pairs, place p) {
    const int row = w.first + (int)p.simd / FB_WN * FB_MI * 8, column = (int)p.simd % FB_WN * N * 8;
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int r = row + m * 8 + (int)FB_ROW(p.lane);
        if (r >= w.len_k)
            continue;
        device element *at = to + key_place(view, w) + r * view.row;
        FB_UNROLL for (int n = 0; n < N; n++) {
            sums y = x[m * N + n];
            store_pair(at, column + n * 8 + (int)FB_COLUMN(p.lane), columns, y.thread_elements()[0] * factor,
                       y.thread_elements()[1] * factor, pairs, a.flags & FB_ADDS);
        }
    }
}

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_dkdv(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]], const device element *q [[buffer(FB_AT_Q)]],
                    const device element *k [[buffer(FB_AT_K)]], const device element *v [[buffer(FB_AT_V)]],
                    const device float *lse [[buffer(FB_AT_LSE)]], const device element *dout [[buffer(FB_AT_DOUT)]],
                    device element *dk [[buffer(FB_AT_DK)]], device element *dv [[buffer(FB_AT_DV)]],
                    const device element *bias [[buffer(FB_AT_BIAS)]], const device uchar *mask [[buffer(FB_AT_MASK)]],
                    const device uchar *block_mask [[buffer(FB_AT_BLOCK_MASK)]],
                    const device int *cu_q [[buffer(FB_AT_CU_Q)]], const device int *cu_k [[buffer(FB_AT_CU_K)]],
                    const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                    const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                    const device float *delta [[buffer(FB_AT_DELTA)]], device element *ds [[buffer(FB_AT_DS)]],
                    threadgroup uchar *memory [[threadgroup(0)]],
                    uint3 group [[threadgroup_position_in_grid]], uint thread_ [[thread_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    const place p = {group, thread_, lane, simd};
    work w;
    if (!work_find(a, {cu_q, cu_k, lens_q, lens_k}, (uint)a.first + group.x, FB_BM, true, w))
        return;
    const inputs t = {q, dout, key_rows(k, a.k, w), key_rows(v, a.v, w), {bias, mask, block_mask}, lse, delta, ds,
                      (threadgroup element *)memory};
    const fb__range seen = fb__band_queries_of(w.band, w.first, w.first + FB_BM);
    int2 tiles = int2((int)(seen.lo / FB_BN), (int)((seen.hi + FB_BN - 1) / FB_BN));
    if (FB_STACK)
        tiles = int2(0, seen.lo < seen.hi ? (w.rows + FB_BN - 1) / FB_BN : 0);
    const turn begin = live_queries(a, t, w, {0, tiles.x}, tiles);
    state o;
    for (bool careful = false;; careful = true) {
        attend(a, t, w, o, begin, tiles, careful, p);
        const bool nan = any_nan(o.dk, FB_MI * FB_NQ) || any_nan(o.dv, FB_MI * FB_NV);
        if (careful || !any_of_all(nan, memory, p))
            break;
    }
    if (FB_HAS(DK))
        write_rows<FB_NQ>(a, w, a.dk, dk, o.dk, a.head_dim, a.scale, a.flags & FB_DK16, p);
    if (FB_HAS(DV))
        write_rows<FB_NV>(a, w, a.dv, dv, o.dv, a.head_dim_v, 1, a.flags & FB_DV16, p);
}
