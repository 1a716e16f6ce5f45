/* Every rule on a descriptor, once. Errors name the field, what came, what was expected. What a call's
 * pointers must fulfil stands in io.c. Floor: core. Next: route.c. */
#include "problem.h"
#include "../base/env.h"
#include "../base/fpmode.h"
#include "../base/text.h"
#include "error.h"
#include "names.h"
#include "route.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* sizeof(fb_desc) in version 0.1, the first. */
#define FIRST_SIZE (offsetof(fb_desc, score_bytes_max) + sizeof(int64_t))

/* Larger dimensions could make sums of positions overflow; no memory holds such tensors. */
#define MAX_DIM (INT64_C(1) << 40)
#define MAX_OFFSET (INT64_C(1) << 60)

#define FLAG_LIST(X)                                                                                         \
    X(FB_DETERMINISTIC)                                                                                      \
    X(FB_FORWARD_ONLY)                                                                                       \
    X(FB_TOP_LEFT)                                                                                           \
    X(FB_PACKED)                                                                                             \
    X(FB_LENGTHS)                                                                                            \
    X(FB_BIAS)                                                                                               \
    X(FB_DBIAS)                                                                                              \
    X(FB_MASK)                                                                                               \
    X(FB_BLOCK_MASK) X(FB_SINKS) X(FB_DSINKS) X(FB_DLSE) X(FB_ACCUMULATE) X(FB_NO_DQ) X(FB_NO_DK) X(FB_NO_DV)

size_t fb__dtype_bytes(fb_dtype dtype) {
    switch (dtype) {
#define X(value, word, bytes)                                                                                \
    case value:                                                                                              \
        return bytes;
        FB__DTYPE_LIST(X)
#undef X
    }
    return 0;
}

size_t fb__stat_bytes(fb_dtype dtype) { return dtype == FB_F64 ? 8 : 4; }

fb_strides fb__lse_strides(const fb__problem *p) {
    fb_strides s = {p->d.heads_q * p->d.len_q, p->d.len_q, 1};
    if (fb__has(p, FB_PACKED))
        s = (fb_strides){0, p->d.total_q, 1};
    return s;
}

uint64_t fb__problem_score_bytes(const fb__problem *p, fb__pass pass) {
    uint64_t bytes = fb__stat_bytes(p->d.dtype) * (pass == FB__BACKWARD ? 2 : 1);
    int64_t dims[] = {p->d.batch, p->d.heads_q, (p->d.len_q + 15) / 16 * 16, p->d.len_k};
    for (int i = 0; i < 4; i++)
        if (dims[i] == 0)
            return 0;
    for (int i = 0; i < 4; i++)
        if (__builtin_mul_overflow(bytes, (uint64_t)dims[i], &bytes))
            return UINT64_MAX;
    return bytes;
}

/* ---- The descriptor ---- */

/* Takes a struct of the caller's version: a shorter one gets the defaults behind its end, a longer one must
 * hold zeros there. */
static fb_status take_desc(fb_desc *d, const fb_desc *given) {
    if (!given)
        return fb__error(FB_INVALID, "desc is NULL; pass a fb_desc set up by fb_desc_init");
    size_t size = given->size;
    if (size < FIRST_SIZE || size > 4096)
        return fb__error(FB_INVALID,
                         "desc.size is %zu, expected sizeof(fb_desc) = %zu; set desc up with "
                         "fb_desc_init(&desc, sizeof desc)",
                         size, sizeof *d);
    for (size_t i = sizeof *d; i < size; i++)
        if (((const unsigned char *)given)[i])
            return fb__error(FB_INVALID,
                             "desc.size is %zu and byte %zu is set, but this library (%s) knows only %zu "
                             "bytes; it is older than the program's header",
                             size, i, fb_version(), sizeof *d);
    fb_desc_init(d, sizeof *d);
    memcpy(d, given, size < sizeof *d ? size : sizeof *d);
    d->size = sizeof *d;
    return FB_OK;
}

