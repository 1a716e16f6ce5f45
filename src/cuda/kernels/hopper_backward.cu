// dQ, dK and dV on sm_90a, in one pass over the cells. A block has 128 keys, and the tiles of FB_BN query rows of all
// heads of their group pass by. For each of these, with keys as rows, so that P' and dS' are made in the registers from
// which products take them:
//
//     S' = K Q^T   P' = 2^(S' - LSE)   dV += P' dO   dP' = V dO^T   dS' = P' (dP' - delta)   dK += dS' Q
//     dQ = dS K, added to what other blocks have added in memory
//
// Warpgroups: one loads; two have 64 keys each; one makes dQ, out of step with the others, since additions to memory in
// larger bursts keep products from beginning. The order of a warpgroup with keys is such that something always runs on
// the tensor cores (measured, in clocks of a step of 64 x 128 x 128 of which products need 2560: 2820 so, 3350 to 3520
// with S' after dK):
//
//     P' from S'              beside dK of the tile before
//     dP', dV begin;  dS' from dP'  beside dV
//     S' of the next tile, dK begin
//
// dV is waited for before S' of the next tile begins: otherwise P' and dS' of two tiles would not fit into registers.
#include "hopper_gradients.cuh"

typedef struct sums {
    float dk[FB_D / 8][4], dv[FB_DV / 8][4], s[FB_BN / 8][4];
} sums;

// tile: where it lies in shared memory.
FB_FN void wait_tile(const place *at, unsigned char *memory, fb_u32 full, fb_u32 parity, fb_u32 tile, int stage,
                     const int COLUMNS) {
    barrier_wait(smem_address(memory) + full, parity);
    const passing p = *passing_of(memory, stage);
    if (p.flags & UNSEEN)
        clear_rows(smem_address(memory) + tile, p.first, at->seen_lo, at->seen_hi, FB_BN, FB_PANELS(COLUMNS), 2);
}

#if FB_OPTIONS & FB_SOFTCAP
FB_FN void take_weights(fb_u32 (*to)[4], fb_u32 (*from)[4]) {
#pragma unroll
    for (int k = 0; k < FB_BN / 16; k++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            to[k][i] = from[k][i];
}
#endif

// All tiles of queries of one tile of keys; *count: how many have passed by this block, which is all that a warpgroup
// has to keep in a register.
FB_FN void attend(const fb__args *a, const place *at, sums *t, unsigned char *memory, fb_u32 *count) {
    const fb_u32 base = smem_address(memory), K = base + (warpgroup() - 1) * (64 * 128);
    fb_u32 p[FB_BN / 16][4], ds[FB_BN / 16][4];
    fb_u32 n = *count;

    wait_tile(at, memory, Q_FULL(stage_of(n)), parity_of(n), Q_AT + stage_of(n) * Q_BYTES, stage_of(n), FB_D);
    products_begin();
    begin_cells(t->s, K, base + Q_AT + stage_of(n) * Q_BYTES, FB_D);
    products_wait(0);
    settle(t->s[0], FB_BN / 2);
    for (;; n++) {
        const int stage = stage_of(n);
        make_p(a, &at->w, t->s, p, (const float *)(memory + LSE_AT(stage)), *passing_of(memory, stage));
#if !(FB_OPTIONS & FB_SOFTCAP)
        to_steps<FAST>(p, t->s, FB_BN);
#endif
        products_wait(0);
        settle(t->dk[0], FB_D / 2);
#if FB_OPTIONS & FB_SOFTCAP
        take_weights(ds, p); // whose registers dK has read
        to_steps<FAST>(p, t->s, FB_BN);
#endif
        if (!(passing_of(memory, stage)->flags & FIRST))
            release(base + Q_EMPTY(stage_of(n + FB_BUFFERS - 1)));
        wait_tile(at, memory, O_FULL(stage), parity_of(n), O_AT + stage * O_BYTES, stage, FB_DV);
        products_begin();
        begin_cells(t->s, K + V_AT, base + O_AT + stage * O_BYTES, FB_DV);
        begin_sums(t->dv, p, base + O_AT + stage * O_BYTES, FB_DV);
        products_wait(1);
        settle(t->s[0], FB_BN / 2);
        make_ds(t->s, FB_OPTIONS & FB_SOFTCAP ? ds : p, (const float *)(memory + DELTA_AT(stage)));
        to_steps<FAST>(ds, t->s, FB_BN);
        products_wait(0);
        settle(t->dv[0], FB_DV / 2);
        release(base + O_EMPTY(stage));
        barrier_wait(base + S_EMPTY(n % S_STAGES), n / S_STAGES % 2 ^ 1);
        store_ds(base + S_AT + n % S_STAGES * S_BYTES, ds);
        const passing tile = *passing_of(memory, stage);
        if (threadIdx.x == 128)
            *adding_of(memory, n % S_STAGES) = tile;
        barrier_arrive(base + S_FULL(n % S_STAGES));
        if (tile.flags & LAST)
            break;
        wait_tile(at, memory, Q_FULL(stage_of(n + 1)), parity_of(n + 1), Q_AT + stage_of(n + 1) * Q_BYTES,
                  stage_of(n + 1), FB_D);
        products_begin();
        begin_cells(t->s, K, base + Q_AT + stage_of(n + 1) * Q_BYTES, FB_D);
        begin_sums(t->dk, ds, base + Q_AT + stage * Q_BYTES, FB_D);
        products_wait(1);
        settle(t->s[0], FB_BN / 2);
    }
    products_begin();
    begin_sums(t->dk, ds, base + Q_AT + stage_of(n) * Q_BYTES, FB_D);
    products_wait(0);
    settle(t->dk[0], FB_D / 2);
    release(base + Q_EMPTY(stage_of(n)));
    *count = n + 1;
}

FB_FN void keys_of_block(const fb__args *a, unsigned char *memory) {
    const fb_u32 base = smem_address(memory);
    sums t;
    fb_u32 count = 0;
    clear<FAST>(t.s, FB_BN / 8);
    for (fb_u32 n = 0;; n ^= 1) {
        barrier_wait(base + KV_FULL, n);
        const place *at = place_of(memory, n);
        if (at->end)
            return;
        const work *w = &at->w;
        clear<FAST>(t.dk, FB_D / 8);
        clear<FAST>(t.dv, FB_DV / 8);
        if (at->any) {
            clear_keys(at, base);
            attend(a, at, &t, memory, &count);
        }
        release(base + KV_EMPTY);
        bool nan = write_rows(a, w, a->dk, t.dk, a->scale, a->head_dim, a->flags & FB_DK16, FB_D);
        nan |= write_rows(a, w, a->dv, t.dv, 1, a->head_dim_v, a->flags & FB_DV16, FB_DV);
        if (__any_sync(~0u, nan))
            mend_keys(a, w, w->first + KEYS_OF_WARP, true, true);
    }
}

extern "C" __global__ void __launch_bounds__(FB_THREADS, 1)
    fb_hopper_backward(const __grid_constant__ fb__args a, const __grid_constant__ fb_maps maps) {
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
    } else {
        registers_raise(FB_REGISTERS);
        keys_of_block(&a, memory);
    }
}
