/* What the kernels of a GPU get: one struct by value, the same for all of them. Filled by a backend for each
 * call, read only afterwards. In Metal a struct holds no pointers: see metal/abi.h. Floor: shared. */
#ifndef FB_SHARED_ARGS_H
#define FB_SHARED_ARGS_H

#include "mask.h"

/* fb__args.flags. The first ones say how a tensor lies: every row starts at a multiple of 16 bytes. */
#define FB_Q16 (1u << 0)
#define FB_K16 (1u << 1)
#define FB_V16 (1u << 2)
#define FB_DOUT16 (1u << 3)
#define FB_OUT16 (1u << 4)
#define FB_DQ16 (1u << 5)
#define FB_DK16 (1u << 6)
#define FB_DV16 (1u << 7)
#define FB_IS_TOP_LEFT (1u << 16)
#define FB_ADDS (1u << 17)      /* gradients are added to what is there */
#define FB_BIAS_COLS (1u << 18) /* the bias has a column for each key, not one for all */
#define FB_MASK_COLS (1u << 19)

/* Baked into kernels: what a score is besides scale * q.k within the band. */
#define FB_SOFTCAP 1
#define FB_BIASED 2
#define FB_MASKED 4
#define FB_BLOCKED 8
#define FB_ALL_OPTIONS 15

/* Window entries are at most this: then nothing overflows even where a compiler subtracts first and compares
 * afterwards, as NVRTC 13.0 does in fb__band_lo. */
#define FB_FAR ((fb_i64)1 << 62)

#ifndef __METAL_VERSION__

/* A tensor of [batch, head, row, column]: strides in elements, columns contiguous. */
typedef struct fb__view {
    void *at;
    fb_i64 batch, head, row;
} fb__view;

typedef struct fb__args {
    fb__view q, k, v, out, dout, dq, dk, dv, bias, dbias, mask; /* .at = NULL: not part of the problem */
    float *lse, *dlse;            /* [batch, heads_q, len_q]; packed: [heads_q, total_q] */
    float *delta;                 /* the same: rowsum(dO * O) - dLSE, and 0 where nothing counts */
    float *lse_log2, *lse_rest;   /* the same: LSE in base 2, and what that has rounded off */
    float *sinks, *dsinks;        /* [heads_q] */
    float *partial, *partial_lse; /* [chunks, rows, columns] and [chunks, rows] of keys cut into chunks */
    float *other_lse;             /* fb_merge: the second part */
    fb__view other_out;
    fb_i32 *cu_q, *cu_k, *lens_q, *lens_k; /* NULL: all sequences are len_q and len_k long */
    fb_u8 *block_mask;
    fb_i64 block_batch, block_head; /* its strides, 0 repeats */
    fb_i64 block_q, block_k;        /* cells per block */
    fb_i64 bias_batches, bias_heads, bias_rows;
    fb_i64 batch, heads_q, heads_kv, group, len_q, len_k, total_q, total_k;
    fb_i64 slots;    /* tiles of rows of one head, over all sequences when packed */
    fb_i64 tiles;    /* slots of all heads and sequences, where blocks take several */
    unsigned *order; /* which tile a block takes in which of `rounds`: hopper.c; NULL: in turn */
    fb_i64 rounds;
    fb_i64 padded;               /* rows of a head in a workspace whose tiles are whole: hopper_tiles.cuh */
    fb_i64 section;              /* heads whose tiles come sorted by length; 0: head after head */
    fb_i64 off, left, right;     /* position offset and window */
    fb_i32 head_dim, head_dim_v; /* columns that exist; the kernels' own are rounded up */
    fb_i32 chunks;               /* parts that the keys are cut into */
    unsigned flags;
    float scale, scale_log2;        /* scale, and scale * log2(e) */
    float softcap, softcap_inverse; /* 0: none */
} fb__args;

#endif

#endif
