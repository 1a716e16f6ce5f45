// O and LSE of FB_BM query rows; the keys pass by in tiles of FB_BN.
//
//     m = -inf, l = 0, O = 0
//     for each tile of keys that some row may see:
//         S = Q K^T                     scale, softcap, bias, mask -> base 2
//         m' = max(m, max S)   P = 2^(S - m')   l = l 2^(m - m') + sum P   O = O 2^(m - m') + P V    (m' may lag)
//     LSE = ln2 (m + log2 l)   O = O / l        the sink joins m and l here
//
// Warps: FB_WM groups of MI x 16 rows, times FB_WN slabs of O's columns (each makes the same S), times FB_WK shares
// of a tile's keys (each has its own m, l, O; joined at the end).
// Shared memory: Q [BM][D], FB_BUFFERS times K [BN][D], FB_BUFFERS times V [BN][DV], streams. With one of each, V
// arrives while S is made, and the next K while P V is. With two, both arrive a tile before they are used.
// With args.chunks > 1 a block has one chunk of the keys, and leaves m, l and O to join.cu in base 2.
#include "softmax.cuh"

#define NK (FB_BN / FB_WK) // keys of a warp
#define NC (FB_DV / FB_WN) // columns of O of a warp
#define ROWS_WM (FB_MI * 16)
#define K_BYTES FB_TILE_BYTES(FB_BN, FB_D)
#define V_BYTES FB_TILE_BYTES(FB_BN, FB_DV)
#define STREAMS_AT (FB_TILE_BYTES(FB_BM, FB_D) + FB_BUFFERS * (K_BYTES + V_BYTES))

typedef struct state {
    float o[FB_MI * (NC / 8)][4];
    float m[FB_MI][2], l[FB_MI][2];
} state;

// Where a cell does not count the score becomes -inf. With all options the scores are then in base 2; the others wait
// for softmax. row: the warp's first, k: its first key.
template <int U> FB_FN void finish(const fb__args *a, const work *w, float (*s)[4], int row, int k) {
#pragma unroll U
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
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
                    float *cell = &s[m * (NK / 8) + n][2 * half + e];
#if FB_PLAIN
                    if (j < lo || j >= hi)
                        *cell = -FB_INFINITY;
#else
                    float slope;
                    *cell = j < lo || j >= hi ? -FB_INFINITY : score_of(a, &x, *cell, i, k + j, &slope);
#endif
                }
        }
}

// S times the factor, which is then 1; -inf stays -inf where the factor is not positive.
template <int U> FB_FN void multiply(float (*s)[4], float *factor) {
#pragma unroll U
    for (int n = 0; n < FB_MI * (NK / 8); n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[n][e] = s[n][e] == -FB_INFINITY ? s[n][e] : s[n][e] * *factor;
    *factor = 1;
}

// What multiplies S: with all options nothing is left to do.
FB_FN float factor_of(const fb__args *a) { return FB_PLAIN ? a->scale_log2 : 1; }

// The largest S of one of the thread's rows, times the factor: base 2.
template <int U> FB_FN float row_top(float (*s)[4], int half, float factor) {
    float top = -FB_INFINITY;
#pragma unroll U
    for (int n = 0; n < NK / 8; n++)
        top = fmaxf(top, fmaxf(s[n][2 * half], s[n][2 * half + 1]));
    return quad_max(top) * factor;
}

// Before the exponentials: S * *factor - m is what P is 2 to the power of. O and l are rescaled where the maximum has
// grown too much.
template <int U> FB_FN void raise_maximum(const fb__args *a, state *t, float (*s)[4], float *factor) {
    bool grown = false, fused = true;
    float top[FB_MI][2];
    *factor = factor_of(a);
    if (FB_PLAIN && !(*factor > 0))
        multiply<U>(s, factor);
#pragma unroll U
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            top[m][half] = row_top<U>(s + m * (NK / 8), half, *factor);
            grown |= top[m][half] > t->m[m][half] + LAG;
            fused &= fabsf(top[m][half]) <= FUSED_LIMIT || top[m][half] == -FB_INFINITY;
        }
    if (!__any_sync(~0u, grown || !fused))
        return;
    if (FB_PLAIN && !__all_sync(~0u, fused))
        multiply<U>(s, factor);
#pragma unroll U
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float to = fmaxf(t->m[m][half], top[m][half]), shift = to == -FB_INFINITY ? 0 : to;
            float scale = exp2_fast(t->m[m][half] - shift);
            t->m[m][half] = to;
            t->l[m][half] *= scale;
#pragma unroll U
            for (int n = 0; n < NC / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    t->o[m * (NC / 8) + n][2 * half + e] *= scale;
        }
}

