/* The folder of compiled kernels: what is taken from it, what is put there, and when it is none. Threads and
 * processes: test_jit_race.c. */
#include "jit.h"
#include <signal.h>
#include <sys/resource.h>

/* Asks, and says whether that took a compilation. What comes back is right either way. */
static bool compiles(const fb__jit_request *r, fb__jit_code *seen) {
    compiler *c = r->context;
    fb__jit_code code;
    int before = c->calls;
    memset(&code, 0x5a, sizeof code);
    assert_int_equal(fb__jit_get(r, &code), FB_OK);
    assert_non_null(code.at);
    static const char begin[] = "#define FB_D 128\n#define FB_LEFT -3\n";
    assert_true(code.size > sizeof begin);
    assert_memory_equal(code.at, begin, sizeof begin - 1);
    if (c->size)
        assert_int_equal(code.size, c->size);
    free(code.at);
    assert_true(c->calls - before == (code.origin == FB__JIT_COMPILED));
    assert_true(code.ms >= 0);
    assert_int_equal(strspn(code.key, "0123456789abcdef"), 32);
    if (seen)
        *seen = code;
    return c->calls != before;
}

/* The file of a key, with what comes after it. */
static const char *file_of(const char *key, const char *end) {
    char name[128];
    snprintf(name, sizeof name, "cache/%s%s", key, end);
    return path(name);
}

static int count_files(const char *folder, const char *containing) {
    DIR *d = opendir(folder);
    int count = 0;
    if (!d)
        return -1;
    for (struct dirent *e; (e = readdir(d));)
        count += e->d_name[0] != '.' && strstr(e->d_name, containing);
    closedir(d);
    return count;
}

static bool exists(const char *file) { return access(file, F_OK) == 0; }

static void set_age(const char *file, long seconds) {
    struct timespec when = {time(NULL) - seconds, 0};
    assert_int_equal(utimensat(AT_FDCWD, file, (const struct timespec[]){when, when}, 0), 0);
}

static void test_hit(void **state) {
    (void)state;
    compiler c = {0};
    fb__jit_request r = request(&c), other = request(&c);
    fb__jit_code code, again;
    other.arch = "sm_80";
    assert_true(compiles(&r, &code));
    assert_false(compiles(&r, &again));
    assert_string_equal(code.key, again.key);
    assert_int_equal(code.size, again.size);
    assert_true(compiles(&other, &again));
    assert_string_not_equal(code.key, again.key);
    assert_false(compiles(&other, NULL));
    assert_false(compiles(&r, NULL));
    put("cuda/kernels/k.cu", "another kernel\n");
    assert_true(compiles(&r, NULL));
    assert_int_equal(count_files(path("cache"), ""), 3); /* no locks, no parts */
    assert_int_equal(count_files(path("cache"), ".bin"), 3);
    struct stat status;
    assert_int_equal(stat(path("cache"), &status), 0);
    assert_int_equal(status.st_mode & 0777, 0700);
}

static void test_failure(void **state) {
    (void)state;
    compiler c = {.status = FB_COMPILE};
    fb__jit_request r = request(&c);
    for (int i = 1; i < 3; i++) {
        fb__jit_code code = {.at = (void *)1};
        assert_int_equal(fb__jit_get(&r, &code), FB_COMPILE);
        assert_null(code.at);
        assert_int_equal(c.calls, i);
        assert_int_equal(count_files(path("cache"), ""), 0);
    }
    c.status = FB_OK;
    assert_true(compiles(&r, NULL));
    r.file = "no.cu";
    fb__jit_code code = {.at = (void *)1};
    assert_int_equal(fb__jit_get(&r, &code), FB_INVALID);
    assert_null(code.at);
}

/* Recompiled, and good again. */
static void expect_repair(const fb__jit_request *r, const char *file, const char *what, size_t where) {
    if (!compiles(r, NULL))
        fail_msg("%s %zu was taken for the code", what, where);
    if (compiles(r, NULL))
        fail_msg("%s %zu: not kept", what, where);
    struct stat status;
    assert_int_equal(stat(file, &status), 0);
    assert_true(S_ISREG(status.st_mode));
}

