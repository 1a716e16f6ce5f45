/* Plans on a mock GPU: what is launched, and what the failure of each call of the driver, the compiler and
 * cuBLAS comes to, from fb_plan_create to fb_plan_destroy: a status, a sentence, and nothing left behind. */
#include "flashback.h"
#include "src/cuda/blas.h"
#include "src/cuda/driver.h"
#include "support.h"
#include <errno.h>

/* ---- Problems ---- */

typedef struct problem {
    const char *name;
    uint32_t flags;
    fb_dtype dtype;
    fb_route route;
    int64_t len_q, len_k;
    const char *forward, *backward; /* what is launched, in order */
    long products;                  /* of cuBLAS, in both passes */
} problem;

static const problem problems[] = {
    {"fused, forward only", FB_FORWARD_ONLY, FB_BF16, FB_FUSED, 100, 200, "fb_hopper_forward", "", 0},
    {"fused", 0, FB_F32, FB_FUSED, 100, 200, "fb_forward", "fb_dq fb_dkdv", 0},
    {"fused, gradients of options", FB_BIAS | FB_DBIAS | FB_SINKS | FB_DSINKS, FB_F16, FB_FUSED, 64, 64,
     "fb_forward", "fb_dq fb_dkdv fb_dbias fb_dsinks", 0},
    {"fused, dq only", FB_NO_DK | FB_NO_DV, FB_F16, FB_FUSED, 64, 64, "fb_hopper_forward",
     "fb_hopper_delta fb_hopper_backward fb_hopper_dq", 0},
    {"vector, forward only", FB_FORWARD_ONLY, FB_F16, FB_VECTOR, 1, 4096, "fb_forward fb_join", "", 0},
    {"unfused, forward only", FB_FORWARD_ONLY, FB_BF16, FB_UNFUSED, 100, 203,
     "fb_unfused_pack fb_unfused_softmax fb_unfused_unpack", "", 2},
    {"unfused", FB_BIAS | FB_DBIAS | FB_SINKS | FB_DSINKS, FB_F32, FB_UNFUSED, 64, 64,
     "fb_unfused_pack fb_unfused_softmax fb_unfused_unpack",
     "fb_delta fb_unfused_pack fb_unfused_dbias fb_unfused_gradient fb_unfused_clean fb_unfused_unpack "
     "fb_dsinks",
     7},
    {"unfused, dv only", FB_NO_DQ | FB_NO_DK, FB_F16, FB_UNFUSED, 5, 64,
     "fb_unfused_pack fb_unfused_softmax fb_unfused_unpack",
     "fb_delta fb_unfused_pack fb_unfused_gradient fb_unfused_clean fb_unfused_unpack", 5},
    {"unfused, no keys", 0, FB_F16, FB_UNFUSED, 5, 0, "fb_unfused_pack fb_unfused_softmax fb_unfused_unpack",
     "fb_delta fb_unfused_pack fb_unfused_gradient fb_unfused_clean fb_unfused_unpack", 0},
    {"reference, forward only", FB_FORWARD_ONLY, FB_F16, FB_REFERENCE, 5, 64, "fb_reference_forward", "", 0},
    {"reference", FB_BIAS | FB_DBIAS | FB_SINKS | FB_DSINKS, FB_F32, FB_REFERENCE, 5, 64,
     "fb_reference_forward",
     "fb_reference_delta fb_reference_dq fb_reference_dkdv fb_reference_dbias fb_reference_dsinks", 0},
    {"vector", 0, FB_BF16, FB_VECTOR, 2, 4096, "fb_forward fb_join", "fb_dq fb_join_dq fb_dkdv", 0},
    {"fused, dk and dv only", FB_NO_DQ, FB_F32, FB_FUSED, 64, 64, "fb_forward", "fb_delta fb_dkdv", 0},
    {"fused, dsinks", FB_NO_DQ | FB_SINKS | FB_DSINKS, FB_BF16, FB_FUSED, 64, 64, "fb_hopper_forward",
     "fb_hopper_delta fb_hopper_backward fb_dsinks", 0},
    {"fused, in order", FB_DETERMINISTIC, FB_BF16, FB_FUSED, 64, 64, "fb_hopper_forward", "fb_dq fb_dkdv", 0},
};

enum { PROBLEMS = sizeof problems / sizeof *problems, BATCH = 2, HEADS = 4, HEADS_KV = 2, DIM = 64 };

static fb_desc describe(const problem *p) {
    fb_desc d;
    fb_desc_init(&d, sizeof d);
    d.device = FB_CUDA;
    d.flags = p->flags;
    d.dtype = p->dtype;
    d.route = p->route;
    d.batch = BATCH, d.heads_q = HEADS, d.heads_kv = HEADS_KV;
    d.len_q = p->len_q, d.len_k = p->len_k;
    d.head_dim = d.head_dim_v = DIM;
    if (p->flags & FB_BIAS)
        d.bias_shape = (fb_shape){1, HEADS, p->len_q, p->len_k};
    return d;
}

