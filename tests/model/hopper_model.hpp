/* The part of the model that sm_90a adds: takes the place of hopper.cuh. What happens beside the threads
 * happens late: a product's sums are NaN until it is waited for, and only then its operands in shared memory
 * are read; they must still be what they were when it began. A box of a tensor map arrives a while after it
 * was asked for, and until then its place holds NaN. What a thread writes to shared memory may be read by a
 * product only after its written_for_async. */
#pragma once
#include <vector>

typedef unsigned long long fb_u64;

struct alignas(64) fb_map {
    fb_u64 words[16];
};

#define FB_WARPGROUP (threadIdx.x / 128)

static float __fadd_rd(float x, float y) {
    const double sum = (double)x + (double)y;
    const float z = (float)sum;
    return (double)z > sum ? nextafterf(z, -__int_as_float(0x7f800000)) : z;
}
static inline float max_or_nan(float x, float y) { return x != x ? x : y != y ? y : x > y ? x : y; }
static inline float reciprocal(float x) { return 1 / x; }
static inline fb_u32 clock_now() {
    static fb_u32 now;
    return now += 16;
}

/* ---- Barriers ---- */

struct model_barrier {
    bool made;
    unsigned phase;
    int count, left; /* arrivals */
    long bytes;      /* announced and not here yet */
};

static model_barrier model_barriers[MODEL_SHARED / 8];
static model_meeting model_meetings[16];

static model_barrier *model_barrier_at(fb_u32 at) {
    model_at(at, 8, 8);
    model_barrier *b = &model_barriers[at / 8];
    if (!b->made)
        model_fail("a barrier that was not made");
    return b;
}

static void model_barrier_step(model_barrier *b) {
    if (b->left || b->bytes)
        return;
    b->left = b->count;
    b->phase++;
}

static inline void barrier_init(fb_u32 at, int count) {
    model_at(at, 8, 8);
    model_barriers[at / 8] = {true, 0, count, count, 0};
}
static inline void barriers_made() {}
static inline void barrier_arrive(fb_u32 at) {
    model_barrier *b = model_barrier_at(at);
    if (b->left-- == 0)
        model_fail("one arrival more than a barrier counts");
    model_barrier_step(b);
}
static inline void barrier_expect(fb_u32 at, int bytes) {
    model_barrier_at(at)->bytes += bytes;
    barrier_arrive(at);
}
static inline void barrier_wait(fb_u32 at, fb_u32 parity) {
    model_barrier *b = model_barrier_at(at);
    while ((b->phase & 1) == parity) {
        model_fiber *f = &fibers[running];
        f->gate = &b->phase, f->seen = b->phase;
        model_switch(&f->sp, scheduler);
    }
}

static void model_meet(int number, int threads, bool wait) {
    model_meeting *m = &model_meetings[number];
    if (number < 1 || number > 15 || threads % 32)
        model_fail("a barrier by a number that there is not, or of half a warp");
    if (++m->arrived == threads) {
        m->arrived = 0;
        m->turn++;
    } else if (wait)
        model_wait(m);
}
static inline void meet(int number, int threads) { model_meet(number, threads, true); }
static inline void meet_later(int number, int threads) { model_meet(number, threads, false); }

static int model_registers[8];
#define registers_raise(n) model_set_registers(n)
#define registers_lower(n) model_set_registers(n)
static void model_set_registers(int n) {
    int sum = 0, groups = (int)blockDim.x / 128;
    if (n % 8 || n < 24 || n > 256)
        model_fail("a number of registers that there is not");
    model_registers[threadIdx.x / 128] = n;
    for (int g = 0; g < groups; g++)
        sum += model_registers[g];
    if (sum > 512)
        model_fail("more registers than a multiprocessor has");
}

/* ---- Who wrote what ---- */

static unsigned short model_writers[MODEL_SHARED / 16]; /* thread + 1, until its written_for_async */
static std::vector<fb_u32> model_marks[MODEL_THREADS];

static void model_mark(fb_u32 at) {
    model_writers[at / 16] = (unsigned short)(running + 1);
    model_marks[running].push_back(at / 16);
}
static inline void written_for_async() {
    for (fb_u32 piece : model_marks[running])
        if (model_writers[piece] == running + 1)
            model_writers[piece] = 0;
    model_marks[running].clear();
}

/* The place of the 16 bytes at an address of a tile whose pieces are swizzled. */
static inline fb_u32 model_swizzle(fb_u32 at) { return at ^ (at >> 7 & 7) << 4; }

