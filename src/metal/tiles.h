/* FLASHBACK_TILES: which rows of the tile table to pass over, for whoever looks for better ones.
 * Floor: metal. */
#ifndef FB_METAL_TILES_H
#define FB_METAL_TILES_H

#include "../core/error.h"
#include "tune.h"

/* Rows that fit and are to be passed over, for each kernel; 0 where nothing is said. FB_INVALID for a text
 * that is not "forward=1,dq=0,...". */
fb_status fb__metal_tiles(int skips[FB__METAL_KERNEL_COUNT]);

#endif
