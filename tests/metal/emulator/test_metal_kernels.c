/* The kernels through the whole library, on the emulator: lengths beside tiles, offsets beside tiles, every
 * mask; the same bits whatever the order in which threads run. Judged by the harness, as `flashback check`
 * is. */
#include "harness/harness.h"
#include "tests/child.h"

/* Runs a case by its name; the digest of its outputs. */
static uint64_t run(const char *name, fb_route route, const char *schedule) {
    fbh_case c;
    fbh_result r;
    char error[512];
    const fbh_options options = {.device = FB_METAL, .route = route};
    if (!fbh_case_parse(&c, name, error, sizeof error))
        fail_msg("%s: %s", name, error);
    setenv("MOCK_SCHEDULE", schedule, 1);
    fbh_case_run(&c, 7, &options, &r);
    if (r.verdict != FBH_PASS)
        fail_msg("%s, schedule %s: %s", name, schedule, r.message);
    return r.digest;
}

/* Which thread is first must not matter: a barrier is missing where it does. Rows of every kind: one and
 * several slabs of columns, one and two buffers, all options, NaN that must stay hidden, few queries with cut
 * keys. */
static void test_schedules_have_the_same_bits(void **state) {
    (void)state;
    static const struct {
        const char *name;
        fb_route route;
    } cases[] = {
        {"f16.b1h2k1.q70k83.d64.causal", FB_FUSED},
        {"f16.b1h2k1.q33k50.d128.causal", FB_FUSED},
        {"bf16.b1h2k1.q33k41.d256.causal", FB_FUSED},
        {"f32.b1h1k1.q19k21.d128", FB_FUSED},
        {"f32.b1h1k1.q11k17.d320v256", FB_FUSED},
        {"f16.b1h1k1.q11k17.d512.causal", FB_FUSED},
        {"f32.b2h4k2.q70k83.d40.causal.left50.softcap15.biasbhqk.dbias.mask11qk.block32x16b.sinks.dsinks."
         "lensk."
         "dlse",
         FB_FUSED},
        {"bf16.b5h2k1.q70k70.d16.packed.causal", FB_FUSED},
        {"f16.b2h4k2.q35k40.d16.bias1h1k.dbias", FB_FUSED},
        {"f16.b1h8k2.q5k600.d16.causal", FB_VECTOR},
        {"f32.b1h4k1.q3k200.d80.sinks.dsinks", FB_VECTOR},
    };
    for (size_t n = 0; n < sizeof cases / sizeof *cases; n++) {
        const uint64_t first = run(cases[n].name, cases[n].route, "0");
        assert_true(first == run(cases[n].name, cases[n].route, "1"));
        assert_true(first == run(cases[n].name, cases[n].route, "2"));
    }
    assert_true(run(cases[0].name, FB_FUSED, "0") != run(cases[1].name, FB_FUSED, "0"));
}

/* ml-explore/mlx#3241 masks the last tiles of keys only, however far the diagonal is from their edge: its dQ
 * is wrong where the offset is no multiple of the tile and the number of keys is, and right where both or
 * neither are. */
static void test_dq_of_causal_offsets_beside_the_tile(void **state) {
    (void)state;
    static const int queries[] = {9, 17, 31, 33, 47, 63, 65, 79}, keys[] = {32, 64, 96};
    char name[64];
    for (size_t q = 0; q < sizeof queries / sizeof *queries; q++)
        for (size_t k = 0; k < sizeof keys / sizeof *keys; k++) {
            snprintf(name, sizeof name, "f16.b1h1k1.q%dk%d.d64.causal", queries[q], keys[k]);
            run(name, FB_FUSED, "0");
            snprintf(name, sizeof name, "bf16.b1h1k1.q%dk%d.d128.causal", queries[q], keys[k] / 2);
            run(name, FB_FUSED, "0");
        }
    run("f32.b1h1k1.q63k64.d64.causal", FB_FUSED, "0");
}

/* (whole tiles, tiles that are cut) of queries and of keys, times offsets on and beside tiles, times masks.
 */
static void test_edges_of_tiles(void **state) {
    (void)state;
    static const int queries[] = {64, 61}, keys[] = {64, 75};
    static const char *const offsets[] = {"", ".offset5", ".offset-9", ".offset32"};
    static const char *const masks[] = {"",
                                        ".causal",
                                        ".causal.left17",
                                        ".left3.right20",
                                        ".causal.topleft",
                                        ".mask11qk",
                                        ".block16x32.causal",
                                        ".bias11qk.dbias.right7",
                                        ".lensq.lensk"};
    static const char *const types[] = {"f16", "bf16", "f32"};
    const bool all = getenv("TEST_ALL") != NULL;
    char name[128];
    for (int type = 0; type < 3; type++)
        for (int lengths = 0; lengths < 4; lengths++)
            for (int offset = 0; offset < 4; offset++)
                for (size_t mask = 0; mask < sizeof masks / sizeof *masks; mask++) {
                    const int every = all ? 1 : type ? 5 : 2;
                    if ((lengths + offset + (int)mask) % every != 0)
                        continue;
                    const char *batch = strstr(masks[mask], "lens") ? "b2" : "b1";
                    snprintf(name, sizeof name, "%s.%sh2k1.q%dk%d.d16%s%s", types[type], batch,
                             queries[lengths % 2], keys[lengths / 2], offsets[offset], masks[mask]);
                    run(name, FB_FUSED, "0");
                }
}

/* All rows of the table that fit, by FLASHBACK_TILES: a kernel may be given any of them. Each is a
 * compilation, so the first few of them only unless TEST_ALL is set. */
static void test_all_rows(void **state) {
    (void)state;
    const bool all = getenv("TEST_ALL") != NULL;
    static const char *const kernels[] = {"forward", "dq", "dkdv"};
    static const char *const cases[] = {"f16.b1h2k1.q35k45.d64.causal", "bf16.b1h2k1.q35k45.d128.causal",
                                        "f32.b1h2k1.q19k21.d64.causal"};
    int rows = 0;
    for (size_t k = 0; k < 3; k++)
        for (size_t n = 0; n < 3; n++)
            for (int skip = 1; all || skip <= (n == 2 ? 1 : 3); skip++, rows++) {
                fbh_case c;
                fbh_result r;
                char error[512], tiles[32];
                const fbh_options options = {.device = FB_METAL, .route = FB_FUSED};
                snprintf(tiles, sizeof tiles, "%s=%d", kernels[k], skip);
                setenv("FLASHBACK_TILES", tiles, 1);
                assert_true(fbh_case_parse(&c, cases[n], error, sizeof error));
                fbh_case_run(&c, 7, &options, &r);
                unsetenv("FLASHBACK_TILES");
                if (r.verdict == FBH_UNSUPPORTED)
                    break;
                if (r.verdict != FBH_PASS)
                    fail_msg("%s, %s: %s", cases[n], tiles, r.message);
            }
    assert_true(rows >= (all ? 40 : 15));
}

int main(void) {
    load_mock(MOCKS "/metal_model/libobjc.A.dylib", "objc_msgSend");
    load_mock(MOCKS "/metal_model/Metal", "MTLCopyAllDevices");
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_schedules_have_the_same_bits),
        cmocka_unit_test(test_dq_of_causal_offsets_beside_the_tile),
        cmocka_unit_test(test_edges_of_tiles),
        cmocka_unit_test(test_all_rows),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