static inline void matrices_store(fb_u32 row, fb_u32 a, fb_u32 b, fb_u32 c, fb_u32 d) {
    struct mine_ {
        fb_u32 row, r[4];
    } mine = {row, {a, b, c, d}};
    model_mark(row); /* one of 32 rows, the lanes' own */
    model_warp(&mine, [](void **slot) {
        for (int i = 0; i < 4; i++)
            for (int l = 0; l < 32; l++)
                memcpy(model_at(((mine_ *)slot[8 * i + l / 4])->row, 16, 16) + l % 4 * 4, &((mine_ *)slot[l])->r[i], 4);
    });
}

static inline void add4(float *to, float a, float b, float c, float d) {
    if ((uintptr_t)to % 16)
        model_fail("an addition of 16 bytes at an address that is no multiple of 16");
    to[0] += a, to[1] += b, to[2] += c, to[3] += d;
}

/* ---- Boxes ---- */

/* A map as cuTensorMapEncodeTiled of tests/mock leaves it. */
struct model_map {
    const char *at;
    fb_u64 size[4], stride[3];
    unsigned box[2], element, magic;
};

struct model_load {
    fb_u32 to, barrier;
    int bytes, age;
    const char *from; /* bytes in a row, or NULL */
    const model_map *map;
    int x, y, h, b;
};

static std::vector<model_load> model_loads;

static void model_ask(model_load load) {
    memset(model_at(load.to, (unsigned)load.bytes, 16), 0xff, (size_t)load.bytes);
    model_barrier_at(load.barrier);
    model_loads.push_back(load);
}

static inline void box_load(fb_u32 to, const fb_map *map, fb_u32 barrier, int x, int y, int h, int b) {
    const model_map *m = (const model_map *)map;
    if (m->magic != 0x4d415053)
        model_fail("a tensor map that was not encoded");
    if (to % 1024)
        model_fail("a box whose place is no multiple of 1024");
    model_ask({to, barrier, (int)(m->box[0] * m->box[1] * m->element), 0, NULL, m, x, y, h, b});
}
static inline void bytes_load(fb_u32 to, const void *from, int bytes, fb_u32 barrier) {
    if (bytes % 16 || (uintptr_t)from % 16)
        model_fail("a load of bytes that does not lie at a multiple of 16");
    model_ask({to, barrier, bytes, 0, (const char *)from});
}
static inline void map_prefetch(const fb_map *) {}

static void model_box(const model_load *l) {
    const model_map *m = l->map;
    const unsigned row_bytes = m->box[0] * m->element, pieces = row_bytes / 16;
    const bool inside = l->h >= 0 && (fb_u64)l->h < m->size[2] && l->b >= 0 && (fb_u64)l->b < m->size[3];
    for (unsigned r = 0; r < m->box[1]; r++)
        for (unsigned p = 0; p < pieces; p++) {
            unsigned char *to = model_at(model_swizzle(l->to + r * row_bytes + p * 16), 16, 16);
            for (unsigned e = 0; e < 16 / m->element; e++) {
                const long x = l->x + (long)(p * (16 / m->element) + e), y = l->y + (long)r;
                if (inside && x >= 0 && (fb_u64)x < m->size[0] && y >= 0 && (fb_u64)y < m->size[1])
                    memcpy(to + e * m->element,
                           m->at + x * m->element + y * (long)m->stride[0] + l->h * (long)m->stride[1] +
                               l->b * (long)m->stride[2],
                           m->element);
                else
                    memset(to + e * m->element, 0, m->element);
            }
        }
}

static bool model_arrivals(bool idle) {
    bool any = false;
    for (size_t n = 0; n < model_loads.size();) {
        model_load l = model_loads[n];
        if (++model_loads[n].age < 2 && !idle) {
            n++;
            continue;
        }
        if (l.from)
            memcpy(model_at(l.to, (unsigned)l.bytes, 16), l.from, (size_t)l.bytes);
        else
            model_box(&l);
        model_barrier *b = model_barrier_at(l.barrier);
        b->bytes -= l.bytes;
        model_barrier_step(b);
        model_loads.erase(model_loads.begin() + (long)n);
        any = true;
    }
    return any;
}

/* ---- Products ---- */

enum model_form { MODEL_NT, MODEL_TN, MODEL_RN };

/* Sums that are under way: d of each thread of a warpgroup. */
struct model_sums {
    float *d[128];
    int count, pending;
    std::vector<float> v;
};

