/* The layers of examples/gpt: every forward against its formula in double, every backward against differences
 * of the forward, the same bits on any number of threads; and the layout and first values of parameters. */
#include "examples/gpt/layers.h"
#include "examples/gpt/parameters.h"
#include "harness/harness.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs some of the above. */
#include <cmocka.h>
#ifdef _OPENMP
#include <omp.h>
#endif

enum { ROWS = 5, IN = 12, OUT = 7, CLASSES = 11, MOST = 128 };
enum { BATCH = 2, CONTEXT = 3, HEADS = 2, DIM = 8 };
static const float BASE = 100, BEFORE = 0.5F; /* BEFORE: what is in a gradient that a backward adds to */

/* x, w: what the layer takes. dy: what weighs the elements of y in the loss, which is sum(y dy). */
typedef struct operands {
    float x[MOST], w[MOST], y[MOST], dy[MOST], dx[MOST], dw[MOST], inverse[ROWS];
    uint8_t tokens[ROWS];
} operands;

typedef double loss_of(operands *o);

static void fill(uint64_t seed, int64_t n, float *x) {
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)fbh_normal(seed, (uint64_t)i);
}

static void set(int64_t n, float *x, float value) {
    for (int64_t i = 0; i < n; i++)
        x[i] = value;
}

static operands fresh(uint64_t seed) {
    operands o;
    fill(4 * seed, MOST, o.x);
    fill(4 * seed + 1, MOST, o.w);
    fill(4 * seed + 2, MOST, o.dy);
    set(MOST, o.y, NAN), set(MOST, o.dx, NAN), set(MOST, o.dw, NAN), set(ROWS, o.inverse, NAN);
    memcpy(o.tokens, (uint8_t[ROWS]){4, 0, 10, 4, 9}, sizeof o.tokens); /* one comes twice */
    return o;
}

static double dot(int64_t n, const float *a, const float *b) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)a[i] * (double)b[i];
    return sum;
}

/* Fails on NaN on either side as well. */
static void assert_close(const char *what, int64_t i, double got, double expected, double bound) {
    if (!(fabs(got - expected) <= bound))
        fail_msg("%s[%lld] is %.9g, expected %.9g within %.2g", what, (long long)i, got, expected, bound);
}

/* Of the forwards, whose values are of size 1: a dozen roundings of f32, 6e-8 each. */
static const double FORWARD = 2e-6;

/* d loss / d x[i] = (8 (loss(+h) - loss(-h)) - (loss(+2h) - loss(-2h))) / 12 h + O(h^4)
 * With h = 1/32 and fifth derivatives of size 1 the formula is off by h^4 / 30 = 3e-8, and one rounding to
 * f32 of an element of size 1 moves it by 6e-8 / (1.5 h) = 1e-6. 4e-6 is the worst seen; 5e-5 is allowed,
 * relative to the largest element. */
static void check_gradient(const char *what, loss_of *loss, operands *o, int64_t n, float *x, const float *dx,
                           float before) {
    const float h = 1.0F / 32;
    double size = 1;
    for (int64_t i = 0; i < n; i++)
        size = fmax(size, fabs((double)dx[i]));
    for (int64_t i = 0; i < n; i++) {
        const float at = x[i];
        double l[4];
        for (int s = 0; s < 4; s++) {
            static const float steps[] = {-2, -1, 1, 2};
            x[i] = at + steps[s] * h;
            l[s] = loss(o);
        }
        x[i] = at;
        const double numeric = (8 * (l[2] - l[1]) - (l[3] - l[0])) / (12 * (double)h);
        assert_close(what, i, (double)dx[i] - (double)before, numeric, 5e-5 * size);
    }
}

/* ---- y = x W^T ---- */

static double linear_loss(operands *o) {
    linear(ROWS, IN, OUT, o->x, o->w, o->y);
    return dot(ROWS * OUT, o->y, o->dy);
}

static void test_linear(void **state) {
    (void)state;
    operands o = fresh(1);
    linear(ROWS, IN, OUT, o.x, o.w, o.y);
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < OUT; c++)
            assert_close("y", r * OUT + c, (double)o.y[r * OUT + c], dot(IN, o.x + r * IN, o.w + c * IN),
                         10 * FORWARD);
    assert_true(isnan(o.y[ROWS * OUT]));
}

