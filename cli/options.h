/* Options of a problem, as keys with text values: from the command line and from a file's metadata alike.
 * Floor: cli. */
#ifndef CLI_OPTIONS_H
#define CLI_OPTIONS_H

#include "cli.h"
#include "harness/harness.h"

/* The flags that set them; ids from 200. */
extern const cli_option cli_problem_options[];

enum { OPTIONS_MOST_FLAGS = 32 };

typedef struct options {
    fb_desc desc;             /* no shape */
    bool causal;              /* asked for by that name */
    int64_t block_q, block_k; /* 0 = not given */
    bool dtype_given, layout_given, device_given;
    fbh_layout layout;
} options;

/* Flags in the order given: they are applied after a file's metadata and win over it. */
typedef struct option_flags {
    int count;
    struct {
        int id;
        const char *value;
    } row[OPTIONS_MOST_FLAGS];
} option_flags;

void options_init(options *o);

/* One entry of a file's metadata. False, with a sentence naming the key, if key or value are unknown. */
bool options_set_metadata(options *o, const char *key, const char *value, complaint *why);

/* Notes a flag; exits with CLI_USAGE if its value is wrong. */
void options_note(option_flags *flags, int id, const char *value);
void options_apply(options *o, const option_flags *flags);

/* "B,HQ,HKV,LQ,LK,D[,DV]" into the dimensions of *shape, its other fields untouched; exits with CLI_USAGE if
 * the text is anything else. options_shape copies them. */
void parse_shape(const char *text, fb_desc *shape);
void options_shape(options *o, const fb_desc *shape);

/* Optional tensors and flags that have no value on the command line, as a list of words for --with, into
 * fb_desc.flags; exits with CLI_USAGE if a word is unknown. options_parts sets them, after the shape: a bias
 * or mask is as large as the scores. */
#define OPTIONS_PARTS                                                                                        \
    "bias, dbias, mask, sinks, dsinks, dlse, lengths, accumulate, deterministic, forward-only"
uint32_t parse_parts(const char *list);
void options_parts(options *o, uint32_t flags);

/* Text to numbers: the whole text, in range; otherwise false. */
bool parse_int(const char *text, int64_t least, int64_t most, int64_t *n);
bool parse_double(const char *text, double *x);

/* "1,2,3" into at most `most` integers >= 0; the count, or 0 if the text is anything else. */
int parse_list(const char *text, int64_t *n, int most);

#endif
