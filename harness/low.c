/* The plain formula, materialised, in the precision of a dtype: what anyone would write without this library.
 * Its error against float64 is the yardstick of rule R12; in float64 it is an oracle that owes nothing to the
 * library. Floor: harness. Read `forward_row` and `backward_row`; compare.c uses the result. */
#include "layout.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One head of a row, [Lk] each. */
typedef struct row {
    const fb_desc *desc;
    fb_dtype type;  /* S, P, O, dP and dS are rounded to it */
    fb_dtype kept;  /* what O is rounded to between the passes, and LSE accordingly */
    fb_dtype cells; /* what P, before it is divided by l, and dS are rounded to besides, for products alone */
    bool again;     /* the backward makes P again, from LSE */
    bool reorder;   /* sums over d run backwards, and q is scaled, to base 2, instead of S */
    bool single;    /* sums and functions are in float; otherwise in double */
    double base;    /* cells are rounded after division by exp(base) */
    double scale, sink, m, l;
    bool *counts;
    int64_t keys;
    double *q; /* [D] */
    float *q_f32;
    double *S, *capped, *P;    /* capped: S before the bias */
    float *f32[FBH_WORKSPACE]; /* copies of `of_products`; to convert in each product takes longer */
} row;

/* A row of a tensor and of its copy: functions that know `single` use the one or the other. */
typedef struct line {
    double *f64;
    float *f32;
} line;

/* x.y, one rounding per operation, from the first product to the last or backwards. */
#define DOT(name, sum_type, type)                                                                            \
    static double name(bool backwards, const type *x, const type *y, int64_t n) {                            \
        sum_type sum = 0;                                                                                    \
        for (int64_t e = 0; e < n; e++) {                                                                    \
            const int64_t d = backwards ? n - 1 - e : e;                                                     \
            sum += (sum_type)x[d] * (sum_type)y[d];                                                          \
        }                                                                                                    \
        return (double)sum;                                                                                  \
    }
DOT(dot_f64, double, double)
DOT(dot_f32, float, float)
DOT(dot_f64_in_f32, float, double)

static double dot(const row *w, line x, line y, int64_t n) {
    return w->single ? dot_f32(w->reorder, x.f32, y.f32, n) : dot_f64(w->reorder, x.f64, y.f64, n);
}

/* y += a * x */
static void axpy(const row *w, double a, line x, line y, int64_t n) {
    const float a_f32 = (float)a;
    if (w->single)
        for (int64_t d = 0; d < n; d++)
            y.f32[d] += a_f32 * x.f32[d];
    else
        for (int64_t d = 0; d < n; d++)
            y.f64[d] += a * x.f64[d];
}

static double exponential(const row *w, double x) { return w->single ? (double)expf((float)x) : exp(x); }
static double logarithm(const row *w, double x) { return w->single ? (double)logf((float)x) : log(x); }
static double tangent(const row *w, double x) { return w->single ? (double)tanhf((float)x) : tanh(x); }
static double sum_of(const row *w, double x, double y) {
    return w->single ? (double)((float)x + (float)y) : x + y;
}
static double rounded(const row *w, double x) { return fbh_round((int)w->type, x); }
static double cell(const row *w, double x) { return fbh_round((int)w->cells, x); }

static double *at(const fbh_problem *p, fbh_id id, int64_t b, int64_t h, int64_t i) {
    return fbh_at(&p->t[id], b, h, i, 0);
}

static line line_at(const row *w, const fbh_problem *p, fbh_id id, int64_t b, int64_t h, int64_t i) {
    double *f64 = at(p, id, b, h, i);
    return (line){f64, w->f32[id] + (f64 - (const double *)(const void *)p->t[id].buffer->data)};
}

/* exp(S - m), rounded as a cell where exp(S - top) is. */
static double weight(const row *w, double S, double top) {
    return cell(w, exponential(w, S - top)) * exponential(w, top - w->m);
}

/* S = scale * q.k, then softcap, then bias; m and l of the softmax with the sink in it; P = exp(S - m) / l.
 */
static void scores(row *w, const fbh_problem *p, int64_t b, int64_t h, int64_t h_kv, int64_t i) {
    const fb_desc *d = w->desc;
    const double ln2 = 0.69314718055994531;
    const double before = w->reorder ? w->scale / ln2 : 1, after = w->reorder ? ln2 : w->scale;
    for (int64_t e = 0; e < d->head_dim; e++) {
        w->q[e] = before * at(p, FBH_Q, b, h, i)[e];
        w->q_f32[e] = (float)w->q[e];
    }
    double top = -(double)INFINITY; /* of the keys; kernels let the sink join last */
    w->m = w->sink;
    for (int64_t j = 0; j < w->keys; j++) {
        if (!w->counts[j])
            continue;
        double S =
            rounded(w, after * dot(w, (line){w->q, w->q_f32}, line_at(w, p, FBH_K, b, h_kv, j), d->head_dim));
        if (d->softcap > 0)
            S = rounded(w, d->softcap * tangent(w, S / d->softcap));
        w->capped[j] = S;
        if (d->flags & FB_BIAS)
            S = rounded(w, S + fbh_get(&p->t[FBH_BIAS], b, h, i, j));
        w->S[j] = S;
        if (S > top || isnan(S))
            top = S;
    }
    if (!(top < w->sink))
        w->m = top;
    top -= w->base;
    w->l = exponential(w, w->sink - w->m);
    for (int64_t j = 0; j < w->keys; j++)
        if (w->counts[j]) {
            w->P[j] = exponential(w, w->S[j] - w->m);
            w->l = sum_of(w, w->l, w->P[j]);
        }
    for (int64_t j = 0; j < w->keys; j++)
        if (w->counts[j])
            w->P[j] = rounded(w, (w->cells == FB_F64 ? w->P[j] : weight(w, w->S[j], top)) / w->l);
}

