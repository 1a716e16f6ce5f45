/* flashback check: every case of harness/cases.c on this machine, by every route, against the reference.
 * Floor: cli. Read harness/cases.c for what is checked, harness/compare.c for what counts as right. */
#include "cli.h"
#include "harness/harness.h"

#include <getopt.h>
#include <jansson.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* As FLASHBACK_ISA takes them. From the fifth on they differ from others in bf16 only. */
static const char *const isas[] = {"scalar", "baseline",   "avx2",      "avx512",
                                   "bfdot",  "avx512bf16", "amx_model", "amx"};

enum {
    ISA_COUNT = sizeof isas / sizeof *isas,
    WIDE_ISAS = 4,
    ROUTE_COUNT = FB_REFERENCE + 1,
    DEVICE_COUNT = FB_METAL + 1
};

typedef struct settings {
    const char *filter;
    int route;       /* an fb_route, or -1 = all */
    int device;      /* an fb_device, or -1 = all that are present */
    int32_t index;   /* which of that kind */
    const char *isa; /* NULL = what the environment says, else the best */
    bool all_isas, list, json, verbose;
    int threads;
    uint64_t seed;
    size_t part, parts; /* every parts-th case, from part on */
} settings;

typedef struct tally {
    size_t count[FBH_UNSUPPORTED + 1]; /* by verdict */
} tally;

static const char *const verdicts[] = {"pass", "FAIL", "unsupported"};

/* ---- The command line ---------------------------------------------------------------------------------- */

static void print_usage(FILE *to) {
    fputs("Usage: flashback check [OPTION]...\n"
          "Runs the built-in cases and compares forward and backward with the float64 reference.\n\n"
          "  -f, --filter REGEX   only cases whose name matches (POSIX extended; a piece of a name will do)\n"
          "  -r, --route ROUTE    auto, fused, vector, unfused or reference (default: all)\n"
          "  -d, --device DEVICE  cpu, cuda or metal (default: all that are present)\n"
          "      --index N        which device of that kind (default: 0)\n"
          "  -i, --isa ISA        a value of FLASHBACK_ISA, or all (default: the best there is)\n"
          "  -t, --threads N      most threads of a call (default: what OpenMP allows)\n"
          "  -s, --seed N         other random values (default: 0)\n"
          "  -p, --part I/N       every N-th case from the I-th on, to share the list (default: 1/1)\n"
          "  -l, --list           print the names of the cases and run nothing\n"
          "  -v, --verbose        a line for every run, not only for failures\n"
          "      --json           a JSON object for every run, and one for the sum\n"
          "  -h, --help           print this\n\n"
          "Exit codes: 0 nothing failed, 1 something failed, 2 wrong usage, 4 the device is not there.\n",
          to);
}

static int word(const char *text, const char *what, const char *(*name)(int), int count) {
    for (int n = 0; n < count; n++)
        if (strcmp(text, name(n)) == 0)
            return n;
    cli_fail(CLI_USAGE, "%s '%s' is unknown; --help lists them", what, text);
}

static const char *route_name(int n) { return fb_route_name((fb_route)n); }
static const char *device_name(int n) { return fb_device_name((fb_device)n); }
static const char *isa_name(int n) { return isas[n]; }

static uint64_t number(const char *text, const char *what, uint64_t most) {
    char *end;
    const uint64_t n = strtoull(text, &end, 10);
    if (end == text || *end || *text == '-' || n > most)
        cli_fail(CLI_USAGE, "--%s '%s' is not a number from 0 to %llu", what, text, (unsigned long long)most);
    return n;
}

static void read_part(const char *text, settings *s) {
    unsigned long part, parts;
    char rest;
    if (sscanf(text, "%lu/%lu%c", &part, &parts, &rest) != 2 || part < 1 || part > parts)
        cli_fail(CLI_USAGE, "--part '%s' is not I/N with I from 1 to N", text);
    s->part = part - 1, s->parts = parts;
}

enum { JSON = 256, INDEX };

static const struct option longs[] = {
    {"filter", required_argument, NULL, 'f'},
    {"route", required_argument, NULL, 'r'},
    {"device", required_argument, NULL, 'd'},
    {"index", required_argument, NULL, INDEX},
    {"isa", required_argument, NULL, 'i'},
    {"threads", required_argument, NULL, 't'},
    {"seed", required_argument, NULL, 's'},
    {"part", required_argument, NULL, 'p'},
    {"list", no_argument, NULL, 'l'},
    {"verbose", no_argument, NULL, 'v'},
    {"json", no_argument, NULL, JSON},
    {"help", no_argument, NULL, 'h'},
    {NULL, 0, NULL, 0},
};

