/* The CPU backend: chooses row, route and sizes when a plan is made, and hands a pass to its route.
 * Floor: cpu. Next: forward.c. */
#include "cpu.h"
#include "../base/env.h"
#include "../core/error.h"
#include "../core/route.h"
#include "backward.h"
#include "forward.h"
#include "merge.h"
#include "ref.h"
#include "team.h"
#include "unfused.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

/* ---- The plan ---- */

/* Below this many floating-point operations (about 50 us of one core) a team of threads costs more than it
 * gives. */
#define SERIAL_FLOPS 2e6

/* Most bytes of partial dQ: with a copy for each task there is nothing to wait for between steps, and K, V,
 * dK and dV stay near the task; but this memory grows with the tasks (bench/SPEED.md, backward on many
 * cores). */
#ifndef COPIES_BYTES
#define COPIES_BYTES 64e6
#endif

static double flops(const fb__problem *p) {
    const fb_desc *d = &p->d;
    return 2.0 * (double)d->batch * (double)d->heads_q * (double)d->len_q * (double)d->len_k *
           (double)(d->head_dim + d->head_dim_v);
}

static int64_t clamp(int64_t x, int64_t lo, int64_t hi) { return fb__max(fb__min(x, hi), lo); }

/* How the problem is cut. All of it follows from shape, options and desc.tasks: never from the threads. */
static void cut(fb__cpu_state *s, const fb__problem *p) {
    const fb_desc *d = &p->d;
    bool packed = fb__has(p, FB_PACKED), dbias = fb__has(p, FB_DBIAS);
    s->operand = s->pairs ? 2 : s->k->size;
    s->lanes = s->pairs ? s->pairs->lanes : s->k->lanes;
    s->row_step = s->pairs ? s->pairs->step : 1;
    s->d_k = fb__round_up(d->head_dim, s->row_step);
    s->dv_k = fb__round_up(d->head_dim_v, s->row_step);
    s->d_pad = fb__round_up(d->head_dim, s->lanes);
    s->dv_pad = fb__round_up(d->head_dim_v, s->lanes);
    s->blocks = s->stacked ? fb__ceil(p->group * d->len_q, FB__BR) : p->group * fb__ceil(d->len_q, FB__BR);
    s->few = s->stacked && p->group * d->len_q <= fb__min(s->k->lanes / 2, FB__FEW);
    s->key_blocks = fb__ceil(d->len_k, FB__BC);
    s->slots = d->batch * s->blocks;
    if (packed && !s->stacked)
        s->slots = p->group * (d->total_q / FB__BR + d->batch);
    s->key_slots = packed ? d->total_k / FB__BC + d->batch : d->batch * s->key_blocks;
    if (!d->heads_q || !d->batch)
        s->slots = 0;

    /* Packing K and V for each block of queries anew costs 5 to 20 % of its products. */
    s->shared_keys = !s->native && s->route != FB_UNFUSED && s->blocks > 1;

    /* A chunk of fewer than 4 tiles of keys is not worth packing its queries for. */
    int64_t tasks = fb__max(s->slots * d->heads_kv, 1);
    s->forward_chunks = clamp(fb__ceil(d->tasks, tasks), 1, fb__max(s->key_blocks / 4, 1));
    /* Few rows finish early and with little to join: more tasks, for cores that do not read equally fast. */
    if (s->few)
        s->forward_chunks = clamp(4 * s->forward_chunks, s->forward_chunks, s->key_blocks / 16);

    s->batch_waves = dbias && d->bias_shape.batch == 1 && d->batch > 1;
    s->head_waves = dbias && d->bias_shape.heads == 1 && d->heads_kv > 1;
    s->waves = (s->batch_waves ? d->batch : 1) * (s->head_waves ? d->heads_kv : 1);
    s->per_wave = (s->batch_waves ? 1 : d->batch) * (s->head_waves ? 1 : d->heads_kv);
    s->chunks = clamp(fb__ceil(d->tasks, fb__max(s->per_wave, 1)), 1, fb__max(s->key_blocks / 4, 1));
    if (s->pairs && s->chunks == 2 && s->key_blocks <= 8) /* half a head is too little for products as fast */
        s->chunks = 1;
    if (dbias && d->bias_shape.cols == 1) /* all keys of a row share one cell of dbias */
        s->chunks = 1;
    double copies =
        (double)s->chunks * (double)s->slots * (double)d->heads_kv * FB__BR * (double)(s->d_k * s->k->size);
    s->steps = s->blocks >= s->chunks && copies > COPIES_BYTES ? s->chunks : 1;
    s->copies = s->steps == 1 ? s->chunks : 1;
    s->sub = clamp((s->pairs ? 2048 : 1024) / fb__max(s->d_pad + s->dv_pad, 1), 1, FB__MOST_SUB);
}

