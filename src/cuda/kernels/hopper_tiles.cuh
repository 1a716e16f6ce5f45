// What the kernels of sm_90a share: which tiles a block takes, tiles in shared memory, how a row of 16 bit
// elements is written from fragments. Next: hopper_forward.cu.
#pragma once
#include "hopper.cuh"
#include "problem.cuh"

#define FB_PANELS(columns) (((columns) + 63) / 64)
#define FB_PANEL_BYTES(rows) ((rows)*128)
#define FB_SWIZZLED_BYTES(rows, columns) (FB_PANELS(columns) * FB_PANEL_BYTES(rows))

// Blocks stay, and take one tile in each round: in turn, or, where tiles are of different lengths, as the host has
// dealt them out. A number past the last tile is none.
FB_FN bool rounds_end(const fb__args *a, fb_u32 round) {
    return a->order ? round >= (fb_u32)a->rounds : round * gridDim.x >= (fb_u32)a->tiles;
}
FB_FN fb_u32 tile_of_round(const fb__args *a, fb_u32 round) {
    const fb_u32 n = round * gridDim.x + blockIdx.x;
    return a->order ? a->order[n] : n;
}

// This thread's warpgroup, in a way that tells the compiler that it is the same for a warp: addresses that depend on it
// then take no registers of threads.
FB_FN int warpgroup() { return __shfl_sync(~0u, (int)FB_WARPGROUP, 0); }

// A place in a ring of FB_BUFFERS stages: waiting for a stage to be full begins with parity 0, for it to be
// empty with 1.
typedef struct ring {
    int stage;
    fb_u32 parity;
} ring;

FB_FN void ring_next(ring *r) {
    if (++r->stage == FB_BUFFERS)
        r->stage = 0, r->parity ^= 1;
}

// All panels of rows [y, y + ROWS).
FB_FN void panels_load(fb_u32 to, const fb_map *map, fb_u32 barrier, int y, int h, int b, const int ROWS,
                       const int COLUMNS) {
#pragma unroll
    for (int n = 0; n < FB_PANELS(COLUMNS); n++)
        box_load(to + n * FB_PANEL_BYTES(ROWS), map, barrier, n * 64, y, h, b);
}

// Four words of each lane of a quad, transposed: lane c gets word c of all, in the order of the lanes.
FB_FN void quad_transpose(fb_u32 *u) {
    const bool two = FB_LANE & 2, one = FB_LANE & 1;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        fb_u32 got = __shfl_xor_sync(~0u, two ? u[i] : u[i + 2], 2);
        u[i] = two ? got : u[i], u[i + 2] = two ? u[i + 2] : got;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        fb_u32 got = __shfl_xor_sync(~0u, one ? u[i] : u[i + 1], 1);
        u[i] = one ? got : u[i], u[i + 1] = one ? u[i + 1] : got;
    }
}

// 8 columns of a row; `columns` is a multiple of 8.
FB_FN void store_eight(element *row, int c, int columns, const fb_u32 *u, bool pieces) {
    if (c >= columns)
        return;
    if (pieces) {
        *(uint4 *)(row + c) = make_uint4(u[0], u[1], u[2], u[3]);
        return;
    }
#pragma unroll
    for (int e = 0; e < 8; e++)
        row[c + e] = (element)(u[e / 2] >> e % 2 * 16);
}

// ---- What the loader says -------------------------------------------------------------------------------------

// About the tile that a block works on.
typedef struct place {
    work w;
    bool end, any;        // no more tiles; some cell counts
    int seen_lo, seen_hi; // of the other side: rows outside of [seen_lo, seen_hi) take no part in the whole sequence
    int own_lo, own_hi;   // the same of this side
} place;

// About a tile that passes by.
typedef struct passing {
    int first, flags, head;
} passing;

#define LAST 1   // of those of this place
#define EDGE 2   // the band leaves out some of the cells
#define FIRST 4  // of those of this place
#define UNSEEN 8 // it holds rows that take no part, and the tensor has them

// Rows that take no part become 0 in a tile, by all warpgroups that use it: their weights are 0, and no number times 0
// is anything else. The warpgroups are those from the second of the block on.
FB_APART void clear_rows(fb_u32 tile, int first, int lo, int hi, const int ROWS, const int PANELS,
                         const int WARPGROUPS) {
    for (int n = threadIdx.x - 128; n < PANELS * ROWS * 8; n += WARPGROUPS * 128) {
        const int row = first + n / 8 % ROWS;
        if (row < lo || row >= hi)
            store16(tile + n * 16, make_uint4(0, 0, 0, 0));
    }
    written_for_async();
    meet(8 + WARPGROUPS, WARPGROUPS * 128);
}

// One arrival for each warp, which has read what it reads itself, and for whom its products have.
#define FB_RELEASES 4 // of a warpgroup
FB_FN void release(fb_u32 barrier) {
    __syncwarp();
    if (FB_LANE == 0)
        barrier_arrive(barrier);
}

#if FB_OPTIONS & FB_SOFTCAP
// tanh to 1e-7: 1 - 2 / (1 + e^2x).
FB_FN float tanh_fast(float x) { return fmaf(-2, reciprocal(1 + exp2_fast(x * (2 * FB_LOG2E))), 1); }
#endif

// ---- The backward's rows --------------------------------------------------------------------------------------
// LSE in base 2, delta and dQ in f32 lie in the workspace by heads of args.padded rows; a sequence begins at a multiple
// of FB_PAD, so that every tile is whole. Rows that do not exist have LSE +inf, which makes their P 0.

#define FB_PAD 128

FB_FN fb_i64 padded_stat(const fb__args *a, const work *w, int head, int i) {
    const fb_i64 rows = a->padded;
    return (a->cu_q ? head * rows + (w->row_q / FB_PAD + w->b) * FB_PAD : (w->b * a->heads_q + head) * rows) + i;
}
