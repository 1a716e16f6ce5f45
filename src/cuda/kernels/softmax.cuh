// What the forward kernels share about rows of the softmax: how far a maximum lags, and how a row ends. Next:
// forward.cu, hopper_forward.cu.
#pragma once
#include "problem.cuh"

// The maximum lags behind by up to this, in base 2, before O and l are rescaled: P stays below 2^8, and rescaling is
// rare after the first tiles.
#define LAG 8

// Maxima up to this size leave a fused multiply-add no remainder that matters.
#define FUSED_LIMIT 65536.f

// One row of the warp: LSE, and what O is multiplied by.
FB_FN float close_row(const fb__args *a, const work *w, int r, float m, float l, bool first_slab) {
    float sink = a->sinks ? a->sinks[head_of(w, r)] : -FB_INFINITY, lse = -FB_INFINITY, factor = 0;
    if (l == 0) // no cell counts, and O is 0
        lse = sink;
    else {
        float top = fmaxf(m, to_log2(sink)), shift = top == -FB_INFINITY ? 0 : top;
        if (sink != sink)
            shift = sink;
        factor = exp2_fast(m - shift);
        l = l * factor + exp2_fast(to_log2(sink) - shift);
        factor /= l;
        lse = fmaf(shift, FB_LN2, fmaf(shift, FB_LN2_REST, logf(l)));
    }
    if (a->lse && first_slab && FB_LANE % 4 == 0)
        a->lse[stat_at(a, w, r)] = lse;
    return factor;
}
