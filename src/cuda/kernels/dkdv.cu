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
// and what is left of LSE in base 2 [BN]; streams.
#include "problem.cuh"

#define NC (FB_D / FB_WN)
#define NCV (FB_DV / FB_WN)
#define ROWS_WM (FB_MI * 16)
#define Q_BYTES FB_TILE_BYTES(FB_BN, FB_D)
#define STATS (FB_TYPE == FB_TYPE_F32 ? 3 : 2)
#define TILE_BYTES (Q_BYTES + FB_TILE_BYTES(FB_BN, FB_DV) + 12 * FB_BN)
#define STREAMS_AT (FB_TILE_BYTES(FB_BM, FB_D) + FB_TILE_BYTES(FB_BM, FB_DV) + FB_BUFFERS * TILE_BYTES)

// S and dP, transposed, become P and dS. row: the warp's first key, q0: the tile's first query row.
template <int U>
FB_FN void gradient(const fb__args *a, const work *w, float (*s)[4], float (*dp)[4], const float *lse, int head,
                    int row, int q0, bool covered, keep *cells) {
    const float *delta = lse + FB_BN, *rest = delta + FB_BN;
    const int c = FB_LANE % 4 * 2;
#if FB_PLAIN
    if (covered) {
#pragma unroll U
        for (int n = 0; n < FB_BN / 8; n++) {
            float2 top = *(const float2 *)(lse + n * 8 + c), sum = *(const float2 *)(delta + n * 8 + c);
            float2 low = FB_TYPE == FB_TYPE_F32 ? *(const float2 *)(rest + n * 8 + c) : make_float2(0, 0);
#pragma unroll U
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
#pragma unroll U
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int j = row + m * 16 + half * 8 + FB_LANE / 4, lo, hi;
            queries_of_key(w, j, FB_STACK ? 0 : q0, &lo, &hi);
#pragma unroll U
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
                    *p = counts ? probability(score, FB_PLAIN ? a->scale_log2 : 1, lse[col],
                                              FB_TYPE == FB_TYPE_F32 ? rest[col] : 0)
                                : 0;
                    *ds = counts ? *p * (*ds - delta[col]) * slope : 0;
                    if (U == SMALL)
                        keep_cell(cells, m, n, 2 * half + e, counts);
                }
        }
}

// A tile of head `head` of the group: Q, dO, stats.
FB_FN void load(const fb__args *a, const work *w, const streams *all, int head, unsigned char *to, int q0) {
    const fb_u32 Q = smem_address(to), dO = Q + Q_BYTES, stats = dO + FB_TILE_BYTES(FB_BN, FB_DV);
    if (q0 + FB_BN <= w->bound) {
        const streams mine = all[threadIdx.x];
        stream_load(Q, mine.first, head * a->q.head + q0 * a->q.row, a->q.row, FB_BN, FB_D);
        stream_load(dO, mine.second, head * a->dout.head + q0 * a->dout.row, a->dout.row, FB_BN, FB_DV);
    } else {
        const int end = FB_STACK ? w->rows : (int)w->band.len_q; // what is beyond are zeros, whatever is there
        tile_load_any(Q, query_rows_of(a->q, w, w->head + head), q0, end, a->head_dim, a->flags & FB_Q16, FB_BN, FB_D);
        tile_load_any(dO, query_rows_of(a->dout, w, w->head + head), q0, end, a->head_dim_v, a->flags & FB_DOUT16,
                      FB_BN, FB_DV);
    }
#pragma unroll
    for (int n = 0; n < (STATS * FB_BN + FB_THREADS - 1) / FB_THREADS; n++) {
        const int x = n * FB_THREADS + threadIdx.x, which = x / FB_BN, r = q0 + x % FB_BN;
        const bool exists = r < w->rows;
        const float *from = which == 0 ? a->lse_log2 : which == 1 ? a->delta : a->lse_rest;
        const fb_i64 of_head = a->cu_q ? a->total_q : a->len_q;
        if (STATS * FB_BN % FB_THREADS == 0 || x < STATS * FB_BN)
            copy4(stats + x * 4, from + (!exists ? 0 : FB_STACK ? stat_at(a, w, r) : w->stat + head * of_head + r),
                  exists);
    }
}

