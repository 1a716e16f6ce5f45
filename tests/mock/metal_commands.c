/* The mock's queues, command buffers and encoders. What is committed runs when somebody waits, or when too
 * much is under way; dispatches between two barriers run from the last to the first, as an encoder that was
 * asked to be concurrent may. What a device with validation would end the process for is strange. */
#include "metal.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define mock mock_metal

/* ---- Running ---- */

static void record(const commands *c, const dispatch *d) {
    if (mock.dispatch_count < MOCK_DISPATCHES) {
        mock_dispatch *to = &mock.dispatches[mock.dispatch_count];
        *to = (mock_dispatch){.x = d->groups[0],
                              .y = d->groups[1],
                              .threads = d->threads,
                              .shared_bytes = d->threadgroup_bytes,
                              .buffer = c->number,
                              .barrier = d->barrier};
        snprintf(to->function, sizeof to->function, "%.31s", d->pipeline->function->name);
    }
    mock.dispatch_count++;
}

static bool run_dispatch(const commands *c, const dispatch *d, char *message, size_t size) {
    msl_launch launch = {.groups = {d->groups[0], d->groups[1], d->groups[2]},
                         .threads = (unsigned)d->threads,
                         .threadgroup_bytes = d->threadgroup_bytes};
    for (int n = 0; n < MSL_BUFFERS; n++) {
        const buffer *b = d->buffers[n];
        launch.buffers[n].at = b ? b->bytes + d->offsets[n] : d->bytes[n];
        launch.buffers[n].bytes = b ? b->length - d->offsets[n] : d->lengths[n];
    }
    const function *f = d->pipeline->function;
    if (strcmp(f->name, "fb_layout") != 0) /* of a plan, and not of a call */
        record(c, d);
#ifndef MOCK_MODEL
    else
        *(int *)launch.buffers[5].at = mock.layout;
#endif
    return mock_msl_run(mock_msl_find(f->library->code, f->name), &launch, message, size);
}

/* From barrier to barrier, each part backwards. */
static bool run_all(const commands *c, char *message, size_t size) {
    for (int start = 0, end; start < c->count; start = end) {
        for (end = start; end < c->count && c->at[end].barrier == c->at[start].barrier;)
            end++;
        for (int n = end - 1; n >= start; n--)
            if (!run_dispatch(c, &c->at[n], message, size))
                return false;
    }
    return true;
}

static void complete(commands *c) {
    char message[400] = "commit is to fail";
    const bool good = !c->is_failing && run_all(c, message, sizeof message);
    c->status = good ? COMPLETED : FAILED;
    if (!good) {
        c->error = mock_retain(mock_error(message, c->is_failing ? mock.fail_code : 3));
        if (!c->is_failing)
            mock_strange("a kernel did what no GPU may be given");
    }
    if (c->handler)
        c->handler->invoke(c->handler, c);
}

/* The oldest of the queue. Who holds the queue holds what is under way. */
static void run_oldest(queue *q) {
    commands *c = q->under_way[0];
    memmove(q->under_way, q->under_way + 1, (size_t)--q->count * sizeof *q->under_way);
    complete(c);
    mock_release(c);
}

static void run_until(commands *c) {
    while (c->status == COMMITTED && c->queue->count)
        run_oldest(c->queue);
}

/* ---- Queues ---- */

static object *new_queue(device *d, selector name) {
    (void)name;
    if (mock_fails("newCommandQueue"))
        return NULL;
    queue *q = mock_new(QUEUE, sizeof *q);
    q->device = d;
    return &q->head;
}

static object *queue_device(queue *q, selector name) {
    (void)name;
    return &q->device->head;
}

void mock_drop_queue(object *o) {
    queue *q = (queue *)o;
    while (q->count)
        run_oldest(q);
}

static object *command_buffer(queue *q, selector name) {
    static long number;
    (void)name;
    if (mock_fails("commandBuffer"))
        return NULL;
    if (q->count == UNDER_WAY_MOST)
        run_oldest(q);
    commands *c = mock_new(COMMANDS, sizeof *c);
    c->queue = mock_retain(q);
    c->number = ++number;
    return mock_autorelease(c);
}

