// What the kernels of the backward on sm_90a share: the loader, what becomes of cells, the warpgroup of dQ. A block has
// KEYS keys, and tiles of FB_BN query rows pass by. Next: hopper_backward.cu, hopper_split.cu.
//
// Shared memory: K, V [KEYS][D], FB_BUFFERS times Q [BN][D] and dO [BN][DV], twice dS' [KEYS][BN] (and, in
// hopper_split.cu, P' as fragments), FB_BUFFERS times LSE [BN] and delta [BN], barriers, what the loader says. A place
// is written when K and V of the tile before are empty: see hopper_forward.cu.
#pragma once
#include "hopper_tiles.cuh"
#include "mend.cuh"

#define KEYS FB_BM
#define SPLIT (KEYS == 64)
#if SPLIT
#define KEYS_OF_WARP (FB_WARP % 4 * 16)
#else
#define KEYS_OF_WARP ((FB_WARP - 4) * 16)
#endif
#define QUERY_PANELS (FB_BN / 64)
#define K_BYTES FB_SWIZZLED_BYTES(KEYS, FB_D)
#define V_BYTES FB_SWIZZLED_BYTES(KEYS, FB_DV)
#define Q_BYTES FB_SWIZZLED_BYTES(FB_BN, FB_D)
#define O_BYTES FB_SWIZZLED_BYTES(FB_BN, FB_DV)
#define S_BYTES (QUERY_PANELS * FB_PANEL_BYTES(KEYS))
#define S_STAGES 2
#define V_AT K_BYTES
#define Q_AT (V_AT + V_BYTES)
#define O_AT (Q_AT + FB_BUFFERS * Q_BYTES)
#define S_AT (O_AT + FB_BUFFERS * O_BYTES)
#define P_AT (S_AT + S_STAGES * S_BYTES)
#define P_BYTES (SPLIT ? S_BYTES : 0)
#define LSE_AT(stage) (P_AT + S_STAGES * P_BYTES + 8 * FB_BN * (stage))
#define DELTA_AT(stage) (LSE_AT(stage) + 4 * FB_BN)
#define BARRIERS_AT LSE_AT(FB_BUFFERS)
#define KV_FULL (BARRIERS_AT)
#define KV_EMPTY (BARRIERS_AT + 8)
#define S_FULL(stage) (BARRIERS_AT + 16 + 8 * (stage))
#define S_EMPTY(stage) (S_FULL(stage) + 8 * S_STAGES)
#define P_FULL(stage) (S_FULL(stage) + 16 * S_STAGES)
#define P_EMPTY(stage) (S_FULL(stage) + 24 * S_STAGES)
#define Q_FULL(stage) (S_FULL(0) + 32 * S_STAGES + 8 * (stage))
#define Q_EMPTY(stage) (Q_FULL(stage) + 8 * FB_BUFFERS)
#define O_FULL(stage) (Q_FULL(stage) + 16 * FB_BUFFERS)
#define O_EMPTY(stage) (Q_FULL(stage) + 24 * FB_BUFFERS)
#define PASSING_AT (Q_FULL(0) + 32 * FB_BUFFERS)
#define ADDING_AT (PASSING_AT + 16 * FB_BUFFERS) // for the warpgroup of dQ
#define PLACES_AT (ADDING_AT + 16 * S_STAGES)

typedef struct fb_maps {
    fb_map q, k, v, dout;
} fb_maps;

FB_FN place *place_of(unsigned char *memory, fb_u32 n) { return (place *)(memory + PLACES_AT) + n % 2; }
FB_FN passing *passing_of(unsigned char *memory, int stage) { return (passing *)(memory + PASSING_AT + 16 * stage); }
FB_FN passing *adding_of(unsigned char *memory, int stage) { return (passing *)(memory + ADDING_AT + 16 * stage); }

