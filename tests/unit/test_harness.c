/* The harness judges everything else; here it is judged: its numbers, its problems, its formula, and that its
 * comparison fails when it should. test_cases.c is about the list of cases. */
#include "harness/harness.h"

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

/* ---- Numbers ------------------------------------------------------------------------------------------- */

typedef struct half_format {
    uint16_t (*narrow)(double);
    double (*widen)(uint16_t);
    uint16_t inf;
} half_format;

static const half_format formats[] = {{fbh_to_f16, fbh_from_f16, 0x7C00},
                                      {fbh_to_bf16, fbh_from_bf16, 0x7F80}};

/* Every value survives the way there and back, with both signs. */
static void test_all_16_bit_values(void **state) {
    (void)state;
    for (int f = 0; f < 2; f++)
        for (uint32_t bits = 0; bits < 0x10000; bits++) {
            const double x = formats[f].widen((uint16_t)bits);
            if ((bits & 0x7FFF) > formats[f].inf) {
                assert_true(isnan(x));
                assert_true((formats[f].narrow(x) & 0x7FFF) > formats[f].inf);
            } else
                assert_int_equal(formats[f].narrow(x), bits);
        }
}

/* Between each pair of neighbours the midpoint goes to the even one, and anything beside it to the nearer. */
static void test_rounding_between_neighbours(void **state) {
    (void)state;
    for (int f = 0; f < 2; f++)
        for (uint16_t bits = 0; bits < formats[f].inf; bits++) {
            const double lo = formats[f].widen(bits);
            const uint16_t up = (uint16_t)(bits + 1);
            /* The last finite value rounds up to inf where the next would be without a limit. */
            const double hi =
                up == formats[f].inf ? 2 * lo - formats[f].widen((uint16_t)(bits - 1)) : formats[f].widen(up);
            const double middle = (lo + hi) / 2;
            assert_int_equal(formats[f].narrow(middle), bits & 1 ? up : bits);
            assert_int_equal(formats[f].narrow(nextafter(middle, 0)), bits);
            assert_int_equal(formats[f].narrow(nextafter(middle, 1e300)), up);
            assert_int_equal(formats[f].narrow(-nextafter(middle, 1e300)), up | 0x8000);
        }
}

static void test_known_numbers(void **state) {
    (void)state;
    assert_true(fbh_from_f16(0x7BFF) == 65504);
    assert_true(fbh_from_f16(0x0001) == ldexp(1, -24));
    assert_int_equal(fbh_to_f16(1e300), 0x7C00);
    assert_int_equal(fbh_to_f16(5e-324), 0);
    assert_true(fbh_from_bf16(0x3F80) == 1);
    assert_true(fbh_from_bf16(0x0001) == ldexp(1, -133));
    assert_true(fbh_ulp(FB_F16, 1) == ldexp(1, -10));
    assert_true(fbh_ulp(FB_BF16, -1.5) == ldexp(1, -7));
    assert_true(fbh_ulp(FB_F32, 0) == ldexp(1, -149));
    assert_true(fbh_ulp(FB_F64, 1) == ldexp(1, -52));
    for (int type = FB_F32; type <= FB_F64; type++) {
        double bytes[1];
        fbh_store(type, bytes, -0.3);
        assert_true(fbh_load(type, bytes) == fbh_round(type, -0.3));
        assert_true(fabs(fbh_round(type, -0.3) + 0.3) <= fbh_ulp(type, 0.3) / 2);
    }
}

/* val(1,i) and val(7,i) of the golden values' generator, in units of 1/64. */
static void test_values(void **state) {
    (void)state;
    static const int of_1[] = {4, -61, -22, 24, -62, 39}, of_7[] = {18, -51, -51, -36};
    double sum = 0, squares = 0;
    enum { MANY = 100000 };
    for (uint64_t i = 0; i < sizeof of_1 / sizeof *of_1; i++)
        assert_true(fbh_exact(1, i) * 64 == of_1[i]);
    for (uint64_t i = 0; i < sizeof of_7 / sizeof *of_7; i++)
        assert_true(fbh_exact(7, i) * 64 == of_7[i]);
    for (uint64_t i = 0; i < MANY; i++) {
        const double x = fbh_normal(3, i);
        sum += x;
        squares += x * x;
        assert_true(fabs(x) < 3.5);
    }
    assert_true(fabs(sum / MANY) < 0.02);
    assert_true(fabs(squares / MANY - 1) < 0.02);
}

