/* Any bytes as a problem. One half of the inputs becomes a descriptor with anything in its fields: it is
 * accepted, or refused with a sentence that names the field. The other half becomes a legal case, which runs
 * on every route within guard pages and must match the reference, and whose io is then spoilt, which must be
 * refused. */
#include "harness/harness.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

extern const unsigned fb_fuzz_runs;
const unsigned fb_fuzz_runs = 8000;

/* ---- Bytes to choices ---------------------------------------------------------------------------------- */

typedef struct source {
    const uint8_t *at;
    size_t left;
} source;

static uint8_t byte(source *s) {
    if (!s->left)
        return 0;
    s->left--;
    return *s->at++;
}

static unsigned below(source *s, unsigned n) { return byte(s) % n; }

static int64_t word(source *s) {
    uint64_t x = 0;
    for (int i = 0; i < 8; i++)
        x = x << 8 | byte(s);
    return (int64_t)x;
}

#define PICK(s, table) (table)[below(s, sizeof(table) / sizeof *(table))]

static void need(bool condition, const char *what, const char *about) {
    if (condition)
        return;
    fprintf(stderr, "%s: %s\n", what, about);
    abort();
}

/* ---- Any descriptor ------------------------------------------------------------------------------------ */

/* Once in a while, something that no caller means. */
static int64_t odd(source *s, int64_t usual) {
    static const int64_t numbers[] = {
        INT64_MIN,        INT64_MIN + 1, -1,       0, 1, INT32_MAX, INT64_C(1) << 32, INT64_C(1) << 40,
        INT64_C(1) << 60, INT64_MAX - 1, INT64_MAX};
    if (below(s, 64) < 63) /* bytes that are missing are 0 and mean nothing odd */
        return usual;
    return below(s, 4) ? PICK(s, numbers) : word(s);
}

static double odd_real(source *s, double usual) {
    static const double numbers[] = {-1, 0, 1e-320, 1e-31, 1e31, 1e300, (double)INFINITY, (double)NAN};
    return below(s, 32) < 31 ? usual : PICK(s, numbers);
}

/* A product of dimensions that may be wild: it wraps, and the library is to refuse it. */
static int64_t times(int64_t a, int64_t b) { return (int64_t)((uint64_t)a * (uint64_t)b); }

/* Contiguous, [B,L,H,D], with gaps, or anything. */
static fb_strides strides(source *s, int64_t heads, int64_t rows, int64_t cols) {
    const int64_t gap = below(s, 3);
    fb_strides made = {0, 0, 0};
    switch (below(s, 4)) {
    case 0:
        return made;
    case 1:
        made = (fb_strides){times(rows, times(heads, cols)), cols, times(heads, cols)};
        break;
    case 2:
        made = (fb_strides){FB_BROADCAST, FB_BROADCAST, cols};
        break;
    default:
        made = (fb_strides){times(heads, times(rows, cols + gap)), times(rows, cols + gap), cols + gap};
    }
    return (fb_strides){odd(s, made.batch), odd(s, made.head), odd(s, made.row)};
}

static fb_shape shape(source *s, const fb_desc *d) {
    const unsigned full = byte(s);
    return (fb_shape){odd(s, full & 1 ? d->batch : 1), odd(s, full & 2 ? d->heads_q : 1),
                      odd(s, full & 4 ? d->len_q : 1), odd(s, full & 8 ? d->len_k : 1)};
}

static void make_numbers(source *s, fb_desc *d) {
    static const int64_t sizes[] = {0, 1, 2, 3, 8, 17, 64, 65, 130};
    d->batch = odd(s, below(s, 4));
    d->heads_kv = odd(s, below(s, 3));
    d->heads_q = odd(s, d->heads_kv < 100 ? times(d->heads_kv, below(s, 4)) : 1);
    d->len_q = odd(s, PICK(s, sizes));
    d->len_k = odd(s, PICK(s, sizes));
    d->head_dim = odd(s, PICK(s, sizes));
    d->head_dim_v = odd(s, PICK(s, sizes));
    d->window.left = odd(s, below(s, 2) ? FB_UNBOUNDED : below(s, 80));
    d->window.right = odd(s, below(s, 2) ? FB_UNBOUNDED : below(s, 80));
    d->position_offset = odd(s, (int64_t)below(s, 3) - 1);
    d->scale = odd_real(s, below(s, 2) ? (double)NAN : 0.5);
    d->softcap = odd_real(s, below(s, 3) ? 0 : 15);
    d->index = (int32_t)odd(s, 0);
    d->threads = (int32_t)odd(s, below(s, 4));
    d->tasks = (int32_t)odd(s, below(s, 40));
    d->fused_min_len = odd(s, below(s, 80));
    d->score_bytes_max = odd(s, 0);
    d->block_q = odd(s, 16 * (1 + below(s, 8)));
    d->block_k = odd(s, 16 * (1 + below(s, 8)));
}

