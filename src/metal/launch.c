/* Arguments and dispatches. Nothing here allocates or asks the environment, besides the command buffers and
 * encoders that Metal makes. See launch.h. */
#include "launch.h"
#include "encode.h"
#include "keep.h"
#include "unfused.h"
#include <string.h>

int64_t fb__metal_rows(const fb__problem *p) {
    const fb_desc *d = &p->d;
    return d->heads_q * (fb__has(p, FB_PACKED) ? d->total_q : d->batch * d->len_q);
}

int64_t fb__metal_slots(const fb__problem *p, bool keys, bool stacked, int tile) {
    const fb_desc *d = &p->d;
    if (stacked && !keys)
        return (p->group * d->len_q + tile - 1) / tile;
    if (fb__has(p, FB_PACKED))
        return (keys ? d->total_k : d->total_q) / tile + d->batch;
    return ((keys ? d->len_k : d->len_q) + tile - 1) / tile;
}

/* ---- Buffers ---- */

/* Metal does not look whether a kernel stays inside a buffer, and a GPU fault is nobody's friend. */
static fb_status check_lengths(const fb__metal_state *s, const fb__extent *extents, int count) {
    for (int n = 0; n < count; n++) {
        const fb__extent *e = &extents[n];
        const uint64_t length = FB__GET(&s->objc, length, e->ref.data);
        if (e->ref.offset > length || e->bytes > length - e->ref.offset)
            return fb__error(FB_INVALID,
                             "io.%s: its MTLBuffer has %llu bytes, fewer than the %llu that the tensor takes "
                             "from offset %llu on",
                             e->name, (unsigned long long)length, (unsigned long long)e->bytes,
                             (unsigned long long)e->ref.offset);
    }
    return FB_OK;
}

static unsigned present(const fb_ref *at) {
    unsigned bits = 0;
    for (int n = FB_AT_ARGS + 1; n < FB_AT_COUNT; n++)
        if (at[n].data)
            bits |= FB_PRESENT(n);
    return bits;
}

/* A kernel has all its buffers bound, also those that it does not look at. */
static void fill_up(fb_ref *at, fb_ref with) {
    for (int n = FB_AT_ARGS + 1; n < FB_AT_COUNT; n++)
        if (!at[n].data)
            at[n] = with;
}

static void bind(const fb__metal_state *s, fb__pass pass, const fb_io *io, fb_ref *at) {
    const fb_ref work = {io->workspace.data, (io->workspace.offset + 15) / 16 * 16};
    at[FB_AT_Q] = io->q, at[FB_AT_K] = io->k, at[FB_AT_V] = io->v;
    at[FB_AT_OUT] = io->out, at[FB_AT_LSE] = io->lse;
    at[FB_AT_BIAS] = io->bias, at[FB_AT_MASK] = io->mask, at[FB_AT_BLOCK_MASK] = io->block_mask;
    at[FB_AT_SINKS] = io->sinks;
    at[FB_AT_CU_Q] = io->cu_q, at[FB_AT_CU_K] = io->cu_k;
    at[FB_AT_LENS_Q] = io->lens_q, at[FB_AT_LENS_K] = io->lens_k;
    at[FB_AT_PARTIAL] = (fb_ref){work.data, work.offset + s->at_partial[pass]};
    at[FB_AT_PARTIAL_LSE] = (fb_ref){work.data, work.offset + s->at_partial_lse};
    if (pass == FB__BACKWARD) {
        at[FB_AT_DOUT] = io->dout, at[FB_AT_DLSE] = io->dlse;
        at[FB_AT_DQ] = io->dq, at[FB_AT_DK] = io->dk, at[FB_AT_DV] = io->dv;
        at[FB_AT_DBIAS] = io->dbias, at[FB_AT_DSINKS] = io->dsinks;
        at[FB_AT_DELTA] = (fb_ref){work.data, work.offset + s->at_delta};
    }
    if (pass == FB__BACKWARD && (s->route == FB_UNFUSED || s->ds_bytes))
        at[FB_AT_DS] = (fb_ref){work.data, work.offset + s->at_gradients};
}

/* ---- Numbers ---- */

static fb__metal_view view(fb_strides s) { return (fb__metal_view){s.batch, s.head, s.row}; }

/* Does every row of the tensor start at a multiple of 16 bytes? Buffers do. */
static bool rows_at_16(fb_ref at, const fb__metal_view *t, size_t element) {
    const uint64_t all = (uint64_t)t->batch | (uint64_t)t->head | (uint64_t)t->row;
    return at.offset % 16 == 0 && all * element % 16 == 0;
}

