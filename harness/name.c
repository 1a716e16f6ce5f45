/* A case and its name, in both directions. harness.h lists the words.
 * Floor: harness. Read cases.c next, where the names are. */
#include "harness.h"

#include <ctype.h>
#include <inttypes.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

enum { WORD_SIZE = 48 };

static const struct {
    const char *word;
    uint32_t flag;
} flags[] = {
    {"topleft", FB_TOP_LEFT}, {"packed", FB_PACKED}, {"dbias", FB_DBIAS},       {"sinks", FB_SINKS},
    {"dsinks", FB_DSINKS},    {"dlse", FB_DLSE},     {"acc", FB_ACCUMULATE},    {"nodq", FB_NO_DQ},
    {"nodk", FB_NO_DK},       {"nodv", FB_NO_DV},    {"det", FB_DETERMINISTIC}, {"fwd", FB_FORWARD_ONLY},
};

#define BACKWARD_FLAGS (FB_DBIAS | FB_DSINKS | FB_DLSE | FB_ACCUMULATE | FB_NO_DQ | FB_NO_DK | FB_NO_DV)

static const char *const layouts[] = {"", "blhd", "qkv", "padded", "odd", "repeated"};

enum { FLAG_COUNT = sizeof flags / sizeof flags[0], LAYOUT_COUNT = sizeof layouts / sizeof layouts[0] };

/* Words that set a bool, and words that end in a number. */
#define SWITCHES(X)                                                                                          \
    X("lensq", lens_q)                                                                                       \
    X("lensk", lens_k)                                                                                       \
    X("nolse", no_lse)                                                                                       \
    X("neginf", neg_inf)                                                                                     \
    X("farbias", far_bias)                                                                                   \
    X("exact", exact)                                                                                        \
    X("massive", massive)
#define INTEGERS(X)                                                                                          \
    X("left", desc.window.left, FB_UNBOUNDED)                                                                \
    X("right", desc.window.right, FB_UNBOUNDED)                                                              \
    X("offset", desc.position_offset, 0)
#define REALS(X)                                                                                             \
    X("scale", desc.scale, (double)NAN)                                                                      \
    X("softcap", desc.softcap, 0)                                                                            \
    X("gain", gain, 1)                                                                                       \
    X("shift", shift, 0)                                                                                     \
    X("flat", flat, 0)

void fbh_case_init(fbh_case *c) {
    memset(c, 0, sizeof *c);
    fb_desc_init(&c->desc, sizeof c->desc);
    c->gain = 1;
}

/* ---- From a name --------------------------------------------------------------------------------------- */

/* Numbers: either the default is still there, or the word repeats what is known. */
static bool put_integer(int64_t *field, int64_t otherwise, int64_t x) {
    const bool fits = *field == otherwise || *field == x;
    *field = x;
    return fits;
}

static bool put_real(double *field, double otherwise, double x) {
    const bool unset = isnan(otherwise) ? isnan(*field) : *field == otherwise;
    const bool fits = unset || *field == x;
    *field = x;
    return fits;
}

/* "bhqk" with 1 where the tensor repeats; the result is in terms of the dimensions, which may come later in
 * the name, so a full dimension is noted as 0. */
static bool read_shape(const char *letters, fb_shape *shape) {
    int64_t *field[] = {&shape->batch, &shape->heads, &shape->rows, &shape->cols};
    if (strlen(letters) != 4 || shape->batch != -1)
        return false;
    for (int n = 0; n < 4; n++) {
        if (letters[n] != '1' && letters[n] != "bhqk"[n])
            return false;
        *field[n] = letters[n] == '1';
    }
    return true;
}

static bool read_blocks(const char *word, fb_desc *desc) {
    int64_t q, k;
    int end = 0;
    if (desc->flags & FB_BLOCK_MASK || sscanf(word, "block%" SCNd64 "x%" SCNd64 "%n", &q, &k, &end) != 2 ||
        !end)
        return false;
    desc->flags |= FB_BLOCK_MASK;
    desc->block_q = q;
    desc->block_k = k;
    desc->block_batch = desc->block_heads = 1;
    word += end;
    if (*word == 'b') {
        desc->block_batch = 0;
        word++;
    }
    if (*word == 'h') {
        desc->block_heads = 0;
        word++;
    }
    return *word == 0;
}

