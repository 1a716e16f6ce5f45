/* See hopper.h. Best first; columns of a row: kernel; largest D and DV; whether it takes options of scores
 * too (softcap, block mask), for which registers are shorter; warps that compute, each with 16 rows (in SPLIT
 * two have the same); rows of a tile that passes by; stages of it; registers of a thread that loads and of
 * one that computes; how many of the exponentials come from products; turns. */
#include "hopper.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct row {
    fb__kernel kernel;
    int d, dv, options, warps, bn, buffers, loader, registers, poly, turns;
    const char *measured;
} row;

#define FORWARD FB__KERNEL_HOPPER_FORWARD
#define BACKWARD FB__KERNEL_HOPPER_BACKWARD
#define SPLIT FB__KERNEL_HOPPER_SPLIT
#define HOPPER_ROWS FB__KERNEL_HOPPER_ROWS
#define FITS "chosen to fit"
#define H200 "bench/SPEED.md, Hopper tiles"

static const row rows[] = {
    /* clang-format off */
    {FORWARD,   64,  64, 0, 12, 128, 2, 32, 160, 0, 1, H200},
    {FORWARD,   64,  64, 1,  8, 128, 2, 24, 240, 0, 1, FITS},
    {FORWARD,   96,  96, 1,  8, 128, 2, 24, 240, 0, 1, FITS},
    {FORWARD,  128, 128, 1,  8, 128, 2, 24, 240, 0, 1, H200},
    {FORWARD,  192, 128, 1,  8, 128, 2, 24, 240, 0, 0, FITS},
    {FORWARD,  192, 192, 0,  8, 112, 2, 24, 240, 0, 0, FITS},
    {FORWARD,  192, 192, 1,  8,  64, 2, 24, 240, 0, 0, FITS},
    {FORWARD,  256, 256, 0,  8,  80, 2, 40, 232, 0, 0, H200},
    {FORWARD,  256, 256, 1,  8,  64, 2, 40, 232, 0, 0, FITS},

    {BACKWARD,  64,  64, 0,  8, 128, 2, 32, 208, 0, 0, H200},
    {BACKWARD,  64,  64, 1,  8,  64, 2, 48, 200, 0, 0, FITS},
    {BACKWARD,  96,  96, 1,  8,  64, 2, 32, 208, 0, 0, FITS},
    {BACKWARD, 128, 128, 1,  8,  64, 2, 32, 208, 0, 0, H200},

    {SPLIT,    192, 128, 1,  8,  64, 2, 32, 208, 0, 0, FITS},
    {SPLIT,    192, 192, 1,  8,  64, 2, 32, 208, 0, 0, FITS},
    {SPLIT,    256, 256, 1,  8,  64, 2, 32, 208, 0, 0, H200},
    /* clang-format on */
};
enum { ROWS = sizeof rows / sizeof *rows };

#define BLOCK 128 /* what the tiles of rows that take options divide: none has a part of a block */
#define PAD 128   /* FB_PAD of hopper_tiles.cuh */

/* ---- Rows ---- */

/* Bytes of a tile, as FB_SWIZZLED_BYTES in hopper_tiles.cuh. */
static int tile(int rows_of_it, int columns) { return (columns + 63) / 64 * rows_of_it * 128; }

/* What the kernels' heads say; barriers and what the loader leaves take less than the last number. */
static int shared_bytes(const row *r, const fb__spec *s) {
    const int passing = tile(s->BN, s->D) + tile(s->BN, s->DV);
    if (r->kernel == FORWARD)
        return tile(s->BM, s->D) + s->BUFFERS * passing + 1024;
    return tile(s->BM, s->D) + tile(s->BM, s->DV) + s->BUFFERS * (passing + 8 * s->BN) +
           (r->kernel == SPLIT ? 4 : 2) * tile(s->BM, s->BN) + 1024;
}

