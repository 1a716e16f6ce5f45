/* What tests of libraries share that are found at run time. A scenario runs in a child of its own, because a
 * library that was loaded stays in the process; there it starts with the mock libraries it names. */
#ifndef TESTS_CHILD_H
#define TESTS_CHILD_H

#include <dlfcn.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>
/* cmocka wants the ones above first */
#include <cmocka.h>

/* In a child cmocka's assertions would go on with the next test. */
#define expect(condition)                                                                                    \
    do {                                                                                                     \
        if (!(condition)) {                                                                                  \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                  \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

/* Does the text have these words? Says what it is, if not. */
#define expect_words(text, words)                                                                            \
    do {                                                                                                     \
        if (!strstr(text, words)) {                                                                          \
            fprintf(stderr, "%s:%d: \"%s\" is not in \"%s\"\n", __FILE__, __LINE__, words, text);            \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

/* exit and not _exit, so that a sanitizer looks for what has leaked. */
static inline void in_child(void (*scenario)(void)) {
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0) {
        unsetenv("FLASHBACK_NVRTC");
        unsetenv("FLASHBACK_ROUTE");
        scenario();
        exit(0);
    }
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_true(WIFEXITED(status));
    assert_int_equal(WEXITSTATUS(status), 0);
}

/* Loads a mock library, which the process then has under its usual name, and finds what it exports. */
static inline void *load_mock(const char *path, const char *block) {
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *found = library ? dlsym(library, block) : NULL;
    if (!found)
        fprintf(stderr, "%s\n", dlerror());
    expect(found);
    return found;
}

/* Is this library on the machine, so that its absence cannot be tested? Asks in a child, which forgets it. */
static inline bool is_installed(const char *name) {
    fflush(NULL);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(dlopen(name, RTLD_NOW | RTLD_LOCAL) ? 0 : 1);
    int status = 0;
    assert_int_equal(waitpid(child, &status, 0), child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

#endif