// S becomes P.
template <int U> FB_FN void exponentials(state *t, float (*s)[4], float factor) {
#pragma unroll U
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float shift = t->m[m][half] == -FB_INFINITY ? 0 : t->m[m][half], sum = 0;
#pragma unroll U
            for (int n = 0; n < NK / 8; n++)
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    float *cell = &s[m * (NK / 8) + n][2 * half + e];
                    *cell = exp2_fast(fmaf(*cell, factor, -shift));
                    sum += *cell;
                }
            t->l[m][half] += sum;
        }
}

#if FB_WK > 1
// The shares of a tile's keys, in order, into the first warp of each group. Every thread of the others leaves its
// state in shared memory, one value of all lanes beside the other.
FB_FN void join_warps(state *t, float *room, int wk, int group) {
    const int VALUES = FB_MI * (NC / 8) * 4 + FB_MI * 4;
    float *mine = room + (group * (FB_WK - 1) + wk - 1) * VALUES * 32 + FB_LANE;
    __syncthreads();
    if (wk) {
#pragma unroll
        for (int m = 0; m < FB_MI; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                *mine = t->m[m][half], mine[32] = t->l[m][half];
                mine += 64;
            }
#pragma unroll
        for (int n = 0; n < FB_MI * (NC / 8); n++)
#pragma unroll
            for (int e = 0; e < 4; e++, mine += 32)
                *mine = t->o[n][e];
    }
    __syncthreads();
    if (wk)
        return;
#pragma unroll 1
    for (int other = 0; other < FB_WK - 1; other++) {
        const float *from = room + (group * (FB_WK - 1) + other) * VALUES * 32 + FB_LANE;
        float keep_old[FB_MI][2], take[FB_MI][2];
#pragma unroll
        for (int m = 0; m < FB_MI; m++)
#pragma unroll
            for (int half = 0; half < 2; half++, from += 64) {
                float top = fmaxf(t->m[m][half], from[0]), shift = top == -FB_INFINITY ? 0 : top;
                keep_old[m][half] = exp2_fast(t->m[m][half] - shift), take[m][half] = exp2_fast(from[0] - shift);
                t->m[m][half] = top;
                t->l[m][half] = t->l[m][half] * keep_old[m][half] + from[32] * take[m][half];
            }
#pragma unroll
        for (int n = 0; n < FB_MI * (NC / 8); n++)
#pragma unroll
            for (int e = 0; e < 4; e++, from += 32) {
                int m = n / (NC / 8);
                t->o[n][e] = t->o[n][e] * keep_old[m][e / 2] + *from * take[m][e / 2];
            }
    }
}
#endif

// A warp's rows to where they belong, to the room, or, with chunks, to the workspace.
FB_FN void leave(const fb__args *a, const work *w, state *t, float *room, bool straight, int row, int wn) {
#pragma unroll
    for (int m = 0; m < FB_MI; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int r = row + m * 16 + half * 8 + FB_LANE / 4;
            float l = quad_sum(t->l[m][half]), (*o)[4] = t->o + m * (NC / 8);
            if (r >= w->rows)
                continue;
            if (FB_STACK && a->chunks > 1) {
                fb_i64 at = (blockIdx.y * a->batch + w->b) * a->heads_kv + w->kv;
                at = at * a->group * a->len_q + r;
                float *to = a->partial + at * FB_DV + wn * NC + FB_LANE % 4 * 2;
                if (wn == 0 && FB_LANE % 4 == 0)
                    a->partial_lse[2 * at] = t->m[m][half], a->partial_lse[2 * at + 1] = l;
#pragma unroll
                for (int n = 0; n < NC / 8; n++)
                    *(float2 *)(to + n * 8) = make_float2(o[n][2 * half], o[n][2 * half + 1]);
                continue;
            }
            float factor = close_row(a, w, r, t->m[m][half], l, wn == 0);
            const piece_of_row x = {o, half, factor, l == 0};
            if (straight)
                store_row((element *)row_at(query_rows(a->out, w), r), x, wn * NC, a->head_dim_v, NC);
            else
                stage_row(room, x, r - w->first, wn * NC, NC, FB_DV);
        }
}

