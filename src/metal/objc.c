/* See objc.h. */
#include "objc.h"
#include <dlfcn.h>
#include <string.h>

/* Elsewhere the same names stand for what imitates them, and lie where the loader looks. */
#ifdef __APPLE__
#define RUNTIME "/usr/lib/libobjc.A.dylib"
#define FRAMEWORK "/System/Library/Frameworks/Metal.framework/Metal"
#define WHERE "macOS 14 or newer has it"
#else
#define RUNTIME "libobjc.A.dylib"
#define FRAMEWORK "Metal"
#define WHERE "Metal is a part of macOS, and this is another system; take device cpu, or cuda"
#endif

static const struct {
    const char *symbol;
    size_t offset;
} functions[] = {
#define X(name, symbol, result, parameters) {symbol, offsetof(fb__objc, name)},
    FB__OBJC_FUNCTIONS(X)
#undef X
};
enum { FUNCTIONS = sizeof functions / sizeof *functions };

static const struct {
    const char *selector;
    size_t call, sel;
} methods[] = {
#define X(name, selector, result, parameters)                                                                \
    {selector, offsetof(fb__objc, call.name), offsetof(fb__objc, sel.name)},
    FB__OBJC_METHODS(X)
#undef X
};
enum { METHODS = sizeof methods / sizeof *methods };

/* The handles are given back at once, as the libraries stay while the process lives (RTLD_NODELETE). */
static fb_status load(const char *path, void **library) {
    *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (*library)
        return FB_OK;
    const char *reason = dlerror();
    return fb__error(FB_NO_DEVICE, "no Metal for device metal: %s; " WHERE, reason ? reason : path);
}

/* ISO C knows no conversion between pointers to objects and to functions; POSIX gives both one form. */
static fb_status find(fb__objc *o, void *runtime, void *framework) {
    o->stack_block = dlsym(runtime, "_NSConcreteStackBlock"); /* of what libobjc stands on */
    if (!o->stack_block)
        return fb__error(FB_NO_DEVICE, "device metal: %s has no _NSConcreteStackBlock; " WHERE, RUNTIME);
    for (int i = 0; i < FUNCTIONS; i++) {
        const bool metal = strncmp(functions[i].symbol, "MTL", 3) == 0;
        void *function = dlsym(metal ? framework : runtime, functions[i].symbol);
        if (!function)
            return fb__error(FB_NO_DEVICE, "device metal: %s has no function %s; " WHERE,
                             metal ? FRAMEWORK : RUNTIME, functions[i].symbol);
        memcpy((char *)o + functions[i].offset, &function, sizeof function);
    }
    for (int i = 0; i < METHODS; i++) {
        fb__sel selector = o->register_name(methods[i].selector);
        memcpy((char *)o + methods[i].call, &o->message, sizeof o->message);
        memcpy((char *)o + methods[i].sel, &selector, sizeof selector);
    }
    return FB_OK;
}

fb_status fb__objc_open(fb__objc *o) {
    void *runtime, *framework;
    *o = (fb__objc){0};
    FB_TRY(load(RUNTIME, &runtime));
    fb_status status = load(FRAMEWORK, &framework);
    if (status == FB_OK) {
        status = find(o, runtime, framework);
        dlclose(framework);
    }
    dlclose(runtime);
    return status;
}

fb_status fb__objc_string(const fb__objc *o, const char *text, fb__id *string) {
    *string = FB__SEND(o, string, o->get_class("NSString"), text);
    return *string ? FB_OK
                   : fb__error(FB_DEVICE,
                               "stringWithUTF8String: failed: no NSString of %zu bytes; is the "
                               "text UTF-8?",
                               strlen(text));
}

const char *fb__objc_reason(const fb__objc *o, fb__id error) {
    const char *words = FB__GET(o, utf8, FB__GET(o, description, error));
    return words && *words ? words : "no reason given";
}