static void fill(const row *r, fb_dtype type, int options, fb__spec *s) {
    fb__tune_common(type, options, s);
    s->D = r->d, s->DV = r->dv;
    s->WM = r->warps, s->BM = r->kernel == SPLIT ? 64 : r->warps * 16, s->BN = r->bn;
    s->BUFFERS = r->buffers;
    s->THREADS = 32 * r->warps + (r->kernel == FORWARD ? 128 : 256); /* dQ has a warpgroup of its own */
    s->MAX_CELLS = r->bn;
    s->REGISTERS = r->registers, s->LOADER_REGISTERS = r->loader;
    s->POLY = r->poly, s->TURNS = r->turns;
    s->shared_bytes = shared_bytes(r, s);
    s->measured = r->measured;
}

bool fb__hopper_row(int n, fb_dtype type, int options, fb__kernel *kernel, fb__spec *spec) {
    if (n >= ROWS)
        return false;
    options = rows[n].options ? options : 0;
    *kernel = rows[n].kernel;
    fill(&rows[n], type, options, spec);
    return true;
}

/* ---- Which problems ---- */

/* A tensor that a map can describe: strides in multiples of 16 bytes where there are several, none of 0. */
static bool mapped(fb_strides s, int64_t batch, int64_t heads, int64_t rows_of_it) {
    const struct { int64_t stride, size; } dims[] = {{s.row, rows_of_it}, {s.head, heads}, {s.batch, batch}};
    for (int n = 0; n < 3; n++)
        if (dims[n].size > 1 &&
            (dims[n].stride <= 0 || dims[n].stride % 8 || dims[n].stride >= INT64_C(1) << 38))
            return false;
    return true;
}

/* NULL, or why the problem is for others. */
static const char *refusal(const fb__cuda_state *s, const fb__problem *p) {
    const fb_desc *d = &p->d;
    const bool packed = fb__has(p, FB_PACKED);
    const int64_t batch = packed ? 1 : d->batch, q = packed ? d->total_q : d->len_q,
                  k = packed ? d->total_k : d->len_k;
    if (s->gpu.cc != 90)
        return "those for sm_90a need compute capability 9.0";
    if (s->route != FB_FUSED)
        return "those for sm_90a are of the route fused";
    if (d->dtype != FB_F16 && d->dtype != FB_BF16)
        return "those for sm_90a take f16 and bf16";
    if (s->options & (FB_BIASED | FB_MASKED))
        return "those for sm_90a take neither a bias nor a boolean mask";
    if (s->options & FB_BLOCKED && (d->block_q % BLOCK || d->block_k % BLOCK))
        return "those for sm_90a take block masks whose blocks are multiples of 128";
    if (d->head_dim % 8 || d->head_dim_v % 8 || d->head_dim > 256 || d->head_dim_v > 256 || d->head_dim < 1 ||
        d->head_dim_v < 1)
        return "those for sm_90a take head dims up to 256 that are multiples of 8";
    if (!((float)d->scale > 0) || !((float)(d->scale * 1.5) < 3e38f))
        return "those for sm_90a take positive scales";
    if (!d->batch || !d->heads_q || !d->heads_kv || !q || !k)
        return "there is nothing to attend to";
    if (!mapped(d->q, batch, d->heads_q, q) || !mapped(d->k, batch, d->heads_kv, k) ||
        !mapped(d->v, batch, d->heads_kv, k))
        return "those for sm_90a take strides of q, k and v that are multiples of 8 elements, and none of 0";
    return NULL;
}

static bool choose(fb__cuda_state *s, const fb__problem *p, fb__kernel kernel) {
    for (int n = 0; n < ROWS; n++) {
        const row *r = &rows[n];
        fb__spec *spec = &s->kernels[kernel].spec;
        if (r->kernel != kernel || p->d.head_dim > r->d || p->d.head_dim_v > r->dv ||
            (s->options && !r->options))
            continue;
        fill(r, p->d.dtype, s->options, spec);
        if (spec->shared_bytes <= s->gpu.smem_block_optin)
            return true;
    }
    return false;
}

