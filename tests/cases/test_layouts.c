/* Where tensors lie: strides of each tensor, slices of one buffer, odd addresses, gaps, giant steps, overlap.
 * The layout must not change a bit, and nothing outside the described elements is touched. */
#include "support.h"

#include "flashback_dlpack.h"

#include <sys/mman.h>

/* ---- One problem in two layouts ------------------------------------------------------------------------ */

/* The same inputs in another layout give the same bits. */
static void check_layout(const char *name, const char *layout, where w) {
    fbh_problem plain, p;
    open_case(&plain, "%s", name);
    open_case(&p, "%s.%s", name, layout);
    while (next_where(&w, &p.desc)) {
        run(&plain, &w);
        run(&p, &w);
        expect(digest(&p) == digest(&plain), "differs from the contiguous layout");
    }
    fbh_problem_destroy(&plain);
    fbh_problem_destroy(&p);
}

/* Also S0: strides of outputs taken from inputs. Gaps hold a canary, which `run` checks. */
static void br_17_gradients_written_into_strided_views(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int dim = 64; dim <= 256; dim *= 2) {
            char name[FBH_NAME_SIZE];
            const int len = type == FB_F16 ? 128 : 40;
            snprintf(name, sizeof name, "%s.b1h4k4.q%dk%d.d%d", type_name(type), len, len, dim);
            check_layout(name, "qkv", EVERY_ROUTE);
            check_layout(name, "padded", EVERY_ROUTE);
            snprintf(name, sizeof name, "%s.b2h4k2.q33k33.d%d.causal", type_name(type), dim);
            check_layout(name, "qkv", EVERYWHERE);
            check_layout(name, "padded", EVERYWHERE);
        }
}

/* H = L = B hides a mistake from every check of shapes. */
static void br_20_bhld_confused_with_blhd(void **state) {
    (void)state;
    for (int type = 0; type < TYPES; type++)
        for (int n = 16; n >= 8; n /= 2) {
            char name[FBH_NAME_SIZE];
            snprintf(name, sizeof name, "%s.b%dh%dk%d.q%dk%d.d8.causal", type_name(type), n, n, n, n, n);
            check_layout(name, "blhd", EVERY_ROUTE);
            snprintf(name, sizeof name, "%s.b2h%dk%d.q%dk%d.d8.causal", type_name(type), n, n, n, n);
            check_layout(name, "blhd", EVERYWHERE);
        }
}

/* What the layout argument of the DLPack functions means, with sizes that hide it. */
static void br_20_layout_is_an_argument_of_dlpack(void **state) {
    (void)state;
    int64_t shape[] = {4, 16, 16, 8};
    const fb_dltensor t = {.device = {1, 0}, .ndim = 4, .dtype = {2, 32, 1}, .shape = shape};
    fb_strides bhld, blhd;
    fb_desc desc;
    snprintf(here, sizeof here, "DLPack");
    expect_ok(fb_strides_from_dlpack(&bhld, FB_BHLD, &t, "q"));
    expect_ok(fb_strides_from_dlpack(&blhd, FB_BLHD, &t, "q"));
    expect(bhld.head == 128 && bhld.row == 8, "[B,H,L,D] has head %" PRId64 ", row %" PRId64, bhld.head,
           bhld.row);
    expect(blhd.head == 8 && blhd.row == 128, "[B,L,H,D] has head %" PRId64 ", row %" PRId64, blhd.head,
           blhd.row);
    fb_desc_init(&desc, sizeof desc);
    shape[1] = 6;
    expect_ok(fb_desc_from_dlpack(&desc, FB_BLHD, &t, &t, &t));
    expect(desc.len_q == 6 && desc.heads_q == 16, "len_q %" PRId64 ", heads_q %" PRId64, desc.len_q,
           desc.heads_q);
    const fb_dltensor flat = {.device = {1, 0}, .ndim = 3, .dtype = {2, 32, 1}, .shape = shape};
    expect_refused(fb_strides_from_dlpack(&bhld, FB_BLHD, &flat, "dout"), FB_INVALID, "dout", "3 dimensions",
                   "[batch, length, heads, head_dim]");
}

/* ---- One tensor moved elsewhere ------------------------------------------------------------------------ */

static const fbh_id strided[] = {FBH_Q, FBH_K, FBH_V, FBH_OUT, FBH_DOUT, FBH_DQ, FBH_DK, FBH_DV};

/* A tensor of a problem at another place and with other strides, its last byte before a forbidden page. */
typedef struct moved {
    fbh_id id;
    fb_strides stride;
    unsigned char *map, *data;
    size_t bytes;
} moved;

