/* See env.h. */
#include "env.h"
#include <stdlib.h>

static const struct {
    const char *name, *holds;
} variables[] = {
#define X(name, holds) [FB__ENV_##name] = {#name, holds},
    FB__ENV_LIST(X) FB__ENV_SYSTEM_LIST(X)
#undef X
};

const char *fb__env_name(fb__env variable) { return variables[variable].name; }

const char *fb__env_holds(fb__env variable) { return variables[variable].holds; }

const char *fb__env_get(fb__env variable) {
    const char *value = getenv(variables[variable].name);
    return value && *value ? value : NULL;
}