// A tensor's rows of the block. row: the warp's first.
FB_FN void write(const fb__args *a, const work *w, fb__view to, float (*x)[4], float *room, int row, int first,
                 int columns, float factor, bool pieces, const int N, const int COLUMNS) {
    const bool straight = stores_straight(columns, pieces, a->flags & FB_ADDS);
    __syncthreads(); // what was there is read
#pragma unroll
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const int r = row + m * 16 + half * 8 + FB_LANE / 4;
            const piece_of_row y = {x + m * (N / 8), half, factor, false};
            if (r >= w->len_k)
                continue;
            if (straight)
                store_row((element *)row_at(key_rows(to, w), r), y, first, columns, N);
            else
                stage_row(room, y, r - w->first, first, N, COLUMNS);
        }
    if (!straight)
        write_staged(room, key_rows(to, w), w->first, w->len_k, columns, a->flags & FB_ADDS, COLUMNS);
}

// Which tile of query rows comes next, over the heads of the group one after the other. The last tile comes first:
// under a causal mask every block of keys has it, so blocks that run together read the same rows.
typedef struct step {
    int head, tile;
} step;

FB_FN step live(const fb__args *a, const work *w, step at, int begin, int end) {
    const int heads = FB_STACK ? 1 : (int)a->group;
    for (;; at.tile--) {
        if (at.tile < begin)
            at.head++, at.tile = end - 1;
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

// All tiles of the block. The careful loop, SMALL, lets infinities and NaN of Q and dO reach only the keys that they
// see.
template <int U>
FB_FN void attend(const fb__args *a, const work *w, sums *t, unsigned char *memory, step at, int begin, int end) {
    const bool CAREFUL = U == SMALL;
    const int wn = FB_WARP % FB_WN, wm = FB_WARP / FB_WN, row = w->first + wm * ROWS_WM;
    const int heads = FB_STACK ? 1 : (int)a->group;
    const fb_u32 K = smem_address(memory), V = K + FB_TILE_BYTES(FB_BM, FB_D);
    unsigned char *tiles = memory + FB_TILE_BYTES(FB_BM, FB_D) + FB_TILE_BYTES(FB_BM, FB_DV);
    const streams *all = (const streams *)(memory + STREAMS_AT);

    clear<U>(t->dk, FB_MI * (NC / 8));
    clear<U>(t->dv, FB_MI * (NCV / 8));
    if (at.head >= heads)
        return;
    tile_load(K, key_rows(a->k, w), w->first, w->len_k, a->head_dim, a->flags & FB_K16, FB_BM, FB_D);
    tile_load(V, key_rows(a->v, w), w->first, w->len_k, a->head_dim_v, a->flags & FB_V16, FB_BM, FB_DV);
    load(a, w, all, at.head, tiles, at.tile * FB_BN);
    copies_commit();
    for (int buffer = 0; at.head < heads; buffer ^= FB_BUFFERS - 1) {
        step next = {at.head, at.tile - 1};
        next = live(a, w, next, begin, end);
        copies_wait(0);
        __syncthreads();
        const fb_u32 Q = smem_address(tiles + buffer * TILE_BYTES), dO = Q + Q_BYTES;
        const float *lse = (const float *)(tiles + buffer * TILE_BYTES + Q_BYTES + FB_TILE_BYTES(FB_BN, FB_DV));
        const int q0 = at.tile * FB_BN;
        float s[FB_MI * (FB_BN / 8)][4], dp[FB_MI * (FB_BN / 8)][4];
        keep cells;
        tile_scores<U>(s, K + wm * ROWS_WM * FB_ROW_BYTES(FB_D) + a_lane(FB_D), Q + b_lane(FB_D), FB_MI, FB_BN, FB_D);
        if (FB_BUFFERS == 2 && next.head < heads) // here, as the addresses come for nothing beside the product
            load(a, w, all, next.head, tiles + (buffer ^ 1) * TILE_BYTES, next.tile * FB_BN);
        copies_commit();
        tile_scores<U>(dp, V + wm * ROWS_WM * FB_ROW_BYTES(FB_DV) + a_lane(FB_DV), dO + b_lane(FB_DV), FB_MI, FB_BN,
                       FB_DV);
        gradient<U>(a, w, s, dp, lse, w->head + at.head, row, q0, !CAREFUL && covers(w->all, q0, FB_BN), &cells);

        const fb_u32 q = Q + wn * NC * FB_SIZE + t_lane(FB_D), d = dO + wn * NCV * FB_SIZE + t_lane(FB_DV);
        if (CAREFUL) {
            add_specials(t->dv, &cells, true, d, FB_MI, FB_BN, NCV, FB_DV);
            add_specials(t->dk, &cells, false, q, FB_MI, FB_BN, NC, FB_D);
            __syncthreads();
            tile_clean(Q, FB_BN, FB_D);
            tile_clean(dO, FB_BN, FB_DV);
            __syncthreads();
        }
        fb_u32 p[FB_MI * (FB_BN / FB_STEP)][4];
#pragma unroll U
        for (int m = 0; m < FB_MI; m++)
            to_steps<U>(p + m * (FB_BN / FB_STEP), s + m * (FB_BN / 8), FB_BN);
        tile_accumulate<U>(t->dv, p, d, FB_MI, FB_BN, NCV, FB_DV);
#pragma unroll U
        for (int m = 0; m < FB_MI; m++)
            to_steps<U>(p + m * (FB_BN / FB_STEP), dp + m * (FB_BN / 8), FB_BN);
        tile_accumulate<U>(t->dk, p, q, FB_MI, FB_BN, NC, FB_D);
        if (FB_BUFFERS == 1 && next.head < heads) {
            __syncthreads();
            load(a, w, all, next.head, tiles, next.tile * FB_BN);
            copies_commit();
        }
        at = next;
    }
    copies_wait(0);
}

// Not inlined: its registers are its own.
FB_APART void attend_carefully(const fb__args *a, const work *w, sums *to, unsigned char *memory, step at, int begin,
                               int end) {
    attend<SMALL>(a, w, to, memory, at, begin, end);
}

extern "C" __global__ void __launch_bounds__(FB_THREADS, FB_BLOCKS) fb_dkdv(const __grid_constant__ fb__args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    const work *w = work_shared(&a, FB_BM, true);
    if (!w)
        return;
    const fb__range seen = fb__band_queries_of(w->band, w->first, w->first + FB_BM);
    int begin = (int)(seen.lo / FB_BN), end = (int)((seen.hi + FB_BN - 1) / FB_BN);
    if (FB_STACK)
        begin = 0, end = seen.lo < seen.hi ? (w->rows + FB_BN - 1) / FB_BN : 0;
    step at = {0, end - 1};
    at = live(&a, w, at, begin, end);
    if (FB_STREAMS)
        ((streams *)(memory + STREAMS_AT))[threadIdx.x] = streams_of(query_rows(a.q, w), query_rows(a.dout, w));
    sums t;
    attend<FAST>(&a, w, &t, memory, at, begin, end);
    if (__syncthreads_or(any_nan(t.dk, FB_MI * (NC / 8)) | any_nan(t.dv, FB_MI * (NCV / 8)))) {
        sums again;
        attend_carefully(&a, w, &again, memory, at, begin, end);
        t = again;
    }
    const int wn = FB_WARP % FB_WN, row = w->first + FB_WARP / FB_WN * ROWS_WM;
    if (a.dk.at)
        write(&a, w, a.dk, t.dk, (float *)memory, row, wn * NC, a.head_dim, a.scale, a.flags & FB_DK16, NC, FB_D);
    if (a.dv.at)
        write(&a, w, a.dv, t.dv, (float *)memory, row, wn * NCV, a.head_dim_v, 1, a.flags & FB_DV16, NCV, FB_DV);
}
