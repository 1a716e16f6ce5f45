/* Times on a GPU: copies of a problem's tensors, calls in turn. See bench_gpu.h. Floor: cli. */
#include "bench_gpu.h"
#include "cli.h"
#include <math.h>
#include <stdlib.h>
#include <time.h>

enum { FEWEST_COPIES = 2, MOST_COPIES = 64, WARM_UP = 3, LEAST_RUNS = 5, MOST_RUNS = 1 << 20 };

struct bench_copies {
    fbh_gpu *gpu;
    job *job;
    size_t count;
    fb_ref at[MOST_COPIES][FBH_COUNT]; /* the first copy is the problem's own */
    fb_io io[MOST_COPIES][2];          /* by pass */
    double idle_since;
};

static void need(fb_status status) {
    if (status != FB_OK)
        cli_fail(CLI_LIBRARY, "%s: %s", fb_status_name(status), fb_last_error());
}

static void need_gpu(const fbh_gpu *gpu, bool good) {
    if (!good)
        cli_fail(CLI_LIBRARY, "%s", fbh_gpu_error(gpu));
}

void bench_need_device(const fb_desc *desc) {
    fb_desc any = *desc;
    any.route = FB_AUTO; /* a route may need more than the device */
    if (fb_supported(&any) == FB_NO_DEVICE)
        cli_fail(CLI_LIBRARY, "%s", fb_last_error());
}

fbh_gpu *bench_gpu_open(const fb_desc *desc) {
    char error[256];
    fbh_gpu *gpu = fbh_gpu_open(desc->index, error, sizeof error);
    if (!gpu)
        cli_fail(CLI_LIBRARY, "%s", error);
    return gpu;
}

word_text bench_gpu_arch(const job *j) {
    static char text[16384];
    fb_plan_explain(j->plan, text, sizeof text);
    return word_behind(text, "gpu", "code for ");
}

/* ---- Copies ------------------------------------------------------------------------------------------ */

static size_t wanted(const fbh_gpu *gpu, const fbh_problem *p) {
    const size_t bytes = p->t[FBH_Q].buffer->bytes + p->t[FBH_K].buffer->bytes + p->t[FBH_V].buffer->bytes;
    const size_t count = bytes ? 2 * fbh_gpu_l2(gpu) / bytes + 1 : FEWEST_COPIES;
    return count < FEWEST_COPIES ? FEWEST_COPIES : count > MOST_COPIES ? MOST_COPIES : count;
}

static void free_copy(const fbh_problem *p, fb_ref *at) {
    for (int id = 0; id < FBH_COUNT; id++)
        if (at[id].data)
            fb_free(&at[id], p->desc.device, p->desc.index);
}

/* False if the device has no room for another. Outputs need no values: a forward comes first. */
static bool make_copy(const fbh_problem *p, fb_ref *at, complaint *why) {
    for (int id = 0; id < FBH_WORKSPACE; id++) {
        const fbh_buffer *b = &p->buffers[id];
        if (!b->data)
            continue;
        const fb_status status = fb_alloc(&at[id], p->desc.device, p->desc.index, b->bytes);
        if (status == FB_MEMORY) {
            complain(why, "%s", fb_last_error());
            free_copy(p, at);
            return false;
        }
        need(status);
        if (id < FBH_OUT)
            need(fb_write(at[id], b->data, b->bytes, p->desc.device, p->desc.index));
    }
    return true;
}

/* The problem's own copy, which goes with it, and the workspace, which the unfused route needs gigabytes of:
 * so unlike fbh_problem_ready without a host side, and without poison. */
static bool make_first(fbh_problem *p, const fb_plan *plan, complaint *why) {
    fb_ref at[FBH_COUNT] = {{NULL, 0}};
    fbh_buffer *workspace = &p->buffers[FBH_WORKSPACE];
    if (!make_copy(p, at, why))
        return false;
    for (int id = 0; id < FBH_WORKSPACE; id++)
        p->buffers[id].device = at[id];
    workspace->bytes = fb_plan_workspace(plan);
    p->t[FBH_WORKSPACE].buffer = workspace;
    p->t[FBH_WORKSPACE].cols = (int64_t)workspace->bytes;
    const fb_status status = fb_alloc(&workspace->device, p->desc.device, p->desc.index, workspace->bytes);
    if (status == FB_MEMORY)
        return complain(why, "%s", fb_last_error());
    need(status);
    return true;
}

