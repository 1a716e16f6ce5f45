// dK and dV of FB_BM keys; the query rows of all heads of their group pass by in tiles of FB_BN, two in turn.
//
//     for each head of the group, for each tile of queries that may see some key:
//         S' = K Q^T   P' = 2^(S' - LSE)   dV += P' dO   dP' = V dO^T   dS' = P' (dP' - delta)   dK += dS' Q
//     dK = scale dK
//
// Everything is transposed (rows are keys), so that P' and dS' are in registers where the products want them, and a
// key belongs to one block: nothing is added up between blocks, and the order of sums is fixed.
// Warps: FB_WM groups of MI x 16 keys, times FB_WN slabs of the columns of dK and dV.
// Shared memory: K [BM][D], V [BM][DV], and FB_BUFFERS times Q [BN][D], dO [BN][DV], LSE [BN], delta [BN],
// and what is left of LSE in base 2 [BN].
#include "problem.cuh"

#define NC (FB_D / FB_WN)
#define NCV (FB_DV / FB_WN)
#define ROWS_WM (FB_MI * 16)
#define Q_BYTES FB_TILE_BYTES(FB_BN, FB_D)
#define TILE_BYTES (Q_BYTES + FB_TILE_BYTES(FB_BN, FB_DV) + 12 * FB_BN)

// S and dP, transposed, become P and dS. row: the warp's first key, q0: the tile's first query row.
FB_FN void gradient(const fb__args *a, const work *w, float (*s)[4], float (*dp)[4], const float *lse, int head,
                    int row, int q0, bool covered, keep *cells) {
    const float *delta = lse + FB_BN, *rest = delta + FB_BN;
    const int c = FB_LANE % 4 * 2;
#if FB_PLAIN
    if (covered) {
#pragma unroll
        for (int n = 0; n < FB_BN / 8; n++) {
            float2 top = *(const float2 *)(lse + n * 8 + c), sum = *(const float2 *)(delta + n * 8 + c);
            float2 low = *(const float2 *)(rest + n * 8 + c);
#pragma unroll
            for (int m = 0; m < FB_MI; m++)
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    float *p = &s[m * (FB_BN / 8) + n][e], *ds = &dp[m * (FB_BN / 8) + n][e];
                    *p = probability(*p, a->scale_log2, e % 2 ? top.y : top.x, e % 2 ? low.y : low.x);
                    *ds = *p * (*ds - (e % 2 ? sum.y : sum.x));
                }
        }
        return;
    }
#endif
#pragma unroll
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int j = row + m * 16 + half * 8 + FB_LANE / 4, lo, hi;
            queries_of_key(w, j, FB_STACK ? 0 : q0, &lo, &hi);
#pragma unroll
            for (int n = 0; n < FB_BN / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    int col = n * 8 + c + e, r = q0 + col, i = query_of(w, r), at = FB_STACK ? i : col;
                    float *p = &s[m * (FB_BN / 8) + n][2 * half + e], *ds = &dp[m * (FB_BN / 8) + n][2 * half + e];
                    float score = -FB_INFINITY, slope = 1;
                    if (at >= lo && at < hi && r < w->rows) {
#if FB_PLAIN
                        score = *p;
#else
                        extras x = extras_of(a, w->b, head + head_of(w, r) - w->head);
                        score = score_of(a, &x, *p, i, j, &slope);
#endif
                    }
                    bool counts = score != -FB_INFINITY;
                    *p = counts ? probability(score, FB_PLAIN ? a->scale_log2 : 1, lse[col], rest[col]) : 0;
                    *ds = counts ? *p * (*ds - delta[col]) * slope : 0;
                    keep_cell(cells, m, n, 2 * half + e, counts);
                }
        }
}

FB_FN void load(const fb__args *a, const work *w, int head, unsigned char *to, int q0) {
    const fb_u32 Q = smem_address(to);
    float *lse = (float *)(to + Q_BYTES + FB_TILE_BYTES(FB_BN, FB_DV));
    tile_load(Q, query_rows_of(a->q, w, head), q0, w->rows, a->head_dim, a->flags & FB_Q16, FB_BN, FB_D);
    tile_load(Q + Q_BYTES, query_rows_of(a->dout, w, head), q0, w->rows, a->head_dim_v, a->flags & FB_DOUT16, FB_BN,
              FB_DV);
    for (int r = threadIdx.x; r < FB_BN; r += FB_THREADS) {
        bool exists = q0 + r < w->rows;
        fb_i64 at = stat_of(a, w, head, exists ? q0 + r : 0);
        float top = exists ? to_log2(a->lse[at]) : 0;
        lse[r] = top == -FB_INFINITY ? FB_INFINITY : top; // nothing comes from an empty row
        lse[FB_BN + r] = exists ? a->delta[at] : 0;
        lse[2 * FB_BN + r] = exists ? to_log2_rest(a->lse[at]) : 0;
    }
}

