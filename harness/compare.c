/* What is right: rule R12, slab by slab (one batch entry, one head), and the rules that know no rounding.
 * Floor: harness. Every threshold of the harness stands in `allowed`, with its reason. */
#include "layout.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

/* One output under comparison. */
typedef struct trio {
    const fbh_problem *p; /* of got */
    const fbh_tensor *got, *want, *low;
    fbh_id id;
    double factors; /* at least 1: the largest |scale * k| for dq, |scale * q| for dk */
} trio;

typedef struct worst {
    double ratio, error, allowed, low_error;
    int64_t b, h, i, d;
} worst;

static double max(double a, double b) { return a > b ? a : b; }

/* Largest |low - ref| and |ref| of a slab. Where the plain formula overflows its own dtype and the truth does
 * not, it allows nothing. */
static void measure(const trio *t, int64_t b, int64_t h, double *low_error, double *largest) {
    *low_error = *largest = 0;
    for (int64_t i = 0; i < fbh_rows(t->want, b); i++)
        for (int64_t d = 0; d < t->want->cols; d++) {
            const double ref = fbh_get(t->want, b, h, i, d), low = fbh_get(t->low, b, h, i, d);
            if (isfinite(ref))
                *largest = max(*largest, fabs(ref));
            if (isfinite(ref) && isfinite(low))
                *low_error = max(*low_error, fabs(low - ref));
        }
}

/* R12: 2 * low's error for out, 3 * for gradients, and a floor, because low may be right by luck. */
static double allowed(const trio *t, double low_error, double largest) {
    const fb_dtype type = t->p->desc.dtype;
    const double factor = t->id == FBH_OUT ? 2 : 3, contract = 1e-5;
    /* 1e-10 of the largest value, or of the factors that dS meets on its way: logits reach 1e4, where a
     * double's last place is 2e-12, and P inherits that. What passed through f32 is off by 1e-8 or more. */
    if (type == FB_F64)
        return factor * low_error + 1e-10 * max(t->factors, largest);
    /* lse is f32 and sums in f32 whatever the inputs are, so low's error in 16 bits is no yardstick; 2e-6 is
     * 17 units of f32 for sums of up to 576 products. */
    if (t->id == FBH_LSE)
        return contract + 2e-6 * largest;
    if (type == FB_F32 || t->got->type == FB_F32)
        return factor * low_error + contract;
    /* One unit in the last place of the largest value: the final rounding costs half of one, and low may be
     * on the right side of it everywhere. Nothing can be better than it would be in f32. */
    return max(factor * low_error, max(contract, fbh_ulp((int)type, largest)));
}

/* Infinity if NaN stands on exactly one side, or infinities differ. */
static double error_of(double got, double ref) {
    if (isnan(got) || isnan(ref))
        return isnan(got) && isnan(ref) ? 0 : (double)INFINITY;
    if (isinf(got) || isinf(ref))
        return got == ref ? 0 : (double)INFINITY;
    return fabs(got - ref);
}

static void compare_slab(const trio *t, int64_t b, int64_t h, worst *w) {
    double low_error, largest;
    measure(t, b, h, &low_error, &largest);
    const double bound = allowed(t, low_error, largest);
    for (int64_t i = 0; i < fbh_rows(t->want, b); i++)
        for (int64_t d = 0; d < t->want->cols; d++) {
            const double error = error_of(fbh_get(t->got, b, h, i, d), fbh_get(t->want, b, h, i, d));
            if (error / bound > w->ratio)
                *w = (worst){error / bound, error, bound, low_error, b, h, i, d};
        }
}

static void place_text(const trio *t, int64_t b, int64_t h, int64_t i, int64_t d, char *text, size_t size) {
    const bool keys = t->id == FBH_DK || t->id == FBH_DV;
    snprintf(text, size, "%s[b%" PRId64 ",h%" PRId64 ",%c%" PRId64 ",%c%" PRId64 "]", t->got->name, b, h,
             keys ? 'j' : 'i', i, t->id == FBH_DBIAS ? 'j' : 'd', d);
}

