/* See peak.h. Independent accumulators hide the latency of the FMA ports (2 ports of 4 cycles: 8 in flight);
 * they are named variables, since compilers keep an array of them in memory. All stay in registers with the
 * two operands: 16 of 32 on AVX-512, 12 of 16 on AVX2. Floor: harness. */
#include "peak.h"
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <time.h>

/* Every value tends to 1, so that nothing becomes denormal or infinite. */
#define SHRINK 0.999
#define GROW 0.001

/* Does n rounds over all accumulators; returns a value that depends on every one. */
typedef double fma_loop(int64_t n);

typedef struct isa {
    const char *name;
    fma_loop *loop[2];         /* by fbh_peak_type */
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

const char *fbh_peak_isa(void) { return widest()->name; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* One thread's share: it repeats its piece until the time is over, and leaves its own rate. */
typedef struct share {
    fma_loop *loop; /* NULL = the streams */
    double work;    /* of one piece */
    double *a, *b, *d;
    int64_t size; /* rounds of the loop, elements of the streams */
    double seconds, rate;
    volatile double result; /* keeps the loops from being dropped */
} share;

static double stream(double *a, const double *b, const double *d, int64_t n, double c) {
    for (int64_t i = 0; i < n; i++)
        a[i] = b[i] + c * d[i];
    return a[n - 1];
}

static double piece(const share *s) {
    return s->loop ? s->loop(s->size) : stream(s->a, s->b, s->d, s->size, GROW);
}

static void *work(void *argument) {
    share *s = argument;
    s->result = piece(s);
    int64_t pieces = 0;
    double start = now(), passed;
    do {
        s->result = piece(s);
        pieces++;
        passed = now() - start;
    } while (passed < s->seconds);
    s->rate = (double)pieces * s->work / passed;
    return NULL;
}

/* The sum of all rates; 0 if a thread did not start. */
static double all(share *shares, int threads) {
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    int started = 0;
    while (ids && started < threads && !pthread_create(&ids[started], NULL, work, &shares[started]))
        started++;
    double rate = 0;
    for (int i = 0; i < started; i++) {
        pthread_join(ids[i], NULL);
        rate += shares[i].rate;
    }
    free(ids);
    return started == threads ? rate : 0;
}

double fbh_peak_flops(fbh_peak_type type, int threads, double seconds) {
    const isa *best = widest();
    const int64_t rounds = 100000;
    share *shares = calloc((size_t)threads, sizeof *shares);
    for (int i = 0; shares && i < threads; i++)
        shares[i] = (share){.loop = best->loop[type],
                            .work = best->flops_per_round[type] * (double)rounds,
                            .size = rounds,
                            .seconds = seconds};
    double rate = shares ? all(shares, threads) : 0;
    free(shares);
    return rate * 1e-9;
}

double fbh_peak_bandwidth(int threads, double seconds, int megabytes) {
    const int64_t n = (int64_t)megabytes * 1000000 / (int64_t)sizeof(double);
    const size_t total = (size_t)(n * threads);
    share *shares = calloc((size_t)threads, sizeof *shares);
    double *memory = malloc(3 * total * sizeof *memory), rate = 0;
    if (shares && memory) {
        for (size_t i = 0; i < 3 * total; i++)
            memory[i] = 1;
        for (int i = 0; i < threads; i++) {
            double *a = memory + 3 * n * i;
            shares[i] = (share){.work = 3.0 * (double)n * sizeof(double),
                                .a = a,
                                .b = a + n,
                                .d = a + 2 * n,
                                .size = n,
                                .seconds = seconds};
        }
        rate = all(shares, threads);
    }
    free(memory);
    free(shares);
    return rate * 1e-9;
}
