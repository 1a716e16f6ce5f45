/* See model.h. The forward keeps for each layer its input and what attention and SwiGLU took, once per token;
 * the backward computes the rest again: what RMSNorm and SwiGLU gave. */
#include "model.h"
#include "attention.h"
#include "layers.h"

#include <limits.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* Q, K, V and the output O of attention, or their gradients: [batch][context][heads][D]. */
typedef struct qkvo {
    void *q, *k, *v, *out;
} qkvo;

typedef struct layer {
    const attention *attention; /* one of the model's two */
    /* Where in the weights: */
    int64_t attention_norm, wq, wk, wv, wo, sinks, mlp_norm, w_gate, w_up, w_down;
    float *x, *middle; /* [rows][width], before attention and before SwiGLU */
    qkvo kept;         /* in attention's type */
    float *lse;        /* [batch][Hq][context] */
    float *gate, *up;  /* [rows][hidden] */
} layer;

struct gpt {
    gpt_config config;
    gpt_layout layout;
    int64_t rows; /* tokens: batch * context */
    int64_t embedding, final_norm, head;
    attention *full, *windowed; /* windowed: NULL unless a layer needs it */
    layer *layers;              /* and one more, of which only x is used: the output of the last */
    fb_ref memory;              /* all that follows, and what the layers point to */
    uint64_t bytes;
    uint8_t *inputs, *targets;               /* [rows] */
    float *logits;                           /* [rows][256] */
    float *n, *inverse;                      /* what RMSNorm gave: [rows][width], [rows] */
    float *branch;                           /* [rows][width]: what is added to x; backward: dn */
    float *dx;                               /* [rows][width] */
    float *product, *dproduct, *dgate, *dup; /* [rows][hidden] */
    qkvo wide;                               /* in f32: what bf16 is made from; backward: the gradients */
    qkvo narrow;                             /* the gradients in attention's type */
    float *wide_out;                         /* O in f32 while wide.out has dO */
    void *workspace;                         /* of attention, for one call at a time */
    double seconds;
    bool forwarded; /* is there a forward without its backward? */
};

/* ---- Opening ---- */

static bool check_run(const gpt_config *c, complaint *why) {
    if (c->batch < 1)
        return complain(why, "batch is %lld, expected at least 1", (long long)c->batch);
    if (c->context < 1)
        return complain(why, "context is %lld, expected at least 1", (long long)c->context);
    if (c->context > INT_MAX / c->batch)
        return complain(why, "batch times context is %lld times %lld tokens, expected at most %d",
                        (long long)c->batch, (long long)c->context, INT_MAX);
    if (c->window < 0)
        return complain(why, "window is %lld, expected at least 1 token, or 0 for all", (long long)c->window);
    if (!(c->softcap >= 0) || isinf(c->softcap))
        return complain(why, "softcap is %g, expected a positive number, or 0 for none", (double)c->softcap);
    if (!(c->rope_base > 0) || isinf(c->rope_base))
        return complain(why, "rope_base is %g, expected a positive number", (double)c->rope_base);
    if (c->dtype != FB_F32 && c->dtype != FB_BF16)
        return complain(why, "dtype is %s, expected f32 or bf16", fb_dtype_name(c->dtype));
    if (c->threads < 0)
        return complain(why, "threads is %d, expected at least 1, or 0 for flashback's choice", c->threads);
    return true;
}

static int64_t offset_of(const gpt *m, const char *name) {
    return m->layout.matrices[gpt_find(&m->layout, name)].offset;
}

static int64_t offset_in_layer(const gpt *m, int n, const char *name) {
    char full[sizeof m->layout.matrices->name];
    snprintf(full, sizeof full, "layer.%d.%s", n, name);
    return offset_of(m, full);
}

