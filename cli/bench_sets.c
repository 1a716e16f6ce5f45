/* Built-in sets of problems, and what a problem costs. See bench.h. Floor: cli. */
#include "bench.h"
#include "cli.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { DENSE = 1, CAUSAL = 2, BOTH = DENSE | CAUSAL };

/* Dv = D. */
typedef struct set_row {
    const char *set;
    int64_t batch, heads_q, heads_kv, len_q, len_k, dim;
    int masks;
} set_row;

#define SELF(set, batch, heads_q, heads_kv, len, dim, masks)                                                 \
    { set, batch, heads_q, heads_kv, len, len, dim, masks }
#define SMALL(len) SELF("small", 32, 8, 8, len, 64, BOTH), SELF("small", 128, 8, 8, len, 64, BOTH)
/* 16384 queries in all, and as many operations for every D. */
#define HOPPER_LEN(batch, len)                                                                               \
    SELF("hopper", batch, 32, 32, len, 64, BOTH), SELF("hopper", batch, 16, 16, len, 128, BOTH),             \
        SELF("hopper", batch, 8, 8, len, 256, BOTH)
#define DECODE(len_k)                                                                                        \
    {"decode", 1, 32, 8, 1, len_k, 128, DENSE}, {"decode", 1, 32, 8, 2, len_k, 128, DENSE},                  \
        {"decode", 1, 32, 8, 4, len_k, 128, DENSE}, {                                                        \
        "decode", 1, 32, 8, 8, len_k, 128, DENSE                                                             \
    }

static const set_row rows[] = {
    SELF("quick", 1, 4, 4, 256, 64, BOTH),
    SELF("quick", 1, 4, 2, 256, 128, CAUSAL),

    SELF("default", 4, 8, 8, 512, 64, BOTH),
    SELF("default", 4, 8, 8, 512, 128, BOTH),
    SELF("default", 1, 8, 8, 2048, 64, BOTH),
    SELF("default", 1, 8, 8, 2048, 128, BOTH),
    SELF("default", 1, 8, 8, 4096, 64, BOTH),
    SELF("default", 1, 8, 2, 2048, 128, CAUSAL),

    SELF("original", 1, 32, 32, 512, 64, BOTH),
    SELF("original", 1, 32, 32, 1024, 64, BOTH),
    SELF("original", 1, 32, 32, 2048, 64, BOTH),
    SELF("original", 1, 32, 32, 4096, 64, BOTH),
    SELF("original", 1, 32, 32, 512, 96, BOTH),
    SELF("original", 1, 32, 32, 1024, 96, BOTH),
    SELF("original", 1, 32, 32, 2048, 96, BOTH),
    SELF("original", 1, 32, 32, 4096, 96, BOTH),
    SELF("original", 1, 32, 32, 512, 128, BOTH),
    SELF("original", 1, 32, 32, 1024, 128, BOTH),
    SELF("original", 1, 32, 32, 2048, 128, BOTH),
    SELF("original", 1, 32, 32, 4096, 128, BOTH),
    SELF("original", 1, 32, 8, 2048, 128, CAUSAL),

    HOPPER_LEN(32, 512),
    HOPPER_LEN(16, 1024),
    HOPPER_LEN(8, 2048),
    HOPPER_LEN(4, 4096),
    HOPPER_LEN(2, 8192),
    HOPPER_LEN(1, 16384),
    SELF("hopper", 4, 32, 8, 4096, 128, CAUSAL),
    SELF("hopper", 2, 32, 8, 8192, 128, CAUSAL),

    SMALL(16),
    SMALL(32),
    SMALL(64),
    SMALL(128),

    DECODE(1024),
    DECODE(8192),
    DECODE(65536),
};

fb_dtype bench_set_dtype(const char *name) {
    return !strcmp(name, "original") ? FB_F16 : !strcmp(name, "hopper") ? FB_BF16 : FB_F32;
}

void bench_list_add(bench_list *list, const fb_desc *desc) {
    list->at = realloc(list->at, (list->count + 1) * sizeof *list->at);
    if (!list->at)
        cli_fail(CLI_LIBRARY, "memory ran out");
    list->at[list->count++] = *desc;
}

static void add_row(bench_list *list, const set_row *row, const fb_desc *base, const fb_window *window) {
    fb_desc desc = *base;
    desc.batch = row->batch;
    desc.heads_q = row->heads_q;
    desc.heads_kv = row->heads_kv;
    desc.len_q = row->len_q;
    desc.len_k = row->len_k;
    desc.head_dim = desc.head_dim_v = row->dim;
    desc.window = *window;
    bench_list_add(list, &desc);
}

bool bench_set_add(bench_list *list, const char *name, const fb_desc *base, bool masked, int64_t max_len) {
    const fb_window windows[] = {fb_window_causal(), fb_window_none()};
    const int masks[] = {CAUSAL, DENSE};
    bool known = false;
    for (int m = 0; m < (masked ? 1 : 2); m++)
        for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
            if (strcmp(rows[i].set, name))
                continue;
            known = true;
            if (rows[i].len_k <= max_len && (masked || rows[i].masks & masks[m]))
                add_row(list, &rows[i], base, masked ? &base->window : &windows[m]);
        }
    return known;
}

/* Window bounds beyond both lengths do not bound; what remains is small enough to add. */
static double cells(const fb_desc *d) {
    const double all = (double)d->len_q * (double)d->len_k;
    const int64_t reach = d->len_q + d->len_k;
    const bool left = d->window.left < reach, right = d->window.right < reach;
    if (!left && !right)
        return all;
    if (!left && d->window.right == 0 && d->len_q == d->len_k && d->position_offset == 0)
        return all / 2;
    const int64_t off = (d->flags & FB_TOP_LEFT ? 0 : d->len_k - d->len_q) + d->position_offset;
    double sum = 0;
    for (int64_t p = off; p < off + d->len_q; p++) {
        int64_t first = left ? p - d->window.left : 0, last = right ? p + d->window.right : d->len_k - 1;
        first = first < 0 ? 0 : first;
        last = last < d->len_k ? last : d->len_k - 1;
        sum += last < first ? 0 : (double)(last - first + 1);
    }
    return sum;
}

double bench_flops(const fb_desc *d, fbh_pass pass) {
    const double D = (double)d->head_dim, Dv = (double)d->head_dim_v;
    return 2 * (double)d->batch * (double)d->heads_q * cells(d) *
           (pass == FBH_FORWARD ? D + Dv : 3 * D + 2 * Dv);
}

double bench_kv_bytes(const fb_desc *d) {
    return (double)d->batch * (double)d->heads_kv * (double)d->len_k * (double)(d->head_dim + d->head_dim_v) *
           (double)fbh_size((int)d->dtype);
}

word_text bench_mask_name(const fb_desc *d) {
    word_text name = {"dense"};
    if (d->window.left == FB_UNBOUNDED && d->window.right == 0)
        return (word_text){"causal"};
    char left[24] = "none", right[24] = "none";
    if (d->window.left != FB_UNBOUNDED)
        snprintf(left, sizeof left, "%lld", (long long)d->window.left);
    if (d->window.right != FB_UNBOUNDED)
        snprintf(right, sizeof right, "%lld", (long long)d->window.right);
    if (d->window.left != FB_UNBOUNDED || d->window.right != FB_UNBOUNDED)
        snprintf(name.text, sizeof name.text, "window %s:%s", left, right);
    return name;
}

const char *bench_pass_name(fbh_pass pass) { return pass == FBH_FORWARD ? "fwd" : "bwd"; }
