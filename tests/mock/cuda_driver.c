/* A libcuda.so.1 without a GPU: memory is the host's, kernels are recorded and do nothing, and any call can
 * be made to fail. It is strict where a real driver would be lost. See mock.h. With MOCK_MODEL kernels run:
 * see tests/model. */
#include "kernels.h"
#include "mock.h"
#include <errno.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_DEVICE = 101, INVALID_CONTEXT = 201 };

EXPORT mock_cuda_state mock_cuda = {.capability = 90, .devices = 1, .version = 13000};
#define mock mock_cuda

/* Is this the call that fails? As with a real driver, no call can be relied on to keep errno. */
static bool fails(const char *name) {
    errno = EIO;
    if (++mock.calls != mock.fail_at)
        return false;
    mock.failed = name;
    return true;
}

#define CALL(name)                                                                                           \
    do {                                                                                                     \
        if (fails(name))                                                                                     \
            return mock.fail_with;                                                                           \
    } while (0)

static int strange(const char *name, int result) {
    if (!mock.strange++)
        mock.strangest = name;
    return result;
}

/* ---- Start, devices ---- */

EXPORT int cuInit(unsigned flags) {
    CALL("cuInit");
    return mock.devices < 1 ? 100 : flags ? strange("cuInit", INVALID_VALUE) : SUCCESS;
}

EXPORT int cuDriverGetVersion(int *version) {
    CALL("cuDriverGetVersion");
    *version = mock.version;
    return SUCCESS;
}

EXPORT int cuDeviceGetCount(int *count) {
    CALL("cuDeviceGetCount");
    *count = mock.devices;
    return SUCCESS;
}

static bool is_device(int device) { return device >= 0 && device < mock.devices; }

EXPORT int cuDeviceGet(int *device, int ordinal) {
    CALL("cuDeviceGet");
    *device = ordinal;
    return is_device(ordinal) ? SUCCESS : strange("cuDeviceGet", INVALID_DEVICE);
}

EXPORT int cuDeviceGetName(char *name, int size, int device) {
    CALL("cuDeviceGetName");
    if (!is_device(device))
        return strange("cuDeviceGetName", INVALID_DEVICE);
    snprintf(name, (size_t)size, "Mock GPU %d.%d", mock.capability / 10, mock.capability % 10);
    return SUCCESS;
}

EXPORT int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    CALL("cuDeviceTotalMem");
    *bytes = (size_t)80 << 30;
    return is_device(device) ? SUCCESS : strange("cuDeviceTotalMem", INVALID_DEVICE);
}

/* Shared memory of a block that asks for more than 48 KiB; an SM has 1 KiB more. */
static int shared_optin(void) {
    switch (mock.capability) {
    case 90:
    case 100:
        return 227 << 10;
    case 80:
        return 163 << 10;
    default:
        return 99 << 10;
    }
}

EXPORT int cuDeviceGetAttribute(int *value, int attribute, int device) {
    CALL("cuDeviceGetAttribute");
    if (!is_device(device))
        return strange("cuDeviceGetAttribute", INVALID_DEVICE);
    switch (attribute) {
    case 8: /* shared memory of a block */
        *value = 48 << 10;
        return SUCCESS;
    case 10: /* warp */
        *value = 32;
        return SUCCESS;
    case 16: /* multiprocessors */
        *value = 132;
        return SUCCESS;
    case 38: /* second-level cache */
        *value = 50 << 20;
        return SUCCESS;
    case 39: /* threads of a multiprocessor */
        *value = 2048;
        return SUCCESS;
    case 75:
        *value = mock.capability / 10;
        return SUCCESS;
    case 76:
        *value = mock.capability % 10;
        return SUCCESS;
    case 81:
        *value = shared_optin() + (1 << 10);
        return SUCCESS;
    case 82: /* registers */
        *value = 65536;
        return SUCCESS;
    case 97:
        *value = shared_optin();
        return SUCCESS;
    default:
        return strange("cuDeviceGetAttribute", INVALID_VALUE);
    }
}

/* ---- Contexts ---- */

enum { DEVICES = 8, DEPTH = 16 };

