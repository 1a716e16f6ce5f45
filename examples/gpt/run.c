/* See run.h. Floor: examples/gpt. */
#include "run.h"
#include "harness/harness.h"
#include "journal.h"

#include <math.h>

/* What a run is made of, for the functions below. */
typedef struct run {
    trainer *t;
    const run_options *o;
    run_result *result;
    journal journal;
} run;

/* Every write says that it is one, if it fails. */
static bool written(run *r, bool good) {
    r->result->unwritten |= !good;
    return good;
}

static bool save(run *r, complaint *why) {
    return written(r, checkpoint_save(r->o->checkpoint, gpt_layout_of(r->t->model), &r->t->state, why));
}

static bool held_out(run *r, complaint *why) {
    r->result->held_out = trainer_held_out(r->t, r->o->held_out_batches, why);
    return !isnan(r->result->held_out);
}

static bool note_held_out(run *r, complaint *why) {
    return held_out(r, why) &&
           written(r, journal_held_out(&r->journal, r->t->state.step, r->result->held_out, why));
}

static bool step(run *r, complaint *why) {
    const trainer *t = r->t;
    const gpt_config *c = &t->state.config;
    const double start = fbh_now(), attention = gpt_attention_seconds(t->model);
    step_result s;
    if (!trainer_step(r->t, &s, why))
        return false;
    const double passed = fbh_now() - start;
    const step_note note = {.step = t->state.step,
                            .bits = s.loss * BITS_PER_NAT,
                            .norm = s.norm,
                            .rate = (double)s.rate,
                            .tokens_per_s = (double)(t->recipe->micro * c->batch * c->context) / passed,
                            .attention_share = (gpt_attention_seconds(t->model) - attention) / passed,
                            .peak_bytes = fbh_peak_rss()};
    if (!r->o->quiet)
        journal_progress(&note, t->recipe->steps, r->result->held_out, r->o->held_out_every);
    return written(r, journal_step(&r->journal, &note, why));
}

/* From the step that it stands at to the last. A run that goes on finds its log as it was at the checkpoint.
 */
static bool steps(run *r, const volatile int *stop, complaint *why) {
    const int64_t last = r->t->recipe->steps;
    const int64_t *done = &r->t->state.step;
    bool saved = true;
    if (!(*done == 0 ? note_held_out(r, why) : held_out(r, why)) || !save(r, why))
        return false;
    r->result->first_held_out = r->result->held_out;
    while (*done < last && !*stop) {
        if (!step(r, why))
            return false;
        if ((*done % r->o->held_out_every == 0 || *done == last) && !note_held_out(r, why))
            return false;
        saved = *done % r->o->save_every == 0;
        if (saved && !save(r, why))
            return false;
    }
    r->result->interrupted = *done < last;
    return saved || save(r, why);
}

bool run_training(trainer *t, const run_options *o, const volatile int *stop, run_result *result,
                  complaint *why) {
    const gpt_config *c = &t->state.config;
    const int64_t before = t->state.step;
    const double start = fbh_now(), attention = gpt_attention_seconds(t->model);
    run r = {.t = t, .o = o, .result = result};
    complaint later;
    *result = (run_result){0};
    if (!written(&r, journal_open(&r.journal, o->log, before, why)))
        return false;
    bool good = steps(&r, stop, why);
    good = written(&r, journal_close(&r.journal, good ? why : &later)) && good;
    if (!o->quiet)
        journal_progress_end();
    result->seconds = fbh_now() - start;
    result->attention_share = (gpt_attention_seconds(t->model) - attention) / result->seconds;
    result->tokens_per_s =
        (double)((t->state.step - before) * t->recipe->micro * c->batch * c->context) / result->seconds;
    return good;
}