static void test_damage(void **state) {
    (void)state;
    static char good[1024], bad[1024];
    compiler c = {0};
    fb__jit_request r = request(&c);
    fb__jit_code code;
    assert_true(compiles(&r, &code));
    const char *file = file_of(code.key, ".bin");
    int fd = open(file, O_RDONLY);
    ssize_t length = read(fd, good, sizeof good);
    close(fd);
    assert_true(length > 72 && (size_t)length < sizeof good);
    size_t size = (size_t)length;
    assert_int_equal(size, 72 + code.size);

    for (size_t i = 0; i < size; i++) {
        memcpy(bad, good, size);
        bad[i] = (char)(bad[i] ^ 1 << i % 8);
        put_bytes(file, bad, size);
        expect_repair(&r, file, "a flipped bit in byte", i);
    }
    for (size_t cut = 0; cut < size; cut++) {
        put_bytes(file, good, cut);
        expect_repair(&r, file, "length", cut);
    }
    memcpy(bad, good, size);
    put_bytes(file, bad, size + 1);
    expect_repair(&r, file, "length", size + 1);
    memset(bad, 0, sizeof bad);
    put_bytes(file, bad, sizeof bad);
    expect_repair(&r, file, "zeros", sizeof bad);
    put_bytes(file, "#!/bin/sh\n", 10);
    expect_repair(&r, file, "a foreign file", 0);
    put_bytes(file, good, size);
    assert_false(compiles(&r, NULL));
}

/* In the place of the file: that of another key, things that are no files. */
static void test_strangers(void **state) {
    (void)state;
    compiler c = {0};
    fb__jit_request r = request(&c), other = request(&c);
    fb__jit_code code, code2;
    other.arch = "sm_80";
    assert_true(compiles(&r, &code));
    assert_true(compiles(&other, &code2));
    const char *file = file_of(code.key, ".bin"), *file2 = file_of(code2.key, ".bin");
    assert_int_equal(unlink(file), 0);
    assert_int_equal(rename(file2, file), 0);
    expect_repair(&r, file, "another key's file", 0);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(symlink("nowhere", file), 0);
    assert_true(compiles(&r, NULL));
    assert_false(compiles(&r, NULL));
    assert_int_equal(unlink(file), 0);
    assert_int_equal(mkfifo(file, 0600), 0);
    expect_repair(&r, file, "a pipe", 0);
    assert_int_equal(unlink(file), 0);
    assert_int_equal(mkdir(file, 0700), 0);
    assert_true(compiles(&r, NULL)); /* which cannot take a folder's place */
    assert_true(compiles(&r, NULL));
    assert_int_equal(rmdir(file), 0);
    assert_int_equal(mkdir(file_of(code.key, ".lock"), 0700), 0);
    assert_true(compiles(&r, NULL)); /* without a lock */
    assert_false(compiles(&r, NULL));
    assert_int_equal(count_files(path("cache"), ".tmp"), 0);
}

static void expect_folder(const char *want) {
    char folder[512];
    memset(folder, 0x5a, sizeof folder);
    assert_int_equal(fb__jit_folder(folder, sizeof folder), FB_OK);
    assert_string_equal(folder, want);
}

/* FLASHBACK_CACHE that cannot be used, one after the other. */
static void test_no_folder(void **state) {
    (void)state;
    compiler c = {0};
    fb__jit_request r = request(&c);
    put("file", "");
    static char longest[5000];
    memset(longest, 'x', sizeof longest - 1);
    char below[512];
    snprintf(below, sizeof below, "%s/folder", path("file"));
    const char *const folders[] = {"off", path("file"), below, "/proc/flashback", "/dev/null", longest};
    for (size_t i = 0; i < COUNT(folders); i++) {
        setenv("FLASHBACK_CACHE", folders[i], 1);
        expect_folder("");
        assert_true(compiles(&r, NULL));
        assert_true(compiles(&r, NULL));
    }
    assert_false(exists("off"));
    char folder[8] = "xxxxxxx";
    setenv("FLASHBACK_CACHE", path("cache"), 1);
    assert_int_equal(fb__jit_folder(folder, sizeof folder), FB_OK); /* which it does not fit into */
    assert_string_equal(folder, "");
    folder[0] = 'x';
    assert_int_equal(fb__jit_folder(folder, 0), FB_OK);
    assert_int_equal(folder[0], 'x');
}

