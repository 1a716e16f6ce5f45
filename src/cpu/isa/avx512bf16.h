/* bf16 in AVX-512: conversions and their order. Floor: cpu. */
#ifndef FB_CPU_ISA_AVX512BF16_H
#define FB_CPU_ISA_AVX512BF16_H

#include "avx512.h"

/* P keeps 1e-5 of lse, hence one degree more than half a unit of bf16 asks for. */
#define EXP2_FORWARD(x) ((V)exp2_512(4, (__m512)(x)))
#define EXP2_BACKWARD(x) ((V)exp2_512(3, (__m512)(x)))

/* Values of two rows in turn, from the first half and from the second. */
#define ZIP_ORDER(base, i) (base) + (i), 32 + (base) + (i)
#define ZIP_EIGHT(base, i)                                                                                   \
    ZIP_ORDER(base, i), ZIP_ORDER(base, i + 1), ZIP_ORDER(base, i + 2), ZIP_ORDER(base, i + 3)
#define ZIP_INDEX(base) ZIP_EIGHT(base, 0), ZIP_EIGHT(base, 4), ZIP_EIGHT(base, 8), ZIP_EIGHT(base, 12)
static const int16_t zip_low[32] __attribute__((aligned(64))) = {ZIP_INDEX(0)};
static const int16_t zip_high[32] __attribute__((aligned(64))) = {ZIP_INDEX(16)};
#define ZIP(a, b, order) ((I)_mm512_permutex2var_epi16((__m512i)(a), _mm512_load_si512(order), (__m512i)(b)))
#define ZIP_LOW(a, b) ZIP(a, b, zip_low)
#define ZIP_HIGH(a, b) ZIP(a, b, zip_high)

#define ROW(a, b) ((I)_mm512_cvtne2ps_pbh((__m512)(b), (__m512)(a)))
static const int16_t pair_order[32]
    __attribute__((aligned(64))) = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                    8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#define PAIR(a, b) ((I)_mm512_permutexvar_epi16(_mm512_load_si512(pair_order), (__m512i)ROW(a, b)))

#define T float
#define TI int32_t
#define BITS 32

#endif