static void test_statistics(void **state) {
    (void)state;
    double samples[] = {5, 1, 4, 2, 3, 6, 7, 8, 10, 9};
    const fbh_stats s = fbh_stats_of(samples, 10);
    assert_true(s.min == 1 && s.median == 5.5 && s.p90 == 9);
    assert_true(fbh_now() <= fbh_now());
    assert_true(fbh_peak_rss() % 1024 == 0);
}

/* ---- Problems ------------------------------------------------------------------------------------------ */

static void make_guarded(fbh_problem *p, const char *name, fbh_guard guard) {
    fbh_case c;
    char error[512];
    if (!fbh_case_parse(&c, name, error, sizeof error))
        fail_msg("%s", error);
    fbh_problem_create(p, &c, FB_CPU, 0, guard, false);
    fbh_problem_fill(p, 1);
}

static void make(fbh_problem *p, const char *name) { make_guarded(p, name, FBH_GUARD_END); }

/* The values of a case do not depend on how it lies in memory. */
static void test_layouts_agree(void **state) {
    (void)state;
    static const char *const names[] = {"f32.b2h2k2.q5k5.d3.causal.blhd", "f32.b2h2k2.q5k5.d3.causal.qkv",
                                        "f32.b2h2k2.q5k5.d3.causal.padded", "f32.b2h2k2.q5k5.d3.causal.odd"};
    fbh_problem plain, other;
    make(&plain, "f32.b2h2k2.q5k5.d3.causal");
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        make(&other, names[n]);
        for (int id = FBH_Q; id <= FBH_DOUT; id++)
            for (int64_t b = 0; b < 2; b++)
                for (int64_t h = 0; h < 2; h++)
                    for (int64_t i = 0; i < 5; i++)
                        for (int64_t d = 0; d < 3; d++)
                            assert_true(fbh_get(&plain.t[id], b, h, i, d) ==
                                        fbh_get(&other.t[id], b, h, i, d));
        fbh_problem_destroy(&other);
    }
    fbh_problem_destroy(&plain);
}

static void test_odd_addresses(void **state) {
    (void)state;
    static const fbh_guard guards[] = {FBH_GUARD_NONE, FBH_GUARD_END, FBH_GUARD_START};
    for (int g = 0; g < 3; g++) {
        fbh_problem p;
        make_guarded(&p, "bf16.b1h2k1.q5k7.d40.odd.biasbhqk.sinks", guards[g]);
        for (int id = 0; id < FBH_WORKSPACE; id++)
            if (p.t[id].buffer)
                assert_int_equal((uintptr_t)fbh_at(&p.t[id], 0, 0, 0, 0) % 64, fbh_size(p.t[id].type));
        fbh_problem_destroy(&p);
    }
}

/* Does reading this byte end the process? */
static bool faults(const volatile unsigned char *at) {
    const pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL);
        signal(SIGBUS, SIG_DFL);
        _exit(*at == 0 ? 1 : 0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFSIGNALED(status);
}

static void test_guard_pages(void **state) {
    (void)state;
    fbh_problem p;
    make_guarded(&p, "f32.b1h2k1.q5k7.d3", FBH_GUARD_END);
    const fbh_buffer *q = p.t[FBH_Q].buffer;
    assert_false(faults(q->data + q->bytes - 1));
    assert_true(faults(q->data + q->bytes));
    fbh_problem_destroy(&p);
    make_guarded(&p, "f32.b1h2k1.q5k7.d3", FBH_GUARD_START);
    assert_false(faults(p.t[FBH_Q].buffer->data));
    assert_true(faults(p.t[FBH_Q].buffer->data - 1));
    fbh_problem_destroy(&p);
}

static fb_plan *reference_plan(fbh_problem *p) {
    fb_plan *plan;
    p->desc.route = FB_REFERENCE;
    if (fb_plan_create(&plan, &p->desc) != FB_OK)
        fail_msg("%s", fb_last_error());
    return plan;
}

static void flip(const fbh_tensor *t, int64_t byte) { t->buffer->data[t->offset + (uint64_t)byte] ^= 1; }

