/* What only the interface shows: the first call, LSE asked for or not, routes by field and by environment,
 * sizes that overflow, a descriptor nobody has set up. */
#include "support.h"

/* ---- The first call of the process --------------------------------------------------------------------- */

/* S0: arrays allocated by the first forward and used by a backward before it. One key: P = 1, so out = v,
 * lse = the logit, dv = sum of dout, dq = dk = 0. This test stands first. */
static void s0_first_call_of_the_process_is_a_backward(void **state) {
    (void)state;
    float q[3] = {1, 2, 3}, k[1] = {0.5F}, v[1] = {7}, out[3] = {7, 7, 7}, lse[3] = {0.5F, 1, 1.5F};
    float dout[3] = {1, 10, 100}, dq[3] = {9, 9, 9}, dk[1] = {9}, dv[1] = {9};
    fb_desc d;
    fb_plan *plan;
    fb_io io;
    fb_desc_init(&d, sizeof d);
    d.batch = d.heads_q = d.heads_kv = d.len_k = d.head_dim = d.head_dim_v = 1;
    d.len_q = 3;
    snprintf(here, sizeof here, "the first call");
    expect_ok(fb_plan_create(&plan, &d));
    fb_io_init(&io, sizeof io);
    io.q.data = q, io.k.data = k, io.v.data = v, io.out.data = out, io.lse.data = lse;
    io.dout.data = dout, io.dq.data = dq, io.dk.data = dk, io.dv.data = dv;
    io.workspace_size = fb_plan_workspace(plan);
    io.workspace.data = malloc(io.workspace_size);
    assert_non_null(io.workspace.data);
    expect_ok(fb_backward(plan, &io));
    expect(dv[0] == 111 && dk[0] == 0, "dv is %g, dk is %g", (double)dv[0], (double)dk[0]);
    expect(dq[0] == 0 && dq[1] == 0 && dq[2] == 0, "dq is %g, ...", (double)dq[0]);
    free(io.workspace.data);
    fb_plan_destroy(plan);
}

/* ---- LSE asked for or not ------------------------------------------------------------------------------ */

static void s0_lse_asked_for_or_not(void **state) {
    (void)state;
    const char *const cases[] = {"b2h4k2.q1k1.d8",    "b2h4k2.q6k9.d8.causal", "b1h2k1.q70k90.d16.softcap2",
                                 "b1h2k1.q8k600.d16", "b1h2k1.q33k33.d576",    "b3h2k1.q9k9.d8.packed.sinks",
                                 "b2h2k1.q6k0.d8"};
    for (int type = 0; type < TYPES; type++)
        for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
            fbh_problem with, without;
            answer a;
            open_case(&with, "%s.%s.fwd", type_name(type), cases[n]);
            open_case(&without, "%s.%s.fwd.nolse", type_name(type), cases[n]);
            open_answer(&a, &with);
            for (where w = EVERYWHERE; next_where(&w, &with.desc);) {
                run(&with, &w);
                run(&without, &w);
                agree(&with, &a);
                for (place at = START; next(&with.t[FBH_OUT], &at);) {
                    expect_exactly(&without.t[FBH_OUT], at, get(&with.t[FBH_OUT], at));
                    expect(!isnan(get(&with.t[FBH_LSE], at)), "lse is not written");
                }
            }
            close_answer(&a);
            fbh_problem_destroy(&with);
            fbh_problem_destroy(&without);
        }
}

/* ---- Routes -------------------------------------------------------------------------------------------- */

static bool takes(const fb_plan *plan, const char *route) {
    char text[8192], line[64];
    fb_plan_explain(plan, text, sizeof text);
    snprintf(line, sizeof line, "route: %s,", route);
    return strstr(text, line) != NULL;
}

/* Each path by environment: explain names it, the bits are those of the same path by field, and other paths
 * agree within the accuracy rule. */