static void read_option(settings *s, int option) {
    switch (option) {
    case 'f':
        s->filter = optarg;
        break;
    case 'r':
        s->route = word(optarg, "route", route_name, ROUTE_COUNT);
        break;
    case 'd':
        s->device = word(optarg, "device", device_name, DEVICE_COUNT);
        break;
    case INDEX:
        s->index = (int32_t)number(optarg, "index", INT32_MAX);
        break;
    case 'i':
        s->all_isas = strcmp(optarg, "all") == 0;
        s->isa = s->all_isas ? NULL : isas[word(optarg, "isa", isa_name, ISA_COUNT)];
        break;
    case 't':
        s->threads = (int)number(optarg, "threads", 4096);
        break;
    case 's':
        s->seed = number(optarg, "seed", UINT32_MAX);
        break;
    case 'p':
        read_part(optarg, s);
        break;
    case 'l':
        s->list = true;
        break;
    case 'v':
        s->verbose = true;
        break;
    case JSON:
        s->json = true;
        break;
    case 'h':
        print_usage(stdout);
        exit(cli_finish(CLI_OK));
    default:
        exit(CLI_USAGE);
    }
}

static settings read_options(int argc, char **argv) {
    settings s = {.route = -1, .device = -1, .parts = 1};
    for (int c; (c = getopt_long(argc, argv, "f:r:d:i:t:s:p:lvh", longs, NULL)) != -1;)
        read_option(&s, c);
    if (optind < argc)
        cli_fail(CLI_USAGE, "'%s' is not an option; --help lists them", argv[optind]);
    if (s.index && s.device <= FB_CPU)
        cli_fail(CLI_USAGE, "--index needs --device cuda or metal");
    return s;
}

/* ---- Crashes ------------------------------------------------------------------------------------------- */

/* What runs now: a fault at a guard page says which case it was before the process ends. */
static char running[FBH_NAME_SIZE + 64];

static void on_fault(int number_of_signal) {
    static const char text[] = "flashback check: crashed in ";
    const bool told = write(STDERR_FILENO, text, sizeof text - 1) > 0 &&
                      write(STDERR_FILENO, running, strlen(running)) > 0 && write(STDERR_FILENO, "\n", 1) > 0;
    (void)told; /* the process ends one way or the other */
    signal(number_of_signal, SIG_DFL);
    raise(number_of_signal);
}

/* A sanitizer's own handler stays. */
static void watch_faults(void) {
    static const int faults[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL};
    for (size_t n = 0; n < sizeof faults / sizeof *faults; n++) {
        struct sigaction old;
        if (sigaction(faults[n], NULL, &old) == 0 && old.sa_handler == SIG_DFL)
            signal(faults[n], on_fault);
    }
}

/* ---- Runs ---------------------------------------------------------------------------------------------- */

static void report(const settings *s, const fbh_case *c, const fbh_options *o, const char *isa,
                   const fbh_result *r) {
    if (s->json) {
        json_t *line =
            json_pack("{s:s,s:s,s:s,s:s,s:s,s:f,s:s}", "case", c->name, "device", fb_device_name(o->device),
                      "route", fb_route_name(o->route), "isa", isa, "verdict", verdicts[r->verdict], "ratio",
                      r->ratio < 1e300 ? r->ratio : 1e300, "message", r->message);
        json_dumpf(line, stdout, JSON_REAL_PRECISION(6));
        putchar('\n');
        json_decref(line);
    } else if (r->verdict == FBH_FAIL || s->verbose)
        printf("%-11s %s  %s %s %s  %s\n", verdicts[r->verdict], c->name, fb_device_name(o->device),
               fb_route_name(o->route), isa, r->message);
}

/* Guard pages lie behind the tensors, and for auto, which takes one of the other routes, before them. Routes
 * in `done` have run with the same kernels before. */
static void run_routes(const settings *s, const fbh_oracle *oracle, fb_device device, const char *isa,
                       unsigned done, tally *sum) {
    const fbh_case *c = &oracle->given.what;
    for (int route = 0; route < ROUTE_COUNT; route++) {
        if ((s->route >= 0 && route != s->route) || !fbh_route_fits(c, (fb_route)route) || done >> route & 1)
            continue;
        const fbh_options options = {.device = device,
                                     .index = device == FB_CPU ? 0 : s->index,
                                     .route = (fb_route)route,
                                     .threads = s->threads,
                                     .guard = route == FB_AUTO ? FBH_GUARD_START : FBH_GUARD_END};
        fbh_result result;
        snprintf(running, sizeof running, "%s, %s, %s, %s", c->name, device_name((int)device),
                 route_name(route), isa);
        fbh_oracle_run(oracle, &options, &result);
        sum->count[result.verdict]++;
        report(s, c, &options, isa, &result);
    }
}

/* FB_NO_DEVICE is the one answer that a device which is there does not give; a plan also asks for its
 * compiler. */
static bool present(fb_device device, int32_t index) {
    fb_desc desc;
    fb_plan *plan;
    fb_desc_init(&desc, sizeof desc);
    desc.device = device;
    desc.index = index;
    desc.batch = desc.heads_q = desc.heads_kv = desc.len_q = desc.len_k = 1;
    desc.head_dim = desc.head_dim_v = 64;
    const fb_status status = fb_plan_create(&plan, &desc);
    fb_plan_destroy(plan);
    return status != FB_NO_DEVICE;
}

