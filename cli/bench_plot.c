/* A picture of a run through gnuplot: GFLOP/s over L, a line for each head dimension, pass and mask. See
 * bench.h. Floor: cli. */
#include "bench.h"
#include "cli.h"
#include "file.h"
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

void bench_plot_check(const char *path) {
    if (!file_ends(path, ".svg") && !file_ends(path, ".png"))
        cli_fail(CLI_USAGE, "--plot is '%s'; expected a name ending in .svg or .png", path);
    if (strchr(path, '\'') || strchr(path, '\n'))
        cli_fail(CLI_USAGE, "--plot: the name may hold no quotes and no line breaks");
    if (system("command -v gnuplot >/dev/null 2>&1"))
        cli_fail(CLI_USAGE, "--plot needs the program gnuplot, which is not installed");
}

static bool same_line(const bench_row *a, const bench_row *b) {
    return a->desc.head_dim == b->desc.head_dim && a->pass == b->pass && a->desc.route == b->desc.route &&
           a->desc.dtype == b->desc.dtype && !strcmp(a->mask.text, b->mask.text) &&
           !strcmp(a->regime.text, b->regime.text);
}

/* Is the row the first of its line? */
static bool begins_line(const bench_row *rows, size_t i) {
    if (*rows[i].refused)
        return false;
    for (size_t j = 0; j < i; j++)
        if (!*rows[j].refused && same_line(&rows[j], &rows[i]))
            return false;
    return true;
}

static void write_script(FILE *to, const char *temporary, const char *path, const bench_place *place,
                         const bench_row *rows, size_t count) {
    for (size_t i = 0; i < count; i++) {
        if (!begins_line(rows, i))
            continue;
        fprintf(to, "$line%zu << END\n", i);
        for (size_t j = i; j < count; j++)
            if (!*rows[j].refused && same_line(&rows[j], &rows[i]))
                fprintf(to, "%lld %.6g\n", (long long)rows[j].desc.len_k, rows[j].gflops);
        fputs("END\n", to);
    }
    fprintf(to, "set terminal %s size 960,600\nset output '%s'\n", file_ends(path, ".svg") ? "svg" : "png",
            temporary);
    fprintf(to, "set title \"%s, ", place->machine.text);
    if (!place->gpu)
        fprintf(to, "%d threads, ", place->threads);
    fprintf(to, "flashback %s\" noenhanced\n", fb_version());
    fputs("set xlabel \"key length L [keys]\"\nset ylabel \"speed [GFLOP/s]\"\nset logscale x 2\nset yrange "
          "[0:*]\n"
          "set grid\nset key below noenhanced\nplot ",
          to);
    const char *comma = "";
    for (size_t i = 0; i < count; i++)
        if (begins_line(rows, i)) {
            fprintf(to, "%s$line%zu using 1:2 with linespoints title \"D=%lld %s %s %s %s %s\"", comma, i,
                    (long long)rows[i].desc.head_dim, bench_pass_name(rows[i].pass), rows[i].mask.text,
                    fb_dtype_name(rows[i].desc.dtype), fb_route_name(rows[i].desc.route),
                    rows[i].regime.text);
            comma = ", ";
        }
    fputs("\n", to);
}

void bench_plot(const char *path, const bench_place *place, const bench_row *rows, size_t count) {
    complaint why;
    draft d;
    size_t lines = 0;
    for (size_t i = 0; i < count; i++)
        lines += begins_line(rows, i);
    if (!lines)
        cli_fail(CLI_LIBRARY, "--plot: every row was refused, so there is nothing to draw");
    if (!file_begin(&d, path, &why))
        cli_fail(CLI_OUTPUT, "%s", why.text);
    FILE *gnuplot = popen("gnuplot", "w");
    if (gnuplot)
        write_script(gnuplot, d.temporary, path, place, rows, count);
    if (!gnuplot || pclose(gnuplot) != 0) {
        file_abandon(&d);
        cli_fail(CLI_OUTPUT, "%s: gnuplot failed", path);
    }
    if (!file_commit(&d, &why))
        cli_fail(CLI_OUTPUT, "%s", why.text);
}
