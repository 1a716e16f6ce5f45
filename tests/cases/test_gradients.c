/* The backward pass: every option against differences of the forward, what is linear, LSE and its cotangent
 * across routes, sinks, and whatever the workspace holds. */
#include "support.h"

/* ---- Options against central differences --------------------------------------------------------------- */

/* The words of an option, and those of the case that it must differ from. */
static const struct {
    const char *words, *without;
} options[] = {{".causal", ""},
               {".causal.topleft", ".causal"},
               {".left2", ""},
               {".right1", ""},
               {".left2.right2.offset1", ".left2.right2"},
               {".scale-0.5", ""},
               {".softcap0.5", ""},
               {".maskbhqk", ""},
               {".biasbhqk.dbias", ""},
               {".bias1h1k.dbias", ""},
               {".sinks.dsinks", ""},
               {".lensk", ""},
               {".lensq", ""},
               {".packed", ""},
               {".block16x16bh", ""},
               {".dlse", ""},
               {".det", ""}};
enum { OPTIONS = sizeof options / sizeof *options };

/* Sum of out * dout and lse * dlse; rows that hold NaN there are those that count nowhere. */
static double loss(const fbh_problem *p) {
    double sum = 0;
    for (place at = START; next(&p->t[FBH_OUT], &at);) {
        const double dout = get(&p->t[FBH_DOUT], at);
        sum += isnan(dout) ? 0 : dout * get(&p->t[FBH_OUT], at);
    }
    if (p->desc.flags & FB_DLSE)
        for (place at = START; next(&p->t[FBH_LSE], &at);) {
            const double lse = get(&p->t[FBH_LSE], at), dlse = get(&p->t[FBH_DLSE], at);
            sum += isinf(lse) || isnan(dlse) ? 0 : dlse * lse;
        }
    return sum;
}

static double direction(fbh_id id, place at) {
    return fbh_exact(50 + (uint64_t)id, (uint64_t)(((at.b * 16 + at.h) * 16 + at.i) * 16 + at.d));
}

/* The loss after a step along the direction of one input, which is then as before. */
static double loss_after(fbh_problem *p, const where *w, fbh_id id, double step) {
    double before[1024];
    size_t n = 0;
    for (place at = START; next(&p->t[id], &at); n++) {
        assert_true(n < sizeof before / sizeof *before);
        before[n] = get(&p->t[id], at);
        set(&p->t[id], at, before[n] + step * direction(id, at));
    }
    run_pass(p, w, FBH_FORWARD);
    n = 0;
    for (place at = START; next(&p->t[id], &at);)
        set(&p->t[id], at, before[n++]);
    return loss(p);
}

static void check_differences(fbh_problem *p, const where *w) {
    const fbh_id inputs[] = {FBH_Q, FBH_K, FBH_V, FBH_BIAS, FBH_SINKS};
    const fbh_id gradients[] = {FBH_DQ, FBH_DK, FBH_DV, FBH_DBIAS, FBH_DSINKS};
    const bool wide = p->desc.dtype == FB_F64;
    const double step = wide ? 1e-4 : 0x1p-8;
    run(p, w);
    for (int n = 0; n < 5; n++) {
        double along = 0, size = 0;
        if (!p->t[gradients[n]].buffer)
            continue;
        for (place at = START; next(&p->t[gradients[n]], &at);) {
            const double x = get(&p->t[gradients[n]], at) * direction(inputs[n], at);
            along += x;
            size += fabs(x);
        }
        const double difference =
            (loss_after(p, w, inputs[n], step) - loss_after(p, w, inputs[n], -step)) / (2 * step);
        expect(fabs(along - difference) <= (wide ? 1e-6 : 1e-3) * (size + 1),
               "%s says %.9g, the differences of the forward say %.9g", p->t[gradients[n]].name, along,
               difference);
    }
}

static bool open_options(fbh_problem *p, fb_dtype type, const char *one, const char *two) {
    char name[FBH_NAME_SIZE], error[512];
    fbh_case what;
    snprintf(name, sizeof name, "%s.b2h4k2.q6k9.d8%s%s", fb_dtype_name(type), one, two);
    if (!fbh_case_parse(&what, name, error, sizeof error))
        return false; /* the two contradict each other */
    open_case(p, "%s", name);
    return true;
}

/* Also S1: gradients of masks and sinks are right, not left out. */
static void br_43_options_alone_and_in_pairs(void **state) {
    (void)state;
    int pairs = 0;
    for (int type = 0; type < 2; type++)
        for (int one = 0; one < OPTIONS; one++)
            for (int two = one; two < OPTIONS; two++) {
                fbh_problem p;
                if (!open_options(&p, type ? FB_F64 : FB_F32, options[one].words,
                                  one == two ? "" : options[two].words)) {
                    assert_true(one != two);
                    continue;
                }
                pairs++;
                for (where w = one == two ? EVERYWHERE : EVERY_ROUTE; next_where(&w, &p.desc);)
                    check_differences(&p, &w);
                fbh_problem_destroy(&p);
            }
    assert_true(pairs > 2 * 120);
}

