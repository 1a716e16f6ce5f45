/* See inputs.h. Floor: cli. Next: inputs_make_job, which calls the checks above it in order. */
#include "inputs.h"
#include "cli.h"
#include "npy.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

static const char *const names[FBH_COUNT] = {
#define X(id, field) #field,
    FBH_TENSORS(X)
#undef X
};

/* The input of that name, or FBH_COUNT. */
static fbh_id find_id(const char *name) {
    int id = 0;
    while (id < FBH_OUT && strcmp(name, names[id]))
        id++;
    return id < FBH_OUT ? (fbh_id)id : FBH_COUNT;
}

__attribute__((format(printf, 2, 3), noreturn)) static void refuse(const inputs *in, const char *format,
                                                                   ...) {
    char text[512];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    cli_fail(CLI_INPUT, "%s: %s", in->name, text);
}

static bool given(const inputs *in, fbh_id id) { return in->t[id].data != NULL; }

/* ---- Opening ---------------------------------------------------------------------------------------- */

void inputs_begin(inputs *in) {
    memset(in, 0, sizeof *in);
    in->name = ".npy files";
    options_init(&in->options);
}

static const mapping *map(inputs *in, const char *path) {
    complaint why;
    mapping *m = &in->maps[in->map_count];
    if (!file_map(m, path, &why))
        cli_fail(CLI_INPUT, "%s", why.text);
    in->map_count++;
    return m;
}

typedef struct metadata_reader {
    options *options;
    complaint why;
} metadata_reader;

static bool read_option(void *context, const char *key, const char *value) {
    metadata_reader *reader = context;
    return options_set_metadata(reader->options, key, value, &reader->why);
}

void inputs_open(inputs *in, const char *path) {
    complaint why;
    inputs_begin(in);
    in->name = path;
    const mapping *m = map(in, path);
    if (!safetensors_read(&in->header, m->data, m->size, &why))
        refuse(in, "%s", why.text);
    for (size_t i = 0; i < in->header.count; i++) {
        const tensor *t = &in->header.tensors[i];
        fbh_id id = find_id(t->name);
        if (id == FBH_COUNT)
            refuse(
                in,
                "the tensor '%s' is unknown; q, k, v, dout, bias, mask, sinks, dlse, block_mask, cu_q, cu_k, "
                "lens_q and lens_k are known",
                quote(t->name).text);
        in->t[id] = *t;
    }
    metadata_reader reader = {.options = &in->options};
    if (!safetensors_metadata(&in->header, read_option, &reader))
        refuse(in, "%s", reader.why.text);
}

void inputs_add(inputs *in, fbh_id id, const char *path) {
    complaint why;
    const mapping *m = map(in, path);
    if (!npy_read(&in->t[id], m->data, m->size, &why))
        cli_fail(CLI_INPUT, "%s: %s", path, why.text);
    in->t[id].name = names[id];
}

void inputs_close(inputs *in) {
    safetensors_close(&in->header);
    for (int i = 0; i < in->map_count; i++)
        file_unmap(&in->maps[i]);
}

/* ---- Types and shapes ------------------------------------------------------------------------------- */

/* tensor_type and fb_dtype agree on the four that attention computes in. */
static bool is_float(tensor_type type) { return type <= TENSOR_F64; }

static void check_types(inputs *in) {
    static const char *const float_names[] = {"f32", "f16", "bf16", "f64"};
    fb_desc *desc = &in->options.desc;
    for (int id = 0; id < FBH_OUT; id++) {
        if (!given(in, (fbh_id)id))
            continue;
        tensor_type type = in->t[id].type;
        bool integers = id >= FBH_CU_Q, bytes = id == FBH_MASK || id == FBH_BLOCK_MASK;
        if (integers && type != TENSOR_I32 && type != TENSOR_I64)
            refuse(in, "%s must hold 32 or 64 bit integers", names[id]);
        if (bytes && type != TENSOR_BOOL && type != TENSOR_U8)
            refuse(in, "%s must hold booleans or bytes", names[id]);
        if (!integers && !bytes && !is_float(type))
            refuse(in, "%s must hold f32, f16, bf16 or f64", names[id]);
    }
    if (!in->options.dtype_given)
        desc->dtype = (fb_dtype)in->t[FBH_Q].type;
    static const fbh_id same[] = {FBH_K, FBH_V, FBH_DOUT, FBH_BIAS};
    for (size_t i = 0; i < sizeof same / sizeof *same && !in->options.dtype_given; i++)
        if (given(in, same[i]) && in->t[same[i]].type != in->t[FBH_Q].type)
            refuse(in, "%s is %s, but q is %s; make them equal, or convert with --dtype", names[same[i]],
                   float_names[in->t[same[i]].type], float_names[in->t[FBH_Q].type]);
}

