/* Backward, fused and vector routes: one pass, five products, no atomics, bits independent of the threads.
 *
 *     delta = rowsum(dO * O) - dLSE
 *     for each task = (sequence, key/value head, keys c, rows r):
 *         for each tile of these keys and rows that counts:
 *             S = scale K Q^T    dP = V dO^T    P = exp(S - lse)    dS = P (dP - delta)
 *             dV += P^T dO    dK += dS^T Q    dQ^T += K^T dS^T
 *
 * A tile is S^T: a row is a key, a lane a query.
 *
 * Two tasks may not add to the same dQ or dK at once, and every sum must have one order. So the keys of a
 * head are dealt to `chunks` tasks and its row blocks to as many groups, and in step s task c works on group
 * (c + s) mod chunks: all tasks of a step touch different keys and different rows, and after all steps each
 * has met each. The first task that meets rows computes their delta, the last writes their dQ. Keys and rows
 * are dealt round robin, so that under a causal mask or a window all tasks of a step take equally long. Where
 * it costs little memory, and with fewer row blocks than chunks, there is one step instead, and each task has
 * its own copy of dQ, summed in order at the end. All of it follows from the shape and desc.tasks alone.
 * Floor: cpu. Next: gradients.c, what happens before and after. */
#include "backward.h"
#include "product.h"
#include <math.h>
#include <string.h>

typedef struct scratch {
    void *q_lanes, *q_rows, *do_lanes, *do_rows;
    void *s, *dp;
    fb__cells cells;
    void *k_rows, *k_columns, *v_rows; /* packs of the keys at hand */
    void *dq;                          /* of the unit, when chunks is 1 */
    void *dk, *dv;                     /* of the keys at hand, when no other task adds to them: steps is 1 */
    fb__mask_scratch mask;
    size_t bytes;
} scratch;

/* How many T take the room of `count` operands. */
static int64_t operands(const fb__cpu_state *state, int64_t count) {
    return fb__ceil(count * state->operand, state->k->size);
}

static scratch carve(const fb__cpu_state *state, const fb__problem *p, char *base) {
    scratch x = {.bytes = 0};
    bool bias = fb__has(p, FB_MASK | FB_BIAS), pack = !state->native, alone = state->chunks == 1;
    bool own_keys = state->steps == 1;
    bool pairs = state->pairs;
    int64_t keys = state->sub * FB__BC, widest = fb__max(state->d_pad, state->dv_pad);
    int64_t cells = pairs ? FB__BC * FB__BR / 2 : 0;
    struct {
        void **to;
        int64_t count; /* of T */
    } arrays[] = {{&x.q_lanes, state->d_pad * FB__BR},
                  {&x.q_rows, state->d_pad * FB__BR},
                  {&x.do_lanes, state->dv_pad * FB__BR},
                  {&x.do_rows, state->dv_pad * FB__BR},
                  {&x.s, FB__BC * FB__BR},
                  {&x.dp, FB__BC * FB__BR},
                  {&x.cells.p, cells},
                  {&x.cells.ds, cells},
                  {&x.cells.ds_pairs, cells},
                  {&x.mask.clean, pairs ? FB__BC * widest / 2 : 0},
                  {&x.k_rows, pack ? operands(state, keys * state->d_pad) : 0},
                  {&x.k_columns, pairs ? operands(state, keys * state->d_pad) : 0},
                  {&x.v_rows, pack ? operands(state, keys * state->dv_pad) : 0},
                  {&x.mask.keep, FB__BC * FB__BR},
                  {&x.mask.bias, bias ? FB__BC * FB__BR : 0},
                  {&x.mask.derivative, p->d.softcap > 0 ? FB__BC * FB__BR : 0},
                  {&x.mask.lo, FB__BR},
                  {&x.mask.hi, FB__BR},
                  {&x.dk, own_keys ? keys * state->d_pad : 0},
                  {&x.dv, own_keys ? keys * state->dv_pad : 0},
                  {&x.dq, alone ? state->blocks * state->d_k * FB__BR : 0}};
    for (size_t i = 0; i < sizeof arrays / sizeof *arrays; i++) {
        *arrays[i].to = base ? base + x.bytes : NULL;
        x.bytes += fb__t_bytes(state, arrays[i].count);
    }
    return x;
}

