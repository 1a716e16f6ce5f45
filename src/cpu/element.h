/* One element of any type, as double. Floor: cpu. */
#ifndef FB_CPU_ELEMENT_H
#define FB_CPU_ELEMENT_H

#include "../base/half.h"
#include "flashback.h"

static inline double fb__load(fb_dtype type, const void *from, int64_t at) {
    switch (type) {
    case FB_F32:
        return (double)((const float *)from)[at];
    case FB_F16:
        return (double)fb__f32_from_f16(((const uint16_t *)from)[at]);
    case FB_BF16:
        return (double)fb__f32_from_bf16(((const uint16_t *)from)[at]);
    case FB_F64:
        break;
    }
    return ((const double *)from)[at];
}

/* Rounds to nearest even, once. */
static inline void fb__store(fb_dtype type, void *to, int64_t at, double x) {
    switch (type) {
    case FB_F32:
        ((float *)to)[at] = (float)x;
        break;
    case FB_F16:
        ((uint16_t *)to)[at] = fb__f16_from_f64(x);
        break;
    case FB_BF16:
        ((uint16_t *)to)[at] = fb__bf16_from_f64(x);
        break;
    case FB_F64:
        ((double *)to)[at] = x;
        break;
    }
}

#endif
