/* What a run tells: a line of JSON for every step in a file, a progress bar on a terminal, a picture of the
 * loss. Floor: examples/gpt. */
#ifndef GPT_JOURNAL_H
#define GPT_JOURNAL_H

#include "cli/tensor.h"
#include <stdio.h>

/* A step; bits are bits a byte. */
typedef struct step_note {
    int64_t step;
    double bits, norm, rate, tokens_per_s, attention_share;
    uint64_t peak_bytes; /* most memory that the process has had */
} step_note;

typedef struct journal {
    FILE *log;
    char path[4096];
} journal;

/* Opens the log to go on after `step` steps: what it says of later ones is dropped. */
bool journal_open(journal *j, const char *path, int64_t step, complaint *why);
bool journal_step(journal *j, const step_note *note, complaint *why);
bool journal_held_out(journal *j, int64_t step, double bits, complaint *why);
bool journal_close(journal *j, complaint *why);

/* The bar, on standard error where that is a terminal; else a line at every `every`-th step. */
void journal_progress(const step_note *note, int64_t steps, double held_out, int64_t every);
void journal_progress_end(void);

/* Draws the log's losses with gnuplot; svg or png by the path's ending. */
bool journal_plot(const char *log, const char *path, const char *title, complaint *why);

#endif