static void find_weights(gpt *m) {
    m->embedding = offset_of(m, "embedding");
    m->final_norm = offset_of(m, "final_norm");
    m->head = m->config.tied ? m->embedding : offset_of(m, "head");
    for (int n = 0; n < m->config.layers; n++) {
        layer *l = &m->layers[n];
        l->attention_norm = offset_in_layer(m, n, "attention_norm");
        l->wq = offset_in_layer(m, n, "wq");
        l->wk = offset_in_layer(m, n, "wk");
        l->wv = offset_in_layer(m, n, "wv");
        l->wo = offset_in_layer(m, n, "wo");
        l->sinks = m->config.sinks ? offset_in_layer(m, n, "sinks") : 0;
        l->mlp_norm = offset_in_layer(m, n, "mlp_norm");
        l->w_gate = offset_in_layer(m, n, "w_gate");
        l->w_up = offset_in_layer(m, n, "w_up");
        l->w_down = offset_in_layer(m, n, "w_down");
    }
}

static bool open_attention(gpt *m, complaint *why) {
    const gpt_config *c = &m->config;
    if (!attention_open(&m->full, c, 0, why))
        return false;
    if (c->window && c->layers > 1 && !attention_open(&m->windowed, c, c->window, why))
        return false;
    for (int64_t n = 0; n < c->layers; n++)
        m->layers[n].attention = n % 2 && m->windowed ? m->windowed : m->full;
    return true;
}

/* Memory is handed out piece by piece, twice: without a base to learn the size, then in earnest. */
typedef struct arena {
    char *base;
    uint64_t used;
    bool overflow;
} arena;

static void *take(arena *a, int64_t count, size_t size) {
    enum { LINE = 64 };
    void *piece = a->base ? a->base + a->used : NULL;
    uint64_t bytes;
    a->overflow |= __builtin_mul_overflow((uint64_t)count, size, &bytes) ||
                   __builtin_add_overflow(bytes, LINE - 1, &bytes) ||
                   __builtin_add_overflow(a->used, bytes / LINE * LINE, &a->used);
    return piece;
}

static float *take_floats(arena *a, int64_t count) { return take(a, count, sizeof(float)); }

static qkvo take_qkvo(arena *a, const gpt *m, size_t size) {
    const int64_t q = m->rows * m->config.heads_q * m->config.head_dim;
    const int64_t kv = m->rows * m->config.heads_kv * m->config.head_dim;
    qkvo h;
    h.q = take(a, q, size), h.k = take(a, kv, size), h.v = take(a, kv, size), h.out = take(a, q, size);
    return h;
}

static void arrange(gpt *m, arena *a) {
    const gpt_config *c = &m->config;
    const int64_t x = m->rows * c->width, hidden = m->rows * c->hidden;
    const bool f32 = c->dtype == FB_F32;
    m->inputs = take(a, m->rows, 1);
    m->targets = take(a, m->rows, 1);
    m->logits = take_floats(a, m->rows * GPT_VOCABULARY);
    m->n = take_floats(a, x);
    m->inverse = take_floats(a, m->rows);
    m->branch = take_floats(a, x);
    m->dx = take_floats(a, x);
    m->product = take_floats(a, hidden), m->dproduct = take_floats(a, hidden);
    m->dgate = take_floats(a, hidden), m->dup = take_floats(a, hidden);
    m->wide = take_qkvo(a, m, sizeof(float));
    m->narrow = f32 ? m->wide : take_qkvo(a, m, sizeof(uint16_t));
    m->wide_out = f32 ? NULL : take_floats(a, m->rows * c->heads_q * c->head_dim);
    size_t workspace = attention_workspace(m->full);
    if (m->windowed && attention_workspace(m->windowed) > workspace)
        workspace = attention_workspace(m->windowed);
    m->workspace = take(a, (int64_t)workspace, 1);
    for (int64_t n = 0; n < c->layers; n++) {
        layer *l = &m->layers[n];
        l->x = take_floats(a, x), l->middle = take_floats(a, x);
        l->kept = take_qkvo(a, m, f32 ? sizeof(float) : sizeof(uint16_t));
        l->lse = take_floats(a, m->rows * c->heads_q);
        l->gate = take_floats(a, hidden), l->up = take_floats(a, hidden);
    }
    m->layers[c->layers].x = take_floats(a, x);
}

