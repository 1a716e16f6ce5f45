/* See unfused.h. The query heads of a group lie one after the other: their rows are the rows of one matrix,
 * so that the products need no copy of K and V for each of them, and dK and dV are summed over the group
 * inside a product, in f32 and in one order. */
#include "unfused.h"
#include "launch.h"

/* Rows and packs in units that products like: 16 bytes of any element, and 32 of f32. */
#define COLUMNS 8
#define PLACE 256

/* Workspace that NVIDIA advises for products, from Hopper on and before. */
#define BLAS_BYTES(cc) ((size_t)((cc) >= 90 ? 32 : 4) << 20)

#define MAX_BLOCKS INT64_C(0x7fffffff)

/* ---- The plan ---- */

static int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }

/* A product needs this many columns even where a tensor has none. */
static int64_t wide(int64_t columns) { return columns ? round_up(columns, COLUMNS) : COLUMNS; }

static double larger(double a, double b) { return a > b ? a : b; }

static size_t place(size_t *end, double bytes) {
    size_t at = *end;
    *end += ((size_t)bytes + PLACE - 1) / PLACE * PLACE;
    return at;
}

/* Blocks of one launch: a row of scores each, eight rows of a pack, or up to 256 columns of dbias. */
static fb_status check_blocks(const fb__problem *p, double queries, double keys) {
    const fb_shape *n = &p->d.bias_shape;
    double most = larger(queries, keys / 8);
    if (fb__has(p, FB_DBIAS))
        most =
            larger(most, (double)n->batch * (double)n->heads * (double)n->rows * ((double)n->cols / 32 + 1));
    if (most > (double)MAX_BLOCKS)
        return fb__error(FB_UNSUPPORTED,
                         "route unfused needs up to %.3g blocks of threads, a launch takes %lld; cut the "
                         "batch or the heads, or take route fused",
                         most, (long long)MAX_BLOCKS);
    return FB_OK;
}

static void lay_out_packs(fb__unfused_plan *u, const fb__problem *p, size_t *end) {
    const bool backward = !fb__has(p, FB_FORWARD_ONLY);
    const double size = (double)fb__dtype_bytes(p->d.dtype),
                 heads = (double)p->d.batch * (double)p->d.heads_kv;
    const struct {
        int64_t rows, columns;
    } packs[FB_PACKS] = {[FB_PACK_Q] = {u->queries, u->wide},
                         [FB_PACK_K] = {u->keys, u->wide},
                         [FB_PACK_V] = {u->keys, u->wide_v},
                         [FB_PACK_DOUT] = {backward ? u->queries : 0, u->wide_v}};
    u->any_bytes = (size_t)(heads * FB_PACKS * 4);
    u->at_any = place(end, heads * FB_PACKS * 4);
    for (int t = 0; t < FB_PACKS; t++) {
        u->at_odd[t] = place(end, (double)packs[t].rows);
        u->at_pack[t] = place(end, (double)packs[t].rows * (double)packs[t].columns * size);
    }
}

/* The score matrices are what core/route.c has counted, but for columns that fill up a row. */
fb_status fb__unfused_lay_out(fb__cuda_state *s, const fb__problem *p) {
    const fb_desc *d = &p->d;
    fb__unfused_plan *u = &s->unfused;
    const bool backward = !fb__has(p, FB_FORWARD_ONLY);
    const double queries = (double)d->batch * (double)d->heads_q * (double)d->len_q,
                 keys = (double)d->batch * (double)d->heads_kv * (double)d->len_k;
    FB_TRY(check_blocks(p, queries, keys));
    u->row = round_up(d->len_k, COLUMNS), u->wide = wide(d->head_dim), u->wide_v = wide(d->head_dim_v);
    u->queries = (int64_t)queries, u->keys = (int64_t)keys;
    const double scores = queries * 4 * (double)u->row, widest = larger((double)u->wide, (double)u->wide_v);
    if (2 * scores + (queries + keys) * 8 * (2 * widest + 4) > 0x1p62)
        return fb__error(FB_INVALID, "overflow: the workspace of this problem would not fit into 64 bits");
    size_t end = 0;
    lay_out_packs(u, p, &end);
    u->at_factor = s->at_delta = place(&end, larger(queries, (double)fb__launch_rows(p)) * 4);
    u->at_sum[FB_SUM_QUERIES] = place(&end, queries * 4 * (backward ? widest : (double)u->wide_v));
    u->at_sum[FB_SUM_K] = place(&end, backward ? keys * 4 * (double)u->wide : 0);
    u->at_sum[FB_SUM_V] = place(&end, backward ? keys * 4 * (double)u->wide_v : 0);
    u->at_scores[0] = place(&end, scores);
    u->at_scores[1] = place(&end, backward ? scores : 0);
    u->at_blas = u->bytes = end;
    s->workspace = end + PLACE; /* to align it */
    return FB_OK;
}

