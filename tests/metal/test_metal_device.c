/* What a program gives the library on Metal, on the mock: memory, streams of all kinds, buffers that do not
 * fit, work that is too long for one command buffer. */
#include "support.h"

static const problem fused = {"fused", 0, FB_F16, FB_AUTO, 100, 200, "fb_forward", "fb_delta fb_dq fb_dkdv"};

/* ---- Objects that a program has ---- */

static fb__id device_at(const mock *m, unsigned long index) {
    fb__id devices = m->objc.copy_devices();
    fb__id device = FB__SEND(&m->objc, at, devices, index);
    FB__GET(&m->objc, release, devices);
    return device; /* devices live as long as the process */
}

static fb__id queue_on(const mock *m, unsigned long index) {
    return FB__GET(&m->objc, new_queue, device_at(m, index));
}

/* ---- Memory ---- */

static void memory(void) {
    mock m = load_metal();
    fb_ref a, b;
    char bytes[256], back[256];
    for (int n = 0; n < 256; n++)
        bytes[n] = (char)n;
    errno = 77;
    expect(fb_alloc(&a, FB_METAL, 0, 256) == FB_OK && a.data && !a.offset);
    expect(fb_alloc(&b, FB_METAL, 0, 0) == FB_OK && b.data);
    expect(fb_write(a, bytes, 256, FB_METAL, 0) == FB_OK);
    expect(fb_write((fb_ref){a.data, 200}, bytes, 56, FB_METAL, 0) == FB_OK);
    expect(fb_read(back, (fb_ref){a.data, 1}, 255, FB_METAL, 0) == FB_OK);
    expect(memcmp(back, bytes + 1, 199) == 0 && memcmp(back + 199, bytes, 56) == 0);
    expect(fb_write((fb_ref){a.data, 256}, bytes, 0, FB_METAL, 0) == FB_OK);
    expect(fb_write((fb_ref){a.data, 200}, bytes, 57, FB_METAL, 0) == FB_INVALID);
    expect_words(fb_last_error(), "MTLBuffer of to has 256 bytes, fewer than the 57 at offset 200");
    expect(fb_read(back, (fb_ref){a.data, UINT64_MAX}, 2, FB_METAL, 0) == FB_INVALID);
    expect_words(fb_last_error(), "MTLBuffer of from has 256 bytes");
    expect(fb_sync(FB_METAL, 0, NULL) == FB_OK);
    expect(fb_free(&a, FB_METAL, 0) == FB_OK && !a.data);
    expect(fb_free(&a, FB_METAL, 0) == FB_OK);
    expect(fb_free(&b, FB_METAL, 0) == FB_OK);
    expect(errno == 77);
    expect_nothing_left(&m, "memory", 0);
}

static void refused_memory(void) {
    mock m = load_metal();
    fb_ref a;
    char byte = 1;
    m.state->buffer_most = 1 << 20;
    expect(fb_alloc(&a, FB_METAL, 0, (1 << 20) + 1) == FB_MEMORY && !a.data);
    expect_words(fb_last_error(), "no memory for 1048577 bytes on Metal device 0, Mock Apple GPU 0");
    m.state->memory_most = 1 << 16;
    expect(fb_alloc(&a, FB_METAL, 0, 1 << 17) == FB_MEMORY && !a.data);
    expect(fb_alloc(&a, FB_METAL, -1, 16) == FB_NO_DEVICE);
    expect_words(fb_last_error(), "index is -1");
    expect(fb_sync(FB_METAL, 2, NULL) == FB_NO_DEVICE);
    expect_words(fb_last_error(), "index is 2");
    /* A buffer of a program's that the host does not see. */
    a = (fb_ref){FB__SEND(&m.objc, new_buffer, device_at(&m, 0), 64, 2 << 4), 0};
    expect(fb_write(a, &byte, 1, FB_METAL, 0) == FB_UNSUPPORTED);
    expect_words(fb_last_error(), "private storage");
    expect(fb_read(&byte, a, 1, FB_METAL, 0) == FB_UNSUPPORTED);
    expect(fb_free(&a, FB_METAL, 0) == FB_OK);
    expect_nothing_left(&m, "refused memory", 0);
}

