/* A libobjc.A.dylib as far as a C program needs it to speak to Metal: classes, messages, references, pools
 * and associations. It is strict: objects count their references, the dead are remembered, and unknown
 * messages are strange. See mock.h. */
#include "objc.h"
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT mock_metal_state mock_metal = {.devices = 1,
                                      .family = 9,
                                      .macos = 15,
                                      .buffer_most = 1UL << 33,
                                      .memory_most = 1UL << 33,
                                      .simd_width = 32,
                                      .layout = 1,
                                      .fast_math = -1};
#define mock mock_metal

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

bool mock_fails(const char *call) {
    if (__atomic_add_fetch(&mock.calls, 1, __ATOMIC_RELAXED) != mock.fail_at)
        return false;
    mock.failed = call;
    return true;
}

void mock_strange(const char *what) {
    if (!mock.strange++)
        mock.strangest = what;
    if (getenv("MOCK_STRICT"))
        fprintf(stderr, "mock: %s\n", what);
}

static void drop_associations(object *o) {
    for (struct association *a = o->associations, *next; a; a = next) {
        next = a->next;
        mock_release(a->value);
        free(a);
    }
    o->associations = NULL;
}

/* With MOCK_STRICT a program says at its end what it has left, besides what devices keep. */
__attribute__((destructor)) static void report(void) {
    for (int n = 0; n < MOCK_DEVICES; n++)
        drop_associations(mock_devices[n]);
    if (getenv("MOCK_STRICT") && (mock.live || mock.pools || mock.strange))
        fprintf(stderr, "mock: %ld objects and %d pools are left, %d calls were strange\n", mock.live,
                mock.pools, mock.strange);
}

/* ---- Objects ---- */

static object *all; /* also those that are gone */

void *mock_new(sort kind, size_t size) {
    object *o = calloc(1, size);
    o->kind = kind;
    o->references = 1;
    pthread_mutex_lock(&mutex);
    o->next = all;
    all = o;
    pthread_mutex_unlock(&mutex);
    if (kind != DEVICE && kind != CLASS)
        __atomic_add_fetch(&mock.live, 1, __ATOMIC_RELAXED);
    return o;
}

void *mock_retain(void *object_) {
    object *o = object_;
    if (o)
        __atomic_add_fetch(&o->references, 1, __ATOMIC_RELAXED);
    return o;
}

void mock_release(void *object_) {
    object *o = object_;
    if (!o)
        return;
    const int left = __atomic_sub_fetch(&o->references, 1, __ATOMIC_ACQ_REL);
    if (left > 0)
        return;
    if (left < 0 || o->kind == DEVICE || o->kind == CLASS) {
        o->references = o->kind == DEVICE || o->kind == CLASS;
        mock_strange("an object was released more often than it was held");
        return;
    }
    if (mock_dealloc[o->kind])
        mock_dealloc[o->kind](o);
    drop_associations(o);
    __atomic_sub_fetch(&mock.live, 1, __ATOMIC_RELAXED);
}

/* ---- Pools ---- */

enum { POOLED = 65536, DEPTH = 64 };

static __thread struct {
    object *at[POOLED];
    int count, starts[DEPTH], depth;
} pools;

EXPORT void *objc_autoreleasePoolPush(void) {
    pools.starts[pools.depth++] = pools.count;
    __atomic_add_fetch(&mock.pools, 1, __ATOMIC_RELAXED);
    return &pools.starts[pools.depth - 1];
}

EXPORT void objc_autoreleasePoolPop(void *pool) {
    if (!pools.depth || pool != &pools.starts[pools.depth - 1]) {
        mock_strange("a pool is popped that is not the last one");
        return;
    }
    const int start = pools.starts[--pools.depth];
    while (pools.count > start)
        mock_release(pools.at[--pools.count]);
    __atomic_sub_fetch(&mock.pools, 1, __ATOMIC_RELAXED);
}

void *mock_autorelease(void *o) {
    if (!o)
        return NULL;
    if (!pools.depth)
        mock_strange("an object is autoreleased without a pool");
    else if (pools.count == POOLED)
        mock_strange("a pool has grown beyond measure");
    else
        pools.at[pools.count++] = o;
    return o;
}

/* ---- Associations, blocks ---- */

/* OBJC_ASSOCIATION_RETAIN, which also holds what is asked for till the pool ends. */
EXPORT void objc_setAssociatedObject(object *o, const void *key, object *value, uintptr_t policy) {
    if (policy != 01401)
        mock_strange("an association of another policy than OBJC_ASSOCIATION_RETAIN");
    mock_retain(value);
    object *old = NULL;
    pthread_mutex_lock(&mutex);
    struct association **at = &o->associations;
    while (*at && (*at)->key != key)
        at = &(*at)->next;
    if (*at) {
        old = (*at)->value;
        (*at)->value = value;
    } else {
        *at = calloc(1, sizeof **at);
        **at = (struct association){key, value, NULL};
    }
    pthread_mutex_unlock(&mutex);
    mock_release(old);
}