static void describe(fb__metal_args *a, const fb_ref *at, size_t element) {
    const struct {
        const fb__metal_view *t;
        int index;
        unsigned flag;
    } rows[] = {{&a->q, FB_AT_Q, FB_Q16},       {&a->k, FB_AT_K, FB_K16},
                {&a->v, FB_AT_V, FB_V16},       {&a->dout, FB_AT_DOUT, FB_DOUT16},
                {&a->out, FB_AT_OUT, FB_OUT16}, {&a->dq, FB_AT_DQ, FB_DQ16},
                {&a->dk, FB_AT_DK, FB_DK16},    {&a->dv, FB_AT_DV, FB_DV16}};
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++)
        if (rows_at_16(at[rows[n].index], rows[n].t, element))
            a->flags |= rows[n].flag;
}

static int64_t at_most(int64_t x, int64_t most) { return x < most ? x : most; }

/* Blocks of a block mask are indexed in 32 bits; larger ones than the lengths are one. */
static void take_blocks(fb__metal_args *a, const fb_desc *d) {
    const int64_t down = (d->len_q + d->block_q - 1) / d->block_q,
                  across = (d->len_k + d->block_k - 1) / d->block_k;
    a->block_head = d->block_heads > 1 ? down * across : 0;
    a->block_batch = d->block_batch > 1 ? d->block_heads * down * across : 0;
    a->block_q = at_most(d->block_q, INT32_MAX), a->block_k = at_most(d->block_k, INT32_MAX);
}

static void take_numbers(fb__metal_args *a, const fb__problem *p) {
    const fb_desc *d = &p->d;
    memset(a, 0, sizeof *a);
    a->q = view(d->q), a->k = view(d->k), a->v = view(d->v), a->out = view(d->out);
    a->dout = view(d->dout), a->dq = view(d->dq), a->dk = view(d->dk), a->dv = view(d->dv);
    a->bias = view(d->bias), a->dbias = view(d->dbias), a->mask = view(d->mask), a->other_out = view(d->out);
    a->batch = d->batch, a->heads_q = d->heads_q, a->heads_kv = d->heads_kv, a->group = p->group;
    a->len_q = d->len_q, a->len_k = d->len_k, a->total_q = d->total_q, a->total_k = d->total_k;
    a->head_dim = (fb_i32)d->head_dim, a->head_dim_v = (fb_i32)d->head_dim_v;
    a->off = d->position_offset;
    a->left = at_most(d->window.left, FB_FAR), a->right = at_most(d->window.right, FB_FAR);
    a->scale = (float)d->scale, a->scale_log2 = (float)(d->scale * 1.4426950408889634);
    a->softcap = (float)d->softcap, a->softcap_inverse = d->softcap > 0 ? (float)(1 / d->softcap) : 0;
    a->bias_batches = d->bias_shape.batch, a->bias_heads = d->bias_shape.heads;
    a->bias_rows = d->bias_shape.rows;
    a->chunks = 1;
    a->flags = (fb__has(p, FB_TOP_LEFT) ? FB_IS_TOP_LEFT : 0) | (fb__has(p, FB_ACCUMULATE) ? FB_ADDS : 0) |
               (d->bias_shape.cols > 1 ? FB_BIAS_COLS : 0) | (d->mask_shape.cols > 1 ? FB_MASK_COLS : 0);
    a->ds = fb__metal_keep_view(p);
    take_blocks(a, d);
}

/* ---- Dispatches ---- */

/* Cells of a plan, as far as their number follows from lengths and window: what work is estimated by. */
static double cells(const fb__problem *p) {
    const fb_desc *d = &p->d;
    const bool bounded = d->window.left != FB_UNBOUNDED && d->window.right != FB_UNBOUNDED;
    const double band = bounded ? (double)d->window.left + (double)d->window.right + 1 : (double)d->len_k;
    return (double)fb__metal_rows(p) * (band < (double)d->len_k ? band : (double)d->len_k);
}

/* Heads whose tiles come sorted by length, the long ones first, where they differ: as many as the cache holds
 * what passes by of, whole groups of them. 0: head after head. */