static struct context { int retains; } contexts[DEVICES];

static void *stack[DEPTH];

static void *current(void) { return mock.depth ? stack[mock.depth - 1] : NULL; }

static bool is_context(const void *context) {
    for (int i = 0; i < DEVICES; i++)
        if (context == &contexts[i])
            return contexts[i].retains > 0;
    return false;
}

EXPORT int cuDevicePrimaryCtxRetain(void **context, int device) {
    CALL("cuDevicePrimaryCtxRetain");
    if (!is_device(device) || device >= DEVICES)
        return strange("cuDevicePrimaryCtxRetain", INVALID_DEVICE);
    contexts[device].retains++;
    mock.retains++;
    *context = &contexts[device];
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    bool fail = fails("cuDevicePrimaryCtxRelease");
    if (fail && mock.fail_with == INVALID_VALUE)
        return INVALID_VALUE;
    if (!is_device(device) || device >= DEVICES || !contexts[device].retains)
        return strange("cuDevicePrimaryCtxRelease", INVALID_CONTEXT);
    contexts[device].retains--;
    mock.retains--;
    return fail ? mock.fail_with : SUCCESS;
}

EXPORT int cuCtxPushCurrent_v2(void *context) {
    CALL("cuCtxPushCurrent");
    if (!is_context(context) || mock.depth == DEPTH)
        return strange("cuCtxPushCurrent", INVALID_CONTEXT);
    stack[mock.depth++] = context;
    return SUCCESS;
}

EXPORT int cuCtxPopCurrent_v2(void **context) {
    CALL("cuCtxPopCurrent");
    if (!mock.depth)
        return strange("cuCtxPopCurrent", INVALID_CONTEXT);
    *context = stack[--mock.depth];
    return SUCCESS;
}

EXPORT int cuCtxGetCurrent(void **context) {
    CALL("cuCtxGetCurrent");
    *context = current();
    return SUCCESS;
}

/* What needs a context, and one that is alive. */
#define IN_CONTEXT(name)                                                                                     \
    do {                                                                                                     \
        CALL(name);                                                                                          \
        if (!is_context(current()))                                                                          \
            return strange(name, INVALID_CONTEXT);                                                           \
    } while (0)

EXPORT int cuCtxSynchronize(void) {
    IN_CONTEXT("cuCtxSynchronize");
    return SUCCESS;
}

EXPORT int cuStreamSynchronize(void *stream) {
    IN_CONTEXT("cuStreamSynchronize");
    (void)stream;
    return SUCCESS;
}

EXPORT int cuStreamIsCapturing(void *stream, int *status) {
    IN_CONTEXT("cuStreamIsCapturing");
    (void)stream;
    *status = 0;
    return SUCCESS;
}

/* ---- Memory: a list of all that is alive ---- */

static struct memory {
    struct memory *next;
    char *at;
    size_t size;
} * memories;

static bool is_memory(uint64_t at, size_t bytes) {
    for (const struct memory *m = memories; m; m = m->next) {
        uint64_t from = (uint64_t)(uintptr_t)m->at;
        if (at >= from && at - from <= m->size && bytes <= m->size - (at - from))
            return true;
    }
    return false;
}

EXPORT int cuMemAlloc_v2(uint64_t *at, size_t bytes) {
    IN_CONTEXT("cuMemAlloc");
    if (!bytes)
        return strange("cuMemAlloc", INVALID_VALUE);
    if (bytes > (size_t)1 << 40)
        return OUT_OF_MEMORY;
    struct memory *m = malloc(sizeof *m);
    char *data = m ? malloc(bytes) : NULL;
    if (!data) {
        free(m);
        return OUT_OF_MEMORY;
    }
    *m = (struct memory){memories, data, bytes};
    memories = m;
    mock.memories++;
    *at = (uint64_t)(uintptr_t)data;
    return SUCCESS;
}

