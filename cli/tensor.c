/* See tensor.h. Floor: cli. */
#include "tensor.h"
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

bool complain(complaint *why, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(why->text, sizeof why->text, format, arguments);
    va_end(arguments);
    return false;
}

quoted quote(const char *name) {
    quoted q;
    size_t n = 0;
    for (; n < 40 && name[n]; n++)
        q.text[n] = name[n] >= ' ' && name[n] <= '~' ? name[n] : '?';
    strcpy(q.text + n, name[n] ? "..." : "");
    return q;
}

size_t tensor_type_bytes(tensor_type type) {
    static const size_t bytes[TENSOR_TYPES] = {4, 2, 2, 8, 1, 1, 4, 8};
    return bytes[type];
}

bool tensor_measure(tensor *t) {
    int64_t bytes = (int64_t)tensor_type_bytes(t->type);
    bool empty = false;
    for (int i = 0; i < t->dims; i++)
        empty |= t->shape[i] == 0;
    for (int i = 0; i < t->dims && !empty; i++)
        if (__builtin_mul_overflow(bytes, t->shape[i], &bytes))
            return false;
    t->bytes = empty ? 0 : (uint64_t)bytes;
    return true;
}

shape_text tensor_shape(const tensor *t) {
    shape_text s;
    int at = snprintf(s.text, sizeof s.text, "[");
    for (int i = 0; i < t->dims; i++)
        at +=
            snprintf(s.text + at, sizeof s.text - (size_t)at, "%s%lld", i ? "," : "", (long long)t->shape[i]);
    snprintf(s.text + at, sizeof s.text - (size_t)at, "]");
    return s;
}
