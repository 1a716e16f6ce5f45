/* A dispatch under way: threads as fibers, what they wait for, what lanes exchange. Next: schedule.cpp. */
#ifndef EMULATOR_MACHINE_HPP
#define EMULATOR_MACHINE_HPP

#include "runtime.h"

#include <cstdint>
#include <string>
#include <sys/mman.h>
#include <vector>

/* Present in a program that runs under ThreadSanitizer. */
extern "C" {
__attribute__((weak)) void *__tsan_get_current_fiber(void);
__attribute__((weak)) void *__tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_switch_to_fiber(void *fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void *at);
__attribute__((weak)) void __tsan_release(void *at);
}

namespace emulator {

constexpr unsigned LANES = 32, STACK = 256 << 10, GUARD = 64 << 10; /* bytes around threadgroup memory */

struct meeting { /* of lanes, or of threads */
    unsigned turn = 0, arrived = 0;
    /* Their addresses are what ThreadSanitizer synchronises on, in turns: who is on may come to the next meeting before
     * others have left this one. */
    char order[2] = {};
};

struct fiber {
    void *sp = nullptr, *tsan = nullptr;
    const meeting *gate = nullptr; /* waits while gate->turn == seen */
    unsigned seen = 0;
    bool done = false;
    emulator_ids ids = {};
    emulator_site site = {};
    uint64_t trail = 0; /* places passed that all lanes of a simdgroup must pass */
};

struct simdgroup {
    meeting lanes;
    unsigned parity = 0;
    unsigned char slots[2][LANES][16];
    bool votes[LANES];
    unsigned verdict[2];
    float a[64], b[64], c[2][64];
};

/* A dispatch under way on this host thread. */
struct machine {
    emulator_entry *entry = nullptr;
    const char *name = "";
    const void *image = nullptr;
    const emulator_dispatch *dispatch = nullptr;
    emulator_counts counts = {};
    emulator_call call = {};
    std::vector<fiber> fibers;
    std::vector<simdgroup> simdgroups;
    std::vector<unsigned> order, place; /* order of fibers, and where each is in it */
    meeting all;
    unsigned live = 0;
    fiber *self = nullptr;
    void *scheduler = nullptr, *scheduler_tsan = nullptr;
    std::string error;
    char start = 0, end = 0; /* synchronisation with the host thread */

    /* Kept from dispatch to dispatch. */
    unsigned char *stacks = nullptr, *pages = nullptr, *shared = nullptr;
    size_t page_bytes = 0;
    std::vector<void *> tsan_fibers;
    ~machine() {
        if (stacks)
            munmap(stacks, (size_t)EMULATOR_THREADS * STACK);
        if (pages)
            munmap(pages, page_bytes);
    }
};

extern __thread machine *m; /* NULL: no kernel runs here */

/* Of schedule.cpp. */
void wait_for(const meeting *gate); /* until it opens */
[[noreturn]] void fail(const std::string &why);
[[noreturn]] void fail_divergence(); /* not all threads come to where some wait */
std::string describe(emulator_site site);

} // namespace emulator

#endif
