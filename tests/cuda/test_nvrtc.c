/* The compiler: where it is looked for, in which order, what is refused, and what its failures come to. With
 * mocks; at the end with the real one, where the machine has it. */
#include "src/cuda/nvrtc.h"
#include "support.h"

/* ---- The search ---- */

static const char *const nowhere[] = {"/nonexistent/flashback/*/lib", NULL};
static const char *const mocks[] = {"/nonexistent/flashback/*/lib", MOCKS "/nvrtc1*", NULL};

static void expect_path(const fb__nvrtc *n, const char *path, int major) {
    if (strcmp(n->path, path) != 0)
        fprintf(stderr, "%s\n", n->path);
    expect(strcmp(n->path, path) == 0 && n->major == major);
}

/* What the variable names is taken or refused. */
static void by_variable(void) {
    fb__nvrtc n;
    setenv("FLASHBACK_NVRTC", NVRTC13, 1);
    expect(fb__nvrtc_open(&n, 12080) == FB_NO_DEVICE);
    expect_words(fb__error_text(), "it is NVRTC 13.0, and the driver, for CUDA 12.8, does not load its code");
    expect(fb__nvrtc_open(&n, 13000) == FB_OK);
    expect_path(&n, NVRTC13, 13);
    setenv("FLASHBACK_NVRTC", NVRTC12, 1);
    expect(fb__nvrtc_open(&n, 0) == FB_OK);
    expect_path(&n, NVRTC12, 12);
    setenv("FLASHBACK_NVRTC", "/nonexistent/libnvrtc.so", 1);
    expect(fb__nvrtc_open(&n, 0) == FB_NO_DEVICE);
    expect_words(fb__error_text(), "FLASHBACK_NVRTC is \"/nonexistent/libnvrtc.so\"");
    expect_words(fb__error_text(), "No such file");
    setenv("FLASHBACK_NVRTC", MOCKS "/driver/libcuda.so.1", 1);
    expect(fb__nvrtc_open(&n, 0) == FB_NO_DEVICE);
    expect_words(fb__error_text(), "it has no function nvrtcVersion");
    setenv("FLASHBACK_NVRTC", "", 1);
    expect(fb__nvrtc_open(&n, 12080) == FB_OK); /* counts as unset; the process has both */
    expect_path(&n, NVRTC12, 12);
    expect(fb__nvrtc_open(&n, 0) == FB_OK);
    expect_path(&n, NVRTC13, 13);
}

/* What the process has comes before what the loader would find, even if that is newer. */
static void in_process(void) {
    fb__nvrtc n;
    load_nvrtc(NVRTC12);
    expect(fb__nvrtc_open_in(&n, 13000, nowhere) == FB_OK);
    expect_path(&n, NVRTC12, 12);
    expect(n.minor == 0);
}

/* Runs with MOCKS/nvrtc13 in the loader's path. */
static void by_loader(void) {
    fb__nvrtc n;
    expect(fb__nvrtc_open_in(&n, 13000, nowhere) == FB_OK);
    expect_path(&n, NVRTC13, 13);
    expect(fb__nvrtc_open_in(&n, 12080, nowhere) == FB_NO_DEVICE);
}

static void by_folder(void) {
    fb__nvrtc n;
    expect(fb__nvrtc_open_in(&n, 12080, mocks) == FB_OK);
    expect_path(&n, NVRTC12, 12);
}

static void by_folder_newest(void) {
    fb__nvrtc n;
    expect(fb__nvrtc_open_in(&n, 0, mocks) == FB_OK);
    expect_path(&n, NVRTC13, 13);
}

static void nowhere_at_all(void) {
    fb__nvrtc n;
    expect(fb__nvrtc_open_in(&n, 0, nowhere) == FB_NO_DEVICE);
    expect_words(fb__error_text(), nowhere[0]);
    expect_words(fb__error_text(), "libnvrtc.so.13");
    expect_words(fb__error_text(), "pip install nvidia-cuda-nvrtc");
    expect_words(fb__error_text(), "FLASHBACK_NVRTC");
    expect(fb__nvrtc_open_in(&n, 11080, mocks) == FB_NO_DEVICE);
    expect_words(fb__error_text(), "of version 11 or older");
}

static void test_variable(void **state) {
    (void)state;
    in_child(by_variable);
}

/* The loader reads its path when a program starts, so these two start this one again. */
static void start_again(const char *word) {
    setenv("LD_LIBRARY_PATH", MOCKS "/nvrtc13", 1);
    execl("/proc/self/exe", "test_nvrtc", word, (char *)NULL);
    perror("execl");
    _exit(1);
}

static void start_in_process(void) { start_again("in_process"); }

static void start_by_loader(void) { start_again("by_loader"); }

