/* Route FB_REFERENCE and the rules that have an exact answer: empty rows, what NaN reaches, one rounding,
 * sizes of zero, accumulation, keys in parts, layouts and threads. */
#include "ref_problem.h"

#include <float.h>

static const double nan_value = (double)NAN;

/* ---- Empty rows ---------------------------------------------------------------------------------------- */

static void test_empty_rows(void **state) {
    (void)state;
    fbh_problem p;
    open_problem(&p, "f64.b1h2k1.q5k2.d4.causal"); /* queries 0 to 2 see no key */
    const fbh_tensor *t = p.t;
    for (place at = START; next(&t[FBH_DOUT], &at);)
        set(&t[FBH_DOUT], at, at.i < 3 ? nan_value : 0.5);
    run(&p);
    for (place at = START; next(&t[FBH_OUT], &at);) {
        double out = get(&t[FBH_OUT], at), lse = get(&t[FBH_LSE], at), dq = get(&t[FBH_DQ], at);
        if (at.i < 3)
            assert_true(out == 0 && !signbit(out) && lse == -HUGE_VAL && dq == 0);
        else
            assert_true(isfinite(out) && out != 0 && isfinite(lse) && isfinite(dq));
    }
    for (place at = START; next(&t[FBH_DV], &at);)
        assert_true(get(&t[FBH_DV], at) > 0 && isfinite(get(&t[FBH_DK], at)));
    fbh_problem_destroy(&p);
}

/* Where the sink is alone, O = 0 and LSE = sink; dsink gets dLSE, and nothing from dO. */
static void test_empty_rows_with_sinks(void **state) {
    (void)state;
    fbh_problem p;
    open_problem(&p, "f64.b1h2k1.q4k0.d4.sinks.dsinks.dlse");
    const fbh_tensor *t = p.t;
    for (place at = START; next(&t[FBH_DOUT], &at);)
        set(&t[FBH_DOUT], at, nan_value);
    for (place at = START; next(&t[FBH_DLSE], &at);)
        set(&t[FBH_DLSE], at, (double)(at.i + 1));
    run(&p);
    for (place at = START; next(&t[FBH_OUT], &at);) {
        assert_true(get(&t[FBH_OUT], at) == 0 && get(&t[FBH_DQ], at) == 0);
        assert_true(get(&t[FBH_LSE], at) == get(&t[FBH_SINKS], at));
        assert_true(get(&t[FBH_DSINKS], at) == 1 + 2 + 3 + 4);
    }
    fbh_problem_destroy(&p);
}

/* A sink of -inf is none: rows without a key are empty, and nothing comes from them. */
static void test_sink_of_minus_infinity(void **state) {
    (void)state;
    fbh_problem p;
    open_problem(&p, "f64.b1h2k1.q4k2.d4.causal.sinks.dsinks.dlse");
    const fbh_tensor *t = p.t;
    for (place at = START; next(&t[FBH_SINKS], &at);)
        set(&t[FBH_SINKS], at, -HUGE_VAL);
    for (place at = START; next(&t[FBH_DOUT], &at);)
        set(&t[FBH_DOUT], at, at.i < 2 ? nan_value : 0.5);
    run(&p);
    for (place at = START; next(&t[FBH_OUT], &at);) {
        assert_int_equal(get(&t[FBH_LSE], at) == -HUGE_VAL, at.i < 2);
        assert_true(get(&t[FBH_DSINKS], at) == 0 && isfinite(get(&t[FBH_DQ], at)));
    }
    fbh_problem_destroy(&p);
}

/* ---- NaN and infinity ---------------------------------------------------------------------------------- */

/* A value put into row 3, column 2 of the second head of q, k or v reaches the rows and columns that the
 * formula says; all others keep their bits. Causal: key 3 is seen by queries 3 to 7. Query heads 2 and 3 read
 * key/value head 1. */