FB_FN void make_barriers(fb_u32 base) {
    barrier_init(base + KV_FULL, 1), barrier_init(base + KV_EMPTY, 3 * FB_RELEASES);
    for (int n = 0; n < S_STAGES; n++) {
        barrier_init(base + S_FULL(n), SPLIT ? 128 : 256);
        barrier_init(base + S_EMPTY(n), FB_RELEASES);
        barrier_init(base + P_FULL(n), 128), barrier_init(base + P_EMPTY(n), FB_RELEASES);
    }
    for (int n = 0; n < FB_BUFFERS; n++) {
        barrier_init(base + Q_FULL(n), 1), barrier_init(base + Q_EMPTY(n), 2 * FB_RELEASES);
        barrier_init(base + O_FULL(n), 1), barrier_init(base + O_EMPTY(n), 2 * FB_RELEASES);
    }
    barriers_made();
}

// ---- The loader -----------------------------------------------------------------------------------------------

// Tiles of queries, over the heads of the group one after the other.
typedef struct step {
    int head, tile;
} step;

FB_FN step step_to(int head, int tile) {
    step s = {head, tile};
    return s;
}

FB_FN step live(const fb__args *a, const work *w, step at, int begin, int end) {
    for (;; at.tile++) {
        if (at.tile >= end)
            at.head++, at.tile = begin;
        if (at.head >= (int)a->group || begin >= end) {
            at.head = (int)a->group;
            return at;
        }
#if FB_OPTIONS & FB_BLOCKED
        extras x = extras_of(a, w->b, w->head + at.head);
        if (blocks_state(a, x.blocks, at.tile * FB_BN, clamp((at.tile + 1) * FB_BN, 0, w->len_q), w->first,
                         clamp(w->first + KEYS, 0, w->len_k)) == 0)
            continue;
#endif
        return at;
    }
}

FB_FN void load_queries(const fb__args *a, const fb_maps *maps, unsigned char *memory, const place *at, ring *now,
                        step from, int begin, int end) {
    const work *w = &at->w;
    step s = from;
    const fb_u32 base = smem_address(memory);
    const int b = a->cu_q ? 0 : (int)w->b, y = (int)w->row_q;
    const int exist = a->cu_q ? (int)(a->total_q - w->row_q) : (int)a->len_q;
    while (s.head < (int)a->group) {
        const step next = live(a, w, step_to(s.head, s.tile + 1), begin, end);
        const int first = s.tile * FB_BN, head = w->head + s.head;
        int flags = (next.head < (int)a->group ? 0 : LAST) | (s.head == from.head && s.tile == from.tile ? FIRST : 0);
        if (!covers(w->all, first, FB_BN))
            flags |= EDGE;
        if (first < at->seen_lo || min(first + FB_BN, exist) > at->seen_hi)
            flags |= UNSEEN;
        const fb_i64 stat = padded_stat(a, w, head, first);
        barrier_wait(base + Q_EMPTY(now->stage), now->parity);
        passing *p = passing_of(memory, now->stage);
        p->first = first, p->flags = flags, p->head = head;
        barrier_expect(base + Q_FULL(now->stage), Q_BYTES + 4 * FB_BN);
        panels_load(base + Q_AT + now->stage * Q_BYTES, &maps->q, base + Q_FULL(now->stage), y + first, head, b, FB_BN,
                    FB_D);
        bytes_load(base + LSE_AT(now->stage), a->partial_lse + stat, 4 * FB_BN, base + Q_FULL(now->stage));
        barrier_wait(base + O_EMPTY(now->stage), now->parity);
        barrier_expect(base + O_FULL(now->stage), O_BYTES + 4 * FB_BN);
        panels_load(base + O_AT + now->stage * O_BYTES, &maps->dout, base + O_FULL(now->stage), y + first, head, b,
                    FB_BN, FB_DV);
        bytes_load(base + DELTA_AT(now->stage), a->delta + stat, 4 * FB_BN, base + O_FULL(now->stage));
        ring_next(now);
        s = next;
    }
}