size_t fb__backward_scratch(const fb__cpu_state *state, const fb__problem *p) {
    return carve(state, p, NULL).bytes;
}

size_t fb__backward_dq(const fb__cpu_state *state, const fb__problem *p) {
    int64_t places =
        state->grouped ? state->together * state->blocks : state->copies * state->slots * p->d.heads_kv;
    return state->chunks == 1 ? 0 : fb__t_bytes(state, places * state->d_k * FB__BR);
}

size_t fb__backward_dkdv(const fb__cpu_state *state, const fb__problem *p) {
    int64_t places = state->grouped ? state->together * state->key_blocks : state->key_slots * p->d.heads_kv;
    return state->steps == 1 ? 0 : fb__t_bytes(state, places * FB__BC * (state->d_pad + state->dv_pad));
}

/* ---- A task and its places ---- */

typedef struct task {
    fb__seq seq;
    int64_t kv, chunk, rows; /* keys dealt to `chunk`, row blocks dealt to `rows` */
    int64_t local;           /* which of the units that run together */
    int64_t blocks, key_blocks;
    scratch x;
    struct {
        fb__operand rows, columns, value; /* K, K as columns, V */
    } key[FB__MOST_SUB];                  /* of the key blocks at hand */
} task;

static void *dq_at(const fb__call *c, const task *t, int64_t block, int64_t copy) {
    int64_t size = c->s->d_k * FB__BR, slot = t->local * c->s->blocks + block;
    if (c->s->chunks == 1)
        return fb__t(c, t->x.dq, block * size);
    if (!c->s->grouped)
        slot = (copy * c->p->d.heads_kv + t->kv) * c->s->slots + fb__slot_of(c, t->seq.b) + block;
    return fb__t(c, c->base + c->s->at_dq, slot * size);
}

/* dK of key block kb, the j-th of those at hand; dV lies behind it. */
static void *dk_at(const fb__call *c, const task *t, int64_t kb, int64_t j) {
    int64_t slot = t->local * c->s->key_blocks + kb;
    if (c->s->steps == 1)
        return fb__t(c, t->x.dk, j * FB__BC * c->s->d_pad);
    if (!c->s->grouped)
        slot = t->kv * c->s->key_slots + fb__key_slot_of(c, t->seq.b) + kb;
    return fb__t(c, c->base + c->s->at_dkdv, slot * FB__BC * (c->s->d_pad + c->s->dv_pad));
}

static void *dv_at(const fb__call *c, const task *t, int64_t kb, int64_t j) {
    if (c->s->steps == 1)
        return fb__t(c, t->x.dv, j * FB__BC * c->s->dv_pad);
    return fb__t(c, dk_at(c, t, kb, j), FB__BC * c->s->d_pad);
}

/* The keys at hand: `count` key blocks, first, first + chunks, ... */
typedef struct keys_at_hand {
    int64_t first, count;
} keys_at_hand;

static int64_t key_block(const fb__call *c, const keys_at_hand *keys, int64_t j) {
    return keys->first + j * c->s->chunks;
}

static int64_t keys_in(const task *t, int64_t kb) { return fb__min(FB__BC, t->seq.len_k - kb * FB__BC); }

/* ---- One tile ---- */

/* Q and dO of a block as rows; as lanes they are in the scratch. */
typedef struct block_rows {
    fb__operand q, dout;
} block_rows;

/* Is this a tile where all cells count and nothing is added to scores, for products in bf16? */
static bool is_plain(const fb__call *c, const fb__tile *tile) {
    return c->s->pairs && !tile->partial && c->p->d.softcap == 0 && !fb__has(c->p, FB_BIAS);
}

