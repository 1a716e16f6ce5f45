/* Any bytes as a .npy file: either the array lies inside them, or a sentence says why not. */
#include "cli/npy.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

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
