/* R15: outputs that overlap inputs, each other or the workspace are refused, with both names; views that only
 * interleave, such as the slices of one projection, are not. Random layouts are judged byte by byte. */
#include "flashback.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

/* Everything lies in one buffer, at places counted in floats. */
enum { B = 2, H = 2, L = 6, D = 4, SIZE = B * H * L * D, PLACES = 1 << 18 };
static float memory[PLACES];
static float *const elsewhere = memory + PLACES / 2;

typedef struct call {
    fb_desc desc;
    fb_plan *plan;
    fb_io io;
} call;

static fb_desc desc_of(void) {
    fb_desc d;
    fb_desc_init(&d, sizeof d);
    d.batch = B, d.heads_q = d.heads_kv = H;
    d.len_q = d.len_k = L;
    d.head_dim = d.head_dim_v = D;
    d.threads = 1;
    return d;
}

/* Tensors of a backward, each SIZE apart; a test then moves some of them. */
static void open_call(call *c, const fb_desc *d) {
    memset(memory, 0, PLACES / 8);
    c->desc = *d;
    if (fb_plan_create(&c->plan, d) != FB_OK)
        fail_msg("%s", fb_last_error());
    fb_io_init(&c->io, sizeof c->io);
    fb_ref *refs[] = {&c->io.q,  &c->io.k,  &c->io.v,  &c->io.out, &c->io.dout,
                      &c->io.dq, &c->io.dk, &c->io.dv, &c->io.lse};
    for (int i = 0; i < 9; i++)
        refs[i]->data = elsewhere + i * SIZE;
    c->io.workspace.data = elsewhere + 10 * SIZE;
    c->io.workspace_size = fb_plan_workspace(c->plan);
    assert_true(c->io.workspace_size <= (PLACES / 2 - 10 * SIZE) * sizeof(float));
}

static void forward_only(call *c) { c->io.dout.data = c->io.dq.data = c->io.dk.data = c->io.dv.data = NULL; }

static void refused_at(int line, const call *c, bool backward, const char *output, const char *other) {
    char names[2][64];
    snprintf(names[0], sizeof names[0], "io.%s (output, bytes 0x", output);
    snprintf(names[1], sizeof names[1], "overlaps io.%s (0x", other);
    fb_status got = backward ? fb_backward(c->plan, &c->io) : fb_forward(c->plan, &c->io);
    if (got != FB_INVALID || !strstr(fb_last_error(), names[0]) || !strstr(fb_last_error(), names[1]))
        fail_msg("line %d: %s, '%s', expected %s and %s", line, fb_status_name(got), fb_last_error(),
                 names[0], names[1]);
}

static void accepted_at(int line, const call *c, bool backward) {
    if ((backward ? fb_backward(c->plan, &c->io) : fb_forward(c->plan, &c->io)) != FB_OK)
        fail_msg("line %d: refused: %s", line, fb_last_error());
}

#define refused(...) refused_at(__LINE__, __VA_ARGS__)
#define accepted(...) accepted_at(__LINE__, __VA_ARGS__)

/* ---- Overlaps ------------------------------------------------------------------------------------------ */

static void test_backward(void **state) {
    (void)state;
    const fb_desc d = desc_of();
    call c;
    open_call(&c, &d);
    accepted(&c, true);
    const fb_io good = c.io;
    c.io.dq = c.io.q;
    refused(&c, true, "dq", "q");
    c.io = good, c.io.dq = c.io.dout;
    refused(&c, true, "dq", "dout");
    c.io = good, c.io.dk.data = (float *)c.io.k.data + SIZE - D; /* one row */
    c.io.v.data = elsewhere + 9 * SIZE;
    refused(&c, true, "dk", "k");
    c.io = good, c.io.dk.data = (float *)c.io.k.data - SIZE + 1; /* one element */
    c.io.q.data = elsewhere + 9 * SIZE;
    refused(&c, true, "dk", "k");
    c.io = good, c.io.dk = c.io.dq;
    refused(&c, true, "dq", "dk");
    c.io = good, c.io.dv = c.io.lse;
    refused(&c, true, "dv", "lse");
    c.io = good, c.io.dq = c.io.workspace;
    refused(&c, true, "dq", "workspace");
    c.io = good, c.io.k.data = (float *)c.io.workspace.data + 100;
    refused(&c, true, "workspace", "k");
    c.io = good, c.io.k = c.io.v = c.io.dout = c.io.q; /* inputs may be one */
    accepted(&c, true);
    fb_plan_destroy(c.plan);
}