static void make_desc(source *s, fb_desc *d) {
    static const uint32_t some[] = {0,           FB_DETERMINISTIC, FB_FORWARD_ONLY,
                                    FB_TOP_LEFT, FB_LENGTHS,       FB_BIAS | FB_DBIAS,
                                    FB_MASK,     FB_BLOCK_MASK,    FB_SINKS | FB_DSINKS,
                                    FB_DLSE,     FB_ACCUMULATE,    FB_NO_DQ | FB_NO_DK,
                                    FB_NO_DV,    FB_BIAS,          FB_SINKS};
    fb_desc_init(d, sizeof *d);
    make_numbers(s, d);
    d->dtype = (fb_dtype)odd(s, below(s, 4));
    d->route = (fb_route)odd(s, below(s, 5));
    d->device = (fb_device)odd(s, FB_CPU);
    d->size = (uint32_t)odd(s, (int64_t)sizeof *d);
    d->flags = (uint32_t)odd(s, PICK(s, some) | PICK(s, some) | PICK(s, some));
    if (below(s, 4) == 3) {
        d->flags |= FB_PACKED;
        d->total_q = odd(s, d->len_q < 1000 ? times(d->len_q, 2) : 0);
        d->total_k = odd(s, d->len_k < 1000 ? times(d->len_k, 2) : 0);
    }
    const int64_t q = d->flags & FB_PACKED ? d->total_q : d->len_q,
                  k = d->flags & FB_PACKED ? d->total_k : d->len_k;
    if (d->heads_q > 8 || d->head_dim > 576 || d->head_dim_v > 576 || q > 1000 || k > 1000)
        return; /* too large for strides without overflow here */
    fb_strides *const of_q[] = {&d->q, &d->dq}, *const of_out[] = {&d->out, &d->dout};
    for (int i = 0; i < 2; i++) {
        *of_q[i] = strides(s, d->heads_q, q, d->head_dim);
        *of_out[i] = strides(s, d->heads_q, q, d->head_dim_v);
    }
    d->k = strides(s, d->heads_kv, k, d->head_dim);
    d->dv = strides(s, d->heads_kv, k, d->head_dim_v);
    d->bias_shape = shape(s, d);
    d->mask_shape = shape(s, d);
    d->mask = strides(s, 1, 1, 1);
    d->dbias = strides(s, d->heads_q, d->len_q, d->len_k);
    d->block_batch = odd(s, below(s, 2) ? d->batch : 1);
    d->block_heads = odd(s, below(s, 2) ? d->heads_q : 1);
}

static void set_environment(source *s) {
    static const char *const routes[] = {NULL, NULL, NULL, "", "auto", "unfused", "reference", "fast"};
    static const char *const numbers[] = {NULL, NULL, NULL, "1", "4096", "0", "-3", "1e9"};
    static const char *const isas[] = {NULL, NULL, "scalar", "baseline", "avx2", "avx512", "sse9"};
    static const char *const names[] = {"FLASHBACK_ROUTE", "FLASHBACK_FUSED_MIN_LEN",
                                        "FLASHBACK_SCORE_BYTES_MAX", "FLASHBACK_ISA"};
    const bool any = below(s, 8) == 7;
    const char *const values[] = {any ? PICK(s, routes) : NULL, any ? PICK(s, numbers) : NULL,
                                  any ? PICK(s, numbers) : NULL, any ? PICK(s, isas) : NULL};
    for (int i = 0; i < 4; i++)
        if (values[i])
            setenv(names[i], values[i], 1);
        else
            unsetenv(names[i]);
}

/* A refusal is useful: a status, and a sentence with the name of what is wrong. */
static void check_refusal(fb_status status, const char *about) {
    static const char *const names[] = {"desc.",  "io.",      "FLASHBACK_", "plan",
                                        "device", "overflow", "route",      "fb_backward"};
    const char *sentence = fb_last_error();
    bool named = false;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        named |= strstr(sentence, names[i]) != NULL;
    need(status != FB_OK && *fb_status_name(status) == 'F', "a refusal without a status", about);
    need(named, "a refusal that names nothing", sentence);
    need(strlen(sentence) < 1000, "a sentence without an end", sentence);
}