/* From the operands to P and dS of a plain tile, a strip of keys at a time, which never leaves the nearest
 * cache; where heads are wide, half the lanes at a time, so that Q and dO stay there too. */
static void strips(const fb__call *c, const task *t, const fb__block *block, const fb__tile *tile, int64_t j,
                   const fb__cells *cells) {
    const fb__pairs *pairs = c->s->pairs;
    const scratch *x = &t->x;
    const fb__operand key = t->key[j].rows, value = t->key[j].value;
    const int64_t n = block->n_pad, d = c->s->d_k, dv = c->s->dv_k;
    const bool wide = d + dv > 192;
    const int64_t most_lanes = wide ? FB__PANEL : n, most_rows = wide ? FB__PANEL : pairs->strip;
    for (int64_t lane = 0; lane < n; lane += most_lanes)
        for (int64_t r = 0; r < tile->rows; r += most_rows) {
            const int64_t width = fb__min(most_lanes, n - lane), rows = fb__min(most_rows, tile->rows - r);
            pairs->gemm(rows, width, d, fb__operand_at(c, key.at, r * key.row), key.row,
                        fb__tc(c, x->q_lanes, lane), n, x->s, width, false, NULL);
            pairs->gemm(rows, width, dv, fb__operand_at(c, value.at, r * value.row), value.row,
                        fb__tc(c, x->do_lanes, lane), n, x->dp, width, false, NULL);
            fb__strip_gradient(c, block, (fb__strip){r, rows, lane, width}, x->s, x->dp, cells);
        }
}

/* Lanes of padding have a Q of 0, and P and dS of NaN beside an infinite K. dK and dV sum over lanes. */
static void clear_padding(const fb__block *block, const fb__tile *tile, const fb__cells *cells) {
    const int64_t n = block->n_pad;
    const size_t bytes = (size_t)(n - block->n) * sizeof(uint16_t);
    for (int64_t r = 0; bytes && r < tile->rows; r++) {
        memset((uint16_t *)cells->p + r * n + block->n, 0, bytes);
        memset((uint16_t *)cells->ds + r * n + block->n, 0, bytes);
    }
}

static void tile_gradient(const fb__call *c, const task *t, const fb__block *block, const block_rows *rows,
                          const fb__tile *tile, const keys_at_hand *keys, int64_t j, void *dq, bool dq_begins,
                          fb__ahead *ahead) {
    const scratch *x = &t->x;
    const fb__cells *cells = c->s->pairs ? &x->cells : NULL;
    const void *p = cells ? cells->p : x->s, *ds = cells ? cells->ds : x->dp;
    int64_t kb = key_block(c, keys, j);
    if (is_plain(c, tile))
        strips(c, t, block, tile, j, cells);
    else {
        fb__tile_scores_product(c, block, tile, t->key[j].rows, c->s->d_k, x->q_lanes, x->s, ahead);
        fb__tile_scores_product(c, block, tile, t->key[j].value, c->s->dv_k, x->do_lanes, x->dp, ahead);
        fb__tile_scores(c, block, tile, &x->mask, x->s, true);
        fb__tile_gradient(c, block, tile, &x->mask, x->s, x->dp, cells);
    }
    if (cells)
        clear_padding(block, tile, cells);
    if (!fb__has(c->p, FB_NO_DV))
        fb__tile_rows_product(c, block, tile, p, &x->mask, rows->dout, c->s->dv_pad, dv_at(c, t, kb, j),
                              ahead);
    if (!fb__has(c->p, FB_NO_DK))
        fb__tile_rows_product(c, block, tile, ds, &x->mask, rows->q, c->s->d_pad, dk_at(c, t, kb, j), ahead);
    if (!fb__has(c->p, FB_NO_DQ))
        fb__tile_lanes_product(c, block, tile, t->key[j].columns, c->s->d_k, cells ? cells->ds_pairs : ds,
                               &x->mask, dq, !dq_begins, ahead);
}

