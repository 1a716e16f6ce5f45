/* See device.h. */
#include "device.h"
#include <stdio.h>

/* MTLGPUFamilyApple7 is 1007; families include the ones before. */
enum { FAMILY = 1000, OLDEST = 7, NEWEST = 10 };

static int find_family(const fb__objc *o, fb__id device) {
    for (int family = NEWEST; family >= OLDEST; family--)
        if (FB__SEND(o, supports_family, device, FAMILY + family))
            return family;
    return 0;
}

static void describe(const fb__objc *o, fb__metal_device *d) {
    const char *name = FB__GET(o, utf8, FB__GET(o, name, d->object));
    snprintf(d->name, sizeof d->name, "%s", name ? name : "a GPU without a name");
    d->registry = FB__GET(o, registry_id, d->object);
    d->family = find_family(o, d->object);
    d->threadgroup_bytes = FB__GET(o, threadgroup_bytes, d->object);
    d->buffer_bytes = FB__GET(o, buffer_bytes, d->object);
    d->working_set = FB__GET(o, working_set, d->object);
}

int fb__metal_device_count(const fb__objc *o) {
    fb__id devices = o->copy_devices();
    const int count = (int)FB__GET(o, count, devices);
    fb__objc_release(o, devices);
    return count;
}

fb_status fb__metal_device_open(const fb__objc *o, const char *argument, int index, fb__metal_device *d) {
    fb__id devices = o->copy_devices();
    const int count = (int)FB__GET(o, count, devices);
    *d = (fb__metal_device){.ordinal = index};
    if (index >= 0 && index < count)
        d->object = FB__GET(o, retain, FB__SEND(o, at, devices, (fb__uint)index));
    fb__objc_release(o, devices);
    if (d->object) {
        describe(o, d);
        return FB_OK;
    }
    if (count < 1)
        return fb__error(FB_NO_DEVICE, "there is no Metal device (MTLCopyAllDevices finds none); virtual "
                                       "machines often have none, and so do sandboxes");
    return fb__error(FB_NO_DEVICE, "%s is %d, but there %s %d Metal device%s: it must be %s%d", argument,
                     index, count == 1 ? "is" : "are", count, count == 1 ? "" : "s",
                     count == 1 ? "" : "0 to ", count - 1);
}

void fb__metal_device_close(const fb__objc *o, fb__metal_device *d) {
    fb__objc_release(o, d->object);
    d->object = NULL;
}

fb_status fb__metal_device_check(const fb__metal_device *d) {
    if (d->family)
        return FB_OK;
    return fb__error(FB_UNSUPPORTED,
                     "device %d, %s, is no GPU of Apple's (family Apple7, M1, or newer); metal needs its "
                     "matrices of simdgroups, and memory that is shared with the processor",
                     d->ordinal, d->name);
}
