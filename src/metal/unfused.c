/* See unfused.h. */
#include "unfused.h"

/* Functions of unfused.metal, in the order of FB__METAL_KERNELS. */
enum { S, DP, SOFTMAX, O, DBIAS, GRADIENT, DQ, DK, DV };

enum { COLUMNS = 8, PLACE = 16 };

/* Floats of a row of scores. */
static int64_t row_of(const fb__problem *p) { return (p->d.len_k + COLUMNS - 1) / COLUMNS * COLUMNS; }

/* Rows of scores; padded to len_q in a packed batch. */
static int64_t queries_of(const fb__problem *p) { return p->d.batch * p->d.heads_q * p->d.len_q; }

static size_t place(size_t *end, double bytes) {
    size_t at = *end;
    *end += ((size_t)bytes + PLACE - 1) / PLACE * PLACE;
    return at;
}

/* The score matrices are what core/route.c has counted, but for columns that fill up a row. */
fb_status fb__metal_unfused_lay_out(fb__metal_state *s, const fb__problem *p) {
    const bool backward = !fb__has(p, FB_FORWARD_ONLY);
    const double queries = (double)p->d.batch * (double)p->d.heads_q * (double)p->d.len_q,
                 rows = (double)p->d.heads_q * (double)p->d.total_q, scores = queries * 4 * (double)row_of(p),
                 stats = (queries > rows ? queries : rows) * 4;
    size_t end = 0;
    if (2 * scores + stats > 0x1p62)
        return fb__error(FB_INVALID, "overflow: the workspace of this problem would not fit into 64 bits");
    s->chunks[FB__FORWARD] = s->chunks[FB__BACKWARD] = 1;
    s->at_delta = s->at_partial_lse = place(&end, stats);
    s->at_partial[0] = s->at_partial[1] = place(&end, scores);
    s->at_gradients = place(&end, backward ? scores : 0);
    s->workspace = end + PLACE; /* to align it */
    return FB_OK;
}

void fb__metal_unfused_explain(const fb__problem *p, fb__text *text) {
    const bool backward = !fb__has(p, FB_FORWARD_ONLY);
    fb__text_add(text, "scores: %d matri%s of %lld x %lld in f32, %.3f GB\n", backward ? 2 : 1,
                 backward ? "ces" : "x", (long long)queries_of(p), (long long)row_of(p),
                 (double)queries_of(p) * (double)row_of(p) * (backward ? 8e-9 : 4e-9));
}

/* ---- Dispatches ---- */

static int64_t tiles(int64_t x, int tile) { return (x + tile - 1) / tile; }

static fb_status start(fb__metal_call *c, int function, int64_t groups, double work, fb__metal_args *a) {
    const fb__metal_loaded *k = &c->s->kernels[FB__METAL_UNFUSED];
    const fb__metal_grid grid = {
        .x = groups, .y = 1, .threads = k->spec.THREADS, .shared_bytes = k->spec.shared_bytes, .work = work};
    return fb__metal_call_dispatch(c, k->pipelines[function], &grid, a);
}

/* A product whose result has so many rows and columns for each of batch * heads, over so many terms. */
static fb_status multiply(fb__metal_call *c, int function, const fb__problem *p, int64_t heads, int64_t rows,
                          int64_t columns, int64_t terms, fb__metal_args *a) {
    const fb__metal_spec *spec = &c->s->kernels[FB__METAL_UNFUSED].spec;
    const int64_t parts = p->d.batch * heads;
    const double work = 2 * (double)parts * (double)rows * (double)columns * (double)terms;
    return start(c, function, tiles(rows, spec->BM) * tiles(columns, spec->BN) * parts, work, a);
}

/* A simdgroup for each row of scores; exponentials and looks at masks, more than sums. */
static fb_status start_rows(fb__metal_call *c, int function, const fb__problem *p, fb__metal_args *a) {
    const int each = c->s->kernels[FB__METAL_UNFUSED].spec.THREADS / 32;
    return start(c, function, tiles(queries_of(p), each), 40 * (double)queries_of(p) * (double)row_of(p), a);
}

fb_status fb__metal_unfused_forward(fb__metal_call *c, const fb__problem *p, fb__metal_args *a) {
    const fb_desc *d = &p->d;
    FB_TRY(multiply(c, S, p, d->heads_q, d->len_q, d->len_k, d->head_dim, a));
    fb__metal_call_barrier(c);
    FB_TRY(start_rows(c, SOFTMAX, p, a));
    fb__metal_call_barrier(c);
    return multiply(c, O, p, d->heads_q, d->len_q, d->head_dim_v, d->len_k, a);
}

/* A thread for each of its cells, which goes through all that share it. */
static fb_status start_dbias(fb__metal_call *c, const fb__problem *p, fb__metal_args *a) {
    const fb_shape *n = &p->d.bias_shape;
    const int64_t cells = n->batch * n->heads * n->rows * n->cols;
    return start(c, DBIAS, tiles(cells, c->s->kernels[FB__METAL_UNFUSED].spec.THREADS),
                 100 * (double)queries_of(p) * (double)row_of(p), a);
}

fb_status fb__metal_unfused_backward(fb__metal_call *c, const fb__problem *p, fb__metal_args *a) {
    const fb_desc *d = &p->d;
    const bool dq = !fb__has(p, FB_NO_DQ), dk = !fb__has(p, FB_NO_DK), dv = !fb__has(p, FB_NO_DV);
    const int64_t queries = d->len_q * p->group;
    if (!dq && !dk && !dv && !fb__has(p, FB_DBIAS))
        return FB_OK;
    FB_TRY(multiply(c, S, p, d->heads_q, d->len_q, d->len_k, d->head_dim, a));
    FB_TRY(multiply(c, DP, p, d->heads_q, d->len_q, d->len_k, d->head_dim_v, a));
    fb__metal_call_barrier(c); /* delta is there as well */
    if (fb__has(p, FB_DBIAS)) {
        FB_TRY(start_dbias(c, p, a));
        fb__metal_call_barrier(c);
    }
    FB_TRY(start_rows(c, GRADIENT, p, a));
    fb__metal_call_barrier(c);
    if (dq)
        FB_TRY(multiply(c, DQ, p, d->heads_q, d->len_q, d->head_dim, d->len_k, a));
    if (dk)
        FB_TRY(multiply(c, DK, p, d->heads_kv, d->len_k, d->head_dim, queries, a));
    return dv ? multiply(c, DV, p, d->heads_kv, d->len_k, d->head_dim_v, queries, a) : FB_OK;
}
