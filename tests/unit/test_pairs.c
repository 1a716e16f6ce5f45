/* What products of bf16 need, in every instruction set that this machine has, against plain loops: products,
 * packs, rounding, softmax and gradient. Rows end where the next byte must not be touched. */
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

#define LN2 0.6931471805599453

static const char *const isas[] = {"bfdot", "avx512bf16", "amx_model", "amx"};
enum { ISAS = sizeof isas / sizeof *isas };

/* What is tested, NULL where this machine or this build lacks it. */
static const fb__pairs *pairs_of(const char *isa) {
    const fb__features here = fb__features_here();
    const fb__cpu_row *row;
    assert_int_equal(fb__cpu_row_choose(&here, isa, &row), FB_OK);
    return strcmp(row->isa, isa) == 0 ? row->pairs : NULL;
}

static void each(void (*check)(const fb__pairs *)) {
    int found = 0;
    for (int i = 0; i < ISAS; i++) {
        const fb__pairs *pairs = pairs_of(isas[i]);
        if (pairs)
            check(pairs), found++;
    }
    if (!found)
        print_message("no bf16 products on this machine: nothing tested\n");
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

static uint32_t bits(void) {
    uint64_t z = drawn += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (uint32_t)(z >> 32);
}

static double between(double lo, double hi) { return lo + (hi - lo) * ((double)bits() / 4294967295.0); }
static int64_t whole(int64_t lo, int64_t hi) { return lo + bits() % (hi - lo + 1); }
static int64_t up(int64_t x, int64_t step) { return (x + step - 1) / step * step; }
static double of_bf16(uint16_t h) { return (double)fb__f32_from_bf16(h); }
static bool is_nan_bf16(uint16_t h) { return (h & 0x7fff) > 0x7f80; }

/* h is x rounded, give or take a part of x; below the normal range it may be 0. */
static bool rounds_to(uint16_t h, double x, double part) {
    double lo = x - fabs(x) * part, hi = x + fabs(x) * part, is = of_bf16(h);
    if (fabs(x) < 0x1.01p-126)
        return fabs(is) <= 0x1.02p-126;
    return of_bf16(fb__bf16_from_f64(lo)) <= is && is <= of_bf16(fb__bf16_from_f64(hi));
}

/* ---- Memory -------------------------------------------------------------------------------------------- */

enum { PAGE = 4096, MADE = 16, BEFORE = 64, ROWS = 72, COLS = 72 };

static struct {
    void *map;
    size_t size;
} made[MADE];
static int made_count;

/* Bytes of 0xFF, NaN in both types, before a page that faults; there are more of them before it. */
static void *make(int64_t bytes) {
    const size_t size = (size_t)up(bytes + BEFORE, PAGE) + PAGE;
    char *map = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(map != MAP_FAILED && made_count < MADE);
    made[made_count].map = map, made[made_count++].size = size;
    memset(map, 0xff, size);
    assert_int_equal(mprotect(map + size - PAGE, PAGE, PROT_NONE), 0);
    return map + size - PAGE - bytes;
}

static void drop_all(void) {
    while (made_count > 0) {
        made_count--;
        munmap(made[made_count].map, made[made_count].size);
    }
}

static bool untouched(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i++)
        if (((const unsigned char *)from)[i] != 0xff)
            return false;
    return true;
}

/* The columns of rows x row_bytes from `bytes` on, and what lies before. */
static bool gaps_untouched(const void *at, int64_t rows, int64_t bytes, int64_t row_bytes) {
    bool good = untouched((const char *)at - BEFORE, BEFORE);
    for (int64_t r = 0; r < rows - 1; r++)
        good &= untouched((const char *)at + r * row_bytes + bytes, row_bytes - bytes);
    return good;
}

/* ROWS rows, each before a page of its own. */
static const void *row_at[ROWS];

