/* Head widths and groups of heads: every D, Dv other than D, which key/value head a query head reads and
 * whose gradients it adds to. */
#include "support.h"

/* Rows have gaps of NaN beside them and a forbidden page behind the last; R12 against float64, both passes.
 * Also S0: every width runs forward and backward on every route. */
static void br_47_head_widths_that_are_not_multiples(void **state) {
    (void)state;
    const int dims[] = {1,  2,   3,   5,   8,   16,  24,  32,  40,  48,  56,  59,  64,  72,  80, 88,
                        96, 111, 112, 120, 127, 128, 129, 160, 192, 224, 256, 257, 320, 512, 576};
    for (int type = 0; type < TYPES; type++)
        for (size_t n = 0; n < sizeof dims / sizeof *dims; n++) {
            fbh_problem p;
            open_case(&p, "%s.b1h2k1.q%dk11.d%d.padded.causal", type_name(type), n % 2 ? 8 : 9, dims[n]);
            check_everywhere(&p, EVERYWHERE);
            fbh_problem_destroy(&p);
        }
}

static void br_47_wider_heads_are_refused_with_the_limit(void **state) {
    (void)state;
    fb_desc desc;
    fb_desc_init(&desc, sizeof desc);
    snprintf(here, sizeof here, "D = 577");
    desc.batch = desc.heads_q = desc.heads_kv = desc.len_q = desc.len_k = 1;
    desc.head_dim = 577;
    desc.head_dim_v = 64;
    expect_refused(fb_supported(&desc), FB_UNSUPPORTED, "head_dim", "577", "576");
    desc.head_dim = 64;
    desc.head_dim_v = 577;
    expect_refused(fb_supported(&desc), FB_UNSUPPORTED, "head_dim_v", "577", "576");
}

static void br_46_value_width_differs(void **state) {
    (void)state;
    const int dims[][2] = {{4, 2},  {2, 6},   {192, 128}, {128, 192}, {64, 1},
                           {1, 64}, {72, 80}, {320, 256}, {576, 512}};
    for (int type = 0; type < TYPES; type++)
        for (size_t n = 0; n < 2 * sizeof dims / sizeof *dims; n++) {
            const int rows = n % 2 ? 70 : 8, dim = dims[n / 2][0], dim_v = dims[n / 2][1];
            fbh_problem p;
            answer a;
            open_case(&p, "%s.b1h2k1.q%dk%d.d%dv%d", type_name(type), rows, rows, dim, dim_v);
            open_answer(&a, &p);
            for (where w = dim > 128 ? EVERY_ROUTE : EVERYWHERE; next_where(&w, &p.desc);) {
                run(&p, &w);
                agree(&p, &a);
                const uint64_t once = digest(&p);
                run(&p, &w);
                expect(digest(&p) == once, "two identical calls differ");
            }
            close_answer(&a);
            fbh_problem_destroy(&p);
        }
}

/* S2: dK that is transposed on its way shows where Lk and D differ, and, when they are equal, in its values.
 */
static void s2_dk_arrives_transposed(void **state) {
    (void)state;
    const char *const shapes[] = {"q8k8.d8",    "q7k5.d8",    "q16k16.d16",
                                  "q33k16.d16", "q20k64.d64", "q7k64.d32"};
    for (int type = 0; type < TYPES; type++)
        for (size_t n = 0; n < sizeof shapes / sizeof *shapes; n++) {
            fbh_problem p;
            open_case(&p, "%s.b2h2k1.%s", type_name(type), shapes[n]);
            check_everywhere(&p, EVERYWHERE);
            fbh_problem_destroy(&p);
        }
}

/* ---- Groups -------------------------------------------------------------------------------------------- */

/* dO is not 0 in one query head at a time: only that head's dQ and its key/value head's dK and dV are not 0,
 * everything is written, and the sum of all runs is the run with all of dO. */
