/* See quota.h. Documentation/admin-guide/cgroup-v2.rst of Linux, "cpu.max"; scheduler/sched-bwc.rst for
 * version 1. */
#include "quota.h"
#include <limits.h>
#include <stdio.h>
#include <string.h>

enum { PATH_BYTES = 4096 };

/* Cores of a quota in a period, or `most` if that is less or there is none. */
static int lower(int most, double quota, double period) {
    if (!(quota > 0) || !(period > 0) || quota / period >= most)
        return most;
    const int whole = (int)(quota / period);
    return whole < quota / period || whole == 0 ? whole + 1 : whole;
}

static double number_in(const char *root, const char *group, const char *file) {
    char path[2 * PATH_BYTES];
    double x = 0;
    snprintf(path, sizeof path, "%s%s/%s", root, group, file);
    FILE *f = fopen(path, "r");
    if (!f)
        return 0;
    if (fscanf(f, "%lf", &x) != 1)
        x = 0; /* "max" */
    fclose(f);
    return x;
}

static double period_in(const char *root, const char *group) {
    char path[2 * PATH_BYTES];
    double x = 0;
    snprintf(path, sizeof path, "%s%s/cpu.max", root, group);
    FILE *f = fopen(path, "r");
    if (!f)
        return 0;
    if (fscanf(f, "%*s %lf", &x) != 1)
        x = 0;
    fclose(f);
    return x;
}

/* Every group above this one may have a quota too. */
static int walk_up(const char *root, char *group, int most) {
    for (;;) {
        most = lower(most, number_in(root, group, "cpu.max"), period_in(root, group));
        most = lower(most, number_in(root, group, "cpu.cfs_quota_us"),
                     number_in(root, group, "cpu.cfs_period_us"));
        char *slash = strrchr(group, '/');
        if (!slash)
            return most;
        *slash = 0;
    }
}

/* Of a line "hierarchy:controllers:/group": the controllers, and the group without a trailing slash. */
static char *split_line(char *line, char **controllers) {
    line[strcspn(line, "\n")] = 0;
    char *first = strchr(line, ':'), *second = first ? strchr(first + 1, ':') : NULL;
    if (!second)
        return NULL;
    *controllers = first + 1;
    *second = 0;
    char *group = second + 1;
    const size_t length = strlen(group);
    if (length && group[length - 1] == '/')
        group[length - 1] = 0;
    return group;
}

static int has_word(const char *list, const char *word) {
    const size_t length = strlen(word);
    for (const char *at = list; (at = strstr(at, word)) != NULL; at += length)
        if ((at == list || at[-1] == ',') && (at[length] == 0 || at[length] == ','))
            return 1;
    return 0;
}

int fb__quota_cores(const char *root, const char *self) {
    char line[PATH_BYTES], mount[PATH_BYTES], *controllers;
    int cores = INT_MAX;
    FILE *f = fopen(self, "r");
    while (f && fgets(line, sizeof line, f)) {
        char *group = split_line(line, &controllers);
        if (!group || (*controllers && !has_word(controllers, "cpu")))
            continue;
        /* Version 1 has a tree for each set of controllers; "cpu" leads to the cpu controller's everywhere.
         */
        snprintf(mount, sizeof mount, "%s%s", root, *controllers ? "/cpu" : "");
        cores = walk_up(mount, group, cores);
    }
    if (f)
        fclose(f);
    return cores == INT_MAX ? 0 : cores;
}
