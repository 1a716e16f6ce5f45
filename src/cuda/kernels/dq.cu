// dQ of FB_BM query rows; the keys pass by in tiles of FB_BN, two of them in turn.
//
//     for each tile of keys that some row may see:
//         S = Q K^T   P = 2^(S - LSE)   dP = dO V^T   dS = P (dP - delta)   dQ += dS K
//     dQ = scale dQ
//
// Warps: FB_WM groups of MI x 16 rows, times FB_WN slabs of dQ's columns, times FB_WK shares of a tile's keys.
// Shared memory: Q [BM][D], dO [BM][DV], and FB_BUFFERS times K [BN][D], V [BN][DV]: one is used while the other
// arrives.
// With args.chunks > 1 a block has one chunk of the keys and leaves its sum to join.cu.
#include "problem.cuh"

#define NK (FB_BN / FB_WK)
#define NC (FB_D / FB_WN)
#define ROWS_WM (FB_MI * 16)
#define KV_BYTES (FB_TILE_BYTES(FB_BN, FB_D) + FB_TILE_BYTES(FB_BN, FB_DV))

// S and dP become dS, in place of S. row: the warp's first, k: its first key.
FB_FN void gradient(const fb__args *a, const work *w, float (*s)[4], float (*dp)[4], float (*lse)[2], float (*rest)[2],
                    float (*delta)[2], int row, int k, bool covered, keep *cells) {
#pragma unroll
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float top = lse[m][half], low = rest[m][half], sum = delta[m][half];
#if FB_PLAIN
            if (covered) {
#pragma unroll
                for (int n = 0; n < NK / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float *cell = &s[m * (NK / 8) + n][2 * half + e];
                        *cell = probability(*cell, a->scale_log2, top, low) *
                                (dp[m * (NK / 8) + n][2 * half + e] - sum);
                    }
                continue;
            }
#endif
            int r = row + m * 16 + half * 8 + FB_LANE / 4, c = FB_LANE % 4 * 2, lo, hi;
            keys_of_row(w, r, k, &lo, &hi);
#if !FB_PLAIN
            int i = query_of(w, r);
            extras x = extras_of(a, w->b, head_of(w, r));
#endif
#pragma unroll
            for (int n = 0; n < NK / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int j = n * 8 + c + e;
                    float *cell = &s[m * (NK / 8) + n][2 * half + e], score = -FB_INFINITY, slope = 1;
                    if (j >= lo && j < hi) {
#if FB_PLAIN
                        score = *cell;
#else
                        score = score_of(a, &x, *cell, i, k + j, &slope);
#endif
                    }
                    bool counts = score != -FB_INFINITY;
                    float factor = FB_PLAIN ? a->scale_log2 : 1, up = dp[m * (NK / 8) + n][2 * half + e] - sum;
                    *cell = counts ? probability(score, factor, top, low) * up * slope : 0;
                    keep_cell(cells, m, n, 2 * half + e, counts);
                }
        }
}

#if FB_WK > 1
// The shares of a tile's keys, in order, into the first warp of each group.
FB_FN void join_warps(float (*dq)[4], float *room, int wk, int group) {
    const int VALUES = FB_MI * (NC / 8) * 4;
    float *mine = room + (group * (FB_WK - 1) + wk - 1) * VALUES * 32 + FB_LANE;
    __syncthreads();
    if (wk) {
#pragma unroll
        for (int n = 0; n < FB_MI * (NC / 8); n++)
#pragma unroll
            for (int e = 0; e < 4; e++, mine += 32)
                *mine = dq[n][e];
    }
    __syncthreads();
    if (wk)
        return;
#pragma unroll 1
    for (int other = 0; other < FB_WK - 1; other++) {
        const float *from = room + (group * (FB_WK - 1) + other) * VALUES * 32 + FB_LANE;
#pragma unroll
        for (int n = 0; n < FB_MI * (NC / 8); n++)
#pragma unroll
            for (int e = 0; e < 4; e++, from += 32)
                dq[n][e] += *from;
    }
}
#endif

