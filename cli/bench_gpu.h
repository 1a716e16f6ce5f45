/* flashback bench on a GPU: a problem's tensors several times over, calls in turn, and what is said once a
 * run. Floor: cli. Next: bench_gpu.c (times), bench_costs.c (compiler, cache, host). */
#ifndef CLI_BENCH_GPU_H
#define CLI_BENCH_GPU_H

#include "bench.h"
#include "harness/gpu_clock.h"
#include "job.h"
#include "kernels.h"

/* Exits with CLI_LIBRARY and a sentence unless the library can use the device of *desc. */
void bench_need_device(const fb_desc *desc);

/* The same unless it can be timed. */
fbh_gpu *bench_gpu_open(const fb_desc *desc);

/* The arch that a plan's kernels are for, "sm_90a". */
word_text bench_gpu_arch(const job *j);

/* A job's tensors on its device, in as many copies as make its inputs larger than the second-level cache:
 * calls that take them in turn read from memory, as calls of different layers do. The forward has run on
 * each. The job has its plan and its inputs, and outlives the copies. NULL, with a sentence, if the device
 * has no room for the first; what cannot be had of the others is left out. */
typedef struct bench_copies bench_copies;
bench_copies *bench_copies_open(fbh_gpu *gpu, job *j, complaint *why);
void bench_copies_close(bench_copies *c);

/* Times a pass in a regime, after a pause and a warm-up: fills in ms, runs, copies, host_us and state. */
void bench_copies_time(bench_copies *c, fbh_pass pass, const bench_regime *regime, bench_row *row);

/* Microseconds that the host spends in a call that only queues work, the median of a thousand; the queue is
 * emptied every few calls. */
double bench_copies_host(bench_copies *c, fbh_pass pass);

/* What does not depend on the row: the kernels of one plan compiled from nothing and read from the cache on
 * disk, and host_us of its passes at a small size. */
typedef struct bench_costs {
    fb_desc desc;
    int cold_count, cached_count;
    kernel_line cold[KERNELS_MOST], cached[KERNELS_MOST];
    double plan_ms[2]; /* all of fb_plan_create, cold and cached */
    double host_us[2]; /* by pass; 0 = the problem has none */
} bench_costs;

/* Compiles for *desc; to be the first of the process, whose compiler is cold as well. */
void bench_costs_measure(bench_costs *costs, fbh_gpu *gpu, const fb_desc *desc);

/* Sentences ahead of a Markdown table, an object among JSON lines, sentences on stderr beside CSV. */
void bench_costs_print(bench_format format, const bench_place *place, const bench_costs *costs);

#endif
