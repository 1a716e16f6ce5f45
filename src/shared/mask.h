/* Which cells count: the one definition that the reference, every route and every backend use (R1, R5, R6,
 * R18).
 *
 * A band is the part of the mask that is an interval of keys for each query: window, causal, alignment,
 * lengths. Boolean masks, block masks and biases of -inf take single cells away from it; they are looked up
 * per cell. Floor: shared. */
#ifndef FB_SHARED_MASK_H
#define FB_SHARED_MASK_H

#include "lang.h"

#define FB_BAND_UNBOUNDED ((fb_i64)0x7fffffffffffffff)

/* One sequence's band. Query i stands at position p = i + off and may see the keys
 * max(0, p - left) <= j <= min(len_k - 1, p + right); queries from len_q on see none. */
typedef struct fb__band {
    fb_i64 len_q, len_k;
    fb_i64 off;
    fb_i64 left, right;
} fb__band;

typedef struct fb__range {
    fb_i64 lo, hi; /* half open; lo >= hi is empty */
} fb__range;

/* Ends of query i's interval, before clipping; both rise with i. No sum overflows: |off| <= 2^61, and window
 * entries are either unbounded or at most 2^62, by the checks on the problem. */
FB_FN fb_i64 fb__band_lo(fb__band band, fb_i64 i) {
    fb_i64 p = i + band.off;
    return band.left == FB_BAND_UNBOUNDED || p <= band.left ? 0 : p - band.left;
}

FB_FN fb_i64 fb__band_hi(fb__band band, fb_i64 i) {
    fb_i64 p = i + band.off;
    return band.right == FB_BAND_UNBOUNDED || p >= band.len_k - band.right ? band.len_k : p + band.right + 1;
}

/* Keys that some query of [i_lo, i_hi) may see, and all between them. */
FB_FN fb__range fb__band_keys_of(fb__band band, fb_i64 i_lo, fb_i64 i_hi) {
    fb__range keys = {0, 0};
    if (i_hi > band.len_q)
        i_hi = band.len_q;
    if (i_lo < i_hi) {
        keys.lo = fb__band_lo(band, i_lo);
        keys.hi = fb__band_hi(band, i_hi - 1);
    }
    if (keys.lo >= keys.hi)
        keys.lo = keys.hi = 0;
    return keys;
}

/* The band seen from the keys: the queries first <= i < past may see key j; both rise with j. */
FB_FN fb_i64 fb__band_first(fb__band band, fb_i64 j) {
    fb_i64 p = j - band.off;
    return band.right == FB_BAND_UNBOUNDED || p <= band.right ? 0 : p - band.right;
}

FB_FN fb_i64 fb__band_past(fb__band band, fb_i64 j) {
    fb_i64 p = j - band.off;
    return band.left == FB_BAND_UNBOUNDED || p >= band.len_q - band.left ? band.len_q : p + band.left + 1;
}

/* Queries that may see some key of [j_lo, j_hi), and all between them. */
FB_FN fb__range fb__band_queries_of(fb__band band, fb_i64 j_lo, fb_i64 j_hi) {
    fb__range queries = {0, 0};
    if (j_hi > band.len_k)
        j_hi = band.len_k;
    if (j_lo < j_hi) {
        queries.lo = fb__band_first(band, j_lo);
        queries.hi = fb__band_past(band, j_hi - 1);
    }
    if (queries.lo >= queries.hi)
        queries.lo = queries.hi = 0;
    return queries;
}

/* Keys that query i may see. */
FB_FN fb__range fb__band_keys(fb__band band, fb_i64 i) { return fb__band_keys_of(band, i, i + 1); }

#endif