/* O = P V    LSE = m + ln l. P made again is exp(S - LSE): m = LSE, l = 1. */
static void forward_row(row *w, const fbh_problem *p, int64_t b, int64_t h, int64_t h_kv, int64_t i) {
    const int64_t Dv = w->desc->head_dim_v;
    const line O = line_at(w, p, FBH_OUT, b, h, i);
    scores(w, p, b, h, h_kv, i);
    for (int64_t j = 0; j < w->keys; j++)
        if (w->counts[j])
            axpy(w, w->P[j], line_at(w, p, FBH_V, b, h_kv, j), O, Dv);
    for (int64_t d = 0; d < Dv; d++)
        O.f64[d] = fbh_round((int)w->kept, w->single ? (double)O.f32[d] : O.f64[d]);
    const double LSE = sum_of(w, w->m, logarithm(w, w->l));
    if (p->t[FBH_LSE].buffer)
        *at(p, FBH_LSE, b, h, i) = LSE;
    if (!w->again)
        return;
    w->m = fbh_round(w->kept == FB_F64 ? FB_F64 : FB_F32, LSE);
    w->l = 1;
    for (int64_t j = 0; j < w->keys; j++)
        if (w->counts[j])
            w->P[j] = exp(w->S[j] - w->m);
}

/* dP = dO V^T    dS = P * (dP - delta + dLSE)    dV += P dO    dK += scale dS q    dQ += scale dS k
 * The tensors themselves, of doubles, hold the sums. An empty row has delta = 0, whatever its dO holds.
 * delta is summed the other way round than dP: with one key they are equal, and would cancel by luck. */
static void backward_row(row *w, const fbh_problem *p, int64_t b, int64_t h, int64_t h_kv, int64_t i,
                         bool empty) {
    const fb_desc *d = w->desc;
    const int64_t D = d->head_dim, Dv = d->head_dim_v;
    const line dO = line_at(w, p, FBH_DOUT, b, h, i), q = line_at(w, p, FBH_Q, b, h, i);
    const double *O = at(p, FBH_OUT, b, h, i);
    const double dLSE = d->flags & FB_DLSE ? *at(p, FBH_DLSE, b, h, i) : 0;
    const double delta = empty               ? 0
                         : w->kept == FB_F64 ? dot_f64(!w->reorder, dO.f64, O, Dv)
                                             : dot_f64_in_f32(!w->reorder, dO.f64, O, Dv);
    for (int64_t j = 0; j < w->keys; j++) {
        if (!w->counts[j])
            continue;
        const double dP = rounded(w, dot(w, dO, line_at(w, p, FBH_V, b, h_kv, j), Dv));
        double dS = rounded(w, w->P[j] * sum_of(w, sum_of(w, dP, -delta), dLSE));
        if (p->t[FBH_DBIAS].buffer) {
            double *dbias = fbh_at(&p->t[FBH_DBIAS], b, h, i, j);
            *dbias = sum_of(w, *dbias, dS);
        }
        if (d->softcap > 0) {
            const double t = w->capped[j] / d->softcap;
            dS = rounded(w, dS * (1 - t * t));
        }
        dS = cell(w, dS);
        if (p->t[FBH_DQ].buffer)
            axpy(w, w->scale * dS, line_at(w, p, FBH_K, b, h_kv, j), line_at(w, p, FBH_DQ, b, h, i), D);
        if (p->t[FBH_DK].buffer)
            axpy(w, w->scale * dS, q, line_at(w, p, FBH_DK, b, h_kv, j), D);
        if (p->t[FBH_DV].buffer)
            axpy(w, cell(w, w->P[j]), dO, line_at(w, p, FBH_DV, b, h_kv, j), Dv);
    }
    if (p->t[FBH_DSINKS].buffer) {
        double *dsink = at(p, FBH_DSINKS, 0, h, 0);
        *dsink = sum_of(w, *dsink, exponential(w, w->sink - w->m) / w->l * sum_of(w, dLSE, -delta));
    }
}