/* Places of the tensors, cut from one memory that nobody reads or writes: 4 bytes an element are enough for
 * all. */
static fb_io tensors(const problem *p, fb_ref memory) {
    fb_io io;
    fb_io_init(&io, sizeof io);
    const bool backward = !(p->flags & FB_FORWARD_ONLY);
    const uint64_t q = (uint64_t)(BATCH * HEADS * p->len_q * DIM) * 4,
                   k = (uint64_t)(BATCH * HEADS_KV * p->len_k * DIM) * 4,
                   bias = (uint64_t)(HEADS * p->len_q * p->len_k) * 4;
    const struct {
        fb_ref *at;
        uint64_t bytes;
        bool used;
    } rows[] = {{&io.q, q, true},
                {&io.k, k, true},
                {&io.v, k, true},
                {&io.out, q, true},
                {&io.lse, q, true},
                {&io.dout, q, backward},
                {&io.dq, q, backward && !(p->flags & FB_NO_DQ)},
                {&io.dk, k, backward && !(p->flags & FB_NO_DK)},
                {&io.dv, k, backward && !(p->flags & FB_NO_DV)},
                {&io.bias, bias, p->flags & FB_BIAS},
                {&io.dbias, bias, p->flags & FB_DBIAS},
                {&io.sinks, q, p->flags & FB_SINKS},
                {&io.dsinks, q, p->flags & FB_DSINKS}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].used) {
            *rows[i].at = memory;
            memory.offset += rows[i].bytes;
        }
    io.workspace = memory;
    return io;
}

/* ---- A life ---- */

typedef struct mocks {
    mock_cuda_state *cuda;
    mock_nvrtc_state *nvrtc;
    mock_cublas_state *cublas;
} mocks;

/* Whose call fails, and with what. */
typedef struct failure {
    enum { NOBODY, DRIVER, COMPILER, PRODUCTS } whose;
    int result;
} failure;

static mocks load(void) {
    mocks m = {load_driver(), load_nvrtc(NVRTC13), load_cublas()};
    setenv("FLASHBACK_NVRTC", NVRTC13, 1);
    setenv("FLASHBACK_CACHE", "off", 1);
    unsetenv("FLASHBACK_KERNELS");
    m.cuda->devices = 2;
    return m;
}

static void expect_launches(const mock_cuda_state *mock, const char *names) {
    char all[512] = "";
    for (long n = 0; n < mock->launch_count && n < MOCK_LAUNCHES; n++) {
        size_t length = strlen(all);
        snprintf(all + length, sizeof all - length, "%s%s", length ? " " : "", mock->launches[n].function);
    }
    if (strcmp(all, names) != 0)
        fprintf(stderr, "launched: %s\nexpected: %s\n", all, names);
    expect(strcmp(all, names) == 0);
}

/* The call that has failed as asked since this was last looked at, or NULL. */
static const char *take_failed(const mocks *m) {
    const char *failed = m->cuda->failed    ? m->cuda->failed
                         : m->nvrtc->failed ? m->nvrtc->failed
                                            : m->cublas->failed;
    m->cuda->failed = m->nvrtc->failed = m->cublas->failed = NULL;
    return failed;
}

/* A call of the library has returned: it may succeed only if nothing has failed in it. errno, which the mock
 * changes with every call, is the caller's. */
static bool went_well(const mocks *m, const problem *p, fb_status status) {
    expect(errno == 77);
    const char *failed = take_failed(m);
    if (failed && strncmp(failed, "nvrtcGetProgramLog", 18) == 0)
        failed = NULL; /* the log is an extra */
    if ((status == FB_OK) != !failed)
        fprintf(stderr, "%s: status %d, \"%s\", and %s failed\n", p->name, (int)status, fb_last_error(),
                failed ? failed : "nothing");
    expect((status == FB_OK) == !failed);
    if (failed && strcmp(failed, "nvrtcCompileProgram") != 0)
        expect_words(fb_last_error(), failed);
    expect(status == FB_OK || fb_last_error()[0]);
    return status == FB_OK;
}

/* Without the device's context current nothing can be unloaded; it goes with that context. */
static void destroy(const mocks *m, fb_plan *plan) {
    fb_plan_destroy(plan);
    expect(errno == 77);
    const char *failed = take_failed(m);
    if (failed && (strcmp(failed, "cuCtxGetCurrent") == 0 || strcmp(failed, "cuCtxPushCurrent") == 0))
        m->cuda->modules = m->cublas->handles = 0;
}

