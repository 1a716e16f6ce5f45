/* Quotas of control groups, in trees made for the purpose. */
#include "src/cpu/quota.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
/* cmocka needs some of the above. */
#include <cmocka.h>

static char folder[] = "/tmp/flashback-quota-XXXXXX";

static const char *path(const char *name) {
    static char text[256];
    snprintf(text, sizeof text, "%s/%s", folder, name);
    return text;
}

static void put(const char *name, const char *content) {
    FILE *f = fopen(path(name), "w");
    assert_non_null(f);
    fputs(content, f);
    fclose(f);
}

/* With these contents of /proc/self/cgroup. */
static int cores(const char *self) {
    char root[256];
    snprintf(root, sizeof root, "%s/cgroup", folder);
    put("self", self);
    return fb__quota_cores(root, path("self"));
}

static int setup(void **state) {
    (void)state;
    static const char *const folders[] = {"cgroup", "cgroup/a", "cgroup/a/b", "cgroup/cpu", "cgroup/cpu/old"};
    if (!mkdtemp(folder))
        return 1;
    for (size_t i = 0; i < sizeof folders / sizeof *folders; i++)
        if (mkdir(path(folders[i]), 0700) != 0)
            return 1;
    return 0;
}

static int teardown(void **state) {
    (void)state;
    char command[300];
    snprintf(command, sizeof command, "rm -rf %s", folder);
    return system(command);
}

static void test_version_2(void **state) {
    (void)state;
    assert_int_equal(cores("0::/a/b\n"), 0); /* no file */
    put("cgroup/a/b/cpu.max", "max 100000\n");
    assert_int_equal(cores("0::/a/b\n"), 0);
    put("cgroup/a/b/cpu.max", "400000 100000\n");
    assert_int_equal(cores("0::/a/b\n"), 4);
    put("cgroup/a/b/cpu.max", "250000 100000\n");
    assert_int_equal(cores("0::/a/b\n"), 3); /* rounded up */
    put("cgroup/a/b/cpu.max", "1000 100000\n");
    assert_int_equal(cores("0::/a/b\n"), 1); /* at least one */
    put("cgroup/a/b/cpu.max", "800000 100000\n");
    put("cgroup/a/cpu.max", "200000 100000\n");
    assert_int_equal(cores("0::/a/b\n"), 2); /* the group above has less */
    put("cgroup/a/cpu.max", "max 100000\n");
    assert_int_equal(cores("0::/a/b\n"), 8);
    put("cgroup/cpu.max", "500000 100000\n"); /* a container sees its own group as the root */
    assert_int_equal(cores("0::/\n"), 5);
    assert_int_equal(cores("0::/a/b\n"), 5);
    assert_int_equal(unlink(path("cgroup/cpu.max")), 0);
    assert_int_equal(cores("0::/\n"), 0);
}

static void test_version_1(void **state) {
    (void)state;
    put("cgroup/cpu/old/cpu.cfs_quota_us", "-1\n");
    put("cgroup/cpu/old/cpu.cfs_period_us", "50000\n");
    assert_int_equal(cores("7:cpuset:/old\n4:cpu,cpuacct:/old\n1:name=systemd:/old\n"), 0);
    put("cgroup/cpu/old/cpu.cfs_quota_us", "150000\n");
    assert_int_equal(cores("7:cpuset:/old\n4:cpu,cpuacct:/old\n1:name=systemd:/old\n"), 3);
    assert_int_equal(cores("7:cpuset:/old\n4:cpuacct:/old\n"), 0);
}

static void test_nonsense(void **state) {
    (void)state;
    put("cgroup/a/b/cpu.max", "many 100000\n");
    assert_int_equal(cores("0::/a/b\n"), 0);
    put("cgroup/a/b/cpu.max", "100000 0\n");
    assert_int_equal(cores("0::/a/b\n"), 0);
    put("cgroup/a/b/cpu.max", "");
    assert_int_equal(cores("0::/a/b\n"), 0);
    assert_int_equal(cores(""), 0);
    assert_int_equal(cores("0\n:\n::\n"), 0);
    assert_int_equal(cores("0::a/b"), 0);
    assert_int_equal(fb__quota_cores("/nowhere", "/nowhere/at/all"), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_version_2),
        cmocka_unit_test(test_version_1),
        cmocka_unit_test(test_nonsense),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