typedef struct dimensions {
    int64_t batch, heads, rows, cols;
} dimensions;

static bool is_packed(const inputs *in) { return given(in, FBH_CU_Q); }

/* Missing leading dimensions are 1. Packed tensors are [total,H,D], as if in the order blhd. */
static dimensions dimensions_of(const inputs *in, fbh_id id) {
    int64_t s[4] = {1, 1, 1, 1};
    const tensor *t = &in->t[id];
    for (int i = 0; i < t->dims; i++)
        s[4 - t->dims + i] = t->shape[i];
    if (t->dims > 2 && (in->options.layout == FBH_BLHD || is_packed(in)))
        return (dimensions){s[0], s[2], s[1], s[3]};
    return (dimensions){s[0], s[1], s[2], s[3]};
}

/* Shape in words of a tensor of that rank and order. */
static shape_text shape_in_order(const inputs *in, dimensions d, int dims) {
    tensor t = {.dims = dims};
    bool rows_first = dims > 2 && (in->options.layout == FBH_BLHD || is_packed(in));
    const int64_t all[4] = {d.batch, rows_first ? d.rows : d.heads, rows_first ? d.heads : d.rows, d.cols};
    memcpy(t.shape, all + 4 - dims, (size_t)dims * sizeof *all);
    return tensor_shape(&t);
}

static void expect(const inputs *in, fbh_id id, dimensions want, const char *because) {
    const tensor *t = &in->t[id];
    dimensions have = dimensions_of(in, id);
    int dims = in->t[FBH_Q].dims;
    if (t->dims != dims || memcmp(&have, &want, sizeof have))
        refuse(in, "%s has the shape %s; expected %s, %s", names[id], tensor_shape(t).text,
               shape_in_order(in, want, dims).text, because);
}

static void set_dimensions(inputs *in) {
    fb_desc *desc = &in->options.desc;
    int dims = in->t[FBH_Q].dims;
    if (is_packed(in) ? dims != 3 : dims < 2)
        refuse(in, "q has the shape %s; expected %s", tensor_shape(&in->t[FBH_Q]).text,
               is_packed(in) ? "[total,H,D], since cu_q is given" : "2 to 4 dimensions");
    if (is_packed(in) && in->options.layout_given)
        refuse(in, "layout does not apply to packed tensors, which are [total,H,D]");
    dimensions q = dimensions_of(in, FBH_Q), k = dimensions_of(in, FBH_K), v = dimensions_of(in, FBH_V);
    expect(in, FBH_K, (dimensions){q.batch, k.heads, k.rows, q.cols},
           "for batch and head_dim are those of q");
    expect(in, FBH_V, (dimensions){q.batch, k.heads, k.rows, v.cols}, "for all but head_dim_v is as in k");
    if (given(in, FBH_DOUT))
        expect(in, FBH_DOUT, (dimensions){q.batch, q.heads, q.rows, v.cols}, "as out is shaped");
    desc->batch = q.batch;
    desc->heads_q = q.heads;
    desc->heads_kv = k.heads;
    desc->len_q = q.rows;
    desc->len_k = k.rows;
    desc->head_dim = q.cols;
    desc->head_dim_v = v.cols;
}

/* ---- Integers: cuts and lengths --------------------------------------------------------------------- */

static int64_t integer_at(const tensor *t, int64_t i) {
    int32_t small;
    int64_t large;
    if (t->type == TENSOR_I32) {
        memcpy(&small, (const char *)t->data + i * 4, sizeof small);
        return small;
    }
    memcpy(&large, (const char *)t->data + i * 8, sizeof large);
    return large;
}

static void check_lengths(const inputs *in, fbh_id id, int64_t longest) {
    const tensor *t = &in->t[id];
    if (t->dims != 1 || t->shape[0] != in->options.desc.batch)
        refuse(in, "%s has the shape %s; expected [%lld], one length for each batch entry", names[id],
               tensor_shape(t).text, (long long)in->options.desc.batch);
    for (int64_t i = 0; i < t->shape[0]; i++)
        if (integer_at(t, i) < 0 || integer_at(t, i) > longest)
            refuse(in, "%s[%lld] is %lld; expected 0 to %lld", names[id], (long long)i,
                   (long long)integer_at(t, i), (long long)longest);
}

