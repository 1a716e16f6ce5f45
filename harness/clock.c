/* Time and memory of the process. Floor: harness. */
#include "harness.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

double fbh_now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static int ascending(const void *a, const void *b) {
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

fbh_stats fbh_stats_of(double *samples, size_t count) {
    qsort(samples, count, sizeof *samples, ascending);
    const double median = (samples[(count - 1) / 2] + samples[count / 2]) / 2;
    return (fbh_stats){.min = samples[0], .median = median, .p90 = samples[(count - 1) * 9 / 10]};
}

/* VmHWM and not getrusage: it can be reset, through /proc/self/clear_refs. */
size_t fbh_peak_rss(void) {
    FILE *file = fopen("/proc/self/status", "r");
    char line[256];
    size_t kib = 0;
    while (file && fgets(line, sizeof line, file))
        if (sscanf(line, "VmHWM: %zu kB", &kib) == 1)
            break;
    if (file)
        fclose(file);
    return kib * 1024;
}
