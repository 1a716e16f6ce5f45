/* THE list of cases: check, the tests and the bench draw from these rows and from no others.
 * Floor: harness. A row is a name with braces: {a,b} stands for a and for b, side by side for all
 * combinations; the words are those of fbh_case_parse. Lengths stay small, because every case is also
 * computed by slow, plain code. */
#include "harness.h"

#include <regex.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOW "{f32,f16,bf16}"
#define ALL "{f32,f16,bf16,f64}"
#define D_ALL                                                                                                \
    "{1,2,3,5,8,16,24,32,40,48,56,59,64,72,80,88,96,111,112,120,127,128,129,160,192,224,256,257,320,512,"    \
    "576}"
#define D_PAIRS "{4v2,2v6,192v128,128v192,64v1,1v64,72v80,320v256,576v512}"
#define L_EDGES "{1,15,16,17,63,64,65,127,128,129,257}"

static const char *const rows[] = {
    /* The values of tests/golden: inputs that anyone can make again. */
    ALL ".b1h2k2.q5k7.d8.exact",
    ALL ".b1h2k2.q{3k7,7k3}.d8.causal.exact",
    ALL ".b1h2k2.q3k7.d8.causal.topleft.exact",
    ALL ".b1h10k2.q9k9.d4.causal.left2.exact",
    ALL ".b1h2k1.q9k6.d4.left0.right3.exact",
    ALL ".b2h2k1.q4k6.d8.softcap0.5.mask{b1,11}qk.exact",
    ALL ".b1h4k2.q6k6.d8.causal.left1.sinks.dsinks.dlse.exact",
    ALL ".b1h1k1.q8k8.d4v2.exact",
    ALL ".b1h6k2.q4k5.d6v10.causal.exact",
    ALL ".b1h2k2.q5k5.d8.scale-0.5.exact",
    ALL ".b1h1k1.q4k4.d8.causal.scale0.exact",
    ALL ".b2h2k2.q4k5.d4.bias1h1k.dbias.exact",
    ALL ".b2h2k1.q4k5.d4.biasb1qk.dbias.mask11qk.exact",
    ALL ".b1h2k2.q5k2.d4.causal.sinks.dsinks.dlse.exact",

    /* Causal: both alignments, Lq below, at and above Lk; rows without a key come first or last. */
    ALL ".b1h2k1.q{1,2,3,5,7}k{1,2,3,5,7}.d8.causal{,.topleft}",
    LOW ".b1h2k1.q{70k33,33k70,130k5,5k130,88k448}.d32.causal{,.topleft}",

    /* Several tiles on either side, where these have up to 192 rows. */
    "bf16.b1h2k1.q{200k300,300k200}.d{64,96,128,192,192v128,256}{,.causal}",
    "f16.b2h2k1.q260k260.d{64,128}.{packed.causal,lensq.lensk,softcap2,block128x128,causal.left100,sinks."
    "dsinks."
    "dlse}",

    /* Windows: one side, both, none but the query itself, wider than the sequence; and far off the diagonal.
     */
    LOW ".b1h2k1.q{5,33,70}k{5,40,70}.d16.{left0.right0,left2,right3,left2.right3,left17.right5,left999."
        "right999}",
    LOW
    ".b1h2k1.q{5,33,70}k{5,40,70}.d16.{causal.left0,causal.left2,causal.left16,left3.topleft,right2.topleft}",
    LOW ".b1h2k1.q9k9.d8.{left3,right3,causal,left2.right2}.offset{-20,-8,-3,1,4,20}",
    LOW ".b2h2k2.q{127,128,129,256}k{127,128,129,256}.d8.left64.right64.lensk",

    /* Groups of query heads: 1 to 16 to a key head. */
    LOW ".b2h{1k1,3k1,5k1,7k1,8k1,16k1,6k2,14k2,10k2,4k4,15k3,16k8}.q9k13.d8.causal",
    LOW ".b1h{7k1,6k2,8k1}.q{33k70,1k70,4k70}.d40",
    "{f32,bf16}.b1h{71k1,20k1,32k1}.q5k9.d8.causal",

    /* Head dims: all, with gaps of NaN beside every row, and values of another width. */
    LOW ".b1h2k1.q{5,19}k21.d" D_ALL ".causal",
    "{f32,bf16}.b1h2k1.q17k21.d" D_ALL ".padded",
    LOW ".b1h2k1.q{8,37}k{8,41}.d" D_PAIRS "{,.causal}",
    ALL ".b1h8k1.q{8,40}k{50,98}.d{128,192v128}{,.acc}",
    "f64.b1h2k1.q9k21.d{1,3,8,59,64,128,257}.causal",

    /* Lengths around the edges of tiles. */
    "f32.b1h2k1.q" L_EDGES "k" L_EDGES ".d8.causal",
    "bf16.b1h2k1.q" L_EDGES "k{17,64,65,129}.d16{,.causal}",
    "f16.b1h1k1.q{17,64,65,129}k" L_EDGES ".d16",
    "{f32,bf16}.b1h1k1.q{511k513,700k300}.d16{,.causal}",
    "f32.b1h1k1.q1024k1024.d16.causal",
    "f32.b1h1k1.q{300k1000}.d64.causal.left100",

    /* Few queries, many keys: the vector route. */
    LOW ".b1h4k1.q{1,2,3,4,5,6,7,8}k{1,7,129,400}.d64{,.causal}",
    LOW ".b2h6k2.q{1,4,8}k{9,32,63,67}.d{80,128}.causal",
    "{f32,bf16}.b1h6k2.q{1,4,8}k513.d{80,128}.causal",
    "{f32,bf16}.b1h16k4.q{1,7}k{129,600}.d16.{causal.left50,sinks.dsinks,softcap5,biasb11k.dbias,mask1hqk,"
    "dlse,lensk}",
    LOW ".b1h4k4.q1k{1,70,1100}.d{40,64}{,.causal}",
    "{f32,bf16}.b1h8k2.q{1,5}k2000.d16.causal",
    "{f32,bf16}.b1h1k1.q3k{32769,66048}.d8.farbias.bias111k{,.causal}",

    /* Many tiny problems, and one with all heads. */
    LOW ".b300h2k1.q3k4.d8.causal",
    "bf16.b64h4k4.q1k17.d16",

    /* Packed batches with sequences of length 0 on either side, padded batches with lengths of 0 and 1. */
    LOW
    ".b5h2k1.q{9,70}k{9,70}.d16.packed{,.causal,.causal.topleft,.left3.right2,.sinks.dsinks,.dlse.causal}",
    LOW ".b5h2k1.q{9,33}k21.d16.packed.{softcap2,acc,nodk,padded,odd,causal.left5}",
    LOW ".b3h4k2.q{5,130}k{7,129}.d32.packed.causal",
    LOW ".b5h2k1.q{9,70}k{9,70}.d16.{lensq,lensk,lensq.lensk}{,.causal,.left3.right2,.sinks.dsinks}",

    /* Block masks: entries of 0, rows of 0, last blocks that are cut. */
    LOW ".b2h2k1.q{70k83,33k200,129k65}.d16.block{16x16,32x16,16x64,64x64,128x128}{,b,h,bh}",
    LOW
    ".b2h2k1.q{70k83,150k150}.d16.block{16x32,32x32}bh.{causal,left20.right9,softcap3,sinks.dsinks,lensk}",

    /* Boolean masks and biases of all shapes, and both where they meet other masks (a row may lose all its
       keys). */
    LOW ".b2h4k2.q{6k9,35k40}.d8.mask{1,b}{1,h}{1,q}{1,k}",
    LOW ".b2h4k2.q{6k9,35k40}.d8.bias{1,b}{1,h}{1,q}{1,k}.dbias",
    LOW ".b1h2k1.q{70,134}k{74,138}.d16.mask11qk{,.causal}",
    LOW ".b1h2k1.q{31,64,130}k{31,64,130}.d64.bias11qk.neginf.causal.dbias",
    LOW ".b1h1k1.q19k361.d40.bias1hqk.dbias.{padded,odd}",

    /* Sinks, the cotangent of lse, positions, what the backward leaves out or adds to. */
    LOW ".b2h4k2.q{5,70}k{9,70}.d16.sinks{,.dsinks}{,.causal,.left3}",
    LOW ".b2h4k2.q{5,70}k{9,70}.d16.dlse{,.causal.topleft,.softcap2}",
    LOW ".b2h4k2.q{5,40}k40.d16.causal.offset{-40,-7,7}",
    LOW ".b2h4k2.q{5,70}k70.d16.causal.{acc,nodq,nodk,nodv,nodq.nodk,nodk.nodv,nodq.nodv,nodq.nodk.nodv,fwd,"
        "fwd.nolse}",
    LOW ".b2h4k2.q20k20.d16.{biasbhqk.dbias.acc,bias1h1k.dbias.acc,sinks.dsinks.acc,nodq.nodk.nodv.biasb1qk."
        "dbias}",

    ALL ".b2h4k2.q6k9.d8.fwd.{causal,left2,biasbhqk,maskbhqk,sinks,lensk,softcap0.5,packed}{,.nolse}",

    /* Layouts. */
    LOW ".b2h4k2.q{6,70}k{9,83}.d{24,40}.{blhd,padded,odd,repeated}.causal",
    LOW ".b2h4k{4,2}.q{16,128}k{16,128}.d16.blhd",
    LOW ".b1h4k4.q{128k128.d64,33k33.d128,20k20.d256,7k7.d8}.qkv{,.causal}",
    LOW ".b3h4k1.q9k9.d40.qkv.{acc,nodk}",
    "f64.b2h4k2.q6k9.d5.{blhd,padded,odd,repeated}",

    /* Zero-sized dimensions. */
    ALL ".b{0h4k2,2h0k2,2h0k0}.q6k9.d8",
    ALL ".b2h4k2.q{0k9,6k0,0k0}.d8{,.causal,.sinks.dsinks,.acc}",
    ALL ".b2h4k2.q6k9.d{0v8,8v0,0v0}.scale1{,.dlse}",
    LOW ".b2h4k2.q{0k9,6k0}.d8.{bias1h1k.dbias,mask1hqk,block16x16,lensk,dlse}",
    LOW ".b0h4k2.q6k9.d8.packed",

    /* Values that hurt: all logits far from 0, wide apart, equal and huge; magnitudes that differ by batch
       entry. */
    LOW ".b1h7k1.q88k448.d16.causal.shift{-200,-10000}",
    LOW ".b1h2k1.q{5,70}k70.d16.{shift200,shift-95.lensk,gain20,gain100,flat64,flat64.causal}",
    LOW ".b1h2k1.q17k17.d16.gain5.softcap{0.5,1,15,50,0.001,1e6}",
    LOW ".b1h2k1.q{7,70}k70.d8.scale{0,-0.5,-10000,2}{,.causal,.softcap5}",
    "{f32,bf16}.b3h4k1.q{5,70}k70.d64.massive.causal",
    /* Products so large that a fused multiply-add leaves a remainder of whole units; factors beyond f32. */
    "{f32,bf16}.b1h2k1.q{7,70}k70.d8.scale{1e10,-1e12}{,.causal}.fwd",
    "{f32,bf16}.b1h2k1.q{7,70}k70.d8.scale1e10.softcap1e-30.fwd",

    /* All at once. */
    LOW ".b2h4k2.q{7,70}k83.d40.causal.left50.softcap15.biasbhqk.dbias.mask11qk.block32x16b.sinks.dsinks."
        "lensk.dlse",
    LOW ".b3h4k2.q{7,70}k83.d40v24.left50.right9.topleft.offset-3.softcap15.bias1h1k.neginf.dbias.lensq."
        "lensk.padded.acc",
};

