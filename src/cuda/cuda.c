/* The CUDA backend: chooses route and rows when a plan is made, compiles and loads the kernels, and hands a
 * pass to launch.c. The driver and the compiler are found at run time. Floor: cuda. Next: kernels/forward.cu.
 */
#include "cuda.h"
#include "../core/route.h"
#include "../shared/args.h"
#include "hopper.h"
#include "launch.h"
#include "memory.h"
#include "nvrtc.h"
#include <stdio.h>
#include <stdlib.h>

/* ---- What can be computed ---- */

/* Rows of a sequence and of all stacked heads are counted in 32 bits, tiles past their end included. */
#define MAX_LEN (INT64_C(1) << 30)
#define MAX_BLOCKS INT64_C(0x7fffffff)

/* Shared memory that kernels declare themselves, at most. */
#define STATIC_BYTES 256

static fb_status check_sizes(const fb__problem *p) {
    const fb_desc *d = &p->d;
    if (d->dtype == FB_F64)
        return fb__error(FB_UNSUPPORTED,
                         "desc.dtype is f64, which is for gradient checks and offered on the CPU only; "
                         "cuda has f32, f16 and bf16");
    if (d->len_q > MAX_LEN || d->len_k > MAX_LEN || d->total_q > MAX_LEN || d->total_k > MAX_LEN)
        return fb__error(FB_UNSUPPORTED,
                         "desc.len_q is %lld and len_k %lld (total_q %lld, total_k %lld); cuda takes "
                         "at most %lld",
                         (long long)d->len_q, (long long)d->len_k, (long long)d->total_q,
                         (long long)d->total_k, (long long)MAX_LEN);
    if (d->heads_q > MAX_BLOCKS || (double)p->group * (double)d->len_q > (double)MAX_LEN * 2)
        return fb__error(FB_UNSUPPORTED, "desc.heads_q is %lld, more than cuda takes", (long long)d->heads_q);
    return FB_OK;
}

/* Blocks of 8 rows, those of fb_delta, are the smallest there are. */
static fb_status check_blocks(const fb__problem *p) {
    const fb_desc *d = &p->d;
    double q = (double)d->len_q / 8 + 1, k = (double)d->len_k / 8 + 1, heads = (double)d->heads_q;
    double most = (q > k ? q : k) * heads * (double)d->batch;
    if (fb__has(p, FB_DBIAS)) {
        const fb_shape *n = &d->bias_shape;
        double tiles =
            ((double)n->rows / 16 + 1) * ((double)n->cols / 16 + 1) * (double)n->heads * (double)n->batch;
        most = tiles > most ? tiles : most;
    }
    if (most > (double)MAX_BLOCKS)
        return fb__error(FB_UNSUPPORTED,
                         "the problem needs up to %.3g blocks of threads, a launch takes %lld; cut the "
                         "batch or the heads",
                         most, (long long)MAX_BLOCKS);
    return FB_OK;
}

static fb_status choose_route(fb__cuda_state *s, const fb__problem *p) {
    FB_TRY(fb__route_choose(p, &s->route));
    s->stacked = s->route == FB_VECTOR;
    s->options = (p->d.softcap > 0 ? FB_SOFTCAP : 0) | (fb__has(p, FB_BIAS) ? FB_BIASED : 0) |
                 (fb__has(p, FB_MASK) ? FB_MASKED : 0) | (fb__has(p, FB_BLOCK_MASK) ? FB_BLOCKED : 0);
    return FB_OK;
}

/* Those of rows.cu serve every route: fb_merge is the same for all. */
static bool needs(const fb__cuda_state *s, const fb__problem *p, fb__kernel kernel) {
    const bool tiles = s->route == FB_FUSED || s->route == FB_VECTOR,
               backward = tiles && !fb__has(p, FB_FORWARD_ONLY);
    switch (kernel) {
    case FB__KERNEL_FORWARD:
        return tiles;
    case FB__KERNEL_DQ:
        return backward && !fb__has(p, FB_NO_DQ);
    case FB__KERNEL_DKDV:
        return backward && (!fb__has(p, FB_NO_DK) || !fb__has(p, FB_NO_DV));
    case FB__KERNEL_DBIAS:
        return backward && fb__has(p, FB_DBIAS);
    case FB__KERNEL_UNFUSED:
        return s->route == FB_UNFUSED;
    case FB__KERNEL_REFERENCE:
        return s->route == FB_REFERENCE;
    case FB__KERNEL_HOPPER_FORWARD:
        return !*s->not_hopper[FB__FORWARD];
    case FB__KERNEL_HOPPER_BACKWARD:
    case FB__KERNEL_HOPPER_SPLIT:
        return !*s->not_hopper[FB__BACKWARD] && kernel == s->hopper_backward;
    case FB__KERNEL_HOPPER_ROWS:
        return !*s->not_hopper[FB__BACKWARD];
    default:
        return true;
    }
}

