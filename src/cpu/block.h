/* Blocks of query rows, and where things lie in memory: the vocabulary of the fast routes. ISA-free; all
 * arithmetic is in isa/kernels.h.
 *
 * A block is up to 64 query rows that share a key/value head: 64 queries of one head (fused), or the queries
 * of all heads of a group side by side (vector). Its rows are the lanes of a tile; a tile's rows are 64 keys.
 * Floor: cpu. Next: tile.h. */
#ifndef FB_CPU_BLOCK_H
#define FB_CPU_BLOCK_H

#include "../core/problem.h"
#include "isa/kernels.h"
#include "rows.h"
#include "team.h"

/* 64 x 64 is within 2 % of the best for long sequences on every vector width, and far the best for short
 * causal ones: bench/SPEED.md. PANEL is the step in which dead parts of a partial tile are left out. */
enum { FB__BR = 64, FB__BC = 64, FB__PANEL = 32, FB__MOST_SUB = 16, FB__FEW = 8 };

/* The backend's state: everything that follows from the problem alone. */
typedef struct fb__cpu_state {
    const fb__cpu_row *row;
    const fb__kernels *k;
    const fb__pairs *pairs; /* operands of products are bf16; NULL: they are T */
    fb_route route;
    bool stacked;     /* vector route */
    int type;         /* element type of the tensors, for packs */
    bool native;      /* that type is T */
    bool few;         /* forward: so few rows in a block that vectors run along the head dimension */
    bool shared_keys; /* forward: K and V are packed once for all blocks, ahead of them */
    bool refused;     /* the system does not permit the row's pairs */

    int64_t operand;       /* bytes of an element of an operand */
    int64_t lanes;         /* what the lanes of a tile, and the columns of packs, are padded to */
    int64_t row_step;      /* what the rows of a tile are padded to: 1, or those of fb__pairs */
    int64_t d_k, dv_k;     /* head dimensions as products sum over them */
    int64_t d_pad, dv_pad; /* and rounded up to whole packs */
    int64_t blocks;        /* row blocks per (sequence, key/value head), at most */
    int64_t key_blocks;    /* 64-key blocks per sequence, at most */
    int64_t slots;         /* places for row blocks in the workspace, per key/value head */
    int64_t key_slots;     /* likewise for key blocks */

    int64_t forward_chunks;       /* into how many parts the keys of a forward task are cut */
    int64_t chunks;               /* backward: tasks per (sequence, key/value head) */
    int64_t steps;                /* backward: chunks, or 1: how many times the tasks change row blocks */
    int64_t copies;               /* backward: partial dQ per row block; chunks or 1 */
    bool batch_waves, head_waves; /* backward: sequences (heads) share dbias, so they may not run at once */
    int64_t waves, per_wave;
    int64_t together; /* backward: units of a wave that go through their steps at the same time */
    bool grouped;     /* and the next ones use the same places for dQ, dK and dV */
    int64_t sub;      /* backward: key blocks whose dK and dV stay in cache together */

    /* By pass: most threads, scratch bytes of each, and where the arrays behind the slices begin. */
    int threads[2];
    size_t slice[2];
    size_t at_keys, at_partial, at_delta, at_dq, at_dkdv, at_dbias, at_scores[2];
    size_t workspace;
} fb__cpu_state;

/* Everything a task needs to know. */
typedef struct fb__call {
    const fb__cpu_state *s;
    const fb__problem *p;
    const fb_io *io;
    char *base; /* the workspace, aligned to 64 bytes */
    fb__team team;
    size_t slice;
    fb__pass pass;
    int64_t wave, unit, step; /* backward: where its loops stand */
} fb__call;

/* A block of rows. Lanes from n to n_pad are padding. */
typedef struct fb__block {
    fb__seq seq;
    int64_t kv, slot;
    int64_t stat; /* of row 0: fb__stat_index */
    int n, n_pad; /* n may be 0, and then the rest means nothing */
    int64_t head[FB__BR], query[FB__BR];
    int64_t lo[FB__BR], hi[FB__BR]; /* each row's band of keys */
    fb__range keys;                 /* all that some row may see */
    fb__range inner;                /* all that every row may see, as far as the band goes */
} fb__block;

/* Row `row` of array `base` of T. */
static inline void *fb__t(const fb__call *c, void *base, int64_t index) {
    return (char *)base + index * c->s->k->size;
}
static inline const void *fb__tc(const fb__call *c, const void *base, int64_t index) {
    return (const char *)base + index * c->s->k->size;
}
static inline void fb__put(const fb__call *c, void *array, int64_t i, double x) {
    if (c->s->k->size == 4)
        ((float *)array)[i] = (float)x;
    else
        ((double *)array)[i] = x;
}
static inline double fb__get(const fb__call *c, const void *array, int64_t i) {
    return c->s->k->size == 4 ? (double)((const float *)array)[i] : ((const double *)array)[i];
}

