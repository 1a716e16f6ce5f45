/* The environment: every variable that the library reads, in two lists. The only place with getenv.
 * Floor: base. */
#ifndef FB_BASE_ENV_H
#define FB_BASE_ENV_H

/* The library's own: name, what it holds */
#define FB__ENV_LIST(X)                                                                                      \
    X(FLASHBACK_ROUTE, "auto | fused | vector | unfused | reference")                                        \
    X(FLASHBACK_FUSED_MIN_LEN, "key length from which auto prefers fused over unfused")                      \
    X(FLASHBACK_SCORE_BYTES_MAX, "most bytes of score matrices that the unfused route may use")              \
    X(FLASHBACK_ISA, "scalar | baseline | bfdot | avx2 | avx512 | avx512bf16 | amx_model | amx")             \
    X(FLASHBACK_CACHE, "folder of compiled kernels | off")                                                   \
    X(FLASHBACK_CACHE_MB, "most megabytes of compiled kernels to keep there")                                \
    X(FLASHBACK_KERNELS, "folder of kernel files to compile instead of the built-in ones")                   \
    X(FLASHBACK_LOG, "file that gets a line for each kernel read, compiled or removed")                      \
    X(FLASHBACK_NVRTC, "path of the NVRTC library to use, tried first")                                      \
    X(FLASHBACK_DS_BYTES_MAX, "Metal: most bytes of dS that a backward may keep between its kernels")        \
    X(FLASHBACK_TILES, "Metal: tiles that fit and are to be passed over: forward=1,dq=0,dkdv=2,dbias=0")

/* The system's, which say where a user's files belong. */
#define FB__ENV_SYSTEM_LIST(X)                                                                               \
    X(HOME, "folder of the user")                                                                            \
    X(XDG_CACHE_HOME, "folder of the user's caches")

typedef enum fb__env {
#define X(name, holds) FB__ENV_##name,
    FB__ENV_LIST(X) FB__ENV_COUNT, /* of the library's own; the system's come behind */
    FB__ENV_SYSTEM_LIST(X)
#undef X
} fb__env;

const char *fb__env_name(fb__env variable);
const char *fb__env_holds(fb__env variable);

/* The value, or NULL when it is unset or empty. */
const char *fb__env_get(fb__env variable);

#endif
