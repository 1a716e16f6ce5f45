/* See tune.h. Best first. Columns of a row: kernel; whether elements take 4 bytes; stacked heads; largest D
 * and DV; WM, WN, WK, MI, BN; buffers; blocks of a multiprocessor that the compiler makes room for. */
#include "tune.h"
#include "../shared/args.h"

typedef struct row {
    fb__kernel kernel;
    int wide, stack, d, wm, wn, wk, mi, bn, buffers, blocks;
    const char *measured;
} row;

#define FORWARD FB__KERNEL_FORWARD
#define DQ FB__KERNEL_DQ
#define DKDV FB__KERNEL_DKDV
#define DBIAS FB__KERNEL_DBIAS
#define H200 "bench/SPEED.md, CUDA tiles"
#define FITS "chosen to fit"

static const row rows[] = {
    /* clang-format off */
    {FORWARD, 0, 0,  64, 4, 1, 1, 2,  64, 2, 2, H200},
    {FORWARD, 0, 0, 128, 4, 1, 1, 2,  64, 2, 2, H200},
    {FORWARD, 0, 0, 256, 8, 1, 1, 1,  64, 1, 1, FITS},
    {FORWARD, 0, 0, 256, 4, 1, 1, 1,  32, 1, 1, FITS},
    {FORWARD, 0, 0, 576, 2, 4, 1, 1,  32, 1, 1, FITS},
    {FORWARD, 0, 0, 576, 1, 4, 1, 1,  16, 1, 1, FITS},
    {FORWARD, 0, 1, 128, 1, 1, 4, 1, 128, 1, 2, FITS},
    {FORWARD, 0, 1, 256, 1, 1, 4, 1,  64, 1, 1, FITS},
    {FORWARD, 0, 1, 576, 1, 4, 1, 1,  32, 1, 1, FITS},
    {FORWARD, 1, 0, 128, 4, 1, 1, 1,  32, 1, 1, FITS},
    {FORWARD, 1, 0, 256, 4, 1, 1, 1,  32, 1, 1, FITS},
    {FORWARD, 1, 0, 256, 2, 1, 1, 1,  16, 1, 1, FITS},
    {FORWARD, 1, 0, 576, 2, 4, 1, 1,  16, 1, 1, FITS},
    {FORWARD, 1, 0, 576, 1, 4, 1, 1,  16, 1, 1, FITS},
    {FORWARD, 1, 1, 128, 1, 1, 4, 1,  64, 1, 1, FITS},
    {FORWARD, 1, 1, 256, 1, 4, 1, 1,  32, 1, 1, FITS},
    {FORWARD, 1, 1, 576, 1, 4, 1, 1,  16, 1, 1, FITS},

    {DQ,      0, 0,  64, 4, 1, 1, 2,  64, 2, 2, H200},
    {DQ,      0, 0, 128, 4, 1, 1, 2,  32, 2, 2, H200},
    {DQ,      0, 0, 128, 4, 1, 1, 1,  32, 2, 1, FITS},
    {DQ,      0, 0, 256, 8, 1, 1, 1,  32, 2, 1, FITS},
    {DQ,      0, 0, 256, 4, 1, 1, 1,  32, 2, 1, FITS},
    {DQ,      0, 0, 256, 4, 1, 1, 1,  16, 1, 1, FITS},
    {DQ,      0, 0, 576, 2, 4, 1, 1,  16, 2, 1, FITS},
    {DQ,      0, 0, 576, 1, 4, 1, 1,  16, 1, 1, FITS},
    {DQ,      0, 1, 128, 1, 1, 4, 1,  64, 2, 2, FITS},
    {DQ,      0, 1, 256, 1, 1, 4, 1,  64, 2, 1, FITS},
    {DQ,      0, 1, 256, 1, 4, 1, 1,  32, 1, 1, FITS},
    {DQ,      0, 1, 576, 1, 4, 1, 1,  16, 2, 1, FITS},
    {DQ,      0, 1, 576, 1, 4, 1, 1,  16, 1, 1, FITS},
    {DQ,      1, 0, 128, 4, 1, 1, 1,  32, 2, 1, FITS},
    {DQ,      1, 0, 128, 4, 1, 1, 1,  16, 1, 1, FITS},
    {DQ,      1, 0, 256, 2, 2, 1, 1,  16, 2, 1, FITS},
    {DQ,      1, 0, 256, 1, 2, 1, 1,  16, 1, 1, FITS},
    {DQ,      1, 0, 576, 1, 4, 1, 1,  16, 1, 1, FITS},
    {DQ,      1, 1, 128, 1, 1, 4, 1,  64, 2, 1, FITS},
    {DQ,      1, 1, 128, 1, 1, 2, 1,  32, 1, 1, FITS},
    {DQ,      1, 1, 256, 1, 4, 1, 1,  16, 2, 1, FITS},
    {DQ,      1, 1, 576, 1, 4, 1, 1,  16, 1, 1, FITS},

    {DKDV,    0, 0,  64, 4, 1, 1, 2,  32, 2, 2, H200},
    {DKDV,    0, 0, 128, 4, 1, 1, 1,  64, 2, 2, H200},
    {DKDV,    0, 0, 128, 4, 1, 1, 1,  32, 2, 1, FITS},
    {DKDV,    0, 0, 256, 4, 2, 1, 1,  32, 2, 1, FITS},
    {DKDV,    0, 0, 256, 2, 2, 1, 1,  16, 2, 1, FITS},
    {DKDV,    0, 0, 576, 2, 4, 1, 1,  16, 2, 1, FITS},
    {DKDV,    0, 0, 576, 1, 4, 1, 1,  16, 1, 1, FITS},
    {DKDV,    0, 1, 128, 4, 1, 1, 1,  16, 2, 2, FITS},
    {DKDV,    0, 1, 256, 4, 2, 1, 1,  16, 2, 1, FITS},
    {DKDV,    0, 1, 576, 2, 4, 1, 1,  16, 2, 1, FITS},
    {DKDV,    0, 1, 576, 1, 4, 1, 1,  16, 1, 1, FITS},
    {DKDV,    1, 0, 128, 4, 1, 1, 1,  32, 2, 1, FITS},
    {DKDV,    1, 0, 128, 4, 1, 1, 1,  16, 1, 1, FITS},
    {DKDV,    1, 0, 256, 2, 2, 1, 1,  16, 2, 1, FITS},
    {DKDV,    1, 0, 256, 1, 2, 1, 1,  16, 1, 1, FITS},
    {DKDV,    1, 0, 576, 1, 4, 1, 1,  16, 1, 1, FITS},
    {DKDV,    1, 1, 128, 4, 1, 1, 1,  16, 2, 1, FITS},
    {DKDV,    1, 1, 256, 2, 2, 1, 1,  16, 2, 1, FITS},
    {DKDV,    1, 1, 576, 1, 4, 1, 1,  16, 1, 1, FITS},

    {DBIAS,   0, 0, 128, 4, 1, 1, 1,  64, 1, 1, FITS},
    {DBIAS,   0, 0, 256, 2, 1, 1, 1,  32, 1, 1, FITS},
    {DBIAS,   0, 0, 576, 1, 1, 1, 1,  16, 1, 1, FITS},
    {DBIAS,   1, 0, 128, 2, 1, 1, 1,  32, 1, 1, FITS},
    {DBIAS,   1, 0, 256, 1, 1, 1, 1,  16, 1, 1, FITS},
    {DBIAS,   1, 0, 576, 1, 1, 1, 1,  16, 1, 1, FITS},
    /* clang-format on */
};
enum { ROWS = sizeof rows / sizeof *rows };

