/* See blas.h. cuBLAS counts columns first: to it all matrices lie turned, and C^T = B^T A^T is what it is
 * asked for. */
#include "blas.h"
#include "../base/text.h"
#include <dlfcn.h>
#include <glob.h>
#include <stdio.h>
#include <string.h>

/* ---- The library ---- */

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define X(name, parameters) {#name, offsetof(fb__blas, name)},
    FB__BLAS_LIST(X)
#undef X
        {"cublasLtGetVersion", offsetof(fb__blas, cublasLtGetVersion)},
    {"cublasLtGetStatusName", offsetof(fb__blas, cublasLtGetStatusName)},
};

static bool find_functions(fb__blas *b, void *library) {
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *function = dlsym(library, functions[i].symbol);
        if (!function)
            return false;
        /* ISO C knows no conversion between pointers to objects and to functions; POSIX gives both one form.
         */
        memcpy((char *)b + functions[i].offset, &function, sizeof function);
    }
    return true;
}

static void note_path(fb__blas *b, const char *name) {
    void *function;
    Dl_info info = {0};
    memcpy(&function, &b->cublasLtGetVersion, sizeof function);
    bool known = dladdr(function, &info) != 0 && info.dli_fname;
    snprintf(b->path, sizeof b->path, "%s", known ? info.dli_fname : name);
}

/* Takes a library if it has everything. `flags` is RTLD_NOLOAD for one that the process has already. It stays
 * loaded in either case (RTLD_NODELETE), as it keeps code on the device; so its handle can be given back. */
static bool take(fb__blas *b, const char *name, int flags) {
    *b = (fb__blas){0};
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | flags);
    if (!library)
        return false;
    bool taken = find_functions(b, library);
    if (taken)
        note_path(b, name);
    dlclose(library);
    return taken;
}

static bool take_from(fb__blas *b, const char *folder, const char *name) {
    char pattern[512];
    int length = snprintf(pattern, sizeof pattern, "%s/%s", folder, name);
    glob_t found;
    if (length < 0 || (size_t)length >= sizeof pattern || glob(pattern, 0, NULL, &found) != 0)
        return false;
    bool taken = false;
    for (size_t i = 0; i < found.gl_pathc && !taken; i++)
        taken = take(b, found.gl_pathv[i], 0);
    globfree(&found);
    return taken;
}

/* Newest first. A name tells the major version: one that is too new for the driver is not even loaded. */
static const struct {
    int major;
    const char *name;
} libraries[] = {{13, "libcublasLt.so.13"}, {12, "libcublasLt.so.12"}};

#define LIBRARIES (sizeof libraries / sizeof *libraries)

static const char *const system_folders[] = {"/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/*/lib",
                                             "/usr/local/lib/python3*/*-packages/nvidia/cu13/lib",
                                             "/usr/local/lib/python3*/*-packages/nvidia/cublas/lib", NULL};

static bool search(fb__blas *b, int most, const char *const *folders) {
    static const int flags[] = {RTLD_NOLOAD, 0};
    for (size_t f = 0; f < sizeof flags / sizeof *flags; f++)
        for (size_t i = 0; i < LIBRARIES; i++)
            if (libraries[i].major <= most && take(b, libraries[i].name, flags[f]))
                return true;
    for (size_t i = 0; i < LIBRARIES; i++)
        for (const char *const *folder = folders; *folder; folder++)
            if (libraries[i].major <= most && take_from(b, *folder, libraries[i].name))
                return true;
    return false;
}

fb_status fb__blas_open_in(fb__blas *b, int driver_version, const char *const *folders) {
    if (search(b, driver_version ? driver_version / 1000 : libraries[0].major, folders))
        return FB_OK;
    char words[512] = "", limit[64] = "";
    fb__text text = {words, sizeof words, 0};
    for (size_t i = 0; i < LIBRARIES; i++)
        fb__text_add(&text, "%s%s", i ? ", " : "", libraries[i].name);
    fb__text_add(&text, " by the loader");
    for (const char *const *folder = folders; *folder; folder++)
        fb__text_add(&text, ", %s", *folder);
    if (driver_version)
        snprintf(limit, sizeof limit, " of version %d or older for this driver", driver_version / 1000);
    return fb__error(FB_NO_DEVICE,
                     "no cuBLAS%s, which multiplies on route unfused; looked for: %.500s. `pip install "
                     "nvidia-cublas` brings one, and LD_LIBRARY_PATH points the loader to its folder; route "
                     "fused needs none",
                     limit, words);
}

