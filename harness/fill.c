/* The values of a problem's inputs. What may not matter is left as it was made, NaN, so that every case with
 * a mask is also a case about masking. Floor: harness. Read cells.c next, which says what may not matter. */
#include "layout.h"

#include <math.h>
#include <string.h>

/* Values of a tensor by its place in the logical row-major order, so that they do not depend on the layout.
 */
typedef struct source {
    const fbh_case *what;
    uint64_t seed;
    fbh_id id;
} source;

static double value(source s, uint64_t n) {
    return s.what->exact ? fbh_exact((uint64_t)s.id + 1 + FBH_COUNT * s.seed, n)
                         : fbh_normal((uint64_t)s.id + 1 + FBH_COUNT * s.seed, n);
}

/* Bytes of masks: a seventh to a third are 0. */
static bool chance(source s, uint64_t n, double below) {
    return fbh_exact((uint64_t)s.id + 1 + FBH_COUNT * s.seed, n) >= below;
}

/* ---- Options ------------------------------------------------------------------------------------------- */

static void fill_lengths(const fbh_problem *p) {
    for (int64_t b = 0; b < p->desc.batch; b++) {
        if (p->what.lens_q)
            fbh_set(&p->t[FBH_LENS_Q], 0, 0, 0, b, (double)fbh_sequence_length(b, p->desc.len_q, false));
        if (p->what.lens_k)
            fbh_set(&p->t[FBH_LENS_K], 0, 0, 0, b, (double)fbh_sequence_length(b, p->desc.len_k, true));
    }
}

/* The mask's row 1 of the last batch entry's first head has no cell, nor has the first row of blocks there.
 */
static double mask_value(source s, const fbh_tensor *t, int64_t b, int64_t h, int64_t i, uint64_t n) {
    const bool last = b == t->batch - 1 && h == 0;
    if (s.id == FBH_MASK)
        return !(last && i == 1) && chance(s, n, -0.25);
    const bool only = t->batch * t->heads * t->rows == 1; /* the one row of blocks there is */
    return !(last && i == 0 && !only) && chance(s, n, -0.4);
}

static double bias_value(source s, const fbh_tensor *t, int64_t j, uint64_t n) {
    enum { NEAR = 1024 };
    if (s.what->far_bias)
        return j < t->cols - NEAR ? -1e4 : 0;
    if (s.what->neg_inf && !chance((source){s.what, s.seed, FBH_COUNT}, n, -0.4))
        return -(double)INFINITY;
    return value(s, n);
}

static void fill_option(const fbh_problem *p, fbh_id id, uint64_t seed) {
    const source s = {&p->what, seed, id};
    const fbh_tensor *t = &p->t[id];
    if (!t->buffer)
        return;
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < t->heads; h++)
            for (int64_t i = 0; i < t->rows; i++)
                for (int64_t j = 0; j < t->cols; j++) {
                    const uint64_t n = fbh_index(t, b, h, i, j);
                    fbh_set(t, b, h, i, j,
                            id == FBH_BIAS    ? bias_value(s, t, j, n)
                            : id == FBH_SINKS ? value(s, n)
                                              : mask_value(s, t, b, h, i, n));
                }
}

/* ---- Tensors ------------------------------------------------------------------------------------------- */

static double scale_of(const fb_desc *d) {
    return isnan(d->scale) ? 1 / sqrt((double)d->head_dim) : d->scale;
}

/* Massive activations: magnitudes by batch entry for v and dout, a few channels 10 times larger in q and in k
 * (so 100 times in their product), and a first key that dominates. */
static double massive(fbh_id id, int64_t b, int64_t i, int64_t d) {
    static const double magnitude[] = {0.1, 1, 20};
    if (id == FBH_V || id == FBH_DOUT)
        return magnitude[b % 3];
    return (d % 32 == 5 ? 10 : 1) * (id == FBH_K && i == 0 ? 2 : 1);
}

