/* Every rule on the pointers of one call, once: present exactly where the plan uses them, a workspace that is
 * large enough, and outputs that overlap nothing (R15). Floor: core. */
#include "../base/text.h"
#include "error.h"
#include "problem.h"
#include <stddef.h>
#include <string.h>

/* UNUSED: the plan has no such tensor. ELSEWHERE: its other pass has, so that one fb_io serves both. */
typedef enum use { UNUSED, ELSEWHERE, OPTIONAL, IN, OUT } use;

/* Where a tensor lies: bytes [base, end), reached as base + i*stride[0] + j*stride[1] + k*stride[2] + [0,
 * width). They are addresses; where refs are handles of buffers, they are bytes of the buffer `memory`. */
typedef struct place {
    const char *name;
    use role;
    fb_ref *ref;
    const void *memory;
    uintptr_t base, end;
    int64_t count[3], stride[3];
    int64_t width;
    size_t element;
} place;

/* `how`, for a tensor of the backward that the plan has. */
static use backward_use(const fb__problem *p, fb__pass pass, bool has, use how) {
    if (!has || fb__has(p, FB_FORWARD_ONLY))
        return UNUSED;
    return pass == FB__BACKWARD ? how : ELSEWHERE;
}

#define MAX_PLACES FB__MAX_EXTENTS
typedef struct places {
    place at[MAX_PLACES];
    int n;
} places;

static place strided(const char *name, use role, fb_ref *ref, fb_strides s, int64_t batch, int64_t heads,
                     int64_t rows, int64_t cols, size_t bytes) {
    int64_t e = (int64_t)bytes;
    return (place){.name = name,
                   .role = role,
                   .ref = ref,
                   .count = {batch, heads, rows},
                   .stride = {s.batch * e, s.head * e, s.row * e},
                   .width = cols * e,
                   .element = bytes};
}

static place flat(const char *name, use role, fb_ref *ref, int64_t count, size_t bytes) {
    return strided(name, role, ref, (fb_strides){0, 0, 0}, 1, 1, 1, count, bytes);
}

static bool is_empty(const place *p) { return !p->width || !p->count[0] || !p->count[1] || !p->count[2]; }

/* From its first byte to behind its last one. */
static uintptr_t extent(const place *p) {
    return is_empty(p) ? 0
                       : (uintptr_t)((p->count[0] - 1) * p->stride[0] + (p->count[1] - 1) * p->stride[1] +
                                     (p->count[2] - 1) * p->stride[2] + p->width);
}

static void locate(const fb__problem *p, places *all) {
    const bool handles = p->d.device == FB_METAL;
    for (int i = 0; i < all->n; i++) {
        place *at = &all->at[i];
        at->memory = handles ? at->ref->data : NULL;
        at->base = handles ? (uintptr_t)at->ref->offset : (uintptr_t)fb__at(*at->ref);
        at->end = at->base + (at->ref->data ? extent(at) : 0);
    }
}

/* The bytes that a place covers inside one period of `step`, as an interval [at, at + width); false if its
 * strides don't fold into one. */
static bool fold(const place *p, int64_t step, int64_t *at, int64_t *width) {
    *width = p->width;
    for (int i = 0; i < 3; i++)
        if (p->count[i] > 1 && p->stride[i] % step != 0)
            *width += (p->count[i] - 1) * p->stride[i];
    *at = (int64_t)(p->base % (uintptr_t)step);
    return *width <= step;
}

/* Spans that meet may still interleave, as the slices of one [B,L,3,H,D] buffer do: then, folded by a stride
 * that both have, the two lie apart on the circle. */
static bool interleave(const place *a, const place *b) {
    for (int i = 0; i < 3; i++) {
        int64_t step = a->count[i] > 1 ? a->stride[i] : 0, at_a, at_b, width_a, width_b;
        if (step <= 0 || !fold(a, step, &at_a, &width_a) || !fold(b, step, &at_b, &width_b))
            continue;
        int64_t a_to_b = ((at_b - at_a) % step + step) % step, b_to_a = ((at_a - at_b) % step + step) % step;
        if (a_to_b >= width_a && b_to_a >= width_b)
            return true;
    }
    return false;
}

