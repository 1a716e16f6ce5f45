/* A model of a GPU for the text of kernels, as C++ on a processor: takes the place of ptx.cuh and of what
 * NVRTC knows by itself. The threads of a block are fibers that run one after the other; what a warp does
 * together waits until all of its lanes are there. Each product is the tensor unit's, lane by lane, from the
 * fragments as PTX documents them. Copies that PTX calls asynchronous arrive when they are waited for and not
 * before, shared memory starts as NaN, and an address outside of it ends the program, so a missing wait or
 * barrier shows. See model_nvrtc.c. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <utility>

#define __global__
#define __device__
#define __shared__ static
#define __grid_constant__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))
#define FB_APART static __attribute__((noinline))

typedef unsigned fb_u32;
typedef unsigned short fb_u16;
struct uint3_ {
    unsigned x, y, z;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

static inline float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
static inline unsigned __float_as_uint(float x) {
    unsigned bits;
    memcpy(&bits, &x, 4);
    return bits;
}
static inline float __int_as_float(int bits) { return __uint_as_float((unsigned)bits); }
static inline float __fmul_rn(float x, float y) { return x * y; } /* nothing is contracted: -ffp-contract=off */
static inline float __fadd_rn(float x, float y) { return x + y; }
static inline float __double2float_rn(double x) { return (float)x; }
static inline float __double2float_rz(double x) { /* towards 0 */
    float y = (float)x;
    return fabs((double)y) > fabs(x) ? nextafterf(y, 0) : y;
}
template <class T> static inline T min(T a, T b) { return b < a ? b : a; }
template <class T> static inline T max(T a, T b) { return a < b ? b : a; }

#define FB_INFINITY __int_as_float(0x7f800000)
#define FB_NAN __int_as_float(0x7fc00000)

/* ---- Fibers ---- */

#if !defined(__x86_64__)
#error "the model switches fibers on x86-64 only"
#endif

