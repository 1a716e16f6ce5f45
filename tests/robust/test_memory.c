/* Memory: what plans ask for stays linear in the length, the score matrices of the unfused route are refused
 * by their size, and a call allocates nothing. */
#include "robust.h"

/* ---- Allocations, counted: every malloc of the process comes through here -------------------------------
 */

static long allocations;

#if defined(__GLIBC__) && !defined(SANITIZED)
#define COUNTED
void *__libc_malloc(size_t size);
void *__libc_calloc(size_t count, size_t size);
void *__libc_realloc(void *old, size_t size);
void *__libc_memalign(size_t alignment, size_t size);
static void count(void) { __atomic_fetch_add(&allocations, 1, __ATOMIC_RELAXED); }
void *malloc(size_t size) {
    count();
    return __libc_malloc(size);
}
void *calloc(size_t number, size_t size) {
    count();
    return __libc_calloc(number, size);
}
void *realloc(void *old, size_t size) {
    count();
    return __libc_realloc(old, size);
}
int posix_memalign(void **at, size_t alignment, size_t size) {
    count();
    *at = __libc_memalign(alignment, size);
    return *at ? 0 : 12;
}
#endif

/* Allocations of one pass; the problem is ready. */
static long allocations_of(fbh_problem *p, const fb_plan *plan, fbh_pass pass) {
    fb_io io;
    assert_int_equal(fbh_problem_ready(p, plan, pass), FB_OK);
    fbh_problem_io(p, pass, &io);
    const long before = allocations;
    const fb_status status = (pass ? fb_backward : fb_forward)(plan, &io);
    const long after = allocations;
    assert_int_equal(status, FB_OK);
    return after - before;
}

/* One thread: none at all, from the first call on. A team: none once it has been started, unless the OpenMP
 * runtime allocates for itself in every parallel region, as that of clang does. */
#ifdef __clang__
enum { MOST_THREADS = 1 };
#else
enum { MOST_THREADS = 2 };
#endif

static void test_no_allocation(void **state) {
    (void)state;
#ifndef COUNTED
    skip();
#endif
    static const char *const names[] = {"b2h4k2.q130k200.d16.causal", "b2h4k2.q130k200.d16.bias1h1k.dbias",
                                        "b2h8k2.q5k2000.d16.sinks.dsinks", "b5h4k2.q130k200.d16.packed.dlse"};
    free(malloc(1));
    assert_true(allocations > 0);
    for (int n = 0; n < 4; n++)
        for (int route = FB_FUSED; route <= FB_REFERENCE; route++)
            for (int threads = 1; threads <= MOST_THREADS; threads++) {
                const fbh_case c = case_of(n % 2 ? "bf16" : "f32", names[n]);
                if (!fbh_route_fits(&c, (fb_route)route))
                    continue;
                fbh_problem p;
                open_case(&p, &c, (fb_route)route, FBH_GUARD_NONE);
                p.desc.threads = threads;
                fb_plan *plan = plan_of(&p);
                if (threads > 1)
                    run_plan(&p, plan);
                for (int pass = 0; pass < 2; pass++) {
                    const long made = allocations_of(&p, plan, (fbh_pass)pass);
                    if (made)
                        fail_msg("%s, %s, %d threads, %s: %ld allocations", c.name,
                                 fb_route_name((fb_route)route), threads, pass ? "backward" : "forward",
                                 made);
                }
                fb_plan_destroy(plan);
                fbh_problem_destroy(&p);
            }
}

/* ---- Sizes ----------------------------------------------------------------------------------------------
 */

static fb_desc long_causal(int64_t len) {
    fb_desc d;
    fb_desc_init(&d, sizeof d);
    d.batch = 1, d.heads_q = d.heads_kv = 8;
    d.len_q = d.len_k = len;
    d.head_dim = d.head_dim_v = 64;
    d.window = fb_window_causal();
    return d;
}

