/* Plans on the mock of Metal: what runs, in which order, and what the failure of each call comes to, from
 * fb_plan_create to fb_plan_destroy: a status, a sentence, and nothing left behind. */
#include "support.h"

static const problem problems[] = {
    {"fused, forward only", FB_FORWARD_ONLY, FB_BF16, FB_AUTO, 100, 200, "fb_forward", ""},
    {"fused", 0, FB_F32, FB_AUTO, 100, 200, "fb_forward", "fb_delta fb_dq fb_dkdv"},
    {"gradients of options", FB_BIAS | FB_DBIAS | FB_SINKS | FB_DSINKS, FB_F16, FB_AUTO, 64, 64, "fb_forward",
     "fb_delta fb_dsinks fb_dbias fb_dq fb_dkdv"},
    {"dq only", FB_NO_DK | FB_NO_DV, FB_F16, FB_AUTO, 64, 64, "fb_forward", "fb_delta fb_dq"},
    {"dv only", FB_NO_DQ | FB_NO_DK, FB_F16, FB_AUTO, 64, 64, "fb_forward", "fb_delta fb_dkdv"},
    {"vector, forward only", FB_FORWARD_ONLY, FB_F16, FB_AUTO, 1, 4096, "fb_forward fb_join", ""},
    {"vector", 0, FB_BF16, FB_AUTO, 2, 4096, "fb_forward fb_join", "fb_delta fb_dq fb_dkdv fb_join_dq"},
    {"vector, no dq", FB_NO_DQ, FB_BF16, FB_AUTO, 2, 4096, "fb_forward fb_join", "fb_delta fb_dkdv"},
    {"unfused, forward only", FB_FORWARD_ONLY, FB_F16, FB_UNFUSED, 100, 203,
     "fb_unfused_s fb_unfused_softmax fb_unfused_o", ""},
    {"unfused", FB_BIAS | FB_DBIAS | FB_SINKS | FB_DSINKS, FB_F32, FB_UNFUSED, 64, 64,
     "fb_unfused_s fb_unfused_softmax fb_unfused_o",
     "fb_unfused_dp fb_unfused_s fb_delta fb_unfused_dbias fb_unfused_gradient fb_unfused_dv fb_unfused_dk "
     "fb_unfused_dq fb_dsinks"},
    {"unfused, dv only", FB_NO_DQ | FB_NO_DK, FB_BF16, FB_UNFUSED, 5, 64,
     "fb_unfused_s fb_unfused_softmax fb_unfused_o",
     "fb_unfused_dp fb_unfused_s fb_delta fb_unfused_gradient fb_unfused_dv"},
    {"unfused, no gradient", FB_NO_DQ | FB_NO_DK | FB_NO_DV, FB_BF16, FB_UNFUSED, 5, 64,
     "fb_unfused_s fb_unfused_softmax fb_unfused_o", "fb_delta"},
    {"unfused, no keys", 0, FB_F16, FB_UNFUSED, 5, 0, "fb_unfused_softmax fb_unfused_o",
     "fb_delta fb_unfused_gradient fb_unfused_dq"},
    {"no queries", 0, FB_F32, FB_AUTO, 0, 64, "", "fb_dkdv"},
};
enum { PROBLEMS = sizeof problems / sizeof *problems };

/* ---- A life ---- */

static const char *take_failed(const mock *m) {
    const char *failed = m->state->failed;
    m->state->failed = NULL;
    return failed;
}

/* A call of the library has returned: it may succeed only if nothing has failed in it, and else says what. */
static bool went_well(const mock *m, const problem *p, fb_status status) {
    const char *failed = take_failed(m);
    expect(errno == 77);
    if ((status == FB_OK) != !failed)
        fprintf(stderr, "%s: status %d, \"%s\", and %s failed\n", p->name, (int)status, fb_last_error(),
                failed ? failed : "nothing");
    expect((status == FB_OK) == !failed);
    if (failed && strcmp(failed, "objc_getClass") != 0) /* what is asked for next then fails */
        expect_words(fb_last_error(), failed);
    expect(status == FB_OK || strlen(fb_last_error()) > 20);
    expect(status != FB_INVALID);
    return status == FB_OK;
}

