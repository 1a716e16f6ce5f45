/* flashback-train: a small language model learns the bytes of some text. Begin with parameters.h. Floor:
 * examples/gpt. */
#include "cli/cli.h"
#include "compare.h"
#include "journal.h"
#include "sample.h"
#include "settings.h"

#include <dirent.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* The first signal's number: the step in progress ends, and is saved. */
static volatile int stop;

static void on_signal(int number) {
    stop = number;
    signal(number, SIG_DFL); /* the second one kills */
}

static void catch_signals(void (*handler)(int)) {
    signal(SIGINT, handler);
    signal(SIGTERM, handler);
}

/* ---- Paths ---- */

typedef struct path {
    char text[4096];
} path;

static path in_folder(const settings *s, const char *name) {
    path p;
    if (snprintf(p.text, sizeof p.text, "%s/%s", s->out, name) >= (int)sizeof p.text)
        cli_fail(CLI_USAGE, "--out: the path is longer than %zu bytes", sizeof p.text);
    return p;
}

/* The folder and those above it. */
static void make_folder(const char *folder) {
    path p;
    snprintf(p.text, sizeof p.text, "%s", folder);
    for (char *at = p.text + 1;; at++) {
        const char was = *at;
        if (was != '/' && was)
            continue;
        *at = 0;
        if (mkdir(p.text, 0777) && errno != EEXIST)
            cli_fail(CLI_OUTPUT, "%s: cannot be made: %s", p.text, strerror(errno));
        *at = was;
        if (!was)
            return;
    }
}

/* The project's own sources and pages, from its top folder. */
static void read_text(const settings *s, text *t) {
    static const char *const own[] = {"README.md", "docs", "include", "src", "harness", "cli", "examples"};
    complaint why = {""};
    const bool given = s->text_count > 0;
    if (!given && access(own[0], R_OK))
        cli_fail(CLI_INPUT, "there is no %s here to learn; --text names files or folders", own[0]);
    if (!text_open(t, given ? s->texts : own, given ? s->text_count : (int)(sizeof own / sizeof *own), &why))
        cli_fail(CLI_INPUT, "%s", why.text);
}

/* ---- Training ---- */

static void print_sample(const settings *s, const trainer *t) {
    enum { PROMPT = 64 };
    complaint why = {""};
    const int64_t given = PROMPT < t->text->size - t->text->train ? PROMPT : t->text->size - t->text->train;
    const int64_t total = given + s->sample;
    uint8_t *bytes = malloc((size_t)total);
    if (!bytes)
        cli_fail(CLI_LIBRARY, "no memory for a sample of %lld bytes", (long long)s->sample);
    memcpy(bytes, t->text->bytes + t->text->train, (size_t)given);
    if (!sample(&t->state.config, t->state.weights, given, total, (float)s->temperature, s->seed, bytes,
                &why))
        cli_fail(CLI_LIBRARY, "%s", why.text);
    printf("\nSample, after %lld bytes of what was held out:\n\n", (long long)given);
    for (int64_t i = 0; i < total; i++) {
        const uint8_t c = bytes[i];
        putchar(c == '\n' || (c >= 32 && c < 127) ? c : '?');
    }
    puts("\n");
    free(bytes);
}

static void draw(const settings *s, const char *log) {
    complaint why = {""};
    const path own = in_folder(s, "loss.svg");
    const char *to = s->plot ? s->plot : own.text;
    char title[200];
    if (!strcmp(to, "none"))
        return;
    snprintf(title, sizeof title, "flashback-train: %lld layers of width %lld, context %lld",
             (long long)s->config.layers, (long long)s->config.width, (long long)s->config.context);
    fflush(stdout);
    if (journal_plot(log, to, title, &why))
        printf("plot: %s\n", to);
    else if (s->plot)
        cli_fail(CLI_OUTPUT, "%s", why.text);
    else
        printf("no plot: %s\n", why.text);
}

/* Checkpoints that a run was killed while writing. */
static void remove_drafts(const settings *s) {
    static const char begin[] = "checkpoint.safetensors.";
    DIR *folder = opendir(s->out);
    for (const struct dirent *e; folder && (e = readdir(folder));)
        if (!strncmp(e->d_name, begin, sizeof begin - 1) && strlen(e->d_name) == sizeof begin - 1 + 6)
            unlink(in_folder(s, e->d_name).text);
    if (folder)
        closedir(folder);
}