/* Beyond that, of the backward. */
static const char *refusal_backward(const fb__problem *p) {
    const fb_desc *d = &p->d;
    const bool packed = fb__has(p, FB_PACKED);
    if (fb__has(p, FB_FORWARD_ONLY))
        return "there is none";
    if (fb__has(p, FB_DETERMINISTIC))
        return "those for sm_90a add to dQ in any order, and FB_DETERMINISTIC asks for one";
    if (fb__has(p, FB_ACCUMULATE))
        return "those for sm_90a do not add to gradients";
    if (!mapped(d->dout, packed ? 1 : d->batch, d->heads_q, packed ? d->total_q : d->len_q))
        return "those for sm_90a take strides of dout that are multiples of 8 elements, and none of 0";
    return NULL;
}

static void choose_rows_of(fb__cuda_state *s, const fb__problem *p, fb__pass pass, fb__kernel kernel,
                           const char *why) {
    if (!why && !choose(s, p, kernel))
        why = "no tiles for sm_90a fit";
    snprintf(s->not_hopper[pass], sizeof *s->not_hopper, "%s", why ? why : "");
}

void fb__hopper_choose(fb__cuda_state *s, const fb__problem *p) {
    const char *why = refusal(s, p);
    choose_rows_of(s, p, FB__FORWARD, FORWARD, why);
    s->hopper_backward = p->d.head_dim > 128 || p->d.head_dim_v > 128 ? SPLIT : BACKWARD;
    choose_rows_of(s, p, FB__BACKWARD, s->hopper_backward, why ? why : refusal_backward(p));
    fb__spec *around = &s->kernels[HOPPER_ROWS].spec;
    *around = s->kernels[s->hopper_backward].spec;
    around->THREADS = 256, around->BM = around->BN = PAD, around->shared_bytes = 0;
}

/* ---- Launches ---- */

/* What a kernel of sm_90a knows as fb_map: a CUtensorMap. */
typedef struct map {
    _Alignas(64) unsigned char bytes[128];
} map;

/* Boxes of `box` rows and 64 columns of one head. Where there is one only, a stride does not matter, but has
 * to be a legal one. */
static fb_status encode(const fb__cuda_state *s, map *to, const fb__problem *p, fb__view t, int64_t columns,
                        int64_t rows_of_it, int64_t heads, int box) {
    const uint64_t batch = fb__has(p, FB_PACKED) ? 1 : (uint64_t)p->d.batch;
    const uint64_t size[] = {(uint64_t)columns, (uint64_t)rows_of_it, (uint64_t)heads, batch};
    const uint64_t any = (uint64_t)(columns + 7) / 8 * 16;
    const uint64_t stride[] = {size[1] > 1 ? (uint64_t)t.row * 2 : any,
                               size[2] > 1 ? (uint64_t)t.head * 2 : any,
                               size[3] > 1 ? (uint64_t)t.batch * 2 : any};
    const unsigned boxes[] = {64, (unsigned)box, 1, 1}, steps[] = {1, 1, 1, 1};
    const int type = p->d.dtype == FB_F16 ? FB__CU_MAP_FLOAT16 : FB__CU_MAP_BFLOAT16;
    FB__CU_TRY(&s->driver, cuTensorMapEncodeTiled,
               (to, type, 4, t.at, size, stride, boxes, steps, 0, FB__CU_MAP_SWIZZLE_128,
                FB__CU_MAP_PROMOTE_256, 0));
    return FB_OK;
}

static int64_t rows_q(const fb__problem *p) { return fb__has(p, FB_PACKED) ? p->d.total_q : p->d.len_q; }
static int64_t rows_k(const fb__problem *p) { return fb__has(p, FB_PACKED) ? p->d.total_k : p->d.len_k; }

bool fb__hopper_can(const fb__cuda_state *s, fb__pass pass, const fb__args *a) {
    const uintptr_t all = (uintptr_t)a->q.at | (uintptr_t)a->k.at | (uintptr_t)a->v.at |
                          (uintptr_t)a->dout.at; /* NULL: forward */
    return !*s->not_hopper[pass] && all % 16 == 0;
}

