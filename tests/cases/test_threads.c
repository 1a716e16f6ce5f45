/* Threads: bits that do not depend on them, calls from many at once, the race of the first calls.
 * Under the thread sanitizer the library runs without OpenMP; br_64's own threads are what it watches. */
#include "support.h"

#include <pthread.h>

/* ---- Calls from many threads at once ------------------------------------------------------------------- */

enum { THREADS = 8, ROUNDS = 40 };

static const char *const extras[] = {
    "",        ".causal",         ".softcap3.dlse", ".sinks.dsinks", ".lensk.left9", ".mask11qk",
    ".packed", ".bias1h1k.dbias", ".padded",        ".causal.odd",   ".blhd",        ".topleft.causal"};

/* One problem of a thread's series: lengths 1 to 300, mostly short; widths 8 to 128. */
static void name_job(int thread, int round, char *name, size_t size) {
    const uint64_t n = (uint64_t)(thread * ROUNDS + round);
    const int rows = 1 + (int)((n * 37) % (round % 8 ? 40 : 300)),
              keys = 1 + (int)((n * 53) % (round % 8 ? 90 : 300));
    snprintf(name, size, "%s.b%dh4k2.q%dk%d.d%d%s", type_name((thread + round) % TYPES), 1 + round % 2, rows,
             keys, 8 * (int)(1 + (n * 7) % 16), extras[n % (sizeof extras / sizeof *extras)]);
}

/* No cmocka here: a failure may jump in the main thread only. */
static uint64_t job(int thread, int round) {
    char name[FBH_NAME_SIZE], error[512];
    fbh_case what;
    fbh_problem p;
    fb_plan *plan;
    uint64_t found = 0;
    name_job(thread, round, name, sizeof name);
    if (!fbh_case_parse(&what, name, error, sizeof error))
        return 0;
    fbh_problem_create(&p, &what, FB_CPU, 0, FBH_GUARD_END, false);
    fbh_problem_fill(&p, 0);
    p.desc.route = round % 3 == 2 ? FB_UNFUSED : FB_AUTO;
    p.desc.threads = 1 + thread % 3;
    if (fb_plan_create(&plan, &p.desc) == FB_OK && fbh_problem_run(&p, plan, FBH_FORWARD) == FB_OK &&
        fbh_problem_intact(&p, FBH_FORWARD, error, sizeof error) &&
        fbh_problem_run(&p, plan, FBH_BACKWARD) == FB_OK &&
        fbh_problem_intact(&p, FBH_BACKWARD, error, sizeof error))
        found = digest(&p) | 1;
    fb_plan_destroy(plan);
    fbh_problem_destroy(&p);
    return found;
}

typedef struct series {
    pthread_barrier_t *start;
    int thread;
    uint64_t found[ROUNDS];
} series;

static void *run_series(void *context) {
    series *s = context;
    pthread_barrier_wait(s->start);
    for (int round = 0; round < ROUNDS; round++)
        s->found[round] = job(s->thread, round);
    return NULL;
}

/* This test stands first: the first calls of the process are made by all threads at once. */
static void br_64_concurrent_calls_from_several_threads(void **state) {
    (void)state;
    pthread_t threads[THREADS];
    pthread_barrier_t start;
    static series all[THREADS];
    assert_int_equal(pthread_barrier_init(&start, NULL, THREADS), 0);
    for (int n = 0; n < THREADS; n++) {
        all[n] = (series){.start = &start, .thread = n};
        assert_int_equal(pthread_create(&threads[n], NULL, run_series, &all[n]), 0);
    }
    for (int n = 0; n < THREADS; n++)
        assert_int_equal(pthread_join(threads[n], NULL), 0);
    pthread_barrier_destroy(&start);
    for (int n = 0; n < THREADS; n++)
        for (int round = 0; round < ROUNDS; round++) {
            name_job(n, round, here, sizeof here);
            expect(all[n].found[round] != 0, "fails among other threads");
            expect(all[n].found[round] == job(n, round), "differs from its serial run");
        }
}

/* One plan, many threads, each with its own tensors and workspace. */
typedef struct shared_run {
    const fb_plan *plan;
    fbh_problem p;
    bool ran;
} shared_run;

static void *run_shared(void *context) {
    shared_run *s = context;
    s->ran = true;
    for (int round = 0; round < 10 && s->ran; round++)
        s->ran = fbh_problem_run(&s->p, s->plan, FBH_FORWARD) == FB_OK &&
                 fbh_problem_run(&s->p, s->plan, FBH_BACKWARD) == FB_OK;
    return NULL;
}