/* A call may fail before or after the memory is there; nothing is left of it in any case. */
static void memory_failures(void) {
    mock m = load_metal();
    char byte = 1;
    for (long n = 1;; n++) {
        fb_ref a = {NULL, 0};
        m.state->failed = NULL;
        m.state->fail_at = m.state->calls + n;
        const bool made = fb_alloc(&a, FB_METAL, 0, 64) == FB_OK;
        expect(made == !m.state->failed && made == (a.data != NULL));
        const bool written = made && fb_write(a, &byte, 1, FB_METAL, 0) == FB_OK;
        expect(!made || written == !m.state->failed);
        const bool waited = fb_sync(FB_METAL, 0, NULL) == FB_OK;
        expect(waited || m.state->failed);
        m.state->fail_at = 0;
        expect(fb_free(&a, FB_METAL, 0) == FB_OK);
        expect_nothing_left(&m, "memory failures", n);
        if (!m.state->failed) {
            expect(n > 4);
            break;
        }
        expect(strlen(fb_last_error()) == 0 || strlen(fb_last_error()) > 20);
    }
}

static void test_memory(void **state) {
    (void)state;
    in_child(memory);
    in_child(refused_memory);
    in_child(memory_failures);
}

/* ---- Streams ---- */

typedef struct scene {
    mock m;
    fb_plan *plan;
    fb_ref memory;
    fb_io io;
    void *pool;
} scene;

static scene begin(void) {
    scene s = {.m = load_metal()};
    s.m.state->devices = 2;
    fb_desc d = describe(&fused);
    expect(fb_alloc(&s.memory, FB_METAL, 0, MEMORY) == FB_OK);
    expect(fb_plan_create(&s.plan, &d) == FB_OK);
    s.io = tensors(&fused, s.memory, fb_plan_workspace(s.plan));
    s.m.state->committed = s.m.state->waited = 0;
    s.pool = s.m.objc.push();
    return s;
}

static void finish(scene *s, const char *where) {
    s->m.objc.pop(s->pool);
    fb_plan_destroy(s->plan);
    expect(fb_free(&s->memory, FB_METAL, 0) == FB_OK);
    expect_nothing_left(&s->m, where, 0);
}

/* A queue: the call returns before the GPU has done anything. */
static void on_a_queue(void) {
    scene s = begin();
    fb__id queue = queue_on(&s.m, 0);
    s.io.stream = queue;
    expect(fb_forward(s.plan, &s.io) == FB_OK && fb_backward(s.plan, &s.io) == FB_OK);
    expect(s.m.state->committed == 2 && s.m.state->waited == 0);
    expect_ran(&s.m, "");
    expect(fb_sync(FB_METAL, 0, queue) == FB_OK);
    expect_ran(&s.m, "fb_forward fb_delta fb_dq fb_dkdv");
    expect(fb_merge(s.plan, s.io.out, s.io.lse, s.io.q, s.io.k, queue) == FB_OK);
    expect(fb_sync(FB_METAL, 0, queue) == FB_OK);
    expect_ran(&s.m, "fb_merge_parts");
    FB__GET(&s.m.objc, release, queue);
    finish(&s, "on a queue");
}

