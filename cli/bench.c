/* flashback bench: problems by shape or from a set, timed on fresh random inputs. A row says what it was
 * measured on, and how far it is from what the machine's multiply-adds allow. Floor: cli. Next: job.c (the
 * runs), bench_gpu.c (on a GPU), bench_sets.c (the problems), bench_print.c (the formats). */
#include "bench.h"
#include "bench_gpu.h"
#include "cli.h"
#include "harness/peak.h"
#include "job.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    ID_SHAPE = 300,
    ID_SET,
    ID_MASK,
    ID_PASS,
    ID_MAX_LEN,
    ID_MIN_TIME,
    ID_REGIME,
    ID_NO_COSTS,
    ID_FORMAT,
    ID_COMPARE,
    ID_PLOT
};

const cli_option cli_bench_options[] = {
    {"shape", "B,HQ,HKV,LQ,LK,D[,DV]", "a shape to measure; may come again", ID_SHAPE},
    {"set", "default|original|hopper|quick|small|decode",
     "built-in shapes; original prints fused against unfused (f16), decode how fast K and V are read; hopper "
     "is for large GPUs (bf16)",
     ID_SET},
    {"mask", "dense|causal", "one mask for all shapes; sets have both", ID_MASK},
    {"max-len", "N", "leave longer shapes out of the set", ID_MAX_LEN},
    {"pass", "fwd,bwd", "which passes (default both)", ID_PASS},
    {"min-time", "S", "repeat each for at least S seconds and 3 runs (default 0.5; on CUDA, the regime's)",
     ID_MIN_TIME},
    {"regime", "burst|sustained|both",
     "on an NVIDIA GPU: 50 ms after a pause (default), or 2 seconds, in which it runs into its power limit",
     ID_REGIME},
    {"no-costs", NULL, "on an NVIDIA GPU: leave out what compiling, the cache and the host cost",
     ID_NO_COSTS},
    {"format", "md|csv|jsonl", "of standard output (default md)", ID_FORMAT},
    {"compare", "FILE.jsonl", "print speed relative to an earlier run; exit 1 if any is under 0.95",
     ID_COMPARE},
    {"plot", "FILE.svg|FILE.png", "draw GFLOP/s over L, with gnuplot", ID_PLOT},
    {0},
};

enum { LEAST_RUNS = 3, MOST_SHAPES = 256 };

typedef struct settings {
    option_flags flags;
    fb_desc shapes[MOST_SHAPES];
    int shape_count;
    const char *set, *mask, *regime, *compare, *plot;
    int64_t max_len;
    bool pass[2], original, decode, no_costs;
    double min_time; /* negative: not given */
    bench_regime regimes[2];
    int regime_count;
    bench_format format;
    fbh_reader *reader; /* not NULL: how fast the machine reads is measured beside every row */
    fbh_gpu *gpu;       /* NULL on the CPU */
} settings;

/* Rows of one problem, by regime and pass. */
typedef struct block {
    bench_row at[2][2];
} block;

/* ---- Command line ----------------------------------------------------------------------------------- */

static void read_passes(settings *s, const char *value) {
    s->pass[FBH_FORWARD] = !strcmp(value, "fwd") || !strcmp(value, "fwd,bwd");
    s->pass[FBH_BACKWARD] = !strcmp(value, "bwd") || !strcmp(value, "fwd,bwd");
    if (!s->pass[FBH_FORWARD] && !s->pass[FBH_BACKWARD])
        cli_fail(CLI_USAGE, "--pass is '%s'; expected fwd, bwd or fwd,bwd", value);
}

static void read_format(settings *s, const char *value) {
    static const char *const names[] = {"md", "csv", "jsonl"};
    for (int i = 0; i < 3; i++)
        if (!strcmp(value, names[i])) {
            s->format = (bench_format)i;
            return;
        }
    cli_fail(CLI_USAGE, "--format is '%s'; expected md, csv or jsonl", value);
}

