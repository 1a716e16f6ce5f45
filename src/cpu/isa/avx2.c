/* AVX2 with FMA and F16C, 16 registers: 6x2 accumulators leave room for two rows of B and a broadcast. Floor:
 * cpu. */
#define ROUND_FIRST(x) __asm__("" : "+x"(x))
#include "prelude.h"
#include <immintrin.h>

#define F16C
#define F16C_LOAD(from) ((V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from))))
#define F16C_STORE(to, x)                                                                                    \
    _mm_storeu_si128((__m128i *)(to), _mm256_cvtps_ph((__m256)(x), _MM_FROUND_TO_NEAREST_INT))
#define BF16_LOAD(from)                                                                                      \
    ((V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(from))), 16))

#define MAX_VECTOR(a, b) ((V)_mm256_max_ps((__m256)(a), (__m256)(b)))

#define ISA avx2
#define VB 32
#define GEMM_TILES(X) X(6, 2) X(8, 1)

#define T float
#define TI int32_t
#define BITS 32
#include "kernel.inc"

#define T double
#define TI int64_t
#define BITS 64
#include "kernel.inc"
