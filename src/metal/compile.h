/* Kernel text becomes pipelines: by Metal's compiler, which is a part of macOS and keeps what it has
 * compiled. Floor: metal. Next: compile.c. */
#ifndef FB_METAL_COMPILE_H
#define FB_METAL_COMPILE_H

#include "state.h"

/* Why there are no rows for a kernel, as a refusal. */
fb_status fb__metal_no_row(const fb__metal_state *s, const fb__problem *p, fb__metal_kernel kernel);

/* What the choice of a row for a kernel depends on; `skip` rows were tried before. */
fb__metal_need fb__metal_need_of(const fb__metal_state *s, const fb__problem *p, fb__metal_kernel kernel,
                                 int skip);

/* Compiles all kernels that are used. A row whose threads the compiled kernel does not allow is passed over
 * for the next one that fits. The state has its queue. What is made is the state's, also on failure:
 * fb__metal_unload. Needs a pool.
 */
fb_status fb__metal_load(fb__metal_state *s, const fb__problem *p);
void fb__metal_unload(fb__metal_state *s);

/* What the compiler is asked for, in words. */
#define FB__METAL_COMPILER "MSL 3.1, safe math"

#endif
