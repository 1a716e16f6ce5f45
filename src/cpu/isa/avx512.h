/* What the files built with AVX-512 share. Floor: cpu. */
#ifndef FB_CPU_ISA_AVX512_H
#define FB_CPU_ISA_AVX512_H

#define ROUND_FIRST(x) __asm__("" : "+v"(x))
#include "prelude.h"
#include <immintrin.h>

#define F16C
#define F16C_LOAD(from) ((V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from))))
#define F16C_STORE(to, x)                                                                                    \
    _mm256_storeu_si256((__m256i *)(to), _mm512_cvtps_ph((__m512)(x), _MM_FROUND_TO_NEAREST_INT))
#define BF16_LOAD(from)                                                                                      \
    ((V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)(from))), 16))

/* 2^x in `degree` + 2 instructions: f = x - floor(x); 2^f = 1 + f q(f) on [0,1) to 9e-8, 3e-6 and 9e-5 for
 * degrees 5, 4 and 3 (own Remez fits); vscalefps floors x itself, gives 0 for -inf and handles both ends of
 * the range. */
INLINE __m512 exp2_512(const int degree, __m512 x) {
    static const float q[3][5] = {
        {0.0770670399f, 0.227644995f, 0.695116758f},
        {0.0134266838f, 0.0522424728f, 0.241280198f, 0.693044841f},
        {0.00186713005f, 0.00901703071f, 0.0557999127f, 0.240164444f, 0.693151295f}};
    const float *c = q[degree - 3];
    __m512 f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC), p = _mm512_set1_ps(c[0]);
    UNROLL for (int i = 1; i < degree; i++) p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(c[i]));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1));
    return _mm512_scalef_ps(p, x);
}
#define EXP2_VECTOR(x) ((V)exp2_512(5, (__m512)(x)))

#define MAX_VECTOR(a, b) ((V)_mm512_max_ps((__m512)(a), (__m512)(b)))

#define VB 64
/* 24 accumulators for whole tiles; 12x2 for half ones; 8x1 for what is left. */
#define GEMM_TILES(X) X(6, 4) X(12, 2) X(8, 1)

#endif
