/* See memory.h. Each call makes the device's primary context current, which is the one that other libraries
 * in the process use as well, and gives back the caller's. */
#include "memory.h"
#include "../core/problem.h"
#include "driver.h"
#include <errno.h>

/* A call's hold on the device. */
typedef struct place {
    fb__driver driver;
    int device;
    void *context;
    fb__guard guard;
    int saved_errno; /* loading a library changes it */
} place;

static fb_status find_context(place *p, int32_t index) {
    const fb__driver *d = &p->driver;
    FB_TRY(fb__driver_open(&p->driver));
    FB_TRY(fb__driver_device(d, "index", index, &p->device));
    FB__CU_TRY(d, cuDevicePrimaryCtxRetain, (&p->context, p->device));
    fb_status status = fb__guard_enter(d, p->context, &p->guard);
    if (status != FB_OK)
        d->cuDevicePrimaryCtxRelease(p->device);
    return status;
}

static fb_status enter(place *p, int32_t index) {
    int saved_errno = errno;
    fb_status status = find_context(p, index);
    p->saved_errno = saved_errno;
    errno = saved_errno;
    return status;
}

/* Gives back the caller's context, then releases the device's so many times: 1 is the call's own hold, and a
 * second one that of an allocation that has ended. The first failure is the call's. */
static fb_status leave(place *p, fb_status status, int releases) {
    status = fb__guard_leave(&p->driver, &p->guard, status);
    for (; releases > 0; releases--) {
        int result = p->driver.cuDevicePrimaryCtxRelease(p->device);
        if (status == FB_OK)
            status = fb__driver_check(&p->driver, result, "cuDevicePrimaryCtxRelease");
    }
    errno = p->saved_errno;
    return status;
}

static uint64_t address(const void *data) { return (uint64_t)(uintptr_t)data; }

fb_status fb__cuda_alloc(fb_ref *ref, int32_t index, size_t bytes) {
    place p;
    FB_TRY(enter(&p, index));
    uint64_t at = 0;
    int result = p.driver.cuMemAlloc(&at, bytes ? bytes : 1);
    fb_status status = fb__driver_check(&p.driver, result, "cuMemAlloc");
    if (result == FB__CU_OUT_OF_MEMORY)
        status = fb__error(FB_MEMORY, "no memory for %zu bytes on CUDA device %d", bytes, (int)index);
    if (status != FB_OK)
        return leave(&p, status, 1);
    status = leave(&p, FB_OK, 0); /* the hold is the allocation's now */
    if (status == FB_OK) {
        *ref = (fb_ref){(void *)(uintptr_t)at, 0};
        return FB_OK;
    }
    /* The caller's context could not be given back, so the device's is still current. */
    p.driver.cuMemFree(at);
    p.driver.cuDevicePrimaryCtxRelease(p.device);
    errno = p.saved_errno;
    return status;
}

/* What is no allocation stays in *ref, and so does one whose device cannot be reached. After any other
 * failure it is gone: the context has failed then, with all its memory. */
fb_status fb__cuda_free(fb_ref *ref, int32_t index) {
    if (!ref->data) {
        *ref = (fb_ref){NULL, 0};
        return FB_OK;
    }
    place p;
    FB_TRY(enter(&p, index));
    int result = p.driver.cuMemFree(address(ref->data));
    fb_status status = fb__driver_check(&p.driver, result, "cuMemFree");
    if (result == FB__CU_INVALID_VALUE)
        return leave(&p, status, 1);
    *ref = (fb_ref){NULL, 0};
    return leave(&p, status, 2);
}

fb_status fb__cuda_write(fb_ref to, const void *from, size_t bytes, int32_t index) {
    if (!bytes)
        return FB_OK;
    place p;
    FB_TRY(enter(&p, index));
    int result = p.driver.cuMemcpyHtoD(address(fb__at(to)), from, bytes);
    fb_status status = fb__driver_check(&p.driver, result, "cuMemcpyHtoD");
    /* The driver has the bytes then, the device perhaps not yet; and some streams do not wait for the NULL
     * stream, on which they come. */
    if (status == FB_OK)
        status = fb__driver_check(&p.driver, p.driver.cuStreamSynchronize(NULL), "cuStreamSynchronize");
    return leave(&p, status, 1);
}

fb_status fb__cuda_read(void *to, fb_ref from, size_t bytes, int32_t index) {
    if (!bytes)
        return FB_OK;
    place p;
    FB_TRY(enter(&p, index));
    int result = p.driver.cuMemcpyDtoH(to, address(fb__at(from)), bytes);
    return leave(&p, fb__driver_check(&p.driver, result, "cuMemcpyDtoH"), 1);
}

fb_status fb__cuda_sync(int32_t index, void *stream) {
    place p;
    FB_TRY(enter(&p, index));
    fb_status status =
        stream ? fb__driver_check(&p.driver, p.driver.cuStreamSynchronize(stream), "cuStreamSynchronize")
               : fb__driver_check(&p.driver, p.driver.cuCtxSynchronize(), "cuCtxSynchronize");
    return leave(&p, status, 1);
}