static int64_t section(const fb__problem *p, bool keys, bool stacked) {
    const fb_desc *d = &p->d;
    const double CACHE_BYTES = 8e6; /* of the system's level, M1 */
    if (d->window.right == FB_UNBOUNDED || d->window.left != FB_UNBOUNDED || fb__has(p, FB_PACKED) || stacked)
        return 0;
    const double group = p->group ? (double)p->group : 1, columns = (double)(d->head_dim + d->head_dim_v);
    const double rows = keys ? group * (double)d->len_q : (double)d->len_k;
    double heads = CACHE_BYTES / (rows * columns * (double)fb__dtype_bytes(d->dtype) + 1);
    heads = heads < 1 ? 1 : heads;
    heads = keys ? heads : heads * group;
    return heads < (double)(1 << 30) ? (int64_t)heads : 1 << 30;
}

/* `columns`: of all operands of a cell's products. */
static fb_status start_tiles(fb__metal_call *c, const fb__problem *p, fb__metal_kernel kernel, int64_t chunks,
                             int columns, fb__metal_args *a) {
    const fb__metal_loaded *k = &c->s->kernels[kernel];
    const bool keys = kernel == FB__METAL_DKDV, stacked = c->s->stacked;
    const int64_t heads = keys || stacked ? p->d.heads_kv : p->d.heads_q;
    a->slots = fb__metal_slots(p, keys, stacked, k->spec.BM);
    a->chunks = (fb_i32)chunks;
    a->section = section(p, keys, stacked);
    const bool over_batch = p->d.batch && fb__has(p, FB_PACKED) && (keys || !stacked);
    const fb__metal_grid grid = {.x = a->slots * heads * (over_batch ? 1 : p->d.batch),
                                 .y = chunks,
                                 .threads = k->spec.THREADS,
                                 .shared_bytes = k->spec.shared_bytes,
                                 .work = 2 * cells(p) * columns};
    return fb__metal_call_dispatch(c, k->pipelines[0], &grid, a);
}

static fb_status start_rows(fb__metal_call *c, int function, int64_t groups, fb__metal_args *a) {
    const fb__metal_loaded *k = &c->s->kernels[FB__METAL_ROWS];
    const fb__metal_grid grid = {.x = groups,
                                 .y = 1,
                                 .threads = k->spec.THREADS,
                                 .shared_bytes = k->spec.shared_bytes,
                                 .work = 2e3 * (double)groups};
    return fb__metal_call_dispatch(c, k->pipelines[function], &grid, a);
}

/* A simdgroup has a row. */
static int64_t groups_of(const fb__metal_state *s, int64_t rows) {
    const int each = s->kernels[FB__METAL_ROWS].spec.THREADS / 32;
    return (rows + each - 1) / each;
}

static int64_t stacked_rows(const fb__problem *p) {
    return p->d.batch * p->d.heads_kv * p->group * p->d.len_q;
}

static fb_status start_dbias(fb__metal_call *c, const fb__problem *p, int columns, fb__metal_args *a) {
    const fb__metal_loaded *k = &c->s->kernels[FB__METAL_DBIAS];
    const fb_shape *n = &p->d.bias_shape;
    const int64_t across = (n->cols + k->spec.BN - 1) / k->spec.BN,
                  down = (n->rows + k->spec.BM - 1) / k->spec.BM;
    const fb__metal_grid grid = {.x = across * down * n->heads * n->batch,
                                 .y = 1,
                                 .threads = k->spec.THREADS,
                                 .shared_bytes = k->spec.shared_bytes,
                                 .work = 2 * cells(p) * columns};
    return fb__metal_call_dispatch(c, k->pipelines[0], &grid, a);
}

static fb_status run_forward(fb__metal_call *c, const fb__problem *p, fb__metal_args *a) {
    const fb__metal_state *s = c->s;
    const fb__metal_spec *spec = &s->kernels[FB__METAL_FORWARD].spec;
    if (s->route == FB_UNFUSED)
        return fb__metal_unfused_forward(c, p, a);
    FB_TRY(start_tiles(c, p, FB__METAL_FORWARD, s->chunks[FB__FORWARD], spec->D + spec->DV, a));
    if (s->chunks[FB__FORWARD] == 1)
        return FB_OK;
    fb__metal_call_barrier(c);
    return start_rows(c, FB__METAL_JOIN, groups_of(s, stacked_rows(p)), a);
}

static fb_status finish_unfused(fb__metal_call *c, const fb__problem *p, fb__metal_args *a) {
    FB_TRY(fb__metal_unfused_backward(c, p, a));
    if (!fb__has(p, FB_DSINKS))
        return FB_OK;
    fb__metal_call_barrier(c);
    return start_rows(c, FB__METAL_DSINKS, p->d.heads_q, a);
}

