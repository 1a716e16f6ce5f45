// Tiles in shared memory: rows of COLUMNS elements, each row 16 bytes longer than it needs to be, so that the eight
// rows of a matrix lie in different banks whatever the width. Columns that a tensor does not have are zeros.
// Next: product.cuh.
#pragma once
#include "element.cuh"

#define FB_ROW_BYTES(columns) ((columns)*FB_SIZE + 16)
#define FB_TILE_BYTES(rows, columns) ((rows)*FB_ROW_BYTES(columns))

#define FB_LANE (threadIdx.x % 32)
#define FB_WARP (threadIdx.x / 32)

// Where the rows of a tile lie: row r at r * row, or, with the heads of a group side by side, at
// r / len * head + r % len * row.
typedef struct rows {
    const element *at;
    fb_i64 row, head;
    int len;
} rows;

FB_FN const element *row_at(rows t, int r) {
#if FB_STACK
    return t.at + r / t.len * t.head + r % t.len * t.row;
#else
    return t.at + r * t.row;
#endif
}

// 16 bytes of a row whose first `n` elements exist, element by element.
FB_FN void load_piece(fb_u32 to, const element *from, int n) {
    union {
        element e[FB_PIECE];
        uint4 all;
    } x;
#pragma unroll
    for (int i = 0; i < FB_PIECE; i++)
        x.e[i] = i < n ? from[i] : 0;
    store16(to, x.all);
}

// How much of a row's 16 bytes from column c on there is. Ask `c + FB_PIECE <= columns` for a whole piece: NVRTC 13.0
// takes the comparison of this with FB_PIECE from the instruction that clamps, which says something else (sm_90a).
FB_FN int piece_left(int columns, int c) {
    int left = columns - c;
    return left < 0 ? 0 : left > FB_PIECE ? FB_PIECE : left;
}

// How many threads share a row of a tile, where threads and rows come out even; 0 where they do not. Each has every
// so-manieth piece of it.
FB_FN constexpr int row_group(const int ROWS, const int PER_ROW) {
    for (int g = PER_ROW; g; g--)
        if (PER_ROW % g == 0 && FB_THREADS % g == 0 && ROWS % (FB_THREADS / g) == 0)
            return FB_STACK ? 0 : g;
    return 0;
}

// Rows [first, first + ROWS) to a tile, by all threads; those from `end` on are zeros. `columns` exist. With
// `pieces` all rows start at a multiple of 16 bytes; such a copy is under way until copies_wait.
FB_FN void tile_load_any(fb_u32 tile, rows from, int first, int end, int columns, bool pieces, const int ROWS,
                         const int COLUMNS) {
    const int PER_ROW = COLUMNS / FB_PIECE, ALL = ROWS * PER_ROW, GROUP = row_group(ROWS, PER_ROW);
    if (pieces && GROUP) { // a thread stays in its columns
        const int EACH = FB_THREADS / (GROUP ? GROUP : 1), c = threadIdx.x % (GROUP ? GROUP : 1) * FB_PIECE,
                  r = threadIdx.x / (GROUP ? GROUP : 1), STEP = (GROUP ? GROUP : PER_ROW) * FB_PIECE;
        const element *at = from.at + (first + r) * from.row + c;
        fb_u32 to = tile + r * FB_ROW_BYTES(COLUMNS) + c * FB_SIZE;
#pragma unroll 1
        for (int n = 0; n < ROWS; n += EACH, at += EACH * from.row, to += EACH * FB_ROW_BYTES(COLUMNS))
#pragma unroll
            for (int x = 0; x < COLUMNS; x += STEP) {
                const int bytes = first + r + n < end ? piece_left(columns, c + x) * FB_SIZE : 0;
                copy16(to + x * FB_SIZE, bytes ? at + x : from.at, bytes);
            }
        return;
    }
#pragma unroll 1
    for (int n = threadIdx.x; n < ALL; n += FB_THREADS) {
        int r = n / PER_ROW, c = n % PER_ROW * FB_PIECE;
        int left = first + r < end ? piece_left(columns, c) : 0;
        const element *at = left ? row_at(from, first + r) + c : from.at;
        fb_u32 to = tile + r * FB_ROW_BYTES(COLUMNS) + c * FB_SIZE;
        if (pieces)
            copy16(to, at, left * FB_SIZE);
        else
            load_piece(to, at, left);
    }
}

// Whole tiles of whole pieces, with a row_group. Where a thread's first piece comes from, were the tile to begin at row
// 0: found once, as it takes longer than the copies.
FB_FN const element *stream_of(rows from, const int ROWS, const int COLUMNS) {
    const int GROUP = row_group(ROWS, COLUMNS / FB_PIECE), SHARE = GROUP ? GROUP : 1;
    return from.at + threadIdx.x / SHARE * from.row + threadIdx.x % SHARE * FB_PIECE;
}

