/* What every per-ISA file needs before kernel.inc. Floor: cpu. */
#ifndef FB_CPU_ISA_PRELUDE_H
#define FB_CPU_ISA_PRELUDE_H

#include "../../base/half.h"
#include "kernels.h"
#include <math.h>
#include <string.h>

/* ROUND_FIRST(x): a product x is rounded before it meets a sum. The kernels are built so that compilers may
 * fuse the two; a per-ISA file with fused operations names the registers of its vectors. */
#ifndef ROUND_FIRST
#if defined(__x86_64__) && !defined(__FMA__)
#define ROUND_FIRST(x) (void)(x)
#else
#define ROUND_FIRST(x) __asm__("" : "+m"(x))
#endif
#endif

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_2 _Pragma("clang loop unroll_count(2)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#define UNROLL_2 _Pragma("GCC unroll 2")
#endif

#endif
