/* NVIDIA's driver, found at run time: its functions, its errors as sentences, a device's numbers, and a guard
 * around the caller's context. Types and constants are declared here after the public documentation of the
 * driver API, so that no toolkit is needed to build. Floor: cuda. Next: memory.h, the shortest user. */
#ifndef FB_CUDA_DRIVER_H
#define FB_CUDA_DRIVER_H

#include "../core/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* name of the field, name in the library, parameters. All return a CUresult, 0 for success. CUdevice is an
 * int; CUcontext, CUmodule, CUfunction and CUstream are pointers; CUdeviceptr is 64 bits. */
#define FB__DRIVER_LIST(X)                                                                                   \
    X(cuInit, "cuInit", (unsigned flags))                                                                    \
    X(cuDriverGetVersion, "cuDriverGetVersion", (int *version))                                              \
    X(cuDeviceGetCount, "cuDeviceGetCount", (int *count))                                                    \
    X(cuDeviceGet, "cuDeviceGet", (int *device, int ordinal))                                                \
    X(cuDeviceGetName, "cuDeviceGetName", (char *name, int size, int device))                                \
    X(cuDeviceTotalMem, "cuDeviceTotalMem_v2", (size_t * bytes, int device))                                 \
    X(cuDeviceGetAttribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))                 \
    X(cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (void **context, int device))                    \
    X(cuDevicePrimaryCtxRelease, "cuDevicePrimaryCtxRelease_v2", (int device))                               \
    X(cuCtxPushCurrent, "cuCtxPushCurrent_v2", (void *context))                                              \
    X(cuCtxPopCurrent, "cuCtxPopCurrent_v2", (void **context))                                               \
    X(cuCtxGetCurrent, "cuCtxGetCurrent", (void **context))                                                  \
    X(cuCtxSynchronize, "cuCtxSynchronize", (void))                                                          \
    X(cuStreamSynchronize, "cuStreamSynchronize", (void *stream))                                            \
    X(cuStreamIsCapturing, "cuStreamIsCapturing", (void *stream, int *status))                               \
    X(cuMemAlloc, "cuMemAlloc_v2", (uint64_t * at, size_t bytes))                                            \
    X(cuMemFree, "cuMemFree_v2", (uint64_t at))                                                              \
    X(cuMemcpyHtoD, "cuMemcpyHtoD_v2", (uint64_t to, const void *from, size_t bytes))                        \
    X(cuMemcpyDtoH, "cuMemcpyDtoH_v2", (void *to, uint64_t from, size_t bytes))                              \
    X(cuMemsetD8Async, "cuMemsetD8Async", (uint64_t at, unsigned char value, size_t bytes, void *stream))    \
    X(cuModuleLoadData, "cuModuleLoadData", (void **module, const void *image))                              \
    X(cuModuleUnload, "cuModuleUnload", (void *module))                                                      \
    X(cuModuleGetFunction, "cuModuleGetFunction", (void **function, void *module, const char *name))         \
    X(cuFuncSetAttribute, "cuFuncSetAttribute", (void *function, int attribute, int value))                  \
    X(cuFuncGetAttribute, "cuFuncGetAttribute", (int *value, int attribute, void *function))                 \
    X(cuLaunchKernel, "cuLaunchKernel",                                                                      \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,                  \
       unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream, void **arguments,            \
       void **extra))                                                                                        \
    X(cuTensorMapEncodeTiled, "cuTensorMapEncodeTiled",                                                      \
      (void *map, int type, unsigned rank, void *at, const uint64_t *size, const uint64_t *stride,           \
       const unsigned *box, const unsigned *step, int interleave, int swizzle, int promotion, int fill))     \
    X(cuGetErrorName, "cuGetErrorName", (int result, const char **name))                                     \
    X(cuGetErrorString, "cuGetErrorString", (int result, const char **text))

typedef struct fb__driver {
    int version; /* 13000 for CUDA 13.0 */
#define X(name, symbol, parameters) int(*name) parameters;
    FB__DRIVER_LIST(X)
#undef X
} fb__driver;

