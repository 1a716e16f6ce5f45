/* See job.h. Floor: cli. */
#include "job.h"
#include "cli.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void need(fb_status status, const char *doing) {
    if (status != FB_OK)
        cli_fail(CLI_LIBRARY, "%s: %s: %s", doing, fb_status_name(status), fb_last_error());
}

void job_recut(fbh_problem *p, int64_t total_q, int64_t total_k) {
    p->desc.total_q = total_q;
    p->desc.total_k = total_k;
    for (int id = 0; id < FBH_WORKSPACE; id++) {
        fbh_tensor *t = &p->t[id];
        if (!t->cu || !t->buffer)
            continue;
        int64_t total = t->cu == p->cu_q ? total_q : total_k;
        if (id == FBH_LSE || id == FBH_DLSE)
            t->stride.head = total;
        free(t->buffer->map);
        t->buffer->bytes = (size_t)(total * t->heads * t->cols) * fbh_size(t->type);
        t->buffer->map = t->buffer->data = malloc(t->buffer->bytes + 1);
        if (!t->buffer->map)
            cli_fail(CLI_LIBRARY, "memory ran out");
    }
}

void job_plan(job *j) { need(fb_plan_create(&j->plan, &j->problem.desc), "plan"); }

void job_close(job *j) {
    fb_plan_destroy(j->plan);
    fbh_problem_destroy(&j->problem);
}

int job_passes(const job *j) { return j->backward ? 2 : 1; }

static fb_status call(const fb_plan *plan, fbh_pass pass, const fb_io *io) {
    return pass == FBH_FORWARD ? fb_forward(plan, io) : fb_backward(plan, io);
}

double job_run(job *j, fbh_pass pass) {
    fbh_problem *p = &j->problem;
    fb_io io;
    need(fbh_problem_ready(p, j->plan, pass), "memory");
    fbh_problem_io(p, pass, &io);
    double start = fbh_now();
    need(call(j->plan, pass, &io), pass == FBH_FORWARD ? "forward" : "backward");
    need(fb_sync(p->desc.device, p->desc.index, NULL), "wait");
    double passed = fbh_now() - start;
    need(fbh_problem_done(p), "memory");
    return 1e3 * passed;
}

fbh_stats job_time(job *j, fbh_pass pass, int least, double seconds) {
    size_t count = 0, room = 64;
    double *ms = malloc(room * sizeof *ms);
    if (!ms)
        cli_fail(CLI_LIBRARY, "memory ran out");
    if (least > 1 || seconds > 0)
        job_run(j, pass);
    for (double start = fbh_now(); (int)count < least || fbh_now() - start < seconds;) {
        if (count == room) {
            double *larger = realloc(ms, (room *= 2) * sizeof *ms);
            if (!larger)
                break;
            ms = larger;
        }
        ms[count++] = job_run(j, pass);
    }
    fbh_stats stats = fbh_stats_of(ms, count);
    free(ms);
    return stats;
}

uint64_t job_output_bytes(const job *j) {
    uint64_t bytes = 0;
    for (int id = FBH_OUT; id < FBH_WORKSPACE; id++)
        if (fbh_writes(&j->problem, (fbh_id)id, FBH_FORWARD) ||
            (j->backward && fbh_writes(&j->problem, (fbh_id)id, FBH_BACKWARD)))
            bytes += j->problem.t[id].buffer->bytes;
    return bytes;
}

uint64_t job_extra_bytes(const job *j, fb_route route, complaint *why) {
    fb_desc desc = j->problem.desc;
    fb_plan *plan;
    desc.route = route;
    if (fb_plan_create(&plan, &desc) != FB_OK) {
        complain(why, "%s", fb_last_error());
        return 0;
    }
    uint64_t bytes = job_output_bytes(j) + fb_plan_workspace(plan);
    fb_plan_destroy(plan);
    return bytes;
}

word_text job_explained(const job *j, const char *key) {
    static char text[16384];
    fb_plan_explain(j->plan, text, sizeof text);
    return word_after(text, key);
}

static double worst_error(const fbh_tensor *got, const fbh_tensor *want) {
    double worst = 0;
    for (int64_t b = 0; b < got->batch; b++)
        for (int64_t h = 0; h < got->heads; h++)
            for (int64_t i = 0; i < fbh_rows(got, b); i++)
                for (int64_t d = 0; d < got->cols; d++) {
                    double x = fbh_get(got, b, h, i, d), y = fbh_get(want, b, h, i, d);
                    double error = x == y || (isnan(x) && isnan(y)) ? 0 : fabs(x - y);
                    worst = fmax(worst, isnan(error) ? (double)INFINITY : error);
                }
    return worst;
}

void job_verify(job *j, job_errors *errors) {
    fbh_problem want, low;
    *errors = (job_errors){.ok = true};
    fbh_problem_cells(&j->problem);
    if (!fbh_expect(&want, &low, &j->problem, errors->message, sizeof errors->message))
        cli_fail(CLI_LIBRARY, "%s", errors->message);
    for (int pass = 0; pass < job_passes(j); pass++) {
        double ratio = 0;
        if (errors->ok)
            errors->ok = fbh_compare(&j->problem, &want, &low, (fbh_pass)pass, &ratio, errors->message,
                                     sizeof errors->message);
        errors->ratio = fmax(errors->ratio, ratio);
        for (int id = FBH_OUT; id < FBH_WORKSPACE; id++)
            if (fbh_writes(&j->problem, (fbh_id)id, (fbh_pass)pass))
                errors->worst[id] = worst_error(&j->problem.t[id], &want.t[id]);
    }
    fbh_problem_destroy(&want);
    fbh_problem_destroy(&low);
}
