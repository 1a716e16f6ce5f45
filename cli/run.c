/* flashback run: tensors from files through the library, results to files, a summary on standard output.
 * Floor: cli. Next: inputs.c (files to problem), job.c (running it), outputs.c. */
#include "cli.h"
#include "inputs.h"
#include "job.h"
#include "options.h"
#include "outputs.h"
#include <jansson.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* Options of .npy files have the id of their tensor, from here on. */
enum { ID_TENSOR = 300, ID_BLOCK = 400, ID_JSON, ID_TABLE, ID_VERIFY, ID_REPEAT, ID_FORWARD };

const cli_option cli_run_options[] = {
    {"output", "PATH", "write out, lse, dq, dk, dv to PATH.safetensors, or as .npy into the folder PATH/",
     'o'},
    {"json", NULL, "print a JSON object for each file", ID_JSON},
    {"table", NULL, "print a table: a row for each file, fused memory beside unfused, errors", ID_TABLE},
    {"verify", NULL, "compare with the definition in float64; exit 1 if the accuracy rule is broken",
     ID_VERIFY},
    {"repeat", "N", "time N runs and print the median (default 1)", ID_REPEAT},
    {"forward-only", NULL, "no backward, even if dout is there", ID_FORWARD},
    {"block", "Q,K", "cells of a block of block_mask, multiples of 16", ID_BLOCK},
    {"q", "FILE.npy", "take q from a .npy file; likewise:", ID_TENSOR + FBH_Q},
    {"k", "FILE.npy", "", ID_TENSOR + FBH_K},
    {"v", "FILE.npy", "", ID_TENSOR + FBH_V},
    {"dout", "FILE.npy", "", ID_TENSOR + FBH_DOUT},
    {"bias", "FILE.npy", "", ID_TENSOR + FBH_BIAS},
    {"mask", "FILE.npy", "", ID_TENSOR + FBH_MASK},
    {"sinks", "FILE.npy", "", ID_TENSOR + FBH_SINKS},
    {"dlse", "FILE.npy", "", ID_TENSOR + FBH_DLSE},
    {"block-mask", "FILE.npy", "", ID_TENSOR + FBH_BLOCK_MASK},
    {"cu-q", "FILE.npy", "", ID_TENSOR + FBH_CU_Q},
    {"cu-k", "FILE.npy", "", ID_TENSOR + FBH_CU_K},
    {"lens-q", "FILE.npy", "", ID_TENSOR + FBH_LENS_Q},
    {"lens-k", "FILE.npy", "", ID_TENSOR + FBH_LENS_K},
    {0},
};

typedef struct settings {
    option_flags flags;
    const char *output, *npy[FBH_OUT];
    int64_t block[2], repeat;
    bool json, table, verify, forward_only, any_npy;
} settings;

/* What is known about one file after it ran. */
typedef struct outcome {
    const char *name;
    word_text route;
    fbh_stats ms[2]; /* by pass */
    uint64_t extra;
    job_errors errors; /* with --verify and --table */
} outcome;

static void read_options(settings *s, int argc, char **argv) {
    const char *value;
    *s = (settings){.repeat = 1};
    for (int id; (id = cli_next(argc, argv, &value)) != -1;) {
        if (id == 'o')
            s->output = value;
        else if (id == ID_JSON)
            s->json = true;
        else if (id == ID_TABLE)
            s->table = true;
        else if (id == ID_VERIFY)
            s->verify = true;
        else if (id == ID_FORWARD)
            s->forward_only = true;
        else if (id >= ID_TENSOR && id < ID_TENSOR + FBH_OUT)
            s->npy[id - ID_TENSOR] = value, s->any_npy = true;
        else if (id == ID_REPEAT && !parse_int(value, 1, 1000000, &s->repeat))
            cli_fail(CLI_USAGE, "--repeat is '%s'; expected an integer from 1 to 1000000", value);
        else if (id == ID_BLOCK && (parse_list(value, s->block, 2) != 2 || s->block[0] < 16 ||
                                    s->block[1] < 16 || s->block[0] % 16 || s->block[1] % 16))
            cli_fail(CLI_USAGE, "--block is '%s'; expected two multiples of 16", value);
        else if (id < ID_TENSOR)
            options_note(&s->flags, id, value);
    }
    int files = argc - optind;
    if (s->any_npy == (files > 0))
        cli_fail(CLI_USAGE, s->any_npy ? "give .safetensors files or .npy files by option, not both"
                                       : "which file? (--help says more)");
    if (s->output && files > 1)
        cli_fail(CLI_USAGE, "--output takes the results of one file, but %d are given", files);
    if (s->json && s->table)
        cli_fail(CLI_USAGE, "--json and --table exclude each other");
    for (int i = optind; i < argc; i++)
        if (!file_ends(argv[i], ".safetensors"))
            cli_fail(CLI_USAGE, "'%s' does not end in .safetensors; .npy files are given by --q, --k, ...",
                     argv[i]);
    if (s->output)
        outputs_check_path(s->output);
}

