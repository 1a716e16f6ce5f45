/* The text to learn: files one after the other, bytes as tokens; the last tenth is held out. Floor:
 * examples/gpt. */
#ifndef GPT_TEXT_H
#define GPT_TEXT_H

#include "cli/tensor.h"

typedef struct text {
    uint8_t *bytes;
    int64_t size, train; /* bytes [train, size) are held out */
} text;

/* Reads files, and all regular files below folders whose name ends in .c, .h, .inc, .md, .txt or .py, in the
 * order of their paths; hidden ones and folders named build are left out. False with a sentence that names
 * the file if one is missing or unreadable, or if all of it is empty. */
bool text_open(text *t, const char *const *paths, int count, complaint *why);
void text_close(text *t);

/* Is there room for a sequence of context + 1 in either part? */
bool text_fits(const text *t, int64_t context, complaint *why);

/* Fills tokens [batch][context + 1] with pieces from random places of the part to train on. They follow from
 * seed, step and micro (the how-manieth batch of the step) alone. */
void text_batch(const text *t, uint64_t seed, int64_t step, int64_t micro, int64_t batch, int64_t context,
                uint8_t *tokens);

/* The n-th batch of the part held out, in order, pieces evenly spread over it; the same at every call. */
void text_held_out(const text *t, int64_t n, int64_t batches, int64_t batch, int64_t context,
                   uint8_t *tokens);

#endif
