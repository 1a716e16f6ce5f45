/* The attention of one kind of layer, by flashback: what a training program of your own would take over. The
 * tensors are as projections leave them, [batch][context][heads][D]; strides tell flashback so, nothing is
 * transposed. Floor: examples/gpt. */
#ifndef GPT_ATTENTION_H
#define GPT_ATTENTION_H

#include "parameters.h"

typedef struct attention attention;

/* Causal; sees `window` tokens, their own included, or all if 0. On false *why says why: flashback's own
 * sentence. */
bool attention_open(attention **a, const gpt_config *config, int64_t window, complaint *why);
void attention_close(attention *a); /* NULL is fine */

/* Bytes of workspace that a call needs, aligned to float; and what the plan says about itself. */
size_t attention_workspace(const attention *a);
void attention_explain(const attention *a, char *text, size_t size);

/* O = softmax(Q K^T / sqrt(D)) V for every head. q and out are [batch][context][Hq][D], k and v have Hkv
 * heads, all of config.dtype; lse is [batch][Hq][context] in f32 and needed by the backward. sinks [Hq] or
 * NULL. workspace has attention_workspace bytes. */
bool attention_forward(const attention *a, const void *q, const void *k, const void *v, const float *sinks,
                       void *out, float *lse, void *workspace, complaint *why);

/* dq, dk, dv from dout; dsinks is added to. */
bool attention_backward(const attention *a, const void *q, const void *k, const void *v, const float *sinks,
                        const void *out, const float *lse, const void *dout, void *dq, void *dk, void *dv,
                        float *dsinks, void *workspace, complaint *why);

#endif
