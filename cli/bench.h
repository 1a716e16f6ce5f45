/* flashback bench, its pieces: bench.c (the verb), bench_sets.c (built-in problems), bench_print.c (formats),
 * bench_compare.c (against an earlier run), bench_plot.c (a picture).
 * Floor: cli. Read bench.c first. */
#ifndef CLI_BENCH_H
#define CLI_BENCH_H

#include "flashback.h"
#include "harness/harness.h"
#include "machine.h"
#include "options.h"
#include <stdio.h>

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
} bench_row;

/* What all rows of a run share. */
typedef struct bench_place {
    word_text machine, compiler, date;
    int threads;
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

/* Multiply-adds count as two operations. Forward 2(D + Dv), backward 2(3D + 2Dv) for each cell; a causal
 * problem with Lq = Lk counts half of its cells, any other window exactly those it leaves. */
double bench_flops(const fb_desc *desc, fbh_pass pass);

/* Of K and V. */
double bench_kv_bytes(const fb_desc *desc);

word_text bench_mask_name(const fb_desc *desc);
const char *bench_pass_name(fbh_pass pass);

/* Tables are printed row by row; BENCH_DECODE is BENCH_MD with the rates of reading. The original's table
 * takes rows in groups of four: forward and backward, unfused and then fused. */
void bench_print_head(bench_format format);
void bench_print_row(bench_format format, const bench_place *place, const bench_row *row);
void bench_print_original(const bench_row *four);

/* Prints time there / time here for every row, on `to`. Returns whether all of them are at least 0.95. Exits
 * with CLI_INPUT if the file cannot be read or has none of these rows. */
bool bench_compare(const char *path, const bench_place *place, const bench_row *rows, size_t count, FILE *to);

/* Exits with CLI_USAGE unless gnuplot is there and the path ends in .svg or .png; bench_plot draws. */
void bench_plot_check(const char *path);
void bench_plot(const char *path, const bench_place *place, const bench_row *rows, size_t count);

#endif
