/* See options.h. Floor: cli. */
#include "options.h"
#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    ID_DTYPE = 200,
    ID_CAUSAL,
    ID_WINDOW,
    ID_SCALE,
    ID_SOFTCAP,
    ID_TOP_LEFT,
    ID_OFFSET,
    ID_LAYOUT,
    ID_ROUTE,
    ID_THREADS,
    ID_DEVICE,
    ID_INDEX
};

const cli_option cli_problem_options[] = {
    {"dtype", "f32|f16|bf16|f64", "element type to compute in", ID_DTYPE},
    {"causal", NULL, "no query sees a later key", ID_CAUSAL},
    {"window", "LEFT,RIGHT", "keys seen before and after a query's position; 'none' = all", ID_WINDOW},
    {"scale", "X", "factor of the scores (default 1/sqrt(D))", ID_SCALE},
    {"softcap", "C", "scores become C*tanh(S/C)", ID_SOFTCAP},
    {"top-left", NULL, "positions are aligned at the first query and key, not at the last", ID_TOP_LEFT},
    {"position-offset", "N", "added to every query position", ID_OFFSET},
    {"layout", "bhld|blhd", "order of the dimensions of q, k, v and what belongs to them", ID_LAYOUT},
    {"route", "ROUTE", "auto, fused, vector, unfused or reference", ID_ROUTE},
    {"threads", "N", "most threads to use, on the CPU (default: all)", ID_THREADS},
    {"device", "cpu|cuda|metal", "what computes", ID_DEVICE},
    {"index", "N", "which device of that kind (default 0)", ID_INDEX},
    {0},
};

bool parse_int(const char *text, int64_t least, int64_t most, int64_t *n) {
    char *end;
    if (!*text || strspn(text, "-0123456789") != strlen(text))
        return false;
    errno = 0;
    *n = strtoll(text, &end, 10);
    return !*end && !errno && *n >= least && *n <= most;
}

bool parse_double(const char *text, double *x) {
    char *end;
    if (!*text || strspn(text, "+-.0123456789eE") != strlen(text))
        return false;
    *x = strtod(text, &end);
    return !*end && isfinite(*x);
}

int parse_list(const char *text, int64_t *n, int most) {
    char piece[24];
    for (int count = 0; count < most; text++) {
        size_t length = strcspn(text, ",");
        if (length >= sizeof piece)
            return 0;
        memcpy(piece, text, length);
        piece[length] = 0;
        if (!parse_int(piece, 0, INT64_MAX, &n[count++]))
            return 0;
        text += length;
        if (!*text)
            return count;
    }
    return 0;
}

void parse_shape(const char *text, fb_desc *shape) {
    int64_t n[7];
    int count = parse_list(text, n, 7);
    if (count < 6)
        cli_fail(CLI_USAGE, "--shape is '%s'; expected B,HQ,HKV,LQ,LK,D or B,HQ,HKV,LQ,LK,D,DV", text);
    shape->batch = n[0];
    shape->heads_q = n[1];
    shape->heads_kv = n[2];
    shape->len_q = n[3];
    shape->len_k = n[4];
    shape->head_dim = n[5];
    shape->head_dim_v = n[count - 1];
}

void options_shape(options *o, const fb_desc *shape) {
    o->desc.batch = shape->batch;
    o->desc.heads_q = shape->heads_q;
    o->desc.heads_kv = shape->heads_kv;
    o->desc.len_q = shape->len_q;
    o->desc.len_k = shape->len_k;
    o->desc.head_dim = shape->head_dim;
    o->desc.head_dim_v = shape->head_dim_v;
}

static bool parse_bound(const char *text, int64_t *n) {
    *n = FB_UNBOUNDED;
    return !strcmp(text, "none") || parse_int(text, 0, INT64_MAX, n);
}

static bool parse_bool(const char *text, bool *on) {
    *on = !strcmp(text, "true") || !strcmp(text, "1");
    return *on || !strcmp(text, "false") || !strcmp(text, "0");
}

void options_init(options *o) {
    *o = (options){.layout = FBH_CONTIGUOUS};
    fb_desc_init(&o->desc, sizeof o->desc);
}

/* Setters: false if the value is not understood. */
static bool set_causal(options *o, const char *value) { return parse_bool(value, &o->causal); }
static bool set_left(options *o, const char *value) { return parse_bound(value, &o->desc.window.left); }
static bool set_right(options *o, const char *value) { return parse_bound(value, &o->desc.window.right); }
static bool set_scale(options *o, const char *value) { return parse_double(value, &o->desc.scale); }
static bool set_softcap(options *o, const char *value) {
    return parse_double(value, &o->desc.softcap) && o->desc.softcap >= 0;
}

