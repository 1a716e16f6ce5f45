/* The width that every 64-bit processor has: SSE2 on x86-64, NEON on AArch64. Floor: cpu. */
#include "prelude.h"

#define ISA baseline
#define VB 16
#ifdef __aarch64__
#define MR 8 /* 32 registers */
#else
#define MR 4
#endif
#define NV 2

#define T float
#define TI int32_t
#define BITS 32
#include "kernel.inc"

#define T double
#define TI int64_t
#define BITS 64
#include "kernel.inc"
