/* Clock, power and temperature of a GPU, by NVML, which comes with the driver. A time means little without:
 * what is fast runs into the power limit within 100 ms. See gpu_clock.h. Floor: harness. */
#include "gpu_clock.h"
#include "harness.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* All return an nvmlReturn_t, 0 for success; a device is a pointer. */
#define NVML(X)                                                                                              \
    X(init, "nvmlInit_v2", (void))                                                                           \
    X(shutdown, "nvmlShutdown", (void))                                                                      \
    X(driver, "nvmlSystemGetDriverVersion", (char *text, unsigned size))                                     \
    X(find, "nvmlDeviceGetHandleByPciBusId_v2", (const char *pci, void **device))                            \
    X(clock, "nvmlDeviceGetClockInfo", (void *device, int type, unsigned *mhz))                              \
    X(power, "nvmlDeviceGetPowerUsage", (void *device, unsigned *milliwatts))                                \
    X(temperature, "nvmlDeviceGetTemperature", (void *device, int sensor, unsigned *celsius))                \
    X(reasons, "nvmlDeviceGetCurrentClocksThrottleReasons", (void *device, unsigned long long *reasons))

/* nvmlClockType_t, nvmlTemperatureSensors_t, nvmlClocksThrottleReason: software power cap, and the hardware's
 * slowdown for power. */
enum { SM_CLOCK = 1, ON_DIE = 0, POWER_REASONS = 0x4 | 0x80 };

struct fbh_gpu_sensors {
#define X(name, symbol, parameters) int(*name) parameters;
    NVML(X)
#undef X
    void *device;
    char version[80];
};

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define X(name, symbol, parameters) {symbol, offsetof(struct fbh_gpu_sensors, name)},
    NVML(X)
#undef X
};

static bool load(struct fbh_gpu_sensors *s) {
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    bool complete = library != NULL;
    for (size_t i = 0; i < sizeof functions / sizeof *functions && complete; i++) {
        void *function = dlsym(library, functions[i].symbol);
        complete = function != NULL;
        memcpy((char *)s + functions[i].offset, &function, sizeof function);
    }
    if (library)
        dlclose(library);
    return complete;
}

fbh_gpu_sensors *fbh_gpu_sensors_open(const char *pci) {
    struct fbh_gpu_sensors *s = fbh_make(1, sizeof *s);
    if (!load(s) || s->init() != 0) {
        free(s);
        return NULL;
    }
    if (s->find(pci, &s->device) != 0) {
        s->shutdown();
        free(s);
        return NULL;
    }
    if (s->driver(s->version, sizeof s->version) != 0)
        strcpy(s->version, "?");
    return s;
}

void fbh_gpu_sensors_close(fbh_gpu_sensors *s) {
    if (!s)
        return;
    s->shutdown();
    free(s);
}

void fbh_gpu_sensors_read(const fbh_gpu_sensors *s, fbh_gpu_state *state) {
    unsigned milliwatts = 0;
    unsigned long long reasons = 0;
    *state = (fbh_gpu_state){0};
    if (!s)
        return;
    if (s->clock(s->device, SM_CLOCK, &state->sm_mhz) != 0)
        state->sm_mhz = 0;
    if (s->power(s->device, &milliwatts) == 0)
        state->watts = milliwatts / 1000;
    if (s->temperature(s->device, ON_DIE, &state->celsius) != 0)
        state->celsius = 0;
    state->power_capped = s->reasons(s->device, &reasons) == 0 && reasons & POWER_REASONS;
}

const char *fbh_gpu_sensors_driver(const fbh_gpu_sensors *s) { return s ? s->version : "?"; }