static void every_row(row *w, const fbh_problem *p) {
    const fb_desc *d = w->desc;
    for (int64_t b = 0; b < d->batch; b++)
        for (int64_t h = 0; h < d->heads_q; h++)
            for (int64_t i = 0; i < fbh_rows(&p->t[FBH_Q], b); i++) {
                const int64_t h_kv = h / (d->heads_q / d->heads_kv);
                const bool empty = fbh_cells(p, b, h, i, w->counts) == 0;
                w->keys = fbh_rows(&p->t[FBH_K], b);
                w->sink = d->flags & FB_SINKS ? fbh_get(&p->t[FBH_SINKS], 0, h, 0, 0) : -(double)INFINITY;
                if (empty && !(d->flags & FB_SINKS)) {
                    if (p->t[FBH_LSE].buffer)
                        *at(p, FBH_LSE, b, h, i) = -(double)INFINITY;
                    continue;
                }
                forward_row(w, p, b, h, h_kv, i);
                if (!(d->flags & FB_FORWARD_ONLY))
                    backward_row(w, p, b, h, h_kv, i, empty);
            }
}

/* Rounds the summed gradients, after adding what was there before. */
static void finish(const row *w, const fbh_problem *p, fbh_id id) {
    const fbh_tensor *t = &p->t[id];
    const bool add = w->desc->flags & FB_ACCUMULATE;
    const int type = id == FBH_DSINKS && w->single ? FB_F32 : (int)w->type;
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < t->heads; h++)
            for (int64_t i = 0; i < fbh_rows(t, b); i++)
                for (int64_t d = 0; d < t->cols; d++) {
                    const double before = add ? fbh_before(id, fbh_index(t, b, h, i, d)) : 0;
                    fbh_set(t, b, h, i, d, fbh_round(type, before + fbh_get(t, b, h, i, d)));
                }
}

static const fbh_id of_products[] = {FBH_Q, FBH_K, FBH_V, FBH_DOUT, FBH_OUT, FBH_DQ, FBH_DK, FBH_DV};
enum { OF_PRODUCTS = sizeof of_products / sizeof *of_products };

static void narrow_all(row *w, const fbh_problem *p) {
    for (int n = 0; n < OF_PRODUCTS; n++) {
        const fbh_buffer *buffer = p->t[of_products[n]].buffer;
        const size_t count = buffer ? buffer->bytes / sizeof(double) : 0;
        float *f32 = w->f32[of_products[n]] = fbh_make(count, sizeof *f32);
        for (size_t e = 0; e < count; e++)
            f32[e] = (float)((const double *)(void *)buffer->data)[e];
    }
}

/* Sums in float go to the tensors; O is there already. */
static void widen_all(row *w, const fbh_problem *p) {
    for (int n = 0; n < OF_PRODUCTS; n++) {
        const fbh_id id = of_products[n];
        const fbh_buffer *buffer = p->t[id].buffer;
        const size_t count = w->single && id > FBH_OUT && buffer ? buffer->bytes / sizeof(double) : 0;
        for (size_t e = 0; e < count; e++)
            ((double *)(void *)buffer->data)[e] = (double)w->f32[id][e];
        free(w->f32[id]);
    }
}

/* w: how to compute; the rest of it follows. */
static void compute(fbh_problem *p, row w) {
    const size_t keys = (size_t)p->desc.len_k;
    w.desc = &p->desc;
    w.single = w.type != FB_F64;
    w.scale = isnan(p->desc.scale) ? 1 / sqrt((double)p->desc.head_dim) : p->desc.scale;
    w.counts = fbh_make(keys, sizeof *w.counts);
    w.S = fbh_make(3 * keys, sizeof *w.S);
    w.q = fbh_make((size_t)p->desc.head_dim, sizeof *w.q);
    w.q_f32 = fbh_make((size_t)p->desc.head_dim, sizeof *w.q_f32);
    w.capped = w.S + keys;
    w.P = w.S + 2 * keys;
    for (int id = FBH_OUT; id < FBH_WORKSPACE; id++)
        if (p->t[id].buffer)
            memset(p->t[id].buffer->data, 0, p->t[id].buffer->bytes);
    narrow_all(&w, p);
    every_row(&w, p);
    widen_all(&w, p);
    for (int id = FBH_DQ; id < FBH_WORKSPACE; id++)
        if (p->t[id].buffer)
            finish(&w, p, (fbh_id)id);
    free(w.q_f32);
    free(w.q);
    free(w.S);
    free(w.counts);
}

void fbh_low(fbh_problem *p, fb_dtype type) {
    compute(p, (row){.type = type, .kept = type, .cells = FB_F64});
}

void fbh_low_reordered(fbh_problem *p, fb_dtype type) {
    compute(p, (row){.type = type, .kept = type, .cells = FB_F64, .reorder = true});
}

void fbh_kept(fbh_problem *p, fb_dtype kept) {
    compute(p, (row){.type = FB_F64, .kept = kept, .cells = FB_F64, .again = true});
}

void fbh_low_cells(fbh_problem *p, fb_dtype cells, double base) {
    compute(p, (row){.type = FB_F32, .kept = cells, .cells = cells, .again = true, .base = base});
}