static bool allocate(gpt *m, complaint *why) {
    arena a = {NULL, 0, false};
    arrange(m, &a);
    if (a.overflow || fb_alloc(&m->memory, FB_CPU, 0, a.used) != FB_OK)
        return complain(why, "memory ran out for %lld layers at batch %lld and context %lld",
                        (long long)m->config.layers, (long long)m->config.batch,
                        (long long)m->config.context);
    m->bytes = a.used;
    a = (arena){m->memory.data, 0, false};
    arrange(m, &a);
    return true;
}

static bool open_weights(gpt *m, complaint *why) {
    if (!gpt_layout_make(&m->layout, &m->config, why))
        return false;
    m->layers = calloc((size_t)m->config.layers + 1, sizeof *m->layers);
    if (!m->layers) {
        complain(why, "memory ran out for %lld layers", (long long)m->config.layers);
        return false;
    }
    find_weights(m);
    return true;
}

bool gpt_open(gpt **model, const gpt_config *config, complaint *why) {
    *model = NULL;
    if (!check_run(config, why))
        return false;
    gpt *m = calloc(1, sizeof *m);
    if (!m)
        return complain(why, "memory ran out for a model");
    m->config = *config;
    m->rows = config->batch * config->context;
    if (!open_weights(m, why) || !open_attention(m, why) || !allocate(m, why)) {
        gpt_close(m);
        return false;
    }
    *model = m;
    return true;
}

void gpt_close(gpt *model) {
    if (!model)
        return;
    fb_free(&model->memory, FB_CPU, 0);
    attention_close(model->full);
    attention_close(model->windowed);
    gpt_layout_drop(&model->layout);
    free(model->layers);
    free(model);
}

const gpt_layout *gpt_layout_of(const gpt *model) { return &model->layout; }
uint64_t gpt_activation_bytes(const gpt *model) { return model->bytes; }
const float *gpt_logits(const gpt *model) { return model->logits; }
double gpt_attention_seconds(const gpt *model) { return model->seconds; }

/* ---- f32 and bf16 ---- */

