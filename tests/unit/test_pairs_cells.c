/* Tiles of bf16 products, in every instruction set that this machine has: rounding, softmax and gradient
 * against plain loops in double. */
#include "pairs.h"

#define LN2 0.6931471805599453

/* ---- Cells --------------------------------------------------------------------------------------------- */

enum { MOST = 128 }; /* rows and lanes of tiles here */

/* Every pattern of the upper half, with lower halves around a tie. */
static float value_at(int64_t i) {
    static const uint32_t low[] = {0, 1, 0x7fff, 0x8000, 0x8001, 0xffff};
    return fb__f32_from_bits((uint32_t)(i & 0xffff) << 16 | low[i / 65536 % 6]);
}

static bool is_rounded(uint16_t h, float x) {
    if (isnan(x))
        return is_nan_bf16(h);
    const uint32_t size = fb__f32_bits(x) & 0x7fffffff;
    const uint16_t sign = (uint16_t)(fb__f32_bits(x) >> 16 & 0x8000);
    return h == (size < 0x00800000 ? sign : fb__bf16_from_f32(x)) ||
           (size < 0x00800000 && h == fb__bf16_from_f32(x));
}

static fb__cells cells_make(int64_t rows, int64_t n, int64_t row) {
    return (fb__cells){make(((rows - 1) * row + n) * 2), make(((rows - 1) * row + n) * 2),
                       make(((rows / 2 - 1) * row + n) * 4)};
}

static uint16_t at_row(const void *cells, int64_t row, int64_t r, int64_t j) {
    return ((const uint16_t *)cells)[r * row + j];
}
static uint16_t at_pair(const void *cells, int64_t row, int64_t r, int64_t j) {
    return ((const uint16_t *)cells)[(r / 2 * row + j) * 2 + r % 2];
}

/* dS as rows and as pairs is the same; gaps are as they were. */
static void cells_check(const fb__pairs *pairs, const fb__cells *x, int64_t rows, int64_t n, int64_t row) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t j = 0; j < n; j++)
            if (at_pair(x->ds_pairs, row, r, j) != at_row(x->ds, row, r, j))
                fail_msg("%s: dS of row %d, lane %d differs in pairs", pairs->isa, (int)r, (int)j);
    assert_true(gaps_untouched(x->p, rows, n * 2, row * 2));
    assert_true(gaps_untouched(x->ds, rows, n * 2, row * 2));
    assert_true(gaps_untouched(x->ds_pairs, rows / 2, n * 4, row * 4));
}

static void check_round(const fb__pairs *pairs) {
    const int64_t rows = up(32, pairs->step);
    for (int64_t first = 0, n; first < 6 * 65536; first += rows * n) {
        const int64_t row = (n = whole(1, 4) * pairs->lanes) + whole(0, 1) * pairs->lanes;
        float *p = make(((rows - 1) * row + n) * 4), *ds = make(((rows - 1) * row + n) * 4);
        const fb__cells to = cells_make(rows, n, row);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < n; j++) {
                p[r * row + j] = value_at(first + r * n + j);
                ds[r * row + j] = value_at((first + r * n + j) ^ 0x1555);
            }
        RUN(pairs, pairs->round(rows, n, p, ds, row, &to));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < n; j++)
                if (!is_rounded(at_row(to.p, row, r, j), p[r * row + j]) ||
                    !is_rounded(at_row(to.ds, row, r, j), ds[r * row + j]))
                    fail_msg("%s: %a or %a becomes 0x%x, 0x%x", pairs->isa, (double)p[r * row + j],
                             (double)ds[r * row + j], at_row(to.p, row, r, j), at_row(to.ds, row, r, j));
        cells_check(pairs, &to, rows, n, row);
        drop_all();
    }
}

/* ---- Softmax ------------------------------------------------------------------------------------------- */

/* Lanes: m as it is suffices for the first five. */
typedef enum kind { LOW, HIGH, FAR, HOLES, MASKED, SUFFICES, RAISED = SUFFICES, FRESH, EMPTY, KINDS } kind;

typedef struct tile {
    int64_t rows, n;
    double factor;
    float s[MOST][MOST], m[MOST], l[MOST];
} tile;

