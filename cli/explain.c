/* flashback explain: the plan of a problem in the library's own words. No tensor is allocated.
 * Floor: cli. */
#include "cli.h"
#include "flashback.h"
#include "options.h"
#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { ID_SHAPE = 300, ID_WITH };

const cli_option cli_explain_options[] = {
    {"shape", "B,HQ,HKV,LQ,LK,D[,DV]", "the shape; needed", ID_SHAPE},
    {"with", "LIST",
     "options that take part: bias, dbias, mask, sinks, dsinks, dlse, lengths, accumulate, deterministic, "
     "forward-only",
     ID_WITH},
    {0},
};

static const struct {
    const char *word;
    uint32_t flag;
} parts[] = {
    {"bias", FB_BIAS},
    {"dbias", FB_DBIAS},
    {"mask", FB_MASK},
    {"sinks", FB_SINKS},
    {"dsinks", FB_DSINKS},
    {"dlse", FB_DLSE},
    {"lengths", FB_LENGTHS},
    {"accumulate", FB_ACCUMULATE},
    {"deterministic", FB_DETERMINISTIC},
    {"forward-only", FB_FORWARD_ONLY},
};

static uint32_t read_parts(const char *list) {
    uint32_t flags = 0;
    for (const char *at = list; *at;) {
        const size_t length = strcspn(at, ","), count = sizeof parts / sizeof *parts;
        size_t i = 0;
        while (i < count && (strlen(parts[i].word) != length || strncmp(at, parts[i].word, length)))
            i++;
        if (i == count)
            cli_fail(CLI_USAGE, "--with: '%.*s' is unknown; --help lists the words", (int)length, at);
        flags |= parts[i].flag;
        at += length + (at[length] == ',');
    }
    return flags;
}

int cmd_explain(int argc, char **argv) {
    options o;
    option_flags flags = {0};
    const char *value;
    uint32_t with = 0;
    bool shaped = false;
    fb_desc shape;
    for (int id; (id = cli_next(argc, argv, &value)) != -1;) {
        if (id == ID_SHAPE) {
            parse_shape(value, &shape);
            shaped = true;
        } else if (id == ID_WITH) {
            with |= read_parts(value);
        } else {
            options_note(&flags, id, value);
        }
    }
    if (optind < argc)
        cli_fail(CLI_USAGE, "'%s' is not an option; explain reads no files", argv[optind]);
    if (!shaped)
        cli_fail(CLI_USAGE, "which shape? Give --shape B,HQ,HKV,LQ,LK,D");
    options_init(&o);
    options_apply(&o, &flags);
    options_shape(&o, &shape);
    o.desc.flags |= with;
    const fb_shape scores = {o.desc.batch, o.desc.heads_q, o.desc.len_q, o.desc.len_k};
    if (with & FB_BIAS)
        o.desc.bias_shape = scores;
    if (with & FB_MASK)
        o.desc.mask_shape = scores;

    static char text[16384];
    fb_plan *plan;
    if (fb_plan_create(&plan, &o.desc) != FB_OK)
        cli_fail(CLI_LIBRARY, "%s", fb_last_error());
    fb_plan_explain(plan, text, sizeof text);
    fb_plan_destroy(plan);
    fputs(text, stdout);
    return CLI_OK;
}
