/* See keep.h. */
#include "keep.h"
#include "../base/env.h"
#include <errno.h>
#include <stdlib.h>

/* Tiles of dkdv and of dq differ; both divide this. */
enum { TILE = 64 };

static int64_t round_up(int64_t x) { return (x + TILE - 1) / TILE * TILE; }

static fb_status read_limit(int64_t *bytes) {
    const char *text = fb__env_get(FB__ENV_FLASHBACK_DS_BYTES_MAX);
    char *end = NULL;
    *bytes = 0;
    if (!text)
        return FB_OK;
    errno = 0;
    const long long value = strtoll(text, &end, 10);
    if (*text < '0' || *text > '9' || *end || errno)
        return fb__error(FB_INVALID, "FLASHBACK_DS_BYTES_MAX is '%s', expected a number of bytes, 0 or more",
                         text);
    *bytes = value;
    return FB_OK;
}

fb__metal_view fb__metal_keep_view(const fb__problem *p) {
    const int64_t row = round_up(p->d.len_k), head = round_up(p->d.len_q) * row;
    return (fb__metal_view){p->d.heads_q * head, head, row};
}

fb_status fb__metal_keep(fb__metal_state *s, const fb__problem *p) {
    const fb_desc *d = &p->d;
    int64_t most;
    FB_TRY(read_limit(&most));
    const bool both = !fb__has(p, FB_NO_DQ) && !(fb__has(p, FB_NO_DK) && fb__has(p, FB_NO_DV));
    const double bytes = (double)d->batch * (double)d->heads_q * (double)(d->len_q + TILE) *
                         (double)(d->len_k + TILE) * (double)fb__dtype_bytes(d->dtype);
    s->ds_bytes = 0;
    if (s->route != FB_FUSED || !both || fb__has(p, FB_FORWARD_ONLY) || bytes > 0x1p62)
        return FB_OK;
    const int64_t exact = d->batch * fb__metal_keep_view(p).batch * (int64_t)fb__dtype_bytes(d->dtype);
    if (exact <= most)
        s->ds_bytes = (size_t)exact;
    return FB_OK;
}
