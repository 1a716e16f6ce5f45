/* Checkpoints: what is saved comes back to the bit; a file that is damaged, foreign or of another model is
 * refused and changes nothing; a save that fails or dies leaves the file that was there. */
#include "examples/gpt/checkpoint.h"

#include <float.h>
#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

/* ---- A state by hand ------------------------------------------------------------------------------- */

enum { FLOATS = 40, MATRICES = 3 };

static gpt_matrix matrices[MATRICES] = {
    {"embedding", 5, 3, 0, true}, {"layer.0.wq", 4, 5, 15, true}, {"final_norm", 1, 5, 35, false}};
static const gpt_layout layout = {matrices, MATRICES, FLOATS};

/* A state with its floats: weights, m, v. */
typedef struct full {
    run_state s;
    float floats[3 * FLOATS];
} full;

static void point(full *f) {
    f->s.weights = f->floats, f->s.m = f->floats + FLOATS, f->s.v = f->s.m + FLOATS;
}

/* Numbers that a careless format would not give back. */
static void make_state(full *f, int which) {
    static const float odd[] = {-0.0f, 1e-45f, FLT_MIN, FLT_MAX, -FLT_MAX, 0.1f, 1 / 3.0f, 16777217.0f};
    memset(f, 0, sizeof *f);
    point(f);
    for (int i = 0; i < FLOATS; i++) {
        f->s.weights[i] = i < 8 ? odd[i] : (float)(i + which) / 7;
        f->s.m[i] = i < 8 ? odd[7 - i] : (float)(i - which) / 9;
        f->s.v[i] = i < 8 ? fabsf(odd[i]) : (float)(i + which) / 11;
    }
    f->s.config = (gpt_config){.layers = 6, .width = 3, .heads_q = 8, .heads_kv = 2, .head_dim = 48};
    f->s.config.hidden = 1031, f->s.config.context = 1 << 30, f->s.config.window = 257;
    f->s.config.tied = true, f->s.config.softcap = 0.1f, f->s.config.rope_base = 10000.0205f;
    f->s.config.batch = 4, f->s.config.route = FB_FUSED, f->s.config.dtype = FB_BF16, f->s.config.threads = 3;
    f->s.step = 1000000000000 - which;
    f->s.seed = UINT64_MAX - (uint64_t)which;
}

/* Another state, to see what a load leaves alone. */
static void make_other(full *f) {
    memset(f, 0x5a, sizeof *f);
    point(f);
    f->s.config = (gpt_config){.batch = 11, .route = FB_UNFUSED, .dtype = FB_F32, .threads = 7};
    f->s.step = -3, f->s.seed = 4;
}

static void same_config(const gpt_config *a, const gpt_config *b) {
    assert_true(a->layers == b->layers && a->width == b->width && a->heads_q == b->heads_q);
    assert_true(a->heads_kv == b->heads_kv && a->head_dim == b->head_dim && a->hidden == b->hidden);
    assert_true(a->context == b->context && a->window == b->window && a->tied == b->tied &&
                a->sinks == b->sinks);
    assert_memory_equal(&a->softcap, &b->softcap, sizeof a->softcap);
    assert_memory_equal(&a->rope_base, &b->rope_base, sizeof a->rope_base);
}

static bool same_floats(const full *a, const full *b) {
    return !memcmp(a->floats, b->floats, sizeof a->floats);
}

/* ---- Files ----------------------------------------------------------------------------------------- */

typedef struct place {
    char folder[64], path[80];
} place;

static int make_folder(void **state) {
    static place p;
    strcpy(p.folder, "/tmp/flashback-checkpoint-XXXXXX");
    if (!mkdtemp(p.folder))
        return 1;
    snprintf(p.path, sizeof p.path, "%s/a.safetensors", p.folder);
    *state = &p;
    return 0;
}

static const char *path_of(void **state) { return ((const place *)*state)->path; }

/* A file in memory: head is what comes before the data. */
typedef struct bytes {
    char at[8192];
    size_t size, head;
} bytes;

static void take(bytes *b, const char *path) {
    FILE *f = fopen(path, "r");
    assert_non_null(f);
    memset(b, 0, sizeof *b);
    b->size = fread(b->at, 1, sizeof b->at, f);
    assert_in_range(b->size, 9, sizeof b->at - 1);
    fclose(f);
    b->head = 8 + (size_t)(unsigned char)b->at[0] + 256 * (size_t)(unsigned char)b->at[1];
}

static void put(const char *path, const void *at, size_t size) {
    FILE *f = fopen(path, "w");
    assert_non_null(f);
    assert_int_equal(fwrite(at, 1, size, f), size);
    assert_int_equal(fclose(f), 0);
}

