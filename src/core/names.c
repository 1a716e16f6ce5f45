/* See names.h. */
#include "names.h"
#include "../base/text.h"

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)

const char *fb_version(void) {
    return TEXT(FB_VERSION_MAJOR) "." TEXT(FB_VERSION_MINOR) "." TEXT(FB_VERSION_PATCH);
}

const char *fb_last_error(void) { return fb__error_text(); }

const char *fb_status_name(fb_status status) {
    switch (status) {
#define X(value)                                                                                             \
    case value:                                                                                              \
        return #value;
        FB__STATUS_LIST(X)
#undef X
    }
    return "?";
}

const char *fb_dtype_name(fb_dtype dtype) {
    switch (dtype) {
#define X(value, word, bytes)                                                                                \
    case value:                                                                                              \
        return word;
        FB__DTYPE_LIST(X)
#undef X
    }
    return "?";
}

const char *fb_device_name(fb_device device) {
    switch (device) {
#define X(value, word)                                                                                       \
    case value:                                                                                              \
        return word;
        FB__DEVICE_LIST(X)
#undef X
    }
    return "?";
}

const char *fb_route_name(fb_route route) {
    switch (route) {
#define X(value, word)                                                                                       \
    case value:                                                                                              \
        return word;
        FB__ROUTE_LIST(X)
#undef X
    }
    return "?";
}
