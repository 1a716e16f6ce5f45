/* See nvrtc.h. */
#include "nvrtc.h"
#include "../base/env.h"
#include <dlfcn.h>
#include <glob.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- One library ---- */

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define X(name, parameters) {#name, offsetof(fb__nvrtc, name)},
    FB__NVRTC_LIST(X)
#undef X
        {"nvrtcGetErrorString", offsetof(fb__nvrtc, nvrtcGetErrorString)},
};

/* NULL if everything is there, else the first name that is not. */
static const char *find_functions(fb__nvrtc *n, void *library) {
    for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) {
        void *function = dlsym(library, functions[i].symbol);
        if (!function)
            return functions[i].symbol;
        /* ISO C knows no conversion between pointers to objects and to functions; POSIX gives both one form.
         */
        memcpy((char *)n + functions[i].offset, &function, sizeof function);
    }
    return NULL;
}

/* What the loader says is the path of the file that has this function. */
static void note_path(fb__nvrtc *n, const char *name) {
    void *function;
    Dl_info info = {0};
    memcpy(&function, &n->nvrtcVersion, sizeof function);
    bool known = dladdr(function, &info) != 0 && info.dli_fname;
    snprintf(n->path, sizeof n->path, "%s", known ? info.dli_fname : name);
}

/* NVRTC loads a second library by its name when it compiles, and says nothing about where that may lie: it is
 * found beside the first only if somebody has loaded it from there. Elsewhere the loader may know it. */
static void load_builtins(const fb__nvrtc *n) {
    char path[600];
    const char *slash = strrchr(n->path, '/');
    if (!slash)
        return;
    snprintf(path, sizeof path, "%.*s/libnvrtc-builtins.so.%d.%d", (int)(slash - n->path), n->path, n->major,
             n->minor);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library)
        dlclose(library);
}

/* Is this loaded library NVRTC, and its code for this driver? If not, `reason` says so. */
static bool suits(fb__nvrtc *n, void *library, int driver_version, fb__text *reason) {
    const char *missing = find_functions(n, library);
    if (missing) {
        fb__text_add(reason, "it has no function %s", missing);
        return false;
    }
    int result = n->nvrtcVersion(&n->major, &n->minor);
    if (result != 0) {
        fb__text_add(reason, "nvrtcVersion failed: %s", n->nvrtcGetErrorString(result));
        return false;
    }
    if (driver_version && n->major > driver_version / 1000) {
        fb__text_add(reason, "it is NVRTC %d.%d, and the driver, for CUDA %d.%d, does not load its code",
                     n->major, n->minor, driver_version / 1000, driver_version % 1000 / 10);
        return false;
    }
    return true;
}

/* Takes a library if it suits. `flags` is RTLD_NOLOAD for one that the process has already. It stays loaded
 * in either case (RTLD_NODELETE), as NVRTC leaves memory behind when it goes; so its handle can be given
 * back. */
static bool take(fb__nvrtc *n, const char *name, int flags, int driver_version, fb__text *reason) {
    *n = (fb__nvrtc){0};
    void *library = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE | flags);
    if (!library) {
        const char *words = dlerror();
        fb__text_add(reason, "%s", words ? words : "it does not load");
        return false;
    }
    bool taken = suits(n, library, driver_version, reason);
    if (taken) {
        note_path(n, name);
        load_builtins(n);
    }
    dlclose(library);
    return taken;
}

/* ---- The search ---- */

/* Newest first. */
static const struct {
    int major;
    const char *name;
} libraries[] = {{13, "libnvrtc.so.13"}, {12, "libnvrtc.so.12"}};

#define LIBRARIES (sizeof libraries / sizeof *libraries)

static const char *const system_folders[] = {"/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/*/lib",
                                             "/usr/local/lib/python3*/*-packages/nvidia/cu13/lib",
                                             "/usr/local/lib/python3*/*-packages/nvidia/cuda_nvrtc/lib",
                                             NULL};

/* glob's order puts /usr/local/cuda, the system's choice, before /usr/local/cuda-13.0. */
static bool take_from(fb__nvrtc *n, const char *folder, const char *name, int driver_version) {
    char pattern[512];
    int length = snprintf(pattern, sizeof pattern, "%s/%s", folder, name);
    if (length < 0 || (size_t)length >= sizeof pattern)
        return false;
    glob_t found;
    bool taken = false;
    if (glob(pattern, 0, NULL, &found) == 0) {
        for (size_t i = 0; i < found.gl_pathc && !taken; i++) {
            fb__text nowhere = {NULL, 0, 0};
            taken = take(n, found.gl_pathv[i], 0, driver_version, &nowhere);
        }
        globfree(&found);
    }
    return taken;
}

