/* Products of bf16 pairs, summed in f32, by AVX512-BF16 and by AMX: what they reach on registers alone. CPUID
 * says whether the processor has them, the kernel whether this process may use the tiles of AMX. Floor:
 * harness. */
#include "peak_loops.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <stdbool.h>
#include <unistd.h>

/* Bit `bit` of a register of CPUID leaf 7: 0 to 3 = eax to edx. */
static bool leaf_7(unsigned subleaf, int reg, int bit) {
    unsigned r[4];
    return __get_cpuid_count(7, subleaf, &r[0], &r[1], &r[2], &r[3]) && r[reg] >> bit & 1;
}

/* ---- AVX512-BF16 --------------------------------------------------------------------------------------- */

#define EACH(X) X(0) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14) X(15)
#define DECLARE(i) __m512 a##i = _mm512_set1_ps(1 + i);
#define STEP(i) a##i = _mm512_dpbf16_ps(a##i, x, y);
#define PLUS(i) +a##i

/* 0x3F80 is 1, 0xBF80 is -1: each step adds 0. */
__attribute__((target("avx512f,avx512bf16"))) static double vdpbf16ps(int64_t n) {
    const __m512bh x = (__m512bh)_mm512_set1_epi32((int)0xBF803F80),
                   y = (__m512bh)_mm512_set1_epi32(0x3F803F80);
    EACH(DECLARE)
    for (; n > 0; n--) {
        EACH(STEP)
    }
    return (double)_mm512_reduce_add_ps(EACH(PLUS));
}

fbh_flop_kernel fbh_flop_kernel_vdpbf16ps(void) {
    const bool here = __builtin_cpu_supports("avx512f") && leaf_7(1, 0, 5);
    return (fbh_flop_kernel){"avx512bf16", here ? vdpbf16ps : NULL, 2 * 16 * 16 * 2};
}

/* ---- AMX ----------------------------------------------------------------------------------------------- */

/* Palette 1: up to 8 tiles of 16 rows of 64 bytes. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

enum { ROWS = 16, ROW_BYTES = 64, PAIRS = ROWS * ROW_BYTES / 2 };

/* C 0 to 3 (2 x 2) += A 4, 5 times B 6, 7, as in a product of matrices. In assembly throughout: of the 64
 * bytes that ldtilecfg reads, gcc's intrinsic declares 8. A and B hold 1 and -1 in turn, so that C stays 0.
 */
static double tdpbf16ps(int64_t n) {
    tile_config config = {.palette = 1};
    uint16_t ones[PAIRS], turns[PAIRS];
    float sums[ROWS * ROWS];
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = ROW_BYTES;
        config.rows[i] = ROWS;
    }
    for (int i = 0; i < PAIRS; i++) {
        ones[i] = 0x3F80;
        turns[i] = i % 2 ? 0x3F80 : 0xBF80;
    }
    const int64_t stride = ROW_BYTES;
    __asm__ volatile("ldtilecfg %0\n\t"
                     "tilezero %%tmm0\n\ttilezero %%tmm1\n\ttilezero %%tmm2\n\ttilezero %%tmm3\n\t"
                     "tileloadd (%1,%3), %%tmm4\n\ttileloadd (%1,%3), %%tmm5\n\t"
                     "tileloadd (%2,%3), %%tmm6\n\ttileloadd (%2,%3), %%tmm7"
                     :
                     : "m"(config), "r"(ones), "r"(turns), "r"(stride)
                     : "memory");
    for (; n > 0; n--)
        __asm__ volatile("tdpbf16ps %%tmm6, %%tmm4, %%tmm0\n\ttdpbf16ps %%tmm7, %%tmm4, %%tmm1\n\t"
                         "tdpbf16ps %%tmm6, %%tmm5, %%tmm2\n\ttdpbf16ps %%tmm7, %%tmm5, %%tmm3" ::
                             : "memory");
    double sum = 0;
#define ADD(tile)                                                                                            \
    __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1)" : : "r"(sums), "r"(stride) : "memory");            \
    for (int i = 0; i < ROWS * ROWS; i++)                                                                    \
        sum += (double)sums[i];
    ADD(0) ADD(1) ADD(2) ADD(3) __asm__ volatile("tilerelease" ::: "memory");
    return sum;
}

/* Linux gives the tiles' state only to a process that asked; its threads have it too. */
static bool tiles_permitted(void) {
    enum { ARCH_PRCTL = 158, ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
#ifdef __linux__
    return syscall(ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
#else
    return false;
#endif
}

fbh_flop_kernel fbh_flop_kernel_tdpbf16ps(void) {
    const bool here = leaf_7(0, 3, 22) && leaf_7(0, 3, 24) && tiles_permitted();
    return (fbh_flop_kernel){"amx", here ? tdpbf16ps : NULL, 2.0 * 4 * ROWS * ROWS * ROW_BYTES / 2};
}
#else
fbh_flop_kernel fbh_flop_kernel_vdpbf16ps(void) { return (fbh_flop_kernel){"avx512bf16", NULL, 0}; }
fbh_flop_kernel fbh_flop_kernel_tdpbf16ps(void) { return (fbh_flop_kernel){"amx", NULL, 0}; }
#endif