/* Blocks that stay: one for each multiprocessor. */
static fb_status start(const fb__cuda_state *s, fb__kernel kernel, int64_t tiles, void *stream,
                       void **parameters) {
    const fb__loaded *k = &s->kernels[kernel];
    const int64_t most = s->gpu.sms;
    return fb__launch_kernel(s, k->function, tiles < most ? tiles : most, 1, k->spec.THREADS,
                             k->spec.shared_bytes, stream, parameters);
}

/* ---- Who takes which tile ---- */

/* Tiles of one pass. */
typedef struct deal {
    const fb__problem *p;
    bool keys;
    int tile, passing; /* rows of a tile, and of one that passes by */
    int64_t slots, heads, takers;
} deal;

/* How long a block has to do with a tile, in tiles that pass by; a begin and an end are about two. */
static int64_t cost(const deal *d, int64_t slot) {
    const fb_desc *desc = &d->p->d;
    const int64_t off = (fb__has(d->p, FB_TOP_LEFT) ? 0 : desc->len_k - desc->len_q) + desc->position_offset;
    const fb__band band = {desc->len_q, desc->len_k, off, desc->window.left, desc->window.right};
    const int64_t from = slot * d->tile;
    const fb__range seen = d->keys ? fb__band_queries_of(band, from, from + d->tile)
                                   : fb__band_keys_of(band, from, from + d->tile);
    return ((seen.hi + d->passing - 1) / d->passing - seen.lo / d->passing) * (d->keys ? d->p->group : 1) + 2;
}

/* Slots of a head, the longest first. */
static void sort_slots(const deal *d, int64_t *costs, int *slots) {
    for (int n = 0; n < d->slots; n++) {
        int at = n;
        costs[n] = cost(d, n);
        for (; at > 0 && costs[slots[at - 1]] < costs[n]; at--)
            slots[at] = slots[at - 1];
        slots[at] = n;
    }
}

/* Each tile goes to the block that has least to do: what blocks would take from a common counter. Heads come
 * in sections, so that what passes by is in the second-level cache for all blocks that want it, and there
 * long tiles first; a section is long enough for the last one to end evenly. */
static int64_t deal_out(const deal *d, const int64_t *costs, const int *slots, int64_t *load, int64_t *count,
                        unsigned *order) {
    const fb_desc *desc = &d->p->d;
    const double CACHE_BYTES = 32e6;
    const double rows_of_it = d->keys ? (double)d->p->group * (double)desc->len_q : (double)desc->len_k;
    const double group = d->keys ? 1 : (double)d->p->group;
    int64_t section = (int64_t)(CACHE_BYTES / (rows_of_it * (double)(desc->head_dim + desc->head_dim_v) * 2) *
                                group),
            least = (8 * d->takers + d->slots - 1) / d->slots, rounds = 0;
    section = section > least ? section : least;
    for (int64_t head = 0; head < d->heads; head += section) {
        const int64_t end = head + section < d->heads ? head + section : d->heads;
        for (int n = 0; n < d->slots; n++)
            for (int64_t h = head; h < end; h++) {
                int64_t to = 0;
                for (int64_t t = 1; t < d->takers; t++)
                    to = load[t] < load[to] ? t : to;
                load[to] += costs[slots[n]];
                if (order)
                    order[count[to] * d->takers + to] = (unsigned)(h * d->slots + slots[n]);
                rounds = ++count[to] > rounds ? count[to] : rounds;
            }
    }
    return rounds;
}

static fb_status upload(fb__cuda_state *s, fb__pass pass, const unsigned *order, size_t bytes) {
    FB__CU_TRY(&s->driver, cuMemAlloc, (&s->hopper_order[pass], bytes));
    FB__CU_TRY(&s->driver, cuMemcpyHtoD, (s->hopper_order[pass], order, bytes));
    FB__CU_TRY(&s->driver, cuStreamSynchronize, (NULL)); /* a call's stream may not wait for that one */
    return FB_OK;
}

