/* The width that every 64-bit processor has: SSE2 on x86-64, NEON on AArch64. Floor: cpu. */
#ifdef __aarch64__
#define ROUND_FIRST(x) __asm__("" : "+w"(x))
#endif
#include "prelude.h"

#define ISA baseline
#define VB 16
#ifdef __aarch64__
#define GEMM_TILES(X) X(6, 4) X(12, 2) X(8, 1) /* 32 registers */
#else
#define GEMM_TILES(X) X(4, 2) X(8, 1) /* 16 registers */
#endif

#define T float
#define TI int32_t
#define BITS 32
#include "kernel.inc"

#define T double
#define TI int64_t
#define BITS 64
#include "kernel.inc"