/* All verbs of a plan, of which the n-th call fails; 0 is none. Returns whether there are so many. */
static bool live(const mock *m, const problem *p, long n) {
    fb_ref memory = {NULL, 0};
    fb_plan *plan = NULL;
    fb_desc desc = describe(p);
    expect(fb_alloc(&memory, FB_METAL, 0, MEMORY) == FB_OK);
    errno = 77;
    m->state->fail_at = n ? m->state->calls + n : 0;
    m->state->dispatch_count = 0;
    if (went_well(m, p, fb_plan_create(&plan, &desc))) {
        fb_io io = tensors(p, memory, fb_plan_workspace(plan));
        if (went_well(m, p, fb_forward(plan, &io)))
            expect_ran(m, p->forward);
        m->state->dispatch_count = 0;
        if (!(p->flags & FB_FORWARD_ONLY) && went_well(m, p, fb_backward(plan, &io)))
            expect_ran(m, p->backward);
        m->state->dispatch_count = 0;
        if (went_well(m, p, fb_merge(plan, io.out, io.lse, io.q, io.workspace, NULL)))
            expect_ran(m, p->len_q ? "fb_merge_parts" : "");
        fb_plan_destroy(plan);
        expect(errno == 77 && !take_failed(m));
    } else
        expect(!plan);
    const bool fired = m->state->calls >= m->state->fail_at;
    m->state->fail_at = 0;
    expect(fb_free(&memory, FB_METAL, 0) == FB_OK && !memory.data);
    return fired;
}

static void lives(void) {
    mock m = load_metal();
    for (int i = 0; i < PROBLEMS; i++) {
        live(&m, &problems[i], 0);
        expect_nothing_left(&m, problems[i].name, 0);
    }
}

static void failures(void) {
    mock m = load_metal();
    m.state->fail_code = MOCK_CODE_INTERNAL;
    for (int i = 0; i < PROBLEMS; i++) {
        long n = 1;
        for (; live(&m, &problems[i], n); n++)
            expect_nothing_left(&m, problems[i].name, n);
        expect(n > 15);
    }
}

static void test_lives(void **state) {
    (void)state;
    in_child(lives);
}

static void test_failures(void **state) {
    (void)state;
    in_child(failures);
}

/* ---- Compiling ---- */

static void safe_math(void) {
    mock m = load_metal();
    fb_desc d = describe(&problems[0]);
    for (m.state->macos = 14; m.state->macos <= 15; m.state->macos++) {
        fb_plan *plan = NULL;
        m.state->fast_math = -1;
        expect(fb_plan_create(&plan, &d) == FB_OK);
        expect(m.state->fast_math == 0 && m.state->language == (3 << 16 | 1));
        expect(m.state->compilations == 2 * (m.state->macos - 13)); /* the forward, and rows */
        fb_plan_destroy(plan);
    }
    expect_nothing_left(&m, "safe math", 0);
}

static void compile_errors(void) {
    mock m = load_metal();
    fb_desc d = describe(&problems[0]);
    fb_plan *plan = NULL;
    m.state->compile_error = "program_source:forward.metal:3:1: error: unknown type name 'y'";
    expect(fb_supported(&d) == FB_OK && m.state->compilations == 0);
    expect(fb_plan_create(&plan, &d) == FB_COMPILE && !plan);
    expect_words(fb_last_error(), "forward.metal:3:1: error: unknown type name 'y'");
    m.state->compile_error = NULL;
    setenv("FLASHBACK_KERNELS", "/nonexistent", 1);
    expect(fb_plan_create(&plan, &d) == FB_INVALID && !plan);
    expect_words(fb_last_error(), "FLASHBACK_KERNELS is '/nonexistent'");
    setenv("FLASHBACK_KERNELS", "src/metal/kernels", 1);
    expect(fb_plan_create(&plan, &d) == FB_OK);
    fb_plan_destroy(plan);
    expect_nothing_left(&m, "compile errors", 0);
}

