/* The emulator by itself, with small kernels: what it computes, what it counts, and that it says what no GPU
 * may be given. Next: ../kernels.py, for the library's own kernels. */
#include "emulator.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define HEAD "#include <metal_stdlib>\nusing namespace metal;\n#line 1 \"small.metal\"\n"
#define IDS                                                                                                  \
    "uint3 group [[threadgroup_position_in_grid]], uint id [[thread_index_in_threadgroup]], "                \
    "uint lane [[thread_index_in_simdgroup]], uint simd [[simdgroup_index_in_threadgroup]]"
#define MEMORY "threadgroup uchar *memory [[threadgroup(0)]], "
#define BARRIER "threadgroup_barrier(mem_flags::mem_threadgroup);"

/* One run of the kernel `f` of a text. */
typedef struct run {
    const char *text;
    emulator_buffer buffers[3];
    unsigned groups, threads, schedule, how;
    size_t memory;
    emulator_counts counts;
    char message[512];
} run;

static bool go(run *r) {
    char *log = NULL;
    char text[4096];
    snprintf(text, sizeof text, "%s%s", HEAD, r->text);
    emulator_library *library = emulator_compile(text, r->how, &log);
    if (!library)
        fail_msg("does not compile: %s", log);
    const emulator_function *f = emulator_find(library, "f");
    assert_non_null(f);
    emulator_dispatch d = {.groups = {r->groups ? r->groups : 1, 1, 1},
                           .threads = r->threads ? r->threads : 64,
                           .threadgroup_bytes = r->memory,
                           .schedule = r->schedule};
    memcpy(d.buffers, r->buffers, sizeof r->buffers);
    memset(&r->counts, 0, sizeof r->counts);
    r->message[0] = 0;
    const bool good = emulator_run(f, &d, &r->counts, r->message, sizeof r->message);
    emulator_release(library);
    return good;
}

static void expect_good(run *r) {
    if (!go(r))
        fail_msg("%s", r->message);
}

/* It fails, and the sentence has both pieces. */
static void expect_failure(run *r, const char *one, const char *two) {
    assert_false(go(r));
    if (!strstr(r->message, one) || !strstr(r->message, two))
        fail_msg("'%s' has no '%s' and '%s'", r->message, one, two);
}

/* ---- What is computed ---- */

/* c = a b^T + 1 for 8 x 8, of three types. */
static void test_products(void **state) {
    (void)state;
    static const char *const types[] = {"float", "half", "bfloat"};
    for (int type = 0; type < 3; type++) {
        char text[1024];
        float a[64], b[64], c[64];
        for (int n = 0; n < 64; n++)
            a[n] = (float)(n * 7 % 13 - 6), b[n] = (float)(n * 5 % 11 - 4) / 4, c[n] = NAN;
        snprintf(text, sizeof text,
                 "typedef %s T;\nkernel void f(const device float *a [[buffer(0)]], const device float *b "
                 "[[buffer(1)]], device float *c [[buffer(2)]], " MEMORY IDS ") {\n"
                 "    threadgroup T *A = (threadgroup T *)memory, *B = A + 64;\n"
                 "    for (uint n = id; n < 64; n += 32) A[n] = T(a[n]), B[n] = T(b[n]);\n    " BARRIER "\n"
                 "    simdgroup_matrix<T, 8, 8> x, y;\n"
                 "    simdgroup_float8x8 z = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);\n"
                 "    simdgroup_load(x, A, 8);\n    simdgroup_load(y, B, 8, ulong2(0, 0), true);\n"
                 "    simdgroup_multiply_accumulate(z, x, y, z);\n    simdgroup_store(z, c, 8);\n}\n",
                 types[type]);
        run r = {.text = text, .threads = 32, .memory = 512};
        r.buffers[0] = (emulator_buffer){a, sizeof a}, r.buffers[1] = (emulator_buffer){b, sizeof b},
        r.buffers[2] = (emulator_buffer){c, sizeof c};
        expect_good(&r);
        assert_int_equal(r.counts.products, 1);
        for (int i = 0; i < 8; i++)
            for (int j = 0; j < 8; j++) {
                float sum = 1;
                for (int k = 0; k < 8; k++)
                    sum += a[i * 8 + k] * b[j * 8 + k];
                assert_true(c[i * 8 + j] == sum); /* all of them exact in every type */
            }
    }
}

static void test_lanes_together(void **state) {
    (void)state;
    unsigned out[64 * 4];
    memset(out, 0xee, sizeof out);
    run r = {.text =
                 "kernel void f(device uint *out [[buffer(0)]], " IDS ") {\n"
                 "    out[id * 4] = simd_sum(id);\n    out[id * 4 + 1] = simd_shuffle_xor(id, (ushort)9);\n"
                 "    out[id * 4 + 2] = simd_max(simd ? 100 - lane : lane);\n"
                 "    out[id * 4 + 3] = simd_any(id == 40) * 2 + simd_all(id < 40);\n}\n"};
    r.buffers[0] = (emulator_buffer){out, sizeof out};
    for (r.schedule = 0; r.schedule < 4; r.schedule++) {
        expect_good(&r);
        for (unsigned id = 0; id < 64; id++) {
            assert_int_equal(out[id * 4], id < 32 ? 31 * 16 : 31 * 16 + 32 * 32);
            assert_int_equal(out[id * 4 + 1], id ^ 9);
            assert_int_equal(out[id * 4 + 2], id < 32 ? 31 : 100);
            assert_int_equal(out[id * 4 + 3], id < 32 ? 1 : 2);
        }
    }
}

