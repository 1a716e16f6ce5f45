/* f16 and bf16 conversions, against the definition of the formats: every one of the 65536 patterns, and
 * around every midpoint of two neighbours the values on it and next to it, in f32 and in f64. */
#include "src/base/half.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
/* cmocka needs the four above. */
#include <cmocka.h>

typedef struct format {
    int fraction_bits, bias;
    uint16_t infinity;
    float (*to_f32)(uint16_t);
    uint16_t (*from_f32)(float);
    uint16_t (*from_f64)(double);
} format;

static const format f16 = {10, 15, 0x7c00, fb__f32_from_f16, fb__f16_from_f32, fb__f16_from_f64};
static const format bf16 = {7, 127, 0x7f80, fb__f32_from_bf16, fb__bf16_from_f32, fb__bf16_from_f64};

/* The value of a finite positive pattern; that of infinity is what the next number would have been. */
static double value(const format *f, uint16_t h) {
    int exponent = h >> f->fraction_bits, fraction = h & ((1 << f->fraction_bits) - 1);
    if (exponent == 0)
        return ldexp(fraction, 1 - f->bias - f->fraction_bits);
    return ldexp(fraction + (1 << f->fraction_bits), exponent - f->bias - f->fraction_bits);
}

static void check_all_patterns(const format *f) {
    for (uint32_t h = 0; h <= 0xffff; h++) {
        uint16_t sign = h & 0x8000, size = h & 0x7fff;
        double x = (double)f->to_f32((uint16_t)h);
        if (size > f->infinity) {
            assert_true(isnan(x));
            assert_true((f->from_f32((float)x) & 0x7fff) > f->infinity);
            assert_true((f->from_f64(x) & 0x7fff) > f->infinity);
            continue;
        }
        double expected = size == f->infinity ? HUGE_VAL : value(f, size);
        assert_true(x == (sign ? -expected : expected));
        assert_int_equal(!!signbit(x), !!sign);
        assert_int_equal(f->from_f32((float)x), h);
        assert_int_equal(f->from_f64(x), h);
    }
}

/* x and -x, as double and, where f32 can hold it, as float. */
static void check_rounding(const format *f, double x, uint16_t expected) {
    assert_int_equal(f->from_f64(x), expected);
    assert_int_equal(f->from_f64(-x), expected | 0x8000);
    if ((double)(float)x == x) {
        assert_int_equal(f->from_f32((float)x), expected);
        assert_int_equal(f->from_f32((float)-x), expected | 0x8000);
    }
}

static void check_midpoints(const format *f) {
    for (uint16_t h = 0; h < f->infinity; h++) {
        double low = value(f, h), high = value(f, (uint16_t)(h + 1)), middle = low + (high - low) / 2;
        uint16_t above = (uint16_t)(h + 1), even = h & 1 ? above : h;
        check_rounding(f, middle, even);
        check_rounding(f, nextafter(middle, 0), h);
        check_rounding(f, nextafter(middle, HUGE_VAL), above);
        check_rounding(f, (double)nextafterf((float)middle, 0), h);
        check_rounding(f, (double)nextafterf((float)middle, HUGE_VALF), above);
    }
}

static void check_extremes(const format *f) {
    check_rounding(f, HUGE_VAL, f->infinity);
    check_rounding(f, 1e300, f->infinity);
    check_rounding(f, 1e-300, 0);
    check_rounding(f, 4.9e-324, 0);
    assert_true((f->from_f32(NAN) & 0x7fff) > f->infinity);
    assert_true((f->from_f32(-NAN) & 0x7fff) > f->infinity);
    /* A NaN whose set bits all lie below those that the narrow type keeps. */
    assert_true((f->from_f32(fb__f32_from_bits(0x7f800001)) & 0x7fff) > f->infinity);
}

static void test_patterns(void **state) {
    (void)state;
    check_all_patterns(&f16);
    check_all_patterns(&bf16);
}

static void test_midpoints(void **state) {
    (void)state;
    check_midpoints(&f16);
    check_midpoints(&bf16);
}

static void test_extremes(void **state) {
    (void)state;
    check_extremes(&f16);
    check_extremes(&bf16);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_patterns),
        cmocka_unit_test(test_midpoints),
        cmocka_unit_test(test_extremes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