static bool set_top_left(options *o, const char *value) {
    bool on;
    if (!parse_bool(value, &on))
        return false;
    o->desc.flags = (o->desc.flags & ~FB_TOP_LEFT) | (on ? FB_TOP_LEFT : 0);
    return true;
}

static bool set_offset(options *o, const char *value) {
    return parse_int(value, -INT64_MAX, INT64_MAX, &o->desc.position_offset);
}

static bool set_layout(options *o, const char *value) {
    o->layout_given = true;
    o->layout = strcmp(value, "blhd") ? FBH_CONTIGUOUS : FBH_BLHD;
    return o->layout == FBH_BLHD || !strcmp(value, "bhld");
}

static bool set_block_q(options *o, const char *value) {
    return parse_int(value, 16, INT64_MAX, &o->block_q) && o->block_q % 16 == 0;
}

static bool set_block_k(options *o, const char *value) {
    return parse_int(value, 16, INT64_MAX, &o->block_k) && o->block_k % 16 == 0;
}

/* Tensor libraries write the name of the framework here. Like keys that begin with "about.", it describes the
 * file and says nothing about the problem. */
static bool set_format(options *o, const char *value) {
    (void)o;
    (void)value;
    return true;
}

static const struct {
    const char *key;
    bool (*set)(options *o, const char *value);
    const char *expected;
} metadata_keys[] = {
    {"causal", set_causal, "true or false"},
    {"window_left", set_left, "an integer of 0 or more, or none"},
    {"window_right", set_right, "an integer of 0 or more, or none"},
    {"scale", set_scale, "a finite number"},
    {"softcap", set_softcap, "a number of 0 or more"},
    {"top_left", set_top_left, "true or false"},
    {"position_offset", set_offset, "an integer"},
    {"layout", set_layout, "bhld or blhd"},
    {"block_q", set_block_q, "a multiple of 16"},
    {"block_k", set_block_k, "a multiple of 16"},
    {"format", set_format, "any text"},
};

/* Causal is right = 0, whichever of the two comes first. */
static bool settle_window(options *o) {
    if (!o->causal)
        return true;
    bool free_side = o->desc.window.right == FB_UNBOUNDED || o->desc.window.right == 0;
    if (free_side)
        o->desc.window.right = 0;
    return free_side;
}

bool options_set_metadata(options *o, const char *key, const char *value, complaint *why) {
    if (!strncmp(key, "about.", 6))
        return true;
    for (size_t i = 0; i < sizeof metadata_keys / sizeof *metadata_keys; i++) {
        if (strcmp(key, metadata_keys[i].key))
            continue;
        if (!metadata_keys[i].set(o, value))
            return complain(why, "__metadata__: %s is '%s'; expected %s", key, quote(value).text,
                            metadata_keys[i].expected);
        if (!settle_window(o))
            return complain(why, "__metadata__: causal is true, but window_right is %lld; causal means 0",
                            (long long)o->desc.window.right);
        return true;
    }
    return complain(
        why,
        "__metadata__: the key '%s' is unknown; causal, window_left, window_right, scale, softcap, "
        "top_left, position_offset, layout, block_q, block_k, format and about.* are known",
        quote(key).text);
}

static bool set_window(options *o, const char *value) {
    char left[24];
    size_t length = strcspn(value, ",");
    if (length >= sizeof left || value[length] != ',')
        return false;
    memcpy(left, value, length);
    left[length] = 0;
    return set_left(o, left) && set_right(o, value + length + 1);
}

static bool set_dtype(options *o, const char *value) {
    o->dtype_given = true;
    for (o->desc.dtype = FB_F32; o->desc.dtype <= FB_F64; o->desc.dtype = (fb_dtype)(o->desc.dtype + 1))
        if (!strcmp(value, fb_dtype_name(o->desc.dtype)))
            return true;
    return false;
}

static bool set_route(options *o, const char *value) {
    for (o->desc.route = FB_AUTO; o->desc.route <= FB_REFERENCE;
         o->desc.route = (fb_route)(o->desc.route + 1))
        if (!strcmp(value, fb_route_name(o->desc.route)))
            return true;
    return false;
}

static bool set_threads(options *o, const char *value) {
    int64_t n;
    if (!parse_int(value, 1, 65536, &n))
        return false;
    o->desc.threads = (int32_t)n;
    return true;
}