/* An upper bound of the workspace in floating point, so that sizes can then be added up in integers. */
static double bound(const fb__cpu_state *s, const fb__problem *p) {
    const fb_desc *d = &p->d;
    double width = (double)(s->d_pad + s->dv_pad + 64) * 8,
           rows = (double)s->slots * (double)d->heads_kv * FB__BR;
    double keys = (double)(s->key_slots + 1) * (double)(d->heads_kv + 1) * FB__BC;
    double bias = (double)d->bias_shape.batch * (double)d->bias_shape.heads * (double)d->bias_shape.rows *
                  (double)(d->bias_shape.cols + 64) * 8;
    double threads = (double)s->threads[0] + (double)s->threads[1];
    double slices = threads * (width * FB__BR * (double)(s->blocks + s->sub + 20) + 1e6);
    if (s->route == FB_UNFUSED || s->route == FB_REFERENCE)
        slices += (double)d->len_k * (width * 4 + 8 * FB__BR * 4) * threads + rows * (double)d->len_k * 16;
    return rows * width * (double)(s->forward_chunks + s->copies + 2) + 2 * keys * width + bias + slices;
}

/* Places one array behind the others. */
static void place(size_t *at, size_t *end, size_t bytes) {
    *at = *end;
    *end += (bytes + 63) / 64 * 64;
}

static size_t slices(fb__cpu_state *s, fb__pass pass, size_t bytes) {
    /* Not a multiple of a page's size: threads would meet in the same cache sets. */
    s->slice[pass] = (bytes + 4095) / 4096 * 4096 + 64;
    return (size_t)s->threads[pass] * s->slice[pass];
}

static void lay_out(fb__cpu_state *s, const fb__problem *p) {
    bool unfused = s->route == FB_UNFUSED;
    size_t ends[2] = {0, 0};
    if (s->route == FB_REFERENCE) {
        ends[0] = slices(s, FB__FORWARD, fb__ref_scratch(p));
        ends[1] = slices(s, FB__BACKWARD, fb__ref_scratch(p));
    } else {
        size_t *end = &ends[FB__FORWARD];
        *end = slices(s, FB__FORWARD, unfused ? fb__unfused_scratch(s, p) : fb__forward_scratch(s, p));
        if (unfused)
            place(&s->at_scores[FB__FORWARD], end, fb__unfused_scores(s, p));
        else {
            place(&s->at_keys, end, fb__forward_keys(s, p));
            place(&s->at_partial, end, fb__forward_partial(s, p));
        }
        end = &ends[FB__BACKWARD];
        if (!fb__has(p, FB_FORWARD_ONLY)) {
            *end = slices(s, FB__BACKWARD, unfused ? fb__unfused_scratch(s, p) : fb__backward_scratch(s, p));
            place(&s->at_delta, end, fb__backward_delta(s, p));
            place(&s->at_dbias, end, fb__backward_dbias(s, p));
            if (unfused)
                place(&s->at_scores[FB__BACKWARD], end, fb__unfused_scores(s, p));
            else {
                place(&s->at_dq, end, fb__backward_dq(s, p));
                place(&s->at_dkdv, end, fb__backward_dkdv(s, p));
            }
        }
    }
    s->workspace = (ends[0] > ends[1] ? ends[0] : ends[1]) + 64; /* 64 to align it */
}

static void count_threads(fb__cpu_state *s, const fb__problem *p) {
    int most = p->d.threads ? p->d.threads : fb__team_max();
    if (flops(p) < SERIAL_FLOPS)
        most = 1;
    int64_t rows = s->slots * p->d.heads_kv, units = s->per_wave * s->chunks;
    int64_t tasks[2] = {rows * s->forward_chunks, units};
    if (s->route == FB_REFERENCE) {
        tasks[0] = fb__ref_units(p, FB__FORWARD);
        tasks[1] = fb__ref_units(p, FB__BACKWARD);
    } else if (s->route == FB_UNFUSED)
        tasks[1] = rows;
    for (int i = 0; i < 2; i++)
        s->threads[i] = (int)clamp(tasks[i], 1, most);
}

/* Units are independent, so how many go through their steps together is free: just enough to feed the
 * threads, which keeps what a unit works on in cache from step to step, and its places too, where that needs
 * fewer. */
static void group(fb__cpu_state *s, const fb__problem *p) {
    int threads = s->threads[FB__BACKWARD];
    int64_t units = fb__max(s->per_wave, 1), heads = p->d.heads_kv;
    s->together = s->steps == 1  ? units
                  : threads == 1 ? 1
                                 : fb__min(fb__ceil(4 * (int64_t)threads, s->chunks), units);
    s->grouped = s->copies == 1 && s->together * s->blocks < s->slots * heads &&
                 s->together * s->key_blocks < s->key_slots * heads;
}