/* The nearest of the type's values, the even one of two, by search over all of them. */
static void test_rounding(void **state) {
    (void)state;
    enum { COUNT = 4096 };
    static float in[COUNT], out[2 * COUNT];
    for (int n = 0; n < COUNT; n++) {
        const uint32_t bits = (uint32_t)n * 1048583u + 12345u * (uint32_t)n;
        memcpy(&in[n], &bits, 4);
    }
    in[0] = 65519.99f, in[1] = 65520.0f, in[2] = 0x1p-25f, in[3] = 0x1.000002p-25f, in[4] = 1 + 0x1p-11f,
    in[5] = 1 + 0x3p-11f, in[6] = 1 + 0x1p-8f, in[7] = 1 + 0x3p-8f;
    run r = {.text =
                 "kernel void f(const device float *in [[buffer(0)]], device float *out [[buffer(1)]], " IDS
                 ") {\n    for (uint n = id; n < 4096; n += 64) out[2 * n] = half(in[n]), out[2 * n + 1] = "
                 "bfloat(in[n]);\n}\n"};
    r.buffers[0] = (emulator_buffer){in, sizeof in}, r.buffers[1] = (emulator_buffer){out, sizeof out};
    expect_good(&r);
    assert_true(out[0] == 65504.0f && isinf(out[2]) && out[4] == 0.0f && out[6] == 0x1p-24f);
    assert_true(out[8] == 1.0f && out[10] == 1 + 0x1p-9f && out[13] == 1.0f && out[15] == 1 + 0x1p-6f);
    for (int n = 0; n < COUNT; n++) {
        const float x = in[n];
        assert_int_equal(isnan(x) != 0, isnan(out[2 * n]) != 0);
        assert_int_equal(isnan(x) != 0, isnan(out[2 * n + 1]) != 0);
        if (isnan(x) || isinf(x))
            continue;
        const float ulp = fmaxf(ldexpf(1, ilogbf(x) - 10), 0x1p-24f), wide = ldexpf(1, ilogbf(x) - 7);
        if (fabsf(x) < 65520)
            assert_true(fabsf(out[2 * n] - x) <= ulp / 2);
        if (fabsf(x) > 0x1p-120f && fabsf(x) < 0x1p127f)
            assert_true(fabsf(out[2 * n + 1] - x) <= wide / 2);
    }
}

/* What a kernel reads that nobody wrote is NaN. */
static void test_memory_starts_as_nan(void **state) {
    (void)state;
    float out[64];
    memset(out, 0, sizeof out);
    run r = {.text = "kernel void f(device float *out [[buffer(0)]], " MEMORY IDS ") {\n"
                     "    out[id] = ((threadgroup float *)memory)[id];\n}\n",
             .memory = 256};
    r.buffers[0] = (emulator_buffer){out, sizeof out};
    expect_good(&r);
    for (int n = 0; n < 64; n++)
        assert_true(isnan(out[n]));
}

/* Each thread leaves its number and reads another's: right with a barrier, a matter of the schedule without.
 */
static void test_schedules_show_a_missing_barrier(void **state) {
    (void)state;
    static const char *const texts[] = {
        "kernel void f(device uint *out [[buffer(0)]], " MEMORY IDS ") {\n"
        "    threadgroup uint *x = (threadgroup uint *)memory;\n    x[id] = id;\n    " BARRIER
        "\n    out[id] = x[63 - id];\n}\n",
        "kernel void f(device uint *out [[buffer(0)]], " MEMORY IDS ") {\n"
        "    threadgroup uint *x = (threadgroup uint *)memory;\n    x[id] = id;\n    out[id] = x[63 - "
        "id];\n}\n"};
    for (int text = 0; text < 2; text++) {
        unsigned out[3][64];
        for (unsigned schedule = 0; schedule < 3; schedule++) {
            run r = {.text = texts[text], .memory = 256, .schedule = schedule};
            r.buffers[0] = (emulator_buffer){out[schedule], sizeof out[schedule]};
            expect_good(&r);
        }
        const bool same =
            memcmp(out[0], out[1], sizeof out[0]) == 0 && memcmp(out[0], out[2], sizeof out[0]) == 0;
        assert_int_equal(same, text == 0);
        for (unsigned n = 0; n < 64 && text == 0; n++)
            assert_int_equal(out[0][n], 63 - n);
    }
}