static bool set_device(options *o, const char *value) {
    o->device_given = true;
    for (o->desc.device = FB_CPU; o->desc.device <= FB_METAL;
         o->desc.device = (fb_device)(o->desc.device + 1))
        if (!strcmp(value, fb_device_name(o->desc.device)))
            return true;
    return false;
}

static bool set_index(options *o, const char *value) {
    int64_t n;
    if (!parse_int(value, 0, INT32_MAX, &n))
        return false;
    o->desc.index = (int32_t)n;
    return true;
}

static bool apply(options *o, int id, const char *value) {
    switch (id) {
    case ID_DTYPE:
        return set_dtype(o, value);
    case ID_CAUSAL:
        return set_causal(o, "true");
    case ID_WINDOW:
        return set_window(o, value);
    case ID_SCALE:
        return set_scale(o, value);
    case ID_SOFTCAP:
        return set_softcap(o, value);
    case ID_TOP_LEFT:
        return set_top_left(o, "true");
    case ID_OFFSET:
        return set_offset(o, value);
    case ID_LAYOUT:
        return set_layout(o, value);
    case ID_ROUTE:
        return set_route(o, value);
    case ID_DEVICE:
        return set_device(o, value);
    case ID_INDEX:
        return set_index(o, value);
    default:
        return set_threads(o, value);
    }
}

/* A flag about the window replaces what the metadata say of the side or sides that it names. */
void options_apply(options *o, const option_flags *flags) {
    for (int i = 0; i < flags->count; i++)
        if (flags->row[i].id == ID_CAUSAL || flags->row[i].id == ID_WINDOW) {
            o->causal = false;
            o->desc.window.right = FB_UNBOUNDED;
        }
    for (int i = 0; i < flags->count; i++)
        apply(o, flags->row[i].id, flags->row[i].value);
    if (!settle_window(o))
        cli_fail(CLI_USAGE,
                 "--causal means that nothing right of a query counts, but --window gives %lld there",
                 (long long)o->desc.window.right);
    if (o->desc.threads && o->desc.device != FB_CPU)
        cli_fail(CLI_USAGE, "--threads is about the CPU and does not apply to --device %s",
                 fb_device_name(o->desc.device));
    if (o->desc.index && o->desc.device == FB_CPU)
        cli_fail(CLI_USAGE, "--index %d needs --device: there is one CPU", (int)o->desc.index);
}

void options_note(option_flags *flags, int id, const char *value) {
    options scratch;
    options_init(&scratch);
    const cli_option *row = cli_problem_options;
    while (row->id != id)
        row++;
    if (!apply(&scratch, id, value))
        cli_fail(CLI_USAGE, "--%s is '%s'; expected %s", row->name, value, row->value);
    if (flags->count == OPTIONS_MOST_FLAGS)
        cli_fail(CLI_USAGE, "more than %d options of the problem", OPTIONS_MOST_FLAGS);
    flags->row[flags->count].id = id;
    flags->row[flags->count++].value = value;
}

/* ---- Parts -------------------------------------------------------------------------------------------- */

static const struct {
    const char *word;
    uint32_t flag;
} parts[] = {
    {"bias", FB_BIAS},
    {"dbias", FB_DBIAS},
    {"mask", FB_MASK},
    {"sinks", FB_SINKS},
    {"dsinks", FB_DSINKS},
    {"dlse", FB_DLSE},
    {"lengths", FB_LENGTHS},
    {"accumulate", FB_ACCUMULATE},
    {"deterministic", FB_DETERMINISTIC},
    {"forward-only", FB_FORWARD_ONLY},
};

uint32_t parse_parts(const char *list) {
    uint32_t flags = 0;
    for (const char *at = list; *at;) {
        const size_t length = strcspn(at, ","), count = sizeof parts / sizeof *parts;
        size_t i = 0;
        while (i < count && (strlen(parts[i].word) != length || strncmp(at, parts[i].word, length)))
            i++;
        if (i == count)
            cli_fail(CLI_USAGE, "--with: '%.*s' is unknown; --help lists the words", (int)length, at);
        flags |= parts[i].flag;
        at += length + (at[length] == ',');
    }
    return flags;
}

void options_parts(options *o, uint32_t flags) {
    const fb_shape scores = {o->desc.batch, o->desc.heads_q, o->desc.len_q, o->desc.len_k};
    o->desc.flags |= flags;
    if (flags & FB_BIAS)
        o->desc.bias_shape = scores;
    if (flags & FB_MASK)
        o->desc.mask_shape = scores;
}
