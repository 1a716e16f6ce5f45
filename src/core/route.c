/* See route.h. Rows, best first; the first that fits is taken. */
#include "route.h"
#include "error.h"
#include "names.h"
#include <stdio.h>

static fb__pass last_pass(const fb__problem *p) {
    return fb__has(p, FB_FORWARD_ONLY) ? FB__FORWARD : FB__BACKWARD;
}

/* Empty when the route can run this problem, otherwise the reason why not. */
static void limit(const fb__problem *p, fb_route route, fb__text *why) {
    if (route == FB_VECTOR && p->d.len_q > FB__VECTOR_MAX_LEN_Q)
        fb__text_add(why, "len_q is %lld, vector takes at most %d", (long long)p->d.len_q,
                     FB__VECTOR_MAX_LEN_Q);
    uint64_t bytes = fb__problem_score_bytes(p, last_pass(p));
    if (route == FB_UNFUSED && bytes > (uint64_t)p->d.score_bytes_max)
        fb__text_add(
            why,
            "its score matrices need %.2f GB (%llu bytes), more than the %lld allowed by score_bytes_max "
            "(FLASHBACK_SCORE_BYTES_MAX); raise it, or take fused, which needs none",
            (double)bytes * 1e-9, (unsigned long long)bytes, (long long)p->d.score_bytes_max);
}

/* What auto prefers. */
static bool always(const fb__problem *p) {
    (void)p;
    return true;
}
static bool few_queries(const fb__problem *p) { return p->d.len_q <= FB__VECTOR_MAX_LEN_Q; }
static bool short_keys(const fb__problem *p) { return p->d.len_k < p->d.fused_min_len; }
static bool never(const fb__problem *p) {
    (void)p;
    return false;
}

static const struct row {
    fb_route route;
    bool (*fits)(const fb__problem *);
    const char *when;     /* for explain: auto takes it ... */
    const char *measured; /* where the row was measured */
} rows[] = {
    /* clang-format off */
    {FB_VECTOR,    few_queries, "when len_q <= 8",            "bench/SPEED.md, routes"},
    {FB_UNFUSED,   short_keys,  "when len_k < fused_min_len", "bench/SPEED.md, routes"},
    {FB_FUSED,     always,      "otherwise",                  "bench/SPEED.md, routes"},
    {FB_REFERENCE, never,       "only by name",               "the definition, in double precision and slow"},
    /* clang-format on */
};
#define ROWS (sizeof rows / sizeof *rows)

fb_status fb__route_choose(const fb__problem *p, fb_route *route) {
    char why[256];
    if (p->d.route != FB_AUTO) {
        fb__text text = {why, sizeof why, 0};
        limit(p, p->d.route, &text);
        if (text.length)
            return fb__error(FB_UNSUPPORTED, "route %s, asked for by %s, can't run: %s",
                             fb_route_name(p->d.route), p->route_from, why);
        *route = p->d.route;
        return FB_OK;
    }
    for (size_t i = 0; i < ROWS; i++) {
        fb__text text = {why, sizeof why, 0};
        limit(p, rows[i].route, &text);
        if (rows[i].fits(p) && !text.length) {
            *route = rows[i].route;
            return FB_OK;
        }
    }
    return fb__error(FB_UNSUPPORTED, "no route fits"); /* not reached: the row of fused always fits */
}

void fb__route_explain(const fb__problem *p, fb_route taken, fb__text *text) {
    fb__text_add(text, "route: %s, by %s\n", fb_route_name(taken), p->route_from);
    for (size_t i = 0; i < ROWS; i++) {
        char reason[256];
        fb__text why = {reason, sizeof reason, 0};
        limit(p, rows[i].route, &why);
        if (rows[i].route == taken)
            fb__text_add(text, "  %s: taken%s%s [%s]\n", fb_route_name(taken),
                         p->d.route == FB_AUTO ? "; auto takes it " : "",
                         p->d.route == FB_AUTO ? rows[i].when : "", rows[i].measured);
        else if (why.length)
            fb__text_add(text, "  %s: passed over, can't run: %s\n", fb_route_name(rows[i].route), reason);
        else if (p->d.route != FB_AUTO)
            fb__text_add(text, "  %s: passed over, %s asks for %s\n", fb_route_name(rows[i].route),
                         p->route_from, fb_route_name(taken));
        else
            fb__text_add(text, "  %s: passed over, auto takes it %s [%s]\n", fb_route_name(rows[i].route),
                         rows[i].when, rows[i].measured);
    }
}
