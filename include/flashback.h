/* flashback: exact attention for training, forward and backward, in O(L) memory.
 *
 *     O = softmax(scale * Q K^T + bias, masked) V        and its vector-Jacobian product
 *
 * This header is the whole API and its manual. It is plain C, uses pointers and integers only, and can be
 * called as it is from C, C++, ctypes, bun:ffi or N-API.
 *
 * USAGE
 *
 *     fb_desc desc;                                   // the problem: numbers only
 *     fb_desc_init(&desc, sizeof desc);               // defaults: CPU, f32, contiguous, scale 1/sqrt(D), no
 * mask desc.batch = 2;  desc.heads_q = 8;  desc.heads_kv = 2; desc.len_q = desc.len_k = 1024;  desc.head_dim
 * = desc.head_dim_v = 64; desc.window = fb_window_causal();
 *
 *     fb_plan *plan;                                  // the decision: which kernels, how much workspace
 *     if (fb_plan_create(&plan, &desc) != FB_OK) { puts(fb_last_error()); return 1; }
 *
 *     fb_io io;                                       // the data: one pointer per tensor
 *     fb_io_init(&io, sizeof io);
 *     io.q.data = q;  io.k.data = k;  io.v.data = v;  io.out.data = out;  io.lse.data = lse;
 *     io.workspace_size = fb_plan_workspace(plan);  io.workspace.data = malloc(io.workspace_size);
 *     fb_forward(plan, &io);
 *
 *     io.dout.data = dout;  io.dq.data = dq;  io.dk.data = dk;  io.dv.data = dv;
 *     fb_backward(plan, &io);
 *     fb_plan_destroy(plan);
 *
 * WHAT IS COMPUTED
 *
 * Shapes: q [B,Hq,Lq,D], k [B,Hkv,Lk,D], v [B,Hkv,Lk,Dv], out and dout [B,Hq,Lq,Dv], lse and dlse [B,Hq,Lq].
 * Hq is a multiple of Hkv; query head h reads key/value head h / (Hq/Hkv). i is a query, j a key,
 * p = i + off its position, off = Lk - Lq (bottom-right) or 0 (FB_TOP_LEFT), plus position_offset.
 *
 *     S = scale * q.k     softcap: S = c*tanh(S/c)     + bias     cells that do not count removed
 *     LSE = ln(sum_j exp(S) + exp(sink))       P = exp(S - LSE)       O = P V
 *     delta = rowsum(dO * O)    dP = dO V^T    dS = P * (dP - delta + dLSE)    (softcap: dS *= 1 - tanh^2)
 *     dQ = scale*dS K    dK = scale*dS^T Q    dV = P^T dO    dbias = dS before softcap's factor, summed over
 *     broadcast dimensions    dsink = sum_i exp(sink - LSE) * (dLSE - delta)
 *     dK and dV are summed over the query heads of their group.
 *
 * The formulas are those of Dao et al., FlashAttention (2022) and FlashAttention-2 (2023), extended by
 * softcap, bias, sinks and the cotangent of LSE.
 *
 * RULES
 *
 *   - A cell (i,j) counts iff window, lengths, block mask and boolean mask all allow it; a bias of exactly
 *     -inf disallows it too.
 *   - A row without a counting cell and without a sink: out = 0, lse = -inf, no gradient from it, whatever
 * its dout holds. With a sink: out = 0, lse = sink.
 *   - Masking selects. NaN and Inf in keys and values that no query may see, in padding and in gaps change
 *     nothing. NaN and Inf that a query does see propagate as the formula says, and only there.
 *   - f32 means f32, f16 and bf16 accumulate in f32 and are rounded once at the end. Where the processor has
 *     products of bf16, P and dS are rounded to it, once each, on their way into them; P is not
 *     where few queries share keys (up to half of a vector's lanes, route vector).
 *   - On the CPU the bits of a result never depend on the number of threads or on other callers.
 *   - Zero-sized dimensions are legal; every output is fully written.
 *   - No byte outside the described tensors is touched; the workspace may hold anything on entry.
 *   - Outputs may not overlap inputs or each other; that is refused by name.
 *
 * ERRORS
 *
 * Functions that can fail return fb_status. fb_last_error() then holds, for the calling thread, a sentence
 * that names the argument, what was given, what was expected, and what would work. The library never prints,
 * exits or aborts.
 *
 * THREADS
 *
 * A plan is constant after fb_plan_create: any number of threads may run it at once, each with its own
 * workspace. fork() after use works on the CPU only. The caller's floating-point mode and errno are left as
 * found.
 *
 * ENVIRONMENT (read by fb_plan_create and fb_supported only; a field of fb_desc wins over it)
 *
 *     FLASHBACK_ROUTE             auto | fused | vector | unfused | reference
 *     FLASHBACK_FUSED_MIN_LEN     key length from which auto prefers fused over unfused
 *     FLASHBACK_SCORE_BYTES_MAX   most bytes of score matrices that the unfused route may use
 *     FLASHBACK_ISA               highest CPU instruction set to use: scalar | baseline | bfdot | avx2 |
 * avx512 | avx512bf16 | amx_model | amx
 *     FLASHBACK_CACHE             folder of compiled kernels, or off: every plan compiles its own then.
 *                                 Unset: $XDG_CACHE_HOME/flashback, ~/.cache/flashback, or a folder in /tmp.
 *                                 On Metal nothing is kept on disk, where macOS has a cache of its own; a
 *                                 process keeps what it has compiled, unless this is off
 *     FLASHBACK_CACHE_MB          most megabytes there, 256 by default; what was used longest ago goes first
 *     FLASHBACK_KERNELS           folder of kernel files to compile instead of the built-in ones
 *     FLASHBACK_LOG               file that gets a line for each kernel read, compiled or removed
 *     FLASHBACK_NVRTC             path of the NVRTC library to use, tried first
 *     FLASHBACK_DS_BYTES_MAX      Metal: most bytes of dS that a backward may keep, 0 by default. It is then
 *                                 made once and not twice; same bits, memory that grows with Lq Lk
 *     FLASHBACK_TILES             Metal: how many tiles that fit are to be passed over, to look for better
 *                                 ones: forward=1,dq=0,dkdv=2,dbias=0
 *
 * An unknown value is an error that lists the valid ones; an empty one counts as unset. A cache folder that
 * cannot be used is no error: kernels are compiled when they are needed then.
 */
