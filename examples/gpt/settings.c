/* See settings.h. Floor: examples/gpt. */
#include "settings.h"
#include "cli/cli.h"
#include "cli/file.h"
#include "cli/options.h"

#include <getopt.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum {
    TEXT = 't',
    OUT = 'o',
    STEPS = 'n',
    CONTEXT = 'c',
    BATCH = 'b',
    LAYERS = 'l',
    RESUME = 'r',
    QUIET = 'q',
    MICRO = 256,
    WIDTH,
    HEADS,
    HEADS_KV,
    HEAD_DIM,
    HIDDEN,
    WINDOW,
    SINKS,
    SOFTCAP,
    UNTIED,
    ATTENTION,
    DTYPE,
    RATE,
    WARMUP,
    DECAY,
    CLIP,
    SEED,
    THREADS,
    SAVE_EVERY,
    HELD_OUT_EVERY,
    HELD_OUT_BATCHES,
    SAMPLE,
    TEMPERATURE,
    PLOT,
    OVERWRITE,
    COMPARE,
    LONGEST,
    MEASURE
};

static const cli_option table[] = {
    {"text", "PATH", "a file or folder to learn; may be given again (default: this project's)", TEXT},
    {"out", "FOLDER", "for checkpoint.safetensors, log.jsonl and loss.svg (build/train)", OUT},
    {"resume", NULL, "go on from the folder's checkpoint; give the other options as before", RESUME},
    {"overwrite", NULL, "begin anew, although the folder has a checkpoint", OVERWRITE},
    {"steps", "N", "steps in all, and the length of the rate's schedule (300)", STEPS},
    {"context", "N", "tokens of a sequence (256)", CONTEXT},
    {"batch", "N", "sequences of a batch (8)", BATCH},
    {"accumulate", "N", "batches of a step, whose gradients are added (1)", MICRO},
    {"layers", "N", "layers (4)", LAYERS},
    {"width", "N", "width of the residual (256)", WIDTH},
    {"heads", "N", "query heads (4)", HEADS},
    {"heads-kv", "N", "key and value heads (2)", HEADS_KV},
    {"head-dim", "N", "width of a head (64)", HEAD_DIM},
    {"hidden", "N", "width of SwiGLU (8/3 of the width, in steps of 32)", HIDDEN},
    {"window", "N", "layers 1, 3, ... see this many tokens (0: all)", WINDOW},
    {"sinks", NULL, "attention sinks, learned", SINKS},
    {"softcap", "X", "cap of attention's scores (0: none)", SOFTCAP},
    {"untied", NULL, "a head of its own instead of the embedding", UNTIED},
    {"attention", "ROUTE", "fused, unfused or auto (auto)", ATTENTION},
    {"dtype", "TYPE", "of attention's tensors: f32 or bf16 (f32)", DTYPE},
    {"rate", "X", "highest learning rate (0.001)", RATE},
    {"warmup", "N", "steps until it is reached (20)", WARMUP},
    {"decay", "X", "weight decay (0.1)", DECAY},
    {"clip", "X", "most norm of a gradient (1)", CLIP},
    {"seed", "N", "of weights, batches and the sample (1)", SEED},
    {"threads", "N", "of attention (0: as many as there are); OMP_NUM_THREADS holds for all else", THREADS},
    {"save-every", "N", "steps between checkpoints (50)", SAVE_EVERY},
    {"held-out-every", "N", "steps between losses over the text held out (25)", HELD_OUT_EVERY},
    {"held-out-batches", "N", "batches of it (4)", HELD_OUT_BATCHES},
    {"sample", "N", "bytes to write at the end (300)", SAMPLE},
    {"temperature", "X", "of the sample (0.8)", TEMPERATURE},
    {"plot", "PATH", "the picture of the loss, .svg or .png; 'none' for none", PLOT},
    {"compare", NULL, "train nothing; compare fused with unfused attention", COMPARE},
    {"longest", "N", "longest context of that table (32768)", LONGEST},
    {"measure", NULL, "train nothing; one row of that table, for --context and --attention", MEASURE},
    {"quiet", NULL, "no progress", QUIET},
    {0},
};

static const cli_verb self = {
    NULL, "",    "train a small language model on the bytes of some text, with flashback's attention",
    NULL, table, NULL};

static int64_t whole(const char *name, const char *value, int64_t least, int64_t most) {
    int64_t n = 0;
    if (!parse_int(value, least, most, &n))
        cli_fail(CLI_USAGE, "--%s is '%s'; expected a whole number from %" PRId64 " to %" PRId64, name, value,
                 least, most);
    return n;
}