FB_FN void write_rows(const fb__args *a, const work *w, float (*dq)[4], int row, int wn) {
#pragma unroll
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = row + m * 16 + half * 8 + FB_LANE / 4;
            if (r >= w->rows)
                continue;
            if (a->chunks > 1) {
                fb_i64 at = (blockIdx.y * a->batch + w->b) * a->heads_kv + w->kv;
                float *to = a->partial + (at * a->group * a->len_q + r) * FB_D + wn * NC + FB_LANE % 4 * 2;
#pragma unroll
                for (int n = 0; n < NC / 8; n++)
                    *(float2 *)(to + n * 8) =
                        make_float2(dq[m * (NC / 8) + n][2 * half], dq[m * (NC / 8) + n][2 * half + 1]);
                continue;
            }
            element *to = (element *)row_at(query_rows(a->dq, w), r);
#pragma unroll
            for (int n = 0; n < NC / 8; n++)
                store_pair(to, wn * NC + n * 8 + FB_LANE % 4 * 2, a->head_dim,
                           dq[m * (NC / 8) + n][2 * half] * a->scale, dq[m * (NC / 8) + n][2 * half + 1] * a->scale,
                           a->flags & FB_DQ_PAIRS, a->flags & FB_ADDS);
        }
}

FB_FN void load(const fb__args *a, rows keys, rows values, int len_k, fb_u32 to, int k0) {
    tile_load(to, keys, k0, len_k, a->head_dim, a->flags & FB_K16, FB_BN, FB_D);
    tile_load(to + FB_TILE_BYTES(FB_BN, FB_D), values, k0, len_k, a->head_dim_v, a->flags & FB_V16, FB_BN, FB_DV);
}

