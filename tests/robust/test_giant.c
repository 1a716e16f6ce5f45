/* R16: 64-bit offsets throughout. Sparse giants, of which a few pages exist, put rows, heads and batches past
 * 2^31 elements and 2^32 bytes; batches are more than 65,535, keys lie beyond position 65,535, positions
 * beyond 2^40. The results are those of compact tensors, bit for bit. */
#include "robust.h"

#include <sys/mman.h>

/* ---- Giants -------------------------------------------------------------------------------------------- */

enum { BATCH, HEAD, ROW };

static const fbh_id tensors[] = {FBH_Q,  FBH_K,  FBH_V,    FBH_OUT,   FBH_DOUT, FBH_DQ,
                                 FBH_DK, FBH_DV, FBH_BIAS, FBH_DBIAS, FBH_MASK};
enum { TENSORS = sizeof tensors / sizeof *tensors };

static fb_strides *described(fb_desc *d, fbh_id id) {
    fb_strides *const table[FBH_COUNT] = {
        [FBH_Q] = &d->q,       [FBH_K] = &d->k,         [FBH_V] = &d->v,       [FBH_OUT] = &d->out,
        [FBH_DOUT] = &d->dout, [FBH_DQ] = &d->dq,       [FBH_DK] = &d->dk,     [FBH_DV] = &d->dv,
        [FBH_BIAS] = &d->bias, [FBH_DBIAS] = &d->dbias, [FBH_MASK] = &d->mask,
    };
    return table[id];
}

/* Stretches one dimension of a tensor over pages that do not exist until they are touched. The buffer says
 * that it has no bytes, so that nobody poisons all of it. */