static void test_loader(void **state) {
    (void)state;
    in_child(start_in_process);
    in_child(start_by_loader);
}

static void test_folders(void **state) {
    (void)state;
    if (is_installed("libnvrtc.so.13") || is_installed("libnvrtc.so.12"))
        skip();
    in_child(by_folder);
    in_child(by_folder_newest);
    in_child(nowhere_at_all);
}

/* ---- Compiling ---- */

static void open_mock(fb__nvrtc *n, const char *path, mock_nvrtc_state **mock) {
    *mock = load_nvrtc(path);
    setenv("FLASHBACK_NVRTC", path, 1);
    expect(fb__nvrtc_open(n, 0) == FB_OK);
}

static void compiled(void) {
    fb__nvrtc n;
    mock_nvrtc_state *mock;
    open_mock(&n, NVRTC13, &mock);
    mock->log = "ptxas info    : Used 168 registers\n";
    static const char *const more[] = {"--maxrregcount=168", NULL};
    fb__nvrtc_job job = {.nvrtc = &n, .arch = "sm_90a", .options = more};
    void *code = NULL;
    size_t size = 0;
    expect(fb__nvrtc_compile(&job, "text", "forward.cu", &code, &size) == FB_OK);
    expect(size == sizeof "mock machine code" && strcmp(code, "mock machine code") == 0);
    expect(job.log && strcmp(job.log, mock->log) == 0);
    expect(strcmp(mock->name, "forward.cu") == 0 && mock->programs == 0);
    expect(strcmp(mock->options,
                  "--gpu-architecture=sm_90a\n--std=c++17\n-default-device\n--ptxas-options=-v\n"
                  "--no-cache\n--split-compile=0\n--maxrregcount=168\n") == 0);
    char words[256] = "";
    fb__text text = {words, sizeof words, 0};
    fb__nvrtc_options(&job, &text);
    expect(strcmp(words, "--gpu-architecture=sm_90a --std=c++17 -default-device --ptxas-options=-v "
                         "--no-cache --split-compile=0 --maxrregcount=168") == 0);
    free(code);
    free(job.log);
}

/* The option for the compiler's own cache is as old as that. */
static void compiled_by_older(void) {
    fb__nvrtc n;
    mock_nvrtc_state *mock = load_nvrtc(NVRTC12);
    for (mock->minor = 8; mock->minor <= 9; mock->minor++) {
        open_mock(&n, NVRTC12, &mock);
        fb__nvrtc_job job = {.nvrtc = &n, .arch = "sm_80"};
        void *code = NULL;
        size_t size = 0;
        expect(fb__nvrtc_compile(&job, "text", "forward.cu", &code, &size) == FB_OK && !job.log);
        expect((strstr(mock->options, "--no-cache") != NULL) == (mock->minor == 9));
        free(code);
    }
}

static void refused(void) {
    static const struct {
        const char *log, *words;
    } rows[] = {
        {"f.cu(7): warning: unused\nf.cu(8): error: identifier \"y\" is undefined\n  int x = y;\n\nt.cuh(9): "
         "error: no\n\nf.cu(10): error: third\n3 errors detected in the compilation of \"f.cu\".\n",
         "f.cu:8: identifier \"y\" is undefined; t.cuh:9: no (forward.cu for sm_90a by NVRTC 13.0)"},
        {"ptxas info    : 0 bytes gmem\nptxas application ptx input, line 25; error   : Unknown modifier\n",
         "ptxas application ptx input, line 25; error   : Unknown modifier (forward.cu"},
        {"\nptxas fatal   : Ptx assembly aborted", "ptxas fatal   : Ptx assembly aborted (forward.cu"},
        {"a(2): error: ", "a:2:  (forward.cu"},
        {"): error: odd", ")"},
        {"\n\nneither one nor the other\nmore", "neither one nor the other (forward.cu"},
        {NULL, "nvrtcCompileProgram failed for forward.cu: NVRTC_ERROR_COMPILATION"},
    };
    fb__nvrtc n;
    mock_nvrtc_state *mock;
    open_mock(&n, NVRTC13, &mock);
    mock->result = 6;
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        fb__nvrtc_job job = {.nvrtc = &n, .arch = "sm_90a"};
        void *code = &n;
        size_t size = 1;
        mock->log = rows[i].log;
        expect(fb__nvrtc_compile(&job, "text", "forward.cu", &code, &size) == FB_COMPILE);
        expect(!code && !size && mock->programs == 0);
        expect_words(fb__error_text(), rows[i].words);
        expect(!rows[i].log || strcmp(job.log, rows[i].log) == 0);
        free(job.log);
    }
}

