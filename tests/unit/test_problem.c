/* Every rule on descriptors and on the environment: its status, and a sentence with the name of the field,
 * what was given and what was expected. What lies on the allowed side of a limit is accepted. test_io.c is
 * about pointers. */
#include "flashback.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

#define TWO_TO(n) (INT64_C(1) << (n))

static fb_desc good(void) {
    fb_desc d;
    fb_desc_init(&d, sizeof d);
    d.batch = 2, d.heads_q = 4, d.heads_kv = 2;
    d.len_q = 20, d.len_k = 30;
    d.head_dim = 8, d.head_dim_v = 16;
    return d;
}

/* fb_supported and fb_plan_create give the same answer: this status, and a sentence with both pieces. */
static void refused_at(int line, const fb_desc *d, fb_status status, const char *given,
                       const char *expected) {
    for (int create = 0; create < 2; create++) {
        fb_plan *plan = (fb_plan *)(uintptr_t)line;
        fb_status got = create ? fb_plan_create(&plan, d) : fb_supported(d);
        if (got != status || !strstr(fb_last_error(), given) || !strstr(fb_last_error(), expected))
            fail_msg("line %d: %s, '%s', expected %s with '%s' and '%s'", line, fb_status_name(got),
                     fb_last_error(), fb_status_name(status), given, expected);
        if (create)
            assert_null(plan);
    }
}

static void accepted_at(int line, const fb_desc *d) {
    fb_plan *plan = NULL;
    if (fb_supported(d) != FB_OK || fb_plan_create(&plan, d) != FB_OK)
        fail_msg("line %d: refused: %s", line, fb_last_error());
    assert_string_equal(fb_last_error(), "");
    assert_non_null(plan);
    fb_plan_destroy(plan);
}

#define refused(...) refused_at(__LINE__, __VA_ARGS__)
#define accepted(d) accepted_at(__LINE__, d)

/* ---- The struct itself --------------------------------------------------------------------------------- */

static void test_struct(void **state) {
    (void)state;
    fb_desc d = good();
    accepted(&d);
    refused(NULL, FB_INVALID, "desc is NULL", "fb_desc_init");
    assert_int_equal(fb_plan_create(NULL, &d), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "plan is NULL"));
    d = good(), d.size = 0;
    refused(&d, FB_INVALID, "desc.size is 0", "expected sizeof(fb_desc)");
    d = good(), d.size = (uint32_t)offsetof(fb_desc, score_bytes_max);
    refused(&d, FB_INVALID, "desc.size is", "expected sizeof(fb_desc)");
    d = good(), d.size = 4097;
    refused(&d, FB_INVALID, "desc.size is 4097", "expected sizeof(fb_desc)");
}

static void test_enums(void **state) {
    (void)state;
    fb_desc d = good();
    d.flags = 1u << 16;
    refused(&d, FB_INVALID, "desc.flags is 0x10000", "bits 0x10000 are unknown");
    d = good(), d.dtype = (fb_dtype)4;
    refused(&d, FB_INVALID, "desc.dtype is 4", "expected FB_F32, FB_F16, FB_BF16 or FB_F64");
    d = good(), d.dtype = (fb_dtype)-1;
    refused(&d, FB_INVALID, "desc.dtype is -1", "FB_F32");
    d = good(), d.device = (fb_device)3;
    refused(&d, FB_INVALID, "desc.device is 3", "expected FB_CPU, FB_CUDA or FB_METAL");
    d = good(), d.route = (fb_route)5;
    refused(&d, FB_INVALID, "desc.route is 5", "FB_VECTOR, FB_UNFUSED or FB_REFERENCE");
    d = good(), d.index = -1;
    refused(&d, FB_INVALID, "desc.index is -1", "expected 0 or more");
    d = good(), d.index = 1;
    refused(&d, FB_NO_DEVICE, "desc.index is 1", "one device: 0");
    d = good(), d.threads = -2;
    refused(&d, FB_INVALID, "desc.threads is -2", "expected 0 (as OpenMP allows) or more");
    d = good(), d.tasks = -1;
    refused(&d, FB_INVALID, "desc.tasks is -1", "0 (the default) to 65536");
    d = good(), d.tasks = 65537;
    refused(&d, FB_INVALID, "desc.tasks is 65537", "65536");
    d = good(), d.tasks = 65536, d.threads = 3, d.dtype = FB_F64;
    accepted(&d);
}

