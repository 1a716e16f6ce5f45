// What is done row by row: delta, dsinks, and joining parts over disjoint keys. A simdgroup has a row, except where
// said. These know columns from the arguments only, so that all head dims share their code.
#include "problem.msl"

// Row of this simdgroup.
FB_FN fb_i64 row_of(constant fb__metal_args &a, place p) {
    return (a.first + p.group.x) * (FB_THREADS / 32) + p.simd;
}

// Row n of all query rows, in the order of lse.
struct row_place {
    fb_i64 b, h, i;
    bool exists;
};

FB_FN row_place place_of(constant fb__metal_args &a, fb_i64 n) {
    const fb_i64 len = FB_HAS(CU_Q) ? a.total_q : a.len_q, batch = FB_HAS(CU_Q) ? 1 : a.batch;
    const fb_i64 b = n / len / a.heads_q;
    return {b, n / len % a.heads_q, n % len, b < batch};
}

FB_FN fb_i64 element_at(constant fb__metal_view &t, row_place at) {
    return at.b * t.batch + at.h * t.head + at.i * t.row;
}

// delta = rowsum(dO * O) - dLSE. 0 where nothing counts: dO may hold anything there. Where the sink is all there is
// (O is 0, LSE the sink) dO is not read either.
[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_delta(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]], const device element *out [[buffer(FB_AT_OUT)]],
                     const device float *lse [[buffer(FB_AT_LSE)]], const device element *dout [[buffer(FB_AT_DOUT)]],
                     const device float *dlse [[buffer(FB_AT_DLSE)]], const device float *sinks [[buffer(FB_AT_SINKS)]],
                     device float *delta [[buffer(FB_AT_DELTA)]], uint3 group [[threadgroup_position_in_grid]],
                     uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]]) {
    const place p = {group, thread_, lane, simd};
    const fb_i64 n = row_of(a, p);
    const row_place at = place_of(a, n);
    if (!at.exists)
        return;
    const device element *O = out + element_at(a.out, at), *dO = dout + element_at(a.dout, at);
    float sum = 0;
    bool zero = true;
    for (int c = (int)lane; c < a.head_dim_v; c += 32) {
        const float o = (float)O[c];
        zero = zero && o == 0;
        sum += o * (float)dO[c];
    }
    sum = simd_sum(sum);
    zero = simd_all(zero);
    if (lane)
        return;
    if (FB_HAS(SINKS) && zero && lse[n] == sinks[at.h])
        sum = 0;
    if (FB_HAS(DLSE))
        sum -= dlse[n];
    delta[n] = lse[n] == -INFINITY ? 0 : sum;
}

// dsink = sum over rows of exp(sink - LSE) (dLSE - delta). A threadgroup has a head, and sums in a fixed order.
[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_dsinks(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]], const device float *lse [[buffer(FB_AT_LSE)]],
                      const device float *sinks [[buffer(FB_AT_SINKS)]], device float *dsinks [[buffer(FB_AT_DSINKS)]],
                      const device int *cu_q [[buffer(FB_AT_CU_Q)]], const device float *delta [[buffer(FB_AT_DELTA)]],
                      threadgroup uchar *memory [[threadgroup(0)]], uint3 group [[threadgroup_position_in_grid]],
                      uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]],
                      uint simd [[simdgroup_index_in_threadgroup]]) {
    threadgroup float *parts = (threadgroup float *)memory;
    const fb_i64 h = a.first + group.x;
    fb_i64 len = a.len_q, batch = a.batch, of_head = a.len_q;
    if (FB_HAS(CU_Q))
        batch = 1, of_head = a.total_q, len = within(a.batch ? cu_q[a.batch] : 0, 0, a.total_q);
    const float sink = sinks[h];
    float sum = 0;
    for (fb_i64 n = thread_; n < batch * len; n += FB_THREADS) {
        const fb_i64 at = (n / len * a.heads_q + h) * of_head + n % len;
        if (lse[at] != -INFINITY)
            sum -= power2((sink - lse[at]) * FB_LOG2E) * delta[at];
    }
    sum = simd_sum(sum);
    if (lane == 0)
        parts[simd] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_ == 0) {
        sum = 0;
        for (int n = 0; n < FB_THREADS / 32; n++)
            sum += parts[n];
        dsinks[h] = a.flags & FB_ADDS ? dsinks[h] + sum : sum;
    }
}

// A row of the stacked route, n of all of them: its place in tensors and in lse.
struct stacked_place {
    row_place at; // i from the start of the tensor when packed
    fb_i64 stat;
};

FB_FN stacked_place stacked_of(constant fb__metal_args &a, const device int *cu_q, fb_i64 n) {
    const fb_i64 rows_ = a.group * a.len_q, b = n / rows_ / a.heads_kv;
    stacked_place s = {{b, 0, 0, b < a.batch}, 0};
    if (!s.at.exists)
        return s;
    fb_i64 row_q = 0, len = a.len_q;
    if (FB_HAS(CU_Q)) {
        row_q = within(cu_q[b], 0, a.total_q);
        len = within(cu_q[b + 1] - row_q, 0, a.total_q - row_q);
    }
    const fb_i64 r = n % rows_;
    s.at.exists = r < a.group * len;
    if (!s.at.exists)
        return s;
    const fb_i64 i = r % len;
    s.at.h = n / rows_ % a.heads_kv * a.group + r / len;
    s.at.i = row_q + i;
    s.stat = FB_HAS(CU_Q) ? s.at.h * a.total_q + row_q + i : (b * a.heads_q + s.at.h) * a.len_q + i;
    return s;
}

