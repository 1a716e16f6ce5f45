/* Metal from C: Apple's Objective-C runtime and the Metal framework, found at run time, so that no header of
 * Apple's is needed to build and nothing to link. A message is a call of objc_msgSend by exactly the type of
 * the method; the list of methods below has these types, after Apple's public documentation. Floor: metal.
 * Next: device.h, the first user. */
#ifndef FB_METAL_OBJC_H
#define FB_METAL_OBJC_H

#include "../core/error.h"
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void *fb__id;
typedef void *fb__sel;
typedef unsigned long fb__uint; /* NSUInteger */
typedef long fb__int;           /* NSInteger */

#if defined(__APPLE__) && !defined(__aarch64__)
typedef signed char fb__bool; /* BOOL */
#else
typedef bool fb__bool;
#endif

/* MTLSize */
typedef struct fb__size {
    fb__uint width, height, depth;
} fb__size;

/* Functions: name, name in the library, result, parameters. The last one is Metal's, the others are of
 * libobjc. What is associated with an object is held as long as that lives. */
#define FB__OBJC_FUNCTIONS(X)                                                                                \
    X(get_class, "objc_getClass", fb__id, (const char *name))                                                \
    X(register_name, "sel_registerName", fb__sel, (const char *name))                                        \
    X(message, "objc_msgSend", void, (void))                                                                 \
    X(push, "objc_autoreleasePoolPush", void *, (void))                                                      \
    X(pop, "objc_autoreleasePoolPop", void, (void *pool))                                                    \
    X(associated, "objc_getAssociatedObject", fb__id, (fb__id object, const void *key))                      \
    X(associate, "objc_setAssociatedObject", void,                                                           \
      (fb__id object, const void *key, fb__id value, uintptr_t policy))                                      \
    X(copy_devices, "MTLCopyAllDevices", fb__id, (void))

enum { FB__OBJC_RETAIN = 01401 }; /* OBJC_ASSOCIATION_RETAIN, the policy of `associate` */

#define FB__SELF fb__id self, fb__sel name

/* Methods: name, selector, result, parameters. Those that begin with new_ or copy_ hand over a reference, the
 * results of others last as long as the pool around the call. None returns a struct. */
