/* Text from a trained model. Floor: examples/gpt. */
#ifndef GPT_SAMPLE_H
#define GPT_SAMPLE_H

#include "model.h"

/* Goes on after `given` bytes of `out`, which has room for `total`: each next byte is drawn from
 * softmax(logits / temperature) with a generator that starts at `seed`. Sees the last context bytes. False
 * with *why if the model could not be opened or run. */
bool sample(const gpt_config *config, const float *weights, int64_t given, int64_t total, float temperature,
            uint64_t seed, uint8_t *out, complaint *why);

#endif
