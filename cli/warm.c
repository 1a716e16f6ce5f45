/* flashback warm: compiles ahead what plans will need, so that no program has to wait for it. The library
 * keeps the kernels in its cache, and macOS those of Metal; making the plans is all that there is to do.
 * Floor: cli. */
#include "bench.h"
#include "cli.h"
#include "flashback.h"
#include "harness/harness.h"
#include "kernels.h"
#include "machine.h"
#include "options.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ID_SHAPE = 300, ID_DIM, ID_SET, ID_WITH, MOST_SHAPES = 256 };

const cli_option cli_warm_options[] = {
    {"shape", "B,HQ,HKV,LQ,LK,D[,DV]", "a problem; may come again", ID_SHAPE},
    {"dim", "D[,DV]", "the same with long sequences, if only the head dimension matters; may come again",
     ID_DIM},
    {"set", "NAME", "all problems of a set of bench", ID_SET},
    {"with", "LIST", "options that take part: " OPTIONS_PARTS, ID_WITH},
    {0},
};

typedef struct settings {
    option_flags flags;
    fb_desc shapes[MOST_SHAPES];
    int shape_count;
    const char *set;
    uint32_t with;
} settings;

typedef struct totals {
    int compiled, cached, refused;
    double compiled_ms, cached_ms;
} totals;

/* ---- Command line ------------------------------------------------------------------------------------ */

static fb_desc *next_shape(settings *s) {
    if (s->shape_count == MOST_SHAPES)
        cli_fail(CLI_USAGE, "more than %d shapes", MOST_SHAPES);
    return &s->shapes[s->shape_count++];
}

/* Kernels do not depend on lengths, as long as there are more queries than the vector route takes. */
static void read_dim(settings *s, const char *value) {
    int64_t n[2];
    const int count = parse_list(value, n, 2);
    if (count == 0)
        cli_fail(CLI_USAGE, "--dim is '%s'; expected D or D,DV", value);
    fb_desc *d = next_shape(s);
    d->batch = 1;
    d->heads_q = d->heads_kv = 8;
    d->len_q = d->len_k = 4096;
    d->head_dim = n[0];
    d->head_dim_v = n[count - 1];
}

static void read_options(settings *s, int argc, char **argv) {
    const char *value;
    *s = (settings){.set = NULL};
    for (int id; (id = cli_next(argc, argv, &value)) != -1;)
        if (id == ID_SHAPE)
            parse_shape(value, next_shape(s));
        else if (id == ID_DIM)
            read_dim(s, value);
        else if (id == ID_SET)
            s->set = value;
        else if (id == ID_WITH)
            s->with |= parse_parts(value);
        else
            options_note(&s->flags, id, value);
    if (optind < argc)
        cli_fail(CLI_USAGE, "'%s' is not an option; warm reads no files", argv[optind]);
    if (s->set && s->shape_count)
        cli_fail(CLI_USAGE, "--set excludes --shape and --dim");
    if (!s->set && !s->shape_count)
        cli_fail(CLI_USAGE, "for what? Give --shape B,HQ,HKV,LQ,LK,D, --dim D or --set NAME");
}

static bench_list make_list(const settings *s) {
    options o;
    bench_list list = {0};
    options_init(&o);
    o.desc.device = FB_CUDA;
    options_apply(&o, &s->flags);
    if (o.desc.device == FB_CPU)
        cli_fail(CLI_USAGE, "--device is 'cpu', whose kernels are compiled already");
    const bool masked = o.desc.window.left != FB_UNBOUNDED || o.desc.window.right != FB_UNBOUNDED;
    if (s->set && !o.dtype_given)
        o.desc.dtype = bench_set_dtype(s->set);
    if (s->set && !bench_set_add(&list, s->set, &o.desc, masked, INT64_MAX))
        cli_fail(CLI_USAGE, "--set is '%s'; expected " BENCH_SETS, s->set);
    for (int i = 0; i < s->shape_count; i++) {
        options_shape(&o, &s->shapes[i]);
        bench_list_add(&list, &o.desc);
    }
    for (size_t i = 0; i < list.count; i++) {
        o.desc = list.at[i];
        options_parts(&o, s->with);
        list.at[i] = o.desc;
    }
    return list;
}

/* ---- Plans ------------------------------------------------------------------------------------------- */

static void print_kernel(const kernel_line *k, const fb_desc *desc) {
    char shape[128];
    bench_shape_words(desc, shape, sizeof shape);
    printf("%-14s %8.1f ms  %-12s  %s %s %s\n", k->compiled ? "compiled" : "from the cache", k->ms, k->file,
           fb_dtype_name(desc->dtype), shape, bench_mask_name(desc).text);
}

/* A plan that needs a device or a compiler that is not there ends it; one that the library does not offer is
 * said and counted. */
static void warm(const fb_desc *desc, totals *sum) {
    kernel_line lines[KERNELS_MOST];
    char shape[128];
    fb_plan *plan;
    const fb_status status = fb_plan_create(&plan, desc);
    if (status == FB_UNSUPPORTED) {
        bench_shape_words(desc, shape, sizeof shape);
        fprintf(stderr, "flashback warm: %s %s: %s\n", fb_dtype_name(desc->dtype), shape, fb_last_error());
        sum->refused++;
        return;
    }
    if (status != FB_OK)
        cli_fail(CLI_LIBRARY, "%s", fb_last_error());
    const int count = kernels_of(plan, lines);
    fb_plan_destroy(plan);
    for (int n = 0; n < count; n++) {
        print_kernel(&lines[n], desc);
        *(lines[n].compiled ? &sum->compiled : &sum->cached) += 1;
        *(lines[n].compiled ? &sum->compiled_ms : &sum->cached_ms) += lines[n].ms;
    }
    fflush(stdout);
}

/* The folder that the library keeps kernels in, as fb_info has it. */
static void print_folder(void) {
    static char text[16384];
    static const char key[] = "\nkernel cache: ";
    fb_info(text, sizeof text);
    const char *line = strstr(text, key);
    const char *folder = line ? line + sizeof key - 1 : "none";
    const int length = (int)strcspn(folder, "\n");
    if (length == 4 && !strncmp(folder, "none", 4))
        cli_fail(CLI_LIBRARY, "there is no kernel cache, so nothing would be kept; FLASHBACK_CACHE names its "
                              "folder, or is off");
    printf("kernel cache: %.*s\n", length, folder);
}

int cmd_warm(int argc, char **argv) {
    static settings s;
    totals sum = {0};
    read_options(&s, argc, argv);
    bench_list list = make_list(&s);
    if (fb_supported(&list.at[0]) == FB_NO_DEVICE)
        cli_fail(CLI_LIBRARY, "%s", fb_last_error());
    if (list.count && list.at[0].device == FB_CUDA) /* macOS keeps Metal's code itself */
        print_folder();
    for (size_t i = 0; i < list.count; i++)
        warm(&list.at[i], &sum);
    printf("%d compiled in %.1f ms, %d from the cache in %.1f ms", sum.compiled, sum.compiled_ms, sum.cached,
           sum.cached_ms);
    printf(sum.refused ? ", %d problems refused\n" : "\n", sum.refused);
    free(list.at);
    return sum.refused ? CLI_LIBRARY : CLI_OK;
}