// All tiles of the block. With `careful` infinities and NaN of K reach only the rows that see them.
FB_FN void attend(const fb__args *a, const work *w, float (*dq)[4], fb_u32 memory, int tile, int end, bool careful) {
    const int wk = FB_WARP % FB_WK, wn = FB_WARP / FB_WK % FB_WN, wm = FB_WARP / FB_WK / FB_WN;
    const int row = w->first + wm * ROWS_WM, len_k = w->len_k;
    const rows keys = key_rows(a->k, w), values = key_rows(a->v, w); // what every tile wants stays in registers
    const whole all_count = whole_keys(w, w->first, FB_BM);
    const fb_u32 Q = memory, dO = Q + FB_TILE_BYTES(FB_BM, FB_D), KV = dO + FB_TILE_BYTES(FB_BM, FB_DV);
    float lse[FB_MI][2], rest[FB_MI][2], delta[FB_MI][2];

    clear(dq, FB_MI * (NC / 8));
    if (tile >= end)
        return;
    tile_load(Q, query_rows(a->q, w), w->first, w->rows, a->head_dim, a->flags & FB_Q16, FB_BM, FB_D);
    tile_load(dO, query_rows(a->dout, w), w->first, w->rows, a->head_dim_v, a->flags & FB_DOUT16, FB_BM, FB_DV);
    load(a, keys, values, len_k, KV, tile * FB_BN);
    copies_commit();
#pragma unroll
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = row + m * 16 + half * 8 + FB_LANE / 4;
            fb_i64 at = stat_at(a, w, r < w->rows ? r : 0);
            lse[m][half] = to_log2(a->lse[at]), rest[m][half] = to_log2_rest(a->lse[at]), delta[m][half] = a->delta[at];
            if (lse[m][half] == -FB_INFINITY) // nothing comes from this row
                lse[m][half] = FB_INFINITY;
        }
    for (int buffer = 0; tile < end; buffer ^= FB_BUFFERS - 1) {
        const int k0 = tile * FB_BN, next = live_keys(a, w, tile + 1, end);
        const fb_u32 K = KV + buffer * KV_BYTES, V = K + FB_TILE_BYTES(FB_BN, FB_D);
        copies_wait(0);
        __syncthreads();
        if (FB_BUFFERS == 2 && next < end)
            load(a, keys, values, len_k, KV + (buffer ^ 1) * KV_BYTES, next * FB_BN);
        copies_commit();

        float s[FB_MI * (NK / 8)][4], dp[FB_MI * (NK / 8)][4];
        keep cells;
        tile_scores(careful, s, Q + wm * ROWS_WM * FB_ROW_BYTES(FB_D) + a_lane(FB_D),
                    K + wk * NK * FB_ROW_BYTES(FB_D) + b_lane(FB_D), FB_MI, NK, FB_D);
        tile_scores(careful, dp, dO + wm * ROWS_WM * FB_ROW_BYTES(FB_DV) + a_lane(FB_DV),
                    V + wk * NK * FB_ROW_BYTES(FB_DV) + b_lane(FB_DV), FB_MI, NK, FB_DV);
        gradient(a, w, s, dp, lse, rest, delta, row, k0 + wk * NK, !careful && covers(all_count, k0, FB_BN), &cells);

        fb_u32 p[FB_MI * (NK / FB_STEP)][4], b = K + wk * NK * FB_ROW_BYTES(FB_D) + wn * NC * FB_SIZE + t_lane(FB_D);
#pragma unroll
        for (int m = 0; m < FB_MI; m++)
            to_steps(p + m * (NK / FB_STEP), s + m * (NK / 8), NK);
        if (careful) {
            add_specials(dq, &cells, false, b, FB_MI, NK, NC, FB_D);
            __syncthreads();
            tile_clean(K, FB_BN, FB_D);
            __syncthreads();
        }
        accumulate(dq, p, b, FB_MI, NK, NC, FB_D);
        if (FB_BUFFERS == 1 && next < end) {
            __syncthreads();
            load(a, keys, values, len_k, KV, next * FB_BN);
            copies_commit();
        }
        tile = next;
    }
    copies_wait(0);
}

#if FB_TWICE
// Not inlined: its registers are its own.
FB_APART void attend_carefully(const fb__args *a, const work *w, float (*to)[4], fb_u32 memory, int tile, int end) {
    float dq[FB_MI * (NC / 8)][4];
    attend(a, w, dq, memory, tile, end, true);
    copy(to, dq, FB_MI * (NC / 8));
}
#endif

extern "C" __global__ void __launch_bounds__(FB_THREADS, FB_BLOCKS) fb_dq(const __grid_constant__ fb__args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    const work *w = work_shared(&a, FB_BM, false);
    if (!w)
        return;
    int tile, end;
    key_tiles(&a, w, &tile, &end);
    float dq[FB_MI * (NC / 8)][4];
#if FB_TWICE
    attend(&a, w, dq, smem_address(memory), tile, end, false);
    if (__syncthreads_or(any_nan(dq, FB_MI * (NC / 8)))) {
        float again[FB_MI * (NC / 8)][4];
        attend_carefully(&a, w, again, smem_address(memory), tile, end);
        copy(dq, again, FB_MI * (NC / 8));
    }
#else
    bool careful = false;
#pragma unroll 1
    do {
        attend(&a, w, dq, smem_address(memory), tile, end, careful);
        careful = !careful && __syncthreads_or(any_nan(dq, FB_MI * (NC / 8)));
    } while (careful);
#endif
    const int wn = FB_WARP / FB_WK % FB_WN, wm = FB_WARP / FB_WK / FB_WN;
#if FB_WK > 1
    join_warps(dq, (float *)memory, FB_WARP % FB_WK, wm * FB_WN + wn);
    if (FB_WARP % FB_WK)
        return;
#endif
    write_rows(&a, w, dq, w->first + wm * ROWS_WM, wn);
}
