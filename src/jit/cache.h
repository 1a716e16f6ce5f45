/* The folder of compiled kernels as files: what cache.c stands on. Floor: jit. Next: store.c. */
#ifndef FB_JIT_CACHE_H
#define FB_JIT_CACHE_H

#include "jit.h"

#define FB__JIT_PATH 4096

/* The folder and what is told about it, for the time of one request. */
typedef struct fb__jit_cache {
    char folder[FB__JIT_PATH - 128]; /* "" for none; with a file's name it fits into FB__JIT_PATH */
    uint64_t limit;                  /* bytes of all files */
    int log;                         /* as fb__jit_log_open */
} fb__jit_cache;

/* Fills at, size and origin of the code with this key, and returns NULL; or says why it could not: "" if
 * there is none. A file that is torn, foreign or damaged in any place is as good as none. */
const char *fb__jit_load(const fb__jit_cache *cache, fb__jit_code *code);

/* Keeps the code; NULL, or why it could not. Nobody ever sees a part of it under its name. */
const char *fb__jit_store(const fb__jit_cache *cache, const fb__jit_code *code);

/* Removes what killed processes left behind, and as many of the files used longest ago, but not that of
 * `key`, as are above the limit. */
void fb__jit_sweep(const fb__jit_cache *cache, const char *key);

#endif
