/* See peak.h. Threads that repeat a piece of work until their time is over. Floor: harness. */
#include "peak.h"
#include "peak_loops.h"
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

const char *fbh_peak_isa(void) { return fbh_flop_kernel_of(FBH_PEAK_F32).name; }

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* ---- Threads ------------------------------------------------------------------------------------------- */

/* One thread's share: it repeats its piece until the time is over, and leaves its own rate. */
typedef struct share {
    double (*piece)(struct share *s);
    double work; /* of one piece */
    fbh_flop_loop *flops;
    int64_t size; /* rounds of the loop, elements of the three streams */
    double *a, *b, *d;
    fbh_read_loop *read;
    char *memory; /* to read: `bytes`, of which what lies before `at` has been read last */
    size_t bytes, at;
    double seconds, rate;
    volatile double result; /* keeps the loops from being dropped */
} share;

static void *work(void *argument) {
    share *s = argument;
    s->result = s->piece(s);
    int64_t pieces = 0;
    double start = now(), passed;
    do {
        s->result = s->piece(s);
        pieces++;
        passed = now() - start;
    } while (passed < s->seconds);
    s->rate = (double)pieces * s->work / passed;
    return NULL;
}

/* Runs all shares at once; false if a thread did not start. */
static bool run(share *shares, int threads, void *(*body)(void *)) {
    pthread_t *ids = calloc((size_t)threads, sizeof *ids);
    int started = 0;
    while (ids && started < threads && !pthread_create(&ids[started], NULL, body, &shares[started]))
        started++;
    for (int i = 0; i < started; i++)
        pthread_join(ids[i], NULL);
    free(ids);
    return started == threads;
}

/* The sum of all rates; 0 if a thread did not start. */
static double all(share *shares, int threads) {
    double rate = 0;
    if (run(shares, threads, work))
        for (int i = 0; i < threads; i++)
            rate += shares[i].rate;
    return rate;
}

/* ---- Multiply-adds ------------------------------------------------------------------------------------- */

static double flop_piece(share *s) { return s->flops(s->size); }

double fbh_peak_flops(fbh_peak_type type, int threads, double seconds) {
    const fbh_flop_kernel best = fbh_flop_kernel_of(type);
    const int64_t rounds = 100000;
    share *shares = calloc((size_t)threads, sizeof *shares);
    for (int i = 0; shares && i < threads; i++)
        shares[i] = (share){.piece = flop_piece,
                            .flops = best.loop,
                            .work = best.flops_per_round * (double)rounds,
                            .size = rounds,
                            .seconds = seconds};
    double rate = shares && best.loop ? all(shares, threads) : 0;
    free(shares);
    return rate * 1e-9;
}

/* ---- Three streams ------------------------------------------------------------------------------------- */

static double stream_piece(share *s) {
    double *a = s->a;
    const double *b = s->b, *d = s->d, c = 0.001;
    for (int64_t i = 0; i < s->size; i++)
        a[i] = b[i] + c * d[i];
    return a[s->size - 1];
}

double fbh_peak_bandwidth(int threads, double seconds, int megabytes) {
    const int64_t n = (int64_t)megabytes * 1000000 / (int64_t)sizeof(double);
    const size_t total = (size_t)(n * threads);
    share *shares = calloc((size_t)threads, sizeof *shares);
    double *memory = malloc(3 * total * sizeof *memory), rate = 0;
    if (shares && memory) {
        for (size_t i = 0; i < 3 * total; i++)
            memory[i] = 1;
        for (int i = 0; i < threads; i++) {
            double *a = memory + 3 * n * i;
            shares[i] = (share){.piece = stream_piece,
                                .work = 3.0 * (double)n * sizeof(double),
                                .a = a,
                                .b = a + n,
                                .d = a + 2 * n,
                                .size = n,
                                .seconds = seconds};
        }
        rate = all(shares, threads);
    }
    free(memory);
    free(shares);
    return rate * 1e-9;
}

/* ---- Reading ------------------------------------------------------------------------------------------- */

enum { HUGE_PAGE = 2 << 20, READ_PIECE = 4 * HUGE_PAGE, LEAST_READ = 64 << 20 };

struct fbh_reader {
    char *memory;
    int threads;
    share *shares;
};

static double read_piece(share *s) {
    if (s->at + READ_PIECE > s->bytes)
        s->at = 0;
    const uint64_t any = s->read(s->memory + s->at, READ_PIECE);
    s->at += READ_PIECE;
    return (double)any;
}

/* Each thread touches its part first, so that it is near where there are several memories. */
static void *touch(void *argument) {
    const share *s = argument;
    memset(s->memory, 1, s->bytes);
    return NULL;
}

/* Bytes for each of `threads`, whole pieces. */
static size_t read_bytes(int threads) {
    const double pages = (double)sysconf(_SC_PHYS_PAGES), page = (double)sysconf(_SC_PAGESIZE);
    double total = (double)threads * LEAST_READ, cache = 0;
#ifdef _SC_LEVEL3_CACHE_SIZE
    cache = (double)sysconf(_SC_LEVEL3_CACHE_SIZE);
#endif
    total = total < 2 * cache ? 2 * cache : total;
    total = total > pages * page / 4 ? pages * page / 4 : total;
    const size_t pieces = (size_t)(total / threads / READ_PIECE);
    return (pieces > 1 ? pieces : 1) * READ_PIECE;
}

fbh_reader *fbh_reader_open(int threads) {
    fbh_reader *r = calloc(1, sizeof *r);
    share *shares = calloc((size_t)threads, sizeof *shares);
    void *memory = NULL;
    const size_t bytes = read_bytes(threads);
    if (!r || !shares || posix_memalign(&memory, HUGE_PAGE, bytes * (size_t)threads)) {
        free(shares);
        free(r);
        return NULL;
    }
#ifdef MADV_HUGEPAGE
    madvise(memory, bytes * (size_t)threads, MADV_HUGEPAGE);
#endif
    *r = (fbh_reader){memory, threads, shares};
    for (int i = 0; i < threads; i++)
        shares[i] = (share){.piece = read_piece,
                            .work = READ_PIECE,
                            .read = fbh_read_widest(),
                            .memory = r->memory + (size_t)i * bytes,
                            .bytes = bytes};
    run(shares, threads, touch);
    return r;
}

void fbh_reader_close(fbh_reader *r) {
    if (r) {
        free(r->memory);
        free(r->shares);
        free(r);
    }
}

double fbh_reader_run(fbh_reader *r, double seconds) {
    for (int i = 0; i < r->threads; i++)
        r->shares[i].seconds = seconds;
    return all(r->shares, r->threads) * 1e-9;
}