struct model_product_job {
    model_form form;
    int n, add;
    fb_u64 a, b, seen;
    model_sums *sums;
    fb_u32 p[128][4];
};

struct model_warpgroup {
    model_meeting meeting;
    void *slot[128];
    std::vector<model_product_job *> jobs;
    std::vector<size_t> groups; /* jobs of each group that is not waited for */
    size_t open;                /* jobs since the last group */
    std::vector<model_sums *> sums;
};

static model_warpgroup model_groups[8];

template <class F> static void model_together(void *mine, F op) {
    model_warpgroup *g = &model_groups[running / 128];
    g->slot[running % 128] = mine;
    if (++g->meeting.arrived < 128) {
        model_wait(&g->meeting);
        return;
    }
    op(g);
    g->meeting.arrived = 0;
    g->meeting.turn++;
}

/* Where element (mn, k) of an operand of 16 terms lies. */
static fb_u32 model_place(fb_u64 operand, bool along_rows, int mn, int k) {
    const fb_u32 at = (fb_u32)(operand & 0x3fff) << 4, far = (fb_u32)(operand >> 16 & 0x3fff) << 4,
                 near = (fb_u32)(operand >> 32 & 0x3fff) << 4;
    if (operand >> 62 != 1)
        model_fail("an operand without the swizzle of 128 bytes");
    const fb_u32 linear = along_rows ? at + (fb_u32)(mn / 64) * far + (fb_u32)(k / 8) * near + (fb_u32)(k % 8) * 128 +
                                           (fb_u32)(mn % 64) * 2
                                     : at + (fb_u32)(mn / 8) * near + (fb_u32)(mn % 8) * 128 + (fb_u32)k * 2;
    return model_swizzle(linear & ~15u) + (linear & 15);
}

static float model_element(fb_u32 at) {
    fb_u16 x;
    memcpy(&x, model_at(at, 2, 2), 2);
    return FB_TYPE == 1 ? from_f16(x) : model_bf16(x);
}

static void model_operand(fb_u64 operand, bool along_rows, int n, float *to, fb_u64 *hash) {
    for (int mn = 0; mn < n; mn++)
        for (int k = 0; k < 16; k++) {
            const fb_u32 at = model_place(operand, along_rows, mn, k);
            if (model_writers[at / 16])
                model_fail("a product reads what a thread wrote without written_for_async");
            to[mn * 16 + k] = model_element(at);
            fb_u32 bits;
            memcpy(&bits, &to[mn * 16 + k], 4);
            *hash = (*hash ^ bits) * 1099511628211ull;
        }
}

static void model_read(const model_product_job *j, float *A, float *B, fb_u64 *hash) {
    *hash = 14695981039346656037ull;
    model_operand(j->b, j->form != MODEL_NT, j->n, B, hash);
    if (j->form != MODEL_RN)
        model_operand(j->a, j->form == MODEL_TN, 64, A, hash);
    for (int t = 0; t < 128 && j->form == MODEL_RN; t++)
        for (int i = 0; i < 4; i++)
            for (int e = 0; e < 2; e++) {
                const fb_u16 x = (fb_u16)(j->p[t][i] >> 16 * e);
                A[(t / 32 * 16 + t % 32 / 4 + i % 2 * 8) * 16 + i / 2 * 8 + t % 4 * 2 + e] =
                    FB_TYPE == 1 ? from_f16(x) : model_bf16(x);
            }
}

static void model_multiply(const model_product_job *j) {
    static float A[64 * 16], B[256 * 16];
    fb_u64 hash;
    model_read(j, A, B, &hash);
    if (hash != j->seen)
        model_fail("an operand has changed while its product was under way");
    for (int t = 0; t < 128; t++)
        for (int i = 0; i < j->n / 2; i++) {
            const float *a = A + (t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8) * 16,
                        *b = B + (i / 4 * 8 + t % 4 * 2 + i % 2) * 16;
            float sum = 0, *to = &j->sums->v[(size_t)(t * j->n / 2 + i)];
            for (int k = 0; k < 16; k++)
                sum += a[k] * b[k];
            *to = j->add ? *to + sum : sum;
        }
}

struct model_begun {
    float *d;
    const fb_u32 *p;
    fb_u64 a, b;
    int add, n;
    model_form form;
};