static fb_status check_enums(const fb_desc *d) {
    uint32_t known = 0;
#define X(flag) known |= flag;
    FLAG_LIST(X)
#undef X
    if (d->flags & ~known)
        return fb__error(FB_INVALID, "desc.flags is 0x%x; bits 0x%x are unknown to this library (%s)",
                         d->flags, d->flags & ~known, fb_version());
    if (!fb__dtype_bytes(d->dtype))
        return fb__error(FB_INVALID, "desc.dtype is %d, expected FB_F32, FB_F16, FB_BF16 or FB_F64",
                         (int)d->dtype);
    if (*fb_device_name(d->device) == '?')
        return fb__error(FB_INVALID, "desc.device is %d, expected FB_CPU, FB_CUDA or FB_METAL",
                         (int)d->device);
    if (*fb_route_name(d->route) == '?')
        return fb__error(
            FB_INVALID, "desc.route is %d, expected FB_AUTO, FB_FUSED, FB_VECTOR, FB_UNFUSED or FB_REFERENCE",
            (int)d->route);
    if (d->index < 0)
        return fb__error(FB_INVALID, "desc.index is %d, expected 0 or more", (int)d->index);
    if (d->threads < 0)
        return fb__error(FB_INVALID, "desc.threads is %d, expected 0 (as OpenMP allows) or more",
                         (int)d->threads);
    if (d->tasks < 0 || d->tasks > 65536)
        return fb__error(FB_INVALID, "desc.tasks is %d, expected 0 (the default) to 65536", (int)d->tasks);
    return FB_OK;
}

static fb_status check_dims(const fb_desc *d) {
    const struct {
        const char *name;
        int64_t value, max;
    } dims[] = {{"batch", d->batch, MAX_DIM},           {"heads_q", d->heads_q, MAX_DIM},
                {"heads_kv", d->heads_kv, MAX_DIM},     {"len_q", d->len_q, MAX_DIM},
                {"len_k", d->len_k, MAX_DIM},           {"head_dim", d->head_dim, MAX_DIM},
                {"head_dim_v", d->head_dim_v, MAX_DIM}, {"total_q", d->total_q, INT32_MAX},
                {"total_k", d->total_k, INT32_MAX}};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        if (dims[i].value < 0 || dims[i].value > dims[i].max)
            return fb__error(FB_INVALID, "desc.%s is %lld, expected 0 to %lld", dims[i].name,
                             (long long)dims[i].value, (long long)dims[i].max);
    const int64_t head_dims[] = {d->head_dim, d->head_dim_v};
    for (int i = 0; i < 2; i++)
        if (head_dims[i] > FB__MAX_HEAD_DIM)
            return fb__error(FB_UNSUPPORTED,
                             "desc.head_dim%s is %lld; every value from 0 to %d is supported, larger "
                             "ones are not",
                             i ? "_v" : "", (long long)head_dims[i], FB__MAX_HEAD_DIM);
    if (d->heads_q && (!d->heads_kv || d->heads_q % d->heads_kv))
        return fb__error(FB_INVALID,
                         "desc.heads_q is %lld and heads_kv is %lld; heads_q must be a multiple of heads_kv",
                         (long long)d->heads_q, (long long)d->heads_kv);
    if (!(d->flags & FB_PACKED) && (d->total_q || d->total_k))
        return fb__error(FB_INVALID,
                         "desc.total_q is %lld and total_k is %lld without FB_PACKED; set the flag, or both "
                         "to 0",
                         (long long)d->total_q, (long long)d->total_k);
    if ((d->flags & FB_PACKED) && (d->flags & FB_LENGTHS))
        return fb__error(FB_INVALID,
                         "desc.flags has FB_PACKED and FB_LENGTHS; cu_q and cu_k already give the lengths");
    /* Elements of the largest tensors must be countable, padding of the head dimension included. */
    const int64_t lens[] = {d->flags & FB_PACKED ? d->total_q : d->len_q,
                            d->flags & FB_PACKED ? d->total_k : d->len_k};
    for (int i = 0; i < 2; i++) {
        int64_t n = 4096; /* head dimension, element size and copies in the workspace */
        if (__builtin_mul_overflow(n, d->flags & FB_PACKED ? 1 : d->batch, &n) ||
            __builtin_mul_overflow(n, i ? d->heads_kv : d->heads_q, &n) ||
            __builtin_mul_overflow(n, lens[i] + 64, &n) || __builtin_mul_overflow(n, 4, &n))
            return fb__error(FB_INVALID,
                             "overflow: desc.batch %lld x heads %lld x length %lld is more than can be "
                             "addressed",
                             (long long)d->batch, (long long)(i ? d->heads_kv : d->heads_q),
                             (long long)lens[i]);
    }
    return FB_OK;
}