static fb_status choose_rows(fb__cuda_state *s, const fb__problem *p) {
    fb__hopper_choose(s, p);
    for (int k = 0; k < FB__KERNEL_COUNT; k++) {
        s->kernels[k].used = needs(s, p, (fb__kernel)k);
        if (!s->kernels[k].used || k >= FB__KERNEL_HOPPER)
            continue;
        if (!fb__tune_choose((fb__kernel)k, p->d.dtype, p->d.head_dim, p->d.head_dim_v, !s->options,
                             s->stacked, s->gpu.smem_block_optin - STATIC_BYTES, &s->kernels[k].spec))
            return fb__error(
                FB_UNSUPPORTED,
                "desc.head_dim %lld, head_dim_v %lld in %s need more shared memory for %s than the %d "
                "bytes that a block of %s has; 16-bit elements need half",
                (long long)p->d.head_dim, (long long)p->d.head_dim_v, fb_dtype_name(p->d.dtype),
                fb__kernel_file((fb__kernel)k), s->gpu.smem_block_optin, s->gpu.name);
        if (s->kernels[k].spec.OPTIONS) /* the row is for all of them */
            s->kernels[k].spec.OPTIONS = s->options;
    }
    return FB_OK;
}

static int64_t clamp(int64_t x, int64_t lo, int64_t hi) {
    return x > hi ? (hi < lo ? lo : hi) : x < lo ? lo : x;
}

/* Few queries make few blocks: the keys are cut so that every multiprocessor has work. By shape and device
 * only. */
static int64_t cut_keys(const fb__cuda_state *s, const fb__problem *p, fb__kernel kernel) {
    const fb__spec *spec = &s->kernels[kernel].spec;
    if (!s->stacked || !s->kernels[kernel].used)
        return 1;
    int64_t blocks = fb__launch_slots(p, false, true, spec->BM) * p->d.heads_kv * p->d.batch;
    int64_t tiles = (p->d.len_k + spec->BN - 1) / spec->BN, room = (int64_t)s->gpu.sms * 2;
    return blocks ? clamp((room + blocks - 1) / blocks, 1, clamp(tiles / 2, 1, 128)) : 1;
}

static size_t place(size_t *end, double bytes) {
    size_t at = *end;
    *end += ((size_t)bytes + 15) / 16 * 16;
    return at;
}

static fb_status lay_out(fb__cuda_state *s, const fb__problem *p) {
    const double rows = (double)fb__launch_rows(p),
                 stacked = (double)p->d.batch * (double)p->d.heads_q * (double)p->d.len_q;
    s->chunks[FB__FORWARD] = cut_keys(s, p, FB__KERNEL_FORWARD);
    s->chunks[FB__BACKWARD] = cut_keys(s, p, FB__KERNEL_DQ);
    double parts[2] = {s->chunks[0] > 1 ? (double)s->chunks[0] * stacked : 0,
                       s->chunks[1] > 1 ? (double)s->chunks[1] * stacked : 0};
    double bytes[2] = {parts[0] * 4 * s->kernels[FB__KERNEL_FORWARD].spec.DV,
                       parts[1] * 4 * s->kernels[FB__KERNEL_DQ].spec.D};
    if (rows * 12 + parts[0] * 8 + bytes[0] + bytes[1] > 0x1p62)
        return fb__error(FB_INVALID, "overflow: the workspace of this problem would not fit into 64 bits");
    size_t ends[2] = {0, 0};
    s->at_partial[0] = place(&ends[0], bytes[0]);
    s->at_partial_lse = place(&ends[0], parts[0] * 8);
    if (!fb__has(p, FB_FORWARD_ONLY)) {
        s->at_delta = place(&ends[1], rows * 4);
        s->at_lse_log2 = place(&ends[1], rows * 4);
        s->at_lse_rest = place(&ends[1], p->d.dtype == FB_F32 ? rows * 4 : 0);
        s->at_partial[1] = place(&ends[1], bytes[1]);
        if (!*s->not_hopper[FB__BACKWARD])
            fb__hopper_lay_out(s, p, &ends[1]);
    }
    s->workspace = (ends[0] > ends[1] ? ends[0] : ends[1]) + 16; /* 16 to align it */
    return FB_OK;
}

