/* READ FIRST: attention and its vector-Jacobian product in double precision. The formulas are those of
 * flashback.h; `forward_row` and `backward_row` are the two that matter, and everything else here finds
 * their operands.
 *
 * One idea carries the rules on masks: for each query, `find_cells` lists the keys that count. All sums run
 * over that list, so a cell that does not count is never read, whatever it holds, and an empty row is an
 * empty list.
 * Floor: cpu. Next: cpu.c, which runs the units in parallel. */
#include "ref.h"
#include "element.h"
#include <math.h>

/* Rows of dbias that are summed at once; K and V are read once for all of them. */
enum { BIAS_ROWS = 16 };

/* One (sequence, key/value head) and the row of it that is being computed; arrays lie in the scratch. */
typedef struct work {
    const fb__problem *p;
    const fb_io *io;
    const fb_desc *d; /* &p->d */
    fb_dtype stat;    /* of lse, dlse and sinks */
    fb__seq seq;

    double *K, *V;   /* [Lk,D] [Lk,Dv] */
    double *dK, *dV; /* as K and V */
    double *dbias;   /* [BIAS_ROWS,Lk] */

    int64_t n;      /* cells of the row that count; of cell c are */
    int64_t *key;   /* its j */
    double *bias;   /* its bias, 0 without one */
    double *S, *P;  /* score and probability */
    double *tanh_S; /* tanh(S/c), where there is a softcap */
    double *dS;     /* gradient of S */
    double *Q, *dQ; /* [D] */
    double *O, *dO; /* [Dv] */
    double LSE, dLSE, sink, delta;
} work;

/* ---- Memory -------------------------------------------------------------------------------------------- */

static void load_row(double *x, int64_t n, fb_dtype type, fb_ref from, int64_t at) {
    const void *data = fb__at(from);
    for (int64_t d = 0; d < n; d++)
        x[d] = fb__load(type, data, at + d);
}

static void store_row(const double *x, int64_t n, fb_dtype type, fb_ref to, int64_t at) {
    void *data = fb__at(to);
    for (int64_t d = 0; d < n; d++)
        fb__store(type, data, at + d, x[d]);
}

/* Writes a gradient, or adds it to the one that is there. Absent gradients are not wanted. */
static void store_gradient(const work *w, const double *x, int64_t n, fb_dtype type, fb_ref to, int64_t at) {
    void *data = fb__at(to);
    bool add = fb__has(w->p, FB_ACCUMULATE);
    for (int64_t d = 0; data && d < n; d++)
        fb__store(type, data, at + d, add ? fb__load(type, data, at + d) + x[d] : x[d]);
}

static void zero(double *x, int64_t n) {
    for (int64_t d = 0; d < n; d++)
        x[d] = 0;
}

/* ---- Arithmetic on rows -------------------------------------------------------------------------------- */

