/* Threads of a threadgroup as fibers of one host thread. A fiber runs until it has to meet others: all lanes of its
 * simdgroup, or all threads of its threadgroup. The last to come does what is to be done for all and goes on;
 * the others are resumed when their turn comes. Which fiber is next is the schedule; a simdgroup runs on as
 * long as it can, so that it meets what others have not done yet where a barrier is missing.
 *
 * Threadgroup memory is 0xFF at the start, NaN in every type, and ends where memory begins that may not be touched.
 * Next: meet.cpp. */
#include "machine.hpp"

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>

#if !defined(__x86_64__)
#error "fibers are switched on x86-64 only"
#endif

extern "C" void emulator_switch(void **from, void *to);

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

namespace emulator {

__thread machine *m;

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

/* How many are where. */
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

} // namespace emulator

using namespace emulator;

extern "C" bool emulator_start(emulator_entry *entry, const char *name, const void *image, const emulator_dispatch *dispatch,
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
