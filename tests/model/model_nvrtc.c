/* A libnvrtc.so.13 that compiles kernels for the processor of this machine: the text without ptx.cuh and
 * hopper.cuh, and cuda_model.hpp and hopper_model.hpp in their places, through g++ into a shared library. Its
 * bytes are the "machine code"; the driver of tests/mock, built with MOCK_MODEL, loads and runs it. So the
 * library goes all of its way without a GPU. */
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { SUCCESS = 0, OUT_OF_MEMORY = 1, COMPILATION = 6 };

struct program {
    char *source, *code, *log;
    size_t size;
};

EXPORT int nvrtcVersion(int *major, int *minor) {
    *major = 13, *minor = 0;
    return SUCCESS;
}

EXPORT const char *nvrtcGetErrorString(int result) {
    return result == COMPILATION ? "NVRTC_ERROR_COMPILATION" : "NVRTC_ERROR_INTERNAL_ERROR";
}

EXPORT int nvrtcCreateProgram(void **program, const char *source, const char *name, int header_count,
                              const char *const *headers, const char *const *header_names) {
    (void)name, (void)header_count, (void)headers, (void)header_names;
    struct program *p = calloc(1, sizeof *p);
    if (!p)
        return OUT_OF_MEMORY;
    p->source = strdup(source);
    *program = p;
    return SUCCESS;
}

EXPORT int nvrtcDestroyProgram(void **program) {
    struct program *p = *program;
    free(p->source), free(p->code), free(p->log);
    free(p);
    *program = NULL;
    return SUCCESS;
}

static char *read_all(const char *path, size_t *size) {
    FILE *f = fopen(path, "rb");
    char *at = NULL;
    *size = 0;
    for (size_t room = 0, got = 1; f && got;) {
        if (*size + 1 >= room)
            at = realloc(at, room = room ? 2 * room : 1 << 16);
        got = fread(at + *size, 1, room - *size - 1, f);
        *size += got;
    }
    if (f)
        fclose(f);
    if (at)
        at[*size] = 0;
    return at;
}

/* A line of the text. Shared memory that the launch sizes is the model's array, as it cannot be static. */
static void write_line(FILE *to, const char *line, size_t length) {
    static const char from[] = "extern __shared__ __align__(";
    const char *found = memmem(line, length, from, sizeof from - 1),
               *past = found ? memchr(found + sizeof from, ')', length - (size_t)(found + sizeof from - line))
                             : NULL;
    if (!past) {
        fwrite(line, 1, length, to);
        return;
    }
    fwrite(line, 1, (size_t)(found - line), to);
    fputs("extern", to);
    fwrite(past + 1, 1, length - (size_t)(past + 1 - line), to);
}

/* An entry point: its name is the first that begins with fb_, on this line or the next. */
static void write_entry(FILE *to, const char *line, size_t length) {
    static const char mark[] = "extern \"C\" __global__";
    if (length < sizeof mark || memcmp(line, mark, sizeof mark - 1) != 0)
        return;
    const char *name = strstr(line, " fb_");
    if (name)
        fprintf(to, "MODEL_ENTRIES_%.*s\n", (int)strcspn(name + 1, "("), name + 1);
}

static void write_source(FILE *to, const char *source, FILE *entries) {
    bool skip = false;
    fprintf(to, "#include \"%s\"\n", MODEL_HEADER);
    for (const char *line = source; *line;) {
        size_t length = strcspn(line, "\n");
        if (strncmp(line, "#line", 5) == 0) {
            const bool hopper = memmem(line, length, "\"hopper.cuh\"", 12) != NULL;
            skip = hopper || memmem(line, length, "\"ptx.cuh\"", 9) != NULL;
            if (hopper)
                fprintf(to, "#include \"%s\"\n", MODEL_HOPPER);
        }
        if (!skip) {
            write_line(to, line, length);
            write_entry(entries, line, length);
        }
        fputc('\n', to);
        line += length + (line[length] == '\n');
    }
}

/* extern "C" void model_<name>(void **) for each. */
static void write_calls(FILE *to, char *entries) {
    for (char *at = entries; (at = strstr(at, "MODEL_ENTRIES_"));) {
        at += strlen("MODEL_ENTRIES_");
        int n = (int)strcspn(at, "\n");
        fprintf(to,
                "extern \"C\" __attribute__((visibility(\"default\"))) void model_%.*s(void **p) {"
                " model_call(%.*s, p); }\n",
                n, at, n, at);
    }
}

EXPORT int nvrtcCompileProgram(void *program, int option_count, const char *const *options) {
    struct program *p = program;
    char folder[] = "/tmp/flashback-model-XXXXXX", path[96], command[1024], *entries = NULL;
    size_t size;
    (void)option_count, (void)options;
    if (!mkdtemp(folder))
        return OUT_OF_MEMORY;
    snprintf(path, sizeof path, "%s/kernel.cpp", folder);
    FILE *to = fopen(path, "w"), *names = open_memstream(&entries, &size);
    if (to && names) {
        write_source(to, p->source, names);
        fclose(names);
        write_calls(to, entries);
        fclose(to);
    }
    free(entries);
    snprintf(command, sizeof command,
             "g++ -std=c++17 -O1 -w -fPIC -shared -fvisibility=hidden -ffp-contract=off %s/kernel.cpp -o "
             "%s/kernel.so >%s/log 2>&1",
             folder, folder, folder);
    int result = system(command);
    snprintf(path, sizeof path, "%s/log", folder);
    p->log = read_all(path, &size);
    snprintf(path, sizeof path, "%s/kernel.so", folder);
    p->code = result == 0 ? read_all(path, &p->size) : NULL;
    snprintf(command, sizeof command, "rm -rf %s", folder);
    if (system(command) != 0)
        return OUT_OF_MEMORY;
    return p->code ? SUCCESS : COMPILATION;
}

EXPORT int nvrtcGetCUBINSize(void *program, size_t *size) {
    *size = ((struct program *)program)->size;
    return SUCCESS;
}

EXPORT int nvrtcGetCUBIN(void *program, char *to) {
    const struct program *p = program;
    memcpy(to, p->code, p->size);
    return SUCCESS;
}

EXPORT int nvrtcGetProgramLogSize(void *program, size_t *size) {
    const struct program *p = program;
    *size = (p->log ? strlen(p->log) : 0) + 1;
    return SUCCESS;
}

EXPORT int nvrtcGetProgramLog(void *program, char *to) {
    const struct program *p = program;
    strcpy(to, p->log ? p->log : "");
    return SUCCESS;
}
