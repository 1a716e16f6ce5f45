/* The readers and writers of .safetensors and .npy: what is written is read back; every field of a header
 * that is wrong is refused by a sentence that names it. */
#include "cli/npy.h"
#include "cli/safetensors.h"
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

/* A file in memory. Allocated to the byte, so that the sanitizers see a reader that goes too far. */
typedef struct bytes {
    char *at;
    size_t size;
} bytes;

static bytes make(const char *head, size_t head_size, const char *text, size_t data_size) {
    bytes b = {NULL, head_size + strlen(text) + data_size};
    b.at = malloc(b.size + !b.size);
    assert_non_null(b.at);
    memcpy(b.at, head, head_size);
    memcpy(b.at + head_size, text, strlen(text));
    memset(b.at + head_size + strlen(text), 7, data_size);
    return b;
}

static bytes safetensors_of(const char *header, size_t data_size) {
    const char length[8] = {(char)(strlen(header) & 255), (char)(strlen(header) >> 8)};
    return make(length, 8, header, data_size);
}

static bytes npy_of(const char *header, size_t data_size) {
    const char head[10] = {'\x93', 'N', 'U', 'M', 'P', 'Y', 1, 0, (char)strlen(header), 0};
    return make(head, 10, header, data_size);
}

static void refused(const char *why, const char *words) {
    if (!strstr(why, words))
        fail_msg("the sentence \"%s\" lacks \"%s\"", why, words);
}

/* ---- safetensors ------------------------------------------------------------------------------------ */

static void safetensors_reads_what_is_there(void **state) {
    (void)state;
    bytes b = safetensors_of("{\"__metadata__\":{\"scale\":\"2\"},"
                             "\"b\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[8,14]},"
                             "\"none\":{\"dtype\":\"F64\",\"shape\":[5,0],\"data_offsets\":[8,8]},"
                             "\"a\":{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[0,8]}}  ",
                             14);
    safetensors file;
    complaint why = {""};
    assert_true(safetensors_read(&file, b.at, b.size, &why));
    assert_int_equal(file.count, 3);
    assert_string_equal(file.tensors[0].name, "a");
    assert_int_equal(file.tensors[0].type, TENSOR_F32);
    assert_string_equal(tensor_shape(&file.tensors[0]).text, "[1,2]");
    assert_string_equal(file.tensors[1].name, "none");
    assert_int_equal(file.tensors[1].bytes, 0);
    assert_int_equal(file.tensors[2].type, TENSOR_BF16);
    assert_ptr_equal(file.tensors[2].data, b.at + b.size - 6);
    safetensors_close(&file);
    free(b.at);
}

static void safetensors_refuses_by_name(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        const char *words;
    } rows[] = {
        {"", 0, "'{'"},
        {" {}", 0, "'{'"},
        {"{", 0, "not JSON"},
        {"{}", 1, "1 bytes of data"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"q\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
         1, "duplicate"},
        {"{\"q\":1}", 0, "'q'"},
        {"{\"q\":{}}", 0, "dtype, shape and data_offsets"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"x\":1}}", 1, "nothing else"},
        {"{\"q\":{\"dtype\":5,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "dtype must be"},
        {"{\"q\":{\"dtype\":\"F8_E4M3\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "dtype is 'F8_E4M3'"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, "shape must be"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1, "shape[0]"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[1,1.0],\"data_offsets\":[0,1]}}", 1, "shape[1]"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1],\"data_offsets\":[0,1]}}", 1, "5 dimensions"},
        {"{\"q\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         "overflows"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[99999999999999999999],\"data_offsets\":[0,0]}}", 0, "not JSON"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "data_offsets must be"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,\"1\"]}}", 1, "data_offsets must be"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[-1,0]}}", 1, "ascend"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,0]}}", 1, "ascend"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,2]}}", 1, "end at 2"},
        {"{\"q\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,2]}}", 2, "span 2 bytes"},
        {"{\"q\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", 8, "span 8 bytes"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
         "\"k\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
         3, "overlap"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"k\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[2,3]}}",
         3, "gap of 1"},
        {"{\"q\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 2, "data_offsets end at 1"},
        {"{\"__metadata__\":[]}", 0, "__metadata__"},
        {"{\"__metadata__\":{\"causal\":true}}", 0, "'causal' must be a string"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        bytes b = safetensors_of(rows[i].header, rows[i].data);
        safetensors file;
        complaint why = {""};
        assert_false(safetensors_read(&file, b.at, b.size, &why));
        refused(why.text, rows[i].words);
        assert_null(file.tensors);
        free(b.at);
    }
}

