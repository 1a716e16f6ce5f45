/* See optimizer.h. Floor: examples/gpt. */
#include "optimizer.h"
#include <math.h>

/* `step` counts the steps done: the first one is step 0 and its rate is not 0. */
float learning_rate(int64_t step, int64_t steps, int64_t warmup, float peak) {
    const double most = (double)peak, least = most / 10, pi = acos(-1.0);
    if (step < warmup)
        return (float)(most * ((double)(step + 1) / (double)warmup));
    if (step >= steps)
        return (float)least;
    const double progress = (double)(step - warmup) / (double)(steps - warmup);
    return (float)(least + (most - least) * (1 + cos(pi * progress)) / 2);
}

/* The parts are of the same length whatever the number of threads, and so are their sums. */
static double sum_of_squares(int64_t count, const float *x) {
    enum { PARTS = 64 };
    double sums[PARTS], total = 0;
    const int64_t length = count / PARTS + 1;
#pragma omp parallel for
    for (int part = 0; part < PARTS; part++) {
        const int64_t lo = part * length < count ? part * length : count;
        const int64_t hi = lo + length < count ? lo + length : count;
        double sum = 0;
        for (int64_t i = lo; i < hi; i++)
            sum += (double)x[i] * (double)x[i];
        sums[part] = sum;
    }
    for (int part = 0; part < PARTS; part++)
        total += sums[part];
    return total;
}

/* Gradients that are not finite stay as they are: scaling by 0 would hide all others, and the norm tells. */
double clip_gradients(int64_t count, float *gradients, double most) {
    const double norm = sqrt(sum_of_squares(count, gradients));
    if (isfinite(norm) && norm > most) {
        const double scale = most / norm;
#pragma omp parallel for
        for (int64_t i = 0; i < count; i++)
            gradients[i] = (float)((double)gradients[i] * scale);
    }
    return norm;
}

/* What all elements of a matrix have in common. */
typedef struct update {
    float beta1, beta2, epsilon, decay, rate;
    float correction1, correction2; /* 1 - b^step: moments begin at 0, and this makes up for it */
} update;

static void update_matrix(const update *u, int64_t count, const float *g, float *w, float *m, float *v) {
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++) {
        m[i] = u->beta1 * m[i] + (1 - u->beta1) * g[i];
        v[i] = u->beta2 * v[i] + (1 - u->beta2) * g[i] * g[i];
        const float along = m[i] / u->correction1 / (sqrtf(v[i] / u->correction2) + u->epsilon);
        w[i] -= u->rate * (along + u->decay * w[i]);
    }
}

void adamw_step(const adamw *a, const gpt_layout *layout, int64_t step, float rate, const float *gradients,
                float *weights, float *m, float *v) {
    /* In double: b2^step is close to 1 at first. */
    const update common = {
        .beta1 = a->beta1,
        .beta2 = a->beta2,
        .epsilon = a->epsilon,
        .rate = rate,
        .correction1 = (float)(1 - pow((double)a->beta1, (double)step)),
        .correction2 = (float)(1 - pow((double)a->beta2, (double)step)),
    };
    for (int64_t i = 0; i < layout->count; i++) {
        const gpt_matrix *matrix = &layout->matrices[i];
        const int64_t at = matrix->offset;
        update u = common;
        u.decay = matrix->decays ? a->decay : 0;
        update_matrix(&u, matrix->rows * matrix->cols, gradients + at, weights + at, m + at, v + at);
    }
}
