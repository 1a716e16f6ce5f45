/* A lock between threads and processes, as a file. It ends with the process that holds it, however that ends.
 * Floor: jit. */
#ifndef FB_JIT_LOCK_H
#define FB_JIT_LOCK_H

#include <stdint.h>

/* Waits for at most `ms`. A descriptor for fb__jit_unlock, or -1: the file cannot be made, or time is up. */
int fb__jit_lock(const char *path, int64_t ms);

void fb__jit_unlock(int lock, const char *path);

#endif
