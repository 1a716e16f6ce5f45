/* The Metal backend: chooses route and rows when a plan is made, has the kernels compiled, and hands a pass
 * to launch.c. Metal is found at run time, and driven in plain C. Floor: metal. Next: objc.h (how C speaks to
 * Metal), launch.c (a pass), kernels/forward.metal. */
#include "metal.h"
#include "../core/route.h"
#include "abi.h"
#include "compile.h"
#include "keep.h"
#include "launch.h"
#include "memory.h"
#include "tiles.h"
#include "unfused.h"
#include <errno.h>
#include <stdlib.h>

_Static_assert(sizeof(fb__metal_args) <= 4096, "setBytes takes at most 4 KB");
_Static_assert(FB_AT_COUNT <= 31, "a kernel has at most 31 buffers");

/* ---- What can be computed ---- */

/* Rows of a sequence and of all stacked heads are counted in 32 bits, tiles past their end included. */
#define MAX_LEN (INT64_C(1) << 30)
#define MAX_GROUPS INT64_C(0x7fffffff)

static fb_status check_sizes(const fb__problem *p) {
    const fb_desc *d = &p->d;
    if (d->dtype == FB_F64)
        return fb__error(FB_UNSUPPORTED,
                         "desc.dtype is f64, which Metal has no type for; metal has f32, f16 and "
                         "bf16, and device cpu has f64");
    if (d->len_q > MAX_LEN || d->len_k > MAX_LEN || d->total_q > MAX_LEN || d->total_k > MAX_LEN)
        return fb__error(
            FB_UNSUPPORTED,
            "desc.len_q is %lld and len_k %lld (total_q %lld, total_k %lld); metal takes at most "
            "%lld",
            (long long)d->len_q, (long long)d->len_k, (long long)d->total_q, (long long)d->total_k,
            (long long)MAX_LEN);
    if (d->heads_q > MAX_GROUPS || (double)p->group * (double)d->len_q > (double)MAX_LEN * 2)
        return fb__error(FB_UNSUPPORTED, "desc.heads_q is %lld, more than metal takes",
                         (long long)d->heads_q);
    return FB_OK;
}

/* Tiles of 8 rows are the smallest there are. */
static fb_status check_groups(const fb__problem *p) {
    const fb_desc *d = &p->d;
    const double q = (double)d->len_q / 8 + 1, k = (double)d->len_k / 8 + 1;
    double most = (q > k ? q : k) * (double)d->heads_q * (double)d->batch;
    if (fb__has(p, FB_DBIAS)) {
        const fb_shape *n = &d->bias_shape;
        const double tiles =
            ((double)n->rows / 8 + 1) * ((double)n->cols / 8 + 1) * (double)n->heads * (double)n->batch;
        most = tiles > most ? tiles : most;
    }
    return most <= (double)MAX_GROUPS
               ? FB_OK
               : fb__error(
                     FB_UNSUPPORTED,
                     "the problem needs up to %.3g threadgroups, metal takes %lld; cut the batch or the "
                     "heads",
                     most, (long long)MAX_GROUPS);
}

static fb_status choose_route(fb__metal_state *s, const fb__problem *p) {
    FB_TRY(fb__route_choose(p, &s->route));
    if (s->route == FB_REFERENCE)
        return fb__error(FB_UNSUPPORTED,
                         "route reference, asked for by %s, is in double precision, which Metal "
                         "does not have; device cpu has it",
                         p->route_from);
    s->stacked = s->route == FB_VECTOR;
    s->options = (p->d.softcap > 0 ? FB_SOFTCAP : 0) | (fb__has(p, FB_BIAS) ? FB_BIASED : 0) |
                 (fb__has(p, FB_MASK) ? FB_MASKED : 0) | (fb__has(p, FB_BLOCK_MASK) ? FB_BLOCKED : 0);
    return FB_OK;
}

/* Those of rows.metal serve every route: fb_merge is the same for all. */
static bool needs(const fb__metal_state *s, const fb__problem *p, fb__metal_kernel kernel) {
    const bool tiles = s->route != FB_UNFUSED, backward = tiles && !fb__has(p, FB_FORWARD_ONLY);
    switch (kernel) {
    case FB__METAL_FORWARD:
        return tiles;
    case FB__METAL_DQ:
        return backward && !fb__has(p, FB_NO_DQ);
    case FB__METAL_DKDV:
        return backward && (!fb__has(p, FB_NO_DK) || !fb__has(p, FB_NO_DV));
    case FB__METAL_DBIAS:
        return backward && fb__has(p, FB_DBIAS);
    case FB__METAL_UNFUSED:
        return !tiles;
    default:
        return true;
    }
}

/* The first rows that fit by their memory; compile.c may have to take later ones. */
static fb_status choose_rows(fb__metal_state *s, const fb__problem *p) {
    int skips[FB__METAL_KERNEL_COUNT];
    FB_TRY(fb__metal_tiles(skips));
    for (int k = 0; k < FB__METAL_KERNEL_COUNT; k++) {
        s->kernels[k].used = needs(s, p, (fb__metal_kernel)k);
        s->kernels[k].first = skips[k];
        const fb__metal_need need = fb__metal_need_of(s, p, (fb__metal_kernel)k, 0);
        if (s->kernels[k].used && !fb__metal_tune((fb__metal_kernel)k, &need, &s->kernels[k].spec))
            return fb__metal_no_row(s, p, (fb__metal_kernel)k);
    }
    return FB_OK;
}

