/* Kernel text and baked constants become machine code: from the disk if it was compiled before, by a
 * backend's compiler otherwise. Nothing here knows a device. Floor: jit.
 *
 * Next: spec.c (what the compiler is given, and its key), cache.c (the folder), source.h (the texts). */
#ifndef FB_JIT_JIT_H
#define FB_JIT_JIT_H

#include "flashback.h"
#include <stddef.h>
#include <stdint.h>

/* "#define name value" ahead of the text. */
typedef struct fb__define {
    const char *name;
    int64_t value;
} fb__define;

/* All that machine code depends on; the library's version and the text of the kernel come on top. Requests
 * that agree in all of it have one key, and share one compilation. */
typedef struct fb__jit_request {
    const char *file;          /* embedded kernel file, "forward.cu" */
    const fb__define *defines; /* baked constants; their order counts */
    int count;
    const char *arch;     /* "sm_90a" */
    const char *compiler; /* name and version, "nvrtc 13.0" */
    const char *options;  /* the compiler's options, as one text */

    /* Compiles `source`; `name` is the kernel file, for messages. On FB_OK *code comes from malloc and is the
     * caller's; otherwise it is not looked at, and the sentence of fb_last_error is set. It is called at most
     * once for a request, by the thread that asks. */
    fb_status (*compile)(void *context, const char *source, const char *name, void **code, size_t *size);
    void *context;
} fb__jit_request;

typedef enum fb__jit_origin { FB__JIT_DISK, FB__JIT_COMPILED } fb__jit_origin;

typedef struct fb__jit_code {
    void *at; /* from malloc, and the caller's to free */
    size_t size;
    fb__jit_origin origin;
    double ms;    /* how long fb__jit_get took, waiting for others included */
    char key[33]; /* hexadecimal; the name of its file */
} fb__jit_code;

/* The machine code of a request. Any number of threads and processes may ask at once; those that ask for the
 * same compile it once, and the others wait. A folder that cannot be used costs time only: then every request
 * compiles. Errors are those of compile, of the kernel text (fb__jit_source), of memory, and FB_INVALID for
 * FLASHBACK_CACHE_MB and FLASHBACK_LOG. On an error code->at is NULL. */
fb_status fb__jit_get(const fb__jit_request *request, fb__jit_code *code);

/* The cache folder in use, made where it is missing; "" with FB_OK when there is none, because none is wanted
 * (FLASHBACK_CACHE=off), can be used, or fits into `size` bytes. */
fb_status fb__jit_folder(char *path, size_t size);

#endif