static bool overlap(const place *a, const place *b) {
    return a->memory == b->memory && a->base < b->end && b->base < a->end && !interleave(a, b) &&
           !interleave(b, a);
}

static fb_status check_overlap(const places *all) {
    for (int i = 0; i < all->n; i++)
        for (int j = 0; j < all->n; j++) {
            const place *a = &all->at[i], *b = &all->at[j];
            if (a->role != OUT || b->role <= ELSEWHERE || i == j || (b->role == OUT && j < i))
                continue;
            if (overlap(a, b))
                return fb__error(FB_INVALID,
                                 "io.%s (output, bytes 0x%llx to 0x%llx) overlaps io.%s (0x%llx to 0x%llx); "
                                 "give outputs and workspace memory of their own",
                                 a->name, (unsigned long long)a->base, (unsigned long long)a->end, b->name,
                                 (unsigned long long)b->base, (unsigned long long)b->end);
        }
    return FB_OK;
}

/* Where a tensor without elements lies if the caller gives NULL: arithmetic on NULL is undefined even with 0.
 * Nobody reads or writes there. A handle stays NULL. */
static const max_align_t nowhere;

/* Pointers are there exactly where the plan uses them, and aligned to their element. */
static fb_status check_present(const places *all, bool handles) {
    for (int i = 0; i < all->n; i++) {
        const place *p = &all->at[i];
        const bool given = p->ref->data;
        if (p->role == UNUSED && given)
            return fb__error(FB_INVALID,
                             "io.%s is given, but the plan does not use it; set its flag in "
                             "desc.flags, or leave it NULL",
                             p->name);
        bool missing = (p->role == IN || p->role == OUT) && !given;
        if (missing && is_empty(p))
            *p->ref = (fb_ref){handles ? NULL : (void *)(uintptr_t)&nowhere, 0};
        else if (missing)
            return fb__error(FB_INVALID, "io.%s is NULL, but the plan %s it", p->name,
                             p->role == IN ? "reads" : "writes");
        if (p->role > ELSEWHERE && given && p->base % p->element)
            return fb__error(FB_INVALID, "io.%s is 0x%llx, expected a multiple of its element's %zu bytes",
                             p->name, (unsigned long long)p->base, p->element);
    }
    return FB_OK;
}

