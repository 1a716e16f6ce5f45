/* A small decoder in the manner of Llama: what shape it has, and its parameters as one block of floats. Read
 * in this order: parameters.h, layers.h (each layer and its backward), attention.h (where flashback is used),
 * model.h (all layers in a row), train.c (the loop). Floor: examples/gpt. */
#ifndef GPT_PARAMETERS_H
#define GPT_PARAMETERS_H

#include "cli/tensor.h"
#include "flashback.h"

enum { GPT_VOCABULARY = 256 }; /* bytes */

typedef struct gpt_config {
    int64_t layers, width, heads_q, heads_kv, head_dim, hidden; /* hidden: of SwiGLU */
    int64_t batch, context;                                     /* sequences, tokens of each */
    int64_t window; /* layers 1, 3, 5, ... see this many tokens, their own included; 0: all see all */
    bool tied;      /* the head is the embedding */
    bool sinks;     /* a learned logit for each head that takes weight and gives nothing */
    float softcap;  /* of attention's scores; 0: none */
    float rope_base;
    fb_route route; /* of attention */
    fb_dtype dtype; /* FB_F32 or FB_BF16: of Q, K, V and the output of attention */
    int threads;    /* of attention; 0: flashback's choice */
} gpt_config;

/* A named matrix (or vector: rows = 1) within the block. */
typedef struct gpt_matrix {
    char name[40];
    int64_t rows, cols, offset;
    bool decays; /* takes part in weight decay: matrices do, gains and sinks do not */
} gpt_matrix;

/* The layout, which weights, gradients and both moments of AdamW share. */
typedef struct gpt_layout {
    gpt_matrix *matrices;
    int64_t count, floats;
} gpt_layout;

/* Names: "embedding" [256][width], "final_norm" [1][width], "head" [256][width] unless tied, and for layer n
 * "layer.<n>.attention_norm", "wq" [Hq D][width], "wk", "wv" [Hkv D][width], "wo" [width][Hq D], "sinks"
 * [1][Hq] if there are any, "mlp_norm", "w_gate", "w_up" [hidden][width], "w_down" [width][hidden]. y = x
 * W^T. */
bool gpt_layout_make(gpt_layout *layout, const gpt_config *config, complaint *why);
void gpt_layout_drop(gpt_layout *layout);

/* Index of a matrix by name; the name is known to be there. */
int64_t gpt_find(const gpt_layout *layout, const char *name);

/* Normal numbers of deviation 0.02 (of what adds to the residual 0.02 / sqrt(2 layers)), gains 1, sinks 0.
 * The same seed gives the same weights on every machine. */
void gpt_initialize(const gpt_layout *layout, const gpt_config *config, uint64_t seed, float *weights);

#endif
