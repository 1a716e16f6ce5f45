/* Route FB_REFERENCE, the definition that every other route is compared with: against golden sums of an
 * independent oracle, and against central differences of its own forward for every option and every pair.
 * tests/python compares it element by element; test_ref_rules.c has what must hold exactly. */
#include "ref_problem.h"

#include <string.h>

/* ---- Golden values ------------------------------------------------------------------------------------- */

typedef struct sums {
    double sum, sum_abs;
} sums;

typedef struct golden {
    const char *name;
    sums out;
    double lse;
    int empty; /* rows whose LSE is -inf */
    sums dq, dk, dv, dbias;
    double dsinks[4];
} golden;

/* Name; out, lse, empty rows, dq, dk; dv, dbias, dsinks. Pairs are the sum and the sum of the sizes. */
/* clang-format off */
static const golden goldens[] = {
    {"f64.b1h2k2.q5k7.d8",
     {3.070092556, 15.978564272}, 20.129129247, 0, {0.392923953, 4.86589806}, {0, 6.175820305},
     {11.96875, 21.086915607}, {0, 0}, {0}},
    {"f64.b1h2k2.q3k7.d8.causal",
     {1.515934477, 11.330115203}, 11.311667032, 0, {0.539642628, 2.873168976}, {0, 4.132789821},
     {9.78125, 14.07913796}, {0, 0}, {0}},
    {"f64.b1h2k2.q7k3.d8.causal",
     {4.191068777, 21.437816158}, 3.487648136, 8, {0.029733902, 1.886124262}, {0, 2.744437517},
     {4.265625, 15.554223649}, {0, 0}, {0}},
    {"f64.b1h2k2.q3k7.d8.causal.topleft",
     {-6.047587825, 20.927778421}, 4.386295654, 0, {0.476466949, 2.632802528}, {0, 2.826100994},
     {9.78125, 15.307667268}, {0, 0}, {0}},
    {"f64.b1h10k2.q9k9.d4.left2.causal",
     {30.90877027, 117.98364847}, 84.548632253, 0, {0.18222603, 22.094888274}, {0, 8.417888481},
     {20.46875, 49.173497221}, {0, 0}, {0}},
    {"f64.b1h2k1.q9k6.d4.left0.right3",
     {-2.160024046, 26.927750164}, 17.313131186, 0, {2.544709045, 4.099067202}, {0, 3.408431585},
     {10.0625, 17.187876344}, {0, 0}, {0}},
    {"f64.b2h2k1.q4k6.d8.softcap0.5.maskb1qk",
     {6.156275827, 33.962388922}, 17.412450289, 2, {-0.936254514, 6.049039727}, {-0.030484224, 5.026970723},
     {9.125, 30.760031167}, {0, 0}, {0}},
    {"f64.b1h4k2.q6k6.d8.left1.causal.sinks.dsinks.dlse",
     {1.948231092, 58.731357127}, 23.408518829, 0, {-0.517752862, 15.532689371}, {1.368868012, 10.621486094},
     {10.394757007, 39.681555416}, {0, 0}, {-0.815749096, -0.040361959, 0.20448483, -0.118256866}},
    {"f64.b1h1k1.q8k8.d4v2",
     {-0.330420185, 0.735775633}, 17.342003593, 0, {0.220009051, 0.990421732}, {0, 1.095656408},
     {0.859375, 3.078125}, {0, 0}, {0}},
    {"f64.b1h6k2.q4k5.d6v10.causal",
     {7.677030498, 64.50401727}, 31.093532865, 0, {0.943169919, 10.925902755}, {0, 6.533844221},
     {24.53125, 51.522119562}, {0, 0}, {0}},
    {"f64.b1h2k2.q5k5.d8.scale-0.5",
     {5.43805235, 19.147540715}, 16.921778845, 0, {-0.987745725, 6.739093433}, {0, 8.37223067},
     {11.96875, 21.265377339}, {0, 0}, {0}},
    {"f64.b1h1k1.q4k4.d8.scale0.causal",
     {-1.928385417, 12.329427083}, 3.17805383, 0, {0, 0}, {0, 0},
     {7.71875, 10.901041667}, {0, 0}, {0}},
    {"f64.b2h2k2.q4k5.d4.bias1h1k.dbias",
     {6.869098202, 15.741614095}, 25.065277292, 0, {0.465467706, 4.125169804}, {0, 4.461976494},
     {13.234375, 18.451712221}, {0, 2.431316591}, {0}},
    {"f64.b2h2k1.q4k5.d4.biasb1qk.dbias.mask11qk",
     {-2.685372973, 14.488621118}, 11.374768677, 4, {0.275025207, 2.600483119}, {0, 1.801726887},
     {12.484375, 13.450596591}, {0, 1.563838876}, {0}},
    {"f64.b1h2k2.q5k2.d4.causal.sinks.dsinks.dlse",
     {1.478187671, 5.91060999}, 2.654367137, 0, {-0.434396402, 1.076226326}, {0.091370932, 0.782183129},
     {3.731398406, 5.521040069}, {0, 0}, {0.916388308, 0.677692839}},
};
/* clang-format on */

