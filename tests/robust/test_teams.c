/* R20: more threads than the system can start, and calls from within a parallel region, end well and give the
 * same bits. */
#include "robust.h"

#include <sys/resource.h>
#include <unistd.h>

/* Enough tasks for hundreds of threads, in every pass. */
static const char many_tasks[] = "b4h32k32.q130k200.d16.causal";

/* Bytes of address space in use. */
static size_t address_space(void) {
    size_t pages = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    if (!file || fscanf(file, "%zu", &pages) != 1)
        pages = 0;
    if (file)
        fclose(file);
    return pages * (size_t)sysconf(_SC_PAGESIZE);
}

/* The runtime ends the process if it is asked for threads that cannot be. */
static void test_no_room(void **state) {
    (void)state;
#ifdef SANITIZED
    skip(); /* their shadow memory leaves no sense in a limit on address space */
#endif
    /* 384 tasks; a thread takes 8 MiB of address space, and up to 64 for its heap. */
    const size_t room = (size_t)2 << 30;
    enum { THREADS = 1000 };
    const fbh_case c = case_of("f32", many_tasks);
    const uint64_t expected = run_case(&c, FB_FUSED, 1, FBH_GUARD_NONE);
    const size_t now = address_space();
    struct rlimit before, limit;
    assert_int_equal(getrlimit(RLIMIT_AS, &before), 0);
    assert_true(now > 0);
    limit = before;
    limit.rlim_cur = now + room;
    assert_int_equal(setrlimit(RLIMIT_AS, &limit), 0);
    const uint64_t first = run_case(&c, FB_FUSED, THREADS, FBH_GUARD_NONE);
    const uint64_t second = run_case(&c, FB_FUSED, THREADS, FBH_GUARD_NONE);
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);
    assert_true(first == expected && second == expected);
    assert_true(run_case(&c, FB_FUSED, 4, FBH_GUARD_NONE) == expected);
}

/* What `#pragma omp parallel` becomes, in libgomp and in libomp; absent in builds without OpenMP. */
__attribute__((weak)) void GOMP_parallel(void (*body)(void *), void *argument, unsigned threads,
                                         unsigned flags);

enum { MEMBERS = 4 };

/* Each member of the region has its own tensors and shares the plan. */
typedef struct region {
    fbh_problem p[MEMBERS];
    fb_plan *plan;
    uint64_t digest[MEMBERS];
    int next;
} region;

static void member(void *argument) {
    region *r = argument;
    const int i = __atomic_fetch_add(&r->next, 1, __ATOMIC_RELAXED);
    r->digest[i] = run_plan(&r->p[i], r->plan);
}

static void test_within_region(void **state) {
    (void)state;
    static const fb_route routes[] = {FB_FUSED, FB_UNFUSED, FB_REFERENCE};
    if (!GOMP_parallel)
        skip();
    const fbh_case c = case_of("f32", "b2h4k2.q130k200.d16.causal.bias1h1k.dbias");
    for (size_t n = 0; n < sizeof routes / sizeof *routes; n++) {
        region r = {.next = 0};
        const uint64_t expected = run_case(&c, routes[n], 1, FBH_GUARD_NONE);
        for (int i = 0; i < MEMBERS; i++) {
            open_case(&r.p[i], &c, routes[n], FBH_GUARD_NONE);
            r.p[i].desc.threads = 3;
        }
        r.plan = plan_of(&r.p[0]);
        GOMP_parallel(member, &r, MEMBERS, 0);
        assert_true(r.next >= 1);
        for (int i = 0; i < r.next; i++)
            if (r.digest[i] != expected)
                fail_msg("%s: member %d of %d: %llx, expected %llx", fb_route_name(routes[n]), i, r.next,
                         (unsigned long long)r.digest[i], (unsigned long long)expected);
        fb_plan_destroy(r.plan);
        for (int i = 0; i < MEMBERS; i++)
            fbh_problem_destroy(&r.p[i]);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_no_room),
        cmocka_unit_test(test_within_region),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