/* A device that this library has is accepted; one that it lacks is named, with those it has. */
static void test_devices(void **state) {
    (void)state;
    char info[4096];
    fb_info(info, sizeof info);
    for (int device = FB_CPU; device <= FB_METAL; device++) {
        fb_desc d = good();
        d.device = (fb_device)device;
        char line[32];
        snprintf(line, sizeof line, "backend: %s\n", fb_device_name(d.device));
        if (!strstr(info, line))
            refused(&d, FB_NO_DEVICE, fb_device_name(d.device), "it has: cpu");
        else if (device == FB_CPU)
            accepted(&d);
    }
}

/* ---- Dimensions ---------------------------------------------------------------------------------------- */

static void test_dimension_range(void **state) {
    (void)state;
    const struct {
        const char *name;
        size_t offset;
    } dims[] = {{"desc.batch is ", offsetof(fb_desc, batch)},
                {"desc.heads_q is ", offsetof(fb_desc, heads_q)},
                {"desc.heads_kv is ", offsetof(fb_desc, heads_kv)},
                {"desc.len_q is ", offsetof(fb_desc, len_q)},
                {"desc.len_k is ", offsetof(fb_desc, len_k)},
                {"desc.head_dim is ", offsetof(fb_desc, head_dim)},
                {"desc.head_dim_v is ", offsetof(fb_desc, head_dim_v)},
                {"desc.total_q is ", offsetof(fb_desc, total_q)},
                {"desc.total_k is ", offsetof(fb_desc, total_k)}};
    const int64_t wrong[] = {-1, INT64_MIN, TWO_TO(40) + 1, INT64_MAX};
    for (size_t i = 0; i < sizeof dims / sizeof *dims; i++)
        for (int w = 0; w < 4; w++) {
            fb_desc d = good();
            char given[64];
            memcpy((char *)&d + dims[i].offset, &wrong[w], sizeof wrong[w]);
            snprintf(given, sizeof given, "%s%lld,", dims[i].name, (long long)wrong[w]);
            refused(&d, FB_INVALID, given, "expected 0 to ");
        }
}

static void test_dimensions(void **state) {
    (void)state;
    fb_desc d = good();
    d.head_dim = 577;
    refused(&d, FB_UNSUPPORTED, "desc.head_dim is 577", "every value from 0 to 576 is supported");
    d = good(), d.head_dim_v = 1000;
    refused(&d, FB_UNSUPPORTED, "desc.head_dim_v is 1000", "0 to 576");
    d = good(), d.head_dim = d.head_dim_v = 576;
    accepted(&d);
    d = good(), d.heads_q = 5;
    refused(&d, FB_INVALID, "desc.heads_q is 5 and heads_kv is 2", "must be a multiple of heads_kv");
    d = good(), d.heads_kv = 0;
    refused(&d, FB_INVALID, "desc.heads_q is 4 and heads_kv is 0", "multiple");
    d = good(), d.heads_q = 0;
    accepted(&d);
    d = good(), d.total_q = 7;
    refused(&d, FB_INVALID, "desc.total_q is 7 and total_k is 0", "FB_PACKED");
    d = good(), d.total_k = 7;
    refused(&d, FB_INVALID, "total_k is 7", "FB_PACKED");
    d = good(), d.flags = FB_PACKED, d.total_q = INT32_MAX + INT64_C(1);
    refused(&d, FB_INVALID, "desc.total_q is 2147483648", "0 to 2147483647");
    d = good(), d.flags = FB_PACKED | FB_LENGTHS, d.total_q = d.total_k = 40;
    refused(&d, FB_INVALID, "FB_PACKED and FB_LENGTHS", "cu_q and cu_k already give the lengths");
    d = good(), d.flags = FB_PACKED, d.total_q = d.total_k = 40;
    accepted(&d);
}

