/* R14 and R19: bits that depend on nothing but the problem. Not on the number of threads, not on where
 * tensors lie, not on other callers of the same plan, not on the caller's floating-point mode, which comes
 * back as it was, as does errno. A batch entry has the bits of that entry alone wherever its keys are cut in
 * the same way: always with desc.tasks = 1, and up to 192 keys, which are never cut, with any. */
#include "robust.h"

#include <errno.h>
#include <fenv.h>
#include <math.h>
#include <pthread.h>

static const char *const cases[] = {
    "b2h4k2.q130k200.d32.causal",
    "b1h6k2.q150k333.d24v40.left40.right9",
    "b1h2k1.q300k700.d16",
    "b5h4k2.q130k150.d16.packed.causal",
    "b3h4k2.q100k130.d16.bias1h1k.dbias",
    "b3h4k2.q100k130.d16.biasb1qk.dbias.acc",
    "b3h4k2.q100k200.d16.bias11qk.dbias.causal",
    "b3h4k2.q100k130.d16.bias11q1.dbias",
    "b2h8k2.q5k2000.d16.causal",
    "b2h16k4.q1k3000.d32.sinks.dsinks",
    "b1h8k2.q8k1100.d16.bias1h1k.dbias",
    "b2h4k1.q100k200.d16.softcap5.sinks.dsinks.dlse.acc",
    "b5h2k2.q100k200.d16.lensq.lensk.mask11qk",
    "b2h2k2.q200k200.d16.block16x32bh",
    "b2h2k1.q70k500.d16.nodq",
};
enum { CASES = sizeof cases / sizeof *cases };

/* ---- Several callers, and the first -------------------------------------------------------------------- */

enum { CALLERS = 8, ROUNDS = 5 };

typedef struct caller {
    pthread_t thread;
    const fb_plan *plan; /* NULL: makes its own */
    fbh_case what;
    fb_route route;
    uint64_t digests[ROUNDS];
} caller;

static void *call(void *argument) {
    caller *c = argument;
    fbh_problem p;
    fb_plan *own = NULL;
    open_case(&p, &c->what, c->route, FBH_GUARD_NONE);
    p.desc.threads = 2;
    if (!c->plan && fb_plan_create(&own, &p.desc) != FB_OK)
        return NULL;
    for (int n = 0; n < ROUNDS; n++)
        c->digests[n] = run_plan(&p, c->plan ? c->plan : own);
    fb_plan_destroy(own);
    fbh_problem_destroy(&p);
    return NULL;
}

static void call_together(caller *callers) {
    for (int n = 0; n < CALLERS; n++)
        assert_int_equal(pthread_create(&callers[n].thread, NULL, call, &callers[n]), 0);
    for (int n = 0; n < CALLERS; n++)
        assert_int_equal(pthread_join(callers[n].thread, NULL), 0);
}

static void check_callers(const caller *callers, const char *when) {
    for (int n = 0; n < CALLERS; n++) {
        const uint64_t expected = run_case(&callers[n].what, callers[n].route, 1, FBH_GUARD_NONE);
        for (int r = 0; r < ROUNDS; r++)
            if (callers[n].digests[r] != expected)
                fail_msg("%s: %s, caller %d, round %d differs", when, callers[n].what.name, n, r);
    }
}

/* Runs first: nothing in the library, nor in OpenMP, has been used by this process. */
static void test_first_use(void **state) {
    (void)state;
    caller callers[CALLERS] = {0};
    for (int n = 0; n < CALLERS; n++) {
        callers[n].what = case_of(n % 2 ? "bf16" : "f32", cases[n]);
        callers[n].route = FB_FUSED;
    }
    call_together(callers);
    check_callers(callers, "first use");
}

static void test_shared_plan(void **state) {
    (void)state;
    static const char *const dtypes[] = {"f32", "f16", "f64"};
    for (int route = FB_FUSED; route <= FB_REFERENCE; route++) {
        const fbh_case c =
            case_of(dtypes[route % 3], route == FB_VECTOR ? "b2h8k2.q5k1000.d16.causal.dlse"
                                                          : "b2h4k2.q100k130.d16.bias1h1k.dbias");
        caller callers[CALLERS] = {0};
        fbh_problem p;
        open_case(&p, &c, (fb_route)route, FBH_GUARD_NONE);
        p.desc.threads = 2;
        fb_plan *plan = plan_of(&p);
        for (int n = 0; n < CALLERS; n++)
            callers[n] = (caller){.plan = plan, .what = c, .route = (fb_route)route};
        call_together(callers);
        check_callers(callers, "shared plan");
        fb_plan_destroy(plan);
        fbh_problem_destroy(&p);
    }
}

