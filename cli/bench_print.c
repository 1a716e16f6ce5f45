/* Formats of bench: Markdown, CSV, JSON lines, and the table of the original. See bench.h. Floor: cli. */
#include "bench.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

void bench_shape_words(const fb_desc *d, char *text, size_t size) {
    int n =
        snprintf(text, size, "%lld,%lld,%lld,%lld,%lld,%lld", (long long)d->batch, (long long)d->heads_q,
                 (long long)d->heads_kv, (long long)d->len_q, (long long)d->len_k, (long long)d->head_dim);
    if (d->head_dim_v != d->head_dim)
        snprintf(text + n, size - (size_t)n, ",%lld", (long long)d->head_dim_v);
}

/* A GPU's table has the regime, and what the clock and the power were, in place of the peak. */
static void print_md_head(bool gpu, bool decode) {
    printf(
        "| B,Hq,Hkv,Lq,Lk,D | dtype | mask | pass | route |%s median ms | min ms | p90 ms | %s | extra MB |",
        gpu ? " regime |" : "", gpu ? "TFLOP/s" : "GFLOP/s | % of peak");
    fputs(gpu && decode ? " K,V GB/s |" : decode ? " K,V GB/s | % of read |" : "", stdout);
    printf("%s\n|---|---|---|---|---|%s--:|--:|--:|--:|--:|%s%s\n", gpu ? " host us | MHz | W |" : "",
           gpu ? "---|" : "--:|", gpu ? "--:|--:|--:|" : "",
           !decode ? ""
           : gpu   ? "--:|"
                   : "--:|--:|");
}

static void print_csv_head(void) {
    puts("batch,heads_q,heads_kv,len_q,len_k,head_dim,head_dim_v,dtype,mask,pass,route,ms_median,ms_min,"
         "ms_p90,gflops,peak_percent,peak_extra_bytes,kv_gb_per_s,read_gb_per_s,machine,isa,threads,version,"
         "compiler,date,device,regime,runs,copies,host_us,sm_mhz,watts,host,driver,cuda,nvrtc,"
         "compute_capability,refused");
}

void bench_print_head(bench_format format, const bench_place *place) {
    if (format == BENCH_MD || format == BENCH_DECODE)
        print_md_head(place->gpu, format == BENCH_DECODE);
    else if (format == BENCH_CSV)
        print_csv_head();
    else if (format == BENCH_ORIGINAL)
        printf(
            "| mask | D | Hkv | L |%s unfused fwd+bwd ms | fused fwd+bwd ms | speed-up | unfused peak MB | "
            "fused peak MB |\n|---|--:|--:|--:|%s--:|--:|--:|--:|--:|\n",
            place->gpu ? " regime |" : "", place->gpu ? "---|" : "");
}

static double read_percent(const bench_row *r) {
    return r->read_rate > 0 ? 100 * r->kv_rate / r->read_rate : 0;
}

static void print_md_gpu(const bench_row *r, bool decode) {
    printf(" %.4f | %.4f | %.4f | %.1f | %.2f |", r->ms.median, r->ms.min, r->ms.p90, r->gflops * 1e-3,
           (double)r->extra * 1e-6);
    if (decode)
        printf(" %.1f |", r->kv_rate);
    printf(" %.1f | %u | %u |\n", r->host_us, r->state.sm_mhz, r->state.watts);
}

static void print_md_cpu(const bench_row *r, bool decode) {
    char percent[16] = "-"; /* where nobody has measured a peak */
    if (r->peak_gflops > 0)
        snprintf(percent, sizeof percent, "%.1f", r->peak_percent);
    printf(" %.3f | %.3f | %.3f | %.1f | %s | %.2f |", r->ms.median, r->ms.min, r->ms.p90, r->gflops, percent,
           (double)r->extra * 1e-6);
    if (decode)
        printf(" %.1f | %.0f |", r->kv_rate, read_percent(r));
    putchar('\n');
}