typedef struct result {
    bool said; /* what the function returns */
    float m[MOST], l[MOST], alpha[MOST];
    uint16_t p[MOST][MOST];
} result;

static tile given;
static result first, second;

static void lane_fill(tile *t, int64_t j, kind is) {
    const double two = LN2 / t->factor, base = between(-5, 5) * two;
    t->m[j] = is >= FRESH ? -HUGE_VALF : (float)base;
    t->l[j] = is >= FRESH ? 0 : (float)between(1, 50);
    for (int64_t r = 0; r < t->rows; r++) {
        double x = is == FAR      ? between(-400, -50)
                   : is == RAISED ? between(-40, 40)
                                  : between(-20, is == HIGH ? 7.9 : 3);
        bool none = is == MASKED || is == EMPTY || (is == HOLES && bits() % 2);
        t->s[r][j] = none ? -HUGE_VALF : (float)(base + x * two);
    }
    if (is == RAISED)
        t->s[whole(0, t->rows - 1)][j] = (float)(base + between(9, 60) * two);
}

static void tile_fill(const fb__pairs *pairs, tile *t, int kinds) {
    t->rows = whole(1, MOST / pairs->step) * pairs->step;
    t->n = whole(1, MOST / pairs->lanes) * pairs->lanes;
    t->factor = exp(between(-3, 1));
    for (int64_t j = 0; j < t->n; j++)
        lane_fill(t, j, (kind)whole(0, kinds - 1));
}

/* The tile as a whole, or by softmax_strip in strips of this height. */
static void softmax(const fb__pairs *pairs, const tile *t, int64_t strip, result *to) {
    const int64_t s_row = t->n + whole(0, 1) * pairs->lanes, p_row = t->n + whole(0, 1) * pairs->lanes;
    float *s = make(((t->rows - 1) * s_row + t->n) * 4), *m = make(t->n * 4), *l = make(t->n * 4);
    float *alpha = make(t->n * 4);
    uint16_t *p = make(((t->rows / 2 - 1) * p_row + t->n) * 4);
    const size_t lanes = (size_t)t->n * 4;
    memcpy(m, t->m, lanes), memcpy(l, t->l, lanes);
    for (int64_t r = 0; r < t->rows; r++)
        memcpy(s + r * s_row, t->s[r], lanes);
    to->said = true;
    if (!strip)
        RUN(pairs, to->said = pairs->softmax(t->rows, t->n, s, s_row, t->factor, m, l, alpha, p, p_row));
    for (int64_t r = 0; strip && r < t->rows && to->said; r += strip) {
        int64_t rows = t->rows - r < strip ? t->rows - r : strip;
        RUN(pairs, to->said = pairs->softmax_strip(rows, t->n, s + r * s_row, s_row, t->factor, m, l,
                                                   p + r * p_row, p_row));
    }
    memcpy(to->m, m, lanes), memcpy(to->l, l, lanes), memcpy(to->alpha, alpha, lanes);
    for (int64_t r = 0; r < t->rows; r++)
        for (int64_t j = 0; j < t->n; j++) {
            to->p[r][j] = at_pair(p, p_row, r, j);
            assert_int_equal(fb__f32_bits(s[r * s_row + j]), fb__f32_bits(t->s[r][j]));
        }
    assert_true(gaps_untouched(p, t->rows / 2, t->n * 4, p_row * 4));
    drop_all();
}

static double highest(const tile *t, int64_t j) {
    double top = -HUGE_VAL;
    for (int64_t r = 0; r < t->rows; r++)
        top = fmax(top, (double)t->s[r][j]);
    return top;
}