/* A failure is said once, by whoever comes first: the wait, or the next call. */
static void failed_on_a_queue(void) {
    scene s = begin();
    fb__id queue = queue_on(&s.m, 0);
    s.io.stream = queue;
    s.m.state->fail_code = MOCK_CODE_TIMEOUT;
    for (int way = 0; way < 2; way++) {
        s.m.state->fail_at = s.m.state->calls + 3; /* commandBuffer, encoder, commit */
        expect(fb_forward(s.plan, &s.io) == FB_OK);
        s.m.state->fail_at = 0;
        expect(s.m.state->failed && strcmp(s.m.state->failed, "commit") == 0);
        expect(fb_backward(s.plan, &s.io) == FB_OK); /* nothing has run yet */
        if (way == 0) {
            expect(fb_sync(FB_METAL, 0, queue) == FB_DEVICE);
        } else { /* somebody else's wait */
            fb__id other = FB__GET(&s.m.objc, command_buffer, queue);
            FB__GET(&s.m.objc, commit, other);
            FB__GET(&s.m.objc, wait, other);
            expect(fb_forward(s.plan, &s.io) == FB_DEVICE);
        }
        expect_words(fb_last_error(), "the command buffer of an earlier call on this queue failed: commit");
        expect_words(fb_last_error(), "watchdog");
        expect(fb_sync(FB_METAL, 0, queue) == FB_OK);
    }
    FB__GET(&s.m.objc, release, queue);
    finish(&s, "failed on a queue");
}

static void failed_wait(void) {
    scene s = begin();
    const struct {
        int code;
        fb_status status;
        const char *words;
    } rows[] = {
        {MOCK_CODE_INTERNAL, FB_DEVICE, "the command buffer of this call failed: commit is to fail (1)"},
        {MOCK_CODE_TIMEOUT, FB_DEVICE, "watchdog"},
        {MOCK_CODE_MEMORY, FB_MEMORY, "(8)"}};
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n++) {
        s.m.state->fail_code = rows[n].code;
        s.m.state->fail_at = s.m.state->calls + 3;
        expect(fb_forward(s.plan, &s.io) == rows[n].status);
        expect_words(fb_last_error(), rows[n].words);
    }
    s.m.state->fail_at = 0;
    expect(fb_forward(s.plan, &s.io) == FB_OK);
    finish(&s, "failed wait");
}

/* A command buffer of the program's: the library encodes, and leaves the rest to who made it. */
static void in_a_command_buffer(void) {
    scene s = begin();
    fb__id queue = queue_on(&s.m, 0), buffer = FB__GET(&s.m.objc, command_buffer, queue);
    s.io.stream = buffer;
    expect(fb_forward(s.plan, &s.io) == FB_OK && fb_backward(s.plan, &s.io) == FB_OK);
    expect(s.m.state->committed == 0);
    expect(fb_sync(FB_METAL, 0, buffer) == FB_INVALID);
    expect_words(fb_last_error(), "was not committed");
    FB__GET(&s.m.objc, commit, buffer);
    expect(fb_sync(FB_METAL, 0, buffer) == FB_OK);
    expect_ran(&s.m, "fb_forward fb_delta fb_dq fb_dkdv");
    s.m.state->fail_at = s.m.state->calls + 3;
    s.m.state->fail_code = MOCK_CODE_INTERNAL;
    s.io.stream = buffer = FB__GET(&s.m.objc, command_buffer, queue);
    expect(fb_forward(s.plan, &s.io) == FB_OK);
    FB__GET(&s.m.objc, commit, buffer);
    s.m.state->fail_at = 0;
    expect(fb_sync(FB_METAL, 0, buffer) == FB_DEVICE);
    expect_words(fb_last_error(), "the command buffer of this stream failed");
    FB__GET(&s.m.objc, release, queue);
    finish(&s, "in a command buffer");
}

static void wrong_streams(void) {
    scene s = begin();
    fb__id other = queue_on(&s.m, 1);
    s.io.stream = other;
    expect(fb_forward(s.plan, &s.io) == FB_INVALID);
    expect_words(fb_last_error(),
                 "io.stream belongs to the device Mock Apple GPU 1, but the plan is for device "
                 "0, Mock Apple GPU 0");
    s.io.stream = s.memory.data;
    expect(fb_forward(s.plan, &s.io) == FB_INVALID);
    expect_words(fb_last_error(), "neither an MTLCommandQueue nor an MTLCommandBuffer");
    expect(fb_sync(FB_METAL, 0, s.memory.data) == FB_INVALID);
    expect_words(fb_last_error(), "neither an MTLCommandQueue nor an MTLCommandBuffer");
    FB__GET(&s.m.objc, release, other);
    finish(&s, "wrong streams");
}