static void s0_paths_forced_by_environment(void **state) {
    (void)state;
    fbh_problem by_field, by_name;
    answer a;
    open_case(&by_field, "f32.b2h4k2.q6k70.d24.causal.softcap4");
    open_case(&by_name, "f32.b2h4k2.q6k70.d24.causal.softcap4");
    open_answer(&a, &by_name);
    for (where w = EVERY_ROUTE; next_where(&w, &by_field.desc);) {
        const where automatic = {.route = FB_AUTO};
        run(&by_field, &w);
        setenv("FLASHBACK_ROUTE", fb_route_name(w.route), 1);
        fb_plan *plan = plan_at(&by_name, &automatic);
        expect(takes(plan, fb_route_name(w.route)), "FLASHBACK_ROUTE=%s takes another",
               fb_route_name(w.route));
        fb_plan_destroy(plan);
        run(&by_name, &automatic);
        unsetenv("FLASHBACK_ROUTE");
        expect(digest(&by_name) == digest(&by_field), "the same route gives other bits");
        agree(&by_name, &a);
    }
    close_answer(&a);
    fbh_problem_destroy(&by_field);
    fbh_problem_destroy(&by_name);
}

static void s0_unknown_environment_values_are_reported(void **state) {
    (void)state;
    const struct {
        const char *name, *value, *expected;
    } rows[] = {{"FLASHBACK_ROUTE", "flash", "auto | fused | vector | unfused | reference"},
                {"FLASHBACK_ISA", "sse9",
                 "scalar | baseline | bfdot | avx2 | avx512 | "
                 "avx512bf16 | amx_model | amx"},
                {"FLASHBACK_FUSED_MIN_LEN", "many", "whole number"},
                {"FLASHBACK_FUSED_MIN_LEN", "-5", "whole number"},
                {"FLASHBACK_SCORE_BYTES_MAX", "4GB", "whole number"}};
    fbh_problem p;
    open_case(&p, "f32.b2h4k2.q6k70.d24");
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        fb_plan *plan;
        setenv(rows[n].name, rows[n].value, 1);
        const fb_status status = fb_plan_create(&plan, &p.desc);
        unsetenv(rows[n].name);
        snprintf(here, sizeof here, "%s=%s", rows[n].name, rows[n].value);
        expect_refused(status, FB_INVALID, rows[n].name, rows[n].value, rows[n].expected);
        assert_null(plan);
    }
    fbh_problem_destroy(&p);
}

/* A threshold decides which route is taken, never what comes out; a route that cannot run is an error. */
static void s0_thresholds_choose_routes_only(void **state) {
    (void)state;
    const where automatic = {.route = FB_AUTO}, vector = {.route = FB_VECTOR};
    fbh_problem p;
    fb_plan *plan;
    open_case(&p, "bf16.b2h4k2.q20k70.d24.causal");
    check_everywhere(&p, EVERY_ROUTE);
    setenv("FLASHBACK_FUSED_MIN_LEN", "71", 1);
    plan = plan_at(&p, &automatic);
    expect(takes(plan, "unfused"), "70 keys, below the threshold of 71, do not take unfused");
    fb_plan_destroy(plan);
    p.desc.fused_min_len = 70; /* the field wins */
    plan = plan_at(&p, &automatic);
    expect(takes(plan, "fused"), "70 keys, at the threshold of 70, do not take fused");
    fb_plan_destroy(plan);
    unsetenv("FLASHBACK_FUSED_MIN_LEN");
    p.desc.route = vector.route;
    expect_refused(fb_plan_create(&plan, &p.desc), FB_UNSUPPORTED, "vector", "len_q is 20", "at most 8");
    p.desc.route = FB_UNFUSED;
    p.desc.score_bytes_max = 1000;
    expect_refused(fb_plan_create(&plan, &p.desc), FB_UNSUPPORTED, "unfused", "score_bytes_max", "fused");
    fbh_problem_destroy(&p);
}

/* ---- Sizes --------------------------------------------------------------------------------------------- */

enum { DIMS = 7 };

static fb_desc large(const int64_t dims[DIMS], fb_route route) {
    fb_desc d;
    fb_desc_init(&d, sizeof d);
    d.dtype = FB_F16;
    d.route = route;
    d.batch = dims[0], d.heads_q = dims[1], d.heads_kv = dims[2], d.len_q = dims[3], d.len_k = dims[4];
    d.head_dim = dims[5], d.head_dim_v = dims[6];
    d.score_bytes_max = INT64_MAX;
    return d;
}

