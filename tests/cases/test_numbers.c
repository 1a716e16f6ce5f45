/* Numbers that hurt: logits far from 0 or wide apart, values at the ends of f16 and bf16, scales of 0 and
 * below, softcap. */
#include "support.h"

/* ---- Logits far from 0 --------------------------------------------------------------------------------- */

/* Sets the last channel so that it adds `shift` to every logit, the others stay. scale is 1/8. */
static void shift_logits(const fbh_problem *p, double shift) {
    const int64_t last = p->desc.head_dim - 1;
    for (place at = START; next(&p->t[FBH_Q], &at);)
        if (at.d == last)
            set(&p->t[FBH_Q], at, 8);
    for (place at = START; next(&p->t[FBH_K], &at);)
        if (at.d == last)
            set(&p->t[FBH_K], at, shift);
}

static void reverse_keys(const fbh_problem *p) {
    const int64_t len = p->desc.len_k;
    for (int id = FBH_K; id <= FBH_V; id++)
        for (place at = START; next(&p->t[id], &at);) {
            const place other = {at.b, at.h, len - 1 - at.i, at.d};
            const double x = get(&p->t[id], at), y = get(&p->t[id], other);
            if (at.i < len / 2) {
                set(&p->t[id], at, y);
                set(&p->t[id], other, x);
            }
        }
}

/* Adding a constant to all logits changes lse by it and nothing else. The causal mask leaves whole tiles
 * empty; under a window they come first. */
static void br_09_logits_all_very_negative(void **state) {
    (void)state;
    const char *const masks[] = {"causal", "left100.right0", "causal.topleft"};
    for (int type = FB_F32; type <= FB_F16; type++)
        for (int n = 0; n < 6; n++) {
            const double tolerance = type == FB_F32 ? 1e-5 : 1e-3;
            fbh_problem p, shifted;
            open_case(&p, "%s.b1h14k2.q88k448.d64.%s.exact.fwd", type_name(type), masks[n / 2]);
            open_case(&shifted, "%s.b1h14k2.q88k448.d64.%s.exact.fwd", type_name(type), masks[n / 2]);
            if (n % 2) {
                reverse_keys(&p);
                reverse_keys(&shifted);
            }
            shift_logits(&p, 0);
            shift_logits(&shifted, -200);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&p, &w);
                run(&shifted, &w);
                for (place at = START; next(&p.t[FBH_OUT], &at);) {
                    expect_near(&shifted.t[FBH_OUT], at, get(&p.t[FBH_OUT], at),
                                tolerance); /* v is up to 1 */
                    expect_near(&shifted.t[FBH_LSE], at, get(&p.t[FBH_LSE], at) - 200, 1e-4);
                }
            }
            fbh_problem_destroy(&p);
            fbh_problem_destroy(&shifted);
        }
}

static void br_09_logits_near_minus_ten_thousand(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int n = 0; n < 2; n++) {
            fbh_problem p;
            open_case(&p, "%s.b1h7k1.q%dk200.d64.causal.exact", type_name(type), n ? 88 : 8);
            shift_logits(&p, -10000);
            check_everywhere(&p, EVERYWHERE);
            fbh_problem_destroy(&p);
        }
}

/* S1: an exponent argument clamped to [-88, 0]. One logit is 200 above all others, whose weights are then
 * exactly 0, and remain so under a dO of 1e30. */
static void s1_exponent_argument_clamped(void **state) {
    (void)state;
    const int shapes[] = {5, 70};
    for (int n = 0; n < 2; n++) {
        fbh_problem p;
        answer a;
        open_case(&p, "f32.b1h1k1.q%dk130.d8.scale1.exact", shapes[n]);
        for (place at = START; next(&p.t[FBH_Q], &at);)
            set(&p.t[FBH_Q], at, at.d == 0);
        for (place at = START; next(&p.t[FBH_K], &at);)
            set(&p.t[FBH_K], at, at.d == 0 && at.i == 100 ? 200 : 0);
        open_answer(&a, &p);
        for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
            run(&p, &w);
            agree(&p, &a);
        }
        close_answer(&a);
        set_all(&p.t[FBH_DOUT], 1e30);
        for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
            run(&p, &w);
            for (place at = START; next(&p.t[FBH_DV], &at);)
                if (w.route != FB_REFERENCE) /* which holds e^-200 in a double */
                    expect(at.i == 100 ? get(&p.t[FBH_DV], at) > 1e30 : get(&p.t[FBH_DV], at) == 0,
                           "dv of key %" PRId64 " is %g", at.i, get(&p.t[FBH_DV], at));
        }
        fbh_problem_destroy(&p);
    }
    for (int type = 0; type < TYPES; type++) {
        fbh_problem p;
        open_case(&p, "%s.b1h2k1.q20k70.d16.gain60", type_name(type));
        check_everywhere(&p, EVERYWHERE);
        fbh_problem_destroy(&p);
    }
}

/* ---- The ends of 16 bits ------------------------------------------------------------------------------- */