/* ---- One task ---- */

static block_rows pack_block(const fb__call *c, const fb__block *block, const scratch *x) {
    const fb_desc *d = &c->p->d;
    fb__lanes_pack(c, block, c->io->q, d->q, d->head_dim, c->s->d_pad, fb__pack_factor(c), x->q_lanes);
    fb__lanes_pack(c, block, c->io->dout, d->dout, d->head_dim_v, c->s->dv_pad, 1, x->do_lanes);
    return (block_rows){
        fb__rows_operand(c, block, c->io->q, d->q, d->head_dim, c->s->d_pad, x->q_rows),
        fb__rows_operand(c, block, c->io->dout, d->dout, d->head_dim_v, c->s->dv_pad, x->do_rows)};
}

/* In step 0 a task is the first that meets its rows (or their copies of dQ), in the last step it is the last.
 */
static bool first_keys(const fb__call *c, const task *t, const keys_at_hand *keys) {
    return c->step == 0 && keys->first == t->chunk;
}

/* What the products of the i-th block pull while they run: what the block after it needs, under a causal mask
 * with a key block that none has seen, and in the last step the places of its dQ and of the dK and dV of key
 * block i. */
static fb__ahead ahead_of(const fb__call *c, const task *t, const keys_at_hand *keys, const fb__block *block,
                          const fb__block *next, int64_t i) {
    const fb_desc *d = &c->p->d;
    const int64_t kb = key_block(c, keys, i), kb_next = key_block(c, keys, i + 1);
    fb__ahead ahead = {.lines = FB__AHEAD_LINES};
    fb__ahead_block(c, next, c->io->q, d->q, d->head_dim, &ahead);
    fb__ahead_block(c, next, c->io->dout, d->dout, d->head_dim_v, &ahead);
    if (first_keys(c, t, keys))
        fb__ahead_block(c, next, c->io->out, d->out, d->head_dim_v, &ahead);
    if (next->n && i + 1 < keys->count) {
        int64_t nk = keys_in(t, kb_next);
        fb__ahead_keys(c, &t->seq, t->kv, c->io->k, d->k, kb_next * FB__BC, nk, d->head_dim, &ahead);
        fb__ahead_keys(c, &t->seq, t->kv, c->io->v, d->v, kb_next * FB__BC, nk, d->head_dim_v, &ahead);
    }
    if (c->step < c->s->steps - 1)
        return ahead;
    if (c->s->copies == 1 && !fb__has(c->p, FB_NO_DQ))
        fb__ahead_block(c, block, c->io->dq, d->dq, d->head_dim, &ahead);
    if (i < keys->count && !fb__has(c->p, FB_NO_DK))
        fb__ahead_keys(c, &t->seq, t->kv, c->io->dk, d->dk, kb * FB__BC, keys_in(t, kb), d->head_dim, &ahead);
    if (i < keys->count && !fb__has(c->p, FB_NO_DV))
        fb__ahead_keys(c, &t->seq, t->kv, c->io->dv, d->dv, kb * FB__BC, keys_in(t, kb), d->head_dim_v,
                       &ahead);
    return ahead;
}

static void block_gradient(const fb__call *c, const task *t, const fb__block *block, void *dq,
                           const keys_at_hand *keys, fb__ahead *ahead) {
    block_rows rows;
    bool packed = false, dq_begins = first_keys(c, t, keys);
    for (int64_t j = 0; j < keys->count; j++) {
        int64_t kb = key_block(c, keys, j), k0 = kb * FB__BC;
        fb__tile tile;
        if (k0 >= block->keys.hi)
            break;
        /* Keys past the sequence's own length are masked for all, so tiles end there. */
        if (!fb__tile_init(c, block, k0, fb__min(FB__BC, t->seq.band.len_k - k0), &tile))
            continue;
        if (!packed)
            rows = pack_block(c, block, &t->x);
        tile_gradient(c, t, block, &rows, &tile, keys, j, dq, dq_begins && !packed, ahead);
        packed = true;
    }
    if (dq_begins && !packed)
        memset(dq, 0, (size_t)(c->s->d_k * block->n_pad * c->s->k->size));
}

