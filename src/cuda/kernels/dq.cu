// dQ of FB_BM query rows; the keys pass by in tiles of FB_BN, two of them in turn.
//
//     for each tile of keys that some row may see:
//         S = Q K^T   P = 2^(S - LSE)   dP = dO V^T   dS = P (dP - delta)   dQ += dS K
//     dQ = scale dQ
//
// Warps: FB_WM groups of MI x 16 rows, times FB_WN slabs of dQ's columns, times FB_WK shares of a tile's keys.
// Shared memory: Q [BM][D], dO [BM][DV], FB_BUFFERS times K [BN][D], V [BN][DV] (one is used while the other arrives),
// streams, and the rows' LSE in base 2, delta, and what is left of LSE [BM] each.
// With args.chunks > 1 a block has one chunk of the keys and leaves its sum to join.cu.
#include "stats.cuh"

#define NK (FB_BN / FB_WK)
#define NC (FB_D / FB_WN)
#define ROWS_WM (FB_MI * 16)
#define KV_BYTES (FB_TILE_BYTES(FB_BN, FB_D) + FB_TILE_BYTES(FB_BN, FB_DV))
#define STREAMS_AT (FB_TILE_BYTES(FB_BM, FB_D) + FB_TILE_BYTES(FB_BM, FB_DV) + FB_BUFFERS * KV_BYTES)
#define STATS_AT (STREAMS_AT + FB_STREAM_BYTES)

