/* Which cells count: causal masks, windows, lengths, boolean masks and biases, alone and together.
 * Read docs/cases.md first, then br_48 below, which shows every key by its place in the value. */
#include "support.h"

/* ---- Keys that can be counted -------------------------------------------------------------------------- */

/* With q = k = 0 all logits are equal, so that lse = ln(number of keys); with v[j] = unit vector j, out shows
 * which ones. The case has Dv = Lk and no batch or heads. */
static void show_keys(fbh_problem *p) {
    set_all(&p->t[FBH_Q], 0);
    set_all(&p->t[FBH_K], 0);
    for (place at = START; next(&p->t[FBH_V], &at);)
        set(&p->t[FBH_V], at, at.i == at.d);
}

/* Row i sees exactly the keys lo <= j <= hi that exist. */
static void expect_keys(const fbh_problem *p, int64_t i, int64_t lo, int64_t hi) {
    const int64_t keys = p->desc.len_k;
    lo = lo < 0 ? 0 : lo;
    hi = hi > keys - 1 ? keys - 1 : hi;
    const double n = hi < lo ? 0 : (double)(hi - lo + 1);
    for (int64_t j = 0; j < keys; j++)
        expect_near(&p->t[FBH_OUT], (place){0, 0, i, j}, j >= lo && j <= hi ? 1 / n : 0,
                    n > 0 ? 5e-3 / n : 0);
    if (n == 0)
        expect_exactly(&p->t[FBH_LSE], (place){0, 0, i, 0}, -infinite);
    else
        expect_near(&p->t[FBH_LSE], (place){0, 0, i, 0}, log(n), 1e-6);
}

static void br_48_sliding_window_off_by_one(void **state) {
    (void)state;
    const int64_t windows[][2] = {{2, 0}, {0, 0}, {0, 2}, {3, 1}, {8, 0}, {100, 100}};
    for (int type = 0; type < TYPES; type++)
        for (int64_t len = 8; len <= 9; len++)
            for (size_t n = 0; n < sizeof windows / sizeof *windows; n++) {
                const int64_t left = windows[n][0], right = windows[n][1];
                fbh_problem p;
                open_case(&p,
                          "%s.b1h1k1.q%" PRId64 "k%" PRId64 ".d%" PRId64 ".left%" PRId64 ".right%" PRId64
                          ".exact",
                          type_name(type), len, len, len, left, right);
                show_keys(&p);
                for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                    run(&p, &w);
                    for (int64_t i = 0; i < len; i++)
                        expect_keys(&p, i, i - left, i + right);
                }
                fbh_problem_destroy(&p);
            }
}

/* Also S2: a causal test on absolute indices is top-left where Lq differs from Lk. */
static void br_50_causal_alignment(void **state) {
    (void)state;
    const int64_t lengths[][2] = {{3, 7}, {7, 3}, {1, 7}, {5, 5}, {2, 5}, {5, 2}, {70, 130}, {130, 70}};
    for (int type = 0; type < TYPES; type++)
        for (size_t n = 0; n < sizeof lengths / sizeof *lengths; n++)
            for (int top_left = 0; top_left < 2; top_left++) {
                const int64_t rows = lengths[n][0], keys = lengths[n][1];
                fbh_problem p;
                open_case(&p, "%s.b1h1k1.q%" PRId64 "k%" PRId64 ".d%" PRId64 ".causal%s.exact",
                          type_name(type), rows, keys, keys, top_left ? ".topleft" : "");
                show_keys(&p);
                for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                    run(&p, &w);
                    for (int64_t i = 0; i < rows; i++)
                        expect_keys(&p, i, 0, top_left ? i : i + keys - rows);
                }
                fbh_problem_destroy(&p);
            }
}

/* ---- Rows without a key -------------------------------------------------------------------------------- */

/* All rows but the last see keys as under a causal mask, the last sees none. */
static void mask_last_row(const fbh_problem *p, int64_t last) {
    const int64_t off = p->desc.len_k - last;
    for (place at = START; next(&p->t[FBH_MASK], &at);)
        set(&p->t[FBH_MASK], at, at.i < last && at.d < at.i + off);
}

static void expect_empty_row(const fbh_problem *p, int64_t b, int64_t h, int64_t i) {
    for (int64_t d = 0; d < p->desc.head_dim_v; d++)
        expect_exactly(&p->t[FBH_OUT], (place){b, h, i, d}, 0);
    for (int64_t d = 0; d < p->desc.head_dim; d++)
        expect(fbh_get(&p->t[FBH_DQ], b, h, i, d) == 0, "dq of row %" PRId64 " is %g, expected 0", i,
               fbh_get(&p->t[FBH_DQ], b, h, i, d));
    expect_exactly(&p->t[FBH_LSE], (place){b, h, i, 0}, -infinite);
}

