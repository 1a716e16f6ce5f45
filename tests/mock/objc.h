/* Inside the mock of Metal: objects, and what classes are made of. Next: objc.c (the runtime), then
 * metal_objects.c and metal_commands.c (the classes). */
#ifndef TESTS_MOCK_OBJC_H
#define TESTS_MOCK_OBJC_H

#include "mock.h"
#include <stdbool.h>
#include <stdint.h>

typedef const char *selector;
typedef unsigned long integer; /* NSUInteger */

typedef enum sort {
    CLASS,
    STRING,
    ARRAY,
    ERROR,
    DEVICE,
    OPTIONS,
    LIBRARY,
    FUNCTION,
    PIPELINE,
    BUFFER,
    QUEUE,
    COMMANDS,
    ENCODER,
    KINDS
} sort;

/* The head of every object. One that is released for good stays in memory, so that who still speaks to it is
 * found out. */
typedef struct object {
    sort kind;
    int references; /* 0: gone */
    struct object *next;
    struct association {
        const void *key;
        struct object *value;
        struct association *next;
    } * associations;
} object;

/* A method. `function` has the type that the caller casts objc_msgSend to. */
typedef struct method {
    sort kind;
    const char *selector;
    void (*function)(void);
} method;

extern const method mock_object_methods[], mock_command_methods[]; /* rows of NULL end them */
extern void (*const mock_dealloc[KINDS])(object *);                /* NULL: nothing to do */

extern mock_metal_state mock_metal;

enum { MOCK_DEVICES = 8 };
extern object *const mock_devices[MOCK_DEVICES];

/* Is this the call that fails? */
bool mock_fails(const char *call);
/* Something that Metal would have ended the process for, or answered with nonsense. */
void mock_strange(const char *what);

/* Of `size` bytes, zeros behind the head; one reference, which is the caller's or the pool's. */
void *mock_new(sort kind, size_t size);
void *mock_autorelease(void *object);
void *mock_retain(void *object);
void mock_release(void *object);

/* A block, as the compiler lays it out. */
typedef struct block {
    void *isa;
    int flags, reserved;
    void (*invoke)(struct block *self, void *argument);
    const struct { unsigned long reserved, bytes; } * size;
} block;

/* An NSError in the pool. */
object *mock_error(const char *words, int code);

#endif
