/* Which instruction set's kernels run: rows, best first, the first that this processor has and FLASHBACK_ISA
 * allows. Floor: cpu. */
#ifndef FB_CPU_ROWS_H
#define FB_CPU_ROWS_H

#include "../base/text.h"
#include "isa/kernels.h"

/* What the processor and its operating system offer, as far as a row asks. */
typedef struct fb__features {
    bool avx2, fma, f16c, avx512f, avx512bw, avx512dq, avx512vl, avx512bf16;
    bool amx;      /* tiles and their bf16 products; the system may still not permit them */
    bool fast_dot; /* vdpbf16ps is faster than two fused multiply-adds */
    bool neon_bf16;
} fb__features;

typedef struct fb__cpu_row {
    const char *isa;
    bool (*present)(const fb__features *); /* can run */
    bool (*worth)(const fb__features *);   /* and is not slower than the rows below */
    bool (*permitted)(void);               /* asks the system for pairs; NULL: no need */
    const fb__kernels *f32, *f64;
    const fb__pairs *pairs; /* NULL: bf16 goes through f32 */
    const char *measured;   /* where the row was, for what it is best at */
} fb__cpu_row;

fb__features fb__features_here(void);

/* The best row up to `cap`, the value of FLASHBACK_ISA, or NULL. A row that is not worth it is taken when cap
 * is its name. An unknown name is refused with the valid ones. */
fb_status fb__cpu_row_choose(const fb__features *features, const char *cap, const fb__cpu_row **row);

/* The instruction sets of this build that the processor has, best first, separated by spaces. */
void fb__cpu_rows_list(const fb__features *features, fb__text *text);

#endif