/* Tensors with strides. */
static void list_tensors(const fb__problem *p, fb__pass pass, fb_io *io, places *all) {
    const fb_desc *d = &p->d;
    bool packed = fb__has(p, FB_PACKED), back = pass == FB__BACKWARD;
    int64_t b = packed ? 1 : d->batch, lq = packed ? d->total_q : d->len_q,
            lk = packed ? d->total_k : d->len_k;
    size_t e = fb__dtype_bytes(d->dtype);
    use dout = backward_use(p, pass, true, IN), dq = backward_use(p, pass, !fb__has(p, FB_NO_DQ), OUT);
    use dk = backward_use(p, pass, !fb__has(p, FB_NO_DK), OUT),
        dv = backward_use(p, pass, !fb__has(p, FB_NO_DV), OUT);
    const struct {
        const char *name;
        use role;
        fb_ref *ref;
        fb_strides s;
        int64_t heads, rows, cols;
    } rows[] = {
        {"q", IN, &io->q, d->q, d->heads_q, lq, d->head_dim},
        {"k", IN, &io->k, d->k, d->heads_kv, lk, d->head_dim},
        {"v", IN, &io->v, d->v, d->heads_kv, lk, d->head_dim_v},
        {"out", back ? IN : OUT, &io->out, d->out, d->heads_q, lq, d->head_dim_v},
        {"dout", dout, &io->dout, d->dout, d->heads_q, lq, d->head_dim_v},
        {"dq", dq, &io->dq, d->dq, d->heads_q, lq, d->head_dim},
        {"dk", dk, &io->dk, d->dk, d->heads_kv, lk, d->head_dim},
        {"dv", dv, &io->dv, d->dv, d->heads_kv, lk, d->head_dim_v},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        all->at[all->n++] = strided(rows[i].name, rows[i].role, rows[i].ref, rows[i].s, b, rows[i].heads,
                                    rows[i].rows, rows[i].cols, e);
    fb_shape n = d->bias_shape, m = d->mask_shape;
    use dbias = backward_use(p, pass, fb__has(p, FB_DBIAS), OUT);
    all->at[all->n++] = strided("bias", fb__has(p, FB_BIAS) ? IN : UNUSED, &io->bias, d->bias, n.batch,
                                n.heads, n.rows, n.cols, e);
    all->at[all->n++] = strided("dbias", dbias, &io->dbias, d->dbias, n.batch, n.heads, n.rows, n.cols, e);
    all->at[all->n++] = strided("mask", fb__has(p, FB_MASK) ? IN : UNUSED, &io->mask, d->mask, m.batch,
                                m.heads, m.rows, m.cols, 1);
}

/* Tensors that lie flat. */
static void list_rest(const fb__problem *p, fb__pass pass, fb_io *io, places *all) {
    const fb_desc *d = &p->d;
    bool packed = fb__has(p, FB_PACKED), back = pass == FB__BACKWARD;
    size_t stat = fb__stat_bytes(d->dtype);
    int64_t stats = packed ? d->heads_q * d->total_q : d->batch * d->heads_q * d->len_q;
    int64_t blocks = d->block_batch * d->block_heads * ((d->len_q + d->block_q - 1) / d->block_q) *
                     ((d->len_k + d->block_k - 1) / d->block_k);
    use cu = packed ? IN : UNUSED, lens = fb__has(p, FB_LENGTHS) ? OPTIONAL : UNUSED;
    all->at[all->n++] = flat("lse", back ? IN : io->lse.data ? OUT : OPTIONAL, &io->lse, stats, stat);
    all->at[all->n++] = flat("dlse", backward_use(p, pass, fb__has(p, FB_DLSE), IN), &io->dlse, stats, stat);
    all->at[all->n++] = flat("sinks", fb__has(p, FB_SINKS) ? IN : UNUSED, &io->sinks, d->heads_q, stat);
    all->at[all->n++] =
        flat("dsinks", backward_use(p, pass, fb__has(p, FB_DSINKS), OUT), &io->dsinks, d->heads_q, stat);
    all->at[all->n++] =
        flat("block_mask", fb__has(p, FB_BLOCK_MASK) ? IN : UNUSED, &io->block_mask, blocks, 1);
    all->at[all->n++] = flat("cu_q", cu, &io->cu_q, d->batch + 1, 4);
    all->at[all->n++] = flat("cu_k", cu, &io->cu_k, d->batch + 1, 4);
    all->at[all->n++] = flat("lens_q", lens, &io->lens_q, d->batch, 4);
    all->at[all->n++] = flat("lens_k", lens, &io->lens_k, d->batch, 4);
}

static fb_status take_io(fb_io *full, const fb_io *given) {
    if (!given)
        return fb__error(FB_INVALID, "io is NULL; pass a fb_io set up by fb_io_init");
    size_t size = given->size, first = offsetof(fb_io, stream) + sizeof(void *);
    if (size < first || size > 4096)
        return fb__error(FB_INVALID,
                         "io.size is %zu, expected sizeof(fb_io) = %zu; set io up with fb_io_init(&io, "
                         "sizeof io)",
                         size, sizeof *full);
    for (size_t i = sizeof *full; i < size; i++)
        if (((const unsigned char *)given)[i])
            return fb__error(FB_INVALID,
                             "io.size is %zu and byte %zu is set, but this library (%s) knows only %zu "
                             "bytes; it is older than the program's header",
                             size, i, fb_version(), sizeof *full);
    memset(full, 0, sizeof *full);
    memcpy(full, given, size < sizeof *full ? size : sizeof *full);
    if (full->reserved)
        return fb__error(FB_INVALID, "io.reserved is %u, expected 0; set io up with fb_io_init",
                         full->reserved);
    return FB_OK;
}

fb_status fb__problem_check_io(const fb__problem *p, fb__pass pass, size_t workspace, const fb_io *given,
                               fb_io *io) {
    FB_TRY(take_io(io, given));
    if (pass == FB__BACKWARD && fb__has(p, FB_FORWARD_ONLY))
        return fb__error(FB_INVALID,
                         "fb_backward on a plan with FB_FORWARD_ONLY; create one without that flag");
    if (io->workspace_size < workspace || (workspace && !io->workspace.data))
        return fb__error(
            FB_INVALID, "io.workspace has %llu bytes%s, expected at least %zu (fb_plan_workspace)",
            (unsigned long long)io->workspace_size, io->workspace.data ? "" : " and is NULL", workspace);
    places all = {.n = 0};
    list_tensors(p, pass, io, &all);
    list_rest(p, pass, io, &all);
    locate(p, &all);
    FB_TRY(check_present(&all, p->d.device == FB_METAL));
    all.at[all.n++] = flat("workspace", OUT, &io->workspace, (int64_t)workspace, 1);
    locate(p, &all);
    return check_overlap(&all);
}

static int list_extents(const places *all, fb__extent *extents) {
    int n = 0;
    for (int i = 0; i < all->n; i++)
        if (all->at[i].role > ELSEWHERE && all->at[i].ref->data)
            extents[n++] = (fb__extent){all->at[i].name, *all->at[i].ref, extent(&all->at[i])};
    return n;
}

int fb__problem_extents(const fb__problem *p, fb__pass pass, size_t workspace, const fb_io *io,
                        fb__extent extents[FB__MAX_EXTENTS]) {
    fb_io refs = *io;
    places all = {.n = 0};
    list_tensors(p, pass, &refs, &all);
    list_rest(p, pass, &refs, &all);
    all.at[all.n++] = flat("workspace", OUT, &refs.workspace, (int64_t)workspace, 1);
    return list_extents(&all, extents);
}

/* The tensors of fb_merge. */
static places list_merge(const fb__problem *p, fb_ref *out, fb_ref *lse, fb_ref *other_out,
                         fb_ref *other_lse) {
    const fb_desc *d = &p->d;
    bool packed = fb__has(p, FB_PACKED);
    int64_t batch = packed ? 1 : d->batch, rows = packed ? d->total_q : d->len_q;
    size_t element = fb__dtype_bytes(d->dtype), stat = fb__stat_bytes(d->dtype);
    places all = {.n = 4};
    all.at[0] = strided("out", OUT, out, d->out, batch, d->heads_q, rows, d->head_dim_v, element);
    all.at[1] = flat("lse", OUT, lse, batch * d->heads_q * rows, stat);
    all.at[2] = strided("other_out", IN, other_out, d->out, batch, d->heads_q, rows, d->head_dim_v, element);
    all.at[3] = flat("other_lse", IN, other_lse, batch * d->heads_q * rows, stat);
    locate(p, &all);
    return all;
}

int fb__problem_merge_extents(const fb__problem *p, fb_ref out, fb_ref lse, fb_ref other_out,
                              fb_ref other_lse, fb__extent extents[FB__MAX_EXTENTS]) {
    const places all = list_merge(p, &out, &lse, &other_out, &other_lse);
    return list_extents(&all, extents);
}

fb_status fb__problem_check_merge(const fb__problem *p, fb_ref out, fb_ref lse, fb_ref other_out,
                                  fb_ref other_lse) {
    const places all = list_merge(p, &out, &lse, &other_out, &other_lse);
    FB_TRY(check_present(&all, p->d.device == FB_METAL));
    return check_overlap(&all);
}
