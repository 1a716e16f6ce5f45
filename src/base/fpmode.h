/* The calling thread's floating-point mode: rounding, and what happens below the normal range. Not fenv.h: on
 * x86-64 fegetround looks at the x87 unit only, while arithmetic follows MXCSR. Floor: base. */
#ifndef FB_BASE_FPMODE_H
#define FB_BASE_FPMODE_H

#include <stdint.h>

#if defined(__x86_64__)
typedef unsigned fb__fpmode;
static inline fb__fpmode fb__fpmode_get(void) { return __builtin_ia32_stmxcsr(); }
static inline void fb__fpmode_set(fb__fpmode mode) { __builtin_ia32_ldmxcsr(mode); }
#define FB__FPMODE_EXACT 0x1f80u /* all exceptions masked, round to nearest */
#define FB__FPMODE_FAST 0x9fc0u  /* and FTZ, DAZ: numbers below the normal range are 0 */
#elif defined(__aarch64__)
typedef uint64_t fb__fpmode;
static inline fb__fpmode fb__fpmode_get(void) {
    fb__fpmode mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
}
static inline void fb__fpmode_set(fb__fpmode mode) { __asm__ volatile("msr fpcr, %0" : : "r"(mode)); }
#define FB__FPMODE_EXACT ((fb__fpmode)0)
#define FB__FPMODE_FAST ((fb__fpmode)1 << 24) /* FZ */
#else
typedef int fb__fpmode;
static inline fb__fpmode fb__fpmode_get(void) { return 0; }
static inline void fb__fpmode_set(fb__fpmode mode) { (void)mode; }
#define FB__FPMODE_EXACT 0
#define FB__FPMODE_FAST 0
#endif

#endif