static fb_status deal_pass(fb__cuda_state *s, fb__pass pass, const deal *d) {
    const size_t takers = (size_t)d->takers, slots = (size_t)d->slots;
    int64_t *numbers = calloc(2 * takers + slots, sizeof *numbers);
    int *sorted = calloc(slots, sizeof *sorted);
    fb_status status = numbers && sorted ? FB_OK
                                         : fb__error(FB_MEMORY, "no memory to deal out %lld tiles",
                                                     (long long)(d->slots * d->heads));
    if (status == FB_OK) {
        int64_t *load = numbers, *count = load + takers, *costs = count + takers;
        sort_slots(d, costs, sorted);
        s->hopper_rounds[pass] = deal_out(d, costs, sorted, load, count, NULL);
        const size_t bytes = (size_t)s->hopper_rounds[pass] * takers * sizeof(unsigned);
        unsigned *order = malloc(bytes ? bytes : 1);
        if (order) {
            memset(order, 0xff, bytes);
            memset(numbers, 0, 2 * takers * sizeof *numbers);
            deal_out(d, costs, sorted, load, count, order);
            status = upload(s, pass, order, bytes);
        } else
            status =
                fb__error(FB_MEMORY, "no memory to deal out %lld tiles", (long long)(d->slots * d->heads));
        free(order);
    }
    free(numbers), free(sorted);
    return status;
}

#define MOST_DEALT (1 << 16) /* tiles: more of them even out by themselves */

fb_status fb__hopper_prepare(fb__cuda_state *s, const fb__problem *p) {
    for (int pass = 0; pass < 2; pass++) {
        const fb__loaded *k = &s->kernels[pass == FB__FORWARD ? FORWARD : s->hopper_backward];
        const int tile_rows = k->spec.BM;
        if (*s->not_hopper[pass] || fb__has(p, FB_PACKED) ||
            (p->d.window.left == FB_UNBOUNDED && p->d.window.right == FB_UNBOUNDED))
            continue;
        deal d = {.p = p, .keys = pass == FB__BACKWARD, .tile = tile_rows, .passing = k->spec.BN};
        d.slots = fb__launch_slots(p, d.keys, false, tile_rows);
        d.heads = (d.keys ? p->d.heads_kv : p->d.heads_q) * p->d.batch;
        d.takers = s->gpu.sms;
        if (d.slots > MOST_DEALT || d.heads > MOST_DEALT || d.slots * d.heads > MOST_DEALT ||
            d.slots * d.heads <= d.takers)
            continue;
        FB_TRY(deal_pass(s, (fb__pass)pass, &d));
    }
    return FB_OK;
}

void fb__hopper_drop(fb__cuda_state *s) {
    for (int pass = 0; pass < 2; pass++)
        if (s->hopper_order[pass])
            s->driver.cuMemFree(s->hopper_order[pass]);
    s->hopper_order[0] = s->hopper_order[1] = 0;
}

/* Counts tiles, and says who takes them. */
static int64_t take(const fb__cuda_state *s, const fb__problem *p, fb__pass pass, int tile_rows,
                    fb__args *a) {
    const int64_t tiles = fb__launch_tiles(s, p, pass == FB__BACKWARD, tile_rows, a);
    a->order = (unsigned *)(uintptr_t)s->hopper_order[pass], a->rounds = s->hopper_rounds[pass];
    a->section = 0;
    return tiles;
}

