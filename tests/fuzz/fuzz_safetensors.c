/* Any bytes as a .safetensors file: either every tensor lies inside them, or a sentence says why not. */
#include "cli/safetensors.h"
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t fb_fuzz_seed_input(unsigned index, uint8_t *data, size_t max);

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

/* Small files that are right, for the mutations to start from. */
size_t fb_fuzz_seed_input(unsigned index, uint8_t *data, size_t max) {
    static const struct {
        const char *header;
        size_t bytes;
    } seeds[] = {
        {"{}", 0},
        {"{\"q\":{\"dtype\":\"F32\",\"shape\":[1,2,3,4],\"data_offsets\":[0,96]}}", 96},
        {"{\"__metadata__\":{\"causal\":\"true\",\"scale\":\"0.5\"},"
         "\"k\":{\"dtype\":\"BF16\",\"shape\":[2,3],\"data_offsets\":[0,12]},"
         "\"v\":{\"dtype\":\"F64\",\"shape\":[],\"data_offsets\":[12,20]}}   ",
         20},
        {"{\"m\":{\"dtype\":\"U8\",\"shape\":[0,9],\"data_offsets\":[0,0]},"
         "\"c\":{\"dtype\":\"I32\",\"shape\":[3],\"data_offsets\":[0,12]}}",
         12},
    };
    if (index >= sizeof seeds / sizeof *seeds)
        return 0;
    const size_t n = strlen(seeds[index].header);
    need(8 + n + seeds[index].bytes <= max);
    for (int i = 0; i < 8; i++)
        data[i] = (uint8_t)((uint64_t)n >> (8 * i));
    memcpy(data + 8, seeds[index].header, n);
    memset(data + 8 + n, 1, seeds[index].bytes);
    return 8 + n + seeds[index].bytes;
}
