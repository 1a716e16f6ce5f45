/* See kernels.h. Floor: cli. */
#include "kernels.h"
#include <stdio.h>
#include <string.h>

static bool read_line(const char *line, kernel_line *k) {
    char origin[32];
    if (sscanf(line, "kernel: %63[^,\n], %31[^0-9\n]%lf ms", k->file, origin, &k->ms) != 3)
        return false;
    k->compiled = !strcmp(origin, "compiled in ");
    return k->compiled || !strcmp(origin, "from the cache in ");
}

int kernels_of(const fb_plan *plan, kernel_line *lines) {
    static char text[16384];
    int count = 0;
    fb_plan_explain(plan, text, sizeof text);
    for (const char *line = text; *line && count < KERNELS_MOST;) {
        count += read_line(line, &lines[count]);
        line += strcspn(line, "\n");
        line += *line == '\n';
    }
    return count;
}