FB_FN void write_rows(const fb__args *a, const work *w, fb__view to, float (*x)[4], int row, int first, int columns,
                      float factor, bool pairs, const int N) {
#pragma unroll
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = row + m * 16 + half * 8 + FB_LANE / 4;
            if (r >= w->len_k)
                continue;
            rows t = key_rows(to, w);
            element *at = (element *)t.at + r * t.row;
#pragma unroll
            for (int n = 0; n < N / 8; n++)
                store_pair(at, first + n * 8 + FB_LANE % 4 * 2, columns, x[m * (N / 8) + n][2 * half] * factor,
                           x[m * (N / 8) + n][2 * half + 1] * factor, pairs, a->flags & FB_ADDS);
        }
}

// Which tile of query rows comes next, over the heads of the group one after the other.
typedef struct step {
    int head, tile;
} step;

FB_FN step live(const fb__args *a, const work *w, step at, int begin, int end) {
    const int heads = FB_STACK ? 1 : (int)a->group;
    for (;; at.tile++) {
        if (at.tile >= end)
            at.head++, at.tile = begin;
        if (at.head >= heads || begin >= end) {
            at.head = heads;
            return at;
        }
#if FB_OPTIONS & FB_BLOCKED && !FB_STACK
        extras x = extras_of(a, w->b, w->kv * a->group + at.head);
        if (blocks_state(a, x.blocks, at.tile * FB_BN, clamp((at.tile + 1) * FB_BN, 0, w->len_q), w->first,
                         clamp(w->first + FB_BM, 0, w->len_k)) == 0)
            continue;
#endif
        return at;
    }
}

typedef struct sums {
    float dk[FB_MI * (NC / 8)][4], dv[FB_MI * (NCV / 8)][4];
} sums;

