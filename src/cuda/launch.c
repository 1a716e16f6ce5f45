/* Arguments and launches. Nothing here allocates, waits or asks the environment: a pass may be captured into
 * a graph. See launch.h. */
#include "launch.h"
#include "../shared/args.h"
#include "hopper.h"
#include <string.h>

int64_t fb__launch_rows(const fb__problem *p) {
    const fb_desc *d = &p->d;
    return d->heads_q * (fb__has(p, FB_PACKED) ? d->total_q : d->batch * d->len_q);
}

int64_t fb__launch_slots(const fb__problem *p, bool keys, bool stacked, int tile) {
    const fb_desc *d = &p->d;
    if (stacked && !keys)
        return (p->group * d->len_q + tile - 1) / tile;
    if (fb__has(p, FB_PACKED))
        return (keys ? d->total_k : d->total_q) / tile + d->batch;
    return ((keys ? d->len_k : d->len_q) + tile - 1) / tile;
}

/* ---- Arguments ---- */

static fb__view view(fb_ref ref, fb_strides s) { return (fb__view){fb__at(ref), s.batch, s.head, s.row}; }

/* Does every row of the tensor start at a multiple of 16 bytes? */
static bool rows_at_16(fb__view t, size_t element) {
    uint64_t all = (uint64_t)t.batch | (uint64_t)t.head | (uint64_t)t.row;
    return (uintptr_t)t.at % 16 == 0 && all * element % 16 == 0;
}

static void describe(fb__args *a, size_t element) {
    const struct {
        fb__view t;
        unsigned flag;
    } rows[] = {{a->q, FB_Q16},     {a->k, FB_K16},   {a->v, FB_V16},   {a->dout, FB_DOUT16},
                {a->out, FB_OUT16}, {a->dq, FB_DQ16}, {a->dk, FB_DK16}, {a->dv, FB_DV16}};
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++)
        if (rows_at_16(rows[n].t, element))
            a->flags |= rows[n].flag;
}

static fb_i64 at_most(int64_t x, int64_t most) { return x < most ? x : most; }

static void take_numbers(fb__args *a, const fb__problem *p) {
    const fb_desc *d = &p->d;
    a->batch = d->batch, a->heads_q = d->heads_q, a->heads_kv = d->heads_kv, a->group = p->group;
    a->len_q = d->len_q, a->len_k = d->len_k, a->total_q = d->total_q, a->total_k = d->total_k;
    a->head_dim = (fb_i32)d->head_dim, a->head_dim_v = (fb_i32)d->head_dim_v;
    a->off = d->position_offset, a->left = at_most(d->window.left, FB_FAR),
    a->right = at_most(d->window.right, FB_FAR);
    a->scale = (float)d->scale, a->scale_log2 = (float)(d->scale * 1.4426950408889634);
    a->softcap = (float)d->softcap, a->softcap_inverse = d->softcap > 0 ? (float)(1 / d->softcap) : 0;
    a->bias_batches = d->bias_shape.batch, a->bias_heads = d->bias_shape.heads,
    a->bias_rows = d->bias_shape.rows;
    a->chunks = 1;
    if (fb__has(p, FB_TOP_LEFT))
        a->flags |= FB_IS_TOP_LEFT;
    if (fb__has(p, FB_ACCUMULATE))
        a->flags |= FB_ADDS;
    if (d->bias_shape.cols > 1)
        a->flags |= FB_BIAS_COLS;
    if (d->mask_shape.cols > 1)
        a->flags |= FB_MASK_COLS;
}

/* Blocks of a block mask are indexed in 32 bits; larger ones than the lengths are one. */
static void take_blocks(fb__args *a, const fb__problem *p, const fb_io *io) {
    const fb_desc *d = &p->d;
    int64_t down = (d->len_q + d->block_q - 1) / d->block_q,
            across = (d->len_k + d->block_k - 1) / d->block_k;
    a->block_mask = fb__at(io->block_mask);
    a->block_head = d->block_heads > 1 ? down * across : 0;
    a->block_batch = d->block_batch > 1 ? d->block_heads * down * across : 0;
    a->block_q = at_most(d->block_q, INT32_MAX), a->block_k = at_most(d->block_k, INT32_MAX);
}

