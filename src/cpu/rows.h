/* Which instruction set's kernels run: rows, best first, the first that this processor has and FLASHBACK_ISA
 * allows. Floor: cpu. */
#ifndef FB_CPU_ROWS_H
#define FB_CPU_ROWS_H

#include "../base/text.h"
#include "isa/kernels.h"

/* What the processor and its operating system offer, as far as a row asks. */
typedef struct fb__features {
    bool avx2, fma, f16c, avx512f, avx512bw, avx512dq, avx512vl;
} fb__features;

typedef struct fb__cpu_row {
    const char *isa;
    bool (*present)(const fb__features *);
    const fb__kernels *f32, *f64;
    const char *measured;
} fb__cpu_row;

fb__features fb__features_here(void);

/* `cap` is the value of FLASHBACK_ISA, or NULL. An unknown one is refused with the valid ones. */
fb_status fb__cpu_row_choose(const fb__features *features, const char *cap, const fb__cpu_row **row);

/* The instruction sets of this build that the processor has, best first, separated by spaces. */
void fb__cpu_rows_list(const fb__features *features, fb__text *text);

#endif
