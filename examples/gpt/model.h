/* All layers in a row: activations, forward and backward of the whole decoder.
 *
 *     x = embed(tokens)
 *     for each layer:
 *         x += Wo attention(rope(Wq n), rope(Wk n), Wv n)      n = rmsnorm(x)
 *         x += Wdown swiglu(Wgate n, Wup n)                    n = rmsnorm(x)
 *     logits = head rmsnorm(x)
 *
 * Floor: examples/gpt. */
#ifndef GPT_MODEL_H
#define GPT_MODEL_H

#include "parameters.h"

typedef struct gpt gpt;

/* Checks the config (each refusal is a sentence that names the field), makes plans and memory. */
bool gpt_open(gpt **model, const gpt_config *config, complaint *why);
void gpt_close(gpt *model); /* NULL is fine */

const gpt_layout *gpt_layout_of(const gpt *model);

/* Bytes of all that grows with the context: activations, workspace. */
uint64_t gpt_activation_bytes(const gpt *model);

/* The mean loss, in nats a token, of predicting tokens[b][1 .. context] from tokens[b][0 .. context - 1];
 * rows of context + 1 bytes. Keeps what the backward needs. NaN with *why if attention failed. */
double gpt_forward(gpt *model, const float *weights, const uint8_t *tokens, complaint *why);

/* Adds scale * d loss / d weights of the last forward to `gradients`. */
bool gpt_backward(gpt *model, const float *weights, const uint8_t *tokens, float scale, float *gradients,
                  complaint *why);

/* Logits of the last forward, [batch][context][256], until a backward. */
const float *gpt_logits(const gpt *model);

/* Seconds spent in attention since the model was opened. */
double gpt_attention_seconds(const gpt *model);

#endif