/* Options that must work alone and in pairs (alternatives of a row exclude each other), at a tiny shape. */
static const char *const options[][5] = {
    {"causal", "causal.topleft", "right1", "right1.topleft"},
    {"left2"},
    {"offset-2", "offset1"},
    {"scale-0.5", "scale0"},
    {"softcap0.5"},
    {"biasbhqk.dbias", "bias1h1k.dbias", "biasb1qk.neginf"},
    {"maskbhqk", "mask11q1"},
    {"block16x16bh"},
    {"sinks.dsinks", "sinks"},
    {"lensq", "lensk", "packed"},
    {"dlse"},
    {"acc"},
    {"nodq", "nodk", "nodv"},
    {"det"},
    {"blhd", "padded", "odd", "repeated"},
};

enum { ROWS = sizeof rows / sizeof rows[0], OPTIONS = sizeof options / sizeof options[0], ALTERNATIVES = 5 };

typedef struct list {
    fbh_case *at;
    size_t count, room;
    const regex_t *filter; /* NULL = all */
} list;

/* A wrong row is a defect of this file; the tests build the whole list, so it cannot hide. */
static void add_case(list *l, const char *name) {
    fbh_case c;
    char error[512];
    if (!fbh_case_parse(&c, name, error, sizeof error)) {
        fprintf(stderr, "harness/cases.c: %s\n", error);
        abort();
    }
    if (l->filter && regexec(l->filter, c.name, 0, NULL, 0) != 0)
        return;
    for (size_t n = 0; n < l->count; n++) {
        const fb_desc *desc = &l->at[n].desc; /* its flags and lengths spare most of the strcmp */
        if (desc->flags == c.desc.flags && desc->len_k == c.desc.len_k && strcmp(l->at[n].name, c.name) == 0)
            return;
    }
    if (l->count == l->room) {
        l->room = l->room ? 2 * l->room : 256;
        l->at = realloc(l->at, l->room * sizeof *l->at);
        if (!l->at)
            abort();
    }
    l->at[l->count++] = c;
}

