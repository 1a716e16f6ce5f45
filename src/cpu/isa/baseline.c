/* The width that every 64-bit processor has: SSE2 on x86-64, NEON on AArch64. Floor: cpu. */
#ifdef __aarch64__
#define ROUND_FIRST(x) __asm__("" : "+w"(x))
/* Scheduling ahead of register allocation moves so many loads up that accumulators of gemm are spilled. */
#ifndef __clang__
#pragma GCC optimize("no-schedule-insns")
#endif
#endif
#include "prelude.h"

#ifdef __aarch64__
#include <arm_neon.h>

#define F16C
#define F16C_LOAD(from) ((V)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16((const uint16_t *)(from)))))
#define F16C_STORE(to, x) vst1_u16((uint16_t *)(to), vreinterpret_u16_f16(vcvt_f16_f32((float32x4_t)(x))))
#define BF16_LOAD(from) ((V)vshll_n_u16(vld1_u16((const uint16_t *)(from)), 16))
#endif

#define ISA baseline
#define VB 16
#ifdef __aarch64__
#define GEMM_TILES(X) X(6, 4) X(8, 2) X(8, 1) /* 32 registers; those of A hold two steps of k */
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