static void logs(void) {
    mock m = load_metal();
    fb_desc d = describe(&problems[0]);
    fb_plan *plan = NULL;
    char path[] = "/tmp/flashback-log-XXXXXX", text[2048] = "";
    const int file = mkstemp(path);
    expect(file >= 0);
    setenv("FLASHBACK_LOG", path, 1);
    expect(fb_plan_create(&plan, &d) == FB_OK);
    fb_plan_destroy(plan);
    m.state->compile_error = "no";
    expect(fb_plan_create(&plan, &d) == FB_COMPILE);
    expect(read(file, text, sizeof text - 1) > 0);
    close(file);
    unlink(path);
    expect_words(text, " compiled forward.metal ");
    expect_words(text, " compiled rows.metal ");
    expect_words(text, " failed forward.metal ");
    setenv("FLASHBACK_LOG", "/nonexistent/log", 1);
    expect(fb_plan_create(&plan, &d) == FB_INVALID);
    expect_words(fb_last_error(), "FLASHBACK_LOG");
    expect_nothing_left(&m, "logs", 0);
}

/* The compiler's choice of registers may allow a kernel fewer threads than its tile has. */
static void limits(void) {
    mock m = load_metal();
    problem wide = {"limits", FB_FORWARD_ONLY, FB_F32, FB_AUTO, 100, 100, "", ""};
    fb_desc d = describe(&wide);
    fb_plan *plan = NULL;
    char before[8192], words[8192];
    expect(fb_plan_create(&plan, &d) == FB_OK);
    fb_plan_explain(plan, before, sizeof before);
    fb_plan_destroy(plan);
    m.state->limited = "fb_forward", m.state->limited_to = 127;
    const fb_status status = fb_plan_create(&plan, &d);
    if (status == FB_OK) {
        expect(fb_plan_explain(plan, words, sizeof words) < sizeof words);
        expect_words(words, "at most 127 threads (too few for 1 tile");
        fb_plan_destroy(plan);
    }
    expect(status == FB_OK || status == FB_UNSUPPORTED);
    for (m.state->limited_to = 32; m.state->limited_to > 30; m.state->limited_to--)
        if (fb_plan_create(&plan, &d) == FB_OK)
            fb_plan_destroy(plan);
    expect(!plan);
    expect_words(fb_last_error(), "allows 31 threads in simdgroups of 32, and there is no smaller tile");
    m.state->limited = "fb_delta";
    expect(fb_plan_create(&plan, &d) == FB_UNSUPPORTED);
    expect_words(fb_last_error(), "rows.metal");
    m.state->limited = NULL, m.state->simd_width = 16;
    expect(fb_plan_create(&plan, &d) == FB_UNSUPPORTED);
    expect_words(fb_last_error(), "allows 0 threads");
    expect_nothing_left(&m, "limits", 0);
}

/* A GPU whose matrices lie otherwise gets no plan, also not the second time. */
static void layout(void) {
    mock m = load_metal();
    fb_desc d = describe(&problems[1]);
    fb_plan *plan = NULL;
    unsetenv("FLASHBACK_CACHE");
    m.state->layout = 0;
    for (int n = 0; n < 2; n++) {
        expect(fb_plan_create(&plan, &d) == FB_UNSUPPORTED && !plan);
        expect_words(fb_last_error(), "lie in the lanes of Mock Apple GPU 0 otherwise");
    }
    m.state->layout = 1;
    expect(fb_plan_create(&plan, &d) == FB_OK);
    fb_plan_destroy(plan);
}

/* The device keeps pipelines for plans of the same kernels, whatever their lengths. */
static void kept(void) {
    mock m = load_metal();
    fb_desc d = describe(&problems[1]);
    fb_plan *plan = NULL;
    char words[8192];
    setenv("FLASHBACK_CACHE", "/nonexistent", 1); /* a folder is of no use here */
    for (int n = 0; n < 3; n++) {
        d.len_q += 50 * n;
        expect(fb_plan_create(&plan, &d) == FB_OK);
        fb_plan_explain(plan, words, sizeof words);
        expect_words(words, n ? "kernel: dq.metal, from the cache in " : "kernel: dq.metal, compiled in ");
        fb_plan_destroy(plan);
        expect(m.state->compilations == 4 && m.state->strange == 0 && m.state->pools == 0);
    }
    const long live = m.state->live;
    d.softcap = 3;
    expect(fb_plan_create(&plan, &d) == FB_OK);
    fb_plan_destroy(plan);
    expect(m.state->compilations == 7 && m.state->live > live); /* rows.metal is the same */
    setenv("FLASHBACK_CACHE", "off", 1);
    expect(fb_plan_create(&plan, &d) == FB_OK);
    fb_plan_destroy(plan);
    expect(m.state->compilations == 11);
}

