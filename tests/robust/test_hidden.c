/* R3, to the bit: what stands in keys, values and rows that take no part changes nothing. Every case runs
 * with zeros there, then with NaN, infinities and large numbers, on every route and instruction set. */
#include "robust.h"

#include <math.h>

static const char *const cases[] = {
    "b2h4k2.q70k83.d24.causal",           "b2h4k2.q83k70.d24.causal",
    "b2h4k2.q7k200.d16.left9.right2",     "b2h2k1.q33k70.d8.maskb1qk",
    "b2h2k1.q33k70.d8.mask1h1k.softcap5", "b2h2k1.q33k70.d8.biasbhqk.dbias.neginf.softcap2",
    "b2h2k1.q70k83.d16.block16x32bh",     "b2h2k1.q70k83.d16.block16x16.softcap3.causal",
    "b5h2k1.q9k70.d20.lensq.lensk",       "b5h2k1.q9k70.d20.lensk.softcap1.sinks.dsinks",
    "b5h2k1.q70k33.d16.packed.causal",    "b2h2k1.q6k200.d16.mask1h1k.dlse.acc",
};

/* Sets what fbh_problem_fill leaves as NaN because it may not matter. */
static void set_hidden(const fbh_problem *p, double x) {
    static const fbh_id ids[] = {FBH_Q, FBH_K, FBH_V, FBH_DOUT, FBH_DLSE};
    for (int n = 0; n < 5; n++) {
        const fbh_tensor *t = &p->t[ids[n]];
        if (!t->buffer)
            continue;
        for (int64_t b = 0; b < t->batch; b++)
            for (int64_t h = 0; h < t->heads; h++)
                for (int64_t i = 0; i < fbh_rows(t, b); i++)
                    for (int64_t d = 0; d < t->cols; d++)
                        if (isnan(fbh_get(t, b, h, i, d)))
                            fbh_set(t, b, h, i, d, x);
    }
}

static uint64_t run_with(const fbh_case *c, fb_route route, double hidden) {
    fbh_problem p;
    open_case(&p, c, route, FBH_GUARD_NONE);
    set_hidden(&p, hidden);
    const uint64_t digest = run(&p);
    fbh_problem_destroy(&p);
    return digest;
}

static void check_case(const fbh_case *c, fb_route route, const char *isa) {
    const double values[] = {(double)NAN, HUGE_VAL, -HUGE_VAL, 3e4, -3e4};
    const uint64_t expected = run_with(c, route, 0);
    for (int v = 0; v < 5; v++)
        if (run_with(c, route, values[v]) != expected)
            fail_msg("%s, %s, %s: bits differ when %g is hidden instead of 0", c->name, fb_route_name(route),
                     isa, values[v]);
}

static void check(const char *dtype) {
    static const char *const isas[] = {"scalar", "baseline",   "avx2",      "avx512",
                                       "bfdot",  "avx512bf16", "amx_model", "amx"};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        const fbh_case c = case_of(dtype, cases[n]);
        for (int isa = 0; isa < (strcmp(dtype, "bf16") ? 4 : 8); isa++) { /* four differ in bf16 only */
            setenv("FLASHBACK_ISA", isas[isa], 1);
            for (int route = FB_FUSED; route <= FB_REFERENCE; route++)
                if (fbh_route_fits(&c, (fb_route)route))
                    check_case(&c, (fb_route)route, isas[isa]);
        }
        unsetenv("FLASHBACK_ISA");
    }
}

static void test_f32(void **state) {
    (void)state;
    check("f32");
}
static void test_f64(void **state) {
    (void)state;
    check("f64");
}
static void test_bf16(void **state) {
    (void)state;
    check("bf16");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f32),
        cmocka_unit_test(test_f64),
        cmocka_unit_test(test_bf16),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
