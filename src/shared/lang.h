/* The dialect that C, CUDA and Metal share: fixed-width integers, one function qualifier, nothing from a
 * library. Floor: shared. Next: mask.h. */
#ifndef FB_SHARED_LANG_H
#define FB_SHARED_LANG_H

#if defined(__METAL_VERSION__) || defined(__CUDACC_RTC__)
typedef long fb_i64;
typedef int fb_i32;
typedef unsigned char fb_u8;
#else
typedef __INT64_TYPE__ fb_i64;
typedef __INT32_TYPE__ fb_i32;
typedef __UINT8_TYPE__ fb_u8;
#endif

#if defined(__CUDACC__)
#define FB_FN static __device__ __forceinline__
#else
#define FB_FN static inline
#endif

#endif
