/* See file.h. */
#include "file.h"
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

char *fb__file_read(int file, size_t *size) {
    struct stat status;
    if (fstat(file, &status) != 0 || !S_ISREG(status.st_mode) || status.st_size < 0 ||
        (uintmax_t)status.st_size >= SIZE_MAX)
        return NULL;
    size_t room = (size_t)status.st_size, length = 0;
    char *at = malloc(room + 1);
    if (!at)
        return NULL;
    while (length < room) { /* a file that shrinks meanwhile is as long as it was found to be */
        ssize_t n = read(file, at + length, room - length);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            free(at);
            return NULL;
        }
        if (n == 0)
            break;
        length += (size_t)n;
    }
    at[length] = 0;
    *size = length;
    return at;
}

int fb__file_write(int file, const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t n = write(file, at, size);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return -1;
        at += n;
        size -= (size_t)n;
    }
    return 0;
}
