// One function for each instruction of sm_90a that C++ has no word for: barriers in shared memory, tiles that
// a tensor map describes (TMA), products of a warpgroup (wgmma). Next: hopper_forward.cu.
//
// A tile in shared memory is a row of panels of 64 columns, [rows][128 bytes] each, at multiples of 1024
// bytes. Within a panel the 16-byte piece c of row r lies at c ^ r % 8: what TMA calls a swizzle of 128
// bytes.
#pragma once
#include "element.cuh"

typedef unsigned long long fb_u64;

// A tensor map of the driver (CUtensorMap).
typedef struct alignas(64) fb_map {
    fb_u64 words[16];
} fb_map;

#define FB_WARPGROUP (threadIdx.x / 128)

// ---- Barriers
// ------------------------------------------------------------------------------------------------- 8 bytes
// of shared memory. A phase ends when `count` arrivals and all announced bytes have come. To wait for the
// phase of parity 0 is to wait for the first one; for that of parity 1, on a new barrier, is not to wait.

FB_FN void barrier_init(fb_u32 at, int count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(at), "r"(count) : "memory");
}

// After all are made, by the thread that made them; the block meets afterwards.
FB_FN void barriers_made() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

FB_FN void barrier_arrive(fb_u32 at) { asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }

// Arrives, and announces bytes.
FB_FN void barrier_expect(fb_u32 at, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(at), "r"(bytes) : "memory");
}

FB_FN void barrier_wait(fb_u32 at, fb_u32 parity) {
    asm volatile("{\n"
                 ".reg .pred done;\n"
                 "again:\n"
                 "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
                 "@done bra over;\n"
                 "bra again;\n"
                 "over:\n"
                 "}" ::"r"(at),
                 "r"(parity)
                 : "memory");
}

// Barriers by number, 0 is __syncthreads: `threads` meet, those that arrive do not wait.
FB_FN void meet(int number, int threads) { asm volatile("bar.sync %0, %1;" ::"r"(number), "r"(threads) : "memory"); }
FB_FN void meet_later(int number, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "r"(threads) : "memory");
}

// Registers of each thread of a warpgroup from here on.
#define registers_raise(n) asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n))
#define registers_lower(n) asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n))

// ---- Tiles
// ----------------------------------------------------------------------------------------------------

// The map's box from column x, row y, head h, sequence b on; what lies outside of the tensor is zeros. All
// bytes of the box count at the barrier.
FB_FN void box_load(fb_u32 to, const fb_map *map, fb_u32 barrier, int x, int y, int h, int b) {
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, "
                 "{%3,%4,%5,%6}], "
                 "[%2];" ::"r"(to),
                 "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(h), "r"(b)
                 : "memory");
}

// Bytes in a row, a multiple of 16 at multiples of 16.
FB_FN void bytes_load(fb_u32 to, const void *from, int bytes, fb_u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}

FB_FN void map_prefetch(const fb_map *map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// What this thread has written to shared memory may be read by products and by TMA, once whoever starts these
// knows.
FB_FN void written_for_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Four matrices of 8 x 16 bytes, as ldmatrix reads them; row: the address of this lane's row.
FB_FN void matrices_store(fb_u32 row, fb_u32 a, fb_u32 b, fb_u32 c, fb_u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(row), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

// Adds to memory, 16 bytes at a multiple of 16, in no order.
FB_FN void add4(float *to, float a, float b, float c, float d) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1,%2,%3,%4};" ::"l"(to), "f"(a), "f"(b), "f"(c), "f"(d)
                 : "memory");
}

// The larger; NaN if one is.
FB_FN float max_or_nan(float x, float y) {
    float z;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(z) : "f"(x), "f"(y));
    return z;
}

// 1 / x to 1 unit in the last place.
FB_FN float reciprocal(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

FB_FN fb_u32 clock_now() {
    fb_u32 t;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(t));
    return t;
}

// ---- Products of a warpgroup
// ---------------------------------------------------------------------------------- d (64 x N, of which a
// thread has d[N/2]: warp w, lane 4 r + c the rows 16 w + r and + 8, as fragments of 16 x 8 one after the
// other) += A B over 16 terms. `d` and A in registers belong to the product until products_wait.

// A tile as an operand, from address `at` on. Summed over columns: `stride` does not matter, a step of 16
// terms is 32 bytes. Summed over rows: `stride` is the bytes of a panel, a step is 2048 bytes.
FB_FN fb_u64 operand(fb_u32 at, fb_u32 stride) {
    return (fb_u64)((at & 0x3ffff) >> 4) | (fb_u64)(stride >> 4) << 16 | (fb_u64)(1024 >> 4) << 32 | (fb_u64)1 << 62;
}

// Before the first product after registers of it were written.
FB_FN void products_begin() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
FB_FN void products_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `pending` of the latest groups are under way.
#define products_wait(pending) asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory")

// Keeps uses of what products have left in registers behind the wait for them.
FB_FN void settle(float *d, const int COUNT) {
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        asm volatile("" : "+f"(d[i])::"memory");
}

