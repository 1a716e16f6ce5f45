/* See rows.h. FB_HAVE_AVX2 and the like say which per-ISA files the build compiled. */
#include "rows.h"
#include "../base/env.h"
#include "../core/error.h"
#include <string.h>
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__APPLE__)
#include <sys/sysctl.h>
#endif

#define KERNELS(isa) &fb__kernels_##isa##_32, &fb__kernels_##isa##_64
#define PAIRS(isa) &fb__pairs_##isa##_32
#define DECLARE(isa) extern const fb__kernels fb__kernels_##isa##_32, fb__kernels_##isa##_64;
DECLARE(scalar)
DECLARE(baseline)
DECLARE(avx2)
DECLARE(avx512)
extern const fb__pairs fb__pairs_avx512bf16_32, fb__pairs_amx_32, fb__pairs_amx_model_32, fb__pairs_bfdot_32;

/* ---- What rows ask for ---- */

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
#ifdef FB_HAVE_AVX512BF16
/* Linux permits tiles to a process, once and for all its threads and children. From then on alternate signal
 * stacks must have room for them, so it is asked when a plan needs them and not before; it refuses where some
 * thread has a smaller one. */
static bool tiles_permitted(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { ASK = 0x1023, TILE_FEATURE = 18 };
    return syscall(SYS_arch_prctl, ASK, TILE_FEATURE) == 0;
#else
    return false;
#endif
}

/* Runs only when named. */
static bool never(const fb__features *f) {
    (void)f;
    return false;
}
static bool has_avx512bf16(const fb__features *f) { return has_avx512(f) && f->avx512bf16; }
static bool has_amx(const fb__features *f) { return has_avx512bf16(f) && f->amx; }
static bool fast_dot(const fb__features *f) { return f->fast_dot; }
#endif
#ifdef FB_HAVE_BFDOT
static bool has_bfdot(const fb__features *f) { return f->neon_bf16; }
#endif

/* Every word that FLASHBACK_ISA may be, also where the build or the machine lacks it, best first. */
static const char *const words[] = {"amx",  "amx_model", "avx512bf16", "avx512",
                                    "avx2", "bfdot",     "baseline",   "scalar"};
#define WORDS (int)(sizeof words / sizeof *words)

#define IN_T "bench/SPEED.md, instruction sets"
#define IN_BF16 "bench/SPEED.md, bf16"

static const fb__cpu_row rows[] = {
/* clang-format off */
#ifdef FB_HAVE_AVX512BF16
    {"amx",        has_amx,        always,   tiles_permitted, KERNELS(avx512), PAIRS(amx), IN_BF16},
    {"amx_model",  has_avx512bf16, never,    NULL, KERNELS(avx512), PAIRS(amx_model),  "for tests"},
    {"avx512bf16", has_avx512bf16, fast_dot, NULL, KERNELS(avx512), PAIRS(avx512bf16), IN_BF16},
#endif
#ifdef FB_HAVE_AVX512
    {"avx512",     has_avx512,     always,   NULL, KERNELS(avx512), NULL, IN_T},
#endif
#ifdef FB_HAVE_AVX2
    {"avx2",       has_avx2,       always,   NULL, KERNELS(avx2),   NULL, IN_T},
#endif
#ifdef FB_HAVE_BFDOT
    {"bfdot",      has_bfdot,      always,   NULL, KERNELS(baseline), PAIRS(bfdot),    "not measured"},
#endif
    {"baseline",   always,         always,   NULL, KERNELS(baseline), NULL, IN_T},
    {"scalar",     always,         always,   NULL, KERNELS(scalar), NULL, IN_T},
    /* clang-format on */
};
#define ROWS (int)(sizeof rows / sizeof *rows)

static int rank(const char *isa) {
    for (int i = 0; i < WORDS; i++)
        if (strcmp(isa, words[i]) == 0)
            return i;
    return -1;
}

/* ---- This machine ---- */

#if defined(__x86_64__)
/* Leaf 7, subleaf `sub`, or zeros. */
static void leaf7(unsigned sub, unsigned r[4]) {
    if (!__get_cpuid_count(7, sub, &r[0], &r[1], &r[2], &r[3]))
        r[0] = r[1] = r[2] = r[3] = 0;
}

/* vdpbf16ps runs at twice the rate of a fused multiply-add on AMD's processors, in products, and at half of
 * it on Intel's (bench/SPEED.md, bf16). */
static bool vendor_is_amd(void) {
    unsigned r[4] = {0};
    return __get_cpuid(0, &r[0], &r[1], &r[2], &r[3]) && r[1] == signature_AMD_ebx &&
           r[2] == signature_AMD_ecx;
}

/* Tiles: the processor's, saved by the system, of the one shape that the kernels use. */
static bool tiles_usable(void) {
#if defined(__linux__) && defined(SYS_arch_prctl)
    enum { TILE_CONFIG = 1 << 17, TILE_DATA = 1 << 18 };
    unsigned r[4], low, high;
    leaf7(0, r);
    if (!(r[3] >> 24 & 1) || !(r[3] >> 22 & 1) || !__get_cpuid(1, &r[0], &r[1], &r[2], &r[3]) ||
        !(r[2] >> 27 & 1)) /* AMX-TILE, AMX-BF16, OSXSAVE */
        return false;
    __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    if ((low & (TILE_CONFIG | TILE_DATA)) != (TILE_CONFIG | TILE_DATA))
        return false;
    /* Palette 1: bytes of a tile and of its rows, number of tiles, rows. */
    if (!__get_cpuid_count(0x1d, 1, &r[0], &r[1], &r[2], &r[3]) || r[0] >> 16 != 1024 ||
        (r[1] & 0xffff) != 64 || r[1] >> 16 != 8 || (r[2] & 0xffff) != 16)
        return false;
    return true;
#else
    return false;
#endif
}
#endif

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
    unsigned r[4];
    leaf7(1, r);
    f.avx512bf16 = f.avx512f && r[0] >> 5 & 1;
    f.fast_dot = f.avx512bf16 && vendor_is_amd();
    f.amx = f.avx512bf16 && tiles_usable();
#elif defined(__aarch64__) && defined(__APPLE__)
    int has = 0;
    size_t size = sizeof has;
    f.neon_bf16 = sysctlbyname("hw.optional.arm.FEAT_BF16", &has, &size, NULL, 0) == 0 && has;
#elif defined(__aarch64__) && defined(__linux__)
    f.neon_bf16 = getauxval(AT_HWCAP2) >> 14 & 1; /* HWCAP2_BF16 */
#endif
    return f;
}

/* ---- The choice ---- */

fb_status fb__cpu_row_choose(const fb__features *features, const char *cap, const fb__cpu_row **row) {
    int best = cap ? rank(cap) : 0;
    if (best < 0)
        return fb__error(FB_INVALID, "FLASHBACK_ISA is '%s', expected one of: %s", cap,
                         fb__env_holds(FB__ENV_FLASHBACK_ISA));
    for (int i = 0; i < ROWS; i++) {
        bool named = cap && strcmp(cap, rows[i].isa) == 0;
        if (rank(rows[i].isa) >= best && rows[i].present(features) && (named || rows[i].worth(features))) {
            *row = &rows[i];
            return FB_OK;
        }
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
