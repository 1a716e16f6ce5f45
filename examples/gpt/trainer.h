/* A model, its optimizer and a text: one training step. Floor: examples/gpt. Next: run.h, the loop around it.
 */
#ifndef GPT_TRAINER_H
#define GPT_TRAINER_H

#include "checkpoint.h"
#include "model.h"
#include "optimizer.h"
#include "text.h"

#define BITS_PER_NAT 1.4426950408889634

typedef struct recipe {
    int64_t steps, warmup; /* of the schedule */
    int64_t micro;         /* batches a step, whose gradients are added */
    float rate, clip;      /* highest rate; most norm of a gradient */
    adamw adam;
} recipe;

typedef struct trainer {
    const recipe *recipe;
    const text *text;
    run_state state;
    gpt *model;
    float *gradients;
    uint8_t *tokens; /* of a batch */
} trainer;

/* A model of config's shape with the weights that seed gives, before its first step. recipe and text must
 * outlive it. */
bool trainer_open(trainer *t, const recipe *how, const text *from, const gpt_config *config, uint64_t seed,
                  complaint *why);
void trainer_close(trainer *t);

/* What a step came to. */
typedef struct step_result {
    double loss; /* nats a token, before the step; the mean of its batches */
    double norm; /* of the gradient */
    float rate;
} step_result;

/* False, and nothing changes, where attention fails or the loss is not a number. */
bool trainer_step(trainer *t, step_result *result, complaint *why);

/* The loss over the part held out, in bits a byte; NaN on failure. */
double trainer_held_out(trainer *t, int64_t batches, complaint *why);

#endif
