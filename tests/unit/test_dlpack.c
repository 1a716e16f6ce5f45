/* DLPack in: dimensions, strides and types of DLTensors, and a sentence for everything that does not fit. */
#include "flashback_dlpack.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

enum { CPU = 1, CUDA = 2, METAL = 8, FLOAT = 2, BFLOAT = 4 };

typedef struct tensor {
    fb_dltensor t;
    int64_t shape[5], strides[5];
} tensor;

static void make(tensor *x, int64_t a, int64_t b, int64_t c, int64_t d) {
    memset(x, 0, sizeof *x);
    memcpy(x->shape, (int64_t[]){a, b, c, d}, 4 * sizeof a);
    x->t.ndim = 4;
    x->t.shape = x->shape;
    x->t.device.device_type = CPU;
    x->t.dtype.code = FLOAT, x->t.dtype.bits = 32, x->t.dtype.lanes = 1;
}

static void set_strides(tensor *x, int64_t a, int64_t b, int64_t c, int64_t d) {
    memcpy(x->strides, (int64_t[]){a, b, c, d}, 4 * sizeof a);
    x->t.strides = x->strides;
}

/* q [2,4,5,8], k [2,2,7,8], v [2,2,7,16] in the given order of dimensions. */
typedef struct three {
    tensor q, k, v;
} three;

static three good(fb_layout layout) {
    three x;
    const int l = layout == FB_BLHD;
    make(&x.q, 2, l ? 5 : 4, l ? 4 : 5, 8);
    make(&x.k, 2, l ? 7 : 2, l ? 2 : 7, 8);
    make(&x.v, 2, l ? 7 : 2, l ? 2 : 7, 16);
    return x;
}

/* The tensors move with the struct, so their pointers are set where it lies. */
static fb_status take(fb_desc *d, fb_layout layout, three *x) {
    tensor *all[] = {&x->q, &x->k, &x->v};
    for (int i = 0; i < 3; i++) {
        all[i]->t.shape = all[i]->shape;
        if (all[i]->t.strides)
            all[i]->t.strides = all[i]->strides;
    }
    return fb_desc_from_dlpack(d, layout, &x->q.t, &x->k.t, &x->v.t);
}

static void assert_strides(fb_strides s, int64_t batch, int64_t head, int64_t row) {
    assert_int_equal(s.batch, batch);
    assert_int_equal(s.head, head);
    assert_int_equal(s.row, row);
}

static void test_layouts(void **state) {
    (void)state;
    for (int layout = FB_BHLD; layout <= FB_BLHD; layout++) {
        three x = good((fb_layout)layout);
        fb_desc d;
        fb_desc_init(&d, sizeof d);
        d.window = fb_window_causal();
        assert_int_equal(take(&d, (fb_layout)layout, &x), FB_OK);
        assert_int_equal(d.batch, 2);
        assert_int_equal(d.heads_q, 4);
        assert_int_equal(d.heads_kv, 2);
        assert_int_equal(d.len_q, 5);
        assert_int_equal(d.len_k, 7);
        assert_int_equal(d.head_dim, 8);
        assert_int_equal(d.head_dim_v, 16);
        assert_int_equal(d.device, FB_CPU);
        assert_int_equal(d.dtype, FB_F32);
        assert_int_equal(d.window.right, 0); /* everything else stays */
        if (layout == FB_BHLD) {
            assert_strides(d.q, 160, 40, 8);
            assert_strides(d.v, 224, 112, 16);
        } else {
            assert_strides(d.q, 160, 8, 32);
            assert_strides(d.v, 224, 16, 32);
        }
        assert_int_equal(fb_supported(&d), FB_OK);
    }
}

