/* See layers.h. Sums over rows, which are gradients of parameters, run over blocks of columns in parallel and
 * over rows in order. */
#include "layers.h"

#ifdef __APPLE__
#include <Accelerate/Accelerate.h>
#else
#include <cblas.h>
#endif
#include <math.h>
#include <string.h>

/* Floats of a line of the cache: columns of one block, so that no two threads write to one line. */
enum { COLUMNS = 16 };

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

/* ---- y = x W^T ---- */

void linear(int64_t rows, int64_t in, int64_t out, const float *x, const float *w, float *y) {
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)rows, (int)out, (int)in, 1, x, (int)in, w,
                (int)in, 0, y, (int)out);
}

void linear_backward(int64_t rows, int64_t in, int64_t out, const float *x, const float *w, const float *dy,
                     float *dx, int add, float *dw) {
    if (dx) /* [rows][in] = [rows][out] [out][in] */
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, (int)rows, (int)in, (int)out, 1, dy, (int)out,
                    w, (int)in, add ? 1 : 0, dx, (int)in);
    /* [out][in] = [rows][out]^T [rows][in] */
    cblas_sgemm(CblasRowMajor, CblasTrans, CblasNoTrans, (int)out, (int)in, (int)rows, 1, dy, (int)out, x,
                (int)in, 1, dw, (int)in);
}

/* ---- RMSNorm ---- */

/* 1 / sqrt(mean(x^2) + 1e-5) */
static float inverse_rms(int64_t width, const float *x) {
    double sum = 0;
    for (int64_t c = 0; c < width; c++)
        sum += (double)x[c] * (double)x[c];
    return (float)(1 / sqrt(sum / (double)width + 1e-5));
}

void rmsnorm(int64_t rows, int64_t width, const float *x, const float *g, float *y, float *inverse) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++) {
        const float *xr = x + r * width;
        float *yr = y + r * width;
        inverse[r] = inverse_rms(width, xr);
        for (int64_t c = 0; c < width; c++)
            yr[c] = g[c] * xr[c] * inverse[r];
    }
}

/* With i = 1 / r:  dx = i (g dy - x i^2 mean(g dy x)) */
static void rmsnorm_dx(int64_t width, const float *x, const float *g, float i, const float *dy, float *dx) {
    double sum = 0;
    for (int64_t c = 0; c < width; c++)
        sum += (double)(g[c] * dy[c]) * (double)x[c];
    const float pull = i * i * (float)(sum / (double)width);
    for (int64_t c = 0; c < width; c++)
        dx[c] += i * (g[c] * dy[c] - x[c] * pull);
}

/* dg = sum over rows of dy x / r, for the columns lo to hi. */
static void rmsnorm_dg(int64_t rows, int64_t width, int64_t lo, int64_t hi, const float *x,
                       const float *inverse, const float *dy, float *dg) {
    double sum[COLUMNS] = {0};
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = lo; c < hi; c++)
            sum[c - lo] += (double)(dy[r * width + c] * x[r * width + c] * inverse[r]);
    for (int64_t c = lo; c < hi; c++)
        dg[c] += (float)sum[c - lo];
}

void rmsnorm_backward(int64_t rows, int64_t width, const float *x, const float *g, const float *inverse,
                      const float *dy, float *dx, float *dg) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        rmsnorm_dx(width, x + r * width, g, inverse[r], dy + r * width, dx + r * width);
#pragma omp parallel for
    for (int64_t lo = 0; lo < width; lo += COLUMNS)
        rmsnorm_dg(rows, width, lo, smaller(lo + COLUMNS, width), x, inverse, dy, dg);
}

/* ---- RoPE ---- */

/* (a, b) turned by the angle whose cosine and sine are given. */
static void turn(float *a, float *b, float cosine, float sine) {
    const float x = *a, y = *b;
    *a = x * cosine - y * sine;
    *b = x * sine + y * cosine;
}