// What is made beside products has to be made before the wait for them. The compiler puts it behind the wait, where it
// is used first, unless the way that the warp takes depends on all of it: on something that is rarely or never so.
FB_FN void made_before(bool rare) {
    if (__any_sync(~0u, rare))
        asm volatile("nanosleep.u32 0;");
}

// All bits of some words.
FB_FN fb_u32 all_bits(const fb_u32 *x, const int COUNT) {
    fb_u32 bits = 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++)
        bits |= x[i];
    return bits;
}

#if FB_TYPE == FB_TYPE_F16
#define FB_WGMMA_TYPES ".f32.f16.f16 "
#else
#define FB_WGMMA_TYPES ".f32.bf16.bf16 "
#endif

#define FB_D16 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define FB_D32                                                                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"               \
    "%27,%28,%29,%30,%31"
#define FB_D40                                                                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"               \
    "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39"
#define FB_D48                                                                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"               \
    "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define FB_D56                                                                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"               \
    "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"             \
    "%52,%53,%54,%55"
#define FB_D64                                                                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"               \
    "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"             \
    "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define FB_D88                                                                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"               \
    "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"             \
    "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,"             \
    "%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87"
#define FB_D96                                                                                                         \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"               \
    "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"             \
    "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,"             \
    "%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define FB_D128                                                                                                        \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,"               \
    "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,"             \
    "%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,"             \
    "%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,"                \
    "%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,"             \
    "%121,%122,%123,%124,%125,%126,%127"

#define FB_R8(i)                                                                                                       \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]),        \
        "+f"(d[i + 7])
#define FB_R16(i) FB_R8(i), FB_R8(i + 8)
#define FB_R32(i) FB_R16(i), FB_R16(i + 16)
#define FB_R64(i) FB_R32(i), FB_R32(i + 32)

// products_nt_N: A and B tiles that are summed over their columns. products_tn_N: over their rows.
// products_rn_N: A fragments a[4] of this thread's rows, B summed over its rows. With add = 0 d is
// overwritten.
#define FB_PRODUCTS(N, LIST, REGISTERS, R0, R1, R2, R3, R4, R5)                                                        \
    FB_FN void products_nt_##N(float *d, fb_u64 a, fb_u64 b, int add) {                                                \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #R2 ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16" FB_WGMMA_TYPES "{" LIST "}, %" #R0 ", %" #R1         \
                     ", add, 1, 1, 0, 0;\n}"                                                                           \
                     : REGISTERS                                                                                       \
                     : "l"(a), "l"(b), "r"(add));                                                                      \
    }                                                                                                                  \
    FB_FN void products_tn_##N(float *d, fb_u64 a, fb_u64 b, int add) {                                                \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #R2 ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16" FB_WGMMA_TYPES "{" LIST "}, %" #R0 ", %" #R1         \
                     ", add, 1, 1, 1, 1;\n}"                                                                           \
                     : REGISTERS                                                                                       \
                     : "l"(a), "l"(b), "r"(add));                                                                      \
    }                                                                                                                  \
    FB_FN void products_rn_##N(float *d, const fb_u32 *a, fb_u64 b, int add) {                                         \
        asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %" #R5 ", 0;\n"                                             \
                     "wgmma.mma_async.sync.aligned.m64n" #N "k16" FB_WGMMA_TYPES "{" LIST "}, {%" #R0 ",%" #R1         \
                     ",%" #R2 ",%" #R3 "}, %" #R4 ", add, 1, 1, 1;\n}"                                                 \
                     : REGISTERS                                                                                       \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(add));                                  \
    }
#define FB_COMMA ,

FB_PRODUCTS(32, FB_D16, FB_R16(0), 16, 17, 18, 19, 20, 21)
FB_PRODUCTS(64, FB_D32, FB_R32(0), 32, 33, 34, 35, 36, 37)
FB_PRODUCTS(80, FB_D40, FB_R32(0) FB_COMMA FB_R8(32), 40, 41, 42, 43, 44, 45)
FB_PRODUCTS(96, FB_D48, FB_R32(0) FB_COMMA FB_R16(32), 48, 49, 50, 51, 52, 53)
FB_PRODUCTS(112, FB_D56, FB_R32(0) FB_COMMA FB_R16(32) FB_COMMA FB_R8(48), 56, 57, 58, 59, 60, 61)
FB_PRODUCTS(128, FB_D64, FB_R64(0), 64, 65, 66, 67, 68, 69)
FB_PRODUCTS(176, FB_D88, FB_R64(0) FB_COMMA FB_R16(64) FB_COMMA FB_R8(80), 88, 89, 90, 91, 92, 93)
FB_PRODUCTS(192, FB_D96, FB_R64(0) FB_COMMA FB_R32(64), 96, 97, 98, 99, 100, 101)
FB_PRODUCTS(256, FB_D128, FB_R64(0) FB_COMMA FB_R64(64), 128, 129, 130, 131, 132, 133)

#define FB_PRODUCTS_OF(form, N) products_##form##_##N
#define products_nt(N, d, a, b, add) FB_PRODUCTS_OF(nt, N)(d, a, b, add)
#define products_tn(N, d, a, b, add) FB_PRODUCTS_OF(tn, N)(d, a, b, add)
#define products_rn(N, d, a, b, add) FB_PRODUCTS_OF(rn, N)(d, a, b, add)