extern "C" void model_switch(void **from, void *to);
asm(R"(
        .text
model_switch:
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

enum { MODEL_THREADS = 1024, MODEL_STACK = 256 << 10, MODEL_SHARED = 232448, MODEL_COPIES = 4096 };

struct model_copy {
    fb_u32 to;
    const void *from;
    int bytes, all; /* the rest of `all` are zeros */
};

/* Waits while *gate == seen. */
struct model_fiber {
    void *sp;
    const unsigned *gate;
    unsigned seen;
    bool done;
    int groups, ends[64]; /* asynchronous copies: where each group ends */
    int copies;
    model_copy queue[MODEL_COPIES];
};

struct model_meeting {
    unsigned turn;
    int arrived, live;
    void *slot[32];
    int votes, result;
};

alignas(1024) unsigned char memory[MODEL_SHARED];
static model_fiber *fibers;
static char *stacks;
static model_meeting warps[32], block;
static void *scheduler;
static int running;
static uint3_ threadIdx, blockIdx, blockDim = {1, 1, 1}, gridDim;
static void (*model_kernel)(void **);
static void **model_arguments;
static unsigned model_shared;

static void model_fail(const char *why) {
    fprintf(stderr, "model: block %u, thread %d: %s\n", blockIdx.x, running, why);
    abort();
}

static void model_wait(model_meeting *m) {
    model_fiber *f = &fibers[running];
    f->gate = &m->turn, f->seen = m->turn;
    model_switch(&f->sp, scheduler);
}

/* All live lanes of the warp meet; the last to come does `op` for all. */
template <class F> static inline void model_warp(void *mine, F op) {
    model_meeting *w = &warps[running / 32];
    w->slot[running % 32] = mine;
    if (++w->arrived < w->live) {
        model_wait(w);
        return;
    }
    if (w->live != 32)
        model_fail("a lane is missing in what a warp does together");
    op(w->slot);
    w->arrived = 0;
    w->turn++;
}

static void model_open() {
    block.result = block.votes, block.votes = 0;
    block.arrived = 0;
    block.turn++;
}

static inline int __syncthreads_or(int vote) {
    block.votes |= vote != 0;
    if (++block.arrived < block.live)
        model_wait(&block);
    else
        model_open();
    return block.result;
}
static inline void __syncthreads() { __syncthreads_or(0); }

static void model_thread() {
    model_kernel(model_arguments);
    model_fiber *f = &fibers[running];
    if (f->copies)
        model_fail("it ends before its copies have arrived");
    f->done = true;
    warps[running / 32].live--;
    if (warps[running / 32].arrived)
        model_fail("it ends while its warp waits for it");
    if (--block.live && block.arrived == block.live)
        model_open();
    model_switch(&f->sp, scheduler);
}

/* What goes on beside the threads (hopper_model.hpp): starts with a block; does what is due, true if anything
 * was; ends with the block. */
static void (*model_beside_start)();
static bool (*model_beside)(bool idle);
static void (*model_beside_end)();

static void model_block(unsigned threads) {
    memset(memory, 0xff, model_shared);
    if (model_beside_start)
        model_beside_start();
    memset(warps, 0, sizeof warps);
    block = model_meeting();
    block.live = (int)threads;
    for (unsigned t = 0; t < threads; t++) {
        model_fiber *f = &fibers[t];
        f->gate = NULL, f->done = false, f->groups = f->copies = 0;
        warps[t / 32].live++;
        void **top = (void **)(stacks + (size_t)(t + 1) * MODEL_STACK - 56); /* as a call leaves it */
        *top = NULL;
        *--top = (void *)model_thread;
        for (int n = 0; n < 6; n++)
            *--top = NULL;
        f->sp = top;
    }
    for (unsigned left = threads; left;) {
        bool moved = false;
        for (unsigned t = 0; t < threads; t++) {
            model_fiber *f = &fibers[t];
            if (f->done || (f->gate && *f->gate == f->seen))
                continue;
            f->gate = NULL;
            running = (int)t, threadIdx.x = t;
            model_switch(&scheduler, f->sp);
            moved = true;
            left -= f->done;
        }
        if (model_beside)
            moved |= model_beside(!moved);
        if (!moved)
            model_fail("the block waits for ever: not all threads come to a barrier");
    }
    if (model_beside_end)
        model_beside_end();
}

extern "C" __attribute__((visibility("default"))) void
model_run(void (*kernel)(void **), const unsigned *grid, unsigned threads, unsigned shared_bytes, void **arguments) {
    if (!fibers) {
        const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
        fibers = (model_fiber *)calloc(MODEL_THREADS, sizeof *fibers);
        stacks = (char *)mmap(NULL, (size_t)MODEL_THREADS * MODEL_STACK, PROT_READ | PROT_WRITE, flags, -1, 0);
    }
    model_kernel = kernel, model_arguments = arguments, model_shared = shared_bytes;
    blockDim.x = threads, gridDim = {grid[0], grid[1], grid[2]};
    for (blockIdx.z = 0; blockIdx.z < grid[2]; blockIdx.z++)
        for (blockIdx.y = 0; blockIdx.y < grid[1]; blockIdx.y++)
            for (blockIdx.x = 0; blockIdx.x < grid[0]; blockIdx.x++)
                model_block(threads);
}

__attribute__((destructor)) static void model_leave() {
    free(fibers);
    if (stacks)
        munmap(stacks, (size_t)MODEL_THREADS * MODEL_STACK);
}

/* A kernel with its arguments as a launch has them. */
template <class... A, size_t... I>
static void model_apply(void (*kernel)(A...), void **arguments, std::index_sequence<I...>) {
    kernel(*(std::remove_cv_t<A> *)arguments[I]...);
}
template <class... A> static void model_call(void (*kernel)(A...), void **arguments) {
    model_apply(kernel, arguments, std::index_sequence_for<A...>());
}

/* ---- Votes and shuffles ---- */

template <class T> static inline T __shfl_sync(unsigned, T x, int from) {
    struct {
        T in, out;
        int from;
    } mine = {x, x, from};
    model_warp(&mine, [](void **slot) {
        for (int l = 0; l < 32; l++) {
            auto *m = (decltype(&mine))slot[l];
            m->out = ((decltype(&mine))slot[m->from & 31])->in;
        }
    });
    return mine.out;
}
template <class T> static inline T __shfl_xor_sync(unsigned, T x, int mask) {
    struct {
        T in, out;
        int mask;
    } mine = {x, x, mask};
    model_warp(&mine, [](void **slot) {
        for (int l = 0; l < 32; l++) {
            auto *m = (decltype(&mine))slot[l];
            m->out = ((decltype(&mine))slot[l ^ m->mask])->in;
        }
    });
    return mine.out;
}
static inline int model_vote(int vote, bool all) {
    int both[2] = {vote != 0, 0};
    auto op = [](void **slot) {
        int any = 0, every = 1;
        for (int l = 0; l < 32; l++)
            any |= ((int *)slot[l])[0], every &= ((int *)slot[l])[0];
        for (int l = 0; l < 32; l++)
            ((int *)slot[l])[1] = any | every << 1;
    };
    model_warp(both, op);
    return all ? both[1] >> 1 : both[1] & 1;
}
static inline int __any_sync(unsigned, int vote) { return model_vote(vote, false); }
static inline int __all_sync(unsigned, int vote) { return model_vote(vote, true); }
static inline void __syncwarp() { model_vote(0, false); }

/* ---- Shared memory ---- */

static inline fb_u32 smem_address(const void *p) { return (fb_u32)((const unsigned char *)p - memory); }

static inline unsigned char *model_at(fb_u32 at, unsigned bytes, unsigned align) {
    if (at + bytes > model_shared || at + bytes < at || at % align)
        model_fail("an address outside of shared memory, or not aligned");
    return memory + at;
}

static inline void model_queue(fb_u32 to, const void *from, int bytes, int all) {
    model_fiber *f = &fibers[running];
    if (f->copies == MODEL_COPIES)
        model_fail("more copies under way than the model keeps");
    if ((uintptr_t)from % (unsigned)all && bytes)
        model_fail("a copy from an address that is no multiple of its size");
    f->queue[f->copies++] = {to, from, bytes, all};
}
static inline void copy16(fb_u32 to, const void *from, int bytes) { model_queue(to, from, bytes, 16); }
static inline void copy16_whole(fb_u32 to, const void *from) { model_queue(to, from, 16, 16); }
static inline void copy4(fb_u32 to, const void *from, bool exists) { model_queue(to, from, exists ? 4 : 0, 4); }
static inline void copies_commit() {
    model_fiber *f = &fibers[running];
    if (f->groups == 64)
        model_fail("more groups of copies than the model keeps");
    f->ends[f->groups++] = f->copies;
}
static inline void copies_wait(int pending) {
    model_fiber *f = &fibers[running];
    int groups = f->groups - pending, n = groups > 0 ? f->ends[groups - 1] : 0;
    for (int i = 0; i < n; i++) {
        const unsigned all = (unsigned)f->queue[i].all;
        unsigned char *to = model_at(f->queue[i].to, all, all);
        memset(to, 0, all);
        memcpy(to, f->queue[i].from, (size_t)f->queue[i].bytes);
    }
    if (groups <= 0)
        return;
    memmove(f->queue, f->queue + n, (size_t)(f->copies - n) * sizeof *f->queue);
    f->copies -= n;
    for (int g = groups; g < f->groups; g++)
        f->ends[g - groups] = f->ends[g] - n;
    f->groups -= groups;
}
static void (*model_written)(fb_u32 at); /* 16 bytes, by a thread */
static inline void store16(fb_u32 to, uint4 x) {
    memcpy(model_at(to, 16, 16), &x, 16);
    if (model_written)
        model_written(to);
}
static inline uint4 load16(fb_u32 from) {
    uint4 x;
    memcpy(&x, model_at(from, 16, 16), 16);
    return x;
}
static inline fb_u32 load4(fb_u32 from) {
    fb_u32 x;
    memcpy(&x, model_at(from, 4, 4), 4);
    return x;
}

/* ---- Matrices ---- */

struct model_rows {
    fb_u32 row, *r;
};

static inline void matrices(fb_u32 *r, fb_u32 row) {
    model_rows mine = {row, r};
    model_warp(&mine, [](void **slot) {
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++)
                memcpy(&((model_rows *)slot[l])->r[i],
                       model_at(((model_rows *)slot[8 * i + l / 4])->row, 16, 16) + l % 4 * 4, 4);
    });
}
static inline void matrices_transposed(fb_u32 *r, fb_u32 row) {
    model_rows mine = {row, r};
    model_warp(&mine, [](void **slot) {
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                fb_u16 pair[2];
                for (int n = 0; n < 2; n++)
                    memcpy(&pair[n], model_at(((model_rows *)slot[8 * i + l % 4 * 2 + n])->row, 16, 16) + l / 4 * 2, 2);
                memcpy(&((model_rows *)slot[l])->r[i], pair, 4);
            }
    });
}