// All tiles of the block. With `careful` infinities and NaN of Q and dO reach only the keys that they see.
FB_FN void attend(const fb__args *a, const work *w, sums *t, unsigned char *memory, step at, int begin, int end,
                  bool careful) {
    const int wn = FB_WARP % FB_WN, wm = FB_WARP / FB_WN, row = w->first + wm * ROWS_WM;
    const int heads = FB_STACK ? 1 : (int)a->group;
    const whole all_count = whole_queries(w, w->first, FB_BM);
    const fb_u32 K = smem_address(memory), V = K + FB_TILE_BYTES(FB_BM, FB_D);
    unsigned char *tiles = memory + FB_TILE_BYTES(FB_BM, FB_D) + FB_TILE_BYTES(FB_BM, FB_DV);

    clear(t->dk, FB_MI * (NC / 8));
    clear(t->dv, FB_MI * (NCV / 8));
    if (at.head >= heads)
        return;
    tile_load(K, key_rows(a->k, w), w->first, w->len_k, a->head_dim, a->flags & FB_K16, FB_BM, FB_D);
    tile_load(V, key_rows(a->v, w), w->first, w->len_k, a->head_dim_v, a->flags & FB_V16, FB_BM, FB_DV);
    load(a, w, w->head + at.head, tiles, at.tile * FB_BN);
    copies_commit();
    for (int buffer = 0; at.head < heads; buffer ^= FB_BUFFERS - 1) {
        step next = {at.head, at.tile + 1};
        next = live(a, w, next, begin, end);
        copies_wait(0);
        __syncthreads();
        if (FB_BUFFERS == 2 && next.head < heads)
            load(a, w, w->head + next.head, tiles + (buffer ^ 1) * TILE_BYTES, next.tile * FB_BN);
        copies_commit();

        const fb_u32 Q = smem_address(tiles + buffer * TILE_BYTES), dO = Q + Q_BYTES;
        const float *lse = (const float *)(tiles + buffer * TILE_BYTES + Q_BYTES + FB_TILE_BYTES(FB_BN, FB_DV));
        const int q0 = at.tile * FB_BN;
        float s[FB_MI * (FB_BN / 8)][4], dp[FB_MI * (FB_BN / 8)][4];
        keep cells;
        tile_scores(careful, s, K + wm * ROWS_WM * FB_ROW_BYTES(FB_D) + a_lane(FB_D), Q + b_lane(FB_D), FB_MI, FB_BN,
                    FB_D);
        tile_scores(careful, dp, V + wm * ROWS_WM * FB_ROW_BYTES(FB_DV) + a_lane(FB_DV), dO + b_lane(FB_DV), FB_MI,
                    FB_BN, FB_DV);
        gradient(a, w, s, dp, lse, w->head + at.head, row, q0, !careful && covers(all_count, q0, FB_BN), &cells);

        const fb_u32 q = Q + wn * NC * FB_SIZE + t_lane(FB_D), d = dO + wn * NCV * FB_SIZE + t_lane(FB_DV);
        if (careful) {
            add_specials(t->dv, &cells, true, d, FB_MI, FB_BN, NCV, FB_DV);
            add_specials(t->dk, &cells, false, q, FB_MI, FB_BN, NC, FB_D);
            __syncthreads();
            tile_clean(Q, FB_BN, FB_D);
            tile_clean(dO, FB_BN, FB_DV);
            __syncthreads();
        }
        fb_u32 p[FB_MI * (FB_BN / FB_STEP)][4];
#pragma unroll
        for (int m = 0; m < FB_MI; m++)
            to_steps(p + m * (FB_BN / FB_STEP), s + m * (FB_BN / 8), FB_BN);
        accumulate(t->dv, p, d, FB_MI, FB_BN, NCV, FB_DV);
#pragma unroll
        for (int m = 0; m < FB_MI; m++)
            to_steps(p + m * (FB_BN / FB_STEP), dp + m * (FB_BN / 8), FB_BN);
        accumulate(t->dk, p, q, FB_MI, FB_BN, NC, FB_D);
        if (FB_BUFFERS == 1 && next.head < heads) {
            __syncthreads();
            load(a, w, w->head + next.head, tiles, next.tile * FB_BN);
            copies_commit();
        }
        at = next;
    }
    copies_wait(0);
}

#if FB_TWICE
// Not inlined: its registers are its own.
FB_APART void attend_carefully(const fb__args *a, const work *w, sums *to, unsigned char *memory, step at, int begin,
                               int end) {
    sums t;
    attend(a, w, &t, memory, at, begin, end, true);
    *to = t;
}
#endif

extern "C" __global__ void __launch_bounds__(FB_THREADS, FB_BLOCKS) fb_dkdv(const __grid_constant__ fb__args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    const work *w = work_shared(&a, FB_BM, true);
    if (!w)
        return;
    const fb__range seen = fb__band_queries_of(w->band, w->first, w->first + FB_BM);
    int begin = (int)(seen.lo / FB_BN), end = (int)((seen.hi + FB_BN - 1) / FB_BN);
    if (FB_STACK)
        begin = 0, end = seen.lo < seen.hi ? (w->rows + FB_BN - 1) / FB_BN : 0;
    step at = {0, begin};
    at = live(&a, w, at, begin, end);
    sums t;
#if FB_TWICE
    attend(&a, w, &t, memory, at, begin, end, false);
    if (__syncthreads_or(any_nan(t.dk, FB_MI * (NC / 8)) | any_nan(t.dv, FB_MI * (NCV / 8)))) {
        sums again;
        attend_carefully(&a, w, &again, memory, at, begin, end);
        t = again;
    }
#else
    bool careful = false;
#pragma unroll 1
    do {
        attend(&a, w, &t, memory, at, begin, end, careful);
        careful = !careful && __syncthreads_or(any_nan(t.dk, FB_MI * (NC / 8)) | any_nan(t.dv, FB_MI * (NCV / 8)));
    } while (careful);
#endif
    const int wn = FB_WARP % FB_WN, row = w->first + FB_WARP / FB_WN * ROWS_WM;
    if (a.dk.at)
        write_rows(&a, w, a.dk, t.dk, row, wn * NC, a.head_dim, a.scale, a.flags & FB_DK_PAIRS, NC);
    if (a.dv.at)
        write_rows(&a, w, a.dv, t.dv, row, wn * NCV, a.head_dim_v, 1, a.flags & FB_DV_PAIRS, NCV);
}
