/* FB_TRY: passes a failed status on. Floor: core. */
#ifndef FB_CORE_TRY_H
#define FB_CORE_TRY_H

#define FB_TRY(call)                                                                                         \
    do {                                                                                                     \
        fb_status status_ = (call);                                                                          \
        if (status_ != FB_OK)                                                                                \
            return status_;                                                                                  \
    } while (0)

#endif