static float number(const char *name, const char *value, double least, double most) {
    double x = 0;
    if (!parse_double(value, &x) || !(x >= least && x <= most))
        cli_fail(CLI_USAGE, "--%s is '%s'; expected a number from %g to %g", name, value, least, most);
    return (float)x;
}

static fb_route route_of(const char *value) {
    static const fb_route routes[] = {FB_AUTO, FB_FUSED, FB_UNFUSED};
    for (size_t i = 0; i < sizeof routes / sizeof *routes; i++)
        if (!strcmp(value, fb_route_name(routes[i])))
            return routes[i];
    cli_fail(CLI_USAGE, "--attention is '%s'; expected auto, fused or unfused", value);
}

static fb_dtype dtype_of(const char *value) {
    if (!strcmp(value, "f32"))
        return FB_F32;
    if (!strcmp(value, "bf16"))
        return FB_BF16;
    cli_fail(CLI_USAGE, "--dtype is '%s'; expected f32 or bf16", value);
}

/* Options of the model; false if it is none of them. */
static bool read_model(gpt_config *c, int id, const char *name, const char *value) {
    const int64_t most = 1 << 24;
    int64_t *const numbers[] = {&c->context, &c->batch,    &c->layers,   &c->width,
                                &c->heads_q, &c->heads_kv, &c->head_dim, &c->hidden};
    static const int ids[] = {CONTEXT, BATCH, LAYERS, WIDTH, HEADS, HEADS_KV, HEAD_DIM, HIDDEN};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        if (id == ids[i]) {
            *numbers[i] = whole(name, value, 1, most);
            return true;
        }
    switch (id) {
    case WINDOW:
        c->window = whole(name, value, 0, most);
        return true;
    case SINKS:
        c->sinks = true;
        return true;
    case SOFTCAP:
        c->softcap = number(name, value, 0, 1e6);
        return true;
    case UNTIED:
        c->tied = false;
        return true;
    case ATTENTION:
        c->route = route_of(value);
        return true;
    case DTYPE:
        c->dtype = dtype_of(value);
        return true;
    case THREADS:
        c->threads = (int)whole(name, value, 0, 1024);
        return true;
    default:
        return false;
    }
}

/* Options of how it learns; false if it is none of them. */
static bool read_recipe(settings *s, int id, const char *name, const char *value) {
    const int64_t most = 1 << 30;
    int64_t *const numbers[] = {&s->recipe.steps, &s->recipe.micro, &s->run.save_every,
                                &s->run.held_out_every, &s->run.held_out_batches};
    static const int ids[] = {STEPS, MICRO, SAVE_EVERY, HELD_OUT_EVERY, HELD_OUT_BATCHES};
    for (size_t i = 0; i < sizeof ids / sizeof *ids; i++)
        if (id == ids[i]) {
            *numbers[i] = whole(name, value, 1, most);
            return true;
        }
    switch (id) {
    case RATE:
        s->recipe.rate = number(name, value, 1e-9, 10);
        return true;
    case WARMUP:
        s->recipe.warmup = whole(name, value, 0, most);
        return true;
    case DECAY:
        s->recipe.adam.decay = number(name, value, 0, 10);
        return true;
    case CLIP:
        s->recipe.clip = number(name, value, 1e-6, 1e6);
        return true;
    default:
        return false;
    }
}

static void read_rest(settings *s, int id, const char *name, const char *value) {
    switch (id) {
    case TEXT:
        if (s->text_count == MOST_TEXTS)
            cli_fail(CLI_USAGE, "--text is given more than %d times; a folder holds many files", MOST_TEXTS);
        s->texts[s->text_count++] = value;
        break;
    case OUT:
        if (!*value)
            cli_fail(CLI_USAGE, "--out is empty; expected the name of a folder");
        s->out = value;
        break;
    case RESUME:
        s->resume = true;
        break;
    case SEED:
        s->seed = (uint64_t)whole(name, value, 0, INT64_MAX);
        break;
    case SAMPLE:
        s->sample = whole(name, value, 0, 1 << 20);
        break;
    case TEMPERATURE:
        s->temperature = (double)number(name, value, 1e-3, 100);
        break;
    case PLOT:
        if (strcmp(value, "none") && !file_ends(value, ".svg") && !file_ends(value, ".png"))
            cli_fail(CLI_USAGE, "--plot is '%s'; expected a name ending in .svg or .png, or none", value);
        s->plot = value;
        break;
    case OVERWRITE:
        s->overwrite = true;
        break;
    case COMPARE:
        s->compare = true;
        break;
    case LONGEST:
        s->longest = whole(name, value, 512, 1 << 24);
        break;
    case MEASURE:
        s->measure = true;
        break;
    default:
        s->run.quiet = true;
    }
}