static size_t workspace_of(const fb_desc *d) {
    fb_plan *plan;
    if (fb_plan_create(&plan, d) != FB_OK)
        fail_msg("%s", fb_last_error());
    const size_t bytes = fb_plan_workspace(plan);
    fb_plan_destroy(plan);
    return bytes;
}

/* Outputs and workspace of 16,384 queries and keys in 8 heads, forward and backward, within 300 MB. */
static void test_long(void **state) {
    (void)state;
    fb_desc d = long_causal(16384);
    const size_t rows = 8 * 16384,
                 outputs = (4 * rows * 64 + rows) * sizeof(float); /* out, dq, dk, dv; lse */
    assert_true(outputs + workspace_of(&d) <= 300000000);
    d.threads = 32;
    assert_true(outputs + workspace_of(&d) <= 300000000);
    d.dtype = FB_BF16;
    assert_true(outputs / 2 + workspace_of(&d) <= 300000000);
}

/* S and dP, 4 bytes for each of 8 x 16,384 x 16,384 cells. */
static void test_unfused_refused(void **state) {
    (void)state;
    fb_desc d = long_causal(16384);
    d.route = FB_UNFUSED;
    assert_int_equal(fb_supported(&d), FB_UNSUPPORTED);
    assert_non_null(strstr(fb_last_error(), "17.18 GB (17179869184 bytes)"));
    assert_non_null(strstr(fb_last_error(), "FLASHBACK_SCORE_BYTES_MAX"));
    assert_non_null(strstr(fb_last_error(), "fused"));
    /* auto takes another route instead, however short fused_min_len calls the problem. */
    d.route = FB_AUTO, d.fused_min_len = 1 << 20;
    assert_true(workspace_of(&d) < 300000000);
}

/* score_bytes_max bounds what the unfused route takes for its score matrices, with few queries as well. */
static void test_score_bytes(void **state) {
    (void)state;
    const int64_t queries[] = {1, 5, 63, 64, 65, 1000};
    for (int n = 0; n < 6; n++) {
        fb_desc d = long_causal(1000);
        d.route = FB_UNFUSED, d.threads = 1, d.len_q = queries[n], d.len_k = 100000;
        d.flags = FB_FORWARD_ONLY;
        d.score_bytes_max = 8 * queries[n] * 100000 * 4;
        /* Scratch of one thread: K and V are used in place, masks of 64 queries. */
        const size_t scratch = (size_t)100000 * 64 * 4 * 2 + (1 << 20);
        if (fb_supported(&d) == FB_OK && workspace_of(&d) > (size_t)d.score_bytes_max + scratch)
            fail_msg("%d queries: a workspace of %zu bytes, but score_bytes_max is %lld", (int)queries[n],
                     workspace_of(&d), (long long)d.score_bytes_max);
    }
}

/* A run at 4,096: the process grows by the tensors and the workspace that it makes itself, not by more. */
static void test_growth(void **state) {
    (void)state;
#ifdef SANITIZED
    skip();
#endif
    fbh_problem p;
    const fbh_case c = case_of("f32", "b1h2k2.q4096k4096.d64.causal");
    open_case(&p, &c, FB_FUSED, FBH_GUARD_NONE);
    p.desc.threads = 2;
    fb_plan *plan = plan_of(&p);
    assert_true(run_plan(&p, plan) != 0); /* everything is touched, and a team runs */
    const size_t before = fbh_peak_rss();
    assert_true(run_plan(&p, plan) != 0);
    const size_t grown = fbh_peak_rss() - before, scores = (size_t)2 * 4096 * 4096 * 4;
    assert_true(grown < scores / 64);
    fb_plan_destroy(plan);
    fbh_problem_destroy(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_allocation),   cmocka_unit_test(test_long),
        cmocka_unit_test(test_unfused_refused), cmocka_unit_test(test_score_bytes),
        cmocka_unit_test(test_growth),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
