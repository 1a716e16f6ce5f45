/* The harness: what the CLI's check, the tests and the bench share. It sees the library through flashback.h
 * only.
 *
 *     number.c   f16 and bf16 in software, deterministic pseudo-random values
 *     name.c     a case and its name (the name is its parameters)      cases.c  the one list of cases
 *     problem.c  the tensors of a case in memory                       fill.c   their values
 *     cells.c    which cells count (R1), independent of the library    low.c    the plain formula, per dtype
 *     compare.c  the accuracy rule (R12) and the exact rules           run.c    a case from name to verdict
 *     clock.c    time and memory
 * Read cases.c first. Rules R1 to R22 are those of docs/contract.md. */
#ifndef FLASHBACK_HARNESS_H
#define FLASHBACK_HARNESS_H

#include "flashback.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- Numbers (number.c) -------------------------------------------------------------------------------- */

/* Element types: an fb_dtype, or one of these two. */
enum { FBH_U8 = 16, FBH_I32 = 17 };

size_t fbh_size(int type); /* bytes of one element */
double fbh_load(int type, const void *at);
void fbh_store(int type, void *at, double x); /* rounds once, to nearest even */
double fbh_round(int type, double x);         /* the value that fbh_store would leave */

uint16_t fbh_to_f16(double x); /* overflow gives inf, NaN stays NaN (quiet), subnormals are kept */
uint16_t fbh_to_bf16(double x);
double fbh_from_f16(uint16_t bits);
double fbh_from_bf16(uint16_t bits);

/* Distance between neighbouring values of the type around |x|; of f16's or bf16's last bit when rounding to
 * it. */
double fbh_ulp(int type, double x);

/* Deterministic values of (seed, i), the same on every machine. exact: a multiple of 1/64 in [-1,1], which
 * every dtype holds exactly. normal: mean 0, variance 1, |x| < 3.5. */
double fbh_exact(uint64_t seed, uint64_t i);
double fbh_normal(uint64_t seed, uint64_t i);

/* ---- Cases (name.c, cases.c) --------------------------------------------------------------------------- */

/* How q, k, v, out and their gradients lie in memory. */
typedef enum fbh_layout {
    FBH_CONTIGUOUS, /* [B,H,L,D]; [total,H,D] when packed */
    FBH_BLHD,       /* [B,L,H,D] */
    FBH_QKV,     /* q, k, v as slices of one [B,L,Hq+2*Hkv,D]; dq, dk, dv likewise. Needs Lq = Lk, D = Dv */
    FBH_PADDED,  /* gaps after rows, heads and batches, of a different size for each tensor */
    FBH_ODD,     /* rows of D+1, and every tensor starts one element past a 64-byte boundary */
    FBH_REPEATED /* stride 0: q over heads, k and v over the batch, dout over batch, heads and rows */
} fbh_layout;

enum { FBH_NAME_SIZE = 192 };

/* One case. desc holds shape, dtype, flags and options; its strides, device and route are 0 and belong to the
 * problem and the run. Set up by fbh_case_parse, or by hand followed by fbh_case_name. */
typedef struct fbh_case {
    char name[FBH_NAME_SIZE];
    fb_desc desc;
    fbh_layout layout;
    bool lens_q, lens_k; /* FB_LENGTHS: which of the two arrays are given */
    bool no_lse;         /* forward without lse (and so without backward) */
    bool neg_inf;        /* some cells of the bias are -inf */
    bool far_bias;       /* the bias is -1e4 except on the last 1024 keys */
    bool exact;          /* all inputs are fbh_exact(tensor id + 1, logical index) and nothing is poisoned */
    bool massive;        /* magnitudes differ by batch entry, and a few channels are 100 times larger */
    double gain;         /* q is multiplied by it; 1 */
    double shift;        /* all logits are moved by it through channel 0; 0 = not */
    double flat;         /* q and k have this value everywhere; 0 = not */
} fbh_case;

