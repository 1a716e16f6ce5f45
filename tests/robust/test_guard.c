/* R13, by force: every input, output and workspace ends right before a page that must not be touched, then
 * starts right behind one, on every route, instruction set and dtype. What is poison before (outputs,
 * workspace, gaps, keys that nobody sees) must not show, and the workspace has exactly the bytes that the
 * plan asks for, at addresses that are odd. */
#include "harness/harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

/* Each option is in some row, sizes are no multiples of anything, and so tensors start at their element only.
 */
static const char *const cases[] = {
    "b1h1k1.q1k1.d1",
    "b1h2k1.q17k21.d3.causal",
    "b2h7k1.q1k1100.d17v9",
    "b2h5k1.q1k130.d33v40.left20.right3",
    "b5h6k1.q1k200.d7v20.packed.causal.odd",
    "b2h1k1.q3k131.d16v32.maskbhqk.biasbhqk.neginf.dbias",
    "b2h4k2.q4k70.d48.causal.offset-3",
    "b1h2k1.q40k50.d128",
    "b1h8k1.q8k98.d192v128",
    "b2h4k2.q70k83.d40.causal",
    "b1h3k1.q5k130.d17v9.left20.right3",
    "b1h1k1.q65k129.d72v80.topleft.right2",
    "b2h4k2.q7k600.d33.causal.offset-3",
    "b1h6k2.q3k70.d111.odd",
    "b1h2k1.q9k13.d257v2",
    "b2h2k1.q33k65.d8.softcap5.biasbhqk.dbias.neginf",
    "b2h2k1.q33k65.d8.bias1h1k.dbias.maskb1qk",
    "b2h4k2.q6k9.d3.maskbhq1.bias11q1.dbias.softcap2",
    "b2h4k2.q7k67.d5.mask11qk.biasb11k.dbias.padded",
    "b2h2k1.q70k83.d16.block16x16bh.causal",
    "b2h2k1.q20k200.d5.block32x64.left50",
    "b2h4k2.q5k70.d7.sinks.dsinks.dlse",
    "b2h4k2.q67k31.d7.sinks.dsinks.causal.acc",
    "b5h2k1.q70k33.d16.packed.causal",
    "b5h2k1.q9k70.d15.packed.left3.odd",
    "b5h2k1.q9k70.d20.lensq.lensk.padded",
    "b5h4k2.q6k130.d9.lensk.sinks.dsinks.odd",
    "b2h4k2.q8k19.d13.acc.odd.nodv",
    "b3h4k2.q20k20.d11.qkv.nodq",
    "b3h4k2.q21k20.d11.blhd.nodk",
    "b2h4k2.q20k31.d11.repeated",
    "b2h4k2.q9k6.d7.fwd.nolse.maskbhqk",
    "b2h4k2.q0k9.d8.bias1h1k.dbias",
    "b2h4k2.q6k0.d8.biasbhqk.dbias",
    "b2h4k2.q6k0.d8.maskbhqk.sinks.dsinks",
    "b2h4k2.q6k0.d8.block16x16.acc",
    "b2h0k2.q6k9.d8",
    "b2h4k2.q6k9.d0v5.scale1",
    "b2h4k2.q6k9.d5v0",
};

enum { CASES = sizeof cases / sizeof *cases };

/* From the fifth on they differ from others in bf16 only. */
static const char *const isas[] = {"scalar", "baseline",   "avx2",      "avx512",
                                   "bfdot",  "avx512bf16", "amx_model", "amx"};

/* Without it on this machine a lower one would run, once more. */
static bool present(const char *isa) {
    char info[4096];
    fb_info(info, sizeof info);
    char *line = strstr(info, "cpu instruction sets: ");
    assert_non_null(line);
    line[strcspn(line, "\n")] = 0;
    for (char *rest, *word = strtok_r(line, " ", &rest); word; word = strtok_r(NULL, " ", &rest))
        if (strcmp(word, isa) == 0)
            return true;
    return false;
}

static fbh_case case_of(int number, fb_dtype dtype) {
    fbh_case c;
    char name[FBH_NAME_SIZE], error[256];
    snprintf(name, sizeof name, "%s.%s", fb_dtype_name(dtype), cases[number]);
    if (!fbh_case_parse(&c, name, error, sizeof error))
        fail_msg("%s: %s", name, error);
    return c;
}

static void run(const fbh_oracle *o, fb_route route, const char *isa) {
    for (int guard = FBH_GUARD_END; guard <= FBH_GUARD_START; guard++) {
        const fbh_options options = {.route = route, .threads = 2, .guard = (fbh_guard)guard};
        fbh_result r;
        fbh_oracle_run(o, &options, &r);
        if (r.verdict != FBH_PASS)
            fail_msg("%s, %s, %s, guard pages %s: %s", o->given.what.name, fb_route_name(route), isa,
                     guard == FBH_GUARD_END ? "behind" : "before", r.message);
    }
}

