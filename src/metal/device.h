/* A device of Metal's: what it is, and what a plan may count on. Floor: metal. Next: device.c. */
#ifndef FB_METAL_DEVICE_H
#define FB_METAL_DEVICE_H

#include "objc.h"

typedef struct fb__metal_device {
    fb__id object; /* held; fb__metal_device_close gives it back */
    int ordinal;   /* desc.index */
    int family;    /* 7 for M1, 8 for M2, 9 for M3 and M4; 0: no GPU of Apple's */
    uint64_t registry;
    size_t threadgroup_bytes, buffer_bytes;
    uint64_t working_set; /* bytes that kernels should be content with */
    char name[96];
} fb__metal_device;

/* The device with this number. `argument` is what the caller knows the number as: desc.index, or index.
 * FB_NO_DEVICE if there is none; the sentence says how many there are. Needs a pool. */
fb_status fb__metal_device_open(const fb__objc *o, const char *argument, int index, fb__metal_device *device);
void fb__metal_device_close(const fb__objc *o, fb__metal_device *device);

/* Can kernels run there? They need the matrices of simdgroups, and memory that host and GPU share. */
fb_status fb__metal_device_check(const fb__metal_device *device);

/* How many there are. Needs a pool. */
int fb__metal_device_count(const fb__objc *o);

#endif
