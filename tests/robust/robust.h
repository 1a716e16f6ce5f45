/* What the tests of this folder share: problems by name, both passes as one digest, rows of two problems. */
#ifndef TESTS_ROBUST_H
#define TESTS_ROBUST_H

#include "harness/harness.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

/* SANITIZED: a sanitizer has its own allocator and address space. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#endif

static inline fbh_case case_of(const char *dtype, const char *rest) {
    fbh_case c;
    char name[2 * FBH_NAME_SIZE], error[256];
    snprintf(name, sizeof name, "%s.%s", dtype, rest);
    if (!fbh_case_parse(&c, name, error, sizeof error))
        fail_msg("%s: %s", name, error);
    return c;
}

static inline void open_case(fbh_problem *p, const fbh_case *c, fb_route route, fbh_guard guard) {
    fbh_problem_create(p, c, FB_CPU, 0, guard, false);
    p->desc.route = route;
    fbh_problem_fill(p, 1);
}

static inline fb_plan *plan_of(const fbh_problem *p) {
    fb_plan *plan;
    if (fb_plan_create(&plan, &p->desc) != FB_OK)
        fail_msg("%s: %s", p->what.name, fb_last_error());
    return plan;
}

/* Both passes; a hash of all outputs. 0 is an error, for threads, which may not fail by longjmp. */
static inline uint64_t run_plan(fbh_problem *p, const fb_plan *plan) {
    uint64_t digest = 1;
    const int passes = p->desc.flags & FB_FORWARD_ONLY ? 1 : 2;
    for (int pass = 0; pass < passes; pass++) {
        if (fbh_problem_run(p, plan, (fbh_pass)pass) != FB_OK)
            return 0;
        digest = digest * 31 + fbh_problem_digest(p, (fbh_pass)pass);
    }
    return digest;
}

static inline uint64_t run(fbh_problem *p) {
    fb_plan *plan = plan_of(p);
    const uint64_t digest = run_plan(p, plan);
    if (!digest)
        fail_msg("%s: %s", p->what.name, fb_last_error());
    fb_plan_destroy(plan);
    return digest;
}

static inline uint64_t run_case(const fbh_case *c, fb_route route, int threads, fbh_guard guard) {
    fbh_problem p;
    open_case(&p, c, route, guard);
    p.desc.threads = threads;
    const uint64_t digest = run(&p);
    fbh_problem_destroy(&p);
    return digest;
}

static const fbh_id of_queries[] = {FBH_OUT, FBH_LSE, FBH_DQ}, of_keys[] = {FBH_DK, FBH_DV};

/* The rows of batch entry b from `first` on become the inputs of `to`, whose batch is 1. */
static inline void copy_entry(const fbh_problem *from, const fbh_problem *to, int64_t b, int64_t first_key) {
    for (int id = FBH_Q; id <= FBH_DOUT; id++) {
        const fbh_tensor *x = &from->t[id], *y = &to->t[id];
        const int64_t first = id == FBH_K || id == FBH_V ? first_key : 0;
        for (int64_t h = 0; h < y->heads; h++)
            for (int64_t i = 0; i < fbh_rows(y, 0); i++)
                memcpy(fbh_at(y, 0, h, i, 0), fbh_at(x, b, h, first + i, 0),
                       (size_t)y->cols * fbh_size(y->type));
    }
}

static inline void check_rows(const fbh_problem *a, const fbh_problem *one, fbh_id id, int64_t b,
                              int64_t first) {
    const fbh_tensor *x = &a->t[id], *y = &one->t[id];
    for (int64_t h = 0; h < y->heads; h++)
        for (int64_t i = 0; i < fbh_rows(y, 0); i++)
            if (memcmp(fbh_at(x, b, h, first + i, 0), fbh_at(y, 0, h, i, 0),
                       (size_t)y->cols * fbh_size(y->type)) != 0)
                fail_msg("%s, batch entry %d, and %s, %s: %s of head %d, row %d differs", a->what.name,
                         (int)b, one->what.name, fb_route_name(one->desc.route), x->name, (int)h, (int)i);
}

/* The outputs of batch entry b are those of `one`, bit for bit. */
static inline void check_entry(const fbh_problem *p, const fbh_problem *one, int64_t b, int64_t first_key) {
    for (int n = 0; n < 3; n++)
        check_rows(p, one, of_queries[n], b, 0);
    for (int n = 0; n < 2; n++)
        check_rows(p, one, of_keys[n], b, first_key);
}

/* The case that is batch entry b of p, alone. */
static inline fbh_case alone(const fbh_problem *p, int64_t b) {
    fbh_case c = p->what;
    c.desc.flags &= ~(uint32_t)FB_PACKED;
    c.desc.batch = 1;
    c.desc.len_q = fbh_rows(&p->t[FBH_Q], b);
    c.desc.len_k = fbh_rows(&p->t[FBH_K], b);
    fbh_case_name(&c);
    return c;
}

#endif
