/* See gpu_clock.h. Floor: harness. Next: fbh_gpu_time. */
#include "gpu_clock.h"
#include "harness.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY "libcuda.so.1"

/* name of the field, name in the library, parameters; all return a CUresult, 0 for success. Contexts, streams
 * and events are pointers. */
#define DRIVER(X)                                                                                            \
    X(init, "cuInit", (unsigned flags))                                                                      \
    X(device_get, "cuDeviceGet", (int *device, int ordinal))                                                 \
    X(attribute, "cuDeviceGetAttribute", (int *value, int attribute, int device))                            \
    X(retain, "cuDevicePrimaryCtxRetain", (void **context, int device))                                      \
    X(release, "cuDevicePrimaryCtxRelease_v2", (int device))                                                 \
    X(push, "cuCtxPushCurrent_v2", (void *context))                                                          \
    X(pop, "cuCtxPopCurrent_v2", (void **context))                                                           \
    X(stream_create, "cuStreamCreate", (void **stream, unsigned flags))                                      \
    X(stream_destroy, "cuStreamDestroy_v2", (void *stream))                                                  \
    X(stream_wait, "cuStreamSynchronize", (void *stream))                                                    \
    X(event_create, "cuEventCreate", (void **event, unsigned flags))                                         \
    X(event_destroy, "cuEventDestroy_v2", (void *event))                                                     \
    X(event_record, "cuEventRecord", (void *event, void *stream))                                            \
    X(event_wait, "cuEventSynchronize", (void *event))                                                       \
    X(elapsed, "cuEventElapsedTime", (float *ms, void *begin, void *end))                                    \
    X(error_string, "cuGetErrorString", (int result, const char **text))

typedef struct driver {
#define X(name, symbol, parameters) int(*name) parameters;
    DRIVER(X)
#undef X
    int (*pci)(char *text, int size, int device); /* may be missing: then there are no sensors */
} driver;

enum { IN_FLIGHT = 64, L2_BYTES = 38, NON_BLOCKING = 1 }; /* a CUdevice_attribute; a CUstream_flags */

struct fbh_gpu {
    driver d;
    int device;
    int l2;
    bool retained, pushed;
    void *stream;
    void *begin[IN_FLIGHT], *end[IN_FLIGHT];
    fbh_gpu_sensors *sensors;
    char error[256];
};

/* ---- Opening ---------------------------------------------------------------------------------------------
 */

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define X(name, symbol, parameters) {symbol, offsetof(driver, name)},
    DRIVER(X)
#undef X
};

static bool failed(fbh_gpu *g, int result, const char *doing) {
    const char *text = NULL;
    if (result == 0)
        return false;
    if (!g->d.error_string || g->d.error_string(result, &text) != 0)
        text = NULL;
    snprintf(g->error, sizeof g->error, "the CUDA device: %s failed with error %d, %s", doing, result,
             text ? text : "which has no description");
    return true;
}

/* The driver stays loaded (RTLD_NODELETE), as it does for the library. */
static bool load(fbh_gpu *g) {
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) {
        const char *reason = dlerror();
        snprintf(g->error, sizeof g->error, "no NVIDIA driver: %s", reason ? reason : LIBRARY);
        return false;
    }
    const char *missing = NULL;
    for (size_t i = 0; i < sizeof functions / sizeof *functions && !missing; i++) {
        void *function = dlsym(library, functions[i].symbol);
        if (!function)
            missing = functions[i].symbol;
        /* ISO C knows no conversion between the two kinds of pointers; POSIX gives both one form. */
        memcpy((char *)&g->d + functions[i].offset, &function, sizeof function);
    }
    void *pci = dlsym(library, "cuDeviceGetPCIBusId");
    memcpy(&g->d.pci, &pci, sizeof pci);
    dlclose(library);
    if (missing)
        snprintf(g->error, sizeof g->error, LIBRARY " has no function %s", missing);
    return !missing;
}