/* The n-th call from now on fails; n = 0 is none. */
static void fail_at(const mocks *m, long n, failure f) {
    m->cuda->fail_with = m->nvrtc->fail_with = m->cublas->fail_with = f.result;
    m->cuda->fail_at = f.whose == DRIVER && n ? m->cuda->calls + n : 0;
    m->nvrtc->fail_at = f.whose == COMPILER && n ? m->nvrtc->calls + n : 0;
    m->cublas->fail_at = f.whose == PRODUCTS && n ? m->cublas->calls + n : 0;
}

static bool has_fired(const mocks *m) {
    return m->cuda->calls >= m->cuda->fail_at && m->nvrtc->calls >= m->nvrtc->fail_at &&
           m->cublas->calls >= m->cublas->fail_at;
}

/* All verbs of a plan, of which the n-th call fails. Returns whether there are so many. */
static bool live(const mocks *m, const problem *p, long n, failure f) {
    fb__driver d;
    fb_ref memory = {NULL, 0};
    fb_plan *plan = NULL;
    void *mine = NULL, *now = NULL;
    fb_desc desc = describe(p);
    /* The caller's context is another device's, and has to be current after each call. */
    expect(fb__driver_open(&d) == FB_OK && d.cuDevicePrimaryCtxRetain(&mine, 1) == 0);
    expect(d.cuCtxPushCurrent(mine) == 0 && fb_alloc(&memory, FB_CUDA, 0, (size_t)64 << 20) == FB_OK);
    errno = 77;
    m->cublas->products = 0;
    fail_at(m, n, f);
    if (went_well(m, p, fb_plan_create(&plan, &desc))) {
        fb_io io = tensors(p, memory);
        io.workspace_size = fb_plan_workspace(plan);
        m->cuda->launch_count = 0;
        if (went_well(m, p, fb_forward(plan, &io)))
            expect_launches(m->cuda, p->forward);
        if (!(p->flags & FB_FORWARD_ONLY)) {
            m->cuda->launch_count = 0;
            if (went_well(m, p, fb_backward(plan, &io)))
                expect_launches(m->cuda, p->backward);
        }
        m->cuda->launch_count = 0;
        if (went_well(m, p, fb_merge(plan, io.out, io.lse, io.q, io.workspace, NULL)))
            expect_launches(m->cuda, "fb_merge_parts");
        destroy(m, plan);
    } else
        expect(!plan);
    bool fired = has_fired(m);
    fail_at(m, 0, f);
    expect(n || m->cublas->products == p->products);
    /* What a failure keeps the library from giving back. */
    while (m->cuda->depth > 1)
        d.cuCtxPopCurrent(&now);
    expect(d.cuCtxGetCurrent(&now) == 0 && now == mine);
    expect(fb_free(&memory, FB_CUDA, 0) == FB_OK);
    expect(d.cuCtxPopCurrent(&now) == 0 && d.cuDevicePrimaryCtxRelease(1) == 0);
    return fired;
}

static void expect_nothing_left(const mocks *m, const problem *p, long n) {
    const mock_cuda_state *c = m->cuda;
    const mock_cublas_state *b = m->cublas;
    if (c->memories || c->retains || c->modules || c->strange || m->nvrtc->programs || b->handles ||
        b->objects || b->strange)
        fprintf(stderr,
                "%s, call %ld: %d memories, %d contexts, %d modules, %d programs, %d handles, %d objects, %d "
                "strange calls (%s, %s)\n",
                p->name, n, c->memories, c->retains, c->modules, m->nvrtc->programs, b->handles, b->objects,
                c->strange + b->strange, c->strangest ? c->strangest : "none",
                b->strangest ? b->strangest : "none");
    expect(!c->memories && !c->retains && !c->modules && !c->strange && !m->nvrtc->programs);
    expect(!b->handles && !b->objects && !b->strange);
}

static void lives(void) {
    mocks m = load();
    for (int i = 0; i < PROBLEMS; i++) {
        live(&m, &problems[i], 0, (failure){NOBODY, 0});
        expect_nothing_left(&m, &problems[i], 0);
    }
}

static void failures(failure f) {
    mocks m = load();
    for (int i = 0; i < PROBLEMS; i++)
        for (long n = 1; live(&m, &problems[i], n, f); n++)
            expect_nothing_left(&m, &problems[i], n);
}

static void driver_failures(void) { failures((failure){DRIVER, FB__CU_ILLEGAL_ADDRESS}); }

static void driver_out_of_memory(void) { failures((failure){DRIVER, FB__CU_OUT_OF_MEMORY}); }

static void compiler_failures(void) { failures((failure){COMPILER, 11}); }

static void compiler_out_of_memory(void) { failures((failure){COMPILER, 1}); }