static void tiles(void) {
    mock m = load_metal();
    fb_desc d = describe(&problems[1]);
    fb_plan *plan = NULL;
    static char words[3][8192];
    static const char *const values[] = {"", "forward=1", "dq=0,forward=1,dkdv=1"},
                             *const wrong[] = {"forward",        "forward=",     "forward=-1",   "rows=1",
                                               "forward=1;dq=1", "forward=1000", "dq=1,,dkdv=1", "dq =1"};
    for (int n = 0; n < 3; n++) {
        setenv("FLASHBACK_TILES", values[n], 1);
        expect(fb_plan_create(&plan, &d) == FB_OK);
        fb_plan_explain(plan, words[n], sizeof words[n]);
        for (char *at = words[n]; (at = strstr(at, "compiled in ")); at += 12)
            memset(at, '.', strcspn(at, ",")); /* the time it took */
        fb_plan_destroy(plan);
    }
    expect(strcmp(words[0], words[1]) != 0 && strcmp(words[1], words[2]) != 0);
    for (size_t n = 0; n < sizeof wrong / sizeof *wrong; n++) {
        setenv("FLASHBACK_TILES", wrong[n], 1);
        expect(fb_supported(&d) == FB_INVALID);
        expect_words(fb_last_error(), "expected how many tiles that fit are to be passed over");
    }
    setenv("FLASHBACK_TILES", "dq=999", 1);
    expect(fb_plan_create(&plan, &d) == FB_UNSUPPORTED && !plan);
    expect_words(fb_last_error(), "dq.metal fit into the 32768 bytes");
    expect_words(fb_last_error(), "behind those that FLASHBACK_TILES passes over");
    unsetenv("FLASHBACK_TILES");
    expect_nothing_left(&m, "tiles", 0);
}

/* dS from dkdv to dq: 2 * 4 heads of 128 x 256 elements of 4 bytes. */
static void kept_ds(void) {
    mock m = load_metal();
    fb_desc d = describe(&problems[1]);
    fb_plan *plan = NULL;
    fb_ref memory;
    char words[8192];
    size_t without = 0;
    static const struct {
        const char *most, *backward;
        size_t more;
    } rows[] = {{"", "fb_delta fb_dq fb_dkdv", 0},
                {"1048575", "fb_delta fb_dq fb_dkdv", 0},
                {"1048576", "fb_delta fb_dkdv fb_dq", 1048576}};
    expect(fb_alloc(&memory, FB_METAL, 0, MEMORY) == FB_OK);
    for (int n = 0; n < 3; n++) {
        setenv("FLASHBACK_DS_BYTES_MAX", rows[n].most, 1);
        expect(fb_plan_create(&plan, &d) == FB_OK);
        without = n ? without : fb_plan_workspace(plan);
        expect(fb_plan_workspace(plan) == without + rows[n].more);
        fb_plan_explain(plan, words, sizeof words);
        expect(!strstr(words, "kept for dq.metal") == !rows[n].more);
        fb_io io = tensors(&problems[1], memory, fb_plan_workspace(plan));
        m.state->dispatch_count = 0;
        expect(fb_backward(plan, &io) == FB_OK);
        expect_ran(&m, rows[n].backward);
        fb_plan_destroy(plan);
    }
    setenv("FLASHBACK_DS_BYTES_MAX", "1G", 1);
    expect(fb_supported(&d) == FB_INVALID);
    expect_words(fb_last_error(), "FLASHBACK_DS_BYTES_MAX is '1G', expected a number of bytes");
    unsetenv("FLASHBACK_DS_BYTES_MAX");
    expect(fb_free(&memory, FB_METAL, 0) == FB_OK);
    expect_nothing_left(&m, "kept dS", 0);
}