static void softmax_check(const fb__pairs *pairs, const tile *t, const result *is) {
    bool moved = false;
    for (int64_t j = 0; j < t->n; j++) {
        const double old = (double)t->m[j], top = highest(t, j);
        const bool raised = top > old && (top - old) * t->factor > FB__HEADROOM * LN2;
        const double m = raised ? top : old, base = isinf(m) ? 0 : m;
        const double alpha = exp(t->factor * (old - base));
        double sum = (double)t->l[j] * alpha;
        for (int64_t r = 0; r < t->rows; r++) {
            const double p = exp(t->factor * ((double)t->s[r][j] - base));
            sum += p;
            if (!rounds_to(is->p[r][j], p, 3e-5) ||
                (raised && (double)t->s[r][j] == top && of_bf16(is->p[r][j]) != 1))
                fail_msg("%s: P[%d][%d] is %.9g, not %.9g", pairs->isa, (int)r, (int)j, of_bf16(is->p[r][j]),
                         p);
        }
        if ((double)is->m[j] != m || !(fabs((double)is->l[j] - sum) <= 1e-5 * sum) ||
            !(fabs((double)is->alpha[j] - alpha) <= 1e-5 * alpha) || (alpha == 1 && is->alpha[j] != 1))
            fail_msg("%s: lane %d of %d x %d has m %.9g, l %.9g, alpha %.9g, not %.9g, %.9g, %.9g",
                     pairs->isa, (int)j, (int)t->rows, (int)t->n, (double)is->m[j], (double)is->l[j],
                     (double)is->alpha[j], m, sum, alpha);
        moved |= is->alpha[j] != 1;
    }
    assert_int_equal(is->said, moved);
}

/* The same bits in all lanes but one. */
static void lanes_check(const fb__pairs *pairs, const tile *t, int64_t but, const char *when) {
    for (int64_t j = 0; j < t->n; j++) {
        bool same = fb__f32_bits(first.m[j]) == fb__f32_bits(second.m[j]) &&
                    fb__f32_bits(first.l[j]) == fb__f32_bits(second.l[j]);
        for (int64_t r = 0; r < t->rows; r++)
            same &= first.p[r][j] == second.p[r][j];
        if (j != but && !same)
            fail_msg("%s: lane %d of %d x %d has other bits %s", pairs->isa, (int)j, (int)t->rows, (int)t->n,
                     when);
    }
}

static void check_softmax(const fb__pairs *pairs) {
    for (int round = 0; round < 60; round++) {
        tile_fill(pairs, &given, round % 3 ? KINDS : SUFFICES);
        softmax(pairs, &given, 0, &first);
        softmax_check(pairs, &given, &first);
        /* A NaN stays in its lane. */
        const int64_t r = whole(0, given.rows - 1), j = whole(0, given.n - 1);
        given.s[r][j] = NAN;
        softmax(pairs, &given, 0, &second);
        lanes_check(pairs, &given, j, "beside NaN");
        assert_memory_equal(first.alpha, second.alpha, (size_t)j * 4);
        assert_memory_equal(first.alpha + j + 1, second.alpha + j + 1, (size_t)(given.n - j - 1) * 4);
        assert_true(is_nan_bf16(second.p[r][j]) && isnan(second.l[j]));
    }
}

static void check_strips(const fb__pairs *pairs) {
    for (int round = 0; round < 60; round++) {
        const int64_t heights[] = {2, pairs->step, pairs->strip, MOST};
        tile_fill(pairs, &given, SUFFICES);
        softmax(pairs, &given, 0, &first);
        assert_false(first.said);
        softmax(pairs, &given, heights[round % 4], &second);
        assert_true(second.said);
        lanes_check(pairs, &given, -1, "in strips");
        const int64_t r = whole(0, given.rows - 1), j = whole(0, given.n - 1);
        const float was = given.s[r][j];
        given.s[r][j] = NAN;
        softmax(pairs, &given, heights[round % 4], &second);
        assert_true(second.said);
        lanes_check(pairs, &given, j, "in strips beside NaN");
        assert_true(is_nan_bf16(second.p[r][j]) && isnan(second.l[j]));
        given.s[r][j] = was;
        /* One score is too high; or m has seen none. */
        given.s[r][j] = given.m[j] + (float)(9 * LN2 / given.factor);
        softmax(pairs, &given, heights[round % 4], &second);
        assert_false(second.said);
        lane_fill(&given, j, FRESH);
        softmax(pairs, &given, heights[round % 4], &second);
        assert_false(second.said);
        /* And none is to come: there is nothing to raise m to, but P is 0 if the strips count. */
        lane_fill(&given, j, EMPTY);
        softmax(pairs, &given, heights[round % 4], &second);
        for (int64_t i = 0; second.said && i < given.rows; i++)
            assert_true(second.l[j] == 0 && second.p[i][j] == 0);
    }
}