static void print_md(const bench_place *p, const bench_row *r, bool decode) {
    char shape[128];
    bench_shape_words(&r->desc, shape, sizeof shape);
    printf("| %s | %s | %s | %s | %s |", shape, fb_dtype_name(r->desc.dtype), r->mask.text,
           bench_pass_name(r->pass), r->route.text);
    if (p->gpu)
        printf(" %s |", r->regime.text);
    if (!*r->refused) {
        (p->gpu ? print_md_gpu : print_md_cpu)(r, decode);
        return;
    }
    printf(" refused: %s |", r->refused);
    for (int empty = p->gpu ? 7 + decode : 5 + 2 * decode; empty > 0; empty--)
        fputs(" |", stdout);
    putchar('\n');
}

/* A field in quotes, with quotes inside doubled. */
static void print_quoted(const char *text) {
    putchar('"');
    for (; *text; text++) {
        if (*text == '"')
            putchar('"');
        putchar(*text);
    }
    putchar('"');
}

/* Empty where there is nothing to say. */
static void print_csv_gpu(const bench_place *p, const bench_row *r) {
    printf(",%s,", fb_device_name(r->desc.device));
    if (!p->gpu) {
        fputs(",,,,,,,,,,,", stdout);
        return;
    }
    printf("%s,%zu,%zu,%.4g,%u,%u,", r->regime.text, r->runs, r->copies, r->host_us, r->state.sm_mhz,
           r->state.watts);
    print_quoted(p->host.text);
    printf(",%s,%s,%s,%s,", p->module.text, p->driver.text, p->nvrtc.text, p->capability.text);
}

static void print_csv(const bench_place *p, const bench_row *r) {
    const fb_desc *d = &r->desc;
    printf("%lld,%lld,%lld,%lld,%lld,%lld,%lld,%s,%s,%s,%s,%.6g,%.6g,%.6g,%.6g,%.4g,%llu,",
           (long long)d->batch, (long long)d->heads_q, (long long)d->heads_kv, (long long)d->len_q,
           (long long)d->len_k, (long long)d->head_dim, (long long)d->head_dim_v, fb_dtype_name(d->dtype),
           r->mask.text, bench_pass_name(r->pass), r->route.text, r->ms.median, r->ms.min, r->ms.p90,
           r->gflops, r->peak_percent, (unsigned long long)r->extra);
    if (r->kv_rate > 0 && r->read_rate > 0)
        printf("%.4g,%.4g,", r->kv_rate, r->read_rate);
    else if (r->kv_rate > 0)
        printf("%.4g,,", r->kv_rate);
    else
        fputs(",,", stdout);
    print_quoted(p->machine.text);
    printf(",%s,%d,%s,%s,%s", r->isa.text, p->threads, fb_version(), p->compiler.text, p->date.text);
    print_csv_gpu(p, r);
    print_quoted(r->refused);
    putchar('\n');
}

static json_t *problem_json(const bench_row *r) {
    const fb_desc *d = &r->desc;
    return json_pack("{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:s,s:s,s:s,s:s,s:s}", "batch", (json_int_t)d->batch,
                     "heads_q", (json_int_t)d->heads_q, "heads_kv", (json_int_t)d->heads_kv, "len_q",
                     (json_int_t)d->len_q, "len_k", (json_int_t)d->len_k, "head_dim", (json_int_t)d->head_dim,
                     "head_dim_v", (json_int_t)d->head_dim_v, "dtype", fb_dtype_name(d->dtype), "mask",
                     r->mask.text, "pass", bench_pass_name(r->pass), "route_asked", fb_route_name(d->route),
                     "route", r->route.text);
}

json_t *bench_place_json(const bench_place *p) {
    json_t *place = json_pack("{s:s,s:s,s:i,s:s,s:s,s:s}", "device", p->device.text, "machine",
                              p->machine.text, "threads", p->threads, "version", fb_version(), "compiler",
                              p->compiler.text, "date", p->date.text);
    if (!p->gpu)
        return place;
    json_t *gpu = json_pack("{s:s,s:s,s:s,s:s,s:s,s:s}", "host", p->host.text, "driver", p->module.text,
                            "cuda", p->driver.text, "nvrtc", p->nvrtc.text, "compute_capability",
                            p->capability.text, "products", p->products.text);
    json_object_update(place, gpu);
    json_decref(gpu);
    return place;
}

