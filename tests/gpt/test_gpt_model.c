/* The decoder of examples/gpt: its attention against the formula in double, the gradient of the whole model
 * against differences of its loss, routes and types against each other, and what
 * gpt_open refuses. */
#include "examples/gpt/attention.h"
#include "examples/gpt/model.h"
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

static gpt_config plain(void) {
    return (gpt_config){.layers = 2,
                        .width = 16,
                        .heads_q = 2,
                        .heads_kv = 2,
                        .head_dim = 8,
                        .hidden = 24,
                        .batch = 2,
                        .context = 12,
                        .rope_base = 100};
}

/* Every option at once. Three layers: the middle one sees 4 tokens. */
static gpt_config with_options(void) {
    gpt_config c = plain();
    c.layers = 3, c.heads_q = 4, c.window = 4, c.sinks = true, c.softcap = 3;
    return c;
}

static gpt_config tied(void) {
    gpt_config c = plain();
    c.tied = true;
    return c;
}

/* A model with weights, tokens and gradients. */
typedef struct subject {
    gpt *model;
    int64_t floats;
    float *weights, *gradients;
    uint8_t *tokens;
    complaint why;
} subject;

/* Weights ten times those of the first step, gains and sinks that vary: gradients of every matrix are large
 * enough to be seen in differences of a loss in f32. */
static void spread(const gpt_layout *layout, float *weights) {
    for (int64_t i = 0; i < layout->count; i++) {
        const gpt_matrix *m = &layout->matrices[i];
        for (int64_t j = m->offset; j < m->offset + m->rows * m->cols; j++)
            if (m->decays)
                weights[j] *= strcmp(m->name, "embedding") == 0 ? 50 : 10;
            else
                weights[j] += 0.3F * (float)fbh_normal(77, (uint64_t)j);
    }
}

static subject subject_open(const gpt_config *config) {
    subject s = {0};
    if (!gpt_open(&s.model, config, &s.why))
        fail_msg("%s", s.why.text);
    const gpt_layout *layout = gpt_layout_of(s.model);
    const int64_t tokens = config->batch * (config->context + 1);
    s.floats = layout->floats;
    s.weights = malloc((size_t)s.floats * sizeof(float));
    s.gradients = calloc((size_t)s.floats, sizeof(float));
    s.tokens = malloc((size_t)tokens);
    assert_true(s.weights && s.gradients && s.tokens);
    gpt_initialize(layout, config, 5, s.weights);
    spread(layout, s.weights);
    for (int64_t i = 0; i < tokens; i++)
        s.tokens[i] = (uint8_t)(i * i * 7 % 251);
    return s;
}

static void subject_close(subject *s) {
    gpt_close(s->model);
    free(s->weights), free(s->gradients), free(s->tokens);
}

static double loss_of(subject *s) {
    const double loss = gpt_forward(s->model, s->weights, s->tokens, &s->why);
    if (!isfinite(loss))
        fail_msg("the loss is %g: %s", loss, s->why.text);
    return loss;
}

static double loss_and_gradients(subject *s, float scale) {
    const double loss = loss_of(s);
    if (!gpt_backward(s->model, s->weights, s->tokens, scale, s->gradients, &s->why))
        fail_msg("%s", s->why.text);
    return loss;
}

/* Fails on NaN on either side as well. */
static void assert_close(const char *what, double got, double expected, double bound) {
    if (!(fabs(got - expected) <= bound))
        fail_msg("%s is %.9g, expected %.9g within %.2g", what, got, expected, bound);
}

static double norm(int64_t n, const float *x) {
    double sum = 0;
    for (int64_t i = 0; i < n; i++)
        sum += (double)x[i] * (double)x[i];
    return sqrt(sum);
}