/* Products of dimensions that do not fit into 64 bits are found before anything is multiplied with them. */
static void test_overflow(void **state) {
    (void)state;
    fb_desc d = good();
    d.batch = TWO_TO(40), d.heads_q = d.heads_kv = TWO_TO(20);
    refused(&d, FB_INVALID, "overflow: desc.batch 1099511627776 x heads 1048576", "can be addressed");
    d = good(), d.len_q = TWO_TO(40), d.heads_q = TWO_TO(12), d.heads_kv = 1;
    refused(&d, FB_INVALID, "overflow: desc.batch", "length 1099511627776");
    d = good(), d.q = (fb_strides){1, INT64_MAX / 3, 8};
    refused(&d, FB_INVALID, "overflow: desc.q.head is", "for 4 entries");
    d = good(), d.mask_shape = (fb_shape){2, 4, 20, 30}, d.mask.row = INT64_MAX / 2, d.flags = FB_MASK;
    d.mask.batch = d.mask.head = 1;
    refused(&d, FB_INVALID, "overflow: desc.mask.row is", "for 20 entries");
    d = good(), d.len_q = d.len_k = TWO_TO(31), d.flags = FB_BIAS, d.bias_shape = (fb_shape){1, 1, 1, 1};
    accepted(&d);
    d.bias_shape.rows = d.bias_shape.cols = TWO_TO(31);
    refused(&d, FB_INVALID, "overflow: bias has more elements", "can be addressed");
    d = good(), d.len_q = d.len_k = TWO_TO(40), d.heads_q = d.heads_kv = 1, d.flags = FB_BLOCK_MASK;
    refused(&d, FB_INVALID, "overflow: block_mask", "can be addressed");
    /* The largest that the rules leave: its workspace is counted, or that is an overflow as well. */
    for (int route = FB_AUTO; route <= FB_REFERENCE; route++) {
        d = good(), d.batch = 1, d.heads_q = d.heads_kv = 1, d.head_dim = d.head_dim_v = 576;
        d.len_q = d.len_k = TWO_TO(40), d.threads = INT32_MAX, d.route = (fb_route)route;
        fb_plan *plan;
        const fb_status status = fb_supported(&d);
        assert_int_equal(fb_plan_create(&plan, &d), status);
        assert_true(status == FB_OK ? fb_plan_workspace(plan) > (size_t)TWO_TO(40) : *fb_last_error() != 0);
        fb_plan_destroy(plan);
    }
}

/* ---- Numbers ------------------------------------------------------------------------------------------- */