/* Were an option dropped in both passes, their agreement would not show it. */
static void br_43_every_option_changes_the_result(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int n = 0; n < OPTIONS; n++) {
            fbh_problem plain, p;
            if (strcmp(options[n].words, ".det") == 0)
                continue; /* always so on a CPU */
            open_case(&plain, "%s.b2h4k2.q6k9.d8.exact%s", type_name(type), options[n].without);
            open_case(&p, "%s.b2h4k2.q6k9.d8.exact%s", type_name(type), options[n].words);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&plain, &w);
                run(&p, &w);
                const bool backward_only = p.desc.flags & FB_DLSE;
                expect((fbh_problem_digest(&p, FBH_FORWARD) == fbh_problem_digest(&plain, FBH_FORWARD)) ==
                           backward_only,
                       "the option %s the forward", backward_only ? "changes" : "does not change");
                bool changed = false;
                for (place at = START; p.t[FBH_DQ].cu == NULL && next(&p.t[FBH_DQ], &at);)
                    changed |= get(&p.t[FBH_DQ], at) != get(&plain.t[FBH_DQ], at);
                expect(changed || p.desc.flags & FB_PACKED, "the option does not change dq");
            }
            fbh_problem_destroy(&plain);
            fbh_problem_destroy(&p);
        }
}

/* ---- Linear in dO and dLSE ----------------------------------------------------------------------------- */

static void scale_cotangents(const fbh_problem *p, double factor) {
    for (int id = FBH_DOUT; id <= FBH_DLSE; id += FBH_DLSE - FBH_DOUT)
        for (place at = START; next(&p->t[id], &at);)
            set(&p->t[id], at, factor * get(&p->t[id], at));
}

static void backward_is_linear(void **state) {
    (void)state;
    const char *const cases[] = {"b2h4k2.q6k40.d16.causal.dlse.sinks.dsinks", "b1h2k1.q70k90.d24.dlse.left30",
                                 "b1h2k2.q20k90.d8.dlse.bias1h1k.dbias.softcap2"};
    const char *const types[] = {"f32", "bf16", "f64"}; /* halves of f16 may be subnormal */
    for (int n = 0; n < 9; n++) {
        fbh_problem p, twice;
        open_case(&p, "%s.%s.exact", types[n / 3], cases[n % 3]);
        open_case(&twice, "%s.%s.exact", types[n / 3], cases[n % 3]);
        for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
            fbh_problem_fill(&twice, 0);
            scale_cotangents(&twice, 2);
            run(&p, &w);
            run(&twice, &w);
            for (int id = FBH_DQ; id <= FBH_DSINKS; id++)
                for (place at = START; next(&p.t[id], &at);)
                    expect_exactly(&twice.t[id], at, 2 * get(&p.t[id], at));
            scale_cotangents(&twice, 0);
            run_pass(&twice, &w, FBH_BACKWARD);
            for (int id = FBH_DQ; id <= FBH_DSINKS; id++)
                for (place at = START; next(&p.t[id], &at);)
                    expect(get(&twice.t[id], at) == 0, "%s is %g without dout and dlse", p.t[id].name,
                           get(&twice.t[id], at));
        }
        fbh_problem_destroy(&p);
        fbh_problem_destroy(&twice);
    }
}

/* S2: the gradient of the second output, LSE, alone: nothing for v, something for q and k. */
static void s2_gradient_of_lse_discarded(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int rows = 7; rows <= 70; rows += 63) {
            fbh_problem p;
            open_case(&p, "%s.b1h2k1.q%dk70.d16.dlse.exact", type_name(type), rows);
            set_all(&p.t[FBH_DOUT], 0);
            check_everywhere(&p, EVERYWHERE);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                double dq = 0, dk = 0;
                run(&p, &w);
                for (place at = START; next(&p.t[FBH_DV], &at);) {
                    expect(get(&p.t[FBH_DV], at) == 0, "dv is %g", get(&p.t[FBH_DV], at));
                    dk += fabs(get(&p.t[FBH_DK], at));
                }
                for (place at = START; next(&p.t[FBH_DQ], &at);)
                    dq += fabs(get(&p.t[FBH_DQ], at));
                expect(dq > 1 && dk > 1, "sums of |dq| and |dk| are %g and %g", dq, dk);
            }
            fbh_problem_destroy(&p);
        }
}

/* S0: LSE in the log2 domain on one path. The backward of each route takes what any other route left. */
static void s0_lse_of_one_route_in_the_backward_of_another(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int rows = 7; rows <= 70; rows += 63) {
            fbh_problem p;
            answer a;
            open_case(&p, "%s.b1h4k2.q%dk80.d16.causal.sinks.dsinks.softcap8", type_name(type), rows);
            open_answer(&a, &p);
            for (where from = EVERY_ROUTE; next_where(&from, &p.desc);) {
                run_pass(&p, &from, FBH_FORWARD);
                agree_pass(&p, &a, FBH_FORWARD);
                for (where to = EVERY_ROUTE; next_where(&to, &p.desc);) {
                    run_pass(&p, &to, FBH_BACKWARD);
                    agree_pass(&p, &a, FBH_BACKWARD);
                }
            }
            close_answer(&a);
            fbh_problem_destroy(&p);
        }
}

