/* A main for fuzz targets where libFuzzer is not at hand: seeded inputs, each a function of its number alone.
 *     fuzz_x [runs [seed]]
 * An input is noise, or one of the target's own seeds after a few mutations. What fails names the number that
 * makes it again: fuzz_x 1 <number>. */
#include <inttypes.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* What a target may offer. Seed number `index`, at most `max` bytes, its size returned; 0 = there are no
 * more. */
__attribute__((weak)) size_t fb_fuzz_seed_input(unsigned index, uint8_t *data, size_t max);
/* How many runs take about ten seconds. */
__attribute__((weak)) extern const unsigned fb_fuzz_runs;

enum { MAX = 4096, RUNS = 100000 };

typedef struct input {
    uint8_t data[MAX];
    size_t size;
    uint64_t random;
} input;

/* splitmix64; a number below `below`. */
static uint64_t draw(input *in, uint64_t below) {
    uint64_t z = in->random += UINT64_C(0x9E3779B97F4A7C15);
    z = (z ^ (z >> 30)) * UINT64_C(0xBF58476D1CE4E5B9);
    z = (z ^ (z >> 27)) * UINT64_C(0x94D049BB133111EB);
    return (z ^ (z >> 31)) % below;
}

static unsigned count_seeds(void) {
    static uint8_t data[MAX];
    unsigned n = 0;
    while (fb_fuzz_seed_input && fb_fuzz_seed_input(n, data, MAX))
        n++;
    return n;
}

/* Makes room for, or takes away, `n` bytes at `at`. */
static void widen(input *in, size_t at, size_t n) {
    if (in->size + n > MAX)
        return;
    memmove(in->data + at + n, in->data + at, in->size - at);
    in->size += n;
}

static void narrow(input *in, size_t at, size_t n) {
    if (n > in->size - at)
        n = in->size - at;
    memmove(in->data + at, in->data + at + n, in->size - at - n);
    in->size -= n;
}

/* Numbers that programs get wrong, as 1 to 8 bytes over what is there. */
static void put_number(input *in, size_t at) {
    static const uint64_t numbers[] = {0,      1,          0x7F,       0x80,       0xFF,      0x7FFF,
                                       0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, INT64_MAX, UINT64_MAX};
    uint64_t x = numbers[draw(in, sizeof numbers / sizeof *numbers)];
    size_t n = (size_t)1 << draw(in, 4);
    for (size_t i = 0; i < n && at + i < in->size; i++, x >>= 8)
        in->data[at + i] = (uint8_t)x;
}

static void mutate(input *in) {
    size_t at = (size_t)draw(in, in->size + 1), n = (size_t)draw(in, 16) + 1;
    if (at == in->size) {
        widen(in, at, n);
        for (size_t i = at; i < in->size; i++)
            in->data[i] = (uint8_t)draw(in, 256);
        return;
    }
    switch (draw(in, 6)) {
    case 0:
        in->data[at] ^= (uint8_t)(1u << draw(in, 8));
        break;
    case 1:
        in->data[at] = (uint8_t)draw(in, 256);
        break;
    case 2:
        in->data[at] = (uint8_t)("0123456789-\"{}[]:,"[draw(in, 18)]);
        break;
    case 3:
        put_number(in, at);
        break;
    case 4:
        narrow(in, at, n);
        break;
    default: /* a piece of it twice */
        widen(in, at, n < in->size - at ? n : in->size - at);
    }
}

static void make(input *in, uint64_t number, unsigned seeds) {
    in->random = number * UINT64_C(0xD1342543DE82EF95) + 1;
    if (seeds && draw(in, 8)) {
        in->size = fb_fuzz_seed_input((unsigned)draw(in, seeds), in->data, MAX);
        for (uint64_t n = draw(in, 9); n > 0; n--)
            mutate(in);
        return;
    }
    in->size = (size_t)draw(in, (uint64_t)2 << draw(in, 10));
    for (size_t i = 0; i < in->size; i++)
        in->data[i] = (uint8_t)draw(in, 256);
}

/* ---- What fails --------------------------------------------------------------------------------------- */

static char again[80]; /* the sentence, written before each run: a signal handler can only print it */

static void tell(void) {
    ssize_t written = write(STDERR_FILENO, again, strlen(again));
    (void)written;
}

static void on_signal(int signal_number) {
    tell();
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

/* The sanitizers' own way to say that a program ends here. */
__attribute__((weak)) void __sanitizer_set_death_callback(void (*callback)(void));

static void watch(void) {
    static const int signals[] = {SIGABRT, SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    if (__sanitizer_set_death_callback) {
        __sanitizer_set_death_callback(tell);
        return;
    }
    for (size_t n = 0; n < sizeof signals / sizeof *signals; n++)
        signal(signals[n], on_signal);
}

static bool read_number(const char *text, uint64_t *number) {
    char *end;
    *number = strtoull(text, &end, 10);
    return *text >= '0' && *text <= '9' && !*end;
}

int main(int argc, char **argv) {
    uint64_t runs = &fb_fuzz_runs ? fb_fuzz_runs : RUNS, seed = 1;
    if (argc > 3 || (argc > 1 && !read_number(argv[1], &runs)) ||
        (argc > 2 && !read_number(argv[2], &seed))) {
        fprintf(stderr, "usage: %s [runs [seed]]\n", argv[0]);
        return 2;
    }
    static input in;
    const unsigned seeds = count_seeds();
    watch();
    for (uint64_t n = seed; n < seed + runs; n++) {
        make(&in, n, seeds);
        snprintf(again, sizeof again, "input %" PRIu64 " fails; again: 1 %" PRIu64 "\n", n, n);
        /* A copy of its exact size, so that a sanitizer sees a read past the end. */
        uint8_t *exact = malloc(in.size + !in.size);
        if (!exact)
            abort();
        memcpy(exact, in.data, in.size);
        LLVMFuzzerTestOneInput(exact, in.size);
        free(exact);
    }
    printf("%" PRIu64 " inputs from %" PRIu64 ", %u seeds\n", runs, seed, seeds);
    return 0;
}
