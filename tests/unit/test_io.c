/* Every rule on the pointers of a call: present where the plan uses them and nowhere else, aligned to their
 * element, a workspace that is large enough, lengths that fit. test_overlap.c is about outputs that overlap.
 */
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

/* B=2, Hq=4, Hkv=2, Lq=3, Lk=5, D=4, Dv=8. */
typedef struct call {
    fb_desc desc;
    fb_plan *plan;
    fb_io io;
} call;

enum { SPACE = 1 << 16 };
static _Alignas(64) unsigned char memory[32][SPACE]; /* each tensor has its own */

static const struct {
    const char *name;
    size_t offset;
    uint32_t flag;      /* without it the tensor is not used; 0 = always used */
    uint32_t not_flag;  /* with it the tensor is not used */
    bool backward_only; /* not used in the forward */
    bool optional;
    size_t element;
} fields[] = {
    {"q", offsetof(fb_io, q), 0, 0, false, false, 4},
    {"k", offsetof(fb_io, k), 0, 0, false, false, 4},
    {"v", offsetof(fb_io, v), 0, 0, false, false, 4},
    {"out", offsetof(fb_io, out), 0, 0, false, false, 4},
    {"lse", offsetof(fb_io, lse), 0, 0, false, true, 4},
    {"dout", offsetof(fb_io, dout), 0, 0, true, false, 4},
    {"dlse", offsetof(fb_io, dlse), FB_DLSE, 0, true, false, 4},
    {"dq", offsetof(fb_io, dq), 0, FB_NO_DQ, true, false, 4},
    {"dk", offsetof(fb_io, dk), 0, FB_NO_DK, true, false, 4},
    {"dv", offsetof(fb_io, dv), 0, FB_NO_DV, true, false, 4},
    {"bias", offsetof(fb_io, bias), FB_BIAS, 0, false, false, 4},
    {"dbias", offsetof(fb_io, dbias), FB_DBIAS, 0, true, false, 4},
    {"mask", offsetof(fb_io, mask), FB_MASK, 0, false, false, 1},
    {"block_mask", offsetof(fb_io, block_mask), FB_BLOCK_MASK, 0, false, false, 1},
    {"sinks", offsetof(fb_io, sinks), FB_SINKS, 0, false, false, 4},
    {"dsinks", offsetof(fb_io, dsinks), FB_DSINKS, 0, true, false, 4},
    {"cu_q", offsetof(fb_io, cu_q), FB_PACKED, 0, false, false, 4},
    {"cu_k", offsetof(fb_io, cu_k), FB_PACKED, 0, false, false, 4},
    {"lens_q", offsetof(fb_io, lens_q), FB_LENGTHS, 0, false, true, 4},
    {"lens_k", offsetof(fb_io, lens_k), FB_LENGTHS, 0, false, true, 4},
};
enum { FIELDS_COUNT = sizeof fields / sizeof *fields };

static fb_ref *ref_at(fb_io *io, int i) { return (fb_ref *)(void *)((char *)io + fields[i].offset); }

static bool used(uint32_t flags, bool backward, int i) {
    return (!fields[i].flag || flags & fields[i].flag) && !(flags & fields[i].not_flag) &&
           (backward || !fields[i].backward_only);
}

static void fill_io(call *c, bool backward) {
    fb_io_init(&c->io, sizeof c->io);
    for (int i = 0; i < FIELDS_COUNT; i++)
        if (used(c->desc.flags, backward, i))
            ref_at(&c->io, i)->data = memory[i];
    c->io.workspace.data = memory[FIELDS_COUNT];
    c->io.workspace_size = fb_plan_workspace(c->plan);
    assert_true(c->io.workspace_size <= SPACE * (32 - FIELDS_COUNT));
}

static void open_desc(call *c, const fb_desc *d) {
    memset(memory, 0, sizeof memory);
    c->desc = *d;
    if (fb_plan_create(&c->plan, d) != FB_OK)
        fail_msg("%s", fb_last_error());
    fill_io(c, true);
}