static void test_linear_backward(void **state) {
    (void)state;
    operands o = fresh(2);
    set(OUT * IN, o.dw, BEFORE);
    linear_backward(ROWS, IN, OUT, o.x, o.w, o.dy, o.dx, 0, o.dw);
    check_gradient("dx", linear_loss, &o, ROWS * IN, o.x, o.dx, 0);
    check_gradient("dw", linear_loss, &o, OUT * IN, o.w, o.dw, BEFORE);
    linear_backward(ROWS, IN, OUT, o.x, o.w, o.dy, NULL, 0, o.dw);
    set(ROWS * IN, o.dx, BEFORE);
    linear_backward(ROWS, IN, OUT, o.x, o.w, o.dy, o.dx, 1, o.dw);
    check_gradient("dx added", linear_loss, &o, ROWS * IN, o.x, o.dx, BEFORE);
}

/* ---- RMSNorm ---- */

static double rmsnorm_loss(operands *o) {
    rmsnorm(ROWS, IN, o->x, o->w, o->y, o->inverse);
    return dot(ROWS * IN, o->y, o->dy);
}

static void test_rmsnorm(void **state) {
    (void)state;
    operands o = fresh(3);
    set(IN, o.x, 0); /* a row of zeros: r = sqrt(1e-5) */
    rmsnorm(ROWS, IN, o.x, o.w, o.y, o.inverse);
    for (int r = 0; r < ROWS; r++) {
        const double inverse = 1 / sqrt(dot(IN, o.x + r * IN, o.x + r * IN) / IN + 1e-5);
        assert_close("inverse", r, (double)o.inverse[r], inverse, FORWARD * inverse);
        for (int c = 0; c < IN; c++)
            assert_close("y", r * IN + c, (double)o.y[r * IN + c],
                         (double)o.w[c] * (double)o.x[r * IN + c] * inverse, 5 * FORWARD);
    }
    assert_true(isnan(o.y[ROWS * IN]));
}

static void test_rmsnorm_backward(void **state) {
    (void)state;
    operands o = fresh(4);
    set(ROWS * IN, o.dx, BEFORE), set(IN, o.dw, BEFORE);
    rmsnorm(ROWS, IN, o.x, o.w, o.y, o.inverse);
    rmsnorm_backward(ROWS, IN, o.x, o.w, o.inverse, o.dy, o.dx, o.dw);
    check_gradient("dx", rmsnorm_loss, &o, ROWS * IN, o.x, o.dx, BEFORE);
    check_gradient("dg", rmsnorm_loss, &o, IN, o.w, o.dw, BEFORE);
}

/* ---- RoPE ---- */

static void test_rope(void **state) {
    (void)state;
    const operands o = fresh(5);
    operands turned = o;
    rope(BATCH, CONTEXT, HEADS, DIM, BASE, 1, turned.x);
    for (int n = 0; n < BATCH * CONTEXT * HEADS; n++)
        for (int i = 0; i < DIM / 2; i++) {
            const int a = n * DIM + i, b = a + DIM / 2, position = n / HEADS % CONTEXT;
            const double angle = position * pow((double)BASE, -2.0 * i / DIM);
            const double c = cos(angle), s = sin(angle), x = (double)o.x[a], y = (double)o.x[b];
            assert_close("x", a, (double)turned.x[a], x * c - y * s, FORWARD);
            assert_close("x", b, (double)turned.x[b], x * s + y * c, FORWARD);
        }
    for (int i = BATCH * CONTEXT * HEADS * DIM; i < MOST; i++)
        assert_true(turned.x[i] == o.x[i]);
}

/* A turn keeps inner products, so its transpose, the backward, is its inverse. */
static void test_rope_backward(void **state) {
    (void)state;
    enum { COUNT = BATCH * CONTEXT * HEADS * DIM };
    const operands o = fresh(6);
    operands turned = o;
    rope(BATCH, CONTEXT, HEADS, DIM, BASE, 1, turned.x);
    rope(BATCH, CONTEXT, HEADS, DIM, BASE, 1, turned.w);
    assert_close("x.w", 0, dot(COUNT, turned.x, turned.w), dot(COUNT, o.x, o.w), 10 * FORWARD);
    rope(BATCH, CONTEXT, HEADS, DIM, BASE, -1, turned.x);
    for (int i = 0; i < COUNT; i++)
        assert_close("x", i, (double)turned.x[i], (double)o.x[i], FORWARD);
}

/* ---- SwiGLU: gate is x, up is w ---- */

static double swiglu_loss(operands *o) {
    swiglu(ROWS * IN, o->x, o->w, o->y);
    return dot(ROWS * IN, o->y, o->dy);
}

static void test_swiglu(void **state) {
    (void)state;
    operands o = fresh(7);
    o.x[0] = -200, o.x[1] = 200; /* where e^-z overflows, and where it vanishes */
    swiglu(ROWS * IN, o.x, o.w, o.y);
    for (int i = 0; i < ROWS * IN; i++) {
        const double z = (double)o.x[i], expected = z / (1 + exp(-z)) * (double)o.w[i];
        assert_close("y", i, (double)o.y[i], expected, FORWARD * fmax(4, fabs(expected)));
    }
    assert_true(isnan(o.y[ROWS * IN]));
}

