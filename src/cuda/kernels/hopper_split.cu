// dQ, dK and dV on sm_90a for wide heads: dK and dV of 64 keys fill the registers of a warpgroup each. So a block has
// 64 keys, and its warpgroups have roles: one loads, one makes P' and dV, one dS' and dK, one dQ. See
// hopper_backward.cu for the rest. P' goes from one to the other through shared memory, as the fragments that it is.
//
//     P and dV:    P' from S'   beside dV of the tile before;    S' of the next tile, dV begin
//     dS and dK:   dS' from dP', P'   beside dK of the tile before;   dP' of the next tile, dK begin
//
// Rows that take no part are cleared in Q by the first of the two before S', ahead of P', for which the second waits
// before it uses Q; in dO by both together.
#include "hopper_gradients.cuh"

typedef struct sums {
    float d[(FB_D > FB_DV ? FB_D : FB_DV) / 8][4], s[FB_BN / 8][4];
} sums;

FB_FN fb_u32 place_of_p(fb_u32 base, fb_u32 n) { return base + P_AT + n % S_STAGES * P_BYTES + threadIdx.x % 128 * 16; }

FB_FN void wait_queries(const place *at, unsigned char *memory, fb_u32 n) {
    barrier_wait(smem_address(memory) + Q_FULL(stage_of(n)), parity_of(n));
    const passing p = *passing_of(memory, stage_of(n));
    if (p.flags & UNSEEN)
        clear_rows(smem_address(memory) + Q_AT + stage_of(n) * Q_BYTES, p.first, at->seen_lo, at->seen_hi, FB_BN,
                   FB_PANELS(FB_D), 1);
}

// dO, whose tile is described beside Q.
FB_FN void wait_gradients(const place *at, unsigned char *memory, fb_u32 n) {
    barrier_wait(smem_address(memory) + Q_FULL(stage_of(n)), parity_of(n));
    barrier_wait(smem_address(memory) + O_FULL(stage_of(n)), parity_of(n));
    const passing p = *passing_of(memory, stage_of(n));
    if (p.flags & UNSEEN)
        clear_rows(smem_address(memory) + O_AT + stage_of(n) * O_BYTES, p.first, at->seen_lo, at->seen_hi, FB_BN,
                   FB_PANELS(FB_DV), 2);
}

// P' and dV.
FB_FN void attend(const fb__args *a, const place *at, sums *t, unsigned char *memory, fb_u32 *count) {
    const fb_u32 base = smem_address(memory);
    fb_u32 p[FB_BN / 16][4], weights[FB_BN / 16][4];
    fb_u32 n = *count;

    wait_queries(at, memory, n);
    products_begin();
    begin_cells(t->s, base, base + Q_AT + stage_of(n) * Q_BYTES, FB_D);
    products_wait(0);
    settle(t->s[0], FB_BN / 2);
    for (;; n++) {
        const passing tile = *passing_of(memory, stage_of(n));
        make_p(a, &at->w, t->s, weights, (const float *)(memory + LSE_AT(stage_of(n))), tile);
        made_before(!all_bits((const fb_u32 *)t->s[0], FB_BN / 2));
        products_wait(0);
        settle(t->d[0], FB_DV / 2);
        if (!(tile.flags & FIRST))
            release(base + O_EMPTY(stage_of(n + FB_BUFFERS - 1)));
        to_steps<FAST>(p, t->s, FB_BN);
        fb_u32(*sent)[4] = FB_OPTIONS & FB_SOFTCAP ? weights : p;
        barrier_wait(base + P_EMPTY(n % S_STAGES), n / S_STAGES % 2 ^ 1);
#pragma unroll
        for (int k = 0; k < FB_BN / 16; k++)
            store16(place_of_p(base, n) + k * 2048, make_uint4(sent[k][0], sent[k][1], sent[k][2], sent[k][3]));
        barrier_arrive(base + P_FULL(n % S_STAGES));
        release(base + Q_EMPTY(stage_of(n)));
        wait_gradients(at, memory, n);
        if (tile.flags & LAST)
            break;
        wait_queries(at, memory, n + 1);
        products_begin();
        begin_cells(t->s, base, base + Q_AT + stage_of(n + 1) * Q_BYTES, FB_D);
        begin_sums(t->d, p, base + O_AT + stage_of(n) * O_BYTES, FB_DV);
        products_wait(1);
        settle(t->s[0], FB_BN / 2);
    }
    products_begin();
    begin_sums(t->d, p, base + O_AT + stage_of(n) * O_BYTES, FB_DV);
    products_wait(0);
    settle(t->d[0], FB_DV / 2);
    release(base + O_EMPTY(stage_of(n)));
    *count = n + 1;
}

