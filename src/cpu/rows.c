/* See rows.h. FB_HAVE_AVX2 and FB_HAVE_AVX512 say which per-ISA files the build compiled. */
#include "rows.h"
#include "../core/error.h"
#include <string.h>

#define KERNELS(isa) &fb__kernels_##isa##_32, &fb__kernels_##isa##_64
#define DECLARE(isa) extern const fb__kernels fb__kernels_##isa##_32, fb__kernels_##isa##_64;
DECLARE(scalar)
DECLARE(baseline)
DECLARE(avx2)
DECLARE(avx512)

static bool always(const fb__features *f) {
    (void)f;
    return true;
}
#ifdef FB_HAVE_AVX2
static bool has_avx2(const fb__features *f) { return f->avx2 && f->fma && f->f16c; }
#endif
#ifdef FB_HAVE_AVX512
static bool has_avx512(const fb__features *f) {
    return f->avx512f && f->avx512bw && f->avx512dq && f->avx512vl && f->fma && f->f16c;
}
#endif

/* Every word that FLASHBACK_ISA may be, also where the build or the machine lacks it, best first. */
static const char *const words[] = {"avx512", "avx2", "baseline", "scalar"};
#define WORDS (int)(sizeof words / sizeof *words)

static const fb__cpu_row rows[] = {
/* clang-format off */
#ifdef FB_HAVE_AVX512
    {"avx512",   has_avx512, KERNELS(avx512),   "bench/SPEED.md, instruction sets"},
#endif
#ifdef FB_HAVE_AVX2
    {"avx2",     has_avx2,   KERNELS(avx2),     "bench/SPEED.md, instruction sets"},
#endif
    {"baseline", always,     KERNELS(baseline), "bench/SPEED.md, instruction sets"},
    {"scalar",   always,     KERNELS(scalar),   "bench/SPEED.md, instruction sets"},
    /* clang-format on */
};
#define ROWS (int)(sizeof rows / sizeof *rows)

static int rank(const char *isa) {
    for (int i = 0; i < WORDS; i++)
        if (strcmp(isa, words[i]) == 0)
            return i;
    return -1;
}

fb__features fb__features_here(void) {
    fb__features f = {0};
#if defined(__x86_64__)
    /* These look at CPUID and, through XCR0, at whether the operating system saves the registers. */
    __builtin_cpu_init();
    f.avx2 = __builtin_cpu_supports("avx2");
    f.fma = __builtin_cpu_supports("fma");
    f.f16c = __builtin_cpu_supports("avx2"); /* every AVX2 processor has F16C; clang 14 has no word for it */
    f.avx512f = __builtin_cpu_supports("avx512f");
    f.avx512bw = __builtin_cpu_supports("avx512bw");
    f.avx512dq = __builtin_cpu_supports("avx512dq");
    f.avx512vl = __builtin_cpu_supports("avx512vl");
#endif
    return f;
}

fb_status fb__cpu_row_choose(const fb__features *features, const char *cap, const fb__cpu_row **row) {
    int best = cap ? rank(cap) : 0;
    if (best < 0)
        return fb__error(FB_INVALID,
                         "FLASHBACK_ISA is '%s', expected one of: scalar | baseline | avx2 | avx512", cap);
    for (int i = 0; i < ROWS; i++)
        if (rank(rows[i].isa) >= best && rows[i].present(features)) {
            *row = &rows[i];
            return FB_OK;
        }
    return fb__error(FB_UNSUPPORTED, "no kernels for this processor"); /* not reached: scalar always fits */
}

void fb__cpu_rows_list(const fb__features *features, fb__text *text) {
    const char *between = "";
    for (int i = 0; i < ROWS; i++)
        if (rows[i].present(features)) {
            fb__text_add(text, "%s%s", between, rows[i].isa);
            between = " ";
        }
}