/* The sentence of an error is the caller's own. */
static void *fail_alone(void *argument) {
    fb_desc d;
    char expected[64];
    const int number = *(const int *)argument;
    fb_desc_init(&d, sizeof d);
    d.batch = -1 - number;
    snprintf(expected, sizeof expected, "desc.batch is %d,", -1 - number);
    for (int n = 0; n < 2000; n++)
        if (fb_supported(&d) != FB_INVALID || strncmp(fb_last_error(), expected, strlen(expected)) != 0)
            return argument;
    return NULL;
}

static void test_last_error(void **state) {
    (void)state;
    pthread_t threads[CALLERS];
    int numbers[CALLERS];
    for (int n = 0; n < CALLERS; n++) {
        numbers[n] = n;
        assert_int_equal(pthread_create(&threads[n], NULL, fail_alone, &numbers[n]), 0);
    }
    for (int n = 0; n < CALLERS; n++) {
        void *wrong;
        pthread_join(threads[n], &wrong);
        assert_null(wrong);
    }
}

/* What `#pragma omp parallel` becomes, in libgomp and in libomp; absent in builds without OpenMP. */
__attribute__((weak)) void GOMP_parallel(void (*body)(void *), void *argument, unsigned threads,
                                         unsigned flags);

static void call_from_team(void *argument) {
    caller *callers = argument;
    static int next;
    const int n = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED);
    if (n < CALLERS)
        call(&callers[n]);
}

static void test_inside_openmp(void **state) {
    (void)state;
    caller callers[CALLERS] = {0};
    if (!GOMP_parallel)
        skip();
    for (int n = 0; n < CALLERS; n++) {
        callers[n].what = case_of("f32", cases[CASES - 1 - n]);
        callers[n].route = n % 2 ? FB_FUSED : FB_UNFUSED;
    }
    GOMP_parallel(call_from_team, callers, CALLERS, 0);
    for (int n = 0; n < CALLERS; n++)
        if (!callers[n].digests[0]) /* OpenMP gave fewer threads */
            call(&callers[n]);
    check_callers(callers, "inside a parallel region");
}

/* ---- Threads and places -------------------------------------------------------------------------------- */

static void check_threads(const fbh_case *c, fb_route route) {
    static const int threads[] = {2, 3, 16, 0};
    const uint64_t expected = run_case(c, route, 1, FBH_GUARD_NONE);
    for (int n = 0; n < 4; n++)
        if (run_case(c, route, threads[n], FBH_GUARD_NONE) != expected)
            fail_msg("%s, %s: %d threads give other bits than 1", c->name, fb_route_name(route), threads[n]);
}

static void test_threads(void **state) {
    (void)state;
    static const char *const dtypes[] = {"f32", "bf16", "f64", "f16"};
    for (int n = 0; n < CASES; n++)
        for (int two = 0; two < 2; two++) {
            const fbh_case c = case_of(dtypes[(n + two) % 4], cases[n]);
            for (int route = FB_FUSED; route <= FB_REFERENCE; route++)
                if (fbh_route_fits(&c, (fb_route)route))
                    check_threads(&c, (fb_route)route);
        }
}

/* Instruction sets that differ in bf16 only; where one is missing, the next lower one runs. */
static void test_threads_bf16(void **state) {
    (void)state;
#ifdef SANITIZED
    skip(); /* minutes for what other tests show them already */
#endif
    static const char *const isas[] = {"bfdot", "avx512bf16", "amx_model", "amx"};
    for (size_t isa = 0; isa < sizeof isas / sizeof *isas; isa++) {
        setenv("FLASHBACK_ISA", isas[isa], 1);
        for (int n = 0; n < CASES; n++) {
            const fbh_case c = case_of("bf16", cases[n]);
            for (int route = FB_FUSED; route <= FB_VECTOR; route++)
                if (fbh_route_fits(&c, (fb_route)route))
                    check_threads(&c, (fb_route)route);
        }
        unsetenv("FLASHBACK_ISA");
    }
}