static void save(const char *path, const full *f) {
    complaint why;
    if (!checkpoint_save(path, &layout, &f->s, &why))
        fail_msg("not saved: %s", why.text);
}

static void save_and_take(const char *path, int which, full *f, bytes *b) {
    make_state(f, which);
    save(path, f);
    take(b, path);
}

static void not_saved(const char *path, const full *f, const char *words) {
    complaint why = {""};
    assert_false(checkpoint_save(path, &layout, &f->s, &why));
    if (!strstr(why.text, path) || !strstr(why.text, words))
        fail_msg("the sentence \"%s\" lacks the file or \"%s\"", why.text, words);
}

/* Puts `now` in the place of `old` in the header, whatever their lengths. */
static void edit(bytes *b, const char *old, const char *now) {
    char *at = memmem(b->at + 8, b->head - 8, old, strlen(old));
    if (!at)
        fail_msg("the header has no %s", old);
    const size_t rest = b->size - (size_t)(at - b->at) - strlen(old);
    assert_true(b->size + strlen(now) < sizeof b->at);
    memmove(at + strlen(now), at + strlen(old), rest);
    memcpy(at, now, strlen(now));
    b->size = b->size - strlen(old) + strlen(now);
    b->head = b->head - strlen(old) + strlen(now);
    b->at[0] = (char)((b->head - 8) & 255), b->at[1] = (char)((b->head - 8) >> 8);
}

/* Nothing changes, and the sentence names the file and says `words`. */
static void refused_by(bool peek, const char *path, const gpt_layout *of, const char *words) {
    full before, after;
    complaint why = {""};
    make_other(&after);
    memcpy(&before, &after, sizeof before);
    if (peek ? checkpoint_peek(path, &after.s, &why) : checkpoint_load(path, of, &after.s, &why))
        fail_msg("was taken, without \"%s\"", words);
    assert_memory_equal(&before, &after, sizeof before);
    if (!strstr(why.text, path) || !strstr(why.text, words) || strlen(why.text) > sizeof why.text - 2)
        fail_msg("the sentence \"%s\" lacks the file or \"%s\", or its end", why.text, words);
}

static void refused_for(const char *path, const char *words) { refused_by(false, path, &layout, words); }

static void both_refuse(const char *path, const char *words) {
    refused_by(true, path, &layout, words);
    refused_by(false, path, &layout, words);
}

/* ---- There and back -------------------------------------------------------------------------------- */

static void expect_state(const char *path, const full *saved) {
    full f;
    complaint why;
    make_other(&f);
    if (!checkpoint_load(path, &layout, &f.s, &why))
        fail_msg("not loaded: %s", why.text);
    assert_true(same_floats(&f, saved));
    assert_true(f.s.step == saved->s.step && f.s.seed == saved->s.seed);
    assert_int_equal(f.s.config.layers, 0); /* that is for peek */

    make_other(&f);
    const full before = f;
    if (!checkpoint_peek(path, &f.s, &why))
        fail_msg("no peek: %s", why.text);
    same_config(&f.s.config, &saved->s.config);
    assert_true(f.s.step == saved->s.step && f.s.seed == saved->s.seed);
    assert_true(f.s.config.batch == 11 && f.s.config.route == FB_UNFUSED && f.s.config.dtype == FB_F32);
    assert_true(f.s.config.threads == 7 && same_floats(&f, &before));
    assert_true(f.s.weights == before.s.weights && f.s.m == before.s.m && f.s.v == before.s.v);
}

static void test_there_and_back(void **state) {
    static const float reals[] = {0, 1e-45f, FLT_MIN, 0.1f, 1.00000012f, 16777216, 3e10f, FLT_MAX};
    full f;
    make_state(&f, 0);
    save(path_of(state), &f);
    expect_state(path_of(state), &f);
    f.s.step = 0, f.s.seed = 0; /* over the file that is there */
    f.s.config.window = 0, f.s.config.context = 1, f.s.config.tied = false, f.s.config.sinks = true;
    for (size_t i = 0; i < sizeof reals / sizeof *reals; i++) {
        f.s.config.softcap = reals[i], f.s.config.rope_base = reals[7 - i];
        save(path_of(state), &f);
        expect_state(path_of(state), &f);
    }
}

/* Other programs pad as they like: then no float lies at a multiple of 4. */
static void test_unaligned(void **state) {
    full f;
    bytes b;
    make_state(&f, 1);
    save(path_of(state), &f);
    for (int i = 0; i < 8; i++) {
        take(&b, path_of(state));
        edit(&b, "{", "{ ");
        put(path_of(state), b.at, b.size);
        expect_state(path_of(state), &f);
    }
}