static bool read_dimensions(const char *word, fb_desc *desc) {
    int end = 0;
    if (sscanf(word, "b%" SCNd64 "h%" SCNd64 "k%" SCNd64 "%n", &desc->batch, &desc->heads_q, &desc->heads_kv,
               &end) == 3 &&
        !word[end])
        return true;
    if (sscanf(word, "q%" SCNd64 "k%" SCNd64 "%n", &desc->len_q, &desc->len_k, &end) == 2 && !word[end])
        return true;
    if (sscanf(word, "d%" SCNd64 "v%" SCNd64 "%n", &desc->head_dim, &desc->head_dim_v, &end) == 2 &&
        !word[end])
        return true;
    if (sscanf(word, "d%" SCNd64 "%n", &desc->head_dim, &end) == 1 && !word[end]) {
        desc->head_dim_v = desc->head_dim;
        return true;
    }
    return false;
}

/* A number behind a prefix: true if the word is the prefix and a number. */
static bool behind(const char *word, const char *prefix, double *x) {
    const size_t n = strlen(prefix);
    int end = 0;
    return strncmp(word, prefix, n) == 0 && sscanf(word + n, "%lf%n", x, &end) == 1 && !word[n + (size_t)end];
}

static bool read_word(const char *word, fbh_case *c) {
    fb_desc *desc = &c->desc;
    double x;
    for (int n = 0; n <= FB_F64; n++)
        if (strcmp(word, fb_dtype_name((fb_dtype)n)) == 0) {
            desc->dtype = (fb_dtype)n;
            return true;
        }
    for (int n = 0; n < FLAG_COUNT; n++)
        if (strcmp(word, flags[n].word) == 0) {
            desc->flags |= flags[n].flag;
            return true;
        }
    for (int n = 1; n < LAYOUT_COUNT; n++)
        if (strcmp(word, layouts[n]) == 0) {
            const bool fits = c->layout == FBH_CONTIGUOUS || c->layout == (fbh_layout)n;
            c->layout = (fbh_layout)n;
            return fits;
        }
    if (strcmp(word, "causal") == 0)
        return put_integer(&desc->window.right, FB_UNBOUNDED, 0);
#define X(name, field)                                                                                       \
    if (strcmp(word, name) == 0)                                                                             \
        return c->field = true;
    SWITCHES(X)
#undef X
#define X(name, field, otherwise)                                                                            \
    if (behind(word, name, &x))                                                                              \
        return put_integer(&c->field, otherwise, (int64_t)x);
    INTEGERS(X)
#undef X
#define X(name, field, otherwise)                                                                            \
    if (behind(word, name, &x))                                                                              \
        return put_real(&c->field, otherwise, x);
    REALS(X)
#undef X
    if (strncmp(word, "bias", 4) == 0) {
        desc->flags |= FB_BIAS;
        return read_shape(word + 4, &desc->bias_shape);
    }
    if (strncmp(word, "mask", 4) == 0) {
        desc->flags |= FB_MASK;
        return read_shape(word + 4, &desc->mask_shape);
    }
    if (strncmp(word, "block", 5) == 0)
        return read_blocks(word, desc);
    return read_dimensions(word, desc);
}

/* 0 stands for a full dimension, 1 for a repeated one, -1 for no such tensor. */
static void complete_shape(const fb_desc *desc, uint32_t flag, fb_shape *shape) {
    if (!(desc->flags & flag)) {
        *shape = (fb_shape){1, 1, 1, 1};
        return;
    }
    shape->batch = shape->batch ? 1 : desc->batch;
    shape->heads = shape->heads ? 1 : desc->heads_q;
    shape->rows = shape->rows ? 1 : desc->len_q;
    shape->cols = shape->cols ? 1 : desc->len_k;
}

/* What the words together must keep; returns the sentence if they do not. */
static const char *complete(fbh_case *c) {
    fb_desc *desc = &c->desc;
    complete_shape(desc, FB_BIAS, &desc->bias_shape);
    complete_shape(desc, FB_MASK, &desc->mask_shape);
    if (desc->flags & FB_BLOCK_MASK) {
        desc->block_batch = desc->block_batch ? 1 : desc->batch;
        desc->block_heads = desc->block_heads ? 1 : desc->heads_q;
    }
    if (c->lens_q || c->lens_k)
        desc->flags |= FB_LENGTHS;
    if (desc->flags & FB_LENGTHS && desc->flags & FB_PACKED)
        return "packed does not go with lensq or lensk";
    if ((c->neg_inf || c->far_bias || desc->flags & FB_DBIAS) && !(desc->flags & FB_BIAS))
        return "dbias, neginf and farbias need a bias, as in biasbhqk";
    if (desc->flags & FB_DSINKS && !(desc->flags & FB_SINKS))
        return "dsinks needs sinks";
    if (c->no_lse && !(desc->flags & FB_FORWARD_ONLY))
        return "nolse needs fwd";
    if (desc->flags & FB_FORWARD_ONLY && desc->flags & BACKWARD_FLAGS)
        return "fwd does not go with dbias, dsinks, dlse, acc, nodq, nodk or nodv";
    if (c->layout == FBH_QKV &&
        (desc->len_q != desc->len_k || desc->head_dim != desc->head_dim_v || desc->flags & FB_PACKED))
        return "qkv needs equal lengths, equal head dims, and no packed";
    if (desc->heads_q < 0 || desc->heads_kv < 0 || desc->batch < 0 || desc->len_q < 0 || desc->len_k < 0 ||
        desc->head_dim < 0 || desc->head_dim_v < 0)
        return "dimensions are not negative";
    return NULL;
}