// S and dP become dS, in place of S. stats: of the thread's first row; row: the warp's first, k: its first key.
template <int U>
FB_FN void gradient(const fb__args *a, const work *w, float (*s)[4], float (*dp)[4], const float *stats, int row, int k,
                    bool covered, keep *cells) {
#pragma unroll U
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float *at = stats + m * 16 + half * 8;
            const float top = at[0], sum = at[FB_BM], low = FB_TYPE == FB_TYPE_F32 ? at[2 * FB_BM] : 0;
#if FB_PLAIN
            if (covered) {
#pragma unroll U
                for (int n = 0; n < NK / 8; n++)
#pragma unroll
                    for (int e = 0; e < 2; e++) {
                        float *cell = &s[m * (NK / 8) + n][2 * half + e];
                        *cell =
                            probability(*cell, a->scale_log2, top, low) * (dp[m * (NK / 8) + n][2 * half + e] - sum);
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
#pragma unroll U
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
                    if (U == SMALL)
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

// A warp's rows to where they belong, to the room, or, with chunks, to the workspace.
FB_FN void leave(const fb__args *a, const work *w, float (*dq)[4], float *room, bool straight, int row, int wn) {
#pragma unroll
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = row + m * 16 + half * 8 + FB_LANE / 4;
            float(*c)[4] = dq + m * (NC / 8);
            if (r >= w->rows)
                continue;
            if (FB_STACK && a->chunks > 1) {
                fb_i64 at = (blockIdx.y * a->batch + w->b) * a->heads_kv + w->kv;
                float *to = a->partial + (at * a->group * a->len_q + r) * FB_D + wn * NC + FB_LANE % 4 * 2;
#pragma unroll
                for (int n = 0; n < NC / 8; n++)
                    *(float2 *)(to + n * 8) = make_float2(c[n][2 * half], c[n][2 * half + 1]);
                continue;
            }
            const piece_of_row x = {c, half, a->scale, false};
            if (straight)
                store_row((element *)row_at(query_rows(a->dq, w), r), x, wn * NC, a->head_dim, NC);
            else
                stage_row(room, x, r - w->first, wn * NC, NC, FB_D);
        }
}

FB_FN void load(const fb__args *a, const work *w, const streams *all, fb_u32 to, int k0) {
    const streams from = !FB_STREAMS ? streams() : all[threadIdx.x];
    load_keys(a, w, from, w->bound, to, k0);
    load_values(a, w, from, w->bound, to + FB_TILE_BYTES(FB_BN, FB_D), k0);
}

// Of the block's rows: to shared memory, and by the first chunk of keys to the workspace.
FB_FN void make_stats(const fb__args *a, const work *w, float *stats) {
    stat_products(a, w, stats, stats + FB_BM);
    __syncthreads();
    for (int r = threadIdx.x; r < FB_BM; r += FB_THREADS) {
        stat s = {FB_INFINITY, 0, 0};
        if (w->first + r < w->rows) {
            const fb_i64 at = stat_at(a, w, w->first + r);
            s = stat_close(a, head_of(w, w->first + r), at, stats[r], stats[FB_BM + r] == 0);
            if (blockIdx.y == 0)
                stat_store(a, at, s);
        }
        stats[r] = s.log2, stats[FB_BM + r] = s.delta, stats[2 * FB_BM + r] = s.rest;
    }
}

// All tiles of the block. The careful loop, SMALL, lets infinities and NaN of K reach only the rows that see them.
template <int U>
FB_FN void attend(const fb__args *a, const work *w, float (*dq)[4], unsigned char *memory, int tile, int end) {
    const bool CAREFUL = U == SMALL;
    const int wk = FB_WARP % FB_WK, wn = FB_WARP / FB_WK % FB_WN, wm = FB_WARP / FB_WK / FB_WN;
    const int row = w->first + wm * ROWS_WM;
    const fb_u32 Q = smem_address(memory), dO = Q + FB_TILE_BYTES(FB_BM, FB_D), KV = dO + FB_TILE_BYTES(FB_BM, FB_DV);
    const streams *all = (const streams *)(memory + STREAMS_AT);
    const float *stats = (const float *)(memory + STATS_AT) + wm * ROWS_WM + FB_LANE / 4;

    clear<U>(dq, FB_MI * (NC / 8));
    if (tile < end) {
        tile_load(Q, query_rows(a->q, w), w->first, w->rows, a->head_dim, a->flags & FB_Q16, FB_BM, FB_D);
        tile_load(dO, query_rows(a->dout, w), w->first, w->rows, a->head_dim_v, a->flags & FB_DOUT16, FB_BM, FB_DV);
        load(a, w, all, KV, tile * FB_BN);
    }
    copies_commit();
    if (!CAREFUL)
        make_stats(a, w, (float *)(memory + STATS_AT));
    for (int buffer = 0; tile < end; buffer ^= FB_BUFFERS - 1) {
        const int k0 = tile * FB_BN, next = live_keys(a, w, tile + 1, end);
        const fb_u32 K = KV + buffer * KV_BYTES, V = K + FB_TILE_BYTES(FB_BN, FB_D);
        copies_wait(0);
        __syncthreads();
        float s[FB_MI * (NK / 8)][4], dp[FB_MI * (NK / 8)][4];
        keep cells;
        tile_scores<U>(s, Q + wm * ROWS_WM * FB_ROW_BYTES(FB_D) + a_lane(FB_D),
                       K + wk * NK * FB_ROW_BYTES(FB_D) + b_lane(FB_D), FB_MI, NK, FB_D);
        if (FB_BUFFERS == 2 && next < end) // here, as the addresses come for nothing beside the product
            load(a, w, all, KV + (buffer ^ 1) * KV_BYTES, next * FB_BN);
        copies_commit();
        tile_scores<U>(dp, dO + wm * ROWS_WM * FB_ROW_BYTES(FB_DV) + a_lane(FB_DV),
                       V + wk * NK * FB_ROW_BYTES(FB_DV) + b_lane(FB_DV), FB_MI, NK, FB_DV);
        gradient<U>(a, w, s, dp, stats, row, k0 + wk * NK, !CAREFUL && covers(w->all, k0, FB_BN), &cells);

        fb_u32 p[FB_MI * (NK / FB_STEP)][4], b = K + wk * NK * FB_ROW_BYTES(FB_D) + wn * NC * FB_SIZE + t_lane(FB_D);
#pragma unroll U
        for (int m = 0; m < FB_MI; m++)
            to_steps<U>(p + m * (NK / FB_STEP), s + m * (NK / 8), NK);
        if (CAREFUL) {
            add_specials(dq, &cells, false, b, FB_MI, NK, NC, FB_D);
            __syncthreads();
            tile_clean(K, FB_BN, FB_D);
            __syncthreads();
        }
        tile_accumulate<U>(dq, p, b, FB_MI, NK, NC, FB_D);
        if (FB_BUFFERS == 1 && next < end) {
            __syncthreads();
            load(a, w, all, KV, next * FB_BN);
            copies_commit();
        }
        tile = next;
    }
    copies_wait(0);
}

// Not inlined: its registers are its own.
FB_APART void attend_carefully(const fb__args *a, const work *w, float (*to)[4], unsigned char *memory, int tile,
                               int end) {
    attend<SMALL>(a, w, to, memory, tile, end);
}

extern "C" __global__ void __launch_bounds__(FB_THREADS, FB_BLOCKS) fb_dq(const __grid_constant__ fb__args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    const work *w = work_shared(&a, FB_BM, false);
    if (!w)
        return;
    int tile, end;
    key_tiles(&a, w, &tile, &end);
    if (FB_STREAMS)
        ((streams *)(memory + STREAMS_AT))[threadIdx.x] = streams_of(key_rows(a.k, w), key_rows(a.v, w));
    float dq[FB_MI * (NC / 8)][4];
    attend<FAST>(&a, w, dq, memory, tile, end);
    if (__syncthreads_or(any_nan(dq, FB_MI * (NC / 8)))) {
        float again[FB_MI * (NC / 8)][4];
        attend_carefully(&a, w, again, memory, tile, end);
        copy(dq, again, FB_MI * (NC / 8));
    }
    const int wn = FB_WARP / FB_WK % FB_WN, wm = FB_WARP / FB_WK / FB_WN;
#if FB_WK > 1
    join_warps(dq, (float *)memory, FB_WARP % FB_WK, wm * FB_WN + wn);
#endif
    const bool straight = stores_straight(a.head_dim, a.flags & FB_DQ16, a.flags & FB_ADDS);
    __syncthreads(); // the tiles are read, and make room
    if (FB_WARP % FB_WK == 0)
        leave(&a, w, dq, (float *)memory, straight, w->first + wm * ROWS_WM, wn);
    if (!straight && (!FB_STACK || a.chunks == 1))
        write_staged((const float *)memory, query_rows(a.dq, w), w->first, w->rows, a.head_dim, a.flags & FB_ADDS,
                     FB_D);
}