static void br_64_one_plan_in_several_threads(void **state) {
    (void)state;
    for (int n = 0; n < 2 * TYPES; n++) {
        static shared_run all[THREADS];
        pthread_t threads[THREADS];
        const int rows = n % 2 ? 70 : 8;
        open_case(&all[0].p, "%s.b1h4k2.q%dk70.d24.causal", type_name(n / 2), rows);
        for (where w = EVERY_ROUTE; next_where(&w, &all[0].p.desc);) {
            fb_plan *plan = plan_at(&all[0].p, &w);
            for (int t = 0; t < THREADS; t++) {
                if (t && !all[t].p.live_rows)
                    open_case(&all[t].p, "%s.b1h4k2.q%dk70.d24.causal", type_name(n / 2), rows);
                all[t].plan = plan;
                assert_int_equal(pthread_create(&threads[t], NULL, run_shared, &all[t]), 0);
            }
            for (int t = 0; t < THREADS; t++) {
                assert_int_equal(pthread_join(threads[t], NULL), 0);
                expect(all[t].ran && digest(&all[t].p) == digest(&all[0].p),
                       "thread %d differs from thread 0", t);
            }
            fb_plan_destroy(plan);
        }
        for (int t = 0; t < THREADS; t++)
            fbh_problem_destroy(&all[t].p);
    }
}

/* ---- Bits and numbers of threads ----------------------------------------------------------------------- */

/* Also S2: a barrier inside a branch. Causal, lengths that are no multiple of a tile, many repetitions. */
static void br_60_races_in_backward(void **state) {
    (void)state;
    const char *const cases[] = {"f16.b4h1k1.q256k128.d64.gain3", "f32.b2h4k2.q77k203.d32.causal",
                                 "bf16.b1h4k1.q8k700.d64.causal", "f32.b1h4k1.q60k2000.d32",
                                 "f32.b3h4k2.q50k60.d16.bias11qk.dbias.sinks.dsinks"};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        fbh_problem p;
        answer a;
        open_case(&p, "%s", cases[n]);
        if (n == 0)
            set_all(&p.t[FBH_DOUT], 1);
        open_answer(&a, &p);
        p.desc.threads = 8;
        for (where w = EVERY_ROUTE; next_where(&w, &p.desc);) {
            run(&p, &w);
            agree(&p, &a);
            const uint64_t first = digest(&p);
            for (int repeat = 1; repeat < (w.route == FB_REFERENCE ? 3 : 20); repeat++) {
                run_pass(&p, &w, FBH_BACKWARD);
                expect(digest(&p) == first, "repetition %d differs", repeat);
            }
        }
        close_answer(&a);
        fbh_problem_destroy(&p);
    }
}

static void br_61_result_depends_on_thread_count(void **state) {
    (void)state;
    const char *const cases[] = {"b2h4k4.q100k100.d64", "b1h4k2.q100k600.d32.causal", "b1h2k1.q8k2000.d32",
                                 "b5h4k1.q100k90.d40.packed.causal",
                                 "b2h4k2.q60k60.d16.bias1h1k.dbias.sinks.dsinks"};
    const int threads[] = {1, 2, 3, 4, 7, 16};
    for (int type = FB_F32; type <= FB_BF16; type += 2)
        for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
            fbh_problem p;
            open_case(&p, "%s.%s", type_name(type), cases[n]);
            for (where w = EVERY_ROUTE; next_where(&w, &p.desc);) {
                uint64_t first = 0;
                for (size_t t = 0; t < sizeof threads / sizeof *threads; t++) {
                    p.desc.threads = threads[t];
                    run(&p, &w);
                    first = t ? first : digest(&p);
                    expect(digest(&p) == first, "%d threads give other bits than one", threads[t]);
                }
            }
            fbh_problem_destroy(&p);
        }
}

/* The items of a batch alone: at this length nothing is split, so the bits are the same. */
static void br_61_result_depends_on_batch_size(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int batch = 1; batch <= 12; batch += type ? 5 : 1)
            for (int rows = 8; rows <= 100; rows += 92) {
                fbh_problem p, one;
                open_case(&p, "%s.b%dh4k2.q%dk100.d64.causal", type_name(type), batch, rows);
                open_case(&one, "%s.b1h4k2.q%dk100.d64.causal", type_name(type), rows);
                for (where w = EVERY_ROUTE; next_where(&w, &p.desc);) {
                    run(&p, &w);
                    for (int64_t b = 0; b < batch; b += 1 + batch / 3) {
                        for (int id = FBH_Q; id <= FBH_DOUT; id++)
                            for (place at = START; next(&one.t[id], &at);)
                                set(&one.t[id], at, fbh_get(&p.t[id], b, at.h, at.i, at.d));
                        run(&one, &w);
                        for (int id = FBH_OUT; id <= FBH_DV; id++)
                            for (place at = START; next(&one.t[id], &at);)
                                expect_exactly(&one.t[id], at, fbh_get(&p.t[id], b, at.h, at.i, at.d));
                    }
                }
                fbh_problem_destroy(&p);
                fbh_problem_destroy(&one);
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(br_64_concurrent_calls_from_several_threads),
        cmocka_unit_test(br_64_one_plan_in_several_threads),
        cmocka_unit_test(br_60_races_in_backward),
        cmocka_unit_test(br_61_result_depends_on_thread_count),
        cmocka_unit_test(br_61_result_depends_on_batch_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
