/* The backend for NVIDIA GPUs. Floor: cuda. Next: cuda.c. */
#ifndef FB_CUDA_CUDA_H
#define FB_CUDA_CUDA_H

#include "../core/backend.h"

extern const fb__backend fb__cuda;

#endif
