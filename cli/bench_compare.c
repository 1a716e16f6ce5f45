/* A run against an earlier one. See bench.h. Floor: cli. */
#include "bench.h"
#include "cli.h"
#include "file.h"
#include <jansson.h>
#include <stdio.h>
#include <string.h>

/* A row slower than this share of its baseline's speed is a regression; what is less is noise. */
static const double least_ratio = 0.95;

static bool same_number(const json_t *line, const char *key, int64_t n) {
    return json_integer_value(json_object_get(line, key)) == n;
}

static bool same_word(const json_t *line, const char *key, const char *word) {
    const char *text = json_string_value(json_object_get(line, key));
    return text && !strcmp(text, word);
}

/* Rows of an earlier version have neither device nor regime: they are the CPU's. */
static bool same_place(const json_t *line, const bench_row *r) {
    const char *device = json_string_value(json_object_get(line, "device"));
    const char *regime = json_string_value(json_object_get(line, "regime"));
    return !strcmp(device ? device : "cpu", fb_device_name(r->desc.device)) &&
           !strcmp(regime ? regime : "", r->regime.text);
}

static bool same_problem(const json_t *line, const bench_place *p, const bench_row *r) {
    const fb_desc *d = &r->desc;
    return same_number(line, "batch", d->batch) && same_number(line, "heads_q", d->heads_q) &&
           same_number(line, "heads_kv", d->heads_kv) && same_number(line, "len_q", d->len_q) &&
           same_number(line, "len_k", d->len_k) && same_number(line, "head_dim", d->head_dim) &&
           same_number(line, "head_dim_v", d->head_dim_v) && same_number(line, "threads", p->threads) &&
           same_word(line, "dtype", fb_dtype_name(d->dtype)) && same_word(line, "mask", r->mask.text) &&
           same_word(line, "pass", bench_pass_name(r->pass)) &&
           same_word(line, "route_asked", fb_route_name(d->route)) && same_place(line, r);
}

/* The lines of the file, each an object; the caller releases the array. */
static json_t *read_lines(const char *path) {
    complaint why;
    mapping map;
    if (!file_map(&map, path, &why))
        cli_fail(CLI_INPUT, "%s", why.text);
    json_t *lines = json_array();
    const char *at = map.data, *end = at + map.size;
    for (int number = 1; at < end; number++) {
        const char *stop = memchr(at, '\n', (size_t)(end - at));
        stop = stop ? stop : end;
        json_error_t error;
        json_t *line = stop > at ? json_loadb(at, (size_t)(stop - at), JSON_REJECT_DUPLICATES, &error) : NULL;
        if (stop > at && !json_is_object(line))
            cli_fail(CLI_INPUT, "%s: line %d is not a JSON object", path, number);
        if (line)
            json_array_append_new(lines, line);
        at = stop + 1;
    }
    file_unmap(&map);
    return lines;
}

/* The last line of the same problem wins: files grow at the end. */
static const json_t *find(const json_t *lines, const bench_place *place, const bench_row *row) {
    for (size_t i = json_array_size(lines); i-- > 0;)
        if (same_problem(json_array_get(lines, i), place, row))
            return json_array_get(lines, i);
    return NULL;
}

bool bench_compare(const char *path, const bench_place *place, const bench_row *rows, size_t count,
                   FILE *to) {
    json_t *lines = read_lines(path);
    size_t found = 0;
    bool good = true, elsewhere = false;
    for (size_t i = 0; i < count; i++) {
        const bench_row *r = &rows[i];
        const json_t *line = *r->refused ? NULL : find(lines, place, r);
        double before = json_number_value(json_object_get(line, "ms_median"));
        fprintf(to, "%-6s %s B=%lld Hq=%lld Hkv=%lld Lq=%lld Lk=%lld D=%lld %s %s%s%s: ", r->mask.text,
                fb_dtype_name(r->desc.dtype), (long long)r->desc.batch, (long long)r->desc.heads_q,
                (long long)r->desc.heads_kv, (long long)r->desc.len_q, (long long)r->desc.len_k,
                (long long)r->desc.head_dim, bench_pass_name(r->pass), fb_route_name(r->desc.route),
                *r->regime.text ? " " : "", r->regime.text);
        if (before <= 0) {
            fputs("no baseline\n", to);
            continue;
        }
        double ratio = before / r->ms.median;
        fprintf(to, "%.3f (%.3f ms, was %.3f)%s\n", ratio, r->ms.median, before,
                ratio < least_ratio ? " SLOWER" : "");
        good = good && ratio >= least_ratio;
        elsewhere = elsewhere || !same_word(line, "machine", place->machine.text);
        found++;
    }
    if (elsewhere)
        fprintf(to, "note: the baseline is from another machine; its ratios say little\n");
    json_decref(lines);
    if (!found)
        cli_fail(
            CLI_INPUT,
            "%s: has none of these rows (same shape, dtype, mask, pass, route, device, regime and threads)",
            path);
    return good;
}
