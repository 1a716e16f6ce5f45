/* What every verb shares: exit codes, option tables (parsing and --help come from one), sentences on stderr.
 * Floor: cli, which uses include/ and harness/ only. Read main.c first (the verbs), then run.c. */
#ifndef CLI_CLI_H
#define CLI_CLI_H

#include "tensor.h"

/* Exit codes; they are part of the interface and stay as they are. */
enum {
    CLI_OK = 0,
    CLI_CHECK = 1,   /* a check failed: run --verify, check, bench --compare */
    CLI_USAGE = 2,   /* the command line is wrong */
    CLI_INPUT = 3,   /* an input file is wrong */
    CLI_LIBRARY = 4, /* the library refused or failed */
    CLI_OUTPUT = 5   /* an output could not be written */
};

typedef struct cli_option {
    const char *name;  /* without the dashes; NULL closes a table */
    const char *value; /* placeholder in --help; NULL = takes no value */
    const char *help;
    int id; /* a printable id is also the short option */
} cli_option;

typedef struct cli_verb {
    const char *name, *arguments, *summary;
    int (*run)(int argc, char **argv); /* argv[0] is the verb; returns an exit code */
    const cli_option *own;             /* NULL: the verb reads its command line itself */
    const cli_option *problem;         /* second table, see options.h; may be NULL */
} cli_verb;

int cmd_run(int argc, char **argv);
int cmd_check(int argc, char **argv);
int cmd_bench(int argc, char **argv);
int cmd_explain(int argc, char **argv);
int cmd_warm(int argc, char **argv);
int cmd_info(int argc, char **argv);

extern const cli_option cli_run_options[], cli_bench_options[], cli_explain_options[], cli_warm_options[],
    cli_info_options[];

/* Says which verb runs, before anything else here is called. */
void cli_begin(const cli_verb *chosen);

/* The same for a program of another name, whose only verb has none. */
void cli_begin_program(const char *name, const cli_verb *only);

/* Next option: its id, its value in *value; -1 at the end, where optind is the
 * first file.
 * --help and --version print and exit; a wrong option exits with CLI_USAGE. */
int cli_next(int argc, char **argv, const char **value);

/* "flashback VERB: sentence" on stderr; exits with the code. */
__attribute__((format(printf, 2, 3), noreturn)) void cli_fail(int code, const char *format, ...);

/* Exits with CLI_OUTPUT if standard output could not take everything. Returns `code`. */
int cli_finish(int code);

#endif
