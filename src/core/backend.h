/* What a device must offer. api/plan.c holds the one array of backends; each backend exports one constant of
 * this type and nothing else. A backend sees problems, never plans. Floor: core. Next: cpu/cpu.c, the first
 * of them. */
#ifndef FB_CORE_BACKEND_H
#define FB_CORE_BACKEND_H

#include "../base/text.h"
#include "problem.h"

typedef struct fb__backend {
    fb_device device;

    /* Can this problem be computed here, on the route it asks for? No side effects; the reason goes to
     * fb__error. */
    fb_status (*check)(const fb__problem *problem);

    /* Chooses rows, compiles, computes the workspace. *state is the backend's own, constant from here on. */
    fb_status (*prepare)(const fb__problem *problem, void **state, size_t *workspace);

    /* One pass. io is complete and checked; nothing is allocated here. */
    fb_status (*run)(const void *state, const fb__problem *problem, fb__pass pass, const fb_io *io);

    /* fb_merge, see flashback.h. */
    fb_status (*merge)(const void *state, const fb__problem *problem, fb_ref out, fb_ref lse,
                       fb_ref other_out, fb_ref other_lse, void *stream);

    void (*explain)(const void *state, const fb__problem *problem, fb__text *text);
    void (*drop)(void *state);

    /* Lines for fb_info. */
    void (*info)(fb__text *text);

    /* Device memory. */
    fb_status (*alloc)(fb_ref *ref, int32_t index, size_t bytes);
    fb_status (*free)(fb_ref *ref, int32_t index);
    fb_status (*write)(fb_ref to, const void *from, size_t bytes, int32_t index);
    fb_status (*read)(void *to, fb_ref from, size_t bytes, int32_t index);
    fb_status (*sync)(int32_t index, void *stream);
} fb__backend;

#endif