#ifndef FLASHBACK_H
#define FLASHBACK_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define FB_VERSION_MAJOR 0
#define FB_VERSION_MINOR 1
#define FB_VERSION_PATCH 0

#if defined(FB_STATIC) || !defined(__GNUC__)
#define FB_API
#else
#define FB_API __attribute__((visibility("default")))
#endif

/* ---- Names --------------------------------------------------------------------------------------------- */

typedef enum fb_status {
    FB_OK = 0,
    FB_INVALID = 1,     /* an argument is wrong; the sentence names it */
    FB_UNSUPPORTED = 2, /* the request is meaningful, but this device or route does not offer it */
    FB_NO_DEVICE = 3,   /* the device, its driver or its compiler is not present */
    FB_COMPILE = 4,     /* a kernel did not compile */
    FB_DEVICE = 5,      /* the device reported an error */
    FB_MEMORY = 6       /* memory ran out */
} fb_status;

typedef enum fb_dtype {
    FB_F32 = 0,
    FB_F16 = 1,
    FB_BF16 = 2,
    FB_F64 = 3 /* CPU only, for gradient checks; lse, dlse, sinks and dsinks are then f64 as well */
} fb_dtype;

typedef enum fb_device { FB_CPU = 0, FB_CUDA = 1, FB_METAL = 2 } fb_device;

/* How a problem is computed. FB_AUTO chooses; any other is taken or refused, never replaced. */
typedef enum fb_route {
    FB_AUTO = 0,
    FB_FUSED = 1,    /* tiles, O(L) memory */
    FB_VECTOR = 2,   /* len_q <= 8: queries of a whole group of heads side by side, keys split over tasks */
    FB_UNFUSED = 3,  /* materialises the score matrix; the honest baseline */
    FB_REFERENCE = 4 /* the definition, in double precision; slow */
} fb_route;

/* fb_desc.flags. A flag says which optional tensors of fb_io take part; an io field without its flag must be
 * NULL, so that no option is ever given and ignored. */
#define FB_DETERMINISTIC (1u << 0) /* bitwise equal from run to run (elsewhere than on sm_90 always) */
#define FB_FORWARD_ONLY (1u << 1)  /* no backward from this plan; saves workspace */
#define FB_TOP_LEFT (1u << 2)      /* positions are aligned at the first query and key, not at the last */
#define FB_PACKED (1u << 3)        /* sequences lie end to end in [total,H,D]; io.cu_q and io.cu_k cut them */
#define FB_LENGTHS (1u << 4)       /* padded batch: io.lens_q and/or io.lens_k say how many rows count */
#define FB_BIAS (1u << 5)          /* io.bias is added to the scores */
#define FB_DBIAS (1u << 6)         /* backward writes io.dbias; needs FB_BIAS */
#define FB_MASK (1u << 7)          /* io.mask: uint8, 0 = the cell does not count */
#define FB_BLOCK_MASK                                                                                        \
    (1u << 8)                /* io.block_mask: uint8 per block of block_q x block_k cells, 0 = none counts */
