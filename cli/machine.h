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

/* The word behind `lead` in the line "key: ..." of a text, up to a blank, comma, semicolon or
 * parenthesis; "?" if there is none. */
word_text word_behind(const char *text, const char *key, const char *lead);

word_text machine_cpu(void);      /* the processor's model name */
word_text machine_compiler(void); /* "gcc 12.2.0" */
word_text machine_date(void);     /* "2026-11-30", UTC */
int machine_threads(void);        /* most that the library uses, by fb_info */

/* What fb_info says of a CUDA device: "NVIDIA H200", "9.0"; the driver is for CUDA "13.0", NVRTC is "13.0",
 * and what multiplies for the unfused route "cuBLAS 13.0", or "none". */
typedef struct machine_gpu {
    word_text name, capability, driver, nvrtc, products;
} machine_gpu;
machine_gpu machine_find_gpu(int index);

/* "Apple M3 Max". */
word_text machine_find_metal(int index);

#endif
