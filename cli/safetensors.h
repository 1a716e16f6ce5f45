/* The safetensors format: 8 bytes of little-endian header length, a JSON object, then the data of all
 * tensors. Every field of the header is checked; a refusal is a sentence that names the field. Floor: cli. */
#ifndef CLI_SAFETENSORS_H
#define CLI_SAFETENSORS_H

#include "tensor.h"
#include <stdio.h>

/* What a file holds. Names and metadata belong to `header`, data to the memory that was read. */
typedef struct safetensors {
    tensor *tensors;
    size_t count;
    void *header;   /* json_t */
    void *metadata; /* json_t of strings, or NULL; borrowed from header */
} safetensors;

/* Reads from memory, which must outlive *file. On false *file is empty and *why says what is wrong. */
bool safetensors_read(safetensors *file, const void *memory, size_t size, complaint *why);
void safetensors_close(safetensors *file);

/* Calls `each` for every entry of the metadata until it returns false; returns the last result, true if none.
 */
bool safetensors_metadata(const safetensors *file,
                          bool (*each)(void *context, const char *key, const char *value), void *context);

/* Writes tensors and metadata (pairs of key and value, closed by NULL). False if memory or the stream fails.
 */
bool safetensors_write(FILE *stream, const tensor *tensors, size_t count, const char *const *metadata);

#endif