/* To nearest, whatever rounding the caller has set. */
static double inverse_sqrt(double x) {
    fb__fpmode mode = fb__fpmode_get();
    fb__fpmode_set(FB__FPMODE_EXACT);
    volatile double exact = x, result = 1 / sqrt(exact); /* volatile: stays between the two modes */
    fb__fpmode_set(mode);
    return result;
}

static fb_status check_numbers(fb_desc *d) {
    if (isnan(d->scale)) {
        if (d->head_dim == 0 && d->batch && d->heads_q && d->len_q && d->len_k)
            return fb__error(FB_INVALID,
                             "desc.scale is NaN (1/sqrt(head_dim)) and head_dim is 0; give a scale");
        d->scale = d->head_dim ? inverse_sqrt((double)d->head_dim) : 0;
    }
    if (isinf(d->scale) || fabs(d->scale) > 1e30)
        return fb__error(FB_INVALID,
                         "desc.scale is %g, expected a number of at most 1e30 in size, or NaN for "
                         "1/sqrt(head_dim)",
                         d->scale);
    if (!(d->softcap >= 0) || d->softcap > 1e30)
        return fb__error(FB_INVALID, "desc.softcap is %g, expected 0 (none) or a positive number up to 1e30",
                         d->softcap);
    if (d->softcap > 0 && d->softcap < 1e-30)
        return fb__error(FB_INVALID, "desc.softcap is %g, too small to divide by; 0 means none", d->softcap);
    if (d->position_offset > MAX_OFFSET || d->position_offset < -MAX_OFFSET)
        return fb__error(FB_INVALID, "desc.position_offset is %lld, expected at most 2^60 in size",
                         (long long)d->position_offset);
    int64_t *ends[] = {&d->window.left, &d->window.right};
    for (int i = 0; i < 2; i++) {
        if (*ends[i] < 0)
            return fb__error(FB_INVALID,
                             "desc.window.%s is %lld, expected 0 or more; FB_UNBOUNDED does not bound",
                             i ? "right" : "left", (long long)*ends[i]);
        if (*ends[i] > 2 * MAX_OFFSET)
            *ends[i] = FB_UNBOUNDED;
    }
    if (d->fused_min_len < 0 || d->score_bytes_max < 0)
        return fb__error(FB_INVALID, "desc.%s is negative, expected 0 (environment or default) or more",
                         d->fused_min_len < 0 ? "fused_min_len" : "score_bytes_max");
    return FB_OK;
}

/* ---- Strides ---- */

typedef struct dims4 {
    int64_t batch, heads, rows, cols;
} dims4;

/* Makes strides explicit, and checks that they are usable; `output` ones may not repeat or overlap
 * themselves. */
static fb_status resolve(const char *name, fb_strides *s, dims4 n, bool packed, bool output) {
    int64_t elements = 64; /* room for the element's size, and then some */
    const int64_t sizes[] = {packed ? 1 : n.batch, n.heads, n.rows, n.cols};
    for (int i = 0; i < 4; i++)
        if (__builtin_mul_overflow(elements, sizes[i] ? sizes[i] : 1, &elements))
            return fb__error(FB_INVALID, "overflow: %s has more elements than can be addressed", name);
    if (!s->batch && !s->head && !s->row) {
        *s = packed ? (fb_strides){0, n.cols, n.heads * n.cols}
                    : (fb_strides){n.heads * n.rows * n.cols, n.rows * n.cols, n.cols};
    }
    struct {
        const char *name;
        int64_t *stride, size;
    } dims[] = {
        {"batch", &s->batch, packed ? 1 : n.batch}, {"head", &s->head, n.heads}, {"row", &s->row, n.rows}};
    bool empty = !n.batch || !n.heads || !n.rows || !n.cols;
    for (int i = 0; i < 3; i++) {
        int64_t *stride = dims[i].stride, last;
        if (dims[i].size <= 1 || empty) {
            *stride = 0;
            continue;
        }
        if (*stride == FB_BROADCAST && !output)
            *stride = 0;
        else if (*stride <= 0)
            return fb__error(FB_INVALID, "desc.%s.%s is %lld, expected a positive stride%s", name,
                             dims[i].name, (long long)*stride,
                             output ? "; an output can't repeat" : ", or FB_BROADCAST for 0");
        if (__builtin_mul_overflow(*stride, dims[i].size - 1, &last) || last > INT64_MAX / 64)
            return fb__error(FB_INVALID, "overflow: desc.%s.%s is %lld for %lld entries", name, dims[i].name,
                             (long long)*stride, (long long)dims[i].size);
    }
    if (!output || empty)
        return FB_OK;
    /* From the smallest stride up, each must step over everything inside it. */
    int64_t span = n.cols;
    bool done[3] = {false, false, false};
    for (int round = 0; round < 3; round++) {
        int next = -1;
        for (int i = 0; i < 3; i++)
            if (!done[i] && (next < 0 || *dims[i].stride < *dims[next].stride))
                next = i;
        done[next] = true;
        if (dims[next].size <= 1)
            continue;
        if (*dims[next].stride < span)
            return fb__error(FB_INVALID,
                             "desc.%s.%s is %lld, but %lld elements lie inside that step: the output would "
                             "overlap itself",
                             name, dims[next].name, (long long)*dims[next].stride, (long long)span);
        span += *dims[next].stride * (dims[next].size - 1);
    }
    return FB_OK;
}

