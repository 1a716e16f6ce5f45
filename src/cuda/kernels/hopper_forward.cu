// O and LSE on sm_90a. The algorithm is that of forward.cu; this one keeps the tensor cores busy while
// exponentials are made, and leaves all copies to TMA.
//
// A block has FB_WM / 4 warpgroups that attend, 64 query rows each, and one more of which one thread loads.
// It stays, and takes a tile of FB_BM query rows in each round: the loader is ahead of the others by up to
// FB_BUFFERS tiles of keys and one tile of queries, so that a tile of queries begins while the last one ends.
//
//     loader: for each tile of queries: where it lies, Q; for each tile of keys that some row may see: K, V
//     others: S = Q K(0)^T, P
//             for each next tile of keys n:  S = Q K(n)^T and O += P V(n - 1) begin; when S is there, its P
//             is made while O is still summed up; O is rescaled if a maximum has grown O += P V(last)
//
// Shared memory: Q by warpgroups [64][D], FB_BUFFERS times K [BN][D] and V [BN][DV], the barriers, two places
// for what the loader says about a tile of queries, FB_BUFFERS for a tile of keys. Barriers: Q and the K and
// V of each stage are full when their bytes have come, empty when each warpgroup has arrived. A place of a
// tile of queries is written when Q of the tile before is empty: then all warpgroups are in that one or
// further, and none reads the place any more, which is that of the tile before it.
#include "hopper_tiles.cuh"
#include "mend.cuh"
#include "softmax.cuh"

#define WARPGROUPS (FB_WM / 4)
#define Q_BYTES FB_SWIZZLED_BYTES(64, FB_D)
#define K_BYTES FB_SWIZZLED_BYTES(FB_BN, FB_D)
#define V_BYTES FB_SWIZZLED_BYTES(FB_BN, FB_DV)
#define K_AT (WARPGROUPS * Q_BYTES)
#define V_AT (K_AT + FB_BUFFERS * K_BYTES)
#define BARRIERS_AT (V_AT + FB_BUFFERS * V_BYTES)
#define Q_FULL (BARRIERS_AT)
#define Q_EMPTY (BARRIERS_AT + 8)
#define K_FULL(stage) (BARRIERS_AT + 16 + 8 * (stage))
#define K_EMPTY(stage) (K_FULL(stage) + 8 * FB_BUFFERS)
#define V_FULL(stage) (K_FULL(stage) + 16 * FB_BUFFERS)
#define V_EMPTY(stage) (K_FULL(stage) + 24 * FB_BUFFERS)
#define PASSING_AT (BARRIERS_AT + 16 + 32 * FB_BUFFERS)
#define PLACES_AT (PASSING_AT + 16 * FB_BUFFERS)

typedef struct fb_maps {
    fb_map q, k, v;
} fb_maps;

FB_FN place *place_of(unsigned char *memory, fb_u32 n) { return (place *)(memory + PLACES_AT) + n % 2; }
FB_FN passing *passing_of(unsigned char *memory, int stage) { return (passing *)(memory + PASSING_AT) + stage; }

// ---- The loader
// -----------------------------------------------------------------------------------------------

// All tiles of keys of a tile of queries.
FB_FN void load_keys(const fb__args *a, const fb_maps *maps, unsigned char *memory, const place *at, ring *kv, int tile,
                     int end) {
    const work *w = &at->w;
    const fb_u32 base = smem_address(memory);
    const int b = a->cu_k ? 0 : (int)w->b, y = (int)w->row_k;
    while (tile < end) {
        const int first = tile * FB_BN, next = live_keys(a, w, tile + 1, end);
        int flags = next < end ? 0 : LAST;
        if (!covers(w->all, first, FB_BN))
            flags |= EDGE;
        if (first < at->seen_lo || min(first + FB_BN, (int)(a->cu_k ? a->total_k - y : a->len_k)) > at->seen_hi)
            flags |= UNSEEN;
        barrier_wait(base + K_EMPTY(kv->stage), kv->parity);
        passing_of(memory, kv->stage)->first = first, passing_of(memory, kv->stage)->flags = flags;
        barrier_expect(base + K_FULL(kv->stage), K_BYTES);
        panels_load(base + K_AT + kv->stage * K_BYTES, &maps->k, base + K_FULL(kv->stage), y + first, w->kv, b, FB_BN,
                    FB_D);
        barrier_wait(base + V_EMPTY(kv->stage), kv->parity);
        barrier_expect(base + V_FULL(kv->stage), V_BYTES);
        panels_load(base + V_AT + kv->stage * V_BYTES, &maps->v, base + V_FULL(kv->stage), y + first, w->kv, b, FB_BN,
                    FB_DV);
        ring_next(kv);
        tile = next;
    }
}

