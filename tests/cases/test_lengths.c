/* How long things are: packed batches, zero-sized dimensions, tile edges, many keys, chunks of one sequence.
 * Read br_51 for how parts of an attention make up the whole. */
#include "support.h"

/* ---- Packed batches ------------------------------------------------------------------------------------ */

/* Replaces the lengths that the harness chose. */
static void set_cu(fbh_problem *p, const int32_t *cu_q, const int32_t *cu_k) {
    for (int64_t b = 0; b <= p->desc.batch; b++) {
        fbh_set(&p->t[FBH_CU_Q], 0, 0, 0, b, p->cu_q[b] = cu_q[b]);
        fbh_set(&p->t[FBH_CU_K], 0, 0, 0, b, p->cu_k[b] = cu_k[b]);
    }
}

static void br_08_packed_causal_keys_far_shorter_than_queries(void **state) {
    (void)state;
    const int32_t cu_q[] = {0, 76, 110, 256}, cu_k[] = {0, 1, 2, 3};
    for (int type = 0; type < TYPES; type++) {
        fbh_problem p;
        answer a;
        open_case(&p, "%s.b3h1k1.q170k1.d32.packed.causal.exact", type_name(type)); /* total_q is 257 */
        set_cu(&p, cu_q, cu_k);
        fbh_problem_fill(&p, 0);
        set_all(&p.t[FBH_DOUT], 1);
        open_answer(&a, &p);
        for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
            run(&p, &w);
            agree(&p, &a);
            for (place at = START; next(&p.t[FBH_OUT], &at);) {
                const bool last = at.i == cu_q[at.b + 1] - cu_q[at.b] - 1;
                expect_exactly(&p.t[FBH_OUT], at, last ? fbh_get(&p.t[FBH_V], at.b, 0, 0, at.d) : 0);
                expect_near(&p.t[FBH_DQ], at, 0, 1e-5);
            }
            for (place at = START; next(&p.t[FBH_DV], &at);)
                expect_exactly(&p.t[FBH_DV], at, 1);
        }
        close_answer(&a);
        fbh_problem_destroy(&p);
    }
}

/* Rows past cu[B] are left alone (R17): `run` checks that they keep their canary, all others are right. */
static void br_59_packed_tensors_longer_than_their_sequences(void **state) {
    (void)state;
    const int32_t cu[] = {0, 144, 432, 944};
    for (int type = 0; type < TYPES; type++) {
        fbh_problem p;
        open_case(&p, "%s.b3h1k1.q629k629.d8.packed.causal.left40.exact",
                  type_name(type)); /* total_q is 946 */
        assert_int_equal(p.desc.total_q, 946);
        set_cu(&p, cu, cu);
        fbh_problem_fill(&p, 0);
        check_everywhere(&p, EVERYWHERE);
        fbh_problem_destroy(&p);
    }
}

static void br_59_wrong_boundaries_are_refused(void **state) {
    (void)state;
    const struct {
        int32_t cu[4];
        const char *word, *value;
    } rows[] = {{{0, 5, 3, 6}, "[2]", "3 after 5"},
                {{1, 2, 3, 4}, "[0]", "is 1"},
                {{0, 4, 8, 17}, "ends at 17", "total_"},
                {{0, 0, 0, 10}, "10 rows", "9"},
                {{0, -1, 3, 4}, "[1]", "-1"}};
    for (size_t n = 0; n < 2 * sizeof rows / sizeof *rows; n++) {
        const int32_t right[] = {0, 3, 6, 9}, *wrong = rows[n / 2].cu;
        fbh_problem p;
        fb_io io;
        open_case(&p, "f32.b3h1k1.q9k9.d8.packed"); /* both totals are 16 or more */
        p.desc.total_q = p.desc.total_k = 16;
        for (where w = EVERY_ROUTE; next_where(&w, &p.desc);) {
            fb_plan *plan = plan_at(&p, &w);
            expect_ok(fbh_problem_ready(&p, plan, FBH_FORWARD));
            fbh_problem_io(&p, FBH_FORWARD, &io);
            for (int b = 0; b < 4; b++) {
                fbh_set(&p.t[FBH_CU_Q], 0, 0, 0, b, n % 2 ? wrong[b] : right[b]);
                fbh_set(&p.t[FBH_CU_K], 0, 0, 0, b, n % 2 ? right[b] : wrong[b]);
            }
            expect_refused(fb_forward(plan, &io), FB_INVALID, n % 2 ? "cu_q" : "cu_k", rows[n / 2].word,
                           rows[n / 2].value);
            fb_plan_destroy(plan);
        }
        fbh_problem_destroy(&p);
    }
}

