/* NaN and infinity: what may not be seen changes nothing (R2, R3), what is seen spreads along the formula and
 * nowhere else (R4). Both directions fail a test: a NaN where a number belongs, and a number where NaN does.
 */
#include "support.h"

/* ---- What may not be seen ------------------------------------------------------------------------------ */

/* Ways in which some keys are seen by no query. `hide` shapes the mask where the words do not. */
typedef struct hiding {
    const char *words;
    void (*hide)(const fbh_problem *p);
} hiding;

static void hide_by_lengths(const fbh_problem *p) {
    const fbh_tensor *t = &p->t[FBH_LENS_K];
    for (place at = START; next(t, &at);)
        set(t, at, at.d % 2 ? 57 : 1);
}

static bool third(int64_t j) { return j % 3 == 1; }

static void hide_by_mask(const fbh_problem *p) {
    for (place at = START; next(&p->t[FBH_MASK], &at);)
        set(&p->t[FBH_MASK], at, !third(at.d));
}

static void hide_by_bias(const fbh_problem *p) {
    for (place at = START; next(&p->t[FBH_BIAS], &at);)
        set(&p->t[FBH_BIAS], at, third(at.d) ? -infinite : 0.5);
}

static void hide_by_blocks(const fbh_problem *p) {
    for (place at = START; next(&p->t[FBH_BLOCK_MASK], &at);)
        set(&p->t[FBH_BLOCK_MASK], at, !third(at.d));
}

static void hide_nothing_more(const fbh_problem *p) { (void)p; }

static const hiding hidings[] = {{"lensk", hide_by_lengths},
                                 {"lensk.causal", hide_by_lengths},
                                 {"mask11qk", hide_by_mask},
                                 {"bias11qk", hide_by_bias},
                                 {"bias11qk.dbias.mask11qk", hide_by_bias},
                                 {"block16x16", hide_by_blocks},
                                 {"causal.topleft", hide_nothing_more},
                                 {"left3.right2", hide_nothing_more},
                                 {"softcap2.sinks.dsinks.lensk", hide_by_lengths},
                                 {"softcap2.mask11qk", hide_by_mask}};
enum { HIDINGS = sizeof hidings / sizeof *hidings };

static bool seen(const fbh_problem *p, place at) {
    return p->live_keys[(at.b * p->desc.heads_kv + at.h) * p->desc.len_k + at.i];
}

/* Puts x into k and v where no query looks. Returns whether there are such keys and others. */
static bool set_unseen(const fbh_problem *p, double x) {
    bool some[2] = {false, false};
    for (place at = START; next(&p->t[FBH_K], &at);) {
        some[seen(p, at)] = true;
        if (!seen(p, at)) {
            set(&p->t[FBH_K], at, x);
            set(&p->t[FBH_V], at, x);
        }
    }
    return some[0] && some[1];
}

/* The same with all bytes 0x7f: NaN in f16, about 3e38 in f32 and bf16. */
static void set_unseen_bytes(const fbh_problem *p) {
    for (place at = START; next(&p->t[FBH_K], &at);)
        if (!seen(p, at)) {
            memset(fbh_at(&p->t[FBH_K], at.b, at.h, at.i, at.d), 0x7f, fbh_size(p->t[FBH_K].type));
            memset(fbh_at(&p->t[FBH_V], at.b, at.h, at.i, at.d), 0x7f, fbh_size(p->t[FBH_V].type));
        }
}

static void expect_unseen_gradients_zero(const fbh_problem *p) {
    for (place at = START; next(&p->t[FBH_DK], &at);)
        if (!seen(p, at)) {
            expect_exactly(&p->t[FBH_DK], at, 0);
            expect_exactly(&p->t[FBH_DV], at, 0);
        }
}

static void check_unseen(int type, const char *shape, const hiding *h) {
    fbh_problem clean, p;
    open_case(&clean, "%s.%s.%s.exact", type_name(type), shape, h->words);
    open_case(&p, "%s.%s.%s.exact", type_name(type), shape, h->words);
    h->hide(&clean);
    h->hide(&p);
    fbh_problem_cells(&clean);
    fbh_problem_cells(&p);
    expect(set_unseen(&clean, 0), "some keys are seen and some are not");
    for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
        run(&clean, &w);
        for (int kind = 0; kind < 3; kind++) {
            if (kind < 2)
                set_unseen(&p, kind ? infinite : not_a_number);
            else
                set_unseen_bytes(&p);
            run(&p, &w);
            expect(digest(&p) == digest(&clean),
                   "%s in keys and values that no query sees changes the result",
                   kind == 0   ? "NaN"
                   : kind == 1 ? "infinity"
                               : "0x7f7f");
            expect_unseen_gradients_zero(&p);
        }
    }
    fbh_problem_destroy(&clean);
    fbh_problem_destroy(&p);
}

