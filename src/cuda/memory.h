/* Memory on a CUDA device, for programs without a framework: that part of the backend. Floor: cuda. */
#ifndef FB_CUDA_MEMORY_H
#define FB_CUDA_MEMORY_H

#include "../core/error.h"
#include <stddef.h>
#include <stdint.h>

/* As fb__backend has them. An allocation holds the device's primary context until it is freed. */
fb_status fb__cuda_alloc(fb_ref *ref, int32_t index, size_t bytes);
fb_status fb__cuda_free(fb_ref *ref, int32_t index);
fb_status fb__cuda_write(fb_ref to, const void *from, size_t bytes, int32_t index);
fb_status fb__cuda_read(void *to, fb_ref from, size_t bytes, int32_t index);
fb_status fb__cuda_sync(int32_t index, void *stream);

#endif
