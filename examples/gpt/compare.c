/* See compare.h. Floor: examples/gpt. */
#include "compare.h"
#include "harness/harness.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

/* ---- Do they learn the same? ---- */

bool compare_losses(const recipe *how, const text *from, const gpt_config *config, uint64_t seed,
                    double *largest, complaint *why) {
    gpt_config c = *config;
    trainer fused, unfused;
    c.dtype = FB_F32;
    c.route = FB_FUSED;
    *largest = 0;
    if (!trainer_open(&fused, how, from, &c, seed, why))
        return false;
    c.route = FB_UNFUSED;
    bool good = trainer_open(&unfused, how, from, &c, seed, why);
    for (int64_t n = 0; good && n < how->steps; n++) {
        step_result a, b;
        good = trainer_step(&fused, &a, why) && trainer_step(&unfused, &b, why);
        if (good)
            *largest = fmax(*largest, fabs(a.loss - b.loss));
    }
    trainer_close(&fused);
    trainer_close(&unfused);
    return good;
}

/* ---- What does it cost? ---- */

gpt_config compare_model(int64_t context, fb_route route, int threads) {
    return (gpt_config){.layers = 2,
                        .width = 512,
                        .heads_q = 8,
                        .heads_kv = 8,
                        .head_dim = 64,
                        .hidden = 1376,
                        .batch = 1,
                        .context = context,
                        .tied = true,
                        .rope_base = 10000,
                        .route = route,
                        .dtype = FB_F32,
                        .threads = threads};
}

/* Bytes that repeat late: what it costs does not depend on them. */
static bool make_text(text *t, int64_t context, complaint *why) {
    t->size = 22 * (context + 1);
    t->train = t->size / 11 * 10;
    t->bytes = malloc((size_t)t->size);
    if (!t->bytes)
        return complain(why, "no memory for %lld bytes of text", (long long)t->size);
    for (int64_t i = 0; i < t->size; i++)
        t->bytes[i] = (uint8_t)((uint64_t)i * 2654435761u >> 13);
    return true;
}

bool compare_cost(const gpt_config *config, cost *c, complaint *why) {
    const recipe how = {.steps = 1000,
                        .warmup = 10,
                        .micro = 1,
                        .rate = 1e-3F,
                        .clip = 1,
                        .adam = {.beta1 = 0.9F, .beta2 = 0.99F, .epsilon = 1e-8F, .decay = 0.1F}};
    const double enough = 1; /* second */
    text t;
    trainer own;
    step_result r;
    if (!make_text(&t, config->context, why))
        return false;
    bool good = trainer_open(&own, &how, &t, config, 1, why);
    if (good) {
        int64_t steps = 0;
        good = config->context > 4096 || trainer_step(&own, &r, why); /* to warm up */
        const double start = fbh_now(), attention = gpt_attention_seconds(own.model);
        for (double passed = 0; good && (!steps || passed < enough); steps++) {
            good = trainer_step(&own, &r, why);
            passed = fbh_now() - start;
            c->tokens_per_s = (double)((steps + 1) * config->context) / passed;
            c->attention_share = (gpt_attention_seconds(own.model) - attention) / passed;
        }
        c->peak_bytes = fbh_peak_rss();
        trainer_close(&own);
    }
    text_close(&t);
    return good;
}

static const char format[] = "%lf tokens/s, attention %lf, peak %" SCNu64 " bytes";

void compare_line(const cost *c) {
    printf("%.6g tokens/s, attention %.6g, peak %" PRIu64 " bytes\n", c->tokens_per_s, c->attention_share,
           c->peak_bytes);
}

/* Runs a row's process; false with its sentence if it was refused, or *interrupted by a signal. */
static bool row(const char *program, int64_t context, const char *route, int threads, cost *c,
                bool *interrupted, complaint *why) {
    *interrupted = false;
    char command[5000], line[512] = "";
    snprintf(command, sizeof command, "'%s' --measure --context %" PRId64 " --attention %s --threads %d 2>&1",
             program, context, route, threads);
    FILE *child = popen(command, "r");
    if (!child)
        return complain(why, "%s cannot be run: %s", program, strerror(errno));
    const bool read = fgets(line, sizeof line, child);
    const int status = pclose(child);
    line[strcspn(line, "\n")] = 0;
    if (read && status == 0 &&
        sscanf(line, format, &c->tokens_per_s, &c->attention_share, &c->peak_bytes) == 3)
        return true;
    const int end = WIFSIGNALED(status) ? WTERMSIG(status)
                    : WIFEXITED(status) ? WEXITSTATUS(status) - 128
                                        : 0;
    if (end == SIGKILL)
        return complain(why, "the system ended it, most likely for want of memory");
    *interrupted = end > 0;
    return complain(why, "%.300s", end > 0 ? "interrupted" : line);
}

static void print_half(bool measured, const cost *c, const complaint *why) {
    if (measured)
        printf(" %.0f | %.0f | %.0f |", c->tokens_per_s, (double)c->peak_bytes * 1e-6,
               100 * c->attention_share);
    else
        printf(" refused | %s | |", strstr(why->text, "score matrices") ? "scores too large" : why->text);
    fflush(stdout);
}

bool compare_table(const char *program, int64_t longest, int threads, complaint *why) {
    char refusal[sizeof why->text] = "";
    puts("| context | fused tokens/s | peak MB | attention % | unfused tokens/s | peak MB | attention % |\n"
         "|--:|--:|--:|--:|--:|--:|--:|");
    for (int64_t context = 512; context <= longest; context *= 2) {
        cost fused, unfused;
        complaint no = {""};
        bool interrupted;
        if (!row(program, context, "fused", threads, &fused, &interrupted, why))
            return false;
        printf("| %" PRId64 " |", context);
        print_half(true, &fused, &no);
        const bool measured = row(program, context, "unfused", threads, &unfused, &interrupted, &no);
        if (interrupted) {
            *why = no;
            return false;
        }
        print_half(measured, &unfused, &no);
        putchar('\n');
        if (!measured && !*refusal)
            strcpy(refusal, no.text);
    }
    if (*refusal)
        printf("\nThe first refusal of unfused in full: %s\n", refusal);
    return true;
}
