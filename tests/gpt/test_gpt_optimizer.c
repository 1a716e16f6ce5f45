/* AdamW against its formula in double, the corners of the schedule, clipping, and bits that do not depend on
 * the number of threads. */
#include "examples/gpt/optimizer.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

/* Bounds below count roundings of a float, each half of this. */
static const double epsilon = (double)FLT_EPSILON;

/* Uniform in [-1, 1). */
static float draw(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*state >> 33) / 1073741824.0 - 1);
}

static void expect_near(double got, double expected, double bound, const char *what, int64_t i) {
    if (!(fabs(got - expected) <= bound))
        fail_msg("%s %lld is %.9g, expected %.9g within %.3g", what, (long long)i, got, expected, bound);
}

/* ---- The schedule ---------------------------------------------------------------------------------- */

static void test_schedule(void **state) {
    (void)state;
    const double peak = (double)0.003f;
    const struct {
        int64_t step, steps, warmup;
        double rate;
    } rows[] = {
        {0, 1000, 100, peak / 100},    /* the first step is none of rate 0 */
        {49, 1000, 100, peak / 2},     /* half-way up */
        {99, 1000, 100, peak},         /* the last step of the rise */
        {100, 1000, 100, peak},        /* the first of the fall */
        {550, 1000, 100, 0.55 * peak}, /* half-way between 1 and a tenth */
        {325, 1000, 100, peak * (0.1 + 0.45 * (1 + sqrt(0.5)))},
        {1000, 1000, 100, peak / 10},
        {5000, 1000, 100, peak / 10}, /* after the end it stays */
        {0, 1000, 0, peak},           /* no rise */
        {500, 1000, 0, 0.55 * peak},
        {0, 10, 20, peak / 20}, /* the end comes first */
        {9, 10, 20, peak / 2},
        {0, 1, 0, peak},
        {1, 1, 1, peak / 10},
        {0, 0, 0, peak / 10},
        {INT64_MAX, INT64_MAX, 0, peak / 10},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        expect_near((double)learning_rate(rows[i].step, rows[i].steps, rows[i].warmup, 0.003f), rows[i].rate,
                    2 * epsilon * peak, "the rate of row", (int64_t)i);
    for (int64_t step = 1; step <= 1000; step++) {
        const float before = learning_rate(step - 1, 1000, 100, 0.003f);
        const float now = learning_rate(step, 1000, 100, 0.003f);
        assert_true(step < 100 ? now > before : now <= before);
        assert_true(fabs((double)now - (double)before) <= peak * (0.01 + 2 * epsilon)); /* no jumps */
    }
}

/* ---- Clipping -------------------------------------------------------------------------------------- */

static void test_norm(void **state) {
    (void)state;
    float ones[4096], numbers[4096];
    uint64_t seed = 1;
    double squares = 0;
    for (int64_t n = 0; n <= 4096; n++) { /* every remainder of the parts */
        for (int64_t i = 0; i < 4096; i++)
            ones[i] = i < n ? 1 : 1e30f;
        assert_true(clip_gradients(n, ones, 1e9) == sqrt((double)n));
    }
    for (int i = 0; i < 4096; i++) {
        numbers[i] = draw(&seed) * 1e20f; /* a square overflows a float */
        squares += (double)numbers[i] * (double)numbers[i];
    }
    expect_near(clip_gradients(4096, numbers, 1e30), sqrt(squares), 1e-12 * sqrt(squares), "the norm", 0);
}

static void test_clip(void **state) {
    (void)state;
    float g[1001], before[1001];
    uint64_t seed = 2;
    for (int i = 0; i < 1001; i++)
        before[i] = g[i] = draw(&seed);
    const double norm = clip_gradients(1000, g, 1e3);
    assert_memory_equal(g, before, sizeof g); /* small enough */
    assert_true(clip_gradients(1000, g, norm) == norm);
    assert_memory_equal(g, before, sizeof g); /* just small enough */
    assert_true(clip_gradients(1000, g, 0.9 * norm) == norm);
    for (int i = 0; i < 1000; i++)
        expect_near((double)g[i], (double)before[i] * 0.9, epsilon * fabs((double)g[i]), "gradient", i);
    assert_true(g[1000] == before[1000]); /* not one of them */
    expect_near(clip_gradients(1000, g, norm), 0.9 * norm, epsilon * norm, "the norm afterwards", 0);

    memset(g, 0, sizeof g);
    assert_true(clip_gradients(1000, g, 1) == 0);
    assert_true(clip_gradients(0, NULL, 1) == 0);
}

static void test_clip_not_finite(void **state) {
    (void)state;
    float g[100], before[100];
    for (int i = 0; i < 100; i++)
        g[i] = 3;
    g[40] = NAN;
    memcpy(before, g, sizeof g);
    assert_true(isnan(clip_gradients(100, g, 1)));
    assert_memory_equal(g, before, sizeof g);
    g[40] = before[40] = -INFINITY;
    assert_true(isinf(clip_gradients(100, g, 1)));
    assert_memory_equal(g, before, sizeof g);
}

/* ---- AdamW ----------------------------------------------------------------------------------------- */

/* A gap between the matrices and one after them belong to no one. */
enum { ROWS = 7, COLS = 5, GAIN_AT = 40, GAIN = 9, FLOATS = 50 };

static bool in_matrix(int i) { return i < ROWS * COLS; }
static bool in_gain(int i) { return i >= GAIN_AT && i < GAIN_AT + GAIN; }

typedef struct run {
    gpt_matrix matrices[2];
    gpt_layout layout;
    float g[FLOATS], w[FLOATS], m[FLOATS], v[FLOATS];
} run;

static void start(run *r, uint64_t seed) {
    *r = (run){.matrices = {{"matrix", ROWS, COLS, 0, true}, {"gain", 1, GAIN, GAIN_AT, false}}};
    r->layout = (gpt_layout){r->matrices, 2, FLOATS};
    for (int i = 0; i < FLOATS; i++)
        r->w[i] = draw(&seed);
}

/* One step from the floats of `old` in double; bounds follow the roundings of each term. */
static void check_step(const run *old, const run *new, const adamw *a, int64_t step, float rate) {
    const double b1 = (double)a->beta1, b2 = (double)a->beta2, r = (double)rate;
    const double c1 = 1 - pow(b1, (double)step), c2 = 1 - pow(b2, (double)step);
    for (int i = 0; i < FLOATS; i++) {
        if (!in_matrix(i) && !in_gain(i)) {
            assert_true(new->w[i] == old->w[i] && new->m[i] == old->m[i] && new->v[i] == old->v[i]);
            continue;
        }
        const double g = (double)new->g[i], w = (double)old->w[i];
        const double decay = in_matrix(i) ? (double)a->decay : 0;
        const double m = b1 * (double)old->m[i] + (1 - b1) * g, v = b2 * (double)old->v[i] + (1 - b2) * g * g;
        const double below = sqrt(v / c2) + (double)a->epsilon;
        const double m_bound = 2 * epsilon * (fabs(b1 * (double)old->m[i]) + fabs((1 - b1) * g));
        const double along = m / c1 / below, along_bound = m_bound / c1 / below + 5 * epsilon * fabs(along);
        const double w_bound = r * (along_bound + 3 * epsilon * decay * fabs(w)) + epsilon * fabs(w);
        expect_near((double)new->m[i], m, m_bound, "m", i);
        expect_near((double)new->v[i], v, 3 * epsilon * v, "v", i);
        expect_near((double)new->w[i], w - r * (along + decay * w), w_bound, "w", i);
    }
}

static void test_adamw(void **state) {
    (void)state;
    static const adamw kinds[] = {{0.9f, 0.95f, 1e-8f, 0.1f},
                                  {0.9f, 0.999f, 1e-3f, 0.01f},
                                  {0, 0, 1e-8f, 0.5f},
                                  {0.5f, 0.9f, 1e-6f, 0}};
    for (size_t kind = 0; kind < sizeof kinds / sizeof *kinds; kind++) {
        run r;
        uint64_t seed = 3 + kind;
        start(&r, 7);
        for (int64_t n = 1; n <= 60; n++) {
            const int64_t step = n <= 50 ? n : n * 100000; /* corrections that have come to an end */
            const float rate = 0.1f / (float)n;
            for (int i = 0; i < FLOATS; i++)
                r.g[i] = draw(&seed) * (i % 3 ? 1 : 1e-6f);
            const run old = r;
            adamw_step(&kinds[kind], &r.layout, step, rate, r.g, r.w, r.m, r.v);
            check_step(&old, &r, &kinds[kind], step, rate);
            assert_memory_equal(r.g, old.g, sizeof r.g);
        }
    }
}

/* What is known without a formula: the first step goes as far as the rate says, whatever the size of the
 * gradient; without a gradient there is only decay, and only of matrices. */
static void test_adamw_by_hand(void **state) {
    (void)state;
    const adamw plain = {0.9f, 0.95f, 0, 0}, decays = {0.9f, 0.95f, 1e-8f, 0.5f};
    run r;
    start(&r, 8);
    for (int i = 0; i < FLOATS; i++)
        r.w[i] = 1, r.g[i] = (i % 2 ? 1e-9f : -1e9f);
    adamw_step(&plain, &r.layout, 1, 0.25f, r.g, r.w, r.m, r.v);
    for (int i = 0; i < FLOATS; i++)
        expect_near((double)r.w[i],
                    !in_matrix(i) && !in_gain(i) ? 1
                    : i % 2                      ? 0.75
                                                 : 1.25,
                    4 * epsilon, "w", i);

    start(&r, 9);
    for (int i = 0; i < FLOATS; i++)
        r.w[i] = 2;
    adamw_step(&decays, &r.layout, 1, 0.25f, r.g, r.w, r.m, r.v);
    for (int i = 0; i < FLOATS; i++)
        assert_true(r.w[i] == (in_matrix(i) ? 1.75f : 2) && r.m[i] == 0 && r.v[i] == 0);
}

/* ---- Threads --------------------------------------------------------------------------------------- */

/* Bits of a clipped step over more floats than any chunk of a runtime. Run by a process of its own: the
 * number of threads is read where OpenMP starts. */
static uint64_t digest(void) {
    enum { COUNT = 100003 };
    static float g[COUNT], w[COUNT], m[COUNT], v[COUNT];
    gpt_matrix matrix = {"matrix", 1, COUNT, 0, true};
    const gpt_layout layout = {&matrix, 1, COUNT};
    const adamw a = {0.9f, 0.95f, 1e-8f, 0.1f};
    uint64_t seed = 4, hash = 14695981039346656037u;
    for (int64_t step = 1; step <= 3; step++) {
        for (int i = 0; i < COUNT; i++)
            g[i] = draw(&seed);
        const double norm = clip_gradients(COUNT, g, 1);
        adamw_step(&a, &layout, step, 0.1f, g, w, m, v);
        const void *const parts[] = {&norm, w, m, v};
        for (int part = 0; part < 4; part++)
            for (size_t i = 0; i < (part ? sizeof w : sizeof norm); i++)
                hash = (hash ^ ((const unsigned char *)parts[part])[i]) * 1099511628211u;
    }
    return hash;
}

static void test_threads(void **state) {
    (void)state;
    char self[4096], command[4200], answer[64], expected[64];
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    assert_true(length > 0);
    self[length] = 0;
    snprintf(expected, sizeof expected, "%llu\n", (unsigned long long)digest());
    for (int threads = 1; threads <= 7; threads += 2) {
        snprintf(command, sizeof command, "OMP_NUM_THREADS=%d '%s' digest", threads, self);
        FILE *f = popen(command, "r");
        assert_non_null(f);
        assert_non_null(fgets(answer, sizeof answer, f));
        assert_int_equal(pclose(f), 0);
        assert_string_equal(answer, expected);
    }
}

int main(int count, char **arguments) {
    if (count == 2 && !strcmp(arguments[1], "digest"))
        return printf("%llu\n", (unsigned long long)digest()) < 0;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_schedule), cmocka_unit_test(test_norm),
        cmocka_unit_test(test_clip),     cmocka_unit_test(test_clip_not_finite),
        cmocka_unit_test(test_adamw),    cmocka_unit_test(test_adamw_by_hand),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
