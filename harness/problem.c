/* The tensors of a case in memory: guard pages, a device's side, passes, and what a pass may write.
 * Floor: harness. Read fill.c next, which sets the values. */
#include "layout.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { ALIGNMENT = 64, POISON = 0xFF };

static void *must(void *pointer, size_t bytes) {
    if (!pointer) {
        fprintf(stderr, "harness: no memory for %zu bytes\n", bytes);
        exit(EXIT_FAILURE);
    }
    return pointer;
}

void *fbh_make(size_t count, size_t size) { return must(calloc(count + 1, size), count * size); }

/* ---- Buffers ------------------------------------------------------------------------------------------- */

static size_t round_up(size_t n, size_t to) { return (n + to - 1) / to * to; }

/* With FBH_GUARD_END the last byte is followed by a forbidden page, with FBH_GUARD_START the first is
 * preceded by one, without either the data is aligned to 64 bytes. */
static void buffer_create(fbh_buffer *b, size_t bytes, fbh_guard guard) {
    b->bytes = bytes;
    if (guard == FBH_GUARD_NONE) {
        /* Large ones in huge pages, as fb_alloc gives them. */
        const size_t whole = round_up(bytes + 1, ALIGNMENT), huge = (size_t)2 << 20;
        if (posix_memalign(&b->map, whole < 2 * huge ? ALIGNMENT : huge, whole) != 0)
            b->map = NULL;
        must(b->map, bytes);
        b->data = b->map;
#ifdef MADV_HUGEPAGE
        if (whole >= 2 * huge)
            madvise(b->map, whole / huge * huge, MADV_HUGEPAGE);
#endif
    } else {
        const size_t page = (size_t)sysconf(_SC_PAGESIZE), inner = round_up(bytes, page);
        b->map_bytes = inner + 2 * page;
        b->map = mmap(NULL, b->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        must(b->map == MAP_FAILED ? NULL : b->map, bytes);
        unsigned char *first = (unsigned char *)b->map + page;
        /* qemu 7.2 refuses to change nothing. */
        must(inner == 0 || mprotect(first, inner, PROT_READ | PROT_WRITE) == 0 ? first : NULL, bytes);
        b->data = guard == FBH_GUARD_END ? first + (inner - bytes) : first;
    }
    memset(b->data, POISON, bytes);
}

static void buffer_destroy(fbh_buffer *b, fb_device device, int32_t index) {
    if (b->device.data)
        fb_free(&b->device, device, index);
    if (b->map_bytes)
        munmap(b->map, b->map_bytes);
    else
        free(b->map);
    free(b->before);
    memset(b, 0, sizeof *b);
}

/* ---- Tensors ------------------------------------------------------------------------------------------- */

int64_t fbh_rows(const fbh_tensor *t, int64_t b) { return t->cu ? t->cu[b + 1] - t->cu[b] : t->rows; }

static uint64_t element(const fbh_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d) {
    const int64_t base = t->cu ? t->cu[b] * t->stride.row : (t->batch == 1 ? 0 : b) * t->stride.batch;
    const int64_t row = !t->cu && t->rows == 1 ? 0 : i;
    return (uint64_t)(base + (t->heads == 1 ? 0 : h) * t->stride.head + row * t->stride.row +
                      (t->cols == 1 ? 0 : d));
}

void *fbh_at(const fbh_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d) {
    return t->buffer->data + t->offset + element(t, b, h, i, d) * fbh_size(t->type);
}

double fbh_get(const fbh_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d) {
    return fbh_load(t->type, fbh_at(t, b, h, i, d));
}

void fbh_set(const fbh_tensor *t, int64_t b, int64_t h, int64_t i, int64_t d, double x) {
    fbh_store(t->type, fbh_at(t, b, h, i, d), x);
}

/* ---- Problems ------------------------------------------------------------------------------------------ */

/* Rows behind the last packed sequence, which belong to none. */
enum { TAIL = 2 };

static int32_t *make_cu(int64_t batch, int64_t longest, bool keys) {
    int32_t *cu = fbh_make((size_t)batch + 1, sizeof *cu);
    for (int64_t b = 0; b < batch; b++)
        cu[b + 1] = cu[b] + (int32_t)fbh_sequence_length(b, longest, keys);
    return cu;
}

static int32_t *copy_cu(int64_t batch, const int32_t *from) {
    int32_t *cu = fbh_make((size_t)batch + 1, sizeof *cu);
    memcpy(cu, from, ((size_t)batch + 1) * sizeof *cu);
    return cu;
}

/* All that follows from what, desc, cu_q and cu_k. */
static void allocate(fbh_problem *p) {
    const fb_desc *d = &p->desc;
    p->live_rows = fbh_make((size_t)(d->batch * d->heads_q * d->len_q), sizeof *p->live_rows);
    p->live_keys = fbh_make((size_t)(d->batch * d->heads_kv * d->len_k), sizeof *p->live_keys);
    for (int id = 0; id < FBH_COUNT; id++) {
        const size_t bytes = fbh_lay_out(p, (fbh_id)id);
        if (!fbh_present(p, (fbh_id)id))
            continue;
        p->t[id].buffer = &p->buffers[fbh_buffer_of(p, (fbh_id)id)];
        if (!p->t[id].buffer->data)
            buffer_create(p->t[id].buffer, bytes, p->guard);
    }
    for (int64_t b = 0; p->cu_q && b <= d->batch; b++) {
        fbh_set(&p->t[FBH_CU_Q], 0, 0, 0, b, p->cu_q[b]);
        fbh_set(&p->t[FBH_CU_K], 0, 0, 0, b, p->cu_k[b]);
    }
}

void fbh_problem_create(fbh_problem *p, const fbh_case *c, fb_device device, int32_t index, fbh_guard guard,
                        bool mirrored) {
    memset(p, 0, sizeof *p);
    p->what = *c;
    p->desc = c->desc;
    p->desc.device = device;
    p->desc.index = index;
    p->guard = guard;
    p->mirrored = mirrored || device != FB_CPU;
    const int64_t batch = p->desc.batch;
    if (p->desc.flags & FB_PACKED) {
        p->cu_q = make_cu(batch, p->desc.len_q, false);
        p->cu_k = make_cu(batch, p->desc.len_k, true);
        p->desc.total_q = p->cu_q[batch] + TAIL;
        p->desc.total_k = p->cu_k[batch] + TAIL;
    }
    allocate(p);
}

void fbh_problem_double(fbh_problem *p, const fbh_problem *given) {
    memset(p, 0, sizeof *p);
    p->what = given->what;
    p->what.desc.dtype = FB_F64;
    p->what.layout = FBH_CONTIGUOUS;
    p->desc = p->what.desc;
    p->desc.total_q = given->desc.total_q;
    p->desc.total_k = given->desc.total_k;
    if (given->cu_q) {
        p->cu_q = copy_cu(p->desc.batch, given->cu_q);
        p->cu_k = copy_cu(p->desc.batch, given->cu_k);
    }
    allocate(p);
    fbh_problem_copy(p, given);
}

void fbh_problem_destroy(fbh_problem *p) {
    for (int id = 0; id < FBH_COUNT; id++)
        buffer_destroy(&p->buffers[id], p->desc.device, p->desc.index);
    free(p->cu_q);
    free(p->cu_k);
    free(p->live_rows);
    free(p->live_keys);
    memset(p, 0, sizeof *p);
}

bool fbh_writes(const fbh_problem *p, fbh_id id, fbh_pass pass) {
    if (!p->t[id].buffer)
        return false;
    if (id == FBH_OUT || id == FBH_LSE)
        return pass == FBH_FORWARD;
    return id >= FBH_DQ && id <= FBH_DSINKS && pass == FBH_BACKWARD;
}

/* Is the tensor read by the pass? */
static bool reads(const fbh_problem *p, fbh_id id, fbh_pass pass) {
    if (!p->t[id].buffer || id == FBH_WORKSPACE)
        return false;
    if (id == FBH_DOUT || id == FBH_DLSE || id == FBH_OUT || id == FBH_LSE)
        return pass == FBH_BACKWARD;
    return id < FBH_DQ;
}

/* ---- Passes -------------------------------------------------------------------------------------------- */

static fb_status upload(fbh_problem *p) {
    for (int id = 0; id < FBH_COUNT; id++) {
        fbh_buffer *b = &p->buffers[id];
        if (!b->data)
            continue;
        fb_status status = FB_OK;
        if (!b->device.data)
            status = fb_alloc(&b->device, p->desc.device, p->desc.index, b->bytes);
        if (status == FB_OK)
            status = fb_write(b->device, b->data, b->bytes, p->desc.device, p->desc.index);
        if (status != FB_OK)
            return status;
    }
    return FB_OK;
}

/* The workspace starts at an odd address where everything does. */
static void make_workspace(fbh_problem *p, size_t bytes) {
    fbh_tensor *t = &p->t[FBH_WORKSPACE];
    fbh_buffer *b = &p->buffers[FBH_WORKSPACE];
    const size_t odd = p->what.layout == FBH_ODD;
    if (!b->data || b->bytes < bytes + odd) {
        buffer_destroy(b, p->desc.device, p->desc.index);
        buffer_create(b, bytes + odd, p->guard);
    }
    t->buffer = b;
    t->offset = odd;
    t->cols = (int64_t)bytes;
    memset(b->data, POISON, b->bytes);
}

double fbh_before(fbh_id id, uint64_t n) { return fbh_exact(100 + (uint64_t)id, n); }

static void set_before(const fbh_problem *p, fbh_id id) {
    const fbh_tensor *t = &p->t[id];
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < t->heads; h++)
            for (int64_t i = 0; i < fbh_rows(t, b); i++)
                for (int64_t d = 0; d < t->cols; d++)
                    fbh_set(t, b, h, i, d, fbh_before(id, fbh_index(t, b, h, i, d)));
}

