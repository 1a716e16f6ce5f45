/* The mock's classes besides commands: Foundation's, and Metal's devices, options, libraries, functions,
 * pipelines and buffers. A device is the same object for everyone, as with Metal. Next: metal_commands.c. */
#include "metal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define mock mock_metal

/* ---- Foundation ---- */

static object *new_string(const char *text) {
    string *s = mock_new(STRING, sizeof *s);
    s->text = strdup(text);
    return &s->head;
}

/* Of a class or an instance; both are asked the same things. */
static object *string_of(object *class, selector name, const char *text) {
    (void)class, (void)name;
    return mock_fails("stringWithUTF8String:") ? NULL : mock_autorelease(new_string(text));
}

static const char *utf8(string *s, selector name) {
    (void)name;
    return s->text;
}

static integer count(array *a, selector name) {
    (void)name;
    return a->count;
}

static object *at(array *a, selector name, integer index) {
    (void)name;
    if (index < a->count)
        return a->at[index];
    mock_strange("objectAtIndex: beyond the last");
    return NULL;
}

object *mock_error(const char *words, int code) {
    failure *e = mock_new(ERROR, sizeof *e);
    snprintf(e->words, sizeof e->words, "%s", words);
    e->code = code;
    return mock_autorelease(e);
}

static object *description(failure *e, selector name) {
    (void)name;
    return mock_autorelease(new_string(e->words));
}

static long code(failure *e, selector name) {
    (void)name;
    return e->code;
}

/* ---- Devices ---- */

static device devices[MOCK_DEVICES];

#define DEVICE_AT(n) &devices[n].head
object *const mock_devices[MOCK_DEVICES] = {DEVICE_AT(0), DEVICE_AT(1), DEVICE_AT(2), DEVICE_AT(3),
                                            DEVICE_AT(4), DEVICE_AT(5), DEVICE_AT(6), DEVICE_AT(7)};

/* What MTLCopyAllDevices of the library Metal returns. */
EXPORT object *mock_copy_devices(void) {
    if (mock_fails("MTLCopyAllDevices"))
        return NULL;
    array *a = mock_new(ARRAY, sizeof *a);
    for (int n = 0; n < mock.devices && n < MOCK_DEVICES; n++) {
        devices[n].head.kind = DEVICE;
        if (!devices[n].head.references)
            devices[n].head.references = 1;
        devices[n].index = n;
        a->at[a->count++] = mock_retain(&devices[n]);
    }
    return &a->head;
}

static object *device_name(device *d, selector name) {
    char text[32];
    (void)name;
    snprintf(text, sizeof text, "Mock Apple GPU %d", d->index);
    return mock_autorelease(new_string(text));
}

static uint64_t registry(device *d, selector name) {
    (void)name;
    return 4096 + (uint64_t)d->index;
}

static bool supports_family(device *d, selector name, long family) {
    (void)d, (void)name;
    return family > 1000 && family <= 1000 + mock.family;
}

static integer threadgroup_bytes(device *d, selector name) {
    (void)d, (void)name;
    return 32768;
}

static integer buffer_most(device *d, selector name) {
    (void)d, (void)name;
    return mock.buffer_most;
}

static uint64_t working_set(device *d, selector name) {
    (void)d, (void)name;
    return (uint64_t)16 << 30;
}

/* ---- Libraries ---- */

static object *new_options(object *class, selector name) {
    (void)class, (void)name;
    if (mock_fails("new"))
        return NULL;
    options *o = mock_new(OPTIONS, sizeof *o);
    o->fast_math = -1;
    return &o->head;
}

static void set_language(options *o, selector name, integer version) {
    (void)name;
    o->language = version;
}

static void set_math_mode(options *o, selector name, long mode) {
    (void)name;
    o->fast_math = mode != 0;
}

static void set_fast_math(options *o, selector name, bool enabled) {
    (void)name;
    o->fast_math = enabled;
}

static object *new_library(device *d, selector name, string *source, options *o, object **error) {
    char *log = NULL;
    (void)d, (void)name;
    *error = NULL;
    if (mock_fails("newLibraryWithSource:")) {
        *error = mock_error("newLibraryWithSource: is to fail", mock.fail_code);
        return NULL;
    }
    if (!o || !source)
        mock_strange("newLibraryWithSource: without source or options");
    mock.compilations++;
    mock.language = o ? o->language : 0;
    mock.fast_math = o ? o->fast_math : -1;
    void *code = mock.compile_error ? NULL : mock_msl_compile(source->text, &log);
    if (!code) {
        *error = mock_error(mock.compile_error ? mock.compile_error : log ? log : "no message", 3);
        free(log);
        return NULL;
    }
    free(log);
    library *l = mock_new(LIBRARY, sizeof *l);
    l->text = strdup(source->text);
    l->code = code;
    return &l->head;
}

static void drop_library(object *o) {
    library *l = (library *)o;
    mock_msl_drop(l->code);
    free(l->text);
}

static object *new_function(library *l, selector name, string *wanted) {
    char text[96];
    (void)name;
    if (mock_fails("newFunctionWithName:"))
        return NULL;
    snprintf(text, sizeof text, "kernel void %s(", wanted->text);
    if (!strstr(l->text, text))
        return NULL;
    function *f = mock_new(FUNCTION, sizeof *f);
    f->library = mock_retain(l);
    snprintf(f->name, sizeof f->name, "%s", wanted->text);
    return &f->head;
}

