/* See compile.h. */
#include "compile.h"
#include "../base/env.h"
#include "../jit/log.h"
#include "../jit/spec.h"
#include "layout.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { LANGUAGE_3_1 = 3 << 16 | 1, MATH_SAFE = 0, SIMD = 32 }; /* MTLLanguageVersion3_1, MTLMathModeSafe */

static const char *const functions[] = {
#define X(name, file, functions) functions,
    FB__METAL_KERNELS(X)
#undef X
};

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

fb__metal_need fb__metal_need_of(const fb__metal_state *s, const fb__problem *p, fb__metal_kernel kernel,
                                 int skip) {
    return (fb__metal_need){.type = p->d.dtype,
                            .head_dim = p->d.head_dim,
                            .head_dim_v = p->d.head_dim_v,
                            .options = s->options,
                            .stack = s->stacked,
                            .family = s->device.family,
                            .shared_bytes = (int)s->device.threadgroup_bytes,
                            .skip = s->kernels[kernel].first + skip,
                            .keep_ds = s->ds_bytes > 0};
}

fb_status fb__metal_no_row(const fb__metal_state *s, const fb__problem *p, fb__metal_kernel kernel) {
    return fb__error(FB_UNSUPPORTED,
                     "desc.head_dim %lld, head_dim_v %lld in %s: no tiles of %s fit into the %zu bytes of "
                     "threadgroup memory of %s%s; take a smaller head dimension, or device cpu",
                     (long long)p->d.head_dim, (long long)p->d.head_dim_v, fb_dtype_name(p->d.dtype),
                     fb__metal_file(kernel), s->device.threadgroup_bytes, s->device.name,
                     s->kernels[kernel].first ? " behind those that FLASHBACK_TILES passes over" : "");
}

/* ---- Metal's compiler ---- */

/* Fast math would take infinities and NaN for granted not to be there, which the masks and R4 rely on. */
static fb_status make_options(const fb__objc *o, fb__id *options) {
    *options = FB__GET(o, new_object, o->get_class("MTLCompileOptions"));
    if (!*options)
        return fb__error(FB_DEVICE, "new failed: there are no MTLCompileOptions");
    FB__SEND(o, set_language, *options, LANGUAGE_3_1);
    if (FB__RESPONDS(o, *options, set_math_mode)) /* macOS 15 */
        FB__SEND(o, set_math_mode, *options, MATH_SAFE);
    else
        FB__SEND(o, set_fast_math, *options, (fb__bool)0);
    return FB_OK;
}

static fb_status make_library(const fb__metal_state *s, const char *file, const char *text, fb__id *library) {
    const fb__objc *o = &s->objc;
    fb__id source, options, error = NULL;
    FB_TRY(fb__objc_string(o, text, &source));
    FB_TRY(make_options(o, &options));
    *library = FB__SEND(o, new_library, s->device.object, source, options, &error);
    fb__objc_release(o, options);
    return *library ? FB_OK
                    : fb__error(FB_COMPILE,
                                "newLibraryWithSource: failed: Metal does not compile %s (" FB__METAL_COMPILER
                                "; that takes macOS 14): %.1500s",
                                file, fb__objc_reason(o, error));
}

static fb_status make_pipeline(const fb__metal_state *s, const char *file, fb__id library, const char *name,
                               fb__id *pipeline) {
    const fb__objc *o = &s->objc;
    fb__id words, error = NULL;
    FB_TRY(fb__objc_string(o, name, &words));
    fb__id function = FB__SEND(o, new_function, library, words);
    if (!function)
        return fb__error(FB_COMPILE, "newFunctionWithName: failed: %s has no kernel %s", file, name);
    *pipeline = FB__SEND(o, new_pipeline, s->device.object, function, &error);
    fb__objc_release(o, function);
    return *pipeline ? FB_OK
                     : fb__error(FB_COMPILE,
                                 "newComputePipelineStateWithFunction: failed: %s of %s does not become a "
                                 "pipeline on %s: %.1500s",
                                 name, file, s->device.name, fb__objc_reason(o, error));
}