FB_FN void load_all(const fb__args *a, const fb_maps *maps, unsigned char *memory) {
    const fb_u32 base = smem_address(memory), tiles = (fb_u32)a->tiles;
    ring kv = {0, 1};
    fb_u32 n = 0;
    for (fb_u32 round = 0;; round++) {
        const bool end = rounds_end(a, round);
        const fb_u32 x = end ? 0 : tile_of_round(a, round);
        if (!end && x >= tiles)
            continue;
        barrier_wait(base + Q_EMPTY, n % 2 ^ 1);
        place *at = place_of(memory, n);
        at->end = end;
        if (end) {
            barrier_arrive(base + Q_FULL);
            return;
        }
        if (!work_find(a, x, FB_BM, false, &at->w)) {
            // The place is written again: nobody has been told of it. Q is still empty, in the same phase.
            continue;
        }
        n++;
        int tile, last;
        key_tiles(a, &at->w, &tile, &last);
        at->any = tile < last;
        if (!at->any) {
            barrier_arrive(base + Q_FULL);
            continue;
        }
        const fb__range seen = fb__band_keys_of(at->w.band, 0, at->w.band.len_q);
        at->seen_lo = (int)seen.lo, at->seen_hi = (int)seen.hi;
        barrier_expect(base + Q_FULL, WARPGROUPS * Q_BYTES);
        for (int g = 0; g < WARPGROUPS; g++)
            panels_load(base + g * Q_BYTES, &maps->q, base + Q_FULL, (int)at->w.row_q + at->w.first + 64 * g,
                        at->w.head, a->cu_q ? 0 : (int)at->w.b, 64, FB_D);
        load_keys(a, maps, memory, at, &kv, tile, last);
    }
}

// ---- The softmax
// ----------------------------------------------------------------------------------------------

typedef struct state {
    float o[FB_DV / 8][4], s[FB_BN / 8][4];
    float m[2], l[2], scale[2]; // scale: what O is still to be multiplied by
} state;

// What does not count becomes -inf. row: the warp's first, k: the tile's first key.
FB_FN void leave_out(const work *w, state *t, int row, int k) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row + half * 8 + FB_LANE / 4, c = FB_LANE % 4 * 2;
        int lo, hi;
        keys_of_row(w, r, k + c, &lo, &hi);
#pragma unroll
        for (int n = 0; n < FB_BN / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++)
                if (n * 8 + e < lo || n * 8 + e >= hi)
                    t->s[n][2 * half + e] = -FB_INFINITY;
    }
}

// Does the band leave out cells of the warp's 16 rows?
FB_FN bool at_edge(const work *w, int row, int k) {
    return !(k + FB_BN <= row + w->hi_off && k >= row + 15 + w->lo_off && row + 16 <= w->band.len_q &&
             k + FB_BN <= w->band.len_k);
}

FB_FN float factor_of(const fb__args *a) { return FB_OPTIONS & FB_SOFTCAP ? 1 : a->scale_log2; }

// Before the exponentials: S * *factor - m is what P is 2 to the power of. True if O has to be rescaled.
FB_FN bool raise_maximum(const fb__args *a, state *t, float *factor) {
    bool grown = false, fused = true;
    float top[2];
    *factor = factor_of(a);
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float x = t->s[0][2 * half], y = t->s[0][2 * half + 1];
#pragma unroll
        for (int n = 1; n < FB_BN / 8; n++)
            x = fmaxf(x, t->s[n][2 * half]), y = fmaxf(y, t->s[n][2 * half + 1]);
        top[half] = quad_max(fmaxf(x, y)) * *factor;
        grown |= top[half] > t->m[half] + LAG;
        fused &= fabsf(top[half]) <= FUSED_LIMIT || top[half] == -FB_INFINITY;
    }
    if (!__any_sync(~0u, grown || !fused))
        return false;
    if (!__all_sync(~0u, fused)) {
#pragma unroll
        for (int n = 0; n < FB_BN / 8; n++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                t->s[n][e] *= *factor;
        *factor = 1;
    }
#pragma unroll
    for (int half = 0; half < 2; half++) {
        float to = fmaxf(t->m[half], top[half]), shift = to == -FB_INFINITY ? 0 : to;
        t->scale[half] = exp2_fast(t->m[half] - shift);
        t->m[half] = to;
        t->l[half] *= t->scale[half];
    }
    return true;
}

