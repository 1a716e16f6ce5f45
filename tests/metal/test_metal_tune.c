/* What is true of all rows of Metal's table of tiles, what they need beside ml-explore/mlx#3241, and that
 * every head dim has one; the sizes of what the host hands to kernels. */
#include "src/metal/abi.h"
#include "src/metal/tune.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

enum { LIMIT = 32768, OLDEST = 7, NEWEST = 9 };

static const fb__metal_kernel tiled[] = {FB__METAL_FORWARD, FB__METAL_DQ, FB__METAL_DKDV, FB__METAL_DBIAS};

static bool choose(fb__metal_kernel kernel, fb_dtype type, int64_t d, int64_t dv, bool stack, int family,
                   fb__metal_spec *spec) {
    const fb__metal_need need = {.type = type,
                                 .head_dim = d,
                                 .head_dim_v = dv,
                                 .stack = stack,
                                 .family = family,
                                 .shared_bytes = LIMIT};
    return fb__metal_tune(kernel, &need, spec);
}

/* What the texts of the kernels take for granted. */
static void expect_sound(fb__metal_kernel kernel, const fb__metal_spec *s) {
    assert_int_equal(s->BM, s->WM * s->MI * 8);
    assert_int_equal(s->THREADS, 32 * s->WM * s->WN);
    assert_in_range(s->THREADS, 32, 1024);
    assert_true(s->BN % 8 == 0 && s->BN >= 8 && s->BN <= 128); /* 32 bits for a row's cells of a lane */
    assert_int_equal(s->D % (8 * s->WN), 0);
    assert_int_equal(s->DV % (8 * s->WN), 0);
    assert_true(s->BUFFERS == 1 || s->BUFFERS == 2);
    assert_true(s->shared_bytes % 16 == 0 && s->shared_bytes > 0 && s->shared_bytes <= LIMIT);
    assert_non_null(s->measured);
    if (kernel == FB__METAL_DBIAS)
        assert_int_equal(s->WN, 1); /* its slabs are another matter */
    else
        assert_true(s->D / s->WN <= 144 && s->DV / s->WN <= 144); /* columns in a simdgroup's registers */
}

static void test_rows(void **state) {
    (void)state;
    fb__metal_kernel kernel;
    fb__metal_spec spec;
    int n = 0, of[FB__METAL_KERNEL_COUNT] = {0};
    for (; fb__metal_tune_row(n, FB_F16, 15, &kernel, &spec); n++) {
        if (kernel != FB__METAL_DBIAS && kernel <= FB__METAL_DBIAS)
            assert_true(spec.D >= 64);
        if (kernel <= FB__METAL_DBIAS)
            expect_sound(kernel, &spec);
        of[kernel]++;
    }
    assert_true(n > 50);
    for (size_t k = 0; k < sizeof tiled / sizeof *tiled; k++)
        assert_true(of[tiled[k]] >= 2);
    assert_false(fb__metal_tune_row(n + 1, FB_F16, 0, &kernel, &spec));
}

static void test_every_head_dim(void **state) {
    (void)state;
    static const fb_dtype types[] = {FB_F32, FB_F16, FB_BF16};
    for (size_t k = 0; k < sizeof tiled / sizeof *tiled; k++)
        for (int type = 0; type < 3; type++)
            for (int stack = 0; stack < 2; stack++)
                for (int family = OLDEST; family <= NEWEST; family++)
                    for (int d = 0; d <= 576; d++) {
                        fb__metal_spec s;
                        const int dv = d % 5 ? d : 576 - d;
                        assert_true(choose(tiled[k], types[type], d, dv, stack, family, &s));
                        expect_sound(tiled[k], &s);
                        assert_int_equal(s.TYPE, types[type]);
                        assert_int_equal(s.STACK, stack && tiled[k] != FB__METAL_DBIAS);
                        assert_true(s.D >= d && s.D < d + 8 * s.WN + (d == 0));
                        assert_true(s.DV >= dv && s.DV < dv + 8 * s.WN + (dv == 0));
                    }
}

/* Threadgroup memory of ml-explore/mlx#3241 for f16, measured: D, forward, dQ with 16 and with 32 keys,
 * dK/dV. */