/* `names` are separated by blanks. */
static fb_status make_pipelines(const fb__metal_state *s, const char *file, fb__id library, const char *names,
                                fb__id *pipelines) {
    char name[64];
    for (int n = 0, length; *names; names += length + (names[length] == ' '), n++) {
        length = (int)strcspn(names, " ");
        snprintf(name, sizeof name, "%.*s", length, names);
        FB_TRY(make_pipeline(s, file, library, name, &pipelines[n]));
    }
    return FB_OK;
}

/* ---- Kept pipelines ---- */

/* The device keeps pipelines for the next plan, each under a selector that is made of its key: selectors are
 * unique, and live as long as the process, as devices do. */
static fb__sel name_of(const fb__objc *o, const char *key, int function) {
    char name[64];
    snprintf(name, sizeof name, "flashback_%s_%d", key, function);
    /* cppcheck-suppress returnDanglingLifetime; the runtime has its own copy of the name */
    return o->register_name(name);
}

static bool is_keeping(void) {
    const char *cache = fb__env_get(FB__ENV_FLASHBACK_CACHE);
    return !cache || strcmp(cache, "off") != 0;
}

static int count_functions(fb__metal_kernel kernel) {
    int count = 1;
    for (const char *at = functions[kernel]; *at; at++)
        count += *at == ' ';
    return count;
}

/* All of a file's functions, or none. */
static bool take_kept(const fb__metal_state *s, fb__metal_kernel kernel, const char *key, fb__id *pipelines) {
    const fb__objc *o = &s->objc;
    const int count = count_functions(kernel);
    for (int n = 0; n < count; n++)
        if (!o->associated(s->device.object, name_of(o, key, n)))
            return false;
    for (int n = 0; n < count; n++)
        pipelines[n] = FB__GET(o, retain, o->associated(s->device.object, name_of(o, key, n)));
    return true;
}

static void keep(const fb__metal_state *s, fb__metal_kernel kernel, const char *key, fb__id *pipelines) {
    const fb__objc *o = &s->objc;
    for (int n = 0; n < count_functions(kernel); n++)
        o->associate(s->device.object, name_of(o, key, n), pipelines[n], FB__OBJC_RETAIN);
}

/* ---- One kernel ---- */

static void report(const fb__metal_loaded *k, const char *file, const char *key, const char *text,
                   fb_status status, int log) {
    const fb__jit_event event = {.what = status != FB_OK ? "failed"
                                         : k->kept       ? "hit"
                                                         : "compiled",
                                 .file = file,
                                 .key = key,
                                 .ms = k->ms,
                                 .bytes = strlen(text),
                                 .lost = status == FB_OK && !k->kept ? "macOS keeps its own on disk" : NULL};
    fb__jit_log_add(log, &event);
}

static fb_status make(const fb__metal_state *s, fb__metal_kernel kernel, const char *text,
                      fb__id *pipelines) {
    fb__id library = NULL;
    fb_status status = make_library(s, fb__metal_file(kernel), text, &library);
    if (status == FB_OK)
        status = make_pipelines(s, fb__metal_file(kernel), library, functions[kernel], pipelines);
    fb__objc_release(&s->objc, library);
    return status;
}

