/* flashback info: what this library is on this machine, and with --peak what the machine can do at most.
 * Floor: cli. */
#include "cli.h"
#include "flashback.h"
#include "harness/peak.h"
#include "machine.h"
#include <jansson.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { ID_PEAK = 300, ID_JSON, STREAM_MEGABYTES = 64 };

const cli_option cli_info_options[] = {
    {"peak", NULL, "measure multiply-adds and memory bandwidth (takes seconds)", ID_PEAK},
    {"json", NULL, "print one JSON object", ID_JSON},
    {0},
};

static const double seconds = 0.25; /* for each measurement */

/* A type is left out where the machine has no such instructions. */
static const struct {
    fbh_peak_type type;
    const char *words, *key;
} types[] = {{FBH_PEAK_F32, "f32", "f32_gflops"},
             {FBH_PEAK_F64, "f64", "f64_gflops"},
             {FBH_PEAK_AVX512BF16, "bf16 by avx512bf16", "bf16_avx512bf16_gflops"},
             {FBH_PEAK_AMX, "bf16 by amx", "bf16_amx_gflops"}};
enum { TYPES = sizeof types / sizeof *types };

typedef struct peaks {
    int threads;
    double flops[TYPES][2], bandwidth[2], read[2]; /* one thread, all threads */
} peaks;

static double measure_read(int threads) {
    fbh_reader *reader = fbh_reader_open(threads);
    double rate = reader ? fbh_reader_run(reader, seconds) : 0;
    fbh_reader_close(reader);
    return rate;
}

static peaks measure(void) {
    peaks p = {.threads = machine_threads()};
    const int threads[2] = {1, p.threads};
    for (int i = 0; i < 2; i++) {
        for (int t = 0; t < TYPES; t++)
            p.flops[t][i] = fbh_peak_flops(types[t].type, threads[i], seconds);
        p.bandwidth[i] = fbh_peak_bandwidth(threads[i], seconds, STREAM_MEGABYTES);
        p.read[i] = measure_read(threads[i]);
    }
    return p;
}

static void print_peak(const char *words, const double rates[2], const char *unit, int threads) {
    if (rates[0] > 0)
        printf("peak %s: %.1f %s on 1 thread, %.1f on %d\n", words, rates[0], unit, rates[1], threads);
}

static void print_words(const char *text, const peaks *p) {
    fputs(text, stdout);
    printf("machine: %s\ncompiler: %s\n", machine_cpu().text, machine_compiler().text);
    if (!p)
        return;
    printf("peak loops: %s\n", fbh_peak_isa());
    for (int t = 0; t < TYPES; t++)
        print_peak(types[t].words, p->flops[t], "GFLOP/s", p->threads);
    print_peak("bandwidth", p->bandwidth, "GB/s", p->threads);
    print_peak("read", p->read, "GB/s", p->threads);
}

/* One line "key: value"; a key that comes again makes an array. */
static void add_line(json_t *info, const char *line, size_t length) {
    char copy[512];
    snprintf(copy, sizeof copy, "%.*s", (int)length, line);
    char *colon = strstr(copy, ": ");
    if (!colon)
        return;
    *colon = 0;
    const char *key = copy + strspn(copy, " ");
    json_t *value = json_string(colon + 2), *known = json_object_get(info, key);
    if (!known)
        json_object_set_new(info, key, value);
    else if (json_is_array(known))
        json_array_append_new(known, value);
    else
        json_object_set_new(info, key, json_pack("[O,o]", known, value));
}

static json_t *json_peaks(const peaks *p) {
    json_t *peak = json_pack("{s:s,s:i,s:[f,f],s:[f,f]}", "loops", fbh_peak_isa(), "threads", p->threads,
                             "bandwidth_gb_per_s", p->bandwidth[0], p->bandwidth[1], "read_gb_per_s",
                             p->read[0], p->read[1]);
    for (int t = 0; t < TYPES; t++)
        if (p->flops[t][0] > 0)
            json_object_set_new(peak, types[t].key, json_pack("[f,f]", p->flops[t][0], p->flops[t][1]));
    return peak;
}

static void print_json(const char *text, const peaks *p) {
    json_t *info = json_object();
    for (const char *line = text; *line;) {
        size_t length = strcspn(line, "\n");
        add_line(info, line, length);
        line += length + (line[length] == '\n');
    }
    json_object_set_new(info, "machine", json_string(machine_cpu().text));
    json_object_set_new(info, "compiler", json_string(machine_compiler().text));
    if (p)
        json_object_set_new(info, "peak", json_peaks(p));
    char *line = json_dumps(info, JSON_INDENT(2) | JSON_REAL_PRECISION(6));
    puts(line ? line : "{}");
    free(line);
    json_decref(info);
}

int cmd_info(int argc, char **argv) {
    static char text[16384];
    const char *value;
    bool json = false, peak = false;
    for (int id; (id = cli_next(argc, argv, &value)) != -1;) {
        json |= id == ID_JSON;
        peak |= id == ID_PEAK;
    }
    if (optind < argc)
        cli_fail(CLI_USAGE, "'%s' is not an option; info reads no files", argv[optind]);
    peaks p;
    if (peak)
        p = measure();
    fb_info(text, sizeof text);
    (json ? print_json : print_words)(text, peak ? &p : NULL);
    return CLI_OK;
}
