/* The problem: a descriptor that has passed every rule on inputs, with all defaults filled in. Code below
 * api/ trusts it. Next: problem.c (the rules), backend.h (who takes it). Floor: core. */
#ifndef FB_CORE_PROBLEM_H
#define FB_CORE_PROBLEM_H

#include "../shared/mask.h"
#include "flashback.h"
#include <stdbool.h>

#define FB__MAX_HEAD_DIM 576

typedef enum fb__pass { FB__FORWARD, FB__BACKWARD } fb__pass;

/* What differs from fb_desc: strides are explicit (0 repeats), scale is finite, window entries beyond the
 * lengths are FB_UNBOUNDED, shapes of absent options are all 1, score_bytes_max and fused_min_len hold what
 * is in force. */
typedef struct fb__problem {
    fb_desc d;
    int64_t group;       /* query heads per key/value head; may be 0, and is 1 without key/value heads */
    char route_from[24]; /* "field", "environment" or "default": who asked for d.route */
} fb__problem;

/* Fills *problem from *desc and the environment, or says why not. */
fb_status fb__problem_init(fb__problem *problem, const fb_desc *desc);

/* Fills *io from the one given, of any known size, and checks it against the problem: pointers that are
 * missing or given without their flag, workspace, overlap of outputs. Contents (cu, lens) are the backend's
 * to check. */
fb_status fb__problem_check_io(const fb__problem *p, fb__pass pass, size_t workspace, const fb_io *given,
                               fb_io *io);

/* The same for the tensors of fb_merge. */
fb_status fb__problem_check_merge(const fb__problem *problem, fb_ref out, fb_ref lse, fb_ref other_out,
                                  fb_ref other_lse);

/* A tensor that a pass uses: `bytes` from ref on hold it, gaps included. For backends whose refs are handles
 * of buffers that have a length. At most FB__MAX_EXTENTS; returns how many. */
#define FB__MAX_EXTENTS 24
typedef struct fb__extent {
    const char *name;
    fb_ref ref;
    uint64_t bytes;
} fb__extent;

int fb__problem_extents(const fb__problem *problem, fb__pass pass, size_t workspace, const fb_io *io,
                        fb__extent extents[FB__MAX_EXTENTS]);
int fb__problem_merge_extents(const fb__problem *problem, fb_ref out, fb_ref lse, fb_ref other_out,
                              fb_ref other_lse, fb__extent extents[FB__MAX_EXTENTS]);

/* Bytes of one element of q, and of lse and sinks. */
size_t fb__dtype_bytes(fb_dtype dtype);
size_t fb__stat_bytes(fb_dtype dtype);

static inline bool fb__has(const fb__problem *p, uint32_t flag) { return (p->d.flags & flag) != 0; }

static inline void *fb__at(fb_ref ref) { return ref.data ? (char *)ref.data + ref.offset : NULL; }

/* One sequence of the batch, resolved: where its rows begin in the tensors and which band it has. For packed
 * batches `row_q` and `row_k` are the first rows in [total, H, D]; otherwise they are 0 and the batch stride
 * counts. */
typedef struct fb__seq {
    int64_t b;
    int64_t row_q, row_k;
    int64_t len_q, len_k; /* rows that exist: what forward and backward must write */
    fb__band band;
} fb__seq;

/* cu and lens are host memory, already checked. */
fb__seq fb__problem_seq(const fb__problem *problem, const fb_io *io, int64_t b);

/* Checks the contents of io's cu and lens arrays, which must be readable by the host. */
fb_status fb__problem_check_lengths(const fb__problem *problem, const fb_io *io);

/* Element index of row `row` of head `head` in sequence `seq` of a tensor with strides s. For lse see below.
 */
static inline int64_t fb__index(fb_strides s, const fb__seq *seq, int64_t first_row, int64_t head,
                                int64_t row) {
    return seq->b * s.batch + head * s.head + (first_row + row) * s.row;
}

/* Strides of lse and dlse: contiguous [B,Hq,Lq], or [Hq,total_q] when packed (batch stride 0). */
fb_strides fb__lse_strides(const fb__problem *problem);

/* Bytes of the score matrices that the unfused route holds at once; len_q counts in whole vectors, 16.
 * Saturates at UINT64_MAX. */
uint64_t fb__problem_score_bytes(const fb__problem *problem, fb__pass pass);

#endif