/* The upper half of the float, rounded to nearest even; a NaN stays one. */
static uint16_t bf16_from_f32(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (isnan(x))
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static float f32_from_bf16(uint16_t half) {
    const uint32_t bits = (uint32_t)half << 16;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* From f32 to attention's type. If that is f32, `from` and `to` are one buffer and nothing is to be done. */
static void to_attention(const gpt *m, int64_t heads, const float *from, void *to) {
    uint16_t *narrow = to;
    if (m->config.dtype == FB_F32)
        return;
#pragma omp parallel for
    for (int64_t i = 0; i < m->rows * heads * m->config.head_dim; i++)
        narrow[i] = bf16_from_f32(from[i]);
}

/* And back. */
static void from_attention(const gpt *m, int64_t heads, const void *from, float *to) {
    const uint16_t *narrow = from;
    if (m->config.dtype == FB_F32)
        return;
#pragma omp parallel for
    for (int64_t i = 0; i < m->rows * heads * m->config.head_dim; i++)
        to[i] = f32_from_bf16(narrow[i]);
}

/* ---- Forward ---- */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* Rows of context + 1 tokens become inputs, all but the last, and targets, all but the first. */
static void split(gpt *m, const uint8_t *tokens) {
    const int64_t context = m->config.context;
    for (int64_t b = 0; b < m->config.batch; b++) {
        memcpy(m->inputs + b * context, tokens + b * (context + 1), (size_t)context);
        memcpy(m->targets + b * context, tokens + b * (context + 1) + 1, (size_t)context);
    }
}

/* y = a + b */
static void sum(int64_t count, const float *a, const float *b, float *y) {
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++)
        y[i] = a[i] + b[i];
}

/* direction 1 turns Q and K, -1 turns their gradients back. */
static void turn(const gpt *m, const qkvo *h, int direction) {
    const gpt_config *c = &m->config;
    rope(c->batch, c->context, c->heads_q, c->head_dim, c->rope_base, direction, h->q);
    rope(c->batch, c->context, c->heads_kv, c->head_dim, c->rope_base, direction, h->k);
}

/* kept.out and lse from h's Q, K and V, which are kept; h's O from kept.out */
static bool attend(gpt *m, layer *l, const float *sinks, const qkvo *h, complaint *why) {
    const int64_t heads_q = m->config.heads_q, heads_kv = m->config.heads_kv;
    const qkvo *kept = &l->kept;
    to_attention(m, heads_q, h->q, kept->q);
    to_attention(m, heads_kv, h->k, kept->k);
    to_attention(m, heads_kv, h->v, kept->v);
    const double start = now();
    const bool fine = attention_forward(l->attention, kept->q, kept->k, kept->v, sinks, kept->out, l->lse,
                                        m->workspace, why);
    m->seconds += now() - start;
    if (fine)
        from_attention(m, heads_q, kept->out, h->out);
    return fine;
}

/* middle = x + Wo attention(rope(Wq n), rope(Wk n), Wv n), n = rmsnorm(x) */
static bool attention_block(gpt *m, layer *l, const float *w, complaint *why) {
    const gpt_config *c = &m->config;
    const int64_t rows = m->rows, width = c->width;
    const int64_t q = c->heads_q * c->head_dim, kv = c->heads_kv * c->head_dim;
    const qkvo *h = c->dtype == FB_F32 ? &l->kept : &m->wide;
    rmsnorm(rows, width, l->x, w + l->attention_norm, m->n, m->inverse);
    linear(rows, width, q, m->n, w + l->wq, h->q);
    linear(rows, width, kv, m->n, w + l->wk, h->k);
    linear(rows, width, kv, m->n, w + l->wv, h->v);
    turn(m, h, 1);
    if (!attend(m, l, c->sinks ? w + l->sinks : NULL, h, why))
        return false;
    linear(rows, q, width, h->out, w + l->wo, m->branch);
    sum(rows * width, l->x, m->branch, l->middle);
    return true;
}

/* The next layer's x = middle + Wdown swiglu(Wgate n, Wup n), n = rmsnorm(middle) */
static void mlp_block(gpt *m, layer *l, const float *w) {
    const int64_t rows = m->rows, width = m->config.width, hidden = m->config.hidden;
    rmsnorm(rows, width, l->middle, w + l->mlp_norm, m->n, m->inverse);
    linear(rows, width, hidden, m->n, w + l->w_gate, l->gate);
    linear(rows, width, hidden, m->n, w + l->w_up, l->up);
    swiglu(rows * hidden, l->gate, l->up, m->product);
    linear(rows, hidden, width, m->product, w + l->w_down, m->branch);
    sum(rows * width, l->middle, m->branch, l[1].x);
}

double gpt_forward(gpt *model, const float *weights, const uint8_t *tokens, complaint *why) {
    const int64_t rows = model->rows, width = model->config.width;
    layer *layers = model->layers;
    model->forwarded = false;
    split(model, tokens);
    embed(rows, width, model->inputs, weights + model->embedding, layers[0].x);
    for (int64_t n = 0; n < model->config.layers; n++) {
        if (!attention_block(model, &layers[n], weights, why))
            return (double)NAN;
        mlp_block(model, &layers[n], weights);
    }
    rmsnorm(rows, width, layers[model->config.layers].x, weights + model->final_norm, model->n,
            model->inverse);
    linear(rows, width, GPT_VOCABULARY, model->n, weights + model->head, model->logits);
    model->forwarded = true;
    return cross_entropy(rows, GPT_VOCABULARY, model->logits, model->targets);
}

/* ---- Backward: the same lines from the last to the first ---- */

/* Of both blocks: dx is the gradient of what the block gave, and becomes that of what it took. */
static void mlp_block_backward(gpt *m, layer *l, const float *w, float *dw) {
    const int64_t rows = m->rows, width = m->config.width, hidden = m->config.hidden;
    swiglu(rows * hidden, l->gate, l->up, m->product);
    linear_backward(rows, hidden, width, m->product, w + l->w_down, m->dx, m->dproduct, 0, dw + l->w_down);
    swiglu_backward(rows * hidden, l->gate, l->up, m->dproduct, m->dgate, m->dup);
    rmsnorm(rows, width, l->middle, w + l->mlp_norm, m->n, m->inverse);
    linear_backward(rows, width, hidden, m->n, w + l->w_gate, m->dgate, m->branch, 0, dw + l->w_gate);
    linear_backward(rows, width, hidden, m->n, w + l->w_up, m->dup, m->branch, 1, dw + l->w_up);
    rmsnorm_backward(rows, width, l->middle, w + l->mlp_norm, m->inverse, m->branch, m->dx, dw + l->mlp_norm);
}

/* d's dQ, dK and dV from its dO */
static bool attend_backward(gpt *m, layer *l, const float *sinks, float *dsinks, const qkvo *d,
                            complaint *why) {
    const int64_t heads_q = m->config.heads_q, heads_kv = m->config.heads_kv;
    const qkvo *kept = &l->kept, *narrow = &m->narrow;
    to_attention(m, heads_q, d->out, narrow->out);
    const double start = now();
    const bool fine =
        attention_backward(l->attention, kept->q, kept->k, kept->v, sinks, kept->out, l->lse, narrow->out,
                           narrow->q, narrow->k, narrow->v, dsinks, m->workspace, why);
    m->seconds += now() - start;
    if (!fine)
        return false;
    from_attention(m, heads_q, narrow->q, d->q);
    from_attention(m, heads_kv, narrow->k, d->k);
    from_attention(m, heads_kv, narrow->v, d->v);
    return true;
}

static bool attention_block_backward(gpt *m, layer *l, const float *w, float *dw, complaint *why) {
    const gpt_config *c = &m->config;
    const int64_t rows = m->rows, width = c->width;
    const int64_t q = c->heads_q * c->head_dim, kv = c->heads_kv * c->head_dim;
    const qkvo *d = &m->wide;
    float *out = c->dtype == FB_F32 ? l->kept.out : m->wide_out;
    from_attention(m, c->heads_q, l->kept.out, out);
    linear_backward(rows, q, width, out, w + l->wo, m->dx, d->out, 0, dw + l->wo);
    if (!attend_backward(m, l, c->sinks ? w + l->sinks : NULL, c->sinks ? dw + l->sinks : NULL, d, why))
        return false;
    turn(m, d, -1);
    rmsnorm(rows, width, l->x, w + l->attention_norm, m->n, m->inverse);
    linear_backward(rows, width, q, m->n, w + l->wq, d->q, m->branch, 0, dw + l->wq);
    linear_backward(rows, width, kv, m->n, w + l->wk, d->k, m->branch, 1, dw + l->wk);
    linear_backward(rows, width, kv, m->n, w + l->wv, d->v, m->branch, 1, dw + l->wv);
    rmsnorm_backward(rows, width, l->x, w + l->attention_norm, m->inverse, m->branch, m->dx,
                     dw + l->attention_norm);
    return true;
}

/* dx is the gradient of what the last layer gave. */
static void head_backward(gpt *m, const float *x, const float *w, float scale, float *dw) {
    const int64_t rows = m->rows, width = m->config.width;
    rmsnorm(rows, width, x, w + m->final_norm, m->n, m->inverse);
    cross_entropy_backward(rows, GPT_VOCABULARY, m->logits, m->targets, scale);
    linear_backward(rows, width, GPT_VOCABULARY, m->n, w + m->head, m->logits, m->branch, 0, dw + m->head);
    memset(m->dx, 0, (size_t)(rows * width) * sizeof *m->dx);
    rmsnorm_backward(rows, width, x, w + m->final_norm, m->inverse, m->branch, m->dx, dw + m->final_norm);
}

bool gpt_backward(gpt *model, const float *weights, const uint8_t *tokens, float scale, float *gradients,
                  complaint *why) {
    if (!model->forwarded)
        return complain(why, "gpt_backward is called without a gpt_forward since the last one");
    model->forwarded = false; /* the logits are about to become their gradient */
    split(model, tokens);
    head_backward(model, model->layers[model->config.layers].x, weights, scale, gradients);
    for (int64_t n = model->config.layers - 1; n >= 0; n--) {
        mlp_block_backward(model, &model->layers[n], weights, gradients);
        if (!attention_block_backward(model, &model->layers[n], weights, gradients, why))
            return false;
    }
    embed_backward(model->rows, model->config.width, model->inputs, model->dx, gradients + model->embedding);
    return true;
}
