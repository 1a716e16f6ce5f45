// O and LSE of FB_BM query rows; the keys pass by in tiles of FB_BN.
//
//     m = -inf, l = 0, O = 0
//     for each tile of keys that some row may see:
//         S = Q K^T                     mask; with options also scale, softcap, bias
//         m' = max(m, max S)   P = exp(S - m')   l = l exp(m - m') + sum P   O = O exp(m - m') + P V
//     LSE = m + ln l   O = O / l        the sink joins m and l here
//
// Simdgroups: FB_WM of MI x 8 rows, times FB_WN slabs of the columns of Q, K, V and O. Q stays in registers.
// Threadgroup memory: K [BN][D] and V [BN][DV], with one buffer one after the other at the same place; then, with
// slabs, [WM * WN][MI * 8][BN] parts of S. Q arrives by way of the first.
// Barriers: a tile is loaded by all, used by all. With one buffer V comes when all have S.
// With args.chunks > 1 a threadgroup has one chunk of the keys, and leaves m, l and O to fb_join in rows.metal.
#include "problem.msl"

#define WIDE_Q FB_WIDE(FB_D)
#define WIDE_V FB_WIDE(FB_DV)
#define V_AT (FB_BUFFERS == 2 ? FB_BN * WIDE_Q : 0)
#define ROOM_AT (FB_BUFFERS == 2 ? V_AT + FB_BN * WIDE_V : FB_BN * (WIDE_Q > WIDE_V ? WIDE_Q : WIDE_V))

struct inputs {
    rows q, k, v;
    extras x;
    threadgroup element *memory;
};

struct state {
    sums o[FB_MI * FB_NV];
    float m[FB_MI], l[FB_MI]; // of the lane's row in each piece; l: of its own columns
};

// Cells that do not count become -inf. Without options the scores stay products, times the sign of scale.
FB_FN void finish(constant fb__metal_args &a, const thread inputs &t, const thread work &w, thread sums *s, int row,
                  int k0, bool covered, uint lane) {
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int r = row + m * 8 + (int)FB_ROW(lane), i = query_of(w, r);
        const int2 seen = keys_of_row(w, r, k0);
        const extras x = extras_of(a, t.x, w.b, head_of(w, r));
        FB_UNROLL for (int n = 0; n < FB_NS; n++)
            FB_UNROLL for (int e = 0; e < 2; e++) {
                const int j = n * 8 + (int)FB_COLUMN(lane) + e;
                float S = s[m * FB_NS + n].thread_elements()[e];
                const bool inside = covered || (j >= seen.x && j < seen.y);
#if FB_PLAIN
                S = inside ? (a.scale < 0 ? -S : S) : -INFINITY;
#else
                score c = {0, 1, false};
                if (inside)
                    c = score_of(a, x, S, i, k0 + j);
                S = c.counts ? c.x : -INFINITY;
#endif
                s[m * FB_NS + n].thread_elements()[e] = S;
            }
    }
}

// S becomes P; m, l and O follow the new maximum. What is rounded is S - m, which is small wherever P is not.
FB_FN void softmax(constant fb__metal_args &a, thread state &t, thread sums *s) {
    const float factor = FB_PLAIN ? abs(a.scale_log2) : FB_LOG2E;
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        float top = t.m[m], sum = 0;
        FB_UNROLL for (int n = 0; n < FB_NS; n++)
            FB_UNROLL for (int e = 0; e < 2; e++) {
                const float S = s[m * FB_NS + n].thread_elements()[e];
                top = S > top ? S : top;
            }
        top = row_max(top);
        const float alpha = t.m[m] == -INFINITY ? 0 : power2((t.m[m] - top) * factor);
        const bool moved = t.m[m] != top;
        t.m[m] = top;
        FB_UNROLL for (int n = 0; n < FB_NS; n++)
            FB_UNROLL for (int e = 0; e < 2; e++) {
                const float S = s[m * FB_NS + n].thread_elements()[e];
                const float P = S == -INFINITY ? 0 : power2((S - top) * factor);
                s[m * FB_NS + n].thread_elements()[e] = P;
                sum += P;
            }
        if (simd_any(moved)) {
            t.l[m] *= alpha;
            FB_UNROLL for (int n = 0; n < FB_NV; n++)
                FB_UNROLL for (int e = 0; e < 2; e++)
                    t.o[m * FB_NV + n].thread_elements()[e] *= alpha;
        }
        t.l[m] += sum;
    }
}

