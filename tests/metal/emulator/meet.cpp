/* What threads do together: barriers, values and matrices that lanes exchange; and what they do alone that somebody
 * wants to see, their loads and stores. Never instrumented: ThreadSanitizer sees kernels only, and what barriers
 * order. */
#include "machine.hpp"

#include <cstdio>
#include <cstring>
#include <dlfcn.h>

namespace emulator {

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

} // namespace emulator

using namespace emulator;

extern "C" const emulator_runtime emulator_the_runtime = {barrier, simd_barrier, note,   shuffle, vote,
                                                          multiply, lane,        loaded, stored};
