/* Every row of tune.c as machine code, by the real NVRTC and without a GPU: it compiles without a warning,
 * spills no registers but where `allowed` says so, and declares no more shared memory than plans leave to it.
 *
 * For all architectures that would take 20 minutes of two cores. So sm_90a has all rows, those of 16 bits in
 * both forms (plain, and with all options); sm_80 all rows in one; the others one row of each kernel and size
 * of elements, another one for each: some 3 minutes. `test_compile all` leaves nothing out, `test_compile
 * list` prints what is spilled as rows of `allowed`, `test_compile hopper` has the rows of hopper.c only.
 * What was compiled before is in the cache, as the compiler's words. One preset runs it (CMakePresets.json),
 * as it is about the kernels only. Next: test_tune.c. */
#include "flashback.h"
#include "src/base/text.h"
#include "src/core/error.h"
#include "src/cuda/hopper.h"
#include "src/cuda/nvrtc.h"
#include "src/cuda/tune.h"
#include "src/shared/args.h"
#include <sched.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>
/* cmocka wants the ones above first */
#include <cmocka.h>

enum { KIB = 1024, STATIC_BYTES = 256, JOBS = 4096, ROW_WORDS = 96 };

/* Which rows: all, those of 16-bit elements plain and with all options; all, in one of the two forms; one of
 * each kernel and size of elements. */
typedef enum share { BOTH_FORMS, ONE_FORM, ONE_EACH } share;

static const struct {
    const char *name;
    int shared; /* of a block that asks for it */
    int since;  /* of NVRTC, in hundredths */
    share rows;
} archs[] = {
    {"sm_90a", 227 * KIB, 1200, BOTH_FORMS}, {"sm_80", 163 * KIB, 1200, ONE_FORM},
    {"sm_86", 99 * KIB, 1200, ONE_EACH},     {"sm_89", 99 * KIB, 1200, ONE_EACH},
    {"sm_100", 227 * KIB, 1208, ONE_EACH},   {"sm_120", 99 * KIB, 1208, ONE_EACH},
};
enum { ARCHS = sizeof archs / sizeof *archs };

/* ---- What may spill ---- */

/* Reasons. */
#define PARTS "operands in two parts: more fragments than registers"
#define CELLS "cells have all options in their text"
#define WAITS "in functions that wait for memory, not for registers"
#define SLOW "in double, cell by cell: slow whatever it spills"
#define FULL "two blocks of 255 registers, as measured fastest on an H200; outside of the loop over tiles"

#define BETWEEN                                                                                              \
    "in the thread that loads, or between a block's tiles: not where the others work on those that pass by"

/* Most bytes of spill stores in an entry point on any architecture, without options and with all; by
 * NVRTC 13.0. They are what was measured and as much again: what cannot matter, such as a comment, moves them
 * by half, as the compiler's own names are hashes of the text. */