static void br_13_nan_in_keys_and_values_that_no_query_sees(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int n = 0; n < HIDINGS; n++) {
            check_unseen(type, "b2h1k1.q33k96.d16", &hidings[n]);
            check_unseen(type, "b2h2k1.q5k96.d16", &hidings[n]);
            check_unseen(type, "b2h2k1.q2k96.d16", &hidings[n]);
            check_unseen(type, "b2h1k1.q3k96.d16", &hidings[n]);
        }
}

/* The other side: q, dO and, before the backward, O of queries past lens_q hold NaN. */
static void br_13_nan_in_padded_queries(void **state) {
    (void)state;
    const char *const shapes[] = {"q33k40", "q5k40"};
    for (int type = 0; type < TYPES; type++)
        for (int n = 0; n < 2; n++) {
            fbh_problem p, clean;
            open_case(&p, "%s.b2h2k1.%s.d16.lensq", type_name(type), shapes[n]);
            open_case(&clean, "%s.b2h2k1.%s.d16.lensq.exact", type_name(type), shapes[n]);
            const int64_t rows = p.desc.len_q / 2;
            for (int64_t b = 0; b < 2; b++) {
                fbh_set(&p.t[FBH_LENS_Q], 0, 0, 0, b, (double)(rows + b));
                fbh_set(&clean.t[FBH_LENS_Q], 0, 0, 0, b, (double)(rows + b));
            }
            fbh_problem_copy(&p, &clean);
            for (place at = START; next(&p.t[FBH_Q], &at);)
                if (at.i >= rows + at.b) {
                    set(&p.t[FBH_Q], at, not_a_number);
                    set(&p.t[FBH_DOUT], at, not_a_number);
                }
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&clean, &w);
                run_pass(&p, &w, FBH_FORWARD);
                expect(fbh_problem_digest(&p, FBH_FORWARD) == fbh_problem_digest(&clean, FBH_FORWARD),
                       "NaN in q past lens_q changes the forward");
                for (place at = START; next(&p.t[FBH_OUT], &at);)
                    if (at.i >= rows + at.b)
                        set(&p.t[FBH_OUT], at, not_a_number);
                run_pass(&p, &w, FBH_BACKWARD);
                expect(fbh_problem_digest(&p, FBH_BACKWARD) == fbh_problem_digest(&clean, FBH_BACKWARD),
                       "NaN in q, dout and out past lens_q changes the backward");
            }
            fbh_problem_destroy(&p);
            fbh_problem_destroy(&clean);
        }
}

/* All logits that count are -95, those of the keys that do not are +95: exp(S - LSE) overflows there. */
static void br_05_masked_cells_recomputed_in_backward(void **state) {
    (void)state;
    const char *const shapes[] = {"b1h1k1.q70k70.d32", "b1h2k1.q5k70.d32"};
    for (int type = 0; type < TYPES; type++)
        for (int n = 0; n < 2 * HIDINGS; n++) {
            const hiding *h = &hidings[n / 2];
            fbh_problem p;
            if (strstr(h->words, "topleft") && n % 2 == 0)
                continue; /* all keys are seen */
            open_case(&p, "%s.%s.%s.exact", type_name(type), shapes[n % 2], h->words);
            h->hide(&p);
            if (strcmp(h->words, "lensk") == 0)
                fbh_set(&p.t[FBH_LENS_K], 0, 0, 0, 0, 41);
            fbh_problem_cells(&p);
            for (place at = START; next(&p.t[FBH_Q], &at);)
                set(&p.t[FBH_Q], at, at.d == 0);
            for (place at = START; next(&p.t[FBH_K], &at);)
                set(&p.t[FBH_K], at, at.d == 0 ? (seen(&p, at) ? -95 : 95) * sqrt(32) : 0);
            check_everywhere(&p, EVERYWHERE);
            fbh_problem_destroy(&p);
        }
}

/* ---- What is seen -------------------------------------------------------------------------------------- */

/* Row 3 or key 5 of batch entry 0, head 1. */
static const place spoiled_row = {0, 1, 3, 0}, spoiled_key = {0, 1, 5, 0};

