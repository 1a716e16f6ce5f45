/* What the bug cases share: problems from a name, runs on every route and instruction set, walks over
 * elements, and what is expected. docs/cases.md lists the cases; rules R1 to R22 are those of
 * docs/contract.md. Every problem has guard pages, and every run checks what it may not write. */
#ifndef TESTS_CASES_SUPPORT_H
#define TESTS_CASES_SUPPORT_H

#include "harness/harness.h"

#include <inttypes.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

static const double not_a_number = (double)NAN;
static const double infinite = (double)INFINITY;

/* ---- Failing ------------------------------------------------------------------------------------------- */

/* The run that an expectation is about: case, route, instruction set. */
static char here[FBH_NAME_SIZE + 64];

__attribute__((format(printf, 4, 5))) static inline void expect_at(bool holds, const char *file, int line,
                                                                   const char *format, ...) {
    char text[1024];
    va_list args;
    if (holds)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    print_error("%s: %s\n", here, text);
    _fail(file, line);
}

/* The condition and, for when it does not hold, a sentence with the values. */
#define expect(holds, ...) expect_at((holds), __FILE__, __LINE__, __VA_ARGS__)

static inline void expect_ok(fb_status status) { expect(status == FB_OK, "%s", fb_last_error()); }

/* Refused with this status and a sentence that holds all of up to three words. */
static inline void expect_refused(fb_status got, fb_status want, const char *a, const char *b,
                                  const char *c) {
    const char *error = fb_last_error();
    expect(got == want && strstr(error, a) && strstr(error, b) && strstr(error, c),
           "%s '%s', expected %s with the words '%s', '%s', '%s'", fb_status_name(got), error,
           fb_status_name(want), a, b, c);
}

/* ---- Every route on every instruction set -------------------------------------------------------------- */

/* for (where w = EVERYWHERE; next_where(&w, &desc);) names each pair that the machine and the problem allow;
 * EVERY_ROUTE stays on the best instruction set. The reference knows no instruction sets and comes once. */
typedef struct where {
    int n;
    bool best;
    fb_route route;
} where;

#define EVERYWHERE ((where){-1, false, FB_AUTO})
#define EVERY_ROUTE ((where){-1, true, FB_AUTO})

/* From the fifth on they differ from others in bf16 only. */
static const char *const isas[] = {"scalar", "baseline",   "avx2",      "avx512",
                                   "bfdot",  "avx512bf16", "amx_model", "amx"};
static const fb_route routes[] = {FB_REFERENCE, FB_FUSED, FB_VECTOR, FB_UNFUSED};
enum { ISAS = sizeof isas / sizeof *isas, WIDE_ISAS = 4, ROUTES = sizeof routes / sizeof *routes };

/* TEST_DEVICE=cuda or metal: the same tests on a GPU, by the routes that it has. f64 stays on the CPU. */
static inline fb_device device_for(fb_dtype dtype) {
    const char *device = getenv("TEST_DEVICE");
    if (!device || dtype == FB_F64)
        return FB_CPU;
    return strcmp(device, "cuda") == 0 ? FB_CUDA : strcmp(device, "metal") == 0 ? FB_METAL : FB_CPU;
}

static inline bool is_offered(const fb_desc *desc, fb_route route) {
    fb_desc d = *desc;
    d.route = route;
    return desc->device == FB_CPU || fb_supported(&d) == FB_OK;
}

/* Does fb_info list the instruction set? */
static inline bool has_isa(const char *isa) {
    static const char title[] = "cpu instruction sets: ";
    char info[4096], word[32];
    fb_info(info, sizeof info);
    const char *at = strstr(info, title);
    expect(at != NULL, "fb_info has no line '%s'", title);
    at += sizeof title - 1;
    for (int n = 0; sscanf(at, "%31[a-z0-9_]%n", word, &n) == 1; at += n + (at[n] == ' '))
        if (strcmp(word, isa) == 0)
            return true;
    return false;
}

static inline bool next_where(where *w, const fb_desc *desc) {
    const bool once = w->best || desc->device != FB_CPU;
    while (++w->n < ROUTES * (once ? 1 : desc->dtype == FB_BF16 ? ISAS : WIDE_ISAS)) {
        const char *isa = isas[w->n / ROUTES];
        w->route = routes[w->n % ROUTES];
        if ((w->route == FB_VECTOR && desc->len_q > 8) || !is_offered(desc, w->route))
            continue;
        if (w->n >= ROUTES && (w->route == FB_REFERENCE || !has_isa(isa)))
            continue;
        if (!once)
            setenv("FLASHBACK_ISA", isa, 1);
        return true;
    }
    if (!once)
        unsetenv("FLASHBACK_ISA");
    return false;
}

/* ---- Problems ------------------------------------------------------------------------------------------ */

/* A problem from the words of fbh_case_parse, with its inputs set. The word `exact` is for tests that change
 * masks or lengths by hand: then no input is NaN. */