static void check_reach(fbh_id input, double x) {
    fbh_problem clean, p;
    const char *const name = "f64.b2h4k2.q8k8.d4.causal";
    const bool of_q = input == FBH_Q, of_v = input == FBH_V;
    const fbh_tensor *t = p.t, *c = clean.t;
    open_problem(&clean, name);
    open_problem(&p, name);
    fbh_set(&t[input], 0, 1, 3, 2, x);
    run(&clean);
    run(&p);
    for (place at = START; next(&t[FBH_OUT], &at);) {
        bool row = at.b == 0 && (of_q ? at.h == 1 && at.i == 3 : at.h >= 2 && at.i >= 3);
        double out = get(&t[FBH_OUT], at), lse = get(&t[FBH_LSE], at), dq = get(&t[FBH_DQ], at);
        assert_true(row && (!of_v || at.d == 2) ? !isfinite(out) : out == get(&c[FBH_OUT], at));
        assert_true(row && !of_v ? isnan(lse) : lse == get(&c[FBH_LSE], at));
        assert_true(row ? isnan(dq) : dq == get(&c[FBH_DQ], at));
    }
    /* P of the rows that are NaN reaches dV of all their keys; v does not reach P. */
    for (place at = START; next(&t[FBH_DV], &at);) {
        bool hit = at.b == 0 && !of_v && (of_q ? at.h == 0 && at.i <= 3 : at.h == 1);
        double dv = get(&t[FBH_DV], at);
        assert_true(hit ? isnan(dv) : dv == get(&c[FBH_DV], at));
    }
    fbh_problem_destroy(&p);
    fbh_problem_destroy(&clean);
}

static void test_nan_reaches(void **state) {
    (void)state;
    check_reach(FBH_Q, nan_value);
    check_reach(FBH_K, nan_value);
    check_reach(FBH_V, nan_value);
    check_reach(FBH_V, HUGE_VAL);
}

/* A NaN score must survive the maximum, whatever stands before and behind it; a logit of +inf gives NaN. */
static void test_nan_survives_maximum(void **state) {
    (void)state;
    for (int64_t j = 0; j < 3; j++)
        for (int kind = 0; kind < 2; kind++) {
            fbh_problem p;
            open_problem(&p, "f64.b1h1k1.q1k3.d1");
            for (int64_t key = 0; key < 3; key++)
                fbh_set(&p.t[FBH_K], 0, 0, key, 0, key != j ? -HUGE_VAL : kind ? HUGE_VAL : nan_value);
            fbh_set(&p.t[FBH_Q], 0, 0, 0, 0, 1);
            run(&p);
            assert_true(isnan(fbh_get(&p.t[FBH_OUT], 0, 0, 0, 0)));
            assert_true(isnan(fbh_get(&p.t[FBH_LSE], 0, 0, 0, 0)));
            fbh_problem_destroy(&p);
        }
}

/* NaN in dO stays in its row, head and column. */
static void test_nan_in_dout(void **state) {
    (void)state;
    fbh_problem p;
    const fbh_tensor *t = p.t;
    open_problem(&p, "f64.b2h2k2.q8k8.d4.causal");
    fbh_set(&t[FBH_DOUT], 1, 0, 5, 3, nan_value);
    run(&p);
    for (place at = START; next(&t[FBH_DQ], &at);) {
        bool head = at.b == 1 && at.h == 0;
        assert_int_equal(isnan(get(&t[FBH_DQ], at)), head && at.i == 5);
        assert_int_equal(isnan(get(&t[FBH_DK], at)), head && at.i <= 5);
        assert_int_equal(isnan(get(&t[FBH_DV], at)), head && at.i <= 5 && at.d == 3);
    }
    fbh_problem_destroy(&p);
}

/* ---- Rounding, accumulation ---------------------------------------------------------------------------- */

enum { GRADIENTS = 5 };
static const fbh_id gradients[GRADIENTS] = {FBH_DQ, FBH_DK, FBH_DV, FBH_DBIAS, FBH_DSINKS};

/* The same exact inputs in a narrow dtype: the forward is the double result, rounded once. The backward
 * starts from that rounded O and LSE, so it is as far off as these are. */
static void check_rounding(const char *dtype, double backward_error) {
    char name[FBH_NAME_SIZE];
    const char *const options = "b2h4k2.q9k13.d8v5.causal.biasb1qk.dbias.sinks.dsinks.dlse.exact";
    fbh_problem p, exact;
    const fbh_tensor *t = p.t, *t64 = exact.t;
    snprintf(name, sizeof name, "%s.%s", dtype, options);
    open_problem(&p, name);
    snprintf(name, sizeof name, "f64.%s", options);
    open_problem(&exact, name);
    run(&p);
    run(&exact);
    for (place at = START; next(&t[FBH_OUT], &at);) {
        assert_true(get(&t[FBH_OUT], at) == fbh_round(t[FBH_OUT].type, get(&t64[FBH_OUT], at)));
        assert_true(get(&t[FBH_LSE], at) == fbh_round(FB_F32, get(&t64[FBH_LSE], at)));
    }
    for (int n = 0; n < GRADIENTS; n++) {
        const fbh_tensor *g = &t[gradients[n]], *g64 = &t64[gradients[n]];
        double largest = 0, error = 0;
        for (place at = START; next(g, &at);) {
            largest = fmax(largest, fabs(get(g64, at)));
            error = fmax(error, fabs(get(g, at) - get(g64, at)));
        }
        if (!(largest > 0 && error <= backward_error * largest))
            fail_msg("%s: %s is off by %g of %g", p.what.name, g->name, error, largest);
    }
    fbh_problem_destroy(&p);
    fbh_problem_destroy(&exact);
}