#if FB_POLY
// 2^x for x <= 2^7 without the unit for special functions, which alone would take as long as the products: to
// 3e-6, so that l, and with it LSE, stays what it is. Below -127 it is 0; NaN stays NaN.
FB_FN float exp2_by_products(float x) {
    const float least = max_or_nan(x, -127.f);
    const float r = __fadd_rd(least, 12582912.f), f = least - (r - 12582912.f);
    float y = fmaf(f, 0.01342668f, 0.05224247f);
    y = fmaf(y, f, 0.24128020f), y = fmaf(y, f, 0.69304484f), y = fmaf(y, f, 1.f);
    return y * __uint_as_float((__float_as_uint(r) << 23) + 0x3f800000u);
}
#endif

// S becomes P.
FB_FN void exponentials(state *t, float factor) {
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const float shift = t->m[half] == -FB_INFINITY ? 0 : t->m[half];
        float sum[2] = {0, 0};
#pragma unroll
        for (int n = 0; n < FB_BN / 8; n++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                float x = fmaf(t->s[n][2 * half + e], factor, -shift);
#if FB_POLY
                x = n % FB_POLY == FB_POLY - 1 ? exp2_by_products(x) : exp2_fast(x);
#else
                x = exp2_fast(x);
#endif
                t->s[n][2 * half + e] = x;
                sum[e] += x;
            }
        t->l[half] += sum[0] + sum[1];
    }
}

