/* Unfused: materialises the whole score matrix [B,Hq,Lk,Lq] (and dP in the backward) and walks over it
 * operation by operation, as frameworks without a fused kernel do: nothing is skipped under a causal mask or
 * a window. The products run through the same gemm as the fused route, so that the two differ in the
 * algorithm only. Floor: cpu. */
#include "unfused.h"
#include "backward.h"
#include "forward.h"
#include "product.h"
#include <math.h>
#include <string.h>

typedef struct scratch {
    void *q, *rows, *o, *k, *v, *dk, *dv;
    void *m, *l, *alpha, *sinks, *lse;
    fb__mask_scratch mask;
    size_t bytes;
} scratch;

static scratch carve(const fb__cpu_state *state, const fb__problem *p, char *base) {
    scratch x = {.bytes = 0};
    bool bias = fb__has(p, FB_MASK | FB_BIAS), pack = !state->native, back = !fb__has(p, FB_FORWARD_ONLY);
    int64_t width = fb__max(state->d_pad, state->dv_pad), len_k = p->d.len_k;
    struct {
        void **to;
        int64_t count;
    } arrays[] = {{&x.rows, 2 * width * FB__BR},
                  {&x.q, width * FB__BR},
                  {&x.o, width * FB__BR},
                  {&x.k, pack ? len_k * state->d_pad : 0},
                  {&x.v, pack ? len_k * state->dv_pad : 0},
                  {&x.dk, back ? len_k * state->d_pad : 0},
                  {&x.dv, back ? len_k * state->dv_pad : 0},
                  {&x.mask.keep, len_k * FB__BR},
                  {&x.mask.bias, bias ? len_k * FB__BR : 0},
                  {&x.mask.derivative, back ? len_k * FB__BR : 0},
                  {&x.mask.lo, FB__BR},
                  {&x.mask.hi, FB__BR},
                  {&x.m, FB__BR},
                  {&x.l, FB__BR},
                  {&x.alpha, FB__BR},
                  {&x.sinks, FB__BR},
                  {&x.lse, FB__BR}};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        *arrays[i].to = base ? base + x.bytes : NULL;
        x.bytes += fb__t_bytes(state, arrays[i].count);
    }
    return x;
}

size_t fb__unfused_scratch(const fb__cpu_state *state, const fb__problem *p) {
    return carve(state, p, NULL).bytes;
}

/* Columns of one score matrix over all batches and heads: queries, rounded up to whole vectors for each head.
 */
static int64_t score_lanes(const fb__cpu_state *state, const fb__problem *p) {
    if (fb__has(p, FB_PACKED))
        return state->slots * p->d.heads_kv * FB__BR;
    return p->d.batch * p->d.heads_q * fb__round_up(p->d.len_q, state->k->lanes);
}

size_t fb__unfused_scores(const fb__cpu_state *state, const fb__problem *p) {
    int64_t matrices = fb__has(p, FB_FORWARD_ONLY) ? 1 : 2;
    return fb__t_bytes(state, matrices * score_lanes(state, p) * p->d.len_k);
}

/* The block's columns of score matrix `which`: [len_k][n_pad]. */
static void *scores_at(const fb__call *c, const fb__block *block, int64_t which) {
    int64_t lane = block->slot * FB__BR;
    if (!fb__has(c->p, FB_PACKED))
        lane =
            (block->seq.b * c->p->d.heads_q + block->head[0]) * fb__round_up(c->p->d.len_q, c->s->k->lanes) +
            block->query[0];
    lane += which * score_lanes(c->s, c->p);
    return fb__t(c, c->base + c->s->at_scores[c->pass], lane * c->p->d.len_k);
}

/* All keys as one tile, every panel live. */
static fb__tile whole(const fb__call *c, const fb__block *block) {
    fb__tile tile;
    int64_t nk = block->seq.len_k;
    if (!fb__tile_init(c, block, 0, nk, &tile))
        tile = (fb__tile){.k0 = 0, .nk = nk, .rows = nk, .partial = true};
    tile.banded = false;
    for (int p = 0; p < FB__BR / FB__PANEL; p++)
        tile.panel[p] = (fb__range){0, nk};
    return tile;
}

