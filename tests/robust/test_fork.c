/* R19: fork after use. A child of a process whose team of threads has run has none of those threads; it must
 * neither wait for them nor compute anything else. The alarm ends a child that hangs.
 *
 * Not under the address sanitizer: where the C library frees its locks in a child, gcc 12's sanitizer keeps
 * those of its allocator as some thread of a shrinking team held them, and the child waits in malloc for
 * ever. */
#include "robust.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUTES = FB_REFERENCE + 1, SECONDS = 120 };

/* Large enough for a team on each route. */
static const char *const names[ROUTES] = {"b2h4k2.q130k200.d16.causal", "b2h4k2.q130k200.d16.bias1h1k.dbias",
                                          "b2h8k2.q5k2000.d16.causal", "b2h4k2.q130k200.d16.sinks.dsinks",
                                          "b2h4k2.q130k200.d16.dlse"};

/* A problem, its plan and what it gives. */
typedef struct job {
    fbh_problem p;
    fb_plan *plan;
    uint64_t expected;
} job;

static void open_job(job *j, int route) {
    const fbh_case c = case_of(route % 2 ? "bf16" : "f32", names[route]);
    open_case(&j->p, &c, (fb_route)route, FBH_GUARD_NONE);
    j->p.desc.threads = 4;
    j->plan = plan_of(&j->p);
    j->expected = run_case(&c, (fb_route)route, 1, FBH_GUARD_NONE);
}

static void close_job(job *j) {
    fb_plan_destroy(j->plan);
    fbh_problem_destroy(&j->p);
}

/* The job's plan of before the fork, and one made now. No cmocka here: a child reports by its exit status. */
static bool holds(job *j) {
    fb_plan *fresh;
    if (run_plan(&j->p, j->plan) != j->expected || fb_plan_create(&fresh, &j->p.desc) != FB_OK)
        return false;
    const bool same = run_plan(&j->p, fresh) == j->expected;
    fb_plan_destroy(fresh);
    return same;
}

/* Runs the body in a child; its children too may fork, `depth` times. */
static bool in_child(job *j, int depth) {
    const pid_t child = fork();
    if (child < 0)
        return false;
    if (child == 0) {
        alarm(SECONDS);
        const bool good = holds(j) && (depth == 0 || in_child(j, depth - 1)) && holds(j);
        _exit(good ? 0 : 1);
    }
    int status;
    return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

static void check_route(int route) {
    job j;
    open_job(&j, route);
    /* The plan has not run yet, then it has, with a team. */
    assert_true(in_child(&j, 0));
    assert_true(holds(&j));
    assert_true(in_child(&j, 1));
    assert_true(holds(&j)); /* the parent's team still works */
    close_job(&j);
}

static void test_routes(void **state) {
    (void)state;
    for (int route = FB_AUTO; route < ROUTES; route++)
        check_route(route);
}

/* Several children at once. */
static void test_siblings(void **state) {
    (void)state;
    enum { CHILDREN = 4 };
    job j;
    pid_t children[CHILDREN];
    open_job(&j, FB_FUSED);
    assert_true(holds(&j));
    for (int n = 0; n < CHILDREN; n++) {
        children[n] = fork();
        assert_true(children[n] >= 0);
        if (children[n] == 0) {
            alarm(SECONDS);
            _exit(holds(&j) ? 0 : 1);
        }
    }
    assert_true(holds(&j));
    for (int n = 0; n < CHILDREN; n++) {
        int status;
        assert_int_equal(waitpid(children[n], &status, 0), children[n]);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    close_job(&j);
}

/* What `#pragma omp parallel` becomes, in libgomp and in libomp; absent in builds without OpenMP. */
__attribute__((weak)) void GOMP_parallel(void (*body)(void *), void *argument, unsigned threads,
                                         unsigned flags);

static void count(void *counter) { __atomic_fetch_add((int *)counter, 1, __ATOMIC_RELAXED); }

/* The process has a team of its own, which the library did not make. */
static void test_after_own_team(void **state) {
    (void)state;
    job j;
    int members = 0;
    if (!GOMP_parallel)
        skip();
    open_job(&j, FB_FUSED);
    GOMP_parallel(count, &members, 4, 0);
    assert_true(members >= 1);
    assert_true(in_child(&j, 0));
    GOMP_parallel(count, &members, 4, 0);
    assert_true(holds(&j));
    close_job(&j);
}

int main(void) {
#ifdef SANITIZED
    puts("skipped: the sanitizer's own locks do not survive a fork");
    return 0;
#endif
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_after_own_team), /* first: the library has run no team yet */
        cmocka_unit_test(test_routes),
        cmocka_unit_test(test_siblings),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
