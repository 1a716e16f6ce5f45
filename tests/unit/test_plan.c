/* Plans from outside: what explain and info say, sizes of structs that grow, names, the version, memory. */
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

static fb_desc good(void) {
    fb_desc d;
    fb_desc_init(&d, sizeof d);
    d.batch = 2, d.heads_q = 4, d.heads_kv = 2;
    d.len_q = 200, d.len_k = 300;
    d.head_dim = 64, d.head_dim_v = 32;
    return d;
}

static fb_plan *plan_of(const fb_desc *d) {
    fb_plan *plan;
    if (fb_plan_create(&plan, d) != FB_OK)
        fail_msg("%s", fb_last_error());
    return plan;
}

static void assert_says(const fb_desc *d, const char *const pieces[]) {
    char text[8192];
    fb_plan *plan = plan_of(d);
    fb_plan_explain(plan, text, sizeof text);
    for (int i = 0; pieces[i]; i++)
        if (!strstr(text, pieces[i]))
            fail_msg("explain does not say '%s':\n%s", pieces[i], text);
    fb_plan_destroy(plan);
}

/* ---- Explain and info ---------------------------------------------------------------------------------- */

/* Each route is named once as taken or passed over, with the reason. */
static void test_explain_routes(void **state) {
    (void)state;
    fb_desc d = good();
    assert_says(&d,
                (const char *[]){"problem: f32, B=2 Hq=4 Hkv=2 Lq=200 Lk=300 D=64 Dv=32, scale 0.125\n",
                                 "device: cpu 0\n", "route: fused, by default\n", "  fused: taken",
                                 "  vector: passed over, can't run: len_q is 200, vector takes at most 8\n",
                                 "  unfused: passed over", "  reference: passed over", "kernels: cpu ",
                                 "tiles: 64 queries x 64 keys", "threads: forward ", "workspace: ", NULL});
    d.route = FB_UNFUSED;
    assert_says(&d, (const char *[]){"route: unfused, by desc.route\n", "  unfused: taken",
                                     "  fused: passed over, desc.route asks for unfused\n", NULL});
    d.route = FB_REFERENCE;
    assert_says(&d, (const char *[]){"  reference: taken", "kernels: cpu/ref.c in double precision", NULL});
    d.route = FB_AUTO, d.len_q = 8, d.dtype = FB_BF16;
    setenv("FLASHBACK_ISA", "baseline", 1);
    assert_says(&d, (const char *[]){"problem: bf16", "route: vector, by default\n", "  vector: taken",
                                     "kernels: cpu baseline, f32 arithmetic", "bf16 through f32",
                                     "heads of a group side by side", NULL});
    char info[4096];
    fb_info(info, sizeof info);
    *strstr(info, "FLASHBACK_") = 0; /* the variables, which name every set */
    setenv("FLASHBACK_ISA", "amx_model", 1);
    if (strstr(info, "amx_model "))
        assert_says(&d, (const char *[]){"kernels: cpu amx_model, bf16 products summed in f32",
                                         "P and dS are rounded to bf16 once", NULL});
    d.scale = 1e30; /* more than Q in bf16 can hold with digits to spare */
    assert_says(&d, (const char *[]){"f32 arithmetic", "bf16 through f32", NULL});
    unsetenv("FLASHBACK_ISA");
    d = good(), d.fused_min_len = 301, d.score_bytes_max = 100, d.len_q = 256;
    assert_says(&d, (const char *[]){"  unfused: passed over, can't run: its score matrices need 0.00 GB "
                                     "(4915200 bytes), more than the 100 allowed by score_bytes_max",
                                     NULL});
}

