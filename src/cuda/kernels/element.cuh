// The element type, FB_TYPE as in fb_dtype: how it is stored, and how 16 x 8 outputs are multiplied from it.
//
// A step of a product takes 32 bytes of each row: 16 halves or 8 floats. Fragments, for lane = 4*r + c:
//     A: a[0..3], rows r and r+8, as ldmatrix leaves it        B: b[0..1], column r
//     C: (r, 2c), (r, 2c+1), (r+8, 2c), (r+8, 2c+1)
// f32 keeps its accuracy on tf32 units: x = hi + lo, and hi*hi + hi*lo + lo*hi is exact to 2^-22. The unit cuts off
// its sums instead of rounding them, so each step is summed from zero and added in f32.
// Next: tile.cuh.
#pragma once
#include "ptx.cuh"

#define FB_TYPE_F32 0
#define FB_TYPE_F16 1
#define FB_TYPE_BF16 2

#if FB_TYPE == FB_TYPE_F32
typedef float element;
#define FB_STEP 8
#else
typedef fb_u16 element;
#define FB_STEP 16
#endif
#define FB_SIZE ((int)sizeof(element))
#define FB_PIECE (16 / FB_SIZE) // elements in 16 bytes

FB_FN float to_float(element x) {
#if FB_TYPE == FB_TYPE_F32
    return x;
#elif FB_TYPE == FB_TYPE_F16
    return from_f16(x);
#else
    return __uint_as_float((fb_u32)x << 16);
#endif
}

// Two numbers, rounded to nearest, as they lie in memory and in fragments.
#if FB_TYPE != FB_TYPE_F32
FB_FN fb_u32 pack(float lo, float hi) {
#if FB_TYPE == FB_TYPE_F16
    return pack_f16(lo, hi);
#else
    return pack_bf16(lo, hi);
#endif
}
#endif

FB_FN element to_element(float x) {
#if FB_TYPE == FB_TYPE_F32
    return x;
#else
    return (element)(pack(x, 0) & 0xffff);
#endif
}

// ---- Products -------------------------------------------------------------------------------------------------

#if FB_TYPE == FB_TYPE_F32
// hi carries infinities and NaN into the main product; in the small ones they would meet the wrong sign.
typedef struct split {
    fb_u32 all, hi, lo;
} split;

FB_FN split split_of(fb_u32 bits) {
    float x = __uint_as_float(bits);
    fb_u32 hi = to_tf32(x);
    bool finite = (hi & 0x7f800000) != 0x7f800000;
    split s = {(bits & 0x7f800000) == 0x7f800000 ? bits : hi, finite ? hi : 0,
               finite ? to_tf32(x - __uint_as_float(hi)) : 0};
    return s;
}
#endif

// c += a * b
FB_FN void mma(float *c, const fb_u32 *a, const fb_u32 *b) {
#if FB_TYPE == FB_TYPE_F16
    mma_f16(c, a, b);
#elif FB_TYPE == FB_TYPE_BF16
    mma_bf16(c, a, b);
#else
    fb_u32 a_all[4], a_hi[4], a_lo[4], b_all[2], b_hi[2], b_lo[2];
#pragma unroll
    for (int i = 0; i < 4; i++) {
        split s = split_of(a[i]);
        a_all[i] = s.all, a_hi[i] = s.hi, a_lo[i] = s.lo;
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        split s = split_of(b[i]);
        b_all[i] = s.all, b_hi[i] = s.hi, b_lo[i] = s.lo;
    }
    float small[4] = {0, 0, 0, 0}, large[4] = {0, 0, 0, 0};
    mma_tf32(small, a_lo, b_hi);
    mma_tf32(small, a_hi, b_lo);
    mma_tf32(large, a_all, b_all);
#pragma unroll
    for (int i = 0; i < 4; i++)
        c[i] += large[i] + small[i];
#endif
}

// c += a * b for factors that the unit holds exactly.
FB_FN void mma_counts(float *c, const fb_u32 *a, const fb_u32 *b) {
#if FB_TYPE == FB_TYPE_F32
    mma_tf32(c, a, b);
#else
    mma(c, a, b);
#endif
}

// ---- Numbers that are none ------------------------------------------------------------------------------------
// Where a cell does not count, its 0 must not meet an infinity or NaN of the other operand (R3). If it did, a sum is
// NaN: a block that finds one starts over, carefully. Then such operands are cleaned, and counted on the side by a
// product with 1 for each cell that counts; the counts decide what the sum becomes (R4). A count of +inf weighs 1, of
// -inf 256, of NaN 65536, all over 256.

#if FB_TYPE == FB_TYPE_F32
#define FB_EXPONENT 0x7f800000u
#define FB_SIGN 0x80000000u
#define FB_PLUS 0x3b800000u  // 2^-8
#define FB_MINUS 0x3f800000u // 1
#define FB_NANS 0x43800000u  // 2^8
#elif FB_TYPE == FB_TYPE_F16
#define FB_EXPONENT 0x7c00u
#define FB_SIGN 0x8000u
#define FB_PLUS 0x1c00u
#define FB_MINUS 0x3c00u
#define FB_NANS 0x5c00u
#else
#define FB_EXPONENT 0x7f80u
#define FB_SIGN 0x8000u
#define FB_PLUS 0x3b80u
#define FB_MINUS 0x3f80u
#define FB_NANS 0x4380u
#endif
#define FB_ONE FB_MINUS

FB_FN bool special(fb_u32 x) { return (x & FB_EXPONENT) == FB_EXPONENT; }

// What one element counts as. Without `signs` infinities count as NaN.
FB_FN fb_u32 count_one(fb_u32 x, bool signs) {
    fb_u32 infinity = x & FB_SIGN ? FB_MINUS : FB_PLUS;
    infinity = signs && (x & ~FB_SIGN) == FB_EXPONENT ? infinity : FB_NANS;
    return special(x) ? infinity : 0;
}

FB_FN fb_u32 count(fb_u32 x, bool signs) {
#if FB_TYPE == FB_TYPE_F32
    return count_one(x, signs);
#else
    return count_one(x & 0xffff, signs) | count_one(x >> 16, signs) << 16;
#endif
}

FB_FN fb_u32 cleaned(fb_u32 x) {
#if FB_TYPE == FB_TYPE_F32
    return special(x) ? 0 : x;
#else
    return (special(x) ? 0 : x & 0xffff) | (special(x >> 16) ? 0 : x & 0xffff0000);
#endif
}

FB_FN bool any_special(fb_u32 x) { return special(x) || (FB_SIZE == 2 && special(x >> 16)); }

// What is added to a sum with these counts: 0 nothing, 1 inf, 2 -inf, 3 NaN.
FB_FN fb_u32 verdict(float counts) {
    int n = (int)(counts * 256);
    bool plus = n & 255, minus = n >> 8 & 255, nan = n >> 16;
    return nan ? 3 : (plus ? 1 : 0) | (minus ? 2 : 0);
}

FB_FN float addend(fb_u32 verdict) {
    return verdict == 0 ? 0 : verdict == 1 ? FB_INFINITY : verdict == 2 ? -FB_INFINITY : FB_NAN;
}
