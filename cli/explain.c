/* flashback explain: the plan of a problem in the library's own words. No tensor is allocated.
 * Floor: cli. */
#include "cli.h"
#include "flashback.h"
#include "options.h"
#include <stdio.h>
#include <unistd.h>

enum { ID_SHAPE = 300, ID_WITH };

const cli_option cli_explain_options[] = {
    {"shape", "B,HQ,HKV,LQ,LK,D[,DV]", "the shape; needed", ID_SHAPE},
    {"with", "LIST", "options that take part: " OPTIONS_PARTS, ID_WITH},
    {0},
};

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
            with |= parse_parts(value);
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
    options_parts(&o, with);

    static char text[16384];
    fb_plan *plan;
    if (fb_plan_create(&plan, &o.desc) != FB_OK)
        cli_fail(CLI_LIBRARY, "%s", fb_last_error());
    fb_plan_explain(plan, text, sizeof text);
    fb_plan_destroy(plan);
    fputs(text, stdout);
    return CLI_OK;
}