/* ---- The workspace ---- */

static int64_t clamp(int64_t x, int64_t lo, int64_t hi) {
    return x > hi ? (hi < lo ? lo : hi) : x < lo ? lo : x;
}

/* Few queries make few threadgroups: the keys are cut so that every core has work. Metal does not say how
 * many cores there are; there are 8 to 80, and so the bits of a result are the same on all of them. */
static int64_t cut_keys(const fb__metal_state *s, const fb__problem *p, fb__metal_kernel kernel) {
    const fb__metal_spec *spec = &s->kernels[kernel].spec;
    const int64_t ROOM = 128;
    if (!s->stacked || !s->kernels[kernel].used)
        return 1;
    const int64_t groups = fb__metal_slots(p, false, true, spec->BM) * p->d.heads_kv * p->d.batch;
    const int64_t tiles = (p->d.len_k + spec->BN - 1) / spec->BN;
    return groups ? clamp((ROOM + groups - 1) / groups, 1, clamp(tiles / 2, 1, 128)) : 1;
}

static size_t place(size_t *end, double bytes) {
    size_t at = *end;
    *end += ((size_t)bytes + 15) / 16 * 16;
    return at;
}

static fb_status lay_out(fb__metal_state *s, const fb__problem *p) {
    if (s->route == FB_UNFUSED)
        return fb__metal_unfused_lay_out(s, p);
    const double rows = (double)fb__metal_rows(p),
                 stacked = (double)p->d.batch * (double)p->d.heads_q * (double)p->d.len_q;
    s->chunks[FB__FORWARD] = cut_keys(s, p, FB__METAL_FORWARD);
    s->chunks[FB__BACKWARD] = cut_keys(s, p, FB__METAL_DQ);
    const double parts[2] = {s->chunks[0] > 1 ? (double)s->chunks[0] * stacked : 0,
                             s->chunks[1] > 1 ? (double)s->chunks[1] * stacked : 0};
    const double bytes[2] = {parts[0] * 4 * s->kernels[FB__METAL_FORWARD].spec.DV,
                             parts[1] * 4 * s->kernels[FB__METAL_DQ].spec.D};
    if (rows * 4 + parts[0] * 8 + bytes[0] + bytes[1] + (double)s->ds_bytes > 0x1p62)
        return fb__error(FB_INVALID, "overflow: the workspace of this problem would not fit into 64 bits");
    size_t ends[2] = {0, 0};
    s->at_partial[0] = place(&ends[0], bytes[0]);
    s->at_partial_lse = place(&ends[0], parts[0] * 8);
    if (!fb__has(p, FB_FORWARD_ONLY)) {
        s->at_delta = place(&ends[1], rows * 4);
        s->at_partial[1] = place(&ends[1], bytes[1]);
        s->at_gradients = place(&ends[1], (double)s->ds_bytes);
    }
    s->workspace = (ends[0] > ends[1] ? ends[0] : ends[1]) + 16; /* 16 to align it */
    return FB_OK;
}

/* ---- Plans ---- */

/* All that a plan is, but for its kernels. What it holds is dropped by `clear`, also on failure. */
static fb_status decide(fb__metal_state *s, const fb__problem *p) {
    FB_TRY(fb__metal_device_open(&s->objc, "desc.index", p->d.index, &s->device));
    FB_TRY(fb__metal_device_check(&s->device));
    FB_TRY(check_sizes(p));
    FB_TRY(choose_route(s, p));
    FB_TRY(check_groups(p));
    FB_TRY(fb__metal_keep(s, p));
    FB_TRY(choose_rows(s, p));
    return lay_out(s, p);
}

static void clear(fb__metal_state *s) {
    fb__metal_unload(s);
    fb__objc_release(&s->objc, s->queue);
    fb__metal_device_close(&s->objc, &s->device);
}

static fb_status check(const fb__problem *p) {
    fb__metal_state s = {.queue = NULL};
    FB_TRY(fb__objc_open(&s.objc));
    void *pool = fb__objc_enter(&s.objc);
    fb_status status = decide(&s, p);
    clear(&s);
    fb__objc_leave(&s.objc, pool);
    return status;
}

static fb_status fill(fb__metal_state *s, const fb__problem *p) {
    FB_TRY(decide(s, p));
    s->queue = FB__GET(&s->objc, new_queue, s->device.object);
    if (!s->queue)
        return fb__error(FB_DEVICE, "newCommandQueue failed: %s gave no queue", s->device.name);
    FB_TRY(fb__metal_load(s, p));
    return lay_out(s, p); /* other rows may have been taken */
}