/* The row, its kernels, and whether products take bf16: not on the unfused route, nor with scales that have
 * to be multiplied into Q. With `ask` the system is asked for what they need; if it refuses, the next row is
 * taken. */
static fb_status choose_kernels(fb__cpu_state *s, const fb__problem *p, bool ask) {
    const char *cap = fb__env_get(FB__ENV_FLASHBACK_ISA);
    const bool bf16 =
        p->d.dtype == FB_BF16 && (s->route == FB_FUSED || s->route == FB_VECTOR) && fb__scale_in_exponent(p);
    fb__features features = fb__features_here();
    FB_TRY(fb__cpu_row_choose(&features, cap, &s->row));
    if (bf16 && ask && s->row->permitted && !s->row->permitted()) {
        s->refused = true;
        features.amx = false;
        FB_TRY(fb__cpu_row_choose(&features, cap, &s->row));
    }
    s->pairs = bf16 ? s->row->pairs : NULL;
    s->k = p->d.dtype == FB_F64 ? s->row->f64 : s->row->f32;
    return FB_OK;
}

/* Everything but the layout of the workspace. */
static fb_status decide(fb__cpu_state *s, const fb__problem *p, bool ask) {
    if (p->d.index != 0)
        return fb__error(FB_NO_DEVICE, "desc.index is %d, but the CPU is one device: 0", p->d.index);
    FB_TRY(fb__route_choose(p, &s->route));
    FB_TRY(choose_kernels(s, p, ask));
    s->stacked = s->route == FB_VECTOR;
    s->type = (int)p->d.dtype;
    s->native = p->d.dtype == FB_F32 || p->d.dtype == FB_F64;
    cut(s, p);
    count_threads(s, p);
    group(s, p);
    if (bound(s, p) > 0x1p62)
        return fb__error(FB_INVALID, "overflow: the workspace of this problem would not fit into 64 bits");
    return FB_OK;
}

static fb_status check(const fb__problem *p) {
    fb__cpu_state s = {0};
    return decide(&s, p, false);
}

static fb_status prepare(const fb__problem *p, void **state, size_t *workspace) {
    fb__cpu_state *s = calloc(1, sizeof *s);
    if (!s)
        return fb__error(FB_MEMORY, "no memory for a plan (%zu bytes)", sizeof *s);
    fb_status status = decide(s, p, true);
    if (status != FB_OK) {
        free(s);
        return status;
    }
    lay_out(s, p);
    *state = s;
    *workspace = s->workspace;
    return FB_OK;
}

static void drop(void *state) { free(state); }

static void explain(const void *state, const fb__problem *p, fb__text *text) {
    const fb__cpu_state *s = state;
    fb__route_explain(p, s->route, text);
    if (s->route == FB_REFERENCE) {
        fb__text_add(text, "kernels: cpu/ref.c in double precision\nthreads: forward %d, backward %d\n",
                     s->threads[0], s->threads[1]);
        return;
    }
    if (s->pairs)
        fb__text_add(
            text,
            "kernels: cpu %s, bf16 products summed in f32, register tiles (rows x vectors)%s; %s f32 "
            "for the rest [%s]\n",
            s->pairs->isa, s->pairs->tiles, s->k->isa, s->row->measured);
    else
        fb__text_add(text,
                     "kernels: cpu %s, %s arithmetic, %d lanes, register tiles (rows x vectors)%s [%s]\n",
                     s->k->isa, s->k->size == 8 ? "f64" : "f32", s->k->lanes, s->k->tiles,
                     s->row->pairs ? "bench/SPEED.md, instruction sets" : s->row->measured);
    if (s->refused)
        fb__text_add(
            text, "  amx: passed over, the system does not permit tiles (arch_prctl); a thread's alternate "
                  "signal stack may be too small for them\n");
    if (s->pairs)
        fb__text_add(text, "conversion: none of q, k, v and dout; P and dS are rounded to bf16 once%s\n",
                     s->few ? ", but for the forward, which is f32" : "");
    else if (!s->native)
        fb__text_add(text, "conversion: %s through f32 packs, one rounding at the end\n",
                     fb_dtype_name(p->d.dtype));
    fb__text_add(text, "tiles: %d queries x %d keys%s\n", FB__BR,
                 s->route == FB_UNFUSED ? (int)p->d.len_k : FB__BC,
                 s->stacked ? ", the heads of a group side by side" : "");
    if (s->few)
        fb__text_add(text, "few queries: forward in %s, vectors along the head dimension\n",
                     s->k->size == 8 ? "f64" : "f32");
    if (s->route != FB_UNFUSED)
        fb__text_add(
            text,
            "tasks: forward %lld (keys in %lld chunks), backward %lld in %lld steps of %lld waves (keys "
            "in %lld chunks, %lld copies of dQ)\n",
            (long long)(s->slots * p->d.heads_kv * s->forward_chunks), (long long)s->forward_chunks,
            (long long)(s->per_wave * s->chunks), (long long)s->steps, (long long)s->waves,
            (long long)s->chunks, (long long)s->copies);
    fb__text_add(text, "threads: forward %d, backward %d\n", s->threads[0], s->threads[1]);
}

