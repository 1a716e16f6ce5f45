/* Modules of the mock driver that run: see model_nvrtc.c, which makes them. */
#include "../mock/kernels.h"
#include <dlfcn.h>
#include <elf.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A library's bytes end with its table of sections. */
static size_t size_of(const void *image) {
    const Elf64_Ehdr *head = image;
    return (size_t)head->e_shoff + (size_t)head->e_shnum * head->e_shentsize;
}

void *mock_load(const void *image) {
    char path[] = "/tmp/flashback-module-XXXXXX";
    if (memcmp(image, ELFMAG, SELFMAG) != 0)
        return NULL;
    int file = mkstemp(path);
    const size_t size = size_of(image);
    void *library = NULL;
    if (file >= 0 && write(file, image, size) == (ssize_t)size)
        library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        fprintf(stderr, "model: %s\n", dlerror());
    close(file);
    unlink(path);
    return library;
}

void mock_unload(void *library) {
    if (library)
        dlclose(library);
}

mock_kernel mock_find(void *library, const char *name) {
    char symbol[128];
    mock_kernel k = {NULL, NULL};
    snprintf(symbol, sizeof symbol, "model_%s", name);
    if (library) {
        *(void **)&k.run = dlsym(library, "model_run");
        *(void **)&k.kernel = dlsym(library, symbol);
    }
    if (!k.kernel) {
        fprintf(stderr, "model: no kernel %s\n", name);
        abort();
    }
    return k;
}

void mock_run(mock_kernel k, const unsigned *grid, unsigned threads, unsigned shared_bytes,
              void **arguments) {
    k.run(k.kernel, grid, threads, shared_bytes, arguments);
}