static const struct {
    const char *row;
    int plain, options;
    const char *reason;
} allowed[] = {
    {"unfused.cu f32", 112, 0, WAITS},
    {"unfused.cu 16 bits", 128, 0, WAITS},
    {"reference.cu f32", 48, 0, SLOW},
    {"reference.cu 16 bits", 64, 0, SLOW},
    {"forward.cu 16 bits D 128, 128 x 64, 4 x 1 x 1 warps, 2 buffers", 0, 1280, CELLS},
    {"forward.cu f32 D 128, 64 x 32, 4 x 1 x 1 warps, 1 buffer", 240, 64, PARTS},
    {"forward.cu f32 D 256, 64 x 32, 4 x 1 x 1 warps, 1 buffer", 32, 112, PARTS},
    {"forward.cu f32 D 256, 32 x 16, 2 x 1 x 1 warps, 1 buffer", 80, 240, PARTS},
    {"forward.cu f32 D 576, 32 x 16, 2 x 4 x 1 warps, 1 buffer", 64, 208, PARTS},
    {"forward.cu f32 D 576, 16 x 16, 1 x 4 x 1 warps, 1 buffer", 288, 576, PARTS},
    {"forward.cu f32 stacked D 576, 16 x 16, 1 x 4 x 1 warps, 1 buffer", 128, 368, PARTS},
    {"dq.cu 16 bits D 64, 128 x 64, 4 x 1 x 1 warps, 2 buffers", 0, 448, CELLS},
    {"dq.cu 16 bits D 128, 128 x 32, 4 x 1 x 1 warps, 2 buffers", 0, 128, CELLS},
    {"dq.cu f32 D 128, 64 x 32, 4 x 1 x 1 warps, 2 buffers", 128, 128, PARTS},
    {"dq.cu f32 D 128, 64 x 16, 4 x 1 x 1 warps, 1 buffer", 208, 64, PARTS},
    {"dq.cu f32 D 256, 32 x 16, 2 x 2 x 1 warps, 2 buffers", 0, 112, PARTS},
    {"dq.cu f32 D 256, 16 x 16, 1 x 2 x 1 warps, 1 buffer", 112, 256, PARTS},
    {"dq.cu f32 D 576, 16 x 16, 1 x 4 x 1 warps, 1 buffer", 160, 512, PARTS},
    {"dq.cu f32 stacked D 128, 16 x 64, 1 x 1 x 4 warps, 2 buffers", 112, 0, PARTS},
    {"dq.cu f32 stacked D 128, 16 x 32, 1 x 1 x 2 warps, 1 buffer", 0, 128, PARTS},
    {"dq.cu f32 stacked D 576, 16 x 16, 1 x 4 x 1 warps, 1 buffer", 192, 448, PARTS},
    {"dkdv.cu 16 bits D 64, 128 x 32, 4 x 1 x 1 warps, 2 buffers", 0, 112, CELLS},
    {"dkdv.cu 16 bits D 128, 64 x 64, 4 x 1 x 1 warps, 2 buffers", 0, 192, CELLS},
    {"dkdv.cu f32 D 128, 64 x 32, 4 x 1 x 1 warps, 2 buffers", 208, 320, PARTS},
    {"dkdv.cu f32 D 128, 64 x 16, 4 x 1 x 1 warps, 1 buffer", 336, 128, PARTS},
    {"dkdv.cu f32 D 256, 32 x 16, 2 x 2 x 1 warps, 2 buffers", 160, 112, PARTS},
    {"dkdv.cu f32 D 256, 16 x 16, 1 x 2 x 1 warps, 1 buffer", 256, 448, PARTS},
    {"dkdv.cu f32 D 576, 16 x 16, 1 x 4 x 1 warps, 1 buffer", 208, 624, PARTS},
    {"dkdv.cu f32 stacked D 128, 64 x 16, 4 x 1 x 1 warps, 2 buffers", 256, 384, PARTS},
    {"dkdv.cu f32 stacked D 256, 32 x 16, 2 x 2 x 1 warps, 2 buffers", 384, 192, PARTS},
    {"dkdv.cu f32 stacked D 576, 16 x 16, 1 x 4 x 1 warps, 1 buffer", 256, 112, PARTS},
    {"hopper_forward.cu 16 bits D 256, 128 x 64, 8 x 1 x 1 warps, 2 buffers", 0, 64, BETWEEN},
    {"hopper_backward.cu 16 bits D 128, 128 x 64, 8 x 1 x 1 warps, 2 buffers", 80, 416, CELLS},
    {"hopper_backward.cu 16 bits D 64, 128 x 128, 8 x 1 x 1 warps, 2 buffers", 128, 0, BETWEEN},
    {"hopper_split.cu 16 bits D 256, 64 x 64, 8 x 1 x 1 warps, 2 buffers", 128, 80, BETWEEN},
};
enum { ALLOWED = sizeof allowed / sizeof *allowed, MEASURED_WITH = 1300 };

