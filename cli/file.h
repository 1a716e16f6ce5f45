/* Files: mapped whole for reading, written beside their place and then renamed, so that no reader ever sees a
 * half. Floor: cli. */
#ifndef CLI_FILE_H
#define CLI_FILE_H

#include "tensor.h"
#include <stdio.h>

typedef struct mapping {
    void *data; /* never NULL once mapped; an empty file has size 0 */
    size_t size;
} mapping;

bool file_map(mapping *map, const char *path, complaint *why);
void file_unmap(mapping *map);

/* A file being written. `stream` takes the content; file_commit makes it appear at its path, file_abandon
 * removes it. Both close the stream. A complaint names the path and the system's reason. */
typedef struct draft {
    FILE *stream;
    char path[4096], temporary[4096 + 8];
} draft;

bool file_begin(draft *d, const char *path, complaint *why);
bool file_commit(draft *d, complaint *why);
void file_abandon(draft *d);

bool file_ends(const char *path, const char *extension);

#endif