__attribute__((format(printf, 2, 3))) static inline void open_case(fbh_problem *p, const char *format, ...) {
    char name[4 * FBH_NAME_SIZE], error[1024] = "";
    fbh_case what;
    va_list args;
    va_start(args, format);
    vsnprintf(name, sizeof name, format, args);
    va_end(args);
    snprintf(here, sizeof here, "%s", "a new case");
    expect(fbh_case_parse(&what, name, error, sizeof error), "%s", error);
    snprintf(here, sizeof here, "%s", what.name);
    fbh_problem_create(p, &what, device_for(what.desc.dtype), 0, FBH_GUARD_END, false);
    fbh_problem_fill(p, 0);
}

/* A plan for the problem at this place. */
static inline fb_plan *plan_at(fbh_problem *p, const where *w) {
    const char *isa = getenv("FLASHBACK_ISA");
    fb_plan *plan;
    p->desc.route = w->route;
    snprintf(here, sizeof here, "%s on %s, %s", p->what.name, fb_route_name(w->route),
             isa ? isa : "best isa");
    expect_ok(fb_plan_create(&plan, &p->desc));
    return plan;
}

static inline void run_pass(fbh_problem *p, const where *w, fbh_pass pass) {
    char message[512] = "";
    fb_plan *plan = plan_at(p, w);
    expect_ok(fbh_problem_run(p, plan, pass));
    expect(fbh_problem_intact(p, pass, message, sizeof message), "%s", message);
    fb_plan_destroy(plan);
}

/* Forward and, unless the case is forward only, backward. */
static inline void run(fbh_problem *p, const where *w) {
    run_pass(p, w, FBH_FORWARD);
    if (!(p->desc.flags & FB_FORWARD_ONLY))
        run_pass(p, w, FBH_BACKWARD);
}

/* Of all outputs of both passes. */
static inline uint64_t digest(const fbh_problem *p) {
    return fbh_problem_digest(p, FBH_FORWARD) * 31 + fbh_problem_digest(p, FBH_BACKWARD);
}

/* ---- What is expected (R12, R2, R3) -------------------------------------------------------------------- */

typedef struct answer {
    fbh_problem want, low;
} answer;

static inline void open_answer(answer *a, const fbh_problem *given) {
    char error[1024] = "";
    snprintf(here, sizeof here, "%s", given->what.name);
    expect(fbh_expect(&a->want, &a->low, given, error, sizeof error), "%s", error);
}

static inline void close_answer(answer *a) {
    fbh_problem_destroy(&a->want);
    fbh_problem_destroy(&a->low);
}

static inline void agree_pass(const fbh_problem *p, const answer *a, fbh_pass pass) {
    char message[512] = "";
    expect(fbh_compare(p, &a->want, &a->low, pass, NULL, message, sizeof message), "%s", message);
}

static inline void agree(const fbh_problem *p, const answer *a) {
    agree_pass(p, a, FBH_FORWARD);
    if (!(p->desc.flags & FB_FORWARD_ONLY))
        agree_pass(p, a, FBH_BACKWARD);
}

/* The whole of most cases: every route and instruction set agrees with the answer. */
static inline void check_everywhere(fbh_problem *p, where w) {
    answer a;
    open_answer(&a, p);
    while (next_where(&w, &p->desc)) {
        run(p, &w);
        agree(p, &a);
    }
    close_answer(&a);
}

/* ---- Walks over elements ------------------------------------------------------------------------------- */

/* for (place at = START; next(t, &at);) visits all elements of a tensor in logical order. */
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

/* A dimension of size 1 repeats, so that the place of an element of out also finds its lse and its sink. */
static inline double get(const fbh_tensor *t, place at) { return fbh_get(t, at.b, at.h, at.i, at.d); }
static inline void set(const fbh_tensor *t, place at, double x) { fbh_set(t, at.b, at.h, at.i, at.d, x); }

static inline void set_all(const fbh_tensor *t, double x) {
    for (place at = START; next(t, &at);)
        set(t, at, x);
}

/* One row of one head, all columns. */
static inline void set_row(const fbh_tensor *t, int64_t b, int64_t h, int64_t i, double x) {
    for (int64_t d = 0; d < t->cols; d++)
        fbh_set(t, b, h, i, d, x);
}

/* Equal, NaN included; -0 and +0 differ. */
static inline bool same(double a, double b) {
    return isnan(a) || isnan(b) ? isnan(a) && isnan(b) : a == b && signbit(a) == signbit(b);
}

static inline void expect_exactly(const fbh_tensor *t, place at, double want) {
    const double x = get(t, at);
    expect(same(x, want), "%s[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "] is %.9g, expected %.9g",
           t->name, at.b, at.h, at.i, at.d, x, want);
}

static inline void expect_near(const fbh_tensor *t, place at, double want, double tolerance) {
    const double x = get(t, at);
    expect(fabs(x - want) <= tolerance,
           "%s[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "] is %.9g, expected %.9g within %.3g", t->name,
           at.b, at.h, at.i, at.d, x, want, tolerance);
}

static inline void expect_finite(const fbh_tensor *t) {
    for (place at = START; next(t, &at);)
        expect(isfinite(get(t, at)),
               "%s[%" PRId64 ",%" PRId64 ",%" PRId64 ",%" PRId64 "] is %g, expected a number", t->name, at.b,
               at.h, at.i, at.d, get(t, at));
}

/* The dtypes that entries call "f32/f16/bf16". */
enum { TYPES = FB_BF16 + 1 };
static inline const char *type_name(int type) { return fb_dtype_name((fb_dtype)type); }

#endif
