/* A case from its name to a verdict.
 * Floor: harness. `fbh_oracle_open` finds what is expected, `fbh_oracle_run` runs and judges. */
#include "harness.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static bool has_backward(const fbh_problem *p) { return !(p->desc.flags & FB_FORWARD_ONLY); }

static fb_status run_reference(fbh_problem *p) {
    fb_plan *plan;
    fb_desc desc = p->desc;
    desc.route = FB_REFERENCE;
    fb_status status = fb_plan_create(&plan, &desc);
    if (status == FB_OK)
        status = fbh_problem_run(p, plan, FBH_FORWARD);
    if (status == FB_OK && has_backward(p))
        status = fbh_problem_run(p, plan, FBH_BACKWARD);
    fb_plan_destroy(plan);
    return status;
}

/* The reference against a formula that owes it nothing. `kept` says what storing lse as f64 costs. */
static bool reference_holds(const fbh_problem *want, const fbh_problem *given, char *message, size_t size) {
    fbh_problem plain, kept;
    fbh_problem_double(&plain, given);
    fbh_problem_double(&kept, given);
    fbh_low(&plain, FB_F64);
    fbh_kept(&kept, FB_F64);
    const bool holds =
        fbh_compare(want, &plain, &kept, FBH_FORWARD, NULL, message, size) &&
        (!has_backward(want) || fbh_compare(want, &plain, &kept, FBH_BACKWARD, NULL, message, size));
    fbh_problem_destroy(&plain);
    fbh_problem_destroy(&kept);
    return holds;
}

/* For inputs in 16 bits the reference runs the same code as for the same case in f32; once is enough. */
static bool is_wide(const fbh_problem *given) { return fbh_size((int)given->desc.dtype) > 2; }

/* Makes each element of low the worse of itself and of other. */
static void take_worse(fbh_problem *low, const fbh_problem *other, const fbh_problem *want) {
    for (int id = FBH_OUT; id < FBH_WORKSPACE; id++) {
        const fbh_tensor *t = &low->t[id];
        for (int64_t b = 0; t->buffer && b < t->batch; b++)
            for (int64_t h = 0; h < t->heads; h++)
                for (int64_t i = 0; i < fbh_rows(t, b); i++)
                    for (int64_t d = 0; d < t->cols; d++) {
                        const double ref = fbh_get(&want->t[id], b, h, i, d);
                        const double one = fbh_get(t, b, h, i, d), two = fbh_get(&other->t[id], b, h, i, d);
                        if (!(fabs(two - ref) <= fabs(one - ref)))
                            fbh_set(t, b, h, i, d, two);
                    }
    }
}

/* low's error is one draw from what rounding can do, and it measures others: a lucky draw would fail what is
 * right. So it is the worst of several. In f32 there is also the same formula in the order of a fast kernel.
 * For 16 bits there are both in f32, where every backend sums: where logits overflow the type, the plain
 * formula in it says nothing. The last is in double, from an out and lse that are kept as the interface keeps
 * them: that rounding is there whoever computes, and the plain formula does not have all of it. */
static void make_low(fbh_problem *low, const fbh_problem *want, const fbh_problem *given) {
    const fb_dtype type = given->desc.dtype;
    fbh_problem other;
    fbh_low(low, type);
    fbh_problem_double(&other, given);
    if (type == FB_F16 || type == FB_BF16) {
        fbh_low(&other, FB_F32);
        take_worse(low, &other, want);
    }
    for (int base = 0; base < 3 && (type == FB_BF16 || type == FB_F16); base++) { /* f16 only on GPUs */
        fbh_low_cells(&other, type, base);
        take_worse(low, &other, want);
    }
    if (type != FB_F64) {
        fbh_low_reordered(&other, FB_F32);
        take_worse(low, &other, want);
    }
    fbh_kept(&other, type);
    take_worse(low, &other, want);
    fbh_problem_destroy(&other);
}

bool fbh_expect(fbh_problem *want, fbh_problem *low, const fbh_problem *given, char *error, size_t size) {
    char message[400] = "";
    fbh_problem_double(want, given);
    fbh_problem_double(low, given);
    if (run_reference(want) != FB_OK)
        snprintf(error, size, "the f64 reference: %s", fb_last_error());
    else if (is_wide(given) && !reference_holds(want, given, message, sizeof message))
        snprintf(error, size, "the f64 reference against the plain formula: %s", message);
    else {
        make_low(low, want, given);
        return true;
    }
    return false;
}

void fbh_oracle_open(fbh_oracle *o, const fbh_case *c, uint64_t seed) {
    memset(o, 0, sizeof *o);
    fbh_problem_create(&o->given, c, FB_CPU, 0, FBH_GUARD_NONE, false);
    fbh_problem_fill(&o->given, seed);
    fbh_expect(&o->want, &o->low, &o->given, o->error, sizeof o->error);
}

void fbh_oracle_close(fbh_oracle *o) {
    fbh_problem_destroy(&o->given);
    fbh_problem_destroy(&o->want);
    fbh_problem_destroy(&o->low);
}

/* One pass, run and judged; the message says what is wrong. */
static bool judge(fbh_problem *p, const fb_plan *plan, const fbh_oracle *o, fbh_pass pass, fbh_result *r) {
    if (fbh_problem_run(p, plan, pass) != FB_OK) {
        snprintf(r->message, sizeof r->message, "%s: %s", pass == FBH_FORWARD ? "fb_forward" : "fb_backward",
                 fb_last_error());
        return false;
    }
    r->digest = r->digest * UINT64_C(0x100000001B3) ^ fbh_problem_digest(p, pass);
    if (p->guard != FBH_GUARD_NONE && !fbh_problem_intact(p, pass, r->message, sizeof r->message))
        return false;
    return fbh_compare(p, &o->want, &o->low, pass, &r->ratio, r->message, sizeof r->message);
}

void fbh_oracle_run(const fbh_oracle *o, const fbh_options *options, fbh_result *r) {
    fbh_problem p;
    fb_plan *plan;
    memset(r, 0, sizeof *r);
    r->verdict = FBH_FAIL;
    if (o->error[0]) {
        snprintf(r->message, sizeof r->message, "%s", o->error);
        return;
    }
    fbh_problem_create(&p, &o->given.what, options->device, options->index, options->guard,
                       options->mirrored);
    p.desc.route = options->route;
    p.desc.threads = options->threads;
    p.desc.tasks = options->tasks;
    const fb_status status = fb_plan_create(&plan, &p.desc);
    if (status != FB_OK) {
        if (status == FB_UNSUPPORTED || status == FB_NO_DEVICE)
            r->verdict = FBH_UNSUPPORTED;
        snprintf(r->message, sizeof r->message, "%s: %s", fb_status_name(status), fb_last_error());
    } else {
        fbh_problem_copy(&p, &o->given);
        r->workspace = fb_plan_workspace(plan);
        if (judge(&p, plan, o, FBH_FORWARD, r) && (!has_backward(&p) || judge(&p, plan, o, FBH_BACKWARD, r)))
            r->verdict = FBH_PASS;
    }
    fb_plan_destroy(plan);
    fbh_problem_destroy(&p);
}

void fbh_case_run(const fbh_case *c, uint64_t seed, const fbh_options *options, fbh_result *result) {
    fbh_oracle o;
    fbh_oracle_open(&o, c, seed);
    fbh_oracle_run(&o, options, result);
    fbh_oracle_close(&o);
}

bool fbh_route_fits(const fbh_case *c, fb_route route) { return route != FB_VECTOR || c->desc.len_q <= 8; }
