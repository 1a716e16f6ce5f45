/* Removing files from the folder of compiled kernels; see cache.h. Only names that begin with a key are
 * touched: the folder may hold other things. Floor: jit. */
#include "base/text.h"
#include "cache.h"
#include "lock.h"
#include "log.h"
#include <dirent.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define KEY_LENGTH 32
#define LEFT_BEHIND 3600 /* seconds after which nobody is at work on a file any more */

typedef struct entry {
    char key[KEY_LENGTH + 1];
    time_t used;
    uint64_t size;
} entry;

typedef struct entries {
    entry *at;
    size_t count, room;
    uint64_t size;
} entries;

/* What comes after the key in a file's name, or NULL if it does not begin with one. */
static const char *after_key(const char *name) {
    return strspn(name, "0123456789abcdef") == KEY_LENGTH ? name + KEY_LENGTH : NULL;
}

static bool add(entries *all, const char *name, const struct stat *status) {
    if (all->count == all->room) {
        size_t room = 2 * all->room + 64;
        entry *larger = realloc(all->at, room * sizeof *larger);
        if (!larger)
            return false;
        all->at = larger;
        all->room = room;
    }
    entry *e = &all->at[all->count++];
    memcpy(e->key, name, KEY_LENGTH);
    e->key[KEY_LENGTH] = 0;
    e->used = status->st_mtime;
    e->size = (uint64_t)status->st_size;
    all->size += e->size;
    return true;
}

/* Oldest first. */
static int compare(const void *a, const void *b) {
    const entry *x = a, *y = b;
    return x->used != y->used ? (x->used > y->used) - (x->used < y->used) : strcmp(x->key, y->key);
}

static void evict(const fb__jit_cache *cache, const char *key, entries *all) {
    qsort(all->at, all->count, sizeof *all->at, compare);
    for (size_t i = 0; i < all->count && all->size > cache->limit; i++) {
        const entry *e = &all->at[i];
        if (strcmp(e->key, key) == 0)
            continue;
        char path[FB__JIT_PATH];
        fb__text text = {path, sizeof path, 0};
        fb__text_add(&text, "%s/%s.bin", cache->folder, e->key);
        if (unlink(path) != 0)
            continue;
        all->size -= e->size;
        fb__jit_log_add(
            cache->log,
            &(fb__jit_event){.what = "evicted", .file = "-", .key = e->key, .bytes = (size_t)e->size});
    }
}

/* A lock's age says nothing: it is removed only by someone who holds it. */
static void remove_left_behind(const char *path, bool is_lock) {
    int lock = is_lock ? fb__jit_lock(path, 0) : -1;
    if (lock >= 0)
        fb__jit_unlock(lock, path);
    else if (!is_lock)
        unlink(path);
}

void fb__jit_sweep(const fb__jit_cache *cache, const char *key) {
    DIR *folder = opendir(cache->folder);
    if (!folder)
        return;
    entries all = {NULL, 0, 0, 0};
    time_t now = time(NULL);
    bool complete = true;
    for (struct dirent *d; complete && (d = readdir(folder));) {
        const char *rest = after_key(d->d_name);
        struct stat status;
        char path[FB__JIT_PATH];
        fb__text text = {path, sizeof path, 0};
        fb__text_add(&text, "%s/%s", cache->folder, d->d_name);
        if (!rest || text.length >= sizeof path || lstat(path, &status) != 0 || !S_ISREG(status.st_mode))
            continue;
        bool is_lock = strcmp(rest, ".lock") == 0;
        if (strcmp(rest, ".bin") == 0)
            complete = add(&all, d->d_name, &status);
        else if ((is_lock || strncmp(rest, ".tmp.", 5) == 0) && now - status.st_mtime > LEFT_BEHIND)
            remove_left_behind(path, is_lock);
    }
    closedir(folder);
    if (complete && all.count) /* without memory for the list, the next that compiles does it */
        evict(cache, key, &all);
    free(all.at);
}
