/* See log.h. */
#include "log.h"
#include "base/env.h"
#include "core/error.h"
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

fb_status fb__jit_log_open(int *log) {
    const char *path = fb__env_get(FB__ENV_FLASHBACK_LOG);
    *log = -1;
    if (!path)
        return FB_OK;
    *log = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY, 0644);
    if (*log < 0)
        return fb__error(FB_INVALID,
                         "FLASHBACK_LOG is '%s', which cannot be written: %s. Expected a file to append to",
                         path, strerror(errno));
    return FB_OK;
}

void fb__jit_log_add(int log, const fb__jit_event *event) {
    if (log < 0)
        return;
    struct timespec now;
    struct tm day;
    clock_gettime(CLOCK_REALTIME, &now);
    gmtime_r(&now.tv_sec, &day);
    char line[512];
    fb__text text = {line, sizeof line - 1, 0};
    fb__text_add(&text, "%04d-%02d-%02dT%02d:%02d:%02d.%03ldZ %ld %s %s %s %.3f ms %zu bytes",
                 day.tm_year + 1900, day.tm_mon + 1, day.tm_mday, day.tm_hour, day.tm_min, day.tm_sec,
                 now.tv_nsec / 1000000, (long)getpid(), event->what, event->file, event->key, event->ms,
                 event->bytes);
    if (event->why)
        fb__text_add(&text, ", because %s", event->why);
    if (event->lost)
        fb__text_add(&text, ", not kept because %s", event->lost);
    size_t length = text.length < text.size ? text.length : text.size - 1;
    line[length] = '\n';
    if (write(log, line, length + 1) < 0)
        return; /* a full disk is no reason not to compute */
}
