/* Threads of a threadgroup as fibers of one host thread. A fiber runs until it has to meet others: all lanes of its
 * simdgroup, or all threads of its threadgroup. The last to come does what is to be done for all and goes on;
 * the others are resumed when their turn comes. Which fiber is next is the schedule; a simdgroup runs on as
 * long as it can, so that it meets what others have not done yet where a barrier is missing.
 *
 * Threadgroup memory is 0xFF at the start, NaN in every type, and ends where memory begins that may not be touched.
 * This file is never instrumented: ThreadSanitizer sees kernels only, and what barriers order (the __tsan_ functions,
 * present in a program that is linked with it). */
#include "runtime.h"

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <map>
#include <random>
#include <string>
#include <sys/mman.h>
#include <vector>

#if !defined(__x86_64__)
#error "fibers are switched on x86-64 only"
#endif

extern "C" {
__attribute__((weak)) void *__tsan_get_current_fiber(void);
__attribute__((weak)) void *__tsan_create_fiber(unsigned flags);
__attribute__((weak)) void __tsan_switch_to_fiber(void *fiber, unsigned flags);
__attribute__((weak)) void __tsan_acquire(void *at);
__attribute__((weak)) void __tsan_release(void *at);

void emulator_switch(void **from, void *to);
}

asm(R"(
        .text
        .globl emulator_switch
        .hidden emulator_switch
emulator_switch:
        pushq %rbp
        pushq %rbx
        pushq %r12
        pushq %r13
        pushq %r14
        pushq %r15
        movq %rsp, (%rdi)
        movq %rsi, %rsp
        popq %r15
        popq %r14
        popq %r13
        popq %r12
        popq %rbx
        popq %rbp
        ret
)");