/* Alignments, strides and the pages around. */
static void test_places(void **state) {
    (void)state;
    static const char *const layouts[] = {"", ".odd", ".padded", ".blhd"};
    static const char *const dtypes[] = {"f32", "bf16", "f64", "f16"};
    for (int n = 0; n < CASES; n++) {
        const fbh_case plain = case_of(dtypes[n % 4], cases[n]);
        for (int route = FB_FUSED; route <= FB_UNFUSED; route++) {
            if (!fbh_route_fits(&plain, (fb_route)route))
                continue;
            const uint64_t expected = run_case(&plain, (fb_route)route, 2, FBH_GUARD_NONE);
            for (int layout = 0; layout < 4; layout++)
                for (int guard = FBH_GUARD_NONE; guard <= FBH_GUARD_START; guard++) {
                    char name[FBH_NAME_SIZE];
                    snprintf(name, sizeof name, "%s%s", cases[n], layouts[layout]);
                    const fbh_case c = case_of(dtypes[n % 4], name);
                    if (run_case(&c, (fb_route)route, 2, (fbh_guard)guard) != expected)
                        fail_msg("%s, %s, guard %d: other bits than contiguous", c.name,
                                 fb_route_name((fb_route)route), guard);
                }
        }
    }
}

/* ---- Batch entries ------------------------------------------------------------------------------------- */

static void check_entries(const fbh_case *c, int tasks) {
    for (int route = FB_FUSED; route <= FB_REFERENCE; route++) {
        if (!fbh_route_fits(c, (fb_route)route))
            continue;
        fbh_problem p;
        open_case(&p, c, (fb_route)route, FBH_GUARD_NONE);
        p.desc.tasks = tasks;
        run(&p);
        for (int64_t b = 0; b < c->desc.batch; b++) {
            fbh_problem one;
            const fbh_case entry = alone(&p, b);
            open_case(&one, &entry, (fb_route)route, FBH_GUARD_NONE);
            one.desc.tasks = tasks;
            copy_entry(&p, &one, b, 0);
            run(&one);
            check_entry(&p, &one, b, 0);
            fbh_problem_destroy(&one);
        }
        fbh_problem_destroy(&p);
    }
}

static void test_batch_entries(void **state) {
    (void)state;
    const struct {
        const char *dtype, *name;
        int tasks;
    } rows[] = {{"f32", "b7h4k2.q100k192.d16.causal", 0}, {"bf16", "b5h2k1.q70k192.d16.packed.causal", 0},
                {"f16", "b3h4k2.q8k192.d16.left30", 0},   {"f32", "b3h4k2.q100k1000.d16.causal", 1},
                {"f32", "b3h8k2.q5k2000.d16", 1},         {"f64", "b5h2k1.q130k500.d16.packed", 1}};
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        const fbh_case c = case_of(rows[n].dtype, rows[n].name);
        check_entries(&c, rows[n].tasks);
    }
}

/* ---- The caller's state -------------------------------------------------------------------------------- */

#ifdef __x86_64__
/* Without the flags of exceptions that have happened. */
static unsigned mode_get(void) { return __builtin_ia32_stmxcsr() & ~0x3fu; }
static void mode_set(unsigned mode) { __builtin_ia32_ldmxcsr(mode); }
enum { FLUSH = 0x8040, NEAREST = 0x1f80, UP = 0x5f80, DOWN = 0x3f80, TO_ZERO = 0x7f80, UNMASKED = 0x1000 };
/* Flushing and denormals-are-zero; the four roundings; exceptions that would end the process. */
static const unsigned modes[] = {NEAREST | FLUSH, UP,       DOWN,
                                 TO_ZERO | FLUSH, UNMASKED, UNMASKED | FLUSH | 0x2000};
#else
static unsigned mode_get(void) { return (unsigned)fegetround(); }
static void mode_set(unsigned mode) { fesetround((int)mode); }
static const unsigned modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
#endif
enum { MODES = sizeof modes / sizeof *modes };

