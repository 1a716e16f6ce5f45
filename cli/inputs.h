/* From files to a problem: tensors by name, shapes that fit each other, options from the metadata and the
 * command line. Whatever is wrong with a file ends the program with CLI_INPUT and a sentence that names file
 * and field. Floor: cli. Next: inputs.c, job.h. */
#ifndef CLI_INPUTS_H
#define CLI_INPUTS_H

#include "file.h"
#include "job.h"
#include "options.h"
#include "safetensors.h"

typedef struct inputs {
    const char *name; /* for messages */
    options options;
    tensor t[FBH_OUT]; /* inputs by fbh_id; data == NULL if not given */
    mapping maps[FBH_OUT];
    int map_count;
    safetensors header; /* owns names */
    bool forward_only;  /* asked for, or no dout */
} inputs;

/* Opens a .safetensors file with everything in it. */
void inputs_open(inputs *in, const char *path);

/* Adds one tensor from a .npy file to inputs set up by inputs_begin. */
void inputs_begin(inputs *in);
void inputs_add(inputs *in, fbh_id id, const char *path);
void inputs_close(inputs *in);

/* Checks shapes and types, creates the job's problem and copies the tensors into it. */
void inputs_make_job(inputs *in, job *j);

#endif
