/* The CPU backend's one symbol. Floor: cpu. Next: ref.c (the definition), then block.h (the vocabulary of the
 * fast routes), forward.c, backward.c. */
#ifndef FB_CPU_CPU_H
#define FB_CPU_CPU_H

#include "../core/backend.h"

extern const fb__backend fb__cpu;

#endif
