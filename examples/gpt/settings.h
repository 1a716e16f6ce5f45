/* What flashback-train is told. Floor: examples/gpt. */
#ifndef GPT_SETTINGS_H
#define GPT_SETTINGS_H

#include "run.h"

enum { MOST_TEXTS = 256, SETTINGS_IDS = 320 };

typedef struct settings {
    gpt_config config;
    recipe recipe;
    run_options run;
    const char *texts[MOST_TEXTS], *out, *plot;
    int text_count;
    int64_t sample, longest;
    uint64_t seed;
    double temperature;
    bool resume, overwrite, compare, measure;
    bool given[SETTINGS_IDS]; /* by the options' ids */
} settings;

/* Takes the model's shape and the seed from a checkpoint; exits with a sentence if an option says otherwise.
 */
void settings_adopt(settings *s, const run_state *saved);

/* The defaults, and over them the command line; exits with a sentence where that is wrong. */
void settings_read(settings *s, int argc, char **argv);

#endif