/* On the border, where factor is one power of two per unit. */
static void check_headroom(const fb__pairs *pairs) {
    const float over = nextafterf(FB__HEADROOM, HUGE_VALF);
    tile_fill(pairs, &given, SUFFICES);
    given.factor = LN2;
    for (int64_t j = 0; j < given.n; j++)
        lane_fill(&given, j, LOW), given.m[j] = 0;
    for (int64_t r = 0; r < given.rows; r++)
        for (int64_t j = whole(0, 3); j < given.n; j += whole(1, 9)) {
            const float was = given.s[r][j];
            given.s[r][j] = FB__HEADROOM;
            softmax(pairs, &given, 0, &first);
            softmax(pairs, &given, pairs->strip, &second);
            assert_true(second.said && !first.said && first.m[j] == 0);
            assert_true(of_bf16(first.p[r][j]) == 1 << FB__HEADROOM);
            given.s[r][j] = over;
            softmax(pairs, &given, 0, &first);
            softmax(pairs, &given, pairs->strip, &second);
            assert_true(!second.said && first.said && first.m[j] == over && of_bf16(first.p[r][j]) == 1);
            given.s[r][j] = was;
        }
}

/* ---- Gradient ------------------------------------------------------------------------------------------ */

static void check_gradient(const fb__pairs *pairs) {
    for (int round = 0; round < 40; round++) {
        tile_fill(pairs, &given, SUFFICES);
        const int64_t rows = given.rows, n = given.n;
        const int64_t row = n + whole(0, 1) * pairs->lanes, to_row = n + whole(0, 1) * pairs->lanes;
        const fb__cells to = cells_make(rows, n, to_row);
        const float factor = (float)given.factor;
        float *s = make(((rows - 1) * row + n) * 4), *dp = make(((rows - 1) * row + n) * 4);
        float *lse = make(n * 4), *delta = make(n * 4);
        for (int64_t j = 0; j < n; j++) {
            const int64_t one = whole(0, rows - 1);
            for (int64_t r = 0; r < rows; r++)
                s[r * row + j] = given.s[r][j], dp[r * row + j] = (float)between(-9, 9);
            /* No lse; the maximum, for P = 1, also where its last bit counts; any other. */
            s[one * row + j] = j % 7 == 4 ? (float)between(1e6, 4e6) : given.m[j];
            lse[j] = factor * s[one * row + j] + (j % 7 == 4 || j % 7 == 5 ? 0 : (float)between(1, 6));
            lse[j] = j % 7 == 3 ? HUGE_VALF : lse[j];
            delta[j] = (float)between(-5, 5);
        }
        RUN(pairs, pairs->gradient(rows, n, s, dp, row, (double)factor, lse, delta, &to, to_row));
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < n; j++) {
                const float x = s[r * row + j];
                const double scaled = (double)(factor * x), p = exp(scaled - (double)lse[j]);
                const double ds = p * ((double)dp[r * row + j] - (double)delta[j]);
                const uint16_t is = at_row(to.p, to_row, r, j), is_ds = at_row(to.ds, to_row, r, j);
                const bool flushed = p < 0x1.01p-126; /* dS may be 0 as well then */
                if (!rounds_to(is, p, 2e-4) || (!flushed && !rounds_to(is_ds, ds, 2e-4)) ||
                    (flushed && fabs(of_bf16(is_ds)) > 0x1p-120) || (p == 1 && is != 0x3f80) ||
                    (p == 0 && (is | is_ds) & 0x7fff))
                    fail_msg("%s: row %d, lane %d of %d x %d has P %.9g, dS %.9g, not %.9g, %.9g", pairs->isa,
                             (int)r, (int)j, (int)rows, (int)n, of_bf16(is), of_bf16(is_ds), p, ds);
            }
        cells_check(pairs, &to, rows, n, to_row);
        drop_all();
    }
}

EACH(round)
EACH(softmax)
EACH(strips)
EACH(headroom)
EACH(gradient)

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round),    cmocka_unit_test(test_softmax),  cmocka_unit_test(test_strips),
        cmocka_unit_test(test_headroom), cmocka_unit_test(test_gradient),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