static fb_status resolve_tensors(fb_desc *d) {
    bool packed = d->flags & FB_PACKED, backward = !(d->flags & FB_FORWARD_ONLY);
    dims4 q = {d->batch, d->heads_q, packed ? d->total_q : d->len_q, d->head_dim};
    dims4 k = {d->batch, d->heads_kv, packed ? d->total_k : d->len_k, d->head_dim};
    dims4 v = k, o = q;
    v.cols = o.cols = d->head_dim_v;
    FB_TRY(resolve("q", &d->q, q, packed, false));
    FB_TRY(resolve("k", &d->k, k, packed, false));
    FB_TRY(resolve("v", &d->v, v, packed, false));
    FB_TRY(resolve("out", &d->out, o, packed, true));
    if (!backward) {
        d->dout = d->dq = d->dk = d->dv = (fb_strides){0, 0, 0};
        return FB_OK;
    }
    FB_TRY(resolve("dout", &d->dout, o, packed, false));
    FB_TRY(resolve("dq", &d->dq, q, packed, true));
    FB_TRY(resolve("dk", &d->dk, k, packed, true));
    return resolve("dv", &d->dv, v, packed, true);
}

/* ---- Options ---- */

static fb_status check_shape(const char *name, const fb_desc *d, fb_shape *s, fb_strides *strides) {
    const int64_t want[] = {d->batch, d->heads_q, d->len_q, d->len_k};
    const int64_t have[] = {s->batch, s->heads, s->rows, s->cols};
    for (int i = 0; i < 4; i++)
        if (have[i] != want[i] && have[i] != 1)
            return fb__error(FB_INVALID,
                             "desc.%s_shape is [%lld,%lld,%lld,%lld], expected [%lld|1,%lld|1,%lld|1,%lld|1] "
                             "(batch, heads_q, len_q, len_k)",
                             name, (long long)have[0], (long long)have[1], (long long)have[2],
                             (long long)have[3], (long long)want[0], (long long)want[1], (long long)want[2],
                             (long long)want[3]);
    return resolve(name, strides, (dims4){s->batch, s->heads, s->rows, s->cols}, false, false);
}

static fb_status check_needs(const fb_desc *d, uint32_t flag, uint32_t needs, const char *text) {
    if ((d->flags & flag) && !(d->flags & needs))
        return fb__error(FB_INVALID, "desc.flags has %s; add the second flag or drop the first", text);
    return FB_OK;
}

static fb_status check_bias(fb_desc *d) {
    if (!(d->flags & FB_BIAS)) {
        d->bias_shape = (fb_shape){1, 1, 1, 1};
        d->bias = d->dbias = (fb_strides){0, 0, 0};
        return FB_OK;
    }
    FB_TRY(check_shape("bias", d, &d->bias_shape, &d->bias));
    const fb_shape n = d->bias_shape;
    if (d->flags & FB_DBIAS)
        return resolve("dbias", &d->dbias, (dims4){n.batch, n.heads, n.rows, n.cols}, false, true);
    d->dbias = (fb_strides){0, 0, 0};
    return FB_OK;
}