static void test_folders(void **state) {
    (void)state;
    static char home[128], caches[128], want[256];
    strcpy(home, path("home"));
    strcpy(caches, path("some/where"));
    const char *home_before = getenv("HOME"), *caches_before = getenv("XDG_CACHE_HOME");
    static char kept_home[1024], kept_caches[1024];
    snprintf(kept_home, sizeof kept_home, "%s", home_before ? home_before : "");
    snprintf(kept_caches, sizeof kept_caches, "%s", caches_before ? caches_before : "");

    setenv("FLASHBACK_CACHE", path("a/b//c/"), 1); /* made as deep as it takes */
    expect_folder(path("a/b//c/"));
    assert_true(exists(path("a/b/c")));

    unsetenv("FLASHBACK_CACHE");
    setenv("XDG_CACHE_HOME", caches, 1);
    setenv("HOME", home, 1);
    assert_int_equal(mkdir(home, 0755), 0);
    snprintf(want, sizeof want, "%s/flashback", caches);
    expect_folder(want);
    assert_int_equal(chmod(want, 0770), 0); /* others may write, and what they write would run */
    snprintf(want, sizeof want, "%s/.cache/flashback", home);
    expect_folder(want);
    assert_int_equal(rmdir(want), 0);
    setenv("XDG_CACHE_HOME", "relative", 1);
    expect_folder(want);
    assert_false(exists("relative"));
    unsetenv("XDG_CACHE_HOME");
    assert_int_equal(rmdir(want), 0);
    expect_folder(want);
    struct stat status;
    assert_int_equal(stat(want, &status), 0);
    assert_int_equal(status.st_mode & 0777, 0700);

    /* No home: /tmp/flashback-UID. What others have made there is not ours to change. */
    snprintf(want, sizeof want, "/tmp/flashback-%d", (int)geteuid());
    setenv("HOME", path("nowhere"), 1);
    if (exists(want)) {
        char folder[512];
        assert_int_equal(fb__jit_folder(folder, sizeof folder), FB_OK);
        assert_true(!*folder || strcmp(folder, want) == 0);
    } else {
        expect_folder(want);
        assert_int_equal(chmod(want, 0755), 0);
        expect_folder("");
        assert_int_equal(rmdir(want), 0);
        assert_int_equal(chmod(home, 0700), 0); /* where a link leads may be as private as it likes */
        assert_int_equal(symlink(home, want), 0);
        expect_folder("");
        assert_int_equal(unlink(want), 0);
        unsetenv("HOME");
        expect_folder(want);
        assert_int_equal(rmdir(want), 0);
    }
    assert_false(exists(path("nowhere")));
    if (kept_home[0])
        setenv("HOME", kept_home, 1);
    if (kept_caches[0])
        setenv("XDG_CACHE_HOME", kept_caches, 1);
}

/* A folder that may be read only: what is there is used, what is not is compiled. */
static void test_read_only(void **state) {
    (void)state;
    compiler c = {0};
    fb__jit_request r = request(&c), other = request(&c);
    other.arch = "sm_80";
    assert_true(compiles(&r, NULL));
    assert_int_equal(chmod(path("cache"), 0555), 0);
    uid_t user = geteuid();
    if (user == 0 && seteuid(65534) != 0)
        skip(); /* root may write anywhere */
    expect_folder(path("cache"));
    bool found = !compiles(&r, NULL);
    bool first = compiles(&other, NULL), second = compiles(&other, NULL);
    assert_int_equal(seteuid(user), 0);
    assert_int_equal(chmod(path("cache"), 0755), 0);
    assert_true(found && first && second);
    assert_int_equal(count_files(path("cache"), ""), 1);
}

