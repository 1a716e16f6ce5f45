/* The environment: every variable that the library reads, in one list. The only place with getenv.
 * Floor: base. */
#ifndef FB_BASE_ENV_H
#define FB_BASE_ENV_H

/* name, what it holds */
#define FB__ENV_LIST(X)                                                                                      \
    X(FLASHBACK_ROUTE, "auto | fused | vector | unfused | reference")                                        \
    X(FLASHBACK_FUSED_MIN_LEN, "key length from which auto prefers fused over unfused")                      \
    X(FLASHBACK_SCORE_BYTES_MAX, "most bytes of score matrices that the unfused route may use")              \
    X(FLASHBACK_ISA, "scalar | baseline | bfdot | avx2 | avx512 | avx512bf16 | amx_model | amx")

typedef enum fb__env {
#define X(name, holds) FB__ENV_##name,
    FB__ENV_LIST(X)
#undef X
        FB__ENV_COUNT
} fb__env;

const char *fb__env_name(fb__env variable);
const char *fb__env_holds(fb__env variable);

/* The value, or NULL when it is unset or empty. */
const char *fb__env_get(fb__env variable);

#endif
