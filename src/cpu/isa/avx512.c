/* AVX-512 (F, BW, DQ, VL), 32 registers. Floor: cpu. */
#include "avx512.h"

#define ISA avx512

#define T float
#define TI int32_t
#define BITS 32
#include "kernel.inc"

#define T double
#define TI int64_t
#define BITS 64
#include "kernel.inc"