/* The libraries by their names, which tell the major version: one that is too new is not even loaded. */
static bool search(fb__nvrtc *n, int driver_version, const char *const *folders) {
    const int most = driver_version ? driver_version / 1000 : libraries[0].major;
    static const int flags[] = {RTLD_NOLOAD, 0};
    for (size_t f = 0; f < sizeof flags / sizeof *flags; f++)
        for (size_t i = 0; i < LIBRARIES; i++) {
            fb__text nowhere = {NULL, 0, 0};
            if (libraries[i].major <= most && take(n, libraries[i].name, flags[f], driver_version, &nowhere))
                return true;
        }
    for (size_t i = 0; i < LIBRARIES; i++)
        for (const char *const *folder = folders; *folder; folder++)
            if (libraries[i].major <= most && take_from(n, *folder, libraries[i].name, driver_version))
                return true;
    return false;
}

fb_status fb__nvrtc_open_in(fb__nvrtc *n, int driver_version, const char *const *folders) {
    char words[512] = "";
    fb__text text = {words, sizeof words, 0};
    const char *wanted = fb__env_get(FB__ENV_FLASHBACK_NVRTC);
    if (wanted) {
        if (take(n, wanted, 0, driver_version, &text))
            return FB_OK;
        return fb__error(
            FB_NO_DEVICE,
            "FLASHBACK_NVRTC is \"%.300s\", which cannot be used: %.400s; it has to be the path of a "
            "libnvrtc.so, or unset",
            wanted, words);
    }
    if (search(n, driver_version, folders))
        return FB_OK;
    for (size_t i = 0; i < LIBRARIES; i++)
        fb__text_add(&text, "%s%s", i ? ", " : "", libraries[i].name);
    fb__text_add(&text, " by the loader");
    for (const char *const *folder = folders; *folder; folder++)
        fb__text_add(&text, ", %s", *folder);
    char limit[64] = "";
    if (driver_version)
        snprintf(limit, sizeof limit, " of version %d or older, for this driver,", driver_version / 1000);
    return fb__error(
        FB_NO_DEVICE,
        "no NVRTC%s, which compiles the kernels; looked for: %.500s. `pip install nvidia-cuda-nvrtc` "
        "brings one; FLASHBACK_NVRTC=<path of its libnvrtc.so> points to it",
        limit, words);
}

fb_status fb__nvrtc_open(fb__nvrtc *n, int driver_version) {
    return fb__nvrtc_open_in(n, driver_version, system_folders);
}

/* ---- Compiling ---- */

/* Is this a line about an error? The front end writes "file(3): error: ...", ptxas "error   : ..." and
 * "ptxas fatal   : ...". */
static bool is_error(const char *line, size_t length) {
    static const char *const words[] = {"error", "fatal"};
    for (size_t w = 0; w < sizeof words / sizeof *words; w++)
        for (size_t i = 0; i + 5 < length; i++) {
            if (strncmp(line + i, words[w], 5) != 0)
                continue;
            size_t end = i + 5;
            while (end < length && line[end] == ' ')
                end++;
            if (end < length && line[end] == ':')
                return true;
        }
    return false;
}

/* A line, with "file(3): error: " as "file:3: ", the way that other compilers and editors have it. */
static void add_line(fb__text *text, const char *line, size_t length) {
    const char *close = NULL;
    for (size_t i = 0; i + 9 < length && !close; i++)
        if (strncmp(line + i, "): error: ", 10) == 0)
            close = line + i;
    const char *open = close;
    while (open && open > line && *open != '(')
        open--;
    if (open && *open == '(')
        fb__text_add(text, "%.*s:%.*s: %.*s", (int)(open - line), line, (int)(close - open - 1), open + 1,
                     (int)(line + length - close - 10), close + 10);
    else
        fb__text_add(text, "%.*s", (int)length, line);
}

/* The first errors of a log; if no line looks like one, the first line that says anything. */
static void add_errors(fb__text *text, const char *log, int most) {
    int found = 0;
    const char *first = NULL;
    for (const char *line = log; *line && found < most;) {
        size_t length = strcspn(line, "\n"), shown = length < 300 ? length : 300;
        if (!first && length)
            first = line;
        if (is_error(line, shown)) {
            fb__text_add(text, "%s", found++ ? "; " : "");
            add_line(text, line, shown);
        }
        line += length + (line[length] != 0);
    }
    if (!found && first)
        add_line(text, first, strcspn(first, "\n"));
}