/* Every row block of the task against the keys at hand. */
static void each_block(const fb__call *c, const task *t, const keys_at_hand *keys) {
    fb__block blocks[2], *block = &blocks[0], *next = &blocks[1];
    const int64_t copy = c->s->copies > 1 ? t->chunk : 0, steps = c->s->steps;
    if (t->rows < t->blocks)
        fb__block_init(c, &t->seq, t->kv, t->rows, block);
    for (int64_t b = t->rows, i = 0; b < t->blocks; b += steps, i++) {
        fb__block_init(c, &t->seq, t->kv, b + steps, next); /* past the end: n = 0 */
        fb__ahead ahead = ahead_of(c, t, keys, block, next, i);
        if (first_keys(c, t, keys) && c->s->copies == 1)
            fb__backward_delta_block(c, block, t->x.q_lanes);
        block_gradient(c, t, block, dq_at(c, t, b, copy), keys, &ahead);
        fb__block *swap = block;
        block = next, next = swap;
    }
}

static void *place(const fb__call *c, void *packs, int64_t index) {
    return (char *)packs + index * c->s->operand;
}

static void begin_keys(const fb__call *c, task *t, const keys_at_hand *keys) {
    const fb_desc *d = &c->p->d;
    const int64_t d_pad = c->s->d_pad, dv_pad = c->s->dv_pad;
    for (int64_t j = 0; j < keys->count; j++) {
        int64_t kb = key_block(c, keys, j), k0 = kb * FB__BC, nk = keys_in(t, kb);
        if (c->step == 0) {
            memset(dk_at(c, t, kb, j), 0, (size_t)(FB__BC * d_pad * c->s->k->size));
            memset(dv_at(c, t, kb, j), 0, (size_t)(FB__BC * dv_pad * c->s->k->size));
        }
        t->key[j].rows = t->key[j].columns =
            fb__key_rows_operand(c, &t->seq, t->kv, c->io->k, d->k, k0, nk, d->head_dim, d_pad,
                                 place(c, t->x.k_rows, j * FB__BC * d_pad));
        t->key[j].value = fb__key_rows_operand(c, &t->seq, t->kv, c->io->v, d->v, k0, nk, d->head_dim_v,
                                               dv_pad, place(c, t->x.v_rows, j * FB__BC * dv_pad));
        if (c->s->pairs)
            t->key[j].columns =
                fb__key_columns_operand(c, &t->seq, t->kv, c->io->k, d->k, k0, nk, d->head_dim, d_pad,
                                        place(c, t->x.k_columns, j * FB__BC * d_pad));
    }
}

static void write_keys(const fb__call *c, const task *t, const keys_at_hand *keys) {
    const fb_desc *d = &c->p->d;
    bool add = fb__has(c->p, FB_ACCUMULATE);
    void *rows[FB__BC];
    for (int64_t j = 0; j < keys->count; j++) {
        int64_t kb = key_block(c, keys, j), nk = keys_in(t, kb);
        if (!fb__has(c->p, FB_NO_DK)) {
            fb__key_rows(c, &t->seq, t->kv, c->io->dk, d->dk, kb * FB__BC, nk, rows);
            c->s->k->unpack_rows(nk, d->head_dim, dk_at(c, t, kb, j), c->s->d_pad, d->scale, rows, c->s->type,
                                 add);
        }
        if (!fb__has(c->p, FB_NO_DV)) {
            fb__key_rows(c, &t->seq, t->kv, c->io->dv, d->dv, kb * FB__BC, nk, rows);
            c->s->k->unpack_rows(nk, d->head_dim_v, dv_at(c, t, kb, j), c->s->dv_pad, 1, rows, c->s->type,
                                 add);
        }
    }
}