/* Is this element of an output NaN, once q's row, k's key or column 2 of v's key is? Causal, Lq = Lk, no
 * groups: query i sees the keys j <= i. */
static bool reached(fbh_id input, fbh_id id, place at) {
    const bool keys = id == FBH_DK || id == FBH_DV;
    if (at.b != spoiled_row.b || at.h != spoiled_row.h)
        return false;
    if (input == FBH_Q)
        return keys ? at.i <= spoiled_row.i : at.i == spoiled_row.i;
    if (input == FBH_V && (id == FBH_DV || id == FBH_LSE))
        return false;
    if (keys)
        return true; /* the last row sees all keys, and the spoiled one */
    return at.i >= spoiled_key.i && (input != FBH_V || id != FBH_OUT || at.d == 2);
}

static void br_14_nan_in_visible_inputs_must_not_vanish(void **state) {
    (void)state;
    const fbh_id inputs[] = {FBH_Q, FBH_K, FBH_V};
    for (int type = 0; type < TYPES; type++)
        for (int n = 0; n < 6; n++) {
            const fbh_id input = inputs[n / 2];
            const char *const shape = n % 2 ? "b2h4k4.q16k16.d8.causal" : "b2h4k4.q8k8.d8.causal";
            fbh_problem p, clean;
            open_case(&p, "%s.%s", type_name(type), shape);
            open_case(&clean, "%s.%s", type_name(type), shape);
            if (input == FBH_V)
                fbh_set(&p.t[input], spoiled_key.b, spoiled_key.h, spoiled_key.i, 2, not_a_number);
            else
                set_row(&p.t[input], 0, 1, input == FBH_Q ? spoiled_row.i : spoiled_key.i, not_a_number);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&clean, &w);
                run(&p, &w);
                for (int id = FBH_OUT; id <= FBH_DV; id++)
                    for (place at = START; next(&p.t[id], &at);)
                        expect_exactly(&p.t[id], at,
                                       reached(input, (fbh_id)id, at) ? not_a_number : get(&clean.t[id], at));
            }
            fbh_problem_destroy(&p);
            fbh_problem_destroy(&clean);
        }
}

/* R3: a NaN in keys that some rows see changes no bit of the rows that see none of them, whatever lies beside
 * them in a vector: out, lse and dq. Keys 7, 15, ... under a causal mask: row i sees none while i < 7. */
static void check_neighbours(const char *name) {
    fbh_problem clean, p;
    open_case(&clean, "%s", name);
    open_case(&p, "%s", name);
    for (int64_t h = 0; h < p.t[FBH_K].heads; h++)
        for (int64_t j = 7; j < p.desc.len_k; j += 8)
            set_row(&p.t[FBH_K], 0, h, j, (double)NAN);
    for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
        run(&clean, &w);
        run(&p, &w);
        const fbh_id ids[] = {FBH_OUT, FBH_LSE, FBH_DQ};
        for (int n = 0; n < 3; n++)
            for (place at = START; next(&p.t[ids[n]], &at);)
                if (at.i < 7)
                    expect_exactly(&p.t[ids[n]], at, get(&clean.t[ids[n]], at));
    }
    fbh_problem_destroy(&clean);
    fbh_problem_destroy(&p);
}

static void r3_nan_of_other_rows_changes_no_bit(void **state) {
    (void)state;
    check_neighbours("f64.b1h2k1.q64k64.d8.causal.exact");
    check_neighbours("f32.b1h2k1.q64k64.d8.causal.exact");
    check_neighbours("f32.b1h2k1.q64k64.d8.causal.sinks.dsinks.exact");
    check_neighbours("bf16.b1h2k1.q64k64.d32.causal.exact");
}

/* A logit of +inf: exp(inf - inf) is NaN, as in any softmax that subtracts its maximum. Row 3 has it; all
 * other rows of that head have a logit of -inf there, which is a weight of 0. */
