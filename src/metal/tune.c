/* See tune.h. Best first. Columns of a row: kernel; whether elements take 4 bytes; stacked heads; oldest
 * family of GPUs; largest D and DV; WM, WN, MI, BN; buffers. No row has been measured: they are chosen so
 * that threadgroup memory allows two threadgroups on a core or more, and no simdgroup has more than 128
 * columns. */
#include "tune.h"
#include "../shared/args.h"

typedef struct row {
    fb__metal_kernel kernel;
    int wide, stack, family, d, wm, wn, mi, bn, buffers;
    const char *measured;
} row;

#define FORWARD FB__METAL_FORWARD
#define DQ FB__METAL_DQ
#define DKDV FB__METAL_DKDV
#define DBIAS FB__METAL_DBIAS
#define UNFUSED FB__METAL_UNFUSED
#define FITS "chosen to fit"
#define SWEEP "another to try" /* by FLASHBACK_TILES, on hardware */
#define PR3241 "as ml-explore/mlx#3241 from M3 on"

static const row rows[] = {
    /* clang-format off */
    {FORWARD, 0, 0, 7,  64, 4, 1, 1, 32, 2, FITS},
    {FORWARD, 0, 0, 7,  64, 4, 1, 1, 16, 2, SWEEP},
    {FORWARD, 0, 0, 7,  64, 2, 1, 2, 32, 2, SWEEP},
    {FORWARD, 0, 0, 7,  64, 8, 1, 1, 64, 2, SWEEP},
    {FORWARD, 0, 0, 7, 128, 4, 1, 1, 16, 2, FITS},
    {FORWARD, 0, 0, 7, 128, 4, 1, 1, 32, 1, SWEEP},
    {FORWARD, 0, 0, 7, 128, 2, 1, 2, 16, 2, SWEEP},
    {FORWARD, 0, 0, 7, 128, 2, 2, 1, 32, 2, SWEEP},
    {FORWARD, 0, 0, 7, 256, 2, 2, 1, 16, 1, FITS},
    {FORWARD, 0, 0, 7, 576, 1, 4, 1,  8, 1, FITS},
    {FORWARD, 0, 1, 7,  64, 1, 1, 1, 32, 2, FITS},
    {FORWARD, 0, 1, 7, 128, 1, 1, 1, 16, 2, FITS},
    {FORWARD, 0, 1, 7, 256, 1, 2, 1,  8, 2, FITS},
    {FORWARD, 0, 1, 7, 576, 1, 4, 1,  8, 1, FITS},
    {FORWARD, 1, 0, 7,  64, 4, 1, 1, 16, 2, FITS},
    {FORWARD, 1, 0, 7, 128, 2, 2, 1,  8, 2, FITS},
    {FORWARD, 1, 0, 7, 256, 1, 4, 1,  8, 1, FITS},
    {FORWARD, 1, 0, 7, 576, 1, 4, 1,  8, 1, FITS},
    {FORWARD, 1, 1, 7,  64, 1, 1, 1, 16, 2, FITS},
    {FORWARD, 1, 1, 7, 128, 1, 1, 1,  8, 2, FITS},
    {FORWARD, 1, 1, 7, 256, 1, 4, 1,  8, 1, FITS},
    {FORWARD, 1, 1, 7, 576, 1, 4, 1,  8, 1, FITS},

    {DQ,      0, 0, 7,  64, 4, 1, 1, 32, 2, FITS},
    {DQ,      0, 0, 7,  64, 4, 1, 1, 16, 2, SWEEP},
    {DQ,      0, 0, 7,  64, 2, 1, 2, 32, 2, SWEEP},
    {DQ,      0, 0, 9, 128, 4, 1, 1, 32, 2, PR3241},
    {DQ,      0, 0, 7, 128, 4, 1, 1, 16, 2, FITS},
    {DQ,      0, 0, 7, 128, 4, 1, 1, 16, 1, SWEEP},
    {DQ,      0, 0, 7, 128, 2, 2, 1, 16, 2, SWEEP},
    {DQ,      0, 0, 7, 256, 2, 2, 1, 16, 1, FITS},
    {DQ,      0, 0, 7, 576, 1, 4, 1,  8, 1, FITS},
    {DQ,      0, 1, 7,  64, 1, 1, 1, 32, 2, FITS},
    {DQ,      0, 1, 7, 128, 1, 1, 1, 16, 2, FITS},
    {DQ,      0, 1, 7, 256, 1, 2, 1,  8, 2, FITS},
    {DQ,      0, 1, 7, 576, 1, 4, 1,  8, 1, FITS},
    {DQ,      1, 0, 7,  64, 4, 1, 1, 16, 2, FITS},
    {DQ,      1, 0, 7, 128, 2, 2, 1,  8, 2, FITS},
    {DQ,      1, 0, 7, 256, 1, 4, 1,  8, 1, FITS},
    {DQ,      1, 0, 7, 576, 1, 4, 1,  8, 1, FITS},
    {DQ,      1, 1, 7,  64, 1, 1, 1, 16, 2, FITS},
    {DQ,      1, 1, 7, 128, 1, 2, 1,  8, 2, FITS},
    {DQ,      1, 1, 7, 256, 1, 4, 1,  8, 1, FITS},
    {DQ,      1, 1, 7, 576, 1, 4, 1,  8, 1, FITS},

    {DKDV,    0, 0, 7,  64, 4, 1, 1, 32, 2, FITS},
    {DKDV,    0, 0, 7,  64, 4, 1, 1, 16, 2, SWEEP},
    {DKDV,    0, 0, 7,  64, 2, 2, 1, 32, 2, SWEEP},
    {DKDV,    0, 0, 7,  64, 2, 1, 2, 16, 2, SWEEP},
    {DKDV,    0, 0, 7, 128, 2, 2, 1, 16, 2, FITS},
    {DKDV,    0, 0, 7, 128, 4, 1, 1, 16, 2, SWEEP},
    {DKDV,    0, 0, 7, 128, 2, 2, 1,  8, 2, SWEEP},
    {DKDV,    0, 0, 7, 128, 1, 4, 1, 16, 2, SWEEP},
    {DKDV,    0, 0, 7, 128, 2, 2, 1, 16, 1, SWEEP},
    {DKDV,    0, 0, 7, 256, 1, 4, 1,  8, 2, FITS},
    {DKDV,    0, 0, 7, 576, 1, 8, 1,  8, 2, FITS},
    {DKDV,    0, 1, 7,  64, 4, 1, 1,  8, 2, FITS},
    {DKDV,    0, 1, 7, 128, 2, 2, 1,  8, 2, FITS},
    {DKDV,    0, 1, 7, 256, 1, 4, 1,  8, 2, FITS},
    {DKDV,    0, 1, 7, 576, 1, 8, 1,  8, 2, FITS},
    {DKDV,    1, 0, 7,  64, 4, 1, 1, 16, 2, FITS},
    {DKDV,    1, 0, 7, 128, 1, 4, 1,  8, 2, FITS},
    {DKDV,    1, 0, 7, 256, 1, 4, 1,  8, 1, FITS},
    {DKDV,    1, 0, 7, 576, 1, 8, 1,  8, 1, FITS},
    {DKDV,    1, 1, 7,  64, 4, 1, 1,  8, 2, FITS},
    {DKDV,    1, 1, 7, 128, 1, 4, 1,  8, 2, FITS},
    {DKDV,    1, 1, 7, 256, 1, 4, 1,  8, 1, FITS},
    {DKDV,    1, 1, 7, 576, 1, 8, 1,  8, 1, FITS},

    {DBIAS,   0, 0, 7, 576, 4, 1, 1, 32, 1, FITS},
    {DBIAS,   1, 0, 7, 576, 4, 1, 1, 16, 1, FITS},

    {UNFUSED, 0, 0, 7, 576, 4, 1, 2, 64, 1, FITS},
    {UNFUSED, 0, 0, 7, 576, 4, 1, 1, 32, 1, FITS},
    {UNFUSED, 1, 0, 7, 576, 4, 1, 2, 64, 1, FITS},
    {UNFUSED, 1, 0, 7, 576, 4, 1, 1, 32, 1, FITS},
    /* clang-format on */
};
enum { ROWS = sizeof rows / sizeof *rows, ROW_THREADS = 256, SLAB = 64, TERMS = 32 };