static void drop_function(object *o) { mock_release(((function *)o)->library); }

/* ---- Pipelines ---- */

static object *new_pipeline(device *d, selector name, function *f, object **error) {
    (void)d, (void)name;
    *error = NULL;
    if (mock_fails("newComputePipelineStateWithFunction:")) {
        *error = mock_error("newComputePipelineStateWithFunction: is to fail", mock.fail_code);
        return NULL;
    }
    pipeline *p = mock_new(PIPELINE, sizeof *p);
    p->function = mock_retain(f);
    p->threads = mock.limited && strcmp(mock.limited, f->name) == 0 ? mock.limited_to : 1024;
    return &p->head;
}

static void drop_pipeline(object *o) { mock_release(((pipeline *)o)->function); }

static integer threads(pipeline *p, selector name) {
    (void)name;
    return p->threads;
}

static integer simd_width(pipeline *p, selector name) {
    (void)p, (void)name;
    return mock.simd_width;
}

static integer static_bytes(pipeline *p, selector name) {
    (void)p, (void)name;
    return 0;
}

/* ---- Buffers ---- */

static integer held; /* bytes of all buffers */

static object *new_buffer(device *d, selector name, integer bytes, integer mode) {
    (void)name;
    if (mock_fails("newBufferWithLength:") || held + bytes > mock.memory_most)
        return NULL;
    if (!bytes || bytes > mock.buffer_most)
        mock_strange("newBufferWithLength: of no bytes, or more than maxBufferLength");
    buffer *b = mock_new(BUFFER, sizeof *b);
    b->device = d;
    b->length = bytes;
    b->is_private = mode >> 4 == 2; /* MTLResourceStorageModePrivate */
    b->bytes = aligned_alloc(256, (bytes + 255) / 256 * 256);
#ifdef MOCK_MODEL /* only there anybody reads it */
    memset(b->bytes, 0xff, bytes);
#endif
    held += bytes;
    return &b->head;
}

static void drop_buffer(object *o) {
    buffer *b = (buffer *)o;
    held -= b->length;
    free(b->bytes);
}

static void *contents(buffer *b, selector name) {
    (void)name;
    return mock_fails("contents") || b->is_private ? NULL : b->bytes;
}

static integer length(buffer *b, selector name) {
    (void)name;
    return b->length;
}

static object *buffer_device(buffer *b, selector name) {
    (void)name;
    return &b->device->head;
}

/* ---- Tables ---- */

static void drop_string(object *o) { free(((string *)o)->text); }

static void drop_array(object *o) {
    array *a = (array *)o;
    for (integer n = 0; n < a->count; n++)
        mock_release(a->at[n]);
}

extern void mock_drop_commands(object *), mock_drop_encoder(object *), mock_drop_queue(object *);

void (*const mock_dealloc[KINDS])(object *) = {[STRING] = drop_string,       [ARRAY] = drop_array,
                                               [LIBRARY] = drop_library,     [FUNCTION] = drop_function,
                                               [PIPELINE] = drop_pipeline,   [BUFFER] = drop_buffer,
                                               [QUEUE] = mock_drop_queue,    [COMMANDS] = mock_drop_commands,
                                               [ENCODER] = mock_drop_encoder};

#define ROW(kind, selector, function)                                                                        \
    { kind, selector, (void (*)(void))function }

const method mock_object_methods[] = {
    ROW(CLASS, "stringWithUTF8String:", string_of),
    ROW(CLASS, "new", new_options),
    ROW(STRING, "UTF8String", utf8),
    ROW(ARRAY, "count", count),
    ROW(ARRAY, "objectAtIndex:", at),
    ROW(ERROR, "localizedDescription", description),
    ROW(ERROR, "code", code),
    ROW(DEVICE, "name", device_name),
    ROW(DEVICE, "registryID", registry),
    ROW(DEVICE, "supportsFamily:", supports_family),
    ROW(DEVICE, "maxThreadgroupMemoryLength", threadgroup_bytes),
    ROW(DEVICE, "maxBufferLength", buffer_most),
    ROW(DEVICE, "recommendedMaxWorkingSetSize", working_set),
    ROW(DEVICE, "newLibraryWithSource:options:error:", new_library),
    ROW(DEVICE, "newComputePipelineStateWithFunction:error:", new_pipeline),
    ROW(DEVICE, "newBufferWithLength:options:", new_buffer),
    ROW(OPTIONS, "setLanguageVersion:", set_language),
    ROW(OPTIONS, "setMathMode:", set_math_mode),
    ROW(OPTIONS, "setFastMathEnabled:", set_fast_math),
    ROW(LIBRARY, "newFunctionWithName:", new_function),
    ROW(PIPELINE, "maxTotalThreadsPerThreadgroup", threads),
    ROW(PIPELINE, "threadExecutionWidth", simd_width),
    ROW(PIPELINE, "staticThreadgroupMemoryLength", static_bytes),
    ROW(BUFFER, "contents", contents),
    ROW(BUFFER, "length", length),
    ROW(BUFFER, "device", buffer_device),
    {0, NULL, NULL},
};