/* Returns the longest sequence. */
static int64_t check_cuts(const inputs *in, fbh_id id, int64_t total) {
    const tensor *t = &in->t[id];
    if (t->dims != 1 || t->shape[0] < 1)
        refuse(in, "%s has the shape %s; expected [B+1]", names[id], tensor_shape(t).text);
    int64_t longest = 0, last = 0;
    for (int64_t i = 0; i < t->shape[0]; i++) {
        int64_t cut = integer_at(t, i);
        if (i == 0 ? cut != 0 : cut < last || cut > total || cut > INT32_MAX)
            refuse(in, "%s[%lld] is %lld; cuts begin with 0, ascend, and end at %lld at most", names[id],
                   (long long)i, (long long)cut, (long long)total);
        longest = cut - last > longest ? cut - last : longest;
        last = cut;
    }
    return longest;
}

static void set_packed(inputs *in) {
    fb_desc *desc = &in->options.desc;
    if (given(in, FBH_CU_Q) != given(in, FBH_CU_K))
        refuse(in, "cu_q and cu_k belong together; %s is missing", given(in, FBH_CU_Q) ? "cu_k" : "cu_q");
    if (!is_packed(in))
        return;
    desc->flags |= FB_PACKED;
    desc->total_q = desc->len_q;
    desc->total_k = desc->len_k;
    desc->len_q = check_cuts(in, FBH_CU_Q, desc->total_q);
    desc->len_k = check_cuts(in, FBH_CU_K, desc->total_k);
    desc->batch = in->t[FBH_CU_Q].shape[0] - 1;
    if (in->t[FBH_CU_K].shape[0] != desc->batch + 1)
        refuse(in, "cu_k has the shape %s; expected [%lld], as cu_q", tensor_shape(&in->t[FBH_CU_K]).text,
               (long long)desc->batch + 1);
}

/* ---- Options ---------------------------------------------------------------------------------------- */

static fb_shape shape_of_scores(const inputs *in, fbh_id id) {
    const fb_desc *desc = &in->options.desc;
    const tensor *t = &in->t[id];
    const int64_t full[4] = {desc->batch, desc->heads_q, desc->len_q, desc->len_k};
    int64_t s[4] = {1, 1, 1, 1};
    for (int i = 0; i < t->dims; i++)
        s[4 - t->dims + i] = t->shape[i];
    for (int i = 0; i < 4; i++)
        if (s[i] != 1 && s[i] != full[i])
            refuse(in, "%s has the shape %s; expected [B|1,Hq|1,Lq|1,Lk|1] with [%lld,%lld,%lld,%lld]",
                   names[id], tensor_shape(t).text, (long long)full[0], (long long)full[1],
                   (long long)full[2], (long long)full[3]);
    return (fb_shape){s[0], s[1], s[2], s[3]};
}

static void expect_shape(const inputs *in, fbh_id id, const tensor *want) {
    const tensor *t = &in->t[id];
    if (t->dims != want->dims || memcmp(t->shape, want->shape, (size_t)t->dims * sizeof *t->shape))
        refuse(in, "%s has the shape %s; expected %s", names[id], tensor_shape(t).text,
               tensor_shape(want).text);
}

/* One logit a head; dlse as the lse that is written. */
static void check_statistics(const inputs *in) {
    const fb_desc *desc = &in->options.desc;
    const tensor sinks = {.dims = 1, .shape = {desc->heads_q}};
    if (given(in, FBH_SINKS))
        expect_shape(in, FBH_SINKS, &sinks);
    tensor dlse = {.dims = in->t[FBH_Q].dims - 1};
    const int64_t all[3] = {desc->batch, desc->heads_q, is_packed(in) ? desc->total_q : desc->len_q};
    memcpy(dlse.shape, all + 3 - dlse.dims, (size_t)dlse.dims * sizeof *all);
    if (given(in, FBH_DLSE))
        expect_shape(in, FBH_DLSE, &dlse);
}

static void set_block_mask(inputs *in) {
    fb_desc *desc = &in->options.desc;
    const tensor *t = &in->t[FBH_BLOCK_MASK];
    const int64_t q = in->options.block_q, k = in->options.block_k;
    if (!q || !k)
        refuse(in, "block_mask needs block_q and block_k, in __metadata__ or by --block");
    const tensor want = {.dims = 4,
                         .shape = {t->shape[0] == 1 ? 1 : desc->batch, t->shape[1] == 1 ? 1 : desc->heads_q,
                                   desc->len_q / q + (desc->len_q % q != 0),
                                   desc->len_k / k + (desc->len_k % k != 0)}};
    expect_shape(in, FBH_BLOCK_MASK, &want);
    desc->flags |= FB_BLOCK_MASK;
    desc->block_q = in->options.block_q;
    desc->block_k = in->options.block_k;
    desc->block_batch = t->shape[0];
    desc->block_heads = t->shape[1];
}