static fb_desc desc_of(uint32_t flags) {
    fb_desc d;
    fb_desc_init(&d, sizeof d);
    d.flags = flags;
    d.batch = 2, d.heads_q = 4, d.heads_kv = 2;
    d.len_q = 3, d.len_k = 5;
    d.head_dim = 4, d.head_dim_v = 8;
    d.bias_shape = (fb_shape){2, 4, 3, 5};
    d.threads = 1;
    if (flags & FB_PACKED)
        d.total_q = 6, d.total_k = 10;
    return d;
}

static void open_call(call *c, uint32_t flags) {
    const fb_desc d = desc_of(flags);
    open_desc(c, &d);
}

static fb_status pass(const call *c, bool backward) {
    return backward ? fb_backward(c->plan, &c->io) : fb_forward(c->plan, &c->io);
}

static void refused_at(int line, const call *c, bool backward, const char *given, const char *expected) {
    fb_status got = pass(c, backward);
    if (got != FB_INVALID || !strstr(fb_last_error(), given) || !strstr(fb_last_error(), expected))
        fail_msg("line %d: %s, '%s', expected FB_INVALID with '%s' and '%s'", line, fb_status_name(got),
                 fb_last_error(), given, expected);
}

static void accepted_at(int line, const call *c, bool backward) {
    if (pass(c, backward) != FB_OK)
        fail_msg("line %d: refused: %s", line, fb_last_error());
    assert_string_equal(fb_last_error(), "");
}

#define refused(...) refused_at(__LINE__, __VA_ARGS__)
#define accepted(...) accepted_at(__LINE__, __VA_ARGS__)

/* ---- The struct, the plan, the workspace --------------------------------------------------------------- */

static void test_struct(void **state) {
    (void)state;
    call c;
    open_call(&c, 0);
    accepted(&c, true);
    assert_int_equal(fb_forward(NULL, &c.io), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "plan is NULL"));
    assert_int_equal(fb_backward(c.plan, NULL), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "io is NULL"));
    c.io.size = 12;
    refused(&c, true, "io.size is 12", "expected sizeof(fb_io)");
    c.io.size = 4097;
    refused(&c, true, "io.size is 4097", "expected sizeof(fb_io)");
    fill_io(&c, true);
    c.io.reserved = 9;
    refused(&c, true, "io.reserved is 9", "expected 0");
    fb_plan_destroy(c.plan);
    open_call(&c, FB_FORWARD_ONLY);
    fill_io(&c, false);
    accepted(&c, false);
    refused(&c, true, "fb_backward on a plan with FB_FORWARD_ONLY", "create one without");
    fb_plan_destroy(c.plan);
}

/* A longer struct of a newer program: what this library does not know must be zero. */
static void test_longer_struct(void **state) {
    (void)state;
    call c;
    struct {
        fb_io io;
        unsigned char newer[16];
    } longer;
    open_call(&c, 0);
    memset(&longer, 0, sizeof longer);
    longer.io = c.io;
    longer.io.size = sizeof longer;
    assert_int_equal(fb_backward(c.plan, &longer.io), FB_OK);
    longer.newer[7] = 1;
    assert_int_equal(fb_backward(c.plan, &longer.io), FB_INVALID);
    assert_non_null(strstr(fb_last_error(), "io.size is"));
    assert_non_null(strstr(fb_last_error(), "older than the program's header"));
    /* fb_io_init keeps the size that it is told, so that this is found without any care of the caller's. */
    fb_io_init(&longer.io, sizeof longer);
    assert_int_equal(longer.io.size, sizeof longer);
    assert_int_equal(longer.newer[7], 0);
    fb_plan_destroy(c.plan);
}

static void test_workspace(void **state) {
    (void)state;
    call c;
    open_call(&c, 0);
    char given[96];
    c.io.workspace_size--;
    snprintf(given, sizeof given, "io.workspace has %llu bytes", (unsigned long long)c.io.workspace_size);
    refused(&c, true, given, "fb_plan_workspace");
    c.io.workspace_size = 0;
    refused(&c, false, "io.workspace has 0 bytes", "expected at least");
    fill_io(&c, true);
    c.io.workspace.data = NULL;
    refused(&c, true, "and is NULL", "io.workspace has");
    fill_io(&c, true);
    c.io.workspace.offset = 13; /* more than is needed, at an odd address */
    c.io.workspace_size++;
    accepted(&c, true);
    fb_plan_destroy(c.plan);
}

