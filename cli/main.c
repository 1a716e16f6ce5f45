/* flashback on the command line. The verbs are the rows of `verbs`; each is one file.
 * Floor: cli. Next: run.c. */
#include "cli.h"
#include "flashback.h"
#include "options.h"
#include <stdio.h>
#include <string.h>

static const cli_verb verbs[] = {
    {"run", "FILE...", "compute attention and its gradients from tensors in files", cmd_run, cli_run_options,
     cli_problem_options},
    {"check", "", "run the built-in cases and compare with the reference", cmd_check, NULL, NULL},
    {"bench", "", "measure speed and memory", cmd_bench, cli_bench_options, cli_problem_options},
    {"explain", "", "say how a problem would be computed, and why", cmd_explain, cli_explain_options,
     cli_problem_options},
    {"warm", "", "compile kernels ahead and keep them", cmd_warm, cli_warm_options, cli_problem_options},
    {"info", "", "say what this library is on this machine", cmd_info, cli_info_options, NULL},
    {0},
};

static void print_help(FILE *to) {
    fputs("Usage: flashback VERB [OPTION]... [FILE]...\n"
          "Exact attention for training, forward and backward, in O(L) memory.\n\nVerbs:\n",
          to);
    for (const cli_verb *v = verbs; v->name; v++)
        fprintf(to, "  %-8s  %s\n", v->name, v->summary);
    fputs("\nflashback VERB --help says more; so does the manual page flashback(1).\n"
          "Exit codes: 0 done, 1 a check failed, 2 wrong usage, 3 bad input file, 4 refused by the library,\n"
          "5 output could not be written.\n",
          to);
}

static int print_version(void) {
    printf("flashback %s\n", fb_version());
    return CLI_OK;
}

/* The verb of that name; the closing row if there is none. */
static const cli_verb *find_verb(const char *name) {
    const cli_verb *v = verbs;
    while (v->name && strcmp(v->name, name))
        v++;
    return v;
}

int main(int argc, char **argv) {
    const char *word = argc > 1 ? argv[1] : "";
    const cli_verb *verb = find_verb(word);
    cli_begin(verb);
    if (!strcmp(word, "--version") || (verb->name && argc == 3 && !strcmp(argv[2], "--version")))
        return cli_finish(print_version());
    if (!strcmp(word, "--help") || !strcmp(word, "-h") || !strcmp(word, "help")) {
        print_help(stdout);
        return cli_finish(CLI_OK);
    }
    if (verb->name)
        return cli_finish(verb->run(argc - 1, argv + 1));
    if (*word)
        fprintf(stderr, "flashback: '%s' is not a verb\n\n", word);
    print_help(stderr);
    return CLI_USAGE;
}