static size_t address(const moved *m, const fbh_tensor *t, place at) {
    return (size_t)(at.b * m->stride.batch + at.h * m->stride.head + at.i * m->stride.row + at.d) *
           fbh_size(t->type);
}

/* False if the machine does not lend so much address space. */
static bool move_out(moved *m, const fbh_problem *p) {
    enum { PAGE = 65536 }; /* a multiple of every page size */
    const fbh_tensor *t = &p->t[m->id];
    const size_t used =
        address(m, t, (place){t->batch - 1, t->heads - 1, t->rows - 1, t->cols - 1}) + fbh_size(t->type);
    const size_t pages = (used + PAGE - 1) / PAGE * PAGE;
    m->bytes = pages + PAGE;
    m->map = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (m->map == MAP_FAILED)
        return false;
    expect(mprotect(m->map + pages, PAGE, PROT_NONE) == 0, "mprotect fails");
    m->data = m->map + pages - used;
    for (place at = START; next(t, &at);)
        memcpy(m->data + address(m, t, at), fbh_at(t, at.b, at.h, at.i, at.d), fbh_size(t->type));
    return true;
}

static void poison(const moved *m, const fbh_problem *p) {
    const fbh_tensor *t = &p->t[m->id];
    for (place at = START; next(t, &at);)
        memset(m->data + address(m, t, at), 0xFF, fbh_size(t->type));
}

static void move_back(const moved *m, const fbh_problem *p) {
    const fbh_tensor *t = &p->t[m->id];
    for (place at = START; next(t, &at);)
        memcpy(fbh_at(t, at.b, at.h, at.i, at.d), m->data + address(m, t, at), fbh_size(t->type));
}

static void set_strides(fb_desc *d, fbh_id id, fb_strides s) {
    fb_strides *const field[FBH_COUNT] = {
        [FBH_Q] = &d->q,       [FBH_K] = &d->k,   [FBH_V] = &d->v,   [FBH_OUT] = &d->out,
        [FBH_DOUT] = &d->dout, [FBH_DQ] = &d->dq, [FBH_DK] = &d->dk, [FBH_DV] = &d->dv,
    };
    *field[id] = s;
}

static fb_ref *pointer(fb_io *io, fbh_id id) {
    fb_ref *const field[FBH_COUNT] = {
        [FBH_Q] = &io->q,       [FBH_K] = &io->k,   [FBH_V] = &io->v,   [FBH_OUT] = &io->out,
        [FBH_DOUT] = &io->dout, [FBH_DQ] = &io->dq, [FBH_DK] = &io->dk, [FBH_DV] = &io->dv,
    };
    return field[id];
}

/* Runs p with one of its tensors at another place; afterwards p's own holds its elements again. False: no
 * memory. */
static bool run_moved(fbh_problem *p, const where *w, fbh_id id, fb_strides stride) {
    moved m = {.id = id, .stride = stride};
    fb_io io;
    if (!move_out(&m, p))
        return false;
    set_strides(&p->desc, id, stride);
    fb_plan *plan = plan_at(p, w);
    for (int pass = FBH_FORWARD; pass <= FBH_BACKWARD; pass++) {
        expect_ok(fbh_problem_ready(p, plan, (fbh_pass)pass));
        fbh_problem_io(p, (fbh_pass)pass, &io);
        if (fbh_writes(p, id, (fbh_pass)pass))
            poison(&m, p);
        if (pointer(&io, id)->data)
            *pointer(&io, id) = (fb_ref){m.data, 0};
        expect_ok(pass == FBH_FORWARD ? fb_forward(plan, &io) : fb_backward(plan, &io));
        if (fbh_writes(p, id, (fbh_pass)pass))
            move_back(&m, p);
    }
    fb_plan_destroy(plan);
    munmap(m.map, m.bytes);
    set_strides(&p->desc, id, (fb_strides){0, 0, 0});
    return true;
}

static void check_moved(const char *name, fbh_id id, fb_strides stride, where w) {
    fbh_problem plain, p;
    open_case(&plain, "%s", name);
    open_case(&p, "%s", name);
    while (next_where(&w, &p.desc)) {
        run(&plain, &w);
        if (!run_moved(&p, &w, id, stride)) {
            print_message("%s: no address space for it\n", here);
            skip();
        }
        expect(digest(&p) == digest(&plain), "%s with strides %" PRId64 ", %" PRId64 ", %" PRId64 " differs",
               p.t[id].name, stride.batch, stride.head, stride.row);
    }
    fbh_problem_destroy(&plain);
    fbh_problem_destroy(&p);
}