fb__args fb__launch_arguments(const fb__cuda_state *s, const fb__problem *p, fb__pass pass, const fb_io *io) {
    const fb_desc *d = &p->d;
    fb__args a;
    memset(&a, 0, sizeof a);
    take_numbers(&a, p);
    take_blocks(&a, p, io);
    a.q = view(io->q, d->q), a.k = view(io->k, d->k), a.v = view(io->v, d->v), a.out = view(io->out, d->out);
    a.bias = view(io->bias, d->bias), a.mask = view(io->mask, d->mask);
    a.lse = fb__at(io->lse), a.sinks = fb__at(io->sinks);
    a.cu_q = fb__at(io->cu_q), a.cu_k = fb__at(io->cu_k), a.lens_q = fb__at(io->lens_q),
    a.lens_k = fb__at(io->lens_k);
    char *work = (char *)(((uintptr_t)fb__at(io->workspace) + 15) / 16 * 16);
    a.partial = (float *)(work + s->at_partial[pass]), a.partial_lse = (float *)(work + s->at_partial_lse);
    if (pass == FB__BACKWARD) {
        a.dout = view(io->dout, d->dout);
        a.dq = view(io->dq, d->dq), a.dk = view(io->dk, d->dk), a.dv = view(io->dv, d->dv);
        a.dbias = view(io->dbias, d->dbias);
        a.dlse = fb__at(io->dlse), a.dsinks = fb__at(io->dsinks), a.delta = (float *)(work + s->at_delta);
        if (s->at_lse_log2) /* the other routes do without */
            a.lse_log2 = (float *)(work + s->at_lse_log2), a.lse_rest = (float *)(work + s->at_lse_rest);
    }
    describe(&a, fb__dtype_bytes(d->dtype));
    return a;
}

/* ---- Launches ---- */

typedef struct launch {
    const fb__cuda_state *s;
    void *stream;
} launch;

fb_status fb__launch_kernel(const fb__cuda_state *s, void *function, int64_t blocks, int64_t across,
                            int threads, int shared_bytes, void *stream, void **parameters) {
    if (!blocks || !across)
        return FB_OK;
    return fb__driver_check(&s->driver,
                            s->driver.cuLaunchKernel(function, (unsigned)blocks, (unsigned)across, 1,
                                                     (unsigned)threads, 1, 1, (unsigned)shared_bytes, stream,
                                                     parameters, NULL),
                            "cuLaunchKernel");
}

static fb_status start(const launch *l, void *function, int64_t blocks, int64_t chunks, int threads,
                       int shared_bytes, fb__args *a) {
    void *parameters[] = {a};
    return fb__launch_kernel(l->s, function, blocks, chunks, threads, shared_bytes, l->stream, parameters);
}

/* Heads whose tiles come sorted by length, the long ones first, where they differ: as many as the cache holds
 * what passes by of, whole groups of them; but so many that the last of such sections ends with short tiles
 * while others still run: a long one that begins late would run alone. 0: head after head. */
static int64_t section(const fb__cuda_state *s, const fb__problem *p, bool keys, int64_t slots) {
    const fb_desc *d = &p->d;
    const double CACHE_BYTES = 32e6, BLOCKS_OF_SM = 2, LONG_TILES = 2;
    if (d->window.right == FB_UNBOUNDED || d->window.left != FB_UNBOUNDED || fb__has(p, FB_PACKED) ||
        s->stacked)
        return 0;
    const double group = p->group ? (double)p->group : 1, columns = (double)(d->head_dim + d->head_dim_v);
    const double rows = keys ? group * (double)d->len_q : (double)d->len_k, share = keys ? 1 : group;
    double heads = CACHE_BYTES / (rows * columns * (double)fb__dtype_bytes(d->dtype) + 1);
    heads = (heads < 1 ? 1 : heads) * share;
    const double fewest = 2 * LONG_TILES * BLOCKS_OF_SM * s->gpu.sms / (double)(slots ? slots : 1);
    while (heads < fewest)
        heads += share;
    return heads < (double)(1 << 30) ? (int64_t)heads : 1 << 30;
}

int64_t fb__launch_tiles(const fb__cuda_state *s, const fb__problem *p, bool keys, int tile, fb__args *a) {
    const int64_t heads = keys || s->stacked ? p->d.heads_kv : p->d.heads_q;
    a->slots = fb__launch_slots(p, keys, s->stacked, tile);
    a->section = section(s, p, keys, a->slots);
    a->tiles = a->slots * heads * (fb__has(p, FB_PACKED) && (keys || !s->stacked) ? 1 : p->d.batch);
    if (!p->d.batch)
        a->tiles = 0;
    return a->tiles;
}

static fb_status start_tiles(const launch *l, const fb__problem *p, fb__kernel kernel, int64_t chunks,
                             fb__args *a) {
    const fb__loaded *k = &l->s->kernels[kernel];
    a->chunks = (fb_i32)chunks;
    return start(l, k->function, fb__launch_tiles(l->s, p, kernel == FB__KERNEL_DKDV, k->spec.BM, a), chunks,
                 k->spec.THREADS, k->spec.shared_bytes, a);
}

static fb_status start_rows(const launch *l, int function, int64_t rows, fb__args *a) {
    int threads = l->s->kernels[FB__KERNEL_ROWS].spec.THREADS, per_block = threads / 32;
    return start(l, l->s->row_functions[function], (rows + per_block - 1) / per_block, 1, threads, 0, a);
}

