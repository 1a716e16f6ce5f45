/* The layers besides attention, each with its backward. Rows are tokens: x is [rows][width]. A backward takes
 * the gradient of the loss with respect to the output, dy, writes dx and ADDS to the gradients of parameters.
 * All are pure functions of their arguments and use OpenMP over rows, so that the bits do not depend on the
 * number of threads; those of linear are BLAS's, which may (OpenBLAS's dx does). Floor: examples/gpt. */
#ifndef GPT_LAYERS_H
#define GPT_LAYERS_H

#include <stdint.h>

/* y = x W^T: y [rows][out], x [rows][in], W [out][in]. Sizes fit an int. */
void linear(int64_t rows, int64_t in, int64_t out, const float *x, const float *w, float *y);
/* dx = dy W (or dx += dy W with `add`), dW += dy^T x. dx may be NULL. */
void linear_backward(int64_t rows, int64_t in, int64_t out, const float *x, const float *w, const float *dy,
                     float *dx, int add, float *dw);

/* y = g x / r, r = sqrt(mean(x^2) + 1e-5). inverse[row] = 1 / r is kept for the backward. (Zhang and
 * Sennrich, 2019) */
void rmsnorm(int64_t rows, int64_t width, const float *x, const float *g, float *y, float *inverse);
/* dx += ..., dg += ... */
void rmsnorm_backward(int64_t rows, int64_t width, const float *x, const float *g, const float *inverse,
                      const float *dy, float *dx, float *dg);

/* Turns pairs (i, i + D/2) of every head by position * base^(-2i/D), in place: x [batch][context][heads][D].
 * direction 1; the backward is the same with direction -1, since a turn's transpose is its inverse. (Su et
 * al., 2021) */
void rope(int64_t batch, int64_t context, int64_t heads, int64_t head_dim, float base, int direction,
          float *x);

/* y = silu(gate) up, silu(z) = z / (1 + e^-z). (Shazeer, 2020) */
void swiglu(int64_t count, const float *gate, const float *up, float *y);
void swiglu_backward(int64_t count, const float *gate, const float *up, const float *dy, float *dgate,
                     float *dup);

/* x[row] = E[token]; dE[token] += dx[row]. */
void embed(int64_t rows, int64_t width, const uint8_t *tokens, const float *e, float *x);
void embed_backward(int64_t rows, int64_t width, const uint8_t *tokens, const float *dx, float *de);

/* The mean over rows of -ln softmax(logits)[target], in nats, summed in double in the order of rows. */
double cross_entropy(int64_t rows, int64_t classes, const float *logits, const uint8_t *targets);
/* dlogits = scale (softmax(logits) - onehot(target)) / rows, in place of the logits. */
void cross_entropy_backward(int64_t rows, int64_t classes, float *logits, const uint8_t *targets,
                            float scale);

#endif