static void test_counts(void **state) {
    (void)state;
    float in[64] = {0}, out[64];
    run r = {
        .text =
            "kernel void f(const device float *in [[buffer(1)]], device float *out [[buffer(2)]], " MEMORY IDS
            ") {\n    threadgroup float *x = (threadgroup float *)memory;\n    x[id] = in[id];\n    " BARRIER
            "\n    float y = x[63 - id] + x[id];\n    " BARRIER "\n    if (id < 16) out[id] = y;\n}\n",
        .memory = 256,
        .groups = 3,
        .how = EMULATOR_CHECKED};
    r.buffers[1] = (emulator_buffer){in, sizeof in}, r.buffers[2] = (emulator_buffer){out, sizeof out};
    expect_good(&r);
    assert_int_equal(r.counts.threadgroups, 3);
    assert_int_equal(r.counts.barriers, 6);
    assert_int_equal(r.counts.products, 0);
    assert_int_equal(r.counts.loads[1], 3 * 64 * 4);
    assert_int_equal(r.counts.stores[2], 3 * 16 * 4);
    assert_int_equal(r.counts.shared_stores, 3 * 64 * 4);
    assert_int_equal(r.counts.shared_loads, 3 * 2 * 64 * 4);
}

/* ---- What is refused ---- */

static void test_divergent_barriers(void **state) {
    (void)state;
    run some = {.text = "kernel void f(" IDS ") {\n    if (id < 57)\n        " BARRIER
                        "\n    else\n        " BARRIER "\n}\n"};
    expect_failure(&some, "57 wait in threadgroup_barrier at small.metal:3",
                   "7 wait in threadgroup_barrier at "
                   "small.metal:5");
    run ended = {.text = "kernel void f(" IDS ") {\n    if (id == 3)\n        return;\n    " BARRIER "\n}\n"};
    expect_failure(&ended, "63 wait in threadgroup_barrier at small.metal:4", "1 have ended");
    run alone = {.text = "kernel void f(device uint *out [[buffer(0)]], " IDS ") {\n    if (lane < 30)\n"
                         "        out[id] = simd_sum(id);\n}\n"};
    unsigned out[64];
    alone.buffers[0] = (emulator_buffer){out, sizeof out};
    expect_failure(&alone, "60 wait in simd_shuffle_xor at small.metal:3", "4 have ended");
    run apart = {.text = "kernel void f(device uint *out [[buffer(0)]], " IDS ") {\n    uint x = id;\n"
                         "    if (lane & 1)\n        x = simd_broadcast(x, (ushort)0);\n    else\n"
                         "        x = simd_shuffle(x, (ushort)0);\n    out[id] = x;\n}\n",
                 .buffers = {{out, sizeof out}}};
    expect_failure(&apart, "lanes of a simdgroup part ways", "small.metal:6");
}

static void test_too_much_memory(void **state) {
    (void)state;
    run over = {.text = "kernel void f(" IDS ") {}\n", .memory = 32784};
    expect_failure(&over, "f: more threadgroup memory than the 32768 bytes", "");
    run beyond = {.text = "kernel void f(" MEMORY IDS ") { ((threadgroup float *)memory)[id + 64] = 1; }\n",
                  .memory = 256};
    expect_failure(&beyond, "reaches beyond threadgroup memory", "thread 0");
    run threads = {.text = "kernel void f(" IDS ") {}\n", .threads = 40};
    expect_failure(&threads, "in whole simdgroups", "");
}

static void test_outside_of_buffers(void **state) {
    (void)state;
    float memory[128] = {0};
    run reads = {
        .text = "kernel void f(const device float *in [[buffer(0)]], device float *out [[buffer(1)]], " IDS
                ") { if (id < 32) out[id] = in[id]; }\n",
        .buffers = {{memory, 31 * 4}, {memory + 64, 64 * 4}},
        .how = EMULATOR_CHECKED};
    expect_failure(&reads, "thread 31 reads 4 bytes that are in no buffer", "");
    run writes = {.text = "kernel void f(device float *out [[buffer(1)]], " IDS ") { out[id] = 1; }\n",
                  .buffers = {{memory, 0}, {memory, 40 * 4}},
                  .how = EMULATOR_CHECKED};
    expect_failure(&writes, "thread 40 writes 4 bytes that are in no buffer", "");
}

static void test_text_that_does_not_compile(void **state) {
    (void)state;
    char *log = NULL;
    assert_null(emulator_compile(HEAD "kernel void f(" IDS ") {\n    wrong;\n}\n", 0, &log));
    assert_non_null(log);
    assert_non_null(strstr(log, "small.metal:2:"));
    assert_non_null(strstr(log, "wrong"));
    free(log);
    emulator_library *library = emulator_compile(HEAD "kernel void f(" IDS ") {}\n", 0, &log);
    assert_non_null(library);
    assert_null(emulator_find(library, "g"));
    emulator_release(library);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_products),
        cmocka_unit_test(test_lanes_together),
        cmocka_unit_test(test_rounding),
        cmocka_unit_test(test_memory_starts_as_nan),
        cmocka_unit_test(test_schedules_show_a_missing_barrier),
        cmocka_unit_test(test_counts),
        cmocka_unit_test(test_divergent_barriers),
        cmocka_unit_test(test_too_much_memory),
        cmocka_unit_test(test_outside_of_buffers),
        cmocka_unit_test(test_text_that_does_not_compile),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
