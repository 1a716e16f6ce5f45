/* Which cells count: rule R1 once more, from its sentence and not from the library's code.
 * Floor: harness. Read low.c next, which sums over the cells. */
#include "harness.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* p + right, where FB_UNBOUNDED must not overflow. */
static int64_t reach(int64_t p, int64_t right) { return right > INT64_MAX / 2 ? INT64_MAX : p + right; }

int64_t fbh_cells(const fbh_problem *p, int64_t b, int64_t h, int64_t i, bool *counts) {
    const fb_desc *d = &p->desc;
    const fbh_tensor *mask = &p->t[FBH_MASK], *blocks = &p->t[FBH_BLOCK_MASK], *bias = &p->t[FBH_BIAS];
    const int64_t len_q = fbh_rows(&p->t[FBH_Q], b), len_k = fbh_rows(&p->t[FBH_K], b);
    const int64_t position = i + (d->flags & FB_TOP_LEFT ? 0 : len_k - len_q) + d->position_offset;
    const int64_t valid_q = p->what.lens_q ? (int64_t)fbh_get(&p->t[FBH_LENS_Q], 0, 0, 0, b) : len_q;
    const int64_t valid_k = p->what.lens_k ? (int64_t)fbh_get(&p->t[FBH_LENS_K], 0, 0, 0, b) : len_k;

    memset(counts, 0, (size_t)len_k * sizeof *counts);
    if (i >= valid_q)
        return 0;
    int64_t n = 0;
    const int64_t lo = d->window.left > INT64_MAX / 2 ? 0 : position - d->window.left;
    const int64_t hi = reach(position, d->window.right);
    for (int64_t j = lo < 0 ? 0 : lo; j < valid_k && j <= hi; j++) {
        if (mask->buffer && fbh_get(mask, b, h, i, j) == 0)
            continue;
        if (blocks->buffer && fbh_get(blocks, b, h, i / d->block_q, j / d->block_k) == 0)
            continue;
        if (bias->buffer && fbh_get(bias, b, h, i, j) == -(double)INFINITY)
            continue;
        counts[j] = true;
        n++;
    }
    return n;
}

void fbh_problem_cells(fbh_problem *p) {
    const fb_desc *d = &p->desc;
    const int64_t group = d->heads_kv ? d->heads_q / d->heads_kv : 1;
    bool *counts = fbh_make((size_t)d->len_k, sizeof *counts);
    memset(p->live_rows, 0, (size_t)(d->batch * d->heads_q * d->len_q) * sizeof *p->live_rows);
    memset(p->live_keys, 0, (size_t)(d->batch * d->heads_kv * d->len_k) * sizeof *p->live_keys);
    for (int64_t b = 0; b < d->batch; b++)
        for (int64_t h = 0; h < d->heads_q; h++) {
            bool *keys = p->live_keys + (b * d->heads_kv + h / group) * d->len_k;
            for (int64_t i = 0; i < fbh_rows(&p->t[FBH_Q], b); i++) {
                p->live_rows[(b * d->heads_q + h) * d->len_q + i] = fbh_cells(p, b, h, i, counts) > 0;
                for (int64_t j = 0; j < fbh_rows(&p->t[FBH_K], b); j++)
                    keys[j] |= counts[j];
            }
        }
    free(counts);
}