/* No score at all: nothing to multiply. */
static bool is_empty(const fb__unfused_plan *u) { return !u->queries || !u->keys; }

/* Rows of scores count in floats; of P and dS, which take their places, in elements. */
static fb__product_shape shape_of(const fb__unfused_plan *u, const fb__problem *p, int product) {
    const fb_desc *d = &p->d;
    const int64_t rows = p->group * d->len_q, keys = d->len_k,
                  cells = u->row * 4 / (int64_t)fb__dtype_bytes(d->dtype);
    const int64_t columns = product == FB__PRODUCT_S || product == FB__PRODUCT_DQ || product == FB__PRODUCT_DK
                                ? u->wide
                                : u->wide_v;
    const fb__product_matrix of_queries = {columns, rows * columns, false},
                             of_keys = {columns, keys * columns, false},
                             scores = {u->row, rows * u->row, false}, weights = {cells, rows * cells, false};
    fb__product_shape s = {.type = d->dtype, .batch = d->batch * d->heads_kv};
    switch (product) {
    case FB__PRODUCT_S:
    case FB__PRODUCT_DP:
        s.rows = rows, s.columns = keys, s.terms = columns;
        s.a = of_queries, s.b = of_keys, s.c = scores;
        s.b.turned = true;
        return s;
    case FB__PRODUCT_O:
    case FB__PRODUCT_DQ:
        s.rows = rows, s.columns = columns, s.terms = keys;
        s.a = weights, s.b = of_keys, s.c = of_queries;
        return s;
    default:
        s.rows = keys, s.columns = columns, s.terms = rows;
        s.a = weights, s.b = of_queries, s.c = of_keys;
        s.a.turned = true;
        return s;
    }
}

/* What the backward writes that comes from S and dP. */
static bool has_gradients(const fb__problem *p) {
    return fb__has(p, FB_DBIAS) || !fb__has(p, FB_NO_DQ) || !fb__has(p, FB_NO_DK) || !fb__has(p, FB_NO_DV);
}

static bool needs(const fb__problem *p, int product) {
    const bool backward = !fb__has(p, FB_FORWARD_ONLY);
    switch (product) {
    case FB__PRODUCT_DP:
        return backward && has_gradients(p);
    case FB__PRODUCT_DQ:
        return backward && !fb__has(p, FB_NO_DQ);
    case FB__PRODUCT_DK:
        return backward && !fb__has(p, FB_NO_DK);
    case FB__PRODUCT_DV:
        return backward && !fb__has(p, FB_NO_DV);
    default:
        return true;
    }
}

fb_status fb__unfused_prepare(fb__cuda_state *s, const fb__problem *p) {
    fb__unfused_plan *u = &s->unfused;
    size_t most = 0;
    FB_TRY(fb__blas_open(&u->blas, s->driver.version));
    FB_TRY(fb__blas_create(&u->blas, &u->handle));
    for (int n = 0; n < FB__PRODUCTS && !is_empty(u); n++) {
        if (!needs(p, n))
            continue;
        const fb__product_shape shape = shape_of(u, p, n);
        FB_TRY(fb__product_make(&u->blas, u->handle, &shape, BLAS_BYTES(s->gpu.cc), &u->products[n]));
        most = u->products[n].workspace > most ? u->products[n].workspace : most;
    }
    u->bytes = u->at_blas + most;
    s->workspace = u->bytes + PLACE;
    return FB_OK;
}