static json_t *numbers_json(const bench_place *p, const bench_row *r) {
    json_t *numbers =
        json_pack("{s:f,s:f,s:f,s:f,s:I}", "ms_median", r->ms.median, "ms_min", r->ms.min, "ms_p90",
                  r->ms.p90, "gflops", r->gflops, "peak_extra_bytes", (json_int_t)r->extra);
    json_t *more =
        p->gpu ? json_pack("{s:f,s:I,s:I,s:f,s:i,s:i,s:i,s:b}", "tflops", r->gflops * 1e-3, "runs",
                           (json_int_t)r->runs, "copies", (json_int_t)r->copies, "host_us", r->host_us,
                           "sm_mhz", (int)r->state.sm_mhz, "watts", (int)r->state.watts, "celsius",
                           (int)r->state.celsius, "power_capped", r->state.power_capped)
               : json_pack("{s:f,s:f}", "peak_percent", r->peak_percent, "peak_gflops", r->peak_gflops);
    json_object_update(numbers, more);
    json_decref(more);
    if (r->kv_rate > 0)
        json_object_set_new(numbers, "kv_gb_per_s", json_real(r->kv_rate));
    if (r->read_rate > 0) {
        json_object_set_new(numbers, "read_gb_per_s", json_real(r->read_rate));
        json_object_set_new(numbers, "read_percent", json_real(read_percent(r)));
    }
    return numbers;
}

static void print_jsonl(const bench_place *p, const bench_row *r) {
    json_t *row = problem_json(r), *place = bench_place_json(p);
    json_t *numbers = *r->refused ? json_pack("{s:s}", "refused", r->refused) : numbers_json(p, r);
    if (p->gpu)
        json_object_set_new(row, "regime", json_string(r->regime.text));
    json_object_update(row, numbers);
    json_object_set_new(row, "isa", json_string(r->isa.text));
    json_object_update(row, place);
    char *line = json_dumps(row, JSON_COMPACT | JSON_REAL_PRECISION(6));
    puts(line ? line : "{}");
    free(line);
    json_decref(numbers);
    json_decref(place);
    json_decref(row);
}

void bench_print_row(bench_format format, const bench_place *place, const bench_row *row) {
    if (format == BENCH_MD || format == BENCH_DECODE)
        print_md(place, row, format == BENCH_DECODE);
    else if (format == BENCH_CSV)
        print_csv(place, row);
    else if (format == BENCH_JSONL)
        print_jsonl(place, row);
    fflush(stdout);
}

/* Both passes of one route: "12.345 | 67 MB", or why not. */
static void original_cells(const bench_row *two, char *ms, char *mb, size_t size) {
    snprintf(ms, size, *two->refused ? "refused" : "%.3f", two[0].ms.median + two[1].ms.median);
    snprintf(mb, size, *two->refused ? "-" : "%.1f", (double)two->extra * 1e-6);
}

void bench_print_original(const bench_place *place, const bench_row *unfused, const bench_row *fused) {
    const bench_row *routes[2] = {unfused, fused};
    char ms[2][32], mb[2][32], gain[32] = "-";
    original_cells(unfused, ms[0], mb[0], sizeof ms[0]);
    original_cells(fused, ms[1], mb[1], sizeof ms[1]);
    if (!*unfused->refused && !*fused->refused)
        snprintf(gain, sizeof gain, "%.2fx",
                 (unfused[0].ms.median + unfused[1].ms.median) / (fused[0].ms.median + fused[1].ms.median));
    printf("| %s | %lld | %lld | %lld |", fused->mask.text, (long long)fused->desc.head_dim,
           (long long)fused->desc.heads_kv, (long long)fused->desc.len_q);
    if (place->gpu)
        printf(" %s |", fused->regime.text);
    printf(" %s | %s | %s | %s | %s |\n", ms[0], ms[1], gain, mb[0], mb[1]);
    for (int i = 0; i < 2; i++)
        if (*routes[i]->refused)
            fprintf(stderr, "flashback bench: %s\n", routes[i]->refused);
    fflush(stdout);
}
