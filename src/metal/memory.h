/* Memory on a Metal device, for programs without a framework: that part of the backend. A ref's data is an
 * MTLBuffer, here one that host and GPU share. Floor: metal. */
#ifndef FB_METAL_MEMORY_H
#define FB_METAL_MEMORY_H

#include "../core/error.h"
#include <stddef.h>
#include <stdint.h>

/* As fb__backend has them. */
fb_status fb__metal_alloc(fb_ref *ref, int32_t index, size_t bytes);
fb_status fb__metal_free(fb_ref *ref, int32_t index);
fb_status fb__metal_write(fb_ref to, const void *from, size_t bytes, int32_t index);
fb_status fb__metal_read(void *to, fb_ref from, size_t bytes, int32_t index);
fb_status fb__metal_sync(int32_t index, void *stream);

#endif
