/* The vocabulary of the CPU backend: all arithmetic on tiles, as one table of functions per instruction set
 * and element type. The algorithm (forward.c, backward.c) is written over it and knows no instruction set.
 *
 * T is float, or double for FB_F64. A tile has one row per key and one lane per query ("lanes = queries"), so
 * that softmax needs no sum across lanes. `n` is a number of lanes, always a multiple of `lanes`; every tile
 * row and every packed row begins at a multiple of 64 bytes when its length allows. Floor: cpu. Next:
 * kernel.inc, the one text behind all tables. */
#ifndef FB_CPU_ISA_KERNELS_H
#define FB_CPU_ISA_KERNELS_H

#include "flashback.h"
#include <stdbool.h>

/* Element types that packs read and write; the first four are fb_dtype's. */
enum { FB__U8 = 16 };

/* Row numbers below this are exact in every T. */
#define FB__RANGE_ROWS ((int64_t)1 << 24)

/* Memory that products pull into the second-level cache while they compute, `lines` lines of it with every
 * row of C: rectangles of `rows` rows, `bytes` wide and `step` apart, one after the other. Slowly, since the
 * buffers for lines on their way are the ones that the product's own loads need (bench/SPEED.md). */
enum { FB__AHEAD_PARTS = 8, FB__AHEAD_LINES = 2 };
typedef struct fb__ahead {
    struct {
        const char *at;
        ptrdiff_t step;
        int64_t rows, bytes;
    } part[FB__AHEAD_PARTS];
    int parts, next; /* how many there are; the one that is being pulled */
    int64_t done;    /* bytes of its current row */
    int lines;
} fb__ahead;