/* A case from its name: words joined by '.', in any order. Every word starts with a letter, so that a point
 * before a digit is a decimal point. False, with a sentence in `error`, if a word is unknown or words
 * contradict. f32 f16 bf16 f64                             dtype b2h4k2  q70k83  d64  d192v128 B, Hq, Hkv;
 * Lq, Lk; D (= Dv); D and Dv causal  left3  right2  topleft  offset-5     window and positions scale-0.5
 * softcap50 biasbhqk  mask1h1k ...                       per dimension its letter, or 1 where it repeats
 *     dbias  neginf  farbias  sinks  dsinks  dlse
 *     block16x32  block16x32b  ..h  ..bh           block mask; the letters say which dimensions it has
 *     lensq  lensk  packed                         padded and packed batches
 *     acc  nodq  nodk  nodv  det  fwd  nolse
 *     blhd  qkv  padded  odd  repeated             layout
 *     exact  massive  gain20  shift-200  flat64    values */
bool fbh_case_parse(fbh_case *c, const char *name, char *error, size_t size);

/* A case of the defaults: f32, all dimensions 0, contiguous, normal values; the name is empty. */
void fbh_case_init(fbh_case *c);

/* Writes c->name from the other fields; parsing it gives the case back. */
void fbh_case_name(fbh_case *c);

/* The one list of cases, or those whose name matches the POSIX extended regular expression `filter` (NULL =
 * all; a plain piece of a name is one). Returns an array that the caller frees, its length in *count; NULL,
 * with a sentence in `error`, if the expression is wrong. */
fbh_case *fbh_case_list(const char *filter, size_t *count, char *error, size_t size);

/* ---- Problems (problem.c, fill.c) ---------------------------------------------------------------------- */

/* id, field of fb_io. The ids of q .. are also the seeds (plus one) of exact values. */
#define FBH_TENSORS(X)                                                                                       \
    X(Q, q)                                                                                                  \
    X(K, k)                                                                                                  \
    X(V, v)                                                                                                  \
    X(DOUT, dout)                                                                                            \
    X(BIAS, bias)                                                                                            \
    X(MASK, mask)                                                                                            \
    X(SINKS, sinks)                                                                                          \
    X(DLSE, dlse)                                                                                            \
    X(BLOCK_MASK, block_mask)                                                                                \
    X(CU_Q, cu_q)                                                                                            \
    X(CU_K, cu_k)                                                                                            \
    X(LENS_Q, lens_q)                                                                                        \
    X(LENS_K, lens_k)                                                                                        \
    X(OUT, out)                                                                                              \
    X(LSE, lse)                                                                                              \
    X(DQ, dq)                                                                                                \
    X(DK, dk)                                                                                                \
    X(DV, dv)                                                                                                \
    X(DBIAS, dbias)                                                                                          \
    X(DSINKS, dsinks)                                                                                        \
    X(WORKSPACE, workspace)

typedef enum fbh_id {
#define X(id, field) FBH_##id,
    FBH_TENSORS(X)
#undef X
        FBH_COUNT
} fbh_id;

typedef enum fbh_pass { FBH_FORWARD, FBH_BACKWARD } fbh_pass;

/* Where tensors end or start at a page that must not be touched: an access outside faults. Without guard
 * pages no copies are taken either, and fbh_problem_intact may not be asked: that is for timing. */
typedef enum fbh_guard { FBH_GUARD_NONE, FBH_GUARD_END, FBH_GUARD_START } fbh_guard;

/* Bytes that one or more tensors lie in. */
typedef struct fbh_buffer {
    unsigned char *data; /* host side */
    size_t bytes;
    unsigned char *before; /* copy taken right before a pass; what must not change is compared with it */
    void *map;             /* with guard pages: the mapping; otherwise what free() takes */
    size_t map_bytes;      /* 0 = from malloc */
    fb_ref device; /* the same bytes on the device, unless the library works on the host side itself */
} fbh_buffer;

/* One tensor, seen as [batch, heads, rows, cols] whatever it is: lse is [B,Hq,Lq,1], sinks [1,Hq,1,1], cu_q
 * [1,1,1,B+1]. Not part of the problem = buffer is NULL. */
typedef struct fbh_tensor {
    const char *name;
    int type;
    int64_t batch, heads, rows, cols;
    fb_strides stride; /* true element strides: here 0 is 0 */
    const int32_t *cu; /* packed: sequence b has rows cu[b] .. cu[b+1] */
    fbh_buffer *buffer;
    uint64_t offset; /* bytes from the buffer's start to element (0,0,0,0) */
} fbh_tensor;

