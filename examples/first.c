/* Quick start: causal attention with grouped heads, forward and backward. Next: train_layer.c. */
#include "flashback.h"

#include <stdio.h>
#include <stdlib.h>

int main(void) {
    enum { B = 1, HQ = 8, HKV = 2, L = 256, D = 64, ROWS = B * HQ * L, Q = ROWS * D, K = B * HKV * L * D };
    fb_desc desc; /* the problem: numbers only */
    fb_desc_init(&desc, sizeof desc);
    desc.batch = B;
    desc.heads_q = HQ;
    desc.heads_kv = HKV;
    desc.len_q = desc.len_k = L;
    desc.head_dim = desc.head_dim_v = D;
    desc.window = fb_window_causal();

    fb_plan *plan; /* the decision: route, kernels, bytes of workspace */
    if (fb_plan_create(&plan, &desc) != FB_OK) {
        fprintf(stderr, "%s\n", fb_last_error());
        return 1;
    }

    size_t floats = 4 * Q + 4 * K + ROWS, bytes = fb_plan_workspace(plan);
    float *memory = malloc(floats * sizeof *memory);
    void *workspace = malloc(bytes);
    if (!memory || !workspace)
        return 1;
    for (size_t i = 0; i < floats; i++) /* q, k, v and dout; outputs are overwritten */
        memory[i] = (float)(i * 2654435761u % 2001) * 1e-3F - 1;

    fb_io io; /* the data: one pointer per tensor */
    fb_io_init(&io, sizeof io);
    float *q = memory, *k = q + Q, *v = k + K, *out = v + K, *lse = out + Q;
    io.q.data = q, io.k.data = k, io.v.data = v, io.out.data = out, io.lse.data = lse;
    io.workspace.data = workspace, io.workspace_size = bytes;
    fb_status status = fb_forward(plan, &io);

    float *dout = lse + ROWS, *dq = dout + Q, *dk = dq + Q, *dv = dk + K;
    io.dout.data = dout, io.dq.data = dq, io.dk.data = dk, io.dv.data = dv;
    if (status == FB_OK)
        status = fb_backward(plan, &io);
    if (status == FB_OK)
        printf("out[0] = %g, v[0] = %g (query 0 sees key 0 only), dv[0] = %g\n", (double)out[0], (double)v[0],
               (double)dv[0]);
    else
        fprintf(stderr, "%s\n", fb_last_error());

    free(workspace);
    free(memory);
    fb_plan_destroy(plan);
    return status == FB_OK ? 0 : 1;
}
