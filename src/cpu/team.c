/* See team.h. */
#include "team.h"
#include "../base/fpmode.h"
#include "quota.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#ifdef _OPENMP
#include <omp.h>
#endif

/* ---- fork ---- */

/* A child of fork() has none of its parent's OpenMP threads, but libgomp's pool still lists them and would
 * wait for them for ever. The pool belongs to the thread that made it, so a child runs its teams from a fresh
 * thread. This flag is written in a child that has one thread only, and never reset. */
static atomic_bool forked;

static void note_fork(void) { atomic_store_explicit(&forked, true, memory_order_relaxed); }

__attribute__((constructor)) static void watch_fork(void) { pthread_atfork(NULL, NULL, note_fork); }

/* ---- Starting threads ---- */

#ifdef _OPENMP
enum { MOST_THREADS = 1024 };

/* OpenMP's runtimes end the process when they cannot start a thread. So before a calling thread's first team
 * of some size, that many threads are started and stopped again. What was seen is kept: teams up to `proven`
 * can be, none is larger than `cap`. */
static _Thread_local int proven = 1, cap = MOST_THREADS;

/* Where started threads wait for each other. */
typedef struct gate {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    int ready;
    bool open;
} gate;

/* As the runtime's threads do, one of these makes the C library set up its heap for the thread. */
static void *wait_at(void *argument) {
    gate *g = argument;
    void *volatile memory = malloc(1);
    free(memory);
    pthread_mutex_lock(&g->lock);
    g->ready++;
    pthread_cond_broadcast(&g->changed);
    while (!g->open)
        pthread_cond_wait(&g->changed, &g->lock);
    pthread_mutex_unlock(&g->lock);
    return NULL;
}

/* How many threads there are at once when `threads` are wanted, the caller included. */
static int try_start(int threads) {
    pthread_t ids[MOST_THREADS];
    gate g = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, 0, false};
    int started = 0;
    while (started < threads - 1 && pthread_create(&ids[started], NULL, wait_at, &g) == 0)
        started++;
    pthread_mutex_lock(&g.lock);
    while (g.ready < started)
        pthread_cond_wait(&g.changed, &g.lock);
    g.open = true;
    pthread_cond_broadcast(&g.changed);
    pthread_mutex_unlock(&g.lock);
    for (int i = 0; i < started; i++)
        pthread_join(ids[i], NULL);
    return started + 1;
}

/* A team of up to `threads` that can be: one that starts twice, since heaps stay. Where not all can, a third
 * of it from then on, as the runtime needs room besides. */
static int can_start(int threads) {
    int size = threads < cap ? threads : cap, wanted = size;
    if (size <= proven)
        return size;
    for (int found; size > 1; size = found / 2) {
        found = try_start(size);
        if (found == size && try_start(size) == size)
            break;
    }
    if (size < wanted)
        cap = size = size / 3 > proven ? size / 3 : proven;
    return proven = size;
}
#endif

/* ---- Teams ---- */

/* Tasks lie in `queues` queues of `each`. More queues than there are counters share them. */
enum { COUNTERS = 128 };

typedef struct job {
    fb__team team;
    int64_t queues, each;
    fb__task task;
    const void *context;
    fb__fpmode mode;
    struct {
        _Alignas(64) atomic_llong next; /* how many tasks were taken; in a cache line of its own */
    } counter[COUNTERS];
} job;

int fb__team_max(void) {
#ifdef _OPENMP
    /* Where nobody chose a number, OpenMP takes as many as there are processors in the process's affinity. */
    int most = omp_get_max_threads();
    if (most == omp_get_num_procs()) {
        const int cores = fb__quota_cores("/sys/fs/cgroup", "/proc/self/cgroup");
        most = cores > 0 && cores < most ? cores : most;
    }
    return most;
#else
    return 1;
#endif
}

/* What a thread does around its tasks; gives back the mode that it had. */
static fb__fpmode enter(const job *j) {
    fb__fpmode saved = fb__fpmode_get();
    fb__fpmode_set(j->mode);
    if (j->team.enter)
        j->team.enter();
    return saved;
}

static void leave(const job *j, fb__fpmode saved) {
    if (j->team.leave)
        j->team.leave();
    fb__fpmode_set(saved);
}

static void run_serial(const job *j) {
    fb__fpmode saved = enter(j);
    for (int64_t i = 0; i < j->queues * j->each; i++)
        j->task(j->context, i, 0);
    leave(j, saved);
}

#ifdef _OPENMP
/* First its own share of the queues, then those of the others. */
static void run_queues(job *j, int thread, int threads) {
    const int64_t count = j->queues < COUNTERS ? j->queues : COUNTERS;
    const int64_t home = thread * count / threads;
    for (int64_t n = 0; n < count; n++) {
        const int64_t c = (home + n) % count, first = c * j->queues / count,
                      end = (c + 1) * j->queues / count;
        const int64_t tasks = (end - first) * j->each;
        for (int64_t i;
             (i = atomic_fetch_add_explicit(&j->counter[c].next, 1, memory_order_relaxed)) < tasks;)
            j->task(j->context, first * j->each + i, thread);
    }
}
#endif

static void run_team(job *j) {
#ifdef _OPENMP
    int threads = omp_get_active_level() < omp_get_max_active_levels() ? can_start(j->team.threads) : 1;
    if (threads == 1) { /* also within a parallel region of the program's own */
        run_serial(j);
        return;
    }
    for (int c = 0; c < COUNTERS; c++)
        atomic_init(&j->counter[c].next, 0);
#pragma omp parallel num_threads(threads)
    {
        fb__fpmode saved = enter(j);
        run_queues(j, omp_get_thread_num(), omp_get_num_threads());
        leave(j, saved);
    }
#else
    run_serial(j);
#endif
}

static void *run_thread(void *j) {
    run_team(j);
    return NULL;
}

static void run(job *j) {
    pthread_t fresh;
    const int64_t count = j->queues * j->each;
    if (j->team.threads > count)
        j->team.threads = (int)count;
    if (j->team.threads <= 1)
        run_serial(j);
    else if (!atomic_load_explicit(&forked, memory_order_relaxed))
        run_team(j);
    else if (pthread_create(&fresh, NULL, run_thread, j) == 0)
        pthread_join(fresh, NULL);
    else
        run_serial(j);
}

void fb__team_run_queues(fb__team team, int64_t queues, int64_t each, fb__task task, const void *context) {
    job j = {.team = team, .queues = queues, .each = each, .task = task, .context = context};
    j.mode = FB__FPMODE_FAST;
    run(&j);
}

void fb__team_run(fb__team team, int64_t count, fb__task task, const void *context) {
    fb__team_run_queues(team, 1, count, task, context);
}

void fb__team_run_exact(int threads, int64_t count, fb__task task, const void *context) {
    job j = {.team = {threads, NULL, NULL}, .queues = 1, .each = count, .task = task, .context = context};
    j.mode = FB__FPMODE_EXACT;
    run(&j);
}