fb_status fb__blas_open(fb__blas *b, int driver_version) {
    return fb__blas_open_in(b, driver_version, system_folders);
}

void fb__blas_version(const fb__blas *b, char text[24]) {
    unsigned version = (unsigned)b->cublasLtGetVersion();
    snprintf(text, 24, "%u.%u.%u", version / 10000, version / 100 % 100, version % 100);
}

/* ---- Errors ---- */

enum { ALLOC_FAILED = 3, NOT_SUPPORTED = 15 }; /* cublasStatus_t */

static fb_status check(const fb__blas *b, int result, const char *call) {
    if (result == 0)
        return FB_OK;
    const char *name = b->cublasLtGetStatusName(result);
    char version[24];
    fb__blas_version(b, version);
    return fb__error(result == ALLOC_FAILED ? FB_MEMORY : FB_DEVICE, "%s failed: %s (%d; cuBLAS %s, %s)",
                     call, name ? name : "an error without a name", result, version, b->path);
}

#define BLAS_TRY(b, name, arguments) FB_TRY(check((b), (b)->name arguments, #name))

fb_status fb__blas_create(const fb__blas *b, void **handle) {
    *handle = NULL;
    void *made = NULL;
    BLAS_TRY(b, cublasLtCreate, (&made));
    *handle = made;
    return FB_OK;
}

void fb__blas_destroy(const fb__blas *b, void *handle) {
    if (handle)
        b->cublasLtDestroy(handle);
}

/* ---- Products ---- */

enum { F32 = 0, F16 = 2, BF16 = 14 };     /* cudaDataType_t */
enum { COMPUTE_F32 = 68 };                /* cublasComputeType_t: no TF32 */
enum { TURN_A = 3, TURN_B = 4 };          /* cublasLtMatmulDescAttributes_t */
enum { BATCH_COUNT = 5, BATCH_STEP = 6 }; /* cublasLtMatrixLayoutAttribute_t */
enum { MOST_WORKSPACE = 1, ALIGN_A = 5, ALIGN_D = 8, PLACE_BYTES = 256 }; /* cublasLtMatmulPreference... */

/* Matrices of one call: kernels count them in 16 bits. */
#define BATCH_MOST 65535

static int64_t batch_of(const fb__product_shape *s) { return s->batch < BATCH_MOST ? s->batch : BATCH_MOST; }

static int element_type(fb_dtype type) { return type == FB_F16 ? F16 : type == FB_BF16 ? BF16 : F32; }

/* A matrix of `rows` rows as they lie. */
static fb_status make_layout(const fb__blas *b, const fb__product_shape *s, int type, int64_t rows,
                             int64_t columns, fb__product_matrix m, void **layout) {
    int32_t batch = (int32_t)batch_of(s);
    void *made = NULL;
    BLAS_TRY(b, cublasLtMatrixLayoutCreate, (&made, type, (uint64_t)columns, (uint64_t)rows, m.step));
    *layout = made;
    BLAS_TRY(b, cublasLtMatrixLayoutSetAttribute, (made, BATCH_COUNT, &batch, sizeof batch));
    BLAS_TRY(b, cublasLtMatrixLayoutSetAttribute, (made, BATCH_STEP, &m.next, sizeof m.next));
    return FB_OK;
}

static fb_status describe(const fb__blas *b, fb__product *p) {
    const fb__product_shape *s = &p->shape;
    const int type = element_type(s->type);
    int32_t turn_a = s->b.turned, turn_b = s->a.turned; /* CUBLAS_OP_N and _T; its A is B */
    void *desc = NULL;
    BLAS_TRY(b, cublasLtMatmulDescCreate, (&desc, COMPUTE_F32, F32));
    p->desc = desc;
    BLAS_TRY(b, cublasLtMatmulDescSetAttribute, (desc, TURN_A, &turn_a, sizeof turn_a));
    BLAS_TRY(b, cublasLtMatmulDescSetAttribute, (desc, TURN_B, &turn_b, sizeof turn_b));
    FB_TRY(make_layout(b, s, type, s->a.turned ? s->terms : s->rows, s->a.turned ? s->rows : s->terms, s->a,
                       &p->a));
    FB_TRY(make_layout(b, s, type, s->b.turned ? s->columns : s->terms, s->b.turned ? s->terms : s->columns,
                       s->b, &p->b));
    return make_layout(b, s, F32, s->rows, s->columns, s->c, &p->c);
}

