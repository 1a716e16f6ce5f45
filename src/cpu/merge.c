/* fb_merge: LSE = ln(e^a + e^b), O = e^(a - LSE) O_a + e^(b - LSE) O_b, row by row. Floor: cpu. */
#include "merge.h"
#include "element.h"
#include "team.h"
#include <math.h>

typedef struct join {
    const fb__problem *p;
    void *out, *lse, *other_out, *other_lse;
} join;

/* Row `row` of all (batch, head, query). */
static void merge_row(const void *context, int64_t row, int thread) {
    (void)thread;
    const join *j = context;
    const fb_desc *d = &j->p->d;
    int64_t len = d->flags & FB_PACKED ? d->total_q : d->len_q, i = row % len, h = row / len % d->heads_q;
    int64_t at = row / len / d->heads_q * d->out.batch + h * d->out.head + i * d->out.row;
    fb_dtype stat = d->dtype == FB_F64 ? FB_F64 : FB_F32;
    double a = fb__load(stat, j->lse, row), b = fb__load(stat, j->other_lse, row);
    double top = b > a ? b : a,
           shift = top == -HUGE_VAL ? 0 : top; /* -inf on both sides: weights 0, LSE -inf */
    double weight_a = exp(a - shift), weight_b = exp(b - shift), sum = weight_a + weight_b;
    if (sum != 0) {
        weight_a /= sum;
        weight_b /= sum;
    }
    for (int64_t e = 0; e < d->head_dim_v; e++) {
        /* A side of weight 0 is left out, so that what an empty part holds does not matter. */
        double x = weight_a != 0 ? weight_a * fb__load(d->dtype, j->out, at + e) : 0;
        if (weight_b != 0)
            x += weight_b * fb__load(d->dtype, j->other_out, at + e);
        fb__store(d->dtype, j->out, at + e, x);
    }
    fb__store(stat, j->lse, row, shift + log(sum));
}

void fb__merge(const fb__problem *p, fb_ref out, fb_ref lse, fb_ref other_out, fb_ref other_lse) {
    join j = {p, fb__at(out), fb__at(lse), fb__at(other_out), fb__at(other_lse)};
    int64_t rows = p->d.heads_q * (fb__has(p, FB_PACKED) ? p->d.total_q : p->d.batch * p->d.len_q);
    int threads = p->d.threads ? p->d.threads : fb__team_max();
    fb__team_run_exact(rows < 1024 ? 1 : threads, rows, merge_row, &j);
}
