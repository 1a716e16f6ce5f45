// The definition in double precision, as cpu/ref.c has it: no tiles, every cell made again wherever it is wanted, and
// nothing in memory but delta. A block has one query of one head, or one key; it goes through its cells in chunks of
// one for each thread, then through their sums with a thread for each column.
#include "cells.cuh"

#define LANE (threadIdx.x % 32)
#define WARPS (FB_THREADS / 32)
#define PARAMETERS const __grid_constant__ fb__args a, const __grid_constant__ fb__reference r

// Columns of a thread, at most: head dims go up to 576.
#define EACH ((576 + FB_THREADS - 1) / FB_THREADS)
#define COLUMN(n) ((n) * FB_THREADS + (int)threadIdx.x)

#define INFINITE ((double)FB_INFINITY)

// ---- Numbers --------------------------------------------------------------------------------------------------

// Rounded once: on its way to 16 bits a number becomes an f32 whose last bit says that something was cut off.
FB_FN element from_double(double x) {
#if FB_TYPE == FB_TYPE_F32
    return __double2float_rn(x);
#else
    float f = __double2float_rz(x);
    if ((double)f != x && f - f == 0)
        f = __uint_as_float(__float_as_uint(f) | 1);
    return to_element(f);
#endif
}

FB_FN double load(const element *x) { return (double)to_float(*x); }

FB_FN void write(const fb__args *a, element *to, double x) { *to = from_double(a->flags & FB_ADDS ? load(to) + x : x); }

FB_FN double dot(const element *x, const element *y, int n) {
    double sum = 0;
    for (int c = 0; c < n; c++)
        sum += load(x + c) * load(y + c);
    return sum;
}

// ---- Reductions of a block, in a fixed order ------------------------------------------------------------------

FB_FN double warp_sum(double x) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

FB_FN double block_sum(double x) {
    __shared__ double room[WARPS];
    x = warp_sum(x);
    __syncthreads();
    if (LANE == 0)
        room[threadIdx.x / 32] = x;
    __syncthreads();
    x = 0;
    for (int n = 0; n < WARPS; n++)
        x += room[n];
    return x;
}

// A NaN must not get lost in a maximum.
FB_FN double larger(double m, double x) { return x > m || x != x ? x : m; }

FB_FN double block_max(double x) {
    __shared__ double room[FB_THREADS];
    __syncthreads();
    room[threadIdx.x] = x;
    __syncthreads();
    for (int n = 0; n < FB_THREADS; n++)
        x = larger(x, room[n]);
    return x;
}

// ---- The mathematics ------------------------------------------------------------------------------------------

// One query of one head.
typedef struct work {
    fb_i64 h, i;
    sequence seq;
    query row;
    const element *Q, *dO, *O, *K, *V; // rows of the query; all keys and values
    double sink;
} work;

FB_FN work work_of(const fb__args *a, const sequence *s, fb_i64 h, fb_i64 i) {
    work w;
    w.h = h, w.i = i, w.seq = *s, w.row = query_of(a, s, h, i);
    w.Q = query_rows(a->q, s, h) + i * a->q.row;
    w.dO = query_rows(a->dout, s, h) + i * a->dout.row;
    w.O = query_rows(a->out, s, h) + i * a->out.row;
    w.K = key_rows(a->k, s, h / a->group), w.V = key_rows(a->v, s, h / a->group);
    w.sink = a->sinks ? (double)a->sinks[h] : -INFINITE;
    return w;
}

// Block n of all queries of all heads.
FB_FN work work_at(const fb__args *a, fb_i64 n) {
    const sequence s = sequence_of(a, n / a->len_q / a->heads_q);
    return work_of(a, &s, n / a->len_q % a->heads_q, n % a->len_q);
}

// S = scale * q.k    softcap: S = c*tanh(S/c)    + bias. False if the cell does not count. *slope: 1 - tanh^2.
FB_FN bool score_of(const fb__args *a, const fb__reference *r, const work *w, fb_i64 j, double *S, double *slope) {
    float bias;
    if (!counts(a, &w->row, j, &bias))
        return false;
    *S = r->scale * dot(w->Q, w->K + j * a->k.row, a->head_dim);
    *slope = 1;
    if (r->softcap > 0) {
        double t = tanh(*S / r->softcap);
        *S = r->softcap * t, *slope = 1 - t * t;
    }
    *S += (double)bias;
    return true;
}

// What the backward knows of a row: LSE, and delta = rowsum(dO * O) - dLSE. Nothing comes from a row that takes no
// part.
typedef struct cotangents {
    double LSE, delta;
    bool take_part;
} cotangents;

FB_FN cotangents cotangents_of(const fb__args *a, const fb__reference *r, const work *w) {
    cotangents c = {(double)a->lse[w->row.stat], r->delta[w->row.stat], false};
    c.take_part = c.LSE != -INFINITE;
    return c;
}

