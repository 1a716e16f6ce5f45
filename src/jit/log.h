/* FLASHBACK_LOG: a line for each thing that happens to a kernel's machine code. Floor: jit. */
#ifndef FB_JIT_LOG_H
#define FB_JIT_LOG_H

#include "flashback.h"
#include <stddef.h>

typedef struct fb__jit_event {
    const char *what; /* hit | compiled | recompiled | failed | evicted */
    const char *file; /* kernel file, "-" where it is not known */
    const char *key;
    double ms;
    size_t bytes;
    const char *why;  /* NULL, or more about `what` */
    const char *lost; /* NULL, or why the code is not kept */
} fb__jit_event;

/* *log is -1 when the variable is unset. Close it. */
fb_status fb__jit_log_open(int *log);

/* In one write, so that lines of many processes do not mix. */
void fb__jit_log_add(int log, const fb__jit_event *event);

#endif