const char *fb__metal_file(fb__metal_kernel kernel) {
    static const char *const files[] = {
#define X(name, file, functions) file,
        FB__METAL_KERNELS(X)
#undef X
    };
    return files[kernel];
}

static int larger(int a, int b) { return a > b ? a : b; }

/* Bytes of a tile, as FB_WIDE in matrix.msl has its rows. */
static int tile(const fb__metal_spec *s, int rows_of_it, int columns) {
    return rows_of_it * (columns * (s->TYPE == FB_F32 ? 4 : 2) + 16);
}

/* What the kernels' heads say: tiles that pass by, which the rows of the threadgroup come through first; then
 * parts of slabs. */
static int shared_bytes(fb__metal_kernel kernel, const fb__metal_spec *s) {
    const int one = tile(s, s->BN, s->D), other = tile(s, s->BN, s->DV);
    const int passing = s->BUFFERS == 2 ? one + other : larger(one, other);
    const int own = larger(tile(s, s->BM, s->D), kernel == FB__METAL_FORWARD ? 0 : tile(s, s->BM, s->DV));
    const int part = s->WN > 1 ? s->WM * s->WN * s->MI * 8 * s->BN * 4 : 0;
    switch (kernel) {
    case FB__METAL_FORWARD:
        return larger(passing + part, own);
    case FB__METAL_DQ:
        return larger(passing + 2 * part, own);
    case FB__METAL_DKDV:
        return larger(passing + 2 * part + 8 * s->BN, own);
    case FB__METAL_DBIAS: /* slabs of columns, then the sums */
        return larger(tile(s, s->BM + s->BN, SLAB), s->BM * s->BN * 4);
    case FB__METAL_UNFUSED: /* both operands, either way round */
        return larger(tile(s, s->BM, TERMS), tile(s, TERMS, s->BM)) +
               larger(tile(s, s->BN, TERMS), tile(s, TERMS, s->BN));
    default:
        return 256; /* fb_layout has 64 floats */
    }
}