// P = exp(S - LSE)    dP = dO V^T    dS = P * (dP - delta), before softcap's factor. False if the cell does not count.
FB_FN bool gradient_of(const fb__args *a, const fb__reference *r, const work *w, const cotangents *c, fb_i64 j,
                       double *P, double *dS, double *slope) {
    double S;
    if (!c->take_part || !score_of(a, r, w, j, &S, slope))
        return false;
    *P = exp(S - c->LSE);
    *dS = *P * (dot(w->dO, w->V + j * a->v.row, a->head_dim_v) - c->delta);
    return true;
}

// ---- Forward --------------------------------------------------------------------------------------------------

// LSE = ln(sum_j exp(S) + exp(sink))    P = exp(S - LSE)    O = P V
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_reference_forward(PARAMETERS) {
    __shared__ double P[FB_THREADS];
    __shared__ bool live[FB_THREADS];
    const work w = work_at(&a, blockIdx.x);
    double m = w.sink, l = 0, S, slope, O[EACH];
    if (!w.row.exists)
        return;
    for (fb_i64 j = threadIdx.x; j < w.seq.len_k; j += FB_THREADS)
        if (score_of(&a, &r, &w, j, &S, &slope))
            m = larger(m, S);
    m = block_max(m);
    for (fb_i64 j = threadIdx.x; j < w.seq.len_k; j += FB_THREADS)
        if (score_of(&a, &r, &w, j, &S, &slope))
            l += exp(S - m);
    l = block_sum(l) + exp(w.sink - m);
    const double LSE = m == -INFINITE ? m : m + log(l); // -inf: an empty row
    for (int n = 0; n < EACH; n++)
        O[n] = 0;
    for (fb_i64 first = 0; first < w.seq.len_k && m != -INFINITE; first += FB_THREADS) {
        __syncthreads();
        live[threadIdx.x] = score_of(&a, &r, &w, first + threadIdx.x, &S, &slope);
        P[threadIdx.x] = exp(S - LSE);
        __syncthreads();
        for (int t = 0; t < FB_THREADS; t++)
            for (int n = 0; n < EACH; n++)
                if (live[t] && COLUMN(n) < a.head_dim_v)
                    O[n] += P[t] * load(w.V + (first + t) * a.v.row + COLUMN(n));
    }
    for (int n = 0; n < EACH; n++)
        if (COLUMN(n) < a.head_dim_v)
            ((element *)w.O)[COLUMN(n)] = from_double(O[n]);
    if (a.lse && threadIdx.x == 0)
        a.lse[w.row.stat] = __double2float_rn(LSE);
}

// ---- Backward -------------------------------------------------------------------------------------------------

// Where the sink is all there is, O is 0 whatever dO holds, and neither is read. LSE tells: in a part of a larger
// problem it differs from the sink when other parts have cells.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_reference_delta(PARAMETERS) {
    const work w = work_at(&a, blockIdx.x);
    double cells = 0, delta = 0;
    float bias;
    if (!w.row.exists)
        return;
    const double LSE = (double)a.lse[w.row.stat];
    for (fb_i64 j = threadIdx.x; j < w.seq.len_k; j += FB_THREADS)
        cells += counts(&a, &w.row, j, &bias) ? 1 : 0;
    cells = block_sum(cells);
    if (LSE != -INFINITE && (cells > 0 || LSE != w.sink))
        for (int c = threadIdx.x; c < a.head_dim_v; c += FB_THREADS)
            delta += load(w.dO + c) * load(w.O + c);
    delta = block_sum(delta);
    if (threadIdx.x == 0)
        r.delta[w.row.stat] = LSE == -INFINITE ? 0 : a.dlse ? delta - (double)a.dlse[w.row.stat] : delta;
}

// dQ = scale*dS K    with dS *= 1 - tanh^2 for softcap
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_reference_dq(PARAMETERS) {
    __shared__ double dS[FB_THREADS];
    __shared__ bool live[FB_THREADS];
    const work w = work_at(&a, blockIdx.x);
    if (!w.row.exists)
        return;
    const cotangents c = cotangents_of(&a, &r, &w);
    double P, ds = 0, slope = 1, dQ[EACH];
    for (int n = 0; n < EACH; n++)
        dQ[n] = 0;
    for (fb_i64 first = 0; first < w.seq.len_k; first += FB_THREADS) {
        __syncthreads();
        live[threadIdx.x] = gradient_of(&a, &r, &w, &c, first + threadIdx.x, &P, &ds, &slope);
        dS[threadIdx.x] = r.scale * (ds * slope);
        __syncthreads();
        for (int t = 0; t < FB_THREADS; t++)
            for (int n = 0; n < EACH; n++)
                if (live[t] && COLUMN(n) < a.head_dim)
                    dQ[n] += dS[t] * load(w.K + (first + t) * a.k.row + COLUMN(n));
    }
    element *to = (element *)query_rows(a.dq, &w.seq, w.h) + w.i * a.dq.row;
    for (int n = 0; n < EACH; n++)
        if (COLUMN(n) < a.head_dim)
            write(&a, to + COLUMN(n), dQ[n]);
}

