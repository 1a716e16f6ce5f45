/* cuBLAS, NVIDIA's matrix products, found at run time. Of its two interfaces this is cublasLt: there a
 * product is an object that is made once, algorithm included, and a call brings stream and workspace. So a
 * plan stays constant, and any number of threads can run it with one handle (R19). A cublasHandle_t holds
 * stream and workspace itself: threads would have to take turns, or have a handle each. Types and constants
 * are declared here after the public documentation. Floor: cuda. Next: unfused.c, the user. */
#ifndef FB_CUDA_BLAS_H
#define FB_CUDA_BLAS_H

#include "../core/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fb__blas_heuristic {
    uint64_t algorithm[8];
    size_t workspace; /* bytes that it needs */
    int status;
    float waves;
    int reserved[4];
} fb__blas_heuristic;

/* name, parameters. All return a cublasStatus_t, 0 for success. Descriptors and the handle are pointers. */
#define FB__BLAS_LIST(X)                                                                                     \
    X(cublasLtCreate, (void **handle))                                                                       \
    X(cublasLtDestroy, (void *handle))                                                                       \
    X(cublasLtMatmulDescCreate, (void **desc, int compute_type, int scale_type))                             \
    X(cublasLtMatmulDescDestroy, (void *desc))                                                               \
    X(cublasLtMatmulDescSetAttribute, (void *desc, int attribute, const void *value, size_t bytes))          \
    X(cublasLtMatrixLayoutCreate, (void **layout, int type, uint64_t rows, uint64_t columns, int64_t step))  \
    X(cublasLtMatrixLayoutDestroy, (void *layout))                                                           \
    X(cublasLtMatrixLayoutSetAttribute, (void *layout, int attribute, const void *value, size_t bytes))      \
    X(cublasLtMatmulPreferenceCreate, (void **preference))                                                   \
    X(cublasLtMatmulPreferenceDestroy, (void *preference))                                                   \
    X(cublasLtMatmulPreferenceSetAttribute,                                                                  \
      (void *preference, int attribute, const void *value, size_t bytes))                                    \
    X(cublasLtMatmulAlgoGetHeuristic, (void *handle, void *desc, void *a, void *b, void *c, void *d,         \
                                       void *preference, int most, fb__blas_heuristic *found, int *count))   \
    X(cublasLtMatmul,                                                                                        \
      (void *handle, void *desc, const void *alpha, const void *a, void *a_layout, const void *b,            \
       void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,             \
       const uint64_t *algorithm, void *workspace, size_t workspace_bytes, void *stream))

typedef struct fb__blas {
#define X(name, parameters) int(*name) parameters;
    FB__BLAS_LIST(X)
#undef X
    size_t (*cublasLtGetVersion)(void); /* 130100 for 13.1 */
    const char *(*cublasLtGetStatusName)(int status);
    char path[512]; /* of the library that was found */
} fb__blas;

/* Finds cublasLt: one that the process has already; else by the loader; else where toolkits and Python
 * packages of the system are. driver_version is fb__driver.version: its major version limits cuBLAS's; 0 for
 * no limit. The library stays loaded. FB_NO_DEVICE, and where was looked. */
fb_status fb__blas_open(fb__blas *b, int driver_version);

/* The same with folders of one's own for the last step: patterns for glob, ended by NULL. */
fb_status fb__blas_open_in(fb__blas *b, int driver_version, const char *const *folders);

/* "13.1.0" */
void fb__blas_version(const fb__blas *b, char text[24]);

/* The handle, for the device of the current context. */
fb_status fb__blas_create(const fb__blas *b, void **handle);
void fb__blas_destroy(const fb__blas *b, void *handle); /* NULL is fine */

/* C = A B for each matrix of a batch: C is rows x columns, each cell a sum of so many terms. All lie row by
 * row. A lies as [rows][terms], or as [terms][rows] when turned; B as [terms][columns], or [columns][terms].
 * Steps count elements from one row to the next as it lies, and from one matrix to the next. */
typedef struct fb__product_matrix {
    int64_t step, next;
    bool turned;
} fb__product_matrix;

typedef struct fb__product_shape {
    fb_dtype type; /* of A and B; f32 keeps its precision. C is f32, and sums are */
    int64_t batch, rows, columns, terms;
    fb__product_matrix a, b, c;
} fb__product_shape;

typedef struct fb__product {
    fb__product_shape shape;
    void *desc, *a, *b, *c;
    uint64_t algorithm[8];
    size_t workspace; /* bytes that a call needs, at a multiple of 256 */
} fb__product;

/* No dimension may be 0. At most so many bytes of workspace are worth it. On an error *product is what
 * fb__product_drop takes; so is one that is all 0. */
fb_status fb__product_make(const fb__blas *b, void *handle, const fb__product_shape *shape, size_t most,
                           fb__product *product);
void fb__product_drop(const fb__blas *b, fb__product *product);

/* Queues the product on a stream. Matrices begin at multiples of 256 bytes. */
fb_status fb__product_run(const fb__blas *b, void *handle, const fb__product *product, const void *A,
                          const void *B, float *C, void *workspace, void *stream);

#endif
