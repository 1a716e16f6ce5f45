/* The objects of the mock of Metal. See objc.h. */
#ifndef TESTS_MOCK_METAL_H
#define TESTS_MOCK_METAL_H

#include "msl.h"
#include "objc.h"

typedef struct string {
    object head;
    char *text;
} string;

typedef struct array {
    object head;
    object *at[8];
    integer count;
} array;

typedef struct failure {
    object head;
    char words[512];
    int code;
} failure;

typedef struct device {
    object head;
    int index;
} device;

typedef struct options {
    object head;
    integer language;
    int fast_math; /* -1: nobody said */
} options;

typedef struct library {
    object head;
    char *text;
    void *code;
} library;

typedef struct function {
    object head;
    library *library;
    char name[64];
} function;

typedef struct pipeline {
    object head;
    function *function;
    integer threads;
} pipeline;

typedef struct buffer {
    object head;
    device *device;
    unsigned char *bytes;
    integer length;
    bool is_private; /* the host sees nothing of it */
} buffer;

/* ---- Commands ---- */

enum { BYTES_MOST = 4096, COMMANDS_MOST = 256, UNDER_WAY_MOST = 64 };

typedef struct dispatch {
    pipeline *pipeline;
    buffer *buffers[MSL_BUFFERS];
    integer offsets[MSL_BUFFERS], lengths[MSL_BUFFERS]; /* of setBytes */
    unsigned char *bytes[MSL_BUFFERS];
    integer threadgroup_bytes, groups[3], threads;
    long barrier;
} dispatch;

typedef struct commands {
    object head;
    struct queue *queue;
    long number;
    integer status; /* as MTLCommandBufferStatus */
    object *error;
    block *handler;           /* to be called when it is done */
    bool is_open, is_failing; /* an encoder is at work; it was decided at commit that this will fail */
    dispatch *at;
    int count;
    long barriers; /* and encoders, so far: what is ordered */
} commands;

typedef struct queue {
    object head;
    device *device;
    commands *under_way[UNDER_WAY_MOST]; /* oldest first */
    int count;
} queue;

typedef struct encoder {
    object head;
    commands *commands;
    bool is_ended;
    dispatch next; /* what is set */
} encoder;

enum { ENQUEUED = 1, COMMITTED = 2, COMPLETED = 4, FAILED = 5 };

#endif
