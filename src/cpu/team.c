/* See team.h. */
#include "team.h"
#include "../base/fpmode.h"
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
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
/* More threads than this are not asked for. */
enum { MOST_THREADS = 1024 };

/* OpenMP's runtimes end the process when they cannot start a thread. So before a calling thread's first team
 * of some size, that many threads are started and stopped again. This is the size seen to work. */
static _Thread_local int proven = 1;

static void *wait_at(void *gate) {
    pthread_mutex_lock(gate);
    pthread_mutex_unlock(gate);
    return NULL;
}

/* How many of `threads`, the caller included, there can be. If not all, half of what there can, since the
 * runtime needs room besides. */
static int can_start(int threads) {
    pthread_t ids[MOST_THREADS];
    pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;
    int started = 0;
    if (threads > MOST_THREADS)
        threads = MOST_THREADS;
    if (threads <= proven)
        return threads;
    pthread_mutex_lock(&gate);
    while (started < threads - 1 && pthread_create(&ids[started], NULL, wait_at, &gate) == 0)
        started++;
    pthread_mutex_unlock(&gate);
    for (int i = 0; i < started; i++)
        pthread_join(ids[i], NULL);
    if (started < threads - 1)
        return started / 2 + 1 > proven ? started / 2 + 1 : proven;
    return proven = threads;
}
#endif

/* ---- Teams ---- */

typedef struct job {
    int threads;
    int64_t count;
    fb__task task;
    const void *context;
    fb__fpmode mode;
} job;

int fb__team_max(void) {
#ifdef _OPENMP
    return omp_get_max_threads();
#else
    return 1;
#endif
}

static void run_serial(const job *j) {
    fb__fpmode saved = fb__fpmode_get();
    fb__fpmode_set(j->mode);
    for (int64_t i = 0; i < j->count; i++)
        j->task(j->context, i, 0);
    fb__fpmode_set(saved);
}

static void run_team(const job *j) {
#ifdef _OPENMP
    int threads = omp_get_active_level() < omp_get_max_active_levels() ? can_start(j->threads) : 1;
    if (threads == 1) { /* also within a parallel region of the program's own */
        run_serial(j);
        return;
    }
#pragma omp parallel num_threads(threads)
    {
        fb__fpmode saved = fb__fpmode_get();
        fb__fpmode_set(j->mode);
        int thread = omp_get_thread_num();
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < j->count; i++)
            j->task(j->context, i, thread);
        fb__fpmode_set(saved);
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
    if (j->threads > j->count)
        j->threads = (int)j->count;
    if (j->threads <= 1)
        run_serial(j);
    else if (!atomic_load_explicit(&forked, memory_order_relaxed))
        run_team(j);
    else if (pthread_create(&fresh, NULL, run_thread, j) == 0)
        pthread_join(fresh, NULL);
    else
        run_serial(j);
}

void fb__team_run(int threads, int64_t count, fb__task task, const void *context) {
    run(&(job){threads, count, task, context, FB__FPMODE_FAST});
}

void fb__team_run_exact(int threads, int64_t count, fb__task task, const void *context) {
    run(&(job){threads, count, task, context, FB__FPMODE_EXACT});
}