// From S of a tile to P. True if O has to be rescaled.
FB_FN bool soften(const fb__args *a, const work *w, state *t, int row, passing tile) {
    float factor;
#if FB_OPTIONS & FB_SOFTCAP
    const float inner = a->scale * a->softcap_inverse, outer = a->softcap * FB_LOG2E;
#pragma unroll
    for (int n = 0; n < FB_BN / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            t->s[n][e] = outer * tanh_fast(t->s[n][e] * inner);
#endif
    if (tile.flags & EDGE && __any_sync(~0u, at_edge(w, row, tile.first)))
        leave_out(w, t, row, tile.first);
    const bool grown = raise_maximum(a, t, &factor);
    exponentials(t, factor);
    made_before(t->l[0] < 0 || t->l[1] < 0);
    return grown;
}

// ---- The products
// ---------------------------------------------------------------------------------------------

FB_FN void begin_scores(state *t, fb_u32 Q, fb_u32 K) {
#pragma unroll
    for (int k = 0; k < FB_D / 16; k++)
        products_nt(FB_BN, t->s[0], operand(Q + k / 4 * FB_PANEL_BYTES(64) + k % 4 * 32, 16),
                    operand(K + k / 4 * FB_PANEL_BYTES(FB_BN) + k % 4 * 32, 16), k > 0);
    products_commit();
}

FB_FN void begin_out(state *t, fb_u32 (*p)[4], fb_u32 V) {
#pragma unroll
    for (int k = 0; k < FB_BN / 16; k++)
        products_rn(FB_DV, t->o[0], p[k], operand(V + k * 2048, FB_PANEL_BYTES(FB_BN)), 1);
    products_commit();
}

FB_FN void wait_values(const place *at, unsigned char *memory, ring now, passing tile) {
    barrier_wait(smem_address(memory) + V_FULL(now.stage), now.parity);
    if (tile.flags & UNSEEN)
        clear_rows(smem_address(memory) + V_AT + now.stage * V_BYTES, tile.first, at->seen_lo, at->seen_hi, FB_BN,
                   FB_PANELS(FB_DV), WARPGROUPS);
}

// Warpgroups take turns to begin products, so that one's exponentials lie beside another's products.
FB_FN void take_turn(int group) {
#if FB_TURNS
    meet(2 + group, 256);
#endif
}
FB_FN void pass_turn(int group) {
#if FB_TURNS
    meet_later(2 + (group + 1) % WARPGROUPS, 256);
#endif
}

FB_FN void rescale(state *t) {
#pragma unroll
    for (int n = 0; n < FB_DV / 8; n++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            t->o[n][e] *= t->scale[e / 2];
}

// One tile of queries; `kv` is the stage of its first keys, and afterwards that of the next tile's.
FB_FN void attend(const fb__args *a, const place *at, state *t, unsigned char *memory, ring *kv) {
    const fb_u32 base = smem_address(memory);
    const int group = warpgroup() - 1, row = at->w.first + (FB_WARP - 4) * 16;
    const fb_u32 Q = base + group * Q_BYTES;
    fb_u32 p[FB_BN / 16][4];

    barrier_wait(base + K_FULL(kv->stage), kv->parity);
    passing tile = *passing_of(memory, kv->stage);
    products_begin();
    begin_scores(t, Q, base + K_AT + kv->stage * K_BYTES);
    products_wait(0);
    settle(t->s[0], FB_BN / 2);
    release(base + K_EMPTY(kv->stage));
    soften(a, &at->w, t, row, tile); // O is 0
    to_steps<FAST>(p, t->s, FB_BN);
    while (!(tile.flags & LAST)) {
        const ring now = *kv;
        ring_next(kv);
        barrier_wait(base + K_FULL(kv->stage), kv->parity);
        const passing next = *passing_of(memory, kv->stage);
        wait_values(at, memory, now, tile);
        take_turn(group);
        products_begin();
        begin_scores(t, Q, base + K_AT + kv->stage * K_BYTES);
        begin_out(t, p, base + V_AT + now.stage * V_BYTES);
        pass_turn(group);
        products_wait(1);
        settle(t->s[0], FB_BN / 2);
        release(base + K_EMPTY(kv->stage));
        const bool grown = soften(a, &at->w, t, row, next);
        products_wait(0);
        settle(t->o[0], FB_DV / 2);
        release(base + V_EMPTY(now.stage));
        if (grown)
            rescale(t);
        to_steps<FAST>(p, t->s, FB_BN);
        tile = next;
    }
    release(base + Q_EMPTY);
    wait_values(at, memory, *kv, tile);
    products_begin();
    begin_out(t, p, base + V_AT + kv->stage * V_BYTES);
    products_wait(0);
    settle(t->o[0], FB_DV / 2);
    release(base + V_EMPTY(kv->stage));
    ring_next(kv);
}

FB_FN void write_rows(const fb__args *a, const work *w, state *t) {
    const int row = w->first + (FB_WARP - 4) * 16;
    float factors[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        const int r = row + half * 8 + FB_LANE / 4;
        const float l = quad_sum(t->l[half]);
        const bool exists = r < w->rows;
        factors[half] = exists ? close_row(a, w, r, t->m[half], l, true) : 0;
        element *to = (element *)row_at(query_rows(a->out, w), exists ? r : 0);
#pragma unroll
        for (int n = 0; n < FB_DV / 8; n += 4) {
            fb_u32 u[4];
#pragma unroll
            for (int i = 0; i < 4; i++)
                u[i] =
                    l == 0 ? 0 : pack(t->o[n + i][2 * half] * factors[half], t->o[n + i][2 * half + 1] * factors[half]);
            quad_transpose(u);
            if (exists)
                store_eight(to, (n + FB_LANE % 4) * 8, a->head_dim_v, u, a->flags & FB_OUT16);
        }
    }
    if (__any_sync(~0u, any_nan(t->o, FB_DV / 8)))
        mend_out(a, w, row, t->m[0], t->m[1], factors[0], factors[1]);
}

extern "C" __global__ void __launch_bounds__(FB_THREADS, 1)
    fb_hopper_forward(const __grid_constant__ fb__args a, const __grid_constant__ fb_maps maps) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const fb_u32 base = smem_address(memory);
    if (threadIdx.x == 0) {
        barrier_init(base + Q_FULL, 1), barrier_init(base + Q_EMPTY, WARPGROUPS * FB_RELEASES);
        for (int n = 0; n < FB_BUFFERS; n++) {
            barrier_init(base + K_FULL(n), 1), barrier_init(base + K_EMPTY(n), WARPGROUPS * FB_RELEASES);
            barrier_init(base + V_FULL(n), 1), barrier_init(base + V_EMPTY(n), WARPGROUPS * FB_RELEASES);
        }
        barriers_made();
    }
    __syncthreads();
    if (FB_WARPGROUP == 0) {
        registers_lower(FB_LOADER_REGISTERS);
        if (threadIdx.x == 0)
            load_all(&a, &maps, memory);
        return;
    }
    registers_raise(FB_REGISTERS);
#if FB_TURNS
    if (FB_WARPGROUP == WARPGROUPS) // the first turn is the first warpgroup's
        meet_later(2, 256);
#endif
    state t;
    ring kv = {0, 0};
    clear<FAST>(t.s, FB_BN / 8);
    for (fb_u32 n = 0;; n ^= 1) {
        barrier_wait(base + Q_FULL, n);
        const place *at = place_of(memory, n);
        if (at->end)
            return;
        clear<FAST>(t.o, FB_DV / 8);
        t.m[0] = t.m[1] = -FB_INFINITY, t.l[0] = t.l[1] = 0;
        if (at->any)
            attend(&a, at, &t, memory, &kv);
        else
            release(base + Q_EMPTY);
        write_rows(&a, &at->w, &t);
    }
}