/* ---- Command buffers ---- */

static void drop_dispatch(dispatch *d) {
    mock_release(d->pipeline);
    for (int n = 0; n < MSL_BUFFERS; n++) {
        mock_release(d->buffers[n]);
        free(d->bytes[n]);
    }
}

void mock_drop_commands(object *o) {
    commands *c = (commands *)o;
    if (c->is_open)
        mock_strange("a command buffer is gone, but its encoder was not ended");
    for (int n = 0; n < c->count; n++)
        drop_dispatch(&c->at[n]);
    free(c->at);
    free(c->handler);
    mock_release(c->error);
    mock_release(c->queue);
}

static object *commands_device(commands *c, selector name) {
    (void)name;
    return &c->queue->device->head;
}

static object *new_encoder(commands *c, selector name, integer type) {
    (void)name;
    if (mock_fails("computeCommandEncoderWithDispatchType:"))
        return NULL;
    if (type > 1 || c->is_open || c->status >= COMMITTED) {
        mock_strange("an encoder on a command buffer that has one, or that was committed");
        return NULL;
    }
    c->is_open = true;
    c->barriers++;
    encoder *e = mock_new(ENCODER, sizeof *e);
    e->commands = mock_retain(c);
    return mock_autorelease(e);
}

/* A call that fails leaves a command buffer that will fail. */
static void commit(commands *c, selector name) {
    (void)name;
    if (c->is_open || c->status >= COMMITTED)
        mock_strange("commit with an open encoder, or once more");
    c->is_failing = mock_fails("commit");
    c->status = COMMITTED;
    mock.committed++;
    if (c->queue->count == UNDER_WAY_MOST)
        run_oldest(c->queue);
    c->queue->under_way[c->queue->count++] = mock_retain(c);
}

static void wait_until_completed(commands *c, selector name) {
    (void)name;
    if (c->status < COMMITTED)
        mock_strange("a wait for a command buffer that was not committed");
    mock.waited++;
    run_until(c);
}

/* Copies the block, as blocks without helpers are copied. */
static void add_handler(commands *c, selector name, const block *handler) {
    extern void *_NSConcreteStackBlock[];
    (void)name;
    if (c->status >= COMMITTED || c->handler || handler->isa != _NSConcreteStackBlock || handler->flags) {
        mock_strange("a handler for what was committed, a second one, or no block on the stack");
        return;
    }
    c->handler = malloc(handler->size->bytes);
    memcpy(c->handler, handler, handler->size->bytes);
}

static object *queue_of(commands *c, selector name) {
    (void)name;
    return &c->queue->head;
}

static integer status(commands *c, selector name) {
    (void)name;
    return c->status;
}

static object *get_error(commands *c, selector name) {
    (void)name;
    return c->error;
}

/* ---- Encoders ---- */

void mock_drop_encoder(object *o) {
    encoder *e = (encoder *)o;
    if (!e->is_ended)
        mock_strange("an encoder is gone that was not ended");
    drop_dispatch(&e->next);
    mock_release(e->commands);
}

static void set_pipeline(encoder *e, selector name, pipeline *p) {
    (void)name;
    mock_retain(p);
    mock_release(e->next.pipeline);
    e->next.pipeline = p;
}

static bool is_index(integer index) {
    if (index >= MSL_BUFFERS)
        mock_strange("an index of a buffer above 30");
    return index < MSL_BUFFERS;
}

static void set_buffer(encoder *e, selector name, buffer *b, integer offset, integer index) {
    (void)name;
    if (!is_index(index))
        return;
    if (b && (b->head.kind != BUFFER || offset > b->length || b->device != e->commands->queue->device))
        mock_strange("setBuffer: with what is no buffer of this device, or an offset past its end");
    mock_retain(b);
    mock_release(e->next.buffers[index]);
    e->next.buffers[index] = b;
    e->next.offsets[index] = offset;
}