static void check_explain(const fb_plan *plan) {
    char text[8192], part[32];
    const size_t length = fb_plan_explain(plan, NULL, 0);
    need(length < sizeof text && fb_plan_explain(plan, text, sizeof text) == length, "explain", "length");
    need(strlen(text) == length && strstr(text, "route: ") && strstr(text, "workspace: "), "explain", text);
    memset(part, 'x', sizeof part);
    need(fb_plan_explain(plan, part, 16) == length && strlen(part) == 15 && part[16] == 'x', "explain", part);
}

/* No tensor is given. Either none has an element, or that is refused. */
static void check_empty_io(const fb_plan *plan, const fb_desc *d) {
    static char workspace[1 << 20];
    fb_io io;
    if (fb_plan_workspace(plan) > sizeof workspace || d->batch > 1000 || d->heads_q > 1000 ||
        d->heads_kv > 1000)
        return;
    fb_io_init(&io, sizeof io);
    io.workspace.data = workspace;
    io.workspace_size = sizeof workspace;
    const fb_status forward = fb_forward(plan, &io);
    if (forward != FB_OK)
        check_refusal(forward, "fb_forward without tensors");
    const fb_status backward = fb_backward(plan, &io);
    if (backward != FB_OK)
        check_refusal(backward, "fb_backward without tensors");
    const int64_t rows = d->flags & FB_PACKED ? d->total_q : d->batch * d->len_q;
    const bool empty = !rows || !d->heads_q || !d->head_dim;
    need(forward != FB_OK || empty, "fb_forward without q", "is FB_OK");
}

static void any_descriptor(source *s) {
    union {
        fb_desc desc;
        char room[4096]; /* what desc.size may claim */
    } any = {.room = {0}};
    fb_plan *plan = (fb_plan *)&any;
    char sentence[1024];
    make_desc(s, &any.desc);
    set_environment(s);
    const fb_status supported = fb_supported(&any.desc);
    snprintf(sentence, sizeof sentence, "%s", fb_last_error());
    const fb_status status = fb_plan_create(&plan, &any.desc);
    need(supported == status, "fb_supported and fb_plan_create differ", fb_last_error());
    need(strcmp(sentence, fb_last_error()) == 0, "fb_supported and fb_plan_create say", sentence);
    if (status != FB_OK) {
        check_refusal(status, "fb_plan_create");
        need(!plan, "a plan", "beside an error");
        return;
    }
    need(!*fb_last_error(), "a sentence beside FB_OK", fb_last_error());
    check_explain(plan);
    check_empty_io(plan, &any.desc);
    fb_plan_destroy(plan);
}

/* ---- A legal case -------------------------------------------------------------------------------------- */

/* Its name, or false where the words contradict. */
static bool make_case(source *s, fbh_case *c) {
    static const int64_t lens[] = {0, 1, 2, 5, 8, 9, 16, 17, 33, 63, 64, 65, 70, 130};
    static const int64_t dims[] = {0, 1, 3, 4, 8, 16, 17, 24, 40};
    static const char *const words[] = {
        "causal",     "topleft",   "left2",    "left40",       "right3",     "offset-3",    "offset2",
        "softcap0.5", "softcap20", "biasbhqk", "bias1h1k",     "biasb1q1",   "dbias",       "neginf",
        "maskbhqk",   "mask11q1",  "mask1h1k", "block16x16bh", "block32x16", "block16x64b", "sinks",
        "dsinks",     "dlse",      "lensq",    "lensk",        "packed",     "acc",         "nodq",
        "nodk",       "nodv",      "fwd",      "nolse",        "blhd",       "qkv",         "padded",
        "odd",        "repeated",  "exact",    "gain20",       "scale0",     "scale-0.5"};
    char name[512], error[256];
    const int64_t heads = 1 + below(s, 2), queries = PICK(s, lens);
    int n = snprintf(name, sizeof name, "%s.b%uh%dk%d.q%dk%d.d%dv%d.scale0.5",
                     fb_dtype_name((fb_dtype)below(s, 4)), below(s, 4), (int)(heads * below(s, 4)),
                     (int)heads, (int)queries, (int)(below(s, 4) ? PICK(s, lens) : queries),
                     (int)PICK(s, dims), (int)PICK(s, dims));
    for (unsigned left = below(s, 6); left > 0; left--)
        n += snprintf(name + n, sizeof name - (size_t)n, ".%s", PICK(s, words));
    return fbh_case_parse(c, name, error, sizeof error);
}

