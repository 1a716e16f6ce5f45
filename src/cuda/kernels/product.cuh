// The two products of attention on fragments, for a warp of MI x 16 rows.
//     scores:      c[MI][N/8][4]  = A B^T    both tiles in shared memory, summed over columns (S, dP)
//     accumulate:  c[MI][N/8][4] += P B      P in registers, B a tile, summed over its rows (O, dQ, dK, dV)
// Next: problem.cuh.
#pragma once
#include "tile.cuh"

#define FB_MAX_COLUMNS (FB_D > FB_DV ? FB_D : FB_DV)

// How far loops over registers are unrolled. FAST: entirely, as registers cannot be indexed. SMALL: not at all, which
// puts arrays into memory: for text that rarely runs and shall not cost the compiler time.
#define FAST 128
#define SMALL 1

template <int U> FB_FN void clear(float (*c)[4], const int TILES) {
#pragma unroll U
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            c[n][e] = 0;
}

// Fragments of B are read FB_PREFETCH before they are used: what a read takes, products cover.
#ifndef FB_PREFETCH
#define FB_PREFETCH 3
#endif
#define FB_RING (FB_PREFETCH + 1)

// a: address of the warp's first row of A plus a_lane; b: of B's first row plus b_lane. N columns of c, COLUMNS summed.
FB_FN void scores(float (*c)[4], fb_u32 a, fb_u32 b, const int MI, const int N, const int COLUMNS) {
    const int PER_STEP = N / 16, ALL = COLUMNS * FB_SIZE / 32 * PER_STEP;
    fb_u32 A[2][FB_MAX_MI][4], B[FB_RING][4];
    clear<FAST>(c, MI * (N / 8));
#pragma unroll
    for (int m = 0; m < MI; m++)
        matrices(A[0][m], a + m * 16 * FB_ROW_BYTES(COLUMNS));
#pragma unroll
    for (int i = 0; i < FB_PREFETCH && i < ALL; i++)
        matrices(B[i], b + i % PER_STEP * 16 * FB_ROW_BYTES(COLUMNS) + i / PER_STEP * 32);
#pragma unroll
    for (int i = 0; i < ALL; i++) {
        const int k = i / PER_STEP, n = i % PER_STEP, next = i + FB_PREFETCH;
        if (n == 0 && i + PER_STEP < ALL)
#pragma unroll
            for (int m = 0; m < MI; m++)
                matrices(A[(k + 1) % 2][m], a + m * 16 * FB_ROW_BYTES(COLUMNS) + (k + 1) * 32);
        if (next < ALL)
            matrices(B[next % FB_RING], b + next % PER_STEP * 16 * FB_ROW_BYTES(COLUMNS) + next / PER_STEP * 32);
#pragma unroll
        for (int m = 0; m < MI; m++) {
            mma(c[m * (N / 8) + 2 * n], A[k % 2][m], B[i % FB_RING]);
            mma(c[m * (N / 8) + 2 * n + 1], A[k % 2][m], B[i % FB_RING] + 2);
        }
    }
}

// The same step by step: short to compile, for many columns and where speed matters less.
template <int U>
FB_FN void scores_rolled(float (*c)[4], fb_u32 a, fb_u32 b, const int MI, const int N, const int COLUMNS) {
    clear<U>(c, MI * (N / 8));
#pragma unroll 1
    for (int k = 0; k < COLUMNS * FB_SIZE; k += 32) {
        fb_u32 A[FB_MAX_MI][4];
#pragma unroll
        for (int m = 0; m < MI; m++)
            matrices(A[m], a + m * 16 * FB_ROW_BYTES(COLUMNS) + k);
#pragma unroll U
        for (int n = 0; n < N / 16; n++) {
            fb_u32 B[4];
            matrices(B, b + n * 16 * FB_ROW_BYTES(COLUMNS) + k);
#pragma unroll
            for (int m = 0; m < MI; m++) {
                mma(c[m * (N / 8) + 2 * n], A[m], B);
                mma(c[m * (N / 8) + 2 * n + 1], A[m], B + 2);
            }
        }
    }
}

// The steps of a product over N cells of a row, from accumulators: c[N/8][4] as A fragments p[N/FB_STEP][4].
template <int U> FB_FN void to_steps(fb_u32 (*p)[4], float (*c)[4], const int N) {
#pragma unroll U
    for (int k = 0; k < N / FB_STEP; k++) {
#if FB_TYPE == FB_TYPE_F32
        p[k][0] = __float_as_uint(c[k][0]);
        p[k][1] = __float_as_uint(c[k][2]);
        p[k][2] = __float_as_uint(c[k][1]);
        p[k][3] = __float_as_uint(c[k][3]);
#else
        p[k][0] = pack(c[2 * k][0], c[2 * k][1]);
        p[k][1] = pack(c[2 * k][2], c[2 * k][3]);
        p[k][2] = pack(c[2 * k + 1][0], c[2 * k + 1][1]);
        p[k][3] = pack(c[2 * k + 1][2], c[2 * k + 1][3]);
#endif
    }
}