/* 0 if refused, which may only be for overflow. */
static size_t workspace_of(const int64_t dims[DIMS], fb_route route) {
    const fb_desc d = large(dims, route);
    fb_plan *plan;
    snprintf(here, sizeof here,
             "B %" PRId64 " Hq %" PRId64 " Hkv %" PRId64 " Lq %" PRId64 " Lk %" PRId64 " D %" PRId64
             " Dv %" PRId64 " on %s",
             dims[0], dims[1], dims[2], dims[3], dims[4], dims[5], dims[6], fb_route_name(route));
    if (fb_plan_create(&plan, &d) == FB_OK) {
        const size_t bytes = fb_plan_workspace(plan);
        fb_plan_destroy(plan);
        return bytes;
    }
    expect_refused(FB_INVALID, FB_INVALID, "overflow", "", "");
    return 0;
}

/* Twice as large in any dimension is not less, but for scratch of a few tiles a thread, whose shape follows
 * the widths; the backward holds at least delta, 4 bytes a row, and unfused a score for every cell. */
static void br_28_workspace_beyond_32_bits(void **state) {
    (void)state;
    const int64_t shapes[][DIMS] = {{400, 4, 4, 10496, 128, 128, 128},
                                    {15000, 16, 16, 2048, 2048, 16, 16},
                                    {1, 1, 1, INT64_C(1) << 31, 1, 8, 8},
                                    {65536, 128, 128, 131072, 131072, 128, 128}};
    const fb_route tested[] = {FB_FUSED, FB_UNFUSED, FB_REFERENCE};
    for (size_t n = 0; n < 3 * sizeof shapes / sizeof *shapes; n++) {
        const int64_t *dims = shapes[n / 3];
        const fb_route route = tested[n % 3];
        const size_t bytes = workspace_of(dims, route), rows = (size_t)(dims[0] * dims[1] * dims[3]);
        expect(bytes > 0, "refused");
        if (route == FB_FUSED)
            expect(bytes >= 4 * rows, "%zu bytes for %zu rows", bytes, rows);
        if (route == FB_UNFUSED)
            expect(bytes >= 4 * rows * (size_t)dims[4], "%zu bytes for %zu rows", bytes, rows);
        for (int dim = 0; dim < DIMS; dim++) {
            int64_t more[DIMS];
            memcpy(more, dims, sizeof more);
            more[dim] *= 2;
            if (dim == 2 || more[5] > 576)
                continue; /* heads_q would not be a multiple */
            const size_t larger = workspace_of(more, route);
            expect(larger == 0 || larger >= bytes - bytes / 64, "%zu bytes, half of it takes %zu", larger,
                   bytes);
        }
    }
}

static void br_28_sizes_that_overflow_are_refused(void **state) {
    (void)state;
    const int64_t far = INT64_MAX;
    const int64_t shapes[][DIMS] = {{far, 1, 1, 1, 1, 8, 8},
                                    {1, 1, 1, far, 1, 8, 8},
                                    {1, 1, 1, 1, far, 8, 8},
                                    {1, far, far, 1, 1, 8, 8},
                                    {far / 2, far / 2, far / 2, far / 2, far / 2, 128, 128},
                                    {INT64_C(1) << 40, INT64_C(1) << 20, 1, 1024, 1024, 64, 64},
                                    {INT64_C(1) << 31, 1, 1, INT64_C(1) << 31, 1, 64, 64}};
    for (size_t n = 0; n < 3 * sizeof shapes / sizeof *shapes; n++) {
        const fb_desc d = large(shapes[n / 3], n % 3 ? n % 3 == 1 ? FB_UNFUSED : FB_REFERENCE : FB_FUSED);
        fb_plan *plan;
        snprintf(here, sizeof here, "shape %zu", n / 3);
        const fb_status status = fb_plan_create(&plan, &d);
        expect(status == FB_INVALID &&
                   (strstr(fb_last_error(), "overflow") || strstr(fb_last_error(), "expected 0 to")),
               "%s '%s', expected FB_INVALID for a size that overflows", fb_status_name(status),
               fb_last_error());
    }
}

/* ---- Descriptors --------------------------------------------------------------------------------------- */

