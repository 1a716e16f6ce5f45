/* What these tests share: the mock libraries of CUDA. */
#ifndef TESTS_CUDA_SUPPORT_H
#define TESTS_CUDA_SUPPORT_H

#include "tests/child.h"
#include "tests/mock/mock.h"

static inline mock_cuda_state *load_driver(void) {
    return load_mock(MOCKS "/driver/libcuda.so.1", "mock_cuda");
}

#define NVRTC13 MOCKS "/nvrtc13/libnvrtc.so.13"
#define NVRTC12 MOCKS "/nvrtc12/libnvrtc.so.12"

#define CUBLAS13 MOCKS "/cublas13/libcublasLt.so.13"

static inline mock_cublas_state *load_cublas(void) { return load_mock(CUBLAS13, "mock_cublas"); }

static inline mock_nvrtc_state *load_nvrtc(const char *path) { return load_mock(path, "mock_nvrtc"); }

#endif
