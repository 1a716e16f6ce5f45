/* See file.h. Floor: cli. */
#include "file.h"
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

bool file_map(mapping *map, const char *path, complaint *why) {
    static char nothing[1];
    struct stat info;
    *map = (mapping){nothing, 0};
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || fstat(fd, &info)) {
        complain(why, "%s: cannot be opened: %s", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return false;
    }
    bool ok = S_ISREG(info.st_mode) || complain(why, "%s: is not a regular file", path);
    if (ok && info.st_size > 0) {
        void *data = mmap(NULL, (size_t)info.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        ok = data != MAP_FAILED || complain(why, "%s: cannot be mapped: %s", path, strerror(errno));
        if (ok)
            *map = (mapping){data, (size_t)info.st_size};
    }
    close(fd);
    return ok;
}

void file_unmap(mapping *map) {
    if (map->size)
        munmap(map->data, map->size);
    *map = (mapping){0};
}

/* mkstemp makes files private; the draft gets the mode that fopen would have given. */
bool file_begin(draft *d, const char *path, complaint *why) {
    *d = (draft){0};
    if (strlen(path) >= sizeof d->path)
        return complain(why, "the output's path is longer than %zu bytes", sizeof d->path - 1);
    strcpy(d->path, path);
    snprintf(d->temporary, sizeof d->temporary, "%s.XXXXXX", path);
    int fd = mkstemp(d->temporary);
    if (fd < 0)
        return complain(why, "%s: cannot be written: %s", path, strerror(errno));
    mode_t mask = umask(0);
    umask(mask);
    if (fchmod(fd, 0666 & ~mask) == 0 && (d->stream = fdopen(fd, "w")))
        return true;
    complain(why, "%s: cannot be written: %s", path, strerror(errno));
    close(fd);
    unlink(d->temporary);
    return false;
}

bool file_commit(draft *d, complaint *why) {
    /* On disk before it takes the old one's place, so that a loss of power leaves one of them too. */
    bool ok = fflush(d->stream) == 0 && !ferror(d->stream) && fsync(fileno(d->stream)) == 0;
    ok = fclose(d->stream) == 0 && ok;
    if (ok && rename(d->temporary, d->path) == 0)
        return true;
    complain(why, "%s: cannot be written: %s", d->path, strerror(errno));
    unlink(d->temporary);
    return false;
}

void file_abandon(draft *d) {
    fclose(d->stream);
    unlink(d->temporary);
}

bool file_ends(const char *path, const char *extension) {
    size_t n = strlen(path), m = strlen(extension);
    return n >= m && !strcmp(path + n - m, extension);
}
