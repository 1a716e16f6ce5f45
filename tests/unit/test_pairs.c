/* Operands of bf16 products, in every instruction set that this machine has: gemm, packs and finite against
 * plain loops; AMX against its model. */
#include "pairs.h"

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
    p.k = bits() % 4 ? whole(1, 160 / pairs->step) * pairs->step : 64;
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
    memcpy(copy, p->c, (size_t)c_bytes(p));
}

static void product_check(const fb__pairs *pairs, const product *p, const float *before, bool add,
                          bool is_exact) {
    for (int64_t i = 0; i < p->m; i++)
        for (int64_t j = 0; j < p->n; j++) {
            double want = add ? (double)before[i * p->c_row + j] : 0, size = fabs(want);
            for (int64_t x = 0; x < p->k; x++) {
                double term =
                    of_bf16(p->a[i * p->a_row + x]) * of_bf16(p->b[x / 2 * 2 * p->b_row + 2 * j + x % 2]);
                want += term, size += fabs(term);
            }
            const double is = (double)p->c[i * p->c_row + j];
            if (!(fabs(is - want) <= (is_exact ? 0 : (double)p->k * 0x1p-22 * size)))
                fail_msg("%s: C[%d][%d] of %d x %d x %d is %.9g, not %.9g", pairs->isa, (int)i, (int)j,
                         (int)p->m, (int)p->n, (int)p->k, is, want);
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
static void check_same_product(const fb__pairs *model, const fb__pairs *amx, uint16_t (*value)(void),
                               bool add) {
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
                fail_msg("C[%d][%d] of %d x %d x %d is %a, the model has %a", (int)i, (int)j, (int)p.m,
                         (int)p.n, (int)p.k, (double)is, (double)want);
        }
    drop_all();
}

/* ---- Packs --------------------------------------------------------------------------------------------- */

enum { ROWS = 72, COLS = 72 };

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
        memset(end - 256, 0xff, 512);
        for (int64_t c = 0; c < cols; c++)
            row[c] = (uint16_t)bits();
        row_at[r] = row;
    }
}

static uint16_t cell(int64_t rows, int64_t cols, int64_t r, int64_t c) {
    return r < rows && c < cols ? ((const uint16_t *)row_at[r])[c] : 0;
}

static void check_pack_lanes(const fb__pairs *pairs, int64_t rows, int64_t cols, bool negate) {
    const int64_t n = up(rows, pairs->lanes) + whole(0, 1) * pairs->lanes;
    const int64_t cols_pad = up(cols, pairs->lanes) + whole(0, 1) * pairs->lanes;
    uint16_t *to = make(cols_pad * n * 2);
    RUN(pairs, pairs->pack_lanes(rows, n, cols, cols_pad, row_at, negate, to));
    for (int64_t r = 0; r < n; r++)
        for (int64_t c = 0; c < cols_pad; c++)
            if (to[(c / 2 * n + r) * 2 + c % 2] != (cell(rows, cols, r, c) ^ (negate ? 0x8000 : 0)))
                fail_msg("%s: pack_lanes of %d x %d, row %d, column %d", pairs->isa, (int)rows, (int)cols,
                         (int)r, (int)c);
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
                fail_msg("%s: pack_rows of %d x %d, row %d, column %d", pairs->isa, (int)rows, (int)cols,
                         (int)r, (int)c);
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
                fail_msg("%s: pack_columns of %d x %d, row %d, column %d", pairs->isa, (int)rows, (int)cols,
                         (int)r, (int)c);
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

/* ---- AMX and its model --------------------------------------------------------------------------------- */

static uint64_t digest(const char *isa, const char *name, fb_route route, fbh_pass until) {
    fbh_case c;
    fbh_problem p;
    fb_plan *plan;
    char error[256];
    setenv("FLASHBACK_ISA", isa, 1);
    if (!fbh_case_parse(&c, name, error, sizeof error))
        fail_msg("%s: %s", name, error);
    fbh_problem_create(&p, &c, FB_CPU, 0, FBH_GUARD_END, false);
    p.desc.route = route;
    fbh_problem_fill(&p, 3);
    assert_int_equal(fb_plan_create(&plan, &p.desc), FB_OK);
    for (int pass = 0; pass <= (int)until; pass++)
        assert_int_equal(fbh_problem_run(&p, plan, (fbh_pass)pass), FB_OK);
    const uint64_t is = fbh_problem_digest(&p, until);
    fb_plan_destroy(plan);
    fbh_problem_destroy(&p);
    unsetenv("FLASHBACK_ISA");
    return is;
}

static void test_model(void **state) {
    (void)state;
    static const char *const names[] = {
        "bf16.b1h2k1.q100k130.d64.causal", "bf16.b1h4k2.q77k203.d80.left30.right9",
        "bf16.b2h2k2.q65k65.d128",         "bf16.b1h4k1.q33k190.d64.causal",
        "bf16.b1h2k2.q130k47.d80",         "bf16.b2h4k2.q5k300.d128.causal"};
    static uint16_t (*const values[])(void) = {spread, plain, exact, finite_bits};
    const fb__pairs *model = pairs_of("amx_model"), *amx = pairs_of("amx");
    int other = 0;
    if (!amx || !model) {
        print_message("no AMX on this machine: its model is compared with nothing\n");
        return;
    }
    for (int round = 0; round < 200; round++)
        check_same_product(model, amx, values[round % 4], round / 4 % 2);
    for (size_t n = 0; n < sizeof names / sizeof *names; n++) {
        fbh_case c;
        assert_true(fbh_case_parse(&c, names[n], (char[256]){0}, 256));
        for (int route = FB_FUSED; route <= FB_UNFUSED; route++)
            for (int pass = 0; pass < 2 && fbh_route_fits(&c, (fb_route)route); pass++) {
                const uint64_t is = digest("amx", names[n], (fb_route)route, (fbh_pass)pass);
                if (is != digest("amx_model", names[n], (fb_route)route, (fbh_pass)pass))
                    fail_msg("%s, %s, pass %d: the model has other bits", names[n],
                             fb_route_name((fb_route)route), pass);
                other += is != digest("avx512", names[n], (fb_route)route, (fbh_pass)pass);
            }
    }
    assert_true(other > 0); /* else FLASHBACK_ISA was not heard */
}

EACH(gemm)
EACH(packs)
EACH(finite)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gemm),
        cmocka_unit_test(test_packs),
        cmocka_unit_test(test_finite),
        cmocka_unit_test(test_model),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
