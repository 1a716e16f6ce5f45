/* See layout.h. */
#include "layout.h"
#include "encode.h"
#include "memory.h"
#include <string.h>

static fb_status ask(const fb__metal_state *s, fb_ref answer) {
    const fb__metal_loaded *rows = &s->kernels[FB__METAL_ROWS];
    fb__metal_call c = {.s = s};
    fb__metal_args none;
    memset(&none, 0, sizeof none);
    for (int n = FB_AT_ARGS + 1; n < FB_AT_COUNT; n++)
        c.at[n] = answer;
    const fb__metal_grid grid = {
        .x = 1, .y = 1, .threads = rows->spec.THREADS, .shared_bytes = rows->spec.shared_bytes};
    FB_TRY(fb__metal_call_open(&c, s, NULL));
    FB_TRY(fb__metal_call_dispatch(&c, rows->pipelines[FB__METAL_LAYOUT], &grid, &none));
    return fb__metal_call_close(&c);
}

fb_status fb__metal_check_layout(const fb__metal_state *s) {
    fb_ref answer = {NULL, 0};
    int32_t good = 0;
    FB_TRY(fb__metal_alloc(&answer, s->device.ordinal, sizeof good));
    fb_status status = fb__metal_write(answer, &good, sizeof good, s->device.ordinal);
    if (status == FB_OK)
        status = ask(s, answer);
    if (status == FB_OK)
        status = fb__metal_read(&good, answer, sizeof good, s->device.ordinal);
    fb__objc_release(&s->objc, answer.data);
    FB_TRY(status);
    return good ? FB_OK
                : fb__error(FB_UNSUPPORTED,
                            "the matrices of simdgroups lie in the lanes of %s otherwise than the kernels "
                            "expect (fb_layout of rows.metal); take device cpu, and tell flashback's authors",
                            s->device.name);
}