/* ---- Jobs ---- */

/* What one compilation is of, and what it came to. */
typedef struct job {
    int arch;
    fb__kernel kernel;
    fb__spec spec;
    bool done;
    int spilled, declared; /* bytes: spill stores, shared memory of its own */
    char words[320];       /* an error or a warning, or "" */
} job;

/* What processes share. NVRTC compiles one text at a time in a process, so threads would gain nothing. */
typedef struct board {
    atomic_int next;
    int count;
    job jobs[JOBS];
} board;

static board *work;
static fb__nvrtc nvrtc;
static bool everything, listing, hopper_only;

static int nvrtc_version(void) { return nvrtc.major * 100 + nvrtc.minor; }

static void add(int arch, fb__kernel kernel, const fb__spec *spec) {
    if (spec->shared_bytes + STATIC_BYTES > archs[arch].shared)
        return; /* fb__tune_choose takes another row there */
    assert_true(work->count < JOBS);
    work->jobs[work->count++] = (job){.arch = arch, .kernel = kernel, .spec = *spec};
}

static void add_row(int arch, int n, fb_dtype type, bool plain) {
    fb__kernel kernel;
    fb__spec spec;
    assert_true(fb__tune_row(n, type, plain, &kernel, &spec));
    if (spec.PLAIN == plain) /* one of the two, for a kernel without a plain form */
        add(arch, kernel, &spec);
}

/* Of 16-bit elements one type for each; of the two forms both, or one, which is the other on the next
 * architecture. */
static void add_all_rows(int arch) {
    fb__kernel kernel;
    fb__spec spec;
    for (int n = 0; fb__tune_row(n, FB_BF16, true, &kernel, &spec); n++)
        for (int plain = 0; plain < 2; plain++) {
            const bool wide = spec.TYPE == FB_F32, both = archs[arch].rows == BOTH_FORMS && !wide;
            if (!everything && !both && kernel != FB__KERNEL_DBIAS && plain != (n + arch) % 2)
                continue;
            add_row(arch, n, (n / 2 + plain) % 2 ? FB_F16 : FB_BF16, plain);
            if (everything && !wide)
                add_row(arch, n, (n / 2 + plain) % 2 ? FB_BF16 : FB_F16, plain);
        }
}

/* The turn-th of the rows that fit, of a kernel and a size of elements. */
static void add_one_row(int arch, fb__kernel kernel, bool wide, int turn) {
    int found[64], count = 0;
    fb__kernel k;
    fb__spec spec;
    for (int n = 0; count < 64 && fb__tune_row(n, FB_BF16, true, &k, &spec); n++)
        if (k == kernel && (spec.TYPE == FB_F32) == wide &&
            spec.shared_bytes + STATIC_BYTES <= archs[arch].shared)
            found[count++] = n;
    if (count)
        add_row(arch, found[turn % count], turn % 2 ? FB_F16 : FB_BF16,
                turn / 2 % 2 && kernel != FB__KERNEL_DBIAS);
}

/* Each option alone, in the first row of each kernel that has text for it. */
static void add_options(int arch) {
    bool seen[FB__KERNEL_COUNT] = {false};
    fb__kernel kernel;
    fb__spec spec;
    for (int n = 0; fb__tune_row(n, FB_BF16, false, &kernel, &spec); n++) {
        for (int option = 1; option <= FB_ALL_OPTIONS && !seen[kernel]; option *= 2) {
            spec.OPTIONS = option;
            add(arch, kernel, &spec);
        }
        seen[kernel] = true;
    }
}