FB_FN void load_all(const fb__args *a, const fb_maps *maps, unsigned char *memory) {
    const fb_u32 base = smem_address(memory), tiles = (fb_u32)a->tiles;
    ring now = {0, 1};
    fb_u32 n = 0;
    for (fb_u32 round = 0;; round++) {
        const bool ends = rounds_end(a, round);
        const fb_u32 x = ends ? 0 : tile_of_round(a, round);
        if (!ends && x >= tiles)
            continue;
        barrier_wait(base + KV_EMPTY, n % 2 ^ 1);
        place *at = place_of(memory, n);
        at->end = ends;
        if (ends) {
            barrier_arrive(base + KV_FULL);
            return;
        }
        if (!work_find(a, x, KEYS, true, &at->w)) // nobody has been told of it: the place is written again
            continue;
        n++;
        const work *w = &at->w;
        const fb__range seen = fb__band_queries_of(w->band, w->first, w->first + KEYS);
        const int begin = (int)(seen.lo / FB_BN), end = (int)((seen.hi + FB_BN - 1) / FB_BN);
        const step s = live(a, w, step_to(0, begin), begin, end);
        at->any = s.head < (int)a->group;
        if (!at->any) {
            barrier_arrive(base + KV_FULL);
            continue;
        }
        const fb__range queries = fb__band_queries_of(w->band, 0, w->band.len_k),
                        keys = fb__band_keys_of(w->band, 0, w->band.len_q);
        at->seen_lo = (int)queries.lo, at->seen_hi = (int)queries.hi;
        at->own_lo = (int)keys.lo, at->own_hi = (int)keys.hi;
        barrier_expect(base + KV_FULL, K_BYTES + V_BYTES);
        const int y = (int)w->row_k + w->first, b = a->cu_k ? 0 : (int)w->b;
        panels_load(base, &maps->k, base + KV_FULL, y, w->kv, b, KEYS, FB_D);
        panels_load(base + V_AT, &maps->v, base + KV_FULL, y, w->kv, b, KEYS, FB_DV);
        load_queries(a, maps, memory, at, &now, s, begin, end);
    }
}

// ---- Cells ----------------------------------------------------------------------------------------------------

// S' = K Q^T, dP' = V dO^T: 64 keys from `keys` on with FB_BN queries, over COLUMNS.
FB_FN void begin_cells(float (*s)[4], fb_u32 keys, fb_u32 queries, const int COLUMNS) {
#pragma unroll
    for (int k = 0; k < COLUMNS / 16; k++)
        products_nt(FB_BN, s[0], operand(keys + k / 4 * FB_PANEL_BYTES(KEYS) + k % 4 * 32, 16),
                    operand(queries + k / 4 * FB_PANEL_BYTES(FB_BN) + k % 4 * 32, 16), k > 0);
    products_commit();
}

// d += P B of 64 rows and FB_BN terms; B is a tile of COLUMNS, which at most 128 at a time fit into an instruction of a
// block of 512 threads.
FB_FN void begin_sums(float (*d)[4], fb_u32 (*p)[4], fb_u32 B, const int COLUMNS) {
#pragma unroll
    for (int k = 0; k < FB_BN / 16; k++) {
        const fb_u64 b = operand(B + k * 2048, FB_PANEL_BYTES(FB_BN));
        const fb_u64 rest = operand(B + k * 2048 + 2 * FB_PANEL_BYTES(FB_BN), FB_PANEL_BYTES(FB_BN));
        if (COLUMNS == 64)
            products_rn(64, d[0], p[k], b, 1);
        else if (COLUMNS == 96)
            products_rn(96, d[0], p[k], b, 1);
        else
            products_rn(128, d[0], p[k], b, 1);
        if (COLUMNS == 192)
            products_rn(64, d[16], p[k], rest, 1);
        if (COLUMNS == 256)
            products_rn(128, d[16], p[k], rest, 1);
    }
    products_commit();
}

// Cells that do not count become `out`. row: the warp's first key.
FB_FN void leave_out(const work *w, float (*s)[4], int row, passing tile, float out) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int j = row + half * 8 + FB_LANE / 4, c = FB_LANE % 4 * 2;
        int lo, hi;
        queries_of_key(w, j, tile.first + c, &lo, &hi);
#pragma unroll
        for (int n = 0; n < FB_BN / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + e < lo || n * 8 + e >= hi)
                    s[n][2 * half + e] = out;
    }
}

// Does the band leave out cells of the warp's 16 keys?
FB_FN bool at_edge(const work *w, int row, int q0) {
    return !(q0 >= row + 15 - w->hi_off + 1 && q0 + FB_BN <= row - w->lo_off + 1 && q0 + FB_BN <= w->band.len_q &&
             row + 16 <= w->band.len_k);
}