typedef struct fbh_problem {
    fbh_case what;
    fb_desc desc; /* complete: strides and device; the route and threads are the caller's to set */
    fbh_tensor t[FBH_COUNT];
    fbh_buffer buffers[FBH_COUNT];
    int32_t *cu_q, *cu_k; /* packed: host copies, which the tensors' cu point to */
    bool *live_rows;      /* [B,Hq,Lq]: the query has a cell that counts */
    bool *live_keys;      /* [B,Hkv,Lk]: a query sees the key */
    fbh_guard guard;
    bool mirrored; /* buffers have a device side */
} fbh_problem;

/* Memory of zeros, at least one byte, for the caller to free. Running out of memory ends the process with a
 * sentence, here and everywhere in the harness, which has nothing better to do. */
void *fbh_make(size_t count, size_t size);

/* Allocates everything but the workspace; all bytes are 0xFF (NaN in every dtype). With `mirrored`, or on
 * another device than the CPU, the library works on memory from fb_alloc, and the host side is a copy. A
 * problem must stay where it was created: its tensors point to its buffers. */
void fbh_problem_create(fbh_problem *p, const fbh_case *c, fb_device device, int32_t index, fbh_guard guard,
                        bool mirrored);
void fbh_problem_destroy(fbh_problem *p);

/* The same problem in f64, contiguous, unguarded, with the same inputs. */
void fbh_problem_double(fbh_problem *p, const fbh_problem *given);

/* Sets all inputs, freshly for each seed. What may not matter stays NaN (except in exact cases): keys and
 * values that no query sees, dout of rows without a counting cell (and dlse, unless there is a sink), q past
 * lens_q, gaps. Whoever changes masks or lengths by hand afterwards calls fbh_problem_cells. */
void fbh_problem_fill(fbh_problem *p, uint64_t seed);

/* Copies all inputs: `to` may differ in dtype and layout. */
void fbh_problem_copy(fbh_problem *to, const fbh_problem *from);

/* One pass: makes the workspace, poisons it and the pass's outputs (FB_ACCUMULATE: gradients start as exact
 * values instead), takes the copies, uploads, runs, waits, downloads. */
fb_status fbh_problem_run(fbh_problem *p, const fb_plan *plan, fbh_pass pass);

/* The same in pieces, for those who time, repeat or spoil something in between: ready poisons and uploads, io
 * fills in the pointers for the pass, done waits and downloads. */
fb_status fbh_problem_ready(fbh_problem *p, const fb_plan *plan, fbh_pass pass);
void fbh_problem_io(const fbh_problem *p, fbh_pass pass, fb_io *io);
fb_status fbh_problem_done(fbh_problem *p);

/* R13 after a pass: every byte that the pass may not write (inputs, gaps, rows past cu[B], gradients not
 * asked for) is as it was. False, with the tensor and byte in `message`, if not. */
bool fbh_problem_intact(const fbh_problem *p, fbh_pass pass, char *message, size_t size);

/* Hash of all elements of the pass's outputs: equal bits, equal digest, whatever the layout. */
uint64_t fbh_problem_digest(const fbh_problem *p, fbh_pass pass);

/* Is the tensor written by the pass? False where it is not part of the problem. */
bool fbh_writes(const fbh_problem *p, fbh_id id, fbh_pass pass);

/* Rows of batch entry b (of sequence b when packed). */
int64_t fbh_rows(const fbh_tensor *t, int64_t b);

/* Element access; a dimension of size 1 repeats. */
void *fbh_at(const fbh_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d);
double fbh_get(const fbh_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d);
void fbh_set(const fbh_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d, double x);

/* ---- Cells (cells.c) ----------------------------------------------------------------------------------- */

/* Brings live_rows and live_keys up to date. */
void fbh_problem_cells(fbh_problem *p);

/* R1 for row i of head h: counts[j] says whether cell (i,j) counts, for all keys j of batch entry b. Returns
 * how many do. Independent of the library. */
int64_t fbh_cells(const fbh_problem *p, int64_t b, int64_t h, int64_t i, bool *counts);

/* ---- Expected values (low.c, compare.c) ---------------------------------------------------------------- */