/* Writes where none belong are seen: an input, a gap, a row behind the last packed sequence; writes to an
 * output are not. */
static void test_intact(void **state) {
    (void)state;
    char message[256];
    fbh_problem p;
    make(&p, "f32.b5h2k1.q4k3.d5.packed.padded");
    fb_plan *plan = reference_plan(&p);
    assert_int_equal(fbh_problem_ready(&p, plan, FBH_FORWARD), FB_OK);
    const fbh_tensor *out = &p.t[FBH_OUT];
    const int64_t size = 4, gap = 5 * size, tail = p.cu_q[5] * out->stride.row * size;
    struct {
        fbh_id id;
        int64_t byte;
        bool legal;
    } const row[] = {{FBH_OUT, 0, true},         {FBH_OUT, gap, false}, {FBH_OUT, tail, false},
                     {FBH_OUT, tail - 1, false}, {FBH_LSE, 0, true},    {FBH_K, 0, false},
                     {FBH_DQ, 0, false},         {FBH_CU_Q, 4, false}};
    for (size_t n = 0; n < sizeof row / sizeof *row; n++) {
        flip(&p.t[row[n].id], row[n].byte);
        assert_int_equal(fbh_problem_intact(&p, FBH_FORWARD, message, sizeof message), row[n].legal);
        flip(&p.t[row[n].id], row[n].byte);
        assert_true(fbh_problem_intact(&p, FBH_FORWARD, message, sizeof message));
    }
    fb_plan_destroy(plan);
    fbh_problem_destroy(&p);
}

/* Masks are made to bite, and what they hide is NaN. */
static void test_poison(void **state) {
    (void)state;
    fbh_problem p;
    make(&p, "f32.b2h2k1.q7k3.d4.causal.lensk");
    assert_true(isnan(fbh_get(&p.t[FBH_DOUT], 0, 1, 0, 0))); /* row 0 is at position -4 */
    assert_false(p.live_rows[0]);
    assert_true(!isnan(fbh_get(&p.t[FBH_DOUT], 0, 1, 6, 0)));
    assert_true(fbh_get(&p.t[FBH_LENS_K], 0, 0, 0, 0) == 2);
    assert_true(!isnan(fbh_get(&p.t[FBH_K], 0, 0, 1, 0)));
    assert_true(isnan(fbh_get(&p.t[FBH_K], 0, 0, 2, 0))); /* behind the length */
    assert_true(isnan(fbh_get(&p.t[FBH_V], 0, 0, 2, 3)));
    fbh_problem_destroy(&p);
}

/* ---- The plain formula --------------------------------------------------------------------------------- */

/* With all logits 0 everything can be said without a softmax. */
static void test_low_uniform(void **state) {
    (void)state;
    fbh_problem p;
    make(&p, "f64.b1h2k1.q3k5.d4.causal.scale0");
    fbh_low(&p, FB_F64);
    for (int64_t h = 0; h < 2; h++)
        for (int64_t i = 0; i < 3; i++) {
            const int64_t count = i + 3; /* bottom-right: j <= i + 2 */
            assert_true(fabs(fbh_get(&p.t[FBH_LSE], 0, h, i, 0) - log((double)count)) < 1e-14);
            for (int64_t d = 0; d < 4; d++) {
                double mean = 0;
                for (int64_t j = 0; j < count; j++)
                    mean += fbh_get(&p.t[FBH_V], 0, 0, j, d) / (double)count;
                assert_true(fabs(fbh_get(&p.t[FBH_OUT], 0, h, i, d) - mean) < 1e-14);
                assert_true(fbh_get(&p.t[FBH_DQ], 0, h, i, d) == 0);
            }
        }
    for (int64_t d = 0; d < 4; d++) { /* the last key is seen by the last query only, with weight 1/5 */
        const double sum = fbh_get(&p.t[FBH_DOUT], 0, 0, 2, d) + fbh_get(&p.t[FBH_DOUT], 0, 1, 2, d);
        assert_true(fabs(fbh_get(&p.t[FBH_DV], 0, 0, 4, d) - sum / 5) < 1e-14);
    }
    fbh_problem_destroy(&p);
}