static void br_02_boolean_mask_row_without_any_true(void **state) {
    (void)state;
    const int64_t lengths[] = {6, 64 + 6, 128 + 6};
    for (int type = 0; type < TYPES; type++)
        for (size_t n = 0; n < sizeof lengths / sizeof *lengths; n++) {
            const int64_t rows = lengths[n], last = rows - 1;
            fbh_problem p, without;
            answer a;
            open_case(&p, "%s.b1h2k2.q%" PRId64 "k%" PRId64 ".d8.mask11qk.exact", type_name(type), rows,
                      rows + 4);
            open_case(&without, "%s.b1h2k2.q%" PRId64 "k%" PRId64 ".d8.mask11qk.exact", type_name(type), last,
                      rows + 4);
            mask_last_row(&p, last);
            mask_last_row(&without, last);
            for (int64_t h = 0; h < 2; h++)
                set_row(&p.t[FBH_DOUT], 0, h, last, not_a_number);
            for (place at = START; next(&without.t[FBH_Q], &at);) {
                set(&without.t[FBH_Q], at, get(&p.t[FBH_Q], at));
                set(&without.t[FBH_DOUT], at, get(&p.t[FBH_DOUT], at));
            }
            fbh_problem_cells(&p);
            open_answer(&a, &p);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&without, &w);
                run(&p, &w);
                agree(&p, &a);
                expect_finite(&p.t[FBH_DK]);
                expect_finite(&p.t[FBH_DV]);
                for (int64_t h = 0; h < 2; h++)
                    expect_empty_row(&p, 0, h, last);
                for (place at = START; next(&without.t[FBH_OUT], &at);) {
                    expect_exactly(&p.t[FBH_OUT], at, get(&without.t[FBH_OUT], at));
                    expect_exactly(&p.t[FBH_DQ], at, get(&without.t[FBH_DQ], at));
                    expect_exactly(&p.t[FBH_LSE], at, get(&without.t[FBH_LSE], at));
                }
            }
            close_answer(&a);
            fbh_problem_destroy(&p);
            fbh_problem_destroy(&without);
        }
}

/* S2: 1/l with l = 0 in the forward, exp(S - LSE) with both -inf in the backward. */
static void s2_rows_without_a_key_by_alignment_or_window(void **state) {
    (void)state;
    const char *const cases[] = {"b1h2k1.q7k3.d8.causal", "b1h2k1.q70k5.d16.causal",
                                 "b1h2k1.q70k9.d16.left2.right1.topleft", "b1h2k1.q6k9.d8.causal.offset-20"};
    for (int type = 0; type < TYPES; type++)
        for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
            fbh_problem p;
            open_case(&p, "%s.%s", type_name(type), cases[n]);
            check_everywhere(&p, EVERYWHERE);
            fbh_problem_destroy(&p);
        }
}

static void br_12_local_window_with_short_padded_items(void **state) {
    (void)state;
    const int64_t lengths[] = {127, 128, 129, 256};
    for (size_t n = 0; n < sizeof lengths / sizeof *lengths; n++) {
        const int64_t len = lengths[n];
        fbh_problem p;
        answer a;
        open_case(&p, "f16.b2h2k2.q%" PRId64 "k%" PRId64 ".d64.left64.right64.lensk.exact", len, len);
        fbh_set(&p.t[FBH_LENS_K], 0, 0, 0, 0, 5);
        fbh_set(&p.t[FBH_LENS_K], 0, 0, 0, 1, (double)len);
        fbh_problem_cells(&p);
        open_answer(&a, &p);
        for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
            run(&p, &w);
            agree(&p, &a);
            for (int64_t h = 0; h < 2; h++) {
                for (int64_t i = 0; i < len; i++)
                    if (i >= 69)
                        expect_empty_row(&p, 0, h, i);
                    else
                        expect(isfinite(fbh_get(&p.t[FBH_LSE], 0, h, i, 0)), "row %" PRId64 " has keys", i);
                for (int64_t j = 5; j < len; j++)
                    for (int64_t d = 0; d < 64; d++) {
                        expect_exactly(&p.t[FBH_DK], (place){0, h, j, d}, 0);
                        expect_exactly(&p.t[FBH_DV], (place){0, h, j, d}, 0);
                    }
            }
        }
        close_answer(&a);
        fbh_problem_destroy(&p);
    }
}