static fb_status get(fb__metal_state *s, fb__metal_kernel kernel, int log) {
    fb__metal_loaded *k = &s->kernels[kernel];
    fb__define defines[FB__METAL_SPEC_COUNT];
    char *text, key[33], arch[16];
    const double start = now_ms();
    fb__metal_defines(&k->spec, defines);
    snprintf(arch, sizeof arch, "apple%d", s->device.family);
    const fb__jit_request request = {.file = fb__metal_file(kernel),
                                     .defines = defines,
                                     .count = FB__METAL_SPEC_COUNT,
                                     .arch = arch,
                                     .compiler = "metal",
                                     .options = FB__METAL_COMPILER};
    FB_TRY(fb__jit_spec(&request, &text, key));
    k->kept = is_keeping() && take_kept(s, kernel, key, k->pipelines);
    fb_status status = k->kept ? FB_OK : make(s, kernel, text, k->pipelines);
    if (status == FB_OK && !k->kept && kernel == FB__METAL_ROWS)
        status = fb__metal_check_layout(s);
    if (status == FB_OK && !k->kept && is_keeping())
        keep(s, kernel, key, k->pipelines);
    k->ms += now_ms() - start;
    report(k, request.file, key, text, status, log);
    free(text);
    return status;
}

static void drop(const fb__objc *o, fb__metal_loaded *k) {
    for (int n = 0; n < FB__METAL_FUNCTIONS; n++) {
        fb__objc_release(o, k->pipelines[n]);
        k->pipelines[n] = NULL;
    }
}

/* How many threads all of a kernel's functions allow; 0 where another limit is exceeded. */
static int limit(const fb__metal_state *s, const fb__metal_loaded *k) {
    const fb__objc *o = &s->objc;
    int threads = 0;
    for (int n = 0; n < FB__METAL_FUNCTIONS && k->pipelines[n]; n++) {
        const int most = (int)FB__GET(o, threads, k->pipelines[n]);
        const fb__uint bytes = FB__GET(o, static_bytes, k->pipelines[n]) + (fb__uint)k->spec.shared_bytes;
        if (FB__GET(o, simd_width, k->pipelines[n]) != SIMD || bytes > s->device.threadgroup_bytes)
            return 0;
        threads = n && threads < most ? threads : most;
    }
    return threads;
}

static fb_status refuse_threads(const fb__metal_state *s, fb__metal_kernel kernel) {
    const fb__metal_loaded *k = &s->kernels[kernel];
    return fb__error(
        FB_UNSUPPORTED,
        "%s takes %d threads in a threadgroup and %d bytes of its memory, but its pipeline on %s "
        "allows %d threads in simdgroups of %d, and there is no smaller tile",
        fb__metal_file(kernel), k->spec.THREADS, k->spec.shared_bytes, s->device.name, k->threads, SIMD);
}

/* Registers decide how many threads a threadgroup may have, and only the compiler knows them. */
static fb_status load(fb__metal_state *s, const fb__problem *p, fb__metal_kernel kernel, int log) {
    fb__metal_loaded *k = &s->kernels[kernel];
    for (int skip = 0;; skip++) {
        const fb__metal_need need = fb__metal_need_of(s, p, kernel, skip);
        fb__metal_spec spec;
        if (!fb__metal_tune(kernel, &need, &spec))
            return skip ? refuse_threads(s, kernel) : fb__metal_no_row(s, p, kernel);
        k->spec = spec;
        FB_TRY(get(s, kernel, log));
        k->threads = limit(s, k);
        k->skipped = skip;
        if (k->threads >= k->spec.THREADS)
            return FB_OK;
        drop(&s->objc, k);
        if (kernel == FB__METAL_ROWS) /* which has no table */
            return refuse_threads(s, kernel);
    }
}

fb_status fb__metal_load(fb__metal_state *s, const fb__problem *p) {
    int log;
    FB_TRY(fb__jit_log_open(&log));
    fb_status status = FB_OK;
    for (int k = 0; k < FB__METAL_KERNEL_COUNT && status == FB_OK; k++)
        if (s->kernels[k].used)
            status = load(s, p, (fb__metal_kernel)k, log);
    if (log >= 0)
        close(log);
    return status;
}

void fb__metal_unload(fb__metal_state *s) {
    for (int k = 0; k < FB__METAL_KERNEL_COUNT; k++)
        drop(&s->objc, &s->kernels[k]);
}