/* ---- Nothing at all ------------------------------------------------------------------------------------ */

enum { DIMS = 7 };
static const char *const dim_names[DIMS] = {"B", "Hq", "Hkv", "Lq", "Lk", "D", "Dv"};

/* Empty tensors are NULL. */
static void run_with_nulls(fbh_problem *p, const where *w) {
    fb_plan *plan = plan_at(p, w);
    for (int pass = FBH_FORWARD; pass <= FBH_BACKWARD; pass++) {
        fb_io io;
        expect_ok(fbh_problem_ready(p, plan, (fbh_pass)pass));
        fbh_problem_io(p, (fbh_pass)pass, &io);
        fb_ref *const refs[] = {&io.q, &io.k, &io.v, &io.out, &io.lse, &io.dout, &io.dq, &io.dk, &io.dv};
        const fbh_id ids[] = {FBH_Q, FBH_K, FBH_V, FBH_OUT, FBH_LSE, FBH_DOUT, FBH_DQ, FBH_DK, FBH_DV};
        for (size_t n = 0; n < sizeof ids / sizeof *ids; n++) {
            const fbh_tensor *t = &p->t[ids[n]];
            if (t->batch * t->heads * t->rows * t->cols == 0)
                *refs[n] = (fb_ref){NULL, 0};
        }
        expect_ok(pass == FBH_FORWARD ? fb_forward(plan, &io) : fb_backward(plan, &io));
    }
    fb_plan_destroy(plan);
}

static void br_57_zero_sized_dimensions(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int sinks = 0; sinks < 2; sinks++)
            for (int one = 0; one < DIMS; one++)
                for (int two = one; two < DIMS; two++) {
                    int dims[DIMS] = {2, 4, 2, 6, 9, 8, 8};
                    fbh_problem p;
                    answer a;
                    dims[one] = dims[two] = 0;
                    if (dims[1] && !dims[2])
                        continue; /* refused, see below */
                    open_case(&p, "%s.b%dh%dk%d.q%dk%d.d%dv%d.scale1.exact%s", type_name(type), dims[0],
                              dims[1], dims[2], dims[3], dims[4], dims[5], dims[6],
                              sinks ? ".sinks.dsinks" : "");
                    open_answer(&a, &p);
                    for (where w = EVERYWHERE; next_where(&w, &p.desc);) {
                        run_with_nulls(&p, &w);
                        agree(&p, &a);
                        for (int id = FBH_OUT; id <= FBH_DV; id++)
                            for (place at = START; next(&p.t[id], &at);)
                                expect(!isnan(get(&p.t[id], at)), "%s is not written, with %s and %s 0",
                                       p.t[id].name, dim_names[one], dim_names[two]);
                    }
                    close_answer(&a);
                    fbh_problem_destroy(&p);
                }
}

/* What the answer says about them, spelled out once. */
static void br_57_values_without_keys_and_queries(void **state) {
    (void)state;
    fbh_problem keyless, rowless, flat;
    open_case(&keyless, "f32.b1h2k1.q6k0.d8.exact");
    open_case(&rowless, "f32.b1h2k1.q0k9.d8.exact");
    open_case(&flat, "f32.b1h2k1.q6k9.d0v8.scale1.exact");
    for (where w = EVERYWHERE; next_where(&w, &keyless.desc);) {
        run(&keyless, &w);
        run(&rowless, &w);
        run(&flat, &w);
        for (place at = START; next(&keyless.t[FBH_OUT], &at);) {
            expect_exactly(&keyless.t[FBH_OUT], at, 0);
            expect_exactly(&keyless.t[FBH_DQ], at, 0);
            expect_exactly(&keyless.t[FBH_LSE], at, -infinite);
            expect_near(&flat.t[FBH_LSE], at, log(9), 1e-6);
        }
        for (place at = START; next(&rowless.t[FBH_DK], &at);) {
            expect_exactly(&rowless.t[FBH_DK], at, 0);
            expect_exactly(&rowless.t[FBH_DV], at, 0);
        }
    }
    rowless.desc.heads_kv = 0;
    expect_refused(fb_supported(&rowless.desc), FB_INVALID, "heads_q is 2", "heads_kv is 0", "multiple");
    flat.desc.scale = not_a_number;
    expect_refused(fb_supported(&flat.desc), FB_INVALID, "scale", "head_dim is 0", "give a scale");
    fbh_problem_destroy(&keyless);
    fbh_problem_destroy(&rowless);
    fbh_problem_destroy(&flat);
}