/* Kernel files without rows. rows.cu depends on DV, by how many lanes share a row of delta. */
static void add_files(int arch) {
    static const fb_dtype types[] = {FB_F32, FB_F16, FB_BF16};
    const bool all = archs[arch].rows != ONE_EACH || everything;
    fb__spec spec;
    for (int kernel = FB__KERNEL_ROWS; kernel < FB__KERNEL_HOPPER; kernel++)
        for (size_t t = 0; t < sizeof types / sizeof *types; t++)
            for (int64_t d = 64; d <= 576; d += 512) {
                const bool turn = types[t] == FB_F32 || types[t] == (arch % 2 ? FB_F16 : FB_BF16);
                if ((all || turn) && (d == 64 || (all && kernel == FB__KERNEL_ROWS)) &&
                    fb__tune_choose((fb__kernel)kernel, types[t], d, d, true, false, 0, &spec))
                    add(arch, (fb__kernel)kernel, &spec);
            }
}

/* The rows of hopper.c, without options and with all that they take; f16 and bf16 take turns. */
static void add_hopper(int arch) {
    static const int options[] = {0, FB_SOFTCAP | FB_BLOCKED, FB_SOFTCAP, FB_BLOCKED};
    fb__kernel kernel;
    fb__spec spec;
    for (int n = 0; fb__hopper_row(n, FB_BF16, 0, &kernel, &spec); n++)
        for (int o = 0; o < (everything ? 4 : 2); o++) {
            fb__hopper_row(n, (n + o) % 2 ? FB_F16 : FB_BF16, options[o], &kernel, &spec);
            if (!o || spec.OPTIONS)
                add(arch, kernel, &spec);
            if (kernel == FB__KERNEL_HOPPER_FORWARD || o)
                continue;
            spec.THREADS = 256, spec.shared_bytes = 0; /* and what surrounds it */
            add(arch, FB__KERNEL_HOPPER_ROWS, &spec);
        }
}

static void add_jobs(void) {
    if (hopper_only) {
        add_hopper(0);
        return;
    }
    for (int arch = 0; arch < ARCHS; arch++) {
        if (nvrtc_version() < archs[arch].since) {
            print_message("%s: NVRTC %d.%d is too old for it\n", archs[arch].name, nvrtc.major, nvrtc.minor);
            continue;
        }
        add_files(arch);
        if (arch == 0)
            add_hopper(arch);
        if (archs[arch].rows == BOTH_FORMS || everything)
            add_options(arch);
        if (archs[arch].rows != ONE_EACH || everything) {
            add_all_rows(arch);
            continue;
        }
        for (int kernel = 0; kernel < FB__KERNEL_ROWS; kernel++)
            for (int wide = 0; wide < 2; wide++)
                add_one_row(arch, (fb__kernel)kernel, wide, arch);
    }
}

/* ---- Compiling ---- */

/* What is kept is not the code but what the compiler said. */
static fb_status compile(void *context, const char *source, const char *name, void **code, size_t *size) {
    fb__nvrtc_job *nvrtc_job = context;
    FB_TRY(fb__nvrtc_compile(nvrtc_job, source, name, code, size));
    free(*code);
    *code = nvrtc_job->log ? nvrtc_job->log : calloc(1, 1);
    nvrtc_job->log = NULL;
    if (!*code)
        return fb__error(FB_MEMORY, "no memory for a log");
    *size = strlen(*code) + 1;
    return FB_OK;
}

/* The number that stands before these words in a line, or 0. */
static int number_before(const char *line, size_t length, const char *words) {
    const char *at = strstr(line, words);
    if (!at || at >= line + length)
        return 0;
    while (at > line && at[-1] >= '0' && at[-1] <= '9')
        at--;
    return atoi(at);
}

/* What ptxas says of each function. Those with C++ names are no entry points: they were not inlined on
 * purpose, as they are run rarely and want registers of their own, so what they spill does not matter. */