static fb__operand operand(const fb__call *c, const fb__block *block, bool value, const scratch *x) {
    const fb_desc *d = &c->p->d;
    if (value)
        return fb__key_rows_operand(c, &block->seq, block->kv, c->io->v, d->v, 0, block->seq.len_k,
                                    d->head_dim_v, c->s->dv_pad, x->v);
    return fb__key_rows_operand(c, &block->seq, block->kv, c->io->k, d->k, 0, block->seq.len_k, d->head_dim,
                                c->s->d_pad, x->k);
}

/* S of the block, after softcap and bias; leaves the keep tile. */
static void scores(const fb__call *c, const fb__block *block, const fb__tile *tile, fb__operand key, void *s,
                   const scratch *x, bool gradient) {
    void *rows[FB__BR];
    fb__block_rows(c, block, c->io->q, c->p->d.q, rows);
    c->s->k->pack_lanes(block->n, block->n_pad, c->p->d.head_dim, (const void *const *)rows, c->s->type,
                        fb__pack_factor(c), x->q);
    fb__tile_scores_product(c, block, tile, key, c->p->d.head_dim, x->q, s, NULL);
    fb__tile_scores(c, block, tile, &x->mask, s, gradient);
}

static void forward_task(const void *context, int64_t index, int thread) {
    const fb__call *c = context;
    fb__block block;
    fb__block_at(c, index, &block);
    if (!block.n)
        return;
    scratch x = carve(c->s, c->p, c->base + (size_t)thread * c->slice);
    fb__tile tile = whole(c, &block);
    void *s = scores_at(c, &block, 0);
    scores(c, &block, &tile, operand(c, &block, false, &x), s, &x, false);
    fb__tile_select(c, &block, &tile, &x.mask, s, -HUGE_VAL);
    for (int r = 0; r < block.n_pad; r++) {
        fb__put(c, x.m, r, -HUGE_VAL);
        fb__put(c, x.l, r, 0);
    }
    fb__tile_softmax(c, &block, &tile, s, x.m, x.l, x.alpha, s);
    fb__tile_lanes_product(c, &block, &tile, operand(c, &block, true, &x), c->p->d.head_dim_v, s, &x.mask,
                           x.o, false, NULL);
    fb__forward_write(c, &block, x.m, x.l, x.o, x.sinks, x.alpha, x.lse);
}

void fb__unfused_forward(fb__call *c) {
    fb__team_run(c->team, c->s->slots * c->p->d.heads_kv, forward_task, c);
}

/* P, dS and dQ of one block. */
static void gradient_task(const void *context, int64_t index, int thread) {
    const fb__call *c = context;
    const fb__kernels *k = c->s->k;
    const fb_desc *d = &c->p->d;
    void *rows[FB__BR];
    fb__block block;
    fb__block_at(c, index, &block);
    if (!block.n)
        return;
    scratch x = carve(c->s, c->p, c->base + (size_t)thread * c->slice);
    fb__tile tile = whole(c, &block);
    fb__operand key = operand(c, &block, false, &x), value = operand(c, &block, true, &x);
    void *s = scores_at(c, &block, 0), *dp = scores_at(c, &block, 1);
    scores(c, &block, &tile, key, s, &x, true);
    fb__block_rows(c, &block, c->io->dout, d->dout, rows);
    k->pack_lanes(block.n, block.n_pad, d->head_dim_v, (const void *const *)rows, c->s->type, 1, x.o);
    fb__tile_scores_product(c, &block, &tile, value, d->head_dim_v, x.o, dp, NULL);
    fb__tile_gradient(c, &block, &tile, &x.mask, s, dp, NULL);
    if (fb__has(c->p, FB_NO_DQ))
        return;
    fb__tile_lanes_product(c, &block, &tile, key, d->head_dim, dp, &x.mask, x.q, false, NULL);
    fb__clear_empty_rows(c, &block, x.q);
    fb__block_rows(c, &block, c->io->dq, d->dq, rows);
    k->unpack_lanes(block.n, block.n_pad, d->head_dim, x.q, NULL, d->scale, rows, c->s->type,
                    fb__has(c->p, FB_ACCUMULATE));
}