static void safetensors_refuses_a_wrong_length(void **state) {
    (void)state;
    bytes b = safetensors_of("{}", 0);
    safetensors file;
    complaint why = {""};
    for (size_t size = 0; size < b.size; size++) {
        bytes cut = make(b.at, size, "", 0);
        assert_false(safetensors_read(&file, cut.at, cut.size, &why));
        refused(why.text, "header length");
        free(cut.at);
    }
    memset(b.at, 0xFF, 8);
    assert_false(safetensors_read(&file, b.at, b.size, &why));
    refused(why.text, "header length is 18446744073709551615");
    free(b.at);
}

/* The deepest nesting that jansson lets through is refused, not a crash. */
static void safetensors_refuses_depth(void **state) {
    (void)state;
    char header[16000] = "{\"q\":";
    memset(header + 5, '[', sizeof header - 6);
    bytes b = safetensors_of(header, 0);
    safetensors file;
    complaint why = {""};
    assert_false(safetensors_read(&file, b.at, b.size, &why));
    refused(why.text, "depth");
    free(b.at);
}

static void safetensors_round_trip(void **state) {
    (void)state;
    const char half[] = {1, 2, 3, 4, 5, 6};
    const double doubles[] = {1.5, -2.5};
    const tensor out[] = {
        {.name = "half", .type = TENSOR_F16, .dims = 2, .shape = {3, 1}, .data = half, .bytes = sizeof half},
        {.name = "empty", .type = TENSOR_F32, .dims = 1, .shape = {0}, .data = half, .bytes = 0},
        {.name = "doubles",
         .type = TENSOR_F64,
         .dims = 1,
         .shape = {2},
         .data = doubles,
         .bytes = sizeof doubles},
    };
    const char *const metadata[] = {"route", "fused", NULL};
    bytes b = {NULL, 0};
    FILE *stream = open_memstream(&b.at, &b.size);
    assert_non_null(stream);
    assert_true(safetensors_write(stream, out, 3, metadata));
    assert_int_equal(fclose(stream), 0);

    safetensors in;
    complaint why = {""};
    if (!safetensors_read(&in, b.at, b.size, &why))
        fail_msg("%s", why.text);
    assert_int_equal(in.count, 3);
    assert_non_null(in.metadata);
    for (int i = 0; i < 3; i++)
        for (int n = 0; n < 3; n++)
            if (!strcmp(in.tensors[i].name, out[n].name)) {
                assert_int_equal(in.tensors[i].type, out[n].type);
                assert_string_equal(tensor_shape(&in.tensors[i]).text, tensor_shape(&out[n]).text);
                assert_int_equal(in.tensors[i].bytes, out[n].bytes);
                assert_memory_equal(in.tensors[i].data, out[n].data, out[n].bytes);
                assert_int_equal(
                    ((const char *)in.tensors[i].data - b.at) % (ptrdiff_t)tensor_type_bytes(out[n].type), 0);
            }
    safetensors_close(&in);
    free(b.at);
}

/* ---- npy -------------------------------------------------------------------------------------------- */

static void npy_reads_what_is_there(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        tensor_type type;
        const char *shape;
    } rows[] = {
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }   \n", 24, TENSOR_F32, "[2,3]"},
        {"{'shape':(4,),'descr':'<f2','fortran_order':False}", 8, TENSOR_F16, "[4]"},
        {"{\"descr\": \"|b1\", \"fortran_order\": False, \"shape\": ()}", 1, TENSOR_BOOL, "[]"},
        {"{'descr': '<i8', 'fortran_order': False, 'shape': (9223372036854775807, 5, 0, 1), }", 0, TENSOR_I64,
         "[9223372036854775807,5,0,1]"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        bytes b = npy_of(rows[i].header, rows[i].data);
        tensor t;
        complaint why = {""};
        if (!npy_read(&t, b.at, b.size, &why))
            fail_msg("row %zu: %s", i, why.text);
        assert_int_equal(t.type, rows[i].type);
        assert_string_equal(tensor_shape(&t).text, rows[i].shape);
        assert_int_equal(t.bytes, rows[i].data);
        assert_ptr_equal(t.data, b.at + b.size - rows[i].data);
        free(b.at);
    }
}

