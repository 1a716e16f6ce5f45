/* Command lines by table. See cli.h. Floor: cli. */
#include "cli.h"
#include "flashback.h"
#include <errno.h>
#include <getopt.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_OPTIONS = 64, ID_HELP = 1000, ID_VERSION };

static const cli_option always[] = {
    {"help", NULL, "print this and exit", ID_HELP},
    {"version", NULL, "print the version and exit", ID_VERSION},
    {0},
};

static const cli_verb *verb;
static const char *program = "flashback";

void cli_begin(const cli_verb *chosen) { verb = chosen; }

void cli_begin_program(const char *name, const cli_verb *only) {
    program = name;
    verb = only;
}

/* "flashback run", or a program's name alone. */
static void print_name(FILE *to) {
    fprintf(to, "%s%s%s", program, verb->name ? " " : "", verb->name ? verb->name : "");
}

void cli_fail(int code, const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    print_name(stderr);
    fputs(": ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(code);
}

int cli_finish(int code) {
    if (fflush(stdout) || ferror(stdout))
        cli_fail(CLI_OUTPUT, "standard output could not be written: %s", strerror(errno));
    return code;
}

static void print_table(const cli_option *row) {
    for (; row->name; row++) {
        char left[64], letter[8] = "";
        if (row->id < 128)
            snprintf(letter, sizeof letter, "-%c, ", row->id);
        snprintf(left, sizeof left, "%s--%s%s%s", letter, row->name, row->value ? " " : "",
                 row->value ? row->value : "");
        printf(*row->help ? "  %-26s  %s\n" : "  %s%s\n", left, row->help);
    }
}

static void print_help(void) {
    fputs("Usage: ", stdout);
    print_name(stdout);
    printf(" [OPTION]... %s\n%c%s.\n\nOptions:\n", verb->arguments, verb->summary[0] - 'a' + 'A',
           verb->summary + 1);
    print_table(verb->own);
    if (verb->problem) {
        puts("\nThe problem:");
        print_table(verb->problem);
    }
    puts("\nAlways:");
    print_table(always);
}

/* getopt's tables from ours. */
static void build(struct option *longs, char *shorts) {
    const cli_option *tables[] = {verb->own, verb->problem, always};
    for (size_t t = 0; t < sizeof tables / sizeof *tables; t++)
        for (const cli_option *row = tables[t]; row && row->name; row++) {
            *longs++ =
                (struct option){row->name, row->value ? required_argument : no_argument, NULL, row->id};
            if (row->id < 128) {
                *shorts++ = (char)row->id;
                if (row->value)
                    *shorts++ = ':';
            }
        }
    *longs = (struct option){0};
    *shorts = 0;
}

int cli_next(int argc, char **argv, const char **value) {
    static struct option longs[MOST_OPTIONS];
    static char shorts[2 * MOST_OPTIONS];
    if (!longs[0].name)
        build(longs, shorts);
    int id = getopt_long(argc, argv, shorts, longs, NULL);
    *value = optarg;
    switch (id) {
    case ID_HELP:
        print_help();
        exit(cli_finish(CLI_OK));
    case ID_VERSION:
        printf("%s %s\n", program, fb_version());
        exit(cli_finish(CLI_OK));
    case '?':
        print_name(stderr);
        fputs(" --help lists the options\n", stderr);
        exit(CLI_USAGE);
    default:
        return id;
    }
}
