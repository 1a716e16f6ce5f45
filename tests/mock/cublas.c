/* A libcublasLt.so.13 that multiplies nothing, but looks whether it could: matrices have to fit together, and
 * to lie where it was told. Any call can be made to fail. See mock.h. */
#include "mock.h"
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 7, NOT_SUPPORTED = 15, WORKSPACE = 4096 };

EXPORT mock_cublas_state mock_cublas;
#define mock mock_cublas

typedef struct object {
    enum { DESC = 0x44, LAYOUT, PREFERENCE } kind;
    int type, turn_a, turn_b;
    uint64_t rows, columns;
    int64_t step, next;
    int32_t batch;
    uint32_t align[4];
} object;

typedef struct heuristic {
    uint64_t algorithm[8];
    size_t workspace;
    int status;
    float waves;
    int reserved[4];
} heuristic;

#define CALL(name)                                                                                           \
    do {                                                                                                     \
        if (++mock.calls == mock.fail_at) {                                                                  \
            mock.failed = name;                                                                              \
            return mock.fail_with;                                                                           \
        }                                                                                                    \
    } while (0)

static int strange(const char *name) {
    if (!mock.strange++)
        mock.strangest = name;
    return INVALID_VALUE;
}

static int make(void **to, object o) {
    object *made = malloc(sizeof *made);
    if (!made)
        return 3;
    *made = o;
    *to = made;
    mock.objects++;
    return SUCCESS;
}

static int drop(void *o) {
    mock.calls++;
    mock.objects--;
    free(o);
    return SUCCESS;
}

EXPORT size_t cublasLtGetVersion(void) { return 130100; }

EXPORT const char *cublasLtGetStatusName(int status) {
    return status == 3 ? "CUBLAS_STATUS_ALLOC_FAILED" : "CUBLAS_STATUS_INTERNAL_ERROR";
}

EXPORT int cublasLtCreate(void **handle) {
    CALL("cublasLtCreate");
    *handle = &mock;
    mock.handles++;
    return SUCCESS;
}

EXPORT int cublasLtDestroy(void *handle) {
    mock.calls++;
    if (handle != &mock || !mock.handles)
        return strange("cublasLtDestroy");
    mock.handles--;
    return SUCCESS;
}

/* ---- Objects ---- */

EXPORT int cublasLtMatmulDescCreate(void **desc, int compute_type, int scale_type) {
    CALL("cublasLtMatmulDescCreate");
    return compute_type == 68 && scale_type == 0 ? make(desc, (object){.kind = DESC})
                                                 : strange("cublasLtMatmulDescCreate");
}

EXPORT int cublasLtMatmulDescDestroy(void *desc) { return drop(desc); }

EXPORT int cublasLtMatmulDescSetAttribute(void *desc, int attribute, const void *value, size_t bytes) {
    CALL("cublasLtMatmulDescSetAttribute");
    object *o = desc;
    if (bytes != 4 || (attribute != 3 && attribute != 4))
        return strange("cublasLtMatmulDescSetAttribute");
    memcpy(attribute == 3 ? &o->turn_a : &o->turn_b, value, bytes);
    return SUCCESS;
}

EXPORT int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns,
                                      int64_t step) {
    CALL("cublasLtMatrixLayoutCreate");
    if (!rows || !columns || step < (int64_t)rows)
        return strange("cublasLtMatrixLayoutCreate");
    return make(layout,
                (object){.kind = LAYOUT, .type = type, .rows = rows, .columns = columns, .step = step});
}

EXPORT int cublasLtMatrixLayoutDestroy(void *layout) { return drop(layout); }

EXPORT int cublasLtMatrixLayoutSetAttribute(void *layout, int attribute, const void *value, size_t bytes) {
    CALL("cublasLtMatrixLayoutSetAttribute");
    object *o = layout;
    if (attribute == 5 && bytes == sizeof o->batch)
        memcpy(&o->batch, value, bytes);
    else if (attribute == 6 && bytes == sizeof o->next)
        memcpy(&o->next, value, bytes);
    else
        return strange("cublasLtMatrixLayoutSetAttribute");
    return SUCCESS;
}

EXPORT int cublasLtMatmulPreferenceCreate(void **preference) {
    CALL("cublasLtMatmulPreferenceCreate");
    return make(preference, (object){.kind = PREFERENCE});
}

EXPORT int cublasLtMatmulPreferenceDestroy(void *preference) { return drop(preference); }

EXPORT int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute, const void *value,
                                                size_t bytes) {
    CALL("cublasLtMatmulPreferenceSetAttribute");
    object *o = preference;
    if (attribute == 1 && bytes == 8)
        return SUCCESS;
    if (attribute < 5 || attribute > 8 || bytes != 4)
        return strange("cublasLtMatmulPreferenceSetAttribute");
    memcpy(&o->align[attribute - 5], value, bytes);
    return SUCCESS;
}

/* ---- Products ---- */

static int fit(const object *d, const object *a, const object *b, const object *c) {
    const uint64_t m = d->turn_a ? a->columns : a->rows, k = d->turn_a ? a->rows : a->columns,
                   terms = d->turn_b ? b->columns : b->rows, n = d->turn_b ? b->rows : b->columns;
    return d->kind == DESC && a->kind == LAYOUT && b->kind == LAYOUT && c->kind == LAYOUT && m == c->rows &&
           n == c->columns && k == terms && a->type == b->type && c->type == 0 && a->batch == c->batch &&
           b->batch == c->batch && c->batch > 0;
}

EXPORT int cublasLtMatmulAlgoGetHeuristic(void *handle, void *desc, void *a, void *b, void *c, void *d,
                                          void *preference, int most, heuristic *found, int *count) {
    CALL("cublasLtMatmulAlgoGetHeuristic");
    const object *o = preference;
    if (handle != &mock || c != d || most != 1 || o->kind != PREFERENCE || o->align[0] != 256 ||
        o->align[3] != 256 || !fit(desc, a, b, c))
        return strange("cublasLtMatmulAlgoGetHeuristic");
    *count = !mock.unable;
    if (mock.unable)
        return mock.unable > 1 ? NOT_SUPPORTED : SUCCESS;
    *found = (heuristic){.algorithm = {1}, .workspace = WORKSPACE};
    return SUCCESS;
}

EXPORT int cublasLtMatmul(void *handle, void *desc, const void *alpha, const void *a, void *a_layout,
                          const void *b, void *b_layout, const void *beta, const void *c, void *c_layout,
                          void *d, void *d_layout, const uint64_t *algorithm, void *workspace,
                          size_t workspace_bytes, void *stream) {
    CALL("cublasLtMatmul");
    const float *one = alpha, *zero = beta;
    const uintptr_t places = (uintptr_t)a | (uintptr_t)b | (uintptr_t)d | (uintptr_t)workspace;
    (void)stream;
    if (handle != &mock || *one != 1 || *zero != 0 || c != d || c_layout != d_layout || places % 256 || !a ||
        !b || !d || algorithm[0] != 1 || workspace_bytes != WORKSPACE ||
        !fit(desc, a_layout, b_layout, c_layout))
        return strange("cublasLtMatmul");
    mock.products++;
    return SUCCESS;
}