#define FB_SINKS (1u << 9)   /* io.sinks: one logit per query head that joins the denominator only */
#define FB_DSINKS (1u << 10) /* backward writes io.dsinks; needs FB_SINKS */
#define FB_DLSE (1u << 11)   /* backward takes io.dlse, the cotangent of lse */
#define FB_ACCUMULATE (1u << 12) /* backward adds to the gradients that are there, instead of overwriting */
#define FB_NO_DQ (1u << 13)      /* backward leaves dq out (io.dq must be NULL) */
#define FB_NO_DK (1u << 14)      /* backward leaves dk out */
#define FB_NO_DV (1u << 15)      /* backward leaves dv out */

/* ---- The problem --------------------------------------------------------------------------------------- */

/* Cell (i,j) counts iff p - left <= j <= p + right, both ends included, p = i + off. Values are >= 0;
 * FB_UNBOUNDED, or anything larger than the lengths, does not bound. Causal is right = 0. A window of W keys
 * that includes the query itself (sliding_window=W elsewhere) is left = W - 1. */
typedef struct fb_window {
    int64_t left, right;
} fb_window;

#define FB_UNBOUNDED INT64_MAX

/* Strides in elements; the last dimension is contiguous. All three 0 = contiguous in the order of the shape
 * ([B,H,L,D]; [total,H,D] when FB_PACKED, where batch is not used). Inputs may repeat data: FB_BROADCAST is a
 * stride of 0. Negative strides are refused. The stride of a dimension of size 1 is never used. */
typedef struct fb_strides {
    int64_t batch, head, row;
} fb_strides;

#define FB_BROADCAST INT64_MIN

/* Shape of bias, dbias or mask: [B|1, Hq|1, Lq|1, Lk|1]; a 1 repeats along that dimension. */
typedef struct fb_shape {
    int64_t batch, heads, rows, cols;
} fb_shape;

/* One attention problem: numbers only, so it can be compared, hashed and printed. Set it up with
 * fb_desc_init; the fields after that are yours. */
typedef struct fb_desc {
    uint32_t size;  /* sizeof(fb_desc) of the caller; lets the struct grow without breaking programs */
    uint32_t flags; /* FB_DETERMINISTIC | FB_BIAS | ... */

    fb_device device; /* FB_CPU */
    int32_t index;    /* which device of that kind */
    fb_dtype dtype;   /* of q, k, v, out, bias and all gradients of these */
    fb_route route;   /* FB_AUTO */

    int64_t batch;      /* B, number of sequences when FB_PACKED */
    int64_t heads_q;    /* Hq */
    int64_t heads_kv;   /* Hkv; heads_q must be a multiple of it */
    int64_t len_q;      /* Lq; the longest sequence when FB_PACKED */
    int64_t len_k;      /* Lk; likewise */
    int64_t head_dim;   /* D of q and k, 0 to 576 */
    int64_t head_dim_v; /* Dv of v and out, 0 to 576 */
    int64_t total_q;    /* FB_PACKED: rows of q; otherwise 0 */
    int64_t total_k;    /* FB_PACKED: rows of k and v; otherwise 0 */

    fb_window window; /* fb_window_none() */
    int64_t
        position_offset; /* added to every query position, may be negative; for chunks of a longer sequence */
    double scale;        /* any finite number; NaN (the default) = 1/sqrt(head_dim) */
    double softcap;      /* c > 0; 0 = none */

    fb_strides q, k, v, out;
    fb_strides dout, dq, dk, dv;

    fb_shape bias_shape; /* FB_BIAS; dbias has the same shape */
    fb_strides bias, dbias;
    fb_shape mask_shape; /* FB_MASK */
    fb_strides mask;

    int64_t block_q, block_k; /* FB_BLOCK_MASK: cells per block, multiples of 16 */
    int64_t block_batch,
        block_heads; /* FB_BLOCK_MASK: [B|1, Hq|1, ceil(Lq/block_q), ceil(Lk/block_k)], contiguous */

    int32_t threads;       /* CPU: most threads a call may use; 0 = what OpenMP allows */
    int32_t tasks;         /* CPU: into how many tasks work is split at least, where the shape allows; part of
                              what fixes the bits; 0 = 32, good for up to 32 threads */
    int64_t fused_min_len; /* as FLASHBACK_FUSED_MIN_LEN; 0 = by environment, else by measurement */
    int64_t score_bytes_max; /* as FLASHBACK_SCORE_BYTES_MAX; 0 = by environment, else 4 GiB */
} fb_desc;

