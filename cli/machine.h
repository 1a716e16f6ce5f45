/* Where a number was measured, in words.
 * Floor: cli. */
#ifndef CLI_MACHINE_H
#define CLI_MACHINE_H

#include <stddef.h>

typedef struct word_text {
    char text[96];
} word_text;

/* Value of the first line "key: value" of a text, up to the first ',', ';' or '('; "?" if there is none.
 * fb_info and fb_plan_explain write such lines. */
word_text word_after(const char *text, const char *key);

word_text machine_cpu(void);      /* the processor's model name */
word_text machine_compiler(void); /* "gcc 12.2.0" */
word_text machine_date(void);     /* "2026-11-30", UTC */
int machine_threads(void);        /* most that the library uses, by fb_info */

#endif