static void test_streams(void **state) {
    (void)state;
    in_child(on_a_queue);
    in_child(failed_on_a_queue);
    in_child(failed_wait);
    in_child(in_a_command_buffer);
    in_child(wrong_streams);
}

/* ---- Buffers of a call ---- */

static void lengths(void) {
    scene s = begin();
    const uint64_t bytes = BATCH * HEADS * 100 * DIM * 2;
    fb_io io = s.io;
    io.q.offset = MEMORY - bytes + 2;
    expect(fb_forward(s.plan, &io) == FB_INVALID);
    expect_words(fb_last_error(),
                 "io.q: its MTLBuffer has 33554432 bytes, fewer than the 102400 that the tensor "
                 "takes from offset 33452034 on");
    io.q.offset -= 2;
    expect(fb_forward(s.plan, &io) == FB_OK);
    io = s.io;
    io.workspace.offset = MEMORY - 16;
    expect(fb_backward(s.plan, &io) == FB_INVALID);
    expect_words(fb_last_error(), "io.workspace: its MTLBuffer");
    expect(fb_merge(s.plan, s.io.out, (fb_ref){s.memory.data, MEMORY}, s.io.q, s.io.k, NULL) == FB_INVALID);
    expect_words(fb_last_error(), "io.lse: its MTLBuffer");
    finish(&s, "lengths");
}

/* Handles are no addresses: buffers never overlap, however near their objects lie; places in one may. */
static void overlaps(void) {
    scene s = begin();
    fb_ref small[2];
    fb_io io = s.io;
    io.out.offset = io.q.offset + 2;
    expect(fb_forward(s.plan, &io) == FB_INVALID);
    expect_words(fb_last_error(), "io.out");
    expect_words(fb_last_error(), "overlaps io.q");
    io.out.offset = s.io.out.offset + 1;
    expect(fb_forward(s.plan, &io) == FB_INVALID);
    expect_words(fb_last_error(), "expected a multiple of its element's 2 bytes");
    for (int n = 0; n < 2; n++)
        expect(fb_alloc(&small[n], FB_METAL, 0, 102400) == FB_OK);
    io = s.io;
    io.q = small[0], io.out = small[1];
    expect(fb_forward(s.plan, &io) == FB_OK);
    io.out = small[0];
    expect(fb_forward(s.plan, &io) == FB_INVALID);
    for (int n = 0; n < 2; n++)
        expect(fb_free(&small[n], FB_METAL, 0) == FB_OK);
    finish(&s, "overlaps");
}

/* Tensors without elements may be NULL. */
static void empties(void) {
    mock m = load_metal();
    const problem none = {"no keys", 0, FB_F32, FB_AUTO, 5, 0, "", ""};
    fb_desc d = describe(&none);
    fb_plan *plan;
    fb_ref memory_;
    expect(fb_alloc(&memory_, FB_METAL, 0, MEMORY) == FB_OK && fb_plan_create(&plan, &d) == FB_OK);
    fb_io io = tensors(&none, memory_, fb_plan_workspace(plan));
    io.k = io.v = io.dk = io.dv = (fb_ref){NULL, 0};
    expect(fb_forward(plan, &io) == FB_OK && fb_backward(plan, &io) == FB_OK);
    fb_plan_destroy(plan);
    d.head_dim_v = 0, d.len_k = 7, d.flags = FB_FORWARD_ONLY;
    expect(fb_plan_create(&plan, &d) == FB_OK);
    const fb_ref nothing = {NULL, 0};
    expect(fb_merge(plan, nothing, io.lse, nothing, io.q, NULL) == FB_OK);
    fb_plan_destroy(plan);
    expect(fb_free(&memory_, FB_METAL, 0) == FB_OK);
    expect_nothing_left(&m, "empties", 0);
}