/* A true 0 repeats; strides of dimensions of size 1, or of a tensor without elements, are not looked at. */
static void test_strides(void **state) {
    (void)state;
    tensor x;
    fb_strides s;
    make(&x, 2, 3, 4, 8);
    set_strides(&x, 0, 0, 40, 1);
    assert_int_equal(fb_strides_from_dlpack(&s, FB_BHLD, &x.t, "out"), FB_OK);
    assert_strides(s, FB_BROADCAST, FB_BROADCAST, 40);
    set_strides(&x, 1000, 50, 300, 1);
    assert_int_equal(fb_strides_from_dlpack(&s, FB_BLHD, &x.t, "out"), FB_OK);
    assert_strides(s, 1000, 300, 50);
    make(&x, 1, 3, 1, 1);
    set_strides(&x, -7, 9, -1, 5);
    assert_int_equal(fb_strides_from_dlpack(&s, FB_BHLD, &x.t, "out"), FB_OK);
    assert_int_equal(s.head, 9);
    make(&x, 2, 0, 4, 8);
    set_strides(&x, -1, -1, -1, -1);
    assert_int_equal(fb_strides_from_dlpack(&s, FB_BHLD, &x.t, "out"), FB_OK);
    /* What comes out is what fb_desc takes. */
    fb_desc d;
    three t = good(FB_BHLD);
    fb_desc_init(&d, sizeof d);
    set_strides(&t.k, 0, 56, 8, 1);
    assert_int_equal(take(&d, FB_BHLD, &t), FB_OK);
    assert_strides(d.k, FB_BROADCAST, 56, 8);
    assert_int_equal(fb_supported(&d), FB_OK);
}

static void test_types(void **state) {
    (void)state;
    const struct {
        uint8_t code, bits;
        fb_dtype dtype;
    } rows[] = {{FLOAT, 32, FB_F32}, {FLOAT, 16, FB_F16}, {BFLOAT, 16, FB_BF16}, {FLOAT, 64, FB_F64}};
    const struct {
        int32_t type;
        fb_device device;
    } places[] = {{CPU, FB_CPU}, {CUDA, FB_CUDA}, {METAL, FB_METAL}};
    for (int r = 0; r < 4; r++)
        for (int p = 0; p < 3; p++) {
            three x = good(FB_BHLD);
            fb_desc d;
            fb_desc_init(&d, sizeof d);
            tensor *all[] = {&x.q, &x.k, &x.v};
            for (int i = 0; i < 3; i++) {
                all[i]->t.dtype.code = rows[r].code, all[i]->t.dtype.bits = rows[r].bits;
                all[i]->t.device.device_type = places[p].type, all[i]->t.device.device_id = 3;
            }
            assert_int_equal(take(&d, FB_BHLD, &x), FB_OK);
            assert_int_equal(d.dtype, rows[r].dtype);
            assert_int_equal(d.device, places[p].device);
            assert_int_equal(d.index, 3);
        }
}

/* The descriptor stays as it was, and the sentence has both pieces. */
static void refused_at(int line, fb_layout layout, three *x, const char *given, const char *expected) {
    fb_desc d, before;
    fb_desc_init(&d, sizeof d);
    d.batch = 77;
    before = d;
    fb_status status = take(&d, layout, x);
    if (status != FB_INVALID || !strstr(fb_last_error(), given) || !strstr(fb_last_error(), expected))
        fail_msg("line %d: %s, '%s', expected FB_INVALID with '%s' and '%s'", line, fb_status_name(status),
                 fb_last_error(), given, expected);
    assert_memory_equal(&d, &before, sizeof d);
}
#define refused(...) refused_at(__LINE__, __VA_ARGS__)

