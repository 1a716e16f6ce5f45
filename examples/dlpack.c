/* Tensors that come from elsewhere: two DLPack tensors in the order [batch, length, heads, head_dim] fill the
 * descriptor, and nothing is copied. The query of one step attends to a cache of keys and values, of which
 * the first 100 rows are in use. Read first.c before. */
#include "flashback.h"
#include "flashback_dlpack.h"

#include <stdio.h>

enum { CAPACITY = 128, USED = 100, HEADS = 2, D = 32 };

static float queries[HEADS * D], cache[CAPACITY * 2 * HEADS * D], out[HEADS * D];

/* What a framework hands out: a pointer, a shape, strides. Keys and values lie side by side in the cache. */
static fb_dltensor tensor(float *data, int64_t *shape, int64_t *strides) {
    fb_dltensor t = {.data = data, .ndim = 4, .shape = shape, .strides = strides};
    t.device.device_type = 1; /* CPU */
    t.dtype.code = 2, t.dtype.bits = 32, t.dtype.lanes = 1;
    return t;
}

int main(void) {
    for (int i = 0; i < CAPACITY * 2 * HEADS * D; i++)
        cache[i] = (float)(i % 7) - 3;
    int64_t q_shape[] = {1, 1, HEADS, D}, k_shape[] = {1, USED, HEADS, D};
    int64_t k_strides[] = {CAPACITY * 2 * HEADS * D, 2 * HEADS * D, D, 1};
    const fb_dltensor q = tensor(queries, q_shape, NULL), k = tensor(cache, k_shape, k_strides),
                      v = tensor(cache + HEADS * D, k_shape, k_strides);

    fb_desc desc;
    fb_plan *plan = NULL;
    fb_desc_init(&desc, sizeof desc);
    desc.flags = FB_FORWARD_ONLY;
    fb_status status = fb_desc_from_dlpack(&desc, FB_BLHD, &q, &k, &v);
    if (status == FB_OK) {
        desc.out = desc.q; /* out has the shape of q here, so its strides will do */
        status = fb_plan_create(&plan, &desc);
    }

    fb_io io;
    fb_io_init(&io, sizeof io);
    io.q = fb_ref_from_dlpack(&q), io.k = fb_ref_from_dlpack(&k), io.v = fb_ref_from_dlpack(&v);
    io.out.data = out;
    if (status == FB_OK) {
        io.workspace_size = fb_plan_workspace(plan);
        status = fb_alloc(&io.workspace, FB_CPU, 0, io.workspace_size);
    }
    if (status == FB_OK)
        status = fb_forward(plan, &io);

    /* Queries of 0 weigh all keys alike, so that out is the mean of the values. */
    double mean = 0;
    for (int j = 0; j < USED; j++)
        mean += (double)cache[(j * 2 + 1) * HEADS * D] / USED;
    if (status == FB_OK)
        printf("out[0] = %.6f, the mean of the values is %.6f\n", (double)out[0], mean);
    else
        fprintf(stderr, "%s: %s\n", fb_status_name(status), fb_last_error());
    fb_free(&io.workspace, FB_CPU, 0);
    fb_plan_destroy(plan);
    const double error = (double)out[0] - mean;
    return status == FB_OK && error < 1e-5 && error > -1e-5 ? 0 : 1;
}
