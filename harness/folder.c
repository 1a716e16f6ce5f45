/* See folder.h. Floor: harness. */
#include "folder.h"

#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

bool fbh_folder_make(char *path, size_t size) {
    const char *parent = getenv("TMPDIR");
    const int length = snprintf(path, size, "%s/flashback-XXXXXX", parent && *parent ? parent : "/tmp");
    return length > 0 && (size_t)length < size && mkdtemp(path);
}

void fbh_folder_remove(const char *path) {
    char file[4096];
    DIR *folder = opendir(path);
    for (struct dirent *entry; folder && (entry = readdir(folder));) {
        if (!strcmp(entry->d_name, ".") || !strcmp(entry->d_name, ".."))
            continue;
        if (snprintf(file, sizeof file, "%s/%s", path, entry->d_name) < (int)sizeof file)
            unlink(file);
    }
    if (folder)
        closedir(folder);
    rmdir(path);
}
