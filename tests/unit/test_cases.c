/* The list of cases: names are unique and say everything, filters filter, and the list holds what it must. */
#include "harness/harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

static fbh_case *list(const char *filter, size_t *count) {
    char error[512] = "";
    fbh_case *cases = fbh_case_list(filter, count, error, sizeof error);
    if (!cases)
        fail_msg("%s", error);
    return cases;
}

static int by_name(const void *a, const void *b) {
    return strcmp(((const fbh_case *)a)->name, ((const fbh_case *)b)->name);
}

static void test_names(void **state) {
    (void)state;
    size_t count;
    fbh_case *cases = list(NULL, &count);
    assert_true(count > 2000);
    for (size_t n = 0; n < count; n++) {
        fbh_case again;
        char error[512];
        assert_true(strlen(cases[n].name) < FBH_NAME_SIZE - 1); /* nothing was cut off */
        if (!fbh_case_parse(&again, cases[n].name, error, sizeof error))
            fail_msg("%s", error);
        assert_memory_equal(&again, &cases[n], sizeof again);
    }
    qsort(cases, count, sizeof *cases, by_name);
    for (size_t n = 1; n < count; n++)
        assert_string_not_equal(cases[n - 1].name, cases[n].name);
    free(cases);
}

static void test_words(void **state) {
    (void)state;
    fbh_case c;
    char error[512];
    assert_true(
        fbh_case_parse(&c, "odd.softcap0.5.mask1h1k.q5k7.bf16.d24v8.left3.b2h6k3.block16x32h.lensk.scale-1e4",
                       error, sizeof error));
    assert_string_equal(c.name,
                        "bf16.b2h6k3.q5k7.d24v8.left3.scale-10000.softcap0.5.mask1h1k.block16x32h.lensk.odd");
    assert_int_equal(c.desc.dtype, FB_BF16);
    assert_int_equal(c.desc.heads_kv, 3);
    assert_int_equal(c.desc.head_dim_v, 8);
    assert_int_equal(c.desc.window.left, 3);
    assert_true(c.desc.window.right == FB_UNBOUNDED);
    assert_true(c.desc.scale == -1e4);
    assert_true(c.desc.softcap == 0.5);
    assert_int_equal(c.desc.mask_shape.batch, 1);
    assert_int_equal(c.desc.mask_shape.heads, 6);
    assert_int_equal(c.desc.mask_shape.rows, 1);
    assert_int_equal(c.desc.mask_shape.cols, 7);
    assert_int_equal(c.desc.block_k, 32);
    assert_int_equal(c.desc.block_batch, 1);
    assert_int_equal(c.desc.block_heads, 6);
    assert_int_equal(c.desc.flags, FB_MASK | FB_BLOCK_MASK | FB_LENGTHS);
    assert_int_equal(c.layout, FBH_ODD);
}

/* Each is refused, with its word in the sentence. */
static void test_wrong_names(void **state) {
    (void)state;
    static const struct {
        const char *name, *word;
    } row[] = {
        {"f32.b1h1k1.q2k2.d2.casual", "casual"},
        {"f32.b1h1k1.q2k2.d2x", "d2x"},
        {"f32.left2.left3", "left3"},
        {"f32.causal.right1", "right1"},
        {"f32.softcap1.softcap2", "softcap2"},
        {"f32.odd.padded", "padded"},
        {"f32.biasbhkq", "biasbhkq"},
        {"f32.block16", "block16"},
        {"f32.dbias", "dbias"},
        {"f32.dsinks", "sinks"},
        {"f32.packed.lensq", "packed"},
        {"f32.nolse", "nolse"},
        {"f32.b1h1k1.q2k3.d2.qkv", "qkv"},
        {"f32.fwd.dlse", "fwd"},
    };
    for (size_t n = 0; n < sizeof row / sizeof *row; n++) {
        fbh_case c;
        char error[512] = "";
        if (fbh_case_parse(&c, row[n].name, error, sizeof error))
            fail_msg("%s was taken", row[n].name);
        if (!strstr(error, row[n].word))
            fail_msg("'%s' does not name %s", error, row[n].word);
    }
}

static void test_filter(void **state) {
    (void)state;
    size_t all, some, none;
    char error[512] = "";
    free(list(NULL, &all));
    fbh_case *cases = list("^bf16\\..*\\.causal", &some);
    assert_true(some > 0 && some < all);
    for (size_t n = 0; n < some; n++)
        assert_true(cases[n].desc.dtype == FB_BF16 && cases[n].desc.window.right == 0);
    free(cases);
    free(list("no such case", &none));
    assert_int_equal(none, 0);
    assert_null(fbh_case_list("(", &none, error, sizeof error));
    assert_non_null(strstr(error, "'('"));
}

/* Every flag, dtype and layout, every query length of the vector route, and heads that divide in every way.
 */
static void test_coverage(void **state) {
    (void)state;
    size_t count;
    uint32_t flags = 0;
    unsigned dtypes = 0, layouts = 0, lengths = 0, groups = 0;
    fbh_case *cases = list(NULL, &count);
    for (size_t n = 0; n < count; n++) {
        const fb_desc *d = &cases[n].desc;
        flags |= d->flags;
        dtypes |= 1u << d->dtype;
        layouts |= 1u << cases[n].layout;
        if (d->len_q <= 8)
            lengths |= 1u << d->len_q;
        if (d->heads_kv && d->heads_q / d->heads_kv <= 16)
            groups |= 1u << d->heads_q / d->heads_kv;
    }
    assert_int_equal(flags, (FB_NO_DV << 1) - 1);
    assert_int_equal(dtypes, 0xF);
    assert_int_equal(layouts, 0x3F);
    assert_int_equal(lengths, 0x1FF);
    assert_true((groups & 0x101AA) == 0x101AA); /* 1, 3, 5, 7, 8 and 16 to one */
    free(cases);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_names),  cmocka_unit_test(test_words),    cmocka_unit_test(test_wrong_names),
        cmocka_unit_test(test_filter), cmocka_unit_test(test_coverage),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