/* Sets all of *desc to the defaults: CPU, f32, FB_AUTO, all dimensions 0, no window, scale NaN, contiguous.
 * `size` is sizeof(fb_desc) of the calling program; a smaller one (an older program) is filled as far as it
 * goes. Never fails; a NULL desc is ignored. */
FB_API void fb_desc_init(fb_desc *desc, size_t size);

/* Windows. Band: p - left <= j <= p + right. */
FB_API fb_window fb_window_none(void);
FB_API fb_window fb_window_causal(void);
FB_API fb_window fb_window_band(int64_t left, int64_t right);

/* ---- The data ------------------------------------------------------------------------------------------ */

/* A place in memory: a pointer (on Metal an MTLBuffer) and an offset in bytes. Needs to be aligned to the
 * element only. On Metal every tensor may have a buffer of its own, or several share one; a buffer has to be
 * of the plan's device, long enough for its tensor, and tracked for hazards, as buffers are unless they say
 * otherwise. */
typedef struct fb_ref {
    void *data;
    uint64_t offset;
} fb_ref;

/* Tensors of one call. The library reads and writes them during the call (on a GPU: until the stream has
 * passed it) and keeps nothing. Fields that the plan does not use must be NULL. */
typedef struct fb_io {
    uint32_t size; /* sizeof(fb_io) of the caller */
    uint32_t reserved;

    fb_ref q, k, v; /* in */
    fb_ref out;     /* forward: out; backward: in, as the forward left it */
    fb_ref lse;  /* natural logarithm, f32, contiguous [B,Hq,Lq] ([Hq,total_q] when FB_PACKED). forward: out,
                    NULL = not wanted; backward: in */
    fb_ref dout; /* backward: in, [B,Hq,Lq,Dv] */
    fb_ref dlse; /* FB_DLSE: in, f32, laid out as lse */
    fb_ref dq, dk, dv;
    fb_ref bias, dbias;      /* FB_BIAS, FB_DBIAS: dtype of q */
    fb_ref mask;             /* FB_MASK: uint8, non-zero = counts */
    fb_ref block_mask;       /* FB_BLOCK_MASK: uint8, non-zero = counts */
    fb_ref sinks, dsinks;    /* FB_SINKS, FB_DSINKS: f32 [Hq] */
    fb_ref cu_q, cu_k;       /* FB_PACKED: int32 [B+1], on the device of the tensors; 0 = first, ascending */
    fb_ref lens_q, lens_k;   /* FB_LENGTHS: int32 [B], either may be NULL; rows past them do not count. They
                                mask,   they do not move positions: off stays Lk - Lq */
    fb_ref workspace;        /* scratch, any content, no alignment needed */
    uint64_t workspace_size; /* bytes there; at least fb_plan_workspace */
    void *stream; /* CUDA: the CUstream. Metal: an MTLCommandQueue, on which the call commits command buffers
                     and returns; an MTLCommandBuffer, into which it encodes, and which the caller commits; or
                     NULL: the call returns when it is done. CPU: NULL */
} fb_io;

/* Sets all of *io to NULL and its size. A NULL io is ignored. */
FB_API void fb_io_init(fb_io *io, size_t size);

/* ---- The plan ------------------------------------------------------------------------------------------ */

typedef struct fb_plan fb_plan;

/* Checks *desc, chooses route and kernels, and compiles them where the device needs that. On FB_OK *plan is a
 * constant object that the caller releases with fb_plan_destroy; otherwise *plan is NULL. Copies desc.
 * Errors: FB_INVALID, FB_UNSUPPORTED, FB_NO_DEVICE, FB_COMPILE, FB_MEMORY. */
FB_API fb_status fb_plan_create(fb_plan **plan, const fb_desc *desc);

/* Bytes of workspace that one call of fb_forward or fb_backward needs; O(B*H*L*D), never O(L^2), unless the
 * route is FB_UNFUSED. One workspace may serve many plans, one call at a time; ask each of
 * them, as a smaller problem may be cut into more parts and need more. */
FB_API size_t fb_plan_workspace(const fb_plan *plan);