static const fbh_id spoilt[] = {FBH_Q,   FBH_K,    FBH_V,          FBH_DOUT,  FBH_BIAS,   FBH_MASK,
                                FBH_OUT, FBH_DLSE, FBH_BLOCK_MASK, FBH_SINKS, FBH_DSINKS, FBH_DQ,
                                FBH_DK,  FBH_DV,   FBH_DBIAS,      FBH_CU_Q,  FBH_CU_K};

static fb_ref *field(fb_io *io, fbh_id id) {
    fb_ref *const fields[FBH_COUNT] = {
#define X(upper, name) [FBH_##upper] = &io->name,
        FBH_TENSORS(X)
#undef X
    };
    return fields[id];
}

static bool has_elements(const fbh_tensor *t) {
    return t->buffer && t->batch && t->heads && t->rows && t->cols;
}

/* One thing wrong with the io; false where it would not be wrong. */
static bool spoil(source *s, fbh_problem *p, fbh_pass pass, fb_io *io) {
    const fbh_id id = PICK(s, spoilt);
    fb_ref *ref = field(io, id);
    const bool used = ref->data && has_elements(&p->t[id]);
    switch (below(s, 6)) {
    case 0:
        *ref = (fb_ref){NULL, 0};
        return used;
    case 1:
        ref->offset++;
        return used && fbh_size(p->t[id].type) > 1;
    case 2:
        ref->data = p;
        return p->t[id].buffer == NULL;
    case 3:
        io->workspace_size--;
        return true;
    case 4:
        io->size = (uint32_t)below(s, 200);
        return true;
    default:
        *ref = io->q;
        return used && fbh_writes(p, id, pass) && has_elements(&p->t[FBH_Q]);
    }
}

static void run_route(source *s, const fbh_oracle *o, fb_route route) {
    const fbh_options options = {.route = route,
                                 .threads = 1 + (int32_t)below(s, 3),
                                 .guard = below(s, 2) ? FBH_GUARD_END : FBH_GUARD_START};
    fbh_result r;
    fbh_oracle_run(o, &options, &r);
    /* Random cases are harsher than chosen ones, so R12 gets room; bytes that may not change and exact
       values, which fail at a ratio of at most 1, and NaN, which is infinitely far off, get none. */
    need(r.verdict != FBH_FAIL || (r.ratio > 1 && r.ratio < 8), o->given.what.name, r.message);
    need(r.verdict != FBH_UNSUPPORTED || !fbh_route_fits(&o->given.what, route), o->given.what.name,
         r.message);
}

static void run_spoilt(source *s, const fbh_case *c) {
    fbh_problem p;
    fb_plan *plan;
    fb_io io;
    fbh_problem_create(&p, c, FB_CPU, 0, FBH_GUARD_END, false);
    fbh_problem_fill(&p, 1);
    need(fb_plan_create(&plan, &p.desc) == FB_OK, c->name, fb_last_error());
    const fbh_pass pass = p.desc.flags & FB_FORWARD_ONLY ? FBH_FORWARD : (fbh_pass)below(s, 2);
    need(fbh_problem_ready(&p, plan, pass) == FB_OK, c->name, fb_last_error());
    fbh_problem_io(&p, pass, &io);
    if (spoil(s, &p, pass, &io)) {
        const uint64_t digest = fbh_problem_digest(&p, pass);
        const fb_status status = pass == FBH_FORWARD ? fb_forward(plan, &io) : fb_backward(plan, &io);
        need(status == FB_INVALID, c->name, "a spoilt io is taken");
        need(strstr(fb_last_error(), "io.") != NULL, c->name, fb_last_error());
        need(digest == fbh_problem_digest(&p, pass), c->name, "a refused call writes");
    }
    fb_plan_destroy(plan);
    fbh_problem_destroy(&p);
}

static void legal_case(source *s) {
    fbh_case c;
    fbh_oracle o;
    for (int i = 0; i < 4; i++)
        unsetenv(i == 0   ? "FLASHBACK_ROUTE"
                 : i == 1 ? "FLASHBACK_FUSED_MIN_LEN"
                 : i == 2 ? "FLASHBACK_SCORE_BYTES_MAX"
                          : "FLASHBACK_ISA");
    if (!make_case(s, &c))
        return;
    fbh_oracle_open(&o, &c, 1 + byte(s));
    need(!o.error[0], c.name, o.error);
    for (int route = FB_AUTO; route <= FB_REFERENCE; route++)
        run_route(s, &o, (fb_route)route);
    fbh_oracle_close(&o);
    run_spoilt(s, &c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    source s = {data, size};
    if (below(&s, 2))
        any_descriptor(&s);
    else
        legal_case(&s);
    return 0;
}