/* ---- Edges --------------------------------------------------------------------------------------------- */

/* S0: an inverted alignment flag sent lengths next to the tile down the unchecked path. Forbidden pages lie
 * behind every tensor, then before. */
static void s0_lengths_around_tiles_with_guard_pages(void **state) {
    (void)state;
    const int edges[] = {15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129};
    enum { EDGES = sizeof edges / sizeof *edges };
    for (int n = 0; n < TYPES * EDGES; n++)
        for (int guard = FBH_GUARD_END; guard <= FBH_GUARD_START; guard++) {
            const int keys = edges[n / TYPES], other = edges[(n * 5 + guard) % EDGES];
            char name[FBH_NAME_SIZE], error[256];
            fbh_case what;
            fbh_problem p;
            snprintf(name, sizeof name, "%s.b1h2k1.q%dk%d.d24%s", type_name(n % TYPES), other, keys,
                     guard == FBH_GUARD_END ? "" : ".causal");
            assert_true(fbh_case_parse(&what, name, error, sizeof error));
            fbh_problem_create(&p, &what, FB_CPU, 0, (fbh_guard)guard, false);
            fbh_problem_fill(&p, 0);
            check_everywhere(&p, EVERYWHERE);
            fbh_problem_destroy(&p);
        }
}

static void br_26_key_positions_beyond_16_bits(void **state) {
    (void)state;
    const char *const options[] = {"bias111k.farbias", "causal.left1023", "bias111k.farbias.causal"};
    const int lengths[] = {32767, 32768, 32769, 40000, 65535, 65536, 66048};
    for (size_t n = 0; n < sizeof lengths / sizeof *lengths; n++)
        for (int option = 0; option < (n % 3 ? 1 : 3); option++) {
            fbh_problem p;
            open_case(&p, "f16.b1h2k1.q5k%d.d8.%s", lengths[n], options[option]);
            check_everywhere(&p, n == 0 ? EVERYWHERE : EVERY_ROUTE);
            fbh_problem_destroy(&p);
        }
    fbh_problem p;
    open_case(&p, "f32.b1h1k1.q9k66048.d2.causal.topleft.offset65530.left600");
    check_everywhere(&p, EVERY_ROUTE);
    fbh_problem_destroy(&p);
}

/* ---- Chunks -------------------------------------------------------------------------------------------- */

enum { LEN = 203, DIM = 16, HEADS = 2, SIZE = HEADS * LEN * DIM };

/* One attention over 203 positions, in pieces that read and write parts of these arrays. */
typedef struct pieces {
    float q[SIZE], k[SIZE], v[SIZE], out[SIZE], dout[SIZE], dq[SIZE], dk[SIZE], dv[SIZE], lse[HEADS * LEN];
} pieces;

static fb_ref ref_of(float *data, int64_t row) { return (fb_ref){data, (uint64_t)row * DIM * sizeof *data}; }

