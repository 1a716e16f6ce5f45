/* The part of the mock driver that programs use and the library does not: streams and events, whose time is
 * the host's. With MOCK_STRICT in the environment the driver says at exit what a program left behind or got
 * wrong. See mock.h and cuda_driver.c. */
#define _POSIX_C_SOURCE 200809L /* clock_gettime */
#include "mock.h"
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define EXPORT __attribute__((visibility("default")))

extern mock_cuda_state mock_cuda;
int cuCtxGetCurrent(void **context);

enum { SUCCESS = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, INVALID_HANDLE = 400 };

enum { STREAM = 0x5712EA, EVENT = 0xE7E27 };

typedef struct handle {
    int kind;
    double recorded; /* an event: ms; 0 = not yet */
} handle;

static int alive;

static int strange(const char *name, int result) {
    if (!mock_cuda.strange++)
        mock_cuda.strangest = name;
    return result;
}

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return 1e3 * (double)now.tv_sec + 1e-6 * (double)now.tv_nsec;
}

static int make(void **at, int kind, const char *name) {
    void *context = NULL;
    if (cuCtxGetCurrent(&context) != SUCCESS || !context)
        return strange(name, INVALID_CONTEXT);
    handle *h = calloc(1, sizeof *h);
    if (!h)
        return OUT_OF_MEMORY;
    h->kind = kind;
    alive++;
    *at = h;
    return SUCCESS;
}

static int drop(handle *h, int kind, const char *name) {
    if (!h || h->kind != kind)
        return strange(name, INVALID_HANDLE);
    alive--;
    free(h);
    return SUCCESS;
}

EXPORT int cuStreamCreate(void **stream, unsigned flags) {
    return flags > 1 ? strange("cuStreamCreate", INVALID_VALUE) : make(stream, STREAM, "cuStreamCreate");
}

EXPORT int cuStreamDestroy_v2(void *stream) { return drop(stream, STREAM, "cuStreamDestroy"); }

EXPORT int cuEventCreate(void **event, unsigned flags) {
    (void)flags;
    return make(event, EVENT, "cuEventCreate");
}

EXPORT int cuEventDestroy_v2(void *event) { return drop(event, EVENT, "cuEventDestroy"); }

EXPORT int cuEventRecord(void *event, void *stream) {
    handle *e = event;
    const handle *s = stream;
    if (!e || e->kind != EVENT || (s && s->kind != STREAM))
        return strange("cuEventRecord", INVALID_HANDLE);
    e->recorded = now_ms();
    return SUCCESS;
}

EXPORT int cuEventSynchronize(void *event) {
    const handle *e = event;
    return e && e->kind == EVENT ? SUCCESS : strange("cuEventSynchronize", INVALID_HANDLE);
}

EXPORT int cuEventElapsedTime(float *ms, void *begin, void *end) {
    const handle *from = begin, *to = end;
    if (!from || !to || from->kind != EVENT || to->kind != EVENT || from->recorded <= 0 || to->recorded <= 0)
        return strange("cuEventElapsedTime", INVALID_HANDLE);
    *ms = (float)(to->recorded - from->recorded);
    return SUCCESS;
}

__attribute__((destructor)) static void say_what_is_left(void) {
    const mock_cuda_state *m = &mock_cuda;
    if (!getenv("MOCK_STRICT"))
        return;
    if (m->strange)
        fprintf(stderr, "mock driver: %d strange calls, the first of %s\n", m->strange, m->strangest);
    if (m->memories || m->retains || m->modules || m->depth || alive)
        fprintf(stderr,
                "mock driver: left are %d memories, %d contexts (%d current), %d modules, %d streams and "
                "events\n",
                m->memories, m->retains, m->depth, m->modules, alive);
}
