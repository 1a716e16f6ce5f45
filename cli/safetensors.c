/* See safetensors.h. jansson parses the JSON (duplicate names refused, depth limited); the rest is checked
 * here. Floor: cli. */
#include "safetensors.h"
#include <jansson.h>
#include <stdlib.h>
#include <string.h>

/* The format's own limit on the header. */
#define HEADER_MAX 100000000u

static const char *const type_names[TENSOR_TYPES] = {"F32", "F16", "BF16", "F64", "BOOL", "U8", "I32", "I64"};

static uint64_t little_endian_64(const unsigned char *at) {
    uint64_t value = 0;
    for (int i = 7; i >= 0; i--)
        value = value << 8 | at[i];
    return value;
}

static bool read_type(tensor *t, const json_t *dtype, complaint *why) {
    quoted name = quote(t->name);
    if (!json_is_string(dtype))
        return complain(why, "tensor '%s': dtype must be a string such as \"F32\"", name.text);
    for (int i = 0; i < TENSOR_TYPES; i++)
        if (!strcmp(json_string_value(dtype), type_names[i])) {
            t->type = (tensor_type)i;
            return true;
        }
    return complain(why, "tensor '%s': dtype is '%s'; F32, F16, BF16, F64, BOOL, U8, I32 and I64 can be read",
                    name.text, quote(json_string_value(dtype)).text);
}

static bool read_shape(tensor *t, const json_t *shape, complaint *why) {
    quoted name = quote(t->name);
    if (!json_is_array(shape))
        return complain(why, "tensor '%s': shape must be an array of integers", name.text);
    if (json_array_size(shape) > TENSOR_DIMS)
        return complain(why, "tensor '%s': shape has %zu dimensions; at most %d can be read", name.text,
                        json_array_size(shape), TENSOR_DIMS);
    t->dims = (int)json_array_size(shape);
    for (int i = 0; i < t->dims; i++) {
        const json_t *n = json_array_get(shape, (size_t)i);
        if (!json_is_integer(n) || json_integer_value(n) < 0)
            return complain(why, "tensor '%s': shape[%d] must be an integer of 0 or more", name.text, i);
        t->shape[i] = json_integer_value(n);
    }
    if (!tensor_measure(t))
        return complain(why, "tensor '%s': shape %s overflows 63 bits", name.text, tensor_shape(t).text);
    return true;
}

static bool read_offsets(tensor *t, const json_t *offsets, const char *data, uint64_t room, complaint *why) {
    quoted name = quote(t->name);
    const json_t *first = json_array_get(offsets, 0), *last = json_array_get(offsets, 1);
    if (json_array_size(offsets) != 2 || !json_is_integer(first) || !json_is_integer(last))
        return complain(why, "tensor '%s': data_offsets must be an array of two integers", name.text);
    json_int_t lo = json_integer_value(first), hi = json_integer_value(last);
    if (lo < 0 || hi < lo)
        return complain(why, "tensor '%s': data_offsets [%lld,%lld] must ascend from 0", name.text,
                        (long long)lo, (long long)hi);
    if ((uint64_t)hi > room)
        return complain(why, "tensor '%s': data_offsets end at %lld, but the file has %llu bytes of data",
                        name.text, (long long)hi, (unsigned long long)room);
    if ((uint64_t)(hi - lo) != t->bytes)
        return complain(why, "tensor '%s': data_offsets span %lld bytes, but %s of %s takes %llu", name.text,
                        (long long)(hi - lo), tensor_shape(t).text, type_names[t->type],
                        (unsigned long long)t->bytes);
    t->data = data + lo;
    return true;
}

static bool read_tensor(tensor *t, const json_t *entry, const char *data, uint64_t room, complaint *why) {
    if (!json_is_object(entry))
        return complain(why, "tensor '%s': its entry in the header must be an object", quote(t->name).text);
    const json_t *dtype = json_object_get(entry, "dtype");
    const json_t *shape = json_object_get(entry, "shape");
    const json_t *offsets = json_object_get(entry, "data_offsets");
    if (!dtype || !shape || !offsets || json_object_size(entry) != 3)
        return complain(why,
                        "tensor '%s': its entry must hold dtype, shape and data_offsets, and nothing else",
                        quote(t->name).text);
    return read_type(t, dtype, why) && read_shape(t, shape, why) && read_offsets(t, offsets, data, room, why);
}

static bool read_metadata(safetensors *file, json_t *metadata, complaint *why) {
    if (!json_is_object(metadata))
        return complain(why, "__metadata__ must be an object of strings");
    const char *key;
    json_t *value;
    json_object_foreach(metadata, key, value) {
        if (!json_is_string(value))
            return complain(why, "__metadata__: the value of '%s' must be a string", quote(key).text);
    }
    file->metadata = metadata;
    return true;
}

/* Empty tensors come before those that begin at the same byte. */
static int by_place(const void *a, const void *b) {
    const tensor *x = a, *y = b;
    if (x->data != y->data)
        return (const char *)x->data < (const char *)y->data ? -1 : 1;
    return (x->bytes > y->bytes) - (x->bytes < y->bytes);
}