/* All that a plan is, but for its code. */
static fb_status decide(fb__cuda_state *s, const fb__problem *p) {
    FB_TRY(fb__driver_open(&s->driver));
    FB_TRY(fb__driver_gpu(&s->driver, p->d.index, &s->gpu));
    if (s->gpu.cc < 80)
        return fb__error(FB_UNSUPPORTED,
                         "device %d, %s, has compute capability %d.%d; cuda needs 8.0 (Ampere) or newer",
                         p->d.index, s->gpu.name, s->gpu.cc / 10, s->gpu.cc % 10);
    FB_TRY(check_sizes(p));
    FB_TRY(choose_route(s, p));
    FB_TRY(check_blocks(p));
    FB_TRY(choose_rows(s, p));
    return s->route == FB_UNFUSED     ? fb__unfused_lay_out(s, p)
           : s->route == FB_REFERENCE ? fb__reference_lay_out(s, p)
                                      : lay_out(s, p);
}

static fb_status check(const fb__problem *p) {
    fb__cuda_state s = {.context = NULL};
    return decide(&s, p);
}

/* ---- Code ---- */

static fb_status compile_kernel(fb__cuda_state *s, fb__kernel kernel, const fb__nvrtc *nvrtc,
                                fb__jit_code *code) {
    char options[512];
    fb__define defines[FB__SPEC_COUNT];
    fb__nvrtc_job job = {.nvrtc = nvrtc, .arch = s->arch};
    fb__text text = {options, sizeof options, 0};
    fb__nvrtc_options(&job, &text);
    fb__tune_defines(&s->kernels[kernel].spec, defines);
    fb__jit_request request = {.file = fb__kernel_file(kernel),
                               .defines = defines,
                               .count = FB__SPEC_COUNT,
                               .arch = s->arch,
                               .compiler = s->compiler,
                               .options = options,
                               .compile = fb__nvrtc_compile,
                               .context = &job};
    fb_status status = fb__jit_get(&request, code);
    free(job.log);
    return status;
}

/* Files with several functions, and where these go. */
static fb_status find_functions(fb__cuda_state *s, fb__kernel kernel) {
#define X(name, function) function,
    static const char *const rows[] = {FB__ROW_FUNCTIONS(X)}, *const unfused[] = {FB__UNFUSED_FUNCTIONS(X)},
                             *const reference[] = {FB__REFERENCE_FUNCTIONS(X)},
                             *const hopper[] = {FB__HOPPER_FUNCTIONS(X)};
#undef X
    const struct {
        fb__kernel kernel;
        int count;
        const char *const *names;
        void **to;
    } files[] = {{FB__KERNEL_ROWS, FB__ROW_COUNT, rows, s->row_functions},
                 {FB__KERNEL_UNFUSED, FB__UNFUSED_COUNT, unfused, s->unfused_functions},
                 {FB__KERNEL_REFERENCE, FB__REFERENCE_COUNT, reference, s->reference_functions},
                 {FB__KERNEL_HOPPER_ROWS, FB__HOPPER_COUNT, hopper, s->hopper_functions}};
    for (size_t f = 0; f < sizeof files / sizeof *files; f++)
        for (int n = 0; n < files[f].count && files[f].kernel == kernel; n++)
            FB__CU_TRY(&s->driver, cuModuleGetFunction,
                       (&files[f].to[n], s->kernels[kernel].module, files[f].names[n]));
    return FB_OK;
}

static fb_status load_code(fb__cuda_state *s, fb__kernel kernel, const void *code) {
    const fb__driver *d = &s->driver;
    fb__loaded *k = &s->kernels[kernel];
    FB__CU_TRY(d, cuModuleLoadData, (&k->module, code));
    FB__CU_TRY(d, cuModuleGetFunction, (&k->function, k->module, fb__kernel_function(kernel)));
    FB_TRY(find_functions(s, kernel));
    FB__CU_TRY(d, cuFuncSetAttribute,
               (k->function, FB__CU_FUNC_MAX_DYNAMIC_SHARED_BYTES, k->spec.shared_bytes));
    FB__CU_TRY(d, cuFuncGetAttribute, (&k->registers, FB__CU_FUNC_REGISTERS, k->function));
    FB__CU_TRY(d, cuFuncGetAttribute, (&k->spilled, FB__CU_FUNC_LOCAL_BYTES, k->function));
    return FB_OK;
}