static void test_numbers(void **state) {
    (void)state;
    fb_desc d = good();
    d.scale = HUGE_VAL;
    refused(&d, FB_INVALID, "desc.scale is inf", "at most 1e30 in size, or NaN");
    d = good(), d.scale = -2e30;
    refused(&d, FB_INVALID, "desc.scale is -2e+30", "1e30");
    d = good(), d.head_dim = 0;
    refused(&d, FB_INVALID, "desc.scale is NaN", "head_dim is 0; give a scale");
    d.scale = 0;
    accepted(&d);
    d = good(), d.scale = -1e30;
    accepted(&d);
    d = good(), d.softcap = -1;
    refused(&d, FB_INVALID, "desc.softcap is -1", "expected 0 (none) or a positive number");
    d = good(), d.softcap = (double)NAN;
    refused(&d, FB_INVALID, "desc.softcap is ", "expected 0 (none) or a positive number");
    d = good(), d.softcap = 1e31;
    refused(&d, FB_INVALID, "desc.softcap is 1e+31", "up to 1e30");
    d = good(), d.softcap = 1e-31;
    refused(&d, FB_INVALID, "desc.softcap is 1e-31", "0 means none");
    d = good(), d.position_offset = TWO_TO(60) + 1;
    refused(&d, FB_INVALID, "desc.position_offset is 1152921504606846977", "at most 2^60");
    d = good(), d.position_offset = INT64_MIN;
    refused(&d, FB_INVALID, "desc.position_offset is -9223372036854775808", "2^60");
    d = good(), d.position_offset = -TWO_TO(60);
    accepted(&d);
    d = good(), d.window.left = -1;
    refused(&d, FB_INVALID, "desc.window.left is -1", "FB_UNBOUNDED");
    d = good(), d.window.right = INT64_MIN;
    refused(&d, FB_INVALID, "desc.window.right is -9223372036854775808", "expected 0 or more");
    d = good(), d.window = fb_window_band(0, FB_UNBOUNDED - 1);
    accepted(&d);
    d = good(), d.fused_min_len = -1;
    refused(&d, FB_INVALID, "desc.fused_min_len is", "expected 0 (environment or default) or more");
    d = good(), d.score_bytes_max = -1;
    refused(&d, FB_INVALID, "desc.score_bytes_max is", "0 (environment or default) or more");
}

/* ---- Strides ------------------------------------------------------------------------------------------- */

static void test_strides(void **state) {
    (void)state;
    fb_desc d = good();
    d.q = (fb_strides){0, 160, 8};
    refused(&d, FB_INVALID, "desc.q.batch is 0", "a positive stride, or FB_BROADCAST for 0");
    d = good(), d.v = (fb_strides){960, -480, 16};
    refused(&d, FB_INVALID, "desc.v.head is -480", "expected a positive stride");
    d = good(), d.dout = (fb_strides){1280, 320, INT64_MIN + 1};
    refused(&d, FB_INVALID, "desc.dout.row is -9223372036854775807", "FB_BROADCAST");
    d = good(), d.out = (fb_strides){FB_BROADCAST, 320, 16};
    refused(&d, FB_INVALID, "desc.out.batch is", "an output can't repeat");
    d = good(), d.dq = (fb_strides){640, 160, 7};
    refused(&d, FB_INVALID, "desc.dq.row is 7, but 8 elements lie inside", "overlap itself");
    d = good(), d.dk = (fb_strides){480, 239, 8};
    refused(&d, FB_INVALID, "desc.dk.head is 239, but 240 elements lie inside", "overlap itself");
    d = good(), d.dv = (fb_strides){32, 16, 31};
    refused(&d, FB_INVALID, "desc.dv.row is 31, but 32 elements lie inside", "overlap itself");
    d = good(), d.flags = FB_BIAS | FB_DBIAS, d.bias_shape = (fb_shape){1, 1, 20, 30}, d.dbias.row = 29;
    refused(&d, FB_INVALID, "desc.dbias.row is 29, but 30 elements lie inside", "overlap itself");
    d = good(), d.q = d.k = d.v = d.dout = (fb_strides){FB_BROADCAST, FB_BROADCAST, FB_BROADCAST};
    accepted(&d);
    d = good(), d.dv = (fb_strides){64, 32, 128}, d.batch = 2; /* [L,B,H,D] */
    accepted(&d);
    d = good(), d.batch = 1, d.out = (fb_strides){-5, 320, 16}; /* dimensions of size 1 have no stride */
    accepted(&d);
    d = good(), d.len_q = 0, d.out = (fb_strides){-5, -5, -5};
    accepted(&d);
}

/* ---- Options ------------------------------------------------------------------------------------------- */