/* In a batch of several calls only the first begins at a place of its own. Rows are multiples of 16 bytes. */
static fb_status prefer(const fb__blas *b, const fb__product *p, size_t most, void *preference) {
    uint64_t bytes = most;
    uint32_t align = p->shape.batch > BATCH_MOST ? 16 : PLACE_BYTES;
    BLAS_TRY(b, cublasLtMatmulPreferenceSetAttribute, (preference, MOST_WORKSPACE, &bytes, sizeof bytes));
    for (int which = ALIGN_A; which <= ALIGN_D; which++)
        BLAS_TRY(b, cublasLtMatmulPreferenceSetAttribute, (preference, which, &align, sizeof align));
    return FB_OK;
}

static fb_status choose(const fb__blas *b, void *handle, void *preference, fb__product *p) {
    fb__blas_heuristic found;
    int count = 0;
    memset(&found, 0, sizeof found);
    int result = b->cublasLtMatmulAlgoGetHeuristic(handle, p->desc, p->b, p->a, p->c, p->c, preference, 1,
                                                   &found, &count);
    if (result == NOT_SUPPORTED || (result == 0 && (count < 1 || found.status != 0)))
        return fb__error(FB_UNSUPPORTED,
                         "cublasLtMatmulAlgoGetHeuristic knows no way to multiply %lld matrices of %lld x "
                         "%lld by %lld x %lld here; route fused needs none",
                         (long long)p->shape.batch, (long long)p->shape.rows, (long long)p->shape.terms,
                         (long long)p->shape.terms, (long long)p->shape.columns);
    FB_TRY(check(b, result, "cublasLtMatmulAlgoGetHeuristic"));
    memcpy(p->algorithm, found.algorithm, sizeof p->algorithm);
    p->workspace = found.workspace;
    return FB_OK;
}

fb_status fb__product_make(const fb__blas *b, void *handle, const fb__product_shape *shape, size_t most,
                           fb__product *product) {
    *product = (fb__product){.shape = *shape};
    FB_TRY(describe(b, product));
    void *preference = NULL;
    BLAS_TRY(b, cublasLtMatmulPreferenceCreate, (&preference));
    fb_status status = prefer(b, product, most, preference);
    if (status == FB_OK)
        status = choose(b, handle, preference, product);
    b->cublasLtMatmulPreferenceDestroy(preference);
    return status;
}

void fb__product_drop(const fb__blas *b, fb__product *product) {
    void *layouts[] = {product->a, product->b, product->c};
    for (int n = 0; n < 3; n++)
        if (layouts[n])
            b->cublasLtMatrixLayoutDestroy(layouts[n]);
    if (product->desc)
        b->cublasLtMatmulDescDestroy(product->desc);
    *product = (fb__product){.workspace = 0};
}

/* More matrices than a call takes need several; the last one begins early enough to be as large as the
 * others, and makes some matrices again. */
fb_status fb__product_run(const fb__blas *b, void *handle, const fb__product *p, const void *A, const void *B,
                          float *C, void *workspace, void *stream) {
    static const float one = 1, zero = 0;
    const fb__product_shape *s = &p->shape;
    const int64_t size = s->type == FB_F32 ? 4 : 2, each = batch_of(s);
    for (int64_t done = 0; done < s->batch; done += each) {
        const int64_t first = done + each > s->batch ? s->batch - each : done;
        float *c = C + first * s->c.next;
        BLAS_TRY(b, cublasLtMatmul,
                 (handle, p->desc, &one, (const char *)B + first * s->b.next * size, p->b,
                  (const char *)A + first * s->a.next * size, p->a, &zero, c, p->c, c, p->c, p->algorithm,
                  workspace, p->workspace, stream));
    }
    return FB_OK;
}
