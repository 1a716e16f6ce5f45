/* A 128-bit hash: two 64-bit sums with different seeds and multipliers, eight bytes at a time. It tells texts
 * and files apart; it is not for security. A step is one to one in the sum and in the word, so that texts
 * which differ in one word never meet. Floor: base. */
#ifndef FB_BASE_HASH_H
#define FB_BASE_HASH_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct fb__hash {
    uint64_t a, b;
} fb__hash;

static inline fb__hash fb__hash_begin(void) {
    return (fb__hash){UINT64_C(0x9e3779b97f4a7c15), UINT64_C(0xc2b2ae3d27d4eb4f)};
}

static inline void fb__hash_word(fb__hash *hash, uint64_t word) {
    uint64_t a = (hash->a ^ word) * UINT64_C(0x9fb21c651e98df25);
    uint64_t b = (hash->b + word) * UINT64_C(0xd6e8feb86659fd93);
    hash->a = a ^ a >> 32;
    hash->b = b ^ b >> 29;
}

/* The size goes in as well, so that two pieces are not the same as one piece of both. */
static inline void fb__hash_add(fb__hash *hash, const void *data, size_t size) {
    const char *at = data;
    uint64_t word;
    for (size_t left = size; left; left -= left < sizeof word ? left : sizeof word, at += sizeof word) {
        word = 0;
        memcpy(&word, at, left < sizeof word ? left : sizeof word);
        fb__hash_word(hash, word);
    }
    fb__hash_word(hash, size);
}

static inline uint64_t fb__hash_spread(uint64_t x) {
    x = (x ^ x >> 33) * UINT64_C(0xff51afd7ed558ccd);
    x = (x ^ x >> 33) * UINT64_C(0xc4ceb9fe1a85ec53);
    return x ^ x >> 33;
}

/* What was added so far, with every bit spread over all. */
static inline fb__hash fb__hash_end(fb__hash hash) {
    return (fb__hash){fb__hash_spread(hash.a), fb__hash_spread(hash.b)};
}

#endif