/* Results that this library tells apart (CUresult). */
enum {
    FB__CU_INVALID_VALUE = 1,
    FB__CU_OUT_OF_MEMORY = 2,
    FB__CU_NOT_INITIALIZED = 3,
    FB__CU_NO_DEVICE = 100,
    FB__CU_INVALID_DEVICE = 101,
    FB__CU_NO_BINARY_FOR_GPU = 209,
    FB__CU_ILLEGAL_ADDRESS = 700,
    FB__CU_LAUNCH_FAILED = 719,
    FB__CU_SYSTEM_DRIVER_MISMATCH = 803,
    FB__CU_STREAM_CAPTURE_UNSUPPORTED = 900
};

/* CUfunction_attribute */
enum {
    FB__CU_FUNC_MAX_THREADS_PER_BLOCK = 0,
    FB__CU_FUNC_SHARED_BYTES = 1,
    FB__CU_FUNC_LOCAL_BYTES = 3, /* stack and spilled registers of a thread */
    FB__CU_FUNC_REGISTERS = 4,
    FB__CU_FUNC_MAX_DYNAMIC_SHARED_BYTES = 8,
    FB__CU_FUNC_SHARED_CARVEOUT = 9 /* percent of what an SM has; 100 prefers shared memory over L1 */
};

/* Parameters of cuTensorMapEncodeTiled. */
enum {
    FB__CU_MAP_FLOAT16 = 6,
    FB__CU_MAP_BFLOAT16 = 9,
    FB__CU_MAP_SWIZZLE_128 = 3,
    FB__CU_MAP_PROMOTE_256 = 3 /* the second-level cache fetches 256 bytes at a time */
};

/* Loads the driver and starts it. Cheap when that has happened before: a search in loaded libraries, and
 * nothing else is kept than what is in *d. FB_NO_DEVICE with a sentence saying what is missing. */
fb_status fb__driver_open(fb__driver *d);

/* A result as a status: FB_OK; FB_MEMORY where memory ran out; else FB_DEVICE. The sentence has the call, and
 * the error's name and text. */
fb_status fb__driver_check(const fb__driver *d, int result, const char *call);

/* FB__CU_TRY(d, cuMemFree, (at)): makes a call and returns from the function if it fails. */
#define FB__CU_TRY(d, name, arguments) FB_TRY(fb__driver_check((d), (d)->name arguments, #name))

/* The handle (CUdevice) of a device by its number. `argument` is what the caller's caller knows the number
 * as: desc.index, or index. */
fb_status fb__driver_device(const fb__driver *d, const char *argument, int index, int *device);

typedef struct fb__gpu {
    int ordinal, device;                       /* desc.index, and the driver's handle */
    int cc;                                    /* compute capability, 90 for 9.0 */
    int sms;                                   /* multiprocessors */
    int smem_block, smem_block_optin, smem_sm; /* bytes of shared memory: a block, a block that asks, an SM */
    int l2_bytes, registers_sm, threads_sm, warp;
    uint64_t memory; /* bytes */
    char name[96];
} fb__gpu;

/* What the device of desc.index is. FB_NO_DEVICE if there is none; the sentence says how many there are. */
fb_status fb__driver_gpu(const fb__driver *d, int index, fb__gpu *gpu);

/* Makes a context current on the calling thread and gives back the caller's. A guard is left exactly once if
 * and only if enter returned FB_OK:
 *
 *     fb__guard g;
 *     FB_TRY(fb__guard_enter(d, context, &g));
 *     fb_status status = ...;
 *     return fb__guard_leave(d, &g, status);
 */
typedef struct fb__guard {
    bool pushed; /* false: the context was current already */
} fb__guard;

fb_status fb__guard_enter(const fb__driver *d, void *context, fb__guard *g);

/* Returns `status`; or, where that is FB_OK, what leaving came to. An earlier failure keeps its sentence. */
fb_status fb__guard_leave(const fb__driver *d, const fb__guard *g, fb_status status);

#endif