static void test_swiglu_backward(void **state) {
    (void)state;
    operands o = fresh(8);
    swiglu_backward(ROWS * IN, o.x, o.w, o.dy, o.dx, o.dw);
    check_gradient("dgate", swiglu_loss, &o, ROWS * IN, o.x, o.dx, 0);
    check_gradient("dup", swiglu_loss, &o, ROWS * IN, o.w, o.dw, 0);
}

/* ---- The embedding: E is w, [CLASSES][OUT] ---- */

static double embed_loss(operands *o) {
    embed(ROWS, OUT, o->tokens, o->w, o->y);
    return dot(ROWS * OUT, o->y, o->dy);
}

static void test_embed(void **state) {
    (void)state;
    operands o = fresh(9);
    embed(ROWS, OUT, o.tokens, o.w, o.y);
    for (int i = 0; i < ROWS * OUT; i++)
        assert_true(o.y[i] == o.w[o.tokens[i / OUT] * OUT + i % OUT]);
    set(CLASSES * OUT, o.dw, BEFORE);
    embed_backward(ROWS, OUT, o.tokens, o.dy, o.dw);
    check_gradient("dE", embed_loss, &o, CLASSES * OUT, o.w, o.dw, BEFORE);
}

/* ---- The loss: logits are x, [ROWS][CLASSES] ---- */

static double entropy_loss(operands *o) { return cross_entropy(ROWS, CLASSES, o->x, o->tokens); }

static void test_cross_entropy(void **state) {
    (void)state;
    operands o = fresh(10);
    o.x[0] += 200; /* beyond what exp in f32 can hold */
    double sum = 0;
    for (int r = 0; r < ROWS; r++) {
        double total = 0;
        for (int c = 0; c < CLASSES; c++)
            total += exp((double)o.x[r * CLASSES + c]);
        sum += log(total) - (double)o.x[r * CLASSES + o.tokens[r]];
    }
    assert_close("loss", 0, entropy_loss(&o), sum / ROWS, FORWARD);
}

static void test_cross_entropy_backward(void **state) {
    (void)state;
    const float scale = 20; /* so that gradients are of size 1 */
    operands o = fresh(11);
    memcpy(o.dx, o.x, sizeof o.dx);
    cross_entropy_backward(ROWS, CLASSES, o.dx, o.tokens, scale);
    for (int i = 0; i < ROWS * CLASSES; i++)
        o.dx[i] /= scale;
    check_gradient("dlogits", entropy_loss, &o, ROWS * CLASSES, o.x, o.dx, 0);
}

/* ---- The layout and the first weights ---- */

static gpt_config shape(int64_t layers) {
    return (gpt_config){.layers = layers,
                        .width = 16,
                        .heads_q = 4,
                        .heads_kv = 2,
                        .head_dim = 8,
                        .hidden = 24,
                        .sinks = true};
}

static void test_layout(void **state) {
    (void)state;
    static const char *const names[] = {"embedding",
                                        "layer.0.attention_norm",
                                        "layer.0.wq",
                                        "layer.0.wk",
                                        "layer.0.wv",
                                        "layer.0.wo",
                                        "layer.0.sinks",
                                        "layer.0.mlp_norm",
                                        "layer.0.w_gate",
                                        "layer.0.w_up",
                                        "layer.0.w_down",
                                        "final_norm",
                                        "head"};
    const gpt_config c = shape(1);
    gpt_layout layout;
    complaint why;
    assert_true(gpt_layout_make(&layout, &c, &why));
    assert_int_equal(layout.count, sizeof names / sizeof *names);
    int64_t floats = 0;
    for (int64_t i = 0; i < layout.count; i++) {
        const gpt_matrix *m = &layout.matrices[i];
        assert_string_equal(m->name, names[i]);
        assert_int_equal(gpt_find(&layout, names[i]), i);
        assert_int_equal(m->offset, floats);
        assert_int_equal(m->decays, !strstr(m->name, "norm") && !strstr(m->name, "sinks"));
        floats += m->rows * m->cols;
    }
    assert_int_equal(layout.floats, floats);
    assert_int_equal(floats, 16 * (2 * 256 + 3 + 2 * 32 + 2 * 16 + 3 * 24) + 4);
    gpt_layout_drop(&layout);
    assert_null(layout.matrices);
}

static void check_first_weights(const gpt_matrix *m, const float *w, double deviation) {
    const int64_t n = m->rows * m->cols;
    if (!m->decays)
        for (int64_t i = 0; i < n; i++)
            assert_true(w[i] == (strstr(m->name, "sinks") ? 0.0F : 1.0F));
    else /* of n numbers the deviation's own deviation is deviation / sqrt(2 n) */
        assert_close(m->name, 0, sqrt(dot(n, w, w) / (double)n), deviation,
                     4 * deviation / sqrt(2 * (double)n));
}