const char *fb__kernel_file(fb__kernel kernel) {
    static const char *const files[] = {
#define X(name, file, function) file,
        FB__KERNELS(X)
#undef X
    };
    return files[kernel];
}

const char *fb__kernel_function(fb__kernel kernel) {
    static const char *const functions[] = {
#define X(name, file, function) function,
        FB__KERNELS(X)
#undef X
    };
    return functions[kernel];
}

/* Bytes of a tile, as FB_TILE_BYTES in tile.cuh. */
static int tile(const fb__spec *s, int rows_of_it, int columns) {
    return rows_of_it * (columns * (s->TYPE == FB_F32 ? 4 : 2) + 16);
}

static int larger(int a, int b) { return a > b ? a : b; }

/* Rows of results, as FB_ROOM_ROW in problem.cuh. */
static int room(const fb__spec *s, int columns) { return s->BM * (columns + 4) * 4; }

/* What the kernels' heads say, or what their ends need. */
static int shared_bytes(fb__kernel kernel, const fb__spec *s) {
    int rows_own = tile(s, s->BM, s->D) + tile(s, s->BM, s->DV),
        passing = tile(s, s->BN, s->D) + tile(s, s->BN, s->DV),
        streams = s->STACK || s->D + s->DV > 512 ? 0 : 16 * s->THREADS;
    switch (kernel) {
    case FB__KERNEL_FORWARD:
        return larger(larger(tile(s, s->BM, s->D) + s->BUFFERS * passing + streams, room(s, s->DV)),
                      (s->WK - 1) * s->WM * s->WN * 128 * (s->MI * (s->DV / s->WN / 2 + 4)));
    case FB__KERNEL_DQ:
        return larger(larger(rows_own + s->BUFFERS * passing + streams + 12 * s->BM, room(s, s->D)),
                      (s->WK - 1) * s->WM * s->WN * 128 * s->MI * (s->D / s->WN / 2));
    case FB__KERNEL_DKDV:
        return larger(rows_own + s->BUFFERS * (passing + 12 * s->BN) + streams,
                      larger(room(s, s->D), room(s, s->DV)));
    case FB__KERNEL_DBIAS:
        return larger(rows_own + passing, s->BM * s->BN * 4);
    default:
        return 0;
    }
}