/* ---- Present, absent, aligned -------------------------------------------------------------------------- */

#define SOME (FB_BIAS | FB_DBIAS | FB_MASK | FB_BLOCK_MASK | FB_SINKS | FB_DSINKS | FB_DLSE)

/* One tensor is missing, or misaligned; every other one is right. */
static void check_fields(uint32_t flags, bool backward) {
    call c;
    open_call(&c, flags);
    fill_io(&c, backward);
    accepted(&c, backward);
    for (int i = 0; i < FIELDS_COUNT; i++) {
        char given[64];
        fill_io(&c, backward);
        fb_ref *ref = ref_at(&c.io, i);
        if (used(flags, backward, i)) {
            ref->data = NULL;
            snprintf(given, sizeof given, "io.%s is NULL, but the plan ", fields[i].name);
            if (fields[i].optional && !(backward && strcmp(fields[i].name, "lse") == 0))
                accepted(&c, backward);
            else
                refused(&c, backward, given, "s it"); /* reads or writes it */
            *ref = (fb_ref){memory[i], 1};
            snprintf(given, sizeof given, "io.%s is 0x", fields[i].name);
            if (fields[i].element > 1)
                refused(&c, backward, given, "expected a multiple of its element's 4 bytes");
            else
                accepted(&c, backward);
        } else {
            ref->data = memory[i];
            snprintf(given, sizeof given, "io.%s is given", fields[i].name);
            if (used(flags, true, i)) /* one fb_io serves both passes */
                accepted(&c, backward);
            else
                refused(&c, backward, given, "set its flag in desc.flags, or leave it NULL");
        }
    }
    fb_plan_destroy(c.plan);
}

static void test_fields(void **state) {
    (void)state;
    for (int backward = 0; backward < 2; backward++) {
        check_fields(0, backward);
        check_fields(SOME, backward);
        check_fields(FB_LENGTHS, backward);
        check_fields(FB_PACKED, backward);
        check_fields(FB_NO_DQ | FB_NO_DK, backward);
        check_fields(FB_NO_DV, backward);
    }
}

/* Fields of fb_desc that belong to an option hold anything while its flag is not set. */
static void test_unused_fields(void **state) {
    (void)state;
    call c;
    const int64_t junk[] = {INT64_MIN, -1, 0, INT64_MAX};
    for (int i = 0; i < 4; i++) {
        const fb_strides s = {junk[i], junk[i], junk[i]};
        const fb_shape n = {junk[i], junk[i], junk[i], junk[i]};
        fb_desc d = desc_of(FB_FORWARD_ONLY);
        d.bias = d.dbias = d.mask = d.dout = d.dq = d.dk = d.dv = s;
        d.bias_shape = d.mask_shape = n;
        d.block_q = d.block_k = d.block_batch = d.block_heads = junk[i];
        for (int route = FB_FUSED; route <= FB_REFERENCE; route++) {
            d.route = (fb_route)route;
            open_desc(&c, &d);
            fill_io(&c, false);
            accepted(&c, false);
            fb_plan_destroy(c.plan);
        }
    }
}

