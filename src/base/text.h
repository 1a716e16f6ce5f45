/* Text: a bounded writer with snprintf's rules, and the calling thread's error sentence.
 * Floor: base. */
#ifndef FB_BASE_TEXT_H
#define FB_BASE_TEXT_H

#include <stddef.h>

/* Appends to a caller's buffer, always closed by 0; `length` counts what a large enough buffer would hold. */
typedef struct fb__text {
    char *at;
    size_t size, length;
} fb__text;

__attribute__((format(printf, 2, 3))) void fb__text_add(fb__text *text, const char *format, ...);

/* Sets the sentence of fb_last_error. Refusals go through fb__error of core/error.h. */
__attribute__((format(printf, 1, 2))) void fb__error_set(const char *format, ...);
const char *fb__error_text(void);
void fb__error_clear(void);

#endif
