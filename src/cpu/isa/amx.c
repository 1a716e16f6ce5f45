/* AMX: tdpbf16ps multiplies 16x32 by 32x16 values of bf16 in 16 cycles. Floor: cpu. */
#include "avx512bf16.h"

#define ISA amx

/* The layout that ldtilecfg reads: eight tiles of 16 rows of 64 bytes. As an operand of its own instruction,
 * since compilers believe that their intrinsic reads 8 of these bytes only. */
typedef struct tile_config {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

static void amx_enter(void) {
    static const tile_config config = {.palette = 1,
                                       .row_bytes = {64, 64, 64, 64, 64, 64, 64, 64},
                                       .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
    __asm__ volatile("ldtilecfg %0" : : "m"(config));
}

/* Frees 8 KiB of every context switch, and lets the core sleep deeply. */
static void amx_leave(void) { __asm__ volatile("tilerelease"); }

#define ENTER amx_enter
#define LEAVE amx_leave
#define TILES
#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, base, row_bytes) _tile_loadd(t, base, row_bytes)
#define TILE_STORE(t, base, row_bytes) _tile_stored(t, base, row_bytes)
#define TILE_DOT(c, a, b) _tile_dpbf16ps(c, a, b)
#include "amx.inc"
