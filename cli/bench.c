/* flashback bench: problems by shape or from a set, timed on fresh random inputs. A row says what it was
 * measured on, and how far it is from what the machine's multiply-adds allow. Floor: cli. Next: job.c (the
 * runs), bench_sets.c (the problems), bench_print.c (the formats). */
#include "bench.h"
#include "cli.h"
#include "harness/peak.h"
#include "job.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ID_SHAPE = 300, ID_SET, ID_MASK, ID_PASS, ID_MAX_LEN, ID_MIN_TIME, ID_FORMAT, ID_COMPARE, ID_PLOT };

const cli_option cli_bench_options[] = {
    {"shape", "B,HQ,HKV,LQ,LK,D[,DV]", "a shape to measure; may come again", ID_SHAPE},
    {"set", "default|original|quick|small|decode",
     "built-in shapes; original prints fused against unfused (f16), decode how fast K and V are read",
     ID_SET},
    {"mask", "dense|causal", "one mask for all shapes; sets have both", ID_MASK},
    {"max-len", "N", "leave longer shapes out of the set", ID_MAX_LEN},
    {"pass", "fwd,bwd", "which passes (default both)", ID_PASS},
    {"min-time", "S", "repeat each for at least S seconds and 3 runs (default 0.5)", ID_MIN_TIME},
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
    const char *set, *mask, *compare, *plot;
    int64_t max_len;
    bool pass[2], original, decode;
    double min_time;
    bench_format format;
    fbh_reader *reader; /* not NULL: how fast the machine reads is measured beside every row */
} settings;

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
    *s = (settings){.max_len = INT64_MAX, .pass = {true, true}, .min_time = 0.5};
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
    if (s->original && !o.dtype_given)
        o.desc.dtype = FB_F16;
    if (s->decode)
        o.desc.flags |= FB_FORWARD_ONLY;
    if (s->set && !bench_set_add(&list, s->set, &o.desc, masked || s->mask, s->max_len))
        cli_fail(CLI_USAGE, "--set is '%s'; expected default, original, quick, small or decode", s->set);
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

/* "avx512" of "kernels: cpu avx512, ...". */
static word_text isa_of(const job *j) {
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
    r->peak_gflops = fmax(r->peak_gflops, peak_of(r, threads, seconds));
    if (s->reader)
        r->read_rate = fmax(r->read_rate, fbh_reader_run(s->reader, seconds));
}

/* Fills two rows, forward and backward, of which those asked for are timed. */
static void measure(const settings *s, const bench_place *place, const fb_desc *desc, fbh_layout layout,
                    uint64_t seed, bench_row *two) {
    job j = {.backward = !(desc->flags & FB_FORWARD_ONLY)};
    complaint why = {""};
    bool refused = fb_supported(desc) != FB_OK;
    if (refused)
        complain(&why, "%s", fb_last_error());
    for (int pass = 0; pass < 2; pass++) {
        two[pass] = (bench_row){.desc = *desc, .pass = (fbh_pass)pass, .mask = bench_mask_name(desc)};
        snprintf(two[pass].refused, sizeof two[pass].refused, "%s", why.text);
        snprintf(two[pass].route.text, sizeof two[pass].route.text, "%s", fb_route_name(desc->route));
        strcpy(two[pass].isa.text, "-");
    }
    if (refused)
        return;

    fbh_case c;
    fbh_case_init(&c);
    c.desc = *desc;
    c.layout = layout;
    fbh_problem_create(&j.problem, &c, desc->device, desc->index, FBH_GUARD_NONE, false);
    j.problem.desc.route = desc->route;
    j.problem.desc.threads = desc->threads;
    fill_normal(&j.problem, seed);
    job_plan(&j);
    if (!s->pass[FBH_FORWARD])
        job_run(&j, FBH_FORWARD);
    for (int pass = 0; pass < 2; pass++) {
        bench_row *r = &two[pass];
        r->route = job_explained(&j, "route");
        r->isa = isa_of(&j);
        r->extra = job_output_bytes(&j) + fb_plan_workspace(j.plan);
        if (!s->pass[pass])
            continue;
        measure_beside(s, place->threads, r);
        r->ms = job_time(&j, (fbh_pass)pass, LEAST_RUNS, s->min_time);
        measure_beside(s, place->threads, r);
        r->gflops = bench_flops(desc, (fbh_pass)pass) / r->ms.median * 1e-6;
        r->peak_percent = r->peak_gflops > 0 ? 100 * r->gflops / r->peak_gflops : 0;
        if (s->reader)
            r->kv_rate = bench_kv_bytes(desc) / r->ms.median * 1e-6;
    }
    job_close(&j);
}

static bench_place find_place(const fb_desc *desc) {
    bench_place p = {machine_cpu(), machine_compiler(), machine_date(), machine_threads()};
    if (desc->threads)
        p.threads = desc->threads;
    return p;
}

int cmd_bench(int argc, char **argv) {
    static settings s;
    fbh_layout layout;
    read_options(&s, argc, argv);
    bench_list list = make_list(&s, &layout);
    const bench_place place = find_place(&list.at[0]);
    const bool original = s.original && s.format == BENCH_MD;
    const bench_format format = s.decode && s.format == BENCH_MD ? BENCH_DECODE : s.format;
    bench_row *rows = calloc(2 * list.count, sizeof *rows);
    size_t count = 0;
    if (!rows)
        cli_fail(CLI_LIBRARY, "memory ran out");

    if (s.decode && !(s.reader = fbh_reader_open(place.threads)))
        cli_fail(CLI_LIBRARY, "memory ran out");
    bench_print_head(original ? BENCH_ORIGINAL : format);
    for (size_t i = 0; i < list.count; i++) {
        bench_row two[2];
        progress(i, list.count);
        measure(&s, &place, &list.at[i], layout, i + 1, two);
        progress_clear();
        for (int pass = 0; pass < 2; pass++)
            if (s.pass[pass]) {
                rows[count++] = two[pass];
                if (!original)
                    bench_print_row(format, &place, &two[pass]);
            }
        if (original && i % 2 == 1)
            bench_print_original(&rows[count - 4]);
    }

    if (s.plot)
        bench_plot(s.plot, &place, rows, count);
    bool good =
        !s.compare || bench_compare(s.compare, &place, rows, count, s.format == BENCH_MD ? stdout : stderr);
    fbh_reader_close(s.reader);
    free(rows);
    free(list.at);
    return good ? CLI_OK : CLI_CHECK;
}
