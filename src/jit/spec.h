/* What a request comes to: the text for the compiler, and the key of its machine code. Floor: jit. */
#ifndef FB_JIT_SPEC_H
#define FB_JIT_SPEC_H

#include "jit.h"

/* *text comes from malloc: a line `#define name value` for each constant, then the text of fb__jit_source. */
fb_status fb__jit_spec(const fb__jit_request *request, char **text, char key[33]);

#endif
