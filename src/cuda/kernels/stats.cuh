// What the backward wants to know of each query row, beside the tensors: delta, and LSE in base 2. fb_dq makes it for
// its own rows and leaves it for fb_dkdv and the others; without dQ fb_delta does, in rows.cu. Next: dq.cu.
//
//     delta = rowsum(dO * O) - dLSE       0 where nothing counts: dO may hold anything there
//     log2 = LSE in base 2                infinity where nothing counts, so that P is 0
//     rest                                what log2 has rounded off, for f32
#pragma once
#include "problem.cuh"

// Neighbouring lanes have a row, 16 bytes at a time each.
#define FB_STAT_LANES (FB_DV / FB_PIECE > 16 ? 32 : FB_DV / FB_PIECE > 8 ? 16 : 8)
#define FB_STAT_ROWS (FB_THREADS / FB_STAT_LANES) // rows at a time
#define FB_STAT_PIECES ((FB_DV / FB_PIECE + FB_STAT_LANES - 1) / FB_STAT_LANES) // of a row and a lane

// A lane's pieces of a row of O or dO; zeros where there is none.
FB_FN void stat_load(const fb__args *a, uint4 *x, const element *row, bool exists) {
    const bool whole = a->flags & FB_OUT16 && a->flags & FB_DOUT16;
#pragma unroll
    for (int n = 0; n < FB_STAT_PIECES; n++) {
        const int c = (n * FB_STAT_LANES + threadIdx.x % FB_STAT_LANES) * FB_PIECE,
                  left = exists ? piece_left(a->head_dim_v, c) : 0;
        x[n] = make_uint4(0, 0, 0, 0);
        if (whole && left && c + FB_PIECE <= a->head_dim_v)
            x[n] = *(const uint4 *)(row + c);
        else if (left) {
            union {
                element e[FB_PIECE];
                uint4 all;
            } y;
#pragma unroll
            for (int e = 0; e < FB_PIECE; e++)
                y.e[e] = e < left ? row[c + e] : 0;
            x[n] = y.all;
        }
    }
}

// rowsum(dO * O) in every lane of the row, and whether all of O is 0. All lanes of a warp are to come here.
FB_FN float stat_product(const uint4 *O, const uint4 *dO, bool *zero) {
    float sum = 0;
    *zero = true;
#pragma unroll
    for (int n = 0; n < FB_STAT_PIECES; n++) {
        union {
            uint4 all;
            element e[FB_PIECE];
        } x, y;
        x.all = O[n], y.all = dO[n];
#pragma unroll
        for (int e = 0; e < FB_PIECE; e++) {
            float o = to_float(x.e[e]);
            *zero &= o == 0;
            sum += o * to_float(y.e[e]);
        }
    }
#pragma unroll
    for (int step = FB_STAT_LANES / 2; step; step /= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        *zero &= __shfl_xor_sync(~0u, *zero, step);
    }
    return sum;
}

// For each row of the block: its product, and 0 where O is 0. Rows are read several at a time, as each read is a wait
// for memory.
FB_FN void stat_products(const fb__args *a, const work *w, float *products, float *zeros) {
    const int AT_ONCE = FB_STAT_PIECES == 1 ? 4 : 1;
#pragma unroll 1
    for (int n = 0; n < FB_BM; n += AT_ONCE * FB_STAT_ROWS) {
        uint4 O[AT_ONCE][FB_STAT_PIECES], dO[AT_ONCE][FB_STAT_PIECES];
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int r = n + i * FB_STAT_ROWS + threadIdx.x / FB_STAT_LANES, row = w->first + r;
            const bool exists = r < FB_BM && row < w->rows;
            stat_load(a, O[i], row_at(query_rows(a->out, w), exists ? row : 0), exists);
            stat_load(a, dO[i], row_at(query_rows(a->dout, w), exists ? row : 0), exists);
        }
#pragma unroll
        for (int i = 0; i < AT_ONCE; i++) {
            const int r = n + i * FB_STAT_ROWS + threadIdx.x / FB_STAT_LANES;
            bool zero;
            const float sum = stat_product(O[i], dO[i], &zero);
            if (r < FB_BM && threadIdx.x % FB_STAT_LANES == 0)
                products[r] = sum, zeros[r] = zero ? 0 : 1;
        }
    }
}

typedef struct stat {
    float log2, rest, delta;
} stat;

// Of row n of head h. Where the sink is all there is (O is 0, LSE the sink) dO is not read either.
FB_FN stat stat_close(const fb__args *a, fb_i64 h, fb_i64 n, float sum, bool zero) {
    const float lse = a->lse[n], top = to_log2(lse);
    if (a->sinks && zero && lse == a->sinks[h])
        sum = 0;
    if (a->dlse)
        sum -= a->dlse[n];
    stat s = {top == -FB_INFINITY ? FB_INFINITY : top, to_log2_rest(lse), lse == -FB_INFINITY ? 0 : sum};
    return s;
}

FB_FN void stat_store(const fb__args *a, fb_i64 n, stat s) {
    a->delta[n] = s.delta;
    if (a->lse_log2)
        a->lse_log2[n] = s.log2;
    if (FB_TYPE == FB_TYPE_F32 && a->lse_rest)
        a->lse_rest[n] = s.rest;
}
