// What is done row by row: stats, dsinks, and joining parts over disjoint keys. A warp has a row, except where said.
#include "stats.cuh"

FB_FN float warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Row n of all query rows, in the order of lse.
FB_FN bool row_place(const fb__args *a, fb_i64 n, fb_i64 *b, fb_i64 *h, fb_i64 *i) {
    fb_i64 len = a->cu_q ? a->total_q : a->len_q, batch = a->cu_q ? 1 : a->batch;
    *i = n % len, *h = n / len % a->heads_q, *b = n / len / a->heads_q;
    return *b < batch;
}

FB_FN const element *place_at(fb__view t, fb_i64 b, fb_i64 h, fb_i64 i) {
    return (const element *)t.at + b * t.batch + h * t.head + i * t.row;
}

FB_FN fb_i64 row_of_warp() { return (fb_i64)blockIdx.x * (FB_THREADS / 32) + FB_WARP; }

// What fb_dq does in passing, where there is no dQ. A block has rows of one head.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_delta(const __grid_constant__ fb__args a) {
    const unsigned len = (unsigned)(a.cu_q ? a.total_q : a.len_q), tiles = (len + FB_STAT_ROWS - 1) / FB_STAT_ROWS;
    const unsigned i = blockIdx.x % tiles * FB_STAT_ROWS + threadIdx.x / FB_STAT_LANES;
    const unsigned bh = blockIdx.x / tiles, h = bh % (unsigned)a.heads_q, b = bh / (unsigned)a.heads_q;
    const bool exists = i < len;
    uint4 O[FB_STAT_PIECES], dO[FB_STAT_PIECES];
    stat_load(&a, O, place_at(a.out, b, h, exists ? i : 0), exists);
    stat_load(&a, dO, place_at(a.dout, b, h, exists ? i : 0), exists);
    bool zero;
    const float sum = stat_product(O, dO, &zero);
    const fb_i64 n = (fb_i64)bh * len + i;
    if (exists && threadIdx.x % FB_STAT_LANES == 0)
        stat_store(&a, n, stat_close(&a, h, n, sum, zero));
}

// dsink = sum over rows of exp(sink - LSE) (dLSE - delta). A block has a head, and sums in a fixed order.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_dsinks(const __grid_constant__ fb__args a) {
    __shared__ float sums[FB_THREADS / 32];
    fb_i64 h = blockIdx.x, len = a.len_q, batch = a.batch, of_head = a.len_q;
    if (a.cu_q)
        batch = 1, of_head = a.total_q, len = clamp(a.batch ? a.cu_q[a.batch] : 0, 0, a.total_q);
    float sink = to_log2(a.sinks[h]), sum = 0;
    for (fb_i64 n = threadIdx.x; n < batch * len; n += FB_THREADS) {
        fb_i64 at = (n / len * a.heads_q + h) * of_head + n % len;
        float lse = a.lse[at];
        if (lse != -FB_INFINITY)
            sum -= exp2_fast(sink - to_log2(lse)) * a.delta[at];
    }
    sum = warp_sum(sum);
    if (FB_LANE == 0)
        sums[FB_WARP] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0;
        for (int n = 0; n < FB_THREADS / 32; n++)
            sum += sums[n];
        a.dsinks[h] = a.flags & FB_ADDS ? a.dsinks[h] + sum : sum;
    }
}

// A row of the stacked route: kv head and place.
FB_FN bool stacked_place(const fb__args *a, fb_i64 n, fb_i64 *b, fb_i64 *h, fb_i64 *i, fb_i64 *row_q) {
    fb_i64 rows = a->group * a->len_q;
    *b = n / rows / a->heads_kv;
    if (*b >= a->batch)
        return false;
    fb_i64 r = n % rows, kv = n / rows % a->heads_kv, len = a->len_q;
    *row_q = 0;
    if (a->cu_q) {
        *row_q = clamp(a->cu_q[*b], 0, a->total_q);
        len = clamp(a->cu_q[*b + 1] - *row_q, 0, a->total_q - *row_q);
    }
    if (r >= a->group * len)
        return false;
    *h = kv * a->group + r / len, *i = r % len;
    return true;
}