static inline int64_t fb__min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t fb__max(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t fb__ceil(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t fb__round_up(int64_t a, int64_t b) { return fb__ceil(a, b) * b; }

/* Row blocks of one sequence and key/value head, and its 64-key blocks. */
int64_t fb__blocks_of(const fb__call *c, const fb__seq *seq);

/* Block t of (sequence, key/value head); t rises with the query. n = 0 when there is none. */
void fb__block_init(const fb__call *c, const fb__seq *seq, int64_t kv, int64_t t, fb__block *block);

/* Finds the block of a flat index 0 ... slots * heads_kv - 1: heads outermost, then sequences, then t. */
void fb__block_at(const fb__call *c, int64_t index, fb__block *block);

/* First slot of a sequence's row blocks (key blocks). Packed sequences lie without gaps of more than one
 * block. */
int64_t fb__slot_of(const fb__call *c, int64_t b);
int64_t fb__key_slot_of(const fb__call *c, int64_t b);

/* Sequence, head and key block of a flat index 0 ... key_slots * heads_kv - 1; a packed sequence may lack the
 * block. */
int64_t fb__key_block_at(const fb__call *c, int64_t index, fb__seq *seq, int64_t *kv);

/* Addresses of the block's rows in a tensor of q's (k's) shape and type. */
void fb__block_rows(const fb__call *c, const fb__block *block, fb_ref ref, fb_strides strides,
                    void *rows[FB__BR]);
void fb__key_rows(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides strides,
                  int64_t k0, int64_t nk, void *rows[FB__BC]);
/* The block's entries of lse, dlse: element index of row r. */
int64_t fb__stat_index(const fb__call *c, const fb__block *block, int r);

/* A matrix of operands: where it begins, and how many elements its rows are apart. */
typedef struct fb__operand {
    const void *at;
    ptrdiff_t row;
} fb__operand;

static inline const void *fb__operand_at(const fb__call *c, const void *base, int64_t index) {
    return (const char *)base + index * c->s->operand;
}

/* K or V of up to 64 keys (of any number, where operands are T): rows as they are, for the products that sum
 * over the head dimension, and columns for those that sum over keys. Where they do not lie in memory as
 * needed, they are made in `pack`, which has room for FB__BC * cols_pad elements each (nk * cols_pad). */
fb__operand fb__key_rows_operand(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref,
                                 fb_strides strides, int64_t k0, int64_t nk, int64_t cols, int64_t cols_pad,
                                 void *pack);
fb__operand fb__key_columns_operand(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref,
                                    fb_strides strides, int64_t k0, int64_t nk, int64_t cols,
                                    int64_t cols_pad, void *pack);

fb__operand fb__key_rows_pack(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref,
                              fb_strides strides, int64_t k0, int64_t nk, int64_t cols, int64_t cols_pad,
                              void *pack);

/* Rows of a block in a tensor of q's shape. lanes: one lane each, for products that sum over `cols`; made in
 * `pack`, times a factor that is 1 or -1 where operands are bf16. rows: [lane][cols_pad], for products that
 * sum over lanes. */
void fb__lanes_pack(const fb__call *c, const fb__block *block, fb_ref ref, fb_strides strides, int64_t cols,
                    int64_t cols_pad, double factor, void *pack);
fb__operand fb__rows_operand(const fb__call *c, const fb__block *block, fb_ref ref, fb_strides strides,
                             int64_t cols, int64_t cols_pad, void *pack);
/* The same as T, whatever operands are. */
fb__operand fb__rows_of_t(const fb__call *c, const fb__block *block, fb_ref ref, fb_strides strides,
                          int64_t cols, int64_t cols_pad, void *pack);

/* What is needed soon, for gemm to pull: the rows that a block, or the block of a flat index
 * (none if past the end), has in a tensor of q's shape, except in the vector route, whose rows lie in several
 * heads; keys k0 ... of a tensor of k's shape. What does not fit into `ahead` is left out. */
void fb__ahead_block(const fb__call *c, const fb__block *block, fb_ref ref, fb_strides strides, int64_t cols,
                     fb__ahead *ahead);
void fb__ahead_keys(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides strides,
                    int64_t k0, int64_t nk, int64_t cols, fb__ahead *ahead);
void fb__ahead_index(const fb__call *c, int64_t index, fb_ref ref, fb_strides strides, int64_t cols,
                     fb__ahead *ahead);

/* Asks for rows of a tensor of k's shape now. */
void fb__fetch_keys(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides strides,
                    int64_t k0, int64_t nk, int64_t cols);

/* Bytes of arrays of T, and of operands, rounded up to whole cache lines. */
size_t fb__t_bytes(const fb__cpu_state *s, int64_t count);
size_t fb__operand_bytes(const fb__cpu_state *s, int64_t count);

#endif