/* Of every matrix: |a - b| <= bound |b|. */
static void assert_same_gradients(const gpt_layout *layout, const float *a, const float *b, double bound) {
    for (int64_t i = 0; i < layout->count; i++) {
        const gpt_matrix *m = &layout->matrices[i];
        double sum = 0;
        for (int64_t j = m->offset; j < m->offset + m->rows * m->cols; j++)
            sum += ((double)a[j] - (double)b[j]) * ((double)a[j] - (double)b[j]);
        const double size = norm(m->rows * m->cols, b + m->offset);
        if (!(size > 0) || !(sqrt(sum) <= bound * size))
            fail_msg("gradients of %s of norm %g differ by %g of it", m->name, size, sqrt(sum) / size);
    }
}

/* ---- Attention ---- */

/* s = softcap of q.k / sqrt(D); o = sum_j exp(s_j) v_j / (sum_j exp(s_j) + exp(sink)), j in (i - window, i]
 */
static void naive_attention(const gpt_config *c, int64_t b, int64_t i, int64_t h, const float *q,
                            const float *k, const float *v, float sink, double *o) {
    const int64_t kv = h / (c->heads_q / c->heads_kv), d = c->head_dim;
    double total = c->sinks ? exp((double)sink) : 0;
    memset(o, 0, (size_t)d * sizeof *o);
    for (int64_t j = c->window && i >= c->window ? i - c->window + 1 : 0; j <= i; j++) {
        const float *qi = q + ((b * c->context + i) * c->heads_q + h) * d;
        const float *kj = k + ((b * c->context + j) * c->heads_kv + kv) * d;
        const float *vj = v + ((b * c->context + j) * c->heads_kv + kv) * d;
        double s = 0;
        for (int64_t e = 0; e < d; e++)
            s += (double)qi[e] * (double)kj[e] / sqrt((double)d);
        if (c->softcap > 0)
            s = (double)c->softcap * tanh(s / (double)c->softcap);
        total += exp(s);
        for (int64_t e = 0; e < d; e++)
            o[e] += exp(s) * (double)vj[e];
    }
    for (int64_t e = 0; e < d; e++)
        o[e] /= total;
}

static void check_attention(const gpt_config *c) {
    enum { MOST = 2 * 12 * 4 * 8 };
    float q[MOST], k[MOST], v[MOST], out[MOST], lse[MOST], sinks[4] = {0.5F, -1, 2, 0};
    for (uint64_t i = 0; i < MOST; i++) {
        q[i] = (float)fbh_normal(1, i), k[i] = (float)fbh_normal(2, i), v[i] = (float)fbh_normal(3, i);
        out[i] = NAN;
    }
    attention *a;
    complaint why;
    if (!attention_open(&a, c, c->window, &why))
        fail_msg("%s", why.text);
    void *workspace = malloc(attention_workspace(a));
    assert_non_null(workspace);
    assert_true(attention_forward(a, q, k, v, c->sinks ? sinks : NULL, out, lse, workspace, &why));
    for (int64_t row = 0; row < c->batch * c->context; row++)
        for (int64_t h = 0; h < c->heads_q; h++) {
            double o[8];
            naive_attention(c, row / c->context, row % c->context, h, q, k, v, sinks[h], o);
            for (int64_t e = 0; e < c->head_dim; e++) /* a few roundings of values of size 1 */
                assert_close("out", (double)out[(row * c->heads_q + h) * c->head_dim + e], o[e], 3e-6);
        }
    char text[64];
    attention_explain(a, text, sizeof text);
    assert_true(strlen(text) > 10);
    free(workspace);
    attention_close(a);
}

static void test_attention(void **state) {
    (void)state;
    gpt_config c = plain();
    check_attention(&c);
    c = with_options();
    check_attention(&c);
    c.window = 1;
    check_attention(&c);
    attention_close(NULL);
}

/* ---- Gradients ---- */

/* d loss / d along, where `along` is a random direction within one matrix; see test_gpt_layers.c for the
 * formula. */