// At the edge of the band, for one warp: does no row see a key of the tile? Does every row see all of them?
FB_FN bool warp_whole(const work *w, int row, int k0) {
    return k0 + NK <= row + w->hi_off && k0 >= row + ROWS_WM - 1 + w->lo_off && row + ROWS_WM <= w->band.len_q &&
           k0 + NK <= w->band.len_k;
}

#if FB_BUFFERS == 2
FB_FN bool warp_dead(const work *w, int row, int k0) {
    return k0 >= row + ROWS_WM - 1 + w->hi_off || k0 + FB_BN <= row + w->lo_off;
}
#endif

// Where a tile is small the next ones are asked for as early as can be; where it is large, behind its first product,
// beside which the addresses come for nothing. Measured for D = 64 and 128.
#define LOADS_FIRST (FB_D + FB_DV <= 128)

#if FB_BUFFERS == 2
FB_FN void load_both(const fb__args *a, const work *w, streams from, int bound, fb_u32 K, fb_u32 V, int k0) {
    load_keys(a, w, from, bound, K, k0);
    load_values(a, w, from, bound, V, k0);
}
#endif

// All tiles of the block. The careful loop, SMALL, lets infinities and NaN of V reach only the rows that see them.
template <int U>
FB_FN void attend(const fb__args *a, const work *w, state *t, unsigned char *memory, int tile, int end) {
    const bool CAREFUL = U == SMALL;
    const int wk = FB_WARP % FB_WK, wn = FB_WARP / FB_WK % FB_WN, wm = FB_WARP / FB_WK / FB_WN;
    const int row = w->first + wm * ROWS_WM;
    const fb_u32 Q = smem_address(memory), K = Q + FB_TILE_BYTES(FB_BM, FB_D), V = K + FB_BUFFERS * K_BYTES;
    const fb_u32 q = Q + wm * ROWS_WM * FB_ROW_BYTES(FB_D) + a_lane(FB_D);
    const fb_u32 k = wk * NK * FB_ROW_BYTES(FB_D) + b_lane(FB_D);
    const fb_u32 v = wk * NK * FB_ROW_BYTES(FB_DV) + wn * NC * FB_SIZE + t_lane(FB_DV);
    const streams from = !FB_STREAMS ? streams() : ((const streams *)(memory + STREAMS_AT))[threadIdx.x];
    const whole all_count = w->all;
    const int bound = w->bound;
    float s[FB_MI * (NK / 8)][4];

    clear<U>(t->o, FB_MI * (NC / 8));
#pragma unroll U
    for (int m = 0; m < FB_MI; m++)
        t->m[m][0] = t->m[m][1] = -FB_INFINITY, t->l[m][0] = t->l[m][1] = 0;
    if (tile >= end)
        return;
    tile_load(Q, query_rows(a->q, w), w->first, w->rows, a->head_dim, a->flags & FB_Q16, FB_BM, FB_D);
    load_keys(a, w, from, bound, K, tile * FB_BN);
    copies_commit();
#if FB_BUFFERS == 2
    load_values(a, w, from, bound, V, tile * FB_BN);
    copies_commit();
#endif
    for (int buffer = 0; tile < end; buffer ^= FB_BUFFERS - 1) {
        const int k0 = tile * FB_BN, next = live_keys(a, w, tile + 1, end);
        const fb_u32 V_now = V + buffer * V_BYTES;
        copies_wait(0);
        __syncthreads();
#if FB_BUFFERS == 2
        if (LOADS_FIRST && next < end)
            load_both(a, w, from, bound, K + (buffer ^ 1) * K_BYTES, V + (buffer ^ 1) * V_BYTES, next * FB_BN);
        // Past the diagonal whole warps have nothing to do.
        const bool dead = !CAREFUL && !FB_STACK && !covers(all_count, k0, FB_BN) &&
                          __all_sync(~0u, warp_dead(w, row, k0));
        if (!dead)
            tile_scores<U>(s, q, K + buffer * K_BYTES + k, FB_MI, NK, FB_D);
        if (!LOADS_FIRST && next < end)
            load_both(a, w, from, bound, K + (buffer ^ 1) * K_BYTES, V + (buffer ^ 1) * V_BYTES, next * FB_BN);
        copies_commit();
        if (dead) {
            tile = next;
            continue;
        }
#else
        load_values(a, w, from, bound, V, k0);
        copies_commit();
        tile_scores<U>(s, q, K + k, FB_MI, NK, FB_D);
        copies_wait(0);
        __syncthreads();
        if (next < end)
            load_keys(a, w, from, bound, K, next * FB_BN);
        copies_commit();
#endif
        if (!FB_PLAIN || (!covers(all_count, k0, FB_BN) &&
                          (FB_STACK || !__all_sync(~0u, warp_whole(w, row, k0 + wk * NK)))))
            finish<U>(a, w, s, row, k0 + wk * NK);
        if (CAREFUL) {
            keep cells;
            keep_cells(&cells, s, FB_MI, NK);
            add_specials(t->o, &cells, true, V_now + v, FB_MI, NK, NC, FB_DV);
            __syncthreads();
            tile_clean(V_now, FB_BN, FB_DV);
            __syncthreads();
        }
        float factor;
        raise_maximum<U>(a, t, s, &factor);
        exponentials<U>(t, s, factor);
        fb_u32 p[FB_MI * (NK / FB_STEP)][4];
#pragma unroll U
        for (int m = 0; m < FB_MI; m++)
            to_steps<U>(p + m * (NK / FB_STEP), s + m * (NK / 8), NK);
        tile_accumulate<U>(t->o, p, V_now + v, FB_MI, NK, NC, FB_DV);
        tile = next;
    }
    copies_wait(0);
}

