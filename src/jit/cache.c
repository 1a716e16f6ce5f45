/* fb__jit_get: the file of the key if there is one; otherwise one thread of one process compiles and keeps
 * it. */
#include "cache.h"
#include "base/env.h"
#include "core/error.h"
#include "lock.h"
#include "log.h"
#include "spec.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define LIMIT_MB 256       /* by default; the code of one kernel takes some 50 KB */
#define LONGEST_WAIT 60000 /* ms; whoever holds the lock for longer hangs, or has been stopped */

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

static fb_status read_limit(uint64_t *bytes) {
    const char *text = fb__env_get(FB__ENV_FLASHBACK_CACHE_MB);
    *bytes = (uint64_t)LIMIT_MB << 20;
    if (!text)
        return FB_OK;
    char *end;
    errno = 0;
    unsigned long long value = strtoull(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno || value > UINT64_MAX >> 20)
        return fb__error(FB_INVALID, "FLASHBACK_CACHE_MB is '%s', expected a number of megabytes, 0 or more",
                         text);
    *bytes = (uint64_t)value << 20;
    return FB_OK;
}

static fb_status open_cache(fb__jit_cache *cache) {
    cache->log = -1;
    FB_TRY(read_limit(&cache->limit));
    FB_TRY(fb__jit_folder(cache->folder, sizeof cache->folder));
    return fb__jit_log_open(&cache->log);
}

/* `why` is fb__jit_load's answer: NULL for a hit. */
static void report(const fb__jit_cache *cache, const fb__jit_request *request, const fb__jit_code *code,
                   const char *what, const char *why, const char *lost) {
    fb__jit_event event = {.what = what,
                           .file = request->file,
                           .key = code->key,
                           .ms = code->ms,
                           .bytes = code->size,
                           .why = why && *why ? why : NULL,
                           .lost = lost};
    fb__jit_log_add(cache->log, &event);
}

static fb_status compile(const fb__jit_cache *cache, const fb__jit_request *request, const char *source,
                         fb__jit_code *code, const char *why, double start) {
    void *at = NULL;
    size_t size = 0;
    fb_status status = request->compile(request->context, source, request->file, &at, &size);
    code->ms = now_ms() - start;
    if (status != FB_OK) {
        report(cache, request, code, "failed", why, NULL);
        return status;
    }
    code->at = at;
    code->size = size;
    code->origin = FB__JIT_COMPILED;
    const char *lost = cache->folder[0] ? fb__jit_store(cache, code) : "there is no folder";
    report(cache, request, code, *why ? "recompiled" : "compiled", why, lost);
    if (!lost)
        fb__jit_sweep(cache, code->key);
    return FB_OK;
}

static fb_status get(const fb__jit_cache *cache, const fb__jit_request *request, const char *source,
                     fb__jit_code *code, double start) {
    if (!cache->folder[0])
        return compile(cache, request, source, code, "", start);
    const char *why = fb__jit_load(cache, code);
    if (!why) {
        code->ms = now_ms() - start;
        report(cache, request, code, "hit", why, NULL);
        return FB_OK;
    }
    char path[FB__JIT_PATH];
    fb__text text = {path, sizeof path, 0};
    fb__text_add(&text, "%s/%s.lock", cache->folder, code->key);
    int lock = fb__jit_lock(path, LONGEST_WAIT);
    if (lock >= 0)
        why = fb__jit_load(cache, code); /* whoever held the lock before may have compiled it */
    fb_status status = FB_OK;
    if (why) {
        status = compile(cache, request, source, code, why, start);
    } else {
        code->ms = now_ms() - start;
        report(cache, request, code, "hit", why, NULL);
    }
    if (lock >= 0)
        fb__jit_unlock(lock, path);
    return status;
}

fb_status fb__jit_get(const fb__jit_request *request, fb__jit_code *code) {
    double start = now_ms();
    memset(code, 0, sizeof *code);
    fb__jit_cache cache;
    FB_TRY(open_cache(&cache));
    char *source;
    fb_status status = fb__jit_spec(request, &source, code->key);
    if (status == FB_OK)
        status = get(&cache, request, source, code, start);
    free(source);
    if (cache.log >= 0)
        close(cache.log);
    return status;
}