// O and LSE of a row from its chunks of keys, in order.
[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_join(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]], device element *out [[buffer(FB_AT_OUT)]],
                    device float *lse [[buffer(FB_AT_LSE)]], const device float *sinks [[buffer(FB_AT_SINKS)]],
                    const device int *cu_q [[buffer(FB_AT_CU_Q)]],
                    const device float *partial [[buffer(FB_AT_PARTIAL)]],
                    const device float *partial_lse [[buffer(FB_AT_PARTIAL_LSE)]],
                    uint3 group [[threadgroup_position_in_grid]], uint thread_ [[thread_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    const fb_i64 n = row_of(a, {group, thread_, lane, simd}), all = a.batch * a.heads_kv * a.group * a.len_q;
    const stacked_place s = stacked_of(a, cu_q, n);
    if (!s.at.exists)
        return;
    const device float *stats = partial_lse + 2 * n;
    const float sink = FB_HAS(SINKS) ? sinks[s.at.h] : -INFINITY;
    float top = -INFINITY, l = 0;
    bool any = false;
    for (int c = 0; c < a.chunks; c++) {
        const float m = stats[2 * c * all];
        top = m > top ? m : top;
        any = any || !(stats[2 * c * all + 1] == 0);
    }
    top = sink > top || sink != sink ? sink : top;
    const float shift = top == -INFINITY ? 0 : top;
    for (int c = 0; c < a.chunks; c++)
        l += stats[2 * c * all + 1] * power2((stats[2 * c * all] - shift) * FB_LOG2E);
    l += power2((sink - shift) * FB_LOG2E);
    if (FB_HAS(LSE) && lane == 0)
        lse[s.stat] = any ? shift + precise::log(l) : sink;
    device element *to = out + element_at(a.out, s.at);
    for (int c = (int)lane; c < a.head_dim_v; c += 32) {
        float o = 0;
        for (int k = 0; any && k < a.chunks; k++)
            if (!(stats[2 * k * all + 1] == 0))
                o += partial[(k * all + n) * a.partial_columns + c] *
                     (power2((stats[2 * k * all] - shift) * FB_LOG2E) / l);
        to[c] = (element)o;
    }
}

// dQ of a row from its chunks of keys, in order.
[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_join_dq(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]], device element *dq [[buffer(FB_AT_DQ)]],
                       const device int *cu_q [[buffer(FB_AT_CU_Q)]],
                       const device float *partial [[buffer(FB_AT_PARTIAL)]],
                       uint3 group [[threadgroup_position_in_grid]], uint thread_ [[thread_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    const fb_i64 n = row_of(a, {group, thread_, lane, simd}), all = a.batch * a.heads_kv * a.group * a.len_q;
    const stacked_place s = stacked_of(a, cu_q, n);
    if (!s.at.exists)
        return;
    device element *to = dq + element_at(a.dq, s.at);
    for (int c = (int)lane; c < a.head_dim; c += 32) {
        float x = 0;
        for (int k = 0; k < a.chunks; k++)
            x += partial[(k * all + n) * a.partial_columns + c];
        x *= a.scale;
        to[c] = (element)(a.flags & FB_ADDS ? (float)to[c] + x : x);
    }
}

// fb_merge: (out, lse) and (other_out, other_lse) become one. A side of weight 0 is left out, so that what an empty
// part holds does not matter.
[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_merge_parts(constant fb__metal_args &a [[buffer(FB_AT_ARGS)]], device element *out [[buffer(FB_AT_OUT)]],
                           device float *lse [[buffer(FB_AT_LSE)]],
                           const device element *other_out [[buffer(FB_AT_OTHER_OUT)]],
                           const device float *other_lse [[buffer(FB_AT_OTHER_LSE)]],
                           uint3 group [[threadgroup_position_in_grid]], uint thread_ [[thread_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]) {
    const fb_i64 n = row_of(a, {group, thread_, lane, simd});
    const row_place at = place_of(a, n);
    if (!at.exists)
        return;
    const float x = lse[n], y = other_lse[n], top = y > x ? y : x, shift = top == -INFINITY ? 0 : top;
    const float wx = power2((x - shift) * FB_LOG2E), wy = power2((y - shift) * FB_LOG2E), sum = wx + wy;
    device element *to = out + element_at(a.out, at);
    const device element *from = other_out + element_at(a.other_out, at);
    for (int c = (int)lane; c < a.head_dim_v; c += 32) {
        float o = wx != 0 ? wx / sum * (float)to[c] : 0;
        if (wy != 0)
            o += wy / sum * (float)from[c];
        to[c] = (element)o;
    }
    simdgroup_barrier(mem_flags::mem_device); // all lanes have read lse[n]
    if (lane == 0)
        lse[n] = shift + precise::log(sum);
}

// Do the elements of matrices lie in lanes as matrix.msl says? 1 if so.
[[max_total_threads_per_threadgroup(FB_THREADS)]]
kernel void fb_layout(device int *answer [[buffer(FB_AT_LSE)]], threadgroup uchar *memory [[threadgroup(0)]],
                      uint thread_ [[thread_index_in_threadgroup]], uint lane [[thread_index_in_simdgroup]]) {
    threadgroup float *numbers = (threadgroup float *)memory;
    if (thread_ < 64)
        numbers[thread_] = (float)thread_;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    sums x;
    simdgroup_load(x, numbers, 8);
    const float at = (float)(FB_ROW(lane) * 8 + FB_COLUMN(lane));
    const bool good = simd_all(x.thread_elements()[0] == at && x.thread_elements()[1] == at + 1);
    if (thread_ == 0)
        *answer = good;
}
