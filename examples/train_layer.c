/* One attention layer in a toy training loop: y = attention(x Wq, x Wk, x Wv) Wo learns the running mean of
 * its inputs by plain gradient descent; the loss is the mean square of y - target. Shown: projections as they
 * are in memory ([B,L,H,D], by strides), grouped heads, a causal window, one plan and one workspace for all
 * steps, and errors. Read first.c before. */
#include "flashback.h"

#include <stdio.h>
#include <stdlib.h>

enum { B = 2, L = 96, HQ = 4, HKV = 2, D = 16, WIDTH = 32, STEPS = 60 };
enum { ROWS = B * L, QW = HQ * D, KW = HKV * D };
static const float RATE = 4;

/* ---- Matrices, row by row ---- */

/* c[m][n] = a[m][k] b[k][n] */
static void product(int m, int n, int k, const float *a, const float *b, float *c) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int e = 0; e < k; e++)
                sum += a[i * k + e] * b[e * n + j];
            c[i * n + j] = sum;
        }
}

/* c[m][n] = a[m][k] b[n][k]^T: the gradient with respect to what was multiplied by b. */
static void product_bt(int m, int n, int k, const float *a, const float *b, float *c) {
    for (int i = 0; i < m; i++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int e = 0; e < k; e++)
                sum += a[i * k + e] * b[j * k + e];
            c[i * n + j] = sum;
        }
}

/* w[k][n] -= RATE a[m][k]^T g[m][n]: one step of gradient descent. */
static void descend(int m, int n, int k, const float *a, const float *g, float *w) {
    for (int e = 0; e < k; e++)
        for (int j = 0; j < n; j++) {
            float sum = 0;
            for (int i = 0; i < m; i++)
                sum += a[i * k + e] * g[i * n + j];
            w[e * n + j] -= RATE * sum;
        }
}

static void fill(float *x, size_t n, float size) {
    static unsigned state = 1;
    for (size_t i = 0; i < n; i++) {
        state = state * 1664525u + 1013904223u;
        x[i] = size * ((float)(state >> 8) / 8388608.0F - 1);
    }
}

/* ---- The layer ---- */

typedef struct layer {
    fb_plan *plan;
    fb_io io;
    float wq[WIDTH * QW], wk[WIDTH * KW], wv[WIDTH * KW], wo[QW * WIDTH];
    float q[ROWS * QW], k[ROWS * KW], v[ROWS * KW], out[ROWS * QW], lse[B * HQ * L];
    float dq[ROWS * QW], dk[ROWS * KW], dv[ROWS * KW], dout[ROWS * QW];
} layer;

/* Row i of batch b holds all heads side by side: [B,L,H,D]. */
static fb_strides heads_inside(int64_t heads) {
    return (fb_strides){.batch = L * heads * D, .head = D, .row = heads * D};
}

static fb_status layer_open(layer *a) {
    fb_desc desc;
    fb_desc_init(&desc, sizeof desc);
    desc.batch = B, desc.heads_q = HQ, desc.heads_kv = HKV;
    desc.len_q = desc.len_k = L, desc.head_dim = desc.head_dim_v = D;
    desc.window = fb_window_causal();
    desc.q = desc.out = desc.dq = desc.dout = heads_inside(HQ);
    desc.k = desc.v = desc.dk = desc.dv = heads_inside(HKV);
    fb_status status = fb_plan_create(&a->plan, &desc);
    if (status != FB_OK)
        return status;

    fb_io *io = &a->io; /* one for both passes: each takes what it needs */
    fb_io_init(io, sizeof *io);
    io->workspace_size = fb_plan_workspace(a->plan);
    io->q.data = a->q, io->k.data = a->k, io->v.data = a->v;
    io->out.data = a->out, io->lse.data = a->lse, io->dout.data = a->dout;
    io->dq.data = a->dq, io->dk.data = a->dk, io->dv.data = a->dv;
    return fb_alloc(&io->workspace, FB_CPU, 0, io->workspace_size);
}

static void layer_close(layer *a) {
    fb_free(&a->io.workspace, FB_CPU, 0);
    fb_plan_destroy(a->plan);
}

/* Forward, loss, backward, and a step of gradient descent. */
static fb_status layer_step(layer *a, const float *x, const float *target, float *loss) {
    static float y[ROWS * WIDTH];
    product(ROWS, QW, WIDTH, x, a->wq, a->q);
    product(ROWS, KW, WIDTH, x, a->wk, a->k);
    product(ROWS, KW, WIDTH, x, a->wv, a->v);
    fb_status status = fb_forward(a->plan, &a->io);
    if (status != FB_OK)
        return status;
    product(ROWS, WIDTH, QW, a->out, a->wo, y);

    *loss = 0;
    for (int i = 0; i < ROWS * WIDTH; i++) {
        const float error = y[i] - target[i];
        *loss += error * error / (ROWS * WIDTH);
        y[i] = 2 * error / (ROWS * WIDTH); /* from here on the gradient of y */
    }

    product_bt(ROWS, QW, WIDTH, y, a->wo, a->dout);
    status = fb_backward(a->plan, &a->io);
    if (status != FB_OK)
        return status;
    descend(ROWS, WIDTH, QW, a->out, y, a->wo);
    descend(ROWS, QW, WIDTH, x, a->dq, a->wq);
    descend(ROWS, KW, WIDTH, x, a->dk, a->wk);
    descend(ROWS, KW, WIDTH, x, a->dv, a->wv);
    return FB_OK;
}

/* target[i] = mean of x[0 ... i], in each batch entry. */
static void running_mean(const float *x, float *target) {
    for (int row = 0; row < ROWS; row++)
        for (int c = 0; c < WIDTH; c++) {
            const int i = row % L, at = row * WIDTH + c;
            const float before = i ? target[at - WIDTH] : 0;
            target[at] = before + (x[at] - before) / (float)(i + 1);
        }
}

int main(void) {
    static layer a;
    static float x[ROWS * WIDTH], target[ROWS * WIDTH];
    fill(x, ROWS * WIDTH, 1);
    running_mean(x, target);
    fill(a.wq, WIDTH * QW, 0.3F);
    fill(a.wk, WIDTH * KW, 0.3F);
    fill(a.wv, WIDTH * KW, 0.3F);
    fill(a.wo, QW * WIDTH, 0.2F);

    float first = 0, loss = 0;
    fb_status status = layer_open(&a);
    for (int step = 0; step < STEPS && status == FB_OK; step++) {
        status = layer_step(&a, x, target, &loss);
        if (step == 0)
            first = loss;
        if (step % 10 == 9 || step == 0)
            printf("step %2d  loss %.4f\n", step + 1, (double)loss);
    }
    if (status != FB_OK)
        fprintf(stderr, "%s: %s\n", fb_status_name(status), fb_last_error());
    layer_close(&a);
    return status == FB_OK && loss < first / 4 ? 0 : 1;
}
