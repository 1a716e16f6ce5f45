// What surrounds hopper_backward.cu. fb_hopper_delta, before it, for each query row: delta = rowsum(dO * O) - dLSE, LSE
// in base 2, and a row of zeros that dQ is added to. fb_hopper_dq, after it: dQ times scale as elements.
// A block has FB_PAD rows of a head.
#include "mend.cuh"

#define LANES (FB_DV > 128 ? 32 : FB_DV > 64 ? 16 : 8) // of a row, 8 columns each
#define SLICES FB_PANELS(FB_D)
#define SLICE 4096 // numbers of 64 rows x 64 columns of dQ, in the order of fragments

FB_FN void delta_of_row(const fb__args *a, const work *w, int i, int lane) {
    const bool exists = i < w->len_q;
    const element *O = row_at(query_rows(a->out, w), exists ? i : 0),
                  *dO = row_at(query_rows(a->dout, w), exists ? i : 0);
    float sum = 0;
    bool zero = true;
    const int c = lane * 8;
    if (exists && c < a->head_dim_v) {
        element x[8], y[8];
        if (a->flags & FB_OUT16)
            *(uint4 *)x = *(const uint4 *)(O + c);
        else
#pragma unroll
            for (int e = 0; e < 8; e++)
                x[e] = O[c + e];
        *(uint4 *)y = *(const uint4 *)(dO + c);
#pragma unroll
        for (int e = 0; e < 8; e++) {
            const float o = to_float(x[e]);
            zero &= o == 0;
            sum += o * to_float(y[e]);
        }
    }
#pragma unroll
    for (int step = LANES / 2; step; step /= 2) {
        sum += __shfl_xor_sync(~0u, sum, step);
        zero &= __shfl_xor_sync(~0u, zero, step);
    }
    if (lane)
        return;
    const float lse = exists ? a->lse[stat_at(a, w, i)] : -FB_INFINITY;
    if (a->sinks && zero && lse == a->sinks[w->head]) // the sink is all there is: dO may hold anything
        sum = 0;
    if (exists && a->dlse)
        sum -= a->dlse[stat_at(a, w, i)];
    if (lse == -FB_INFINITY)
        sum = 0;
    const fb_i64 at = padded_stat(a, w, w->head, i);
    a->partial_lse[at] = lse == -FB_INFINITY ? FB_INFINITY : to_log2(lse);
    a->delta[at] = sum;
    if (exists && a->dsinks)
        a->other_lse[stat_at(a, w, i)] = sum;
}

extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_hopper_delta(const __grid_constant__ fb__args a) {
    const work *w = work_shared(&a, FB_PAD, false);
    if (!w)
        return;
    for (int r = threadIdx.x / LANES; r < FB_PAD; r += FB_THREADS / LANES)
        delta_of_row(&a, w, w->first + r, threadIdx.x % LANES);
    if (!a.dq.at)
        return;
    float4 *sums = (float4 *)(a.partial + padded_stat(&a, w, w->head, w->first) * (SLICES * 64));
    for (int n = threadIdx.x; n < FB_PAD * SLICES * 16; n += FB_THREADS)
        sums[n] = make_float4(0, 0, 0, 0);
}

// Thread t of a warpgroup has of its 64 rows what the warpgroup that added them up had: number i of a slice is d[4 i]
// to d[4 i + 3] of its products.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_hopper_dq(const __grid_constant__ fb__args a) {
    const work *w = work_shared(&a, FB_PAD, false);
    if (!w)
        return;
    const int t = threadIdx.x % 128, row = w->first + FB_WARP * 16;
    const float4 *sums = (const float4 *)(a.partial + padded_stat(&a, w, w->head, w->first) * (SLICES * 64)) +
                         threadIdx.x / 128 * (SLICES * SLICE / 4) + t;
    const int r = row + FB_LANE / 4;
    element *to[2] = {(element *)row_at(query_rows(a.dq, w), r < w->len_q ? r : 0),
                      (element *)row_at(query_rows(a.dq, w), r + 8 < w->len_q ? r + 8 : 0)};
    bool nan = false;
#pragma unroll 1
    for (int n = 0; n < SLICES * 8; n += 4) {
        fb_u32 u[2][4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const float4 x = sums[(n + i) * 128];
            nan |= x.x != x.x || x.y != x.y || x.z != x.z || x.w != x.w;
            u[0][i] = pack(x.x * a.scale, x.y * a.scale), u[1][i] = pack(x.z * a.scale, x.w * a.scale);
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            quad_transpose(u[half]);
            if (r + 8 * half < w->len_q)
                store_eight(to[half], (n + FB_LANE % 4) * 8, a.head_dim, u[half], a.flags & FB_DQ16);
        }
    }
    if (__any_sync(~0u, nan))
        mend_dq(&a, w, row);
}
