/* See journal.h. Floor: examples/gpt. */
#include "journal.h"
#include "cli/file.h"

#include <errno.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- The log ---- */

/* Both kinds of lines begin so. */
static bool line_step(const char *line, int64_t *step) {
    return sscanf(line, "{\"step\":%" SCNd64, step) == 1;
}

/* Copies the lines of steps up to `last`. */
static bool keep_lines(FILE *from, FILE *to, int64_t last) {
    char line[512];
    int64_t step;
    while (fgets(line, sizeof line, from))
        if (line_step(line, &step) && step <= last && strchr(line, '\n'))
            fputs(line, to);
    return !ferror(from);
}

bool journal_open(journal *j, const char *path, int64_t step, complaint *why) {
    draft d;
    FILE *old = step > 0 ? fopen(path, "r") : NULL;
    snprintf(j->path, sizeof j->path, "%s", path);
    j->log = NULL;
    if (step > 0 && !old && errno != ENOENT)
        return complain(why, "%s: cannot be read: %s", path, strerror(errno));
    if (!file_begin(&d, path, why)) {
        if (old)
            fclose(old);
        return false;
    }
    const bool kept = !old || keep_lines(old, d.stream, step);
    if (old)
        fclose(old);
    if (!kept) {
        file_abandon(&d);
        return complain(why, "%s: cannot be read: %s", path, strerror(errno));
    }
    if (!file_commit(&d, why))
        return false;
    j->log = fopen(path, "a");
    return j->log || complain(why, "%s: cannot be written: %s", path, strerror(errno));
}

/* A line is on its way to the disk before the next step: an interrupted run leaves whole lines. */
static bool flush(journal *j, complaint *why) {
    return (fflush(j->log) == 0 && !ferror(j->log)) ||
           complain(why, "%s: cannot be written: %s", j->path, strerror(errno));
}

bool journal_step(journal *j, const step_note *n, complaint *why) {
    fprintf(j->log,
            "{\"step\":%" PRId64
            ",\"bits_per_byte\":%.6f,\"gradient_norm\":%.6g,\"rate\":%.6g,\"tokens_per_s\":%.1f,"
            "\"attention_share\":%.4f,\"peak_bytes\":%" PRIu64 "}\n",
            n->step, n->bits, n->norm, n->rate, n->tokens_per_s, n->attention_share, n->peak_bytes);
    return flush(j, why);
}

bool journal_held_out(journal *j, int64_t step, double bits, complaint *why) {
    fprintf(j->log, "{\"step\":%" PRId64 ",\"held_out_bits_per_byte\":%.6f}\n", step, bits);
    return flush(j, why);
}

bool journal_close(journal *j, complaint *why) {
    const bool closed = !j->log || fclose(j->log) == 0;
    j->log = NULL;
    return closed || complain(why, "%s: cannot be written: %s", j->path, strerror(errno));
}

/* ---- Progress ---- */

void journal_progress(const step_note *n, int64_t steps, double held_out, int64_t every) {
    enum { WIDTH = 24 };
    const bool terminal = isatty(STDERR_FILENO);
    if (!terminal && n->step % every && n->step != steps)
        return;
    if (terminal) {
        const int filled = (int)(WIDTH * n->step / steps);
        fprintf(stderr, "\r[%.*s%*s] ", filled, "########################", WIDTH - filled, "");
    }
    fprintf(stderr,
            "step %" PRId64 "/%" PRId64 "  %.3f bits/byte (held out %.3f)  %.0f tokens/s, attention %.0f %%, "
            "%.0f MB%s",
            n->step, steps, n->bits, held_out, n->tokens_per_s, 100 * n->attention_share,
            (double)n->peak_bytes * 1e-6, terminal ? " \033[K" : "\n");
    fflush(stderr);
}

void journal_progress_end(void) {
    if (isatty(STDERR_FILENO))
        fputc('\n', stderr);
}

/* ---- The picture ---- */

/* Writes "step value" of every line that holds `key`; how many there were. */
static size_t write_points(FILE *log, const char *key, FILE *to) {
    char line[512];
    size_t count = 0;
    rewind(log);
    while (fgets(line, sizeof line, log)) {
        int64_t step;
        const char *at = strstr(line, key);
        if (!at || !line_step(line, &step))
            continue;
        fprintf(to, "%" PRId64 " %.6f\n", step, strtod(at + strlen(key), NULL));
        count++;
    }
    return count;
}

static void write_script(FILE *to, FILE *log, const char *temporary, bool svg, const char *title) {
    fputs("$train << END\n", to);
    write_points(log, "\"bits_per_byte\":", to);
    fputs("END\n$held << END\n", to);
    write_points(log, "\"held_out_bits_per_byte\":", to);
    fprintf(to, "END\nset terminal %s size 960,600 background rgb 'white'\nset output '%s'\n",
            svg ? "svg" : "pngcairo", temporary);
    fprintf(to,
            "set title \"%s\" noenhanced\nset xlabel \"step\"\nset ylabel \"loss [bits/byte]\"\nset yrange "
            "[0:*]\n"
            "set grid\nset key top right\n"
            "plot $train using 1:2 with lines lc rgb '#9ecae1' title \"training batch\", "
            "$held using 1:2 with linespoints lw 2 pt 7 ps 0.5 lc rgb '#08519c' title \"held out\"\n",
            title);
}

bool journal_plot(const char *log_path, const char *path, const char *title, complaint *why) {
    draft d;
    if (strchr(path, '\'') || strchr(path, '\n'))
        return complain(why, "%s: the name of a plot may hold no quotes and no line breaks", path);
    if (system("command -v gnuplot >/dev/null 2>&1"))
        return complain(why, "%s: drawing it needs the program gnuplot, which is not installed", path);
    FILE *log = fopen(log_path, "r");
    if (!log)
        return complain(why, "%s: cannot be read: %s", log_path, strerror(errno));
    if (!file_begin(&d, path, why)) {
        fclose(log);
        return false;
    }
    FILE *gnuplot = popen("gnuplot", "w");
    if (gnuplot)
        write_script(gnuplot, log, d.temporary, file_ends(path, ".svg"), title);
    fclose(log);
    if (!gnuplot || pclose(gnuplot) != 0) {
        file_abandon(&d);
        return complain(why, "%s: gnuplot failed", path);
    }
    return file_commit(&d, why);
}
