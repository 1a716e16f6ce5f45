/* Which tensors a problem has, their shapes, and where their elements lie.
 * Floor: harness. Read problem.c next, which gives them memory. */
#include "layout.h"

static bool has(const fbh_problem *p, uint32_t flag) { return (p->desc.flags & flag) != 0; }

bool fbh_present(const fbh_problem *p, fbh_id id) {
    const bool backward = !has(p, FB_FORWARD_ONLY);
    const bool table[FBH_COUNT] = {
        [FBH_Q] = true,
        [FBH_K] = true,
        [FBH_V] = true,
        [FBH_OUT] = true,
        [FBH_LSE] = !p->what.no_lse,
        [FBH_DOUT] = backward,
        [FBH_DQ] = backward && !has(p, FB_NO_DQ),
        [FBH_DK] = backward && !has(p, FB_NO_DK),
        [FBH_DV] = backward && !has(p, FB_NO_DV),
        [FBH_DLSE] = has(p, FB_DLSE),
        [FBH_BIAS] = has(p, FB_BIAS),
        [FBH_DBIAS] = has(p, FB_DBIAS),
        [FBH_MASK] = has(p, FB_MASK),
        [FBH_BLOCK_MASK] = has(p, FB_BLOCK_MASK),
        [FBH_SINKS] = has(p, FB_SINKS),
        [FBH_DSINKS] = has(p, FB_DSINKS),
        [FBH_CU_Q] = has(p, FB_PACKED),
        [FBH_CU_K] = has(p, FB_PACKED),
        [FBH_LENS_Q] = p->what.lens_q,
        [FBH_LENS_K] = p->what.lens_k,
        [FBH_WORKSPACE] = false, /* made when its size is known */
    };
    return table[id];
}

static fbh_tensor shaped(const fbh_problem *p, fbh_id id) {
    const fb_desc *d = &p->desc;
    const int value = (int)d->dtype, stat = d->dtype == FB_F64 ? FB_F64 : FB_F32;
    const int64_t B = d->batch, Hq = d->heads_q, Hkv = d->heads_kv, Lq = d->len_q, Lk = d->len_k;
    const int64_t D = d->head_dim, Dv = d->head_dim_v;
    const fb_shape bias = d->bias_shape, mask = d->mask_shape;
    const int64_t blocks_q = (Lq + d->block_q - 1) / d->block_q,
                  blocks_k = (Lk + d->block_k - 1) / d->block_k;
    const fbh_tensor table[FBH_COUNT] = {
        [FBH_Q] = {"q", value, B, Hq, Lq, D, .cu = p->cu_q},
        [FBH_K] = {"k", value, B, Hkv, Lk, D, .cu = p->cu_k},
        [FBH_V] = {"v", value, B, Hkv, Lk, Dv, .cu = p->cu_k},
        [FBH_OUT] = {"out", value, B, Hq, Lq, Dv, .cu = p->cu_q},
        [FBH_DOUT] = {"dout", value, B, Hq, Lq, Dv, .cu = p->cu_q},
        [FBH_DQ] = {"dq", value, B, Hq, Lq, D, .cu = p->cu_q},
        [FBH_DK] = {"dk", value, B, Hkv, Lk, D, .cu = p->cu_k},
        [FBH_DV] = {"dv", value, B, Hkv, Lk, Dv, .cu = p->cu_k},
        [FBH_LSE] = {"lse", stat, B, Hq, Lq, 1, .cu = p->cu_q},
        [FBH_DLSE] = {"dlse", stat, B, Hq, Lq, 1, .cu = p->cu_q},
        [FBH_BIAS] = {"bias", value, bias.batch, bias.heads, bias.rows, bias.cols, .cu = NULL},
        [FBH_DBIAS] = {"dbias", value, bias.batch, bias.heads, bias.rows, bias.cols, .cu = NULL},
        [FBH_MASK] = {"mask", FBH_U8, mask.batch, mask.heads, mask.rows, mask.cols, .cu = NULL},
        [FBH_BLOCK_MASK] = {"block_mask", FBH_U8, d->block_batch, d->block_heads, blocks_q, blocks_k,
                            .cu = NULL},
        [FBH_SINKS] = {"sinks", stat, 1, Hq, 1, 1, .cu = NULL},
        [FBH_DSINKS] = {"dsinks", stat, 1, Hq, 1, 1, .cu = NULL},
        [FBH_CU_Q] = {"cu_q", FBH_I32, 1, 1, 1, B + 1, .cu = NULL},
        [FBH_CU_K] = {"cu_k", FBH_I32, 1, 1, 1, B + 1, .cu = NULL},
        [FBH_LENS_Q] = {"lens_q", FBH_I32, 1, 1, 1, B, .cu = NULL},
        [FBH_LENS_K] = {"lens_k", FBH_I32, 1, 1, 1, B, .cu = NULL},
        [FBH_WORKSPACE] = {"workspace", FBH_U8, 1, 1, 1, 0, .cu = NULL},
    };
    return table[id];
}

/* Lengths of which the longest, an empty one and a single row are among the first five, at different places
 * for queries and keys. */
int64_t fbh_sequence_length(int64_t b, int64_t longest, bool keys) {
    const int64_t of_q[] = {longest, (longest + 1) / 2, 0, longest < 1 ? 0 : 1, longest};
    const int64_t of_k[] = {longest - longest / 3, longest, (longest + 1) / 2, longest, 0};
    return keys ? of_k[b % 5] : of_q[b % 5];
}