static void read_option(settings *s, int id, const char *value) {
    switch (id) {
    case ID_SHAPE:
        if (s->shape_count == MOST_SHAPES)
            cli_fail(CLI_USAGE, "more than %d shapes", MOST_SHAPES);
        parse_shape(value, &s->shapes[s->shape_count++]);
        break;
    case ID_SET:
        s->set = value;
        break;
    case ID_MASK:
        s->mask = value;
        if (strcmp(value, "dense") && strcmp(value, "causal"))
            cli_fail(CLI_USAGE, "--mask is '%s'; expected dense or causal", value);
        break;
    case ID_MAX_LEN:
        if (!parse_int(value, 1, INT64_MAX, &s->max_len))
            cli_fail(CLI_USAGE, "--max-len is '%s'; expected an integer of 1 or more", value);
        break;
    case ID_PASS:
        read_passes(s, value);
        break;
    case ID_MIN_TIME:
        if (!parse_double(value, &s->min_time) || s->min_time < 0)
            cli_fail(CLI_USAGE, "--min-time is '%s'; expected seconds, 0 or more", value);
        break;
    case ID_REGIME:
        s->regime = value;
        if (strcmp(value, "burst") && strcmp(value, "sustained") && strcmp(value, "both"))
            cli_fail(CLI_USAGE, "--regime is '%s'; expected burst, sustained or both", value);
        break;
    case ID_NO_COSTS:
        s->no_costs = true;
        break;
    case ID_FORMAT:
        read_format(s, value);
        break;
    case ID_COMPARE:
        s->compare = value;
        break;
    case ID_PLOT:
        bench_plot_check(value);
        s->plot = value;
        break;
    default:
        options_note(&s->flags, id, value);
    }
}

static void read_options(settings *s, int argc, char **argv) {
    const char *value;
    *s = (settings){.max_len = INT64_MAX, .pass = {true, true}, .min_time = -1};
    for (int id; (id = cli_next(argc, argv, &value)) != -1;)
        read_option(s, id, value);
    if (optind < argc)
        cli_fail(CLI_USAGE, "'%s' is not an option; bench reads no files", argv[optind]);
    if (s->set && s->shape_count)
        cli_fail(CLI_USAGE, "--set and --shape exclude each other");
    if (!s->set && !s->shape_count)
        s->set = "default";
    s->original = s->set && !strcmp(s->set, "original");
    if (s->original && !(s->pass[0] && s->pass[1]))
        cli_fail(CLI_USAGE, "the set original times forward and backward together; --pass does not apply");
    s->decode = s->set && !strcmp(s->set, "decode");
    if (s->decode && !s->pass[FBH_FORWARD])
        cli_fail(CLI_USAGE, "the set decode times the forward; --pass bwd does not apply");
    s->pass[FBH_BACKWARD] = s->pass[FBH_BACKWARD] && !s->decode;
}

/* The problems; the original's come twice, unfused before fused. */
static bench_list make_list(const settings *s, fbh_layout *layout) {
    options o;
    bench_list list = {0}, twice = {0};
    options_init(&o);
    options_apply(&o, &s->flags);
    *layout = o.layout;
    bool masked = o.desc.window.left != FB_UNBOUNDED || o.desc.window.right != FB_UNBOUNDED;
    if (masked && s->mask)
        cli_fail(CLI_USAGE, "--mask and --causal or --window exclude each other");
    if (s->mask)
        o.desc.window = strcmp(s->mask, "causal") ? fb_window_none() : fb_window_causal();
    for (int i = 0; i < s->shape_count; i++) {
        options_shape(&o, &s->shapes[i]);
        bench_list_add(&list, &o.desc);
    }
    if (s->set && !o.dtype_given)
        o.desc.dtype = bench_set_dtype(s->set);
    if (s->decode)
        o.desc.flags |= FB_FORWARD_ONLY;
    if (s->set && !bench_set_add(&list, s->set, &o.desc, masked || s->mask, s->max_len))
        cli_fail(CLI_USAGE, "--set is '%s'; expected " BENCH_SETS, s->set);
    if (list.count == 0)
        cli_fail(CLI_USAGE, "--max-len %lld leaves no shape of the set", (long long)s->max_len);
    if (!s->original)
        return list;
    if (o.desc.route != FB_AUTO)
        cli_fail(CLI_USAGE, "the set original times the routes unfused and fused; --route does not apply");
    for (size_t i = 0; i < list.count; i++) {
        list.at[i].route = FB_UNFUSED;
        bench_list_add(&twice, &list.at[i]);
        list.at[i].route = FB_FUSED;
        bench_list_add(&twice, &list.at[i]);
    }
    free(list.at);
    return twice;
}

/* A CUDA GPU is timed in one regime or in both; calls on the CPU and on Metal return when they are done, and
 * are timed one by one. */