/* "low" of R12: the plain formula in type `type`, S, P, O, dP and dS rounded to it, sums in f32 (f64: plain
 * double), the backward from the forward's own P. p is a contiguous f64 problem with its inputs set; writes
 * its outputs. Type FB_F64 makes it an oracle that owes nothing to the library. */
void fbh_low(fbh_problem *p, fb_dtype type);

/* The same operations in the order of a fast kernel: scale and the change to base 2 go into q, sums over head
 * dims run from the last to the first. */
void fbh_low_reordered(fbh_problem *p, fb_dtype type);

/* In f32 but for P and dS, which are rounded to `cells` on their way into products: kernels of 16-bit matrix
 * units. P is exp(S - max S + base) there, since such kernels let their maximum lag. */
void fbh_low_cells(fbh_problem *p, fb_dtype cells, double base);

/* The formula in double, but the backward starts from out and lse as the interface keeps them for `kept`:
 * what no backward behind this interface can know better. */
void fbh_kept(fbh_problem *p, fb_dtype kept);

/* R12 per batch entry and head, and the exact rules of R2 and R3, for the outputs of a pass. `want` and `low`
 * are f64 problems with the same inputs. False, with the worst element in `message`, if `got` breaks a rule.
 * *ratio (may be NULL) becomes the largest error over what was allowed. */
bool fbh_compare(const fbh_problem *got, const fbh_problem *want, const fbh_problem *low, fbh_pass pass,
                 double *ratio, char *message, size_t size);

/* ---- Runs (run.c) -------------------------------------------------------------------------------------- */

typedef enum fbh_verdict { FBH_PASS, FBH_FAIL, FBH_UNSUPPORTED } fbh_verdict;

typedef struct fbh_options {
    fb_device device;
    int32_t index;
    fb_route route;
    int32_t threads, tasks; /* as in fb_desc */
    fbh_guard guard;
    bool mirrored;
} fbh_options;

typedef struct fbh_result {
    fbh_verdict verdict;
    char message[512]; /* why not passed */
    double ratio;      /* largest error over what was allowed; <= 1 when passed */
    uint64_t digest;   /* of all outputs of both passes */
    size_t workspace;
} fbh_result;

/* Creates and computes what is expected of a problem whose inputs are set: `want` by the library's f64
 * reference, checked against the harness's own formula in double, and `low` as the measure of R12 (fbh_low,
 * and fbh_kept where that is worse). False, with a sentence in `error`, if the reference could not run or is
 * wrong; the caller destroys both problems either way. */
bool fbh_expect(fbh_problem *want, fbh_problem *low, const fbh_problem *given, char *error, size_t size);

/* A case with what is expected of it, computed once and good for many runs. */
typedef struct fbh_oracle {
    fbh_problem given; /* inputs, in the case's dtype and layout */
    fbh_problem want, low;
    char error[512]; /* not empty: the reference could not run, or is wrong; every run then fails */
} fbh_oracle;

void fbh_oracle_open(fbh_oracle *o, const fbh_case *c, uint64_t seed);
void fbh_oracle_close(fbh_oracle *o);

/* Runs the case with these options and judges it: forward, and backward unless the case is forward only. A
 * plan that answers FB_UNSUPPORTED or FB_NO_DEVICE is FBH_UNSUPPORTED with the reason; any other error fails,
 * as all cases are legal. */
void fbh_oracle_run(const fbh_oracle *o, const fbh_options *options, fbh_result *result);

/* Open, run, close. */
void fbh_case_run(const fbh_case *c, uint64_t seed, const fbh_options *options, fbh_result *result);

/* Could the route take this case at all? FB_VECTOR: at most 8 queries. Saves asking. */
bool fbh_route_fits(const fbh_case *c, fb_route route);

/* ---- Time and memory (clock.c) ------------------------------------------------------------------------- */

typedef struct fbh_stats {
    double min, median, p90;
} fbh_stats;

double fbh_now(void);                                  /* seconds, monotonic */
fbh_stats fbh_stats_of(double *samples, size_t count); /* sorts the samples; count >= 1 */
size_t fbh_peak_rss(void);                             /* bytes; 0 where the system does not say */

#endif
