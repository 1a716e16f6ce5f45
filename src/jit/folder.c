/* Where compiled kernels are kept: FLASHBACK_CACHE, else the first usable of $XDG_CACHE_HOME/flashback,
 * ~/.cache/flashback and /tmp/flashback-UID. Floor: jit.
 *
 * What lies in the folder becomes code that runs. So a folder that nobody named has to be the user's own, and
 * closed to others' writing; one that FLASHBACK_CACHE names is taken as it is, even for reading only. */
#include "base/env.h"
#include "core/error.h"
#include "jit.h"
#include <errno.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Makes what is missing of a path, beyond its first `there` bytes; false if it is no folder in the end. */
static bool make(char *path, size_t there) {
    struct stat status;
    if (stat(path, &status) == 0)
        return S_ISDIR(status.st_mode);
    for (char *slash = path + there; (slash = strchr(slash + 1, '/'));) {
        *slash = 0;
        bool failed = mkdir(path, 0700) != 0 && errno != EEXIST;
        *slash = '/';
        if (failed)
            return false;
    }
    if (mkdir(path, 0700) != 0 && errno != EEXIST)
        return false;
    return stat(path, &status) == 0 && S_ISDIR(status.st_mode);
}

static bool is_ours(const char *path) {
    struct stat status;
    return stat(path, &status) == 0 && status.st_uid == geteuid() && (status.st_mode & 022) == 0 &&
           access(path, R_OK | W_OK | X_OK) == 0;
}

/* In a folder where anyone may make anything: no link, and closed to all others. */
static bool is_private(const char *path) {
    struct stat status;
    return lstat(path, &status) == 0 && S_ISDIR(status.st_mode) && (status.st_mode & 0777) == 0700 &&
           is_ours(path);
}

/* Writes the path; false if it does not fit. */
static bool put(char *path, size_t size, const char *parent, const char *rest) {
    fb__text text = {path, size, 0};
    fb__text_add(&text, "%s%s", parent, rest);
    return text.length < size;
}

fb_status fb__jit_folder(char *path, size_t size) {
    const char *named = fb__env_get(FB__ENV_FLASHBACK_CACHE);
    const char *caches = fb__env_get(FB__ENV_XDG_CACHE_HOME), *home = fb__env_get(FB__ENV_HOME);
    if (!size)
        return FB_OK;
    if (named) {
        bool off = strcmp(named, "off") == 0;
        if (off || !put(path, size, named, "") || !make(path, 0) || access(path, R_OK | X_OK) != 0)
            path[0] = 0;
        return FB_OK;
    }
    /* A relative path there counts as none, by the specification of XDG_CACHE_HOME. */
    if (caches && caches[0] == '/' && put(path, size, caches, "/flashback") && make(path, 0) && is_ours(path))
        return FB_OK;
    /* A home that does not exist is that of a user who should have none. */
    if (home && home[0] == '/' && put(path, size, home, "/.cache/flashback") && make(path, strlen(home)) &&
        is_ours(path))
        return FB_OK;
    char user[32];
    fb__text text = {user, sizeof user, 0};
    fb__text_add(&text, "%ju", (uintmax_t)geteuid());
    if (!put(path, size, "/tmp/flashback-", user) || !make(path, 4) || !is_private(path))
        path[0] = 0;
    return FB_OK;
}
