/* See text.h. Floor: examples/gpt. */
#include "text.h"
#include "cli/file.h"
#include "random.h"
#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* ---- Paths ----------------------------------------------------------------------------------------- */

typedef struct names {
    char **at;
    size_t count;
} names;

static void names_drop(names *n) {
    for (size_t i = 0; i < n->count; i++)
        free(n->at[i]);
    free(n->at);
    *n = (names){0};
}

/* Adds folder/name. */
static bool names_add(names *n, const char *folder, const char *name, complaint *why) {
    const size_t size = strlen(folder) + strlen(name) + 2;
    char **at = realloc(n->at, (n->count + 1) * sizeof *at);
    if (at)
        n->at = at;
    char *path = at ? malloc(size) : NULL;
    if (!path)
        return complain(why, "%s: memory ran out over the names of its files", folder);
    snprintf(path, size, "%s%s%s", folder, *name && !file_ends(folder, "/") ? "/" : "", name);
    n->at[n->count++] = path;
    return true;
}

static int by_name(const void *a, const void *b) { return strcmp(*(char *const *)a, *(char *const *)b); }

static bool is_text(const char *name) {
    static const char *const endings[] = {".c", ".h", ".inc", ".md", ".txt", ".py"};
    for (size_t i = 0; i < sizeof endings / sizeof *endings; i++)
        if (file_ends(name, endings[i]))
            return true;
    return false;
}

/* Puts an entry of a folder where it belongs. Symbolic links belong nowhere: they may go round in circles. */
static bool sort_entry(const char *folder, const char *name, names *folders, names *files, complaint *why) {
    struct stat info;
    if (name[0] == '.')
        return true;
    if (!names_add(files, folder, name, why))
        return false;
    char *path = files->at[files->count - 1];
    if (lstat(path, &info))
        return complain(why, "%s: cannot be read: %s", path, strerror(errno));
    if (S_ISREG(info.st_mode) && is_text(name))
        return true;
    files->count--;
    free(path);
    return !S_ISDIR(info.st_mode) || !strcmp(name, "build") || names_add(folders, folder, name, why);
}

static bool scan_folder(const char *folder, names *folders, names *files, complaint *why) {
    DIR *dir = opendir(folder);
    if (!dir)
        return complain(why, "%s: the folder cannot be read: %s", folder, strerror(errno));
    bool ok = true;
    while (ok) {
        errno = 0;
        const struct dirent *entry = readdir(dir);
        if (!entry) {
            ok = !errno || complain(why, "%s: the folder cannot be read: %s", folder, strerror(errno));
            break;
        }
        ok = sort_entry(folder, entry->d_name, folders, files, why);
    }
    closedir(dir);
    return ok;
}

/* Adds the texts below a folder, sorted, so that a file system's own order does not matter. The folders found
 * wait in a list, so that their depth does not matter either. */
static bool add_folder(const char *folder, names *files, complaint *why) {
    const size_t before = files->count;
    names folders = {0};
    bool ok = names_add(&folders, folder, "", why);
    for (size_t i = 0; i < folders.count && ok; i++)
        ok = scan_folder(folders.at[i], &folders, files, why);
    names_drop(&folders);
    if (files->count > before)
        qsort(files->at + before, files->count - before, sizeof *files->at, by_name);
    return ok;
}

static bool add_path(const char *path, names *files, complaint *why) {
    struct stat info;
    if (stat(path, &info))
        return complain(why, "%s: cannot be read: %s; expected a file or folder that exists", path,
                        strerror(errno));
    if (S_ISDIR(info.st_mode))
        return add_folder(path, files, why);
    if (S_ISREG(info.st_mode))
        return names_add(files, path, "", why);
    return complain(why, "%s: is neither a file nor a folder; expected one of the two", path);
}

/* ---- Bytes ----------------------------------------------------------------------------------------- */

