/* Threads: one parallel loop, the floating-point mode of those who run it, and what fork() does to them.
 * Floor: cpu. */
#ifndef FB_CPU_TEAM_H
#define FB_CPU_TEAM_H

#include <stdint.h>

/* Task `index` of a loop, run by thread `thread` (0 to threads - 1) of its team. */
typedef void (*fb__task)(const void *context, int64_t index, int thread);

/* How many threads a team may have now: by OpenMP's settings, which know affinity, and, where those are the
 * default, by the control group's quota. 1 without OpenMP. */
int fb__team_max(void);

/* Who runs a loop: up to `threads` threads, each of which calls enter before its first task and leave after
 * its last (NULL: nothing to do). */
typedef struct fb__team {
    int threads;
    void (*enter)(void);
    void (*leave)(void);
} fb__team;

/* Runs task(context, 0 ... count - 1), each once, on up to team.threads threads (fewer where the system
 * refuses to start them; one within a parallel region of the program's own), in no promised order; returns
 * when all are done. Within, numbers below the normal range are 0 (a denormal exp2 costs 220 cycles on some
 * processors) and rounding is to nearest, whatever the caller's mode; the caller's mode comes back. */
void fb__team_run(fb__team team, int64_t count, fb__task task, const void *context);

/* The same for `queues` queues of `each` tasks that share what they read: index = queue * each + place in it.
 * A thread stays with a queue as long as it lasts, so that its caches keep what is shared; then it helps with
 * the others. */
void fb__team_run_queues(fb__team team, int64_t queues, int64_t each, fb__task task, const void *context);

/* The same with numbers below the normal range intact: for the reference. */
void fb__team_run_exact(int threads, int64_t count, fb__task task, const void *context);

#endif