static double slope(subject *s, const gpt_matrix *m, const float *along) {
    const float h = 1.0F / 128;
    float *w = s->weights + m->offset, *at = malloc((size_t)(m->rows * m->cols) * sizeof *at);
    assert_non_null(at);
    memcpy(at, w, (size_t)(m->rows * m->cols) * sizeof *at);
    double l[4];
    for (int n = 0; n < 4; n++) {
        static const float steps[] = {-2, -1, 1, 2};
        for (int64_t i = 0; i < m->rows * m->cols; i++)
            w[i] = at[i] + steps[n] * h * along[i];
        l[n] = loss_of(s);
    }
    memcpy(w, at, (size_t)(m->rows * m->cols) * sizeof *at);
    free(at);
    return (8 * (l[2] - l[1]) - (l[3] - l[0])) / (12 * (double)h);
}

static void check_matrix(subject *s, const gpt_matrix *m) {
    const int64_t count = m->rows * m->cols;
    const float *g = s->gradients + m->offset;
    float *along = malloc((size_t)count * sizeof *along);
    assert_non_null(along);
    for (uint64_t seed = 0; seed < 3; seed++) {
        double expected = 0;
        for (int64_t i = 0; i < count; i++) {
            along[i] = (float)fbh_normal(seed + 30, (uint64_t)i);
            expected += (double)g[i] * (double)along[i];
        }
        const double got = slope(s, m, along), size = norm(count, g);
        if (!(fabs(got - expected) <= 1e-3 * size + 2e-5))
            fail_msg("%s, direction %d: the loss rises by %.7g, its gradient of norm %.4g says %.7g", m->name,
                     (int)seed, got, size, expected);
    }
    free(along);
}

static void check_model(const gpt_config *config) {
    subject s = subject_open(config);
    const gpt_layout *layout = gpt_layout_of(s.model);
    loss_and_gradients(&s, 1);
    for (int64_t i = 0; i < layout->count; i++)
        check_matrix(&s, &layout->matrices[i]);
    assert_true(gpt_attention_seconds(s.model) > 0);
    subject_close(&s);
}

static void test_gradients_plain(void **state) {
    (void)state;
    const gpt_config c = plain();
    check_model(&c);
}

static void test_gradients_with_options(void **state) {
    (void)state;
    const gpt_config c = with_options();
    check_model(&c);
}

static void test_gradients_tied(void **state) {
    (void)state;
    const gpt_config c = tied();
    check_model(&c);
}

/* Two backwards of half the loss add up to one of all of it, on top of what was there. */
static void test_gradients_are_added(void **state) {
    (void)state;
    const gpt_config c = with_options();
    subject s = subject_open(&c);
    float *once = calloc((size_t)s.floats, sizeof *once);
    assert_non_null(once);
    loss_and_gradients(&s, 1);
    for (int64_t i = 0; i < s.floats; i++) {
        once[i] = s.gradients[i];
        s.gradients[i] = 0.25F;
    }
    loss_and_gradients(&s, 0.5F);
    loss_and_gradients(&s, 0.5F);
    for (int64_t i = 0; i < s.floats; i++)
        assert_close("a sum", (double)s.gradients[i], (double)once[i] + 0.25, 1e-6);
    free(once);
    subject_close(&s);
}

static void test_a_backward_needs_a_forward(void **state) {
    (void)state;
    const gpt_config c = plain();
    subject s = subject_open(&c);
    assert_false(gpt_backward(s.model, s.weights, s.tokens, 1, s.gradients, &s.why));
    assert_non_null(strstr(s.why.text, "gpt_forward"));
    loss_and_gradients(&s, 1);
    assert_false(gpt_backward(s.model, s.weights, s.tokens, 1, s.gradients, &s.why));
    subject_close(&s);
}

/* ---- Routes and types ---- */

/* Losses and gradients of two configs agree, relative to the norm of each matrix's gradient. Returns by how
 * much the losses differ. */
static double compare(const gpt_config *a, const gpt_config *b, double loss_bound, double gradient_bound) {
    subject sa = subject_open(a), sb = subject_open(b);
    const double la = loss_and_gradients(&sa, 1), lb = loss_and_gradients(&sb, 1);
    assert_close("the loss", la, lb, loss_bound);
    assert_same_gradients(gpt_layout_of(sa.model), sa.gradients, sb.gradients, gradient_bound);
    subject_close(&sa);
    subject_close(&sb);
    return fabs(la - lb);
}