static void set_io(bench_copies *c, size_t copy, fbh_pass pass) {
    const fbh_problem *p = &c->job->problem;
    fb_io *io = &c->io[copy][pass];
    fbh_problem_io(p, pass, io);
    fb_ref *const field[FBH_COUNT] = {
#define X(id, name) [FBH_##id] = &io->name,
        FBH_TENSORS(X)
#undef X
    };
    for (int id = 0; id < FBH_WORKSPACE && copy; id++)
        if (field[id]->data)
            field[id]->data = c->at[copy][p->t[id].buffer - p->buffers].data;
    io->stream = fbh_gpu_stream(c->gpu);
}

static void queue_forward(void *copies, size_t n) {
    const bench_copies *c = copies;
    need(fb_forward(c->job->plan, &c->io[n % c->count][FBH_FORWARD]));
}

static void queue_backward(void *copies, size_t n) {
    const bench_copies *c = copies;
    need(fb_backward(c->job->plan, &c->io[n % c->count][FBH_BACKWARD]));
}

static void (*const queue[2])(void *, size_t) = {queue_forward, queue_backward};

bench_copies *bench_copies_open(fbh_gpu *gpu, job *j, complaint *why) {
    const size_t most = wanted(gpu, &j->problem);
    complaint enough;
    if (!make_first(&j->problem, j->plan, why))
        return NULL;
    bench_copies *c = fbh_make(1, sizeof *c);
    c->gpu = gpu;
    c->job = j;
    c->count = 1;
    while (c->count < most && make_copy(&j->problem, c->at[c->count], &enough))
        c->count++;
    /* Copies from the host may still be on their way, and the clock's stream waits for no other. */
    need(fb_sync(j->problem.desc.device, j->problem.desc.index, NULL));
    for (size_t n = 0; n < c->count; n++) {
        set_io(c, n, FBH_FORWARD);
        if (j->backward)
            set_io(c, n, FBH_BACKWARD);
        queue_forward(c, n);
    }
    need_gpu(gpu, fbh_gpu_wait(gpu));
    c->idle_since = fbh_now();
    return c;
}

void bench_copies_close(bench_copies *c) {
    for (size_t n = 1; n < c->count; n++)
        free_copy(&c->job->problem, c->at[n]);
    free(c);
}

/* ---- Times ------------------------------------------------------------------------------------------- */

static void sleep_until(double moment) {
    const double left = moment - fbh_now();
    if (left <= 0)
        return;
    const struct timespec pause = {(time_t)left, (long)(1e9 * (left - floor(left)))};
    nanosleep(&pause, NULL);
}

static void time_calls(bench_copies *c, fbh_pass pass, size_t count, double *ms, double *us,
                       fbh_gpu_state *state) {
    need_gpu(c->gpu, fbh_gpu_time(c->gpu, count, queue[pass], c, ms, us, state));
    c->idle_since = fbh_now();
}

void bench_copies_time(bench_copies *c, fbh_pass pass, const bench_regime *regime, bench_row *row) {
    double warm[WARM_UP];
    sleep_until(c->idle_since + regime->pause);
    time_calls(c, pass, WARM_UP, warm, NULL, NULL);
    const double one = fmax(fbh_stats_of(warm, WARM_UP).min, 1e-3);
    const double fit = fmin(fmax(1e3 * regime->seconds / one, LEAST_RUNS), MOST_RUNS);
    row->runs = (size_t)fit;
    row->copies = c->count;
    double *ms = fbh_make(row->runs, sizeof *ms), *us = fbh_make(row->runs, sizeof *us);
    time_calls(c, pass, row->runs, ms, us, &row->state);
    row->ms = fbh_stats_of(ms, row->runs);
    row->host_us = fbh_stats_of(us, row->runs).median;
    free(ms);
    free(us);
}

double bench_copies_host(bench_copies *c, fbh_pass pass) {
    enum { BATCHES = 64, CALLS = 16 };
    static double us[BATCHES * CALLS];
    for (size_t n = 0; n < BATCHES * CALLS; n++) {
        const double start = fbh_now();
        queue[pass](c, n);
        us[n] = 1e6 * (fbh_now() - start);
        if (n % CALLS == CALLS - 1)
            need_gpu(c->gpu, fbh_gpu_wait(c->gpu));
    }
    c->idle_since = fbh_now();
    return fbh_stats_of(us, BATCHES * CALLS).median;
}
