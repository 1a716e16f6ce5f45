/* Which kernels run where: the rows of the CPU backend, for the feature sets of processors that nobody here
 * owns, and for every word of FLASHBACK_ISA. */
#include "src/cpu/rows.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

#define AVX2 .avx2 = true, .fma = true, .f16c = true
#define AVX512 AVX2, .avx512f = true, .avx512bw = true, .avx512dq = true, .avx512vl = true

static const struct {
    const char *name;
    fb__features features;
    const char *best; /* of all instruction sets */
} machines[] = {
    {"Sapphire Rapids", {AVX512}, "avx512"},
    {"Skylake-X", {AVX512}, "avx512"},
    {"Zen 4", {AVX512}, "avx512"},
    {"Zen 3", {AVX2}, "avx2"},
    {"Haswell", {AVX2}, "avx2"},
    {"Alder Lake", {AVX2}, "avx2"},
    {"Sandy Bridge", {.avx2 = false}, "baseline"},
    {"Apple M2", {.avx2 = false}, "baseline"},
    {"Graviton 3", {.avx2 = false}, "baseline"},
    /* Not whole: each word needs all of its parts. */
    {"Knights Landing", {AVX2, .avx512f = true}, "avx2"},
    {"AVX-512 without VL", {AVX2, .avx512f = true, .avx512bw = true, .avx512dq = true}, "avx2"},
    {"AVX-512 without BW", {AVX2, .avx512f = true, .avx512dq = true, .avx512vl = true}, "avx2"},
    {"AVX-512 without DQ", {AVX2, .avx512f = true, .avx512bw = true, .avx512vl = true}, "avx2"},
    {"AVX-512 without F", {AVX2, .avx512bw = true, .avx512dq = true, .avx512vl = true}, "avx2"},
    {"AVX2 without FMA", {.avx2 = true, .f16c = true}, "baseline"},
    {"AVX2 without F16C", {.avx2 = true, .fma = true}, "baseline"},
    {"AVX2 hidden", {.fma = true, .f16c = true}, "baseline"},
    {"all but FMA",
     {.avx2 = true, .f16c = true, .avx512f = true, .avx512bw = true, .avx512dq = true, .avx512vl = true},
     "baseline"},
};

static const char *const words[] = {"scalar", "baseline", "avx2", "avx512"}; /* rising */

static int rank_of(const char *isa) {
    for (int i = 0; i < 4; i++)
        if (strcmp(isa, words[i]) == 0)
            return i;
    fail_msg("no word is '%s'", isa);
    return -1;
}

/* Instruction sets of this build, as a processor with everything lists them. */
static const char *built(void) {
    static char list[128];
    const fb__features all = {AVX512};
    fb__text text = {list, sizeof list, 0};
    fb__cpu_rows_list(&all, &text);
    return list;
}

/* The best that is not above `most`, and that the build has. */
static const char *within_build(int most) {
    while (most > 0 && !strstr(built(), words[most]))
        most--;
    return words[most];
}

static void test_machines(void **state) {
    (void)state;
    for (size_t m = 0; m < sizeof machines / sizeof *machines; m++)
        for (int cap = -1; cap < 4; cap++) {
            const fb__cpu_row *row = NULL;
            int most = rank_of(machines[m].best);
            if (cap >= 0 && cap < most)
                most = cap;
            assert_int_equal(fb__cpu_row_choose(&machines[m].features, cap < 0 ? NULL : words[cap], &row),
                             FB_OK);
            if (strcmp(row->isa, within_build(most)) != 0)
                fail_msg("%s, FLASHBACK_ISA %s: %s", machines[m].name, cap < 0 ? "unset" : words[cap],
                         row->isa);
            assert_true(row->present(&machines[m].features));
        }
}

static void test_unknown_words(void **state) {
    (void)state;
    const char *const wrong[] = {"", "AVX2", "avx", "avx10", "avx512 ", "sse2", "neon", "auto", "0"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        for (size_t m = 0; m < sizeof machines / sizeof *machines; m++) {
            const fb__cpu_row *row = NULL;
            char given[64];
            snprintf(given, sizeof given, "FLASHBACK_ISA is '%s'", wrong[i]);
            assert_int_equal(fb__cpu_row_choose(&machines[m].features, wrong[i], &row), FB_INVALID);
            assert_null(row);
            assert_non_null(strstr(fb__error_text(), given));
            assert_non_null(strstr(fb__error_text(), "scalar | baseline | avx2 | avx512"));
        }
}

/* What holds for every row, and the list that fb_info prints. */
static void test_rows(void **state) {
    (void)state;
    int lanes = 1 << 20;
    for (int cap = 3; cap >= 0; cap--) {
        const fb__features all = {AVX512};
        const fb__cpu_row *row;
        assert_int_equal(fb__cpu_row_choose(&all, words[cap], &row), FB_OK);
        assert_string_equal(row->f32->isa, row->isa);
        assert_string_equal(row->f64->isa, row->isa);
        assert_int_equal(row->f32->size, sizeof(float));
        assert_int_equal(row->f64->size, sizeof(double));
        assert_int_equal(row->f32->lanes * row->f32->size,
                         row->f64->lanes * (row->isa[0] == 's' ? 4 : row->f64->size));
        assert_true(row->f32->lanes <= lanes && row->f32->lanes <= 32 && 32 % row->f32->lanes == 0);
        assert_true(*row->measured);
        lanes = row->f32->lanes;
    }
    char list[128];
    const fb__features none = {.avx2 = false};
    fb__text text = {list, sizeof list, 0};
    fb__cpu_rows_list(&none, &text);
    assert_string_equal(list, "baseline scalar");
}

/* This machine: what it has is one of the sets above, and a word above it takes the best that there is. */
static void test_here(void **state) {
    (void)state;
    const fb__features here = fb__features_here();
    const fb__cpu_row *best, *highest;
    assert_int_equal(fb__cpu_row_choose(&here, NULL, &best), FB_OK);
    assert_int_equal(fb__cpu_row_choose(&here, "avx512", &highest), FB_OK);
    assert_ptr_equal(best, highest);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_machines),
        cmocka_unit_test(test_unknown_words),
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_here),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
