/* What surrounds the backward of every fast route: lse and delta of each block before it, dbias during it,
 * dsinks after it. Floor: cpu. */
#include "backward.h"
#include <math.h>
#include <string.h>

/* ---- lse and delta: two vectors of FB__BR per block ---- */

enum { STATS = 2 * FB__BR };

size_t fb__backward_delta(const fb__cpu_state *state, const fb__problem *p) {
    return fb__t_bytes(state, state->slots * p->d.heads_kv * STATS);
}

static void *lse_of(const fb__call *c, const fb__block *block) {
    return fb__t(c, c->base + c->s->at_delta, block->slot * STATS);
}

static void *delta_of(const fb__call *c, const fb__block *block) {
    return fb__t(c, lse_of(c, block), FB__BR);
}

/* A row with a sink and no key: its out is 0 whatever q, k and v are, so its dout, which may be NaN, has no
 * say. */
static bool sink_only(const fb__call *c, const fb__block *block, int r, double lse, fb__operand out) {
    if (!fb__has(c->p, FB_SINKS) || lse != fb__get(c, fb__at(c->io->sinks), block->head[r]))
        return false;
    for (int64_t e = 0; e < c->p->d.head_dim_v; e++)
        if (fb__get(c, out.at, r * out.row + e) != 0)
            return false;
    return true;
}

/* lse, +inf for rows that take no part, so that exp(S - lse) = 0; delta = rowsum(dO * O) - dlse. */
void fb__backward_delta_block(const fb__call *c, const fb__block *block, char *scratch) {
    const fb_desc *d = &c->p->d;
    const int64_t cols = d->head_dim_v, pad = fb__round_up(cols, c->s->k->lanes);
    fb__operand out = fb__rows_of_t(c, block, c->io->out, d->out, cols, pad, scratch);
    fb__operand dout =
        fb__rows_of_t(c, block, c->io->dout, d->dout, cols, pad, fb__t(c, scratch, pad * FB__BR));
    void *lse = lse_of(c, block), *delta = delta_of(c, block);
    c->s->k->dot_rows(block->n, pad, dout.at, dout.row, out.at, out.row, delta);
    for (int r = 0; r < FB__BR; r++) {
        double value = r < block->n ? fb__get(c, fb__at(c->io->lse), fb__stat_index(c, block, r)) : -HUGE_VAL;
        bool empty = value == -HUGE_VAL;
        fb__put(c, lse, r, empty ? HUGE_VAL : value);
        if (empty || sink_only(c, block, r, value, out))
            fb__put(c, delta, r, 0);
        if (!empty && fb__has(c->p, FB_DLSE))
            fb__put(c, delta, r,
                    fb__get(c, delta, r) - fb__get(c, fb__at(c->io->dlse), fb__stat_index(c, block, r)));
    }
}

void fb__clear_empty_rows(const fb__call *c, const fb__block *block, void *dq) {
    for (int64_t r = 0; r < block->n; r++)
        for (int64_t e = 0; fb__get(c, lse_of(c, block), r) == HUGE_VAL && e < c->p->d.head_dim; e++)
            fb__put(c, dq, e * block->n_pad + r, 0);
}

static void delta_task(const void *context, int64_t index, int thread) {
    const fb__call *c = context;
    fb__block block;
    fb__block_at(c, index, &block);
    if (block.n)
        fb__backward_delta_block(c, &block, c->base + (size_t)thread * c->slice);
}

void fb__backward_delta_run(fb__call *c) {
    fb__team_run(c->team, c->s->slots * c->p->d.heads_kv, delta_task, c);
}

/* ---- dbias: straight into the caller's tensor when it is of type T, else into sums of T ---- */

static int64_t dbias_rows(const fb__problem *p) {
    return p->d.bias_shape.batch * p->d.bias_shape.heads * p->d.bias_shape.rows;
}

size_t fb__backward_dbias(const fb__cpu_state *state, const fb__problem *p) {
    if (!fb__has(p, FB_DBIAS) || state->native)
        return 0;
    return fb__t_bytes(state, dbias_rows(p) * fb__round_up(p->d.bias_shape.cols, state->k->lanes));
}

/* Row `row` (of all batches and heads) of the caller's dbias. */
static char *dbias_row(const fb__call *c, int64_t row) {
    fb_shape n = c->p->d.bias_shape;
    fb_strides s = c->p->d.dbias;
    int64_t i = row % n.rows, h = row / n.rows % n.heads, b = row / n.rows / n.heads;
    return (char *)fb__at(c->io->dbias) +
           (size_t)(b * s.batch + h * s.head + i * s.row) * fb__dtype_bytes(c->p->d.dtype);
}

static int64_t sums_row(const fb__call *c) { return fb__round_up(c->p->d.bias_shape.cols, c->s->k->lanes); }

