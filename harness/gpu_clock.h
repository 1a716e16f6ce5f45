/* Time on an NVIDIA GPU: events around calls that are queued on a stream, in the device's primary context,
 * which the library works in as well; and what NVML says of clock and power meanwhile. Driver and NVML are
 * found at run time, and declared after the public documentation of their APIs. Floor: harness.
 * Next: gpu_clock.c (events), gpu_sensors.c (NVML). */
#ifndef HARNESS_GPU_CLOCK_H
#define HARNESS_GPU_CLOCK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct fbh_gpu fbh_gpu;

/* Opens device `index`; its primary context is current on the calling thread until close. NULL, with a
 * sentence in `error`, if there is no driver, no such device, or one that fails. */
fbh_gpu *fbh_gpu_open(int32_t index, char *error, size_t size);
void fbh_gpu_close(fbh_gpu *g); /* NULL is fine */

void *fbh_gpu_stream(const fbh_gpu *g);       /* a CUstream of its own, which waits for no other */
size_t fbh_gpu_l2(const fbh_gpu *g);          /* bytes of the second-level cache */
const char *fbh_gpu_driver(const fbh_gpu *g); /* the kernel module's version; "?" where NVML is missing */

/* Waits for the stream. False, with a sentence in fbh_gpu_error, if what was queued has failed. */
bool fbh_gpu_wait(fbh_gpu *g);
const char *fbh_gpu_error(const fbh_gpu *g);

/* 0 where NVML is missing or does not say. */
typedef struct fbh_gpu_state {
    unsigned sm_mhz, watts, celsius;
    bool power_capped; /* the clock is lower than it could be, for power */
} fbh_gpu_state;

/* Queues `count` calls, the n-th by call(context, n), each between two events. ms[n] is the time from one to
 * the other, host_us[n] what queueing took (may be NULL). No more than 64 calls are under way, so that
 * neither the queue fills, which would block the host, nor runs empty as long as calls take longer than
 * queueing them. *state (may be NULL) is taken when the last call has been queued. False as in fbh_gpu_wait.
 */
bool fbh_gpu_time(fbh_gpu *g, size_t count, void (*call)(void *context, size_t n), void *context, double *ms,
                  double *host_us, fbh_gpu_state *state);

/* ---- NVML (gpu_sensors.c) --------------------------------------------------------------------------------
 */

typedef struct fbh_gpu_sensors fbh_gpu_sensors;

/* The device with this address on the PCI bus, "0000:1b:00.0"; NULL if NVML or the device is missing. */
fbh_gpu_sensors *fbh_gpu_sensors_open(const char *pci);
void fbh_gpu_sensors_close(fbh_gpu_sensors *s); /* NULL is fine */
void fbh_gpu_sensors_read(const fbh_gpu_sensors *s, fbh_gpu_state *state);
const char *fbh_gpu_sensors_driver(const fbh_gpu_sensors *s);

#endif
