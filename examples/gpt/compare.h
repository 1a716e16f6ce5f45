/* Fused beside unfused attention in the same model: do they learn the same, and what does either cost as the
 * context grows? Floor: examples/gpt. */
#ifndef GPT_COMPARE_H
#define GPT_COMPARE_H

#include "trainer.h"

/* Trains twice from the same seed in f32, fused and unfused; the largest difference of their losses in nats a
 * token over all steps of the recipe. */
bool compare_losses(const recipe *how, const text *from, const gpt_config *config, uint64_t seed,
                    double *largest, complaint *why);

/* What a step of the comparison's model costs at one context. */
typedef struct cost {
    double tokens_per_s, attention_share;
    uint64_t peak_bytes; /* of the process: one for each row of a table */
} cost;

/* The model of the table: 2 layers of 8 heads of 64, one sequence. */
gpt_config compare_model(int64_t context, fb_route route, int threads);

/* Measures one step (of a few, where they are short) in this process. */
bool compare_cost(const gpt_config *config, cost *c, complaint *why);

/* The table over contexts of 512, 1024, ... up to `longest`, fused and unfused. Every row is a process of its
 * own, which runs `program` with --measure and prints compare_line. */
bool compare_table(const char *program, int64_t longest, int threads, complaint *why);
void compare_line(const cost *c);

#endif