static void test_rounding(void **state) {
    (void)state;
    check_rounding("f32", 4 * (double)FLT_EPSILON);
    check_rounding("f16", 4 * 0x1p-10);
    check_rounding("bf16", 4 * 0x1p-7);
}

/* dV of a single key is the sum of dO: here a value just above the middle of two neighbours, which rounding
 * to f32 first would move onto the middle, and from there down. */
static void check_one_rounding(const char *dtype, double half_ulp) {
    char name[FBH_NAME_SIZE];
    fbh_problem p;
    const double dout[] = {1, half_ulp, 0x1p-24};
    snprintf(name, sizeof name, "%s.b1h1k1.q3k1.d1", dtype);
    open_problem(&p, name);
    for (int64_t i = 0; i < 3; i++) {
        fbh_set(&p.t[FBH_Q], 0, 0, i, 0, 0);
        fbh_set(&p.t[FBH_DOUT], 0, 0, i, 0, dout[i]);
    }
    run(&p);
    assert_true(fbh_get(&p.t[FBH_DV], 0, 0, 0, 0) == 1 + 2 * half_ulp);
    fbh_problem_destroy(&p);
}

static void test_one_rounding(void **state) {
    (void)state;
    check_one_rounding("f16", 0x1p-11);
    check_one_rounding("bf16", 0x1p-8);
}

/* The gradient is added to what is there, and the sum is rounded once. The plain gradients come from an f64
 * problem that starts from the narrow one's own out and lse. */
static void check_accumulate(const char *dtype) {
    char name[FBH_NAME_SIZE];
    const char *const options = "b2h2k1.q5k6.d4.bias1h1k.dbias.sinks.dsinks.exact";
    fbh_problem p, plain, before;
    const fbh_tensor *t = p.t;
    snprintf(name, sizeof name, "%s.%s.acc", dtype, options);
    open_problem(&p, name);
    open_problem(&before, name);
    snprintf(name, sizeof name, "f64.%s", options);
    open_problem(&plain, name);
    run_pass(&p, FBH_FORWARD);
    run_pass(&before, FBH_FORWARD);
    run_pass(&plain, FBH_FORWARD);
    for (place at = START; next(&t[FBH_OUT], &at);) {
        set(&plain.t[FBH_OUT], at, get(&t[FBH_OUT], at));
        set(&plain.t[FBH_LSE], at, get(&t[FBH_LSE], at));
    }
    run_pass(&p, FBH_BACKWARD);
    run_pass(&plain, FBH_BACKWARD);
    fb_plan *plan = plan_of(&before); /* what the gradients of p started from */
    assert_int_equal(fbh_problem_ready(&before, plan, FBH_BACKWARD), FB_OK);
    fb_plan_destroy(plan);
    for (int n = 0; n < GRADIENTS; n++) {
        const fbh_tensor *g = &t[gradients[n]];
        for (place at = START; next(g, &at);) {
            double old = get(&before.t[gradients[n]], at), plus = get(&plain.t[gradients[n]], at);
            assert_true(get(g, at) == fbh_round(g->type, old + plus));
        }
    }
    fbh_problem_destroy(&p);
    fbh_problem_destroy(&before);
    fbh_problem_destroy(&plain);
}

static void test_accumulate(void **state) {
    (void)state;
    check_accumulate("f32");
    check_accumulate("f16");
    check_accumulate("bf16");
    check_accumulate("f64");
}

/* ---- Parts, sizes, layouts, threads -------------------------------------------------------------------- */

/* Gives a half of the keys everything of the whole problem that belongs to it, out and lse included. */
static void take_half(fbh_problem *p, const fbh_problem *whole, int64_t first_key) {
    const fbh_id by_query[] = {FBH_Q, FBH_DOUT, FBH_DLSE, FBH_OUT, FBH_LSE, FBH_SINKS};
    run_pass(p, FBH_FORWARD);
    for (int n = 0; n < 6; n++)
        for (place at = START; next(&p->t[by_query[n]], &at);)
            set(&p->t[by_query[n]], at, get(&whole->t[by_query[n]], at));
    for (place at = START; next(&p->t[FBH_K], &at);) {
        place from = {at.b, at.h, at.i + first_key, at.d};
        set(&p->t[FBH_K], at, get(&whole->t[FBH_K], from));
        set(&p->t[FBH_V], at, get(&whole->t[FBH_V], from));
    }
    run_pass(p, FBH_BACKWARD);
}