static fb_status prepare(const fb__problem *p, void **state, size_t *workspace) {
    fb__metal_state *s = calloc(1, sizeof *s);
    if (!s)
        return fb__error(FB_MEMORY, "no memory for a plan (%zu bytes)", sizeof *s);
    fb_status status = fb__objc_open(&s->objc);
    if (status == FB_OK) {
        void *pool = fb__objc_enter(&s->objc);
        status = fill(s, p);
        if (status != FB_OK)
            clear(s);
        fb__objc_leave(&s->objc, pool);
    }
    if (status != FB_OK) {
        free(s);
        return status;
    }
    *state = s;
    *workspace = s->workspace;
    return FB_OK;
}

/* What is under way on the GPU holds what it needs. */
static void drop(void *state) {
    fb__metal_state *s = state;
    void *pool = fb__objc_enter(&s->objc);
    clear(s);
    fb__objc_leave(&s->objc, pool);
    free(s);
}

/* ---- Words ---- */

static void explain(const void *state, const fb__problem *p, fb__text *text) {
    const fb__metal_state *s = state;
    fb__route_explain(p, s->route, text);
    fb__text_add(text, "gpu: %s, family Apple%d; code by Metal (" FB__METAL_COMPILER ")\n", s->device.name,
                 s->device.family);
    for (int n = 0; n < FB__METAL_KERNEL_COUNT; n++) {
        const fb__metal_loaded *k = &s->kernels[n];
        if (!k->used)
            continue;
        fb__text_add(text, "kernel: %s, %s in %.1f ms, at most %d threads",
                     fb__metal_file((fb__metal_kernel)n), k->kept ? "from the cache" : "compiled", k->ms,
                     k->threads);
        if (k->skipped)
            fb__text_add(text, " (too few for %d tile%s before this one)", k->skipped,
                         k->skipped > 1 ? "s" : "");
        if (n != FB__METAL_ROWS)
            fb__text_add(text,
                         "; tiles %d x %d, D %d, DV %d, %d threads, %d bytes of threadgroup memory [%s]",
                         k->spec.BM, k->spec.BN, k->spec.D, k->spec.DV, k->spec.THREADS, k->spec.shared_bytes,
                         k->spec.measured);
        fb__text_add(text, "\n");
    }
    if (s->route == FB_UNFUSED)
        fb__metal_unfused_explain(p, text);
    if (s->ds_bytes)
        fb__text_add(text, "dS: made by dkdv.metal and kept for dq.metal, %.3f GB\n",
                     (double)s->ds_bytes * 1e-9);
    if (s->stacked)
        fb__text_add(text, "chunks of keys: forward %lld, dq %lld\n", (long long)s->chunks[0],
                     (long long)s->chunks[1]);
}

static void info_device(const fb__objc *o, int index, fb__text *text) {
    fb__metal_device d;
    if (fb__metal_device_open(o, "index", index, &d) != FB_OK)
        return;
    fb__text_add(text, "metal device %d: %s, ", index, d.name);
    if (d.family)
        fb__text_add(text, "family Apple%d, ", d.family);
    else
        fb__text_add(text, "no GPU of Apple's, ");
    fb__text_add(text, "%zu bytes of threadgroup memory, working set of %.1f GB\n", d.threadgroup_bytes,
                 (double)d.working_set * 1e-9);
    fb__metal_device_close(o, &d);
}

static void info(fb__text *text) {
    fb__objc objc;
    if (fb__objc_open(&objc) != FB_OK) {
        fb__text_add(text, "metal devices: none (%s)\n", fb__error_text());
        fb__error_clear();
        return;
    }
    void *pool = fb__objc_enter(&objc);
    const int count = fb__metal_device_count(&objc);
    fb__text_add(text, "metal devices: %d\nmetal compiler: " FB__METAL_COMPILER "; macOS keeps its code\n",
                 count);
    for (int n = 0; n < count; n++)
        info_device(&objc, n, text);
    fb__objc_leave(&objc, pool);
    fb__error_clear();
}

/* ---- A call ---- */

static fb_status run(const void *state, const fb__problem *p, fb__pass pass, const fb_io *io) {
    const fb__metal_state *s = state;
    void *pool = fb__objc_enter(&s->objc);
    fb_status status = (pass == FB__FORWARD ? fb__metal_forward : fb__metal_backward)(s, p, io);
    fb__objc_leave(&s->objc, pool);
    return status;
}

static fb_status merge(const void *state, const fb__problem *p, fb_ref out, fb_ref lse, fb_ref other_out,
                       fb_ref other_lse, void *stream) {
    const fb__metal_state *s = state;
    void *pool = fb__objc_enter(&s->objc);
    fb_status status = fb__metal_merge(s, p, out, lse, other_out, other_lse, stream);
    fb__objc_leave(&s->objc, pool);
    return status;
}

const fb__backend fb__metal = {.device = FB_METAL,
                               .check = check,
                               .prepare = prepare,
                               .run = run,
                               .merge = merge,
                               .explain = explain,
                               .drop = drop,
                               .info = info,
                               .alloc = fb__metal_alloc,
                               .free = fb__metal_free,
                               .write = fb__metal_write,
                               .read = fb__metal_read,
                               .sync = fb__metal_sync};