/* The golden inputs: fbh_exact by logical index; masks from it, with query 1 of the last batch entry masked.
 */
static void fill_golden(fbh_problem *p) {
    for (fbh_id id = FBH_Q; id <= FBH_DLSE; id++) {
        const fbh_tensor *t = &p->t[id];
        uint64_t n = 0;
        for (place at = START; next(t, &at); n++) {
            double x = fbh_exact((uint64_t)id + 1, n);
            if (id == FBH_MASK)
                x = x >= -0.25 && !(at.b == t->batch - 1 && at.i == 1);
            set(t, at, x);
        }
    }
}

static void check_sums(const char *name, const fbh_tensor *t, sums expected) {
    sums found = {0, 0};
    for (place at = START; next(t, &at);) {
        found.sum += get(t, at);
        found.sum_abs += fabs(get(t, at));
    }
    if (!(fabs(found.sum - expected.sum) < 1e-9 && fabs(found.sum_abs - expected.sum_abs) < 1e-9))
        fail_msg("%s: %s sums to %.9f, in size to %.9f; expected %.9f, %.9f", name, t->name, found.sum,
                 found.sum_abs, expected.sum, expected.sum_abs);
}

static void check_golden(const golden *g) {
    fbh_problem p;
    open_problem(&p, g->name);
    fill_golden(&p);
    run(&p);
    double lse = 0;
    int empty = 0;
    for (place at = START; next(&p.t[FBH_LSE], &at);)
        if (get(&p.t[FBH_LSE], at) == -HUGE_VAL)
            empty++;
        else
            lse += get(&p.t[FBH_LSE], at);
    assert_int_equal(empty, g->empty);
    assert_true(fabs(lse - g->lse) < 1e-9);
    check_sums(g->name, &p.t[FBH_OUT], g->out);
    check_sums(g->name, &p.t[FBH_DQ], g->dq);
    check_sums(g->name, &p.t[FBH_DK], g->dk);
    check_sums(g->name, &p.t[FBH_DV], g->dv);
    if (p.desc.flags & FB_DBIAS)
        check_sums(g->name, &p.t[FBH_DBIAS], g->dbias);
    for (int64_t h = 0; p.desc.flags & FB_DSINKS && h < p.desc.heads_q; h++)
        assert_true(fabs(fbh_get(&p.t[FBH_DSINKS], 0, h, 0, 0) - g->dsinks[h]) < 1e-9);
    fbh_problem_destroy(&p);
}

static void test_golden(void **state) {
    (void)state;
    for (size_t n = 0; n < sizeof goldens / sizeof *goldens; n++)
        check_golden(&goldens[n]);
}

/* ---- Central differences ------------------------------------------------------------------------------- */

#define TINY "f64.b2h4k2.q6k9.d8"
#define STEP 1e-4

/* Options that exclude each other have the same kind. */
static const struct {
    int kind;
    const char *words;
} options[] = {
    {0, "causal"},
    {0, "topleft.causal"},
    {0, "left2"},
    {0, "right1"},
    {0, "left3.right1.offset-2"},
    {1, "scale-0.7"},
    {2, "softcap0.5"},
    {3, "maskb1qk"},
    {3, "mask1h1k"},
    {4, "block16x16bh"},
    {5, "biasbhqk.dbias"},
    {5, "bias1h1k.dbias"},
    {5, "biasb1q1.dbias"},
    {5, "biasbhqk.dbias.neginf"},
    {6, "lensq.lensk"},
    {6, "packed"},
    {7, "sinks.dsinks"},
    {8, "dlse"},
};
enum { OPTIONS = sizeof options / sizeof *options };

/* The scalar whose gradient the backward computes: sum(O*dO) + sum(LSE*dLSE). */
static double loss(const fbh_problem *p, const fb_plan *plan) {
    const fbh_tensor *t = p->t;
    double sum = 0;
    fb_io io;
    fbh_problem_io(p, FBH_FORWARD, &io);
    assert_int_equal(fb_forward(plan, &io), FB_OK);
    for (place at = START; next(&t[FBH_OUT], &at);)
        if (!isnan(get(&t[FBH_DOUT], at))) /* NaN: there is no way from O to this row */
            sum += get(&t[FBH_OUT], at) * get(&t[FBH_DOUT], at);
    for (place at = START; next(&t[FBH_DLSE], &at);)
        if (get(&t[FBH_LSE], at) != -HUGE_VAL)
            sum += get(&t[FBH_LSE], at) * get(&t[FBH_DLSE], at);
    return sum;
}