static void *make_rows(void) {
    char *map = mmap(NULL, ROWS * 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(map != MAP_FAILED);
    for (int r = 0; r < ROWS; r++)
        assert_int_equal(mprotect(map + (2 * r + 1) * PAGE, PAGE, PROT_NONE), 0);
    return map;
}

/* Any bits, right before the page or with `gap` NaNs between. */
static void fill_rows(char *map, int64_t cols, int64_t gap) {
    for (int r = 0; r < ROWS; r++) {
        uint16_t *end = (uint16_t *)(void *)(map + (2 * r + 1) * PAGE), *row = end - gap - cols;
        memset(map + 2 * r * PAGE, 0xff, PAGE);
        for (int64_t c = 0; c < cols; c++)
            row[c] = (uint16_t)(bits() & 0xfffe);
        row_at[r] = row;
    }
}

static uint16_t cell(int64_t rows, int64_t cols, int64_t r, int64_t c) {
    return r < rows && c < cols ? ((const uint16_t *)row_at[r])[c] : 0;
}

/* ---- Products ------------------------------------------------------------------------------------------ */

typedef struct product {
    int64_t m, n, k, a_row, b_row, c_row, below; /* rows that lie below C */
    uint16_t *a, *b;
    float *c;
} product;

static int64_t c_bytes(const product *p) { return ((p->m + p->below - 1) * p->c_row + p->n) * 4; }

/* Any size that the kernels allow. Rows of A are anywhere, those of B and C on vectors. */
static product product_make(const fb__pairs *pairs) {
    product p;
    do
        p.m = whole(1, 130);
    while (p.m % pairs->step && p.m % pairs->strip);
    if (bits() % 4 == 0)
        p.m = bits() % 2 ? pairs->strip : 64;
    p.k = whole(1, 160 / pairs->step) * pairs->step;
    p.n = whole(1, 160 / pairs->lanes) * pairs->lanes;
    p.a_row = p.k + whole(0, 1) * whole(0, 40);
    p.b_row = p.n + whole(0, 1) * 16 * whole(1, 3);
    p.c_row = p.n + whole(0, 1) * 16 * whole(1, 3);
    p.below = whole(0, 1) * 3;
    p.a = make(((p.m - 1) * p.a_row + p.k) * 2);
    p.b = make(((p.k / 2 - 1) * p.b_row + p.n) * 4);
    p.c = make(c_bytes(&p));
    return p;
}

static void product_fill(const product *p, uint16_t (*value)(void)) {
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t x = 0; x < p->k; x++)
            p->a[i * p->a_row + x] = value();
    for (int64_t x = 0; x < p->k; x += 2)
        for (int64_t j = 0; j < 2 * p->n; j++)
            p->b[x * p->b_row + j] = value();
}

static uint16_t exact(void) { return fb__bf16_from_f64((double)whole(-64, 64) / 64); }
static uint16_t plain(void) { return fb__bf16_from_f64(between(-2, 2)); }
static uint16_t spread(void) { return fb__bf16_from_f64(ldexp(between(-1, 1), (int)whole(-20, 20))); }
static uint16_t finite_bits(void) {
    uint16_t h = (uint16_t)bits();
    return (h & 0x7f80) == 0x7f80 ? h & 0xbfff : h;
}

/* What lies in C before, also where nothing may be read. */
static void product_start(const product *p, bool add, float *copy) {
    for (int64_t i = 0; add && i < p->m; i++)
        for (int64_t j = 0; j < p->n; j++)
            p->c[i * p->c_row + j] = (float)whole(-512, 512) / 16;
    if (copy)
        memcpy(copy, p->c, (size_t)c_bytes(p));
}