/* Raw products of 64 * 64 * 64 = 2^18, scaled 2^15. */
static void br_35_products_beyond_65504_before_scaling(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int rows = 5; rows <= 9; rows += 4) {
            fbh_problem p;
            answer a;
            open_case(&p, "%s.b1h1k1.q%dk9.d64.flat64.exact", type_name(type), rows);
            open_answer(&a, &p);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&p, &w);
                agree(&p, &a);
                for (place at = START; next(&p.t[FBH_OUT], &at);) {
                    double mean = 0;
                    for (int64_t j = 0; j < 9; j++)
                        mean += fbh_get(&p.t[FBH_V], 0, 0, j, at.d) / 9;
                    expect_near(&p.t[FBH_OUT], at, mean, fbh_ulp(type, mean) + 1e-6);
                    expect_near(&p.t[FBH_LSE], at, 32768 + log(9), 0.008); /* two units of f32 */
                }
            }
            close_answer(&a);
            fbh_problem_destroy(&p);
            open_case(&p, "f16.b1h1k1.q%dk9.d64.exact", rows);
            set_all(&p.t[FBH_Q], 60000);
            for (place at = START; next(&p.t[FBH_K], &at);)
                set(&p.t[FBH_K], at, (at.d + at.i) % 2 ? 0x1p-10 : -0x1p-10);
            check_everywhere(&p, EVERYWHERE);
            fbh_problem_destroy(&p);
        }
}

static double v_of(int kind, int64_t j) { return kind == 0 ? 100 : kind == 1 || j % 2 ? 60000 : -60000; }

static void br_36_sums_of_values_beyond_65504(void **state) {
    (void)state;
    const int keys[] = {4096, 3, 4096};
    for (int n = 0; n < 6; n++) {
        const int kind = n / 2;
        fbh_problem p;
        open_case(&p, "f16.b1h1k1.q%dk%d.d16.exact.fwd", n % 2 ? 5 : 20, keys[kind]);
        set_all(&p.t[FBH_Q], 0);
        for (place at = START; next(&p.t[FBH_V], &at);)
            set(&p.t[FBH_V], at, v_of(kind, at.i));
        for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
            run(&p, &w);
            for (place at = START; next(&p.t[FBH_OUT], &at);)
                if (kind == 2)
                    expect_near(&p.t[FBH_OUT], at, 0, 60000 * 0x1p-22);
                else
                    expect_exactly(&p.t[FBH_OUT], at, v_of(kind, 0));
        }
        fbh_problem_destroy(&p);
    }
}

/* S2: bf16 on its way through f16. */
static void s2_bf16_cast_to_f16(void **state) {
    (void)state;
    const fbh_id ids[] = {FBH_Q, FBH_K, FBH_V, FBH_V, FBH_DOUT, FBH_DOUT};
    const double factors[] = {1e5, 1e5, 1e5, 1e-8, 1e5, 1e-8};
    for (int n = 0; n < 12; n++) {
        const fbh_tensor *t;
        const double factor = factors[n / 2];
        fbh_problem p;
        open_case(&p, "bf16.b1h2k1.q%dk40.d16.scale%g.exact", n % 2 ? 8 : 40, n / 2 < 2 ? 1e-5 : 0.25);
        t = &p.t[ids[n / 2]];
        for (place at = START; next(t, &at);)
            set(t, at, get(t, at) * factor);
        check_everywhere(&p, EVERYWHERE);
        for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
            double largest = 0;
            run(&p, &w);
            for (place at = START; next(&p.t[FBH_OUT], &at);)
                largest = fmax(largest, fabs(get(&p.t[FBH_OUT], at)));
            if (ids[n / 2] == FBH_V) /* the accuracy rule's floor is relative to out, not to what it may be */
                expect(largest > factor * 0.05 && largest < factor, "out is up to %g for values of %g",
                       largest, factor);
        }
        fbh_problem_destroy(&p);
    }
}

/* Magnitudes that differ by batch entry, a few channels 100 times larger, one key that dominates; each entry
 * is held to its own error and to its own run. */
static void br_70_massive_activations(void **state) {
    (void)state;
    for (int n = 0; n < 2; n++) {
        fbh_problem p, one;
        answer a;
        open_case(&p, "bf16.b3h4k1.q%dk96.d256.causal.massive", n ? 96 : 8);
        open_case(&one, "bf16.b1h4k1.q%dk96.d256.causal.massive", n ? 96 : 8);
        open_answer(&a, &p);
        for (where w = EVERY_ROUTE; next_where(&w, &p.desc);) {
            run(&p, &w);
            agree(&p, &a);
            for (int64_t b = 0; b < 3; b++) {
                for (int id = FBH_Q; id <= FBH_DOUT; id++)
                    for (place at = START; next(&one.t[id], &at);)
                        set(&one.t[id], at, fbh_get(&p.t[id], b, at.h, at.i, at.d));
                run(&one, &w);
                for (int id = FBH_OUT; id <= FBH_DV; id++)
                    for (place at = START; next(&one.t[id], &at);)
                        expect_exactly(&one.t[id], at, fbh_get(&p.t[id], b, at.h, at.i, at.d));
            }
        }
        close_answer(&a);
        fbh_problem_destroy(&p);
        fbh_problem_destroy(&one);
    }
}

