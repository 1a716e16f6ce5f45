/* A folder for the time of a measurement: made empty, removed with all that came into it.
 * Floor: harness. */
#ifndef HARNESS_FOLDER_H
#define HARNESS_FOLDER_H

#include <stdbool.h>
#include <stddef.h>

/* Makes a folder below $TMPDIR or /tmp; its path in `path`. False if it cannot be made. */
bool fbh_folder_make(char *path, size_t size);

/* Removes the files in it, and it. Files only: there are no folders below it. */
void fbh_folder_remove(const char *path);

#endif