void rope(int64_t batch, int64_t context, int64_t heads, int64_t head_dim, float base, int direction,
          float *x) {
    const int64_t half = head_dim / 2;
    const double ratio =
        pow((double)base, -2 / (double)head_dim); /* of the frequencies of neighbouring pairs */
#pragma omp parallel for
    for (int64_t position = 0; position < context; position++) {
        double frequency = 1;
        for (int64_t i = 0; i < half; i++, frequency *= ratio) {
            const double angle = direction * (double)position * frequency;
            const float cosine = (float)cos(angle), sine = (float)sin(angle);
            for (int64_t b = 0; b < batch; b++)
                for (int64_t h = 0; h < heads; h++) {
                    float *head = x + ((b * context + position) * heads + h) * head_dim;
                    turn(&head[i], &head[i + half], cosine, sine);
                }
        }
    }
}

/* ---- SwiGLU ---- */

static float sigmoid(float z) { return 1 / (1 + expf(-z)); }

void swiglu(int64_t count, const float *gate, const float *up, float *y) {
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++)
        y[i] = gate[i] * sigmoid(gate[i]) * up[i];
}

/* silu'(z) = s (1 + z (1 - s)), s = sigmoid(z) */
void swiglu_backward(int64_t count, const float *gate, const float *up, const float *dy, float *dgate,
                     float *dup) {
#pragma omp parallel for
    for (int64_t i = 0; i < count; i++) {
        const float z = gate[i], s = sigmoid(z);
        dgate[i] = dy[i] * up[i] * s * (1 + z * (1 - s));
        dup[i] = dy[i] * z * s;
    }
}

/* ---- The embedding ---- */

void embed(int64_t rows, int64_t width, const uint8_t *tokens, const float *e, float *x) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        memcpy(x + r * width, e + tokens[r] * width, (size_t)width * sizeof *x);
}

void embed_backward(int64_t rows, int64_t width, const uint8_t *tokens, const float *dx, float *de) {
#pragma omp parallel for
    for (int64_t lo = 0; lo < width; lo += COLUMNS)
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = lo; c < smaller(lo + COLUMNS, width); c++)
                de[tokens[r] * width + c] += dx[r * width + c];
}

/* ---- The loss ---- */

static float largest(int64_t n, const float *x) {
    float most = x[0];
    for (int64_t i = 1; i < n; i++)
        most = fmaxf(most, x[i]);
    return most;
}

/* -ln softmax(z)[target] = ln sum_i exp(z_i - m) + m - z_target, m = max(z) */
static double surprise(int64_t classes, const float *z, uint8_t target) {
    const float m = largest(classes, z);
    double sum = 0;
    for (int64_t i = 0; i < classes; i++)
        sum += (double)expf(z[i] - m);
    return log(sum) + (double)m - (double)z[target];
}

double cross_entropy(int64_t rows, int64_t classes, const float *logits, const uint8_t *targets) {
    enum { AT_ONCE = 256 }; /* rows whose losses wait for their turn to be added */
    double sum = 0, losses[AT_ONCE];
    for (int64_t lo = 0; lo < rows; lo += AT_ONCE) {
        const int64_t hi = smaller(lo + AT_ONCE, rows);
#pragma omp parallel for
        for (int64_t r = lo; r < hi; r++)
            losses[r - lo] = surprise(classes, logits + r * classes, targets[r]);
        for (int64_t r = lo; r < hi; r++)
            sum += losses[r - lo];
    }
    return sum / (double)rows;
}

/* z = factor (softmax(z) - onehot(target)) */
static void softmax_minus_target(int64_t classes, float *z, uint8_t target, float factor) {
    const float m = largest(classes, z);
    double sum = 0;
    for (int64_t i = 0; i < classes; i++)
        sum += (double)(z[i] = expf(z[i] - m));
    for (int64_t i = 0; i < classes; i++)
        z[i] *= (float)(1 / sum);
    z[target] -= 1;
    for (int64_t i = 0; i < classes; i++)
        z[i] *= factor;
}

void cross_entropy_backward(int64_t rows, int64_t classes, float *logits, const uint8_t *targets,
                            float scale) {
#pragma omp parallel for
    for (int64_t r = 0; r < rows; r++)
        softmax_minus_target(classes, logits + r * classes, targets[r], scale / (float)rows);
}
