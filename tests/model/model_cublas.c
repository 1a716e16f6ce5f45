/* A libcublasLt.so.13 on the processor: products as the documentation says, in column-major order, summed in
 * f32. Types, attributes and their numbers are those of cublasLt's public documentation. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, NOT_SUPPORTED = 15, R_32F = 0, R_16F = 2, R_16BF = 14 };

/* Attributes by number: of a layout 0 type, 2 rows, 3 columns, 4 leading dimension, 5 batch, 6 offset in the
 * batch; of a product 3 and 4: is A, is B transposed? */
typedef struct object {
    int64_t attribute[32];
} object;

static int create(void **to) {
    *to = calloc(1, sizeof(object));
    return SUCCESS;
}

static int set(object *o, int attribute, const void *value, size_t bytes) {
    o->attribute[attribute] = 0;
    memcpy(&o->attribute[attribute], value, bytes);
    return SUCCESS;
}

static int destroy(void *o) {
    free(o);
    return SUCCESS;
}

EXPORT size_t cublasLtGetVersion(void) { return 130100; }
EXPORT const char *cublasLtGetStatusName(int status) {
    return status == SUCCESS ? "CUBLAS_STATUS_SUCCESS" : "CUBLAS_STATUS_NOT_SUPPORTED";
}
EXPORT int cublasLtCreate(void **handle) { return create(handle); }
EXPORT int cublasLtDestroy(void *handle) { return destroy(handle); }
EXPORT int cublasLtMatmulDescCreate(void **desc, int compute_type, int scale_type) {
    (void)compute_type, (void)scale_type;
    return create(desc);
}
EXPORT int cublasLtMatmulDescDestroy(void *desc) { return destroy(desc); }
EXPORT int cublasLtMatmulDescSetAttribute(void *desc, int attribute, const void *value, size_t bytes) {
    return set(desc, attribute, value, bytes);
}
EXPORT int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns,
                                      int64_t step) {
    create(layout);
    object *o = *layout;
    o->attribute[0] = type, o->attribute[2] = (int64_t)rows, o->attribute[3] = (int64_t)columns;
    o->attribute[4] = step, o->attribute[5] = 1;
    return SUCCESS;
}
EXPORT int cublasLtMatrixLayoutDestroy(void *layout) { return destroy(layout); }
EXPORT int cublasLtMatrixLayoutSetAttribute(void *layout, int attribute, const void *value, size_t bytes) {
    return set(layout, attribute, value, bytes);
}
EXPORT int cublasLtMatmulPreferenceCreate(void **preference) { return create(preference); }
EXPORT int cublasLtMatmulPreferenceDestroy(void *preference) { return destroy(preference); }
EXPORT int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value,
                                                size_t bytes) {
    return set(preference, attribute, value, bytes);
}

typedef struct heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
} heuristic;

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d,
                                          void *preference, int most, heuristic *found, int *count) {
    (void)handle, (void)desc, (void)a, (void)b, (void)c, (void)d, (void)preference;
    memset(found, 0, (size_t)most * sizeof *found);
    *count = 1;
    return SUCCESS;
}

static float load(int64_t type, const void *at, int64_t index) {
    if (type == R_32F)
        return ((const float *)at)[index];
    uint32_t h = ((const uint16_t *)at)[index], bits = h << 16;
    float x;
    if (type == R_16F) {
        const uint32_t sign = (h & 0x8000u) << 16, exponent = h >> 10 & 31, fraction = h & 0x3ff;
        x = (float)fraction * 0x1p-24f;
        memcpy(&bits, &x, 4);
        bits |= sign;
        if (exponent)
            bits = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    }
    memcpy(&x, &bits, 4);
    return x;
}

static float cell(const object *layout, int64_t transposed, const void *at, int64_t batch, int64_t row,
                  int64_t column) {
    const int64_t *a = layout->attribute, i = transposed ? column : row, j = transposed ? row : column;
    return load(a[0], at, batch * a[6] + i + j * a[4]);
}

EXPORT int cublasLtMatmul(void *handle, void *desc, const void *alpha, const void *a, void *a_layout,
                          const void *b, void *b_layout, const void *beta, const void *c, void *c_layout,
                          void *d, void *d_layout, const uint64_t *algorithm, void *workspace,
                          size_t workspace_bytes, void *stream) {
    const object *product = desc, *A = a_layout, *B = b_layout, *D = d_layout;
    const int64_t turn_a = product->attribute[3], turn_b = product->attribute[4], *n = D->attribute;
    const int64_t terms = A->attribute[turn_a ? 2 : 3];
    (void)handle, (void)c, (void)c_layout, (void)algorithm, (void)workspace, (void)workspace_bytes,
        (void)stream;
    if (n[0] != R_32F || *(const float *)beta != 0 || *(const float *)alpha != 1)
        return NOT_SUPPORTED;
    for (int64_t batch = 0; batch < n[5]; batch++)
        for (int64_t j = 0; j < n[3]; j++)
            for (int64_t i = 0; i < n[2]; i++) {
                float sum = 0;
                for (int64_t k = 0; k < terms; k++)
                    sum += cell(A, turn_a, a, batch, i, k) * cell(B, turn_b, b, batch, k, j);
                ((float *)d)[batch * n[6] + i + j * n[4]] = sum;
            }
    return SUCCESS;
}
