/* Any bytes as a .npy file: either the array lies inside them, or a sentence says why not. */
#include "cli/npy.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t fb_fuzz_seed_input(unsigned index, uint8_t *data, size_t max);

static void need(bool condition) {
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    tensor t;
    complaint why = {""};
    if (!npy_read(&t, data, size, &why)) {
        need(*why.text && strlen(why.text) < sizeof why.text);
        return 0;
    }
    const uint64_t bytes = t.bytes;
    need(t.dims >= 0 && t.dims <= TENSOR_DIMS && t.type != TENSOR_BF16 && *tensor_shape(&t).text == '[');
    need((const uint8_t *)t.data + bytes == data + size && tensor_measure(&t) && t.bytes == bytes);
    return 0;
}

/* Small files that are right, of every kind, for the mutations to start from. */
size_t fb_fuzz_seed_input(unsigned index, uint8_t *data, size_t max) {
    static const struct {
        const char *descr, *shape;
        size_t bytes;
        uint8_t version;
    } seeds[] = {{"<f4", "(2, 3, 4, 5)", 480, 1}, {"<f8", "(3,)", 24, 1}, {"<f2", "(1, 2)", 4, 1},
                 {"|u1", "(2, 2)", 4, 1},         {"|b1", "()", 1, 1},    {"<i4", "(5,)", 20, 2},
                 {"<f4", "(0, 7)", 0, 1},         {"<i8", "(2,)", 16, 1}};
    if (index >= sizeof seeds / sizeof *seeds)
        return 0;
    char header[256];
    const size_t before = seeds[index].version == 1 ? 10 : 12;
    size_t n =
        (size_t)snprintf(header, sizeof header, "{'descr': '%s', 'fortran_order': False, 'shape': %s, }",
                         seeds[index].descr, seeds[index].shape);
    while ((before + n + 1) % 64)
        header[n++] = ' ';
    header[n++] = '\n';
    need(before + n + seeds[index].bytes <= max);
    memset(data, 0, before);
    memcpy(data, "\x93NUMPY", 6);
    data[6] = seeds[index].version;
    data[8] = (uint8_t)n;
    data[9] = (uint8_t)(n >> 8);
    memcpy(data + before, header, n);
    memset(data + before + n, 0x3c, seeds[index].bytes);
    return before + n + seeds[index].bytes;
}
