/* AVX512-BF16 on top of AVX-512: vdpbf16ps sums two products in each lane, first the high one. Floor: cpu. */
#include "avx512bf16.h"

#define ISA avx512bf16
#define STEP 2
#define STRIP 64
#define DOT(sum, a, b) ((V)_mm512_dpbf16_ps((__m512)(sum), (__m512bh)(a), (__m512bh)(b)))
#include "pairs.inc"
