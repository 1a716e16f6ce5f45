/* fb_merge on the CPU. Floor: cpu. */
#ifndef FB_CPU_MERGE_H
#define FB_CPU_MERGE_H

#include "../core/problem.h"

void fb__merge(const fb__problem *problem, fb_ref out, fb_ref lse, fb_ref other_out, fb_ref other_lse);

#endif