static const char *name_of(int id) {
    const cli_option *o = table;
    while (o->name && o->id != id)
        o++;
    return o->name;
}

/* What --compare and --measure have no use for is refused, not ignored. */
static void check_use(const settings *s) {
    static const int no_compare[] = {OUT,        RESUME,         OVERWRITE,        STEPS,  ATTENTION,   DTYPE,
                                     SAVE_EVERY, HELD_OUT_EVERY, HELD_OUT_BATCHES, SAMPLE, TEMPERATURE, PLOT};
    static const int measure[] = {CONTEXT, ATTENTION, THREADS, MEASURE};
    for (size_t i = 0; s->compare && i < sizeof no_compare / sizeof *no_compare; i++)
        if (s->given[no_compare[i]])
            cli_fail(CLI_USAGE,
                     "--compare has no use for --%s: it trains 100 steps in f32, fused and unfused",
                     name_of(no_compare[i]));
    for (const cli_option *o = table; s->measure && o->name; o++) {
        bool used = false;
        for (size_t i = 0; i < sizeof measure / sizeof *measure; i++)
            used |= measure[i] == o->id;
        if (s->given[o->id] && !used)
            cli_fail(CLI_USAGE, "--measure has no use for --%s: the table's model is fixed", o->name);
    }
    if (s->resume && s->overwrite)
        cli_fail(CLI_USAGE, "--resume and --overwrite exclude each other");
    if (!s->compare && s->given[LONGEST])
        cli_fail(CLI_USAGE, "--longest is for --compare only");
}

static void adopt(const settings *s, int id, double asked, double saved) {
    if (s->given[id] && (asked < saved || asked > saved))
        cli_fail(CLI_USAGE, "--%s is %g, but the checkpoint to go on from has %g; leave it out", name_of(id),
                 asked, saved);
}

void settings_adopt(settings *s, const run_state *saved) {
    const gpt_config *a = &s->config, *b = &saved->config;
    adopt(s, CONTEXT, (double)a->context, (double)b->context);
    adopt(s, LAYERS, (double)a->layers, (double)b->layers);
    adopt(s, WIDTH, (double)a->width, (double)b->width);
    adopt(s, HEADS, (double)a->heads_q, (double)b->heads_q);
    adopt(s, HEADS_KV, (double)a->heads_kv, (double)b->heads_kv);
    adopt(s, HEAD_DIM, (double)a->head_dim, (double)b->head_dim);
    adopt(s, HIDDEN, (double)a->hidden, (double)b->hidden);
    adopt(s, WINDOW, (double)a->window, (double)b->window);
    adopt(s, SINKS, a->sinks, b->sinks);
    adopt(s, SOFTCAP, (double)a->softcap, (double)b->softcap);
    adopt(s, UNTIED, !a->tied, !b->tied);
    adopt(s, SEED, (double)s->seed, (double)saved->seed);
    s->config = *b;
    s->seed = saved->seed;
}

void settings_read(settings *s, int argc, char **argv) {
    const char *value;
    *s = (settings){.out = "build/train", .sample = 300, .longest = 32768, .seed = 1, .temperature = 0.8};
    s->config = (gpt_config){.layers = 4,
                             .width = 256,
                             .heads_q = 4,
                             .heads_kv = 2,
                             .head_dim = 64,
                             .batch = 8,
                             .context = 256,
                             .tied = true,
                             .rope_base = 10000,
                             .route = FB_AUTO,
                             .dtype = FB_F32};
    s->recipe = (recipe){.steps = 300, .warmup = 20, .micro = 1, .rate = 1e-3F, .clip = 1};
    s->recipe.adam = (adamw){.beta1 = 0.9F, .beta2 = 0.99F, .epsilon = 1e-8F, .decay = 0.1F};
    s->run = (run_options){.save_every = 50, .held_out_every = 25, .held_out_batches = 4};
    cli_begin_program("flashback-train", &self);
    for (int id; (id = cli_next(argc, argv, &value)) != -1;) {
        const char *name = name_of(id);
        s->given[id] = true;
        if (!read_model(&s->config, id, name, value) && !read_recipe(s, id, name, value))
            read_rest(s, id, name, value);
    }
    if (optind < argc)
        cli_fail(CLI_USAGE, "'%s' is not an option; a text is given by --text", argv[optind]);
    if (!s->config.hidden)
        s->config.hidden = (s->config.width * 8 / 3 + 31) / 32 * 32;
    check_use(s);
}