/* sum O*dO + sum LSE*dLSE, of which the gradients are the gradients. */
static double loss(fbh_problem *p) {
    double sum = 0;
    fbh_low(p, FB_F64);
    for (int64_t b = 0; b < p->desc.batch; b++)
        for (int64_t h = 0; h < p->desc.heads_q; h++)
            for (int64_t i = 0; i < p->desc.len_q; i++) {
                sum += fbh_get(&p->t[FBH_LSE], b, h, i, 0) * fbh_get(&p->t[FBH_DLSE], b, h, i, 0);
                for (int64_t d = 0; d < p->desc.head_dim_v; d++)
                    sum += fbh_get(&p->t[FBH_OUT], b, h, i, d) * fbh_get(&p->t[FBH_DOUT], b, h, i, d);
            }
    return sum;
}

/* Every gradient of the formula against central differences of its forward, with options that interact. */
static void test_low_gradients(void **state) {
    (void)state;
    static const fbh_id pairs[][2] = {
        {FBH_Q, FBH_DQ}, {FBH_K, FBH_DK}, {FBH_V, FBH_DV}, {FBH_BIAS, FBH_DBIAS}, {FBH_SINKS, FBH_DSINKS}};
    const double step = 1e-5;
    fbh_problem p, q;
    make(&p, "f64.b2h4k2.q3k4.d3v2.left2.softcap2.bias1hqk.dbias.sinks.dsinks.dlse.mask11qk.exact");
    make(&q, p.what.name);
    fbh_low(&p, FB_F64);
    for (size_t n = 0; n < sizeof pairs / sizeof *pairs; n++) {
        const fbh_tensor *x = &q.t[pairs[n][0]], *gradient = &p.t[pairs[n][1]];
        double largest = 0;
        for (int64_t e = 0; e < x->batch * x->heads * x->rows * x->cols; e++) {
            const int64_t d = e % x->cols, i = e / x->cols % x->rows, h = e / x->cols / x->rows % x->heads;
            const int64_t b = e / x->cols / x->rows / x->heads;
            const double at = fbh_get(x, b, h, i, d), analytic = fbh_get(gradient, b, h, i, d);
            fbh_set(x, b, h, i, d, at + step);
            const double above = loss(&q);
            fbh_set(x, b, h, i, d, at - step);
            const double below = loss(&q);
            fbh_set(x, b, h, i, d, at);
            if (!(fabs(analytic - (above - below) / (2 * step)) < 1e-8))
                fail_msg("%s element %d: %g, differences say %g", gradient->name, (int)e, analytic,
                         (above - below) / (2 * step));
            largest = fmax(largest, fabs(analytic));
        }
        assert_true(largest > 0.01); /* an option that does nothing would agree as well */
    }
    fbh_problem_destroy(&q);
    fbh_problem_destroy(&p);
}

/* A 16-bit formula is off by about its own last place, and not by that of another type. */
static void test_low_precision(void **state) {
    (void)state;
    static const struct {
        fb_dtype type;
        double lo, hi;
    } row[] = {{FB_F32, 1e-9, 1e-6}, {FB_F16, 1e-5, 3e-3}, {FB_BF16, 1e-4, 3e-2}};
    fbh_problem p, exact;
    make(&exact, "f64.b1h1k1.q9k20.d8");
    fbh_low(&exact, FB_F64);
    for (int n = 0; n < 3; n++) {
        double error = 0;
        make(&p, exact.what.name);
        fbh_low(&p, row[n].type);
        for (int64_t i = 0; i < 9; i++)
            for (int64_t d = 0; d < 8; d++)
                error = fmax(
                    error, fabs(fbh_get(&p.t[FBH_OUT], 0, 0, i, d) - fbh_get(&exact.t[FBH_OUT], 0, 0, i, d)));
        assert_true(error > row[n].lo && error < row[n].hi);
        fbh_problem_destroy(&p);
    }
    fbh_problem_destroy(&exact);
}

/* ---- The comparison ------------------------------------------------------------------------------------ */

/* An oracle, and a correct result to spoil. */
typedef struct bench {
    fbh_oracle oracle;
    fbh_problem got;
} bench;

