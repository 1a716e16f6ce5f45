/* AdamW with gradient clipping, and the schedule of its rate. Floor: examples/gpt. */
#ifndef GPT_OPTIMIZER_H
#define GPT_OPTIMIZER_H

#include "parameters.h"

typedef struct adamw {
    float beta1, beta2, epsilon, decay;
} adamw;

/* For the step after `step` steps. Rises linearly over `warmup` steps to `peak`, then falls along a cosine to
 * a tenth of it at `steps`. */
float learning_rate(int64_t step, int64_t steps, int64_t warmup, float peak);

/* Scales the gradients so that their Euclidean norm is at most `most`; returns the norm that they had, summed
 * in double in a fixed order. */
double clip_gradients(int64_t count, float *gradients, double most);

/* Step number `step`, from 1. m and v are the moments:
 *     m = b1 m + (1 - b1) g    v = b2 v + (1 - b2) g^2
 *     w -= rate (m / (1 - b1^step) / (sqrt(v / (1 - b2^step)) + epsilon) + decay w)
 * decay only where the layout says so. (Loshchilov and Hutter, 2019) */
void adamw_step(const adamw *a, const gpt_layout *layout, int64_t step, float rate, const float *gradients,
                float *weights, float *m, float *v);

#endif
