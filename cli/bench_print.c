/* Formats of bench: Markdown, CSV, JSON lines, and the table of the original. See bench.h. Floor: cli. */
#include "bench.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>

static void shape_words(const fb_desc *d, char *text, size_t size) {
    int n =
        snprintf(text, size, "%lld,%lld,%lld,%lld,%lld,%lld", (long long)d->batch, (long long)d->heads_q,
                 (long long)d->heads_kv, (long long)d->len_q, (long long)d->len_k, (long long)d->head_dim);
    if (d->head_dim_v != d->head_dim)
        snprintf(text + n, size - (size_t)n, ",%lld", (long long)d->head_dim_v);
}

void bench_print_head(bench_format format) {
    if (format == BENCH_MD || format == BENCH_DECODE)
        printf("| B,Hq,Hkv,Lq,Lk,D | dtype | mask | pass | route | median ms | min ms | p90 ms | GFLOP/s | "
               "%% of "
               "peak | extra MB |%s\n|---|---|---|---|---|--:|--:|--:|--:|--:|--:|%s\n",
               format == BENCH_DECODE ? " K,V GB/s | % of read |" : "",
               format == BENCH_DECODE ? "--:|--:|" : "");
    else if (format == BENCH_CSV)
        puts("batch,heads_q,heads_kv,len_q,len_k,head_dim,head_dim_v,dtype,mask,pass,route,ms_median,ms_min,"
             "ms_p90,"
             "gflops,peak_percent,peak_extra_bytes,kv_gb_per_s,read_gb_per_s,machine,isa,threads,version,"
             "compiler,date,refused");
    else if (format == BENCH_ORIGINAL)
        puts("| mask | D | Hkv | L | unfused fwd+bwd ms | fused fwd+bwd ms | speed-up | unfused peak MB | "
             "fused peak "
             "MB |\n|---|--:|--:|--:|--:|--:|--:|--:|--:|");
}

static double read_percent(const bench_row *r) {
    return r->read_rate > 0 ? 100 * r->kv_rate / r->read_rate : 0;
}

static void print_md(const bench_row *r, bool decode) {
    char shape[128];
    shape_words(&r->desc, shape, sizeof shape);
    printf("| %s | %s | %s | %s | %s |", shape, fb_dtype_name(r->desc.dtype), r->mask.text,
           bench_pass_name(r->pass), r->route.text);
    if (*r->refused)
        printf(" refused: %s | | | | | |%s", r->refused, decode ? " | |" : "");
    else
        printf(" %.3f | %.3f | %.3f | %.1f | %.1f | %.2f |", r->ms.median, r->ms.min, r->ms.p90, r->gflops,
               r->peak_percent, (double)r->extra * 1e-6);
    if (decode && !*r->refused)
        printf(" %.1f | %.0f |", r->kv_rate, read_percent(r));
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

static void print_csv(const bench_place *p, const bench_row *r) {
    const fb_desc *d = &r->desc;
    printf("%lld,%lld,%lld,%lld,%lld,%lld,%lld,%s,%s,%s,%s,%.6g,%.6g,%.6g,%.6g,%.4g,%llu,",
           (long long)d->batch, (long long)d->heads_q, (long long)d->heads_kv, (long long)d->len_q,
           (long long)d->len_k, (long long)d->head_dim, (long long)d->head_dim_v, fb_dtype_name(d->dtype),
           r->mask.text, bench_pass_name(r->pass), r->route.text, r->ms.median, r->ms.min, r->ms.p90,
           r->gflops, r->peak_percent, (unsigned long long)r->extra);
    if (r->kv_rate > 0)
        printf("%.4g,%.4g,", r->kv_rate, r->read_rate);
    else
        fputs(",,", stdout);
    print_quoted(p->machine.text);
    printf(",%s,%d,%s,%s,%s,", r->isa.text, p->threads, fb_version(), p->compiler.text, p->date.text);
    print_quoted(r->refused);
    putchar('\n');
}

static void print_jsonl(const bench_place *p, const bench_row *r) {
    const fb_desc *d = &r->desc;
    json_t *row = json_pack(
        "{s:I,s:I,s:I,s:I,s:I,s:I,s:I,s:s,s:s,s:s,s:s,s:s}", "batch", (json_int_t)d->batch, "heads_q",
        (json_int_t)d->heads_q, "heads_kv", (json_int_t)d->heads_kv, "len_q", (json_int_t)d->len_q, "len_k",
        (json_int_t)d->len_k, "head_dim", (json_int_t)d->head_dim, "head_dim_v", (json_int_t)d->head_dim_v,
        "dtype", fb_dtype_name(d->dtype), "mask", r->mask.text, "pass", bench_pass_name(r->pass),
        "route_asked", fb_route_name(d->route), "route", r->route.text);
    json_t *place =
        json_pack("{s:s,s:s,s:i,s:s,s:s,s:s}", "machine", p->machine.text, "isa", r->isa.text, "threads",
                  p->threads, "version", fb_version(), "compiler", p->compiler.text, "date", p->date.text);
    json_t *numbers = *r->refused ? json_pack("{s:s}", "refused", r->refused)
                                  : json_pack("{s:f,s:f,s:f,s:f,s:f,s:f,s:I}", "ms_median", r->ms.median,
                                              "ms_min", r->ms.min, "ms_p90", r->ms.p90, "gflops", r->gflops,
                                              "peak_percent", r->peak_percent, "peak_gflops", r->peak_gflops,
                                              "peak_extra_bytes", (json_int_t)r->extra);
    json_object_update(row, numbers);
    if (r->kv_rate > 0) {
        json_object_set_new(row, "kv_gb_per_s", json_real(r->kv_rate));
        json_object_set_new(row, "read_gb_per_s", json_real(r->read_rate));
        json_object_set_new(row, "read_percent", json_real(read_percent(r)));
    }
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
        print_md(row, format == BENCH_DECODE);
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

void bench_print_original(const bench_row *four) {
    const bench_row *unfused = four, *fused = four + 2;
    char ms[2][32], mb[2][32], gain[32] = "-";
    original_cells(unfused, ms[0], mb[0], sizeof ms[0]);
    original_cells(fused, ms[1], mb[1], sizeof ms[1]);
    if (!*unfused->refused && !*fused->refused)
        snprintf(gain, sizeof gain, "%.2fx",
                 (unfused[0].ms.median + unfused[1].ms.median) / (fused[0].ms.median + fused[1].ms.median));
    printf("| %s | %lld | %lld | %lld | %s | %s | %s | %s | %s |\n", four->mask.text,
           (long long)four->desc.head_dim, (long long)four->desc.heads_kv, (long long)four->desc.len_q, ms[0],
           ms[1], gain, mb[0], mb[1]);
    for (int i = 0; i < 4; i += 2)
        if (*four[i].refused)
            fprintf(stderr, "flashback bench: %s\n", four[i].refused);
    fflush(stdout);
}