// O and LSE of a row from its chunks of keys, in order.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_join(const __grid_constant__ fb__args a) {
    fb_i64 n = row_of_warp(), b, h, i, row_q, all = a.batch * a.heads_kv * a.group * a.len_q;
    if (!stacked_place(&a, n, &b, &h, &i, &row_q))
        return;
    const float *stats = a.partial_lse + 2 * n;
    float sink = a.sinks ? to_log2(a.sinks[h]) : -FB_INFINITY, top = -FB_INFINITY, l = 0;
    bool any = false;
    for (int c = 0; c < a.chunks; c++)
        top = fmaxf(top, stats[2 * c * all]), any |= !(stats[2 * c * all + 1] == 0);
    top = fmaxf(top, sink);
    float shift = sink != sink ? sink : top == -FB_INFINITY ? 0 : top;
    for (int c = 0; c < a.chunks; c++)
        l += stats[2 * c * all + 1] * exp2_fast(stats[2 * c * all] - shift);
    l += exp2_fast(sink - shift);
    fb_i64 stat = a.cu_q ? h * a.total_q + row_q + i : (b * a.heads_q + h) * a.len_q + i;
    if (a.lse && FB_LANE == 0)
        a.lse[stat] = any       ? fmaf(shift, FB_LN2, fmaf(shift, FB_LN2_REST, logf(l)))
                      : a.sinks ? a.sinks[h]
                                : -FB_INFINITY;
    element *to = (element *)place_at(a.out, b, h, row_q + i);
    for (int c = FB_LANE; c < a.head_dim_v; c += 32) {
        float o = 0;
        for (int k = 0; any && k < a.chunks; k++)
            if (!(stats[2 * k * all + 1] == 0))
                o += a.partial[(k * all + n) * FB_DV + c] * (exp2_fast(stats[2 * k * all] - shift) / l);
        to[c] = to_element(o);
    }
}

// dQ of a row from its chunks of keys, in order.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_join_dq(const __grid_constant__ fb__args a) {
    fb_i64 n = row_of_warp(), b, h, i, row_q, all = a.batch * a.heads_kv * a.group * a.len_q;
    if (!stacked_place(&a, n, &b, &h, &i, &row_q))
        return;
    element *to = (element *)place_at(a.dq, b, h, row_q + i);
    for (int c = FB_LANE; c < a.head_dim; c += 32) {
        float dq = 0;
        for (int k = 0; k < a.chunks; k++)
            dq += a.partial[(k * all + n) * FB_D + c];
        dq *= a.scale;
        to[c] = to_element(a.flags & FB_ADDS ? to_float(to[c]) + dq : dq);
    }
}

// fb_merge: (out, lse) and (other_out, other_lse) become one. A side of weight 0 is left out, so that what an empty
// part holds does not matter.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_merge_parts(const __grid_constant__ fb__args a) {
    fb_i64 n = row_of_warp(), b, h, i;
    if (!row_place(&a, n, &b, &h, &i))
        return;
    float x = a.lse[n], y = a.other_lse[n], top = y > x ? y : x, shift = top == -FB_INFINITY ? 0 : top;
    float wx = exp2_fast(to_log2(x - shift)), wy = exp2_fast(to_log2(y - shift)), sum = wx + wy;
    element *to = (element *)place_at(a.out, b, h, i);
    const element *from = place_at(a.other_out, b, h, i);
    for (int c = FB_LANE; c < a.head_dim_v; c += 32) {
        float o = wx != 0 ? wx / sum * to_float(to[c]) : 0;
        if (wy != 0)
            o += wy / sum * to_float(from[c]);
        to[c] = to_element(o);
    }
    __syncwarp();
    if (FB_LANE == 0)
        a.lse[n] = shift + logf(sum);
}