// dK = scale*dS^T Q    dV = P^T dO, of one key; over the queries of all heads of the group, one after the other.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_reference_dkdv(PARAMETERS) {
    __shared__ double Ps[FB_THREADS], dS[FB_THREADS];
    __shared__ bool live[FB_THREADS];
    const fb_i64 j = blockIdx.x % a.len_k, kv = blockIdx.x / a.len_k % a.heads_kv;
    const sequence s = sequence_of(&a, blockIdx.x / a.len_k / a.heads_kv);
    const fb_i64 all = a.group * s.len_q;
    double dK[EACH], dV[EACH];
    if (j >= s.len_k)
        return;
    for (int n = 0; n < EACH; n++)
        dK[n] = dV[n] = 0;
    for (fb_i64 first = 0; first < all; first += FB_THREADS) {
        double P = 0, ds = 0, slope = 1;
        bool counted = false;
        if (first + threadIdx.x < all) {
            const fb_i64 at = first + threadIdx.x;
            const work w = work_of(&a, &s, kv * a.group + at / s.len_q, at % s.len_q);
            const cotangents c = cotangents_of(&a, &r, &w);
            counted = gradient_of(&a, &r, &w, &c, j, &P, &ds, &slope);
        }
        __syncthreads();
        live[threadIdx.x] = counted, Ps[threadIdx.x] = P, dS[threadIdx.x] = r.scale * (ds * slope);
        __syncthreads();
        for (int t = 0; t < FB_THREADS; t++) {
            if (!live[t])
                continue;
            const work w = work_of(&a, &s, kv * a.group + (first + t) / s.len_q, (first + t) % s.len_q);
            for (int n = 0; n < EACH; n++) {
                if (COLUMN(n) < a.head_dim)
                    dK[n] += dS[t] * load(w.Q + COLUMN(n));
                if (COLUMN(n) < a.head_dim_v)
                    dV[n] += Ps[t] * load(w.dO + COLUMN(n));
            }
        }
    }
    element *dk = (element *)key_rows(a.dk, &s, kv) + j * a.dk.row;
    element *dv = (element *)key_rows(a.dv, &s, kv) + j * a.dv.row;
    for (int n = 0; n < EACH; n++) {
        if (a.dk.at && COLUMN(n) < a.head_dim)
            write(&a, dk + COLUMN(n), dK[n]);
        if (a.dv.at && COLUMN(n) < a.head_dim_v)
            write(&a, dv + COLUMN(n), dV[n]);
    }
}

// dbias = dS before softcap's factor, summed over every batch, head, row and column that shares a cell. A warp has a
// cell of dbias.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_reference_dbias(PARAMETERS) {
    const fb_i64 cols = a.flags & FB_BIAS_COLS ? a.len_k : 1, n = (fb_i64)blockIdx.x * WARPS + threadIdx.x / 32;
    const fb_i64 j = n % cols, i = n / cols % a.bias_rows, h = n / cols / a.bias_rows % a.bias_heads;
    const fb_i64 b = n / cols / a.bias_rows / a.bias_heads;
    if (b >= a.bias_batches)
        return;
    const fb_i64 batches = a.bias_batches == 1 ? a.batch : 1, heads = a.bias_heads == 1 ? a.heads_q : 1;
    const fb_i64 rows = a.bias_rows == 1 ? a.len_q : 1, keys = cols == 1 ? a.len_k : 1;
    double sum = 0, P, dS, slope;
    for (fb_i64 x = LANE; x < batches * heads * rows * keys; x += 32) {
        const sequence s = sequence_of(&a, b + x / keys / rows / heads);
        const work w = work_of(&a, &s, h + x / keys / rows % heads, i + x / keys % rows);
        if (!w.row.exists)
            continue;
        const cotangents c = cotangents_of(&a, &r, &w);
        if (gradient_of(&a, &r, &w, &c, j + x % keys, &P, &dS, &slope))
            sum += dS;
    }
    sum = warp_sum(sum);
    if (LANE == 0)
        write(&a, (element *)a.dbias.at + b * a.dbias.batch + h * a.dbias.head + i * a.dbias.row + j, sum);
}

// dsink = sum_i exp(sink - LSE) * (dLSE - delta), over the whole batch. A block has a head.
extern "C" __global__ void __launch_bounds__(FB_THREADS) fb_reference_dsinks(PARAMETERS) {
    double sum = 0;
    for (fb_i64 b = 0; b < a.batch; b++) {
        const sequence s = sequence_of(&a, b);
        for (fb_i64 i = threadIdx.x; i < s.len_q; i += FB_THREADS) {
            const work w = work_of(&a, &s, blockIdx.x, i);
            const cotangents c = cotangents_of(&a, &r, &w);
            if (c.take_part)
                sum -= exp(w.sink - c.LSE) * c.delta;
        }
    }
    sum = block_sum(sum);
    float *to = a.dsinks + blockIdx.x;
    if (threadIdx.x == 0)
        *to = __double2float_rn(a.flags & FB_ADDS ? (double)*to + sum : sum);
}