FB_FN void leave_out_at_edges(const work *w, float (*s)[4], passing tile, float out) {
    const int row = w->first + KEYS_OF_WARP;
    if (tile.flags & EDGE && __any_sync(~0u, at_edge(w, row, tile.first)))
        leave_out(w, s, row, tile, out);
}

// From S' to P'. `weights` becomes, as operands, what dS' is dP' - delta times: P' times the derivative of the softcap.
// Without one it is P' itself, and left to whoever makes operands of that.
FB_FN void make_p(const fb__args *a, const work *w, float (*s)[4], fb_u32 (*weights)[4], const float *lse,
                  passing tile) {
#if FB_OPTIONS & FB_SOFTCAP
    // With y = 1 / (1 + e^2x), tanh x is 1 - 2 y, and its derivative 4 y (1 - y).
    const float inner = a->scale * a->softcap_inverse * (2 * FB_LOG2E), outer = a->softcap * FB_LOG2E, OUT = 2;
#pragma unroll
    for (int n = 0; n < FB_BN / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[n][e] = reciprocal(1 + exp2_fast(s[n][e] * inner));
    leave_out_at_edges(w, s, tile, OUT);
#pragma unroll
    for (int n = 0; n < FB_BN / 8; n++) {
        const float2 top = *(const float2 *)(lse + n * 8 + FB_LANE % 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float slopes[2];
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float *cell = &s[n][2 * half + e];
                const float y = *cell;
                slopes[e] = 4 * y * (1 - y);
                *cell = y == OUT ? 0 : exp2_fast(fmaf(outer, fmaf(-2, y, 1), e ? -top.y : -top.x));
            }
            weights[n / 2][n % 2 * 2 + half] = pack(s[n][2 * half] * slopes[0], s[n][2 * half + 1] * slopes[1]);
        }
    }
#else
    leave_out_at_edges(w, s, tile, -FB_INFINITY);
#pragma unroll
    for (int n = 0; n < FB_BN / 8; n++) {
        const float2 top = *(const float2 *)(lse + n * 8 + FB_LANE % 4 * 2);
#pragma unroll
        for (int e = 0; e < 4; e++)
            s[n][e] = exp2_fast(fmaf(s[n][e], a->scale_log2, e % 2 ? -top.y : -top.x));
    }
#endif
}

FB_FN float half_of(fb_u32 pair, int e) { return to_float((element)(pair >> 16 * e)); }

// From dP' to dS'.
FB_FN void make_ds(float (*s)[4], fb_u32 (*weights)[4], const float *delta) {
#pragma unroll
    for (int n = 0; n < FB_BN / 8; n++) {
        const float2 sum = *(const float2 *)(delta + n * 8 + FB_LANE % 4 * 2);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const fb_u32 pair = weights[n / 2][n % 2 * 2 + half];
            float *d = &s[n][2 * half];
            d[0] = half_of(pair, 0) * (d[0] - sum.x), d[1] = half_of(pair, 1) * (d[1] - sum.y);
        }
    }
}

// dS' of this warpgroup's 64 keys, for the warpgroup of dQ. Rows of keys, so that dQ sums over rows of both operands.
FB_FN void store_ds(fb_u32 S, fb_u32 (*ds)[4]) {
    const int row = KEYS_OF_WARP + FB_LANE % 16;
#pragma unroll
    for (int k = 0; k < FB_BN / 16; k++)
        matrices_store(S + k / 4 * FB_PANEL_BYTES(KEYS) + row * 128 + (((k % 4 * 2 + FB_LANE / 16) ^ row % 8) << 4),
                       ds[k][0], ds[k][1], ds[k][2], ds[k][3]);
    written_for_async();
}

// Tile number n of all that pass by this block: its stage, and the parity of that.
FB_FN int stage_of(fb_u32 n) { return (int)(n % FB_BUFFERS); }
FB_FN fb_u32 parity_of(fb_u32 n) { return n / FB_BUFFERS % 2; }

// ---- Ends -----------------------------------------------------------------------------------------------------

