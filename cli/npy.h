/* The npy format: magic, version, header length, a Python dictionary, then the data of one array. Versions 1,
 * 2 and 3; little-endian, C order. bf16 has no dtype in it. Every field is checked; a refusal names the
 * field. Floor: cli. */
#ifndef CLI_NPY_H
#define CLI_NPY_H

#include "tensor.h"
#include <stdio.h>

/* Reads from memory, which must outlive t->data. The name is left "". */
bool npy_read(tensor *t, const void *memory, size_t size, complaint *why);

/* False if the stream fails. t->type must not be TENSOR_BF16. */
bool npy_write(FILE *stream, const tensor *t);

#endif