/* Every `every`th element of one input. What no row may see holds NaN, and its gradient is exactly 0. */
static void check_gradient(const fbh_problem *p, const fb_plan *plan, fbh_id input, fbh_id gradient,
                           int every) {
    const fbh_tensor *x = &p->t[input], *g = &p->t[gradient];
    double largest = 0;
    int n = 0;
    for (place at = START; next(g, &at);)
        largest = fmax(largest, fabs(get(g, at)));
    for (place at = START; next(g, &at);) {
        double old = get(x, at), found = get(g, at);
        if (n++ % every && isfinite(old))
            continue;
        if (!isfinite(old)) {
            assert_true(found == 0);
            continue;
        }
        set(x, at, old + STEP);
        double high = loss(p, plan);
        set(x, at, old - STEP);
        double expected = (high - loss(p, plan)) / (2 * STEP);
        set(x, at, old);
        if (!(fabs(found - expected) <= 1e-6 * largest + 1e-9))
            fail_msg("%s: %s[%d,%d,%d,%d] is %.9g, by differences %.9g", p->what.name, g->name, (int)at.b,
                     (int)at.h, (int)at.i, (int)at.d, found, expected);
    }
}

static void check_gradients(const char *name, int every) {
    fbh_problem p;
    open_problem(&p, name);
    run(&p);
    fb_plan *plan = plan_of(&p);
    check_gradient(&p, plan, FBH_Q, FBH_DQ, every);
    check_gradient(&p, plan, FBH_K, FBH_DK, every);
    check_gradient(&p, plan, FBH_V, FBH_DV, every);
    check_gradient(&p, plan, FBH_BIAS, FBH_DBIAS, every);
    check_gradient(&p, plan, FBH_SINKS, FBH_DSINKS, 1);
    fb_plan_destroy(plan);
    fbh_problem_destroy(&p);
}

static void test_gradients(void **state) {
    (void)state;
    char name[FBH_NAME_SIZE];
    check_gradients(TINY, 1);
    check_gradients("f64.b2h4k2.q6k9.d5v3", 1);
    for (int n = 0; n < OPTIONS; n++) {
        snprintf(name, sizeof name, TINY ".%s", options[n].words);
        check_gradients(name, 5); /* no divisor of a dimension: all rows and columns are met */
    }
}

/* Pairs are sampled: what a pair can break is the meeting of two options, not single elements. */
static void test_gradients_of_pairs(void **state) {
    (void)state;
    char name[FBH_NAME_SIZE];
    for (int a = 0; a < OPTIONS; a++)
        for (int b = a + 1; b < OPTIONS; b++)
            if (options[a].kind != options[b].kind) {
                snprintf(name, sizeof name, TINY ".%s.%s", options[a].words, options[b].words);
                check_gradients(name, 61);
            }
}

/* What the option with this index must change: dlse is about the backward, all others change out or lse. */
static fbh_pass pass_of(int option) {
    return strcmp(options[option].words, "dlse") == 0 ? FBH_BACKWARD : FBH_FORWARD;
}

/* An option that changes nothing, alone or beside another, would pass every comparison. */
static void test_options_matter(void **state) {
    (void)state;
    char name[FBH_NAME_SIZE];
    digests base = digests_of(TINY, 0), alone[OPTIONS];
    for (int n = 0; n < OPTIONS; n++) {
        snprintf(name, sizeof name, TINY ".%s", options[n].words);
        alone[n] = digests_of(name, 0);
        if (alone[n].of[pass_of(n)] == base.of[pass_of(n)])
            fail_msg("%s changes nothing", name);
    }
    for (int a = 0; a < OPTIONS; a++)
        for (int b = a + 1; b < OPTIONS; b++)
            if (options[a].kind != options[b].kind) {
                snprintf(name, sizeof name, TINY ".%s.%s", options[a].words, options[b].words);
                digests both = digests_of(name, 0);
                if (both.of[pass_of(a)] == alone[b].of[pass_of(a)] ||
                    both.of[pass_of(b)] == alone[a].of[pass_of(b)])
                    fail_msg("one option of %s changes nothing", name);
            }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden),
        cmocka_unit_test(test_gradients),
        cmocka_unit_test(test_gradients_of_pairs),
        cmocka_unit_test(test_options_matter),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