/* Tensors without an element need no memory. */
static void test_empty(void **state) {
    (void)state;
    call c;
    fb_desc d = desc_of(0);
    d.len_k = 0;
    open_desc(&c, &d);
    c.io.k.data = c.io.v.data = c.io.dk.data = c.io.dv.data = NULL;
    accepted(&c, true);
    fill_io(&c, false);
    c.io.k.data = c.io.v.data = NULL;
    accepted(&c, false);
    fb_plan_destroy(c.plan);
    d.len_k = 5, d.scale = 1;
    /* q and k, then v and out, have no columns. */
    for (int route = FB_FUSED; route <= FB_REFERENCE; route++) {
        d.route = (fb_route)route, d.head_dim = 0, d.head_dim_v = 8;
        open_desc(&c, &d);
        c.io.q.data = c.io.k.data = c.io.dq.data = c.io.dk.data = NULL;
        accepted(&c, false);
        accepted(&c, true);
        fb_plan_destroy(c.plan);
        d.head_dim = 4, d.head_dim_v = 0;
        open_desc(&c, &d);
        c.io.v.data = c.io.out.data = c.io.dout.data = c.io.dv.data = NULL;
        accepted(&c, false);
        accepted(&c, true);
        fb_plan_destroy(c.plan);
    }
    d.batch = 0, d.head_dim_v = 8, d.route = FB_AUTO;
    open_desc(&c, &d);
    fb_ref workspace = c.io.workspace;
    fb_io_init(&c.io, sizeof c.io);
    c.io.workspace = workspace;
    c.io.workspace_size = fb_plan_workspace(c.plan);
    accepted(&c, false);
    accepted(&c, true);
    fb_plan_destroy(c.plan);
}

/* ---- Lengths ------------------------------------------------------------------------------------------- */

static void test_cu(void **state) {
    (void)state;
    call c;
    open_call(&c, FB_PACKED);
    const struct {
        int32_t q[3], k[3];
        const char *given, *expected;
    } rows[] = {{{1, 2, 3}, {0, 1, 2}, "io.cu_q[0] is 1", "expected 0"},
                {{0, 2, 3}, {-1, 1, 2}, "io.cu_k[0] is -1", "expected 0"},
                {{0, 3, 2}, {0, 1, 2}, "io.cu_q[2] is 2 after 3", "ascending"},
                {{0, 2, 3}, {0, -5, 2}, "io.cu_k[1] is -5 after 0", "ascending"},
                {{0, 1, 6}, {0, 1, 2}, "io.cu_q gives sequence 1 5 rows", "desc.len_q (the longest) is 3"},
                {{0, 1, 2}, {0, 6, 7}, "io.cu_k gives sequence 0 6 rows", "desc.len_k (the longest) is 5"},
                {{0, INT32_MAX, 2}, {0, 1, 2}, "io.cu_q gives sequence 0 2147483647 rows", "is 3"}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        for (int backward = 0; backward < 2; backward++) {
            fill_io(&c, backward);
            memcpy(c.io.cu_q.data, rows[i].q, sizeof rows[i].q);
            memcpy(c.io.cu_k.data, rows[i].k, sizeof rows[i].k);
            refused(&c, backward, rows[i].given, rows[i].expected);
        }
    fb_plan_destroy(c.plan);
    fb_desc d = desc_of(FB_PACKED);
    d.total_q = 5;
    open_desc(&c, &d);
    fill_io(&c, false);
    memcpy(c.io.cu_q.data, (int32_t[]){0, 3, 6}, 12);
    refused(&c, false, "io.cu_q ends at 6", "desc.total_q is 5");
    memcpy(c.io.cu_q.data, (int32_t[]){0, 0, 3}, 12);
    accepted(&c, false);
    fb_plan_destroy(c.plan);
}

static void test_lens(void **state) {
    (void)state;
    call c;
    open_call(&c, FB_LENGTHS);
    int32_t *q = c.io.lens_q.data, *k = c.io.lens_k.data;
    q[1] = -1;
    refused(&c, true, "io.lens_q[1] is -1", "expected 0 to 3");
    q[1] = 3, k[0] = 6;
    refused(&c, true, "io.lens_k[0] is 6", "expected 0 to 5");
    k[0] = 5;
    accepted(&c, true);
    fb_plan_destroy(c.plan);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_struct), cmocka_unit_test(test_longer_struct), cmocka_unit_test(test_workspace),
        cmocka_unit_test(test_fields), cmocka_unit_test(test_unused_fields), cmocka_unit_test(test_empty),
        cmocka_unit_test(test_cu),     cmocka_unit_test(test_lens),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