FB_FN void keep_cells(thread sums *s, thread uint *keep) {
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        keep[m] = 0;
        FB_UNROLL for (int n = 0; n < FB_NS; n++)
            FB_UNROLL for (int e = 0; e < 2; e++)
                if (s[m * FB_NS + n].thread_elements()[e] != -INFINITY)
                    keep[m] |= 1u << (2 * n + e);
    }
}

// All tiles of the threadgroup. With `careful` infinities and NaN of V reach only the rows that see them.
FB_FN void attend(constant fb__metal_args &a, const thread inputs &t, const thread work &w, thread state &o, int2 tiles,
                  bool careful, place p) {
    const int wm = (int)p.simd / FB_WN, wn = (int)p.simd % FB_WN, row = w.first + wm * FB_MI * 8;
    const int len_k = (int)w.band.len_k;
    const int2 whole = whole_keys(w, w.first, FB_BM);
    threadgroup element *K = t.memory, *V = t.memory + V_AT;
    threadgroup float *room = (threadgroup float *)(t.memory + ROOM_AT);
    operand q[FB_MI * FB_NQ];

    clear(o.o, FB_MI * FB_NV);
    FB_UNROLL for (int m = 0; m < FB_MI; m++)
        o.m[m] = -INFINITY, o.l[m] = 0;
    if (tiles.x >= tiles.y)
        return;
    tile_load<FB_BM, FB_D, WIDE_Q>(K, t.q, w.first, query_end(w), 0, a.head_dim, a.flags & FB_Q16, p.thread_);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    take_rows<FB_NQ, WIDE_Q>(q, K + wm * FB_MI * 8 * WIDE_Q + wn * FB_NQ * 8);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int tile = tiles.x; tile < tiles.y; tile = live_keys(a, t.x, w, tile + 1, tiles.y)) {
        const int k0 = tile * FB_BN;
        sums s[FB_MI * FB_NS];
        uint keep[FB_MI];
        tile_load<FB_BN, FB_D, WIDE_Q>(K, t.k, k0, len_k, 0, a.head_dim, a.flags & FB_K16, p.thread_);
#if FB_BUFFERS == 2
        tile_load<FB_BN, FB_DV, WIDE_V>(V, t.v, k0, len_k, 0, a.head_dim_v, a.flags & FB_V16, p.thread_);
#endif
        threadgroup_barrier(mem_flags::mem_threadgroup);
        scores<FB_NQ, WIDE_Q>(s, q, K + wn * FB_NQ * 8);
        leave_part(s, room, p.simd);
#if FB_BUFFERS == 1 || FB_WN > 1
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
#if FB_BUFFERS == 1
        tile_load<FB_BN, FB_DV, WIDE_V>(V, t.v, k0, len_k, 0, a.head_dim_v, a.flags & FB_V16, p.thread_);
        threadgroup_barrier(mem_flags::mem_threadgroup);
#endif
        join_parts(s, room, p.simd);
        const bool covered = covers(whole, k0, FB_BN);
        if (!FB_PLAIN || !covered || a.scale < 0)
            finish(a, t, w, s, row, k0, covered, p.lane);
        if (careful)
            keep_cells(s, keep);
        softmax(a, o, s);
        if (careful) {
            add_specials<FB_NV, WIDE_V>(o.o, s, keep, V + wn * FB_NV * 8, p.lane);
            threadgroup_barrier(mem_flags::mem_threadgroup);
            tile_clean<FB_BN, FB_DV, WIDE_V>(V, p.thread_);
            threadgroup_barrier(mem_flags::mem_threadgroup);
        }
        accumulate<FB_NV, WIDE_V>(o.o, s, V + wn * FB_NV * 8);
        threadgroup_barrier(mem_flags::mem_threadgroup);
    }
}

