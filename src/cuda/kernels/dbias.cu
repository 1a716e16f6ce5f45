// dbias: a block has FB_BM x FB_BN cells of it, and sums dS (before softcap's slope) over all batches, heads, rows and
// columns that share them, in a fixed order. S and dP are made once more, so nothing of size Lq x Lk is kept and
// nothing is added up between blocks.
//
// Warps: FB_WM groups of 16 rows. Shared memory: Q [BM][D], K [BN][D], dO [BM][DV], V [BN][DV]; in the end the sums.
#include "problem.cuh"

#define NK FB_BN

// Adds the cells of one tile. row: the warp's first.
FB_FN void add_cells(const fb__args *a, const work *w, float (*sum)[4], float (*s)[4], float (*dp)[4], int row,
                     int k0) {
    extras x = extras_of(a, w->b, w->head);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int r = row + half * 8 + FB_LANE / 4, lo, hi;
        keys_of_row(w, r, k0, &lo, &hi);
        if (lo >= hi)
            continue;
        fb_i64 at = stat_at(a, w, r);
        float top = to_log2(a->lse[at]), rest = to_log2_rest(a->lse[at]), delta = a->delta[at];
        if (top == -FB_INFINITY)
            continue;
#pragma unroll
        for (int n = 0; n < NK / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                int j = n * 8 + FB_LANE % 4 * 2 + e;
                if (j < lo || j >= hi)
                    continue;
                float slope, score = score_of(a, &x, s[n][2 * half + e], r, k0 + j, &slope);
                if (score != -FB_INFINITY)
                    sum[n][2 * half + e] += probability(score, 1, top, rest) * (dp[n][2 * half + e] - delta);
            }
    }
}

FB_FN void add_tile(const fb__args *a, const work *w, float (*sum)[4], fb_u32 memory, int q0, int k0) {
    const fb_u32 Q = memory, K = Q + FB_TILE_BYTES(FB_BM, FB_D), dO = K + FB_TILE_BYTES(FB_BN, FB_D),
                 V = dO + FB_TILE_BYTES(FB_BM, FB_DV);
    const int wm = FB_WARP;
    float s[NK / 8][4], dp[NK / 8][4];
    __syncthreads();
    tile_load(Q, query_rows(a->q, w), q0, w->len_q, a->head_dim, a->flags & FB_Q16, FB_BM, FB_D);
    tile_load(K, key_rows(a->k, w), k0, w->len_k, a->head_dim, a->flags & FB_K16, FB_BN, FB_D);
    tile_load(dO, query_rows(a->dout, w), q0, w->len_q, a->head_dim_v, a->flags & FB_DOUT16, FB_BM, FB_DV);
    tile_load(V, key_rows(a->v, w), k0, w->len_k, a->head_dim_v, a->flags & FB_V16, FB_BN, FB_DV);
    copies_commit();
    copies_wait(0);
    __syncthreads();
    scores_rolled<FAST>(s, Q + wm * 16 * FB_ROW_BYTES(FB_D) + a_lane(FB_D), K + b_lane(FB_D), 1, NK, FB_D);
    scores_rolled<FAST>(dp, dO + wm * 16 * FB_ROW_BYTES(FB_DV) + a_lane(FB_DV), V + b_lane(FB_DV), 1, NK, FB_DV);
    add_cells(a, w, sum, s, dp, q0 + wm * 16, k0);
}

// All tiles of one head that share this block's cells.
FB_FN void add_head(const fb__args *a, const work *w, float (*sum)[4], fb_u32 memory, int q_tile, int k_tile) {
    int q_lo = q_tile * FB_BM, q_hi = q_lo + FB_BM, k_lo = k_tile * FB_BN, k_hi = k_lo + FB_BN;
    if (a->bias_rows == 1)
        q_lo = 0, q_hi = w->len_q;
    if (!(a->flags & FB_BIAS_COLS))
        k_lo = 0, k_hi = w->len_k;
    for (int q0 = q_lo; q0 < q_hi; q0 += FB_BM) {
        fb__range seen = fb__band_keys_of(w->band, q0, q0 + FB_BM);
        for (int k0 = k_lo; k0 < k_hi; k0 += FB_BN)
            if (k0 < seen.hi && k0 + FB_BN > seen.lo)
                add_tile(a, w, sum, memory, q0, k0);
    }
}

FB_FN void write_cell(const fb__args *a, fb_i64 b, fb_i64 h, int i, int j, float x) {
    element *to = (element *)a->dbias.at + b * a->dbias.batch + h * a->dbias.head + i * a->dbias.row + j;
    *to = to_element(a->flags & FB_ADDS ? to_float(*to) + x : x);
}

extern "C" __global__ void __launch_bounds__(FB_THREADS, FB_BLOCKS) fb_dbias(const __grid_constant__ fb__args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    const bool one_row = a.bias_rows == 1, one_col = !(a.flags & FB_BIAS_COLS);
    const int rows = one_row ? 1 : (int)a.len_q, cols = one_col ? 1 : (int)a.len_k;
    fb_i64 x = blockIdx.x, across = (cols + FB_BN - 1) / FB_BN, down = (rows + FB_BM - 1) / FB_BM;
    const int k_tile = (int)(x % across), q_tile = (int)(x / across % down);
    x /= across * down;
    const fb_i64 h = x % a.bias_heads, b = x / a.bias_heads;

    float sum[NK / 8][4];
    clear<FAST>(sum, NK / 8);
    const bool all_b = a.bias_batches == 1, all_h = a.bias_heads == 1;
    for (fb_i64 batch = all_b ? 0 : b; batch < (all_b ? a.batch : b + 1); batch++)
        for (fb_i64 head = all_h ? 0 : h; head < (all_h ? a.heads_q : h + 1); head++) {
            work w;
            work_sequence(&a, batch, &w);
            w.head = (int)head, w.kv = (int)(head / a.group);
            add_head(&a, &w, sum, smem_address(memory), q_tile, k_tile);
        }

    float *room = (float *)memory;
    __syncthreads();
#pragma unroll
    for (int n = 0; n < NK / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            room[(FB_WARP * 16 + e / 2 * 8 + FB_LANE / 4) * FB_BN + n * 8 + FB_LANE % 4 * 2 + e % 2] = sum[n][e];
    __syncthreads();
    if (one_row && one_col) {
        float all = 0;
        if (threadIdx.x == 0) {
            for (int n = 0; n < FB_BM * FB_BN; n++)
                all += room[n];
            write_cell(&a, b, h, 0, 0, all);
        }
    } else if (one_row) {
        for (int j = threadIdx.x; j < FB_BN && k_tile * FB_BN + j < cols; j += FB_THREADS) {
            float all = 0;
            for (int i = 0; i < FB_BM; i++)
                all += room[i * FB_BN + j];
            write_cell(&a, b, h, 0, k_tile * FB_BN + j, all);
        }
    } else if (one_col) {
        for (int i = threadIdx.x; i < FB_BM && q_tile * FB_BM + i < rows; i += FB_THREADS) {
            float all = 0;
            for (int j = 0; j < FB_BN; j++)
                all += room[i * FB_BN + j];
            write_cell(&a, b, h, q_tile * FB_BM + i, 0, all);
        }
    } else
        for (int n = threadIdx.x; n < FB_BM * FB_BN; n += FB_THREADS) {
            int i = q_tile * FB_BM + n / FB_BN, j = k_tile * FB_BN + n % FB_BN;
            if (i < rows && j < cols)
                write_cell(&a, b, h, i, j, room[n]);
        }
}