static void product_check(const fb__pairs *pairs, const product *p, const float *before, bool add,
                          bool is_exact) {
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t j = 0; j < p->n; j++) {
            double want = add ? (double)before[i * p->c_row + j] : 0, size = fabs(want);
            for (int64_t x = 0; x < p->k; x++) {
                double term = of_bf16(p->a[i * p->a_row + x]) * of_bf16(p->b[x / 2 * 2 * p->b_row + 2 * j + x % 2]);
                want += term, size += fabs(term);
            }
            const double is = (double)p->c[i * p->c_row + j];
            if (!(fabs(is - want) <= (is_exact ? 0 : (double)p->k * 0x1p-22 * size)))
                fail_msg("%s: C[%d][%d] of %d x %d x %d is %.9g, not %.9g", pairs->isa, (int)i, (int)j, (int)p->m,
                         (int)p->n, (int)p->k, is, want);
        }
    assert_true(gaps_untouched(p->c, p->m + p->below, p->n * 4, p->c_row * 4));
    for (int64_t i = p->m; i < p->m + p->below; i++)
        assert_true(untouched(p->c + i * p->c_row, p->n * 4));
}

static void check_gemm(const fb__pairs *pairs) {
    for (int round = 0; round < 120; round++) {
        const bool add = round % 2, is_exact = round / 2 % 2;
        const product p = product_make(pairs);
        float *before = make(c_bytes(&p)), *first = make(c_bytes(&p));
        fb__ahead ahead = {.part = {{(char *)p.a, 64, 3, 100}, {(char *)p.b, 64, 3, 100}}, .parts = 2};
        product_fill(&p, is_exact ? exact : plain);
        product_start(&p, add, before);
        RUN(pairs, pairs->gemm(p.m, p.n, p.k, p.a, p.a_row, p.b, p.b_row, p.c, p.c_row, add, NULL));
        product_check(pairs, &p, before, add, is_exact);
        memcpy(first, p.c, (size_t)c_bytes(&p));
        memcpy(p.c, before, (size_t)c_bytes(&p));
        RUN(pairs, pairs->gemm(p.m, p.n, p.k, p.a, p.a_row, p.b, p.b_row, p.c, p.c_row, add, &ahead));
        assert_memory_equal(p.c, first, (size_t)c_bytes(&p));
        assert_true(ahead.next >= 0 && ahead.next <= ahead.parts);
        drop_all();
    }
}

/* Bits; a NaN is a NaN. */
static void check_same_product(const fb__pairs *model, const fb__pairs *amx, uint16_t (*value)(void), bool add) {
    const product p = product_make(amx);
    float *before = make(c_bytes(&p)), *first = make(c_bytes(&p));
    product_fill(&p, value);
    product_start(&p, add, before);
    RUN(model, model->gemm(p.m, p.n, p.k, p.a, p.a_row, p.b, p.b_row, p.c, p.c_row, add, NULL));
    memcpy(first, p.c, (size_t)c_bytes(&p));
    memcpy(p.c, before, (size_t)c_bytes(&p));
    RUN(amx, amx->gemm(p.m, p.n, p.k, p.a, p.a_row, p.b, p.b_row, p.c, p.c_row, add, NULL));
    for (int64_t i = 0; i < p.m; i++)
        for (int64_t j = 0; j < p.n; j++) {
            const float is = p.c[i * p.c_row + j], want = first[i * p.c_row + j];
            if (fb__f32_bits(is) != fb__f32_bits(want) && !(isnan(is) && isnan(want)))
                fail_msg("C[%d][%d] of %d x %d x %d is %a, the model has %a", (int)i, (int)j, (int)p.m, (int)p.n,
                         (int)p.k, (double)is, (double)want);
        }
    drop_all();
}

/* ---- Packs --------------------------------------------------------------------------------------------- */

static void check_pack_lanes(const fb__pairs *pairs, int64_t rows, int64_t cols, bool negate) {
    const int64_t n = up(rows, pairs->lanes) + whole(0, 1) * pairs->lanes;
    const int64_t cols_pad = up(cols, pairs->lanes) + whole(0, 1) * pairs->lanes;
    uint16_t *to = make(cols_pad * n * 2);
    RUN(pairs, pairs->pack_lanes(rows, n, cols, cols_pad, row_at, negate, to));
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < cols_pad; c++)
            if (to[(c / 2 * n + r) * 2 + c % 2] != (cell(rows, cols, r, c) ^ (negate ? 0x8000 : 0)))
                fail_msg("%s: pack_lanes of %d x %d, row %d, column %d", pairs->isa, (int)rows, (int)cols, (int)r,
                         (int)c);
    assert_true(untouched((char *)to - BEFORE, BEFORE));
    drop_all();
}