/* The last brace varies fastest. */
static void add_row(list *l, const char *row) {
    const char *open = strchr(row, '{');
    if (!open) {
        add_case(l, row);
        return;
    }
    const char *close = strchr(open, '}');
    for (const char *from = open + 1; from <= close;) {
        const size_t n = strcspn(from, ",}");
        char name[4 * FBH_NAME_SIZE];
        snprintf(name, sizeof name, "%.*s%.*s%s", (int)(open - row), row, (int)n, from, close + 1);
        add_row(l, name);
        from += n + 1;
    }
}

static void add_pairs(list *l) {
    char row[FBH_NAME_SIZE];
    for (int one = 0; one < OPTIONS * ALTERNATIVES; one++)
        for (int two = one; two < OPTIONS * ALTERNATIVES; two++) {
            const char *a = options[one / ALTERNATIVES][one % ALTERNATIVES];
            const char *b = options[two / ALTERNATIVES][two % ALTERNATIVES];
            if (!a || !b || (one != two && one / ALTERNATIVES == two / ALTERNATIVES))
                continue;
            const char *dtypes = one == two ? ALL : "{f32,bf16}";
            snprintf(row, sizeof row, "%s.b2h4k2.q6k9.d8.%s%s%s", dtypes, a, one == two ? "" : ".",
                     one == two ? "" : b);
            add_row(l, row);
        }
}

fbh_case *fbh_case_list(const char *filter, size_t *count, char *error, size_t size) {
    regex_t regex;
    *count = 0;
    if (filter) {
        const int wrong = regcomp(&regex, filter, REG_EXTENDED | REG_NOSUB);
        if (wrong) {
            const size_t n =
                (size_t)snprintf(error, size, "filter '%s' is not a regular expression: ", filter);
            if (n < size)
                regerror(wrong, &regex, error + n, size - n);
            return NULL;
        }
    }
    list l = {.filter = filter ? &regex : NULL, .room = 1, .at = calloc(1, sizeof(fbh_case))};
    if (!l.at)
        abort();
    for (int n = 0; n < ROWS; n++)
        add_row(&l, rows[n]);
    add_pairs(&l);
    if (filter)
        regfree(&regex);
    *count = l.count;
    return l.at;
}
