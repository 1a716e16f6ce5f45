/* A libnvrtc.so of any version (MOCK_MAJOR) that compiles whatever it is given into a few bytes; any call can
 * be made to fail, and a compilation to have any log. See mock.h. */
#include "mock.h"
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

#ifndef MOCK_MAJOR
#define MOCK_MAJOR 13
#endif

enum { SUCCESS = 0, OUT_OF_MEMORY = 1, INVALID_INPUT = 3, INVALID_PROGRAM = 4 };

EXPORT mock_nvrtc_state mock_nvrtc;
#define mock mock_nvrtc

struct program {
    char name[64];
    bool compiled;
    const char *log;
};

static const char code[] = "mock machine code";

#define CALL(function)                                                                                       \
    do {                                                                                                     \
        if (++mock.calls == mock.fail_at) {                                                                  \
            mock.failed = function;                                                                          \
            return mock.fail_with;                                                                           \
        }                                                                                                    \
    } while (0)

EXPORT int nvrtcVersion(int *major, int *minor) {
    CALL("nvrtcVersion");
    *major = MOCK_MAJOR;
    *minor = mock.minor;
    return SUCCESS;
}

EXPORT const char *nvrtcGetErrorString(int result) {
    switch (result) {
    case OUT_OF_MEMORY:
        return "NVRTC_ERROR_OUT_OF_MEMORY";
    case INVALID_INPUT:
        return "NVRTC_ERROR_INVALID_INPUT";
    case 5:
        return "NVRTC_ERROR_INVALID_OPTION";
    case 6:
        return "NVRTC_ERROR_COMPILATION";
    default:
        return "NVRTC_ERROR_INTERNAL_ERROR";
    }
}

EXPORT int nvrtcCreateProgram(void **program, const char *source, const char *name, int header_count,
                              const char *const *headers, const char *const *header_names) {
    CALL("nvrtcCreateProgram");
    if (!source || !name || header_count || headers || header_names)
        return INVALID_INPUT;
    struct program *p = calloc(1, sizeof *p);
    if (!p)
        return OUT_OF_MEMORY;
    snprintf(p->name, sizeof p->name, "%s", name);
    mock.programs++;
    *program = p;
    return SUCCESS;
}

EXPORT int nvrtcDestroyProgram(void **program) {
    mock.calls++; /* fails never: nothing could be done about it */
    free(*program);
    *program = NULL;
    mock.programs--;
    return SUCCESS;
}

EXPORT int nvrtcCompileProgram(void *program, int option_count, const char *const *options) {
    CALL("nvrtcCompileProgram");
    struct program *p = program;
    size_t length = 0;
    mock.options[0] = 0;
    for (int i = 0; i < option_count; i++)
        length += (size_t)snprintf(mock.options + length, sizeof mock.options - length, "%s\n", options[i]);
    memcpy(mock.name, p->name, sizeof mock.name);
    p->log = mock.log ? mock.log : "";
    p->compiled = mock.result == SUCCESS;
    return mock.result;
}

EXPORT int nvrtcGetCUBINSize(void *program, size_t *size) {
    CALL("nvrtcGetCUBINSize");
    *size = sizeof code;
    return ((struct program *)program)->compiled ? SUCCESS : INVALID_PROGRAM;
}

EXPORT int nvrtcGetCUBIN(void *program, char *to) {
    CALL("nvrtcGetCUBIN");
    if (!((struct program *)program)->compiled)
        return INVALID_PROGRAM;
    memcpy(to, code, sizeof code);
    return SUCCESS;
}

EXPORT int nvrtcGetProgramLogSize(void *program, size_t *size) {
    CALL("nvrtcGetProgramLogSize");
    const struct program *p = program;
    *size = (p->log ? strlen(p->log) : 0) + 1;
    return SUCCESS;
}

EXPORT int nvrtcGetProgramLog(void *program, char *to) {
    CALL("nvrtcGetProgramLog");
    const struct program *p = program;
    memcpy(to, p->log ? p->log : "", (p->log ? strlen(p->log) : 0) + 1);
    return SUCCESS;
}