/* The sums that d belongs to; taken from the threads, and NaN there until they are waited for. */
static model_sums *model_take(model_warpgroup *g) {
    const model_begun *first = (const model_begun *)g->slot[0];
    for (model_sums *s : g->sums)
        if (s->d[0] == first->d)
            return s;
    model_sums *s = new model_sums();
    s->count = first->n / 2;
    for (int t = 0; t < 128; t++) {
        s->d[t] = ((model_begun *)g->slot[t])->d;
        for (int i = 0; i < s->count; i++) {
            s->v.push_back(s->d[t][i]);
            s->d[t][i] = FB_NAN;
        }
    }
    g->sums.push_back(s);
    return s;
}

static void model_begin(model_form form, int n, float *d, const fb_u32 *p, fb_u64 a, fb_u64 b, int add) {
    model_begun mine = {d, p, a, b, add, n, form};
    model_together(&mine, [](model_warpgroup *g) {
        static float A[64 * 16], B[256 * 16];
        model_product_job *j = new model_product_job();
        const model_begun *first = (const model_begun *)g->slot[0];
        j->form = first->form, j->n = first->n, j->add = first->add, j->a = first->a, j->b = first->b;
        for (int t = 0; t < 128; t++) {
            const model_begun *m = (const model_begun *)g->slot[t];
            if (m->a != j->a || m->b != j->b || m->n != j->n || m->add != j->add)
                model_fail("the threads of a warpgroup begin different products");
            if (j->form == MODEL_RN)
                memcpy(j->p[t], m->p, 16);
        }
        j->sums = model_take(g);
        j->sums->pending++;
        model_read(j, A, B, &j->seen);
        g->jobs.push_back(j);
        g->open++;
    });
}
static inline void products_begin() {}
static inline void products_commit() {
    int nothing;
    model_together(&nothing, [](model_warpgroup *g) { g->groups.push_back(g->open), g->open = 0; });
}

static void model_finish(model_warpgroup *g, size_t jobs) {
    for (size_t n = 0; n < jobs; n++) {
        model_product_job *j = g->jobs[n];
        model_multiply(j);
        if (--j->sums->pending == 0) {
            model_sums *s = j->sums;
            for (int t = 0; t < 128; t++)
                memcpy(s->d[t], &s->v[(size_t)(t * s->count)], (size_t)s->count * 4);
            for (size_t i = 0; i < g->sums.size(); i++)
                if (g->sums[i] == s)
                    g->sums.erase(g->sums.begin() + (long)i);
            delete s;
        }
        delete j;
    }
    g->jobs.erase(g->jobs.begin(), g->jobs.begin() + (long)jobs);
}

static inline void products_wait(int pending) {
    model_together(&pending, [](model_warpgroup *g) {
        const int pending = *(int *)g->slot[0];
        while ((int)g->groups.size() > pending) {
            model_finish(g, g->groups[0]);
            g->groups.erase(g->groups.begin());
        }
    });
}
static inline void settle(float *, int) {}
static inline void made_before(bool) {}
static inline fb_u32 all_bits(const fb_u32 *, int) { return 0; }
static inline fb_u64 operand(fb_u32 at, fb_u32 stride) {
    return (fb_u64)((at & 0x3ffff) >> 4) | (fb_u64)(stride >> 4) << 16 | (fb_u64)(1024 >> 4) << 32 | (fb_u64)1 << 62;
}
#define products_nt(N, d, a, b, add) model_begin(MODEL_NT, N, d, NULL, a, b, add)
#define products_tn(N, d, a, b, add) model_begin(MODEL_TN, N, d, NULL, a, b, add)
#define products_rn(N, d, a, b, add) model_begin(MODEL_RN, N, d, a, 0, b, add)

/* ---- A block ---- */

static void model_hopper_start() {
    memset(model_barriers, 0, sizeof model_barriers);
    memset(model_meetings, 0, sizeof model_meetings);
    memset(model_writers, 0, sizeof model_writers);
    for (int g = 0; g < 8; g++)
        model_registers[g] = 0;
    for (model_warpgroup &g : model_groups)
        g.meeting = model_meeting();
}
static void model_hopper_end() {
    if (!model_loads.empty())
        model_fail("a box is under way when the block ends");
    for (model_warpgroup &g : model_groups)
        if (!g.jobs.empty())
            model_fail("a product is under way when the block ends");
    for (auto &marks : model_marks)
        marks.clear();
}
static const bool model_hopper = [] {
    model_beside_start = model_hopper_start, model_beside = model_arrivals, model_beside_end = model_hopper_end;
    model_written = model_mark;
    return true;
}();
