/* The AMX kernel on tiles in software, for processors without: the same text as amx.c, the same bits. It is
 * there to be tested, and slow. Floor: cpu. */
#include "avx512bf16.h"

#define ISA amx_model

typedef struct tile {
    char row[16][64];
} tile;

static void model_load(tile *t, const void *base, ptrdiff_t row_bytes) {
    for (int r = 0; r < 16; r++)
        memcpy(t->row[r], (const char *)base + r * row_bytes, 64);
}

static void model_store(const tile *t, void *base, ptrdiff_t row_bytes) {
    for (int r = 0; r < 16; r++)
        memcpy((char *)base + r * row_bytes, t->row[r], 64);
}

/* One of 16 lanes of bf16 pairs as floats; numbers below the normal range are 0. */
static __m512 half_of(__m512i pairs, bool high) {
    __m512i x =
        high ? _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)) : _mm512_slli_epi32(pairs, 16);
    return (__m512)x;
}

/* tdpbf16ps, by Intel's manual: even and odd products are summed apart with fused multiply-adds, the two sums
 * are added, and that to C; rounding to nearest, denormals are 0 on the way in and out. The floating-point
 * mode of the fast routes does the latter. */
static void model_dot(tile *c, const tile *a, const tile *b) {
    for (int m = 0; m < 16; m++) {
        __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
        for (int k = 0; k < 16; k++) {
            int32_t pair;
            memcpy(&pair, a->row[m] + 4 * k, 4);
            __m512i x = _mm512_set1_epi32(pair), y = _mm512_loadu_si512(b->row[k]);
            even = _mm512_fmadd_ps(half_of(x, false), half_of(y, false), even);
            odd = _mm512_fmadd_ps(half_of(x, true), half_of(y, true), odd);
        }
        __m512 sum = _mm512_add_ps(even, odd);
        _mm512_storeu_ps(c->row[m], _mm512_add_ps(_mm512_loadu_ps(c->row[m]), sum));
    }
}

static void model_nothing(void) {}
#define ENTER model_nothing
#define LEAVE model_nothing
#define TILES tile tiles[8];
#define TILE_ZERO(t) memset(&tiles[t], 0, sizeof(tile))
#define TILE_LOAD(t, base, row_bytes) model_load(&tiles[t], base, row_bytes)
#define TILE_STORE(t, base, row_bytes) model_store(&tiles[t], base, row_bytes)
#define TILE_DOT(c, a, b) model_dot(&tiles[c], &tiles[a], &tiles[b])
#include "amx.inc"