/* Both passes of a plan, made and run in the given mode; 0 if the mode or errno changes. */
static uint64_t run_in_mode(fbh_problem *p, unsigned mode) {
    uint64_t digest = 1;
    const unsigned usual = mode_get();
    fb_plan *plan;
    bool kept = true;
    mode_set(mode);
    errno = 77;
    const fb_status made = fb_plan_create(&plan, &p->desc);
    kept = kept && errno == 77 && mode_get() == mode;
    mode_set(usual);
    assert_int_equal(made, FB_OK);
    for (int pass = 0; pass < 2; pass++) {
        fb_io io;
        assert_int_equal(fbh_problem_ready(p, plan, (fbh_pass)pass), FB_OK);
        fbh_problem_io(p, (fbh_pass)pass, &io);
        mode_set(mode);
        errno = 77;
        const fb_status status = (pass ? fb_backward : fb_forward)(plan, &io);
        kept = kept && errno == 77 && mode_get() == mode;
        mode_set(usual);
        assert_int_equal(status, FB_OK);
        digest = digest * 31 + fbh_problem_digest(p, (fbh_pass)pass);
    }
    fb_plan_destroy(plan);
    return kept ? digest : 0;
}

/* 1/sqrt(24) is not a number of any precision, exp of -200 is below the normal range, rows are empty. */
static void test_floating_point_mode(void **state) {
    (void)state;
    static const char *const names[] = {"b2h4k2.q130k100.d24.causal", "b2h4k2.q100k130.d24.gain20.softcap50",
                                        "b2h4k2.q7k900.d24.causal.sinks.dsinks"};
    static const char *const dtypes[] = {"f32", "bf16", "f64"};
    for (int n = 0; n < 9; n++)
        for (int route = FB_FUSED; route <= FB_REFERENCE; route++) {
            const fbh_case c = case_of(dtypes[n / 3], names[n % 3]);
            if (!fbh_route_fits(&c, (fb_route)route))
                continue;
            const uint64_t expected = run_case(&c, (fb_route)route, 2, FBH_GUARD_NONE);
            for (int m = 0; m < MODES; m++) {
                fbh_problem p;
                open_case(&p, &c, (fb_route)route, FBH_GUARD_NONE);
                p.desc.threads = 2;
                const uint64_t digest = run_in_mode(&p, modes[m]);
                if (digest != expected)
                    fail_msg("%s, %s, mode 0x%x: %s", c.name, fb_route_name((fb_route)route), modes[m],
                             digest ? "other bits" : "the mode or errno is lost");
                fbh_problem_destroy(&p);
            }
        }
}

/* Refused calls and fb_merge keep errno and the mode as well. */
static void test_errno(void **state) {
    (void)state;
    const fbh_case c = case_of("f32", "b1h2k2.q9k2.d4.causal"); /* empty rows: ln 0 */
    fbh_problem a, b;
    fb_io io;
    open_case(&a, &c, FB_FUSED, FBH_GUARD_NONE);
    open_case(&b, &c, FB_FUSED, FBH_GUARD_NONE);
    run(&a);
    run(&b);
    fb_plan *plan = plan_of(&a), *none;
    const unsigned mode = mode_get();
    fb_desc wrong = a.desc;
    wrong.len_q = -1;
    errno = 77;
    assert_int_equal(fb_merge(plan, (fb_ref){a.t[FBH_OUT].buffer->data, 0},
                              (fb_ref){a.t[FBH_LSE].buffer->data, 0}, (fb_ref){b.t[FBH_OUT].buffer->data, 0},
                              (fb_ref){b.t[FBH_LSE].buffer->data, 0}, NULL),
                     FB_OK);
    assert_int_equal(errno, 77);
    fb_io_init(&io, sizeof io);
    assert_int_equal(fb_forward(plan, &io), FB_INVALID);
    assert_int_equal(fb_plan_create(&none, &wrong), FB_INVALID);
    setenv("FLASHBACK_SCORE_BYTES_MAX", "99999999999999999999", 1);
    assert_int_equal(fb_supported(&a.desc), FB_INVALID);
    unsetenv("FLASHBACK_SCORE_BYTES_MAX");
    assert_int_equal(errno, 77);
    assert_true(mode_get() == mode);
    fb_plan_destroy(plan);
    fbh_problem_destroy(&a);
    fbh_problem_destroy(&b);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_first_use),
        cmocka_unit_test(test_shared_plan),
        cmocka_unit_test(test_last_error),
        cmocka_unit_test(test_inside_openmp),
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_threads_bf16),
        cmocka_unit_test(test_places),
        cmocka_unit_test(test_batch_entries),
        cmocka_unit_test(test_floating_point_mode),
        cmocka_unit_test(test_errno),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