EXPORT int cuMemFree_v2(uint64_t at) {
    bool fail = fails("cuMemFree");
    if (fail && mock.fail_with == INVALID_VALUE)
        return INVALID_VALUE;
    if (!is_context(current()))
        return strange("cuMemFree", INVALID_CONTEXT);
    for (struct memory **m = &memories; *m; m = &(*m)->next)
        if ((uint64_t)(uintptr_t)(*m)->at == at) {
            struct memory *gone = *m;
            *m = gone->next;
            free(gone->at);
            free(gone);
            mock.memories--;
            return fail ? mock.fail_with : SUCCESS;
        }
    return INVALID_VALUE;
}

EXPORT int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    IN_CONTEXT("cuMemcpyHtoD");
    if (!is_memory(to, bytes))
        return strange("cuMemcpyHtoD", INVALID_VALUE);
    memcpy((void *)(uintptr_t)to, from, bytes);
    return SUCCESS;
}

EXPORT int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) {
    IN_CONTEXT("cuMemcpyDtoH");
    if (!is_memory(from, bytes))
        return strange("cuMemcpyDtoH", INVALID_VALUE);
    memcpy(to, (const void *)(uintptr_t)from, bytes);
    return SUCCESS;
}

EXPORT int cuMemsetD8Async(uint64_t at, unsigned char value, size_t bytes, void *stream) {
    IN_CONTEXT("cuMemsetD8Async");
    (void)stream;
    if (!is_memory(at, bytes))
        return strange("cuMemsetD8Async", INVALID_VALUE);
    memset((void *)(uintptr_t)at, value, bytes);
    return SUCCESS;
}

/* ---- Modules and kernels: a module has the functions that were asked for ---- */

struct function {
    struct function *next;
    char name[64];
    int most_shared; /* dynamic, in bytes */
    mock_kernel kernel;
};

static struct module {
    struct module *next;
    void *library;
    struct function *functions;
} * modules;

static struct module *find_module(const void *module) {
    struct module *m = modules;
    while (m && m != module)
        m = m->next;
    return m;
}

static struct function *find_function(const void *function) {
    for (struct module *m = modules; m; m = m->next)
        for (struct function *f = m->functions; f; f = f->next)
            if (f == function)
                return f;
    return NULL;
}

EXPORT int cuModuleLoadData(void **module, const void *image) {
    IN_CONTEXT("cuModuleLoadData");
    if (!image)
        return strange("cuModuleLoadData", INVALID_VALUE);
    struct module *m = calloc(1, sizeof *m);
    if (!m)
        return OUT_OF_MEMORY;
    m->library = mock_load(image);
    m->next = modules;
    modules = m;
    mock.modules++;
    *module = m;
    return SUCCESS;
}

EXPORT int cuModuleUnload(void *module) {
    bool fail = fails("cuModuleUnload");
    if (fail && mock.fail_with == INVALID_VALUE)
        return INVALID_VALUE;
    struct module *gone = find_module(module);
    if (!gone || !is_context(current()))
        return strange("cuModuleUnload", gone ? INVALID_CONTEXT : INVALID_VALUE);
    struct module **m = &modules;
    while (*m != gone)
        m = &(*m)->next;
    *m = gone->next;
    while (gone->functions) {
        struct function *f = gone->functions;
        gone->functions = f->next;
        free(f);
    }
    mock_unload(gone->library);
    free(gone);
    mock.modules--;
    return fail ? mock.fail_with : SUCCESS;
}

EXPORT int cuModuleGetFunction(void **function, void *module, const char *name) {
    IN_CONTEXT("cuModuleGetFunction");
    struct module *m = find_module(module);
    if (!m)
        return strange("cuModuleGetFunction", INVALID_VALUE);
    struct function *f = calloc(1, sizeof *f);
    if (!f)
        return OUT_OF_MEMORY;
    snprintf(f->name, sizeof f->name, "%s", name);
    f->most_shared = 48 << 10;
    f->kernel = mock_find(m->library, name);
    f->next = m->functions;
    m->functions = f;
    *function = f;
    return SUCCESS;
}

EXPORT int cuFuncSetAttribute(void *function, int attribute, int value) {
    CALL("cuFuncSetAttribute");
    struct function *f = find_function(function);
    if (!f || (attribute == 8 && value > shared_optin()))
        return strange("cuFuncSetAttribute", INVALID_VALUE);
    if (attribute == 8)
        f->most_shared = value;
    return SUCCESS;
}

