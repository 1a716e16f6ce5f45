/* The words for the values of the API's enums, as lists: header, errors, environment and explain all use
 * them. Floor: core. */
#ifndef FB_CORE_NAMES_H
#define FB_CORE_NAMES_H

#include "flashback.h"

#define FB__STATUS_LIST(X)                                                                                   \
    X(FB_OK) X(FB_INVALID) X(FB_UNSUPPORTED) X(FB_NO_DEVICE) X(FB_COMPILE) X(FB_DEVICE) X(FB_MEMORY)
/* value, word, bytes */
#define FB__DTYPE_LIST(X) X(FB_F32, "f32", 4) X(FB_F16, "f16", 2) X(FB_BF16, "bf16", 2) X(FB_F64, "f64", 8)
#define FB__DEVICE_LIST(X) X(FB_CPU, "cpu") X(FB_CUDA, "cuda") X(FB_METAL, "metal")
#define FB__ROUTE_LIST(X)                                                                                    \
    X(FB_AUTO, "auto")                                                                                       \
    X(FB_FUSED, "fused") X(FB_VECTOR, "vector") X(FB_UNFUSED, "unfused") X(FB_REFERENCE, "reference")

#define FB__ROUTES 5

#endif
