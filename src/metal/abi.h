/* What the host and the Metal kernels agree on: which buffer is which tensor, the one struct of numbers that
 * every kernel gets, and how threadgroups are counted. Read by C and by Metal. Floor: metal.
 *
 * Next: tune.h (what is baked into a kernel), kernels/problem.msl (how a threadgroup finds its work). */
#ifndef FB_METAL_ABI_H
#define FB_METAL_ABI_H

#include "../shared/args.h"

/* Buffer indices, the same for all kernels; a kernel declares those that it uses. A tensor that is not part
 * of the problem is bound to something all the same, and its bit in `present` says that it is not to be read.
 */
#define FB_AT_ARGS 0 /* fb__metal_args, in constant */
#define FB_AT_Q 1
#define FB_AT_K 2
#define FB_AT_V 3
#define FB_AT_OUT 4
#define FB_AT_LSE 5 /* f32 [batch, heads_q, len_q]; packed: [heads_q, total_q]. The same: DLSE, DELTA */
#define FB_AT_DOUT 6
#define FB_AT_DLSE 7
#define FB_AT_DQ 8
#define FB_AT_DK 9
#define FB_AT_DV 10
#define FB_AT_BIAS 11
#define FB_AT_DBIAS 12
#define FB_AT_MASK 13
#define FB_AT_BLOCK_MASK 14
#define FB_AT_SINKS 15 /* f32 [heads_q]; the same: DSINKS */
#define FB_AT_DSINKS 16
#define FB_AT_CU_Q 17
#define FB_AT_CU_K 18
#define FB_AT_LENS_Q 19
#define FB_AT_LENS_K 20
#define FB_AT_OTHER_OUT 21   /* fb_merge: the second part */
#define FB_AT_OTHER_LSE 22   /* likewise */
#define FB_AT_DELTA 23       /* rowsum(dO * O) - dLSE, and 0 where nothing counts */
#define FB_AT_PARTIAL 24     /* f32 [chunks, batch * heads_q * len_q, DV, or D in dq]: keys cut into chunks */
#define FB_AT_PARTIAL_LSE 25 /* f32 [chunks, the same rows, 2]: m and l */
#define FB_AT_DS 26          /* dS between dkdv and dq, where it is kept; f32 scores of the unfused route */
#define FB_AT_COUNT 27

#define FB_PRESENT(index) (1u << (index))

/* Strides of [batch, head, row] in elements; columns are contiguous. */
typedef struct fb__metal_view {
    fb_i64 batch, head, row;
} fb__metal_view;

/* By setBytes; the names are those of fb__args, which has the pointers besides. */
typedef struct fb__metal_args {
    fb__metal_view q, k, v, out, dout, dq, dk, dv, bias, dbias, mask, other_out;
    fb__metal_view
        ds; /* of dS between dkdv and dq, where it is kept: rows of keys, both in multiples of 64 */
    fb_i64 block_batch, block_head; /* strides of the block mask, 0 repeats */
    fb_i64 block_q, block_k;        /* cells per block */
    fb_i64 bias_batches, bias_heads, bias_rows;
    fb_i64 batch, heads_q, heads_kv, group, len_q, len_k, total_q, total_k;
    fb_i64 slots;   /* tiles of rows of one head, over all sequences when packed */
    fb_i64 section; /* heads whose tiles come sorted by length; 0: head after head */
    fb_i64 first;   /* the threadgroup at x = 0 is number `first`: long work comes in several dispatches */
    fb_i64 off, left, right;
    fb_i32 head_dim, head_dim_v;    /* columns that exist; the kernels' own are rounded up */
    fb_i32 chunks;                  /* parts that the keys are cut into: y of the grid */
    unsigned flags;                 /* FB_Q16 | ... of shared/args.h */
    unsigned present;               /* FB_PRESENT(FB_AT_BIAS) | ... */
    float scale, scale_log2;        /* scale, and scale * log2(e) */
    float softcap, softcap_inverse; /* 0: none */
    fb_i32 partial_columns;         /* floats of a row of PARTIAL: spec.DV of forward, spec.D of dq */
} fb__metal_args;

/* Grids, in threadgroups; x is cut into dispatches by `first`, y is `chunks` for FORWARD and DQ, 1 otherwise.
 * Threads are in one dimension, spec.THREADS of them.
 *
 *     forward, dq    slots * heads_q * batch (packed: * 1); stacked: slots * heads_kv * batch, packed too
 *     dkdv           slots * heads_kv * batch (packed: * 1)
 *                    slots: tiles of spec.BM rows of queries, of keys in dkdv; stacked queries are
 *                    group * len_q rows; packed ones total / BM + batch
 *     dbias          ceil(columns / BN) * ceil(rows / BM) * heads * batches, of the bias's shape
 *     delta, merge   ceil(rows / (THREADS / 32)), rows as in lse
 *     join, join_dq  the same, rows = batch * heads_q * len_q
 *     dsinks         heads_q
 *
 * Threadgroup memory is one buffer at index 0, spec.shared_bytes long; rows.metal has spec.shared_bytes too.
 */

#endif
