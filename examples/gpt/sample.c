/* See sample.h. Every byte is a forward over the whole context: short, and what follows a position does not
 * reach it under the causal mask, so that the rest of the row may be anything. Floor: examples/gpt. */
#include "sample.h"
#include "random.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Uniform in [0, 1). */
static double uniform(uint64_t *state) { return (double)random_53(state) * 0x1p-53; }

static uint8_t draw(const float *logits, float temperature, double u) {
    double p[GPT_VOCABULARY], sum = 0;
    float most = logits[0];
    for (int i = 1; i < GPT_VOCABULARY; i++)
        most = fmaxf(most, logits[i]);
    for (int i = 0; i < GPT_VOCABULARY; i++)
        sum += p[i] = exp((double)((logits[i] - most) / temperature));
    int last = 0;
    for (int i = 0; i < GPT_VOCABULARY; i++) {
        u -= p[i] / sum;
        if (p[i] > 0)
            last = i;
        if (u < 0)
            break;
    }
    return (uint8_t)last;
}

bool sample(const gpt_config *config, const float *weights, int64_t given, int64_t total, float temperature,
            uint64_t seed, uint8_t *out, complaint *why) {
    gpt_config one = *config;
    gpt *model;
    one.batch = 1;
    one.context =
        total < one.context ? total : one.context; /* positions begin at 0: what is not there costs */
    *why = (complaint){""};
    if (!gpt_open(&model, &one, why))
        return false;
    bool good = true;
    uint8_t *row = calloc((size_t)one.context + 1, 1);
    if (!row)
        good = complain(why, "no memory for a row of %lld tokens", (long long)one.context);
    for (int64_t n = given; good && n < total; n++) {
        const int64_t seen = n < one.context ? n : one.context;
        memcpy(row, out + n - seen, (size_t)seen);
        good = isfinite(gpt_forward(model, weights, row, why));
        if (!good && !*why->text)
            complain(why, "the model's logits are not finite");
        if (good)
            out[n] = draw(gpt_logits(model) + (seen - 1) * GPT_VOCABULARY, temperature, uniform(&seed));
    }
    free(row);
    gpt_close(model);
    return good;
}