/* ---- Damage ---------------------------------------------------------------------------------------- */

static void test_truncated(void **state) {
    full f;
    bytes b;
    save_and_take(path_of(state), 2, &f, &b);
    for (size_t size = 0; size < b.size; size++) {
        put(path_of(state), b.at, size);
        both_refuse(path_of(state), "not a whole checkpoint");
    }
    b.at[b.size] = 0;
    put(path_of(state), b.at, b.size + 1);
    refused_for(path_of(state), "bytes of data");
}

/* A byte of the header that changed is either found, or changed a number into another that may be. */
static void test_flipped_bits(void **state) {
    full f, g;
    bytes b;
    complaint why;
    int loaded = 0, found = 0;
    save_and_take(path_of(state), 3, &f, &b);
    for (size_t i = 0; i < 8 * b.head; i++) {
        b.at[i / 8] = (char)(b.at[i / 8] ^ 1 << i % 8);
        put(path_of(state), b.at, b.size);
        b.at[i / 8] = (char)(b.at[i / 8] ^ 1 << i % 8);
        make_other(&g);
        if (checkpoint_load(path_of(state), &layout, &g.s, &why)) {
            assert_true(same_floats(&g, &f));
            assert_in_range(g.s.step, 0, 1000000000000);
            loaded++;
        } else {
            refused_for(path_of(state), "");
            found++;
        }
    }
    assert_in_range(loaded, 1, found / 8);
}

static void test_foreign(void **state) {
    const char *path = path_of(state);
    static const char no_notes[] = "\x02\0\0\0\0\0\0\0{}";
    static const char other_notes[] = "\x26\0\0\0\0\0\0\0{\"__metadata__\":{\"flashback\":\"1.0.0\"}}";
    unlink(path);
    both_refuse(path, "No such file");
    put(path, "", 0);
    refused_for(path, "has 0 bytes");
    put(path, "This is a text and no checkpoint.", 33);
    refused_for(path, "header length");
    put(path, no_notes, sizeof no_notes - 1);
    both_refuse(path, "its metadata has no 'format'; expected 'flashback-train 1'");
    put(path, other_notes, sizeof other_notes - 1);
    refused_for(path, "its metadata has no 'format'; expected 'flashback-train 1'");
    refused_for("/tmp", "not a regular file");
}

/* ---- Fields ---------------------------------------------------------------------------------------- */

static void refused_edit(void **state, const bytes *whole, const char *old, const char *now,
                         const char *words) {
    bytes b = *whole;
    edit(&b, old, now);
    put(path_of(state), b.at, b.size);
    refused_for(path_of(state), words);
}

static void test_numbers(void **state) {
    static const struct {
        const char *old, *now, *words;
    } rows[] = {
        {"flashback-train 1", "flashback-train 2",
         "format is 'flashback-train 2'; expected 'flashback-train 1'"},
        {"\"step\":\"7\"", "\"step\":\"-1\"", "step is '-1'; expected a whole number of 0 to 1000000000000"},
        {"\"step\":\"7\"", "\"step\":\"1000000000001\"", "step is '1000000000001'; expected"},
        {"\"step\":\"7\"", "\"step\":\"99999999999999999999\"", "step is '99999999999999999999'; expected"},
        {"\"step\":\"7\"", "\"step\":\"\"", "step is ''; expected"},
        {"\"step\":\"7\"", "\"step\":\" 7\"", "step is ' 7'; expected"},
        {"\"step\":\"7\"", "\"step\":\"7 \"", "step is '7 '; expected"},
        {"\"step\":\"7\"", "\"step\":\"0x7\"", "step is '0x7'; expected"},
        {"\"step\":\"7\"", "\"step\":7", "'step' must be a string"},
        {"\"seed\":\"9\"", "\"seed\":\"-9\"",
         "seed is '-9'; expected a whole number of 0 to 18446744073709551615"},
        {"\"seed\":\"9\"", "\"seed\":\"18446744073709551616\"", "seed is '18446744073709551616'; expected"},
        {"\"layers\":\"6\"", "\"layers\":\"0\"", "layers is '0'; expected a whole number of 1 to 1048576"},
        {"\"window\":\"257\"", "\"window\":\"-1\"", "window is '-1'; expected a whole number of 0 to"},
        {"\"tied\":\"1\"", "\"tied\":\"2\"", "tied is '2'; expected 0 or 1"},
        {"\"tied\":\"1\"", "\"tied\":\"true\"", "tied is 'true'; expected 0 or 1"},
        {"\"softcap\":\"5\"", "\"softcap\":\"nan\"", "softcap is 'nan'; expected a number of 0 or more"},
        {"\"softcap\":\"5\"", "\"softcap\":\"-5\"", "softcap is '-5'; expected"},
        {"\"softcap\":\"5\"", "\"softcap\":\"1e39\"", "softcap is '1e39'; expected"},
        {"\"softcap\":\"5\"", "\"softcap\":\"0x5\"", "softcap is '0x5'; expected"},
    };
    full f;
    bytes whole;
    make_state(&f, 4);
    f.s.step = 7, f.s.seed = 9, f.s.config.softcap = 5;
    save(path_of(state), &f);
    take(&whole, path_of(state));
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        refused_edit(state, &whole, rows[i].old, rows[i].now, rows[i].words);
        refused_by(true, path_of(state), NULL, rows[i].words);
    }
}

