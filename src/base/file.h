/* Whole files by descriptor: read into memory, written to the end. Floor: base. */
#ifndef FB_BASE_FILE_H
#define FB_BASE_FILE_H

#include <stddef.h>

/* The content of a regular file, closed by a 0 that `size` does not count; the caller frees it. NULL where
 * reading fails, memory runs out, or it is no regular file. */
char *fb__file_read(int file, size_t *size);

/* Writes all of it; 0, or -1 with errno. */
int fb__file_write(int file, const void *data, size_t size);

#endif