static int round_up(int64_t x, int to) {
    const int n = ((int)x + to - 1) / to * to;
    return n ? n : to;
}

static void fill(const row *r, const fb__metal_need *need, fb__metal_spec *s) {
    *s = (fb__metal_spec){.TYPE = (int)need->type,
                          .D = round_up(need->head_dim, 8 * r->wn),
                          .DV = round_up(need->head_dim_v, 8 * r->wn),
                          .OPTIONS = need->options,
                          .STACK = r->stack,
                          .BM = r->wm * r->mi * 8,
                          .BN = r->bn,
                          .WM = r->wm,
                          .WN = r->wn,
                          .MI = r->mi,
                          .BUFFERS = r->buffers,
                          .KEEP_DS = need->keep_ds && !r->stack && (r->kernel == DQ || r->kernel == DKDV),
                          .THREADS = 32 * r->wm * r->wn,
                          .measured = r->measured};
    if (r->kernel == UNFUSED) /* whose tiles are of results: all head dims share their code */
        s->D = s->DV = 8;
    s->shared_bytes = (shared_bytes(r->kernel, s) + 15) / 16 * 16;
}

/* Kernels without tiles have D = DV = 8, so that all head dims share their code. */
static bool tune_rows(const fb__metal_need *need, fb__metal_spec *spec) {
    const row r = {FB__METAL_ROWS, need->type == FB_F32, need->stack, 7, 8, 1, 1, 1, 8, 1, FITS};
    fb__metal_need any = *need;
    any.head_dim = any.head_dim_v = 8;
    any.options = 0;
    fill(&r, &any, spec);
    spec->THREADS = ROW_THREADS;
    spec->shared_bytes = shared_bytes(FB__METAL_ROWS, spec);
    return need->skip == 0;
}

bool fb__metal_tune(fb__metal_kernel kernel, const fb__metal_need *need, fb__metal_spec *spec) {
    if (kernel == FB__METAL_ROWS)
        return tune_rows(need, spec);
    const int64_t widest = need->head_dim > need->head_dim_v ? need->head_dim : need->head_dim_v;
    const bool stack = need->stack && kernel != DBIAS && kernel != UNFUSED;
    for (int n = 0, skip = need->skip; n < ROWS; n++) {
        const row *r = &rows[n];
        if (r->kernel != kernel || r->wide != (need->type == FB_F32) || r->stack != stack ||
            need->family < r->family || widest > r->d)
            continue;
        fill(r, need, spec);
        if (spec->shared_bytes <= need->shared_bytes && skip-- == 0)
            return true;
    }
    return false;
}

bool fb__metal_tune_row(int n, fb_dtype type, int options, fb__metal_kernel *kernel, fb__metal_spec *spec) {
    if (n >= ROWS)
        return false;
    const fb__metal_need need = {.type = rows[n].wide ? FB_F32 : type,
                                 .head_dim = rows[n].d,
                                 .head_dim_v = rows[n].d,
                                 .options = options,
                                 .stack = rows[n].stack};
    *kernel = rows[n].kernel;
    fill(&rows[n], &need, spec);
    return true;
}

void fb__metal_defines(const fb__metal_spec *spec, fb__define *defines) {
#define X(name) defines[FB__METAL_SPEC_##name] = (fb__define){"FB_" #name, spec->name};
    FB__METAL_SPEC(X)
#undef X
}