/* Blocks of fb_delta, as rows.cu counts them. */
fb_status fb__launch_delta(const fb__cuda_state *s, const fb__problem *p, void *stream, fb__args *a) {
    const launch l = {s, stream};
    const fb__spec *spec = &s->kernels[FB__KERNEL_ROWS].spec;
    const fb_desc *d = &p->d;
    int pieces = spec->DV * (int)fb__dtype_bytes(d->dtype) / 16, lanes = pieces > 16  ? 32
                                                                         : pieces > 8 ? 16
                                                                                      : 8;
    int64_t rows = spec->THREADS / lanes, len = fb__has(p, FB_PACKED) ? d->total_q : d->len_q;
    int64_t heads = d->heads_q * (fb__has(p, FB_PACKED) ? 1 : d->batch);
    return start(&l, s->row_functions[FB__ROW_DELTA], (len + rows - 1) / rows * heads, 1, spec->THREADS, 0,
                 a);
}

fb_status fb__launch_dsinks(const fb__cuda_state *s, const fb__problem *p, void *stream, fb__args *a) {
    const launch l = {s, stream};
    return start(&l, s->row_functions[FB__ROW_DSINKS], p->d.heads_q, 1,
                 s->kernels[FB__KERNEL_ROWS].spec.THREADS, 0, a);
}

static int64_t stacked_rows(const fb__problem *p) {
    return p->d.batch * p->d.heads_kv * p->group * p->d.len_q;
}

fb_status fb__launch_forward(const fb__cuda_state *s, const fb__problem *p, const fb_io *io) {
    launch l = {s, io->stream};
    fb__args a = fb__launch_arguments(s, p, FB__FORWARD, io);
    if (fb__hopper_can(s, FB__FORWARD, &a))
        return fb__hopper_forward(s, p, io->stream, &a);
    FB_TRY(start_tiles(&l, p, FB__KERNEL_FORWARD, s->chunks[FB__FORWARD], &a));
    return s->chunks[FB__FORWARD] > 1 ? start_rows(&l, FB__ROW_JOIN, stacked_rows(p), &a) : FB_OK;
}

static fb_status start_dbias(const launch *l, const fb__problem *p, fb__args *a) {
    const fb__loaded *k = &l->s->kernels[FB__KERNEL_DBIAS];
    const fb_shape *n = &p->d.bias_shape;
    int64_t across = (n->cols + k->spec.BN - 1) / k->spec.BN, down = (n->rows + k->spec.BM - 1) / k->spec.BM;
    return start(l, k->function, across * down * n->heads * n->batch, 1, k->spec.THREADS,
                 k->spec.shared_bytes, a);
}

fb_status fb__launch_backward(const fb__cuda_state *s, const fb__problem *p, const fb_io *io) {
    launch l = {s, io->stream};
    fb__args a = fb__launch_arguments(s, p, FB__BACKWARD, io);
    if (fb__hopper_can(s, FB__BACKWARD, &a))
        return fb__hopper_backward(s, p, io, &a);
    if (fb__has(p, FB_NO_DQ)) /* else fb_dq does it in passing */
        FB_TRY(fb__launch_delta(s, p, io->stream, &a));
    else {
        FB_TRY(start_tiles(&l, p, FB__KERNEL_DQ, s->chunks[FB__BACKWARD], &a));
        if (s->chunks[FB__BACKWARD] > 1)
            FB_TRY(start_rows(&l, FB__ROW_JOIN_DQ, stacked_rows(p), &a));
    }
    if (!fb__has(p, FB_NO_DK) || !fb__has(p, FB_NO_DV))
        FB_TRY(start_tiles(&l, p, FB__KERNEL_DKDV, 1, &a));
    if (fb__has(p, FB_DBIAS))
        FB_TRY(start_dbias(&l, p, &a));
    return fb__has(p, FB_DSINKS) ? fb__launch_dsinks(s, p, io->stream, &a) : FB_OK;
}

fb_status fb__launch_merge(const fb__cuda_state *s, const fb__problem *p, fb_ref out, fb_ref lse,
                           fb_ref other_out, fb_ref other_lse, void *stream) {
    launch l = {s, stream};
    fb__args a;
    memset(&a, 0, sizeof a);
    take_numbers(&a, p);
    a.out = view(out, p->d.out), a.other_out = view(other_out, p->d.out);
    a.lse = fb__at(lse), a.other_lse = fb__at(other_lse);
    a.cu_q = fb__has(p, FB_PACKED) ? (fb_i32 *)a.lse : NULL; /* only says that the batch is packed */
    return start_rows(&l, FB__ROW_MERGE, fb__launch_rows(p), &a);
}