// dS' and dK.
FB_FN void derive(const fb__args *a, const place *at, sums *t, unsigned char *memory, fb_u32 *count) {
    const fb_u32 base = smem_address(memory);
    fb_u32 p[FB_BN / 16][4];
    fb_u32 n = *count;

    wait_gradients(at, memory, n);
    products_begin();
    begin_cells(t->s, base + V_AT, base + O_AT + stage_of(n) * O_BYTES, FB_DV);
    products_wait(0);
    settle(t->s[0], FB_BN / 2);
    for (;; n++) {
        const passing tile = *passing_of(memory, stage_of(n));
        barrier_wait(base + P_FULL(n % S_STAGES), n / S_STAGES % 2);
        products_wait(0); // dK of the tile before has dS' in the registers that P' comes into
        settle(t->d[0], FB_D / 2);
        if (!(tile.flags & FIRST))
            release(base + Q_EMPTY(stage_of(n + FB_BUFFERS - 1)));
#pragma unroll
        for (int k = 0; k < FB_BN / 16; k++) {
            const uint4 x = load16(place_of_p(base, n) + k * 2048);
            p[k][0] = x.x, p[k][1] = x.y, p[k][2] = x.z, p[k][3] = x.w;
        }
        make_ds(t->s, p, (const float *)(memory + DELTA_AT(stage_of(n))));
        to_steps<FAST>(p, t->s, FB_BN);
        barrier_wait(base + S_EMPTY(n % S_STAGES), n / S_STAGES % 2 ^ 1);
        store_ds(base + S_AT + n % S_STAGES * S_BYTES, p);
        if (threadIdx.x % 128 == 0)
            *adding_of(memory, n % S_STAGES) = tile;
        barrier_arrive(base + S_FULL(n % S_STAGES));
        release(base + P_EMPTY(n % S_STAGES));
        release(base + O_EMPTY(stage_of(n)));
        if (tile.flags & LAST)
            break;
        wait_gradients(at, memory, n + 1);
        products_begin();
        begin_cells(t->s, base + V_AT, base + O_AT + stage_of(n + 1) * O_BYTES, FB_DV);
        begin_sums(t->d, p, base + Q_AT + stage_of(n) * Q_BYTES, FB_D);
        products_wait(1);
        settle(t->s[0], FB_BN / 2);
    }
    products_begin();
    begin_sums(t->d, p, base + Q_AT + stage_of(n) * Q_BYTES, FB_D);
    products_wait(0);
    settle(t->d[0], FB_D / 2);
    release(base + Q_EMPTY(stage_of(n)));
    *count = n + 1;
}

FB_FN void keys_of_block(const fb__args *a, unsigned char *memory, bool derives) {
    const fb_u32 base = smem_address(memory);
    const fb__view to = derives ? a->dk : a->dv;
    sums t;
    fb_u32 count = 0;
    clear<FAST>(t.s, FB_BN / 8);
    for (fb_u32 n = 0;; n ^= 1) {
        barrier_wait(base + KV_FULL, n);
        const place *at = place_of(memory, n);
        if (at->end)
            return;
        clear<FAST>(t.d, (derives ? FB_D : FB_DV) / 8);
        if (at->any) {
            clear_keys(at, base);
            if (derives)
                derive(a, at, &t, memory, &count);
            else
                attend(a, at, &t, memory, &count);
        }
        release(base + KV_EMPTY);
        const bool nan = derives ? write_rows(a, &at->w, to, t.d, a->scale, a->head_dim, a->flags & FB_DK16, FB_D)
                                 : write_rows(a, &at->w, to, t.d, 1, a->head_dim_v, a->flags & FB_DV16, FB_DV);
        if (__any_sync(~0u, nan))
            mend_keys(a, &at->w, at->w.first + KEYS_OF_WARP, derives, !derives);
    }
}

extern "C" __global__ void __launch_bounds__(FB_THREADS, 1)
    fb_hopper_split(const __grid_constant__ fb__args a, const __grid_constant__ fb_maps maps) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const fb_u32 base = smem_address(memory);
    if (threadIdx.x == 0)
        make_barriers(base);
    __syncthreads();
    if (FB_WARPGROUP == 0) {
        registers_lower(FB_LOADER_REGISTERS);
        if (threadIdx.x == 0)
            load_all(&a, &maps, memory);
    } else if (FB_WARPGROUP == 3) {
        registers_lower(512 - 2 * FB_REGISTERS - FB_LOADER_REGISTERS);
        queries_of_block(&a, memory);
    } else if (FB_WARPGROUP == 2) {
        registers_raise(FB_REGISTERS);
        keys_of_block(&a, memory, true);
    } else {
        registers_raise(FB_REGISTERS);
        keys_of_block(&a, memory, false);
    }
}