// Keys of the block that no query sees.
FB_FN void clear_keys(const place *at, fb_u32 base) {
    const int first = at->w.first;
    if (first >= at->own_lo && first + KEYS <= at->own_hi)
        return;
    clear_rows(base, first, at->own_lo, at->own_hi, KEYS, FB_PANELS(FB_D), 2);
    clear_rows(base + V_AT, first, at->own_lo, at->own_hi, KEYS, FB_PANELS(FB_DV), 2);
}

FB_FN bool write_rows(const fb__args *a, const work *w, fb__view to, float (*x)[4], float factor, int columns,
                      bool pieces, const int COLUMNS) {
    const int row = w->first + KEYS_OF_WARP;
    if (!to.at)
        return false;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int j = row + half * 8 + FB_LANE / 4;
        const bool exists = j < w->len_k;
        element *at = (element *)row_at(key_rows(to, w), exists ? j : 0);
#pragma unroll
        for (int n = 0; n < COLUMNS / 8; n += 4) {
            fb_u32 u[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                u[i] = pack(x[n + i][2 * half] * factor, x[n + i][2 * half + 1] * factor);
            quad_transpose(u);
            if (exists)
                store_eight(at, (n + FB_LANE % 4) * 8, columns, u, pieces);
        }
    }
    return any_nan(x, COLUMNS / 8);
}

// ---- dQ -------------------------------------------------------------------------------------------------------

// 64 queries x 64 columns of dS K over the block's keys. Where D has 32 columns more, those past them are zeros.
FB_FN void begin_dq(float (*d)[4], fb_u32 S, fb_u32 K, bool add) {
#pragma unroll
    for (int k = 0; k < KEYS / 16; k++)
        products_tn(64, d[0], operand(S + k * 2048, FB_PANEL_BYTES(64)), operand(K + k * 2048, FB_PANEL_BYTES(KEYS)),
                    add || k > 0);
}

FB_FN void end_dq(float (*d)[4]) {
    products_commit();
    products_wait(0);
    settle(d[0], 32);
}

// What a burst may be before the next: 4 KB of a warpgroup, this many clocks apart.
#ifndef FB_PACE
#define FB_PACE 60
#endif

FB_FN void add_dq(float *to, float (*d)[4], const int COUNT) {
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        add4(to + i * 512, d[i][0], d[i][1], d[i][2], d[i][3]);
        if (i % 2 && FB_PACE) {
            const fb_u32 from = clock_now();
            while (clock_now() - from < FB_PACE)
                ;
        }
    }
}

FB_FN void queries_of_block(const fb__args *a, unsigned char *memory) {
    const fb_u32 base = smem_address(memory);
    ring cells = {0, 0};
    float d[8][4];
    clear<FAST>(d, 8);
    for (fb_u32 n = 0;; n ^= 1) {
        barrier_wait(base + KV_FULL, n);
        const place *at = place_of(memory, n);
        if (at->end)
            return;
        for (bool last = !at->any; !last;) {
            const fb_u32 S = base + S_AT + cells.stage * S_BYTES;
            barrier_wait(base + S_FULL(cells.stage), cells.parity);
            const passing tile = *adding_of(memory, cells.stage);
            last = tile.flags & LAST;
            float *to = a->partial + padded_stat(a, &at->w, tile.head, tile.first) * (FB_PANELS(FB_D) * 64);
            to += threadIdx.x % 128 * 4;
#pragma unroll 1
            for (int panel = 0; panel < QUERY_PANELS; panel++)
#pragma unroll 1
                for (int c = 0; c < FB_PANELS(FB_D); c++, to += 4096) {
                    settle(d[0], 32);
                    products_begin();
                    begin_dq(d, S + panel * FB_PANEL_BYTES(KEYS), base + c * FB_PANEL_BYTES(KEYS), false);
                    end_dq(d);
                    if (panel == QUERY_PANELS - 1 && c == FB_PANELS(FB_D) - 1)
                        release(base + S_EMPTY(cells.stage));
                    if (!a->dq.at)
                        continue;
                    add_dq(to, d, 4);
                    if (FB_D % 64 == 0 || c < FB_D / 64)
                        add_dq(to + 2048, d + 4, 4);
                }
            cells.stage ^= 1, cells.parity ^= !cells.stage;
        }
        release(base + KV_EMPTY);
    }
}
