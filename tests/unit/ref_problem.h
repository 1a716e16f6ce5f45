/* What the tests of FB_REFERENCE share: problems from a name, runs that fail the test, walks over elements.
 */
#ifndef TESTS_UNIT_REF_PROBLEM_H
#define TESTS_UNIT_REF_PROBLEM_H

#include "harness/harness.h"

#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

static inline void open_problem(fbh_problem *p, const char *name) {
    char error[256] = "";
    fbh_case what;
    if (!fbh_case_parse(&what, name, error, sizeof error))
        fail_msg("%s: %s", name, error);
    fbh_problem_create(p, &what, FB_CPU, 0, FBH_GUARD_END, false);
    p->desc.route = FB_REFERENCE;
    fbh_problem_fill(p, 1);
}

static inline fb_plan *plan_of(const fbh_problem *p) {
    fb_plan *plan;
    if (fb_plan_create(&plan, &p->desc) != FB_OK)
        fail_msg("%s: %s", p->what.name, fb_last_error());
    return plan;
}

static inline void run_pass(fbh_problem *p, fbh_pass pass) {
    fb_plan *plan = plan_of(p);
    char message[256];
    if (fbh_problem_run(p, plan, pass) != FB_OK)
        fail_msg("%s: %s", p->what.name, fb_last_error());
    if (!fbh_problem_intact(p, pass, message, sizeof message))
        fail_msg("%s: %s", p->what.name, message);
    fb_plan_destroy(plan);
}

static inline void run(fbh_problem *p) {
    run_pass(p, FBH_FORWARD);
    run_pass(p, FBH_BACKWARD);
}

/* Of the outputs of both passes, by fbh_pass. */
typedef struct digests {
    uint64_t of[2];
} digests;

/* Of a run with at most so many threads (0 = as OpenMP allows). */
static inline digests digests_of(const char *name, int threads) {
    fbh_problem p;
    open_problem(&p, name);
    p.desc.threads = threads;
    run(&p);
    digests found = {{fbh_problem_digest(&p, FBH_FORWARD), fbh_problem_digest(&p, FBH_BACKWARD)}};
    fbh_problem_destroy(&p);
    return found;
}

/* A walk over all elements of a tensor, in logical order: for (place at = START; next(t, &at);) */
typedef struct place {
    int64_t b, h, i, d;
} place;

#define START ((place){0, 0, 0, -1})

static inline bool next(const fbh_tensor *t, place *at) {
    if (!t->buffer || !t->cols || !t->heads)
        return false;
    if (++at->d == t->cols)
        at->d = 0, at->i++;
    while (at->b < t->batch && at->i == fbh_rows(t, at->b)) {
        at->i = 0;
        if (++at->h == t->heads)
            at->h = 0, at->b++;
    }
    return at->b < t->batch;
}

/* Dimensions of size 1 repeat, so that the place of an element of out also finds its lse and sink. */
static inline double get(const fbh_tensor *t, place at) { return fbh_get(t, at.b, at.h, at.i, at.d); }
static inline void set(const fbh_tensor *t, place at, double x) { fbh_set(t, at.b, at.h, at.i, at.d, x); }

#endif