static void check_pack_rows(const fb__pairs *pairs, int64_t rows, int64_t cols) {
    const int64_t rows_pad = up(rows, pairs->step) + whole(0, 1) * pairs->step;
    const int64_t cols_pad = up(cols, pairs->lanes) + whole(0, 1) * pairs->lanes;
    uint16_t *to = make(rows_pad * cols_pad * 2);
    RUN(pairs, pairs->pack_rows(rows, rows_pad, cols, cols_pad, row_at, to));
    for (int64_t r = 0; r < rows_pad; r++)
        for (int64_t c = 0; c < cols_pad; c++)
            if (to[(r / 2 * cols_pad + c) * 2 + r % 2] != cell(rows, cols, r, c))
                fail_msg("%s: pack_rows of %d x %d, row %d, column %d", pairs->isa, (int)rows, (int)cols, (int)r,
                         (int)c);
    assert_true(untouched((char *)to - BEFORE, BEFORE));
    drop_all();
}

static void check_pack_columns(const fb__pairs *pairs, int64_t rows, int64_t cols) {
    const int64_t rows_pad = up(rows, pairs->lanes), to_row = rows_pad + whole(0, 2) * pairs->lanes;
    const int64_t cols_pad = up(cols, pairs->lanes) + whole(0, 1) * pairs->lanes;
    uint16_t *to = make(((cols_pad - 1) * to_row + rows_pad) * 2);
    RUN(pairs, pairs->pack_columns(rows, rows_pad, cols, cols_pad, row_at, to, to_row));
    for (int64_t r = 0; r < rows_pad; r++)
        for (int64_t c = 0; c < cols_pad; c++)
            if (to[c * to_row + r] != cell(rows, cols, r, c))
                fail_msg("%s: pack_columns of %d x %d, row %d, column %d", pairs->isa, (int)rows, (int)cols, (int)r,
                         (int)c);
    assert_true(gaps_untouched(to, cols_pad, rows_pad * 2, to_row * 2));
    drop_all();
}

static void check_packs(const fb__pairs *pairs) {
    char *map = make_rows();
    for (int64_t i = 1; i <= 70; i++)
        for (int way = 0; way < 4; way++) {
            const int64_t rows = way < 2 ? i : whole(1, 70), cols = way == 2 ? i : whole(1, 70);
            fill_rows(map, cols, way % 2 ? 80 : 0);
            check_pack_lanes(pairs, rows, cols, false);
            check_pack_lanes(pairs, rows, cols, true);
            check_pack_rows(pairs, rows, cols);
            check_pack_columns(pairs, rows, cols);
        }
    munmap(map, ROWS * 2 * PAGE);
}

static void check_finite(const fb__pairs *pairs) {
    static const uint16_t good[] = {0x7f7f, 0xff7f, 0x0001, 0x8001, 0x007f, 0x8000, 0, 0x3f80};
    static const uint16_t bad[] = {0x7f80, 0xff80, 0x7f81, 0xffc0, 0x7fff, 0xffff};
    for (int64_t cols = 1; cols <= COLS; cols++) {
        const int64_t rows = whole(1, 3), a_row = cols + whole(0, 1) * whole(1, 40);
        uint16_t *a = make(((rows - 1) * a_row + cols) * 2);
        bool is;
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++)
                a[r * a_row + c] = cols % 2 ? good[bits() % 8] : finite_bits();
        RUN(pairs, is = pairs->finite(rows, cols, a, a_row));
        assert_true(is);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = 0; c < cols; c++) {
                uint16_t *at = &a[r * a_row + c], was = *at;
                *at = bad[bits() % 6];
                RUN(pairs, is = pairs->finite(rows, cols, a, a_row));
                if (is)
                    fail_msg("%s: 0x%x is finite, in column %d of %d", pairs->isa, *at, (int)c, (int)cols);
                *at = was;
            }
        drop_all();
    }
}