/* a.b; four sums that do not wait for each other. */
static double dot(const double *a, const double *b, int64_t n) {
    double sum[4] = {0};
    int64_t d = 0;
    for (; d + 4 <= n; d += 4)
        for (int64_t x = 0; x < 4; x++)
            sum[x] += a[d + x] * b[d + x];
    for (; d < n; d++)
        sum[0] += a[d] * b[d];
    return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

/* y += a x */
static void add_scaled(double *restrict y, double a, const double *restrict x, int64_t n) {
    for (int64_t d = 0; d < n; d++)
        y[d] += a * x[d];
}

/* ---- Which cells count --------------------------------------------------------------------------------- */

/* Row i of the block mask, one byte for every block_k keys. */
static const uint8_t *block_mask_row(const work *w, int64_t h, int64_t i) {
    const fb_desc *d = w->d;
    int64_t rows = (d->len_q + d->block_q - 1) / d->block_q, cols = (d->len_k + d->block_k - 1) / d->block_k;
    int64_t b = d->block_batch == 1 ? 0 : w->seq.b;
    if (d->block_heads == 1)
        h = 0;
    return (const uint8_t *)fb__at(w->io->block_mask) +
           ((b * d->block_heads + h) * rows + i / d->block_q) * cols;
}

/* Lists the keys that count for query i, with their bias. Where bias and mask repeat, strides are 0. */
static void find_cells(work *w, int64_t h, int64_t i) {
    const fb_desc *d = w->d;
    const void *bias = fb__at(w->io->bias);
    const uint8_t *mask = fb__at(w->io->mask), *blocks = NULL;
    int64_t bias_at = fb__index(d->bias, &w->seq, 0, h, i);
    if (mask)
        mask += fb__index(d->mask, &w->seq, 0, h, i);
    fb__range keys = fb__band_keys(w->seq.band, i);
    if (fb__has(w->p, FB_BLOCK_MASK) && keys.lo < keys.hi)
        blocks = block_mask_row(w, h, i);
    w->n = 0;
    for (int64_t j = keys.lo; j < keys.hi; j++) {
        if (mask && !mask[d->mask_shape.cols == 1 ? 0 : j])
            continue;
        if (blocks && !blocks[j / d->block_k])
            continue;
        double b = bias ? fb__load(d->dtype, bias, bias_at + (d->bias_shape.cols == 1 ? 0 : j)) : 0;
        if (b == -HUGE_VAL)
            continue;
        w->key[w->n] = j;
        w->bias[w->n++] = b;
    }
}

/* ---- The mathematics ----------------------------------------------------------------------------------- */

/* S = scale * q.k    softcap: S = c*tanh(S/c)    + bias */
static void score_row(work *w) {
    const fb_desc *d = w->d;
    double cap = d->softcap;
    for (int64_t c = 0; c < w->n; c++) {
        double S = d->scale * dot(w->Q, w->K + w->key[c] * d->head_dim, d->head_dim);
        if (cap > 0) {
            w->tanh_S[c] = tanh(S / cap);
            S = cap * w->tanh_S[c];
        }
        w->S[c] = S + w->bias[c];
    }
}

/* LSE = ln(sum_j exp(S) + exp(sink))    P = exp(S - LSE)    O = P V
 * The maximum m keeps every exponential at or below 1; a NaN in S must not get lost in it. */
static void forward_row(work *w) {
    int64_t Dv = w->d->head_dim_v;
    score_row(w);
    double m = w->sink, l;
    for (int64_t c = 0; c < w->n; c++)
        if (w->S[c] > m || isnan(w->S[c]))
            m = w->S[c];
    zero(w->O, Dv);
    w->LSE = m;
    if (m == -HUGE_VAL) /* an empty row */
        return;
    l = exp(w->sink - m);
    for (int64_t c = 0; c < w->n; c++)
        l += exp(w->S[c] - m);
    w->LSE = m + log(l);
    for (int64_t c = 0; c < w->n; c++)
        add_scaled(w->O, exp(w->S[c] - w->LSE), w->V + w->key[c] * Dv, Dv);
}

/* P = exp(S - LSE)    dP = dO V^T    dS = P * (dP - delta + dLSE) */
static void backward_row(work *w) {
    int64_t Dv = w->d->head_dim_v;
    score_row(w);
    for (int64_t c = 0; c < w->n; c++) {
        double dP = dot(w->dO, w->V + w->key[c] * Dv, Dv);
        w->P[c] = exp(w->S[c] - w->LSE);
        w->dS[c] = w->P[c] * (dP - w->delta + w->dLSE);
    }
}

/* dQ = scale*dS K    dK = scale*dS^T Q    dV = P^T dO    with dS *= 1 - tanh^2 for softcap */
static void add_gradients(work *w) {
    int64_t D = w->d->head_dim, Dv = w->d->head_dim_v;
    for (int64_t c = 0; c < w->n; c++) {
        int64_t j = w->key[c];
        double dS = w->dS[c];
        if (w->d->softcap > 0)
            dS *= 1 - w->tanh_S[c] * w->tanh_S[c];
        add_scaled(w->dQ, w->d->scale * dS, w->K + j * D, D);
        add_scaled(w->dK + j * D, w->d->scale * dS, w->Q, D);
        add_scaled(w->dV + j * Dv, w->P[c], w->dO, Dv);
    }
}

/* ---- Operands ------------------------------------------------------------------------------------------ */

static int64_t lse_at(const work *w, int64_t h, int64_t i) {
    return fb__index(fb__lse_strides(w->p), &w->seq, w->seq.row_q, h, i);
}

/* A head without a sink has one of -inf: exp(sink) is 0. */
static double load_sink(const work *w, int64_t h) {
    return fb__has(w->p, FB_SINKS) ? fb__load(w->stat, fb__at(w->io->sinks), h) : -HUGE_VAL;
}

static void load_keys(work *w, int64_t b, int64_t h_kv) {
    const fb_desc *d = w->d;
    w->seq = fb__problem_seq(w->p, w->io, b);
    for (int64_t j = 0; j < w->seq.len_k; j++) {
        load_row(w->K + j * d->head_dim, d->head_dim, d->dtype, w->io->k,
                 fb__index(d->k, &w->seq, w->seq.row_k, h_kv, j));
        load_row(w->V + j * d->head_dim_v, d->head_dim_v, d->dtype, w->io->v,
                 fb__index(d->v, &w->seq, w->seq.row_k, h_kv, j));
    }
}

static void load_query(work *w, int64_t h, int64_t i) {
    const fb_desc *d = w->d;
    find_cells(w, h, i);
    w->sink = load_sink(w, h);
    load_row(w->Q, d->head_dim, d->dtype, w->io->q, fb__index(d->q, &w->seq, w->seq.row_q, h, i));
}

/* What the backward knows of a row: LSE, dLSE, dO and delta = rowsum(dO * O).
 * False if nothing counts there, not even a sink. Where the sink is all there is, O is 0 whatever dO holds,
 * and neither is read. LSE tells: in a part of a larger problem (context parallelism) it differs from the
 * sink when other parts have cells. */
static bool load_cotangents(work *w, int64_t h, int64_t i) {
    const fb_desc *d = w->d;
    w->sink = load_sink(w, h);
    w->LSE = fb__load(w->stat, fb__at(w->io->lse), lse_at(w, h, i));
    if (w->LSE == -HUGE_VAL)
        return false;
    w->dLSE = fb__has(w->p, FB_DLSE) ? fb__load(w->stat, fb__at(w->io->dlse), lse_at(w, h, i)) : 0;
    w->delta = 0;
    if (w->n == 0 && w->LSE == w->sink)
        return true;
    load_row(w->O, d->head_dim_v, d->dtype, w->io->out, fb__index(d->out, &w->seq, w->seq.row_q, h, i));
    load_row(w->dO, d->head_dim_v, d->dtype, w->io->dout, fb__index(d->dout, &w->seq, w->seq.row_q, h, i));
    w->delta = dot(w->dO, w->O, d->head_dim_v);
    return true;
}

/* ---- Units --------------------------------------------------------------------------------------------- */

/* Query heads that read one key/value head; none if there are no query heads at all. */
static fb__range heads_of(const work *w, int64_t h_kv) {
    fb__range heads = {h_kv * w->p->group, (h_kv + 1) * w->p->group};
    if (heads.hi > w->d->heads_q)
        heads.hi = w->d->heads_q;
    return heads;
}

static void forward_unit(work *w, int64_t b, int64_t h_kv) {
    const fb_desc *d = w->d;
    fb__range heads = heads_of(w, h_kv);
    load_keys(w, b, h_kv);
    for (int64_t h = heads.lo; h < heads.hi; h++)
        for (int64_t i = 0; i < w->seq.len_q; i++) {
            load_query(w, h, i);
            forward_row(w);
            store_row(w->O, d->head_dim_v, d->dtype, w->io->out,
                      fb__index(d->out, &w->seq, w->seq.row_q, h, i));
            if (fb__at(w->io->lse))
                fb__store(w->stat, fb__at(w->io->lse), lse_at(w, h, i), w->LSE);
        }
}

static void gradient_unit(work *w, int64_t b, int64_t h_kv) {
    const fb_desc *d = w->d;
    fb__range heads = heads_of(w, h_kv);
    load_keys(w, b, h_kv);
    zero(w->dK, w->seq.len_k * d->head_dim);
    zero(w->dV, w->seq.len_k * d->head_dim_v);
    for (int64_t h = heads.lo; h < heads.hi; h++)
        for (int64_t i = 0; i < w->seq.len_q; i++) {
            load_query(w, h, i);
            zero(w->dQ, d->head_dim);
            if (load_cotangents(w, h, i)) {
                backward_row(w);
                add_gradients(w);
            }
            store_gradient(w, w->dQ, d->head_dim, d->dtype, w->io->dq,
                           fb__index(d->dq, &w->seq, w->seq.row_q, h, i));
        }
    for (int64_t j = 0; j < w->seq.len_k; j++) {
        store_gradient(w, w->dK + j * d->head_dim, d->head_dim, d->dtype, w->io->dk,
                       fb__index(d->dk, &w->seq, w->seq.row_k, h_kv, j));
        store_gradient(w, w->dV + j * d->head_dim_v, d->head_dim_v, d->dtype, w->io->dv,
                       fb__index(d->dv, &w->seq, w->seq.row_k, h_kv, j));
    }
}

/* Adds dS of queries [rows.lo, rows.hi) of one (b,h) to w->dbias, whose rows and columns repeat as the bias
 * does. */
static void add_dbias(work *w, int64_t b, int64_t h, fb__range rows) {
    fb_shape shape = w->d->bias_shape;
    load_keys(w, b, h / w->p->group);
    if (rows.hi > w->seq.len_q)
        rows.hi = w->seq.len_q;
    for (int64_t i = rows.lo; i < rows.hi; i++) {
        double *row = w->dbias + (shape.rows == 1 ? 0 : i - rows.lo) * shape.cols;
        load_query(w, h, i);
        if (!load_cotangents(w, h, i))
            continue;
        backward_row(w);
        for (int64_t c = 0; c < w->n; c++)
            row[shape.cols == 1 ? 0 : w->key[c]] += w->dS[c];
    }
}

/* One (batch, head) slice of dbias = dS before softcap's factor, summed over every (b,h) that reads the
 * slice. */
static void dbias_unit(work *w, int64_t slice_b, int64_t slice_h) {
    const fb_desc *d = w->d;
    fb_shape shape = d->bias_shape;
    fb__range batches = {slice_b, slice_b + 1}, heads = {slice_h, slice_h + 1};
    if (shape.batch == 1)
        batches = (fb__range){0, d->batch};
    if (shape.heads == 1)
        heads = (fb__range){0, d->heads_q};
    for (int64_t i = 0; i < shape.rows; i += BIAS_ROWS) {
        int64_t n = shape.rows - i < BIAS_ROWS ? shape.rows - i : BIAS_ROWS;
        fb__range rows = {i, i + n};
        if (shape.rows == 1)
            rows = (fb__range){0, d->len_q};
        zero(w->dbias, n * shape.cols);
        for (int64_t b = batches.lo; b < batches.hi; b++)
            for (int64_t h = heads.lo; h < heads.hi; h++)
                add_dbias(w, b, h, rows);
        for (int64_t r = 0; r < n; r++)
            store_gradient(w, w->dbias + r * shape.cols, shape.cols, d->dtype, w->io->dbias,
                           slice_b * d->dbias.batch + slice_h * d->dbias.head + (i + r) * d->dbias.row);
    }
}

/* dsink = sum_i exp(sink - LSE) * (dLSE - delta), over the whole batch */
static void dsink_unit(work *w, int64_t h) {
    double dsink = 0;
    for (int64_t b = 0; b < w->d->batch; b++) {
        w->seq = fb__problem_seq(w->p, w->io, b);
        for (int64_t i = 0; i < w->seq.len_q; i++) {
            find_cells(w, h, i);
            if (load_cotangents(w, h, i))
                dsink += exp(w->sink - w->LSE) * (w->dLSE - w->delta);
        }
    }
    store_gradient(w, &dsink, 1, w->stat, w->io->dsinks, h);
}

/* ---- The interface ------------------------------------------------------------------------------------- */

/* Doubles (and keys, which are as wide) of scratch for one key, and for the rest. */
static uint64_t per_key(const fb_desc *d) {
    return (uint64_t)(2 * (d->head_dim + d->head_dim_v) + BIAS_ROWS + 6);
}
static uint64_t per_row(const fb_desc *d) { return (uint64_t)(2 * (d->head_dim + d->head_dim_v)); }

size_t fb__ref_scratch(const fb__problem *p) {
    uint64_t keys = (uint64_t)p->d.len_k, fixed = per_row(&p->d) + 1 + BIAS_ROWS; /* 1 to align */
    if (keys > (SIZE_MAX / sizeof(double) - fixed) / per_key(&p->d))
        return SIZE_MAX;
    return (size_t)(keys * per_key(&p->d) + fixed) * sizeof(double);
}

static work carve(const fb__problem *p, const fb_io *io, void *scratch) {
    const fb_desc *d = &p->d;
    int64_t D = d->head_dim, Dv = d->head_dim_v, Lk = d->len_k;
    work w = {.p = p, .io = io, .d = d, .stat = d->dtype == FB_F64 ? FB_F64 : FB_F32};
    double *at = (double *)(((uintptr_t)scratch + sizeof(double) - 1) / sizeof(double) * sizeof(double));
    w.K = at, at += Lk * D;
    w.V = at, at += Lk * Dv;
    w.dK = at, at += Lk * D;
    w.dV = at, at += Lk * Dv;
    w.dbias = at, at += BIAS_ROWS * (Lk > 1 ? Lk : 1); /* one column may repeat over no keys at all */
    w.bias = at, at += Lk;
    w.S = at, at += Lk;
    w.P = at, at += Lk;
    w.tanh_S = at, at += Lk;
    w.dS = at, at += Lk;
    w.Q = at, at += D;
    w.dQ = at, at += D;
    w.O = at, at += Dv;
    w.dO = at, at += Dv;
    w.key = (int64_t *)at;
    return w;
}

static int64_t gradient_units(const fb_desc *d) { return d->batch * d->heads_kv; }

static int64_t dbias_units(const fb__problem *p) {
    return fb__has(p, FB_DBIAS) ? p->d.bias_shape.batch * p->d.bias_shape.heads : 0;
}

int64_t fb__ref_units(const fb__problem *p, fb__pass pass) {
    int64_t units = gradient_units(&p->d);
    if (pass == FB__BACKWARD)
        units += dbias_units(p) + (fb__has(p, FB_DSINKS) ? p->d.heads_q : 0);
    return units;
}

void fb__ref_run(const fb__problem *p, fb__pass pass, const fb_io *io, int64_t unit, void *scratch) {
    const fb_desc *d = &p->d;
    int64_t gradients = gradient_units(d), slices = dbias_units(p);
    work w = carve(p, io, scratch);
    if (pass == FB__FORWARD)
        forward_unit(&w, unit / d->heads_kv, unit % d->heads_kv);
    else if (unit < gradients)
        gradient_unit(&w, unit / d->heads_kv, unit % d->heads_kv);
    else if (unit < gradients + slices)
        dbias_unit(&w, (unit - gradients) / d->bias_shape.heads, (unit - gradients) % d->bias_shape.heads);
    else
        dsink_unit(&w, unit - gradients - slices);
}