static void settle_regimes(settings *s, fb_device device) {
    static const bench_regime known[] = {{{"burst"}, 0.05, 0.5}, {{"sustained"}, 2, 0}};
    const bool gpu = device == FB_CUDA;
    if (!gpu && (s->regime || s->no_costs))
        cli_fail(CLI_USAGE, "--%s is about NVIDIA GPUs; it needs --device cuda",
                 s->regime ? "regime" : "no-costs");
    if (s->regime && s->min_time >= 0)
        cli_fail(CLI_USAGE, "--regime and --min-time exclude each other: a regime says how long");
    s->regime_count = 1;
    if (!gpu) {
        s->min_time = s->min_time < 0 ? 0.5 : s->min_time;
    } else if (s->min_time >= 0) {
        s->regimes[0].seconds = s->min_time;
        snprintf(s->regimes[0].name.text, sizeof s->regimes[0].name.text, "%g s", s->min_time);
    } else {
        memcpy(s->regimes, known, sizeof known);
        if (s->regime && !strcmp(s->regime, "sustained"))
            s->regimes[0] = known[1];
        s->regime_count = s->regime && !strcmp(s->regime, "both") ? 2 : 1;
    }
}

/* ---- Measuring -------------------------------------------------------------------------------------- */

static void progress(size_t done, size_t count) {
    enum { WIDTH = 32 };
    if (!isatty(STDERR_FILENO))
        return;
    int filled = (int)(WIDTH * done / count);
    fprintf(stderr, "\r[%.*s%*s] %zu/%zu", filled, "################################", WIDTH - filled, "",
            done, count);
    fflush(stderr);
}

/* Rows may go to the same terminal. */
static void progress_clear(void) {
    if (isatty(STDERR_FILENO))
        fputs("\r\033[K", stderr);
}

/* Past MOST_NORMAL elements the numbers come again: hundreds of millions would take longer than the runs. */
static void fill_normal(fbh_problem *p, uint64_t seed) {
    static const fbh_id ids[] = {FBH_Q, FBH_K, FBH_V, FBH_DOUT};
    enum { MOST_NORMAL = 4 << 20 };
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++) {
        fbh_tensor *t = &p->t[ids[i]];
        if (!t->buffer)
            continue;
        unsigned char *data = t->buffer->data;
        const size_t size = fbh_size(t->type), count = t->buffer->bytes / size;
        for (size_t n = 0; n < count && n < MOST_NORMAL; n++)
            fbh_store(t->type, data + n * size, fbh_normal(seed + ids[i], n));
        for (size_t n = MOST_NORMAL; n < count; n += MOST_NORMAL)
            memcpy(data + n * size, data, (count - n < MOST_NORMAL ? count - n : MOST_NORMAL) * size);
    }
}

/* "avx512" of "kernels: cpu avx512, ..."; "Apple9" on Metal. */
static word_text isa_of(const job *j) {
    static char text[16384];
    if (j->problem.desc.device == FB_METAL) {
        fb_plan_explain(j->plan, text, sizeof text);
        return word_behind(text, "gpu", "family ");
    }
    word_text kernels = job_explained(j, "kernels");
    const char *device = fb_device_name(j->problem.desc.device);
    const size_t length = strlen(device);
    if (!strncmp(kernels.text, device, length) && kernels.text[length] == ' ')
        memmove(kernels.text, kernels.text + length + 1, strlen(kernels.text + length + 1) + 1);
    return kernels;
}

/* The peak of what the row's kernels multiply with. VDPBF16PS has half the rate of multiply-adds in f32 on
 * some processors; kernels with AVX512-BF16 have both. */
static double peak_of(const bench_row *r, int threads, double seconds) {
    if (r->desc.dtype == FB_F64)
        return fbh_peak_flops(FBH_PEAK_F64, threads, seconds);
    if (r->desc.dtype == FB_BF16 && !strcmp(r->isa.text, "amx"))
        return fbh_peak_flops(FBH_PEAK_AMX, threads, seconds);
    const double f32 = fbh_peak_flops(FBH_PEAK_F32, threads, seconds);
    if (r->desc.dtype != FB_BF16 || strcmp(r->isa.text, "avx512bf16"))
        return f32;
    return fmax(f32, fbh_peak_flops(FBH_PEAK_AVX512BF16, threads, seconds));
}

/* Measured before and after a row: clocks wander, and neighbours come and go. The larger counts. */
static void measure_beside(const settings *s, int threads, bench_row *r) {
    const double seconds = fmin(s->min_time / 4, 0.1);
    if (r->desc.device != FB_CPU)
        return;
    r->peak_gflops = fmax(r->peak_gflops, peak_of(r, threads, seconds));
    if (s->reader)
        r->read_rate = fmax(r->read_rate, fbh_reader_run(s->reader, seconds));
}

