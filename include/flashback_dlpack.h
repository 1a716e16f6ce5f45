/* DLPack in: fills a descriptor and references from DLTensors, without copying anything.
 *
 * fb_dltensor has the memory layout of DLTensor (DLPack 1.x; also 0.x), so that no dlpack.h is needed here;
 * cast: fb_desc_from_dlpack(&desc, (const fb_dltensor *)q, (const fb_dltensor *)k, (const fb_dltensor *)v);
 * Tensors are borrowed for the call only. Layout names the order of the dimensions, since equal sizes would
 * hide a mistake: FB_BHLD is [batch, heads, length, head_dim], FB_BLHD is [batch, length, heads, head_dim].
 */
#ifndef FLASHBACK_DLPACK_H
#define FLASHBACK_DLPACK_H

#include "flashback.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct fb_dltensor {
    void *data;
    struct {
        int32_t device_type; /* 1 CPU, 2 CUDA, 8 Metal */
        int32_t device_id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code; /* 2 float, 4 bfloat */
        uint8_t bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape;
    int64_t *strides; /* in elements; NULL = contiguous */
    uint64_t byte_offset;
} fb_dltensor;

typedef enum fb_layout { FB_BHLD = 0, FB_BLHD = 1 } fb_layout;

/* Sets device, index, dtype, all dimensions and the strides of q, k and v in *desc, which fb_desc_init has
 * set up; everything else stays. Errors (FB_INVALID) name the tensor, the dimension and the value: ranks
 * other than 4, shapes that do not belong together, mixed devices or dtypes, a last stride other than 1,
 * negative strides. */
FB_API fb_status fb_desc_from_dlpack(fb_desc *desc, fb_layout layout, const fb_dltensor *q,
                                     const fb_dltensor *k, const fb_dltensor *v);

/* Strides of one 4-dimensional tensor (out, dout, a gradient) in the form of fb_desc. `name` is used in
 * errors. */
FB_API fb_status fb_strides_from_dlpack(fb_strides *strides, fb_layout layout, const fb_dltensor *tensor,
                                        const char *name);

/* Where the data of the tensor lies. NULL gives a NULL reference. */
FB_API fb_ref fb_ref_from_dlpack(const fb_dltensor *tensor);

#ifdef __cplusplus
}
#endif
#endif