static void set_options(inputs *in) {
    fb_desc *desc = &in->options.desc;
    if (given(in, FBH_BIAS)) {
        desc->bias_shape = shape_of_scores(in, FBH_BIAS);
        desc->flags |= FB_BIAS | (in->forward_only ? 0 : FB_DBIAS);
    }
    if (given(in, FBH_MASK)) {
        desc->mask_shape = shape_of_scores(in, FBH_MASK);
        desc->flags |= FB_MASK;
    }
    if (given(in, FBH_BLOCK_MASK))
        set_block_mask(in);
    else if (in->options.block_q || in->options.block_k)
        refuse(in, "block_q and block_k are given, but no block_mask");
    check_statistics(in);
    if (given(in, FBH_SINKS))
        desc->flags |= FB_SINKS | (in->forward_only ? 0 : FB_DSINKS);
    if (given(in, FBH_DLSE) && !given(in, FBH_DOUT))
        refuse(in, "dlse is given, but no dout; both are needed for the backward");
    if (given(in, FBH_DLSE) && !in->forward_only)
        desc->flags |= FB_DLSE;
    if (given(in, FBH_LENS_Q))
        check_lengths(in, FBH_LENS_Q, desc->len_q);
    if (given(in, FBH_LENS_K))
        check_lengths(in, FBH_LENS_K, desc->len_k);
    if (given(in, FBH_LENS_Q) || given(in, FBH_LENS_K))
        desc->flags |= FB_LENGTHS;
    if (in->forward_only)
        desc->flags |= FB_FORWARD_ONLY;
}

/* ---- The problem ------------------------------------------------------------------------------------ */

static double number_at(const tensor *t, int64_t i) {
    const char *at = (const char *)t->data + (uint64_t)i * tensor_type_bytes(t->type);
    if (is_float(t->type))
        return fbh_load((int)t->type, at);
    return tensor_type_bytes(t->type) == 1 ? fbh_load(FBH_U8, at) : (double)integer_at(t, i);
}

/* Element by element in the order of memory, which is that of the file: the problem has the file's layout. */
static void copy_in(const inputs *in, fbh_id id, fbh_tensor *to) {
    const tensor *t = &in->t[id];
    const size_t size = fbh_size(to->type);
    const uint64_t count = t->bytes / tensor_type_bytes(t->type);
    if (count * size != to->buffer->bytes)
        refuse(in, "%s has the shape %s, which is %llu elements; expected %llu", names[id],
               tensor_shape(t).text, (unsigned long long)count,
               (unsigned long long)(to->buffer->bytes / size));
    unsigned char *data = to->buffer->data;
    if (is_float(t->type) && (int)t->type == to->type) {
        memcpy(data, t->data, to->buffer->bytes);
        return;
    }
    for (uint64_t i = 0; i < count; i++)
        fbh_store(to->type, data + i * size, number_at(t, (int64_t)i));
}

static void cuts_in(const inputs *in, fbh_id id, int32_t *cu) {
    for (int64_t i = 0; i < in->t[id].shape[0]; i++)
        cu[i] = (int32_t)integer_at(&in->t[id], i);
}

void inputs_make_job(inputs *in, job *j) {
    for (int id = FBH_Q; id <= FBH_V; id++)
        if (!given(in, (fbh_id)id))
            refuse(in, "the tensor %s is missing", names[id]);
    in->forward_only |= !given(in, FBH_DOUT);
    check_types(in);
    set_dimensions(in);
    set_packed(in);
    set_options(in);

    fbh_case c;
    fbh_case_init(&c);
    c.desc = in->options.desc;
    c.desc.device = FB_CPU; /* a case has none: what is expected of it is computed there */
    c.desc.index = 0;
    c.layout = in->options.layout;
    c.lens_q = given(in, FBH_LENS_Q);
    c.lens_k = given(in, FBH_LENS_K);
    *j = (job){.backward = !in->forward_only};
    fbh_problem_create(&j->problem, &c, in->options.desc.device, in->options.desc.index, FBH_GUARD_NONE,
                       false);
    j->problem.desc.route = in->options.desc.route;
    j->problem.desc.threads = in->options.desc.threads;
    if (is_packed(in)) {
        cuts_in(in, FBH_CU_Q, j->problem.cu_q);
        cuts_in(in, FBH_CU_K, j->problem.cu_k);
        job_recut(&j->problem, in->options.desc.total_q, in->options.desc.total_k);
    }
    for (int id = 0; id < FBH_OUT; id++)
        if (given(in, (fbh_id)id) && j->problem.t[id].buffer)
            copy_in(in, (fbh_id)id, &j->problem.t[id]);
}