static void read_log(job *j, const char *log) {
    static const char head[] = "Function properties for ";
    bool entry = true;
    for (const char *line = log; *line;) {
        size_t length = strcspn(line, "\n");
        const char *name = strstr(line, head);
        if (name && name < line + length)
            entry = strncmp(name + strlen(head), "_Z", 2) != 0;
        int spilled = entry ? number_before(line, length, " bytes spill stores") : 0;
        int declared = number_before(line, length, " bytes smem");
        j->spilled = spilled > j->spilled ? spilled : j->spilled;
        j->declared = declared > j->declared ? declared : j->declared;
        line += length + (line[length] != 0);
    }
}

/* The line with a warning. (C75xx) is what ptxas says of a wgmma that waits for the one before it. */
static void find_warning(const char *log, char *words, size_t size) {
    static const char *const marks[] = {"warning", "(C75"};
    for (size_t m = 0; m < sizeof marks / sizeof *marks; m++) {
        const char *at = strstr(log, marks[m]);
        if (!at)
            continue;
        while (at > log && at[-1] != '\n')
            at--;
        snprintf(words, size, "%.*s", (int)strcspn(at, "\n"), at);
        return;
    }
}

static void do_job(job *j) {
    char options[512], compiler[48];
    fb__define defines[FB__SPEC_COUNT];
    fb__nvrtc_job nvrtc_job = {.nvrtc = &nvrtc, .arch = archs[j->arch].name};
    fb__text text = {options, sizeof options, 0};
    fb__nvrtc_options(&nvrtc_job, &text);
    fb__text_add(&text, ", words only"); /* not the key of the code */
    snprintf(compiler, sizeof compiler, "nvrtc %d.%d", nvrtc.major, nvrtc.minor);
    fb__tune_defines(&j->spec, defines);
    fb__jit_request request = {.file = fb__kernel_file(j->kernel),
                               .defines = defines,
                               .count = FB__SPEC_COUNT,
                               .arch = nvrtc_job.arch,
                               .compiler = compiler,
                               .options = options,
                               .compile = compile,
                               .context = &nvrtc_job};
    fb__jit_code code;
    if (fb__jit_get(&request, &code) == FB_OK) {
        read_log(j, code.at);
        find_warning(code.at, j->words, sizeof j->words);
    } else
        snprintf(j->words, sizeof j->words, "%s", fb__error_text());
    free(code.at);
    free(nvrtc_job.log);
    j->done = true;
}

static void do_jobs(void) {
    for (int n; (n = atomic_fetch_add(&work->next, 1)) < work->count;)
        do_job(&work->jobs[n]);
}

static int cores(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

static void do_jobs_on_all_cores(void) {
    fflush(NULL);
    for (int n = cores(); n > 0; n--) {
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            do_jobs();
            _exit(0);
        }
    }
    for (int status; wait(&status) > 0;)
        if (!WIFEXITED(status) || WEXITSTATUS(status) != 0)
            print_error("a process that compiles has ended with status %d\n", status);
}

/* ---- What came of it ---- */

static const char *row_words(const job *j) {
    static char words[ROW_WORDS];
    const fb__spec *s = &j->spec;
    fb__text text = {words, sizeof words, 0};
    fb__text_add(&text, "%s %s%s", fb__kernel_file(j->kernel), s->TYPE == FB_F32 ? "f32" : "16 bits",
                 s->STACK ? " stacked" : "");
    if (j->kernel < FB__KERNEL_ROWS || j->kernel >= FB__KERNEL_HOPPER)
        fb__text_add(&text, " D %d, %d x %d, %d x %d x %d warps, %d buffer%s", s->D, s->BM, s->BN, s->WM,
                     s->WN, s->WK, s->BUFFERS, s->BUFFERS > 1 ? "s" : "");
    return words;
}

static void complain(const job *j, const char *format, ...) __attribute__((format(printf, 2, 3)));

static int complaints;

static void complain(const job *j, const char *format, ...) {
    char words[512];
    va_list list;
    va_start(list, format);
    vsnprintf(words, sizeof words, format, list);
    va_end(list);
    print_error("%s, %s, %s, options %d: %s\n", archs[j->arch].name, row_words(j),
                fb_dtype_name((fb_dtype)j->spec.TYPE), j->spec.OPTIONS, words);
    complaints++;
}