/* ---- Reports ---------------------------------------------------------------------------------------- */

static json_t *shape_json(const fb_desc *d) {
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I}", "batch", (json_int_t)d->batch, "heads_q",
                     (json_int_t)d->heads_q, "heads_kv", (json_int_t)d->heads_kv, "len_q",
                     (json_int_t)d->len_q, "len_k", (json_int_t)d->len_k, "head_dim", (json_int_t)d->head_dim,
                     "head_dim_v", (json_int_t)d->head_dim_v);
}

/* JSON has no infinity: an error that is none is null. */
static json_t *number_json(double x) { return isfinite(x) ? json_real(x) : json_null(); }

static json_t *errors_json(const job *j, const job_errors *e) {
    json_t *errors = json_object();
    for (int id = FBH_OUT; id < FBH_WORKSPACE; id++)
        if (j->problem.t[id].buffer)
            json_object_set_new(errors, j->problem.t[id].name, number_json(e->worst[id]));
    json_object_set_new(errors, "ratio", number_json(e->ratio));
    json_object_set_new(errors, "ok", json_boolean(e->ok));
    if (!e->ok)
        json_object_set_new(errors, "message", json_string(e->message));
    return errors;
}

static void print_json(const settings *s, const job *j, const outcome *o) {
    json_t *line =
        json_pack("{s:s,s:o,s:s,s:s,s:f,s:I}", "file", o->name, "shape", shape_json(&j->problem.desc),
                  "dtype", fb_dtype_name(j->problem.desc.dtype), "route", o->route.text, "forward_ms",
                  o->ms[0].median, "peak_extra_bytes", (json_int_t)o->extra);
    if (j->backward)
        json_object_set_new(line, "backward_ms", json_real(o->ms[1].median));
    if (s->verify)
        json_object_set_new(line, "errors", errors_json(j, &o->errors));
    char *text = json_dumps(line, JSON_COMPACT | JSON_REAL_PRECISION(9));
    puts(text ? text : "{}");
    free(text);
    json_decref(line);
}

static void shape_words(const fb_desc *d, char *text, size_t size) {
    snprintf(text, size, "%lldx%lld/%lldx%lldx%lldx%lld", (long long)d->batch, (long long)d->heads_q,
             (long long)d->heads_kv, (long long)d->len_q, (long long)d->len_k, (long long)d->head_dim);
    if (d->head_dim_v != d->head_dim)
        snprintf(text + strlen(text), size - strlen(text), "/%lld", (long long)d->head_dim_v);
}

static void memory_words(const job *j, fb_route route, char *text, size_t size) {
    complaint why;
    uint64_t bytes = job_extra_bytes(j, route, &why);
    if (bytes)
        snprintf(text, size, "%.2f MB", (double)bytes * 1e-6);
    else
        snprintf(text, size, "refused: %s", why.text);
}

static void print_table_head(void) {
    printf("%-32s %-28s %-9s %10s %10s  %9s %9s %9s %9s  %-12s  %s\n", "name", "B x Hq/Hkv x Lq x Lk x D/Dv",
           "route", "fwd ms", "bwd ms", "err out", "err dq", "err dk", "err dv", "fused extra",
           "unfused extra");
}