static int round_up(int64_t x, int to) {
    int n = ((int)x + to - 1) / to * to;
    return n ? n : to;
}

static void fill(const row *r, fb_dtype type, int64_t d, int64_t dv, bool plain, fb__spec *s) {
    *s = (fb__spec){.TYPE = (int)type,
                    .PLAIN = plain,
                    .OPTIONS = plain ? 0 : FB_ALL_OPTIONS,
                    .STACK = r->stack,
                    .WM = r->wm,
                    .WN = r->wn,
                    .WK = r->wk,
                    .MI = r->mi,
                    .BN = r->bn,
                    .BM = r->wm * r->mi * 16,
                    .BUFFERS = r->buffers,
                    .BLOCKS = r->blocks,
                    .measured = r->measured};
    s->D = round_up(d, 16 * r->wn);
    s->DV = round_up(dv, 16 * r->wn);
    s->THREADS = 32 * r->wm * r->wn * r->wk;
    s->UNROLL_COLUMNS = s->D <= 128 && s->DV <= 128 && type != FB_F32;
    s->MAX_MI = r->mi;
    s->MAX_CELLS = r->bn / r->wk;
    s->shared_bytes = shared_bytes(r->kernel, s);
}

bool fb__tune_choose(fb__kernel kernel, fb_dtype type, int64_t head_dim, int64_t head_dim_v, bool plain,
                     bool stack, int shared, fb__spec *spec) {
    if (kernel >= FB__KERNEL_ROWS) {
        if (kernel > FB__KERNEL_ROWS)
            head_dim = head_dim_v = 16;
        fill(&(row){kernel, type == FB_F32, stack, 576, 1, 1, 1, 1, 16, 1, 1, FITS}, type, head_dim,
             head_dim_v, true, spec);
        spec->THREADS = 256;
        return true;
    }
    const int64_t widest = head_dim > head_dim_v ? head_dim : head_dim_v;
    for (int n = 0; n < ROWS; n++) {
        const row *r = &rows[n];
        if (r->kernel != kernel || r->wide != (type == FB_F32) || r->stack != (stack && kernel != DBIAS) ||
            widest > r->d)
            continue;
        fill(r, type, head_dim, head_dim_v, plain && kernel != DBIAS, spec);
        if (spec->shared_bytes <= shared)
            return true;
    }
    return false;
}

bool fb__tune_row(int n, fb_dtype type, bool plain, fb__kernel *kernel, fb__spec *spec) {
    if (n >= ROWS)
        return false;
    *kernel = rows[n].kernel;
    fill(&rows[n], rows[n].wide ? FB_F32 : type, rows[n].d, rows[n].d, plain && *kernel != DBIAS, spec);
    return true;
}

void fb__tune_common(fb_dtype type, int options, fb__spec *s) {
    *s = (fb__spec){.TYPE = (int)type,
                    .PLAIN = !options,
                    .OPTIONS = options,
                    .WN = 1,
                    .WK = 1,
                    .MI = 1,
                    .BLOCKS = 1,
                    .UNROLL_COLUMNS = 1,
                    .MAX_MI = 1};
}

void fb__tune_defines(const fb__spec *spec, fb__define *defines) {
#define X(name) defines[FB__SPEC_##name] = (fb__define){"FB_" #name, spec->name};
    FB__SPEC(X)
#undef X
}
