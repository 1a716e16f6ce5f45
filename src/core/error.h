/* Refusals: fb__error sets the sentence and is the status, so that a refusal is one statement; FB_TRY passes
 * one on. Floor: core. */
#ifndef FB_CORE_ERROR_H
#define FB_CORE_ERROR_H

#include "../base/text.h"
#include "flashback.h"

#define fb__error(status, ...) (fb__error_set(__VA_ARGS__), (fb_status)(status))

#define FB_TRY(call)                                                                                         \
    do {                                                                                                     \
        fb_status status_ = (call);                                                                          \
        if (status_ != FB_OK)                                                                                \
            return status_;                                                                                  \
    } while (0)

#endif