static void open_bench(bench *t, const char *name) {
    fbh_case c;
    char error[512];
    assert_true(fbh_case_parse(&c, name, error, sizeof error));
    fbh_oracle_open(&t->oracle, &c, 1);
    assert_string_equal(t->oracle.error, "");
    fbh_problem_create(&t->got, &c, FB_CPU, 0, FBH_GUARD_END, false);
    fbh_problem_copy(&t->got, &t->oracle.given);
    fb_plan *plan = reference_plan(&t->got);
    assert_int_equal(fbh_problem_run(&t->got, plan, FBH_FORWARD), FB_OK);
    assert_int_equal(fbh_problem_run(&t->got, plan, FBH_BACKWARD), FB_OK);
    fb_plan_destroy(plan);
}

static void close_bench(bench *t) {
    fbh_problem_destroy(&t->got);
    fbh_oracle_close(&t->oracle);
}

static bool right(const bench *t, fbh_pass pass, char *message, size_t size) {
    return fbh_compare(&t->got, &t->oracle.want, &t->oracle.low, pass, NULL, message, size);
}

/* Puts x in place of one element: the comparison must fail and name it; then puts the element back. */
static void must_fail(bench *t, fbh_pass pass, fbh_id id, int64_t b, int64_t h, int64_t i, int64_t d,
                      double x, const char *named) {
    char message[512] = "";
    const fbh_tensor *at = &t->got.t[id];
    const double was = fbh_get(at, b, h, i, d);
    fbh_set(at, b, h, i, d, x);
    if (right(t, pass, message, sizeof message))
        fail_msg("%s = %g in place of %g was not seen", named, x, was);
    if (strncmp(message, named, strlen(named)) != 0)
        fail_msg("'%s' does not start with %s", message, named);
    fbh_set(at, b, h, i, d, was);
    assert_true(right(t, pass, message, sizeof message));
}

static void test_planted_errors(void **state) {
    (void)state;
    static const char *const names[] = {"f32.b2h2k1.q9k12.d4.causal.dlse", "bf16.b2h2k1.q9k12.d4.causal.dlse",
                                        "f16.b2h2k1.q9k12.d4.causal.dlse", "f64.b2h2k1.q9k12.d4.causal.dlse"};
    static const double sizes[] = {4e-5, 0.2, 0.02, 1e-8};
    for (size_t n = 0; n < 4; n++) {
        bench t;
        open_bench(&t, names[n]);
        const double x = fbh_get(&t.got.t[FBH_OUT], 1, 0, 3, 2), g = fbh_get(&t.got.t[FBH_DK], 1, 0, 3, 2);
        must_fail(&t, FBH_FORWARD, FBH_OUT, 1, 0, 3, 2, x + sizes[n], "out[b1,h0,i3,d2]");
        must_fail(&t, FBH_FORWARD, FBH_OUT, 1, 0, 3, 2, (double)NAN, "out[b1,h0,i3,d2]");
        must_fail(&t, FBH_FORWARD, FBH_OUT, 1, 0, 3, 2, (double)INFINITY, "out[b1,h0,i3,d2]");
        must_fail(&t, FBH_FORWARD, FBH_LSE, 1, 1, 2, 0, fbh_get(&t.got.t[FBH_LSE], 1, 1, 2, 0) + 5e-5,
                  "lse[b1,h1,i2,d0]");
        must_fail(&t, FBH_BACKWARD, FBH_DK, 1, 0, 3, 2, g + 4 * sizes[n], "dk[b1,h0,j3,d2]");
        must_fail(&t, FBH_BACKWARD, FBH_DV, 0, 0, 1, 1, (double)NAN, "dv[b0,h0,j1,d1]");
        close_bench(&t);
    }
}

/* NaN where NaN belongs is right, and a number there is wrong. */
static void test_nan_on_the_other_side(void **state) {
    (void)state;
    bench t;
    char message[512];
    open_bench(&t, "f32.b1h1k1.q3k3.d2");
    fbh_set(&t.oracle.want.t[FBH_OUT], 0, 0, 1, 1, (double)NAN);
    assert_false(right(&t, FBH_FORWARD, message, sizeof message));
    fbh_set(&t.got.t[FBH_OUT], 0, 0, 1, 1, (double)NAN);
    assert_true(right(&t, FBH_FORWARD, message, sizeof message));
    fbh_set(&t.oracle.want.t[FBH_OUT], 0, 0, 1, 1, (double)INFINITY);
    fbh_set(&t.got.t[FBH_OUT], 0, 0, 1, 1, -(double)INFINITY);
    assert_false(right(&t, FBH_FORWARD, message, sizeof message));
    close_bench(&t);
}