static void test_explain_options(void **state) {
    (void)state;
    fb_desc d = good();
    d.flags = FB_TOP_LEFT | FB_LENGTHS | FB_BIAS | FB_DBIAS | FB_MASK | FB_BLOCK_MASK | FB_SINKS | FB_DSINKS |
              FB_DLSE | FB_ACCUMULATE | FB_DETERMINISTIC;
    d.window = fb_window_band(7, 3);
    d.softcap = 15, d.position_offset = -4, d.scale = -2;
    assert_says(&d, (const char *[]){", scale -2,", "softcap 15", "window left 7", "window right 3",
                                     "position offset -4", "top-left", ", lengths", ", bias", ", dbias",
                                     ", mask", ", block mask", ", sinks", ", dsinks", ", dlse", "accumulate",
                                     "deterministic", NULL});
    d = good(), d.flags = FB_PACKED | FB_FORWARD_ONLY, d.total_q = d.total_k = 400;
    d.window = fb_window_causal();
    assert_says(&d, (const char *[]){"causal", "packed", "forward only", NULL});
    d = good(), d.flags = FB_NO_DQ | FB_NO_DK | FB_NO_DV;
    assert_says(&d, (const char *[]){"no dq", "no dk", "no dv", NULL});
}

/* snprintf's rules: the whole length is returned whatever fits, and nothing is written past the size. */
static void check_snprintf(size_t (*print)(const void *, char *, size_t), const void *what) {
    char text[8192];
    const size_t length = print(what, NULL, 0);
    assert_true(length > 100 && length < sizeof text);
    assert_int_equal(print(what, text, sizeof text), length);
    assert_int_equal(strlen(text), length);
    assert_int_equal(text[length - 1], '\n');
    const size_t sizes[] = {1, 2, 17, length, length + 1};
    for (int i = 0; i < 5; i++) {
        char *part = malloc(sizes[i]); /* of exactly the size, so that checkers see more */
        assert_non_null(part);
        memset(part, 'x', sizes[i]);
        assert_int_equal(print(what, part, sizes[i]), length);
        const size_t kept = sizes[i] <= length ? sizes[i] - 1 : length;
        assert_int_equal(strlen(part), kept);
        assert_memory_equal(part, text, kept);
        free(part);
    }
}

static size_t explain(const void *plan, char *text, size_t size) { return fb_plan_explain(plan, text, size); }
static size_t info(const void *unused, char *text, size_t size) {
    (void)unused;
    return fb_info(text, size);
}

static void test_snprintf_rules(void **state) {
    (void)state;
    fb_desc d = good();
    fb_plan *plan = plan_of(&d);
    check_snprintf(explain, plan);
    check_snprintf(info, NULL);
    fb_plan_destroy(plan);
    char text[8] = "before";
    assert_int_equal(fb_plan_explain(NULL, text, sizeof text), 0);
    assert_string_equal(text, "");
}

static void test_info(void **state) {
    (void)state;
    char text[4096];
    const char *const pieces[] = {"version: ",
                                  "\nbackend: cpu\n",
                                  "cpu instruction sets: ",
                                  "baseline scalar\n",
                                  "cpu threads: ",
                                  "FLASHBACK_ROUTE: reference (",
                                  "FLASHBACK_FUSED_MIN_LEN: ",
                                  "FLASHBACK_SCORE_BYTES_MAX: unset (",
                                  "FLASHBACK_ISA: "};
    setenv("FLASHBACK_ROUTE", "reference", 1);
    fb_info(text, sizeof text);
    unsetenv("FLASHBACK_ROUTE");
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
        if (!strstr(text, pieces[i]))
            fail_msg("info does not say '%s':\n%s", pieces[i], text);
}

/* ---- Sizes --------------------------------------------------------------------------------------------- */

/* A program with a shorter struct writes nothing behind it, and gets the defaults there. */
static void test_desc_sizes(void **state) {
    (void)state;
    fb_desc d, whole;
    fb_desc_init(&whole, sizeof whole);
    assert_int_equal(whole.size, sizeof whole);
    assert_true(isnan(whole.scale) && whole.window.left == FB_UNBOUNDED &&
                whole.window.right == FB_UNBOUNDED);
    const size_t sizes[] = {4, 8, 100, offsetof(fb_desc, tasks)};
    for (int i = 0; i < 4; i++) {
        memset(&d, 0x5A, sizeof d);
        fb_desc_init(&d, sizes[i]);
        assert_int_equal(d.size, sizes[i]);
        assert_memory_equal((char *)&d + 4, (char *)&whole + 4, sizes[i] - 4);
        for (size_t n = sizes[i]; n < sizeof d; n++)
            assert_int_equal(((unsigned char *)&d)[n], 0x5A);
    }
    fb_desc_init(NULL, sizeof d);
    fb_io_init(NULL, sizeof(fb_io));
}

