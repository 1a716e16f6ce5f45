/* Fused multiply-adds on registers. Independent accumulators hide the latency of the FMA ports (2 ports of 4
 * cycles: 8 in flight); they are named variables, since compilers keep an array of them in memory. All stay
 * in registers with the two operands: 16 of 32 on AVX-512, 12 of 16 on AVX2. Floor: harness. */
#include "peak_loops.h"
#include <math.h>

/* Every value tends to 1, so that nothing becomes denormal or infinite. */
#define SHRINK 0.999
#define GROW 0.001

/* An instruction set for both types of FMA. */
typedef struct isa {
    const char *name;
    fbh_flop_loop *loop[2];    /* by fbh_peak_type */
    double flops_per_round[2]; /* 2 x accumulators x lanes */
} isa;

/* Where fma is a call of the C library, separate multiply and add are what the build has. */
#ifdef FP_FAST_FMAF
#define MULTIPLY_ADD_F32 fmaf
#else
#define MULTIPLY_ADD_F32(a, x, y) ((a) * (x) + (y))
#endif
#ifdef FP_FAST_FMA
#define MULTIPLY_ADD_F64 fma
#else
#define MULTIPLY_ADD_F64(a, x, y) ((a) * (x) + (y))
#endif

/* The portable loops leave the vectors to the compiler. */
enum { PORTABLE = 64 };

static double f32_portable(int64_t n) {
    float a[PORTABLE], sum = 0;
    for (int i = 0; i < PORTABLE; i++)
        a[i] = (float)i;
    for (; n > 0; n--)
        for (int i = 0; i < PORTABLE; i++)
            a[i] = MULTIPLY_ADD_F32(a[i], (float)SHRINK, (float)GROW);
    for (int i = 0; i < PORTABLE; i++)
        sum += a[i];
    return (double)sum;
}

static double f64_portable(int64_t n) {
    double a[PORTABLE], sum = 0;
    for (int i = 0; i < PORTABLE; i++)
        a[i] = i;
    for (; n > 0; n--)
        for (int i = 0; i < PORTABLE; i++)
            a[i] = MULTIPLY_ADD_F64(a[i], SHRINK, GROW);
    for (int i = 0; i < PORTABLE; i++)
        sum += a[i];
    return sum;
}

static const isa portable = {"portable", {f32_portable, f64_portable}, {2 * PORTABLE, 2 * PORTABLE}};

#if defined(__x86_64__)
#include <immintrin.h>

#define EACH_12(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11)
#define EACH_16(X) EACH_12(X) X(12) X(13) X(14) X(15)
#define DECLARE(i) vector a##i = SET(2 + i); /* not 1, which a compiler sees through */
#define STEP(i) a##i = FMA(a##i, x, y);
#define PLUS(i) +a##i

__attribute__((target("avx512f"))) static double f32_avx512(int64_t n) {
    typedef __m512 vector;
#define SET _mm512_set1_ps
#define FMA _mm512_fmadd_ps
    const vector x = SET((float)SHRINK), y = SET((float)GROW);
    EACH_16(DECLARE)
    for (; n > 0; n--) {
        EACH_16(STEP)
    }
    return (double)_mm512_reduce_add_ps(EACH_16(PLUS));
#undef SET
#undef FMA
}

__attribute__((target("avx512f"))) static double f64_avx512(int64_t n) {
    typedef __m512d vector;
#define SET _mm512_set1_pd
#define FMA _mm512_fmadd_pd
    const vector x = SET(SHRINK), y = SET(GROW);
    EACH_16(DECLARE)
    for (; n > 0; n--) {
        EACH_16(STEP)
    }
    return _mm512_reduce_add_pd(EACH_16(PLUS));
#undef SET
#undef FMA
}

__attribute__((target("avx2,fma"))) static double f32_avx2(int64_t n) {
    typedef __m256 vector;
#define SET _mm256_set1_ps
#define FMA _mm256_fmadd_ps
    const vector x = SET((float)SHRINK), y = SET((float)GROW);
    EACH_12(DECLARE)
    for (; n > 0; n--) {
        EACH_12(STEP)
    }
    const vector sum = EACH_12(PLUS);
    return (double)sum[0] + (double)sum[3] + (double)sum[7];
#undef SET
#undef FMA
}

__attribute__((target("avx2,fma"))) static double f64_avx2(int64_t n) {
    typedef __m256d vector;
#define SET _mm256_set1_pd
#define FMA _mm256_fmadd_pd
    const vector x = SET(SHRINK), y = SET(GROW);
    EACH_12(DECLARE)
    for (; n > 0; n--) {
        EACH_12(STEP)
    }
    const vector sum = EACH_12(PLUS);
    return sum[0] + sum[1] + sum[3];
#undef SET
#undef FMA
}

static const isa avx512 = {"avx512f", {f32_avx512, f64_avx512}, {2 * 16 * 16, 2 * 16 * 8}};
static const isa avx2 = {"avx2+fma", {f32_avx2, f64_avx2}, {2 * 12 * 8, 2 * 12 * 4}};

static const isa *widest(void) {
    if (__builtin_cpu_supports("avx512f"))
        return &avx512;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") ? &avx2 : &portable;
}
#else
static const isa *widest(void) { return &portable; }
#endif

fbh_flop_kernel fbh_flop_kernel_of(fbh_peak_type type) {
    if (type == FBH_PEAK_AMX)
        return fbh_flop_kernel_tdpbf16ps();
    if (type == FBH_PEAK_AVX512BF16)
        return fbh_flop_kernel_vdpbf16ps();
    const isa *best = widest();
    return (fbh_flop_kernel){best->name, best->loop[type], best->flops_per_round[type]};
}
