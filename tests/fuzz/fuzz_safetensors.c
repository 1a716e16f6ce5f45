/* Any bytes as a .safetensors file: either every tensor lies inside them, or a sentence says why not. */
#include "cli/safetensors.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static void need(bool condition) {
    if (!condition)
        abort();
}

static bool look(void *context, const char *key, const char *value) {
    *(size_t *)context += strlen(key) + strlen(value);
    return true;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    safetensors file;
    complaint why = {""};
    if (!safetensors_read(&file, data, size, &why)) {
        need(*why.text && strlen(why.text) < sizeof why.text && !file.header && !file.tensors);
        return 0;
    }
    size_t covered = 0, letters = 0;
    for (size_t i = 0; i < file.count; i++) {
        tensor t = file.tensors[i];
        const uint8_t *first = t.data;
        need(t.dims >= 0 && t.dims <= TENSOR_DIMS && first >= data && first + t.bytes <= data + size);
        need(tensor_measure(&t) && t.bytes == file.tensors[i].bytes && *tensor_shape(&t).text == '[');
        covered += t.bytes;
    }
    need(covered < size && safetensors_metadata(&file, look, &letters) && letters < size);
    safetensors_close(&file);
    return 0;
}
