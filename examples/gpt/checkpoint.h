/* The state of a training run in a .safetensors file: weights, both moments of AdamW, the model's shape and
 * the step. A file appears whole or not at all; the one before it stays until then. Floor: examples/gpt. */
#ifndef GPT_CHECKPOINT_H
#define GPT_CHECKPOINT_H

#include "parameters.h"

/* What a run must repeat to go on as if it had not been interrupted. */
typedef struct run_state {
    gpt_config config;
    int64_t step; /* steps done */
    uint64_t seed;
    float *weights, *m, *v; /* layout.floats each */
} run_state;

bool checkpoint_save(const char *path, const gpt_layout *layout, const run_state *state, complaint *why);

/* The shape of the model in a checkpoint, its step and seed; weights are not read. batch, route, dtype and
 * threads are not the model's and stay as they are in state->config. */
bool checkpoint_peek(const char *path, run_state *state, complaint *why);

/* Fills state->weights, m and v, which have room, and step and seed. Every tensor must be there, f32 and of
 * the layout's shape; on false nothing of *state has changed. */
bool checkpoint_load(const char *path, const gpt_layout *layout, run_state *state, complaint *why);

#endif