static inline float from_f16(fb_u16 h) {
    unsigned sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
    if (!exponent)
        return __uint_as_float(sign | __float_as_uint((float)fraction * 0x1p-24f));
    if (exponent == 31)
        return __uint_as_float(sign | 0x7f800000u | fraction << 13);
    return __uint_as_float(sign | (exponent + 112) << 23 | fraction << 13);
}
static inline float model_bf16(fb_u16 h) { return __uint_as_float((unsigned)h << 16); }

struct model_mma {
    float *c;
    const fb_u32 *a, *b;
};

/* D = A B + C, 16 x 8, K columns of A: halves by `load`, or tf32 with K = 8. Lane 4 r + c has of A the rows
 * r, r + 8, of B the column r, of C the columns 2 c and 2 c + 1. */
template <int K, class L> static inline void model_product(float *c, const fb_u32 *a, const fb_u32 *b, L load) {
    model_mma mine = {c, a, b};
    auto op = [](void **slot) {
        L load;
        float A[16][K], B[K][8];
        for (int l = 0; l < 32; l++) {
            const model_mma *m = (const model_mma *)slot[l];
            for (int i = 0; i < 4; i++)
                for (int e = 0; e < K / 8; e++)
                    A[l / 4 + i % 2 * 8][(i / 2 * 4 + l % 4) * (K / 8) + e] = load(m->a[i], e);
            for (int i = 0; i < 2; i++)
                for (int e = 0; e < K / 8; e++)
                    B[(i * 4 + l % 4) * (K / 8) + e][l / 4] = load(m->b[i], e);
        }
        for (int l = 0; l < 32; l++)
            for (int i = 0; i < 4; i++) {
                float *to = &((model_mma *)slot[l])->c[i], sum = 0;
                for (int k = 0; k < K; k++)
                    sum += A[l / 4 + i / 2 * 8][k] * B[k][l % 4 * 2 + i % 2];
                *to += sum;
            }
    };
    model_warp(&mine, op);
    (void)load;
}

