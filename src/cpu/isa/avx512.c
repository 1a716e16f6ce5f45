/* AVX-512 (F, BW, DQ, VL), 32 registers: 8x2 accumulators, 95 to 99 % of the FMA peak. Floor: cpu. */
#define ROUND_FIRST(x) __asm__("" : "+v"(x))
#include "prelude.h"
#include <immintrin.h>

#define F16C
#define F16C_LOAD(from) ((V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from))))
#define F16C_STORE(to, x)                                                                                    \
    _mm256_storeu_si256((__m256i *)(to), _mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT))
#define BF16_LOAD(from)                                                                                      \
    ((V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from))), 16))

/* 2^x in seven instructions: f = x - floor(x); 2^f = 1 + f q(f) on [0,1) to 9e-8 (own Remez fit); vscalefps
 * floors x itself, gives 0 for -inf and handles both ends of the range. */
INLINE __m512 exp2_512(__m512 x) {
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC),
           p = _mm512_set1_ps(0.00186713005f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.00901703071f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0557999127f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.240164444f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.693151295f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1));
    return _mm512_scalef_ps(p, x);
}
#define EXP2_VECTOR(x) ((V)exp2_512((__m512)(x)))

#define ISA avx512
#define VB 64
/* 24 accumulators for whole tiles; 12x2 for half ones; 8x1 for what is left. */
#define GEMM_TILES(X) X(6, 4) X(12, 2) X(8, 1)

#define T float
#define TI int32_t
#define BITS 32
#include "kernel.inc"

#define T double
#define TI int64_t
#define BITS 64
#include "kernel.inc"
