/* The backend for Apple GPUs. Floor: metal. */
#ifndef FB_METAL_METAL_H
#define FB_METAL_METAL_H

#include "../core/backend.h"

extern const fb__backend fb__metal;

#endif
