/* f16 and bf16 as bit patterns: conversions from and to f32, and from f64 with a single rounding. Round to
 * nearest even, subnormals exact, infinities kept, NaN kept NaN (and made quiet). Between 16 and 32 bits all
 * rounding is integer arithmetic, so the floating-point mode does not matter; the f64 ones need subnormals
 * switched on.
 * Floor: base. */
#ifndef FB_BASE_HALF_H
#define FB_BASE_HALF_H

#include <stdint.h>
#include <string.h>

static inline uint32_t fb__f32_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float fb__f32_from_bits(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* v / 2^shift to the nearest integer, ties to even; shift is 1 to 31 and v below 2^31. */
static inline uint32_t fb__shift_right_even(uint32_t v, uint32_t shift) {
    uint32_t odd = (v >> shift) & 1u;
    return (v + (1u << (shift - 1)) - 1u + odd) >> shift;
}

static inline float fb__f32_from_f16(uint16_t h) {
    uint32_t sign = (h & 0x8000u) << 16, exponent = (h >> 10) & 31u, fraction = h & 0x3ffu;
    if (exponent == 0) { /* zero, or a subnormal: fraction * 2^-24, which is exact */
        uint32_t size = fb__f32_bits((float)fraction * 0x1p-24f);
        return fb__f32_from_bits(sign | size);
    }
    if (exponent == 31)
        return fb__f32_from_bits(sign | 0x7f800000u | (fraction ? 0x400000u | fraction << 13 : 0));
    return fb__f32_from_bits(sign | (exponent + 112) << 23 | fraction << 13);
}

static inline uint16_t fb__f16_from_f32(float x) {
    uint32_t bits = fb__f32_bits(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    uint32_t h;
    if (size > 0x7f800000u) /* NaN */
        h = 0x7e00u | (size >> 13 & 0x3ffu);
    else if (size >= 0x47800000u) /* 2^16 and more */
        h = 0x7c00u;
    else if (size >= 0x38800000u) /* 2^-14 and more: normal; a carry may rightly reach infinity */
        h = fb__shift_right_even(size - 0x38000000u, 13);
    else { /* a multiple of 2^-24; below 2^-25 it is zero */
        uint32_t shift = 126 - (size >> 23);
        h = shift > 24 ? 0 : fb__shift_right_even((size & 0x7fffffu) | 0x800000u, shift);
    }
    return (uint16_t)(sign | h);
}

static inline float fb__f32_from_bf16(uint16_t h) { return fb__f32_from_bits((uint32_t)h << 16); }

static inline uint16_t fb__bf16_from_f32(float x) {
    uint32_t bits = fb__f32_bits(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    uint32_t h = size > 0x7f800000u ? size >> 16 | 0x40u : fb__shift_right_even(size, 16);
    return (uint16_t)(sign | h);
}

/* f64 to f32 "rounded to odd": an inexact result takes the neighbour whose last bit is 1. That bit remembers
 * that something was cut off, so that rounding once more to a narrower type gives what one rounding would
 * have given. */
static inline float fb__f32_odd_from_f64(double x) {
    float f = (float)x;
    uint32_t bits = fb__f32_bits(f);
    double exact = (double)f;
    if (exact != x && x == x && !(bits & 1u)) {
        double size = x < 0 ? -x : x, rounded = exact < 0 ? -exact : exact;
        bits = rounded > size ? bits - 1 : bits + 1;
    }
    return fb__f32_from_bits(bits);
}

static inline uint16_t fb__f16_from_f64(double x) { return fb__f16_from_f32(fb__f32_odd_from_f64(x)); }
static inline uint16_t fb__bf16_from_f64(double x) { return fb__bf16_from_f32(fb__f32_odd_from_f64(x)); }

#endif