static void test_buffers(void **state) {
    (void)state;
    in_child(lengths);
    in_child(overlaps);
    in_child(empties);
}

/* ---- Long work ---- */

/* The threadgroups of a function that ran, over how many command buffers; none has too much. */
static unsigned long count_groups(const mock *m, const char *name, int *buffers) {
    unsigned long groups = 0;
    long last = 0;
    *buffers = 0;
    for (long n = 0; n < m->state->dispatch_count && n < MOCK_DISPATCHES; n++) {
        const mock_dispatch *d = &m->state->dispatches[n];
        if (strcmp(d->function, name) != 0)
            continue;
        groups += d->x;
        *buffers += d->buffer != last;
        last = d->buffer;
    }
    return groups;
}

/* 2 heads of 2^17 queries and keys, 8 columns: 1.1 10^12 operations forward, 3.3 10^12 in all. */
static void long_work(void) {
    mock m = load_metal();
    const int64_t len = 1 << 17;
    fb_desc d;
    fb_plan *plan;
    fb_ref memory_, place;
    int buffers[2];
    fb_desc_init(&d, sizeof d);
    d.device = FB_METAL, d.dtype = FB_F16;
    d.batch = 1, d.heads_q = 2, d.heads_kv = 1, d.len_q = d.len_k = len, d.head_dim = d.head_dim_v = 8;
    expect(fb_plan_create(&plan, &d) == FB_OK);
    expect(fb_alloc(&memory_, FB_METAL, 0, 64 << 20) == FB_OK);
    fb_io io;
    fb_io_init(&io, sizeof io);
    place = memory_;
    fb_ref *const all[] = {&io.q, &io.k, &io.v, &io.out, &io.lse, &io.dout, &io.dq, &io.dk, &io.dv};
    for (size_t n = 0; n < sizeof all / sizeof *all; n++, place.offset += 4 << 20)
        *all[n] = place;
    io.workspace = place, io.workspace_size = fb_plan_workspace(plan);
    expect(fb_forward(plan, &io) == FB_OK && fb_backward(plan, &io) == FB_OK);
    const unsigned long forward = count_groups(&m, "fb_forward", &buffers[0]),
                        dkdv = count_groups(&m, "fb_dkdv", &buffers[1]);
    expect(forward > 2048 && dkdv > 1024 && buffers[0] >= 4 && buffers[0] < 16 && buffers[1] >= 8);
    expect(m.state->waited == m.state->committed && m.state->committed < 40);
    /* In a program's command buffer it stays one dispatch. */
    void *pool = m.objc.push();
    fb__id queue = queue_on(&m, 0), buffer = FB__GET(&m.objc, command_buffer, queue);
    io.stream = buffer;
    m.state->dispatch_count = 0;
    expect(fb_forward(plan, &io) == FB_OK);
    FB__GET(&m.objc, commit, buffer);
    FB__GET(&m.objc, wait, buffer);
    expect(m.state->dispatch_count == 1 && count_groups(&m, "fb_forward", buffers) == forward);
    /* One that fails ends the call. */
    m.state->fail_at = m.state->calls + 6; /* the second commit */
    m.state->dispatch_count = 0;
    io.stream = NULL;
    expect(fb_forward(plan, &io) == FB_DEVICE && count_groups(&m, "fb_forward", buffers) < forward);
    m.state->fail_at = 0;
    FB__GET(&m.objc, release, queue);
    m.objc.pop(pool);
    fb_plan_destroy(plan);
    expect(fb_free(&memory_, FB_METAL, 0) == FB_OK);
    expect_nothing_left(&m, "long work", 0);
}

static void test_long_work(void **state) {
    (void)state;
    in_child(long_work);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_memory), cmocka_unit_test(test_streams),
                                       cmocka_unit_test(test_buffers), cmocka_unit_test(test_long_work)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