static bool open_context(fbh_gpu *g, int32_t index) {
    void *context;
    if (failed(g, g->d.init(0), "starting CUDA") ||
        failed(g, g->d.device_get(&g->device, index), "finding the device") ||
        failed(g, g->d.attribute(&g->l2, L2_BYTES, g->device), "asking for the size of its cache") ||
        failed(g, g->d.retain(&context, g->device), "making its context"))
        return false;
    g->retained = true;
    if (failed(g, g->d.push(context), "entering its context"))
        return false;
    g->pushed = true;
    return true;
}

static bool make_events(fbh_gpu *g) {
    if (failed(g, g->d.stream_create(&g->stream, NON_BLOCKING), "making a stream"))
        return false;
    for (int n = 0; n < IN_FLIGHT; n++)
        if (failed(g, g->d.event_create(&g->begin[n], 0), "making an event") ||
            failed(g, g->d.event_create(&g->end[n], 0), "making an event"))
            return false;
    return true;
}

fbh_gpu *fbh_gpu_open(int32_t index, char *error, size_t size) {
    fbh_gpu *g = fbh_make(1, sizeof *g);
    if (!load(g) || !open_context(g, index) || !make_events(g)) {
        snprintf(error, size, "%s", g->error);
        fbh_gpu_close(g);
        return NULL;
    }
    char pci[32];
    if (g->d.pci && g->d.pci(pci, sizeof pci, g->device) == 0)
        g->sensors = fbh_gpu_sensors_open(pci);
    return g;
}

void fbh_gpu_close(fbh_gpu *g) {
    void *context;
    if (!g)
        return;
    fbh_gpu_sensors_close(g->sensors);
    for (int n = 0; n < IN_FLIGHT; n++) {
        if (g->begin[n])
            g->d.event_destroy(g->begin[n]);
        if (g->end[n])
            g->d.event_destroy(g->end[n]);
    }
    if (g->stream)
        g->d.stream_destroy(g->stream);
    if (g->pushed)
        g->d.pop(&context);
    if (g->retained)
        g->d.release(g->device);
    free(g);
}

void *fbh_gpu_stream(const fbh_gpu *g) { return g->stream; }
size_t fbh_gpu_l2(const fbh_gpu *g) { return (size_t)g->l2; }
const char *fbh_gpu_driver(const fbh_gpu *g) { return fbh_gpu_sensors_driver(g->sensors); }
const char *fbh_gpu_error(const fbh_gpu *g) { return g->error; }

/* ---- Timing ----------------------------------------------------------------------------------------------
 */

bool fbh_gpu_wait(fbh_gpu *g) { return !failed(g, g->d.stream_wait(g->stream), "a kernel"); }

static bool queue(fbh_gpu *g, size_t n, void (*call)(void *, size_t), void *context, double *host_us) {
    const size_t slot = n % IN_FLIGHT;
    if (failed(g, g->d.event_record(g->begin[slot], g->stream), "recording an event"))
        return false;
    const double start = fbh_now();
    call(context, n);
    if (host_us)
        host_us[n] = 1e6 * (fbh_now() - start);
    return !failed(g, g->d.event_record(g->end[slot], g->stream), "recording an event");
}

static bool collect(fbh_gpu *g, size_t n, double *ms) {
    const size_t slot = n % IN_FLIGHT;
    float passed;
    if (failed(g, g->d.event_wait(g->end[slot]), "a kernel") ||
        failed(g, g->d.elapsed(&passed, g->begin[slot], g->end[slot]), "reading an event"))
        return false;
    ms[n] = (double)passed;
    return true;
}

bool fbh_gpu_time(fbh_gpu *g, size_t count, void (*call)(void *context, size_t n), void *context, double *ms,
                  double *host_us, fbh_gpu_state *state) {
    size_t done = 0;
    for (size_t n = 0; n < count; n++) {
        if (n - done == IN_FLIGHT && !collect(g, done++, ms))
            return false;
        if (!queue(g, n, call, context, host_us))
            return false;
    }
    if (state)
        fbh_gpu_sensors_read(g->sensors, state);
    while (done < count)
        if (!collect(g, done++, ms))
            return false;
    return true;
}