static void set_bytes(encoder *e, selector name, const void *bytes, integer length, integer index) {
    (void)name;
    if (!is_index(index) || !length || length > BYTES_MOST) {
        mock_strange("setBytes: of none, or more than 4096");
        return;
    }
    free(e->next.bytes[index]);
    e->next.bytes[index] = malloc(length);
    memcpy(e->next.bytes[index], bytes, length);
    e->next.lengths[index] = length;
}

static void set_threadgroup(encoder *e, selector name, integer length, integer index) {
    (void)name;
    if (index || length % 16 || length > 32768)
        mock_strange("setThreadgroupMemoryLength: at another index than 0, not of 16 bytes, or above 32768");
    e->next.threadgroup_bytes = length;
}

typedef struct size {
    integer width, height, depth;
} size;

static dispatch copy(const dispatch *from) {
    dispatch to = *from;
    mock_retain(to.pipeline);
    for (int n = 0; n < MSL_BUFFERS; n++) {
        mock_retain(to.buffers[n]);
        if (from->bytes[n]) {
            to.bytes[n] = malloc(from->lengths[n]);
            memcpy(to.bytes[n], from->bytes[n], from->lengths[n]);
        }
    }
    return to;
}

static void dispatch_threadgroups(encoder *e, selector name, size groups, size threads) {
    commands *c = e->commands;
    (void)name;
    if (e->is_ended || !e->next.pipeline || c->count == COMMANDS_MOST) {
        mock_strange("a dispatch after the end, without a pipeline, or too many");
        return;
    }
    if (!groups.width || !groups.height || groups.depth != 1 || !threads.width || threads.height != 1 ||
        threads.depth != 1 || threads.width > e->next.pipeline->threads ||
        groups.width * threads.width >= 1UL << 32)
        mock_strange("a dispatch of no threadgroups, or of more threads than the pipeline allows");
    if (!c->at)
        c->at = calloc(COMMANDS_MOST, sizeof *c->at);
    dispatch *d = &c->at[c->count++];
    *d = copy(&e->next);
    d->groups[0] = groups.width, d->groups[1] = groups.height, d->groups[2] = groups.depth;
    d->threads = threads.width;
    d->barrier = c->barriers;
}

static void barrier(encoder *e, selector name, integer scope) {
    (void)name;
    if (scope != 1) /* MTLBarrierScopeBuffers */
        mock_strange("memoryBarrierWithScope: of something else than buffers");
    e->commands->barriers++;
}

static void end(encoder *e, selector name) {
    (void)name;
    if (e->is_ended)
        mock_strange("endEncoding once more");
    e->is_ended = true;
    e->commands->is_open = false;
}

#define ROW(kind, selector, function)                                                                        \
    { kind, selector, (void (*)(void))function }

const method mock_command_methods[] = {
    ROW(DEVICE, "newCommandQueue", new_queue),
    ROW(QUEUE, "commandBuffer", command_buffer),
    ROW(QUEUE, "device", queue_device),
    ROW(COMMANDS, "device", commands_device),
    ROW(COMMANDS, "computeCommandEncoderWithDispatchType:", new_encoder),
    ROW(COMMANDS, "commit", commit),
    ROW(COMMANDS, "waitUntilCompleted", wait_until_completed),
    ROW(COMMANDS, "status", status),
    ROW(COMMANDS, "error", get_error),
    ROW(COMMANDS, "addCompletedHandler:", add_handler),
    ROW(COMMANDS, "commandQueue", queue_of),
    ROW(ENCODER, "setComputePipelineState:", set_pipeline),
    ROW(ENCODER, "setBuffer:offset:atIndex:", set_buffer),
    ROW(ENCODER, "setBytes:length:atIndex:", set_bytes),
    ROW(ENCODER, "setThreadgroupMemoryLength:atIndex:", set_threadgroup),
    ROW(ENCODER, "dispatchThreadgroups:threadsPerThreadgroup:", dispatch_threadgroups),
    ROW(ENCODER, "memoryBarrierWithScope:", barrier),
    ROW(ENCODER, "endEncoding", end),
    {0, NULL, NULL},
};