static void print_row(const job *j, const outcome *o) {
    char shape[128], fused[512], unfused[512], backward[24] = "-";
    shape_words(&j->problem.desc, shape, sizeof shape);
    memory_words(j, FB_FUSED, fused, sizeof fused);
    memory_words(j, FB_UNFUSED, unfused, sizeof unfused);
    if (j->backward)
        snprintf(backward, sizeof backward, "%.3f", o->ms[1].median);
    const char *folder_end = strrchr(o->name, '/');
    printf("%-32s %-28s %-9s %10.3f %10s ", folder_end ? folder_end + 1 : o->name, shape, o->route.text,
           o->ms[0].median, backward);
    static const fbh_id columns[] = {FBH_OUT, FBH_DQ, FBH_DK, FBH_DV};
    for (size_t i = 0; i < sizeof columns / sizeof *columns; i++)
        if (j->problem.t[columns[i]].buffer)
            printf(" %9.2e", o->errors.worst[columns[i]]);
        else
            printf(" %9s", "-");
    printf("  %-12s  %s\n", fused, unfused);
}

static void print_words(const settings *s, const job *j, const outcome *o) {
    char shape[128];
    shape_words(&j->problem.desc, shape, sizeof shape);
    printf("%s: %s %s, route %s, forward %.3f ms", o->name, fb_dtype_name(j->problem.desc.dtype), shape,
           o->route.text, o->ms[0].median);
    if (j->backward)
        printf(", backward %.3f ms", o->ms[1].median);
    printf(", %.2f MB beside the inputs\n", (double)o->extra * 1e-6);
    for (int id = FBH_OUT; id < FBH_WORKSPACE && s->verify; id++)
        if (j->problem.t[id].buffer)
            printf("  max error of %-6s %.3e\n", j->problem.t[id].name, o->errors.worst[id]);
}

/* ---- One file --------------------------------------------------------------------------------------- */

static void open_inputs(inputs *in, const settings *s, const char *path) {
    if (path)
        inputs_open(in, path);
    else
        inputs_begin(in);
    for (int id = 0; id < FBH_OUT; id++)
        if (s->npy[id])
            inputs_add(in, (fbh_id)id, s->npy[id]);
    if (s->block[0]) {
        in->options.block_q = s->block[0];
        in->options.block_k = s->block[1];
    }
    options_apply(&in->options, &s->flags);
    in->forward_only = s->forward_only;
}

/* Returns the exit code. */
static int run_file(const settings *s, const char *path) {
    inputs in;
    job j;
    open_inputs(&in, s, path);
    inputs_make_job(&in, &j);
    job_plan(&j);

    outcome o = {.name = in.name, .route = job_explained(&j, "route")};
    complaint why;
    for (int pass = 0; pass < job_passes(&j); pass++)
        o.ms[pass] = job_time(&j, (fbh_pass)pass, (int)s->repeat, 0);
    o.extra = job_extra_bytes(&j, j.problem.desc.route, &why);
    bool compared = s->verify || s->table;
    if (compared)
        job_verify(&j, &o.errors);
    if (s->output)
        outputs_write(&in, &j, s->output);

    if (s->json)
        print_json(s, &j, &o);
    else if (s->table)
        print_row(&j, &o);
    else
        print_words(s, &j, &o);
    bool wrong = compared && !o.errors.ok;
    if (wrong)
        fprintf(stderr, "flashback run: %s: the accuracy rule is broken: %s\n", o.name, o.errors.message);
    job_close(&j);
    inputs_close(&in);
    return wrong ? CLI_CHECK : CLI_OK;
}

int cmd_run(int argc, char **argv) {
    settings s;
    read_options(&s, argc, argv);
    if (s.table)
        print_table_head();
    if (s.any_npy)
        return run_file(&s, NULL);
    int code = CLI_OK;
    for (int i = optind; i < argc; i++)
        if (run_file(&s, argv[i]) != CLI_OK)
            code = CLI_CHECK;
    return code;
}