static fb_status failed(const fb__nvrtc *n, const char *call, int result, const char *name) {
    enum { OUT_OF_MEMORY = 1 }; /* nvrtcResult */
    return fb__error(result == OUT_OF_MEMORY ? FB_MEMORY : FB_COMPILE,
                     "%s failed for %s: %s (NVRTC %d.%d, %s)", call, name, n->nvrtcGetErrorString(result),
                     n->major, n->minor, n->path);
}

/* The program's log, or NULL where it is empty or there is no memory for it: it is never what a call fails
 * for. */
static char *log_of(const fb__nvrtc *n, void *program) {
    size_t size = 0; /* with the closing 0 */
    if (n->nvrtcGetProgramLogSize(program, &size) != 0 || size < 2)
        return NULL;
    char *log = calloc(size + 1, 1);
    if (log && n->nvrtcGetProgramLog(program, log) != 0) {
        free(log);
        return NULL;
    }
    return log;
}

/* The options of a job, and how many they are; arch has room for its own. Too many are counted, but not
 * there. */
static int collect(const fb__nvrtc_job *job, char arch[64], const char *options[FB__NVRTC_OPTIONS]) {
    const fb__nvrtc *n = job->nvrtc;
    snprintf(arch, 64, "--gpu-architecture=%s", job->arch);
    /* Functions without a mark are for the device, as the text that kernels share with C has none. ptxas
     * tells registers and spills. What is worth keeping is kept elsewhere; NVRTC has a cache since 12.9.
     * Several threads optimize one program: a quarter less to wait for (NVRTC 13.0, two cores). */
    const char *const always[] = {arch,
                                  "--std=c++17",
                                  "-default-device",
                                  "--ptxas-options=-v",
                                  n->major > 12 || n->minor >= 9 ? "--no-cache" : NULL,
                                  n->major > 12 ? "--split-compile=0" : NULL};
    int count = 0;
    for (size_t i = 0; i < sizeof always / sizeof *always; i++)
        if (always[i])
            options[count++] = always[i];
    for (const char *const *more = job->options; more && *more; more++, count++)
        if (count < FB__NVRTC_OPTIONS)
            options[count] = *more;
    return count;
}

void fb__nvrtc_options(const fb__nvrtc_job *job, fb__text *text) {
    char arch[64];
    const char *options[FB__NVRTC_OPTIONS];
    int count = collect(job, arch, options);
    for (int i = 0; i < count && i < FB__NVRTC_OPTIONS; i++)
        fb__text_add(text, "%s%s", i ? " " : "", options[i]);
}

static fb_status compile(fb__nvrtc_job *job, void *program, const char *name) {
    const fb__nvrtc *n = job->nvrtc;
    char arch[64];
    const char *options[FB__NVRTC_OPTIONS];
    int count = collect(job, arch, options);
    if (count > FB__NVRTC_OPTIONS)
        return fb__error(FB_COMPILE, "%s has %d options for NVRTC; the most are %d", name, count,
                         FB__NVRTC_OPTIONS);
    int result = n->nvrtcCompileProgram(program, count, options);
    job->log = log_of(n, program);
    if (result == 0)
        return FB_OK;
    if (!job->log)
        return failed(n, "nvrtcCompileProgram", result, name);
    char words[640];
    fb__text text = {words, sizeof words, 0};
    add_errors(&text, job->log, 2);
    return fb__error(FB_COMPILE, "%s (%s for %s by NVRTC %d.%d)", words, name, job->arch, n->major, n->minor);
}

static fb_status take_code(const fb__nvrtc *n, void *program, const char *name, void **code, size_t *size) {
    int result = n->nvrtcGetCUBINSize(program, size);
    if (result != 0)
        return failed(n, "nvrtcGetCUBINSize", result, name);
    *code = malloc(*size ? *size : 1);
    if (!*code)
        return fb__error(FB_MEMORY, "no memory for the code of %s (%zu bytes)", name, *size);
    result = n->nvrtcGetCUBIN(program, *code);
    if (result == 0)
        return FB_OK;
    free(*code);
    *code = NULL;
    return failed(n, "nvrtcGetCUBIN", result, name);
}

fb_status fb__nvrtc_compile(void *context, const char *source, const char *name, void **code, size_t *size) {
    fb__nvrtc_job *job = context;
    const fb__nvrtc *n = job->nvrtc;
    job->log = NULL;
    *code = NULL;
    *size = 0;
    void *program = NULL;
    int result = n->nvrtcCreateProgram(&program, source, name, 0, NULL, NULL);
    if (result != 0)
        return failed(n, "nvrtcCreateProgram", result, name);
    fb_status status = compile(job, program, name);
    if (status == FB_OK)
        status = take_code(n, program, name, code, size);
    n->nvrtcDestroyProgram(&program);
    return status;
}