/* What nothing reaches is exactly 0 and -inf, not about so. */
static void test_exact_rules(void **state) {
    (void)state;
    bench t;
    open_bench(&t, "f32.b1h1k1.q5k3.d2.causal"); /* rows 0 and 1 are empty */
    must_fail(&t, FBH_FORWARD, FBH_OUT, 0, 0, 1, 0, -0.0, "out[b0,h0,i1,d0]");
    must_fail(&t, FBH_FORWARD, FBH_LSE, 0, 0, 1, 0, -1e30, "lse[b0,h0,i1,d0]");
    must_fail(&t, FBH_BACKWARD, FBH_DQ, 0, 0, 1, 0, 1e-30, "dq[b0,h0,i1,d0]");
    close_bench(&t);
    open_bench(&t, "f32.b1h1k1.q2k5.d2.causal.left1.acc"); /* keys 0 and 1 are out of reach */
    const double before = fbh_get(&t.got.t[FBH_DV], 0, 0, 1, 1);
    must_fail(&t, FBH_BACKWARD, FBH_DV, 0, 0, 1, 1, before + 1e-6, "dv[b0,h0,j1,d1]");
    close_bench(&t);
}

/* One small error in a batch entry of small values is not hidden by a large one beside it. */
static void test_slab_by_slab(void **state) {
    (void)state;
    bench t;
    open_bench(&t, "bf16.b3h2k1.q9k12.d8.massive"); /* v of the entries is 0.1, 1 and 20 times normal */
    const double x = fbh_get(&t.got.t[FBH_OUT], 0, 1, 3, 2);
    must_fail(&t, FBH_FORWARD, FBH_OUT, 0, 1, 3, 2, x + 0.05, "out[b0,h1,i3,d2]");
    close_bench(&t);
}

/* ---- Runs ---------------------------------------------------------------------------------------------- */

static fbh_result run_named(const char *name, fbh_options options) {
    fbh_case c;
    fbh_result r;
    char error[512];
    assert_true(fbh_case_parse(&c, name, error, sizeof error));
    fbh_case_run(&c, 1, &options, &r);
    return r;
}

static void test_runs(void **state) {
    (void)state;
    const fbh_options host = {.route = FB_REFERENCE, .guard = FBH_GUARD_END};
    const fbh_options device = {.route = FB_REFERENCE, .guard = FBH_GUARD_END, .mirrored = true};
    const char *const plain = "f32.b2h2k2.q7k7.d4.causal.sinks.dsinks";
    const fbh_result one = run_named(plain, host), two = run_named(plain, device);
    assert_string_equal(one.message, "");
    assert_int_equal(one.verdict, FBH_PASS);
    assert_int_equal(two.verdict, FBH_PASS);
    assert_true(one.ratio > 0 && one.ratio <= 1);
    assert_true(one.digest == two.digest);
    assert_true(one.digest == run_named("f32.b2h2k2.q7k7.d4.causal.sinks.dsinks.qkv", host).digest);
    assert_false(one.digest == run_named("f32.b2h2k2.q7k7.d4.causal.sinks.dsinks.gain2", host).digest);
    const fbh_result none = run_named(plain, (fbh_options){.device = FB_METAL, .guard = FBH_GUARD_END});
    assert_int_equal(none.verdict, FBH_UNSUPPORTED);
    assert_true(strlen(none.message) > 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_16_bit_values),
        cmocka_unit_test(test_rounding_between_neighbours),
        cmocka_unit_test(test_known_numbers),
        cmocka_unit_test(test_values),
        cmocka_unit_test(test_statistics),
        cmocka_unit_test(test_layouts_agree),
        cmocka_unit_test(test_odd_addresses),
        cmocka_unit_test(test_guard_pages),
        cmocka_unit_test(test_intact),
        cmocka_unit_test(test_poison),
        cmocka_unit_test(test_low_uniform),
        cmocka_unit_test(test_low_gradients),
        cmocka_unit_test(test_low_precision),
        cmocka_unit_test(test_planted_errors),
        cmocka_unit_test(test_nan_on_the_other_side),
        cmocka_unit_test(test_exact_rules),
        cmocka_unit_test(test_slab_by_slab),
        cmocka_unit_test(test_runs),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
