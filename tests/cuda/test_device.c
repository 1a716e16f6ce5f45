/* On a real GPU: what a list of cases cannot show. Bits that stay the same over many runs, capture into a
 * graph and replay, two streams and two threads at once, offsets beyond 2^31, more batches than a grid has
 * rows, the caller's context. Skipped, and says so, where there is no GPU; tools/check_gpu.sh runs it where
 * there is one. */
#include "harness/harness.h"

#include <dlfcn.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

#define COMMON "b2h4k2.q200k200.d64.causal"

/* ---- The driver, for streams and graphs ---- */

#define DRIVER(X)                                                                                            \
    X(cuInit, "cuInit", (unsigned flags))                                                                    \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (void **context, int device))                    \
    X(cuCtxSetCurrent, "cuCtxSetCurrent", (void *context))                                                   \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", (void **context))                                                  \
    X(cuStreamCreate, "cuStreamCreate", (void **stream, unsigned flags))                                     \
    X(cuStreamSynchronize, "cuStreamSynchronize", (void *stream))                                            \
    X(cuStreamBeginCapture, "cuStreamBeginCapture_v2", (void *stream, int mode))                             \
    X(cuStreamEndCapture, "cuStreamEndCapture", (void *stream, void **graph))                                \
    X(cuGraphInstantiate, "cuGraphInstantiateWithFlags",                                                     \
      (void **exec, void *graph, unsigned long long flags))                                                  \
    X(cuGraphLaunch, "cuGraphLaunch", (void *exec, void *stream))

static struct {
#define X(name, symbol, parameters) int(*name) parameters;
    DRIVER(X)
#undef X
    void *context;
} cu;

/* The context is kept to the end: making one takes a tenth of a second. */
static int open_driver(void **state) {
    (void)state;
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library)
        return 0;
#define X(name, symbol, parameters) *(void **)&cu.name = dlsym(library, symbol);
    DRIVER(X)
#undef X
    if (cu.cuInit(0) || cu.cuDevicePrimaryCtxRetain(&cu.context, 0))
        cu.context = NULL;
    return 0;
}

static void need_gpu(void) {
    if (cu.context)
        return;
    print_message("no GPU on this machine\n");
    skip();
}

#define ok(call) assert_int_equal(call, 0)

/* ---- Problems ---- */

static void open_problem(fbh_problem *p, const char *name, uint64_t seed) {
    fbh_case c;
    char error[256];
    if (!fbh_case_parse(&c, name, error, sizeof error))
        fail_msg("%s: %s", name, error);
    fbh_problem_create(p, &c, FB_CUDA, 0, FBH_GUARD_NONE, false);
    fbh_problem_fill(p, seed);
}

static fb_plan *plan_of(const fbh_problem *p) {
    fb_plan *plan;
    if (fb_plan_create(&plan, &p->desc) != FB_OK)
        fail_msg("%s: %s", p->what.name, fb_last_error());
    return plan;
}

/* Both passes by the usual way; a hash of all outputs. */
static uint64_t run(fbh_problem *p, const fb_plan *plan) {
    uint64_t digest = 1;
    for (int pass = 0; pass < 2; pass++) {
        if (fbh_problem_run(p, plan, (fbh_pass)pass) != FB_OK)
            return 0;
        digest = digest * 31 + fbh_problem_digest(p, (fbh_pass)pass);
    }
    return digest;
}

/* Bits: on sm_90a without `det` at most two blocks add to the same dQ, which has one result. */
static const char *const names[] = {
    "bf16." COMMON, "f32." COMMON, "f16.b2h4k2.q7k600.d64.causal",
    "bf16.b2h4k2.q150k170.d128.left40.right9.sinks.dsinks.bias1h1k.dbias.det"};
enum { NAMES = sizeof names / sizeof *names };

/* ---- Tests ---- */

static void test_bits(void **state) {
    (void)state;
    need_gpu();
    for (int n = 0; n < NAMES; n++) {
        fbh_problem p;
        open_problem(&p, names[n], 1);
        fb_plan *plan = plan_of(&p);
        const uint64_t first = run(&p, plan);
        assert_true(first);
        for (int again = 0; again < 250; again++)
            if (run(&p, plan) != first)
                fail_msg("%s: other bits in repetition %d", names[n], again);
        fb_plan_destroy(plan);
        fbh_problem_destroy(&p);
    }
}

