/* DLPack in: see flashback_dlpack.h. Floor: api. */
#include "../base/text.h"
#include "../core/error.h"
#include "flashback_dlpack.h"
#include <stdbool.h>

enum { DL_CPU = 1, DL_CUDA = 2, DL_METAL = 8, DL_FLOAT = 2, DL_BFLOAT = 4 };

/* Where batch, heads, length and width stand in a shape. */
static const int order[][4] = {[FB_BHLD] = {0, 1, 2, 3}, [FB_BLHD] = {0, 2, 1, 3}};

static fb_status check_layout(fb_layout layout) {
    if (layout != FB_BHLD && layout != FB_BLHD)
        return fb__error(FB_INVALID, "layout is %d, expected FB_BHLD or FB_BLHD", (int)layout);
    return FB_OK;
}

fb_status fb_strides_from_dlpack(fb_strides *strides, fb_layout layout, const fb_dltensor *t,
                                 const char *name) {
    fb__error_clear();
    FB_TRY(check_layout(layout));
    if (!strides)
        return fb__error(FB_INVALID, "strides is NULL; pass the address of a fb_strides");
    if (!t || !t->shape)
        return fb__error(FB_INVALID, "%s is NULL, expected a tensor of 4 dimensions", name);
    if (t->ndim != 4)
        return fb__error(FB_INVALID, "%s has %d dimensions, expected 4: %s", name, t->ndim,
                         layout == FB_BHLD ? "[batch, heads, length, head_dim]"
                                           : "[batch, length, heads, head_dim]");
    int64_t dense[4], stride[4], step = 1;
    bool empty = false;
    for (int i = 3; i >= 0; i--) {
        if (t->shape[i] < 0)
            return fb__error(FB_INVALID, "%s has size %lld in dimension %d, expected 0 or more", name,
                             (long long)t->shape[i], i);
        empty |= t->shape[i] == 0;
        dense[i] = step;
        if (!empty && __builtin_mul_overflow(step, t->shape[i], &step))
            return fb__error(FB_INVALID, "overflow: %s has more elements than can be addressed", name);
    }
    for (int i = 0; i < 4; i++) {
        int64_t s = t->strides ? t->strides[i] : dense[i];
        bool used = t->shape[i] > 1 && !empty;
        if (used && s < 0)
            return fb__error(FB_INVALID,
                             "%s has stride %lld in dimension %d; negative strides are not supported, copy "
                             "the tensor",
                             name, (long long)s, i);
        if (i == 3 && used && s != 1)
            return fb__error(FB_INVALID,
                             "%s has stride %lld in its last dimension, expected 1; make it contiguous", name,
                             (long long)s);
        stride[i] = !used ? 1 : s ? s : FB_BROADCAST;
    }
    const int *at = order[layout];
    *strides = (fb_strides){stride[at[0]], stride[at[1]], stride[at[2]]};
    return FB_OK;
}

static fb_status take_type(fb_desc *d, const fb_dltensor *t, const char *name) {
    if (t->dtype.lanes == 1 && t->dtype.code == DL_FLOAT && t->dtype.bits == 32)
        d->dtype = FB_F32;
    else if (t->dtype.lanes == 1 && t->dtype.code == DL_FLOAT && t->dtype.bits == 16)
        d->dtype = FB_F16;
    else if (t->dtype.lanes == 1 && t->dtype.code == DL_FLOAT && t->dtype.bits == 64)
        d->dtype = FB_F64;
    else if (t->dtype.lanes == 1 && t->dtype.code == DL_BFLOAT && t->dtype.bits == 16)
        d->dtype = FB_BF16;
    else
        return fb__error(FB_INVALID,
                         "%s has DLPack type (code %d, bits %d, lanes %d), expected f32, f16, bf16 or f64",
                         name, t->dtype.code, t->dtype.bits, t->dtype.lanes);
    switch (t->device.device_type) {
    case DL_CPU:
        d->device = FB_CPU;
        break;
    case DL_CUDA:
        d->device = FB_CUDA;
        break;
    case DL_METAL:
        d->device = FB_METAL;
        break;
    default:
        return fb__error(FB_INVALID, "%s lies on DLPack device %d, expected 1 (CPU), 2 (CUDA) or 8 (Metal)",
                         name, t->device.device_type);
    }
    d->index = t->device.device_id;
    return FB_OK;
}

fb_status fb_desc_from_dlpack(fb_desc *desc, fb_layout layout, const fb_dltensor *q, const fb_dltensor *k,
                              const fb_dltensor *v) {
    fb__error_clear();
    if (!desc)
        return fb__error(FB_INVALID, "desc is NULL; pass a fb_desc set up by fb_desc_init");
    fb_desc d = *desc, other = *desc;
    FB_TRY(fb_strides_from_dlpack(&d.q, layout, q, "q"));
    FB_TRY(fb_strides_from_dlpack(&d.k, layout, k, "k"));
    FB_TRY(fb_strides_from_dlpack(&d.v, layout, v, "v"));
    FB_TRY(take_type(&d, q, "q"));
    const struct {
        const char *name;
        const fb_dltensor *t;
    } rest[] = {{"k", k}, {"v", v}};
    for (int i = 0; i < 2; i++) {
        FB_TRY(take_type(&other, rest[i].t, rest[i].name));
        if (other.dtype != d.dtype)
            return fb__error(FB_INVALID, "%s is %s and q is %s; all three must have one dtype", rest[i].name,
                             fb_dtype_name(other.dtype), fb_dtype_name(d.dtype));
        if (other.device != d.device || other.index != d.index)
            return fb__error(FB_INVALID, "%s lies on %s %d and q on %s %d; all three must be on one device",
                             rest[i].name, fb_device_name(other.device), other.index,
                             fb_device_name(d.device), d.index);
    }
    static const char *const words[] = {"batch", "heads", "length", "head_dim"};
    const int *at = order[layout];
    for (int i = 0; i < 4; i += 3)
        if (q->shape[at[i]] != k->shape[at[i]])
            return fb__error(FB_INVALID, "k has %s %lld and q has %lld; they must be equal", words[i],
                             (long long)k->shape[at[i]], (long long)q->shape[at[i]]);
    for (int i = 0; i < 3; i++)
        if (k->shape[at[i]] != v->shape[at[i]])
            return fb__error(FB_INVALID, "v has %s %lld and k has %lld; they must be equal", words[i],
                             (long long)v->shape[at[i]], (long long)k->shape[at[i]]);
    d.batch = q->shape[at[0]], d.heads_q = q->shape[at[1]], d.len_q = q->shape[at[2]],
    d.head_dim = q->shape[at[3]];
    d.heads_kv = k->shape[at[1]], d.len_k = k->shape[at[2]], d.head_dim_v = v->shape[at[3]];
    *desc = d;
    return FB_OK;
}

fb_ref fb_ref_from_dlpack(const fb_dltensor *t) {
    return t ? (fb_ref){t->data, t->byte_offset} : (fb_ref){NULL, 0};
}
