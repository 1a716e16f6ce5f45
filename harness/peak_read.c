/* Loads and nothing else: the widest that the processor has, in four places at a time, each of which the
 * hardware fetches ahead of. Floor: harness. */
#include "peak_loops.h"

/* At 4 x 256 bytes a round. */
enum { PLACES = 4, ROUND = 256 };

static uint64_t read_portable(const void *from, size_t bytes) {
    enum { WORDS = ROUND / sizeof(uint64_t) };
    const uint64_t *words = from;
    const size_t part = bytes / sizeof(uint64_t) / PLACES;
    uint64_t any[WORDS] = {0}, all = 0;
    for (size_t i = 0; i < part; i += WORDS)
        for (size_t place = 0; place < PLACES; place++)
            for (size_t w = 0; w < WORDS; w++)
                any[w] |= words[place * part + i + w];
    for (size_t w = 0; w < WORDS; w++)
        all |= any[w];
    return all;
}

#if defined(__x86_64__)
#include <immintrin.h>

__attribute__((target("avx512f"))) static uint64_t read_avx512(const void *from, size_t bytes) {
    const char *start = from;
    const size_t part = bytes / PLACES;
    __m512i a = _mm512_setzero_si512(), b = a, c = a, d = a;
    for (size_t i = 0; i < part; i += ROUND)
        for (size_t place = 0; place < PLACES; place++) {
            const char *at = start + place * part + i;
            a = _mm512_or_si512(a, _mm512_load_si512(at));
            b = _mm512_or_si512(b, _mm512_load_si512(at + 64));
            c = _mm512_or_si512(c, _mm512_load_si512(at + 128));
            d = _mm512_or_si512(d, _mm512_load_si512(at + 192));
        }
    a = _mm512_or_si512(_mm512_or_si512(a, b), _mm512_or_si512(c, d));
    return (uint64_t)_mm512_reduce_or_epi64(a);
}

#define LOAD(k) _mm256_load_si256((const __m256i *)(const void *)(at + 32 * (k)))

__attribute__((target("avx2"))) static uint64_t read_avx2(const void *from, size_t bytes) {
    const char *start = from;
    const size_t part = bytes / PLACES;
    __m256i a = _mm256_setzero_si256(), b = a, c = a, d = a;
    for (size_t i = 0; i < part; i += ROUND)
        for (size_t place = 0; place < PLACES; place++) {
            const char *at = start + place * part + i;
            a = _mm256_or_si256(_mm256_or_si256(a, LOAD(0)), LOAD(1));
            b = _mm256_or_si256(_mm256_or_si256(b, LOAD(2)), LOAD(3));
            c = _mm256_or_si256(_mm256_or_si256(c, LOAD(4)), LOAD(5));
            d = _mm256_or_si256(_mm256_or_si256(d, LOAD(6)), LOAD(7));
        }
    a = _mm256_or_si256(_mm256_or_si256(a, b), _mm256_or_si256(c, d));
    return (uint64_t)(a[0] | a[1] | a[2] | a[3]);
}

fbh_read_loop *fbh_read_widest(void) {
    if (__builtin_cpu_supports("avx512f"))
        return read_avx512;
    return __builtin_cpu_supports("avx2") ? read_avx2 : read_portable;
}
#else
fbh_read_loop *fbh_read_widest(void) { return read_portable; }
#endif