static void test_missing_numbers(void **state) {
    static const char *const names[] = {"format",  "step",     "seed",     "layers",  "width",
                                        "heads_q", "heads_kv", "head_dim", "hidden",  "context",
                                        "window",  "tied",     "sinks",    "softcap", "rope_base"};
    full f;
    bytes whole;
    save_and_take(path_of(state), 5, &f, &whole);
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        char old[32], words[48];
        snprintf(old, sizeof old, "\"%s\":", names[i]);
        snprintf(words, sizeof words, "its metadata has no '%s'", names[i]);
        refused_edit(state, &whole, old, "\"unknown\":", words);
    }
}

static void test_tensors(void **state) {
    static const struct {
        const char *old, *now, *words;
    } rows[] = {
        {"\"weights.embedding\"", "\"weights.embeddinG\"",
         "has no tensor 'weights.embedding'; expected F32 of [5,3]"},
        {"\"adam_m.layer.0.wq\"", "\"adam_m.layer.1.wq\"", "has no tensor 'adam_m.layer.0.wq'"},
        {"\"adam_v.final_norm\"", "\"adam_V.final_norm\"", "has no tensor 'adam_v.final_norm'"},
        {"\"shape\":[4,5]", "\"shape\":[5,4]", "is F32 of [5,4]; expected F32 of [4,5]"},
        {"\"shape\":[4,5]", "\"shape\":[20]", "is F32 of [20]; expected F32 of [4,5]"},
        {"\"shape\":[1,5]", "\"shape\":[1,5,1]", "is F32 of [1,5,1]; expected F32 of [1,5]"},
        {"\"dtype\":\"F32\"", "\"dtype\":\"I32\"", "is I32 of [5,3]; expected F32 of [5,3]"},
    };
    full f;
    bytes whole;
    save_and_take(path_of(state), 6, &f, &whole);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        refused_edit(state, &whole, rows[i].old, rows[i].now, rows[i].words);
    put(path_of(state), whole.at, whole.size);
    const gpt_layout less = {matrices, MATRICES - 1, FLOATS}; /* a model with fewer layers */
    refused_by(false, path_of(state), &less, "has 9 tensors; expected 6");
    expect_state(path_of(state), &f);
}

/* Values that would spoil every step after: not read, and not written over a good file. */
static void test_values(void **state) {
    static const struct {
        int block, element;
        float value;
        const char *words;
    } rows[] = {
        {0, 3, NAN, "tensor 'weights.embedding' has nan at element 3; expected finite"},
        {0, 39, INFINITY, "tensor 'weights.final_norm' has inf at element 4; expected finite"},
        {1, 15, -INFINITY, "tensor 'adam_m.layer.0.wq' has -inf at element 0; expected finite"},
        {2, 34, NAN, "tensor 'adam_v.layer.0.wq' has nan at element 19; expected finite"},
        {2, 0, -1e-30f,
         "tensor 'adam_v.embedding' has -1e-30 at element 0; expected finite numbers of 0 or more"},
    };
    full good, bad;
    bytes whole, b;
    save_and_take(path_of(state), 7, &good, &whole);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        make_state(&bad, 7);
        bad.floats[rows[i].block * FLOATS + rows[i].element] = rows[i].value;
        not_saved(path_of(state), &bad, rows[i].words);
        take(&b, path_of(state));
        assert_memory_equal(&b, &whole, sizeof b);

        /* The file keeps the matrices in the layout's order, each with its moments. */
        const gpt_matrix *m = &matrices[rows[i].element < 15 ? 0 : rows[i].element < 35 ? 1 : 2];
        const int64_t at = 3 * m->offset + rows[i].block * m->rows * m->cols + rows[i].element - m->offset;
        memcpy(b.at + b.head + (size_t)at * sizeof(float), &rows[i].value, sizeof(float));
        put(path_of(state), b.at, b.size);
        refused_for(path_of(state), rows[i].words);
        put(path_of(state), whole.at, whole.size);
    }
    make_state(&bad, 7);
    bad.s.step = -1;
    not_saved(path_of(state), &bad, "is not written: step is '-1'");
    make_state(&bad, 7);
    bad.s.config.softcap = NAN;
    not_saved(path_of(state), &bad, "is not written: softcap is 'nan'");
    expect_state(path_of(state), &good);
}

