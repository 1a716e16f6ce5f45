/* What the tests of products of bf16 share: the kernels of every instruction set that this machine has,
 * numbers, and memory that ends where the next byte must not be touched. */
#ifndef TESTS_UNIT_PAIRS_H
#define TESTS_UNIT_PAIRS_H

#include "harness/harness.h"
#include "src/base/fpmode.h"
#include "src/base/half.h"
#include "src/cpu/rows.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

static const char *const isas[] = {"bfdot", "avx512bf16", "amx_model", "amx"};
enum { ISAS = sizeof isas / sizeof *isas };

/* What is tested, NULL where this machine or this build lacks it. */
static inline const fb__pairs *pairs_of(const char *isa) {
    const fb__features here = fb__features_here();
    const fb__cpu_row *row;
    assert_int_equal(fb__cpu_row_choose(&here, isa, &row), FB_OK);
    if (row->permitted && !row->permitted())
        return NULL;
    return strcmp(row->isa, isa) == 0 ? row->pairs : NULL;
}

static inline void each(void (*check)(const fb__pairs *)) {
    int found = 0;
    for (int i = 0; i < ISAS; i++) {
        const fb__pairs *pairs = pairs_of(isas[i]);
        if (pairs)
            check(pairs), found++;
    }
    if (!found)
        print_message("no bf16 products on this machine: nothing tested\n");
}

/* void test_x(void **), from void check_x(const fb__pairs *). */
#define EACH(name)                                                                                           \
    static void test_##name(void **state) {                                                                  \
        (void)state;                                                                                         \
        each(check_##name);                                                                                  \
    }

/* As the fast routes call kernels. */
#define RUN(pairs, call)                                                                                     \
    do {                                                                                                     \
        const fb__fpmode usual_ = fb__fpmode_get();                                                          \
        fb__fpmode_set(FB__FPMODE_FAST);                                                                     \
        (pairs)->enter();                                                                                    \
        call;                                                                                                \
        (pairs)->leave();                                                                                    \
        fb__fpmode_set(usual_);                                                                              \
    } while (0)

/* ---- Numbers ------------------------------------------------------------------------------------------- */

static uint64_t drawn;

static inline uint32_t bits(void) {
    uint64_t z = drawn += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}

static inline double between(double lo, double hi) {
    return lo + (hi - lo) * ((double)bits() / 4294967295.0);
}
static inline int64_t whole(int64_t lo, int64_t hi) { return lo + bits() % (hi - lo + 1); }
static inline int64_t up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
static inline double of_bf16(uint16_t h) { return (double)fb__f32_from_bf16(h); }
static inline bool is_nan_bf16(uint16_t h) { return (h & 0x7fff) > 0x7f80; }

/* h is x rounded, give or take a part of x; below the normal range it may be 0. */
static inline bool rounds_to(uint16_t h, double x, double part) {
    double lo = x - fabs(x) * part, hi = x + fabs(x) * part, is = of_bf16(h);
    if (fabs(x) < 0x1.01p-126)
        return fabs(is) <= 0x1.02p-126;
    return of_bf16(fb__bf16_from_f64(lo)) <= is && is <= of_bf16(fb__bf16_from_f64(hi));
}

/* ---- Memory -------------------------------------------------------------------------------------------- */

enum { PAGE = 65536, MADE = 16, BEFORE = 64 };

static struct {
    void *map;
    size_t size;
} made[MADE];
static int made_count;

/* Bytes of 0xFF, NaN in both types, before a page that faults; BEFORE more of them lie before. */
static inline void *make(int64_t bytes) {
    const size_t size = (size_t)up(bytes + BEFORE, PAGE) + PAGE;
    char *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(map != MAP_FAILED && made_count < MADE);
    made[made_count].map = map, made[made_count++].size = size;
    char *end = map + size - PAGE;
    assert_int_equal(mprotect(end, PAGE, PROT_NONE), 0);
    memset(end - bytes - BEFORE, 0xff, (size_t)(bytes + BEFORE));
    return end - bytes;
}

static inline void drop_all(void) {
    while (made_count > 0) {
        made_count--;
        munmap(made[made_count].map, made[made_count].size);
    }
}

static inline bool untouched(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++)
        if (((const unsigned char *)from)[i] != 0xff)
            return false;
    return true;
}

/* The columns of rows x row_bytes from `bytes` on, and what lies before. */
static inline bool gaps_untouched(const void *at, int64_t rows, int64_t bytes, int64_t row_bytes) {
    bool good = untouched((const char *)at - BEFORE, BEFORE);
    for (int64_t r = 0; r < rows - 1; r++)
        good &= untouched((const char *)at + r * row_bytes + bytes, row_bytes - bytes);
    return good;
}

#endif