/* One pass on a stream, without waiting. */
static void queue(fbh_problem *p, const fb_plan *plan, fbh_pass pass, void *stream) {
    fb_io io;
    fbh_problem_io(p, pass, &io);
    io.stream = stream;
    if ((pass == FBH_FORWARD ? fb_forward : fb_backward)(plan, &io) != FB_OK)
        fail_msg("%s: %s", p->what.name, fb_last_error());
}

static void *capture(fbh_problem *p, const fb_plan *plan, fbh_pass pass, void *stream) {
    void *graph, *exec;
    ok(cu.cuStreamBeginCapture(stream, 0));
    queue(p, plan, pass, stream);
    ok(cu.cuStreamEndCapture(stream, &graph));
    ok(cu.cuGraphInstantiate(&exec, graph, 0));
    return exec;
}

/* Outputs are poisoned before each replay. */
static void test_graph(void **state) {
    (void)state;
    need_gpu();
    void *stream;
    ok(cu.cuCtxSetCurrent(cu.context));
    ok(cu.cuStreamCreate(&stream, 1));
    for (int n = 0; n < NAMES; n++) {
        fbh_problem p;
        open_problem(&p, names[n], 2);
        fb_plan *plan = plan_of(&p);
        for (int pass = 0; pass < 2; pass++) {
            ok(fbh_problem_run(&p, plan, (fbh_pass)pass));
            const uint64_t direct = fbh_problem_digest(&p, (fbh_pass)pass);
            ok(fbh_problem_ready(&p, plan, (fbh_pass)pass));
            void *exec = capture(&p, plan, (fbh_pass)pass, stream);
            for (int again = 0; again < 3; again++) {
                ok(fbh_problem_ready(&p, plan, (fbh_pass)pass));
                ok(cu.cuGraphLaunch(exec, stream));
                ok(cu.cuStreamSynchronize(stream));
                ok(fbh_problem_done(&p));
                assert_true(fbh_problem_digest(&p, (fbh_pass)pass) == direct);
            }
        }
        fb_plan_destroy(plan);
        fbh_problem_destroy(&p);
    }
}

static void test_streams(void **state) {
    (void)state;
    need_gpu();
    void *streams[2];
    fbh_problem p[2];
    fb_plan *plans[2];
    uint64_t want[2];
    ok(cu.cuCtxSetCurrent(cu.context));
    for (int n = 0; n < 2; n++) {
        ok(cu.cuStreamCreate(&streams[n], 1));
        open_problem(&p[n], "bf16.b2h8k4.q500k500.d64.causal.det", 3 + (uint64_t)n);
        plans[n] = plan_of(&p[n]);
        ok(fbh_problem_run(&p[n], plans[n], FBH_FORWARD));
        ok(fbh_problem_run(&p[n], plans[n], FBH_BACKWARD));
        want[n] = fbh_problem_digest(&p[n], FBH_BACKWARD);
    }
    for (int again = 0; again < 20; again++) {
        for (int n = 0; n < 2; n++)
            ok(fbh_problem_ready(&p[n], plans[n], FBH_BACKWARD));
        for (int n = 0; n < 2; n++)
            queue(&p[n], plans[n], FBH_BACKWARD, streams[n]);
        for (int n = 0; n < 2; n++) {
            ok(cu.cuStreamSynchronize(streams[n]));
            ok(fbh_problem_done(&p[n]));
            assert_true(fbh_problem_digest(&p[n], FBH_BACKWARD) == want[n]);
        }
    }
    for (int n = 0; n < 2; n++) {
        fb_plan_destroy(plans[n]);
        fbh_problem_destroy(&p[n]);
    }
}

/* One plan, two threads with a workspace each. */
typedef struct job {
    const fb_plan *plan;
    fbh_problem p;
    uint64_t want, wrong;
} job;

static void *work(void *argument) {
    job *j = argument;
    for (int again = 0; again < 50; again++)
        j->wrong += run(&j->p, j->plan) != j->want;
    return NULL;
}

static void test_threads(void **state) {
    (void)state;
    need_gpu();
    job jobs[2];
    pthread_t threads[2];
    for (int n = 0; n < 2; n++)
        open_problem(&jobs[n].p, "bf16." COMMON, 5 + (uint64_t)n);
    fb_plan *plan = plan_of(&jobs[0].p);
    for (int n = 0; n < 2; n++) {
        jobs[n].plan = plan, jobs[n].wrong = 0, jobs[n].want = run(&jobs[n].p, plan);
        assert_true(jobs[n].want);
    }
    for (int n = 0; n < 2; n++)
        ok(pthread_create(&threads[n], NULL, work, &jobs[n]));
    for (int n = 0; n < 2; n++) {
        ok(pthread_join(threads[n], NULL));
        assert_int_equal(jobs[n].wrong, 0);
        fbh_problem_destroy(&jobs[n].p);
    }
    fb_plan_destroy(plan);
}