/* A warning of one text is in the log of every job that has it. */
static bool said_before(const job *j) {
    for (const job *other = work->jobs; other < j; other++)
        if (strcmp(other->words, j->words) == 0)
            return true;
    return false;
}

static void judge(const job *j) {
    if (!j->done)
        complain(j, "not compiled");
    if (*j->words && !said_before(j))
        complain(j, "%s", j->words);
    const int room = j->kernel < FB__KERNEL_ROWS ? STATIC_BYTES : 48 * KIB;
    if (j->declared > room)
        complain(j, "%d bytes of shared memory of its own, %d are left to it", j->declared, room);
}

static void judge_spills(void) {
    bool spills[ALLOWED] = {false};
    for (const job *j = work->jobs; j < work->jobs + work->count; j++) {
        int at = 0, most = 0;
        while (at < ALLOWED && strcmp(allowed[at].row, row_words(j)) != 0)
            at++;
        if (at < ALLOWED) {
            most = j->spec.PLAIN ? allowed[at].plain : allowed[at].options;
            spills[at] |= j->spilled > 0;
        }
        if (j->spilled > most)
            complain(j, "%d bytes spilled, %d are allowed", j->spilled, most);
    }
    for (int n = 0; n < ALLOWED; n++)
        if (!spills[n] && !hopper_only) {
            print_error("%s: allowed to spill, and does not any more\n", allowed[n].row);
            complaints++;
        }
}

static int with_slack(int bytes) { return (bytes * 2 + 15) / 16 * 16; }

/* What this run has measured, as rows of `allowed`: each at its first job. */
static void list_spills(void) {
    for (int n = 0; n < work->count; n++) {
        char row[ROW_WORDS];
        int most[2] = {0, 0}, first = n;
        snprintf(row, sizeof row, "%s", row_words(&work->jobs[n]));
        for (int m = work->count - 1; m >= 0; m--) {
            const job *j = &work->jobs[m];
            if (strcmp(row_words(j), row) != 0)
                continue;
            first = m;
            if (j->spilled > most[j->spec.PLAIN])
                most[j->spec.PLAIN] = j->spilled;
        }
        if (first == n && (most[0] || most[1]))
            printf("    {\"%s\", %d, %d, %s},\n", row, with_slack(most[1]), with_slack(most[0]),
                   work->jobs[n].spec.TYPE == FB_F32 ? "PARTS"
                   : most[1]                         ? "FULL"
                                                     : "CELLS");
    }
}

static void test_rows(void **state) {
    (void)state;
    if (fb__nvrtc_open(&nvrtc, 0) != FB_OK) {
        print_message("nothing is compiled: %s\n", fb__error_text());
        skip();
    }
    work = mmap(NULL, sizeof *work, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    assert_true(work != MAP_FAILED);
    add_jobs();
    do_jobs_on_all_cores();
    for (int n = 0; n < work->count; n++)
        judge(&work->jobs[n]);
    if (listing)
        list_spills();
    else if (nvrtc_version() == MEASURED_WITH)
        judge_spills();
    else
        print_message("NVRTC %d.%d: `allowed` was measured with another one, spills are not looked at\n",
                      nvrtc.major, nvrtc.minor);
    struct rusage used;
    getrusage(RUSAGE_CHILDREN, &used);
    print_message("%d compilations in %ld s of processor time, %d complaints\n", work->count,
                  (long)used.ru_utime.tv_sec, complaints);
    munmap(work, sizeof *work);
    assert_int_equal(complaints, 0);
}

int main(int count, char **words) {
    for (int n = 1; n < count; n++) {
        everything |= strcmp(words[n], "all") == 0;
        listing |= strcmp(words[n], "list") == 0;
        hopper_only |= strcmp(words[n], "hopper") == 0;
    }
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_rows)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
