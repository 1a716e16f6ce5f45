/* A training run: steps, a journal of them, checkpoints. Floor: examples/gpt. */
#ifndef GPT_RUN_H
#define GPT_RUN_H

#include "trainer.h"

typedef struct run_options {
    int64_t save_every, held_out_every; /* steps */
    int64_t held_out_batches;
    const char *checkpoint, *log; /* paths */
    bool quiet;                   /* no progress bar */
} run_options;

/* What a run came to. */
typedef struct run_result {
    double first_held_out, held_out; /* bits a byte, at its begin and end */
    double tokens_per_s, attention_share, seconds;
    bool interrupted;
    bool unwritten; /* where it failed: a file could not be written */
} run_result;

/* Trains from the trainer's step to its recipe's last. Saves a checkpoint first, on the way and at the end;
 * *stop, set by a signal, ends the run after the step in progress, which is saved too. */
bool run_training(trainer *t, const run_options *options, const volatile int *stop, run_result *result,
                  complaint *why);

#endif
