/* What a module of the mock driver holds: nothing, or, with MOCK_MODEL, a library that
 * tests/model/model_nvrtc.c compiled. */
#ifndef TESTS_MOCK_KERNELS_H
#define TESTS_MOCK_KERNELS_H

#include <stddef.h>

typedef struct mock_kernel {
    void (*run)(void (*kernel)(void **), const unsigned *grid, unsigned threads, unsigned shared_bytes,
                void **arguments);
    void (*kernel)(void **);
} mock_kernel;

#ifdef MOCK_MODEL
void *mock_load(const void *image);
void mock_unload(void *library);
mock_kernel mock_find(void *library, const char *name);
void mock_run(mock_kernel k, const unsigned *grid, unsigned threads, unsigned shared_bytes, void **arguments);
#else
static inline void *mock_load(const void *image) {
    (void)image;
    return NULL;
}
static inline void mock_unload(void *library) { (void)library; }
static inline mock_kernel mock_find(void *library, const char *name) {
    (void)library, (void)name;
    return (mock_kernel){NULL, NULL};
}
static inline void mock_run(mock_kernel k, const unsigned *grid, unsigned threads, unsigned shared_bytes,
                            void **arguments) {
    (void)k, (void)grid, (void)threads, (void)shared_bytes, (void)arguments;
}
#endif

#endif
