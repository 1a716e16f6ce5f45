/* See npy.h. The header's dictionary is read by a parser of exactly what the format allows: three keys, each
 * once, in any order. Floor: cli. */
#include "npy.h"
#include <string.h>

#define DESCR_READABLE "<f4, <f2, <f8, |b1, |u1, <i4 and <i8 can be read"

static const char *const descrs[TENSOR_TYPES] = {"<f4", "<f2", NULL, "<f8", "|b1", "|u1", "<i4", "<i8"};

typedef struct cursor {
    const char *at, *end;
} cursor;

static void skip_space(cursor *c) {
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\n'))
        c->at++;
}

/* Takes `word` if it is next. */
static bool take(cursor *c, const char *word) {
    skip_space(c);
    size_t n = strlen(word);
    if ((size_t)(c->end - c->at) < n || memcmp(c->at, word, n))
        return false;
    c->at += n;
    return true;
}

/* Takes a quoted string without escapes into text, cut to its size. */
static bool take_string(cursor *c, char *text, size_t size) {
    char close = take(c, "'") ? '\'' : take(c, "\"") ? '"' : 0;
    if (!close)
        return false;
    size_t n = 0;
    for (; c->at < c->end && *c->at != close; c->at++)
        if (n + 1 < size)
            text[n++] = *c->at;
    text[n] = 0;
    return c->at++ < c->end;
}

static bool take_size(cursor *c, int64_t *n) {
    skip_space(c);
    const char *first = c->at;
    for (*n = 0; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++)
        if (__builtin_mul_overflow(*n, 10, n) || __builtin_add_overflow(*n, *c->at - '0', n))
            return false;
    return c->at > first;
}

static bool read_descr(tensor *t, cursor *c, complaint *why) {
    char text[16];
    if (!take_string(c, text, sizeof text))
        return complain(why, "descr must be a string such as '<f4'; arrays of records are not tensors");
    for (int i = 0; i < TENSOR_TYPES; i++)
        if (descrs[i] && !strcmp(text, descrs[i])) {
            t->type = (tensor_type)i;
            return true;
        }
    if (text[0] == '>')
        return complain(why, "descr is '%s', which is big-endian; " DESCR_READABLE, quote(text).text);
    if (text[0] && text[1] == 'V')
        return complain(why, "descr is '%s', raw bytes; npy has no bf16, keep it in a .safetensors file",
                        quote(text).text);
    return complain(why, "descr is '%s'; " DESCR_READABLE, quote(text).text);
}

static bool read_order(cursor *c, complaint *why) {
    if (take(c, "False"))
        return true;
    if (take(c, "True"))
        return complain(why,
                        "fortran_order is True; save numpy.ascontiguousarray(x), whose rows are contiguous");
    return complain(why, "fortran_order must be False");
}

static bool read_shape(tensor *t, cursor *c, complaint *why) {
    if (!take(c, "("))
        return complain(why, "shape must be a tuple of integers");
    bool comma = true;
    for (t->dims = 0; !take(c, ")"); t->dims++) {
        if (t->dims == TENSOR_DIMS)
            return complain(why, "shape has more than %d dimensions", TENSOR_DIMS);
        if (!comma || !take_size(c, &t->shape[t->dims]))
            return complain(why, "shape[%d] must be an integer from 0 to 2^63 - 1, followed by ',' or ')'",
                            t->dims);
        comma = take(c, ",");
    }
    if (t->dims == 1 && !comma)
        return complain(why, "shape must be a tuple: one dimension is written (n,)");
    return true;
}

static bool read_header(tensor *t, cursor c, complaint *why) {
    static const char *const keys[3] = {"descr", "fortran_order", "shape"};
    bool seen[3] = {false, false, false};
    if (!take(&c, "{"))
        return complain(why, "header must be a dictionary that begins with '{'");
    while (!take(&c, "}")) {
        char key[24];
        if (!take_string(&c, key, sizeof key) || !take(&c, ":"))
            return complain(why, "header must be a dictionary of descr, fortran_order and shape");
        int i = 0;
        while (i < 3 && strcmp(key, keys[i]))
            i++;
        if (i == 3)
            return complain(why, "header has the key '%s'; descr, fortran_order and shape are known",
                            quote(key).text);
        if (seen[i])
            return complain(why, "header has the key %s twice", key);
        seen[i] = true;
        if (!(i == 0 ? read_descr(t, &c, why) : i == 1 ? read_order(&c, why) : read_shape(t, &c, why)))
            return false;
        if (!take(&c, ",")) {
            if (take(&c, "}"))
                break;
            return complain(why, "header: ',' or '}' must follow the value of %s", key);
        }
    }
    for (int i = 0; i < 3; i++)
        if (!seen[i])
            return complain(why, "header lacks the key %s", keys[i]);
    skip_space(&c);
    if (c.at != c.end)
        return complain(why, "header: only spaces may follow the dictionary");
    return true;
}

bool npy_read(tensor *t, const void *memory, size_t size, complaint *why) {
    const unsigned char *byte = memory;
    *t = (tensor){.name = ""};
    if (size < 10 || memcmp(byte, "\x93NUMPY", 6))
        return complain(why, "magic: the file does not begin with the bytes 93 'NUMPY' of the npy format");
    if (byte[6] < 1 || byte[6] > 3 || byte[7] != 0)
        return complain(why, "version is %d.%d; 1.0, 2.0 and 3.0 can be read", byte[6], byte[7]);
    size_t start = byte[6] == 1 ? 10 : 12;
    if (size < start)
        return complain(why, "header length: the file ends inside it, at %zu bytes", size);
    uint32_t length = (uint32_t)byte[8] | (uint32_t)byte[9] << 8;
    if (byte[6] > 1)
        length |= (uint32_t)byte[10] << 16 | (uint32_t)byte[11] << 24;
    if (length > size - start)
        return complain(why, "header length is %u, but only %zu bytes follow it", length, size - start);

    const char *header = (const char *)memory + start;
    if (!read_header(t, (cursor){header, header + length}, why))
        return false;
    if (!tensor_measure(t))
        return complain(why, "shape %s overflows 63 bits", tensor_shape(t).text);
    uint64_t room = size - start - length;
    if (room != t->bytes)
        return complain(why, "shape %s of %s takes %llu bytes, but the file has %llu bytes of data",
                        tensor_shape(t).text, descrs[t->type], (unsigned long long)t->bytes,
                        (unsigned long long)room);
    t->data = header + length;
    return true;
}

bool npy_write(FILE *stream, const tensor *t) {
    char header[256], shape[128];
    int at = 0;
    for (int i = 0; i < t->dims; i++)
        at += snprintf(shape + at, sizeof shape - (size_t)at, "%lld,", (long long)t->shape[i]);
    snprintf(header, sizeof header, "{'descr': '%s', 'fortran_order': False, 'shape': (%.*s), }",
             descrs[t->type], t->dims > 1 ? at - 1 : at, shape);
    /* The data begins at a multiple of 64 bytes: 10 for the preamble, the header, spaces and a newline. */
    int padded = ((int)strlen(header) + 10 + 1 + 63) / 64 * 64 - 10;
    const unsigned char preamble[10] = {0x93, 'N', 'U', 'M', 'P', 'Y', 1, 0, (unsigned char)padded, 0};
    return fwrite(preamble, sizeof preamble, 1, stream) == 1 &&
           fprintf(stream, "%-*s\n", padded - 1, header) == padded &&
           (t->bytes == 0 || fwrite(t->data, (size_t)t->bytes, 1, stream) == 1);
}
