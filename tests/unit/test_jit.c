/* What the compiler is given, and the key of what it makes. The folder: test_jit_cache.c. */
#include "jit.h"
#include "src/base/hash.h"
#include "src/jit/source.h"
#include "src/jit/spec.h"

/* Every built-in file, byte for byte as in the tree, whose top is the working directory. */
static void test_built_in(void **state) {
    (void)state;
    static const char *const folders[] = {"src/shared", "src/cuda/kernels", "src/metal", "src/metal/kernels"};
    int count = 0;
    for (const fb__jit_file *f = fb__jit_files; f->name; f++, count++) {
        FILE *file = NULL;
        for (size_t i = 0; !file && i < COUNT(folders); i++) {
            char name[256];
            snprintf(name, sizeof name, "%s/%s", folders[i], f->name);
            file = fopen(name, "r");
        }
        assert_non_null(file);
        assert_int_equal(strlen(f->text), f->size);
        char *text = calloc(1, f->size + 2);
        assert_non_null(text);
        size_t size = fread(text, 1, f->size + 1, file);
        if (size != f->size || memcmp(f->text, text, size) != 0)
            fail_msg("%s is not what was built in; has it changed since the build?", f->name);
        free(text);
        fclose(file);
    }
    assert_true(count >= 2); /* lang.h and mask.h */
}

static void test_text(void **state) {
    (void)state;
    compiler c = {0};
    fb__jit_request r = request(&c);
    char *text, key[33];
    r.file = "mask.h";
    unsetenv("FLASHBACK_KERNELS");
    assert_int_equal(fb__jit_spec(&r, &text, key), FB_OK);
    static const char begin[] = "#define FB_D 128\n#define FB_LEFT -3\n#define FB_MOST 9223372036854775807\n"
                                "#line 1 \"mask.h\"\n/* Which cells count";
    assert_memory_equal(text, begin, sizeof begin - 1);
    assert_null(strstr(text, "#include"));

    /* After what lang.h holds, the numbers of lines go on with the one after the #include. */
    const char *inner = strstr(text, "#line 1 \"lang.h\"\n/* The dialect");
    assert_non_null(inner);
    int line = 1, lines = 0;
    for (const char *at = strstr(text, "#line 1 \"mask.h\"\n") + strlen("#line 1 \"mask.h\"\n"); at < inner;
         at++)
        line += *at == '\n';
    char want[64];
    snprintf(want, sizeof want, "\n#line %d \"mask.h\"\n", line + 1);
    assert_non_null(strstr(inner, want));
    for (const char *at = text; (at = strstr(at, "#line ")); at++)
        lines++;
    assert_int_equal(lines, 3);
    free(text);
}

static void test_includes(void **state) {
    (void)state;
    put("cuda/kernels/a.cu", "first\n"
                             "#include \"b.cuh\"\n"
                             " #  include\t\"../../shared/s.h\" // why\n"
                             "#include \"b.cuh\"\n"
                             "#include \"a.cu\"\n"
                             "#include <cuda.h>\n"
                             "// #include \"c.cuh\"\n"
                             "#include \"unclosed\n"
                             "#include NAME\n"
                             "#includes\n"
                             "#\n"
                             "last, without an end");
    put("cuda/kernels/b.cuh", "#pragma once\n#pragma unroll\nb\n#include \"s.h\"\n");
    put("cuda/kernels/c.cuh", "c\n");
    put("shared/s.h", "");
    char *text;
    assert_int_equal(fb__jit_source("a.cu", &text), FB_OK);
    assert_string_equal(text, "#line 1 \"a.cu\"\n"
                              "first\n"
                              "#line 1 \"b.cuh\"\n"
                              "\n"
                              "#pragma unroll\n"
                              "b\n"
                              "#line 1 \"s.h\"\n"
                              "#line 5 \"b.cuh\"\n"
                              "#line 3 \"a.cu\"\n"
                              "\n"
                              "\n"
                              "\n"
                              "#include <cuda.h>\n"
                              "// #include \"c.cuh\"\n"
                              "#include \"unclosed\n"
                              "#include NAME\n"
                              "#includes\n"
                              "#\n"
                              "last, without an end\n");
    free(text);
    put("shared/s.h", "s");
    assert_int_equal(fb__jit_source("s.h", &text), FB_OK); /* found in ../../shared */
    assert_string_equal(text, "#line 1 \"s.h\"\ns\n");
    free(text);
    put("cuda/s.h", "near\n");
    assert_int_equal(fb__jit_source("s.h", &text), FB_OK); /* found in .. */
    assert_string_equal(text, "#line 1 \"s.h\"\nnear\n");
    free(text);
    put("cuda/kernels/s.h", "nearer\n");
    assert_int_equal(fb__jit_source("s.h", &text), FB_OK);
    assert_string_equal(text, "#line 1 \"s.h\"\nnearer\n");
    free(text);
}

/* A refusal, with a sentence that names all of these. */
static void refused(const char *file, fb_status status, const char *const words[]) {
    char *text = (char *)1;
    assert_int_equal(fb__jit_source(file, &text), status);
    assert_null(text);
    for (; *words; words++)
        if (!strstr(fb_last_error(), *words))
            fail_msg("'%s' lacks '%s'", fb_last_error(), *words);
}