void fb__unfused_drop(fb__cuda_state *s, bool in_context) {
    fb__unfused_plan *u = &s->unfused;
    for (int n = 0; n < FB__PRODUCTS; n++)
        fb__product_drop(&u->blas, &u->products[n]);
    if (in_context)
        fb__blas_destroy(&u->blas, u->handle);
    u->handle = NULL;
}

void fb__unfused_explain(const fb__cuda_state *s, const fb__problem *p, fb__text *text) {
    const fb__unfused_plan *u = &s->unfused;
    const bool backward = !fb__has(p, FB_FORWARD_ONLY);
    char version[24];
    fb__blas_version(&u->blas, version);
    fb__text_add(text, "products: cuBLAS %s, %s, %zu bytes of workspace\n", version, u->blas.path,
                 u->bytes - u->at_blas);
    fb__text_add(text, "scores: %d matri%s of %lld x %lld in f32, %.3f GB\n", backward ? 2 : 1,
                 backward ? "ces" : "x", (long long)u->queries, (long long)u->row,
                 (double)u->queries * (double)u->row * (backward ? 8e-9 : 4e-9));
}

/* ---- A call ---- */

typedef struct call {
    const fb__cuda_state *s;
    const fb__problem *p;
    fb__args a;
    fb__unfused u;
    char *work;
    void *stream;
} call;

static call call_of(const fb__cuda_state *s, const fb__problem *p, fb__pass pass, const fb_io *io) {
    const fb__unfused_plan *plan = &s->unfused;
    const bool backward = pass == FB__BACKWARD;
    call c = {.s = s, .p = p, .stream = io->stream};
    c.a = fb__launch_arguments(s, p, pass, io);
    c.work = (char *)(((uintptr_t)fb__at(io->workspace) + PLACE - 1) / PLACE * PLACE);
    c.a.delta = (float *)(c.work + s->at_delta);
    c.u = (fb__unfused){.scores = (float *)(c.work + plan->at_scores[0]),
                        .gradients = backward ? (float *)(c.work + plan->at_scores[1]) : NULL,
                        .factor = (float *)(c.work + plan->at_factor),
                        .row = plan->row,
                        .wide = (fb_i32)plan->wide,
                        .wide_v = (fb_i32)plan->wide_v};
    for (int t = 0; t < FB_PACKS; t++) {
        c.u.pack[t] = c.work + plan->at_pack[t];
        c.u.odd[t] = (fb_u8 *)(c.work + plan->at_odd[t]);
        c.u.any[t] = (fb_i32 *)(c.work + plan->at_any) + t * p->d.batch * p->d.heads_kv;
    }
    for (int n = 0; n < FB_SUMS && !is_empty(plan); n++)
        c.u.sum[n] = (float *)(c.work + plan->at_sum[n]);
    return c;
}

static fb_status start(call *c, int function, int64_t blocks, int64_t across, int threads) {
    void *parameters[] = {&c->a, &c->u};
    return fb__launch_kernel(c->s, c->s->unfused_functions[function], blocks, across, threads, 0, c->stream,
                             parameters);
}

static int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }

static int threads_of(const call *c) { return c->s->kernels[FB__KERNEL_UNFUSED].spec.THREADS; }

/* A warp for each of so many rows. */
static fb_status start_rows(call *c, int function, int64_t rows, int64_t across) {
    const int threads = threads_of(c), warps = threads / 32;
    return start(c, function, (rows + warps - 1) / warps, across, threads);
}

/* Threads for so many pieces of work: whole warps, up to all. */
static int threads_for(const call *c, int64_t pieces) {
    const int64_t threads = max(32, round_up(pieces, 32));
    return threads < threads_of(c) ? (int)threads : threads_of(c);
}

/* A block for each row of scores, a thread for four of its cells. */
static fb_status start_scores(call *c, int function) {
    return start(c, function, c->s->unfused.queries, 1, threads_for(c, c->u.row / 4));
}