static void info(fb__text *text) {
    const fb__features features = fb__features_here();
    fb__text_add(text, "cpu instruction sets: ");
    fb__cpu_rows_list(&features, text);
    fb__text_add(text, "\ncpu threads: %d\n", fb__team_max());
}

/* ---- A call ---- */

static void ref_task(const void *context, int64_t unit, int thread) {
    const fb__call *c = context;
    fb__ref_run(c->p, c->pass, c->io, unit, c->base + (size_t)thread * c->slice);
}

static fb_status no_stream(const char *name, const void *stream) {
    if (stream)
        return fb__error(FB_INVALID, "%s is %p, but calls on the CPU end before they return; it must be NULL",
                         name, stream);
    return FB_OK;
}

static fb_status run(const void *state, const fb__problem *p, fb__pass pass, const fb_io *io) {
    const fb__cpu_state *s = state;
    FB_TRY(no_stream("io.stream", io->stream));
    FB_TRY(fb__problem_check_lengths(p, io));
    uintptr_t base = ((uintptr_t)fb__at(io->workspace) + 63) / 64 * 64;
    fb__call call = {
        .s = s,
        .p = p,
        .io = io,
        .base = (char *)base,
        .team = {s->threads[pass], s->pairs ? s->pairs->enter : NULL, s->pairs ? s->pairs->leave : NULL},
        .slice = s->slice[pass],
        .pass = pass};
    if (s->route == FB_REFERENCE)
        fb__team_run_exact(call.team.threads, fb__ref_units(p, pass), ref_task, &call);
    else if (s->route == FB_UNFUSED)
        (pass == FB__FORWARD ? fb__unfused_forward : fb__unfused_backward)(&call);
    else
        (pass == FB__FORWARD ? fb__forward_run : fb__backward_run)(&call);
    return FB_OK;
}

/* ---- Memory ---- */

/* A stream through 4-KiB pages waits for address translation: 2 to 8 % of a call (bench/SPEED.md). */
#define HUGE_PAGE ((size_t)2 << 20)
#define HUGE_FROM (2 * HUGE_PAGE)

static fb_status memory_alloc(fb_ref *ref, int32_t index, size_t bytes) {
    if (index != 0)
        return fb__error(FB_NO_DEVICE, "index is %d, but the CPU is one device: 0", index);
    if (bytes > SIZE_MAX - 63)
        return fb__error(FB_MEMORY, "no memory for %zu bytes", bytes);
    size_t align = bytes < HUGE_FROM ? 64 : HUGE_PAGE, whole = bytes ? (bytes + 63) / 64 * 64 : 64;
    if (posix_memalign(&ref->data, align, whole) != 0) {
        ref->data = NULL;
        return fb__error(FB_MEMORY, "no memory for %zu bytes", bytes);
    }
#ifdef MADV_HUGEPAGE
    if (bytes >= HUGE_FROM)
        madvise(ref->data, whole / HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE); /* advice: failing is no error */
#endif
    return FB_OK;
}

static fb_status memory_free(fb_ref *ref, int32_t index) {
    (void)index;
    free(ref->data);
    *ref = (fb_ref){NULL, 0};
    return FB_OK;
}

static fb_status memory_write(fb_ref to, const void *from, size_t bytes, int32_t index) {
    (void)index;
    if (bytes)
        memcpy(fb__at(to), from, bytes);
    return FB_OK;
}

static fb_status memory_read(void *to, fb_ref from, size_t bytes, int32_t index) {
    (void)index;
    if (bytes)
        memcpy(to, fb__at(from), bytes);
    return FB_OK;
}

static fb_status sync_nothing(int32_t index, void *stream) {
    (void)index;
    return no_stream("stream", stream);
}

static fb_status merge(const void *state, const fb__problem *p, fb_ref out, fb_ref lse, fb_ref other_out,
                       fb_ref other_lse, void *stream) {
    (void)state;
    FB_TRY(no_stream("stream", stream));
    fb__merge(p, out, lse, other_out, other_lse);
    return FB_OK;
}

const fb__backend fb__cpu = {
    .device = FB_CPU,
    .check = check,
    .prepare = prepare,
    .run = run,
    .merge = merge,
    .explain = explain,
    .drop = drop,
    .info = info,
    .alloc = memory_alloc,
    .free = memory_free,
    .write = memory_write,
    .read = memory_read,
    .sync = sync_nothing,
};
