/* What every per-ISA file needs before kernel.inc. Floor: cpu. */
#ifndef FB_CPU_ISA_PRELUDE_H
#define FB_CPU_ISA_PRELUDE_H

#include "../../base/half.h"
#include "kernels.h"
#include <math.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define UNROLL _Pragma("clang loop unroll(full)")
#define UNROLL_2 _Pragma("clang loop unroll_count(2)")
#else
#define UNROLL _Pragma("GCC unroll 32")
#define UNROLL_2 _Pragma("GCC unroll 2")
#endif

#endif
