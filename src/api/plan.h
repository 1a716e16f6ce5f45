/* The plan: a problem and the backend that took it. Floor: api. Next: plan.c. */
#ifndef FB_API_PLAN_H
#define FB_API_PLAN_H

#include "../core/backend.h"

struct fb_plan {
    fb__problem problem;
    const fb__backend *backend;
    void *state; /* the backend's */
    size_t workspace;
};

/* The backend for a device, or NULL with the reason in fb__error. */
const fb__backend *fb__backend_of(fb_device device);
int fb__backend_count(void);
const fb__backend *fb__backend_at(int index);

#endif
