// Rows whose sums hold a NaN, made again cell by cell (R3, R4). The kernels of sm_90a let a cell that does
// not count, a 0, meet whatever the other operand has there; where that is an infinity or NaN, the sum is
// NaN. Their rows are written, and then looked at by the warp that wrote them: nothing here is a function of
// what fits into registers or is fast. It is slow only where it has to sum up a row; where a NaN that may be
// seen is the reason, it ends at that one.
#pragma once
#include "hopper_tiles.cuh"

#define FB_MEND_COLUMNS ((FB_MAX_COLUMNS + 31) / 32)

FB_FN float mend_warp_sum(float x) {
#pragma unroll
    for (int step = 16; step; step /= 2)
        x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Rounded as it goes into a product.
FB_FN float mend_round(float x) { return to_float(to_element(x)); }

// A warp's product of two rows.
FB_FN float mend_dot(const element *x, const element *y, int columns) {
    float sum = 0;
    for (int c = FB_LANE; c < columns; c += 32)
        sum += to_float(x[c]) * to_float(y[c]);
    return mend_warp_sum(sum);
}

// Score in base 2 of a cell inside the band, -inf where it does not count.
FB_FN float mend_score(const fb__args *a, const work *w, int head, float S, int i, int j, float *slope) {
    *slope = 1;
#if FB_PLAIN
    return S * a->scale_log2;
#else
    extras x = extras_of(a, w->b, head);
    return score_of(a, &x, S, i, j, slope);
#endif
}

// Which of this lane's columns of a row hold NaN: one bit each.
FB_FN fb_u32 mend_find(const element *row, int columns) {
    fb_u32 bits = 0;
    for (int n = 0; n < FB_MEND_COLUMNS; n++) {
        int c = n * 32 + FB_LANE;
        if (c < columns && to_float(row[c]) != to_float(row[c]))
            bits |= 1u << n;
    }
    return bits;
}

// Adds weight times a row to the sums of these columns; returns those whose sum is no NaN yet.
FB_FN fb_u32 mend_add(float *sums, fb_u32 bits, float weight, const element *row) {
    fb_u32 left = 0;
#pragma unroll
    for (int n = 0; n < FB_MEND_COLUMNS; n++)
        if (bits >> n & 1) {
            sums[n] += weight * to_float(row[n * 32 + FB_LANE]);
            if (sums[n] == sums[n])
                left |= 1u << n;
        }
    return left;
}

FB_FN void mend_clear(float *sums) {
#pragma unroll
    for (int n = 0; n < FB_MEND_COLUMNS; n++)
        sums[n] = 0;
}

// ---- Gradients ------------------------------------------------------------------------------------------------
// a->partial_lse has LSE in base 2, +inf where a row sees nothing, and a->delta its delta, both at padded_stat.

// One cell of row i of a head: what it adds to dV, and, times a scale, to dK and dQ. False if it does not count.
FB_FN bool mend_cell(const fb__args *a, const work *w, int head, int i, int j, float *P, float *dS) {
    const fb_i64 at = padded_stat(a, w, head, i);
    const float lse = a->partial_lse[at];
    float slope;
    if (lse == FB_INFINITY)
        return false;
    const float S = mend_dot(row_at(query_rows_of(a->q, w, head), i), row_at(key_rows(a->k, w), j), a->head_dim);
    const float score = mend_score(a, w, head, S, i, j, &slope);
    if (score == -FB_INFINITY)
        return false;
    const float p = exp2_fast(score - lse);
    const float dP = mend_dot(row_at(query_rows_of(a->dout, w, head), i), row_at(key_rows(a->v, w), j), a->head_dim_v);
    *P = mend_round(p);
    *dS = mend_round(mend_round(p * slope) * (dP - a->delta[at]));
    return true;
}

FB_FN void mend_write(element *row, const float *sums, fb_u32 bits, float factor) {
#pragma unroll
    for (int n = 0; n < FB_MEND_COLUMNS; n++)
        if (bits >> n & 1)
            row[n * 32 + FB_LANE] = to_element(sums[n] * factor);
}

// dQ of 16 rows from `row` on.
FB_APART void mend_dq(const fb__args *a, const work *w, int row) {
    __syncwarp();
    for (int i = row; i < row + 16 && i < w->rows; i++) {
        element *dq = (element *)row_at(query_rows(a->dq, w), i);
        const fb_u32 bits = mend_find(dq, a->head_dim);
        fb_u32 left = bits;
        float sums[FB_MEND_COLUMNS], P, dS;
        int lo, hi;
        mend_clear(sums);
        keys_of_row(w, i, 0, &lo, &hi);
        for (int j = lo; j < hi && __any_sync(~0u, left != 0); j++)
            if (mend_cell(a, w, w->head, i, j, &P, &dS))
                left = mend_add(sums, bits, dS, row_at(key_rows(a->k, w), j));
        mend_write(dq, sums, bits, a->scale);
    }
}

// dK and dV of 16 keys from `row` on, or one of them.
FB_APART void mend_keys(const fb__args *a, const work *w, int row, bool with_dk, bool with_dv) {
    __syncwarp();
    for (int j = row; j < row + 16 && j < w->len_k; j++) {
        element *dk = with_dk && a->dk.at ? (element *)row_at(key_rows(a->dk, w), j) : 0;
        element *dv = with_dv && a->dv.at ? (element *)row_at(key_rows(a->dv, w), j) : 0;
        const fb_u32 bits_k = dk ? mend_find(dk, a->head_dim) : 0, bits_v = dv ? mend_find(dv, a->head_dim_v) : 0;
        fb_u32 left_k = bits_k, left_v = bits_v;
        float sums_k[FB_MEND_COLUMNS], sums_v[FB_MEND_COLUMNS], P, dS;
        int lo, hi;
        mend_clear(sums_k), mend_clear(sums_v);
        queries_of_key(w, j, 0, &lo, &hi);
        for (int h = 0; h < (int)a->group; h++)
            for (int i = lo; i < hi && __any_sync(~0u, (left_k | left_v) != 0); i++)
                if (mend_cell(a, w, w->head + h, i, j, &P, &dS)) {
                    left_v = mend_add(sums_v, bits_v, P, row_at(query_rows_of(a->dout, w, w->head + h), i));
                    left_k = mend_add(sums_k, bits_k, dS, row_at(query_rows_of(a->q, w, w->head + h), i));
                }
        if (dk)
            mend_write(dk, sums_k, bits_k, a->scale);
        if (dv)
            mend_write(dv, sums_v, bits_v, 1);
    }
}

// ---- Output ---------------------------------------------------------------------------------------------------

// O of 16 rows from `row` on. Lane 4 r + c has of the rows r and r + 8: m, what P is 2 to the power of the
// score minus, and the factor of O; a factor of NaN or 0 means that the row needs nothing.
FB_APART void mend_out(const fb__args *a, const work *w, int row, float m0, float m1, float factor0, float factor1) {
    __syncwarp();
    for (int r = row; r < row + 16 && r < w->rows; r++) {
        const int from = (r - row) % 8 * 4;
        const float m = __shfl_sync(~0u, r - row < 8 ? m0 : m1, from),
                    factor = __shfl_sync(~0u, r - row < 8 ? factor0 : factor1, from);
        element *out = (element *)row_at(query_rows(a->out, w), r);
        const fb_u32 bits = mend_find(out, a->head_dim_v);
        if (!(factor > 0) || !__any_sync(~0u, bits != 0))
            continue;
        const element *q = row_at(query_rows(a->q, w), r);
        const rows keys = key_rows(a->k, w), values = key_rows(a->v, w);
        float sums[FB_MEND_COLUMNS], slope;
        mend_clear(sums);
        int lo, hi;
        keys_of_row(w, r, 0, &lo, &hi);
        fb_u32 left = bits;
        for (int j = lo; j < hi && __any_sync(~0u, left != 0); j++) {
            float S = mend_dot(q, row_at(keys, j), a->head_dim);
            float score = mend_score(a, w, w->head, S, query_of(w, r), j, &slope);
            if (score != -FB_INFINITY)
                left = mend_add(sums, bits, mend_round(exp2_fast(score - m)), row_at(values, j));
        }
        mend_write(out, sums, bits, factor);
    }
}
