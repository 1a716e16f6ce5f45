/* See trainer.h. Floor: examples/gpt. */
#include "trainer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

bool trainer_open(trainer *t, const recipe *how, const text *from, const gpt_config *config, uint64_t seed,
                  complaint *why) {
    *t = (trainer){.recipe = how, .text = from, .state = {.config = *config, .seed = seed}};
    if (!text_fits(from, config->context, why) || !gpt_open(&t->model, config, why))
        return false;
    const gpt_layout *layout = gpt_layout_of(t->model);
    const size_t count = (size_t)layout->floats;
    t->state.weights = malloc(count * sizeof(float));
    t->state.m = calloc(count, sizeof(float));
    t->state.v = calloc(count, sizeof(float));
    t->gradients = malloc(count * sizeof(float));
    t->tokens = malloc((size_t)(config->batch * (config->context + 1)));
    if (!t->state.weights || !t->state.m || !t->state.v || !t->gradients || !t->tokens) {
        trainer_close(t);
        return complain(why, "no memory for %zu parameters, their gradients and moments (%zu bytes)", count,
                        4 * count * sizeof(float));
    }
    gpt_initialize(layout, config, seed, t->state.weights);
    return true;
}

void trainer_close(trainer *t) {
    free(t->state.weights);
    free(t->state.m);
    free(t->state.v);
    free(t->gradients);
    free(t->tokens);
    gpt_close(t->model);
    *t = (trainer){0};
}

/* The mean loss of the step's batches, in nats, and their mean gradient. */
static double gradient(trainer *t, complaint *why) {
    const gpt_config *c = &t->state.config;
    const int64_t micro = t->recipe->micro;
    double loss = 0;
    memset(t->gradients, 0, (size_t)gpt_layout_of(t->model)->floats * sizeof(float));
    for (int64_t n = 0; n < micro; n++) {
        text_batch(t->text, t->state.seed, t->state.step, n, c->batch, c->context, t->tokens);
        const double part = gpt_forward(t->model, t->state.weights, t->tokens, why);
        if (isnan(part) ||
            !gpt_backward(t->model, t->state.weights, t->tokens, 1 / (float)micro, t->gradients, why))
            return (double)NAN;
        loss += part / (double)micro;
    }
    return loss;
}

bool trainer_step(trainer *t, step_result *result, complaint *why) {
    const recipe *how = t->recipe;
    const gpt_layout *layout = gpt_layout_of(t->model);
    run_state *s = &t->state;
    *why = (complaint){""};
    result->loss = gradient(t, why);
    result->norm =
        isnan(result->loss) ? (double)NAN : clip_gradients(layout->floats, t->gradients, (double)how->clip);
    if (!isfinite(result->norm)) {
        if (!*why->text)
            complain(why, "step %lld: the %s is not finite; a lower rate may help", (long long)s->step + 1,
                     isnan(result->loss) ? "loss" : "gradient");
        return false;
    }
    result->rate = learning_rate(s->step, how->steps, how->warmup, how->rate);
    adamw_step(&how->adam, layout, s->step + 1, result->rate, t->gradients, s->weights, s->m, s->v);
    s->step++;
    return true;
}

double trainer_held_out(trainer *t, int64_t batches, complaint *why) {
    const gpt_config *c = &t->state.config;
    double sum = 0;
    *why = (complaint){""};
    for (int64_t n = 0; n < batches; n++) {
        text_held_out(t->text, n, batches, c->batch, c->context, t->tokens);
        sum += gpt_forward(t->model, t->state.weights, t->tokens, why);
    }
    if (!isfinite(sum) && !*why->text)
        complain(why, "step %lld: the loss over the text held out is not finite", (long long)t->state.step);
    return isfinite(sum) ? sum / (double)batches * BITS_PER_NAT : (double)NAN;
}