bool bench_job_make(job *j, const fb_desc *desc, fbh_layout layout, uint64_t seed) {
    fbh_case c;
    fbh_case_init(&c);
    c.desc = *desc;
    c.desc.device = FB_CPU; /* the problem's, and no part of a case */
    c.desc.index = 0;
    c.layout = layout;
    fbh_problem_create(&j->problem, &c, desc->device, desc->index, FBH_GUARD_NONE, false);
    j->problem.desc.route = desc->route;
    j->problem.desc.threads = desc->threads;
    const fb_status status = fb_plan_create(&j->plan, &j->problem.desc);
    if (status != FB_OK && status != FB_UNSUPPORTED && status != FB_NO_DEVICE && status != FB_MEMORY)
        cli_fail(CLI_LIBRARY, "%s: %s", fb_status_name(status), fb_last_error());
    if (status == FB_OK)
        fill_normal(&j->problem, seed);
    return status == FB_OK;
}

/* Rows as they are before a measurement. */
static void begin(const settings *s, const fb_desc *desc, block *rows) {
    for (int regime = 0; regime < s->regime_count; regime++)
        for (int pass = 0; pass < 2; pass++) {
            bench_row *r = &rows->at[regime][pass];
            *r = (bench_row){.desc = *desc,
                             .pass = (fbh_pass)pass,
                             .mask = bench_mask_name(desc),
                             .regime = s->regimes[regime].name};
            snprintf(r->route.text, sizeof r->route.text, "%s", fb_route_name(desc->route));
            strcpy(r->isa.text, "-");
        }
}

static void refuse(const settings *s, const char *why, block *rows) {
    for (int regime = 0; regime < s->regime_count; regime++)
        for (int pass = 0; pass < 2; pass++)
            snprintf(rows->at[regime][pass].refused, sizeof rows->at[regime][pass].refused, "%s", why);
}

static void finish(const settings *s, bench_row *r) {
    r->gflops = bench_flops(&r->desc, r->pass) / r->ms.median * 1e-6;
    r->peak_percent = r->peak_gflops > 0 ? 100 * r->gflops / r->peak_gflops : 0;
    if (s->decode)
        r->kv_rate = bench_kv_bytes(&r->desc) / r->ms.median * 1e-6;
}

static void measure_calls(const settings *s, const bench_place *place, job *j, block *rows) {
    if (!s->pass[FBH_FORWARD])
        job_run(j, FBH_FORWARD);
    for (int pass = 0; pass < 2; pass++) {
        bench_row *r = &rows->at[0][pass];
        if (!s->pass[pass])
            continue;
        measure_beside(s, place->threads, r);
        r->ms = job_time(j, (fbh_pass)pass, LEAST_RUNS, s->min_time);
        measure_beside(s, place->threads, r);
    }
}

static void measure_gpu(const settings *s, job *j, block *rows) {
    complaint why;
    bench_copies *copies = bench_copies_open(s->gpu, j, &why);
    if (!copies) {
        refuse(s, why.text, rows);
        return;
    }
    for (int regime = 0; regime < s->regime_count; regime++)
        for (int pass = 0; pass < 2; pass++)
            if (s->pass[pass])
                bench_copies_time(copies, (fbh_pass)pass, &s->regimes[regime], &rows->at[regime][pass]);
    bench_copies_close(copies);
}

static void measure_plan(const settings *s, const bench_place *place, job *j, block *rows) {
    const word_text route = job_explained(j, "route"), isa = s->gpu ? bench_gpu_arch(j) : isa_of(j);
    const uint64_t extra = job_output_bytes(j) + fb_plan_workspace(j->plan);
    if (s->gpu)
        measure_gpu(s, j, rows);
    else
        measure_calls(s, place, j, rows);
    for (int regime = 0; regime < s->regime_count; regime++)
        for (int pass = 0; pass < 2; pass++) {
            bench_row *r = &rows->at[regime][pass];
            r->route = route, r->isa = isa, r->extra = extra;
            if (s->pass[pass] && !*r->refused)
                finish(s, r);
        }
}

/* Fills the rows, of which those of the passes asked for are timed. What the library refuses without a look
 * at the machine takes no memory here either. */
static void measure(const settings *s, const bench_place *place, const fb_desc *desc, fbh_layout layout,
                    uint64_t seed, block *rows) {
    job j = {.backward = !(desc->flags & FB_FORWARD_ONLY)};
    begin(s, desc, rows);
    if (fb_supported(desc) != FB_OK) {
        refuse(s, fb_last_error(), rows);
        return;
    }
    if (bench_job_make(&j, desc, layout, seed))
        measure_plan(s, place, &j, rows);
    else
        refuse(s, fb_last_error(), rows);
    job_close(&j);
}