/* One that is asked for has to be there: a run in which nothing could be checked is no success. */
static void find_devices(const settings *s, bool *use) {
    for (int device = 0; device < DEVICE_COUNT; device++) {
        const bool asked = device == s->device;
        use[device] = (asked || s->device < 0) && present((fb_device)device, asked ? s->index : 0);
        if (asked && !use[device])
            cli_fail(CLI_LIBRARY, "%s", fb_last_error());
    }
}

/* A byte on each GPU until the end: a GPU that nothing is held on is set up anew for every plan, which takes
 * a tenth of a second, and more with every process that does. */
static void hold_devices(const settings *s, const bool *use, fb_ref *held) {
    for (int device = FB_CPU + 1; device < DEVICE_COUNT; device++)
        if (use[device] && fb_alloc(&held[device], (fb_device)device, s->index, 1) != FB_OK)
            cli_fail(CLI_LIBRARY, "%s", fb_last_error());
}

static void let_go(const settings *s, fb_ref *held) {
    for (int device = FB_CPU + 1; device < DEVICE_COUNT; device++)
        if (held[device].data && fb_free(&held[device], (fb_device)device, s->index) != FB_OK)
            cli_fail(CLI_LIBRARY, "%s", fb_last_error());
}

/* The instruction sets of this machine, as fb_info lists them ahead of the environment variables. */
static void find_isas(bool *use) {
    static const char title[] = "cpu instruction sets: ";
    char text[8192];
    fb_info(text, sizeof text);
    memset(use, 0, ISA_COUNT * sizeof *use);
    char *rest, *line = strstr(text, title);
    if (!line)
        return;
    line += sizeof title - 1;
    line[strcspn(line, "\n")] = 0;
    for (char *isa = strtok_r(line, " ", &rest); isa; isa = strtok_r(NULL, " ", &rest))
        for (int n = 0; n < ISA_COUNT; n++)
            use[n] |= strcmp(isa, isas[n]) == 0;
}

static void run_case(const settings *s, const fbh_case *c, const bool *devices, const bool *use, tally *sum) {
    fbh_oracle oracle;
    snprintf(running, sizeof running, "%s, the reference", c->name);
    fbh_oracle_open(&oracle, c, s->seed);
    for (int device = 0; device < DEVICE_COUNT; device++) {
        if (!devices[device])
            continue;
        if (device != FB_CPU || !s->all_isas) {
            run_routes(s, &oracle, (fb_device)device, device == FB_CPU && s->isa ? s->isa : "best", 0, sum);
            continue;
        }
        unsigned done = 0;
        for (int n = 0; n < (c->desc.dtype == FB_BF16 ? ISA_COUNT : WIDE_ISAS); n++)
            if (use[n]) {
                setenv("FLASHBACK_ISA", isas[n], 1);
                run_routes(s, &oracle, FB_CPU, isas[n], n < WIDE_ISAS ? done : done | 1U << FB_UNFUSED, sum);
                done = 1U << FB_REFERENCE; /* it has no instruction sets */
            }
    }
    fbh_oracle_close(&oracle);
}

static void report_sum(const settings *s, size_t cases, const tally *sum, double seconds) {
    const size_t *n = sum->count;
    if (s->json)
        printf(
            "{\"cases\": %zu, \"passed\": %zu, \"failed\": %zu, \"unsupported\": %zu, \"seconds\": %.1f}\n",
            cases, n[FBH_PASS], n[FBH_FAIL], n[FBH_UNSUPPORTED], seconds);
    else
        printf("%zu passed, %zu failed, %zu unsupported (%zu cases in %.1f s)\n", n[FBH_PASS], n[FBH_FAIL],
               n[FBH_UNSUPPORTED], cases, seconds);
}

int cmd_check(int argc, char **argv) {
    const settings s = read_options(argc, argv);
    char error[512];
    size_t count;
    fbh_case *cases = fbh_case_list(s.filter, &count, error, sizeof error);
    if (!cases)
        cli_fail(CLI_USAGE, "%s", error);
    if (count == 0)
        cli_fail(CLI_USAGE, "no case matches '%s'; --list prints the names", s.filter);
    bool use[ISA_COUNT], devices[DEVICE_COUNT];
    fb_ref held[DEVICE_COUNT] = {{NULL, 0}};
    tally sum = {{0}};
    const double start = fbh_now();
    find_isas(use);
    if (!s.list) {
        find_devices(&s, devices);
        hold_devices(&s, devices, held);
    }
    if (s.isa)
        setenv("FLASHBACK_ISA", s.isa, 1);
    setvbuf(stdout, NULL, _IOLBF, 0); /* a crash takes no line with it */
    watch_faults();
    for (size_t n = s.part; n < count; n += s.parts)
        if (s.list)
            puts(cases[n].name);
        else
            run_case(&s, &cases[n], devices, use, &sum);
    let_go(&s, held);
    if (!s.list)
        report_sum(&s, (count - s.part + s.parts - 1) / s.parts, &sum, fbh_now() - start);
    free(cases);
    return cli_finish(sum.count[FBH_FAIL] ? CLI_CHECK : CLI_OK);
}