/* dkdv, dq, dbias and dsinks need delta, and nothing of each other, unless dkdv keeps dS for dq: they run
 * side by side. */
static fb_status run_backward(fb__metal_call *c, const fb__problem *p, fb__metal_args *a) {
    const fb__metal_state *s = c->s;
    const int D = (int)p->d.head_dim, DV = (int)p->d.head_dim_v;
    const bool cut = s->chunks[FB__BACKWARD] > 1 && !fb__has(p, FB_NO_DQ);
    FB_TRY(start_rows(c, FB__METAL_DELTA, groups_of(s, fb__metal_rows(p)), a));
    if (s->route == FB_UNFUSED)
        return finish_unfused(c, p, a);
    fb__metal_call_barrier(c);
    if (!fb__has(p, FB_NO_DK) || !fb__has(p, FB_NO_DV)) {
        fb__metal_args keys = *a;
        FB_TRY(start_tiles(c, p, FB__METAL_DKDV, 1, 2 * (D + DV), &keys));
    }
    if (s->ds_bytes)
        fb__metal_call_barrier(c);
    if (!fb__has(p, FB_NO_DQ))
        FB_TRY(start_tiles(c, p, FB__METAL_DQ, s->chunks[FB__BACKWARD], s->ds_bytes ? D : 2 * D + DV, a));
    if (fb__has(p, FB_DBIAS))
        FB_TRY(start_dbias(c, p, D + DV, a));
    if (fb__has(p, FB_DSINKS))
        FB_TRY(start_rows(c, FB__METAL_DSINKS, p->d.heads_q, a));
    if (!cut)
        return FB_OK;
    fb__metal_call_barrier(c);
    return start_rows(c, FB__METAL_JOIN_DQ, groups_of(s, stacked_rows(p)), a);
}

static fb_status run(const fb__metal_state *s, const fb__problem *p, fb__pass pass, const fb_io *io) {
    fb__extent extents[FB__MAX_EXTENTS];
    fb__metal_call c = {.s = s};
    fb__metal_args a;
    FB_TRY(check_lengths(s, extents, fb__problem_extents(p, pass, s->workspace, io, extents)));
    take_numbers(&a, p);
    bind(s, pass, io, c.at);
    a.present = present(c.at);
    describe(&a, c.at, fb__dtype_bytes(p->d.dtype));
    fill_up(c.at, io->workspace);
    a.partial_columns =
        pass == FB__FORWARD ? s->kernels[FB__METAL_FORWARD].spec.DV : s->kernels[FB__METAL_DQ].spec.D;
    FB_TRY(fb__metal_call_open(&c, s, io->stream));
    FB_TRY((pass == FB__FORWARD ? run_forward : run_backward)(&c, p, &a));
    return fb__metal_call_close(&c);
}

fb_status fb__metal_forward(const fb__metal_state *s, const fb__problem *p, const fb_io *io) {
    return run(s, p, FB__FORWARD, io);
}

fb_status fb__metal_backward(const fb__metal_state *s, const fb__problem *p, const fb_io *io) {
    return run(s, p, FB__BACKWARD, io);
}

fb_status fb__metal_merge(const fb__metal_state *s, const fb__problem *p, fb_ref out, fb_ref lse,
                          fb_ref other_out, fb_ref other_lse, void *stream) {
    fb__extent extents[FB__MAX_EXTENTS];
    fb__metal_call c = {.s = s};
    fb__metal_args a;
    FB_TRY(check_lengths(s, extents, fb__problem_merge_extents(p, out, lse, other_out, other_lse, extents)));
    if (!lse.data) /* there are no rows */
        return FB_OK;
    take_numbers(&a, p);
    c.at[FB_AT_OUT] = out, c.at[FB_AT_LSE] = lse;
    c.at[FB_AT_OTHER_OUT] = other_out, c.at[FB_AT_OTHER_LSE] = other_lse;
    if (fb__has(p, FB_PACKED)) /* only says that the batch is packed */
        c.at[FB_AT_CU_Q] = lse;
    a.present = present(c.at);
    fill_up(c.at, lse);
    FB_TRY(fb__metal_call_open(&c, s, stream));
    FB_TRY(start_rows(&c, FB__METAL_MERGE, groups_of(s, fb__metal_rows(p)), &a));
    return fb__metal_call_close(&c);
}
