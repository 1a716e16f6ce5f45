/* A problem in memory, made ready to run: what run and bench share. Wraps the harness's fbh_problem, whose
 * tensors come from files (inputs.h) or from random numbers (bench.c). Floor: cli. */
#ifndef CLI_JOB_H
#define CLI_JOB_H

#include "harness/harness.h"
#include "machine.h"
#include "tensor.h"

typedef struct job {
    fbh_problem problem;
    fb_plan *plan;
    bool backward; /* dout is there */
} job;

/* Packed: gives the problem the cuts that its cu_q and cu_k now hold, and `total` rows; tensors are made anew
 * and empty. (The harness cuts by a pattern of its own.) */
void job_recut(fbh_problem *p, int64_t total_q, int64_t total_k);

/* Creates the plan of the problem as its desc says; exits with CLI_LIBRARY and the library's sentence if
 * refused. */
void job_plan(job *j);
void job_close(job *j);

/* Passes a job has. */
int job_passes(const job *j);

/* Runs a pass once to warm up (unless one run is all that is asked for) and then at least `least` times and
 * until `seconds` are over; outputs are poisoned before each run. Milliseconds. */
fbh_stats job_time(job *j, fbh_pass pass, int least, double seconds);

/* Runs a pass once; milliseconds. */
double job_run(job *j, fbh_pass pass);

/* Bytes of all outputs of all passes; and with the workspace that the route takes. When the route refuses, 0,
 * and the reason in *why. */
uint64_t job_output_bytes(const job *j);
uint64_t job_extra_bytes(const job *j, fb_route route, complaint *why);

/* What the plan's explanation says of a key, see word_after. */
word_text job_explained(const job *j, const char *key);

/* Errors of the outputs against the definition in float64. */
typedef struct job_errors {
    double worst[FBH_COUNT]; /* max |x - ref|; infinite if only one of the two is a number */
    bool ok;                 /* the accuracy rule holds */
    double ratio;            /* largest error over what the rule allows */
    char message[512];       /* where it does not */
} job_errors;

void job_verify(job *j, job_errors *errors);

#endif