static void test_missing(void **state) {
    (void)state;
    refused(
        "no.cu", FB_INVALID,
        (const char *const[]){"FLASHBACK_KERNELS", "'no.cu'", path("cuda/kernels"), "No such file", NULL});
    put("cuda/kernels/a.cu", "#include \"x/no.cuh\"\n");
    refused("a.cu", FB_INVALID,
            (const char *const[]){"FLASHBACK_KERNELS", "'no.cuh'", path("cuda/kernels"), NULL});
    assert_int_equal(mkdir(path("cuda/kernels/folder.cu"), 0700), 0);
    refused("folder.cu", FB_INVALID, (const char *const[]){"FLASHBACK_KERNELS", "'folder.cu'", NULL});
    assert_int_equal(mkfifo(path("cuda/kernels/pipe.cu"), 0700), 0);
    refused("pipe.cu", FB_INVALID, (const char *const[]){"FLASHBACK_KERNELS", "'pipe.cu'", NULL});
    char longest[5000];
    memset(longest, 'x', sizeof longest - 1);
    longest[sizeof longest - 1] = 0;
    refused(longest, FB_COMPILE, (const char *const[]){"63", NULL});
    setenv("FLASHBACK_KERNELS", longest, 1);
    refused("a.cu", FB_INVALID, (const char *const[]){"FLASHBACK_KERNELS", NULL});
    unsetenv("FLASHBACK_KERNELS");
    refused("no.cu", FB_COMPILE, (const char *const[]){"'no.cu'", NULL});
}

/* Files that include each other in a chain that has no end, and one whose name is cut. */
static void test_too_many(void **state) {
    (void)state;
    char name[128], text[128];
    for (int i = 0; i < 70; i++) {
        snprintf(name, sizeof name, "cuda/kernels/%d.cu", i);
        snprintf(text, sizeof text, "#include \"%d.cu\"\n", i + 1);
        put(name, text);
    }
    refused("0.cu", FB_COMPILE, (const char *const[]){"'64.cu'", "at most 64 files", NULL});
    put("cuda/kernels/70.cu", "end\n");
    char *whole;
    assert_int_equal(fb__jit_source("7.cu", &whole), FB_OK); /* 64 of them */
    assert_non_null(strstr(whole, "#line 1 \"70.cu\"\nend\n#line 2 \"69.cu\"\n"));
    free(whole);
    put("cuda/kernels/a.cu",
        "#include \"a123456789b123456789c123456789d123456789e123456789f123456789g.cuh\"\n");
    refused("a.cu", FB_INVALID, (const char *const[]){"'a123456789b", NULL});
}

static void key_of(const fb__jit_request *r, char key[33]) {
    char *text;
    assert_int_equal(fb__jit_spec(r, &text, key), FB_OK);
    free(text);
    assert_int_equal(strspn(key, "0123456789abcdef"), 32);
    assert_int_equal(key[32], 0);
}

static void test_key(void **state) {
    (void)state;
    static const fb__define value[] = {{"FB_D", 64}, {"FB_LEFT", -3}, {"FB_MOST", INT64_MAX}};
    static const fb__define name[] = {{"FB_DV", 128}, {"FB_LEFT", -3}, {"FB_MOST", INT64_MAX}};
    static const fb__define order[] = {{"FB_LEFT", -3}, {"FB_D", 128}, {"FB_MOST", INT64_MAX}};
    compiler c = {0};
    fb__jit_request r[12];
    char keys[12][33], again[33];
    for (size_t i = 0; i < COUNT(r); i++)
        r[i] = request(&c);
    r[1].defines = value;
    r[2].defines = name;
    r[3].defines = order;
    r[4].count = 2;
    r[5].count = 0;
    r[6].arch = "sm_80";
    r[7].compiler = "nvrtc 13.1";
    r[8].options = "";
    r[9].arch = "sm_90", r[9].compiler = "anvrtc 13.0"; /* the same letters, one further */
    r[10].file = "other.cu";
    for (size_t i = 0; i < COUNT(r); i++) {
        if (i == 11)
            put("cuda/kernels/k.cu", "kernel \n");
        key_of(&r[i], keys[i]);
        for (size_t j = 0; j < i; j++)
            assert_string_not_equal(keys[i], keys[j]);
    }
    put("cuda/kernels/k.cu", "kernel\n");
    r[0].context = NULL; /* what makes it is no part of what it is */
    key_of(&r[0], again);
    assert_string_equal(again, keys[0]);
}

static fb__hash hash_of(const void *data, size_t size) {
    fb__hash hash = fb__hash_begin();
    fb__hash_add(&hash, data, size);
    return fb__hash_end(hash);
}

/* Bits that are flipped, lengths and pieces change both halves, and each time in some 32 of 64 bits. */
static void test_hash(void **state) {
    (void)state;
    enum { SIZE = 40, ROWS = 8 * SIZE + SIZE + 2 };
    static fb__hash rows[ROWS];
    unsigned char data[SIZE] = {0};
    int n = 0;
    double flips = 0;
    rows[n++] = hash_of(data, SIZE);
    for (int bit = 0; bit < 8 * SIZE; bit++, n++) {
        data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        rows[n] = hash_of(data, SIZE);
        data[bit / 8] ^= (unsigned char)(1 << bit % 8);
        flips += __builtin_popcountll(rows[n].a ^ rows[0].a) + __builtin_popcountll(rows[n].b ^ rows[0].b);
    }
    for (size_t size = 0; size < SIZE; size++)
        rows[n++] = hash_of(data, size);
    rows[n] = fb__hash_begin();
    fb__hash_add(&rows[n], data, 8);
    fb__hash_add(&rows[n], data, SIZE - 8);
    rows[n] = fb__hash_end(rows[n]);
    assert_int_equal(++n, ROWS);
    for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++)
            assert_true(rows[i].a != rows[j].a && rows[i].b != rows[j].b);
    flips /= 8 * SIZE;
    assert_true(flips > 60 && flips < 68); /* 64 +- 0.3, were they random */
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_built_in, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_text, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_includes, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_missing, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_too_many, jit_setup, jit_teardown),
        cmocka_unit_test_setup_teardown(test_key, jit_setup, jit_teardown),
        cmocka_unit_test(test_hash),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