/* Length of the first word: up to the end, or up to a point before a letter. */
static size_t word_length(const char *name) {
    size_t n = 0;
    while (name[n] && !(name[n] == '.' && isalpha((unsigned char)name[n + 1])))
        n++;
    return n;
}

bool fbh_case_parse(fbh_case *c, const char *name, char *error, size_t size) {
    fbh_case_init(c);
    c->desc.bias_shape.batch = c->desc.mask_shape.batch = -1;
    for (const char *at = name; *at;) {
        char word[WORD_SIZE];
        const size_t n = word_length(at);
        snprintf(word, sizeof word, "%.*s", (int)n, at);
        if (n >= sizeof word || !read_word(word, c)) {
            snprintf(error, size, "case '%s': the word '%s' is unknown, or contradicts an earlier one", name,
                     word);
            return false;
        }
        at += n + (at[n] == '.');
    }
    const char *wrong = complete(c);
    if (wrong) {
        snprintf(error, size, "case '%s': %s", name, wrong);
        return false;
    }
    fbh_case_name(c);
    return true;
}

/* ---- To a name ----------------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static void add(fbh_case *c, const char *format, ...) {
    const size_t n = strlen(c->name);
    va_list args;
    va_start(args, format);
    vsnprintf(c->name + n, sizeof c->name - n, format, args);
    va_end(args);
}

/* A dimension that is 1 anyway is written as repeated, so that a shape has one name. */
static void add_shape(fbh_case *c, const char *word, fb_shape s) {
    add(c, ".%s%c%c%c%c", word, s.batch == 1 ? '1' : 'b', s.heads == 1 ? '1' : 'h', s.rows == 1 ? '1' : 'q',
        s.cols == 1 ? '1' : 'k');
}

void fbh_case_name(fbh_case *c) {
    const fb_desc *desc = &c->desc;
    c->name[0] = 0;
    add(c, "%s.b%" PRId64 "h%" PRId64 "k%" PRId64, fb_dtype_name(desc->dtype), desc->batch, desc->heads_q,
        desc->heads_kv);
    add(c, ".q%" PRId64 "k%" PRId64 ".d%" PRId64, desc->len_q, desc->len_k, desc->head_dim);
    if (desc->head_dim_v != desc->head_dim)
        add(c, "v%" PRId64, desc->head_dim_v);
    if (desc->window.right == 0)
        add(c, ".causal");
#define X(word, field, otherwise)                                                                            \
    if (c->field != (otherwise) && !(&c->field == &c->desc.window.right && c->field == 0))                   \
        add(c, "." word "%" PRId64, c->field);
    INTEGERS(X)
#undef X
#define X(word, field, otherwise)                                                                            \
    if (isnan((double)(otherwise)) ? !isnan(c->field) : c->field != (otherwise))                             \
        add(c, "." word "%g", c->field);
    REALS(X)
#undef X
    if (desc->flags & FB_BIAS)
        add_shape(c, "bias", desc->bias_shape);
    if (desc->flags & FB_MASK)
        add_shape(c, "mask", desc->mask_shape);
    if (desc->flags & FB_BLOCK_MASK)
        add(c, ".block%" PRId64 "x%" PRId64 "%s%s", desc->block_q, desc->block_k,
            desc->block_batch == 1 ? "" : "b", desc->block_heads == 1 ? "" : "h");
    for (int n = 0; n < FLAG_COUNT; n++)
        if (desc->flags & flags[n].flag)
            add(c, ".%s", flags[n].word);
#define X(word, field)                                                                                       \
    if (c->field)                                                                                            \
        add(c, "." word);
    SWITCHES(X)
#undef X
    if (c->layout != FBH_CONTIGUOUS)
        add(c, ".%s", layouts[c->layout]);
}
