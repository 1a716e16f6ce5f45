/* See spec.h. */
#include "spec.h"
#include "base/hash.h"
#include "core/error.h"
#include "source.h"
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

static void add_prologue(fb__text *text, const fb__jit_request *request) {
    for (int i = 0; i < request->count; i++)
        fb__text_add(text, "#define %s %" PRId64 "\n", request->defines[i].name, request->defines[i].value);
}

static void make_key(const fb__jit_request *request, const char *text, char key[33]) {
    static const int version[] = {FB_VERSION_MAJOR, FB_VERSION_MINOR, FB_VERSION_PATCH};
    const char *const parts[] = {text, request->arch, request->compiler, request->options};
    fb__hash hash = fb__hash_begin();
    fb__hash_add(&hash, version, sizeof version);
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        fb__hash_add(&hash, parts[i], strlen(parts[i]));
    hash = fb__hash_end(hash);
    fb__text out = {key, 33, 0};
    fb__text_add(&out, "%016" PRIx64 "%016" PRIx64, hash.a, hash.b);
}

fb_status fb__jit_spec(const fb__jit_request *request, char **text, char key[33]) {
    *text = NULL;
    char *source;
    FB_TRY(fb__jit_source(request->file, &source));
    fb__text prologue = {NULL, 0, 0};
    add_prologue(&prologue, request);
    size_t size = prologue.length + strlen(source) + 1;
    char *all = malloc(size);
    if (!all) {
        free(source);
        return fb__error(FB_MEMORY, "%zu bytes for the text of %s could not be allocated", size,
                         request->file);
    }
    prologue = (fb__text){all, size, 0};
    add_prologue(&prologue, request);
    strcpy(all + prologue.length, source);
    free(source);
    make_key(request, all, key);
    *text = all;
    return FB_OK;
}