static void test_forward(void **state) {
    (void)state;
    const fb_desc d = desc_of();
    call c;
    open_call(&c, &d);
    forward_only(&c);
    accepted(&c, false);
    const fb_io good = c.io;
    c.io.out = c.io.q;
    refused(&c, false, "out", "q");
    c.io = good, c.io.lse.data = (float *)c.io.out.data + 5;
    refused(&c, false, "out", "lse");
    c.io = good, c.io.lse.data = (float *)c.io.out.data + SIZE; /* right behind */
    accepted(&c, false);
    c.io.lse.data = (float *)c.io.out.data - B * H * L; /* right before */
    c.io.v.data = elsewhere + 9 * SIZE;
    accepted(&c, false);
    /* The same by offset instead of address. */
    c.io = good, c.io.out = (fb_ref){memory, (uint64_t)((char *)good.v.data - (char *)memory)};
    refused(&c, false, "out", "v");
    fb_plan_destroy(c.plan);
}

/* Small tensors count as well: an output over a list of lengths, a mask, sinks. */
static void test_options(void **state) {
    (void)state;
    fb_desc d = desc_of();
    d.flags = FB_SINKS | FB_DSINKS | FB_LENGTHS | FB_MASK | FB_BIAS | FB_DBIAS | FB_DLSE;
    d.mask_shape = d.bias_shape = (fb_shape){1, 1, L, L};
    call c;
    open_call(&c, &d);
    float *next = memory;
    fb_ref *const refs[] = {&c.io.sinks, &c.io.dsinks, &c.io.lens_q, &c.io.mask,
                            &c.io.bias,  &c.io.dbias,  &c.io.dlse,   &c.io.lens_k};
    for (int i = 0; i < 8; i++, next += SIZE)
        refs[i]->data = next;
    accepted(&c, true);
    const fb_io good = c.io;
    c.io.dsinks = c.io.sinks;
    refused(&c, true, "dsinks", "sinks");
    c.io = good, c.io.dbias = c.io.bias;
    refused(&c, true, "dbias", "bias");
    c.io = good, c.io.dbias = c.io.mask;
    refused(&c, true, "dbias", "mask");
    c.io = good, c.io.dq.data = (float *)c.io.dlse.data + 3;
    refused(&c, true, "dq", "dlse");
    c.io = good, c.io.dsinks = c.io.lens_k;
    refused(&c, true, "dsinks", "lens_k");
    fb_plan_destroy(c.plan);
}

static void test_merge(void **state) {
    (void)state;
    const fb_desc d = desc_of();
    call c;
    open_call(&c, &d);
    const fb_ref out = c.io.out, lse = c.io.lse, other = c.io.dq, other_lse = c.io.dk;
    assert_int_equal(fb_merge(c.plan, out, lse, other, other_lse, NULL), FB_OK);
    assert_int_equal(fb_merge(NULL, out, lse, other, other_lse, NULL), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "plan is NULL"));
    assert_int_equal(fb_merge(c.plan, out, lse, out, other_lse, NULL), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "other_out"));
    assert_int_equal(fb_merge(c.plan, out, lse, other, lse, NULL), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "other_lse"));
    assert_int_equal(fb_merge(c.plan, out, (fb_ref){NULL, 0}, other, other_lse, NULL), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "lse is NULL"));
    assert_int_equal(fb_merge(c.plan, out, lse, (fb_ref){out.data, 2}, other_lse, NULL), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "expected a multiple of its element's 4 bytes"));
    fb_plan_destroy(c.plan);
}

/* ---- Views that interleave ----------------------------------------------------------------------------- */

/* q, k, v as three slices of one buffer, dq, dk, dv of another; then all six of one. */
static void check_views(fb_strides s, int64_t apart) {
    fb_desc d = desc_of();
    d.q = d.k = d.v = d.dq = d.dk = d.dv = s;
    call c;
    open_call(&c, &d);
    fb_ref *const refs[] = {&c.io.q, &c.io.k, &c.io.v, &c.io.dq, &c.io.dk, &c.io.dv};
    for (int i = 0; i < 6; i++)
        refs[i]->data = memory + (i / 3) * 3 * SIZE + (i % 3) * apart;
    accepted(&c, true);
    c.io.dv.data = (float *)c.io.dv.data - 1; /* into dk */
    refused(&c, true, "dk", "dv");
    fb_plan_destroy(c.plan);
}