struct model_load_f16 {
    float operator()(fb_u32 x, int e) { return from_f16((fb_u16)(x >> 16 * e)); }
};
struct model_load_bf16 {
    float operator()(fb_u32 x, int e) { return model_bf16((fb_u16)(x >> 16 * e)); }
};
struct model_load_tf32 { /* the unit does not look at the last 13 bits */
    float operator()(fb_u32 x, int) { return __uint_as_float(x & 0xffffe000u); }
};
static inline void mma_f16(float *c, const fb_u32 *a, const fb_u32 *b) { model_product<16>(c, a, b, model_load_f16()); }
static inline void mma_bf16(float *c, const fb_u32 *a, const fb_u32 *b) {
    model_product<16>(c, a, b, model_load_bf16());
}
static inline void mma_tf32(float *c, const fb_u32 *a, const fb_u32 *b) {
    model_product<8>(c, a, b, model_load_tf32());
}

/* ---- Numbers ---- */

static inline float exp2_fast(float x) {
    float y = exp2f(x);
    return y < 0x1p-126f ? 0 : y;
}
static inline fb_u32 to_tf32(float x) { /* to nearest, ties away from 0 */
    fb_u32 bits = __float_as_uint(x);
    return (bits & 0x7f800000u) == 0x7f800000u ? bits : (bits + 0x1000u) & 0xffffe000u;
}
static inline fb_u32 model_to_bf16(float x) {
    fb_u32 bits = __float_as_uint(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u)
        return 0x7fff;
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}
static inline fb_u32 model_to_f16(float x) {
    fb_u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000u, size = bits & 0x7fffffffu;
    if (size > 0x7f800000u)
        return 0x7fff;
    if (size >= 0x477ff000u)
        return sign | 0x7c00u;
    if (size < 0x38800000u)
        return sign | (fb_u32)rintf(__uint_as_float(size) * 0x1p24f);
    size -= 0x38000000u;
    return sign | (size + 0xfffu + (size >> 13 & 1)) >> 13;
}
static inline fb_u32 pack_bf16(float lo, float hi) { return model_to_bf16(lo) | model_to_bf16(hi) << 16; }
static inline fb_u32 pack_f16(float lo, float hi) { return model_to_f16(lo) | model_to_f16(hi) << 16; }

static inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
static inline float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
