/* The text to learn: which files it takes and in what order, what is held out, where batches come from. */
#include "examples/gpt/text.h"

#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* SANITIZED: a sanitizer has its own allocator and address space. */
#if defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
#define SANITIZED
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define SANITIZED
#endif

/* ---- A folder for a test --------------------------------------------------------------------------- */

typedef struct path {
    char at[256];
} path;

static int make_folder(void **state) {
    static path top;
    strcpy(top.at, "/tmp/flashback-text-XXXXXX");
    *state = &top;
    /* Another user enters it too: test_unreadable. */
    return !mkdtemp(top.at) || chmod(top.at, 0755);
}

static int drop_folder(void **state) {
    char command[300];
    snprintf(command, sizeof command, "rm -rf '%s'", ((const path *)*state)->at);
    return system(command);
}

static path below(void **state, const char *name) {
    path p;
    snprintf(p.at, sizeof p.at, "%.100s/%.100s", ((const path *)*state)->at, name);
    return p;
}

/* Writes a file, and the folders on the way to it. */
static void put(void **state, const char *name, const char *words) {
    path p = below(state, name);
    for (char *slash = strchr(p.at + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = 0;
        if (mkdir(p.at, 0755) && errno != EEXIST)
            fail_msg("%s: %s", p.at, strerror(errno));
        *slash = '/';
    }
    FILE *f = fopen(p.at, "w");
    assert_non_null(f);
    assert_true(fputs(words, f) >= 0);
    assert_int_equal(fclose(f), 0);
}

static void expect_text(const char *const *paths, int count, const char *expected) {
    text t;
    complaint why;
    if (!text_open(&t, paths, count, &why))
        fail_msg("refused: %s", why.text);
    if (t.size != (int64_t)strlen(expected) || memcmp(t.bytes, expected, (size_t)t.size) != 0)
        fail_msg("the text is '%.*s', expected '%s'", (int)t.size, (const char *)t.bytes, expected);
    text_close(&t);
    assert_null(t.bytes);
}

static void expect_refusal(const char *const *paths, int count, const char *first, const char *second) {
    text t;
    complaint why;
    assert_false(text_open(&t, paths, count, &why));
    if (!strstr(why.text, first) || !strstr(why.text, second))
        fail_msg("the sentence \"%s\" lacks \"%s\" or \"%s\"", why.text, first, second);
    assert_null(t.bytes);
    assert_int_equal(t.size, 0);
}

/* ---- Which files, in what order -------------------------------------------------------------------- */

/* Made in an order that is not that of their paths. */
static void put_tree(void **state) {
    put(state, "tree/z.py", "<z>");
    put(state, "tree/sub/z.md", "<sub/z>");
    put(state, "tree/b.txt", "<b>");
    put(state, "tree/sub/a.inc", "<sub/a>");
    put(state, "tree/a.h", "<a>");
    put(state, "tree/sub/deep/er/m.c", "<m>");
    put(state, "tree/sub.c", "<sub.c>"); /* '.' sorts before '/' */
    put(state, "tree/empty.c", "");
    put(state, "tree/.hidden.c", "<wrong>");
    put(state, "tree/.c", "<wrong>");
    put(state, "tree/.git/x.c", "<wrong>");
    put(state, "tree/build/x.c", "<wrong>");
    put(state, "tree/sub/build/x.c", "<wrong>");
    put(state, "tree/sub/.cache/x.c", "<wrong>");
    put(state, "tree/picture.png", "<png>");
    put(state, "tree/noending", "<wrong>");
    put(state, "tree/cc", "<wrong>");
    put(state, "elsewhere.c", "<elsewhere>");
    assert_int_equal(symlink("../elsewhere.c", below(state, "tree/link.c").at), 0);
    assert_int_equal(symlink(".", below(state, "tree/circle").at), 0);
    assert_int_equal(mkfifo(below(state, "tree/pipe.c").at, 0644), 0);
    assert_int_equal(mkdir(below(state, "tree/folder.c").at, 0755), 0);
}

#define TREE "<a><b><sub.c><sub/a><m><sub/z><z>"

static void test_order(void **state) {
    put_tree(state);
    const path tree = below(state, "tree"), slash = below(state, "tree/"),
               png = below(state, "tree/picture.png");
    const path other = below(state, "elsewhere.c"), link = below(state, "tree/link.c");
    const path build = below(state, "tree/build"), hidden = below(state, "tree/.git");
    expect_text((const char *[]){tree.at}, 1, TREE);
    expect_text((const char *[]){slash.at}, 1, TREE);
    /* Those that are named come in the order of the names, whatever they are called. */
    expect_text((const char *[]){png.at}, 1, "<png>");
    expect_text((const char *[]){png.at, tree.at, other.at}, 3, "<png>" TREE "<elsewhere>");
    expect_text((const char *[]){other.at, tree.at, png.at}, 3, "<elsewhere>" TREE "<png>");
    expect_text((const char *[]){link.at, build.at, hidden.at}, 3, "<elsewhere><wrong><wrong>");
}

static void test_unfit_paths(void **state) {
    put(state, "empty/none.c", "");
    put(state, "empty/other.png", "<png>");
    put(state, "one.c", "x");
    const path missing = below(state, "missing"), empty = below(state, "empty"), one = below(state, "one.c");
    const path none = below(state, "empty/none.c"), through = below(state, "one.c/x"),
               pipe = below(state, "pipe");
    assert_int_equal(mkfifo(pipe.at, 0644), 0);
    expect_refusal((const char *[]){missing.at}, 1, missing.at, "No such file");
    expect_refusal((const char *[]){one.at, missing.at}, 2, missing.at, "No such file");
    expect_refusal((const char *[]){through.at}, 1, through.at, "Not a directory");
    expect_refusal((const char *[]){pipe.at}, 1, pipe.at, "neither a file nor a folder");
    expect_refusal((const char *[]){"/dev/null"}, 1, "/dev/null", "neither a file nor a folder");
    expect_refusal((const char *[]){empty.at}, 1, empty.at, "nothing to learn, 1 files with 0 bytes");
    expect_refusal((const char *[]){none.at, empty.at}, 2, "and the others", "2 files with 0 bytes");
    expect_refusal((const char *[]){""}, 1, "cannot be read", "No such file");
    expect_refusal(NULL, 0, "no file", "at least one");
    expect_text((const char *[]){none.at, one.at}, 2, "x");
}

/* Root reads everything, so this is done as nobody. */
static void test_unreadable(void **state) {
    put(state, "locked/a.c", "a");
    put(state, "locked/sub/b.c", "b");
    const path folder = below(state, "locked"), file = below(state, "locked/a.c");
    const path sub = below(state, "locked/sub"), slash = below(state, "locked/");
    const uid_t before = geteuid();
    if (before == 0)
        assert_int_equal(seteuid(65534), 0);
    expect_text((const char *[]){folder.at}, 1, "ab");
    assert_int_equal(seteuid(before), 0);
    assert_int_equal(chmod(file.at, 0), 0);
    if (before == 0)
        assert_int_equal(seteuid(65534), 0);
    expect_refusal((const char *[]){file.at}, 1, file.at, "Permission denied");
    expect_refusal((const char *[]){folder.at}, 1, file.at, "Permission denied");
    expect_refusal((const char *[]){slash.at}, 1, file.at, "Permission denied");
    assert_int_equal(seteuid(before), 0);
    assert_int_equal(chmod(file.at, 0644) || chmod(sub.at, 0), 0);
    if (before == 0)
        assert_int_equal(seteuid(65534), 0);
    expect_refusal((const char *[]){folder.at}, 1, sub.at, "Permission denied");
    assert_int_equal(seteuid(before), 0);
    assert_int_equal(chmod(sub.at, 0755), 0);
}

/* The address space in use: a BLAS that is linked in may have taken much of it. */
static rlim_t address_space(void) {
    unsigned long pages = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    if (f) {
        if (fscanf(f, "%lu", &pages) != 1)
            pages = 0;
        fclose(f);
    }
    return (rlim_t)pages * (rlim_t)sysconf(_SC_PAGESIZE);
}

/* A file of holes that fits once into what a child may still take, but not twice. Exits with 0 if all is as
 * it should. */
static int open_giant(const char *small, const char *giant) {
    const rlim_t most = address_space() + ((rlim_t)1 << 30);
    const struct rlimit limit = {most, most};
    text t;
    complaint why = {""};
    if (truncate(giant, (off_t)700 << 20) || setrlimit(RLIMIT_AS, &limit))
        return 2;
    const bool opened = text_open(&t, (const char *[]){small, giant}, 2, &why);
    const bool told =
        strstr(why.text, giant) && strstr(why.text, "734003200 bytes") && strstr(why.text, "memory");
    return opened || !told || t.bytes || t.size;
}

static void test_longer_than_memory(void **state) {
#ifdef SANITIZED
    (void)state, (void)open_giant;
    skip();
#else
    int status = 0;
    put(state, "small.c", "0123456789");
    put(state, "giant.c", "");
    const path small = below(state, "small.c"), giant = below(state, "giant.c");
    const pid_t child = fork();
    if (child == 0)
        _exit(open_giant(small.at, giant.at));
    assert_int_equal(waitpid(child, &status, 0), child);
    assert_int_equal(status, 0);
#endif
}

/* ---- The two parts --------------------------------------------------------------------------------- */

static void test_split(void **state) {
    static const struct {
        int size, train;
    } rows[] = {{1, 1}, {9, 9}, {10, 9}, {11, 10}, {19, 18}, {20, 18}, {99, 90}, {100, 90}, {101, 91}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        char words[128] = "";
        text t;
        complaint why;
        memset(words, 'x', (size_t)rows[i].size);
        put(state, "split.c", words);
        const path p = below(state, "split.c");
        assert_true(text_open(&t, (const char *[]){p.at}, 1, &why));
        assert_int_equal(t.size, rows[i].size);
        assert_int_equal(t.train, rows[i].train);
        text_close(&t);
    }
}

static void test_fits(void **state) {
    (void)state;
    complaint why = {""};
    text t = {NULL, 1000, 900};
    assert_true(text_fits(&t, 99, &why));
    assert_false(text_fits(&t, 100, &why));
    assert_non_null(strstr(why.text, "context is 100,"));
    assert_non_null(strstr(why.text, "1000 bytes the last 100"));
    assert_non_null(strstr(why.text, "at most 99,"));
    assert_false(text_fits(&t, INT64_MAX, &why));
    t = (text){NULL, 1000, 30}; /* the part to train on counts too */
    assert_true(text_fits(&t, 29, &why));
    assert_false(text_fits(&t, 30, &why));
    t = (text){NULL, 19, 18};
    assert_false(text_fits(&t, 1, &why));
    assert_non_null(strstr(why.text, "19 bytes, of which 1 are held out"));
    assert_non_null(strstr(why.text, "at least 20 bytes"));
    t = (text){NULL, 20, 18};
    assert_true(text_fits(&t, 1, &why));
    assert_false(text_fits(&t, 2, &why));
    t = (text){NULL, 9, 9};
    assert_false(text_fits(&t, 1, &why));
}

/* ---- Batches --------------------------------------------------------------------------------------- */

enum { SIZE = 250, TRAIN = 225 };

/* Every byte says where it is. */
static text numbered(uint8_t bytes[SIZE]) {
    for (int i = 0; i < SIZE; i++)
        bytes[i] = (uint8_t)i;
    return (text){bytes, SIZE, TRAIN};
}

/* The start of a row, which must be a piece of [lo, hi). */
static int start_of(const uint8_t *row, int context, int lo, int hi) {
    for (int i = 0; i <= context; i++)
        assert_int_equal(row[i], row[0] + i);
    assert_in_range(row[0], lo, hi - context - 1);
    return row[0];
}

static void test_batch_is_of_the_first_part(void **state) {
    (void)state;
    enum { BATCH = 3, CONTEXT = 20, STARTS = TRAIN - CONTEXT };
    uint8_t bytes[SIZE], tokens[BATCH * (CONTEXT + 1) + 1];
    int seen[STARTS] = {0}, met = 0;
    const text t = numbered(bytes);
    for (int step = 0; step < 4000; step++) {
        tokens[BATCH * (CONTEXT + 1)] = 255;
        text_batch(&t, 5, step, 0, BATCH, CONTEXT, tokens);
        assert_int_equal(tokens[BATCH * (CONTEXT + 1)], 255);
        for (int row = 0; row < BATCH; row++)
            seen[start_of(tokens + row * (CONTEXT + 1), CONTEXT, 0, TRAIN)]++;
    }
    /* 12000 draws from 205 starts, 58.5 each: seven deviations either way. */
    for (int i = 0; i < STARTS; i++)
        met += seen[i] > 5 && seen[i] < 113;
    assert_int_equal(met, STARTS);

    uint8_t all[TRAIN];
    text_batch(&t, 5, 1, 0, 1, TRAIN - 1, all); /* one place only */
    assert_int_equal(start_of(all, TRAIN - 1, 0, TRAIN), 0);
}

/* Numbers of splitmix64 from Python, whose integers do not overflow. */
static void test_batch_is_the_same_everywhere(void **state) {
    (void)state;
    static const int expected[2][4] = {{214, 81, 16, 81}, {36, 54, 88, 180}};
    uint8_t bytes[SIZE], tokens[4 * 11];
    const text t = numbered(bytes);
    for (int which = 0; which < 2; which++) {
        text_batch(&t, which ? UINT64_MAX : 1, which ? 123456789012 : 0, which ? 3 : 0, 4, 10, tokens);
        for (int row = 0; row < 4; row++)
            assert_int_equal(start_of(tokens + row * 11, 10, 0, TRAIN), expected[which][row]);
    }
}

static void test_batches_differ(void **state) {
    (void)state;
    enum { BATCH = 8, CONTEXT = 10, BYTES = BATCH * (CONTEXT + 1), MANY = 64 };
    uint8_t bytes[SIZE], tokens[MANY][BYTES], again[BYTES];
    const text t = numbered(bytes);
    for (int i = 0; i < MANY; i++)
        text_batch(&t, (uint64_t)(i & 3), i >> 2 & 3, i >> 4, BATCH, CONTEXT, tokens[i]);
    for (int i = 0; i < MANY; i++) {
        text_batch(&t, (uint64_t)(i & 3), i >> 2 & 3, i >> 4, BATCH, CONTEXT, again);
        assert_memory_equal(again, tokens[i], BYTES);
        for (int j = 0; j < i; j++)
            assert_memory_not_equal(tokens[i], tokens[j], BYTES);
    }
    for (int i = 0; i < MANY; i++) { /* nor are all rows of a batch one */
        int other = 0;
        for (int row = 1; row < BATCH; row++)
            other += tokens[i][row * (CONTEXT + 1)] != tokens[i][0];
        assert_in_range(other, BATCH / 2, BATCH - 1);
    }
}

static void check_spread(const text *t, int batches, int batch, int context) {
    uint8_t tokens[SIZE];
    const int pieces = batches * batch, last = SIZE - TRAIN - (context + 1);
    int before = 0;
    assert_true(batch * (context + 1) < SIZE);
    for (int repeat = 0; repeat < 2; repeat++)
        for (int n = 0; n < batches; n++) {
            tokens[batch * (context + 1)] = 255;
            text_held_out(t, n, batches, batch, context, tokens);
            assert_int_equal(tokens[batch * (context + 1)], 255);
            for (int row = 0; row < batch; row++) {
                const int i = n * batch + row;
                const int start = start_of(tokens + row * (context + 1), context, TRAIN, SIZE);
                const int step = start - before, even = pieces > 1 ? last / (pieces - 1) : 0;
                if (i == 0)
                    assert_int_equal(start, TRAIN);
                else
                    assert_in_range(step, even, even + 1);
                if (i == pieces - 1 && pieces > 1)
                    assert_int_equal(start, TRAIN + last);
                before = start;
            }
        }
}

static void test_held_out(void **state) {
    (void)state;
    uint8_t bytes[SIZE];
    const text t = numbered(bytes);
    check_spread(&t, 1, 1, 10);
    check_spread(&t, 1, 2, 10);
    check_spread(&t, 2, 1, 10);
    check_spread(&t, 3, 4, 4);
    check_spread(&t, 5, 3, 1);
    check_spread(&t, 40, 5, 7); /* more pieces than places */
    check_spread(&t, 1, 1, SIZE - TRAIN - 1);
    check_spread(&t, 4, 3, SIZE - TRAIN - 1); /* one place only */
    check_spread(&t, 4, 3, SIZE - TRAIN - 2);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_unfit_paths),
        cmocka_unit_test(test_unreadable),
        cmocka_unit_test(test_longer_than_memory),
        cmocka_unit_test(test_split),
        cmocka_unit_test(test_fits),
        cmocka_unit_test(test_batch_is_of_the_first_part),
        cmocka_unit_test(test_batch_is_the_same_everywhere),
        cmocka_unit_test(test_batches_differ),
        cmocka_unit_test(test_held_out),
    };
    return cmocka_run_group_tests(tests, make_folder, drop_folder);
}
