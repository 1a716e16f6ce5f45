/* BF16 in Armv8.6's NEON: bfdot sums two products in each of four lanes. Floor: cpu. */
#define ROUND_FIRST(x) __asm__("" : "+w"(x))
#include "prelude.h"
#include <arm_neon.h>

#define ISA bfdot
#define VB 16
#define GEMM_TILES(X) X(6, 4) X(12, 2) X(8, 1) /* 32 registers */

#define HALVES(x) vreinterpret_u16_bf16(vcvt_bf16_f32((float32x4_t)(x)))
#define WORDS_OF(x) ((uint16x8_t)(x))
#define ZIP_LOW(a, b) ((I)vzip1q_u16(WORDS_OF(a), WORDS_OF(b)))
#define ZIP_HIGH(a, b) ((I)vzip2q_u16(WORDS_OF(a), WORDS_OF(b)))
#define ROW(a, b) ((I)vcombine_u16(HALVES(a), HALVES(b)))
#define PAIR(a, b) ((I)vcombine_u16(vzip1_u16(HALVES(a), HALVES(b)), vzip2_u16(HALVES(a), HALVES(b))))
#define DOT(sum, a, b)                                                                                       \
    ((V)vbfdotq_f32((float32x4_t)(sum), vreinterpretq_bf16_s32((int32x4_t)(a)),                              \
                    vreinterpretq_bf16_s32((int32x4_t)(b))))

#define STEP 2
#define STRIP 64
#define T float
#define TI int32_t
#define BITS 32
#include "pairs.inc"