static fb_status check_mask(fb_desc *d) {
    if (d->flags & FB_MASK)
        return check_shape("mask", d, &d->mask_shape, &d->mask);
    d->mask_shape = (fb_shape){1, 1, 1, 1};
    d->mask = (fb_strides){0, 0, 0};
    return FB_OK;
}

static fb_status check_block_mask(fb_desc *d) {
    if (!(d->flags & FB_BLOCK_MASK)) {
        d->block_q = d->block_k = 64;
        d->block_batch = d->block_heads = 1;
        return FB_OK;
    }
    const int64_t blocks[] = {d->block_q, d->block_k};
    for (int i = 0; i < 2; i++)
        if (blocks[i] < 16 || blocks[i] % 16 || blocks[i] > MAX_DIM)
            return fb__error(FB_INVALID, "desc.block_%s is %lld, expected a positive multiple of 16",
                             i ? "k" : "q", (long long)blocks[i]);
    if ((d->block_batch != 1 && d->block_batch != d->batch) ||
        (d->block_heads != 1 && d->block_heads != d->heads_q))
        return fb__error(FB_INVALID,
                         "desc.block_batch is %lld and block_heads is %lld, expected %lld|1 and %lld|1 "
                         "(batch, heads_q)",
                         (long long)d->block_batch, (long long)d->block_heads, (long long)d->batch,
                         (long long)d->heads_q);
    int64_t count = d->block_batch;
    if (__builtin_mul_overflow(count, d->block_heads, &count) ||
        __builtin_mul_overflow(count, d->len_q / d->block_q + 1, &count) ||
        __builtin_mul_overflow(count, d->len_k / d->block_k + 1, &count))
        return fb__error(FB_INVALID, "overflow: block_mask has more blocks than can be addressed");
    return FB_OK;
}

/* Fields of absent options may hold anything; they become harmless here. */
static fb_status check_options(fb_desc *d) {
    FB_TRY(check_needs(d, FB_DBIAS, FB_BIAS, "FB_DBIAS without FB_BIAS"));
    FB_TRY(check_needs(d, FB_DSINKS, FB_SINKS, "FB_DSINKS without FB_SINKS"));
    const uint32_t backward = FB_DBIAS | FB_DSINKS | FB_DLSE | FB_ACCUMULATE | FB_NO_DQ | FB_NO_DK | FB_NO_DV;
    if ((d->flags & FB_FORWARD_ONLY) && (d->flags & backward))
        return fb__error(FB_INVALID,
                         "desc.flags has FB_FORWARD_ONLY and 0x%x, which are about the backward pass",
                         d->flags & backward);
    FB_TRY(check_bias(d));
    FB_TRY(check_mask(d));
    return check_block_mask(d);
}

/* ---- The environment, where the descriptor leaves a choice ---- */

static fb_status env_bytes(fb__env variable, int64_t *value) {
    const char *text = fb__env_get(variable);
    if (*value || !text)
        return FB_OK;
    char *end;
    errno = 0;
    long long number = strtoll(text, &end, 10);
    if (*end || errno || number <= 0 || *text < '0' || *text > '9')
        return fb__error(FB_INVALID, "%s is '%s', expected a positive whole number (%s)",
                         fb__env_name(variable), text, fb__env_holds(variable));
    *value = number;
    return FB_OK;
}

static fb_status env_route(fb__problem *p) {
    const char *text = fb__env_get(FB__ENV_FLASHBACK_ROUTE);
    strcpy(p->route_from, p->d.route == FB_AUTO ? "default" : "desc.route");
    if (!text)
        return FB_OK;
    for (int r = 0; r < FB__ROUTES; r++)
        if (strcmp(text, fb_route_name((fb_route)r)) == 0) {
            if (p->d.route == FB_AUTO && r != FB_AUTO) {
                p->d.route = (fb_route)r;
                strcpy(p->route_from, "FLASHBACK_ROUTE");
            }
            return FB_OK;
        }
    return fb__error(FB_INVALID, "FLASHBACK_ROUTE is '%s', expected one of: %s", text,
                     fb__env_holds(FB__ENV_FLASHBACK_ROUTE));
}