/* ---- Two masks at once --------------------------------------------------------------------------------- */

/* The bias is 0 on the band of the window of `left` and -inf outside. */
static void set_band_bias(const fbh_problem *p, int64_t left) {
    const fbh_tensor *t = &p->t[FBH_BIAS];
    for (place at = START; next(t, &at);) {
        const int64_t position = at.i + t->cols - t->rows;
        set(t, at, at.d <= position && at.d >= position - left ? 0 : -infinite);
    }
}

static void br_11_explicit_mask_plus_causal(void **state) {
    (void)state;
    const int64_t lengths[] = {30, 31, 32, 33, 34, 62, 63, 64, 65, 66, 127, 128, 129, 130};
    for (size_t n = 0; n < 3 * sizeof lengths / sizeof *lengths; n++)
        for (int64_t left = 17; left <= 1000; left += 983) {
            const int64_t keys = lengths[n / 3], rows = n % 3 == 0 ? 1 : n % 3 == 1 ? 5 : keys;
            const char *const type = n % 2 ? "f32" : "bf16";
            fbh_problem both, bias, band;
            answer a;
            open_case(&both, "%s.b1h1k1.q%" PRId64 "k%" PRId64 ".d64.causal.bias11qk.exact", type, rows,
                      keys);
            open_case(&bias, "%s.b1h1k1.q%" PRId64 "k%" PRId64 ".d64.bias11qk.exact", type, rows, keys);
            open_case(&band, "%s.b1h1k1.q%" PRId64 "k%" PRId64 ".d64.causal.left%" PRId64 ".exact", type,
                      rows, keys, left);
            set_band_bias(&both, left);
            set_band_bias(&bias, left);
            open_answer(&a, &band);
            for (where w = EVERYWHERE; next_where(&w, &both.desc);) {
                run(&bias, &w);
                run(&band, &w);
                run(&both, &w);
                agree(&bias, &a);
                agree(&band, &a);
                agree(&both, &a);
            }
            close_answer(&a);
            fbh_problem_destroy(&both);
            fbh_problem_destroy(&bias);
            fbh_problem_destroy(&band);
        }
}

/* ---- Masks of bytes and of numbers --------------------------------------------------------------------- */

/* Any byte but 0 counts; a bias of 0 and 1 is added, not applied. The bindings' part waits for them. */
static void br_69_mask_kinds_confused(void **state) {
    (void)state;
    const double bytes[] = {1, 2, 128, 255};
    fbh_problem ones, any, bias, none;
    open_case(&ones, "f32.b1h2k1.q6k9.d8.maskbhqk.exact");
    open_case(&any, "f32.b1h2k1.q6k9.d8.maskbhqk.exact");
    open_case(&bias, "f32.b1h2k1.q6k9.d8.biasbhqk.exact");
    open_case(&none, "f32.b1h2k1.q6k9.d8.exact");
    for (place at = START; next(&any.t[FBH_MASK], &at);) {
        const double counts = get(&any.t[FBH_MASK], at);
        set(&any.t[FBH_MASK], at, counts * bytes[at.d % 4]);
        set(&bias.t[FBH_BIAS], at, counts);
    }
    for (where w = EVERYWHERE; next_where(&w, &any.desc);) {
        run(&ones, &w);
        run(&any, &w);
        run(&none, &w);
        expect(digest(&any) == digest(&ones), "bytes of 2 to 255 differ from bytes of 1");
        expect(digest(&any) != digest(&none), "the mask changes nothing");
    }
    check_everywhere(&bias, EVERYWHERE);
    fb_desc wrong = any.desc;
    wrong.mask_shape = (fb_shape){1, 2, 9, 6};
    expect_refused(fb_supported(&wrong), FB_INVALID, "mask_shape", "[1,2,9,6]", "[1|1,2|1,6|1,9|1]");
    fbh_problem_destroy(&ones);
    fbh_problem_destroy(&any);
    fbh_problem_destroy(&bias);
    fbh_problem_destroy(&none);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(br_48_sliding_window_off_by_one),
        cmocka_unit_test(br_50_causal_alignment),
        cmocka_unit_test(br_02_boolean_mask_row_without_any_true),
        cmocka_unit_test(s2_rows_without_a_key_by_alignment_or_window),
        cmocka_unit_test(br_12_local_window_with_short_padded_items),
        cmocka_unit_test(br_11_explicit_mask_plus_causal),
        cmocka_unit_test(br_69_mask_kinds_confused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
