/* Plans: create, explain, destroy; and the one array of backends. Floor: api. */
#include "plan.h"
#include "../core/error.h"
#include "../cpu/cpu.h"
#include "../cuda/cuda.h"
#include "../metal/metal.h"
#include <errno.h>
#include <stdlib.h>

static const fb__backend *const backends[] = {&fb__cpu, &fb__cuda, &fb__metal};

int fb__backend_count(void) { return (int)(sizeof backends / sizeof *backends); }

const fb__backend *fb__backend_at(int index) { return backends[index]; }

const fb__backend *fb__backend_of(fb_device device) {
    for (int i = 0; i < fb__backend_count(); i++)
        if (backends[i]->device == device)
            return backends[i];
    fb__error_set("device %s is not part of this library (%s); it has: cpu, cuda, metal",
                  fb_device_name(device), fb_version());
    return NULL;
}

static fb_status check(const fb_desc *desc, fb__problem *problem, const fb__backend **backend) {
    fb__error_clear();
    FB_TRY(fb__problem_init(problem, desc));
    *backend = fb__backend_of(problem->d.device);
    if (!*backend)
        return FB_NO_DEVICE;
    return (*backend)->check(problem);
}

fb_status fb_supported(const fb_desc *desc) {
    int saved_errno = errno;
    fb__problem problem;
    const fb__backend *backend;
    fb_status status = check(desc, &problem, &backend);
    errno = saved_errno;
    return status;
}

fb_status fb_plan_create(fb_plan **plan, const fb_desc *desc) {
    fb__error_clear();
    if (!plan)
        return fb__error(FB_INVALID, "plan is NULL; pass the address of a fb_plan pointer");
    *plan = NULL;
    int saved_errno = errno;
    fb_plan *p = calloc(1, sizeof *p);
    if (!p)
        return fb__error(FB_MEMORY, "no memory for a plan (%zu bytes)", sizeof *p);
    fb_status status = check(desc, &p->problem, &p->backend);
    if (status == FB_OK)
        status = p->backend->prepare(&p->problem, &p->state, &p->workspace);
    if (status == FB_OK)
        *plan = p;
    else
        free(p);
    errno = saved_errno;
    return status;
}

size_t fb_plan_workspace(const fb_plan *plan) { return plan ? plan->workspace : 0; }

void fb_plan_destroy(fb_plan *plan) {
    if (!plan)
        return;
    int saved_errno = errno;
    plan->backend->drop(plan->state);
    free(plan);
    errno = saved_errno;
}

static void explain_problem(const fb__problem *p, fb__text *text) {
    const fb_desc *d = &p->d;
    fb__text_add(text, "problem: %s, B=%lld Hq=%lld Hkv=%lld Lq=%lld Lk=%lld D=%lld Dv=%lld, scale %g",
                 fb_dtype_name(d->dtype), (long long)d->batch, (long long)d->heads_q, (long long)d->heads_kv,
                 (long long)d->len_q, (long long)d->len_k, (long long)d->head_dim, (long long)d->head_dim_v,
                 d->scale);
    if (d->softcap > 0)
        fb__text_add(text, ", softcap %g", d->softcap);
    if (d->window.left != FB_UNBOUNDED)
        fb__text_add(text, ", window left %lld", (long long)d->window.left);
    if (d->window.right == 0)
        fb__text_add(text, ", causal");
    else if (d->window.right != FB_UNBOUNDED)
        fb__text_add(text, ", window right %lld", (long long)d->window.right);
    if (d->position_offset)
        fb__text_add(text, ", position offset %lld", (long long)d->position_offset);
    static const struct {
        uint32_t flag;
        const char *word;
    } words[] = {{FB_TOP_LEFT, "top-left"},     {FB_PACKED, "packed"},
                 {FB_LENGTHS, "lengths"},       {FB_BIAS, "bias"},
                 {FB_DBIAS, "dbias"},           {FB_MASK, "mask"},
                 {FB_BLOCK_MASK, "block mask"}, {FB_SINKS, "sinks"},
                 {FB_DSINKS, "dsinks"},         {FB_DLSE, "dlse"},
                 {FB_ACCUMULATE, "accumulate"}, {FB_FORWARD_ONLY, "forward only"},
                 {FB_NO_DQ, "no dq"},           {FB_NO_DK, "no dk"},
                 {FB_NO_DV, "no dv"},           {FB_DETERMINISTIC, "deterministic"}};
    for (size_t i = 0; i < sizeof words / sizeof *words; i++)
        if (d->flags & words[i].flag)
            fb__text_add(text, ", %s", words[i].word);
    fb__text_add(text, "\ndevice: %s %d\n", fb_device_name(d->device), d->index);
}

size_t fb_plan_explain(const fb_plan *plan, char *at, size_t size) {
    fb__text text = {at, size, 0};
    if (size)
        at[0] = 0;
    if (!plan)
        return 0;
    explain_problem(&plan->problem, &text);
    plan->backend->explain(plan->state, &plan->problem, &text);
    fb__text_add(&text, "workspace: %zu bytes\n", plan->workspace);
    return text.length;
}
