/* See parameters.h. */
#include "parameters.h"
#include "cli/file.h"
#include "random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- The layout ---- */

static bool in_range(const char *field, int64_t value, int64_t least, int64_t most, complaint *why) {
    if (value >= least && value <= most)
        return true;
    return complain(why, "%s is %lld, expected %lld to %lld", field, (long long)value, (long long)least,
                    (long long)most);
}

/* With these bounds no size of a matrix exceeds an int of BLAS, and no sum of sizes 63 bits. */
static bool check_shape(const gpt_config *c, complaint *why) {
    if (!in_range("layers", c->layers, 1, 1000, why) || !in_range("width", c->width, 1, 1 << 20, why) ||
        !in_range("heads_q", c->heads_q, 1, 1 << 16, why) ||
        !in_range("heads_kv", c->heads_kv, 1, 1 << 16, why) ||
        !in_range("head_dim", c->head_dim, 2, 576, why) || !in_range("hidden", c->hidden, 1, 1 << 20, why))
        return false;
    if (c->heads_q % c->heads_kv != 0)
        return complain(why, "heads_q is %lld, expected a multiple of heads_kv, which is %lld",
                        (long long)c->heads_q, (long long)c->heads_kv);
    if (c->head_dim % 2 != 0)
        return complain(why, "head_dim is %lld, expected an even number, as RoPE turns pairs",
                        (long long)c->head_dim);
    return true;
}

enum { NO_LAYER = -1 };

static void add(gpt_layout *layout, int64_t layer, const char *name, int64_t rows, int64_t cols,
                bool decays) {
    gpt_matrix *m = &layout->matrices[layout->count++];
    if (layer == NO_LAYER)
        snprintf(m->name, sizeof m->name, "%s", name);
    else
        snprintf(m->name, sizeof m->name, "layer.%d.%s", (int)layer, name);
    m->rows = rows, m->cols = cols, m->decays = decays;
    m->offset = layout->floats;
    layout->floats += rows * cols;
}

static void add_layer(gpt_layout *layout, int64_t n, const gpt_config *c) {
    const int64_t q = c->heads_q * c->head_dim, kv = c->heads_kv * c->head_dim;
    add(layout, n, "attention_norm", 1, c->width, false);
    add(layout, n, "wq", q, c->width, true);
    add(layout, n, "wk", kv, c->width, true);
    add(layout, n, "wv", kv, c->width, true);
    add(layout, n, "wo", c->width, q, true);
    if (c->sinks)
        add(layout, n, "sinks", 1, c->heads_q, false);
    add(layout, n, "mlp_norm", 1, c->width, false);
    add(layout, n, "w_gate", c->hidden, c->width, true);
    add(layout, n, "w_up", c->hidden, c->width, true);
    add(layout, n, "w_down", c->width, c->hidden, true);
}

bool gpt_layout_make(gpt_layout *layout, const gpt_config *config, complaint *why) {
    enum { OUTSIDE_LAYERS = 3, IN_A_LAYER = 10 };
    *layout = (gpt_layout){NULL, 0, 0};
    if (!check_shape(config, why))
        return false;
    layout->matrices =
        calloc((size_t)(OUTSIDE_LAYERS + config->layers * IN_A_LAYER), sizeof *layout->matrices);
    if (!layout->matrices)
        return complain(why, "memory ran out for the names of %lld layers", (long long)config->layers);
    add(layout, NO_LAYER, "embedding", GPT_VOCABULARY, config->width, true);
    for (int64_t n = 0; n < config->layers; n++)
        add_layer(layout, n, config);
    add(layout, NO_LAYER, "final_norm", 1, config->width, false);
    if (!config->tied)
        add(layout, NO_LAYER, "head", GPT_VOCABULARY, config->width, true);
    return true;
}

void gpt_layout_drop(gpt_layout *layout) {
    free(layout->matrices);
    *layout = (gpt_layout){NULL, 0, 0};
}

int64_t gpt_find(const gpt_layout *layout, const char *name) {
    for (int64_t i = 0; i < layout->count; i++)
        if (strcmp(layout->matrices[i].name, name) == 0)
            return i;
    return -1;
}

/* ---- The first weights ---- */

/* In (0, 1], so that it has a logarithm. */
static double uniform(uint64_t *state) { return ldexp((double)(random_53(state) + 1), -53); }

/* sqrt(-2 ln u) cos(2 pi v) has mean 0 and deviation 1 (Box and Muller, 1958). In double, so that a last bit
 * in which two machines' ln and cos differ is lost when the result becomes a float. */
static double normal(uint64_t *state) {
    const double two_pi = 6.283185307179586, u = uniform(state), v = uniform(state);
    return sqrt(-2 * log(u)) * cos(two_pi * v);
}

/* All numbers come from one generator, in the order of the layout. */
void gpt_initialize(const gpt_layout *layout, const gpt_config *config, uint64_t seed, float *weights) {
    uint64_t state = seed;
    for (int64_t i = 0; i < layout->count; i++) {
        const gpt_matrix *m = &layout->matrices[i];
        float *w = weights + m->offset;
        const bool residual = file_ends(m->name, ".wo") || file_ends(m->name, ".w_down");
        const double deviation = residual ? 0.02 / sqrt(2 * (double)config->layers) : 0.02;
        for (int64_t j = 0; j < m->rows * m->cols; j++)
            if (m->decays)
                w[j] = (float)(deviation * normal(&state));
            else
                w[j] = file_ends(m->name, ".sinks") ? 0 : 1;
    }
}
