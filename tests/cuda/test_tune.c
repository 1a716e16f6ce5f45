/* The table of tiles, without a GPU: what holds for every row, that the first row that fits is taken, and
 * which head dims find none where. Next: test_compile.c, which compiles the rows. */
#include "flashback.h"
#include "src/cuda/tune.h"
#include "src/shared/args.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
/* cmocka wants the ones above first */
#include <cmocka.h>

enum { KIB = 1024, MOST_DIM = 576, ROWS_MAX = 256 };

/* Shared memory of a block that asks for it: compute capability 8.6, 8.9 and 12; 8.0; 9.0 and 10. Without
 * what kernels declare themselves (STATIC_BYTES in cuda.c). */
static const int devices[] = {99 * KIB - 256, 163 * KIB - 256, 227 * KIB - 256};
enum { DEVICES = sizeof devices / sizeof *devices };

static const fb_dtype types[] = {FB_F32, FB_F16, FB_BF16};

typedef struct row {
    fb__kernel kernel;
    fb__spec spec; /* at its largest head dims */
    bool wide;
} row;

static row rows[ROWS_MAX];
static int row_count;

static int load_rows(void **state) {
    (void)state;
    for (row_count = 0; row_count < ROWS_MAX; row_count++) {
        row *r = &rows[row_count];
        if (!fb__tune_row(row_count, FB_F16, true, &r->kernel, &r->spec))
            return row_count == 0;
        r->wide = r->spec.TYPE == FB_F32;
    }
    return 1;
}

static const char *words(const row *r) {
    static char text[160];
    const fb__spec *s = &r->spec;
    snprintf(text, sizeof text, "row %d: %s, %s%s D %d, %d x %d", (int)(r - rows), fb__kernel_file(r->kernel),
             r->wide ? "f32" : "16 bits", s->STACK ? ", stacked," : ",", s->D, s->BM, s->BN);
    return text;
}