#define FB__OBJC_METHODS(X)                                                                                  \
    X(new_object, "new", fb__id, (FB__SELF))                                                                 \
    X(retain, "retain", fb__id, (FB__SELF))                                                                  \
    X(release, "release", void, (FB__SELF))                                                                  \
    X(responds, "respondsToSelector:", fb__bool, (FB__SELF, fb__sel selector))                               \
    /* NSString, NSArray, NSError */                                                                         \
    X(string, "stringWithUTF8String:", fb__id, (FB__SELF, const char *text))                                 \
    X(utf8, "UTF8String", const char *, (FB__SELF))                                                          \
    X(count, "count", fb__uint, (FB__SELF))                                                                  \
    X(at, "objectAtIndex:", fb__id, (FB__SELF, fb__uint index))                                              \
    X(description, "localizedDescription", fb__id, (FB__SELF))                                               \
    X(code, "code", fb__int, (FB__SELF))                                                                     \
    /* MTLDevice; the last two belong to what lies on a device as well */                                    \
    X(registry_id, "registryID", uint64_t, (FB__SELF))                                                       \
    X(supports_family, "supportsFamily:", fb__bool, (FB__SELF, fb__int family))                              \
    X(threadgroup_bytes, "maxThreadgroupMemoryLength", fb__uint, (FB__SELF))                                 \
    X(buffer_bytes, "maxBufferLength", fb__uint, (FB__SELF))                                                 \
    X(working_set, "recommendedMaxWorkingSetSize", uint64_t, (FB__SELF))                                     \
    X(new_queue, "newCommandQueue", fb__id, (FB__SELF))                                                      \
    X(new_buffer, "newBufferWithLength:options:", fb__id, (FB__SELF, fb__uint bytes, fb__uint options))      \
    X(new_library, "newLibraryWithSource:options:error:", fb__id,                                            \
      (FB__SELF, fb__id source, fb__id options, fb__id * error))                                             \
    X(new_pipeline, "newComputePipelineStateWithFunction:error:", fb__id,                                    \
      (FB__SELF, fb__id function, fb__id * error))                                                           \
    X(name, "name", fb__id, (FB__SELF))                                                                      \
    X(device, "device", fb__id, (FB__SELF))                                                                  \
    /* MTLCompileOptions, MTLLibrary, MTLComputePipelineState */                                             \
    X(set_language, "setLanguageVersion:", void, (FB__SELF, fb__uint version))                               \
    X(set_math_mode, "setMathMode:", void, (FB__SELF, fb__int mode))                                         \
    X(set_fast_math, "setFastMathEnabled:", void, (FB__SELF, fb__bool enabled))                              \
    X(new_function, "newFunctionWithName:", fb__id, (FB__SELF, fb__id function))                             \
    X(threads, "maxTotalThreadsPerThreadgroup", fb__uint, (FB__SELF))                                        \
    X(simd_width, "threadExecutionWidth", fb__uint, (FB__SELF))                                              \
    X(static_bytes, "staticThreadgroupMemoryLength", fb__uint, (FB__SELF))                                   \
    /* MTLBuffer */                                                                                          \
    X(contents, "contents", void *, (FB__SELF))                                                              \
    X(length, "length", fb__uint, (FB__SELF))                                                                \
    /* MTLCommandQueue, MTLCommandBuffer */                                                                  \
    X(command_buffer, "commandBuffer", fb__id, (FB__SELF))                                                   \
    X(encoder, "computeCommandEncoderWithDispatchType:", fb__id, (FB__SELF, fb__uint type))                  \
    X(commit, "commit", void, (FB__SELF))                                                                    \
    X(wait, "waitUntilCompleted", void, (FB__SELF))                                                          \
    X(status, "status", fb__uint, (FB__SELF))                                                                \
    X(error, "error", fb__id, (FB__SELF))                                                                    \
    X(queue, "commandQueue", fb__id, (FB__SELF))                                                             \
    X(add_handler, "addCompletedHandler:", void, (FB__SELF, const void *block))                              \
    /* MTLComputeCommandEncoder */                                                                           \
    X(set_pipeline, "setComputePipelineState:", void, (FB__SELF, fb__id pipeline))                           \
    X(set_buffer, "setBuffer:offset:atIndex:", void,                                                         \
      (FB__SELF, fb__id buffer, fb__uint offset, fb__uint index))                                            \
    X(set_bytes, "setBytes:length:atIndex:", void,                                                           \
      (FB__SELF, const void *bytes, fb__uint length, fb__uint index))                                        \
    X(set_threadgroup, "setThreadgroupMemoryLength:atIndex:", void,                                          \
      (FB__SELF, fb__uint length, fb__uint index))                                                           \
    X(dispatch, "dispatchThreadgroups:threadsPerThreadgroup:", void,                                         \
      (FB__SELF, fb__size threadgroups, fb__size threads))                                                   \
    X(barrier, "memoryBarrierWithScope:", void, (FB__SELF, fb__uint scope))                                  \
    X(end, "endEncoding", void, (FB__SELF))

typedef struct fb__objc {
    void *stack_block; /* _NSConcreteStackBlock: the class of blocks that are on the stack */
#define X(name, symbol, result, parameters) result(*name) parameters;
    FB__OBJC_FUNCTIONS(X)
#undef X
    /* objc_msgSend, as the type of each method; and its selector. */
    struct {
#define X(name, selector, result, parameters) result(*name) parameters;
        FB__OBJC_METHODS(X)
#undef X
    } call;
    struct {
#define X(name, selector, result, parameters) fb__sel name;
        FB__OBJC_METHODS(X)
#undef X
    } sel;
} fb__objc;

/* FB__GET(o, name, device): a message without arguments. FB__SEND(o, at, devices, 0): one with. To NULL they
 * are 0. */
#define FB__GET(o, method, self) ((o)->call.method((self), (o)->sel.method))
#define FB__SEND(o, method, self, ...) ((o)->call.method((self), (o)->sel.method, __VA_ARGS__))

/* Loads both libraries. Cheap when that has happened before; nothing is kept but what is in *o. FB_NO_DEVICE
 * with a sentence saying what is missing. */
fb_status fb__objc_open(fb__objc *o);

/* Everything that sends messages does so inside a pool: what is not handed over goes with it.
 *
 *     void *pool = fb__objc_enter(&o);
 *     ...
 *     fb__objc_leave(&o, pool);
 */
static inline void *fb__objc_enter(const fb__objc *o) { return o->push(); }
static inline void fb__objc_leave(const fb__objc *o, void *pool) { o->pop(pool); }

static inline void fb__objc_release(const fb__objc *o, fb__id object) {
    if (object)
        FB__GET(o, release, object);
}

/* An NSString in the pool; FB_DEVICE if there is none to be had. */
fb_status fb__objc_string(const fb__objc *o, const char *text, fb__id *string);

/* The words of an NSError, or of none: "no reason given". They last as long as the pool. */
const char *fb__objc_reason(const fb__objc *o, fb__id error);

/* Does the object have the method? */
#define FB__RESPONDS(o, object, method) FB__SEND(o, responds, object, (o)->sel.method)

#endif
