/* Tensors as files hold them: a name, an element type, a shape and borrowed bytes. Readers fill these from
 * memory, writers take them; neither knows what attention is. Floor: cli. Next: safetensors.h, npy.h (the two
 * formats), file.h (mapping and atomic writing). */
#ifndef CLI_TENSOR_H
#define CLI_TENSOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TENSOR_DIMS 4 /* the most that attention needs */

typedef enum tensor_type {
    TENSOR_F32,
    TENSOR_F16,
    TENSOR_BF16,
    TENSOR_F64,
    TENSOR_BOOL,
    TENSOR_U8,
    TENSOR_I32,
    TENSOR_I64,
    TENSOR_TYPES
} tensor_type;

typedef struct tensor {
    const char *name; /* "" where the format has none */
    tensor_type type;
    int dims;
    int64_t shape[TENSOR_DIMS];
    const void *data; /* not necessarily aligned to the element */
    uint64_t bytes;
} tensor;

/* A sentence about what is wrong. */
typedef struct complaint {
    char text[400];
} complaint;

/* Writes the sentence; returns false, so that a refusal is one statement. */
__attribute__((format(printf, 2, 3))) bool complain(complaint *why, const char *format, ...);

/* A name from a file made fit for a sentence: printable ASCII, at most 40 characters. */
typedef struct quoted {
    char text[44];
} quoted;
quoted quote(const char *name);

size_t tensor_type_bytes(tensor_type type);

/* Sets t->bytes from type and shape; false if they do not fit 63 bits. A size of 0 is legal. */
bool tensor_measure(tensor *t);

/* "[2,8,1024,64]" */
typedef struct shape_text {
    char text[4 * 21 + 3];
} shape_text;
shape_text tensor_shape(const tensor *t);

#endif