static void write_dq(const fb__call *c, const fb__block *block, void *dq) {
    void *rows[FB__BR];
    fb__clear_empty_rows(c, block, dq);
    fb__block_rows(c, block, c->io->dq, c->p->d.dq, rows);
    c->s->k->unpack_lanes(block->n, block->n_pad, c->p->d.head_dim, dq, NULL, c->p->d.scale, rows, c->s->type,
                          fb__has(c->p, FB_ACCUMULATE));
}

static void write_rows(const fb__call *c, const task *t) {
    fb__block block;
    for (int64_t b = t->rows; b < t->blocks && !fb__has(c->p, FB_NO_DQ); b += c->s->steps) {
        fb__block_init(c, &t->seq, t->kv, b, &block);
        write_dq(c, &block, dq_at(c, t, b, 0));
    }
}

/* Unit `unit` of the wave. Units that share dbias are in different waves: one wave per sequence, per head, or
 * both. */
static void find_unit(const fb__call *c, int64_t unit, task *t) {
    int64_t heads = c->p->d.heads_kv, head_waves = c->s->head_waves ? heads : 1;
    int64_t heads_per_wave = heads / head_waves;
    t->kv = c->s->head_waves ? c->wave % head_waves : unit % heads_per_wave;
    t->seq = fb__problem_seq(c->p, c->io, c->s->batch_waves ? c->wave / head_waves : unit / heads_per_wave);
}

static void gradient_task(const void *context, int64_t index, int thread) {
    const fb__call *c = context;
    int64_t chunks = c->s->chunks, steps = c->s->steps;
    task t = {.chunk = index % chunks,
              .local = index / chunks,
              .x = carve(c->s, c->p, c->base + (size_t)thread * c->slice)};
    find_unit(c, c->unit + index / chunks, &t);
    t.rows = (t.chunk + c->step) % steps;
    t.blocks = fb__blocks_of(c, &t.seq);
    t.key_blocks = fb__ceil(t.seq.len_k, FB__BC);
    int64_t first = t.chunk;
    do { /* once even without keys: rows have a delta and a dQ all the same */
        int64_t left = fb__max(t.key_blocks - first, 0);
        keys_at_hand keys = {.first = first, .count = fb__min(c->s->sub, fb__ceil(left, chunks))};
        begin_keys(c, &t, &keys);
        each_block(c, &t, &keys);
        if (c->step == steps - 1)
            write_keys(c, &t, &keys);
        first += c->s->sub * chunks;
    } while (first < t.key_blocks);
    if (c->step == steps - 1 && c->s->copies == 1)
        write_rows(c, &t);
}

static void dq_task(const void *context, int64_t index, int thread) {
    (void)thread;
    const fb__call *c = context;
    fb__block block;
    fb__block_at(c, index, &block);
    if (!block.n)
        return;
    int64_t size = c->s->d_k * FB__BR;
    void *dq = fb__t(c, c->base + c->s->at_dq, block.slot * size);
    c->s->k->sum_parts(c->s->copies, c->s->d_k * block.n_pad, dq, c->s->slots * c->p->d.heads_kv * size);
    write_dq(c, &block, dq);
}

void fb__backward_run(fb__call *c) {
    if (c->s->copies > 1)
        fb__backward_delta_run(c);
    fb__dbias_begin(c);
    const int64_t together = c->s->together;
    for (c->wave = 0; c->wave < c->s->waves; c->wave++)
        for (c->unit = 0; c->unit < c->s->per_wave; c->unit += together)
            for (c->step = 0; c->step < c->s->steps; c->step++)
                fb__team_run_queues(c->team, fb__min(together, c->s->per_wave - c->unit), c->s->chunks,
                                    gradient_task, c);
    if (c->s->copies > 1 && !fb__has(c->p, FB_NO_DQ))
        fb__team_run(c->team, c->s->slots * c->p->d.heads_kv, dq_task, c);
    fb__dbias_end(c);
    fb__dsinks_run(c);
}