static void stretch(fbh_problem *p, fbh_id id, int dimension, fbh_buffer *kept) {
    fbh_tensor *t = &p->t[id];
    const int64_t size = (int64_t)fbh_size(t->type), giant = (INT64_C(1) << (size == 1 ? 32 : 31)) + 24;
    const int64_t count[] = {t->batch, t->heads, t->rows};
    int64_t *const stride[] = {&t->stride.batch, &t->stride.head, &t->stride.row};
    *stride[dimension] = giant;
    *described(&p->desc, id) = t->stride;
    *kept = *t->buffer;
    t->buffer->map_bytes = (size_t)(((count[dimension] - 1) * giant + 4096) * size);
    t->buffer->map = mmap(NULL, t->buffer->map_bytes, PROT_READ | PROT_WRITE,
                          MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (t->buffer->map == MAP_FAILED)
        fail_msg("no %zu bytes of address space", t->buffer->map_bytes);
    t->buffer->data = t->buffer->map;
    t->buffer->bytes = 0;
    for (int64_t b = 0; b < t->batch; b++)
        for (int64_t h = 0; h < t->heads; h++)
            for (int64_t i = 0; i < t->rows; i++)
                memset(fbh_at(t, b, h, i, 0), 0xFF, (size_t)(t->cols * size));
}

static void shrink(fbh_problem *p, fbh_id id, const fbh_buffer *kept) {
    munmap(p->t[id].buffer->map, p->t[id].buffer->map_bytes);
    *p->t[id].buffer = *kept;
}

static void check_giants(const fbh_case *c) {
    for (int route = FB_FUSED; route <= FB_REFERENCE; route++) {
        const uint64_t expected = run_case(c, (fb_route)route, 0, FBH_GUARD_NONE);
        for (int n = 0; n < TENSORS; n++)
            for (int dimension = BATCH; dimension <= ROW; dimension++) {
                fbh_problem p;
                fbh_buffer kept;
                open_case(&p, c, (fb_route)route, FBH_GUARD_NONE);
                stretch(&p, tensors[n], dimension, &kept);
                fbh_problem_fill(&p, 1);
                if (run(&p) != expected)
                    fail_msg("%s, %s: with a giant stride of %s (dimension %d) bits differ", c->name,
                             fb_route_name((fb_route)route), p.t[tensors[n]].name, dimension);
                shrink(&p, tensors[n], &kept);
                fbh_problem_destroy(&p);
            }
    }
}

static void test_giants(void **state) {
    (void)state;
    const fbh_case cases[] = {case_of("f32", "b2h4k2.q3k5.d8.biasbhqk.dbias.maskbhqk"),
                              case_of("bf16", "b2h4k2.q3k5.d9v4.biasbhqk.dbias.maskbhqk"),
                              case_of("f64", "b2h2k2.q2k3.d3.biasbhqk.dbias.maskbhqk.acc")};
    for (int n = 0; n < 3; n++)
        check_giants(&cases[n]);
}

/* All tensors at once, by batch. */
static void test_all_giants(void **state) {
    (void)state;
    const fbh_case c = case_of("f16", "b2h4k2.q3k5.d8.biasbhqk.dbias.maskbhqk.causal");
    for (int route = FB_FUSED; route <= FB_REFERENCE; route++) {
        fbh_problem p;
        fbh_buffer kept[TENSORS];
        open_case(&p, &c, (fb_route)route, FBH_GUARD_NONE);
        for (int n = 0; n < TENSORS; n++)
            stretch(&p, tensors[n], BATCH, &kept[n]);
        fbh_problem_fill(&p, 1);
        assert_int_equal(run(&p), run_case(&c, (fb_route)route, 0, FBH_GUARD_NONE));
        for (int n = 0; n < TENSORS; n++)
            shrink(&p, tensors[n], &kept[n]);
        fbh_problem_destroy(&p);
    }
}

/* ---- Many and far -------------------------------------------------------------------------------------- */

/* Sequences from all over a batch of 70,000 against each of them alone. */
static void check_batch(const fbh_case *c) {
    static const int64_t some[] = {0, 1, 65534, 65535, 65536, 65537, 69999};
    for (int route = FB_FUSED; route <= FB_REFERENCE; route++) {
        fbh_problem p;
        open_case(&p, c, (fb_route)route, FBH_GUARD_NONE);
        run(&p);
        for (size_t n = 0; n < sizeof some / sizeof *some; n++) {
            fbh_problem one;
            const fbh_case entry = alone(&p, some[n]);
            open_case(&one, &entry, (fb_route)route, FBH_GUARD_NONE);
            copy_entry(&p, &one, some[n], 0);
            run(&one);
            check_entry(&p, &one, some[n], 0);
            fbh_problem_destroy(&one);
        }
        fbh_problem_destroy(&p);
    }
}

static void test_batch(void **state) {
    (void)state;
    const fbh_case padded = case_of("f32", "b70000h2k1.q1k3.d2.causal");
    const fbh_case packed = case_of("bf16", "b70000h1k1.q3k4.d2.packed.causal");
    check_batch(&padded);
    check_batch(&packed);
}

/* 65,536 keys that a window hides, then 200 that it shows: those alone give the same bits. One task, because
 * how keys are cut may depend on how many there are. */
static void check_far_keys(const char *dtype, const char *far_name, const char *near_name) {
    enum { HIDDEN = 1 << 16 };
    const fbh_case far_case = case_of(dtype, far_name), near_case = case_of(dtype, near_name);
    for (int route = FB_FUSED; route <= FB_REFERENCE; route++) {
        fbh_problem far, near;
        open_case(&far, &far_case, (fb_route)route, FBH_GUARD_NONE);
        open_case(&near, &near_case, (fb_route)route, FBH_GUARD_NONE);
        far.desc.tasks = near.desc.tasks = 1;
        copy_entry(&far, &near, 0, HIDDEN);
        run(&far);
        run(&near);
        check_entry(&far, &near, 0, HIDDEN);
        fbh_problem_destroy(&far);
        fbh_problem_destroy(&near);
    }
}

static void test_far_keys(void **state) {
    (void)state;
    check_far_keys("f32", "b1h2k1.q7k65736.d8.causal.left100", "b1h2k1.q7k200.d8.causal.left100");
    check_far_keys("f16", "b1h2k1.q5k65736.d8.right2.left150", "b1h2k1.q5k200.d8.right2.left150");
}

/* A window that moves along with the positions allows the same cells. */
static uint64_t moved(int64_t far, bool ahead, fb_route route) {
    const fbh_case c = case_of("f32", ahead ? "b1h2k1.q8k70.d8.left3" : "b1h2k1.q8k70.d8.right3");
    fbh_problem p;
    open_case(&p, &c, route, FBH_GUARD_NONE);
    p.desc.position_offset = ahead ? far : -far;
    p.desc.window = ahead ? fb_window_band(far + 3, FB_UNBOUNDED) : fb_window_band(FB_UNBOUNDED, far + 3);
    const uint64_t digest = run(&p);
    fbh_problem_destroy(&p);
    return digest;
}

static void test_far_positions(void **state) {
    (void)state;
    const int64_t far[] = {1, 1 << 20, INT64_C(1) << 33, INT64_C(1) << 60};
    for (int route = FB_FUSED; route <= FB_REFERENCE; route++) {
        const uint64_t ahead = moved(0, true, (fb_route)route), behind = moved(0, false, (fb_route)route);
        assert_true(ahead != behind);
        for (int n = 0; n < 4; n++) {
            assert_int_equal(moved(far[n], true, (fb_route)route), ahead);
            assert_int_equal(moved(far[n], false, (fb_route)route), behind);
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_giants),   cmocka_unit_test(test_all_giants),    cmocka_unit_test(test_batch),
        cmocka_unit_test(test_far_keys), cmocka_unit_test(test_far_positions),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