/* A program with a longer struct: it works while what this library does not know is zero, and is told when
 * it is not. */
static void test_longer_desc(void **state) {
    (void)state;
    struct {
        fb_desc d;
        unsigned char newer[24];
    } longer;
    memset(&longer, 0x5A, sizeof longer);
    fb_desc_init(&longer.d, sizeof longer);
    for (int i = 0; i < 24; i++)
        assert_int_equal(longer.newer[i], 0);
    const uint32_t size = longer.d.size;
    longer.d = good();
    longer.d.size = sizeof longer;
    assert_int_equal(fb_supported(&longer.d), FB_OK);
    longer.newer[23] = 1;
    assert_int_equal(fb_supported(&longer.d), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "desc.size is"));
    assert_non_null(strstr(fb_last_error(), "older than the program's header"));
    /* fb_desc_init keeps the size that it is told, so that this is found without any care of the caller's. */
    assert_int_equal(size, sizeof longer);
}

/* ---- Workspace ----------------------------------------------------------------------------------------- */

static size_t workspace_of(const fb_desc *d) {
    fb_plan *plan = plan_of(d);
    size_t bytes = fb_plan_workspace(plan);
    fb_plan_destroy(plan);
    return bytes;
}

/* O(B*H*L*D) but for the unfused route; less for a forward alone; more threads never less. */
static void test_workspace(void **state) {
    (void)state;
    assert_int_equal(fb_plan_workspace(NULL), 0);
    const fb_route linear[] = {FB_FUSED, FB_VECTOR, FB_REFERENCE};
    for (int r = 0; r < 3; r++) {
        fb_desc d = good();
        d.route = linear[r], d.threads = 2;
        d.len_q = linear[r] == FB_VECTOR ? 8 : 1 << 12, d.len_k = 1 << 12;
        const size_t one = workspace_of(&d);
        d.len_k *= 4;
        d.len_q = linear[r] == FB_VECTOR ? 8 : 1 << 14;
        const size_t four = workspace_of(&d);
        assert_true(four <= 5 * one);
        d.flags = FB_FORWARD_ONLY;
        assert_true(workspace_of(&d) <= four);
    }
    fb_desc d = good();
    d.route = FB_UNFUSED;
    assert_true(workspace_of(&d) >= (size_t)2 * 4 * 200 * 300 * 4 * 2); /* S and dP */
    d.threads = 1;
    const size_t one = workspace_of(&d);
    d.threads = 7;
    assert_true(workspace_of(&d) >= one);
}

/* ---- Words and memory ---------------------------------------------------------------------------------- */

static void test_names(void **state) {
    (void)state;
    const char *const statuses[] = {"FB_OK",      "FB_INVALID", "FB_UNSUPPORTED", "FB_NO_DEVICE",
                                    "FB_COMPILE", "FB_DEVICE",  "FB_MEMORY",      "?"};
    const char *const dtypes[] = {"f32", "f16", "bf16", "f64", "?"};
    const char *const devices[] = {"cpu", "cuda", "metal", "?"};
    const char *const routes[] = {"auto", "fused", "vector", "unfused", "reference", "?"};
    for (int i = 0; i < 8; i++)
        assert_string_equal(fb_status_name((fb_status)i), statuses[i]);
    for (int i = 0; i < 5; i++)
        assert_string_equal(fb_dtype_name((fb_dtype)i), dtypes[i]);
    for (int i = 0; i < 4; i++)
        assert_string_equal(fb_device_name((fb_device)i), devices[i]);
    for (int i = 0; i < 6; i++)
        assert_string_equal(fb_route_name((fb_route)i), routes[i]);
    assert_string_equal(fb_status_name((fb_status)-1), "?");
    char version[32];
    snprintf(version, sizeof version, "%d.%d.%d", FB_VERSION_MAJOR, FB_VERSION_MINOR, FB_VERSION_PATCH);
    assert_string_equal(fb_version(), version);
}