static void cublas_failures(void) { failures((failure){PRODUCTS, 14}); }

static void cublas_out_of_memory(void) { failures((failure){PRODUCTS, 3}); }

static void test_lives(void **state) {
    (void)state;
    in_child(lives);
}

static void test_failures(void **state) {
    (void)state;
    in_child(driver_failures);
    in_child(driver_out_of_memory);
    in_child(compiler_failures);
    in_child(compiler_out_of_memory);
    in_child(cublas_failures);
    in_child(cublas_out_of_memory);
}

/* ---- Refusals ---- */

static void absent(void) {
    fb_desc d = describe(&problems[1]);
    fb_plan *plan = NULL;
    expect(fb_plan_create(&plan, &d) == FB_NO_DEVICE && !plan);
    expect_words(fb_last_error(), "no NVIDIA driver");
    expect(fb_supported(&d) == FB_NO_DEVICE);
    char words[8192];
    expect(fb_info(words, sizeof words) < sizeof words);
    expect_words(words, "no NVIDIA driver");
}

static void refused(void) {
    mocks m = load();
    fb_desc d = describe(&problems[1]);
    fb_plan *plan = NULL;
    char words[8192];
    expect(fb_info(words, sizeof words) < sizeof words);
    expect_words(words, "Mock GPU 9.0");
    expect_words(words, NVRTC13);
    d.index = 2;
    expect(fb_plan_create(&plan, &d) == FB_NO_DEVICE && !plan);
    expect_words(fb_last_error(), "desc.index is 2, but there are 2 CUDA devices");
    d.index = 0;
    setenv("FLASHBACK_NVRTC", "/nonexistent/libnvrtc.so", 1);
    expect(fb_supported(&d) == FB_OK); /* compiles nothing */
    expect(fb_plan_create(&plan, &d) == FB_NO_DEVICE && !plan);
    expect_words(fb_last_error(), "/nonexistent/libnvrtc.so");
    setenv("FLASHBACK_NVRTC", NVRTC13, 1);
    m.nvrtc->result = 6;
    m.nvrtc->log = "forward.cu(3): error: identifier \"y\" is undefined\n";
    expect(fb_plan_create(&plan, &d) == FB_COMPILE && !plan);
    expect_words(fb_last_error(), "forward.cu:3: identifier");
    m.cuda->capability = 75;
    expect(fb_supported(&d) == FB_UNSUPPORTED);
    expect_words(fb_last_error(), "7.5");
    expect_nothing_left(&m, &problems[1], 0);
}

/* Route unfused needs cuBLAS, one for this driver, and products that it knows. */
static void refused_products(void) {
    static const char *const folders[] = {MOCKS "/cublas1*", "/nonexistent", NULL};
    fb__blas blas;
    if (!is_installed("libcublasLt.so.13") && !is_installed("libcublasLt.so.12")) {
        expect(fb__blas_open_in(&blas, 13000, folders + 1) == FB_NO_DEVICE);
        expect_words(fb_last_error(), "no cuBLAS of version 13");
        expect_words(fb_last_error(), "/nonexistent");
        expect(fb__blas_open_in(&blas, 12080, folders) == FB_NO_DEVICE);
        expect(fb__blas_open_in(&blas, 13000, folders) == FB_OK);
        expect_words(blas.path, CUBLAS13);
    }
    mocks m = load();
    fb_desc d = describe(&problems[5]);
    fb_plan *plan = NULL;
    char words[8192];
    expect(fb_info(words, sizeof words) < sizeof words);
    expect_words(words, "cuBLAS 13.1.0");
    expect(fb_plan_create(&plan, &d) == FB_OK);
    expect(fb_plan_explain(plan, words, sizeof words) < sizeof words);
    expect_words(words, "products: cuBLAS 13.1.0, " CUBLAS13 ", 4096 bytes of workspace");
    expect_words(words, "scores: 1 matrix of 800 x 208 in f32");
    fb_plan_destroy(plan);
    for (m.cublas->unable = 1; m.cublas->unable < 3; m.cublas->unable++) {
        expect(fb_plan_create(&plan, &d) == FB_UNSUPPORTED && !plan);
        expect_words(fb_last_error(), "4 matrices of 200 x 64 by 64 x 203");
        expect_nothing_left(&m, &problems[5], 0);
    }
    d.score_bytes_max = 1000;
    expect(fb_supported(&d) == FB_UNSUPPORTED);
    expect_words(fb_last_error(), "score_bytes_max");
}

static void test_refusals(void **state) {
    (void)state;
    if (!is_installed("libcuda.so.1"))
        in_child(absent);
    in_child(refused);
    in_child(refused_products);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_lives), cmocka_unit_test(test_failures),
                                       cmocka_unit_test(test_refusals)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
