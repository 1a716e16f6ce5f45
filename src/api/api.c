/* The verbs: each checks its arguments and hands over to the backend. Floor: api. Next: plan.c. */
#include "../base/env.h"
#include "../core/error.h"
#include "../core/names.h"
#include "plan.h"
#include <errno.h>

static fb_status run(const fb_plan *plan, fb__pass pass, const fb_io *io) {
    int saved_errno = errno;
    fb__error_clear();
    if (!plan)
        return fb__error(FB_INVALID, "plan is NULL; fb_plan_create makes one");
    fb_io full;
    FB_TRY(fb__problem_check_io(&plan->problem, pass, plan->workspace, io, &full));
    fb_status status = plan->backend->run(plan->state, &plan->problem, pass, &full);
    errno = saved_errno;
    return status;
}

fb_status fb_forward(const fb_plan *plan, const fb_io *io) { return run(plan, FB__FORWARD, io); }

fb_status fb_backward(const fb_plan *plan, const fb_io *io) { return run(plan, FB__BACKWARD, io); }

fb_status fb_merge(const fb_plan *plan, fb_ref out, fb_ref lse, fb_ref other_out, fb_ref other_lse,
                   void *stream) {
    int saved_errno = errno;
    fb__error_clear();
    if (!plan)
        return fb__error(FB_INVALID, "plan is NULL; fb_plan_create makes one");
    FB_TRY(fb__problem_check_merge(&plan->problem, out, lse, other_out, other_lse));
    fb_status status =
        plan->backend->merge(plan->state, &plan->problem, out, lse, other_out, other_lse, stream);
    errno = saved_errno;
    return status;
}

/* ---- Device memory ---- */

static fb_status memory_of(fb_device device, const fb__backend **backend) {
    fb__error_clear();
    *backend = fb__backend_of(device);
    return *backend ? FB_OK : FB_NO_DEVICE;
}

fb_status fb_alloc(fb_ref *ref, fb_device device, int32_t index, size_t bytes) {
    const fb__backend *backend;
    FB_TRY(memory_of(device, &backend));
    if (!ref)
        return fb__error(FB_INVALID, "ref is NULL; pass the address of a fb_ref");
    *ref = (fb_ref){NULL, 0};
    return backend->alloc(ref, index, bytes);
}

fb_status fb_free(fb_ref *ref, fb_device device, int32_t index) {
    const fb__backend *backend;
    FB_TRY(memory_of(device, &backend));
    if (!ref)
        return fb__error(FB_INVALID, "ref is NULL; pass the address of a fb_ref");
    return backend->free(ref, index);
}

fb_status fb_write(fb_ref to, const void *from, size_t bytes, fb_device device, int32_t index) {
    const fb__backend *backend;
    FB_TRY(memory_of(device, &backend));
    if (bytes && (!to.data || !from))
        return fb__error(FB_INVALID, "%s is NULL, but %zu bytes are to be written", to.data ? "from" : "to",
                         bytes);
    return backend->write(to, from, bytes, index);
}

fb_status fb_read(void *to, fb_ref from, size_t bytes, fb_device device, int32_t index) {
    const fb__backend *backend;
    FB_TRY(memory_of(device, &backend));
    if (bytes && (!to || !from.data))
        return fb__error(FB_INVALID, "%s is NULL, but %zu bytes are to be read", to ? "from" : "to", bytes);
    return backend->read(to, from, bytes, index);
}

fb_status fb_sync(fb_device device, int32_t index, void *stream) {
    const fb__backend *backend;
    FB_TRY(memory_of(device, &backend));
    return backend->sync(index, stream);
}

size_t fb_info(char *at, size_t size) {
    int saved_errno = errno;
    fb__text text = {at, size, 0};
    if (size)
        at[0] = 0;
    fb__text_add(&text, "version: %s\n", fb_version());
    for (int i = 0; i < fb__backend_count(); i++) {
        fb__text_add(&text, "backend: %s\n", fb_device_name(fb__backend_at(i)->device));
        fb__backend_at(i)->info(&text);
    }
    for (int v = 0; v < FB__ENV_COUNT; v++) {
        const char *value = fb__env_get((fb__env)v);
        fb__text_add(&text, "%s: %s (%s)\n", fb__env_name((fb__env)v), value ? value : "unset",
                     fb__env_holds((fb__env)v));
    }
    errno = saved_errno;
    return text.length;
}