/* ---- Saves that fail ------------------------------------------------------------------------------- */

/* A limit on the size of files takes the place of a disk that is full. The first writes of a large state fail
 * already, of a small one it is the last. */
static void test_full_disk(void **state) {
    static float zeros[5000];
    gpt_matrix matrix = {"large", 50, 100, 0, true};
    const gpt_layout large = {&matrix, 1, 5000};
    full old, new;
    bytes whole, b;
    complaint why;
    struct rlimit before;
    save_and_take(path_of(state), 8, &old, &whole);
    make_state(&new, 9);
    const size_t limits[] = {0, 1, 8, 100, whole.head, whole.head + 1, whole.size - 1};
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &before), 0);
    signal(SIGXFSZ, SIG_IGN);
    for (size_t i = 0; i < 2 * sizeof limits / sizeof *limits; i++) {
        const struct rlimit limit = {limits[i / 2], before.rlim_max};
        run_state s = new.s;
        if (i % 2)
            s.weights = s.m = s.v = zeros;
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &limit), 0);
        const bool saved = checkpoint_save(path_of(state), i % 2 ? &large : &layout, &s, &why);
        assert_int_equal(setrlimit(RLIMIT_FSIZE, &before), 0);
        assert_true(!saved && strstr(why.text, path_of(state)) && strstr(why.text, "File too large"));
        take(&b, path_of(state));
        assert_memory_equal(&b, &whole, sizeof b);
    }
    save(path_of(state), &new);
    expect_state(path_of(state), &new);
}

static void test_no_place(void **state) {
    full f;
    char path[128];
    make_state(&f, 0);
    snprintf(path, sizeof path, "%s/missing/a.safetensors", ((const place *)*state)->folder);
    not_saved(path, &f, "cannot be written: No such file");
    not_saved("/tmp", &f, "cannot be written");
}

/* After all the others: nothing but the checkpoint is there, so that the folder can go. */
static void test_no_drafts_stay(void **state) {
    const place *p = *state;
    unlink(p->path);
    assert_int_equal(rmdir(p->folder), 0);
}

/* A child saves one state and another until it is killed. It has a folder of its own, for the drafts that it
 * leaves. */
static void test_killed(void **state) {
    (void)state;
    char folder[] = "/tmp/flashback-killed-XXXXXX", path[80], command[80];
    full f[2], got;
    complaint why;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/a.safetensors", folder);
    make_state(&f[0], 10);
    make_state(&f[1], 11);
    save(path, &f[0]);
    for (int round = 0; round < 24; round++) {
        const pid_t child = fork();
        if (child == 0)
            for (int i = 0;; i++)
                checkpoint_save(path, &layout, &f[i % 2].s, &why);
        assert_true(child > 0);
        usleep((unsigned)(1000 + 137 * round));
        assert_int_equal(kill(child, SIGKILL), 0);
        assert_int_equal(waitpid(child, NULL, 0), child);
        make_other(&got);
        if (!checkpoint_load(path, &layout, &got.s, &why))
            fail_msg("not loaded after a kill: %s", why.text);
        assert_in_range(f[0].s.step - got.s.step, 0, 1);
        assert_true(same_floats(&got, &f[f[0].s.step - got.s.step]));
    }
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    assert_int_equal(system(command), 0);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_there_and_back),  cmocka_unit_test(test_unaligned),
        cmocka_unit_test(test_truncated),       cmocka_unit_test(test_flipped_bits),
        cmocka_unit_test(test_foreign),         cmocka_unit_test(test_numbers),
        cmocka_unit_test(test_missing_numbers), cmocka_unit_test(test_tensors),
        cmocka_unit_test(test_values),          cmocka_unit_test(test_full_disk),
        cmocka_unit_test(test_no_place),        cmocka_unit_test(test_killed),
        cmocka_unit_test(test_no_drafts_stay),
    };
    return cmocka_run_group_tests(tests, make_folder, NULL);
}