// LSE of a row, and what its O is multiplied by.
FB_FN float2 close_row(constant fb__metal_args &a, float m, float l, float sink) {
    const float unit = FB_PLAIN ? abs(a.scale) : 1; // m in natural units
    if (l == 0) // no cell counts, and O is 0
        return float2(sink, 0);
    m *= unit;
    const float top = sink > m || sink != sink ? sink : m, shift = top == -INFINITY ? 0 : top;
    const float weight = power2((m - shift) * FB_LOG2E);
    l = l * weight + power2((sink - shift) * FB_LOG2E);
    return float2(shift + precise::log(l), weight / l);
}

FB_FN void write_rows(constant fb__metal_args &a, const thread work &w, thread state &t, device element *out,
                      device float *lse, const device float *sinks, device float *partial, device float *partial_lse,
                      place p) {
    const int row = w.first + (int)p.simd / FB_WN * FB_MI * 8, wn = (int)p.simd % FB_WN;
    FB_UNROLL for (int m = 0; m < FB_MI; m++) {
        const int r = row + m * 8 + (int)FB_ROW(p.lane), column = wn * FB_NV * 8 + (int)FB_COLUMN(p.lane);
        const float l = row_sum(t.l[m]);
        const bool first = wn == 0 && FB_COLUMN(p.lane) == 0; // of those that have this row
        if (r >= w.rows)
            continue;
        if (a.chunks > 1) {
            const fb_i64 at = partial_of(a, w, p.group.y, r);
            if (first)
                partial_lse[2 * at] = t.m[m] * (FB_PLAIN ? abs(a.scale) : 1), partial_lse[2 * at + 1] = l;
            FB_UNROLL for (int n = 0; n < FB_NV; n++)
                FB_UNROLL for (int e = 0; e < 2; e++)
                    partial[at * FB_DV + column + n * 8 + e] = t.o[m * FB_NV + n].thread_elements()[e];
            continue;
        }
        const float2 end = close_row(a, t.m[m], l, FB_HAS(SINKS) ? sinks[head_of(w, r)] : -INFINITY);
        if (first && FB_HAS(LSE))
            lse[stat_of(a, w, w.head, r)] = end.x;
        device element *to = out + query_row(a.out, w, r);
        FB_UNROLL for (int n = 0; n < FB_NV; n++) {
            sums o = t.o[m * FB_NV + n];
            store_pair(to, column + n * 8, a.head_dim_v, l == 0 ? 0 : o.thread_elements()[0] * end.y,
                       l == 0 ? 0 : o.thread_elements()[1] * end.y, a.flags & FB_OUT16, false);
        }
    }
}

[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_forward(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]], const device element *q [[buffer(FB_AT_Q)]],
                       const device element *k [[buffer(FB_AT_K)]], const device element *v [[buffer(FB_AT_V)]],
                       device element *out [[buffer(FB_AT_OUT)]], device float *lse [[buffer(FB_AT_LSE)]],
                       const device element *bias [[buffer(FB_AT_BIAS)]],
                       const device uchar *mask [[buffer(FB_AT_MASK)]],
                       const device uchar *block_mask [[buffer(FB_AT_BLOCK_MASK)]],
                       const device float *sinks [[buffer(FB_AT_SINKS)]], const device int *cu_q [[buffer(FB_AT_CU_Q)]],
                       const device int *cu_k [[buffer(FB_AT_CU_K)]], const device int *lens_q [[buffer(FB_AT_LENS_Q)]],
                       const device int *lens_k [[buffer(FB_AT_LENS_K)]],
                       device float *partial [[buffer(FB_AT_PARTIAL)]],
                       device float *partial_lse [[buffer(FB_AT_PARTIAL_LSE)]],
                       threadgroup uchar *memory [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                       uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]]) {
    const place p = {group, thread_, lane, simd};
    work w;
    if (!work_find(a, {cu_q, cu_k, lens_q, lens_k}, (uint)a.first + group.x, FB_BM, false, w))
        return;
    const inputs t = {query_rows(q, a.q, w, w.head), key_rows(k, a.k, w), key_rows(v, a.v, w), {bias, mask, block_mask},
                      (threadgroup element *)memory};
    const int2 tiles = key_tiles(a, t.x, w, group.y);
    state o;
    for (bool careful = false;; careful = true) {
        attend(a, t, w, o, tiles, careful, p);
        if (careful || !any_of_all(any_nan(o.o, FB_MI * FB_NV), memory, p))
            break;
    }
    write_rows(a, w, o, out, lse, sinks, partial, partial_lse, p);
}
