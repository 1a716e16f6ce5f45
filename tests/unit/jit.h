/* What the tests of src/jit share: a folder of their own, a compiler that only counts, kernels to give it.
 * Next: test_jit.c, test_jit_cache.c, test_jit_race.c. */
#ifndef TESTS_UNIT_JIT_H
#define TESTS_UNIT_JIT_H

#include "src/jit/jit.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

#define COUNT(array) (sizeof(array) / sizeof *(array))

/* The test's folder, with kernels in top/cuda/kernels and a cache, not made yet, in top/cache. */
static char top[64];

/* A path in it; good until three more are asked for. */
static const char *path(const char *name) {
    static char text[4][512];
    static int turn;
    char *at = text[turn++ % 4];
    snprintf(at, sizeof *text, "%s/%s", top, name);
    return at;
}

static void put_bytes(const char *file, const void *bytes, size_t size) {
    int fd = open(file, O_WRONLY | O_CREAT | O_TRUNC, 0644);
    assert_true(fd >= 0);
    assert_int_equal(write(fd, bytes, size), size);
    assert_int_equal(close(fd), 0);
}

static void put(const char *name, const char *text) { put_bytes(path(name), text, strlen(text)); }

/* A name as a shell would remove it, whatever it is. */
static void remove_all(const char *name) {
    char command[600];
    snprintf(command, sizeof command, "rm -rf '%s'", name);
    assert_int_equal(system(command), 0);
}

static int jit_setup(void **state) {
    (void)state;
    static const char *const folders[] = {"shared", "cuda", "cuda/kernels"};
    static const char *const unset[] = {"FLASHBACK_CACHE_MB", "FLASHBACK_LOG"};
    strcpy(top, "/tmp/flashback-jit-XXXXXX");
    if (!mkdtemp(top) || chmod(top, 0755) != 0)
        return 1;
    for (size_t i = 0; i < COUNT(folders); i++)
        if (mkdir(path(folders[i]), 0755) != 0)
            return 1;
    for (size_t i = 0; i < COUNT(unset); i++)
        unsetenv(unset[i]);
    put("cuda/kernels/k.cu", "kernel\n");
    put("cuda/kernels/other.cu", "kernel\n");
    setenv("FLASHBACK_KERNELS", path("cuda/kernels"), 1);
    setenv("FLASHBACK_CACHE", path("cache"), 1);
    return 0;
}

static int jit_teardown(void **state) {
    (void)state;
    remove_all(top);
    return 0;
}

/* The machine code is the text, and zeros up to `size` bytes. */
typedef struct compiler {
    atomic_int calls;
    long sleep_ms;
    size_t size;
    fb_status status;
} compiler;

static fb_status compile(void *context, const char *source, const char *name, void **code, size_t *size) {
    compiler *c = context;
    assert_non_null(strstr(source, name));
    atomic_fetch_add(&c->calls, 1);
    if (c->sleep_ms)
        nanosleep(&(struct timespec){c->sleep_ms / 1000, c->sleep_ms % 1000 * 1000000}, NULL);
    if (c->status != FB_OK)
        return c->status;
    *size = c->size ? c->size : strlen(source);
    *code = calloc(1, *size);
    if (!*code)
        return FB_MEMORY;
    memcpy(*code, source, strlen(source) < *size ? strlen(source) : *size);
    return FB_OK;
}

static const fb__define defines[] = {{"FB_D", 128}, {"FB_LEFT", -3}, {"FB_MOST", INT64_MAX}};

static inline fb__jit_request request(compiler *c) {
    return (fb__jit_request){.file = "k.cu",
                             .defines = defines,
                             .count = COUNT(defines),
                             .arch = "sm_90a",
                             .compiler = "nvrtc 13.0",
                             .options = "-O3",
                             .compile = compile,
                             .context = c};
}

#endif