/* Every route in every instruction set. */
static void check_dtype(fb_dtype dtype) {
    for (int n = 0; n < CASES; n++) {
        const fbh_case c = case_of(n, dtype);
        fbh_oracle o;
        fbh_oracle_open(&o, &c, 1);
        run(&o, FB_REFERENCE, "plain C");
        for (int i = 0; i < (dtype == FB_BF16 ? 8 : 4); i++) {
            if (!present(isas[i]))
                continue;
            setenv("FLASHBACK_ISA", isas[i], 1);
            for (int route = FB_FUSED; route <= FB_UNFUSED; route++)
                if (fbh_route_fits(&c, (fb_route)route))
                    run(&o, (fb_route)route, isas[i]);
        }
        unsetenv("FLASHBACK_ISA");
        fbh_oracle_close(&o);
    }
}

static void test_f32(void **state) {
    (void)state;
    check_dtype(FB_F32);
}
static void test_f16(void **state) {
    (void)state;
    check_dtype(FB_F16);
}
static void test_bf16(void **state) {
    (void)state;
    check_dtype(FB_BF16);
}
static void test_f64(void **state) {
    (void)state;
    check_dtype(FB_F64);
}

/* ---- The workspace ------------------------------------------------------------------------------------- */

enum { CANARY = 0xA5 };

/* `bytes` of poison between forbidden pages, `shift` bytes away from one of them. */
typedef struct room {
    unsigned char *map, *data, *gap;
    size_t map_bytes, shift;
} room;

static room make_room(size_t bytes, fbh_guard guard, size_t shift) {
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = (bytes + shift + page - 1) / page * page;
    room r = {.map_bytes = inner + 2 * page, .shift = shift};
    r.map = mmap(NULL, r.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(r.map != MAP_FAILED && mprotect(r.map + page, inner, PROT_READ | PROT_WRITE) == 0);
    r.data = guard == FBH_GUARD_START ? r.map + page + shift : r.map + page + inner - bytes - shift;
    r.gap = guard == FBH_GUARD_START ? r.data - shift : r.data + bytes;
    memset(r.gap, CANARY, shift);
    memset(r.data, 0xFF, bytes);
    return r;
}

static void check_workspace(fbh_problem *p, const fb_plan *plan, const fbh_oracle *o, fbh_guard guard,
                            size_t shift) {
    const int passes = p->desc.flags & FB_FORWARD_ONLY ? 1 : 2;
    for (int pass = 0; pass < passes; pass++) {
        room r = make_room(fb_plan_workspace(plan), guard, shift);
        fb_io io;
        char message[256];
        assert_int_equal(fbh_problem_ready(p, plan, (fbh_pass)pass), FB_OK);
        fbh_problem_io(p, (fbh_pass)pass, &io);
        io.workspace = (fb_ref){r.data, 0};
        io.workspace_size = fb_plan_workspace(plan);
        if ((pass ? fb_backward : fb_forward)(plan, &io) != FB_OK)
            fail_msg("%s: %s", p->what.name, fb_last_error());
        for (size_t n = 0; n < shift; n++)
            assert_int_equal(r.gap[n], CANARY);
        if (!fbh_problem_intact(p, (fbh_pass)pass, message, sizeof message) ||
            !fbh_compare(p, &o->want, &o->low, (fbh_pass)pass, NULL, message, sizeof message))
            fail_msg("%s, workspace shifted by %zu: %s", p->what.name, shift, message);
        munmap(r.map, r.map_bytes);
    }
}

static void test_workspace(void **state) {
    (void)state;
    static const size_t shifts[] = {0, 1, 7, 63};
    for (int n = 0; n < CASES; n++) {
        const fbh_case c = case_of(n, n % 2 ? FB_BF16 : FB_F32);
        fbh_oracle o;
        fbh_oracle_open(&o, &c, 2);
        for (int route = FB_FUSED; route <= FB_REFERENCE; route++) {
            if (!fbh_route_fits(&c, (fb_route)route))
                continue;
            fbh_problem p;
            fb_plan *plan;
            fbh_problem_create(&p, &c, FB_CPU, 0, FBH_GUARD_END, false);
            fbh_problem_copy(&p, &o.given);
            p.desc.route = (fb_route)route;
            p.desc.threads = 3;
            if (fb_plan_create(&plan, &p.desc) != FB_OK)
                fail_msg("%s: %s", c.name, fb_last_error());
            for (int s = 0; s < 4; s++)
                for (int guard = FBH_GUARD_END; guard <= FBH_GUARD_START; guard++)
                    check_workspace(&p, plan, &o, (fbh_guard)guard, shifts[s]);
            fb_plan_destroy(plan);
            fbh_problem_destroy(&p);
        }
        fbh_oracle_close(&o);
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_f32), cmocka_unit_test(test_f16),       cmocka_unit_test(test_bf16),
        cmocka_unit_test(test_f64), cmocka_unit_test(test_workspace),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