/* The tensors tile the data: no byte belongs to two of them, none to no one. */
static bool check_tiling(safetensors *file, const char *data, uint64_t room, complaint *why) {
    if (file->count > 1)
        qsort(file->tensors, file->count, sizeof *file->tensors, by_place);
    uint64_t end = 0;
    for (size_t i = 0; i < file->count; i++) {
        const tensor *t = &file->tensors[i];
        uint64_t at = (uint64_t)((const char *)t->data - data);
        if (at < end)
            return complain(why, "tensor '%s': data_offsets overlap those of '%s'", quote(t->name).text,
                            quote(t[-1].name).text);
        if (at > end)
            return complain(why, "tensor '%s': data_offsets leave a gap of %llu bytes before it",
                            quote(t->name).text, (unsigned long long)(at - end));
        end = at + t->bytes;
    }
    if (end != room)
        return complain(why, "data_offsets end at %llu, but the file has %llu bytes of data",
                        (unsigned long long)end, (unsigned long long)room);
    return true;
}

static bool read_header(safetensors *file, const char *data, uint64_t room, complaint *why) {
    file->tensors = calloc(json_object_size(file->header) + 1, sizeof *file->tensors);
    if (!file->tensors)
        return complain(why, "memory ran out");
    const char *key;
    json_t *entry;
    json_object_foreach((json_t *)file->header, key, entry) {
        tensor *t = &file->tensors[file->count];
        t->name = key;
        if (!strcmp(key, "__metadata__")) {
            if (!read_metadata(file, entry, why))
                return false;
        } else if (read_tensor(t, entry, data, room, why)) {
            file->count++;
        } else {
            return false;
        }
    }
    return check_tiling(file, data, room, why);
}

bool safetensors_read(safetensors *file, const void *memory, size_t size, complaint *why) {
    *file = (safetensors){0};
    if (size < 8)
        return complain(why, "header length: the file has %zu bytes, but safetensors begins with 8 for it",
                        size);
    uint64_t length = little_endian_64(memory);
    if (length > size - 8)
        return complain(why, "header length is %llu, but only %zu bytes follow it",
                        (unsigned long long)length, size - 8);
    if (length > HEADER_MAX)
        return complain(why, "header length is %llu; at most %u is legal", (unsigned long long)length,
                        HEADER_MAX);
    const char *header = (const char *)memory + 8;
    if (length == 0 || header[0] != '{')
        return complain(why, "header must be a JSON object that begins with '{' at byte 8");

    json_error_t error;
    file->header = json_loadb(header, (size_t)length, JSON_REJECT_DUPLICATES, &error);
    if (!file->header)
        return complain(why, "header is not JSON: %s (byte %d)", quote(error.text).text, error.position);
    if (read_header(file, header + length, size - 8 - length, why))
        return true;
    safetensors_close(file);
    return false;
}

void safetensors_close(safetensors *file) {
    json_decref(file->header);
    free(file->tensors);
    *file = (safetensors){0};
}

bool safetensors_metadata(const safetensors *file,
                          bool (*each)(void *context, const char *key, const char *value), void *context) {
    const char *key;
    json_t *value;
    json_object_foreach((json_t *)file->metadata, key, value) {
        if (!each(context, key, json_string_value(value)))
            return false;
    }
    return true;
}

/* The header's text, or NULL. Tensors are placed in the order of `order`. */
static char *header_text(const tensor *tensors, const size_t *order, size_t count,
                         const char *const *metadata) {
    json_t *header = json_object(), *notes = json_object();
    int failed = 0;
    for (; metadata && *metadata; metadata += 2)
        failed |= json_object_set_new(notes, metadata[0], json_string(metadata[1]));
    failed |= json_object_set_new(header, "__metadata__", notes);
    uint64_t end = 0;
    for (size_t i = 0; i < count; i++) {
        const tensor *t = &tensors[order[i]];
        json_t *shape = json_array();
        for (int d = 0; d < t->dims; d++)
            failed |= json_array_append_new(shape, json_integer(t->shape[d]));
        json_t *entry = json_pack("{s:s, s:o, s:[I,I]}", "dtype", type_names[t->type], "shape", shape,
                                  "data_offsets", (json_int_t)end, (json_int_t)(end + t->bytes));
        failed |= json_object_set_new(header, t->name, entry);
        end += t->bytes;
    }
    char *text = failed ? NULL : json_dumps(header, JSON_COMPACT);
    json_decref(header);
    return text;
}

/* Larger elements come first, so that every tensor is aligned to its element: the header is padded to 8. */
bool safetensors_write(FILE *stream, const tensor *tensors, size_t count, const char *const *metadata) {
    size_t *order = calloc(count + 1, sizeof *order), placed = 0;
    if (!order)
        return false;
    for (size_t bytes = 8; bytes; bytes /= 2)
        for (size_t i = 0; i < count; i++)
            if (tensor_type_bytes(tensors[i].type) == bytes)
                order[placed++] = i;

    char *text = header_text(tensors, order, count, metadata);
    bool ok = text != NULL;
    if (ok) {
        int padded = (int)((strlen(text) + 7) / 8 * 8);
        unsigned char length[8];
        for (int i = 0; i < 8; i++)
            length[i] = (unsigned char)((uint64_t)padded >> 8 * i);
        ok = fwrite(length, 8, 1, stream) == 1 && fprintf(stream, "%-*s", padded, text) == padded;
    }
    for (size_t i = 0; i < count && ok; i++) {
        const tensor *t = &tensors[order[i]];
        ok = t->bytes == 0 || fwrite(t->data, (size_t)t->bytes, 1, stream) == 1;
    }
    free(text);
    free(order);
    return ok;
}
