/* See checkpoint.h. One table, `fields`, says which numbers a checkpoint holds and what they may be; saving
 * and loading check by the same rules, so that what is written can be read. Next: cli/safetensors.h. Floor:
 * examples/gpt. */
#include "checkpoint.h"
#include "cli/file.h"
#include "cli/safetensors.h"
#include <ctype.h>
#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Numbers: the metadata, which is text ---------------------------------------------------------- */

static const char format[] = "flashback-train 1";

typedef enum kind { WHOLE, SEED, SWITCH, REAL } kind;

typedef struct field {
    const char *name;
    kind kind;
    size_t offset;
    int64_t least, most; /* of WHOLE */
} field;

#define SHAPE(name, kind, least, most)                                                                       \
    { #name, kind, offsetof(run_state, config.name), least, most }

/* The bounds only keep out what cannot be meant; which shapes a model can have is for gpt_open to say. */
static const field fields[] = {
    {"step", WHOLE, offsetof(run_state, step), 0, 1000000000000},
    {"seed", SEED, offsetof(run_state, seed), 0, 0},
    SHAPE(layers, WHOLE, 1, 1 << 20),
    SHAPE(width, WHOLE, 1, 1 << 20),
    SHAPE(heads_q, WHOLE, 1, 1 << 20),
    SHAPE(heads_kv, WHOLE, 1, 1 << 20),
    SHAPE(head_dim, WHOLE, 1, 1 << 20),
    SHAPE(hidden, WHOLE, 1, 1 << 20),
    SHAPE(context, WHOLE, 1, 1 << 30),
    SHAPE(window, WHOLE, 0, 1 << 30),
    SHAPE(tied, SWITCH, 0, 0),
    SHAPE(sinks, SWITCH, 0, 0),
    SHAPE(softcap, REAL, 0, 0),
    SHAPE(rope_base, REAL, 0, 0),
};
enum { FIELDS = sizeof fields / sizeof *fields };

/* Nine digits give every float back exactly. */
static void print_field(char *value, size_t size, const field *f, const run_state *s) {
    const void *at = (const char *)s + f->offset;
    switch (f->kind) {
    case WHOLE:
        snprintf(value, size, "%" PRId64, *(const int64_t *)at);
        break;
    case SEED:
        snprintf(value, size, "%" PRIu64, *(const uint64_t *)at);
        break;
    case SWITCH:
        snprintf(value, size, "%d", *(const bool *)at);
        break;
    case REAL:
        snprintf(value, size, "%.9g", (double)*(const float *)at);
        break;
    }
}

/* strtol and its like also take blanks, signs, hexadecimal digits and "nan", which no checkpoint has. */
static bool parse_field(const field *f, const char *value, run_state *s) {
    void *at = (char *)s + f->offset;
    char *end = NULL;
    if (!isdigit((unsigned char)value[value[0] == '-']) || strpbrk(value, "xXpP"))
        return false;
    errno = 0;
    if (f->kind == REAL) {
        const float x = strtof(value, &end);
        *(float *)at = x;
        return !*end && isfinite(x) && x >= 0;
    }
    if (f->kind == SEED) {
        *(uint64_t *)at = strtoull(value, &end, 10);
        return !*end && !errno && value[0] != '-';
    }
    const long long n = strtoll(value, &end, 10);
    if (*end)
        return false; /* what overflows is cut off at a bound and is beyond `most` */
    if (f->kind == SWITCH) {
        *(bool *)at = n == 1;
        return n == 0 || n == 1;
    }
    *(int64_t *)at = n;
    return n >= f->least && n <= f->most;
}

static bool read_field(const field *f, const char *value, run_state *s, complaint *why) {
    if (parse_field(f, value, s))
        return true;
    const quoted given = quote(value);
    if (f->kind == WHOLE)
        return complain(why, "%s is '%s'; expected a whole number of %" PRId64 " to %" PRId64, f->name,
                        given.text, f->least, f->most);
    return complain(why, "%s is '%s'; expected %s", f->name, given.text,
                    f->kind == SEED     ? "a whole number of 0 to 18446744073709551615"
                    : f->kind == SWITCH ? "0 or 1"
                                        : "a number of 0 or more");
}

typedef struct search {
    const char *key, *value; /* NULL: not found */
} search;

/* Goes on until the key is found. */
static bool is_not_it(void *context, const char *key, const char *value) {
    search *s = context;
    if (!strcmp(s->key, key))
        s->value = value;
    return !s->value;
}

static const char *look_up(const safetensors *file, const char *key) {
    search s = {key, NULL};
    safetensors_metadata(file, is_not_it, &s);
    return s.value;
}

static bool read_fields(const safetensors *file, run_state *s, complaint *why) {
    const char *given = look_up(file, "format");
    if (!given)
        return complain(why, "its metadata has no 'format'; expected '%s'", format);
    if (strcmp(given, format) != 0)
        return complain(why, "its metadata's format is '%s'; expected '%s'", quote(given).text, format);
    for (int i = 0; i < FIELDS; i++) {
        const char *value = look_up(file, fields[i].name);
        if (!value)
            return complain(why, "its metadata has no '%s'; every checkpoint has it", fields[i].name);
        if (!read_field(&fields[i], value, s, why))
            return false;
    }
    return true;
}

/* ---- Tensors --------------------------------------------------------------------------------------- */

enum { BLOCKS = 3 }; /* weights, adam_m, adam_v */

static float *block_of(const run_state *s, int block) {
    float *const blocks[BLOCKS] = {s->weights, s->m, s->v};
    return blocks[block];
}

typedef struct tensor_name {
    char text[48];
} tensor_name;

static tensor_name name_of(const gpt_matrix *matrix, int block) {
    static const char *const prefixes[BLOCKS] = {"weights", "adam_m", "adam_v"};
    tensor_name name;
    snprintf(name.text, sizeof name.text, "%s.%s", prefixes[block], matrix->name);
    return name;
}

static tensor tensor_of(const gpt_matrix *matrix, const tensor_name *name) {
    tensor t = {.name = name->text, .type = TENSOR_F32, .dims = 2, .shape = {matrix->rows, matrix->cols}};
    tensor_measure(&t);
    return t;
}

/* In a file the floats need not be aligned. The mean of squares, adam_v, is never negative. */
static bool check_values(const tensor *t, int block, complaint *why) {
    const char *const data = t->data;
    for (uint64_t i = 0; i < t->bytes / sizeof(float); i++) {
        float x;
        memcpy(&x, data + i * sizeof x, sizeof x);
        if (!isfinite(x) || (block == 2 && x < 0))
            return complain(why, "tensor '%s' has %g at element %" PRIu64 "; expected %s", t->name, (double)x,
                            i, block == 2 ? "finite numbers of 0 or more" : "finite numbers");
    }
    return true;
}

/* ---- Saving ---------------------------------------------------------------------------------------- */

/* What goes into a file, with the texts that it borrows. */
typedef struct content {
    char values[FIELDS][32];
    const char *notes[2 * FIELDS + 3];
    tensor *tensors;
    tensor_name *names;
    size_t count;
} content;

static bool make_notes(content *c, const run_state *state, complaint *why) {
    run_state again = *state;
    c->notes[0] = "format";
    c->notes[1] = format;
    for (int i = 0; i < FIELDS; i++) {
        print_field(c->values[i], sizeof c->values[i], &fields[i], state);
        if (!read_field(&fields[i], c->values[i], &again, why))
            return false;
        c->notes[2 * i + 2] = fields[i].name;
        c->notes[2 * i + 3] = c->values[i];
    }
    c->notes[2 * FIELDS + 2] = NULL;
    return true;
}

static bool make_tensors(content *c, const gpt_layout *layout, const run_state *state, complaint *why) {
    c->count = (size_t)layout->count * BLOCKS;
    c->tensors = calloc(c->count + 1, sizeof *c->tensors);
    c->names = calloc(c->count + 1, sizeof *c->names);
    if (!c->tensors || !c->names)
        return complain(why, "memory ran out");
    for (size_t i = 0; i < c->count; i++) {
        const gpt_matrix *matrix = &layout->matrices[i / BLOCKS];
        const int block = (int)(i % BLOCKS);
        c->names[i] = name_of(matrix, block);
        c->tensors[i] = tensor_of(matrix, &c->names[i]);
        c->tensors[i].data = block_of(state, block) + matrix->offset;
        if (!check_values(&c->tensors[i], block, why))
            return false;
    }
    return true;
}

static bool write_file(const char *path, const content *c, complaint *why) {
    draft d;
    if (!file_begin(&d, path, why))
        return false;
    errno = 0;
    if (safetensors_write(d.stream, c->tensors, c->count, c->notes))
        return file_commit(&d, why);
    complain(why, "%s: cannot be written: %s", path, errno ? strerror(errno) : "memory ran out");
    file_abandon(&d);
    return false;
}

/* A state that could not be loaded again does not take the place of one that can. */
bool checkpoint_save(const char *path, const gpt_layout *layout, const run_state *state, complaint *why) {
    content c = {.count = 0};
    complaint inner;
    bool ok = make_notes(&c, state, &inner) && make_tensors(&c, layout, state, &inner);
    if (ok)
        ok = write_file(path, &c, why);
    else
        complain(why, "%s: is not written: %s", path, inner.text);
    free(c.names);
    free(c.tensors);
    return ok;
}

/* ---- Loading --------------------------------------------------------------------------------------- */

typedef struct opened {
    mapping map;
    safetensors file;
} opened;

static void close_file(opened *o) {
    safetensors_close(&o->file);
    file_unmap(&o->map);
}

/* Maps, parses and reads the numbers into *found. */
static bool open_file(opened *o, const char *path, run_state *found, complaint *why) {
    complaint inner;
    *o = (opened){{0}, {0}};
    if (!file_map(&o->map, path, why))
        return false;
    if (safetensors_read(&o->file, o->map.data, o->map.size, &inner) && read_fields(&o->file, found, &inner))
        return true;
    close_file(o);
    return complain(why, "%s: is not a whole checkpoint of flashback-train: %s", path, inner.text);
}

bool checkpoint_peek(const char *path, run_state *state, complaint *why) {
    opened o;
    run_state found = *state;
    if (!open_file(&o, path, &found, why))
        return false;
    close_file(&o);
    *state = found;
    return true;
}

static bool same_shape(const tensor *a, const tensor *b) {
    return a->dims == b->dims && !memcmp(a->shape, b->shape, (size_t)a->dims * sizeof *a->shape);
}

/* The tensor of the file that `expected` names, once it is found to be right; NULL if it is not. */
static const tensor *find_tensor(const safetensors *file, const tensor *expected, int block, complaint *why) {
    static const char *const types[TENSOR_TYPES] = {"F32", "F16", "BF16", "F64", "BOOL", "U8", "I32", "I64"};
    const tensor *t = NULL;
    for (size_t i = 0; i < file->count && !t; i++)
        if (!strcmp(file->tensors[i].name, expected->name))
            t = &file->tensors[i];
    if (!t)
        complain(why, "has no tensor '%s'; expected F32 of %s", expected->name, tensor_shape(expected).text);
    else if (t->type != TENSOR_F32 || !same_shape(t, expected))
        complain(why, "tensor '%s' is %s of %s; expected F32 of %s", t->name, types[t->type],
                 tensor_shape(t).text, tensor_shape(expected).text);
    else if (check_values(t, block, why))
        return t;
    return NULL;
}

/* The layout has no two matrices of one name, so that as many tensors as it asks for are just those. */
static bool find_all(const safetensors *file, const gpt_layout *layout, const tensor **found,
                     complaint *why) {
    const size_t count = (size_t)layout->count * BLOCKS;
    for (size_t i = 0; i < count; i++) {
        const gpt_matrix *matrix = &layout->matrices[i / BLOCKS];
        const int block = (int)(i % BLOCKS);
        const tensor_name name = name_of(matrix, block);
        const tensor expected = tensor_of(matrix, &name);
        found[i] = find_tensor(file, &expected, block, why);
        if (!found[i])
            return false;
    }
    return file->count == count ||
           complain(why, "has %zu tensors; expected %zu, those of the model and no others", file->count,
                    count);
}

bool checkpoint_load(const char *path, const gpt_layout *layout, run_state *state, complaint *why) {
    opened o;
    complaint inner;
    run_state numbers = *state;
    if (!open_file(&o, path, &numbers, why))
        return false;
    const size_t count = (size_t)layout->count * BLOCKS;
    const tensor **found = calloc(count + 1, sizeof *found);
    const bool ok = found ? find_all(&o.file, layout, found, &inner) : complain(&inner, "memory ran out");
    for (size_t i = 0; i < count && ok; i++)
        memcpy(block_of(state, (int)(i % BLOCKS)) + layout->matrices[i / BLOCKS].offset, found[i]->data,
               (size_t)found[i]->bytes);
    if (ok) {
        state->step = numbers.step;
        state->seed = numbers.seed;
    } else {
        complain(why, "%s: cannot be loaded: %s", path, inner.text);
    }
    free(found);
    close_file(&o);
    return ok;
}