fb_status fb__problem_init(fb__problem *p, const fb_desc *given) {
    memset(p, 0, sizeof *p);
    fb_desc *d = &p->d;
    FB_TRY(take_desc(d, given));
    FB_TRY(check_enums(d));
    FB_TRY(check_dims(d));
    FB_TRY(check_numbers(d));
    FB_TRY(resolve_tensors(d));
    FB_TRY(check_options(d));
    FB_TRY(env_route(p));
    FB_TRY(env_bytes(FB__ENV_FLASHBACK_FUSED_MIN_LEN, &d->fused_min_len));
    FB_TRY(env_bytes(FB__ENV_FLASHBACK_SCORE_BYTES_MAX, &d->score_bytes_max));
    if (!d->fused_min_len)
        d->fused_min_len = FB__FUSED_MIN_LEN;
    if (!d->score_bytes_max)
        d->score_bytes_max = FB__SCORE_BYTES_MAX;
    if (!d->tasks)
        d->tasks = 32;
    p->group = d->heads_kv ? d->heads_q / d->heads_kv : 1;
    return FB_OK;
}

/* ---- Sequences ---- */

fb__seq fb__problem_seq(const fb__problem *p, const fb_io *io, int64_t b) {
    const fb_desc *d = &p->d;
    const int32_t *cu_q = fb__at(io->cu_q), *cu_k = fb__at(io->cu_k);
    const int32_t *lens_q = fb__at(io->lens_q), *lens_k = fb__at(io->lens_k);
    fb__seq s = {b, 0, 0, d->len_q, d->len_k, {0, 0, 0, d->window.left, d->window.right}};
    if (fb__has(p, FB_PACKED)) {
        s.row_q = cu_q[b], s.len_q = cu_q[b + 1] - cu_q[b];
        s.row_k = cu_k[b], s.len_k = cu_k[b + 1] - cu_k[b];
    }
    s.band.len_q = lens_q ? lens_q[b] : s.len_q;
    s.band.len_k = lens_k ? lens_k[b] : s.len_k;
    s.band.off = (fb__has(p, FB_TOP_LEFT) ? 0 : s.len_k - s.len_q) + d->position_offset;
    return s;
}

static fb_status check_cu(const char *name, const int32_t *cu, int64_t batch, int64_t total, int64_t longest,
                          const char *side) {
    if (cu[0] != 0)
        return fb__error(FB_INVALID, "io.%s[0] is %d, expected 0", name, cu[0]);
    for (int64_t b = 0; b < batch; b++) {
        if (cu[b + 1] < cu[b])
            return fb__error(FB_INVALID, "io.%s[%lld] is %d after %d, expected ascending values", name,
                             (long long)(b + 1), cu[b + 1], cu[b]);
        if ((int64_t)cu[b + 1] - cu[b] > longest)
            return fb__error(FB_INVALID,
                             "io.%s gives sequence %lld %d rows, but desc.len_%s (the longest) is %lld", name,
                             (long long)b, cu[b + 1] - cu[b], side, (long long)longest);
    }
    if (cu[batch] > total)
        return fb__error(FB_INVALID, "io.%s ends at %d, but desc.total_%s is %lld", name, cu[batch], side,
                         (long long)total);
    return FB_OK;
}

static fb_status check_lens(const char *name, const int32_t *lens, int64_t batch, int64_t len) {
    for (int64_t b = 0; lens && b < batch; b++)
        if (lens[b] < 0 || lens[b] > len)
            return fb__error(FB_INVALID, "io.%s[%lld] is %d, expected 0 to %lld", name, (long long)b, lens[b],
                             (long long)len);
    return FB_OK;
}

fb_status fb__problem_check_lengths(const fb__problem *p, const fb_io *io) {
    const fb_desc *d = &p->d;
    if (fb__has(p, FB_PACKED)) {
        FB_TRY(check_cu("cu_q", fb__at(io->cu_q), d->batch, d->total_q, d->len_q, "q"));
        FB_TRY(check_cu("cu_k", fb__at(io->cu_k), d->batch, d->total_k, d->len_k, "k"));
    }
    FB_TRY(check_lens("lens_q", fb__at(io->lens_q), d->batch, d->len_q));
    return check_lens("lens_k", fb__at(io->lens_k), d->batch, d->len_k);
}