/* The sentence is that of the last call: a call that succeeds clears it. */
static void test_last_error(void **state) {
    (void)state;
    fb_desc d = good();
    d.batch = -1;
    assert_int_equal(fb_supported(&d), FB_INVALID);
    assert_true(*fb_last_error());
    assert_true(*fb_last_error()); /* asking does not clear it */
    fb_plan_destroy(NULL);
    d.batch = 1;
    assert_int_equal(fb_supported(&d), FB_OK);
    assert_string_equal(fb_last_error(), "");
}

static void test_memory(void **state) {
    (void)state;
    fb_ref ref = {&ref, 5};
    const size_t sizes[] = {0, 1, 63, 64, 65, 100000};
    for (int i = 0; i < 6; i++) {
        assert_int_equal(fb_alloc(&ref, FB_CPU, 0, sizes[i]), FB_OK);
        assert_non_null(ref.data);
        assert_int_equal(((uintptr_t)ref.data + ref.offset) % 64, 0);
        unsigned char *from = malloc(sizes[i] + 1), *to = calloc(sizes[i] + 1, 1);
        assert_true(from && to);
        memset(from, 0xA7, sizes[i] + 1);
        assert_int_equal(fb_write(ref, from, sizes[i], FB_CPU, 0), FB_OK);
        assert_int_equal(fb_sync(FB_CPU, 0, NULL), FB_OK);
        assert_int_equal(fb_read(to, ref, sizes[i], FB_CPU, 0), FB_OK);
        assert_memory_equal(to, from, sizes[i]);
        assert_int_equal(to[sizes[i]], 0);
        assert_int_equal(fb_free(&ref, FB_CPU, 0), FB_OK);
        assert_null(ref.data);
        free(from);
        free(to);
    }
    assert_int_equal(fb_free(&ref, FB_CPU, 0), FB_OK); /* NULL is fine */
}

static void test_memory_refused(void **state) {
    (void)state;
    char byte = 0;
    fb_ref ref = {NULL, 0};
    assert_int_equal(fb_alloc(&ref, FB_CPU, 0, SIZE_MAX), FB_MEMORY);
    assert_non_null(strstr(fb_last_error(), "no memory for 18446744073709551615 bytes"));
    assert_null(ref.data);
    assert_int_equal(fb_alloc(&ref, FB_CPU, 2, 8), FB_NO_DEVICE);
    assert_non_null(strstr(fb_last_error(), "index is 2"));
    assert_int_equal(fb_alloc(NULL, FB_CPU, 0, 8), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "ref is NULL"));
    assert_int_equal(fb_free(NULL, FB_CPU, 0), FB_INVALID);
    assert_int_equal(fb_write(ref, &byte, 1, FB_CPU, 0), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "to is NULL, but 1 bytes are to be written"));
    assert_int_equal(fb_write((fb_ref){&byte, 0}, NULL, 1, FB_CPU, 0), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "from is NULL"));
    assert_int_equal(fb_read(NULL, (fb_ref){&byte, 0}, 1, FB_CPU, 0), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "to is NULL, but 1 bytes are to be read"));
    assert_int_equal(fb_alloc(&ref, (fb_device)7, 0, 8), FB_NO_DEVICE);
    assert_int_equal(fb_sync((fb_device)7, 0, NULL), FB_NO_DEVICE);
    assert_non_null(strstr(fb_last_error(), "device"));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_explain_routes), cmocka_unit_test(test_explain_options),
        cmocka_unit_test(test_snprintf_rules), cmocka_unit_test(test_info),
        cmocka_unit_test(test_desc_sizes),     cmocka_unit_test(test_longer_desc),
        cmocka_unit_test(test_workspace),      cmocka_unit_test(test_names),
        cmocka_unit_test(test_last_error),     cmocka_unit_test(test_memory),
        cmocka_unit_test(test_memory_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
