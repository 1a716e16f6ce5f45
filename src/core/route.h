/* Routes: which of fused, vector, unfused and reference a problem takes, and why not the others.
 * Floor: core. */
#ifndef FB_CORE_ROUTE_H
#define FB_CORE_ROUTE_H

#include "../base/text.h"
#include "problem.h"

/* Defaults of the thresholds; see the rows in route.c for what was measured. */
#define FB__FUSED_MIN_LEN 1
#define FB__SCORE_BYTES_MAX (INT64_C(4) << 30)
#define FB__VECTOR_MAX_LEN_Q 8

/* Chooses the route for a problem on a backend that offers all of them. A forced route that can't run is
 * refused. */
fb_status fb__route_choose(const fb__problem *problem, fb_route *route);

/* One line for each route: taken or passed over, and why. */
void fb__route_explain(const fb__problem *problem, fb_route taken, fb__text *text);

#endif
