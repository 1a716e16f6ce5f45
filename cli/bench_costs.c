/* What a run of bench on a GPU says once: the compiler cold, the cache on disk, the host's share of a call.
 * See bench_gpu.h. Floor: cli. */
#include "bench_gpu.h"
#include "cli.h"
#include "harness/folder.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char cache[] = "FLASHBACK_CACHE";

/* ---- Measuring --------------------------------------------------------------------------------------- */

/* False, with the library's sentence, if there is no plan. */
static bool plan_once(const fb_desc *desc, double *ms, kernel_line *lines, int *count) {
    fb_plan *plan;
    const double start = fbh_now();
    if (fb_plan_create(&plan, desc) != FB_OK)
        return false;
    *ms = 1e3 * (fbh_now() - start);
    *count = kernels_of(plan, lines);
    fb_plan_destroy(plan);
    return true;
}

/* With a folder of its own, empty at first, as the cache; the one that was named before comes back. */
static bool measure_plans(bench_costs *c) {
    char folder[4096];
    const char *named = getenv(cache);
    char *before = named ? strdup(named) : NULL;
    if (!fbh_folder_make(folder, sizeof folder))
        cli_fail(CLI_OUTPUT, "no folder could be made for a cold cache; --no-costs does without");
    setenv(cache, folder, 1);
    const bool good = plan_once(&c->desc, &c->plan_ms[0], c->cold, &c->cold_count) &&
                      plan_once(&c->desc, &c->plan_ms[1], c->cached, &c->cached_count);
    if (before)
        setenv(cache, before, 1);
    else
        unsetenv(cache);
    free(before);
    fbh_folder_remove(folder);
    return good;
}

/* Small, so that the GPU has done a call before the host has queued many. */
static fb_desc small_of(const fb_desc *desc) {
    enum { ROWS = 1024 };
    fb_desc small = *desc;
    small.batch = small.batch < 1 ? small.batch : 1;
    small.len_q = small.len_q < ROWS ? small.len_q : ROWS;
    small.len_k = small.len_k < ROWS ? small.len_k : ROWS;
    return small;
}

static void measure_host(bench_costs *c, fbh_gpu *gpu) {
    const fb_desc desc = small_of(&c->desc);
    complaint why;
    job j = {.backward = !(desc.flags & FB_FORWARD_ONLY)};
    if (!bench_job_make(&j, &desc, FBH_CONTIGUOUS, 1))
        cli_fail(CLI_LIBRARY, "%s", fb_last_error());
    bench_copies *copies = bench_copies_open(gpu, &j, &why);
    if (!copies)
        cli_fail(CLI_LIBRARY, "%s", why.text);
    for (int pass = 0; pass < job_passes(&j); pass++)
        c->host_us[pass] = bench_copies_host(copies, (fbh_pass)pass);
    bench_copies_close(copies);
    job_close(&j);
}

void bench_costs_measure(bench_costs *c, fbh_gpu *gpu, const fb_desc *desc) {
    *c = (bench_costs){.desc = *desc};
    if (!measure_plans(c))
        cli_fail(CLI_LIBRARY, "%s", fb_last_error());
    measure_host(c, gpu);
}

/* ---- Printing ---------------------------------------------------------------------------------------- */

static void print_words(FILE *to, const bench_place *p, const bench_costs *c) {
    char shape[128];
    bench_shape_words(&c->desc, shape, sizeof shape);
    fprintf(to, "%s, compute capability %s, driver %s for CUDA %s, nvrtc %s, products: %s; host %s; %s\n",
            p->machine.text, p->capability.text, p->module.text, p->driver.text, p->nvrtc.text,
            p->products.text, p->host.text, p->date.text);
    fprintf(to, "One plan, %s %s: %.1f ms from nothing, %.1f ms from the cache on disk\n",
            fb_dtype_name(c->desc.dtype), shape, c->plan_ms[0], c->plan_ms[1]);
    for (int n = 0; n < c->cold_count && n < c->cached_count; n++)
        fprintf(to, "  %s: %s in %.1f ms, then %s in %.1f ms\n", c->cold[n].file,
                c->cold[n].compiled ? "compiled" : "from the cache", c->cold[n].ms,
                c->cached[n].compiled ? "compiled" : "from the cache", c->cached[n].ms);
    fprintf(to, "Host cost of a call: forward %.1f us", c->host_us[FBH_FORWARD]);
    if (c->host_us[FBH_BACKWARD] > 0)
        fprintf(to, ", backward %.1f us", c->host_us[FBH_BACKWARD]);
    fputs("\n\n", to);
}

static void print_json(const bench_place *p, const bench_costs *c) {
    char shape[128];
    bench_shape_words(&c->desc, shape, sizeof shape);
    json_t *kernels = json_array();
    for (int n = 0; n < c->cold_count && n < c->cached_count; n++)
        json_array_append_new(kernels, json_pack("{s:s,s:f,s:f,s:b}", "file", c->cold[n].file, "compile_ms",
                                                 c->cold[n].ms, "cache_ms", c->cached[n].ms, "cached",
                                                 !c->cached[n].compiled));
    json_t *row =
        json_pack("{s:s,s:s,s:s,s:f,s:f,s:f,s:o}", "kind", "costs", "dtype", fb_dtype_name(c->desc.dtype),
                  "shape", shape, "plan_cold_ms", c->plan_ms[0], "plan_cached_ms", c->plan_ms[1],
                  "host_us_forward", c->host_us[FBH_FORWARD], "kernels", kernels);
    if (c->host_us[FBH_BACKWARD] > 0)
        json_object_set_new(row, "host_us_backward", json_real(c->host_us[FBH_BACKWARD]));
    json_t *place = bench_place_json(p);
    json_object_update(row, place);
    json_decref(place);
    char *line = json_dumps(row, JSON_COMPACT | JSON_REAL_PRECISION(6));
    puts(line ? line : "{}");
    free(line);
    json_decref(row);
}

void bench_costs_print(bench_format format, const bench_place *place, const bench_costs *costs) {
    if (format == BENCH_JSONL)
        print_json(place, costs);
    else
        print_words(format == BENCH_CSV ? stderr : stdout, place, costs);
    fflush(stdout);
}