// The tile whose first row is `offset` elements on; rows are `row` elements apart.
FB_FN void stream_load(fb_u32 tile, const element *stream, fb_i64 offset, fb_i64 row, const int ROWS,
                       const int COLUMNS) {
    const int GROUP = row_group(ROWS, COLUMNS / FB_PIECE), SHARE = GROUP ? GROUP : 1, EACH = FB_THREADS / SHARE;
    const element *at = stream + offset;
    tile += threadIdx.x / SHARE * FB_ROW_BYTES(COLUMNS) + threadIdx.x % SHARE * 16;
#pragma unroll
    for (int n = 0; GROUP && n < ROWS; n += EACH, at += EACH * row)
#pragma unroll
        for (int x = 0; x < COLUMNS; x += GROUP * FB_PIECE)
            copy16_whole(tile + n * FB_ROW_BYTES(COLUMNS) + x * FB_SIZE, at + x);
}

// The two streams of what passes by. Where registers are short, each thread keeps its own in shared memory.
typedef struct streams {
    const element *first, *second;
} streams;

#define FB_STREAMS (!FB_STACK && FB_D + FB_DV <= 512) // wider tiles take long anyway, and all the room there is
#define FB_STREAM_BYTES (FB_STREAMS ? FB_THREADS * (int)sizeof(streams) : 0)

// The same as tile_load_any, fast where it can be.
FB_FN void tile_load(fb_u32 tile, rows from, int first, int end, int columns, bool pieces, const int ROWS,
                     const int COLUMNS) {
    if (row_group(ROWS, COLUMNS / FB_PIECE) && pieces && columns == COLUMNS && first + ROWS <= end) {
        stream_load(tile, stream_of(from, ROWS, COLUMNS), first * from.row, from.row, ROWS, COLUMNS);
    } else
        tile_load_any(tile, from, first, end, columns, pieces, ROWS, COLUMNS);
}

// Does this thread's share of a tile hold an infinity or NaN?
FB_FN bool tile_special(fb_u32 tile, const int ROWS, const int COLUMNS) {
    const int PER_ROW = COLUMNS / FB_PIECE, ALL = ROWS * PER_ROW;
    bool any = false;
    for (int n = threadIdx.x; n < ALL; n += FB_THREADS) {
        uint4 x = load16(tile + n / PER_ROW * FB_ROW_BYTES(COLUMNS) + n % PER_ROW * 16);
        any |= any_special(x.x) | any_special(x.y) | any_special(x.z) | any_special(x.w);
    }
    return any;
}

// This thread's share of a tile, with zeros for infinities and NaN.
FB_FN void tile_clean(fb_u32 tile, const int ROWS, const int COLUMNS) {
    const int PER_ROW = COLUMNS / FB_PIECE, ALL = ROWS * PER_ROW;
#pragma unroll 1
    for (int n = threadIdx.x; n < ALL; n += FB_THREADS) {
        fb_u32 at = tile + n / PER_ROW * FB_ROW_BYTES(COLUMNS) + n % PER_ROW * 16;
        uint4 x = load16(at);
        store16(at, make_uint4(cleaned(x.x), cleaned(x.y), cleaned(x.z), cleaned(x.w)));
    }
}

// ---- Fragments ------------------------------------------------------------------------------------------------
// Each function is given the address that this lane starts from (its *_lane) plus whole rows and columns.

// A: 16 rows x one step.
FB_FN fb_u32 a_lane(const int COLUMNS) { return FB_LANE % 16 * FB_ROW_BYTES(COLUMNS) + FB_LANE / 16 * 16; }

// B with its columns as the tile's rows, 16 of them x one step: b[0..1] for the first 8, b[2..3] for the others.
FB_FN fb_u32 b_lane(const int COLUMNS) {
    return (FB_LANE % 8 + FB_LANE / 16 * 8) * FB_ROW_BYTES(COLUMNS) + FB_LANE / 8 % 2 * 16;
}

// B as it lies, one step of rows x 16 columns: the steps of a product with accumulators as its A. For f32 the rows
// of a step come in the order 0 2 4 6 1 3 5 7, as accumulators hold them.
FB_FN fb_u32 t_lane(const int COLUMNS) {
#if FB_TYPE == FB_TYPE_F32
    return FB_LANE % 4 * 2 * FB_ROW_BYTES(COLUMNS) + FB_LANE / 4 * 4;
#else
    return FB_LANE % 16 * FB_ROW_BYTES(COLUMNS) + FB_LANE / 16 * 16;
#endif
}

FB_FN void t_load(fb_u32 *b, fb_u32 at, const int COLUMNS) {
#if FB_TYPE == FB_TYPE_F32
    b[0] = load4(at);
    b[1] = load4(at + FB_ROW_BYTES(COLUMNS));
    b[2] = load4(at + 32);
    b[3] = load4(at + 32 + FB_ROW_BYTES(COLUMNS));
#else
    matrices_transposed(b, at);
#endif
}