static void br_18_k_and_v_with_different_strides(void **state) {
    (void)state;
    const fb_strides wide = {0, 70 * 64 * 64, 64 * 64}, heads_inside = {0, 64, 2 * 64};
    for (int type = 0; type < TYPES; type++)
        for (int rows = 8; rows <= 9; rows++)
            for (fbh_id id = FBH_K; id <= FBH_V; id++) {
                char name[FBH_NAME_SIZE];
                snprintf(name, sizeof name, "%s.b1h2k2.q%dk70.d64", type_name(type), rows);
                check_moved(name, id, wide, EVERY_ROUTE);
                check_moved(name, id, heads_inside, EVERYWHERE);
            }
}

static void br_22_size_one_dimensions_with_odd_strides(void **state) {
    (void)state;
    /* The batch stride of B = 1, the head stride of H = 1, the row stride of L = 1: any number. */
    for (size_t n = 0; n < sizeof strided / sizeof *strided; n++) {
        const fbh_id id = strided[n];
        check_moved("f32.b1h2k2.q9k9.d8", id, (fb_strides){12345, 9 * 8, 8}, EVERYWHERE);
        check_moved("f16.b2h1k1.q9k9.d8", id, (fb_strides){9 * 8, -7, 8}, EVERYWHERE);
        check_moved("f32.b2h2k2.q1k1.d8", id, (fb_strides){2 * 8, 8, 0}, EVERYWHERE);
        check_moved("f32.b1h1k1.q2k2.d1", id, (fb_strides){0, INT64_MAX, 1}, EVERYWHERE);
    }
}

/* A last stride exists in DLPack only: any where the size is 1, otherwise 1 or an error. */
static void br_22_last_stride(void **state) {
    (void)state;
    int64_t shape[] = {1, 1, 2, 1}, strides[] = {12345, 0, 2, 2};
    const fb_dltensor t = {
        .device = {1, 0}, .ndim = 4, .dtype = {2, 32, 1}, .shape = shape, .strides = strides};
    fb_strides s;
    snprintf(here, sizeof here, "DLPack");
    expect_ok(fb_strides_from_dlpack(&s, FB_BHLD, &t, "k"));
    expect(s.row == 2, "row stride %" PRId64 ", expected 2", s.row);
    shape[3] = 8, strides[2] = 24, strides[3] = 3;
    expect_refused(fb_strides_from_dlpack(&s, FB_BHLD, &t, "k"), FB_INVALID, "k has stride 3",
                   "last dimension", "expected 1");
}

/* Everything one element past a 64-byte boundary, rows of D + 1, bias rows of odd length. */
static void br_23_pointers_that_are_only_element_aligned(void **state) {
    (void)state;
    const char *const cases[] = {"b1h1k1.q19k361.d40.bias1hqk.dbias", "b1h2k1.q19k364.d40.bias1hqk.dbias",
                                 "b2h4k2.q7k83.d40.maskbhqk.causal",
                                 "b2h4k2.q33k83.d40.sinks.dsinks.dlse.mask11qk"};
    for (int type = 0; type < TYPES; type++)
        for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
            char name[FBH_NAME_SIZE];
            snprintf(name, sizeof name, "%s.%s", type_name(type), cases[n]);
            check_layout(name, "odd", EVERYWHERE);
        }
}

/* The C API's part: out has the strides of desc.out, dense if these are 0, whatever q's strides and Dv are.
 */
static void br_24_output_strides_do_not_follow_inputs(void **state) {
    (void)state;
    const fb_strides blhd = {9 * 2 * 8, 8, 2 * 8};
    check_moved("f32.b2h2k2.q9k9.d8v5", FBH_Q, blhd, EVERYWHERE);
    check_moved("f32.b2h2k2.q9k9.d5v8", FBH_V, blhd, EVERYWHERE);
}

/* S2: (b * H + h) * T + row in 32 bits. Steps of 2^31 elements, of every tensor and in every dimension. */
static void s2_offsets_beyond_32_bits(void **state) {
    (void)state;
    const int64_t far = (INT64_C(1) << 31) + 16;
    for (size_t n = 0; n < sizeof strided / sizeof *strided; n++) {
        const fbh_id id = strided[n];
        check_moved("f16.b1h1k1.q3k3.d8", id, (fb_strides){0, 0, far}, EVERY_ROUTE);
        check_moved("f16.b1h3k3.q9k9.d8", id, (fb_strides){0, far, 8}, EVERY_ROUTE);
        check_moved("f32.b3h1k1.q9k9.d8", id, (fb_strides){far, 0, 8}, EVERY_ROUTE);
    }
}

/* ---- Overlap ------------------------------------------------------------------------------------------- */

