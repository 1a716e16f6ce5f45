// What the kernels of sm_90a share: which tiles a block takes, tiles in shared memory, how a row of 16 bit
// elements is written from fragments. Next: hopper_forward.cu.
#pragma once
#include "hopper.cuh"
#include "problem.cuh"

#define FB_PANELS(columns) (((columns) + 63) / 64)
#define FB_PANEL_BYTES(rows) ((rows)*128)
#define FB_SWIZZLED_BYTES(rows, columns) (FB_PANELS(columns) * FB_PANEL_BYTES(rows))

// Blocks stay, and take one tile in each round. With long tiles first every other round goes backwards, so
// that what a block gets adds up to about the same for all.
FB_FN fb_u32 tile_of_round(const fb__args *a, fb_u32 round) {
    const fb_u32 back = a->section && round % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x;
    return round * gridDim.x + back;
}

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