static void test_fused_and_unfused(void **state) {
    (void)state;
    gpt_config fused = with_options();
    fused.context = 150;
    fused.route = FB_FUSED;
    gpt_config unfused = fused;
    unfused.route = FB_UNFUSED;
    compare(&fused, &unfused, 1e-5, 1e-5);
}

/* bf16 keeps 8 bits, which is 4e-3 of each number that attention takes and gives, and of a loss, a mean over
 * many, less. If not a bit differs, it is not bf16. */
static void test_bf16(void **state) {
    (void)state;
    gpt_config f32 = with_options(), bf16;
    f32.context = 64;
    bf16 = f32;
    bf16.dtype = FB_BF16;
    assert_true(compare(&bf16, &f32, 2e-3, 2e-2) > 0);
}

/* ---- What the model computes ---- */

static void test_the_first_loss(void **state) {
    (void)state;
    gpt_config c = with_options();
    for (int tie = 0; tie < 2; tie++) {
        c.tied = tie;
        subject s = subject_open(&c);
        gpt_initialize(gpt_layout_of(s.model), &c, 1, s.weights);
        assert_close("the first loss", loss_of(&s), log(GPT_VOCABULARY), 0.05);
        subject_close(&s);
    }
}

/* What comes later changes nothing of what came before, to the bit. */
static void test_causality(void **state) {
    (void)state;
    gpt_config c = plain();
    c.batch = 1;
    subject s = subject_open(&c);
    float before[12 * GPT_VOCABULARY];
    loss_of(&s);
    memcpy(before, gpt_logits(s.model), sizeof before);
    s.tokens[7] ^= 1;
    loss_of(&s);
    for (int t = 0; t < 12; t++) {
        const bool same =
            memcmp(before + (ptrdiff_t)t * GPT_VOCABULARY,
                   gpt_logits(s.model) + (ptrdiff_t)t * GPT_VOCABULARY, GPT_VOCABULARY * sizeof *before) == 0;
        assert_true(same == (t < 7));
    }
    subject_close(&s);
}

/* The loss if the attention of one of two layers adds nothing. */
static double loss_without(int mute, int64_t window) {
    gpt_config c = plain();
    c.window = window;
    subject s = subject_open(&c);
    const gpt_layout *layout = gpt_layout_of(s.model);
    const gpt_matrix *m = &layout->matrices[gpt_find(layout, mute == 0 ? "layer.0.wo" : "layer.1.wo")];
    memset(s.weights + m->offset, 0, (size_t)(m->rows * m->cols) * sizeof *s.weights);
    const double loss = loss_of(&s);
    subject_close(&s);
    return loss;
}

static void test_odd_layers_have_the_window(void **state) {
    (void)state;
    assert_close("layer 0 alone", loss_without(1, 4), loss_without(1, 0), 0);
    assert_true(fabs(loss_without(0, 4) - loss_without(0, 0)) > 1e-4);
}

/* The loss of a batch is the mean of its sequences' own. */
static void test_sequences_are_apart(void **state) {
    (void)state;
    gpt_config c = plain();
    subject both = subject_open(&c);
    c.batch = 1;
    subject one = subject_open(&c);
    const double first = loss_of(&one);
    memcpy(one.tokens, both.tokens + c.context + 1, (size_t)c.context + 1);
    assert_close("the loss", loss_of(&both), (first + loss_of(&one)) / 2, 1e-6);
    subject_close(&both);
    subject_close(&one);
}

static void test_memory_is_linear(void **state) {
    (void)state;
    gpt_config c = with_options();
    c.route = FB_FUSED;
    uint64_t bytes[2];
    for (int i = 0; i < 2; i++) {
        c.context = i ? 8192 : 4096;
        subject s = subject_open(&c);
        bytes[i] = gpt_activation_bytes(s.model);
        subject_close(&s);
    }
    assert_true(bytes[0] > 4096u * GPT_VOCABULARY * sizeof(float));
    assert_true(bytes[1] > bytes[0] && bytes[1] < 2 * bytes[0] + bytes[0] / 50);
}