static void dbias_zero(const void *context, int64_t row, int thread) {
    (void)thread;
    const fb__call *c = context;
    size_t size = (size_t)c->s->k->size;
    if (c->s->native && !fb__has(c->p, FB_ACCUMULATE))
        memset(dbias_row(c, row), 0, (size_t)c->p->d.bias_shape.cols * size);
    else if (!c->s->native)
        memset(fb__t(c, c->base + c->s->at_dbias, row * sums_row(c)), 0, (size_t)sums_row(c) * size);
}

static void dbias_write(const void *context, int64_t row, int thread) {
    (void)thread;
    const fb__call *c = context;
    void *to = dbias_row(c, row);
    c->s->k->unpack_rows(1, c->p->d.bias_shape.cols, fb__t(c, c->base + c->s->at_dbias, row * sums_row(c)),
                         sums_row(c), 1, &to, c->s->type, fb__has(c->p, FB_ACCUMULATE));
}

void fb__dbias_begin(fb__call *c) {
    if (fb__has(c->p, FB_DBIAS) && c->p->d.bias_shape.cols)
        fb__team_run(c->team, dbias_rows(c->p), dbias_zero, c);
}

void fb__dbias_end(fb__call *c) {
    if (fb__has(c->p, FB_DBIAS) && c->p->d.bias_shape.cols && !c->s->native)
        fb__team_run(c->team, dbias_rows(c->p), dbias_write, c);
}

static void dbias_add(const fb__call *c, const fb__block *block, const fb__tile *tile, const void *ds) {
    fb_shape n = c->p->d.bias_shape;
    void *rows[FB__BR];
    bool repeat = n.cols == 1;
    for (int r = 0; r < block->n; r++) {
        int64_t b = n.batch > 1 ? block->seq.b : 0, h = n.heads > 1 ? block->head[r] : 0;
        int64_t row = (b * n.heads + h) * n.rows + (n.rows > 1 ? block->query[r] : 0);
        void *base =
            c->s->native ? (void *)dbias_row(c, row) : fb__t(c, c->base + c->s->at_dbias, row * sums_row(c));
        rows[r] = fb__t(c, base, repeat ? 0 : tile->k0);
    }
    c->s->k->scatter(tile->nk, block->n_pad, block->n, ds, rows, repeat ? 0 : 1);
}

/* ---- S and dP of a tile become P and dS ---- */

void fb__tile_gradient(const fb__call *c, const fb__block *block, const fb__tile *tile,
                       const fb__mask_scratch *m, void *s, void *dp, const fb__cells *cells) {
    const fb__kernels *k = c->s->k;
    int64_t nk = tile->nk, n = block->n_pad;
    fb__tile_weights(c, block, tile, s, dp, lse_of(c, block), delta_of(c, block));
    fb__tile_select(c, block, tile, m, s, 0);
    fb__tile_select(c, block, tile, m, dp, 0);
    if (fb__has(c->p, FB_DBIAS))
        dbias_add(c, block, tile, dp);
    if (c->p->d.softcap > 0) {
        k->multiply(nk, n, dp, m->derivative);
        fb__tile_select(c, block, tile, m, dp, 0); /* 0 * NaN, where a score that does not count is NaN */
    }
    if (cells)
        fb__tile_round(c, block, tile, s, dp, cells);
}

void fb__strip_gradient(const fb__call *c, const fb__block *block, fb__strip x, const void *s, const void *dp,
                        const fb__cells *cells) {
    const int64_t n = block->n_pad;
    const fb__cells to = fb__cells_at(cells, x.row, x.lane, n);
    c->s->pairs->gradient(x.rows, x.width, s, dp, x.width, fb__score_factor(c),
                          fb__tc(c, lse_of(c, block), x.lane), fb__tc(c, delta_of(c, block), x.lane), &to, n);
}

/* ---- dsinks: one head per task, in double, in the order of the rows ---- */

static void dsink_task(const void *context, int64_t h, int thread) {
    (void)thread;
    const fb__call *c = context;
    int64_t g = c->p->group;
    double sink = fb__get(c, fb__at(c->io->sinks), h), sum = 0;
    for (int64_t b = 0; b < c->p->d.batch; b++) {
        fb__seq seq = fb__problem_seq(c->p, c->io, b);
        fb__block block;
        for (int64_t t = 0; t < fb__blocks_of(c, &seq); t++) {
            if (!c->s->stacked && t % g != h % g)
                continue;
            fb__block_init(c, &seq, h / g, t, &block);
            for (int r = 0; r < block.n; r++) {
                double lse = fb__get(c, fb__at(c->io->lse), fb__stat_index(c, &block, r));
                if (block.head[r] == h && lse != -HUGE_VAL)
                    sum -= exp(sink - lse) * fb__get(c, delta_of(c, &block), r);
            }
        }
    }
    void *to = fb__at(c->io->dsinks);
    fb__put(c, to, h, fb__has(c->p, FB_ACCUMULATE) ? fb__get(c, to, h) + sum : sum);
}

void fb__dsinks_run(fb__call *c) {
    if (fb__has(c->p, FB_DSINKS))
        fb__team_run(c->team, c->p->d.heads_q, dsink_task, c);
}
