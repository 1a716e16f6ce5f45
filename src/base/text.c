/* See text.h. The error sentence is the library's only mutable object: one buffer per thread. */
#include "text.h"
#include <stdarg.h>
#include <stdio.h>

static _Thread_local char error_text[1024];

static void add(fb__text *text, const char *format, va_list arguments) {
    size_t room = text->length < text->size ? text->size - text->length : 0;
    int n = vsnprintf(room ? text->at + text->length : NULL, room, format, arguments);
    if (n > 0)
        text->length += (size_t)n;
}

void fb__text_add(fb__text *text, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    add(text, format, arguments);
    va_end(arguments);
}

void fb__error_set(const char *format, ...) {
    fb__text text = {error_text, sizeof error_text, 0};
    va_list arguments;
    va_start(arguments, format);
    add(&text, format, arguments);
    va_end(arguments);
}

const char *fb__error_text(void) { return error_text; }

void fb__error_clear(void) { error_text[0] = 0; }