static void br_45_gradients_in_grouped_heads(void **state) {
    (void)state;
    const int heads[][2] = {{6, 2}, {4, 4}, {8, 1}};
    for (int type = 0; type < TYPES; type++)
        for (size_t n = 0; n < 2 * sizeof heads / sizeof *heads; n++) {
            const int rows = n % 2 ? 20 : 5, hq = heads[n / 2][0], hkv = heads[n / 2][1];
            fbh_problem all, one;
            open_case(&all, "%s.b2h%dk%d.q%dk13.d8.exact", type_name(type), hq, hkv, rows);
            open_case(&one, "%s.b2h%dk%d.q%dk13.d8.exact", type_name(type), hq, hkv, rows);
            const size_t count = (size_t)(2 * hkv * 13 * 8);
            double *sum = fbh_make(2 * count, sizeof *sum);
            for (where w = EVERYWHERE; next_where(&w, &one.desc);) {
                memset(sum, 0, 2 * count * sizeof *sum);
                run(&all, &w);
                for (int64_t h = 0; h < hq; h++) {
                    for (place at = START; next(&one.t[FBH_DOUT], &at);)
                        set(&one.t[FBH_DOUT], at, at.h == h ? get(&all.t[FBH_DOUT], at) : 0);
                    run(&one, &w);
                    for (place at = START; next(&one.t[FBH_DQ], &at);)
                        expect_exactly(&one.t[FBH_DQ], at, at.h == h ? get(&all.t[FBH_DQ], at) : 0);
                    size_t i = 0, zeros = 0;
                    for (int id = FBH_DK; id <= FBH_DV; id++)
                        for (place at = START; next(&one.t[id], &at); i++) {
                            const double x = get(&one.t[id], at);
                            const bool own = at.h == h / (hq / hkv);
                            expect(own || x == 0,
                                   "with dout in head %" PRId64 " only, %s of head %" PRId64 " is %g", h,
                                   one.t[id].name, at.h, x);
                            zeros += own && x == 0;
                            sum[i] += x;
                        }
                    /* A sum of few bf16 products may be 0 by chance. */
                    expect(zeros * 50 < i / (size_t)hkv,
                           "with dout in head %" PRId64 " only, %zu of its %zu gradients are 0", h, zeros,
                           i / (size_t)hkv);
                }
                size_t i = 0;
                for (int id = FBH_DK; id <= FBH_DV; id++)
                    for (place at = START; next(&all.t[id], &at); i++)
                        expect_near(&all.t[id], at, sum[i], (hq / hkv + 1) * fbh_ulp(all.t[id].type, 4));
            }
            free(sum);
            fbh_problem_destroy(&all);
            fbh_problem_destroy(&one);
        }
}

/* v holds the number of its head: out shows which one was read. */
static void br_45_which_head_is_read(void **state) {
    (void)state;
    const int heads[][2] = {{6, 2}, {4, 4}, {8, 1}, {14, 2}, {15, 5}};
    for (int type = 0; type < TYPES; type++)
        for (size_t n = 0; n < 2 * sizeof heads / sizeof *heads; n++) {
            const int rows = n % 2 ? 70 : 3, hq = heads[n / 2][0], hkv = heads[n / 2][1];
            fbh_problem p;
            open_case(&p, "%s.b3h%dk%d.q%dk80.d8.exact.fwd", type_name(type), hq, hkv, rows);
            for (place at = START; next(&p.t[FBH_V], &at);)
                set(&p.t[FBH_V], at, (double)(at.b * hkv + at.h));
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&p, &w);
                for (place at = START; next(&p.t[FBH_OUT], &at);)
                    expect_near(&p.t[FBH_OUT], at, (double)(at.b * hkv + at.h / (hq / hkv)), 0.1);
            }
            fbh_problem_destroy(&p);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(br_47_head_widths_that_are_not_multiples),
        cmocka_unit_test(br_47_wider_heads_are_refused_with_the_limit),
        cmocka_unit_test(br_46_value_width_differs),
        cmocka_unit_test(s2_dk_arrives_transposed),
        cmocka_unit_test(br_45_gradients_in_grouped_heads),
        cmocka_unit_test(br_45_which_head_is_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