static void test_views(void **state) {
    (void)state;
    check_views((fb_strides){L * 3 * H * D, D, 3 * H * D}, H * D); /* [B,L,3,H,D] */
    check_views((fb_strides){H * L * 3 * D, L * 3 * D, 3 * D}, D); /* [B,H,L,3,D] */
    check_views((fb_strides){L * H * 3 * D, 3 * D, H * 3 * D}, D); /* [B,L,H,3,D] */
    check_views((fb_strides){3 * H * L * D, L * D, D}, H * L * D); /* [B,3,H,L,D] */
    check_views((fb_strides){H * L * D, L * D, D}, SIZE);          /* [3,B,H,L,D] */
}

/* ---- Random layouts, byte by byte ---------------------------------------------------------------------- */

static uint32_t draw(uint32_t below) {
    static uint64_t state = 1;
    state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (uint32_t)(state >> 33) % below;
}

static void mark(unsigned char *map, unsigned char value, size_t base, const fb_desc *d, fb_strides s) {
    const size_t strides[] = {d->batch > 1 ? (size_t)s.batch : 0, d->heads_q > 1 ? (size_t)s.head : 0,
                              d->len_q > 1 ? (size_t)s.row : 0};
    for (size_t b = 0; b < (size_t)d->batch; b++)
        for (size_t h = 0; h < (size_t)d->heads_q; h++)
            for (size_t i = 0; i < (size_t)d->len_q; i++)
                for (size_t e = 0; e < (size_t)d->head_dim; e++)
                    map[base + b * strides[0] + h * strides[1] + i * strides[2] + e] |= value;
}

static fb_strides draw_strides(const fb_desc *d) {
    /* Products of small factors, so that many layouts nest. */
    const int64_t row = d->head_dim * (1 + draw(3)) + draw(2) * draw(3),
                  head = draw(2) ? d->head_dim : row * d->len_q;
    const int64_t wide = head > row ? row : head * d->heads_q * (1 + draw(2));
    const int64_t batch = d->len_q * wide * (1 + draw(2));
    return (fb_strides){batch > head * d->heads_q ? batch : head * d->heads_q, head, wide};
}

/* What is accepted shares no byte; what lies in different spans is accepted. */
static void test_random_layouts(void **state) {
    (void)state;
    enum { SPAN = 2000 };
    int taken = 0, shared = 0, interleaved = 0;
    for (int round = 0; round < 4000; round++) {
        static unsigned char map[2 * SPAN + 4000];
        fb_desc d = desc_of();
        d.flags = FB_FORWARD_ONLY;
        d.batch = 1 + draw(2), d.heads_q = d.heads_kv = 1 + draw(3);
        d.len_q = d.len_k = 1 + draw(4), d.head_dim = d.head_dim_v = 1 + draw(3);
        d.q = draw_strides(&d);
        d.out = draw(2) ? d.q : draw_strides(&d);
        if (fb_supported(&d) != FB_OK)
            continue; /* out overlaps itself */
        const size_t q = draw(SPAN / 20), out = draw(SPAN / 20);
        memset(map, 0, sizeof map);
        mark(map, 1, q, &d, d.q);
        mark(map, 2, out, &d, d.out);
        bool overlap = false;
        size_t end[3] = {0}, start[3] = {sizeof map, sizeof map, sizeof map};
        for (size_t n = 0; n < sizeof map; n++) {
            overlap |= map[n] == 3;
            for (int who = 1; who < 3; who++)
                if (map[n] & who)
                    end[who] = n + 1, start[who] = start[who] < n ? start[who] : n;
        }
        call c;
        open_call(&c, &d);
        forward_only(&c);
        c.io.q.data = memory + q, c.io.out.data = memory + out;
        const bool accepts = fb_forward(c.plan, &c.io) == FB_OK;
        const bool apart = end[1] <= start[2] || end[2] <= start[1];
        if (accepts ? overlap : apart)
            fail_msg("round %d: %s", round, accepts ? "accepted, but they share bytes" : fb_last_error());
        taken += accepts;
        shared += overlap;
        interleaved += accepts && !apart;
        fb_plan_destroy(c.plan);
    }
    assert_true(taken > 200 && shared > 200 && interleaved > 50);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_backward), cmocka_unit_test(test_forward),
        cmocka_unit_test(test_options),  cmocka_unit_test(test_merge),
        cmocka_unit_test(test_views),    cmocka_unit_test(test_random_layouts),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
