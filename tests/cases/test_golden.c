/* Golden values: sums over outputs of small cases, from a float64 program that shares nothing with this one
 * (tests/python/oracle_f64.py). Inputs are multiples of 1/64 that anyone can make again: fbh_exact with the
 * seeds 1 q, 2 k, 3 v, 4 dout, 5 bias, 6 mask, 7 sinks, 8 dlse. */
#include "support.h"

typedef struct golden {
    const char *name;
    double out[2], lse; /* the sum and the sum of absolute values; of lse the sum of what is finite */
    int empty;          /* entries of lse that are -inf */
    double dq[2], dk[2], dv[2], dbias[2], dsinks[4];
} golden;

/* clang-format off */
static const golden rows[] = {
    {"b1h2k2.q5k7.d8", {3.070092556, 15.978564272}, 20.129129247, 0,
     {0.392923953, 4.865898060}, {0, 6.175820305}, {11.968750000, 21.086915607}, {0}, {0}},
    {"b1h2k2.q3k7.d8.causal", {1.515934477, 11.330115203}, 11.311667032, 0,
     {0.539642628, 2.873168976}, {0, 4.132789821}, {9.781250000, 14.079137960}, {0}, {0}},
    {"b1h2k2.q7k3.d8.causal", {4.191068777, 21.437816158}, 3.487648136, 8,
     {0.029733902, 1.886124262}, {0, 2.744437517}, {4.265625000, 15.554223649}, {0}, {0}},
    {"b1h2k2.q3k7.d8.causal.topleft", {-6.047587825, 20.927778421}, 4.386295654, 0,
     {0.476466949, 2.632802528}, {0, 2.826100994}, {9.781250000, 15.307667268}, {0}, {0}},
    {"b1h10k2.q9k9.d4.causal.left2", {30.908770270, 117.983648470}, 84.548632253, 0,
     {0.182226030, 22.094888274}, {0, 8.417888481}, {20.468750000, 49.173497221}, {0}, {0}},
    {"b1h2k1.q9k6.d4.left0.right3", {-2.160024046, 26.927750164}, 17.313131186, 0,
     {2.544709045, 4.099067202}, {0, 3.408431585}, {10.062500000, 17.187876344}, {0}, {0}},
    {"b2h2k1.q4k6.d8.softcap0.5.maskb1qk", {6.156275827, 33.962388922}, 17.412450289, 2,
     {-0.936254514, 6.049039727}, {-0.030484224, 5.026970723}, {9.125000000, 30.760031167}, {0}, {0}},
    {"b1h4k2.q6k6.d8.causal.left1.sinks.dsinks.dlse", {1.948231092, 58.731357127}, 23.408518829, 0,
     {-0.517752862, 15.532689371}, {1.368868012, 10.621486094}, {10.394757007, 39.681555416}, {0},
     {-0.815749096, -0.040361959, 0.204484830, -0.118256866}},
    {"b1h1k1.q8k8.d4v2", {-0.330420185, 0.735775633}, 17.342003593, 0,
     {0.220009051, 0.990421732}, {0, 1.095656408}, {0.859375000, 3.078125000}, {0}, {0}},
    {"b1h6k2.q4k5.d6v10.causal", {7.677030498, 64.504017270}, 31.093532865, 0,
     {0.943169919, 10.925902755}, {0, 6.533844221}, {24.531250000, 51.522119562}, {0}, {0}},
    {"b1h2k2.q5k5.d8.scale-0.5", {5.438052350, 19.147540715}, 16.921778845, 0,
     {-0.987745725, 6.739093433}, {0, 8.372230670}, {11.968750000, 21.265377339}, {0}, {0}},
    {"b1h1k1.q4k4.d8.causal.scale0", {-1.928385417, 12.329427083}, 3.178053830, 0,
     {0, 0}, {0, 0}, {7.718750000, 10.901041667}, {0}, {0}},
    {"b2h2k2.q4k5.d4.bias1h1k.dbias", {6.869098202, 15.741614095}, 25.065277292, 0,
     {0.465467706, 4.125169804}, {0, 4.461976494}, {13.234375000, 18.451712221}, {0, 2.431316591}, {0}},
    {"b2h2k1.q4k5.d4.biasb1qk.dbias.mask11qk", {-2.685372973, 14.488621118}, 11.374768677, 4,
     {0.275025207, 2.600483119}, {0, 1.801726887}, {12.484375000, 13.450596591}, {0, 1.563838876}, {0}},
    {"b1h2k2.q5k2.d4.causal.sinks.dsinks.dlse", {1.478187671, 5.910609990}, 2.654367137, 0,
     {-0.434396402, 1.076226326}, {0.091370932, 0.782183129}, {3.731398406, 5.521040069}, {0},
     {0.916388308, 0.677692839}},
};
/* clang-format on */
enum { ROWS = sizeof rows / sizeof *rows };

static void expect_sums(const fbh_tensor *t, const double want[2], double unit) {
    double sum = 0, size = 0;
    for (place at = START; next(t, &at);) {
        sum += get(t, at);
        size += fabs(get(t, at));
    }
    expect(fabs(sum - want[0]) <= unit * (want[1] + 1) && fabs(size - want[1]) <= unit * (want[1] + 1),
           "the sum of %s is %.9f, and of its absolute values %.9f, expected %.9f and %.9f", t->name, sum,
           size, want[0], want[1]);
}

static void golden_values(void **state) {
    (void)state;
    const double units[] = {[FB_F32] = 1e-6, [FB_F16] = 1e-3, [FB_BF16] = 8e-3, [FB_F64] = 1e-9};
    for (int type = FB_F32; type <= FB_F64; type++)
        for (int n = 0; n < ROWS; n++) {
            const golden *g = &rows[n];
            const double unit = units[type];
            fbh_problem p;
            open_case(&p, "%s.%s.exact", type_name(type), g->name);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                double lse = 0, size = 0;
                int empty = 0;
                run(&p, &w);
                expect_sums(&p.t[FBH_OUT], g->out, unit);
                expect_sums(&p.t[FBH_DQ], g->dq, unit);
                expect_sums(&p.t[FBH_DK], g->dk, unit);
                expect_sums(&p.t[FBH_DV], g->dv, unit);
                expect_sums(&p.t[FBH_DBIAS], g->dbias, unit);
                for (place at = START; next(&p.t[FBH_LSE], &at);) {
                    const double x = get(&p.t[FBH_LSE], at);
                    empty += x == -infinite;
                    lse += x == -infinite ? 0 : x;
                    size += x == -infinite ? 0 : fabs(x);
                }
                expect(empty == g->empty && fabs(lse - g->lse) <= fmin(unit, 1e-6) * (size + 1),
                       "lse sums to %.9f with %d entries of -inf, expected %.9f with %d", lse, empty, g->lse,
                       g->empty);
                for (place at = START; next(&p.t[FBH_DSINKS], &at);)
                    expect_near(&p.t[FBH_DSINKS], at, g->dsinks[at.h], unit);
            }
            fbh_problem_destroy(&p);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(golden_values)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