/* ---- Refusals ---- */

static void refuse(const gpt_config *c, const char *words) {
    complaint why = {""};
    gpt *model = (gpt *)&why;
    assert_false(gpt_open(&model, c, &why));
    assert_null(model);
    if (!strstr(why.text, words))
        fail_msg("'%s' is not in: %s", words, why.text);
}

static void test_numbers_refused(void **state) {
    (void)state;
    static const struct {
        const char *words;
        size_t field;
        int64_t value;
    } wrong[] = {
        {"layers is 0", offsetof(gpt_config, layers), 0},
        {"layers is -1", offsetof(gpt_config, layers), -1},
        {"layers is 1001", offsetof(gpt_config, layers), 1001},
        {"width is 0", offsetof(gpt_config, width), 0},
        {"width is 9223372036854775807", offsetof(gpt_config, width), INT64_MAX},
        {"heads_q is 0", offsetof(gpt_config, heads_q), 0},
        {"heads_q is 3, expected a multiple of heads_kv, which is 2", offsetof(gpt_config, heads_q), 3},
        {"heads_kv is 0", offsetof(gpt_config, heads_kv), 0},
        {"heads_q is 2, expected a multiple of heads_kv, which is 4", offsetof(gpt_config, heads_kv), 4},
        {"head_dim is 0", offsetof(gpt_config, head_dim), 0},
        {"head_dim is 7, expected an even number", offsetof(gpt_config, head_dim), 7},
        {"head_dim is 578", offsetof(gpt_config, head_dim), 578},
        {"hidden is 0", offsetof(gpt_config, hidden), 0},
        {"batch is 0", offsetof(gpt_config, batch), 0},
        {"batch times context", offsetof(gpt_config, batch), INT64_MAX},
        {"context is 0", offsetof(gpt_config, context), 0},
        {"batch times context", offsetof(gpt_config, context), INT64_MAX},
        {"memory ran out for 1000 layers", offsetof(gpt_config, width), 1 << 20},
        {"window is -1", offsetof(gpt_config, window), -1},
    };
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        gpt_config c = plain();
        if (strstr(wrong[i].words, "memory")) /* more than 64 bits can count */
            c.layers = 1000, c.hidden = 1 << 20, c.context = (1 << 30) - 1;
        memcpy((char *)&c + wrong[i].field, &wrong[i].value, sizeof wrong[i].value);
        refuse(&c, wrong[i].words);
    }
}

static void test_others_refused(void **state) {
    (void)state;
    gpt_config c = plain();
    c.softcap = -1;
    refuse(&c, "softcap is -1");
    c.softcap = NAN;
    refuse(&c, "softcap is nan");
    c = plain(), c.rope_base = 0;
    refuse(&c, "rope_base is 0");
    c.rope_base = INFINITY;
    refuse(&c, "rope_base is inf");
    c = plain(), c.dtype = FB_F16;
    refuse(&c, "dtype is f16, expected f32 or bf16");
    c = plain(), c.threads = -1;
    refuse(&c, "threads is -1");
    c = plain(), c.route = FB_VECTOR; /* flashback's own sentence: not for 12 queries */
    refuse(&c, "vector");
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_gradients_plain),
        cmocka_unit_test(test_gradients_with_options),
        cmocka_unit_test(test_gradients_tied),
        cmocka_unit_test(test_gradients_are_added),
        cmocka_unit_test(test_a_backward_needs_a_forward),
        cmocka_unit_test(test_fused_and_unfused),
        cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_the_first_loss),
        cmocka_unit_test(test_causality),
        cmocka_unit_test(test_odd_layers_have_the_window),
        cmocka_unit_test(test_sequences_are_apart),
        cmocka_unit_test(test_memory_is_linear),
        cmocka_unit_test(test_numbers_refused),
        cmocka_unit_test(test_others_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
