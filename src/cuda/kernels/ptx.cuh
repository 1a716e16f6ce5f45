// One function for each instruction of sm_80 that C++ has no word for. Next: element.cuh.
#pragma once
#include "../../shared/lang.h"

typedef unsigned fb_u32;
typedef unsigned short fb_u16;

#define FB_APART static __device__ __noinline__ // for what runs rarely

#define FB_INFINITY __int_as_float(0x7f800000)
#define FB_NAN __int_as_float(0x7fc00000)

FB_FN fb_u32 smem_address(const void *p) { return (fb_u32)__cvta_generic_to_shared(p); }

// ---- Copies ---------------------------------------------------------------------------------------------------

// 16 bytes to shared memory, of which `bytes` are read and the rest are zeros.
FB_FN void copy16(fb_u32 to, const void *from, int bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}

FB_FN void copy16_whole(fb_u32 to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// 4 bytes, or zeros.
FB_FN void copy4(fb_u32 to, const void *from, bool exists) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(exists ? 4 : 0) : "memory");
}

FB_FN void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `pending` of this thread's latest groups are on their way.
#define copies_wait(pending) asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory")

FB_FN void store16(fb_u32 to, uint4 x) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(to), "r"(x.x), "r"(x.y), "r"(x.z), "r"(x.w) : "memory");
}

FB_FN uint4 load16(fb_u32 from) {
    uint4 x;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
                 : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w)
                 : "r"(from)
                 : "memory");
    return x;
}

FB_FN fb_u32 load4(fb_u32 from) {
    fb_u32 x;
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(x) : "r"(from) : "memory");
    return x;
}

// ---- Matrices of 8 x 16 bytes ---------------------------------------------------------------------------------

FB_FN void matrices(fb_u32 *r, fb_u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

FB_FN void matrices_transposed(fb_u32 *r, fb_u32 row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(row)
                 : "memory");
}

#define FB_MMA(shape, types)                                                                                           \
    asm volatile("mma.sync.aligned." shape ".row.col.f32." types ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "        \
                 "{%0,%1,%2,%3};"                                                                                      \
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                                      \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]))

FB_FN void mma_f16(float *c, const fb_u32 *a, const fb_u32 *b) { FB_MMA("m16n8k16", "f16.f16"); }
FB_FN void mma_bf16(float *c, const fb_u32 *a, const fb_u32 *b) { FB_MMA("m16n8k16", "bf16.bf16"); }
FB_FN void mma_tf32(float *c, const fb_u32 *a, const fb_u32 *b) { FB_MMA("m16n8k8", "tf32.tf32"); }

// ---- Numbers --------------------------------------------------------------------------------------------------

// 2^x to 2 units in the last place; results below the normal range are 0, exp2(-inf) is 0.
FB_FN float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

FB_FN fb_u32 to_tf32(float x) {
    fb_u32 y;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(y) : "f"(x));
    return y;
}

FB_FN fb_u32 pack_bf16(float lo, float hi) {
    fb_u32 y;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

FB_FN fb_u32 pack_f16(float lo, float hi) {
    fb_u32 y;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(y) : "f"(hi), "f"(lo));
    return y;
}

FB_FN float from_f16(fb_u16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
    return y;
}

FB_FN float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

FB_FN float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