// Not inlined: its registers are its own.
FB_APART void attend_carefully(const fb__args *a, const work *w, state *to, unsigned char *memory, int tile, int end) {
    attend<SMALL>(a, w, to, memory, tile, end);
}

extern "C" __global__ void __launch_bounds__(FB_THREADS, FB_BLOCKS) fb_forward(const __grid_constant__ fb__args a) {
    extern __shared__ __align__(16) unsigned char memory[];
    const work *w = work_shared(&a, FB_BM, false);
    if (!w)
        return;
    int tile, end;
    key_tiles(&a, w, &tile, &end);
    if (FB_STREAMS)
        ((streams *)(memory + STREAMS_AT))[threadIdx.x] = streams_of(key_rows(a.k, w), key_rows(a.v, w));
    state t;
    attend<FAST>(&a, w, &t, memory, tile, end);
    if (__syncthreads_or(any_nan(t.o, FB_MI * (NC / 8)))) {
        state again;
        attend_carefully(&a, w, &again, memory, tile, end);
        t = again;
    }
    const int wn = FB_WARP / FB_WK % FB_WN, wm = FB_WARP / FB_WK / FB_WN;
#if FB_WK > 1
    join_warps(&t, (float *)memory, FB_WARP % FB_WK, wm * FB_WN + wn);
#endif
    const bool straight = stores_straight(a.head_dim_v, a.flags & FB_OUT16, false);
    __syncthreads(); // the tiles are read, and make room
    if (FB_WARP % FB_WK == 0)
        leave(&a, w, &t, (float *)memory, straight, w->first + wm * ROWS_WM, wn);
    if (!straight && (!FB_STACK || a.chunks == 1))
        write_staged((const float *)memory, query_rows(a.out, w), w->first, w->rows, a.head_dim_v, false, FB_DV);
}