static void br_14_infinite_logit(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int n = 0; n < 2; n++) {
            fbh_problem p, clean;
            open_case(&p, "%s.b2h4k4.q%dk16.d8.exact.fwd", type_name(type), n ? 16 : 5);
            open_case(&clean, "%s.b2h4k4.q%dk16.d8.exact.fwd", type_name(type), n ? 16 : 5);
            for (int64_t i = 0; i < p.desc.len_q; i++)
                fbh_set(&p.t[FBH_Q], 0, 1, i, 0, i == spoiled_row.i ? 1 : -1);
            fbh_set(&p.t[FBH_K], 0, 1, spoiled_key.i, 0, infinite);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&clean, &w);
                run(&p, &w);
                for (place at = START; next(&p.t[FBH_OUT], &at);) {
                    const bool head = at.b == 0 && at.h == 1, row = head && at.i == spoiled_row.i;
                    const double out = get(&p.t[FBH_OUT], at), lse = get(&p.t[FBH_LSE], at);
                    if (!head)
                        expect_exactly(&p.t[FBH_OUT], at, get(&clean.t[FBH_OUT], at));
                    else
                        expect(row ? isnan(out) && !isfinite(lse) : isfinite(out) && isfinite(lse),
                               "row %" PRId64 " has out %g and lse %g", at.i, out, lse);
                }
            }
            fbh_problem_destroy(&p);
            fbh_problem_destroy(&clean);
        }
}

/* dO[1,0,7,3] = +inf. */
static void br_15_infinity_in_dout(void **state) {
    (void)state;
    const char *const shapes[] = {"b2h2k2.q33k33.d16", "b2h2k2.q33k33.d16.causal", "b2h2k2.q8k33.d16",
                                  "b2h2k2.q8k8.d16.causal"};
    for (int type = 0; type < TYPES; type++)
        for (int n = 0; n < 4; n++) {
            fbh_problem p, clean;
            open_case(&p, "%s.%s", type_name(type), shapes[n]);
            open_case(&clean, "%s.%s", type_name(type), shapes[n]);
            fbh_set(&p.t[FBH_DOUT], 1, 0, 7, 3, infinite);
            const int64_t keys = n % 2 ? 8 : 33; /* that row 7 sees */
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&clean, &w);
                run(&p, &w);
                for (int id = FBH_DQ; id <= FBH_DV; id++)
                    for (place at = START; next(&p.t[id], &at);) {
                        const bool head = at.b == 1 && at.h == 0;
                        const bool touched = head && (id == FBH_DQ ? at.i == 7 : at.i < keys);
                        if (id == FBH_DV && touched && at.d == 3)
                            expect_exactly(&p.t[id], at, infinite);
                        else if (id != FBH_DV && touched)
                            expect(!isfinite(get(&p.t[id], at)), "%s of row %" PRId64 " is %g, a number",
                                   p.t[id].name, at.i, get(&p.t[id], at));
                        else
                            expect_exactly(&p.t[id], at, get(&clean.t[id], at));
                    }
            }
            fbh_problem_destroy(&p);
            fbh_problem_destroy(&clean);
        }
}

/* An infinite key that all see at a logit of -inf: its own dV is 0, its dK finite, also where lanes of a tile
 * lie idle (40 of 64) and see 0 * inf. With no other key a row is empty, and so is its dQ. */
static void r4_minus_infinite_key(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int all = 0; all < 2; all++) {
            fbh_problem p;
            open_case(&p, "%s.b1h1k1.q40k64.d32.exact", type_name(type));
            for (place at = START; next(&p.t[FBH_Q], &at);)
                if (at.d == 0)
                    set(&p.t[FBH_Q], at, 1);
            for (place at = START; next(&p.t[FBH_K], &at);)
                if (at.d == 0 && (all || at.i == 5))
                    set(&p.t[FBH_K], at, -infinite);
            for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                run(&p, &w);
                for (int id = FBH_DK; id <= FBH_DV; id++)
                    for (place at = START; next(&p.t[id], &at);)
                        expect(isfinite(get(&p.t[id], at)), "%s[%" PRId64 ",%" PRId64 "] is %g", p.t[id].name,
                               at.i, at.d, get(&p.t[id], at));
                for (place at = START; next(&p.t[FBH_DV], &at);)
                    if (at.i == 5)
                        expect_exactly(&p.t[FBH_DV], at, 0);
                for (place at = START; all && next(&p.t[FBH_DQ], &at);)
                    expect_exactly(&p.t[FBH_DQ], at, 0);
            }
            fbh_problem_destroy(&p);
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(br_13_nan_in_keys_and_values_that_no_query_sees),
        cmocka_unit_test(br_13_nan_in_padded_queries),
        cmocka_unit_test(br_05_masked_cells_recomputed_in_backward),
        cmocka_unit_test(br_14_nan_in_visible_inputs_must_not_vanish),
        cmocka_unit_test(r3_nan_of_other_rows_changes_no_bit),
        cmocka_unit_test(r4_minus_infinite_key),
        cmocka_unit_test(br_14_infinite_logit),
        cmocka_unit_test(br_15_infinity_in_dout),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