static void test_flags(void **state) {
    (void)state;
    fb_desc d = good();
    d.flags = FB_DBIAS;
    refused(&d, FB_INVALID, "desc.flags has FB_DBIAS without FB_BIAS",
            "add the second flag or drop the first");
    d.flags = FB_DSINKS;
    refused(&d, FB_INVALID, "desc.flags has FB_DSINKS without FB_SINKS", "add the second flag");
    const uint32_t backward[] = {
        FB_DBIAS | FB_BIAS, FB_DSINKS | FB_SINKS, FB_DLSE, FB_ACCUMULATE, FB_NO_DQ, FB_NO_DK, FB_NO_DV};
    for (size_t i = 0; i < sizeof backward / sizeof *backward; i++) {
        d.flags = FB_FORWARD_ONLY | backward[i];
        refused(&d, FB_INVALID, "desc.flags has FB_FORWARD_ONLY and 0x", "about the backward pass");
        d.flags = backward[i];
        accepted(&d);
    }
}

static void test_shapes(void **state) {
    (void)state;
    const fb_shape wrong[] = {{3, 4, 20, 30}, {2, 2, 20, 30}, {2, 4, 30, 20}, {2, 4, 20, 0}, {1, 1, 1, -1}};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        fb_desc d = good();
        d.flags = FB_BIAS, d.bias_shape = wrong[i];
        refused(&d, FB_INVALID, "desc.bias_shape is [", "expected [2|1,4|1,20|1,30|1]");
        d = good(), d.flags = FB_MASK, d.mask_shape = wrong[i];
        refused(&d, FB_INVALID, "desc.mask_shape is [", "expected [2|1,4|1,20|1,30|1]");
        d.flags = 0; /* without the flag the field is not looked at */
        accepted(&d);
    }
}

static void test_block_mask(void **state) {
    (void)state;
    const int64_t wrong[] = {0, -16, 8, 24, TWO_TO(40) + 16, INT64_MIN};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char given[64];
        fb_desc d = good();
        d.flags = FB_BLOCK_MASK, d.block_q = wrong[i];
        snprintf(given, sizeof given, "desc.block_q is %lld", (long long)wrong[i]);
        refused(&d, FB_INVALID, given, "expected a positive multiple of 16");
        d = good(), d.flags = FB_BLOCK_MASK, d.block_k = wrong[i];
        snprintf(given, sizeof given, "desc.block_k is %lld", (long long)wrong[i]);
        refused(&d, FB_INVALID, given, "expected a positive multiple of 16");
    }
    fb_desc d = good();
    d.flags = FB_BLOCK_MASK, d.block_batch = 3;
    refused(&d, FB_INVALID, "desc.block_batch is 3 and block_heads is 1", "expected 2|1 and 4|1");
    d.block_batch = 2, d.block_heads = 2;
    refused(&d, FB_INVALID, "block_heads is 2", "expected 2|1 and 4|1");
    d.block_heads = 4;
    accepted(&d);
}

/* ---- Routes and the environment ------------------------------------------------------------------------ */

static void test_forced_routes(void **state) {
    (void)state;
    fb_desc d = good();
    d.route = FB_VECTOR, d.len_q = 9;
    refused(&d, FB_UNSUPPORTED, "route vector, asked for by desc.route",
            "len_q is 9, vector takes at most 8");
    d.len_q = 8;
    accepted(&d);
    /* S and dP of 2 x 4 x 64 x 30 floats. */
    d = good(), d.len_q = 64, d.route = FB_UNFUSED, d.score_bytes_max = 122879;
    refused(&d, FB_UNSUPPORTED, "(122880 bytes), more than the 122879 allowed by score_bytes_max",
            "take fused");
    d.score_bytes_max = 122880;
    accepted(&d);
}

static void with_environment(const char *name, const char *value) {
    if (value)
        setenv(name, value, 1);
    else
        unsetenv(name);
}

/* What explain says about the route. */
static const char *route_line(const fb_desc *d) {
    static char text[4096];
    fb_plan *plan;
    assert_int_equal(fb_plan_create(&plan, d), FB_OK);
    fb_plan_explain(plan, text, sizeof text);
    fb_plan_destroy(plan);
    char *line = strstr(text, "route: ");
    assert_non_null(line);
    line[strcspn(line, "\n")] = 0;
    return line;
}