fb_status fb__hopper_forward(const fb__cuda_state *s, const fb__problem *p, void *stream, fb__args *a) {
    const fb__spec *spec = &s->kernels[FORWARD].spec;
    const fb_desc *d = &p->d;
    struct {
        map q, k, v;
    } maps;
    FB_TRY(encode(s, &maps.q, p, a->q, d->head_dim, rows_q(p), d->heads_q, 64));
    FB_TRY(encode(s, &maps.k, p, a->k, d->head_dim, rows_k(p), d->heads_kv, spec->BN));
    FB_TRY(encode(s, &maps.v, p, a->v, d->head_dim_v, rows_k(p), d->heads_kv, spec->BN));
    void *parameters[] = {a, &maps};
    return start(s, FORWARD, take(s, p, FB__FORWARD, spec->BM, a), stream, parameters);
}

/* ---- The backward ---- */

/* Rows of a head in the workspace, and of all. */
static int64_t padded(const fb__problem *p) { return fb__launch_slots(p, false, false, PAD) * PAD; }
static double all_padded(const fb__problem *p) {
    return (double)padded(p) * (double)p->d.heads_q * (fb__has(p, FB_PACKED) ? 1 : (double)p->d.batch);
}

static size_t place(size_t *end, double bytes) {
    const size_t at = (*end + 255) / 256 * 256;
    *end = at + (size_t)bytes;
    return at;
}

void fb__hopper_lay_out(fb__cuda_state *s, const fb__problem *p, size_t *end) {
    const double rows_of_all = all_padded(p);
    s->at_hopper_lse = place(end, rows_of_all * 4);
    s->at_hopper_delta = place(end, rows_of_all * 4);
    s->at_hopper_plain_delta = place(end, fb__has(p, FB_DSINKS) ? (double)fb__launch_rows(p) * 4 : 0);
    const int columns = (s->kernels[s->hopper_backward].spec.D + 63) / 64 * 64;
    s->at_hopper_dq = place(end, rows_of_all * 4 * columns);
}

static fb_status start_rows(const fb__cuda_state *s, int function, const fb__problem *p, void *stream,
                            fb__args *a) {
    void *parameters[] = {a};
    const int64_t tiles = fb__launch_tiles(s, p, false, PAD, a);
    a->section = 0;
    return fb__launch_kernel(s, s->hopper_functions[function], tiles, 1, s->kernels[HOPPER_ROWS].spec.THREADS,
                             0, stream, parameters);
}

fb_status fb__hopper_backward(const fb__cuda_state *s, const fb__problem *p, const fb_io *io, fb__args *a) {
    const fb__spec *spec = &s->kernels[s->hopper_backward].spec;
    const fb_desc *d = &p->d;
    struct {
        map q, k, v, dout;
    } maps;
    char *work = (char *)(((uintptr_t)fb__at(io->workspace) + 15) / 16 * 16);
    a->padded = padded(p);
    a->partial_lse = (float *)(work + s->at_hopper_lse), a->delta = (float *)(work + s->at_hopper_delta);
    a->other_lse = (float *)(work + s->at_hopper_plain_delta), a->partial = (float *)(work + s->at_hopper_dq);
    FB_TRY(encode(s, &maps.q, p, a->q, d->head_dim, rows_q(p), d->heads_q, spec->BN));
    FB_TRY(encode(s, &maps.k, p, a->k, d->head_dim, rows_k(p), d->heads_kv, spec->BM));
    FB_TRY(encode(s, &maps.v, p, a->v, d->head_dim_v, rows_k(p), d->heads_kv, spec->BM));
    FB_TRY(encode(s, &maps.dout, p, a->dout, d->head_dim_v, rows_q(p), d->heads_q, spec->BN));
    FB_TRY(start_rows(s, FB__HOPPER_DELTA, p, io->stream, a));
    void *parameters[] = {a, &maps};
    FB_TRY(start(s, s->hopper_backward, take(s, p, FB__BACKWARD, spec->BM, a), io->stream, parameters));
    if (a->dq.at)
        FB_TRY(start_rows(s, FB__HOPPER_DQ, p, io->stream, a));
    if (!fb__has(p, FB_DSINKS))
        return FB_OK;
    a->delta = a->other_lse; /* as lse lies */
    return fb__launch_dsinks(s, p, io->stream, a);
}