/* Which pointer is put where: on `other`, some bytes further. */
typedef struct clash {
    const char *name, *other;
    fbh_id id, on;
    uint64_t bytes;
    fbh_pass pass;
} clash;

static void br_72_outputs_that_overlap(void **state) {
    (void)state;
    const clash clashes[] = {{"io.out", "io.q", FBH_OUT, FBH_Q, 0, FBH_FORWARD},
                             {"io.out", "io.v", FBH_OUT, FBH_V, 8 * 4, FBH_FORWARD},
                             {"io.dq", "io.q", FBH_DQ, FBH_Q, 0, FBH_BACKWARD},
                             {"io.dq", "io.dout", FBH_DQ, FBH_DOUT, 0, FBH_BACKWARD},
                             {"io.dk", "io.k", FBH_DK, FBH_K, 8 * 8 * 4, FBH_BACKWARD},
                             {"io.dk", "io.dq", FBH_DK, FBH_DQ, 0, FBH_BACKWARD},
                             {"io.dv", "io.dk", FBH_DV, FBH_DK, 4, FBH_BACKWARD},
                             {"io.dv", "io.lse", FBH_DV, FBH_LSE, 0, FBH_BACKWARD}};
    const char *const layouts[] = {"odd", "padded", "blhd"};
    for (int layout = 0; layout < 3; layout++)
        for (size_t n = 0; n < sizeof clashes / sizeof *clashes; n++) {
            const clash *c = &clashes[n];
            fbh_problem p;
            fb_io io;
            open_case(&p, "f32.b1h1k1.q9k9.d8.%s", layouts[layout]);
            for (where w = EVERY_ROUTE; next_where(&w, &p.desc);) {
                fb_plan *plan = plan_at(&p, &w);
                expect_ok(fbh_problem_run(&p, plan, FBH_FORWARD));
                expect_ok(fbh_problem_ready(&p, plan, c->pass));
                fbh_problem_io(&p, c->pass, &io);
                *pointer(&io, c->id) = c->on == FBH_LSE ? io.lse : *pointer(&io, c->on);
                pointer(&io, c->id)->offset += c->bytes;
                expect_refused(c->pass == FBH_FORWARD ? fb_forward(plan, &io) : fb_backward(plan, &io),
                               FB_INVALID, c->name, c->other, "overlap");
                for (int id = FBH_OUT; id <= FBH_DV; id++)
                    for (place at = START; fbh_writes(&p, (fbh_id)id, c->pass) && next(&p.t[id], &at);)
                        expect(isnan(get(&p.t[id], at)), "%s was written before the refusal", p.t[id].name);
                fb_plan_destroy(plan);
            }
            fbh_problem_destroy(&p);
        }
}

/* lse inside out, the workspace on an input, an output that overlaps itself. */
static void br_72_lse_workspace_and_self(void **state) {
    (void)state;
    fbh_problem p;
    fb_io io;
    open_case(&p, "f32.b1h1k1.q9k9.d8");
    for (where w = EVERY_ROUTE; next_where(&w, &p.desc);) {
        fb_plan *plan = plan_at(&p, &w);
        expect_ok(fbh_problem_ready(&p, plan, FBH_FORWARD));
        fbh_problem_io(&p, FBH_FORWARD, &io);
        io.lse = io.out;
        io.lse.offset += 4;
        expect_refused(fb_forward(plan, &io), FB_INVALID, "io.out", "io.lse", "overlap");
        fbh_problem_io(&p, FBH_FORWARD, &io);
        io.workspace = io.k;
        expect_refused(fb_forward(plan, &io), FB_INVALID, "io.workspace", "overlaps io.", "of their own");
        fb_plan_destroy(plan);
    }
    p.desc.out = (fb_strides){0, 0, 7};
    expect_refused(fb_supported(&p.desc), FB_INVALID, "out", "7", "overlap");
    fbh_problem_destroy(&p);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(br_17_gradients_written_into_strided_views),
        cmocka_unit_test(br_20_bhld_confused_with_blhd),
        cmocka_unit_test(br_20_layout_is_an_argument_of_dlpack),
        cmocka_unit_test(br_18_k_and_v_with_different_strides),
        cmocka_unit_test(br_22_size_one_dimensions_with_odd_strides),
        cmocka_unit_test(br_22_last_stride),
        cmocka_unit_test(br_23_pointers_that_are_only_element_aligned),
        cmocka_unit_test(br_24_output_strides_do_not_follow_inputs),
        cmocka_unit_test(s2_offsets_beyond_32_bits),
        cmocka_unit_test(br_72_outputs_that_overlap),
        cmocka_unit_test(br_72_lse_workspace_and_self),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
