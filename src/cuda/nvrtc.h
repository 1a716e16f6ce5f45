/* NVRTC, NVIDIA's compiler as a library: found at run time, and asked for machine code (SASS). PTX would need
 * a driver as new as the compiler. Floor: cuda. Next: ../jit, which decides when something is compiled. */
#ifndef FB_CUDA_NVRTC_H
#define FB_CUDA_NVRTC_H

#include "../core/error.h"
#include <stddef.h>

/* name, parameters. All return an nvrtcResult, 0 for success. nvrtcProgram is a pointer. */
#define FB__NVRTC_LIST(X)                                                                                    \
    X(nvrtcVersion, (int *major, int *minor))                                                                \
    X(nvrtcCreateProgram, (void **program, const char *source, const char *name, int header_count,           \
                           const char *const *headers, const char *const *header_names))                     \
    X(nvrtcDestroyProgram, (void **program))                                                                 \
    X(nvrtcCompileProgram, (void *program, int option_count, const char *const *options))                    \
    X(nvrtcGetCUBINSize, (void *program, size_t *size))                                                      \
    X(nvrtcGetCUBIN, (void *program, char *code))                                                            \
    X(nvrtcGetProgramLogSize, (void *program, size_t *size))                                                 \
    X(nvrtcGetProgramLog, (void *program, char *log))

typedef struct fb__nvrtc {
    int major, minor; /* 13, 0 */
#define X(name, parameters) int(*name) parameters;
    FB__NVRTC_LIST(X)
#undef X
    const char *(*nvrtcGetErrorString)(int result);
    char path[512]; /* of the library that was found */
} fb__nvrtc;

/* Finds NVRTC: FLASHBACK_NVRTC, which is taken or refused; else one that the process has already; else by the
 * loader; else where toolkits and Python packages of the system are. driver_version is fb__driver.version:
 * its major version limits NVRTC's, as older drivers do not load newer code; 0 for no limit. The library
 * stays loaded, because loading takes up to a quarter of a second. FB_NO_DEVICE, and where was looked. */
fb_status fb__nvrtc_open(fb__nvrtc *n, int driver_version);

/* The same with folders of one's own for the last step: patterns for glob, ended by NULL. */
fb_status fb__nvrtc_open_in(fb__nvrtc *n, int driver_version, const char *const *folders);

/* Most options of a job. */
#define FB__NVRTC_OPTIONS 24

typedef struct fb__nvrtc_job {
    const fb__nvrtc *nvrtc;
    const char *arch;           /* "sm_90a" */
    const char *const *options; /* besides those that are always given; ended by NULL, or NULL */
    char *log; /* out: what the compiler said, registers, stack and spills included. May be NULL. The caller
                  frees it; it is set by every call, also by one that fails. */
} fb__nvrtc_job;

/* All options of a job as one text, for the key of what it compiles. */
void fb__nvrtc_options(const fb__nvrtc_job *job, fb__text *text);

/* Compiles source, which is called `name` in messages, into *code (to be freed) of *size bytes; `context` is
 * a fb__nvrtc_job. FB_COMPILE: the sentence begins with the first errors, as file:line: message. */
fb_status fb__nvrtc_compile(void *context, const char *source, const char *name, void **code, size_t *size);

#endif
