/* What kernels of single routes get besides fb__args, by value too. Floor: shared. */
#ifndef FB_SHARED_ROUTES_H
#define FB_SHARED_ROUTES_H

#include "args.h"

/* Tensors of the unfused route that are packed: contiguous [batch, heads, length, columns]. */
enum { FB_PACK_Q, FB_PACK_K, FB_PACK_V, FB_PACK_DOUT, FB_PACKS };

/* Its results: [batch, heads, length, columns] of f32. */
enum { FB_SUM_QUERIES, FB_SUM_K, FB_SUM_V, FB_SUMS };

/* The unfused route: places in the workspace. Lengths are len_q and len_k for every sequence, also of a
 * packed batch; a row of scores is one of [batch, heads_q, len_q]. */
typedef struct fb__unfused {
    void *pack[FB_PACKS];  /* rows and columns that do not exist are 0 */
    fb_u8 *odd[FB_PACKS];  /* [batch, heads, length]: does the row have an infinity or NaN? */
    fb_i32 *any[FB_PACKS]; /* [batch, heads_kv]: does one of the rows? */
    float *scores;         /* S; P, as elements, from the start of each row on once it is made */
    float *gradients;      /* dP, then dS, likewise; NULL in the forward */
    float *sum[FB_SUMS];   /* O or dQ, dK, dV; NULL: zeros */
    float *factor;         /* forward: what a row of O is multiplied by; negative: the row is empty */
    fb_i64 row;            /* floats from one row of scores to the next, a multiple of 8 */
    fb_i32 wide, wide_v;   /* columns of packs and sums, as head_dim and head_dim_v */
} fb__unfused;

/* The reference: what is too narrow in fb__args. */
typedef struct fb__reference {
    double *delta; /* as lse: rowsum(dO * O) - dLSE */
    double scale, softcap;
} fb__reference;

#endif
