/* The texts of kernels: built in by cmake/embed.cmake, or from the folder FLASHBACK_KERNELS. Floor: jit. */
#ifndef FB_JIT_SOURCE_H
#define FB_JIT_SOURCE_H

#include "flashback.h"
#include <stddef.h>

typedef struct fb__jit_file {
    const char *name; /* the last component of its path */
    const char *text;
    size_t size; /* without the 0 that closes the text */
} fb__jit_file;

/* All files that are built in; a row of NULL ends it. */
extern const fb__jit_file fb__jit_files[];

/* The text of a kernel file as one piece, from malloc: each line `#include "..."` is replaced by the file
 * that the last component of its path names, once; `#line` directives keep file and line of messages right.
 * Includes are not conditional: a file stands where it is named first. Lines with <> stay for the compiler,
 * those with `#pragma once` become empty.
 *
 * With FLASHBACK_KERNELS=dir every file is read from dir, or else from dir/.. or dir/../../shared. A file
 * that is not there is FB_INVALID; FB_COMPILE stands for one that is not built in. */
fb_status fb__jit_source(const char *name, char **text);

#endif
