/* How much processor time the system gives to this process: a container with a quota of two cores on a
 * machine of 64 stops all its threads when 64 of them have used it up. Floor: cpu. */
#ifndef FB_CPU_QUOTA_H
#define FB_CPU_QUOTA_H

/* Whole cores that the quota of the control group allows, rounded up, at least 1; 0 when there is none.
 * `root` is where control groups are mounted, `self` the file that names this process's own: /sys/fs/cgroup
 * and /proc/self/cgroup. Version 2, and version 1's cpu controller. */
int fb__quota_cores(const char *root, const char *self);

#endif