static void test_first_weights(void **state) {
    (void)state;
    const gpt_config c = shape(3);
    gpt_layout layout;
    complaint why;
    assert_true(gpt_layout_make(&layout, &c, &why));
    float *a = malloc((size_t)layout.floats * sizeof *a), *b = malloc((size_t)layout.floats * sizeof *b);
    assert_true(a && b);
    gpt_initialize(&layout, &c, 1, a);
    gpt_initialize(&layout, &c, 1, b);
    assert_memory_equal(a, b, (size_t)layout.floats * sizeof *a);
    for (int64_t i = 0; i < layout.count; i++) {
        const gpt_matrix *m = &layout.matrices[i];
        const bool residual = strstr(m->name, "wo") || strstr(m->name, "w_down");
        check_first_weights(m, a + m->offset, residual ? 0.02 / sqrt(2 * 3) : 0.02);
    }
    /* The same numbers on every machine. */
    assert_true(a[0] == -0.000564994931F && a[1] == -0.00455839047F && a[layout.floats - 1] == 0.0403723493F);
    gpt_initialize(&layout, &c, 2, b);
    assert_memory_not_equal(a, b, (size_t)layout.floats * sizeof *a);
    free(a), free(b);
    gpt_layout_drop(&layout);
}

/* ---- Threads ---- */

#ifdef _OPENMP
enum { MANY = 331, WIDE = 70, PARTS = 12 }; /* MANY: more rows than cross_entropy takes at once, and odd */

/* What all layers but linear, where BLAS decides, give: PARTS matrices of MANY rows. */
static void run_all(const float *x, const float *g, const uint8_t *tokens, float *to) {
    enum { SIZE = MANY * WIDE };
    float *part[PARTS];
    for (int i = 0; i < PARTS; i++)
        part[i] = to + (ptrdiff_t)i * SIZE;
    memset(to, 0, (size_t)PARTS * SIZE * sizeof *to);
    rmsnorm(MANY, WIDE, x, g, part[0], part[1]);
    rmsnorm_backward(MANY, WIDE, x, g, part[1], g, part[2], part[3]);
    memcpy(part[4], x, SIZE * sizeof *x);
    rope(1, MANY, 7, WIDE / 7, BASE, 1, part[4]);
    swiglu(SIZE, x, g, part[5]);
    swiglu_backward(SIZE, x, g, part[0], part[6], part[7]);
    embed(MANY, WIDE, tokens, g, part[8]);
    embed_backward(MANY, WIDE, tokens, x, part[9]);
    const double loss = cross_entropy(MANY, WIDE, x, tokens);
    memcpy(part[10], &loss, sizeof loss);
    memcpy(part[11], x, SIZE * sizeof *x);
    cross_entropy_backward(MANY, WIDE, part[11], tokens, 1);
}
#endif

static void test_threads(void **state) {
    (void)state;
#ifdef _OPENMP
    enum { SIZE = MANY * WIDE };
    static float x[SIZE], g[SIZE], one[PARTS * SIZE], many[PARTS * SIZE];
    uint8_t tokens[MANY];
    fill(100, SIZE, x), fill(101, SIZE, g);
    for (int r = 0; r < MANY; r++)
        tokens[r] = (uint8_t)(r * r % WIDE);
    const int before = omp_get_max_threads();
    omp_set_num_threads(1);
    run_all(x, g, tokens, one);
    for (int threads = 2; threads < 9; threads++) {
        omp_set_num_threads(threads);
        run_all(x, g, tokens, many);
        for (int i = 0; i < PARTS; i++)
            if (memcmp(one + (ptrdiff_t)i * SIZE, many + (ptrdiff_t)i * SIZE, SIZE * sizeof *one) != 0)
                fail_msg("part %d of run_all has other bits on %d threads than on 1", i, threads);
    }
    omp_set_num_threads(before);
#else
    skip();
#endif
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_linear),
        cmocka_unit_test(test_linear_backward),
        cmocka_unit_test(test_rmsnorm),
        cmocka_unit_test(test_rmsnorm_backward),
        cmocka_unit_test(test_rope),
        cmocka_unit_test(test_rope_backward),
        cmocka_unit_test(test_swiglu),
        cmocka_unit_test(test_swiglu_backward),
        cmocka_unit_test(test_embed),
        cmocka_unit_test(test_cross_entropy),
        cmocka_unit_test(test_cross_entropy_backward),
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_first_weights),
        cmocka_unit_test(test_threads),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
