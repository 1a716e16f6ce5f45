/* splitmix64 (Steele, Lea and Flood, 2014): first weights, places of batches, samples. Floor: examples/gpt.
 */
#ifndef GPT_RANDOM_H
#define GPT_RANDOM_H

#include <stdint.h>

/* Every bit of the result depends on every bit of z, and of the numbers z that were taken in before. */
static inline uint64_t random_mix(uint64_t z) {
    z += 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

/* A whole number below 2^53, each as likely; the state goes on. */
static inline uint64_t random_53(uint64_t *state) {
    const uint64_t z = random_mix(*state) >> 11;
    *state += 0x9e3779b97f4a7c15u;
    return z;
}

#endif