static void assert_near(double x, double y) { assert_true(fabs(x - y) < 1e-14); }

/* Keys in two halves, each with the whole problem's out and lse: the gradients of the halves add up to the
 * whole's. The sink belongs to the second half, of which the first queries see no key. */
static void test_parts(void **state) {
    (void)state;
    fbh_problem whole, half[2];
    open_problem(&whole, "f64.b1h2k1.q6k8.d4.causal.sinks.dsinks.dlse.exact");
    open_problem(&half[0], "f64.b1h2k1.q6k4.d4.causal.offset4.dlse.exact");
    open_problem(&half[1], "f64.b1h2k1.q6k4.d4.causal.sinks.dsinks.dlse.exact");
    run(&whole);
    take_half(&half[0], &whole, 0);
    take_half(&half[1], &whole, 4);
    for (place at = START; next(&whole.t[FBH_DQ], &at);) {
        assert_near(get(&half[0].t[FBH_DQ], at) + get(&half[1].t[FBH_DQ], at), get(&whole.t[FBH_DQ], at));
        assert_near(get(&half[1].t[FBH_DSINKS], at), get(&whole.t[FBH_DSINKS], at));
    }
    for (place at = START; next(&whole.t[FBH_DK], &at);) {
        const fbh_tensor *t = half[at.i / 4].t;
        place in_half = {at.b, at.h, at.i % 4, at.d};
        assert_near(get(&t[FBH_DK], in_half), get(&whole.t[FBH_DK], at));
        assert_near(get(&t[FBH_DV], in_half), get(&whole.t[FBH_DV], at));
    }
    fbh_problem_destroy(&whole);
    fbh_problem_destroy(&half[0]);
    fbh_problem_destroy(&half[1]);
}

/* Dimensions of 0, alone and together: all that is left of the outputs is written. */
static void test_zero_sizes(void **state) {
    (void)state;
    const char *const dims[] = {"b0h4k2.q3k5.d4v6", "b2h0k2.q3k5.d4v6", "b2h0k0.q3k5.d4v6",
                                "b2h4k2.q0k5.d4v6", "b2h4k2.q3k0.d4v6", "b2h4k2.q0k0.d4v6",
                                "b2h4k2.q3k5.d0v6", "b2h4k2.q3k5.d4v0", "b2h4k2.q3k5.d0v0",
                                "b2h4k2.q0k5.d4v0", "b2h4k2.q3k0.d0v6"};
    const fbh_id outputs[] = {FBH_OUT, FBH_LSE, FBH_DQ, FBH_DK, FBH_DV, FBH_DBIAS, FBH_DSINKS};
    for (size_t n = 0; n < sizeof dims / sizeof *dims; n++) {
        char name[FBH_NAME_SIZE];
        fbh_problem p;
        snprintf(name, sizeof name, "f32.%s.scale0.5.bias11q1.dbias.sinks.dsinks.dlse", dims[n]);
        open_problem(&p, name);
        run(&p);
        for (int o = 0; o < 7; o++)
            for (place at = START; next(&p.t[outputs[o]], &at);)
                if (!isfinite(get(&p.t[outputs[o]], at)))
                    fail_msg("%s: %s is not written", name, p.t[outputs[o]].name);
        fbh_problem_destroy(&p);
    }
}

static void test_layouts_and_threads(void **state) {
    (void)state;
    const char *const problem = "f16.b3h4k2.q37k41.d8.causal.bias1h1k.dbias.sinks.dsinks";
    const char *const layouts[] = {"", ".blhd", ".padded", ".odd"};
    digests expected = digests_of(problem, 1);
    for (int n = 0; n < 4; n++)
        for (int threads = 1; threads <= 4; threads++) {
            char name[FBH_NAME_SIZE];
            snprintf(name, sizeof name, "%s%s", problem, layouts[n]);
            digests found = digests_of(name, threads);
            assert_memory_equal(&found, &expected, sizeof found);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_empty_rows),
        cmocka_unit_test(test_empty_rows_with_sinks),
        cmocka_unit_test(test_sink_of_minus_infinity),
        cmocka_unit_test(test_nan_reaches),
        cmocka_unit_test(test_nan_survives_maximum),
        cmocka_unit_test(test_nan_in_dout),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_one_rounding),
        cmocka_unit_test(test_accumulate),
        cmocka_unit_test(test_parts),
        cmocka_unit_test(test_zero_sizes),
        cmocka_unit_test(test_layouts_and_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