static void npy_refuses_by_name(void **state) {
    (void)state;
    static const struct {
        const char *header;
        size_t data;
        const char *words;
    } rows[] = {
        {"", 0, "'{'"},
        {"{}", 0, "lacks the key descr"},
        {"{'descr': '<f4', 'fortran_order': False}", 0, "lacks the key shape"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'extra': 1}", 4, "'extra'"},
        {"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", 4, "descr twice"},
        {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}", 4, "records"},
        {"{'descr': '>f4', 'fortran_order': False, 'shape': (1,)}", 4, "big-endian"},
        {"{'descr': '<V2', 'fortran_order': False, 'shape': (1,)}", 2, "no bf16"},
        {"{'descr': '<c8', 'fortran_order': False, 'shape': (1,)}", 8, "descr is '<c8'"},
        {"{'descr': '<f4', 'fortran_order': True, 'shape': (1,)}", 4, "fortran_order is True"},
        {"{'descr': '<f4', 'fortran_order': 0, 'shape': (1,)}", 4, "fortran_order must be"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': 1}", 4, "tuple"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1)}", 4, "(n,)"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}", 4, "shape[0]"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1 1)}", 4, "shape[1]"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,", 4, "shape[1]"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1, 1, 1, 1, 1)}", 4, "more than 4"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775808,)}", 4, "shape[0]"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (4294967296, 4294967296)}", 4, "overflows"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 7, "takes 8 bytes, but the file has 7"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)}", 9, "takes 8 bytes, but the file has 9"},
        {"{'descr': '<f4' 'fortran_order': False, 'shape': (2,)}", 8, "',' or '}'"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (2,)} x", 8, "only spaces"},
    };
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        bytes b = npy_of(rows[i].header, rows[i].data);
        tensor t;
        complaint why = {""};
        if (npy_read(&t, b.at, b.size, &why))
            fail_msg("row %zu is accepted", i);
        refused(why.text, rows[i].words);
        free(b.at);
    }
}

static void npy_refuses_a_wrong_preamble(void **state) {
    (void)state;
    bytes b = npy_of("{'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", 4);
    tensor t;
    complaint why = {""};
    for (size_t size = 0; size < b.size; size++) {
        bytes cut = make(b.at, size, "", 0);
        assert_false(npy_read(&t, cut.at, cut.size, &why));
        refused(why.text, size < 10 ? "magic" : size < b.size - 4 ? "header length" : "bytes of data");
        free(cut.at);
    }
    b.at[6] = 4;
    assert_false(npy_read(&t, b.at, b.size, &why));
    refused(why.text, "version is 4.0");
    b.at[6] = 2;
    assert_false(npy_read(&t, b.at, b.size, &why));
    refused(why.text, "header length");
    b.at[0] = 'N';
    assert_false(npy_read(&t, b.at, b.size, &why));
    refused(why.text, "magic");
    free(b.at);
}

static void npy_round_trip(void **state) {
    (void)state;
    const float values[6] = {1, 2, 3, 4, 5, 6};
    for (int dims = 0; dims <= TENSOR_DIMS; dims++) {
        tensor t = {.name = "", .type = TENSOR_F32, .dims = dims, .shape = {1, 2, 3, 1}, .data = values};
        assert_true(tensor_measure(&t));
        bytes b = {NULL, 0};
        FILE *stream = open_memstream(&b.at, &b.size);
        assert_non_null(stream);
        assert_true(npy_write(stream, &t));
        assert_int_equal(fclose(stream), 0);
        tensor in;
        complaint why = {""};
        if (!npy_read(&in, b.at, b.size, &why))
            fail_msg("%s", why.text);
        assert_string_equal(tensor_shape(&in).text, tensor_shape(&t).text);
        assert_memory_equal(in.data, values, t.bytes);
        assert_int_equal((const char *)in.data - b.at, 128);
        free(b.at);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(safetensors_reads_what_is_there),
        cmocka_unit_test(safetensors_refuses_by_name),
        cmocka_unit_test(safetensors_refuses_a_wrong_length),
        cmocka_unit_test(safetensors_refuses_depth),
        cmocka_unit_test(safetensors_round_trip),
        cmocka_unit_test(npy_reads_what_is_there),
        cmocka_unit_test(npy_refuses_by_name),
        cmocka_unit_test(npy_refuses_a_wrong_preamble),
        cmocka_unit_test(npy_round_trip),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