/* What an element must be exactly, by R2 and R3: true, with the value, for rows without a cell and keys that
 * no query sees. */
static bool exact_value(const trio *t, int64_t b, int64_t h, int64_t i, int64_t d, double *x) {
    const fb_desc *desc = &t->p->desc;
    const bool of_keys = t->id == FBH_DK || t->id == FBH_DV;
    if (t->id == FBH_DBIAS || t->id == FBH_DSINKS || (t->id == FBH_LSE && desc->flags & FB_SINKS))
        return false;
    if (of_keys ? t->p->live_keys[(b * desc->heads_kv + h) * desc->len_k + i]
                : t->p->live_rows[(b * desc->heads_q + h) * desc->len_q + i])
        return false;
    *x = 0;
    if (t->id == FBH_LSE)
        *x = -(double)INFINITY;
    else if (t->id != FBH_OUT && desc->flags & FB_ACCUMULATE)
        *x = fbh_before(t->id, fbh_index(t->got, b, h, i, d));
    return true;
}

static bool exact_rules(const trio *t, char *message, size_t size) {
    for (int64_t b = 0; b < t->got->batch; b++)
        for (int64_t h = 0; h < t->got->heads; h++)
            for (int64_t i = 0; i < fbh_rows(t->got, b); i++)
                for (int64_t d = 0; d < t->got->cols; d++) {
                    double x;
                    if (!exact_value(t, b, h, i, d, &x))
                        break;
                    const double got = fbh_get(t->got, b, h, i, d);
                    if (got == x && !(t->id == FBH_OUT && signbit(got)))
                        continue;
                    char place[96];
                    place_text(t, b, h, i, d, place, sizeof place);
                    snprintf(message, size, "%s is %g, expected exactly %g: nothing that counts reaches it",
                             place, got, x);
                    return false;
                }
    return true;
}

static bool compare_tensor(const trio *t, double *ratio, char *message, size_t size) {
    worst w = {.ratio = -1};
    for (int64_t b = 0; b < t->want->batch; b++)
        for (int64_t h = 0; h < t->want->heads; h++)
            compare_slab(t, b, h, &w);
    if (w.ratio > *ratio)
        *ratio = w.ratio;
    if (w.ratio > 1) {
        char place[96];
        place_text(t, w.b, w.h, w.i, w.d, place, sizeof place);
        snprintf(message, size,
                 "%s is %.9g, expected %.9g; off by %.3g, allowed %.3g (the plain formula in %s: %.3g)",
                 place, fbh_get(t->got, w.b, w.h, w.i, w.d), fbh_get(t->want, w.b, w.h, w.i, w.d), w.error,
                 w.allowed, fb_dtype_name(t->p->desc.dtype), w.low_error);
        return false;
    }
    return exact_rules(t, message, size);
}

static double factors(const fbh_problem *want, fbh_id id) {
    const fbh_tensor *t = &want->t[id == FBH_DQ ? FBH_K : FBH_Q];
    double largest = 1;
    if (id != FBH_DQ && id != FBH_DK)
        return 1;
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < t->heads; h++)
            for (int64_t i = 0; i < fbh_rows(t, b); i++)
                for (int64_t d = 0; d < t->cols; d++)
                    largest = fmax(largest, fabs(fbh_get(t, b, h, i, d))); /* passes over NaN */
    return isnan(want->desc.scale) ? largest : max(1, fabs(want->desc.scale) * largest);
}

bool fbh_compare(const fbh_problem *got, const fbh_problem *want, const fbh_problem *low, fbh_pass pass,
                 double *ratio, char *message, size_t size) {
    double largest = 0;
    bool right = true;
    for (int id = 0; id < FBH_WORKSPACE && right; id++)
        if (fbh_writes(got, (fbh_id)id, pass)) {
            trio t = {got, &got->t[id], &want->t[id], &low->t[id], (fbh_id)id, 1};
            if (got->desc.dtype == FB_F64)
                t.factors = factors(want, (fbh_id)id);
            right = compare_tensor(&t, &largest, message, size);
        }
    if (ratio)
        *ratio = max(*ratio, largest);
    return right;
}