static bench_place find_place(const settings *s, const fb_desc *desc) {
    bench_place p = {
        .machine = machine_cpu(), .compiler = machine_compiler(), .date = machine_date(), .gpu = s->gpu};
    snprintf(p.device.text, sizeof p.device.text, "%s", fb_device_name(desc->device));
    if (desc->device == FB_METAL) {
        p.machine = machine_find_metal(desc->index);
        return p;
    }
    if (!s->gpu) {
        p.threads = desc->threads ? desc->threads : machine_threads();
        return p;
    }
    const machine_gpu gpu = machine_find_gpu(desc->index);
    p.host = p.machine;
    p.machine = gpu.name, p.capability = gpu.capability, p.driver = gpu.driver, p.nvrtc = gpu.nvrtc,
    p.products = gpu.products;
    snprintf(p.module.text, sizeof p.module.text, "%s", fbh_gpu_driver(s->gpu));
    return p;
}

/* Of the first problem that is not the unfused route's, which has few kernels of its own; and if that is not
 * wanted, at least whether there is a plan for it: without a compiler there is none for any. */
static void print_costs(const settings *s, const bench_place *place, const bench_list *list) {
    static bench_costs costs;
    const fb_desc *desc = &list->at[list->count > 1 && list->at[0].route == FB_UNFUSED ? 1 : 0];
    fb_plan *plan;
    if (!s->no_costs) {
        bench_costs_measure(&costs, s->gpu, desc);
        bench_costs_print(s->format, place, &costs);
        return;
    }
    if (fb_plan_create(&plan, desc) == FB_NO_DEVICE)
        cli_fail(CLI_LIBRARY, "%s", fb_last_error());
    fb_plan_destroy(plan);
}

/* Measures and prints; the rows that were asked for go to `rows`. Returns how many. */
static size_t run(const settings *s, const bench_place *place, const bench_list *list, fbh_layout layout,
                  bench_row *rows) {
    static block got, before;
    const bool original = s->original && s->format == BENCH_MD;
    const bench_format format = original                             ? BENCH_ORIGINAL
                                : s->decode && s->format == BENCH_MD ? BENCH_DECODE
                                                                     : s->format;
    size_t count = 0;
    bench_print_head(format, place);
    for (size_t i = 0; i < list->count; i++) {
        progress(i, list->count);
        measure(s, place, &list->at[i], layout, i + 1, &got);
        progress_clear();
        for (int regime = 0; regime < s->regime_count; regime++) {
            for (int pass = 0; pass < 2; pass++)
                if (s->pass[pass]) {
                    rows[count++] = got.at[regime][pass];
                    bench_print_row(format, place, &got.at[regime][pass]);
                }
            if (original && i % 2 == 1)
                bench_print_original(place, before.at[regime], got.at[regime]);
        }
        before = got;
    }
    return count;
}

static void open_devices(settings *s, const fb_desc *desc) {
    settle_regimes(s, desc->device);
    if (desc->device != FB_CPU)
        bench_need_device(desc);
    if (desc->device == FB_CUDA)
        s->gpu = bench_gpu_open(desc);
    else if (desc->device == FB_CPU && s->decode &&
             !(s->reader = fbh_reader_open(desc->threads ? desc->threads : machine_threads())))
        cli_fail(CLI_LIBRARY, "memory ran out");
}

int cmd_bench(int argc, char **argv) {
    static settings s;
    fbh_layout layout;
    read_options(&s, argc, argv);
    bench_list list = make_list(&s, &layout);
    open_devices(&s, &list.at[0]);
    const bench_place place = find_place(&s, &list.at[0]);
    bench_row *rows = calloc(4 * list.count, sizeof *rows);
    if (!rows)
        cli_fail(CLI_LIBRARY, "memory ran out");
    if (s.gpu)
        print_costs(&s, &place, &list);
    const size_t count = run(&s, &place, &list, layout, rows);

    if (s.plot)
        bench_plot(s.plot, &place, rows, count);
    bool good =
        !s.compare || bench_compare(s.compare, &place, rows, count, s.format == BENCH_MD ? stdout : stderr);
    fbh_reader_close(s.reader);
    fbh_gpu_close(s.gpu);
    free(rows);
    free(list.at);
    return good ? CLI_OK : CLI_CHECK;
}