EXPORT int cuFuncGetAttribute(int *value, int attribute, void *function) {
    CALL("cuFuncGetAttribute");
    const struct function *f = find_function(function);
    if (!f)
        return strange("cuFuncGetAttribute", INVALID_VALUE);
    /* threads of a block, registers, dynamic shared memory; local and constant memory are 0 */
    *value = attribute == 0 ? 1024 : attribute == 4 ? 128 : attribute == 8 ? f->most_shared : 0;
    return SUCCESS;
}

EXPORT int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared_bytes, void *stream,
                          void **arguments, void **extra) {
    IN_CONTEXT("cuLaunchKernel");
    const struct function *f = find_function(function);
    uint64_t threads = (uint64_t)block_x * block_y * block_z;
    if (!f || !grid_x || !grid_y || !grid_z || grid_x > INT32_MAX || grid_y > 65535 || grid_z > 65535 ||
        !threads || threads > 1024 || shared_bytes > (unsigned)f->most_shared || (!arguments && !extra))
        return strange("cuLaunchKernel", INVALID_VALUE);
    if (mock.launch_count < MOCK_LAUNCHES) {
        mock_launch *l = &mock.launches[mock.launch_count];
        *l = (mock_launch){"", {grid_x, grid_y, grid_z}, {block_x, block_y, block_z}, shared_bytes, stream};
        memcpy(l->function, f->name, sizeof l->function);
    }
    mock.launch_count++;
    mock_run(f->kernel, (const unsigned[]){grid_x, grid_y, grid_z}, (unsigned)threads, shared_bytes,
             arguments);
    return SUCCESS;
}

/* ---- Tensor maps ---- */

/* What tests/model/hopper_model.hpp reads; a real map says the same in another form. */
struct map {
    uint64_t at, size[4], stride[3];
    unsigned box[2], element, magic;
};

EXPORT int cuTensorMapEncodeTiled(void *to, int type, unsigned rank, void *at, const uint64_t *size,
                                  const uint64_t *stride, const unsigned *box, const unsigned *step,
                                  int interleave, int swizzle, int promotion, int fill) {
    CALL("cuTensorMapEncodeTiled");
    bool legal = (uintptr_t)to % 64 == 0 && (type == 6 || type == 9) && rank == 4 &&
                 (uintptr_t)at % 16 == 0 && at && !interleave && swizzle == 3 && promotion >= 0 &&
                 promotion < 4 && !fill && box[0] * 2 == 128 && box[1] && box[1] <= 256 && box[2] == 1 &&
                 box[3] == 1;
    for (int n = 0; n < 4; n++)
        legal = legal && size[n] && size[n] <= (uint64_t)1 << 32 && step[n] == 1;
    for (int n = 0; n < 3; n++)
        legal = legal && stride[n] % 16 == 0 && stride[n] < (uint64_t)1 << 40;
    if (!legal)
        return strange("cuTensorMapEncodeTiled", INVALID_VALUE);
    struct map m = {.at = (uintptr_t)at, .box = {box[0], box[1]}, .element = 2, .magic = 0x4d415053};
    memcpy(m.size, size, sizeof m.size);
    memcpy(m.stride, stride, sizeof m.stride);
    memset(to, 0, 128);
    memcpy(to, &m, sizeof m);
    return SUCCESS;
}

/* ---- Errors ---- */

static const struct {
    int result;
    const char *name, *text;
} errors[] = {{INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
              {OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
              {3, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
              {100, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
              {INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
              {INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
              {700, "CUDA_ERROR_ILLEGAL_ADDRESS", "an illegal memory access was encountered"}};

EXPORT int cuGetErrorName(int result, const char **name) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].result == result) {
            *name = errors[i].name;
            return SUCCESS;
        }
    return INVALID_VALUE;
}

#ifndef MOCK_INCOMPLETE /* a driver in which a function is missing */
EXPORT int cuGetErrorString(int result, const char **text) {
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].result == result) {
            *text = errors[i].text;
            return SUCCESS;
        }
    return INVALID_VALUE;
}
#endif