/* Makes the folder ready; nothing that a run has left there is lost unless that is asked for. */
static void prepare_folder(settings *s, const char *checkpoint) {
    complaint why = {""};
    run_state saved = {.config = s->config};
    if (s->resume) {
        if (!checkpoint_peek(checkpoint, &saved, &why))
            cli_fail(CLI_INPUT, "%s", why.text);
        settings_adopt(s, &saved);
    } else if (!s->overwrite && access(checkpoint, F_OK) == 0)
        cli_fail(CLI_USAGE,
                 "%s is there already; --resume goes on from it, --overwrite begins anew, --out names "
                 "another folder",
                 checkpoint);
    remove_drafts(s);
}

/* The shape of the model is the checkpoint's. */
static void load(settings *s, const char *checkpoint, trainer *t) {
    complaint why = {""};
    if (!checkpoint_load(checkpoint, gpt_layout_of(t->model), &t->state, &why))
        cli_fail(CLI_INPUT, "%s", why.text);
    if (t->state.step >= s->recipe.steps)
        cli_fail(CLI_USAGE, "%s has done %lld steps; --steps is %lld and must be more to go on", checkpoint,
                 (long long)t->state.step, (long long)s->recipe.steps);
}

static int train(settings *s, const text *t) {
    const path checkpoint = in_folder(s, "checkpoint.safetensors"), log = in_folder(s, "log.jsonl");
    complaint why = {""};
    trainer own;
    run_result r;
    s->run.checkpoint = checkpoint.text;
    s->run.log = log.text;
    prepare_folder(s, checkpoint.text);
    if (!text_fits(t, s->config.context, &why))
        cli_fail(CLI_INPUT, "%s", why.text);
    if (!trainer_open(&own, &s->recipe, t, &s->config, s->seed, &why))
        cli_fail(CLI_LIBRARY, "%s", why.text);
    if (s->resume)
        load(s, checkpoint.text, &own);
    else
        make_folder(s->out);
    printf("%lld parameters, %lld bytes of text, %lld held out; activations and workspace %.1f MB\n",
           (long long)gpt_layout_of(own.model)->floats, (long long)t->size, (long long)(t->size - t->train),
           (double)gpt_activation_bytes(own.model) * 1e-6);
    fflush(stdout);
    catch_signals(on_signal);
    if (!run_training(&own, &s->run, &stop, &r, &why))
        cli_fail(r.unwritten ? CLI_OUTPUT : CLI_LIBRARY, "%s", why.text);
    catch_signals(SIG_DFL);
    printf("%s at step %lld: held out %.3f bits/byte, %.3f at the start; %.0f tokens/s, attention %.0f %% of "
           "the time\n",
           r.interrupted ? "interrupted" : "done", (long long)own.state.step, r.held_out, r.first_held_out,
           r.tokens_per_s, 100 * r.attention_share);
    printf("checkpoint: %s\nlog: %s\n", checkpoint.text, log.text);
    if (s->sample && !r.interrupted)
        print_sample(s, &own);
    draw(s, log.text);
    trainer_close(&own);
    return r.interrupted ? 128 + stop : CLI_OK; /* as a shell says it of a program that a signal ended */
}

/* ---- Comparing ---- */

static int measure(const settings *s) {
    const gpt_config config = compare_model(s->config.context, s->config.route, s->config.threads);
    complaint why = {""};
    cost c;
    if (!compare_cost(&config, &c, &why))
        cli_fail(CLI_LIBRARY, "%s", why.text);
    compare_line(&c);
    return CLI_OK;
}

static int compare(const settings *s, const text *t) {
    recipe how = s->recipe;
    char self[4096];
    complaint why = {""};
    double largest;
    how.steps = 100;
    const ssize_t length = readlink("/proc/self/exe", self, sizeof self - 1);
    if (length < 0)
        cli_fail(CLI_LIBRARY, "the path of this program is not known: %s", strerror(errno));
    self[length] = 0;
    if (!compare_losses(&how, t, &s->config, s->seed, &largest, &why))
        cli_fail(CLI_LIBRARY, "%s", why.text);
    printf("fused and unfused, %lld steps from the same seed, f32: losses differ by at most %.2g nats\n\n",
           (long long)how.steps, largest);
    fflush(stdout);
    if (!compare_table(self, s->longest, s->config.threads, &why))
        cli_fail(CLI_LIBRARY, "%s", why.text);
    if (!(largest <= 1e-4))
        cli_fail(CLI_CHECK, "losses differ by %.2g nats; 1e-4 is allowed", largest);
    return CLI_OK;
}

int main(int argc, char **argv) {
    static settings s;
    text t;
    settings_read(&s, argc, argv);
    if (s.measure)
        return cli_finish(measure(&s));
    signal(SIGXFSZ, SIG_IGN); /* a file too large, or a gnuplot that has ended, is an error of the write */
    signal(SIGPIPE, SIG_IGN);
    read_text(&s, &t);
    const int code = s.compare ? compare(&s, &t) : train(&s, &t);
    text_close(&t);
    return cli_finish(code);
}