/* No room: writing stops in the middle of the file. */
static void test_full(void **state) {
    (void)state;
    compiler c = {.size = 5000};
    fb__jit_request r = request(&c);
    struct rlimit before, small;
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    void (*handler)(int) = signal(SIGXFSZ, SIG_IGN);
    small = before;
    for (rlim_t room = 0; room < 5000; room += 1000) {
        small.rlim_cur = room;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
        bool first = compiles(&r, NULL), second = compiles(&r, NULL);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        assert_true(first && second);
        assert_int_equal(count_files(path("cache"), ""), 0); /* no part stays */
    }
    signal(SIGXFSZ, handler);
    assert_true(compiles(&r, NULL));
    assert_false(compiles(&r, NULL));
}

static void test_limit(void **state) {
    (void)state;
    compiler c = {.size = 400000};
    fb__jit_request r[4] = {request(&c), request(&c), request(&c), request(&c)};
    fb__jit_code code[4];
    r[1].arch = "1", r[2].arch = "2", r[3].arch = "3";
    setenv("FLASHBACK_CACHE_MB", "1", 1);
    assert_true(compiles(&r[0], &code[0]));
    assert_true(compiles(&r[1], &code[1]));
    set_age(file_of(code[0].key, ".bin"), 2000);
    set_age(file_of(code[1].key, ".bin"), 1000);
    assert_false(compiles(&r[0], NULL)); /* used now, so the other is older */
    put("cache/notes.txt", "not ours");
    put("cache/0123456789abcdef0123456789abcdef.bin.bak", "not ours");
    set_age(path("cache/notes.txt"), 1000000);
    set_age(path("cache/0123456789abcdef0123456789abcdef.bin.bak"), 1000000);
    assert_true(compiles(&r[2], &code[2]));
    assert_true(exists(file_of(code[0].key, ".bin")));
    assert_false(exists(file_of(code[1].key, ".bin")));
    assert_true(exists(file_of(code[2].key, ".bin")));
    assert_int_equal(count_files(path("cache"), ""), 4);

    c.size = 1 << 20; /* with its header it is larger than all that may be there */
    assert_true(compiles(&r[3], &code[3]));
    assert_true(compiles(&r[3], NULL));
    assert_int_equal(count_files(path("cache"), ".bin"), 3);
    c.size -= 72; /* and this fits, alone */
    assert_true(compiles(&r[3], NULL));
    assert_false(compiles(&r[3], NULL));
    assert_int_equal(count_files(path("cache"), ".bin"), 2);
    assert_true(exists(file_of(code[3].key, ".bin")));
    c.size = 400000;
    set_age(file_of(code[3].key, ".bin"), -5000); /* a clock that was wrong */
    assert_true(compiles(&r[0], NULL));
    assert_false(exists(file_of(code[3].key, ".bin")));
    assert_false(compiles(&r[0], NULL));

    setenv("FLASHBACK_CACHE_MB", "0", 1);
    assert_true(compiles(&r[1], NULL));
    assert_true(compiles(&r[1], NULL));
    static const char *const wrong[] = {
        "-1", "x", "1x", " 1", "1e3", "99999999999999999999", "17592186044416"};
    for (size_t i = 0; i < COUNT(wrong); i++) {
        setenv("FLASHBACK_CACHE_MB", wrong[i], 1);
        assert_int_equal(fb__jit_get(&r[0], &code[0]), FB_INVALID);
        assert_null(code[0].at);
        assert_non_null(strstr(fb_last_error(), "FLASHBACK_CACHE_MB"));
        assert_non_null(strstr(fb_last_error(), wrong[i]));
    }
    setenv("FLASHBACK_CACHE_MB", "17592186044415", 1);
    assert_false(compiles(&r[0], NULL));
}

/* What processes leave behind that were killed. */
static void test_left_behind(void **state) {
    (void)state;
    static const char *const old[] = {"cache/0123456789abcdef0123456789abcdef.tmp.17.0123456789abcdef",
                                      "cache/0123456789abcdef0123456789abcdef.lock"};
    static const char *const kept[] = {"cache/0123456789abcdef0123456789abcdee.tmp.17.0123456789abcdef",
                                       "cache/0123456789abcdef0123456789abcdee.lock", "cache/mine.tmp.1",
                                       "cache/my.lock"};
    compiler c = {0};
    fb__jit_request r = request(&c);
    assert_int_equal(mkdir(path("cache"), 0700), 0);
    for (size_t i = 0; i < COUNT(old); i++) {
        put(old[i], "x");
        set_age(path(old[i]), 3700);
    }
    for (size_t i = 0; i < COUNT(kept); i++) {
        put(kept[i], "x");
        set_age(path(kept[i]), i < 2 ? 3500 : 1000000);
    }
    assert_true(compiles(&r, NULL));
    for (size_t i = 0; i < COUNT(old); i++)
        assert_false(exists(path(old[i])));
    for (size_t i = 0; i < COUNT(kept); i++)
        assert_true(exists(path(kept[i])));
}

