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
#define AVX512BF16 AVX512, .avx512bf16 = true
#define EVERYTHING AVX512BF16, .amx = true, .fast_dot = true, .neon_bf16 = true

static const struct {
    const char *name;
    fb__features features;
    const char *best; /* of all instruction sets */
} machines[] = {
    {"Sapphire Rapids", {AVX512BF16, .amx = true}, "amx"},
    {"Granite Rapids", {AVX512BF16, .amx = true}, "amx"},
    {"Sapphire Rapids, tiles not permitted", {AVX512BF16}, "avx512"},
    {"Cooper Lake", {AVX512BF16}, "avx512"},
    {"Skylake-X", {AVX512}, "avx512"},
    {"Zen 4", {AVX512BF16, .fast_dot = true}, "avx512bf16"},
    {"Zen 5", {AVX512BF16, .fast_dot = true}, "avx512bf16"},
    {"Zen 3", {AVX2}, "avx2"},
    {"Haswell", {AVX2}, "avx2"},
    {"Alder Lake", {AVX2}, "avx2"},
    {"Sandy Bridge", {.avx2 = false}, "baseline"},
    {"Apple M1", {.avx2 = false}, "baseline"},
    {"Apple M2", {.neon_bf16 = true}, "bfdot"},
    {"Graviton 2", {.avx2 = false}, "baseline"},
    {"Graviton 3", {.neon_bf16 = true}, "bfdot"},
    {"Graviton 4", {.neon_bf16 = true}, "bfdot"},
    /* Not whole: each word needs all of its parts. */
    {"Knights Landing", {AVX2, .avx512f = true}, "avx2"},
    {"AVX-512 without VL", {AVX2, .avx512f = true, .avx512bw = true, .avx512dq = true}, "avx2"},
    {"AVX-512 without BW", {AVX2, .avx512f = true, .avx512dq = true, .avx512vl = true}, "avx2"},
    {"AVX-512 without DQ", {AVX2, .avx512f = true, .avx512bw = true, .avx512vl = true}, "avx2"},
    {"tiles without AVX512-BF16", {AVX512, .amx = true}, "avx512"},
    {"BF16 without VL",
     {AVX2, .avx512f = true, .avx512bw = true, .avx512dq = true, .avx512bf16 = true},
     "avx2"},
    {"AVX-512 without F", {AVX2, .avx512bw = true, .avx512dq = true, .avx512vl = true}, "avx2"},
    {"AVX2 without FMA", {.avx2 = true, .f16c = true}, "baseline"},
    {"AVX2 without F16C", {.avx2 = true, .fma = true}, "baseline"},
    {"AVX2 hidden", {.fma = true, .f16c = true}, "baseline"},
    {"all but FMA",
     {.avx2 = true, .f16c = true, .avx512f = true, .avx512bw = true, .avx512dq = true, .avx512vl = true},
     "baseline"},
};

/* Rising. */
static const char *const words[] = {"scalar", "baseline",   "bfdot",     "avx2",
                                    "avx512", "avx512bf16", "amx_model", "amx"};
enum { WORDS = sizeof words / sizeof *words };

/* Is it in the list of what `features` and this build have? */
static bool listed(const fb__features *features, const char *isa) {
    char list[128];
    fb__text text = {list, sizeof list, 0};
    fb__cpu_rows_list(features, &text);
    for (char *rest, *word = strtok_r(list, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        if (strcmp(word, isa) == 0)
            return true;
    return false;
}

/* Rows that are taken only by their name: the model always, vdpbf16ps where it is slow. */
static bool worth(const fb__features *features, const char *isa) {
    return strcmp(isa, "amx_model") != 0 && (strcmp(isa, "avx512bf16") != 0 || features->fast_dot);
}

/* The best that is not above `most`, that there is, and that is worth it or asked for. */
static const char *expected(const fb__features *features, int most, const char *cap) {
    while (!listed(features, words[most]) ||
           (!worth(features, words[most]) && !(cap && strcmp(cap, words[most]) == 0)))
        most--;
    return words[most];
}

static void test_machines(void **state) {
    (void)state;
    const fb__features all = {EVERYTHING};
    for (size_t m = 0; m < sizeof machines / sizeof *machines; m++)
        for (int cap = -1; cap < WORDS; cap++) {
            const fb__cpu_row *row = NULL;
            const fb__features *features = &machines[m].features;
            const char *word = cap < 0 ? NULL : words[cap];
            const char *want = expected(features, cap < 0 ? WORDS - 1 : cap, word);
            assert_int_equal(fb__cpu_row_choose(features, word, &row), FB_OK);
            if (strcmp(row->isa, want) != 0)
                fail_msg("%s, FLASHBACK_ISA %s: %s, not %s", machines[m].name, word ? word : "unset",
                         row->isa, want);
            /* Every row that this machine has, the build may lack. */
            if (cap < 0 && listed(&all, machines[m].best) && strcmp(row->isa, machines[m].best) != 0)
                fail_msg("%s: %s, not %s", machines[m].name, row->isa, machines[m].best);
            assert_true(row->present(features));
        }
}

static void test_unknown_words(void **state) {
    (void)state;
    const char *const wrong[] = {"",     "AVX2", "avx",  "avx10", "avx512 ",  "avx512_bf16",
                                 "sse2", "neon", "auto", "0",     "amx-model"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        for (size_t m = 0; m < sizeof machines / sizeof *machines; m++) {
            const fb__cpu_row *row = NULL;
            char given[64];
            snprintf(given, sizeof given, "FLASHBACK_ISA is '%s'", wrong[i]);
            assert_int_equal(fb__cpu_row_choose(&machines[m].features, wrong[i], &row), FB_INVALID);
            assert_null(row);
            assert_non_null(strstr(fb__error_text(), given));
            assert_non_null(strstr(fb__error_text(),
                                   "scalar | baseline | bfdot | avx2 | avx512 | avx512bf16 | "
                                   "amx_model | amx"));
        }
}

/* What holds for every row, and the list that fb_info prints. */
static void test_rows(void **state) {
    (void)state;
    const fb__features all = {EVERYTHING};
    int lanes = 1 << 20;
    for (int cap = WORDS - 1; cap >= 0; cap--) {
        const fb__cpu_row *row;
        if (!listed(&all, words[cap]))
            continue;
        assert_int_equal(fb__cpu_row_choose(&all, words[cap], &row), FB_OK);
        assert_string_equal(row->isa, words[cap]);
        assert_int_equal(row->f32->size, sizeof(float));
        assert_int_equal(row->f64->size, sizeof(double));
        assert_string_equal(row->f32->isa, row->f64->isa);
        assert_int_equal(row->f32->lanes * row->f32->size,
                         row->f64->lanes * (row->isa[0] == 's' ? 4 : row->f64->size));
        assert_true(row->f32->lanes <= lanes && row->f32->lanes <= 32 && 32 % row->f32->lanes == 0);
        assert_true(*row->measured);
        lanes = row->f32->lanes;
        if (!row->pairs) {
            assert_string_equal(row->f32->isa, row->isa);
            continue;
        }
        /* Panels of 32 lanes are whole, and lanes are whole vectors of f32 as well. */
        assert_string_equal(row->pairs->isa, row->isa);
        assert_int_equal(32 % row->pairs->lanes, 0);
        assert_int_equal(row->pairs->lanes % row->f32->lanes, 0);
        assert_int_equal(row->pairs->lanes % row->pairs->step, 0);
        assert_int_equal(row->pairs->step % 2, 0);
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
    assert_int_equal(fb__cpu_row_choose(&here, "amx", &highest), FB_OK);
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