namespace {

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

thread_local machine *m; /* NULL: no kernel runs here */

void go_to(void **from, fiber *to) {
    m->self = to;
    if (__tsan_switch_to_fiber)
        __tsan_switch_to_fiber(to->tsan, 1);
    emulator_switch(from, to->sp);
}

[[noreturn]] void leave() {
    void *nowhere;
    fiber *self = m->self;
    if (__tsan_switch_to_fiber)
        __tsan_switch_to_fiber(m->scheduler_tsan, 1);
    m->self = nullptr;
    emulator_switch(self ? &self->sp : &nowhere, m->scheduler);
    abort();
}

std::string describe(emulator_site s) {
    return s.file ? std::string(s.what) + " at " + s.file + ":" + std::to_string(s.line) : "the start";
}

/* Ends the dispatch. */
[[noreturn]] void fail(const std::string &why) {
    const unsigned *g = m->self ? m->self->ids.group : m->fibers[0].ids.group;
    char where[128];
    snprintf(where, sizeof where, "%s, threadgroup %u,%u,%u", m->name, g[0], g[1], g[2]);
    m->error = std::string(where) + ": " + why;
    leave();
}

/* Not all threads come to where some wait: how many are where. */
[[noreturn]] void fail_divergence() {
    std::map<std::string, unsigned> places;
    for (const fiber &f : m->fibers)
        places[f.done ? "have ended" : "wait in " + describe(f.site)]++;
    std::string text = "threads part ways:";
    for (const auto &p : places)
        text += " " + std::to_string(p.second) + " " + p.first + ";";
    fail(text);
}

bool can_run(const fiber &f) { return !f.done && (!f.gate || f.gate->turn != f.seen); }

/* The next fiber that can run: of the same simdgroup if there is one. In `order` simdgroups stay together. */
fiber *next() {
    const unsigned all = (unsigned)m->fibers.size(), here = m->place[m->self->ids.thread];
    const unsigned first = here / LANES * LANES, lanes = std::min(LANES, all - first);
    for (unsigned n = 1; n <= lanes; n++) {
        fiber &f = m->fibers[m->order[first + (here - first + n) % lanes]];
        if (can_run(f))
            return &f;
    }
    for (unsigned n = first + lanes; n < first + all; n++) {
        fiber &f = m->fibers[m->order[n % all]];
        if (can_run(f))
            return &f;
    }
    return nullptr;
}

void wait_for(const meeting *gate) {
    fiber *self = m->self;
    self->gate = gate, self->seen = gate->turn;
    fiber *to = next();
    if (!to)
        fail_divergence();
    go_to(&self->sp, to);
    self->gate = nullptr;
}

void open_meeting(meeting *x) { x->arrived = 0, x->turn++; }

simdgroup &my_simdgroup() { return m->simdgroups[m->self->ids.thread / LANES]; }
unsigned my_lane() { return m->self->ids.thread % LANES; }

/* All lanes came, and by the same way. */
void check_lanes() {
    const fiber *first = &m->fibers[m->self->ids.thread / LANES * LANES];
    for (unsigned l = 1; l < LANES; l++) {
        const emulator_site &a = first[l].site, &b = first->site;
        if (a.line != b.line || a.what != b.what)
            fail("lanes of a simdgroup part ways: " + describe(b) + " and " + describe(a));
        if (first[l].trail != first->trail)
            fail("lanes of a simdgroup part ways before " + describe(b) + ": not all loaded or stored a matrix");
    }
}

/* The lanes of a simdgroup meet; the last to come does `op`. Returns which of two places the results are in:
 * one is read while the next meeting fills the other. */
template <class F> unsigned meet(emulator_site site, F op) {
    simdgroup &g = my_simdgroup();
    const unsigned parity = g.parity;
    m->self->site = site;
    if (++g.lanes.arrived < LANES) {
        wait_for(&g.lanes);
        return parity;
    }
    check_lanes();
    op(g, parity);
    g.parity ^= 1;
    open_meeting(&g.lanes);
    return parity;
}

void barrier(emulator_site site) {
    char *order = &m->all.order[m->all.turn % 2];
    m->self->site = site;
    if (__tsan_release)
        __tsan_release(order);
    if (++m->all.arrived < m->fibers.size())
        wait_for(&m->all);
    else {
        for (const fiber &f : m->fibers)
            if (f.site.line != site.line || f.site.what != site.what)
                fail_divergence();
        m->counts.barriers++;
        open_meeting(&m->all);
    }
    if (__tsan_acquire)
        __tsan_acquire(order);
}

void simd_barrier(emulator_site site) {
    simdgroup &g = my_simdgroup();
    char *order = &g.lanes.order[g.lanes.turn % 2];
    if (__tsan_release)
        __tsan_release(order);
    meet(site, [](simdgroup &, unsigned) {});
    if (__tsan_acquire)
        __tsan_acquire(order);
}

void note(emulator_site site) {
    m->self->trail = (m->self->trail * 31 + (unsigned)site.line) * 31 + (unsigned char)site.what[0];
}

/* ThreadSanitizer sees memcpy wherever it is called, and lanes may exchange values without ordering memory. */
void copy(void *to, const void *from, size_t size) {
    for (size_t n = 0; n < size; n++)
        ((volatile unsigned char *)to)[n] = ((const unsigned char *)from)[n];
}

void shuffle(void *value, size_t size, unsigned from, emulator_site site) {
    simdgroup &g = my_simdgroup();
    copy(g.slots[g.parity][my_lane()], value, size);
    const unsigned at = meet(site, [](simdgroup &, unsigned) {});
    copy(value, g.slots[at][from % LANES], size);
}

unsigned vote(bool x, emulator_site site) {
    simdgroup &g = my_simdgroup();
    g.votes[my_lane()] = x;
    const unsigned at = meet(site, [](simdgroup &s, unsigned parity) {
        unsigned any = 0, every = 1;
        for (bool v : s.votes)
            any |= v, every &= v;
        s.verdict[parity] = any | every << 1;
    });
    return g.verdict[at];
}

/* Lane l has two neighbours of a row: where. As MLX, metal-flash-attention and tinygrad have it. */
unsigned element_of(unsigned l) { return (l / 16 * 4 + l / 2 % 4) * 8 + l / 8 % 2 * 4 + l % 2 * 2; }

emulator_pair multiply(emulator_pair a, emulator_pair b, emulator_pair c, emulator_site site) {
    simdgroup &g = my_simdgroup();
    const unsigned e = element_of(my_lane());
    g.a[e] = a.x, g.a[e + 1] = a.y;
    g.b[e] = b.x, g.b[e + 1] = b.y;
    g.c[g.parity][e] = c.x, g.c[g.parity][e + 1] = c.y;
    const unsigned at = meet(site, [](simdgroup &s, unsigned parity) {
        for (int i = 0; i < 8; i++)
            for (int k = 0; k < 8; k++)
                for (int j = 0; j < 8; j++)
                    s.c[parity][i * 8 + j] += s.a[i * 8 + k] * s.b[k * 8 + j];
        m->counts.products++;
    });
    return {g.c[at][e], g.c[at][e + 1]};
}

unsigned lane() { return my_lane(); }

/* ---- Checked libraries: every access ---- */

bool within(const void *at, size_t bytes, const void *from, size_t size) {
    const uintptr_t a = (uintptr_t)at, f = (uintptr_t)from;
    return a >= f && a + bytes <= f + size;
}

bool is_constant(const void *at) {
    Dl_info info;
    return dladdr(at, &info) && info.dli_fbase == m->image;
}

void touched(const void *at, size_t bytes, bool store, const void *code) {
    if (!m || !m->self)
        return;
    if (within(at, bytes, m->stacks, (size_t)EMULATOR_THREADS * STACK))
        return;
    if (within(at, bytes, m->shared, m->dispatch->threadgroup_bytes)) {
        (store ? m->counts.shared_stores : m->counts.shared_loads) += bytes;
        return;
    }
    for (int n = 0; n < EMULATOR_BUFFERS; n++)
        if (within(at, bytes, m->dispatch->buffers[n].at, m->dispatch->buffers[n].bytes)) {
            (store ? m->counts.stores : m->counts.loads)[n] += bytes;
            return;
        }
    if (within(at, bytes, m->fibers.data(), m->fibers.size() * sizeof(fiber)) ||
        within(at, bytes, m->dispatch, sizeof *m->dispatch) ||
        within(at, bytes, &emulator_the_runtime, sizeof emulator_the_runtime)) /* the glue */
        return;
    if (is_constant(at))
        return;
    Dl_info info = {};
    dladdr(code, &info);
    char text[256];
    snprintf(text, sizeof text, "thread %u %s %zu bytes that are in no buffer (code at %#lx)", m->self->ids.thread,
             store ? "writes" : "reads", bytes, (unsigned long)((uintptr_t)code - (uintptr_t)info.dli_fbase));
    fail(text);
}

void loaded(const void *at, size_t bytes) { touched(at, bytes, false, __builtin_return_address(0)); }
void stored(const void *at, size_t bytes) { touched(at, bytes, true, __builtin_return_address(0)); }

/* ---- Threadgroups ---- */

void run_fiber() {
    fiber *self = m->self;
    if (__tsan_acquire)
        __tsan_acquire(&m->start);
    emulator_call call = m->call;
    call.ids = &self->ids;
    m->entry(&call);
    if (__tsan_release)
        __tsan_release(&m->end);
    self->done = true;
    self->site = {};
    if (--m->live == 0)
        leave();
    fiber *to = next();
    if (!to)
        fail_divergence();
    go_to(&self->sp, to);
    abort();
}

void prepare_stack(fiber *f, unsigned n) {
    void **top = (void **)(m->stacks + (size_t)(n + 1) * STACK - 64);
    *--top = nullptr; /* as a call leaves it: a return address, 8 below a multiple of 16 */
    *--top = (void *)run_fiber;
    for (int r = 0; r < 6; r++)
        *--top = nullptr;
    f->sp = top;
    if (__tsan_create_fiber && m->tsan_fibers.size() <= n)
        m->tsan_fibers.push_back(__tsan_create_fiber(0));
    f->tsan = __tsan_create_fiber ? m->tsan_fibers[n] : nullptr;
}

/* Whole simdgroups in some order, and the lanes of each in some order. */
void make_order(unsigned threads, unsigned schedule, std::mt19937 *random) {
    std::vector<unsigned> groups(threads / LANES), lanes(LANES);
    for (unsigned n = 0; n < groups.size(); n++)
        groups[n] = schedule == EMULATOR_REVERSE ? (unsigned)groups.size() - 1 - n : n;
    if (schedule >= EMULATOR_SHUFFLED)
        std::shuffle(groups.begin(), groups.end(), *random);
    m->order.clear(), m->place.resize(threads);
    for (unsigned g : groups) {
        for (unsigned l = 0; l < LANES; l++)
            lanes[l] = schedule == EMULATOR_REVERSE ? LANES - 1 - l : l;
        if (schedule >= EMULATOR_SHUFFLED)
            std::shuffle(lanes.begin(), lanes.end(), *random);
        for (unsigned l : lanes) {
            m->place[g * LANES + l] = (unsigned)m->order.size();
            m->order.push_back(g * LANES + l);
        }
    }
}

void run_group(const unsigned long *group) {
    const emulator_dispatch *d = m->dispatch;
    m->fibers.assign(d->threads, fiber());
    m->simdgroups.assign(d->threads / LANES, simdgroup());
    m->all = meeting();
    m->live = d->threads;
    memset(m->shared, 0xFF, d->threadgroup_bytes);
    for (unsigned n = 0; n < d->threads; n++) {
        fiber *f = &m->fibers[n];
        for (int x = 0; x < 3; x++)
            f->ids.group[x] = (unsigned)group[x], f->ids.groups[x] = (unsigned)d->groups[x];
        f->ids.thread = n, f->ids.threads = d->threads;
        prepare_stack(f, n);
    }
    m->counts.threadgroups++;
    if (__tsan_release)
        __tsan_release(&m->start);
    go_to(&m->scheduler, &m->fibers[m->order[0]]);
    if (__tsan_acquire)
        __tsan_acquire(&m->end);
}

/* ---- Memory that may not be touched ---- */

struct sigaction older;

void on_fault(int signal, siginfo_t *info, void *context) {
    const unsigned char *at = (const unsigned char *)info->si_addr;
    if (m && m->self && at >= m->pages && at < m->pages + m->page_bytes)
        fail("thread " + std::to_string(m->self->ids.thread) + " reaches beyond threadgroup memory, near " +
             describe(m->self->site));
    if (older.sa_flags & SA_SIGINFO && older.sa_sigaction)
        older.sa_sigaction(signal, info, context);
    else
        sigaction(signal, &older, nullptr); /* and the access happens again */
}

/* For every dispatch anew, as test programs set handlers of their own. */
void catch_faults() {
    struct sigaction action = {};
    sigaction(SIGSEGV, nullptr, &action);
    if (action.sa_flags & SA_SIGINFO && action.sa_sigaction == on_fault)
        return;
    older = action;
    action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_NODEFER;
    sigaction(SIGSEGV, &action, nullptr);
}

void make_memory(machine *to) {
    to->page_bytes = EMULATOR_THREADGROUP_BYTES + 2 * GUARD;
    to->stacks = (unsigned char *)mmap(nullptr, (size_t)EMULATOR_THREADS * STACK, PROT_READ | PROT_WRITE,
                                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    to->pages = (unsigned char *)mmap(nullptr, to->page_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                                      0);
    mprotect(to->pages, GUARD, PROT_NONE);
    mprotect(to->pages + to->page_bytes - GUARD, GUARD, PROT_NONE);
}

thread_local machine kept;

const char *refusal(const emulator_dispatch *d) {
    if (d->threads == 0 || d->threads > EMULATOR_THREADS || d->threads % LANES)
        return "a threadgroup has 32 to 1024 threads, in whole simdgroups";
    if (d->threadgroup_bytes > EMULATOR_THREADGROUP_BYTES)
        return "more threadgroup memory than the 32768 bytes that there are";
    return d->threadgroup_bytes % 16 ? "threadgroup memory comes in multiples of 16 bytes" : nullptr;
}

} // namespace

extern "C" {

const emulator_runtime emulator_the_runtime = {barrier, simd_barrier, note,   shuffle, vote,
                                               multiply, lane,        loaded, stored};

bool emulator_start(emulator_entry *entry, const char *name, const void *image, const emulator_dispatch *dispatch,
                    emulator_counts *counts, char *message, size_t size) {
    if (const char *why = refusal(dispatch)) {
        snprintf(message, size, "%s: %s", name, why);
        return false;
    }
    machine *to = &kept;
    if (!to->stacks)
        make_memory(to);
    to->entry = entry, to->name = name, to->image = image, to->dispatch = dispatch;
    to->counts = {};
    to->error.clear();
    to->shared = to->pages + to->page_bytes - GUARD - dispatch->threadgroup_bytes;
    to->call = {dispatch, nullptr, to->shared};
    if (__tsan_get_current_fiber)
        to->scheduler_tsan = __tsan_get_current_fiber();
    catch_faults();
    m = to;
    std::mt19937 random(dispatch->schedule);
    make_order(dispatch->threads, dispatch->schedule, &random);
    const unsigned long *g = dispatch->groups, all = g[0] * g[1] * g[2];
    for (unsigned long n = 0; n < all && to->error.empty(); n++) {
        const unsigned long i = dispatch->schedule == EMULATOR_REVERSE ? all - 1 - n : n;
        const unsigned long group[3] = {i % g[0], i / g[0] % g[1], i / g[0] / g[1]};
        run_group(group);
    }
    m = nullptr;
    *counts = to->counts;
    if (!to->error.empty())
        snprintf(message, size, "%s", to->error.c_str());
    return to->error.empty();
}
}
