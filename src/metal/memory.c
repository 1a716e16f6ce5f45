/* See memory.h. */
#include "memory.h"
#include "device.h"
#include "queue.h"
#include <errno.h>
#include <string.h>

enum { SHARED = 0, LEAST_BYTES = 16 }; /* MTLResourceStorageModeShared */

/* A call's hold on the runtime. */
typedef struct place {
    fb__objc objc;
    void *pool;
    int saved_errno; /* loading a library changes it */
} place;

static fb_status enter(place *p) {
    p->saved_errno = errno;
    fb_status status = fb__objc_open(&p->objc);
    if (status == FB_OK)
        p->pool = fb__objc_enter(&p->objc);
    errno = p->saved_errno;
    return status;
}

static fb_status leave(const place *p, fb_status status) {
    fb__objc_leave(&p->objc, p->pool);
    errno = p->saved_errno;
    return status;
}

static fb_status make(const fb__objc *o, const fb__metal_device *device, size_t bytes, fb_ref *ref) {
    fb__id buffer =
        bytes > device->buffer_bytes
            ? NULL
            : FB__SEND(o, new_buffer, device->object, bytes > LEAST_BYTES ? bytes : LEAST_BYTES, SHARED);
    if (!buffer)
        return fb__error(FB_MEMORY,
                         "newBufferWithLength: failed: no memory for %zu bytes on Metal device %d, %s, whose "
                         "buffers have at most %zu bytes",
                         bytes, device->ordinal, device->name, device->buffer_bytes);
    *ref = (fb_ref){buffer, 0};
    return FB_OK;
}

fb_status fb__metal_alloc(fb_ref *ref, int32_t index, size_t bytes) {
    place p;
    fb__metal_device device;
    FB_TRY(enter(&p));
    fb_status status = fb__metal_device_open(&p.objc, "index", index, &device);
    if (status == FB_OK) {
        status = make(&p.objc, &device, bytes, ref);
        fb__metal_device_close(&p.objc, &device);
    }
    return leave(&p, status);
}

/* The GPU's holds on a buffer are Metal's matter: what is under way keeps it. */
fb_status fb__metal_free(fb_ref *ref, int32_t index) {
    place p;
    (void)index;
    if (ref->data) {
        FB_TRY(enter(&p));
        fb__objc_release(&p.objc, ref->data);
        leave(&p, FB_OK);
    }
    *ref = (fb_ref){NULL, 0};
    return FB_OK;
}

/* Where the host sees the bytes of a ref. */
static fb_status find_bytes(const fb__objc *o, const char *argument, fb_ref ref, size_t bytes, char **at) {
    char *contents = FB__GET(o, contents, ref.data);
    const size_t length = FB__GET(o, length, ref.data);
    if (!contents)
        return fb__error(FB_UNSUPPORTED,
                         "contents failed: the MTLBuffer of %s has no bytes for the host (private storage); "
                         "make it with MTLResourceStorageModeShared, or copy it with a blit encoder",
                         argument);
    if (ref.offset > length || bytes > length - ref.offset)
        return fb__error(FB_INVALID,
                         "the MTLBuffer of %s has %zu bytes, fewer than the %zu at offset %llu that are to "
                         "be copied",
                         argument, length, bytes, (unsigned long long)ref.offset);
    *at = contents + ref.offset;
    return FB_OK;
}

fb_status fb__metal_write(fb_ref to, const void *from, size_t bytes, int32_t index) {
    place p;
    char *at = NULL;
    (void)index;
    if (!bytes)
        return FB_OK;
    FB_TRY(enter(&p));
    fb_status status = find_bytes(&p.objc, "to", to, bytes, &at);
    if (status == FB_OK)
        memcpy(at, from, bytes);
    return leave(&p, status);
}

fb_status fb__metal_read(void *to, fb_ref from, size_t bytes, int32_t index) {
    place p;
    char *at = NULL;
    (void)index;
    if (!bytes)
        return FB_OK;
    FB_TRY(enter(&p));
    fb_status status = find_bytes(&p.objc, "from", from, bytes, &at);
    if (status == FB_OK)
        memcpy(to, at, bytes);
    return leave(&p, status);
}

/* ---- Waiting ---- */

static fb_status wait_for_buffer(const fb__objc *o, fb__id buffer) {
    if (FB__GET(o, status, buffer) < 2) /* MTLCommandBufferStatusCommitted */
        return fb__error(FB_INVALID,
                         "stream is an MTLCommandBuffer that was not committed; who made it commits "
                         "it, and then it can be waited for");
    return fb__metal_wait(o, buffer, "this stream");
}

/* Without a stream there is nothing to wait for: such calls return when they are done. */
fb_status fb__metal_sync(int32_t index, void *stream) {
    place p;
    fb__metal_device device;
    FB_TRY(enter(&p));
    const fb__objc *o = &p.objc;
    fb_status status = fb__metal_device_open(o, "index", index, &device);
    if (status != FB_OK)
        return leave(&p, status);
    fb__metal_device_close(o, &device);
    switch (fb__metal_stream_kind(o, stream)) {
    case FB__METAL_OWN:
        return leave(&p, FB_OK);
    case FB__METAL_QUEUE:
        return leave(&p, fb__metal_finish(o, stream));
    case FB__METAL_BUFFER:
        return leave(&p, wait_for_buffer(o, stream));
    default:
        return leave(&p,
                     fb__error(FB_INVALID, "stream is neither an MTLCommandQueue nor an MTLCommandBuffer"));
    }
}
