/* What these tests share: the mock of Metal, and ways to speak to it as a program would. */
#ifndef TESTS_METAL_SUPPORT_H
#define TESTS_METAL_SUPPORT_H

#include "flashback.h"
#include "src/metal/objc.h"
#include "tests/child.h"
#include "tests/mock/mock.h"
#include <errno.h>

typedef struct mock {
    mock_metal_state *state;
    fb__objc objc;
} mock;

/* Both libraries, which the process then has under their usual names. */
static inline mock load_metal(void) {
    mock m = {.state = load_mock(MOCKS "/metal/libobjc.A.dylib", "mock_metal")};
    load_mock(MOCKS "/metal/Metal", "MTLCopyAllDevices");
    setenv("FLASHBACK_CACHE", "off", 1);
    unsetenv("FLASHBACK_KERNELS");
    unsetenv("FLASHBACK_LOG");
    expect(fb__objc_open(&m.objc) == FB_OK);
    return m;
}

static inline void expect_nothing_left(const mock *m, const char *where, long n) {
    const mock_metal_state *s = m->state;
    if (s->live || s->pools || s->strange)
        fprintf(stderr, "%s, call %ld: %ld objects, %d pools, %d strange calls (%s)\n", where, n, s->live,
                s->pools, s->strange, s->strangest ? s->strangest : "none");
    expect(!s->live && !s->pools && !s->strange);
}

/* The functions that ran, in order, since this was last looked at. */
static inline void expect_ran(const mock *m, const char *names) {
    char all[1024] = "";
    mock_metal_state *s = m->state;
    for (long n = 0; n < s->dispatch_count && n < MOCK_DISPATCHES; n++) {
        const size_t length = strlen(all);
        snprintf(all + length, sizeof all - length, "%s%s", length ? " " : "", s->dispatches[n].function);
    }
    s->dispatch_count = 0;
    if (strcmp(all, names) != 0)
        fprintf(stderr, "ran: %s\nexpected: %s\n", all, names);
    expect(strcmp(all, names) == 0);
}

/* ---- Problems ---- */

typedef struct problem {
    const char *name;
    uint32_t flags;
    fb_dtype dtype;
    fb_route route;
    int64_t len_q, len_k;
    const char *forward, *backward; /* what runs: between barriers, the last first */
} problem;

enum { BATCH = 2, HEADS = 4, HEADS_KV = 2, DIM = 64 };

static inline fb_desc describe(const problem *p) {
    fb_desc d;
    fb_desc_init(&d, sizeof d);
    d.device = FB_METAL;
    d.flags = p->flags;
    d.dtype = p->dtype;
    d.route = p->route;
    d.batch = BATCH, d.heads_q = HEADS, d.heads_kv = HEADS_KV;
    d.len_q = p->len_q, d.len_k = p->len_k;
    d.head_dim = d.head_dim_v = DIM;
    if (p->flags & FB_BIAS)
        d.bias_shape = (fb_shape){1, HEADS, p->len_q, p->len_k};
    return d;
}

/* Places of the tensors, cut from one buffer: 4 bytes an element are enough for all. */
static inline fb_io tensors(const problem *p, fb_ref memory, uint64_t workspace) {
    fb_io io;
    fb_io_init(&io, sizeof io);
    const bool backward = !(p->flags & FB_FORWARD_ONLY);
    const uint64_t q = (uint64_t)(BATCH * HEADS * p->len_q * DIM) * 4,
                   k = (uint64_t)(BATCH * HEADS_KV * p->len_k * DIM) * 4,
                   bias = (uint64_t)(HEADS * p->len_q * p->len_k) * 4;
    const struct {
        fb_ref *at;
        uint64_t bytes;
        bool used;
    } rows[] = {{&io.q, q, true},
                {&io.k, k, true},
                {&io.v, k, true},
                {&io.out, q, true},
                {&io.lse, q, true},
                {&io.dout, q, backward},
                {&io.dq, q, backward && !(p->flags & FB_NO_DQ)},
                {&io.dk, k, backward && !(p->flags & FB_NO_DK)},
                {&io.dv, k, backward && !(p->flags & FB_NO_DV)},
                {&io.bias, bias, p->flags & FB_BIAS},
                {&io.dbias, bias, p->flags & FB_DBIAS},
                {&io.sinks, 64, p->flags & FB_SINKS},
                {&io.dsinks, 64, p->flags & FB_DSINKS}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        if (rows[i].used) {
            *rows[i].at = memory;
            memory.offset += rows[i].bytes;
        }
    io.workspace = memory;
    io.workspace_size = workspace;
    return io;
}

enum { MEMORY = 32 << 20 };

#endif
