/* See cache.h. A file KEY.bin is a header and the code, written as KEY.tmp.PID.RANDOM and then renamed.
 * Floor: jit. */
#include "base/file.h"
#include "base/hash.h"
#include "base/text.h"
#include "cache.h"
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

/* In the byte order of the machine; with another one `format` does not match. There is no padding, so that
 * every byte of a file is looked at. */
#define FORMAT UINT64_C(1)
static const char magic[8] = "fb__jit";

typedef struct header {
    char magic[8];
    uint64_t format;
    char key[32];
    uint64_t size, hash_a, hash_b; /* of the code behind */
} header;
_Static_assert(sizeof(header) == 72, "no padding");

static header make_header(const char *key, const void *code, size_t size) {
    fb__hash hash = fb__hash_begin();
    fb__hash_add(&hash, code, size);
    hash = fb__hash_end(hash);
    header h = {.format = FORMAT, .size = size, .hash_a = hash.a, .hash_b = hash.b};
    memcpy(h.magic, magic, sizeof h.magic);
    memcpy(h.key, key, sizeof h.key);
    return h;
}

/* The reason against a file with this content, or NULL. */
static const char *judge(const char *file, size_t size, const char *key) {
    header h;
    if (size < sizeof h)
        return "its file is shorter than a header";
    memcpy(&h, file, sizeof h);
    if (memcmp(h.magic, magic, sizeof h.magic) != 0 || h.format != FORMAT)
        return "its file is of another kind or version";
    if (memcmp(h.key, key, sizeof h.key) != 0)
        return "its file has another key";
    if (h.size != size - sizeof h)
        return "its file has another length than it says";
    header want = make_header(key, file + sizeof h, size - sizeof h);
    return memcmp(&h, &want, sizeof h) != 0 ? "its file is damaged" : NULL;
}

const char *fb__jit_load(const fb__jit_cache *cache, fb__jit_code *code) {
    char path[FB__JIT_PATH];
    fb__text text = {path, sizeof path, 0};
    fb__text_add(&text, "%s/%s.bin", cache->folder, code->key);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return errno == ENOENT ? "" : "its file cannot be opened";
    size_t size = 0;
    char *file = fb__file_read(fd, &size);
    const char *wrong = file ? judge(file, size, code->key) : "its file cannot be read";
    if (!wrong) /* used now, so that others go first; without the right to say so, it keeps its time */
        futimens(fd, NULL);
    close(fd);
    if (wrong) {
        free(file);
        return wrong;
    }
    code->size = size - sizeof(header);
    memmove(file, file + sizeof(header), code->size);
    code->at = file;
    code->origin = FB__JIT_DISK;
    return NULL;
}

/* A number that differs between threads and processes at one time; O_EXCL sees to the rest. */
static uint64_t random_number(int attempt) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    uint64_t parts[] = {(uint64_t)now.tv_sec, (uint64_t)now.tv_nsec, (uint64_t)(uintptr_t)&now,
                        (uint64_t)attempt};
    fb__hash hash = fb__hash_begin();
    fb__hash_add(&hash, parts, sizeof parts);
    return fb__hash_end(hash).a;
}

const char *fb__jit_store(const fb__jit_cache *cache, const fb__jit_code *code) {
    header h = make_header(code->key, code->at, code->size);
    if (code->size > cache->limit || sizeof h > cache->limit - code->size)
        return "it is larger than FLASHBACK_CACHE_MB";
    char path[FB__JIT_PATH], temporary[FB__JIT_PATH];
    fb__text text = {path, sizeof path, 0};
    fb__text_add(&text, "%s/%s.bin", cache->folder, code->key);
    int fd = -1;
    for (int attempt = 0; fd < 0 && attempt < 8; attempt++) {
        text = (fb__text){temporary, sizeof temporary, 0};
        fb__text_add(&text, "%s/%s.tmp.%ld.%016" PRIx64, cache->folder, code->key, (long)getpid(),
                     random_number(attempt));
        fd = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
        if (fd < 0 && errno != EEXIST)
            break;
    }
    if (fd < 0)
        return "the folder cannot be written";
    bool written = fb__file_write(fd, &h, sizeof h) == 0 && fb__file_write(fd, code->at, code->size) == 0 &&
                   fsync(fd) == 0;
    if (close(fd) != 0 || !written || rename(temporary, path) != 0) {
        unlink(temporary);
        return "its file cannot be written";
    }
    return NULL;
}
