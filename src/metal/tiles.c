/* See tiles.h. */
#include "tiles.h"
#include "../base/env.h"
#include <stdlib.h>
#include <string.h>

/* "forward" of forward.metal; 0 for a kernel that has no tiles. */
static size_t name_length(fb__metal_kernel kernel) {
    return kernel == FB__METAL_ROWS ? 0 : strcspn(fb__metal_file(kernel), ".");
}

/* Reads "forward=1" and returns what comes behind it, or NULL. */
static const char *read_one(const char *text, int skips[FB__METAL_KERNEL_COUNT]) {
    for (int k = 0; k < FB__METAL_KERNEL_COUNT; k++) {
        const size_t length = name_length((fb__metal_kernel)k);
        if (!length || strncmp(text, fb__metal_file((fb__metal_kernel)k), length) != 0 || text[length] != '=')
            continue;
        const char *digits = text + length + 1;
        const size_t count = strspn(digits, "0123456789");
        if (count < 1 || count > 3)
            return NULL;
        skips[k] = atoi(digits);
        return digits + count;
    }
    return NULL;
}

fb_status fb__metal_tiles(int skips[FB__METAL_KERNEL_COUNT]) {
    const char *text = fb__env_get(FB__ENV_FLASHBACK_TILES);
    memset(skips, 0, FB__METAL_KERNEL_COUNT * sizeof *skips);
    for (const char *at = text; at && *at;) {
        at = read_one(at, skips);
        if (!at || (*at && *at != ','))
            return fb__error(
                FB_INVALID,
                "FLASHBACK_TILES is '%s'; expected how many tiles that fit are to be passed over, "
                "up to 999, for some of the kernels: forward=1,dq=0,dkdv=2,dbias=0",
                text);
        at += *at == ',';
    }
    return FB_OK;
}