static bool append_file(text *t, const char *path, complaint *why) {
    mapping map;
    if (!file_map(&map, path, why))
        return false;
    const size_t size = (size_t)t->size;
    /* One byte more than needed: an empty text is no failure of realloc. */
    uint8_t *bytes = map.size < (size_t)INT64_MAX - size ? realloc(t->bytes, size + map.size + 1) : NULL;
    if (bytes) {
        memcpy(bytes + size, map.data, map.size);
        t->bytes = bytes;
        t->size += (int64_t)map.size;
    } else {
        complain(why,
                 "%s: has %zu bytes, which memory does not hold after the %zu of the files before it; "
                 "expected a text that fits in memory, so take fewer or shorter files",
                 path, map.size, size);
    }
    file_unmap(&map);
    return bytes != NULL;
}

bool text_open(text *t, const char *const *paths, int count, complaint *why) {
    names files = {0};
    *t = (text){0};
    bool ok =
        count > 0 || complain(why, "the text to learn names no file; expected at least one file or folder");
    for (int i = 0; i < count && ok; i++)
        ok = add_path(paths[i], &files, why);
    for (size_t i = 0; i < files.count && ok; i++)
        ok = append_file(t, files.at[i], why);
    if (ok && t->size == 0)
        ok = complain(
            why,
            "%s%s: nothing to learn, %zu files with 0 bytes; expected text: any file that is named, or "
            "files below a folder that end in .c, .h, .inc, .md, .txt or .py",
            paths[0], count > 1 ? " and the others" : "", files.count);
    names_drop(&files);
    if (ok)
        t->train = t->size - t->size / 10;
    else
        text_close(t);
    return ok;
}

void text_close(text *t) {
    free(t->bytes);
    *t = (text){0};
}

bool text_fits(const text *t, int64_t context, complaint *why) {
    const int64_t held = t->size - t->train, room = held < t->train ? held : t->train;
    if (context < room)
        return true;
    if (room < 2)
        return complain(
            why,
            "the text has %lld bytes, of which %lld are held out: too few for a context of %lld or "
            "any other; expected at least 20 bytes",
            (long long)t->size, (long long)held, (long long)context);
    return complain(
        why,
        "context is %lld, but of the text's %lld bytes the last %lld are held out, and a sequence must "
        "fit there with the byte after it; expected a context of at most %lld, or a longer text",
        (long long)context, (long long)t->size, (long long)held, (long long)(room - 1));
}

/* ---- Batches --------------------------------------------------------------------------------------- */

/* Takes in one number more. */
static uint64_t mix(uint64_t state, uint64_t number) { return random_mix(state + number); }

void text_batch(const text *t, uint64_t seed, int64_t step, int64_t micro, int64_t batch, int64_t context,
                uint8_t *tokens) {
    const uint64_t of_batch = mix(mix(mix(0, seed), (uint64_t)step), (uint64_t)micro);
    const uint64_t starts = (uint64_t)(t->train - context);
    const size_t piece = (size_t)context + 1;
    for (int64_t row = 0; row < batch; row++) {
        const uint64_t start = mix(of_batch, (uint64_t)row) % starts;
        memcpy(tokens + (size_t)row * piece, t->bytes + start, piece);
    }
}

void text_held_out(const text *t, int64_t n, int64_t batches, int64_t batch, int64_t context,
                   uint8_t *tokens) {
    const int64_t last = t->size - t->train - (context + 1); /* start of the last piece */
    const int64_t gaps = batches * batch > 1 ? batches * batch - 1 : 1;
    const size_t piece = (size_t)context + 1;
    for (int64_t row = 0; row < batch; row++) {
        const int64_t i = n * batch + row;
        /* last i / gaps, without the product, which may be too large */
        const int64_t start = last / gaps * i + last % gaps * i / gaps;
        memcpy(tokens + (size_t)row * piece, t->bytes + t->train + start, piece);
    }
}
