/* What a test sees of the mock libraries: a block that each exports, to be found by dlsym. The fields above
 * the line are the test's to set, those below it the mock's. */
#ifndef TESTS_MOCK_H
#define TESTS_MOCK_H

#include <stddef.h>

typedef struct mock_launch {
    char function[64];
    unsigned grid[3], block[3], shared_bytes;
    void *stream;
} mock_launch;

enum { MOCK_LAUNCHES = 256 };

/* "mock_cuda" in libcuda.so.1. A call that is to fail does nothing else. Those that release something are the
 * exception, as they are documented to report what failed earlier: unless they fail with
 * CUDA_ERROR_INVALID_VALUE, what they are to release is gone. cuGetErrorName and cuGetErrorString are not
 * counted and do not fail. */
typedef struct mock_cuda_state {
    int capability; /* 90 */
    int devices;    /* 1 */
    int version;    /* 13000 */
    long fail_at;   /* calls + 1 is the next; 0 = none */
    int fail_with;  /* a CUresult */
    /* ---- */
    long calls;
    const char *failed; /* the call that failed as asked, or NULL */
    int memories, retains, modules;
    int depth;   /* of the stack of contexts */
    int strange; /* calls that a driver would not have survived: a wrong handle, memory out of bounds */
    const char *strangest; /* the first of these */
    long launch_count;     /* the first MOCK_LAUNCHES are in launches */
    mock_launch launches[MOCK_LAUNCHES];
} mock_cuda_state;

/* "mock_nvrtc" in libnvrtc.so.13 and .12. */
typedef struct mock_nvrtc_state {
    int minor;       /* 0 */
    const char *log; /* of the next compilations */
    int result;      /* of them; an nvrtcResult, 6 is a compiler error */
    long fail_at;    /* as above */
    int fail_with;   /* an nvrtcResult */
    /* ---- */
    long calls;
    const char *failed;
    int programs;
    char name[64], options[1024]; /* of the last compilation; one option a line */
} mock_nvrtc_state;

/* "mock_cublas" in libcublasLt.so.13. What destroys something cannot fail. */
typedef struct mock_cublas_state {
    int unable;    /* cublasLtMatmulAlgoGetHeuristic finds nothing */
    long fail_at;  /* as above */
    int fail_with; /* a cublasStatus_t */
    /* ---- */
    long calls;
    const char *failed;
    int handles, objects; /* alive; objects are descriptors, layouts and preferences */
    int strange;          /* as above: matrices that do not fit together, places that are not aligned */
    const char *strangest;
    long products; /* that ran */
} mock_cublas_state;

/* "mock_metal" in libobjc.A.dylib, beside which lies Metal. Calls that may fail are those that can give NULL,
 * and the commit of a command buffer, which then ends with an error. A failure has the call's name in its
 * NSError where it has one. What a queue is given runs when somebody waits for it. */
typedef struct mock_dispatch {
    char function[32];
    unsigned long x, y, threads, shared_bytes;
    long buffer;  /* number of the command buffer, from 1 on */
    long barrier; /* barriers and encoders before it in its command buffer */
} mock_dispatch;

enum { MOCK_DISPATCHES = 512, MOCK_CODE_INTERNAL = 1, MOCK_CODE_TIMEOUT = 2, MOCK_CODE_MEMORY = 8 };

typedef struct mock_metal_state {
    int devices;               /* 1 */
    int family;                /* 9: Apple9 and the ones before */
    int macos;                 /* 15 */
    unsigned long buffer_most; /* bytes; 1 << 33 */
    unsigned long memory_most; /* bytes of all buffers; 1 << 33 */
    const char *limited;       /* the function whose pipelines allow less, or NULL */
    unsigned long limited_to;  /* threads */
    unsigned long simd_width;  /* 32 */
    int layout;                /* what fb_layout answers where kernels do not run; 1 */
    const char *compile_error; /* what the compiler says of the next texts; NULL: nothing */
    long fail_at;              /* calls + 1 is the next; 0 = none */
    int fail_code;             /* of the NSError */
    /* ---- */
    long calls;
    const char *failed;
    long live; /* objects besides devices and classes */
    int pools; /* open ones */
    int locks; /* held by objc_sync_enter */
    int strange;
    const char *strangest;
    long compilations;
    unsigned long language; /* of the last one */
    int fast_math;          /* of the last one; -1: nobody said */
    long committed, waited; /* command buffers */
    long dispatch_count;    /* in the order in which they ran */
    mock_dispatch dispatches[MOCK_DISPATCHES];
} mock_metal_state;

#endif