static fb_status load_kernels(fb__cuda_state *s) {
    fb__nvrtc nvrtc;
    FB_TRY(fb__nvrtc_open(&nvrtc, s->driver.version));
    snprintf(s->compiler, sizeof s->compiler, "nvrtc %d.%d", nvrtc.major, nvrtc.minor);
    /* The letter allows the instructions that only this generation has. */
    snprintf(s->arch, sizeof s->arch, s->gpu.cc == 90 ? "sm_%da" : "sm_%d", s->gpu.cc);
    for (int k = 0; k < FB__KERNEL_COUNT; k++) {
        if (!s->kernels[k].used)
            continue;
        fb__jit_code code;
        FB_TRY(compile_kernel(s, (fb__kernel)k, &nvrtc, &code));
        s->kernels[k].origin = code.origin, s->kernels[k].ms = code.ms;
        fb_status status = load_code(s, (fb__kernel)k, code.at);
        free(code.at);
        FB_TRY(status);
    }
    return FB_OK;
}

/* Everything that a plan holds besides the context: needs that to be current. */
static fb_status fill(fb__cuda_state *s, const fb__problem *p) {
    FB_TRY(load_kernels(s));
    FB_TRY(fb__hopper_prepare(s, p));
    return s->route == FB_UNFUSED ? fb__unfused_prepare(s, p) : FB_OK;
}

/* Without the device's context current its code and cuBLAS's handle go with that context. */
static void clear(fb__cuda_state *s, bool in_context) {
    fb__unfused_drop(s, in_context);
    if (in_context)
        fb__hopper_drop(s);
    for (int k = 0; k < FB__KERNEL_COUNT && in_context; k++)
        if (s->kernels[k].module)
            s->driver.cuModuleUnload(s->kernels[k].module);
}

/* The sentence of the failure, not one of the cleaning up, is what the caller wants. */
static void drop(void *state) {
    fb__cuda_state *s = state;
    fb__guard guard;
    if (s->context) {
        const bool in_context = fb__guard_enter(&s->driver, s->context, &guard) == FB_OK;
        clear(s, in_context);
        if (in_context)
            fb__guard_leave(&s->driver, &guard, FB_OK);
        s->driver.cuDevicePrimaryCtxRelease(s->gpu.device);
    }
    free(s);
}

static fb_status prepare_in_context(fb__cuda_state *s, const fb__problem *p) {
    fb__guard guard;
    FB_TRY(decide(s, p));
    void *context;
    FB__CU_TRY(&s->driver, cuDevicePrimaryCtxRetain, (&context, s->gpu.device));
    s->context = context;
    FB_TRY(fb__guard_enter(&s->driver, s->context, &guard));
    fb_status status = fill(s, p);
    if (status != FB_OK)
        clear(s, true);
    fb_status left = fb__guard_leave(&s->driver, &guard, status);
    if (status == FB_OK && left != FB_OK) /* the device's context is still current */
        clear(s, true);
    return left;
}

static fb_status prepare(const fb__problem *p, void **state, size_t *workspace) {
    fb__cuda_state *s = calloc(1, sizeof *s);
    if (!s)
        return fb__error(FB_MEMORY, "no memory for a plan (%zu bytes)", sizeof *s);
    fb_status status = prepare_in_context(s, p);
    if (status != FB_OK) {
        if (s->context)
            s->driver.cuDevicePrimaryCtxRelease(s->gpu.device);
        free(s);
        return status;
    }
    *state = s;
    *workspace = s->workspace;
    return FB_OK;
}

/* ---- Words ---- */