/* to += cells^T rows for one block: the share of its queries in dK or dV. */
static void add_rows(const fb__call *c, const fb__block *block, const fb__tile *tile, fb_ref ref,
                     fb_strides strides, int64_t cols, int64_t cols_pad, const void *cells, const scratch *x,
                     void *to) {
    fb__operand rows = fb__rows_operand(c, block, ref, strides, cols, cols_pad, x->rows);
    /* The keep tile is needed only beside NaN or Inf; it is then made anew, on scores that nobody reads. */
    if (tile->partial && !c->s->k->finite(block->n, cols_pad, rows.at, rows.row))
        fb__tile_scores(c, block, tile, &x->mask, x->mask.derivative, false);
    fb__tile_rows_product(c, block, tile, cells, &x->mask, rows, cols_pad, to, NULL);
}

static void write_rows(const fb__call *c, const fb__seq *seq, int64_t kv, fb_ref ref, fb_strides strides,
                       int64_t cols, int64_t cols_pad, double factor, const void *from) {
    void *rows[FB__BC];
    for (int64_t k0 = 0; k0 < seq->len_k; k0 += FB__BC) {
        int64_t nk = fb__min(FB__BC, seq->len_k - k0);
        fb__key_rows(c, seq, kv, ref, strides, k0, nk, rows);
        c->s->k->unpack_rows(nk, cols, fb__tc(c, from, k0 * cols_pad), cols_pad, factor, rows, c->s->type,
                             fb__has(c->p, FB_ACCUMULATE));
    }
}

/* dK and dV of one sequence and key/value head, blocks in order. */
static void keys_task(const void *context, int64_t index, int thread) {
    const fb__call *c = context;
    const fb_desc *d = &c->p->d;
    int64_t kv = index % d->heads_kv;
    fb__seq seq = fb__problem_seq(c->p, c->io, index / d->heads_kv);
    scratch x = carve(c->s, c->p, c->base + (size_t)thread * c->slice);
    memset(x.dk, 0, (size_t)(seq.len_k * c->s->d_pad * c->s->k->size));
    memset(x.dv, 0, (size_t)(seq.len_k * c->s->dv_pad * c->s->k->size));
    for (int64_t t = 0; t < fb__blocks_of(c, &seq); t++) {
        fb__block block;
        fb__block_init(c, &seq, kv, t, &block);
        fb__tile tile = whole(c, &block);
        if (!fb__has(c->p, FB_NO_DV))
            add_rows(c, &block, &tile, c->io->dout, d->dout, d->head_dim_v, c->s->dv_pad,
                     scores_at(c, &block, 0), &x, x.dv);
        if (!fb__has(c->p, FB_NO_DK))
            add_rows(c, &block, &tile, c->io->q, d->q, d->head_dim, c->s->d_pad, scores_at(c, &block, 1), &x,
                     x.dk);
    }
    if (!fb__has(c->p, FB_NO_DK))
        write_rows(c, &seq, kv, c->io->dk, d->dk, d->head_dim, c->s->d_pad, d->scale, x.dk);
    if (!fb__has(c->p, FB_NO_DV))
        write_rows(c, &seq, kv, c->io->dv, d->dv, d->head_dim_v, c->s->dv_pad, 1, x.dv);
}

void fb__unfused_backward(fb__call *c) {
    fb__backward_delta_run(c);
    fb__dbias_begin(c);
    /* Blocks may share cells of dbias, so with it they run one after the other. */
    fb__team team = c->team;
    team.threads = fb__has(c->p, FB_DBIAS) ? 1 : team.threads;
    fb__team_run(team, c->s->slots * c->p->d.heads_kv, gradient_task, c);
    fb__team_run(c->team, c->p->d.batch * c->p->d.heads_kv, keys_task, c);
    fb__dbias_end(c);
    fb__dsinks_run(c);
}