/* 0 is a scale, so a struct of zeros must not pass for one with defaults. */
static void br_53_struct_of_zeros_is_refused(void **state) {
    (void)state;
    fb_desc d;
    fb_io io;
    fb_plan *plan;
    fbh_problem p;
    const where w = {.route = FB_AUTO};
    snprintf(here, sizeof here, "a struct of zeros");
    memset(&d, 0, sizeof d);
    d.batch = d.heads_q = d.heads_kv = d.len_q = d.len_k = d.head_dim = d.head_dim_v = 1;
    expect_refused(fb_plan_create(&plan, &d), FB_INVALID, "desc.size is 0", "fb_desc_init", "");
    assert_null(plan);
    open_case(&p, "f32.b1h1k1.q1k1.d1");
    plan = plan_at(&p, &w);
    memset(&io, 0, sizeof io);
    expect_refused(fb_forward(plan, &io), FB_INVALID, "io.size is 0", "fb_io_init", "");
    fb_plan_destroy(plan);
    fbh_problem_destroy(&p);
    fb_desc_init(&d, sizeof d);
    expect(isnan(d.scale), "the default scale is %g", d.scale);
}

/* S1: what a plan does not use may not be given, and what it uses may not be missing. */
static void s1_nothing_is_given_and_ignored(void **state) {
    (void)state;
    const where w = {.route = FB_AUTO};
    fbh_problem p;
    fb_io io;
    float any[64] = {0}, other[2 * 6 * 8] = {0}; /* other: of out's shape */
    open_case(&p, "f32.b1h2k1.q6k9.d8");
    fb_plan *plan = plan_at(&p, &w);
    expect_ok(fbh_problem_run(&p, plan, FBH_FORWARD));
    fb_ref *const fields[] = {&io.bias, &io.dbias, &io.mask, &io.block_mask, &io.sinks, &io.dsinks,
                              &io.dlse, &io.cu_q,  &io.cu_k, &io.lens_q,     &io.lens_k};
    const char *const names[] = {"io.bias", "io.dbias", "io.mask", "io.block_mask", "io.sinks", "io.dsinks",
                                 "io.dlse", "io.cu_q",  "io.cu_k", "io.lens_q",     "io.lens_k"};
    for (size_t n = 0; n < sizeof fields / sizeof *fields; n++) {
        expect_ok(fbh_problem_ready(&p, plan, FBH_BACKWARD));
        fbh_problem_io(&p, FBH_BACKWARD, &io);
        fields[n]->data = any;
        expect_refused(fb_backward(plan, &io), FB_INVALID, names[n], "does not use it", "flag");
    }
    for (int pass = FBH_FORWARD; pass <= FBH_BACKWARD; pass++) {
        fbh_problem_io(&p, (fbh_pass)pass, &io);
        io.stream = any;
        expect_refused(pass == FBH_FORWARD ? fb_forward(plan, &io) : fb_backward(plan, &io), FB_INVALID,
                       "io.stream is", "must be NULL", "");
    }
    expect_refused(fb_sync(FB_CPU, 0, any), FB_INVALID, "stream is", "must be NULL", "");
    fb_ref other_out = {other, 0}, other_lse = {any, 0};
    expect_refused(fb_merge(plan, io.out, io.lse, other_out, other_lse, any), FB_INVALID, "stream is",
                   "must be NULL", "");
    expect_ok(fb_merge(plan, io.out, io.lse, other_out, other_lse, NULL));
    fbh_problem_io(&p, FBH_BACKWARD, &io);
    io.lse.data = NULL;
    expect_refused(fb_backward(plan, &io), FB_INVALID, "io.lse is NULL", "reads", "");
    fb_plan_destroy(plan);
    fbh_problem_destroy(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(s0_first_call_of_the_process_is_a_backward),
        cmocka_unit_test(s0_lse_asked_for_or_not),
        cmocka_unit_test(s0_paths_forced_by_environment),
        cmocka_unit_test(s0_unknown_environment_values_are_reported),
        cmocka_unit_test(s0_thresholds_choose_routes_only),
        cmocka_unit_test(br_28_workspace_beyond_32_bits),
        cmocka_unit_test(br_28_sizes_that_overflow_are_refused),
        cmocka_unit_test(br_53_struct_of_zeros_is_refused),
        cmocka_unit_test(s1_nothing_is_given_and_ignored),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