/* TIME PID WHAT FILE KEY MS ms ..., with times of any size, as the rest of it is expected. */
static void check_line(const char *line, const char *what, const char *file, const fb__jit_code *code,
                       const char *rest) {
    int year, month, day, hour, minute, second, ms, length = 0;
    char want[512];
    assert_int_equal(sscanf(line, "%4d-%2d-%2dT%2d:%2d:%2d.%3dZ%n", &year, &month, &day, &hour, &minute,
                            &second, &ms, &length),
                     7);
    assert_int_equal(length, 24);
    snprintf(want, sizeof want, " %d %s %s %s ", (int)getpid(), what, file, code->key);
    assert_memory_equal(line + length, want, strlen(want));
    const char *time = line + length + strlen(want);
    assert_string_equal(time + strspn(time, "0123456789."), rest);
}

static void test_log(void **state) {
    (void)state;
    static char log[8192];
    compiler c = {.size = 1000};
    fb__jit_request r = request(&c);
    fb__jit_code code, large, none;
    setenv("FLASHBACK_LOG", path("log"), 1);
    compiles(&r, &code);
    compiles(&r, NULL);
    put_bytes(file_of(code.key, ".bin"), "", 0);
    compiles(&r, NULL);
    c.size = (1 << 20) - 72;
    setenv("FLASHBACK_CACHE_MB", "1", 1);
    r.arch = "other";
    compiles(&r, &large);
    setenv("FLASHBACK_CACHE", "off", 1);
    compiles(&r, NULL);
    c.status = FB_DEVICE;
    assert_int_equal(fb__jit_get(&r, &none), FB_DEVICE);

    int fd = open(path("log"), O_RDONLY);
    ssize_t length = read(fd, log, sizeof log - 1);
    close(fd);
    assert_true(length > 0);
    char *lines[8] = {log};
    for (size_t i = 1; i < COUNT(lines); i++) {
        lines[i] = strchr(lines[i - 1], '\n');
        if (!lines[i])
            fail_msg("%zu lines", i - 1);
        *lines[i]++ = 0;
    }
    check_line(lines[0], "compiled", "k.cu", &code, " ms 1000 bytes");
    check_line(lines[1], "hit", "k.cu", &code, " ms 1000 bytes");
    check_line(lines[2], "recompiled", "k.cu", &code,
               " ms 1000 bytes, because its file is shorter than a header");
    check_line(lines[3], "compiled", "k.cu", &large, " ms 1048504 bytes");
    check_line(lines[4], "evicted", "-", &code, " ms 1072 bytes");
    check_line(lines[5], "compiled", "k.cu", &large,
               " ms 1048504 bytes, not kept because there is no folder");
    check_line(lines[6], "failed", "k.cu", &large, " ms 0 bytes");
    assert_string_equal(lines[7], "");
}

static void test_no_log(void **state) {
    (void)state;
    compiler c = {0};
    fb__jit_request r = request(&c);
    fb__jit_code code;
    setenv("FLASHBACK_LOG", path("no/where"), 1);
    assert_int_equal(fb__jit_get(&r, &code), FB_INVALID);
    assert_null(code.at);
    assert_int_equal(c.calls, 0);
    assert_non_null(strstr(fb_last_error(), "FLASHBACK_LOG"));
    assert_non_null(strstr(fb_last_error(), path("no/where")));
    setenv("FLASHBACK_LOG", "/dev/full", 1); /* a line that is lost is no reason not to compute */
    assert_true(compiles(&r, NULL));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_hit, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_failure, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_damage, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_strangers, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_no_folder, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_folders, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_read_only, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_full, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_limit, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_left_behind, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_log, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_no_log, jit_setup, jit_teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