/* ---- Sinks --------------------------------------------------------------------------------------------- */

/* dsink = -sum_i exp(sink - LSE) delta, a sum that cancels, from the rounded O: with products and sums in
 * f64, and in f32. `size` is the sum of the absolute terms. */
static void sink_gradient(const fbh_problem *p, int64_t h, double *wide, double *narrow, double *size) {
    const double sink = fbh_get(&p->t[FBH_SINKS], 0, h, 0, 0);
    float sum = 0;
    *wide = *size = 0;
    for (int64_t b = 0; b < p->desc.batch; b++)
        for (int64_t i = 0; i < p->desc.len_q; i++) {
            const double P = exp(sink - fbh_get(&p->t[FBH_LSE], b, h, i, 0));
            double delta = 0;
            float short_delta = 0;
            for (int64_t d = 0; d < p->desc.head_dim_v; d++) {
                const double x = fbh_get(&p->t[FBH_DOUT], b, h, i, d) * fbh_get(&p->t[FBH_OUT], b, h, i, d);
                delta += x;
                short_delta += (float)x;
            }
            sum -= (float)P * short_delta;
            *wide -= P * delta;
            *size += fabs(P * delta);
        }
    *narrow = (double)sum;
}

static void br_39_sink_gradient_rounded_before_its_reduction(void **state) {
    (void)state;
    for (int n = 0; n < 2; n++) {
        fbh_problem p;
        open_case(&p, "bf16.b2h4k2.q%dk%d.d64.sinks.dsinks", n ? 512 : 8, n ? 128 : 512);
        for (where w = EVERY_ROUTE; next_where(&w, &p.desc);) {
            run(&p, &w);
            const uint64_t once = digest(&p);
            for (int64_t h = 0; h < 4; h++) {
                double wide, narrow, size;
                sink_gradient(&p, h, &wide, &narrow, &size);
                /* f32 may be right by luck: a few units of its last place of what is summed. */
                expect_near(&p.t[FBH_DSINKS], (place){0, h, 0, 0}, wide,
                            fmax(3 * fabs(narrow - wide), 4 * 0x1p-24 * size));
            }
            run(&p, &w);
            expect(digest(&p) == once, "two runs differ");
        }
        fbh_problem_destroy(&p);
    }
}

/* ---- Workspace ----------------------------------------------------------------------------------------- */

static void run_in(fbh_problem *p, const where *w, unsigned char *workspace) {
    fb_plan *plan = plan_at(p, w);
    for (int pass = FBH_FORWARD; pass <= FBH_BACKWARD; pass++) {
        fb_io io;
        expect_ok(fbh_problem_ready(p, plan, (fbh_pass)pass));
        fbh_problem_io(p, (fbh_pass)pass, &io);
        io.workspace = (fb_ref){workspace, 0};
        expect_ok(pass == FBH_FORWARD ? fb_forward(plan, &io) : fb_backward(plan, &io));
    }
    fb_plan_destroy(plan);
}

static void br_33_workspace_may_hold_anything(void **state) {
    (void)state;
    enum { BYTES = 1 << 26 };
    unsigned char *workspace = fbh_make(BYTES, 1);
    for (int type = 0; type < TYPES; type++)
        for (int n = 0; n < 2; n++) {
            fbh_problem p, other;
            open_case(&p, "%s.b2h4k1.q%dk64.d256.packed", type_name(type), n ? 64 : 8);
            open_case(&other, "%s.b1h2k2.q%dk300.d40.causal.gain1000", type_name(type), n ? 90 : 7);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                memset(workspace, 0, BYTES / 8);
                run_in(&p, &w, workspace);
                const uint64_t fresh = digest(&p);
                memset(workspace, 0xFF, BYTES / 8);
                run_in(&p, &w, workspace);
                expect(digest(&p) == fresh, "differs in a workspace full of NaN");
                run_in(&p, &w, workspace);
                expect(digest(&p) == fresh, "differs in its own used workspace");
                run_in(&other, &w, workspace);
                run_in(&p, &w, workspace);
                expect(digest(&p) == fresh, "differs in a workspace that another shape used");
            }
            fbh_problem_destroy(&p);
            fbh_problem_destroy(&other);
        }
    free(workspace);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(br_43_options_alone_and_in_pairs),
        cmocka_unit_test(br_43_every_option_changes_the_result),
        cmocka_unit_test(backward_is_linear),
        cmocka_unit_test(s2_gradient_of_lse_discarded),
        cmocka_unit_test(s0_lse_of_one_route_in_the_backward_of_another),
        cmocka_unit_test(br_39_sink_gradient_rounded_before_its_reduction),
        cmocka_unit_test(br_33_workspace_may_hold_anything),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