uint64_t fbh_index(const fbh_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d) {
    return (uint64_t)(((b * t->heads + h) * t->rows + i) * t->cols + d);
}

/* ---- Strides ------------------------------------------------------------------------------------------- */

/* A dense tensor but for `gap` elements after each row and `gap` rows after each head and batch entry. */
static fb_strides dense(const fbh_tensor *t, int64_t gap) {
    const int64_t row = t->cols + gap, head = (t->rows + gap) * row;
    if (t->cu)
        return (fb_strides){.row = t->heads * row + gap, .head = row};
    return (fb_strides){.row = row, .head = head, .batch = t->heads * head + gap * row};
}

static fb_strides interleaved(const fbh_tensor *t, int64_t heads) {
    return (fb_strides){.row = heads * t->cols, .head = t->cols, .batch = t->rows * heads * t->cols};
}

/* Strides of q, k, v, out and their gradients. */
static fb_strides main_strides(const fbh_problem *p, fbh_id id, const fbh_tensor *t) {
    fb_strides s = dense(t, 0);
    switch (p->what.layout) {
    case FBH_BLHD:
        return t->cu ? s : interleaved(t, t->heads);
    case FBH_QKV:
        return id == FBH_OUT || id == FBH_DOUT ? s : interleaved(t, p->desc.heads_q + 2 * p->desc.heads_kv);
    case FBH_REPEATED:
        if (id == FBH_Q || id == FBH_DOUT)
            s.head = 0;
        if (id == FBH_K || id == FBH_V || id == FBH_DOUT)
            s.batch = 0;
        if (id == FBH_DOUT)
            s.row = 0;
        return s;
    default:
        return s;
    }
}

/* Where fb_desc describes the strides of a tensor; NULL for those that lie flat. */
static fb_strides *described(fb_desc *d, fbh_id id) {
    fb_strides *const table[FBH_COUNT] = {
        [FBH_Q] = &d->q,       [FBH_K] = &d->k,         [FBH_V] = &d->v,       [FBH_OUT] = &d->out,
        [FBH_DOUT] = &d->dout, [FBH_DQ] = &d->dq,       [FBH_DK] = &d->dk,     [FBH_DV] = &d->dv,
        [FBH_BIAS] = &d->bias, [FBH_DBIAS] = &d->dbias, [FBH_MASK] = &d->mask,
    };
    return table[id];
}

static fb_strides strides(fbh_problem *p, fbh_id id, const fbh_tensor *t) {
    fb_strides *to = described(&p->desc, id), s;
    if (!to)
        return t->cu ? (fb_strides){.head = p->desc.total_q, .row = 1} : dense(t, 0);
    if (p->what.layout == FBH_PADDED)
        s = dense(t, 1 + (int64_t)id % 4); /* k and v, and each gradient, get their own */
    else if (p->what.layout == FBH_ODD)
        s = dense(t, 1);
    else
        s = id == FBH_BIAS || id == FBH_DBIAS || id == FBH_MASK ? dense(t, 0) : main_strides(p, id, t);
    if (p->what.layout != FBH_CONTIGUOUS)
        *to = (fb_strides){.batch = s.batch ? s.batch : FB_BROADCAST,
                           .head = s.head ? s.head : FB_BROADCAST,
                           .row = s.row ? s.row : FB_BROADCAST};
    return s;
}

/* ---- Places -------------------------------------------------------------------------------------------- */

fbh_id fbh_buffer_of(const fbh_problem *p, fbh_id id) {
    if (p->what.layout != FBH_QKV)
        return id;
    return id == FBH_K || id == FBH_V ? FBH_Q : id == FBH_DK || id == FBH_DV ? FBH_DQ : id;
}

/* Elements before a slice of a fused row [Hq+2*Hkv,D]. */
static int64_t slice_start(const fb_desc *d, fbh_id id) {
    if (id == FBH_K || id == FBH_DK)
        return d->heads_q * d->head_dim;
    return id == FBH_V || id == FBH_DV ? (d->heads_q + d->heads_kv) * d->head_dim : 0;
}

size_t fbh_lay_out(fbh_problem *p, fbh_id id) {
    enum { LINE = 64 };
    fbh_tensor *t = &p->t[id];
    *t = shaped(p, id);
    if (!fbh_present(p, id))
        return 0;
    t->stride = strides(p, id, t);
    const size_t size = fbh_size(t->type);
    const int64_t rows = !t->cu ? t->rows : t->cu == p->cu_q ? p->desc.total_q : p->desc.total_k;
    const int64_t batch = t->cu ? 1 : t->batch;
    const fb_strides s = t->stride;
    int64_t elements = 0;
    if (batch && t->heads && rows && t->cols)
        elements = (batch - 1) * s.batch + (t->heads - 1) * s.head + (rows - 1) * s.row + t->cols;
    if (fbh_buffer_of(p, id) != id || (p->what.layout == FBH_QKV && (id == FBH_Q || id == FBH_DQ))) {
        t->offset = (uint64_t)slice_start(&p->desc, id) * size;
        return (size_t)(batch * s.batch) * size;
    }
    if (p->what.layout != FBH_ODD)
        return (size_t)elements * size;
    /* A buffer of whole lines starts at a line, whichever end its guard page is at. */
    t->offset = size;
    return (size + (size_t)elements * size + LINE - 1) / LINE * LINE;
}