/* Queries [from, to) over keys [0, to): bottom-right puts the last query at the last key. */
static void run_piece(pieces *a, const where *w, int64_t from, int64_t to) {
    const fb_strides whole = {0, LEN * DIM, DIM};
    float lse[HEADS * LEN];
    fb_desc d;
    fb_plan *plan;
    fb_io io;
    fb_desc_init(&d, sizeof d);
    d.batch = 1, d.heads_q = d.heads_kv = HEADS, d.head_dim = d.head_dim_v = DIM;
    d.len_q = to - from, d.len_k = to;
    d.window = fb_window_causal();
    d.flags = FB_ACCUMULATE;
    d.route = w->route;
    d.q = d.k = d.v = d.out = d.dout = d.dq = d.dk = d.dv = whole;
    expect_ok(fb_plan_create(&plan, &d));
    fb_io_init(&io, sizeof io);
    io.q = ref_of(a->q, from), io.out = ref_of(a->out, from);
    io.k = ref_of(a->k, 0), io.v = ref_of(a->v, 0);
    io.lse = (fb_ref){lse, 0};
    io.workspace_size = fb_plan_workspace(plan);
    io.workspace.data = malloc(io.workspace_size);
    assert_non_null(io.workspace.data);
    memset(io.workspace.data, 0xFF, io.workspace_size);
    memset(lse, 0xFF, sizeof lse);
    expect_ok(fb_forward(plan, &io));
    io.dout = ref_of(a->dout, from), io.dq = ref_of(a->dq, from);
    io.dk = ref_of(a->dk, 0), io.dv = ref_of(a->dv, 0);
    expect_ok(fb_backward(plan, &io));
    for (int64_t h = 0; h < HEADS; h++)
        memcpy(a->lse + h * LEN + from, lse + h * (to - from), (size_t)(to - from) * sizeof *lse);
    free(io.workspace.data);
    fb_plan_destroy(plan);
}

static void set_pieces(pieces *a) {
    memset(a, 0, sizeof *a);
    memset(a->out, 0xFF, sizeof a->out);
    memset(a->lse, 0xFF, sizeof a->lse);
    for (uint64_t n = 0; n < SIZE; n++) {
        a->q[n] = (float)fbh_normal(1, n), a->k[n] = (float)fbh_normal(2, n);
        a->v[n] = (float)fbh_normal(3, n), a->dout[n] = (float)fbh_normal(4, n);
    }
}

static void expect_close(const float *x, const float *y, size_t n, const char *name) {
    for (size_t i = 0; i < n; i++)
        expect(fabsf(x[i] - y[i]) <= 2e-5F, "%s[%zu] is %.9g in chunks and %.9g in one", name, i,
               (double)x[i], (double)y[i]);
}

static void br_51_chunked_causal_attention_equals_the_full_one(void **state) {
    (void)state;
    const int64_t sizes[] = {1, 3, 16, 17, 64, 100};
    static pieces full, a;
    const fb_desc any = {.len_q = 1};
    for (size_t n = 0; n < sizeof sizes / sizeof *sizes; n++)
        for (where w = EVERYWHERE; next_where(&w, &any);) {
            const where fused = {.route = w.route == FB_VECTOR ? FB_FUSED : w.route};
            if (w.route == FB_VECTOR && sizes[n] > 8)
                continue;
            snprintf(here, sizeof here, "chunks of %" PRId64 " on %s, %s", sizes[n], fb_route_name(w.route),
                     getenv("FLASHBACK_ISA"));
            set_pieces(&full);
            set_pieces(&a);
            run_piece(&full, &fused, 0, LEN);
            for (int64_t from = 0; from < LEN; from += sizes[n])
                run_piece(&a, &w, from, from + sizes[n] < LEN ? from + sizes[n] : LEN);
            expect_close(a.out, full.out, SIZE, "out");
            expect_close(a.lse, full.lse, HEADS * LEN, "lse");
            expect_close(a.dq, full.dq, SIZE, "dq");
            expect_close(a.dk, full.dk, SIZE, "dk");
            expect_close(a.dv, full.dv, SIZE, "dv");
        }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(br_08_packed_causal_keys_far_shorter_than_queries),
        cmocka_unit_test(br_59_packed_tensors_longer_than_their_sequences),
        cmocka_unit_test(br_59_wrong_boundaries_are_refused),
        cmocka_unit_test(br_57_zero_sized_dimensions),
        cmocka_unit_test(br_57_values_without_keys_and_queries),
        cmocka_unit_test(s0_lengths_around_tiles_with_guard_pages),
        cmocka_unit_test(br_26_key_positions_beyond_16_bits),
        cmocka_unit_test(br_51_chunked_causal_attention_equals_the_full_one),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
