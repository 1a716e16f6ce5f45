/* flashback bench, its pieces: bench.c (the verb), bench_sets.c (built-in problems), bench_gpu.h (on a GPU),
 * bench_print.c (formats), bench_compare.c (against an earlier run), bench_plot.c (a picture).
 * Floor: cli. Read bench.c first. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "flashback.h"
#include "harness/gpu_clock.h"
#include "harness/harness.h"
#include "job.h"
#include "machine.h"
#include "options.h"
#include <jansson.h>
#include <stdio.h>

/* For how long a GPU is timed, and how long it rests before. What is fast runs into the power limit within
 * 100 ms, so a time says in which regime it was taken. */
typedef struct bench_regime {
    word_text name; /* "" on the CPU */
    double seconds, pause;
} bench_regime;

/* One measured pass of one problem. */
typedef struct bench_row {
    fb_desc desc; /* with the route that was asked for */
    fbh_pass pass;
    word_text mask, route, isa; /* "causal"; the route taken; what its kernels use */
    fbh_stats ms;
    double gflops, peak_gflops, peak_percent; /* the peak beside this row; 0 = none */
    double kv_rate, read_rate; /* GB/s: K and V over the median time, what the machine reads; 0 = not asked */
    uint64_t extra;            /* bytes beside the inputs, for all passes of the plan together */
    char refused[400];         /* not empty: why nothing was measured */

    /* On a GPU: */
    word_text regime;
    size_t runs, copies; /* calls timed; sets of inputs that they took in turn */
    double host_us;      /* what queueing a call took, in the median */
    fbh_gpu_state state;
} bench_row;

/* What all rows of a run share. */
typedef struct bench_place {
    word_text machine, compiler, date; /* the processor's name, or the GPU's */
    word_text device;                  /* "cpu", "cuda", "metal" */
    int threads;                       /* 0 on a GPU */

    bool gpu;                   /* of NVIDIA, of which more is known: */
    word_text host, capability; /* the processor beside the GPU; "9.0" */
    word_text module, driver;   /* version of the kernel module; of CUDA, for which the driver is */
    word_text nvrtc, products;  /* "13.0"; "cuBLAS 13.0", for the unfused route, or "none" */
} bench_place;

typedef enum bench_format { BENCH_MD, BENCH_CSV, BENCH_JSONL, BENCH_ORIGINAL, BENCH_DECODE } bench_format;

/* A growing list of problems to measure. */
typedef struct bench_list {
    fb_desc *at;
    size_t count;
} bench_list;

void bench_list_add(bench_list *list, const fb_desc *desc);

/* Adds the problems of a set with the other fields of *base; those whose lengths exceed max_len are left out.
 * Where `masked`, base's window holds for all. False if there is no such set. */
bool bench_set_add(bench_list *list, const char *name, const fb_desc *base, bool masked, int64_t max_len);

#define BENCH_SETS "default, original, hopper, quick, small or decode"

/* What a set is measured in unless something else is asked for. */
fb_dtype bench_set_dtype(const char *name);

/* Multiply-adds count as two operations. Forward 2(D + Dv), backward 2(3D + 2Dv) for each cell; a causal
 * problem with Lq = Lk counts half of its cells, any other window exactly those it leaves. */
double bench_flops(const fb_desc *desc, fbh_pass pass);

/* Of K and V. */
double bench_kv_bytes(const fb_desc *desc);

word_text bench_mask_name(const fb_desc *desc);
const char *bench_pass_name(fbh_pass pass);

/* The problem with random inputs, and its plan; the job is the caller's to close. False, with the library's
 * sentence in fb_last_error, if there is no plan because the library does not offer it here, a part of the
 * machine is missing or memory is; exits with CLI_LIBRARY if it failed otherwise. */
bool bench_job_make(job *j, const fb_desc *desc, fbh_layout layout, uint64_t seed);

/* Tables are printed row by row; BENCH_DECODE is BENCH_MD with the rates of reading. The original's table
 * takes forward and backward of both routes. */
void bench_print_head(bench_format format, const bench_place *place);
void bench_print_row(bench_format format, const bench_place *place, const bench_row *row);
void bench_print_original(const bench_place *place, const bench_row *unfused, const bench_row *fused);

/* "1,32,8,2048,2048,128", with Dv where it differs. */
void bench_shape_words(const fb_desc *desc, char *text, size_t size);

/* The fields of a row of JSON that say where it was measured. */
json_t *bench_place_json(const bench_place *place);

/* Prints time there / time here for every row, on `to`. Returns whether all of them are at least 0.95. Exits
 * with CLI_INPUT if the file cannot be read or has none of these rows. */
bool bench_compare(const char *path, const bench_place *place, const bench_row *rows, size_t count, FILE *to);

/* Exits with CLI_USAGE unless gnuplot is there and the path ends in .svg or .png; bench_plot draws. */
void bench_plot_check(const char *path);
void bench_plot(const char *path, const bench_place *place, const bench_row *rows, size_t count);

#endif
