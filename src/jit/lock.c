/* See lock.h.
 *
 * flock belongs to an open file, and every call opens one, so that threads exclude each other as well.
 * Whoever holds the lock removes its file before letting go. Those who waited then hold a file without a
 * name, while the next to come would make another; so a lock counts only if its file still has the name, and
 * is tried again otherwise. */
#include "lock.h"
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define LONGEST_NAP 20 /* ms; a compilation takes some hundred */

static bool has_name(int lock, const char *path) {
    struct stat held, named;
    return fstat(lock, &held) == 0 && stat(path, &named) == 0 && held.st_ino == named.st_ino &&
           held.st_dev == named.st_dev;
}

static int64_t now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

int fb__jit_lock(const char *path, int64_t ms) {
    int64_t end = now_ms() + ms;
    long nap = 1;
    for (;;) {
        int lock = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0644);
        if (lock < 0)
            return -1;
        int failed;
        while ((failed = flock(lock, LOCK_EX | LOCK_NB)) != 0 && (errno == EWOULDBLOCK || errno == EINTR)) {
            if (now_ms() >= end)
                break;
            nanosleep(&(struct timespec){0, nap * 1000000}, NULL);
            nap = nap < LONGEST_NAP ? nap + 1 : nap;
        }
        if (!failed && has_name(lock, path))
            return lock;
        close(lock);
        if (failed || now_ms() >= end)
            return -1;
    }
}

void fb__jit_unlock(int lock, const char *path) {
    if (has_name(lock, path))
        unlink(path);
    /* A child that was forked meanwhile has the open file too, and closing it here would not end the lock. */
    flock(lock, LOCK_UN);
    close(lock);
}
