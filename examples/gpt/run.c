/* See run.h. Floor: examples/gpt. */
#include "run.h"
#include "harness/harness.h"
#include "journal.h"

#include <math.h>

static bool save(const trainer *t, const run_options *o, complaint *why) {
    return checkpoint_save(o->checkpoint, gpt_layout_of(t->model), &t->state, why);
}

static bool held_out(trainer *t, const run_options *o, double *bits, complaint *why) {
    *bits = trainer_held_out(t, o->held_out_batches, why);
    return !isnan(*bits);
}

static bool step(trainer *t, const run_options *o, journal *j, double held, complaint *why) {
    const gpt_config *c = &t->state.config;
    const double start = fbh_now(), attention = gpt_attention_seconds(t->model);
    step_result r;
    if (!trainer_step(t, &r, why))
        return false;
    const double passed = fbh_now() - start;
    const step_note note = {.step = t->state.step,
                            .bits = r.loss * BITS_PER_NAT,
                            .norm = r.norm,
                            .rate = (double)r.rate,
                            .tokens_per_s = (double)(t->recipe->micro * c->batch * c->context) / passed,
                            .attention_share = (gpt_attention_seconds(t->model) - attention) / passed,
                            .peak_bytes = fbh_peak_rss()};
    if (!o->quiet)
        journal_progress(&note, t->recipe->steps, held, o->held_out_every);
    return journal_step(j, &note, why);
}

/* From the step that it stands at to the last. */
static bool steps(trainer *t, const run_options *o, journal *j, const volatile int *stop, run_result *result,
                  complaint *why) {
    double held;
    bool saved = true;
    /* A run that goes on finds its log as it was at the checkpoint. */
    if (!held_out(t, o, &held, why) || (t->state.step == 0 && !journal_held_out(j, 0, held, why)) ||
        !save(t, o, why))
        return false;
    result->first_held_out = held;
    while (t->state.step < t->recipe->steps && !*stop) {
        if (!step(t, o, j, held, why))
            return false;
        const int64_t done = t->state.step;
        if ((done % o->held_out_every == 0 || done == t->recipe->steps) &&
            (!held_out(t, o, &held, why) || !journal_held_out(j, done, held, why)))
            return false;
        saved = done % o->save_every == 0;
        if (saved && !save(t, o, why))
            return false;
    }
    result->held_out = held;
    result->interrupted = t->state.step < t->recipe->steps;
    return saved || save(t, o, why);
}

bool run_training(trainer *t, const run_options *o, const volatile int *stop, run_result *result,
                  complaint *why) {
    const gpt_config *c = &t->state.config;
    const int64_t before = t->state.step;
    const double start = fbh_now(), attention = gpt_attention_seconds(t->model);
    journal j;
    complaint later;
    *result = (run_result){0};
    if (!journal_open(&j, o->log, before, why))
        return false;
    bool good = steps(t, o, &j, stop, result, why);
    good = journal_close(&j, good ? why : &later) && good;
    if (!o->quiet)
        journal_progress_end();
    result->seconds = fbh_now() - start;
    result->attention_share = (gpt_attention_seconds(t->model) - attention) / result->seconds;
    result->tokens_per_s =
        (double)((t->state.step - before) * t->recipe->micro * c->batch * c->context) / result->seconds;
    return good;
}