/* ---- Scale and softcap --------------------------------------------------------------------------------- */

/* Attention with q negated and |scale|, bit for bit, and right. */
static void br_52_negative_scale(void **state) {
    (void)state;
    const char *const options[] = {"0.5", "10000", "2.softcap5", "0.5.causal"};
    for (int type = 0; type < TYPES; type++)
        for (int n = 0; n < 8; n++) {
            fbh_problem p, mirror;
            answer a;
            open_case(&p, "%s.b1h2k1.q%dk70.d8.scale-%s", type_name(type), n % 2 ? 8 : 70, options[n / 2]);
            open_case(&mirror, "%s.b1h2k1.q%dk70.d8.scale%s", type_name(type), n % 2 ? 8 : 70,
                      options[n / 2]);
            for (place at = START; next(&mirror.t[FBH_Q], &at);)
                set(&mirror.t[FBH_Q], at, -get(&p.t[FBH_Q], at));
            open_answer(&a, &p);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&p, &w);
                agree(&p, &a);
                run(&mirror, &w);
                for (int id = FBH_OUT; id <= FBH_DV; id++)
                    for (place at = START; next(&p.t[id], &at);) {
                        const double x = get(&p.t[id], at), y = get(&mirror.t[id], at);
                        expect(x == (id == FBH_DQ ? -y : y), "%s is %.9g, and %.9g for -q", p.t[id].name, x,
                               y);
                    }
            }
            close_answer(&a);
            fbh_problem_destroy(&p);
            fbh_problem_destroy(&mirror);
        }
}

static void br_53_scale_zero_is_a_value(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int rows = 8; rows <= 70; rows += 62) {
            fbh_problem p;
            open_case(&p, "%s.b1h2k1.q%dk%d.d8.causal.scale0.exact", type_name(type), rows, rows);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&p, &w);
                for (place at = START; next(&p.t[FBH_OUT], &at);) {
                    double mean = 0;
                    for (int64_t j = 0; j <= at.i; j++)
                        mean += fbh_get(&p.t[FBH_V], 0, 0, j, at.d) / (double)(at.i + 1);
                    expect_near(&p.t[FBH_OUT], at, mean, fbh_ulp(type, mean) + 1e-6);
                    expect_near(&p.t[FBH_LSE], at, log((double)(at.i + 1)), 1e-6);
                    expect(get(&p.t[FBH_DQ], at) == 0, "dq is %g", get(&p.t[FBH_DQ], at));
                }
                for (place at = START; next(&p.t[FBH_DK], &at);)
                    expect(get(&p.t[FBH_DK], at) == 0, "dk is %g", get(&p.t[FBH_DK], at));
            }
            fbh_problem_destroy(&p);
        }
}

/* Logits span +-20 c, so that many are saturated; a softcap of 1e6 is none. */
static void br_42_softcap_derivative(void **state) {
    (void)state;
    const double caps[] = {0.5, 1, 15, 50, 1e-3};
    for (int type = 0; type < TYPES; type++)
        for (int n = 0; n < 10; n++) {
            fbh_problem p;
            open_case(&p, "%s.b1h2k1.q%dk17.d16.softcap%g.gain%g", type_name(type), n % 2 ? 8 : 17,
                      caps[n / 2], 10 * caps[n / 2]);
            check_everywhere(&p, EVERYWHERE);
            fbh_problem_destroy(&p);
        }
    for (int rows = 8; rows <= 17; rows += 9) {
        fbh_problem none, large;
        open_case(&none, "f32.b1h2k1.q%dk17.d16", rows);
        open_case(&large, "f32.b1h2k1.q%dk17.d16.softcap1e6", rows);
        for (where w = EVERYWHERE; next_where(&w, &none.desc);) {
            run(&none, &w);
            run(&large, &w);
            for (int id = FBH_OUT; id <= FBH_DV; id++)
                for (place at = START; next(&none.t[id], &at);)
                    expect_near(&large.t[id], at, get(&none.t[id], at), 2e-6);
        }
        fbh_problem_destroy(&none);
        fbh_problem_destroy(&large);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(br_09_logits_all_very_negative),
        cmocka_unit_test(br_09_logits_near_minus_ten_thousand),
        cmocka_unit_test(s1_exponent_argument_clamped),
        cmocka_unit_test(br_35_products_beyond_65504_before_scaling),
        cmocka_unit_test(br_36_sums_of_values_beyond_65504),
        cmocka_unit_test(s2_bf16_cast_to_f16),
        cmocka_unit_test(br_70_massive_activations),
        cmocka_unit_test(br_52_negative_scale),
        cmocka_unit_test(br_53_scale_zero_is_a_value),
        cmocka_unit_test(br_42_softcap_derivative),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