// b: address of B's first row and column plus t_lane. K rows summed, N columns of c, COLUMNS of the tile.
FB_FN void accumulate(float (*c)[4], fb_u32 (*p)[4], fb_u32 b, const int MI, const int K, const int N,
                      const int COLUMNS) {
    const int PER_STEP = N / 16, ALL = K / FB_STEP * PER_STEP;
    fb_u32 B[FB_RING][4];
#pragma unroll
    for (int i = 0; i < FB_PREFETCH && i < ALL; i++)
        t_load(B[i], b + i / PER_STEP * FB_STEP * FB_ROW_BYTES(COLUMNS) + i % PER_STEP * 16 * FB_SIZE, COLUMNS);
#pragma unroll
    for (int i = 0; i < ALL; i++) {
        const int k = i / PER_STEP, n = i % PER_STEP, next = i + FB_PREFETCH;
        if (next < ALL)
            t_load(B[next % FB_RING],
                   b + next / PER_STEP * FB_STEP * FB_ROW_BYTES(COLUMNS) + next % PER_STEP * 16 * FB_SIZE, COLUMNS);
#pragma unroll
        for (int m = 0; m < MI; m++) {
            mma(c[m * (N / 8) + 2 * n], p[m * (K / FB_STEP) + k], B[i % FB_RING]);
            mma(c[m * (N / 8) + 2 * n + 1], p[m * (K / FB_STEP) + k], B[i % FB_RING] + 2);
        }
    }
}

// The same step by step.
template <int U>
FB_FN void accumulate_rolled(float (*c)[4], fb_u32 (*p)[4], fb_u32 b, const int MI, const int K, const int N,
                             const int COLUMNS) {
#pragma unroll 1
    for (int k = 0; k < K / FB_STEP; k++)
#pragma unroll U
        for (int n = 0; n < N / 16; n++) {
            fb_u32 B[4];
            t_load(B, b + k * FB_STEP * FB_ROW_BYTES(COLUMNS) + n * 16 * FB_SIZE, COLUMNS);
#pragma unroll
            for (int m = 0; m < MI; m++) {
                mma(c[m * (N / 8) + 2 * n], p[m * (K / FB_STEP) + k], B);
                mma(c[m * (N / 8) + 2 * n + 1], p[m * (K / FB_STEP) + k], B + 2);
            }
        }
}

FB_FN void copy(float (*to)[4], float (*from)[4], const int TILES) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            to[n][e] = from[n][e];
}

// Is one of a warp's sums none? Only then can a cell that does not count have met an infinity or NaN.
FB_FN bool any_nan(float (*c)[4], const int TILES) {
    bool nan = false;
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            nan |= c[n][e] != c[n][e];
    return nan;
}

// One bit for each of a thread's cells: does it count? N/8 * 4 bits of a row of fragments.
typedef struct keep {
    fb_u32 bits[FB_MAX_MI][(FB_MAX_CELLS + 63) / 64];
} keep;

FB_FN bool kept(const keep *k, int m, int n, int e) { return k->bits[m][n / 8] >> (n % 8 * 4 + e) & 1; }

FB_FN void keep_cell(keep *k, int m, int n, int e, bool counts) {
    fb_u32 bit = 1u << (n % 8 * 4 + e);
    if (n % 8 == 0 && e % 2 == 0) // a thread's cells come row by row: first the bits of e = 0, 1, then of 2, 3
        k->bits[m][n / 8] = e ? k->bits[m][n / 8] & 0x33333333 : 0;
    if (counts)
        k->bits[m][n / 8] |= bit;
}

// From scores, before they become P: those of -inf do not count.
FB_FN void keep_cells(keep *k, float (*s)[4], const int MI, const int N) {
#pragma unroll 1
    for (int m = 0; m < MI; m++)
#pragma unroll 1
        for (int n = 0; n < N / 8; n++) {
            if (n % 8 == 0)
                k->bits[m][n / 8] = 0;
#pragma unroll
            for (int e = 0; e < 4; e++)
                if (s[m * (N / 8) + n][e] != -FB_INFINITY)
                    k->bits[m][n / 8] |= 1u << (n % 8 * 4 + e);
        }
}

// 1 for each cell of a step that counts, as A.
FB_FN void kept_step(fb_u32 *a, const keep *cells, int m, int k) {
#pragma unroll
    for (int i = 0; i < 4; i++)
#if FB_TYPE == FB_TYPE_F32
        a[i] = kept(cells, m, k, i % 2 * 2 + i / 2) ? FB_ONE : 0;
#else
        a[i] = (kept(cells, m, 2 * k + i / 2, i % 2 * 2) ? FB_ONE : 0) |
               (kept(cells, m, 2 * k + i / 2, i % 2 * 2 + 1) ? FB_ONE << 16 : 0);
#endif
}

// What infinities and NaN of B do to c, where cells that do not count must not meet them; see element.cuh. The tile is
// then cleaned and multiplied as any other. `signs`: cells are positive, so that an infinity stays one; else all make
// NaN.
FB_FN void add_specials(float (*c)[4], const keep *cells, bool signs, fb_u32 b, const int MI, const int K, const int N,
                        const int COLUMNS) {
#pragma unroll 1
    for (int n = 0; n < N / 16; n++) {
        float counts[FB_MAX_MI * 2][4];
        clear<FAST>(counts, MI * 2);
#pragma unroll 1
        for (int k = 0; k < K / FB_STEP; k++) {
            fb_u32 B[4];
            t_load(B, b + k * FB_STEP * FB_ROW_BYTES(COLUMNS) + n * 16 * FB_SIZE, COLUMNS);
#pragma unroll
            for (int i = 0; i < 4; i++)
                B[i] = count(B[i], signs);
#pragma unroll
            for (int m = 0; m < MI; m++) {
                fb_u32 ones[4];
                kept_step(ones, cells, m, k);
                mma_counts(counts[2 * m], ones, B);
                mma_counts(counts[2 * m + 1], ones, B + 2);
            }
        }
#pragma unroll
        for (int m = 0; m < MI; m++)
#pragma unroll
            for (int e = 0; e < 8; e++)
                c[m * (N / 8) + 2 * n + e / 4][e % 4] += addend(verdict(counts[2 * m + e / 4][e % 4]));
    }
}
