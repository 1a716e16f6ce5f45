/* See driver.h. */
#include "driver.h"
#include <dlfcn.h>
#include <string.h>

#define LIBRARY "libcuda.so.1"

/* ---- Errors ---- */

/* The driver's words for a result; they are missing for a result that is newer than the driver. */
static const char *error_name(const fb__driver *d, int result) {
    const char *name = NULL;
    return d->cuGetErrorName(result, &name) == 0 && name ? name : "an error without a name";
}

static const char *error_string(const fb__driver *d, int result) {
    const char *text = NULL;
    return d->cuGetErrorString(result, &text) == 0 && text ? text : "no description";
}

/* What helps, where the driver's own words do not say it. */
static const char *advice(int result) {
    switch (result) {
    case FB__CU_NOT_INITIALIZED:
        return "; a child of fork cannot use CUDA if its parent did before: fork first, or start a new "
               "program";
    case FB__CU_NO_DEVICE:
        return "; is there a GPU, and does CUDA_VISIBLE_DEVICES hide it?";
    case FB__CU_NO_BINARY_FOR_GPU:
        return "; the kernel is for another GPU, or made by an NVRTC that is newer than the driver";
    case FB__CU_SYSTEM_DRIVER_MISMATCH:
        return "; the kernel module and " LIBRARY " are of different versions: restart the machine";
    default:
        /* From 700 to 719 the device has failed in what it was given earlier, by whomever. */
        return result >= FB__CU_ILLEGAL_ADDRESS && result <= FB__CU_LAUNCH_FAILED
                   ? "; this or an earlier call on the device failed, and its context is lost"
                   : "";
    }
}

fb_status fb__driver_check(const fb__driver *d, int result, const char *call) {
    if (result == 0)
        return FB_OK;
    return fb__error(result == FB__CU_OUT_OF_MEMORY ? FB_MEMORY : FB_DEVICE, "%s failed: %s (%d), %s%s", call,
                     error_name(d, result), result, error_string(d, result), advice(result));
}

/* ---- The library ---- */

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define X(name, symbol, parameters) {symbol, offsetof(fb__driver, name)},
    FB__DRIVER_LIST(X)
#undef X
};

static fb_status find_functions(fb__driver *d, void *library) {
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *function = dlsym(library, functions[i].symbol);
        if (!function)
            return fb__error(FB_NO_DEVICE,
                             "device cuda: " LIBRARY
                             " has no function %s; an NVIDIA driver for CUDA 12 or newer has it",
                             functions[i].symbol);
        /* ISO C knows no conversion between pointers to objects and to functions; POSIX gives both one form.
         */
        memcpy((char *)d + functions[i].offset, &function, sizeof function);
    }
    return FB_OK;
}

/* The library stays loaded while the process lives (RTLD_NODELETE): the driver has threads and handlers at
 * exit of its own, a plan or a memory may still point into it, and other users of CUDA in the process share
 * it. So the handle can be given back at once, and opening often does not count up anything. */
fb_status fb__driver_open(fb__driver *d) {
    *d = (fb__driver){0};
    void *library = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) {
        const char *reason = dlerror();
        return fb__error(
            FB_NO_DEVICE,
            "no NVIDIA driver for device cuda: %s; it comes with the system's driver package, and "
            "containers have to be started with GPU support",
            reason ? reason : LIBRARY " does not load");
    }
    fb_status status = find_functions(d, library);
    dlclose(library);
    FB_TRY(status);
    int result = d->cuInit(0);
    if (result != 0)
        return fb__error(FB_NO_DEVICE, "device cuda does not start: cuInit failed: %s (%d), %s%s",
                         error_name(d, result), result, error_string(d, result), advice(result));
    FB__CU_TRY(d, cuDriverGetVersion, (&d->version));
    return FB_OK;
}

/* ---- Devices ---- */

fb_status fb__driver_device(const fb__driver *d, const char *argument, int index, int *device) {
    int count = 0;
    FB__CU_TRY(d, cuDeviceGetCount, (&count));
    if (count < 1)
        return fb__error(FB_NO_DEVICE, "there is no CUDA device%s", advice(FB__CU_NO_DEVICE));
    if (index < 0 || index >= count)
        return fb__error(FB_NO_DEVICE, "%s is %d, but there %s %d CUDA device%s: it must be %s%d", argument,
                         index, count == 1 ? "is" : "are", count, count == 1 ? "" : "s",
                         count == 1 ? "" : "0 to ", count - 1);
    FB__CU_TRY(d, cuDeviceGet, (device, index));
    return FB_OK;
}

/* CUdevice_attribute */
enum {
    SHARED_PER_BLOCK = 8,
    WARP_SIZE = 10,
    MULTIPROCESSORS = 16,
    L2_BYTES = 38,
    THREADS_PER_SM = 39,
    CAPABILITY_MAJOR = 75,
    CAPABILITY_MINOR = 76,
    SHARED_PER_SM = 81,
    REGISTERS_PER_SM = 82,
    SHARED_PER_BLOCK_OPTIN = 97
};

fb_status fb__driver_gpu(const fb__driver *d, int index, fb__gpu *gpu) {
    *gpu = (fb__gpu){.ordinal = index};
    FB_TRY(fb__driver_device(d, "desc.index", index, &gpu->device));
    int major = 0, minor = 0;
    const struct {
        int attribute, *value;
    } rows[] = {{SHARED_PER_BLOCK, &gpu->smem_block},
                {WARP_SIZE, &gpu->warp},
                {MULTIPROCESSORS, &gpu->sms},
                {L2_BYTES, &gpu->l2_bytes},
                {THREADS_PER_SM, &gpu->threads_sm},
                {CAPABILITY_MAJOR, &major},
                {CAPABILITY_MINOR, &minor},
                {SHARED_PER_SM, &gpu->smem_sm},
                {REGISTERS_PER_SM, &gpu->registers_sm},
                {SHARED_PER_BLOCK_OPTIN, &gpu->smem_block_optin}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        FB__CU_TRY(d, cuDeviceGetAttribute, (rows[i].value, rows[i].attribute, gpu->device));
    gpu->cc = 10 * major + minor;
    size_t bytes = 0;
    FB__CU_TRY(d, cuDeviceTotalMem, (&bytes, gpu->device));
    gpu->memory = bytes;
    FB__CU_TRY(d, cuDeviceGetName, (gpu->name, (int)sizeof gpu->name, gpu->device));
    gpu->name[sizeof gpu->name - 1] = 0;
    return FB_OK;
}

/* ---- The guard ---- */

fb_status fb__guard_enter(const fb__driver *d, void *context, fb__guard *g) {
    g->pushed = false;
    void *now = NULL;
    FB__CU_TRY(d, cuCtxGetCurrent, (&now));
    if (now == context)
        return FB_OK;
    FB__CU_TRY(d, cuCtxPushCurrent, (context));
    g->pushed = true;
    return FB_OK;
}

fb_status fb__guard_leave(const fb__driver *d, const fb__guard *g, fb_status status) {
    if (!g->pushed)
        return status;
    void *popped = NULL;
    int result = d->cuCtxPopCurrent(&popped);
    return status != FB_OK ? status : fb__driver_check(d, result, "cuCtxPopCurrent");
}