fb_status fbh_problem_ready(fbh_problem *p, const fb_plan *plan, fbh_pass pass) {
    make_workspace(p, fb_plan_workspace(plan));
    for (int id = 0; id < FBH_COUNT; id++)
        if (fbh_writes(p, (fbh_id)id, pass))
            memset(p->t[id].buffer->data, POISON, p->t[id].buffer->bytes);
    for (int id = 0; id < FBH_COUNT; id++) {
        if (p->desc.flags & FB_ACCUMULATE && pass == FBH_BACKWARD && fbh_writes(p, (fbh_id)id, pass))
            set_before(p, (fbh_id)id);
        fbh_buffer *b = &p->buffers[id];
        if (b->data && p->guard != FBH_GUARD_NONE && id != FBH_WORKSPACE) {
            if (!b->before)
                b->before = fbh_make(b->bytes, 1);
            memcpy(b->before, b->data, b->bytes);
        }
    }
    return p->mirrored ? upload(p) : FB_OK;
}

void fbh_problem_io(const fbh_problem *p, fbh_pass pass, fb_io *io) {
    fb_io_init(io, sizeof *io);
    fb_ref *const field[FBH_COUNT] = {
#define X(id, name) [FBH_##id] = &io->name,
        FBH_TENSORS(X)
#undef X
    };
    for (int id = 0; id < FBH_COUNT; id++) {
        const fbh_tensor *t = &p->t[id];
        if (!reads(p, (fbh_id)id, pass) && !fbh_writes(p, (fbh_id)id, pass) && id != FBH_WORKSPACE)
            continue;
        if (!t->buffer)
            continue;
        *field[id] = p->mirrored ? t->buffer->device : (fb_ref){t->buffer->data, 0};
        field[id]->offset += t->offset;
    }
    io->workspace_size = (uint64_t)p->t[FBH_WORKSPACE].cols;
}