static void test_compiling(void **state) {
    (void)state;
    in_child(kept_ds);
    in_child(kept);
    in_child(layout);
    in_child(tiles);
    in_child(safe_math);
    in_child(compile_errors);
    in_child(logs);
    in_child(limits);
}

/* ---- Refusals ---- */

static void absent(void) {
    fb_desc d = describe(&problems[0]);
    fb_plan *plan = NULL;
    fb_ref ref;
    char words[8192];
    expect(fb_plan_create(&plan, &d) == FB_NO_DEVICE && !plan);
    expect_words(fb_last_error(), "Metal is a part of macOS, and this is another system");
    expect(fb_supported(&d) == FB_NO_DEVICE);
    expect(fb_alloc(&ref, FB_METAL, 0, 16) == FB_NO_DEVICE && !ref.data);
    expect(fb_sync(FB_METAL, 0, NULL) == FB_NO_DEVICE);
    expect(fb_info(words, sizeof words) < sizeof words);
    expect_words(words, "metal devices: none (");
}

static void expect_unsupported(const fb_desc *d, fb_status status, const char *words) {
    fb_plan *plan = NULL;
    expect(fb_supported(d) == status);
    expect_words(fb_last_error(), words);
    expect(fb_plan_create(&plan, d) == status && !plan);
    expect_words(fb_last_error(), words);
}

static void refused(void) {
    mock m = load_metal();
    fb_desc d = describe(&problems[1]);
    char words[8192];
    expect(fb_info(words, sizeof words) < sizeof words);
    expect_words(words, "metal device 0: Mock Apple GPU 0, family Apple9, 32768 bytes of threadgroup memory");
    d.index = 1;
    expect_unsupported(&d, FB_NO_DEVICE, "desc.index is 1, but there is 1 Metal device: it must be 0");
    m.state->devices = 3;
    d.index = 3;
    expect_unsupported(&d, FB_NO_DEVICE, "there are 3 Metal devices: it must be 0 to 2");
    m.state->devices = 0;
    d.index = 0;
    expect_unsupported(&d, FB_NO_DEVICE, "there is no Metal device");
    m.state->devices = 1;
    m.state->family = 6;
    expect_unsupported(&d, FB_UNSUPPORTED, "no GPU of Apple's (family Apple7, M1, or newer)");
    m.state->family = 7;
    d.route = FB_REFERENCE;
    expect_unsupported(&d, FB_UNSUPPORTED, "reference, asked for by desc.route, is in double");
    d.route = FB_AUTO;
    d.dtype = FB_F64;
    expect_unsupported(&d, FB_UNSUPPORTED, "desc.dtype is f64");
    d.dtype = FB_F16;
    d.len_k = INT64_C(1) << 31;
    expect_unsupported(&d, FB_UNSUPPORTED, "metal takes at most 1073741824");
    d.len_k = 64;
    d.batch = INT64_C(1) << 28;
    expect_unsupported(&d, FB_UNSUPPORTED, "threadgroups");
    expect_nothing_left(&m, "refused", 0);
}

static void explained(void) {
    mock m = load_metal();
    fb_desc d = describe(&problems[6]);
    fb_plan *plan = NULL;
    char words[8192];
    m.state->family = 8;
    expect(fb_plan_create(&plan, &d) == FB_OK);
    expect(fb_plan_explain(plan, words, sizeof words) < sizeof words);
    expect_words(words, "device: metal 0");
    expect_words(words, "route: vector");
    expect_words(words, "gpu: Mock Apple GPU 0, family Apple8; code by Metal (MSL 3.1, safe math)");
    expect_words(words, "kernel: dkdv.metal, compiled in ");
    expect_words(words, " bytes of threadgroup memory [");
    expect_words(words, "chunks of keys: forward ");
    fb_plan_destroy(plan);
    expect_nothing_left(&m, "explained", 0);
}

static void test_refusals(void **state) {
    (void)state;
    if (!is_installed("libobjc.A.dylib"))
        in_child(absent);
    in_child(refused);
    in_child(explained);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_lives), cmocka_unit_test(test_failures),
                                       cmocka_unit_test(test_compiling), cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