#define HOLDS(row, condition)                                                                                \
    do {                                                                                                     \
        if (!(condition))                                                                                    \
            fail_msg("%s: not %s", words(row), #condition);                                                  \
    } while (0)

/* ---- What the heads of the kernels say about shared memory ---- */

static int tile(const fb__spec *s, int height, int columns) {
    return height * (columns * (s->TYPE == FB_F32 ? 4 : 2) + 16);
}

static int shared_bytes(fb__kernel kernel, const fb__spec *s) {
    const int Q = tile(s, s->BM, s->D), dO = tile(s, s->BM, s->DV); /* or K and V, where keys stay */
    const int K = tile(s, s->BN, s->D), V = tile(s, s->BN, s->DV);  /* or Q and dO, where queries pass by */
    const int streams = s->STACK || s->D + s->DV > 512 ? 0 : s->THREADS * 2 * (int)sizeof(void *);
    const int others = (s->WK - 1) * s->WM * s->WN, lanes = 32 * 4; /* warps that leave their sums, bytes */
    int tiles = 0, sums = 0, results = 0; /* results as f32, 16 bytes between rows */
    switch (kernel) {
    case FB__KERNEL_FORWARD: /* O, m and l of two rows a thread */
        tiles = Q + s->BUFFERS * (K + V) + streams;
        sums = others * lanes * s->MI * (s->DV / s->WN / 8 * 4 + 4);
        results = s->BM * (s->DV + 4) * 4;
        break;
    case FB__KERNEL_DQ:
        tiles =
            Q + dO + s->BUFFERS * (K + V) + streams + s->BM * 3 * 4; /* with LSE in two parts, and delta */
        sums = others * lanes * s->MI * (s->D / s->WN / 8 * 4);
        results = s->BM * (s->D + 4) * 4;
        break;
    case FB__KERNEL_DKDV: /* with LSE in two parts, and delta */
        tiles = Q + dO + s->BUFFERS * (K + V + 3 * s->BN * 4) + streams;
        results = s->BM * ((s->D > s->DV ? s->D : s->DV) + 4) * 4;
        break;
    case FB__KERNEL_DBIAS:
        tiles = Q + dO + K + V;
        sums = s->BM * s->BN * 4;
        break;
    default:
        break;
    }
    const int ends = sums > results ? sums : results;
    return tiles > ends ? tiles : ends;
}

/* ---- Every row ---- */

static void test_shapes(void **state) {
    (void)state;
    for (const row *r = rows; r < rows + row_count; r++) {
        const fb__spec *s = &r->spec;
        HOLDS(r, s->THREADS == 32 * s->WM * s->WN * s->WK && s->THREADS <= 1024);
        HOLDS(r, s->BM == s->WM * s->MI * 16);
        HOLDS(r, s->BN % (s->WK * 16) == 0);
        HOLDS(r, s->D % (s->WN * 16) == 0 && s->DV == s->D && s->D <= MOST_DIM);
        HOLDS(r, s->BUFFERS == 1 || s->BUFFERS == 2);
        HOLDS(r, s->MAX_MI == s->MI && s->MAX_CELLS == s->BN / s->WK);
        HOLDS(r, s->shared_bytes == shared_bytes(r->kernel, s) && s->shared_bytes % 16 == 0);
        HOLDS(r, s->measured && *s->measured);
        /* What a kernel does not read has to be 1. */
        HOLDS(r, r->kernel != FB__KERNEL_DKDV || s->WK == 1);
        HOLDS(r, r->kernel != FB__KERNEL_DBIAS || s->WN * s->WK * s->MI * s->BUFFERS == 1);
        HOLDS(r, r->kernel != FB__KERNEL_DBIAS || !s->STACK);
        HOLDS(r, s->PLAIN == (r->kernel != FB__KERNEL_DBIAS));
        /* Registers are rationed in vain where shared memory has no room for as many blocks. */
        HOLDS(r, s->BLOCKS >= 1 && s->BLOCKS * (s->shared_bytes + 256 + KIB) <= 228 * KIB);
    }
}

static bool same_class(const row *a, const row *b) {
    return a->kernel == b->kernel && a->wide == b->wide && a->spec.STACK == b->spec.STACK;
}

/* Rows of a class rise in head dims, and fall in memory where these are equal: what comes later is taken only
 * because what comes first did not fit. */
static void test_order(void **state) {
    (void)state;
    for (const row *a = rows; a < rows + row_count; a++)
        for (const row *b = a + 1; b < rows + row_count; b++)
            if (same_class(a, b)) {
                HOLDS(b, b->spec.D >= a->spec.D);
                HOLDS(b, b->spec.D > a->spec.D || b->spec.shared_bytes < a->spec.shared_bytes);
            }
}

static void test_types(void **state) {
    (void)state;
    for (int n = 0; n < row_count; n++)
        for (int plain = 0; plain < 2; plain++) {
            fb__kernel kernel;
            fb__spec bf16, f32;
            assert_true(fb__tune_row(n, FB_BF16, plain, &kernel, &bf16));
            assert_true(fb__tune_row(n, FB_F32, plain, &kernel, &f32));
            assert_int_equal(bf16.TYPE, rows[n].wide ? FB_F32 : FB_BF16);
            assert_int_equal(bf16.PLAIN, plain && kernel != FB__KERNEL_DBIAS);
            assert_int_equal(bf16.OPTIONS, bf16.PLAIN ? 0 : FB_ALL_OPTIONS);
            assert_int_equal(bf16.shared_bytes, rows[n].spec.shared_bytes);
            assert_int_equal(f32.D, rows[n].spec.D);
        }
}

/* ---- The choice ---- */

static int round_up(int64_t x, int step) { return x ? ((int)x + step - 1) / step * step : step; }

/* The spec that a row should give. */
static fb__spec expected(const row *r, fb_dtype type, int64_t d, int64_t dv, bool plain) {
    fb__spec s = r->spec;
    s.TYPE = (int)type;
    s.PLAIN = plain && r->kernel != FB__KERNEL_DBIAS;
    s.OPTIONS = s.PLAIN ? 0 : FB_ALL_OPTIONS;
    s.D = round_up(d, 16 * s.WN), s.DV = round_up(dv, 16 * s.WN);
    s.shared_bytes = shared_bytes(r->kernel, &s);
    return s;
}

/* The first row that fits, or NULL. */
static const row *first_fit(fb__kernel kernel, fb_dtype type, int64_t d, int64_t dv, bool stack, int shared) {
    for (const row *r = rows; r < rows + row_count; r++) {
        bool stacked = stack && kernel != FB__KERNEL_DBIAS;
        if (r->kernel != kernel || r->wide != (type == FB_F32) || (r->spec.STACK != 0) != stacked)
            continue;
        if (d <= r->spec.D && dv <= r->spec.D && expected(r, type, d, dv, true).shared_bytes <= shared)
            return r;
    }
    return NULL;
}

static bool equal(const fb__spec *a, const fb__spec *b) {
    return a->shared_bytes == b->shared_bytes && a->measured == b->measured
#define X(knob) &&a->knob == b->knob
                                                                    FB__SPEC(X)
#undef X
        ;
}

static void check_choice(fb__kernel kernel, fb_dtype type, int64_t d, int64_t dv, int variant, int shared) {
    const bool plain = variant & 1, stack = variant & 2;
    fb__spec got, want;
    const row *r = first_fit(kernel, type, d, dv, stack, shared);
    bool found = fb__tune_choose(kernel, type, d, dv, plain, stack, shared, &got);
    if (found != (r != NULL))
        fail_msg("%s %s D %d DV %d stack %d, %d bytes: a row is %sfound", fb__kernel_file(kernel),
                 fb_dtype_name(type), (int)d, (int)dv, stack, shared, found ? "" : "not ");
    if (!r)
        return;
    want = expected(r, type, d, dv, plain);
    want.UNROLL_COLUMNS = got.UNROLL_COLUMNS; /* a matter of speed only */
    if (!equal(&got, &want))
        fail_msg("%s, for %s D %d DV %d, %d bytes: another spec was chosen", words(r), fb_dtype_name(type),
                 (int)d, (int)dv, shared);
}

static void test_choice(void **state) {
    (void)state;
    const int most[] = {0, 40000, devices[0], devices[1], devices[2], 1 << 30};
    for (int k = 0; k < FB__KERNEL_ROWS; k++)
        for (size_t t = 0; t < sizeof types / sizeof *types; t++)
            for (size_t m = 0; m < sizeof most / sizeof *most; m++)
                for (int variant = 0; variant < 4; variant++)
                    for (int64_t d = 0; d <= MOST_DIM + 1; d++) {
                        check_choice((fb__kernel)k, types[t], d, d, variant, most[m]);
                        check_choice((fb__kernel)k, types[t], d, d * 7 % 577, variant, most[m]);
                        check_choice((fb__kernel)k, types[t], d % 64, d, variant, most[m]);
                    }
}

/* A row that no head dim takes on any device is not true of anything. */
static void test_no_row_is_dead(void **state) {
    (void)state;
    bool taken[ROWS_MAX] = {false};
    for (int k = 0; k < FB__KERNEL_ROWS; k++)
        for (int variant = 0; variant < 4; variant++)
            for (int n = 0; n < DEVICES; n++)
                for (int64_t d = 1; d <= MOST_DIM; d++) {
                    fb_dtype type = variant & 1 ? FB_F32 : FB_F16;
                    const row *r = first_fit((fb__kernel)k, type, d, d, variant & 2, devices[n]);
                    if (r)
                        taken[r - rows] = true;
                }
    for (const row *r = rows; r < rows + row_count; r++)
        HOLDS(r, taken[r - rows]);
}

/* Kernel files that have no rows, and need no shared memory at launch. */
static void test_files(void **state) {
    (void)state;
    for (int kernel = FB__KERNEL_ROWS; kernel < FB__KERNEL_HOPPER; kernel++)
        for (int variant = 0; variant < 4; variant++)
            for (int64_t d = 0; d <= MOST_DIM; d++) {
                fb__spec s;
                assert_true(fb__tune_choose((fb__kernel)kernel, types[d % 3], d, MOST_DIM - d, variant & 1,
                                            variant & 2, 0, &s));
                /* What does not keep columns is the same code for all head dims. */
                assert_int_equal(s.D, kernel == FB__KERNEL_ROWS ? round_up(d, 16) : 16);
                assert_int_equal(s.DV, kernel == FB__KERNEL_ROWS ? round_up(MOST_DIM - d, 16) : 16);
                assert_int_equal(s.TYPE, types[d % 3]);
                assert_true(s.THREADS % 32 == 0 && s.shared_bytes == 0);
            }
}

/* ---- Head dims without a row ---- */

/* With D = DV from `from` on, up to MOST_DIM, a kernel has no row where blocks have this much shared memory,
 * stacked or not. Whatever is not listed takes every head dim, and with 227 KiB everything does. */
static const struct {
    int kib;
    fb__kernel kernel;
    fb_dtype type;
    int from;
} without[] = {
    {99, FB__KERNEL_FORWARD, FB_F32, 513},
    {99, FB__KERNEL_DQ, FB_F32, 385},
    {99, FB__KERNEL_DKDV, FB_F32, 385},
    {99, FB__KERNEL_DBIAS, FB_F32, 385},
};

static int listed_without(int kib, fb__kernel kernel, fb_dtype type) {
    for (size_t n = 0; n < sizeof without / sizeof *without; n++)
        if (without[n].kib == kib && without[n].kernel == kernel && without[n].type == type)
            return without[n].from;
    return MOST_DIM + 1;
}

/* The first head dim without a row, and MOST_DIM + 1 if there is none. All after it have none either. */
static int first_without(int shared, fb__kernel kernel, fb_dtype type, bool stack) {
    int first = MOST_DIM + 1;
    for (int d = 1; d <= MOST_DIM; d++) {
        fb__spec s;
        bool found = fb__tune_choose(kernel, type, d, d, true, stack, shared, &s);
        if (!found && first > MOST_DIM)
            first = d;
        if (found && first <= MOST_DIM)
            fail_msg("%s: D %d has no row, and D %d has one", fb__kernel_file(kernel), first, d);
    }
    return first;
}

static int unlisted(int shared, fb__kernel kernel, fb_dtype type) {
    const int kib = (shared + 256) / KIB, want = listed_without(kib, kernel, type);
    int wrong = 0;
    for (int stack = 0; stack < 2; stack++) {
        int got = first_without(shared, kernel, type, stack);
        if (got != want)
            print_error("%d KiB, %s, %s, stack %d: none from D %d on, listed is %d\n", kib,
                        fb__kernel_file(kernel), fb_dtype_name(type), stack, got, want);
        wrong += got != want;
    }
    return wrong;
}

static void test_head_dims(void **state) {
    (void)state;
    int wrong = 0;
    for (int n = 0; n < DEVICES; n++)
        for (int k = 0; k < FB__KERNEL_ROWS; k++)
            for (size_t t = 0; t < sizeof types / sizeof *types; t++)
                wrong += unlisted(devices[n], (fb__kernel)k, types[t]);
    assert_int_equal(wrong, 0);
}

/* ---- What is baked ---- */

static void test_defines(void **state) {
    (void)state;
    fb__define defines[FB__SPEC_COUNT];
    fb__tune_defines(&rows[0].spec, defines);
#define X(knob)                                                                                              \
    assert_string_equal(defines[FB__SPEC_##knob].name, "FB_" #knob);                                         \
    assert_int_equal(defines[FB__SPEC_##knob].value, rows[0].spec.knob);
    FB__SPEC(X)
#undef X
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes),    cmocka_unit_test(test_order),          cmocka_unit_test(test_types),
        cmocka_unit_test(test_choice),    cmocka_unit_test(test_no_row_is_dead), cmocka_unit_test(test_files),
        cmocka_unit_test(test_head_dims), cmocka_unit_test(test_defines),
    };
    return cmocka_run_group_tests(tests, load_rows, NULL);
}