typedef struct fb__kernels {
    const char *isa;
    int size;          /* sizeof(T) */
    int lanes;         /* T per vector */
    const char *tiles; /* register tiles of gemm, rows x vectors */

    /* C[m][n] = A[m][k] B[k][n], or += with `add`. A by strides, so that a transposed view costs nothing;
     * rows of B and C are contiguous. Pulls from `ahead`, which may be NULL. */
    void (*gemm)(int64_t m, int64_t n, int64_t k, const void *a, ptrdiff_t a_row, ptrdiff_t a_col,
                 const void *b, ptrdiff_t b_row, void *c, ptrdiff_t c_row, bool add, fb__ahead *ahead);

    /* The same product where single cells of a tile do not count and their partners may be NaN or Inf: terms
     * that are not kept are left out, not multiplied by 0. keep is a tile of lane masks, rows of `keep_row`.
     * gemm_keep_lanes: B is the tile, term (k, lane) counts by keep[k][lane]. gemm_keep_rows: A is the tile,
     * term (m, k) counts by keep[m][k]. */
    void (*gemm_keep_lanes)(int64_t m, int64_t n, int64_t k, const void *a, ptrdiff_t a_row, ptrdiff_t a_col,
                            const void *b, ptrdiff_t b_row, void *c, ptrdiff_t c_row, bool add,
                            const void *keep, ptrdiff_t keep_row);
    void (*gemm_keep_rows)(int64_t m, int64_t n, int64_t k, const void *a, ptrdiff_t a_row, const void *b,
                           ptrdiff_t b_row, void *c, ptrdiff_t c_row, const void *keep, ptrdiff_t keep_row);

    /* Products of a tile with few lanes, which would leave most of a vector empty: vectors run along the head
     * dimension instead, in whole vectors. A and B of keys are of any `type` but FB__U8, the rest is T.
     * dots: S[key][lane] = A[key] . Q[lane], for `lanes` lanes, and 0 for those up to a whole vector.
     * weigh: O[lane] = factors[lane] O[lane] + sum_key P[key][lane] B[key]; without factors O is not read.
     * With keep, a tile of lane masks like P, only cells that count are added; B is T then. */
    void (*dots)(int64_t keys, int64_t lanes, int64_t k, const void *a, ptrdiff_t a_row, int type,
                 const void *q, ptrdiff_t q_row, void *s, ptrdiff_t s_row, fb__ahead *ahead);
    void (*weigh)(int64_t keys, int64_t lanes, int64_t n, const void *p, ptrdiff_t p_row, const void *b,
                  ptrdiff_t b_row, int type, void *o, ptrdiff_t o_row, const void *factors, const void *keep,
                  fb__ahead *ahead);

    /* Packs `rows` rows of `cols` elements, each at its own address, times factor. pack_lanes: row r becomes
     * lane r of to[cols][n], lanes from `rows` on are 0. pack_rows: to[rows][to_row], columns from `cols` on
     * are 0. */
    void (*pack_lanes)(int64_t rows, int64_t n, int64_t cols, const void *const *from, int type,
                       double factor, void *to);
    void (*pack_rows)(int64_t rows, int64_t cols, const void *const *from, int type, double factor, void *to,
                      ptrdiff_t to_row);

    /* The way back, rounded once; `add` adds what is there before rounding. unpack_lanes multiplies lane r by
     * factors[r] (T) as well, unless NULL. */
    void (*unpack_lanes)(int64_t rows, int64_t n, int64_t cols, const void *from, const void *factors,
                         double factor, void *const *to, int type, bool add);
    void (*unpack_rows)(int64_t rows, int64_t cols, const void *from, ptrdiff_t from_row, double factor,
                        void *const *to, int type, bool add);

    /* S = b tanh(a S). derivative, unless NULL, takes 1 - tanh^2, without cancellation. */
    void (*softcap)(int64_t rows, int64_t n, void *s, double a, double b, void *derivative);
    /* S = factor * S + bias, all tiles. A bias of -inf is left to keep_finite_bias. */
    void (*add_bias)(int64_t rows, int64_t n, void *s, double factor, const void *bias);
    void (*multiply)(int64_t rows, int64_t n, void *s, const void *by);

    /* keep[r][lane] = lo[lane] <= r < hi[lane], bounds as T, so at most FB__RANGE_ROWS rows. */
    void (*keep_range)(int64_t rows, int64_t n, void *keep, const void *lo, const void *hi);
    /* keep &= mask != 0; keep &= bias != -inf. Both tiles of T. */
    void (*keep_nonzero)(int64_t rows, int64_t n, void *keep, const void *mask);
    void (*keep_finite_bias)(int64_t rows, int64_t n, void *keep, const void *bias);
    /* keep[r_lo..r_hi)[lane] = nothing, for block masks. */
    void (*keep_clear)(int64_t r_lo, int64_t r_hi, int64_t n, int64_t lane, void *keep);
    /* s = keep ? s : fill */
    void (*select)(int64_t rows, int64_t n, void *s, const void *keep, double fill);
    /* s[r] = lo[lane] <= r < hi[lane] ? s[r] : fill, for rows [first, end) that are s_row apart. */
    void (*select_range)(int64_t first, int64_t end, int64_t n, void *s, ptrdiff_t s_row, const void *lo,
                         const void *hi, double fill);
    /* Is every element of rows x cols finite? */
    bool (*finite)(int64_t rows, int64_t cols, const void *a, ptrdiff_t a_row);

    /* Running softmax of factor * S, factor > 0: m is the running maximum of S, S becomes
     * P = exp(factor * (S - m)), exactly 1 at the maximum; l is the running sum; alpha receives
     * exp(factor * (m_old - m)). Returns whether some alpha is not 1. Rows are s_row apart. */
    bool (*softmax)(int64_t rows, int64_t n, void *s, ptrdiff_t s_row, double factor, void *m, void *l,
                    void *alpha);
    /* c[r][lane] *= factors[lane] */
    void (*scale_lanes)(int64_t rows, int64_t n, void *c, const void *factors);
    /* Ends the softmax: from m, l and the lane's sink (-inf = none) the factor for O and the LSE. A lane
     * without keys has factor 0. sinks NULL: none. */
    void (*finish)(int64_t n, double factor, const void *m, const void *l, const void *sinks, void *factors,
                   void *lse);
    /* Joins `parts` partial sums (m, l, O) of the same lanes, in order, into the first. m and l of part c
     * begin at c * stat_step elements, O at c * o_step. */
    void (*join)(int64_t parts, int64_t n, int64_t cols, double factor, void *m, void *l, ptrdiff_t stat_step,
                 void *o, ptrdiff_t o_step);

    /* S becomes P = exp(factor * S - lse), dP becomes dS = P (dP - delta). Rows of both are `step` apart.
     * factor * S is rounded, as it is in an LSE that is the maximum: P is then 1. */
    void (*gradient)(int64_t rows, int64_t n, void *s, void *dp, ptrdiff_t step, double factor,
                     const void *lse, const void *delta);
    /* to[r] = sum_c a[r][c] b[r][c], whole vectors of columns */
    void (*dot_rows)(int64_t rows, int64_t cols, const void *a, ptrdiff_t a_row, const void *b,
                     ptrdiff_t b_row, void *to);
    /* to = sum of `parts` blocks of `count` elements that lie `step` apart, in order, into the first. */
    void (*sum_parts)(int64_t parts, int64_t count, void *first, ptrdiff_t step);
    /* to[lane][r * to_col] += s[r][lane] for lanes < rows_n: the way of dS into dbias. */
    void (*scatter)(int64_t rows, int64_t n, int64_t lanes_n, const void *s, void *const *to,
                    ptrdiff_t to_col);
} fb__kernels;

