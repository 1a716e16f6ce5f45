/* See source.h. */
#include "source.h"
#include "base/env.h"
#include "base/file.h"
#include "core/error.h"
#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define NAME_SIZE 64
#define FILES_MAX 64

/* The text so far, closed by 0, and the files that are in it. */
typedef struct walk {
    const char *folder; /* FLASHBACK_KERNELS, or NULL */
    char *text;
    size_t length, room;
    char seen[FILES_MAX][NAME_SIZE];
    int files;
} walk;

static fb_status add(walk *w, const char *text, size_t size) {
    if (w->room - w->length <= size) {
        size_t room = 2 * w->room + size + 1;
        char *larger = realloc(w->text, room);
        if (!larger)
            return fb__error(FB_MEMORY, "%zu bytes for the text of a kernel could not be allocated", room);
        w->text = larger;
        w->room = room;
    }
    memcpy(w->text + w->length, text, size);
    w->length += size;
    w->text[w->length] = 0;
    return FB_OK;
}

static fb_status add_line_directive(walk *w, long line, const char *name) {
    char directive[NAME_SIZE + 32];
    fb__text text = {directive, sizeof directive, 0};
    fb__text_add(&text, "#line %ld \"%s\"\n", line, name);
    return add(w, directive, text.length);
}

/* A file's text: `at` lies in `owned` if it was read from a folder, and that has to be freed. */
typedef struct file {
    const char *at;
    char *owned;
    size_t size;
} file;

static fb_status find_in_folder(const char *folder, const char *name, file *found) {
    static const char *const places[] = {"", "/..", "/../../shared"};
    int reason = ENOENT;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++) {
        char path[4096];
        fb__text text = {path, sizeof path, 0};
        fb__text_add(&text, "%s%s/%s", folder, places[i], name);
        if (text.length >= sizeof path) {
            reason = ENAMETOOLONG;
            break;
        }
        int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK); /* which does not wait at a pipe */
        if (fd < 0) {
            if (errno != ENOENT)
                reason = errno;
            continue;
        }
        errno = EINVAL; /* for what is no file */
        found->at = found->owned = fb__file_read(fd, &found->size);
        reason = errno;
        close(fd);
        if (found->at)
            return FB_OK;
        break;
    }
    return fb__error(
        FB_INVALID,
        "FLASHBACK_KERNELS is '%s', but '%s' can be read neither there nor in .. or ../../shared of it: "
        "%s. Expected the folder with all kernel files, or none to use the built-in ones",
        folder, name, strerror(reason));
}

static fb_status find(const walk *w, const char *name, const char *includer, file *found) {
    if (w->folder)
        return find_in_folder(w->folder, name, found);
    for (const fb__jit_file *f = fb__jit_files; f->name; f++)
        if (strcmp(f->name, name) == 0) {
            found->at = f->text;
            found->size = f->size;
            return FB_OK;
        }
    return fb__error(FB_COMPILE, "the kernel file '%s'%s%s is not among those built into the library", name,
                     includer ? ", which is included by " : "", includer ? includer : "");
}

/* Past blanks and `word`, or NULL if something else comes next. */
static const char *skip(const char *at, const char *end, const char *word) {
    while (at && at < end && (*at == ' ' || *at == '\t'))
        at++;
    size_t length = strlen(word);
    return at && (size_t)(end - at) >= length && memcmp(at, word, length) == 0 ? at + length : NULL;
}

/* A file is here once anyway, and compilers warn of #pragma once in the main file. */
static bool is_once(const char *line, const char *end) {
    return skip(skip(skip(line, end, "#"), end, "pragma"), end, "once");
}

/* If a line is #include "path": the last component of it. One that is too long is cut, and not found. */
static bool includes(const char *line, const char *end, char name[NAME_SIZE]) {
    line = skip(skip(skip(line, end, "#"), end, "include"), end, "\"");
    if (!line)
        return false;
    const char *close = memchr(line, '"', (size_t)(end - line));
    if (!close)
        return false;
    for (const char *at = line; at < close; at++)
        if (*at == '/')
            line = at + 1;
    size_t length = (size_t)(close - line);
    if (length >= NAME_SIZE)
        length = NAME_SIZE - 1;
    memcpy(name, line, length);
    name[length] = 0;
    return true;
}

static bool is_in(const walk *w, const char *name) {
    for (int i = 0; i < w->files; i++)
        if (strcmp(w->seen[i], name) == 0)
            return true;
    return false;
}

/* It calls itself for what a file includes, at most FILES_MAX deep, as no file comes twice. */
static fb_status add_file(walk *w, const char *name, const char *includer) {
    if (w->files == FILES_MAX || strlen(name) >= NAME_SIZE)
        return fb__error(
            FB_COMPILE,
            "a kernel has at most %d files, with names of at most %d characters; '%s' does not fit",
            FILES_MAX, NAME_SIZE - 1, name);
    strcpy(w->seen[w->files++], name);

    file found = {NULL, NULL, 0};
    FB_TRY(find(w, name, includer, &found));
    fb_status status = add_line_directive(w, 1, name);
    const char *end = found.at + found.size;
    long line = 1;
    for (const char *at = found.at; status == FB_OK && at < end; line++) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        const char *next = stop ? stop + 1 : end;
        char inner[NAME_SIZE];
        bool include = includes(at, next, inner);
        if (is_once(at, next) || (include && is_in(w, inner))) {
            status = add(w, "\n", 1);
        } else if (!include) {
            status = add(w, at, (size_t)(next - at));
            if (status == FB_OK && !stop)
                status = add(w, "\n", 1);
        } else {
            status = add_file(w, inner, name);
            if (status == FB_OK)
                status = add_line_directive(w, line + 1, name);
        }
        at = next;
    }
    free(found.owned);
    return status;
}

fb_status fb__jit_source(const char *name, char **text) {
    walk w = {.folder = fb__env_get(FB__ENV_FLASHBACK_KERNELS)};
    fb_status status = add_file(&w, name, NULL);
    if (status != FB_OK) {
        free(w.text);
        w.text = NULL;
    }
    *text = w.text;
    return status;
}