fb_status fbh_problem_done(fbh_problem *p) {
    fb_status status = fb_sync(p->desc.device, p->desc.index, NULL);
    for (int id = 0; id < FBH_COUNT && status == FB_OK && p->mirrored; id++) {
        fbh_buffer *b = &p->buffers[id];
        if (b->data)
            status = fb_read(b->data, b->device, b->bytes, p->desc.device, p->desc.index);
    }
    return status;
}

fb_status fbh_problem_run(fbh_problem *p, const fb_plan *plan, fbh_pass pass) {
    fb_io io;
    fb_status status = fbh_problem_ready(p, plan, pass);
    if (status != FB_OK)
        return status;
    fbh_problem_io(p, pass, &io);
    status = pass == FBH_FORWARD ? fb_forward(plan, &io) : fb_backward(plan, &io);
    return status == FB_OK ? fbh_problem_done(p) : status;
}

/* ---- After a pass -------------------------------------------------------------------------------------- */

/* Sets a byte of the map for every byte that the pass may write. */
static void mark(const fbh_problem *p, fbh_id id, unsigned char *map) {
    const fbh_tensor *t = &p->t[id];
    const size_t row = (size_t)t->cols * fbh_size(t->type);
    for (int64_t b = 0; b < t->batch && t->cols; b++)
        for (int64_t h = 0; h < t->heads; h++)
            for (int64_t i = 0; i < fbh_rows(t, b); i++)
                memset(map + ((unsigned char *)fbh_at(t, b, h, i, 0) - t->buffer->data), 1, row);
}

bool fbh_problem_intact(const fbh_problem *p, fbh_pass pass, char *message, size_t size) {
    assert(p->guard != FBH_GUARD_NONE && "without guards there are no copies to compare with");
    bool intact = true;
    for (int n = 0; n < FBH_COUNT && intact; n++) {
        const fbh_buffer *b = &p->buffers[n];
        if (!b->before)
            continue;
        unsigned char *map = fbh_make(b->bytes, 1);
        for (int id = 0; id < FBH_COUNT; id++)
            if (p->t[id].buffer == b && fbh_writes(p, (fbh_id)id, pass))
                mark(p, (fbh_id)id, map);
        for (size_t at = 0; at < b->bytes && intact; at++)
            if (!map[at] && b->data[at] != b->before[at]) {
                snprintf(message, size,
                         "byte %zu of the buffer of %s was 0x%02x and is 0x%02x; nothing may write it", at,
                         p->t[n].name, b->before[at], b->data[at]);
                intact = false;
            }
        free(map);
    }
    return intact;
}

uint64_t fbh_problem_digest(const fbh_problem *p, fbh_pass pass) {
    uint64_t hash = UINT64_C(0xCBF29CE484222325); /* FNV-1a */
    for (int id = 0; id < FBH_COUNT; id++) {
        const fbh_tensor *t = &p->t[id];
        if (!fbh_writes(p, (fbh_id)id, pass))
            continue;
        const size_t row = (size_t)t->cols * fbh_size(t->type);
        for (int64_t b = 0; b < t->batch && t->cols; b++)
            for (int64_t h = 0; h < t->heads; h++)
                for (int64_t i = 0; i < fbh_rows(t, b); i++) {
                    const unsigned char *bytes = fbh_at(t, b, h, i, 0);
                    for (size_t n = 0; n < row; n++)
                        hash = (hash ^ bytes[n]) * UINT64_C(0x100000001B3);
                }
    }
    return hash;
}