/* Says in words what the plan does: problem, route, kernels, instruction set, tiles, threads, workspace, and
 * for every route passed over the reason. snprintf's rules: writes at most `size` bytes with a closing 0,
 * returns the length of the whole text. */
FB_API size_t fb_plan_explain(const fb_plan *plan, char *text, size_t size);

/* Releases the plan. NULL is fine. No call may be using it. */
FB_API void fb_plan_destroy(fb_plan *plan);

/* FB_OK if fb_plan_create would accept *desc; otherwise its status, with the reason in fb_last_error().
 * Compiles and allocates nothing. */
FB_API fb_status fb_supported(const fb_desc *desc);

/* ---- The verbs ----------------------------------------------------------------------------------------- */

/* out, lse from q, k, v and the options. Allocates nothing, takes no lock, reads no environment; on a GPU it
 * is queued on io->stream, and with CUDA may be captured into a graph. On Metal, long work is cut into
 * several command buffers, but for a caller's own; what fails on a caller's queue after the call is the error
 * of the next call or fb_sync there. Errors: FB_INVALID, FB_DEVICE, FB_MEMORY. */
FB_API fb_status fb_forward(const fb_plan *plan, const fb_io *io);

/* dq, dk, dv (dbias, dsinks) from q, k, v, out, lse, dout (dlse) and the options. Overwrites the gradients,
 * or adds to them with FB_ACCUMULATE. `out` and `lse` may also be those of a larger problem of which these
 * keys are a part (context parallelism): the result is then this part's share of the gradient. */
FB_API fb_status fb_backward(const fb_plan *plan, const fb_io *io);

/* Joins two partial results over disjoint keys: (out, lse) becomes the result over both. All four are laid
 * out as the plan's out and lse; lse = -inf on one side leaves the other as it is, on both gives out = 0 and
 * -inf. LSE = ln(exp(LSE_a) + exp(LSE_b)),  O = exp(LSE_a - LSE) O_a + exp(LSE_b - LSE) O_b For FB_PACKED
 * plans every row of [total_q] is joined. A sink must be part of one side only. */
FB_API fb_status fb_merge(const fb_plan *plan, fb_ref out, fb_ref lse, fb_ref other_out, fb_ref other_lse,
                          void *stream);

/* ---- Device memory, for programs without a framework --------------------------------------------------- */

/* Allocates `bytes` on a device (64-byte aligned on the CPU, content undefined); 0 bytes gives a valid ref.
 * Release with fb_free. From 4 MiB on, CPU memory asks for huge pages, which makes long calls a few percent
 * faster than malloc's. On Metal: an MTLBuffer that host and GPU share. Errors: FB_NO_DEVICE, FB_MEMORY. */
FB_API fb_status fb_alloc(fb_ref *ref, fb_device device, int32_t index, size_t bytes);
FB_API fb_status fb_free(fb_ref *ref, fb_device device, int32_t index); /* sets *ref to NULL */
/* Copies to and from a device, ordered after what was queued on the default stream; done when they return,
 * for all streams. On Metal buffers may also be the caller's, unless their storage is private; what was
 * queued on a caller's queue is to be waited for first. */
FB_API fb_status fb_write(fb_ref to, const void *from, size_t bytes, fb_device device, int32_t index);
FB_API fb_status fb_read(void *to, fb_ref from, size_t bytes, fb_device device, int32_t index);
/* Waits until everything queued on the device (stream NULL) or on the stream is done. On Metal calls without
 * a stream are done when they return; a stream is a queue, or a command buffer that was committed. */
FB_API fb_status fb_sync(fb_device device, int32_t index, void *stream);

/* ---- Words --------------------------------------------------------------------------------------------- */

/* The sentence of the calling thread's last failed call, or "". Valid until its next call. */
FB_API const char *fb_last_error(void);
FB_API const char *fb_status_name(fb_status status); /* "FB_OK", ... ; "?" if unknown */
FB_API const char *fb_dtype_name(fb_dtype dtype);    /* "f32", ... ; "?" if unknown */
FB_API const char *fb_device_name(fb_device device); /* "cpu", ... ; "?" if unknown */
FB_API const char *fb_route_name(fb_route route);    /* "auto", ... ; "?" if unknown */
FB_API const char *fb_version(void);                 /* "0.1.0" */

/* What this library is on this machine: version, backends, instruction sets, threads, environment variables
 * and their values, one "key: value" a line. snprintf's rules. */
FB_API size_t fb_info(char *text, size_t size);

#ifdef __cplusplus
}
#endif
#endif
