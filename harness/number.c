/* Numbers: f16 and bf16 in software, and the deterministic values that inputs are made of.
 * Floor: harness. The conversions owe nothing to the library's, so that both can be checked against each
 * other. */
#include "harness.h"

#include <assert.h>
#include <math.h>
#include <string.h>

/* A 16-bit floating-point format. */
typedef struct format {
    int exponent, mantissa; /* bits */
} format;

static const format f16 = {5, 10}, bf16 = {8, 7};

/* Rounds a double to the format, once, to nearest even. */
static uint16_t narrow(double x, format f) {
    uint64_t bits;
    memcpy(&bits, &x, sizeof bits);
    const uint64_t sign = bits >> 63 << 15;
    const uint64_t inf = ((UINT64_C(1) << f.exponent) - 1) << f.mantissa;
    if (isnan(x))
        return (uint16_t)(sign | inf | UINT64_C(1) << (f.mantissa - 1));
    if (isinf(x))
        return (uint16_t)(sign | inf);

    /* Doubles below 2^-1022 lack the implicit bit, but they are far below half of the smallest subnormal of
     * either format and are shifted out all the same. */
    const int e = (int)(bits >> 52 & 0x7FF) - 1023 + (1 << (f.exponent - 1)) - 1;
    const uint64_t significand = (bits & ((UINT64_C(1) << 52) - 1)) | UINT64_C(1) << 52;
    const int shift = 52 - f.mantissa + (e < 1 ? 1 - e : 0);
    if (shift > 53)
        return (uint16_t)sign;
    const uint64_t rest = significand & ((UINT64_C(1) << shift) - 1), half = UINT64_C(1) << (shift - 1);
    uint64_t r = significand >> shift;
    r += rest > half || (rest == half && (r & 1));
    /* The implicit bit of a normal number, and a carry out of the mantissa, both add one to the exponent. */
    if (e > 1)
        r += (uint64_t)(e - 1) << f.mantissa;
    return (uint16_t)(sign | (r < inf ? r : inf));
}

static double widen(uint16_t bits, format f) {
    const int e = bits >> f.mantissa & ((1 << f.exponent) - 1), m = bits & ((1 << f.mantissa) - 1);
    const int lowest = 2 - (1 << (f.exponent - 1)) - f.mantissa; /* exponent of the smallest subnormal */
    double x;
    if (e == (1 << f.exponent) - 1)
        x = m ? (double)NAN : (double)INFINITY;
    else if (e == 0)
        x = ldexp(m, lowest);
    else { /* ldexp would do; it takes 4 to 8 % of a run in an emulator */
        const int exponent = lowest + e - 1 + f.mantissa;
        const uint64_t wide = (uint64_t)(exponent + 1023) << 52 | (uint64_t)m << (52 - f.mantissa);
        memcpy(&x, &wide, sizeof x);
    }
    return bits >> 15 ? -x : x;
}

uint16_t fbh_to_f16(double x) { return narrow(x, f16); }
uint16_t fbh_to_bf16(double x) { return narrow(x, bf16); }
double fbh_from_f16(uint16_t bits) { return widen(bits, f16); }
double fbh_from_bf16(uint16_t bits) { return widen(bits, bf16); }

size_t fbh_size(int type) {
    switch (type) {
    case FB_F16:
    case FB_BF16:
        return 2;
    case FB_F64:
        return 8;
    case FBH_U8:
        return 1;
    default:
        return 4;
    }
}

double fbh_load(int type, const void *at) {
    float f;
    double d;
    uint16_t h;
    int32_t n;
    switch (type) {
    case FB_F32:
        memcpy(&f, at, sizeof f);
        return (double)f;
    case FB_F64:
        memcpy(&d, at, sizeof d);
        return d;
    case FBH_I32:
        memcpy(&n, at, sizeof n);
        return n;
    case FBH_U8:
        return *(const unsigned char *)at;
    default:
        memcpy(&h, at, sizeof h);
        return type == FB_F16 ? fbh_from_f16(h) : fbh_from_bf16(h);
    }
}

void fbh_store(int type, void *at, double x) {
    const float f = (float)x;
    uint16_t h;
    switch (type) {
    case FB_F32:
        memcpy(at, &f, sizeof f);
        break;
    case FB_F64:
        memcpy(at, &x, sizeof x);
        break;
    case FBH_I32:
        memcpy(at, &(int32_t){(int32_t)x}, sizeof(int32_t));
        break;
    case FBH_U8:
        *(unsigned char *)at = (unsigned char)x;
        break;
    default:
        h = type == FB_F16 ? fbh_to_f16(x) : fbh_to_bf16(x);
        memcpy(at, &h, sizeof h);
    }
}

double fbh_round(int type, double x) {
    switch (type) {
    case FB_F32:
        return (double)(float)x;
    case FB_F16:
        return fbh_from_f16(fbh_to_f16(x));
    case FB_BF16:
        return fbh_from_bf16(fbh_to_bf16(x));
    default:
        return x;
    }
}

double fbh_ulp(int type, double x) {
    static const struct {
        int digits, lowest; /* bits of the significand, exponent of the smallest normal number */
    } row[] = {[FB_F32] = {24, -126}, [FB_F16] = {11, -14}, [FB_BF16] = {8, -126}, [FB_F64] = {53, -1022}};
    assert(type >= 0 && type <= FB_F64);
    int e = 0;
    frexp(x, &e); /* |x| = m * 2^e, m in [1/2, 1) */
    if (x == 0 || e - 1 < row[type].lowest)
        e = row[type].lowest + 1;
    return ldexp(1, e - row[type].digits);
}

static uint64_t mix(uint64_t seed, uint64_t i) {
    uint64_t x = seed * UINT64_C(0x9E3779B97F4A7C15) + i * UINT64_C(0xBF58476D1CE4E5B9);
    x ^= x >> 31;
    x *= UINT64_C(0x94D049BB133111EB);
    return x ^ x >> 29;
}

double fbh_exact(uint64_t seed, uint64_t i) { return ((double)((mix(seed, i) >> 40) % 129) - 64) / 64; }

/* The sum of four uniform values: close enough to a normal distribution, and the same with every libm. */
double fbh_normal(uint64_t seed, uint64_t i) {
    const uint64_t x = mix(seed ^ UINT64_C(0xD1B54A32D192ED03), i);
    const double sum =
        (double)(x & 0xFFFF) + (double)(x >> 16 & 0xFFFF) + (double)(x >> 32 & 0xFFFF) + (double)(x >> 48);
    return (sum / 65535 - 2) * 1.7320508075688772;
}