/* Where P and dS of a tile go, rounded to bf16: as rows [key][n], and dS as pairs too. */
typedef struct fb__cells {
    void *p, *ds, *ds_pairs;
} fb__cells;

/* P of bf16 products is at most 2 to this. It was 1 at the key that m was raised to, so l is at least 1. */
#define FB__HEADROOM 8

/* What products of bf16 need besides an f32 table: operands are bf16, sums and all else f32. "Pairs" are two
 * neighbours along k in one 32-bit word: [k / 2][n][2]. Rows and pairs are as long as a tile has lanes. */
typedef struct fb__pairs {
    const char *isa, *tiles;
    int step;  /* k of gemm and rows of cells are multiples of this, m of this or of strip */
    int strip; /* rows of S to make and use at a time, while they are near; even */
    int lanes; /* n of gemm, cols_pad and lanes are multiples of this, to_row and rows_pad of pack_columns too
                */

    /* Around every region in which a thread calls gemm. */
    void (*enter)(void);
    void (*leave)(void);

    /* C[m][n] = A[m][k] B[k / 2][n][2], or += with `add`. a_row counts elements, b_row words. */
    void (*gemm)(int64_t m, int64_t n, int64_t k, const void *a, ptrdiff_t a_row, const void *b,
                 ptrdiff_t b_row, void *c, ptrdiff_t c_row, bool add, fb__ahead *ahead);

    /* Packs `rows` rows of `cols` elements, each at its own address; what is not there is 0.
     * pack_lanes: row r becomes lane r of to[cols_pad / 2][n][2], with the other sign (0 too) if `negate`.
     * pack_rows: to[rows_pad / 2][cols_pad][2]. pack_columns: to[cols_pad][to_row], the transpose. */
    void (*pack_lanes)(int64_t rows, int64_t n, int64_t cols, int64_t cols_pad, const void *const *from,
                       bool negate, void *to);
    void (*pack_rows)(int64_t rows, int64_t rows_pad, int64_t cols, int64_t cols_pad, const void *const *from,
                      void *to);
    void (*pack_columns)(int64_t rows, int64_t rows_pad, int64_t cols, int64_t cols_pad,
                         const void *const *from, void *to, ptrdiff_t to_row);
    bool (*finite)(int64_t rows, int64_t cols, const void *a, ptrdiff_t a_row);

    /* From S to P, in pairs, an even number of rows. m lags behind the maximum of S: it is raised to it only
     * in lanes where factor * (S - m) would exceed FB__HEADROOM ln 2, so that O has to be scaled seldom. What
     * a lane gets is the same either way: softmax raises m first, as in fb__kernels. softmax_strip does not;
     * if it returns false, some lane's m must be raised or is -inf, and l and p are void. */
    bool (*softmax)(int64_t rows, int64_t n, const void *s, ptrdiff_t s_row, double factor, void *m, void *l,
                    void *alpha, void *p, ptrdiff_t p_row);
    bool (*softmax_strip)(int64_t rows, int64_t n, const void *s, ptrdiff_t s_row, double factor,
                          const void *m, void *l, void *p, ptrdiff_t p_row);
    /* As in fb__kernels, from S and dP to P and dS in bf16. */
    void (*gradient)(int64_t rows, int64_t n, const void *s, const void *dp, ptrdiff_t step, double factor,
                     const void *lse, const void *delta, const fb__cells *to, ptrdiff_t to_row);
    /* Rounds P and dS. */
    void (*round)(int64_t rows, int64_t n, const void *p, const void *ds, ptrdiff_t step,
                  const fb__cells *to);
} fb__pairs;

#endif