/* Two sequences more than 2^31 elements apart give what they give side by side. */
static void test_far_apart(void **state) {
    (void)state;
    need_gpu();
    enum { LEN = 130, DIM = 64, BYTES = 2 * LEN * DIM * 2 };
    const int64_t far = (INT64_C(1) << 31) + 64, near = LEN * DIM;
    uint16_t *in = fbh_make(1, BYTES), *out[2] = {fbh_make(1, BYTES), fbh_make(1, BYTES)};
    for (int n = 0; n < 2 * LEN * DIM; n++)
        in[n] = fbh_to_bf16(fbh_normal(7, (uint64_t)n));
    for (int which = 0; which < 2; which++) {
        const int64_t apart = which ? far : near;
        const size_t bytes = (size_t)(apart + near) * 2;
        fb_desc d;
        fb_io io;
        fb_plan *plan;
        fb_ref tensor, result;
        fb_desc_init(&d, sizeof d);
        fb_io_init(&io, sizeof io);
        d.device = FB_CUDA, d.dtype = FB_BF16, d.flags = FB_FORWARD_ONLY, d.batch = 2,
        d.heads_q = d.heads_kv = 1;
        d.len_q = d.len_k = LEN, d.head_dim = d.head_dim_v = DIM;
        d.q = d.k = d.v = d.out = (fb_strides){apart, apart, DIM};
        ok(fb_plan_create(&plan, &d));
        ok(fb_alloc(&tensor, FB_CUDA, 0, bytes));
        ok(fb_alloc(&result, FB_CUDA, 0, bytes));
        io.workspace_size = fb_plan_workspace(plan);
        ok(fb_alloc(&io.workspace, FB_CUDA, 0, io.workspace_size));
        for (int b = 0; b < 2; b++)
            ok(fb_write((fb_ref){tensor.data, (uint64_t)(b * apart) * 2}, in + b * near, BYTES / 2, FB_CUDA,
                        0));
        io.q = io.k = io.v = tensor, io.out = result;
        ok(fb_forward(plan, &io));
        for (int b = 0; b < 2; b++)
            ok(fb_read(out[which] + b * near, (fb_ref){result.data, (uint64_t)(b * apart) * 2}, BYTES / 2,
                       FB_CUDA, 0));
        fb_plan_destroy(plan);
        fb_free(&io.workspace, FB_CUDA, 0), fb_free(&tensor, FB_CUDA, 0), fb_free(&result, FB_CUDA, 0);
    }
    assert_memory_equal(out[0], out[1], BYTES);
    free(in), free(out[0]), free(out[1]);
}

/* A grid has 65,535 rows in its second dimension; batches are not counted there. */
static void test_many_batches(void **state) {
    (void)state;
    need_gpu();
    fbh_problem p;
    open_problem(&p, "f32.b70000h1k1.q3k4.d8.causal", 8);
    fb_plan *plan = plan_of(&p);
    fbh_problem want, low;
    char error[512] = "", message[512] = "";
    assert_true(run(&p, plan));
    assert_true(fbh_expect(&want, &low, &p, error, sizeof error));
    for (int pass = 0; pass < 2; pass++)
        if (!fbh_compare(&p, &want, &low, (fbh_pass)pass, NULL, message, sizeof message))
            fail_msg("%s", message);
    fb_plan_destroy(plan);
    fbh_problem_destroy(&p), fbh_problem_destroy(&want), fbh_problem_destroy(&low);
}

/* R19: the caller's current context is left as found. */
static void test_context(void **state) {
    (void)state;
    need_gpu();
    void *contexts[] = {NULL, cu.context}, *after;
    for (int n = 0; n < 2; n++) {
        ok(cu.cuCtxSetCurrent(contexts[n]));
        fbh_problem p;
        open_problem(&p, "f16." COMMON, 9);
        fb_plan *plan = plan_of(&p);
        assert_true(run(&p, plan));
        fb_plan_destroy(plan);
        fbh_problem_destroy(&p);
        ok(cu.cuCtxGetCurrent(&after));
        assert_ptr_equal(after, contexts[n]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bits),    cmocka_unit_test(test_graph),     cmocka_unit_test(test_streams),
        cmocka_unit_test(test_threads), cmocka_unit_test(test_far_apart), cmocka_unit_test(test_many_batches),
        cmocka_unit_test(test_context),
    };
    return cmocka_run_group_tests(tests, open_driver, NULL);
}