static fb_status start_dbias(call *c) {
    const fb_shape *n = &c->p->d.bias_shape;
    const int threads = threads_for(c, c->p->d.len_k);
    const int64_t tiles = n->cols > 1 ? (n->cols + threads - 1) / threads : n->cols;
    return start(c, FB__UNFUSED_DBIAS, n->batch * n->heads * n->rows * tiles, 1, threads);
}

static fb_status multiply(const call *c, int product, const void *A, const void *B, float *C) {
    const fb__unfused_plan *u = &c->s->unfused;
    if (is_empty(u))
        return FB_OK;
    return fb__product_run(&u->blas, u->handle, &u->products[product], A, B, C, c->work + u->at_blas,
                           c->stream);
}

static fb_status start_packs(call *c, int tensors) {
    const fb__unfused_plan *u = &c->s->unfused;
    const fb__driver *d = &c->s->driver;
    if (u->any_bytes)
        FB__CU_TRY(d, cuMemsetD8Async, ((uint64_t)(uintptr_t)c->u.any[0], 0, u->any_bytes, c->stream));
    return start_rows(c, FB__UNFUSED_PACK, max(u->queries, u->keys), tensors);
}

static fb_status forward(call *c) {
    fb__unfused *u = &c->u;
    FB_TRY(start_packs(c, FB_PACK_DOUT));
    FB_TRY(multiply(c, FB__PRODUCT_S, u->pack[FB_PACK_Q], u->pack[FB_PACK_K], u->scores));
    FB_TRY(start_scores(c, FB__UNFUSED_SOFTMAX));
    FB_TRY(multiply(c, FB__PRODUCT_O, u->scores, u->pack[FB_PACK_V], u->sum[FB_SUM_QUERIES]));
    return start_rows(c, FB__UNFUSED_UNPACK, c->s->unfused.queries, 1);
}

/* From S and dP on. */
static fb_status gradients(call *c) {
    const fb__unfused_plan *plan = &c->s->unfused;
    fb__unfused *u = &c->u;
    if (fb__has(c->p, FB_DBIAS))
        FB_TRY(start_dbias(c));
    FB_TRY(start_scores(c, FB__UNFUSED_GRADIENT));
    FB_TRY(start_rows(c, FB__UNFUSED_CLEAN, max(plan->queries, plan->keys), 3));
    if (!fb__has(c->p, FB_NO_DQ))
        FB_TRY(multiply(c, FB__PRODUCT_DQ, u->gradients, u->pack[FB_PACK_K], u->sum[FB_SUM_QUERIES]));
    if (!fb__has(c->p, FB_NO_DK))
        FB_TRY(multiply(c, FB__PRODUCT_DK, u->gradients, u->pack[FB_PACK_Q], u->sum[FB_SUM_K]));
    if (!fb__has(c->p, FB_NO_DV))
        FB_TRY(multiply(c, FB__PRODUCT_DV, u->scores, u->pack[FB_PACK_DOUT], u->sum[FB_SUM_V]));
    return start_rows(c, FB__UNFUSED_UNPACK, max(plan->queries, plan->keys), FB_SUMS);
}

static fb_status backward(call *c) {
    fb__unfused *u = &c->u;
    FB_TRY(fb__launch_delta(c->s, c->p, c->stream, &c->a));
    if (has_gradients(c->p)) {
        FB_TRY(start_packs(c, FB_PACKS));
        FB_TRY(multiply(c, FB__PRODUCT_S, u->pack[FB_PACK_Q], u->pack[FB_PACK_K], u->scores));
        FB_TRY(multiply(c, FB__PRODUCT_DP, u->pack[FB_PACK_DOUT], u->pack[FB_PACK_V], u->gradients));
        FB_TRY(gradients(c));
    }
    return fb__has(c->p, FB_DSINKS) ? fb__launch_dsinks(c->s, c->p, c->stream, &c->a) : FB_OK;
}

fb_status fb__unfused_run(const fb__cuda_state *s, const fb__problem *p, fb__pass pass, const fb_io *io) {
    call c = call_of(s, p, pass, io);
    return pass == FB__FORWARD ? forward(&c) : backward(&c);
}