static void test_threadgroup_memory_beside_the_original(void **state) {
    (void)state;
    static const struct {
        int d, forward, dq_16, dq_32, dkdv;
    } original[] = {
        {64, 9728, 14336, 14336, 14336}, {96, 14336, 17920, 17920, 17920}, {128, 14848, 23552, 27648, 14848}};
    for (size_t n = 0; n < sizeof original / sizeof *original; n++)
        for (int family = OLDEST; family <= NEWEST; family++) {
            fb__metal_spec forward, dq, dkdv;
            const int d = original[n].d;
            assert_true(choose(FB__METAL_FORWARD, FB_F16, d, d, false, family, &forward));
            assert_true(choose(FB__METAL_DQ, FB_F16, d, d, false, family, &dq));
            assert_true(choose(FB__METAL_DKDV, FB_BF16, d, d, false, family, &dkdv));
            assert_true(forward.shared_bytes <= original[n].forward);
            assert_true(dq.shared_bytes <= (dq.BN == 32 ? original[n].dq_32 : original[n].dq_16));
            assert_true(dkdv.shared_bytes <= original[n].dkdv);
            assert_true(dkdv.shared_bytes <= 13 * 1024 && forward.shared_bytes <= 13 * 1024);
        }
}

/* Newer GPUs may have rows of their own. */
static void test_families(void **state) {
    (void)state;
    fb__metal_spec old, new;
    assert_true(choose(FB__METAL_DQ, FB_F16, 128, 128, false, OLDEST, &old));
    assert_true(choose(FB__METAL_DQ, FB_F16, 128, 128, false, NEWEST, &new));
    assert_int_equal(old.BN, 16);
    assert_int_equal(new.BN, 32);
}

static void test_what_does_not_fit(void **state) {
    (void)state;
    fb__metal_spec s;
    fb__metal_need need = {
        .type = FB_F32, .head_dim = 512, .head_dim_v = 512, .family = OLDEST, .shared_bytes = 8192};
    assert_false(fb__metal_tune(FB__METAL_DKDV, &need, &s));
    need.shared_bytes = LIMIT;
    assert_true(fb__metal_tune(FB__METAL_DKDV, &need, &s));
    assert_true(s.shared_bytes > 8192);
    need.head_dim = 577;
    assert_false(fb__metal_tune(FB__METAL_DKDV, &need, &s));
    /* Each row once, then none. */
    fb__metal_spec first, second;
    need = (fb__metal_need){
        .type = FB_F16, .head_dim = 64, .head_dim_v = 64, .family = OLDEST, .shared_bytes = LIMIT};
    assert_true(fb__metal_tune(FB__METAL_FORWARD, &need, &first));
    need.skip = 1;
    assert_true(fb__metal_tune(FB__METAL_FORWARD, &need, &second));
    assert_true(memcmp(&first, &second, sizeof(int) * FB__METAL_SPEC_COUNT) != 0);
    need.skip = 100;
    assert_false(fb__metal_tune(FB__METAL_FORWARD, &need, &second));
}

/* All head dims and options share the code of kernels without tiles. */
static void test_rows_kernel(void **state) {
    (void)state;
    fb__metal_spec one, other;
    fb__metal_need need = {
        .type = FB_BF16, .head_dim = 40, .head_dim_v = 80, .family = OLDEST, .shared_bytes = LIMIT};
    assert_true(fb__metal_tune(FB__METAL_ROWS, &need, &one));
    need.head_dim = 512, need.options = 15;
    assert_true(fb__metal_tune(FB__METAL_ROWS, &need, &other));
    assert_memory_equal(&one, &other, sizeof one);
    assert_true(one.shared_bytes >= 64 * 4); /* fb_layout */
    need.skip = 1;
    assert_false(fb__metal_tune(FB__METAL_ROWS, &need, &one));
}

static void test_defines(void **state) {
    (void)state;
    fb__metal_spec s;
    fb__define defines[FB__METAL_SPEC_COUNT];
    assert_true(choose(FB__METAL_FORWARD, FB_F16, 72, 80, false, OLDEST, &s));
    fb__metal_defines(&s, defines);
    assert_string_equal(defines[FB__METAL_SPEC_D].name, "FB_D");
    assert_int_equal(defines[FB__METAL_SPEC_D].value, 72);
    assert_string_equal(defines[FB__METAL_SPEC_DV].name, "FB_DV");
    assert_int_equal(defines[FB__METAL_SPEC_DV].value, 80);
    assert_int_equal(defines[FB__METAL_SPEC_THREADS].value, s.THREADS);
    assert_string_equal(fb__metal_file(FB__METAL_DKDV), "dkdv.metal");
}

/* Limits of setBytes and of a kernel's arguments; a bit for each tensor. */
static void test_abi(void **state) {
    (void)state;
    assert_true(sizeof(fb__metal_args) <= 4096 && sizeof(fb__metal_args) % 8 == 0);
    assert_int_equal(offsetof(fb__metal_args, partial_columns) + 4,
                     sizeof(fb__metal_args)); /* no gap at the end */
    assert_true(FB_AT_COUNT <= 31);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_every_head_dim),
        cmocka_unit_test(test_threadgroup_memory_beside_the_original),
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_what_does_not_fit),
        cmocka_unit_test(test_rows_kernel),
        cmocka_unit_test(test_defines),
        cmocka_unit_test(test_abi),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