static double tensor_value(const fbh_problem *p, source s, int64_t b, int64_t i, int64_t d, uint64_t n) {
    const fbh_case *c = s.what;
    const bool logits = s.id == FBH_Q || s.id == FBH_K;
    if (logits && c->flat != 0)
        return c->flat;
    if (logits && c->shift != 0 && d == 0)
        return s.id == FBH_Q ? 1 : c->shift / scale_of(&p->desc);
    double x = value(s, n);
    if (s.id == FBH_Q)
        x *= c->gain;
    return c->massive ? x * massive(s.id, b, i, d) : x;
}

/* May the row be read at all? */
static bool matters(const fbh_problem *p, fbh_id id, int64_t b, int64_t h, int64_t i) {
    const fb_desc *d = &p->desc;
    if (p->what.exact)
        return true;
    switch (id) {
    case FBH_Q:
        return !p->what.lens_q || i < (int64_t)fbh_get(&p->t[FBH_LENS_Q], 0, 0, 0, b);
    case FBH_K:
    case FBH_V:
        return p->live_keys[(b * d->heads_kv + h) * d->len_k + i];
    case FBH_DLSE:
        if (d->flags & FB_SINKS)
            return true;
        break;
    default:
        break;
    }
    return p->live_rows[(b * d->heads_q + h) * d->len_q + i];
}

static void fill_tensor(const fbh_problem *p, fbh_id id, uint64_t seed) {
    const source s = {&p->what, seed, id};
    const fbh_tensor *t = &p->t[id];
    if (!t->buffer)
        return;
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < t->heads; h++)
            for (int64_t i = 0; i < fbh_rows(t, b); i++)
                for (int64_t d = 0; d < t->cols && matters(p, id, b, h, i); d++)
                    fbh_set(t, b, h, i, d, tensor_value(p, s, b, i, d, fbh_index(t, b, h, i, d)));
}

static void poison(const fbh_problem *p, fbh_id id) {
    if (p->t[id].buffer)
        memset(p->t[id].buffer->data, 0xFF, p->t[id].buffer->bytes);
}

void fbh_problem_fill(fbh_problem *p, uint64_t seed) {
    static const fbh_id options[] = {FBH_MASK, FBH_BLOCK_MASK, FBH_BIAS, FBH_SINKS};
    static const fbh_id tensors[] = {FBH_Q, FBH_K, FBH_V, FBH_DOUT, FBH_DLSE};
    fill_lengths(p);
    for (size_t n = 0; n < sizeof options / sizeof *options; n++)
        fill_option(p, options[n], seed);
    fbh_problem_cells(p);
    for (size_t n = 0; n < sizeof tensors / sizeof *tensors; n++)
        poison(p, tensors[n]);
    for (size_t n = 0; n < sizeof tensors / sizeof *tensors; n++)
        fill_tensor(p, tensors[n], seed);
}

/* ---- Copies -------------------------------------------------------------------------------------------- */

static void copy_tensor(const fbh_tensor *to, const fbh_tensor *from) {
    const bool alike = to->type == from->type && memcmp(&to->stride, &from->stride, sizeof to->stride) == 0;
    if (alike && to->offset == from->offset && to->buffer->bytes == from->buffer->bytes) {
        memcpy(to->buffer->data, from->buffer->data, to->buffer->bytes);
        return;
    }
    for (int64_t b = 0; b < to->batch; b++)
        for (int64_t h = 0; h < to->heads; h++)
            for (int64_t i = 0; i < fbh_rows(to, b); i++)
                for (int64_t d = 0; d < to->cols; d++)
                    fbh_set(to, b, h, i, d, fbh_get(from, b, h, i, d));
}

void fbh_problem_copy(fbh_problem *to, const fbh_problem *from) {
    const fb_desc *d = &to->desc;
    for (int id = 0; id < FBH_OUT; id++)
        if (to->t[id].buffer)
            copy_tensor(&to->t[id], &from->t[id]);
    memcpy(to->live_rows, from->live_rows,
           (size_t)(d->batch * d->heads_q * d->len_q) * sizeof *to->live_rows);
    memcpy(to->live_keys, from->live_keys,
           (size_t)(d->batch * d->heads_kv * d->len_k) * sizeof *to->live_keys);
}