static void explain(const void *state, const fb__problem *p, fb__text *text) {
    const fb__cuda_state *s = state;
    fb__route_explain(p, s->route, text);
    fb__text_add(text, "gpu: %s, compute capability %d.%d, %d multiprocessors; code for %s by %s\n",
                 s->gpu.name, s->gpu.cc / 10, s->gpu.cc % 10, s->gpu.sms, s->arch, s->compiler);
    for (int n = 0; n < FB__KERNEL_COUNT; n++) {
        const fb__loaded *k = &s->kernels[n];
        if (!k->used)
            continue;
        fb__text_add(text, "kernel: %s, %s in %.1f ms, %d registers, %d bytes of stack",
                     fb__kernel_file((fb__kernel)n),
                     k->origin == FB__JIT_DISK ? "from the cache" : "compiled", k->ms, k->registers,
                     k->spilled);
        if (n < FB__KERNEL_ROWS || n >= FB__KERNEL_HOPPER)
            fb__text_add(text, "; tiles %d x %d, D %d, DV %d, %d threads, %d bytes of shared memory%s [%s]",
                         k->spec.BM, k->spec.BN, k->spec.D, k->spec.DV, k->spec.THREADS, k->spec.shared_bytes,
                         k->spec.PLAIN ? "" : ", all options", k->spec.measured);
        fb__text_add(text, "\n");
    }
    for (int pass = 0; pass < 2; pass++)
        if (*s->not_hopper[pass])
            fb__text_add(text, "%s: the kernels for all GPUs, as %s\n",
                         pass == FB__FORWARD ? "forward" : "backward", s->not_hopper[pass]);
    if (s->route == FB_UNFUSED)
        fb__unfused_explain(s, p, text);
    if (s->stacked)
        fb__text_add(text, "chunks of keys: forward %lld, dq %lld\n", (long long)s->chunks[0],
                     (long long)s->chunks[1]);
}

static void info_devices(const fb__driver *d, fb__text *text) {
    fb__gpu gpu;
    fb__text_add(text, "cuda driver: %d.%d\n", d->version / 1000, d->version % 1000 / 10);
    for (int n = 0; fb__driver_gpu(d, n, &gpu) == FB_OK; n++)
        fb__text_add(text, "cuda device %d: %s, compute capability %d.%d, %.1f GB\n", n, gpu.name,
                     gpu.cc / 10, gpu.cc % 10, (double)gpu.memory * 1e-9);
}

static void info_blas(int driver_version, fb__text *text) {
    fb__blas blas;
    char version[24];
    if (fb__blas_open(&blas, driver_version) != FB_OK) {
        fb__text_add(text, "cuda products: none (%s)\n", fb__error_text());
        return;
    }
    fb__blas_version(&blas, version);
    fb__text_add(text, "cuda products: cuBLAS %s, %s\n", version, blas.path);
}

static void info(fb__text *text) {
    fb__driver driver;
    fb__nvrtc nvrtc;
    char folder[512];
    const bool present = fb__driver_open(&driver) == FB_OK;
    if (present)
        info_devices(&driver, text);
    else
        fb__text_add(text, "cuda driver: none (%s)\n", fb__error_text());
    if (fb__nvrtc_open(&nvrtc, present ? driver.version : 0) == FB_OK)
        fb__text_add(text, "cuda compiler: nvrtc %d.%d, %s\n", nvrtc.major, nvrtc.minor, nvrtc.path);
    else
        fb__text_add(text, "cuda compiler: none (%s)\n", fb__error_text());
    info_blas(present ? driver.version : 0, text);
    if (fb__jit_folder(folder, sizeof folder) == FB_OK)
        fb__text_add(text, "kernel cache: %s\n", *folder ? folder : "none");
    fb__error_clear();
}

/* ---- A call ---- */

static fb_status run(const void *state, const fb__problem *p, fb__pass pass, const fb_io *io) {
    const fb__cuda_state *s = state;
    fb__guard guard;
    FB_TRY(fb__guard_enter(&s->driver, s->context, &guard));
    fb_status status = s->route == FB_UNFUSED     ? fb__unfused_run(s, p, pass, io)
                       : s->route == FB_REFERENCE ? fb__reference_run(s, p, pass, io)
                       : pass == FB__FORWARD      ? fb__launch_forward(s, p, io)
                                                  : fb__launch_backward(s, p, io);
    return fb__guard_leave(&s->driver, &guard, status);
}

static fb_status merge(const void *state, const fb__problem *p, fb_ref out, fb_ref lse, fb_ref other_out,
                       fb_ref other_lse, void *stream) {
    const fb__cuda_state *s = state;
    fb__guard guard;
    FB_TRY(fb__guard_enter(&s->driver, s->context, &guard));
    fb_status status = fb__launch_merge(s, p, out, lse, other_out, other_lse, stream);
    return fb__guard_leave(&s->driver, &guard, status);
}

const fb__backend fb__cuda = {.device = FB_CUDA,
                              .check = check,
                              .prepare = prepare,
                              .run = run,
                              .merge = merge,
                              .explain = explain,
                              .drop = drop,
                              .info = info,
                              .alloc = fb__cuda_alloc,
                              .free = fb__cuda_free,
                              .write = fb__cuda_write,
                              .read = fb__cuda_read,
                              .sync = fb__cuda_sync};