static void test_environment_route(void **state) {
    (void)state;
    const char *const name = "FLASHBACK_ROUTE";
    fb_desc d = good();
    const char *const wrong[] = {"fast", "FUSED", " fused", "fused ", "2"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
        char given[64];
        snprintf(given, sizeof given, "FLASHBACK_ROUTE is '%s'", wrong[i]);
        with_environment(name, wrong[i]);
        refused(&d, FB_INVALID, given, "auto | fused | vector | unfused | reference");
    }
    with_environment(name, "");
    assert_string_equal(route_line(&d), "route: fused, by default");
    with_environment(name, "reference");
    assert_string_equal(route_line(&d), "route: reference, by FLASHBACK_ROUTE");
    d.route = FB_UNFUSED;
    assert_string_equal(route_line(&d), "route: unfused, by desc.route");
    d.route = FB_AUTO;
    with_environment(name, "vector");
    refused(&d, FB_UNSUPPORTED, "route vector, asked for by FLASHBACK_ROUTE", "len_q is 20");
    with_environment(name, NULL);
}

static void test_environment_numbers(void **state) {
    (void)state;
    const char *const names[] = {"FLASHBACK_FUSED_MIN_LEN", "FLASHBACK_SCORE_BYTES_MAX"};
    const char *const wrong[] = {
        "0", "-1", "many", "12 ", " 12", "+12", "1e9", "0x10", "99999999999999999999"};
    fb_desc d = good();
    for (int n = 0; n < 2; n++) {
        for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++) {
            char given[96];
            snprintf(given, sizeof given, "%s is '%s'", names[n], wrong[i]);
            with_environment(names[n], wrong[i]);
            refused(&d, FB_INVALID, given, "expected a positive whole number");
        }
        with_environment(names[n], NULL);
    }
    d.len_q = 64;
    with_environment("FLASHBACK_FUSED_MIN_LEN", "31"); /* len_k is 30 */
    assert_string_equal(route_line(&d), "route: unfused, by default");
    d.fused_min_len = 30;
    assert_string_equal(route_line(&d), "route: fused, by default");
    d.fused_min_len = 0;
    with_environment("FLASHBACK_SCORE_BYTES_MAX", "122879");
    assert_string_equal(route_line(&d), "route: fused, by default");
    d.score_bytes_max = 122880;
    assert_string_equal(route_line(&d), "route: unfused, by default");
    with_environment("FLASHBACK_FUSED_MIN_LEN", NULL);
    with_environment("FLASHBACK_SCORE_BYTES_MAX", NULL);
}

static void test_environment_isa(void **state) {
    (void)state;
    const char *before = getenv("FLASHBACK_ISA");
    char kept[64];
    snprintf(kept, sizeof kept, "%s", before ? before : "");
    fb_desc d = good();
    with_environment("FLASHBACK_ISA", "avx3");
    refused(&d, FB_INVALID, "FLASHBACK_ISA is 'avx3'",
            "scalar | baseline | bfdot | avx2 | avx512 | "
            "avx512bf16 | amx_model | amx");
    with_environment("FLASHBACK_ISA", "scalar");
    accepted(&d);
    with_environment("FLASHBACK_ISA", before ? kept : NULL);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_struct),
        cmocka_unit_test(test_enums),
        cmocka_unit_test(test_devices),
        cmocka_unit_test(test_dimension_range),
        cmocka_unit_test(test_dimensions),
        cmocka_unit_test(test_overflow),
        cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_strides),
        cmocka_unit_test(test_flags),
        cmocka_unit_test(test_shapes),
        cmocka_unit_test(test_block_mask),
        cmocka_unit_test(test_forced_routes),
        cmocka_unit_test(test_environment_route),
        cmocka_unit_test(test_environment_numbers),
        cmocka_unit_test(test_environment_isa),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