/* A log without end does not push the rest out of the sentence. */
static void refused_at_length(void) {
    fb__nvrtc n;
    mock_nvrtc_state *mock;
    open_mock(&n, NVRTC13, &mock);
    size_t length = 100000;
    char *log = malloc(length + 1);
    expect(log);
    memset(log, 'x', length);
    memcpy(log, "f.cu(1): error: ", 16);
    log[length] = 0;
    mock->log = log;
    mock->result = 6;
    fb__nvrtc_job job = {.nvrtc = &n, .arch = "sm_90a"};
    void *code;
    size_t size;
    expect(fb__nvrtc_compile(&job, "text", "forward.cu", &code, &size) == FB_COMPILE);
    expect(strncmp(fb__error_text(), "f.cu:1: xxx", 11) == 0);
    expect_words(fb__error_text(), "NVRTC 13.0");
    free(job.log);
    free(log);
}

static void failures(void) {
    fb__nvrtc n;
    mock_nvrtc_state *mock;
    open_mock(&n, NVRTC13, &mock);
    mock->log = "a log";
    for (long at = 1;; at++) {
        fb__nvrtc_job job = {.nvrtc = &n, .arch = "sm_90a"};
        void *code = NULL;
        size_t size = 0;
        mock->failed = NULL;
        mock->fail_at = mock->calls + at;
        mock->fail_with = at % 2 ? 1 : 11;
        fb_status status = fb__nvrtc_compile(&job, "text", "forward.cu", &code, &size);
        expect(mock->programs == 0);
        const char *failed = mock->failed;
        if (failed && strncmp(failed, "nvrtcGetProgramLog", 18) == 0)
            expect(status == FB_OK && !job.log); /* the log is an extra */
        else if (failed && strcmp(failed, "nvrtcCompileProgram") == 0)
            expect(status != FB_OK && !code);
        else if (failed) {
            expect(status == (at % 2 ? FB_MEMORY : FB_COMPILE) && !code);
            expect_words(fb__error_text(), failed);
        } else
            expect(status == FB_OK && at > 6);
        free(code);
        free(job.log);
        if (!failed)
            break;
    }
}

static void too_many_options(void) {
    fb__nvrtc n;
    mock_nvrtc_state *mock;
    open_mock(&n, NVRTC13, &mock);
    const char *more[FB__NVRTC_OPTIONS + 1];
    for (int i = 0; i < FB__NVRTC_OPTIONS; i++)
        more[i] = "-x";
    more[FB__NVRTC_OPTIONS] = NULL;
    fb__nvrtc_job job = {.nvrtc = &n, .arch = "sm_90a", .options = more};
    void *code;
    size_t size;
    expect(fb__nvrtc_compile(&job, "text", "forward.cu", &code, &size) == FB_COMPILE);
    expect_words(fb__error_text(), "options");
    job.options = more + 6; /* there are six besides */
    expect(fb__nvrtc_compile(&job, "text", "forward.cu", &code, &size) == FB_OK);
    free(code);
}

static void test_compile(void **state) {
    (void)state;
    in_child(compiled);
    in_child(compiled_by_older);
    in_child(refused);
    in_child(refused_at_length);
    in_child(failures);
    in_child(too_many_options);
}

/* ---- The real one ---- */

static void real_compile(fb__nvrtc *n) {
    fb__nvrtc_job job = {.nvrtc = n, .arch = "sm_90a"};
    void *code = NULL;
    size_t size = 0;
    const char *text = "int one(void) { return 1; }\n"
                       "extern \"C\" __global__ void f(int *x) { x[0] = one(); }\n";
    expect(fb__nvrtc_compile(&job, text, "f.cu", &code, &size) == FB_OK);
    expect(size > 4 && memcmp(code, "\177ELF", 4) == 0);
    expect(job.log);
    expect_words(job.log, "0 bytes spill stores");
    expect_words(job.log, "registers");
    free(code);
    free(job.log);
    expect(fb__nvrtc_compile(&job, "#line 7 \"g.cuh\"\nint x = y;\n", "f.cu", &code, &size) == FB_COMPILE);
    expect_words(fb__error_text(), "g.cuh:7: ");
    expect_words(fb__error_text(), "undefined");
    free(job.log);
}

static void test_real(void **state) {
    (void)state;
    fb__nvrtc n;
    if (fb__nvrtc_open(&n, 0) != FB_OK)
        skip();
    real_compile(&n);
}

int main(int count, char **words) {
    if (count == 2) {
        (strcmp(words[1], "in_process") == 0 ? in_process : by_loader)();
        return 0;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_variable), cmocka_unit_test(test_loader),
                                       cmocka_unit_test(test_folders), cmocka_unit_test(test_compile),
                                       cmocka_unit_test(test_real)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