static void test_tensors_refused(void **state) {
    (void)state;
    three x = good(FB_BHLD);
    refused((fb_layout)2, &x, "layout is 2", "expected FB_BHLD or FB_BLHD");
    x.q.t.ndim = 3;
    refused(FB_BHLD, &x, "q has 3 dimensions, expected 4", "[batch, heads, length, head_dim]");
    refused(FB_BLHD, &x, "q has 3 dimensions, expected 4", "[batch, length, heads, head_dim]");
    x = good(FB_BHLD), x.k.shape[2] = -7;
    refused(FB_BHLD, &x, "k has size -7 in dimension 2", "expected 0 or more");
    x = good(FB_BHLD), x.v.shape[0] = x.v.shape[1] = INT64_C(1) << 32;
    refused(FB_BHLD, &x, "overflow: v", "can be addressed");
    x = good(FB_BHLD), set_strides(&x.v, 224, -112, 16, 1);
    refused(FB_BHLD, &x, "v has stride -112 in dimension 1", "negative strides are not supported");
    x = good(FB_BHLD), set_strides(&x.k, 112, 56, 8, 2);
    refused(FB_BHLD, &x, "k has stride 2 in its last dimension, expected 1", "make it contiguous");
    x = good(FB_BHLD), set_strides(&x.q, 160, 40, 8, 0);
    refused(FB_BHLD, &x, "q has stride 0 in its last dimension", "expected 1");
    const struct {
        uint8_t code, bits;
        uint16_t lanes;
    } types[] = {{FLOAT, 8, 1}, {0, 32, 1}, {1, 8, 1}, {BFLOAT, 32, 1}, {FLOAT, 32, 4}, {6, 8, 1}};
    for (int i = 0; i < 6; i++) {
        x = good(FB_BHLD), x.v.t.dtype.code = types[i].code, x.v.t.dtype.bits = types[i].bits;
        x.v.t.dtype.lanes = types[i].lanes;
        refused(FB_BHLD, &x, "v has DLPack type (code ", "expected f32, f16, bf16 or f64");
    }
    x = good(FB_BHLD), x.q.t.device.device_type = 10;
    refused(FB_BHLD, &x, "q lies on DLPack device 10", "1 (CPU), 2 (CUDA) or 8 (Metal)");
}

static void test_mismatches_refused(void **state) {
    (void)state;
    three x = good(FB_BHLD);
    x.k.t.dtype.bits = 16;
    refused(FB_BHLD, &x, "k is f16 and q is f32", "one dtype");
    x = good(FB_BHLD), x.v.t.device.device_id = 1;
    refused(FB_BHLD, &x, "v lies on cpu 1 and q on cpu 0", "one device");
    x = good(FB_BHLD), x.k.t.device.device_type = CUDA;
    refused(FB_BHLD, &x, "k lies on cuda 0", "one device");
    x = good(FB_BHLD), x.k.shape[0] = 3;
    refused(FB_BHLD, &x, "k has batch 3 and q has 2", "must be equal");
    x = good(FB_BHLD), x.k.shape[3] = 9;
    refused(FB_BHLD, &x, "k has head_dim 9 and q has 8", "must be equal");
    x = good(FB_BHLD), x.v.shape[1] = 4;
    refused(FB_BHLD, &x, "v has heads 4 and k has 2", "must be equal");
    x = good(FB_BLHD), x.v.shape[1] = 8;
    refused(FB_BLHD, &x, "v has length 8 and k has 7", "must be equal");
}

static void test_null(void **state) {
    (void)state;
    three x = good(FB_BHLD);
    fb_desc d;
    fb_strides s;
    fb_desc_init(&d, sizeof d);
    x.q.t.shape = x.q.shape;
    assert_int_equal(fb_desc_from_dlpack(NULL, FB_BHLD, &x.q.t, &x.q.t, &x.q.t), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "desc is NULL"));
    assert_int_equal(fb_desc_from_dlpack(&d, FB_BHLD, &x.q.t, NULL, &x.q.t), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "k is NULL"));
    assert_int_equal(fb_strides_from_dlpack(NULL, FB_BHLD, &x.q.t, "dq"), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "strides is NULL"));
    assert_int_equal(fb_strides_from_dlpack(&s, FB_BHLD, NULL, "dq"), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "dq is NULL"));
    x.q.t.data = &x, x.q.t.byte_offset = 24;
    fb_ref ref = fb_ref_from_dlpack(&x.q.t);
    assert_ptr_equal(ref.data, &x);
    assert_int_equal(ref.offset, 24);
    ref = fb_ref_from_dlpack(NULL);
    assert_null(ref.data);
    assert_int_equal(ref.offset, 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layouts),
        cmocka_unit_test(test_strides),
        cmocka_unit_test(test_types),
        cmocka_unit_test(test_tensors_refused),
        cmocka_unit_test(test_mismatches_refused),
        cmocka_unit_test(test_null),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