EXPORT object *objc_getAssociatedObject(object *o, const void *key) {
    object *found = NULL;
    pthread_mutex_lock(&mutex);
    for (struct association *a = o ? o->associations : NULL; a; a = a->next)
        if (a->key == key)
            found = mock_retain(a->value);
    pthread_mutex_unlock(&mutex);
    return mock_autorelease(found);
}

/* What blocks on the stack name as their class. */
EXPORT void *_NSConcreteStackBlock[32];

/* ---- Names ---- */

/* One text for each selector, however often it is asked for. */
EXPORT selector sel_registerName(const char *name) {
    static const char *names[1 << 16];
    pthread_mutex_lock(&mutex);
    int n = 0;
    while (names[n] && strcmp(names[n], name) != 0)
        n++;
    if (!names[n])
        names[n] = strdup(name);
    pthread_mutex_unlock(&mutex);
    return names[n];
}

static object classes[2] = {{.kind = CLASS, .references = 1}, {.kind = CLASS, .references = 1}};

EXPORT object *objc_getClass(const char *name) {
    static const char *const names[] = {"NSString", "MTLCompileOptions"};
    if (mock_fails("objc_getClass"))
        return NULL;
    for (int n = 0; n < 2; n++)
        if (strcmp(name, names[n]) == 0)
            return &classes[n];
    mock_strange("a class that is unknown");
    return NULL;
}

/* ---- Messages ---- */

static void *zero(void) { return NULL; }

static void (*find(const method *methods, sort kind, selector name))(void) {
    for (; methods->selector; methods++)
        if (methods->kind == kind && strcmp(methods->selector, name) == 0)
            return methods->function;
    return NULL;
}

static object *retain(object *o, selector name) {
    (void)name;
    return mock_retain(o);
}

static void release(object *o, selector name) {
    (void)name;
    mock_release(o);
}

static bool responds(object *o, selector name, selector asked);

static void (*method_of(const object *o, selector name))(void) {
    static const struct {
        const char *selector;
        void (*function)(void);
    } every[] = {{"retain", (void (*)(void))retain},
                 {"release", (void (*)(void))release},
                 {"respondsToSelector:", (void (*)(void))responds}};
    for (size_t n = 0; n < sizeof every / sizeof *every; n++)
        if (strcmp(every[n].selector, name) == 0)
            return every[n].function;
    void (*found)(void) = find(mock_object_methods, o->kind, name);
    return found ? found : find(mock_command_methods, o->kind, name);
}

static bool responds(object *o, selector name, selector asked) {
    (void)name;
    if (strcmp(asked, "setMathMode:") == 0 && mock.macos < 15)
        return false;
    return method_of(o, asked) != NULL;
}

/* Called by objc_msgSend, which then jumps to what this returns, with the arguments as they came. */
__attribute__((used, visibility("hidden"))) void (*mock_lookup(object *o, selector name))(void) {
    if (!o)
        return (void (*)(void))zero;
    if (o->references < 1) {
        mock_strange("a message to an object that is gone");
        return (void (*)(void))zero;
    }
    void (*found)(void) = method_of(o, name);
    if (found)
        return found;
    fprintf(stderr, "mock: no method %s of kind %d\n", name, (int)o->kind);
    mock_strange("a message that its object does not understand");
    return (void (*)(void))zero;
}

#if defined(__x86_64__)
__asm__(".text\n"
        ".globl objc_msgSend\n"
        ".type objc_msgSend, @function\n"
        "objc_msgSend:\n"
        "    pushq %rdi\n"
        "    pushq %rsi\n"
        "    pushq %rdx\n"
        "    pushq %rcx\n"
        "    pushq %r8\n"
        "    pushq %r9\n"
        "    subq $8, %rsp\n" /* the stack is aligned to 16 bytes again */
        "    call mock_lookup\n"
        "    addq $8, %rsp\n"
        "    popq %r9\n"
        "    popq %r8\n"
        "    popq %rcx\n"
        "    popq %rdx\n"
        "    popq %rsi\n"
        "    popq %rdi\n"
        "    jmp *%rax\n"
        ".size objc_msgSend, .-objc_msgSend\n");
#elif defined(__aarch64__)
__asm__(".text\n"
        ".globl objc_msgSend\n"
        ".type objc_msgSend, %function\n"
        "objc_msgSend:\n"
        "    stp x29, x30, [sp, #-80]!\n"
        "    stp x0, x1, [sp, #16]\n"
        "    stp x2, x3, [sp, #32]\n"
        "    stp x4, x5, [sp, #48]\n"
        "    stp x6, x7, [sp, #64]\n"
        "    bl mock_lookup\n"
        "    mov x16, x0\n"
        "    ldp x0, x1, [sp, #16]\n"
        "    ldp x2, x3, [sp, #32]\n"
        "    ldp x4, x5, [sp, #48]\n"
        "    ldp x6, x7, [sp, #64]\n"
        "    ldp x29, x30, [sp], #80\n"
        "    br x16\n"
        ".size objc_msgSend, .-objc_msgSend\n");
#endif
