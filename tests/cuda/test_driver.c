/* NVIDIA's driver as the library meets it, with a mock in its place: not there, incomplete, without a device;
 * what each of its failures comes to, and that nothing of the caller's or the device's is left behind. */
#include "flashback.h"
#include "src/cuda/driver.h"
#include "support.h"
#include <errno.h>

/* ---- Opening ---- */

static void absent(void) {
    fb__driver d;
    expect(fb__driver_open(&d) == FB_NO_DEVICE);
    expect_words(fb_last_error(), "libcuda.so.1");
    expect_words(fb_last_error(), "driver package");
    fb_ref ref = {NULL, 0};
    expect(fb_alloc(&ref, FB_CUDA, 0, 16) == FB_NO_DEVICE);
    expect(!ref.data);
}

static void incomplete(void) {
    load_mock(MOCKS "/driver_incomplete/libcuda.so.1", "mock_cuda");
    fb__driver d;
    expect(fb__driver_open(&d) == FB_NO_DEVICE);
    expect_words(fb_last_error(), "cuGetErrorString");
}

static void no_device(void) {
    load_driver()->devices = 0;
    fb__driver d;
    expect(fb__driver_open(&d) == FB_NO_DEVICE);
    expect_words(fb_last_error(), "CUDA_ERROR_NO_DEVICE");
    expect_words(fb_last_error(), "no CUDA-capable device");
    expect_words(fb_last_error(), "CUDA_VISIBLE_DEVICES");
}

static void opened(void) {
    load_driver()->version = 12080;
    fb__driver d;
    for (int again = 0; again < 3; again++) {
        expect(fb__driver_open(&d) == FB_OK);
        expect(d.version == 12080);
    }
}

static void not_started(void) {
    mock_cuda_state *mock = load_driver();
    fb__driver d;
    mock->fail_at = 1;
    mock->fail_with = 3;
    expect(fb__driver_open(&d) == FB_NO_DEVICE);
    expect_words(fb_last_error(), "cuInit failed: CUDA_ERROR_NOT_INITIALIZED (3), initialization error");
    expect_words(fb_last_error(), "fork");
    mock->fail_at = mock->calls + 2;
    expect(fb__driver_open(&d) == FB_DEVICE);
    expect_words(fb_last_error(), "cuDriverGetVersion failed");
}

static void test_absent(void **state) {
    (void)state;
    if (is_installed("libcuda.so.1"))
        skip();
    in_child(absent);
}

static void test_open(void **state) {
    (void)state;
    in_child(incomplete);
    in_child(no_device);
    in_child(opened);
    in_child(not_started);
}

/* ---- Results, devices ---- */

static void results(void) {
    load_driver();
    fb__driver d;
    expect(fb__driver_open(&d) == FB_OK);
    expect(fb__driver_check(&d, 0, "cuCall") == FB_OK);
    expect(fb__driver_check(&d, FB__CU_OUT_OF_MEMORY, "cuCall") == FB_MEMORY);
    expect_words(fb_last_error(), "cuCall failed: CUDA_ERROR_OUT_OF_MEMORY (2), out of memory");
    expect(fb__driver_check(&d, FB__CU_ILLEGAL_ADDRESS, "cuCall") == FB_DEVICE);
    expect_words(fb_last_error(), "an earlier call");
    expect(fb__driver_check(&d, 12345, "cuCall") == FB_DEVICE);
    expect_words(fb_last_error(), "without a name (12345), no description");
}

static void numbers(void) {
    mock_cuda_state *mock = load_driver();
    mock->devices = 2;
    mock->capability = 86;
    fb__driver d;
    fb__gpu gpu;
    expect(fb__driver_open(&d) == FB_OK);
    expect(fb__driver_gpu(&d, 1, &gpu) == FB_OK);
    expect(gpu.ordinal == 1 && gpu.device == 1 && gpu.cc == 86 && gpu.sms == 132 && gpu.warp == 32);
    expect(gpu.smem_block == 48 << 10 && gpu.smem_block_optin == 99 << 10 && gpu.smem_sm == 100 << 10);
    expect(gpu.l2_bytes == 50 << 20 && gpu.registers_sm == 65536 && gpu.threads_sm == 2048);
    expect(gpu.memory == (uint64_t)80 << 30 && strcmp(gpu.name, "Mock GPU 8.6") == 0);
    expect(fb__driver_gpu(&d, 2, &gpu) == FB_NO_DEVICE);
    expect_words(fb_last_error(), "desc.index is 2, but there are 2 CUDA devices: it must be 0 to 1");
    mock->devices = 1;
    expect(fb__driver_gpu(&d, -1, &gpu) == FB_NO_DEVICE);
    expect_words(fb_last_error(), "desc.index is -1, but there is 1 CUDA device: it must be 0");
    for (long n = 1;; n++) {
        mock->failed = NULL;
        mock->fail_at = mock->calls + n;
        mock->fail_with = FB__CU_ILLEGAL_ADDRESS;
        fb_status status = fb__driver_gpu(&d, 0, &gpu);
        if (!mock->failed) {
            expect(status == FB_OK && n > 10);
            break;
        }
        expect(status == FB_DEVICE);
        expect_words(fb_last_error(), mock->failed);
    }
}

static void test_results(void **state) {
    (void)state;
    in_child(results);
    in_child(numbers);
}

/* ---- The guard ---- */

static void guard(void) {
    mock_cuda_state *mock = load_driver();
    mock->devices = 2;
    fb__driver d;
    void *mine = NULL, *other = NULL, *now = NULL;
    fb__guard g;
    expect(fb__driver_open(&d) == FB_OK);
    expect(d.cuDevicePrimaryCtxRetain(&mine, 1) == 0 && d.cuDevicePrimaryCtxRetain(&other, 0) == 0);
    /* Without a context of the caller's, with another one, with the same. */
    for (int round = 0; round < 3; round++) {
        void *before = round == 0 ? NULL : mine, *inside = round == 2 ? mine : other;
        if (round == 1)
            expect(d.cuCtxPushCurrent(mine) == 0);
        expect(fb__guard_enter(&d, inside, &g) == FB_OK);
        expect(g.pushed == (round != 2));
        expect(d.cuCtxGetCurrent(&now) == 0 && now == inside);
        expect(fb__guard_leave(&d, &g, FB_OK) == FB_OK);
        expect(d.cuCtxGetCurrent(&now) == 0 && now == before);
    }
    /* A failure that is under way keeps its status and its sentence; one in leaving has its own. */
    expect(fb__guard_enter(&d, other, &g) == FB_OK);
    mock->fail_at = mock->calls + 1;
    mock->fail_with = FB__CU_ILLEGAL_ADDRESS;
    fb_status status = fb__error(FB_MEMORY, "first");
    expect(fb__guard_leave(&d, &g, status) == FB_MEMORY && strcmp(fb_last_error(), "first") == 0);
    mock->fail_at = mock->calls + 1;
    expect(fb__guard_leave(&d, &g, FB_OK) == FB_DEVICE);
    expect_words(fb_last_error(), "cuCtxPopCurrent");
    expect(fb__guard_leave(&d, &g, FB_OK) == FB_OK && mock->depth == 1);
    for (int n = 1; n <= 2; n++) {
        mock->fail_at = mock->calls + n;
        expect(fb__guard_enter(&d, other, &g) == FB_DEVICE && mock->depth == 1);
    }
    expect(!mock->strange);
}

static void test_guard(void **state) {
    (void)state;
    in_child(guard);
}

/* ---- Memory ---- */

static void memory(void) {
    mock_cuda_state *mock = load_driver();
    fb_ref ref = {NULL, 0}, empty = {NULL, 0};
    int data[4] = {1, 2, 3, 4}, back[4] = {0};
    errno = 77;
    expect(fb_alloc(&ref, FB_CUDA, 0, sizeof data) == FB_OK && ref.data && ref.offset == 0);
    expect(mock->retains == 1 && mock->memories == 1 && mock->depth == 0);
    expect(fb_write(ref, data, sizeof data, FB_CUDA, 0) == FB_OK);
    expect(fb_read(back, ref, sizeof data, FB_CUDA, 0) == FB_OK && memcmp(back, data, sizeof data) == 0);
    fb_ref second = {ref.data, 4};
    expect(fb_write(second, data, 12, FB_CUDA, 0) == FB_OK);
    expect(fb_read(back, (fb_ref){ref.data, 8}, 8, FB_CUDA, 0) == FB_OK && back[0] == 2 && back[1] == 3);
    expect(fb_sync(FB_CUDA, 0, NULL) == FB_OK && fb_sync(FB_CUDA, 0, &ref) == FB_OK);
    expect(fb_alloc(&empty, FB_CUDA, 0, 0) == FB_OK && empty.data && mock->retains == 2);
    expect(fb_write(empty, NULL, 0, FB_CUDA, 0) == FB_OK && fb_read(NULL, empty, 0, FB_CUDA, 0) == FB_OK);
    expect(fb_free(&empty, FB_CUDA, 0) == FB_OK && !empty.data && fb_free(&empty, FB_CUDA, 0) == FB_OK);
    expect(fb_free(&ref, FB_CUDA, 0) == FB_OK && !ref.data);
    expect(errno == 77);
    expect(!mock->retains && !mock->memories && !mock->depth && !mock->strange);
}

static void memory_refusals(void) {
    mock_cuda_state *mock = load_driver();
    fb_ref ref = {NULL, 0};
    expect(fb_alloc(&ref, FB_CUDA, 1, 16) == FB_NO_DEVICE && !ref.data);
    expect_words(fb_last_error(), "index is 1, but there is 1 CUDA device");
    expect(fb_alloc(&ref, FB_CUDA, 0, SIZE_MAX) == FB_MEMORY && !ref.data);
    expect_words(fb_last_error(), "no memory for 18446744073709551615 bytes on CUDA device 0");
    expect(fb_sync(FB_CUDA, -1, NULL) == FB_NO_DEVICE);
    /* What is no allocation is refused and kept. */
    int host = 0;
    ref.data = &host;
    expect(fb_free(&ref, FB_CUDA, 0) == FB_DEVICE && ref.data == &host);
    expect_words(fb_last_error(), "cuMemFree failed: CUDA_ERROR_INVALID_VALUE");
    expect(!mock->retains && !mock->depth && !mock->strange);
}

/* The verbs, for the failure of each call that they make. Each leaves in *ref what it should. */
static fb_status do_alloc(fb_ref *ref) { return fb_alloc(ref, FB_CUDA, 0, 64); }

static fb_status do_free(fb_ref *ref) { return fb_free(ref, FB_CUDA, 0); }

static fb_status do_write(fb_ref *ref) {
    const int data[4] = {1, 2, 3, 4};
    return fb_write(*ref, data, sizeof data, FB_CUDA, 0);
}

static fb_status do_read(fb_ref *ref) {
    int data[4];
    return fb_read(data, *ref, sizeof data, FB_CUDA, 0);
}

static fb_status do_sync(fb_ref *ref) {
    (void)ref;
    return fb_sync(FB_CUDA, 0, NULL);
}

static fb_status do_sync_stream(fb_ref *ref) { return fb_sync(FB_CUDA, 0, ref); }

/* One call of a verb with its n-th call of the driver failing; false when it makes fewer. The caller's
 * context is another device's, and current before and after. */
static bool with_failure(mock_cuda_state *mock, fb_status (*verb)(fb_ref *), long n, int result) {
    fb__driver d;
    fb_ref ref = {NULL, 0};
    void *mine = NULL, *now = NULL;
    expect(fb__driver_open(&d) == FB_OK);
    expect(d.cuDevicePrimaryCtxRetain(&mine, 1) == 0 && d.cuCtxPushCurrent(mine) == 0);
    if (verb != do_alloc)
        expect(fb_alloc(&ref, FB_CUDA, 0, 64) == FB_OK);
    fb__error_clear();
    mock->failed = NULL;
    mock->fail_with = result;
    mock->fail_at = mock->calls + n;
    errno = 77;
    fb_status status = verb(&ref);
    const char *failed = mock->failed;
    mock->fail_at = 0;
    expect(errno == 77);
    if (failed) {
        expect(status == FB_DEVICE || status == FB_NO_DEVICE || (status == FB_MEMORY && result == 2));
        expect_words(fb_last_error(), strcmp(failed, "cuMemAlloc") == 0 && result == 2 ? "64 bytes" : failed);
        expect(verb != do_alloc || !ref.data);
        if (strcmp(failed, "cuCtxPopCurrent") == 0) /* what nobody else could do either */
            expect(d.cuCtxPopCurrent(&now) == 0);
        if (strcmp(failed, "cuDevicePrimaryCtxRelease") == 0 && result == FB__CU_INVALID_VALUE)
            expect(d.cuDevicePrimaryCtxRelease(0) == 0);
    } else
        expect(status == FB_OK);
    expect(d.cuCtxGetCurrent(&now) == 0 && now == mine);
    expect(fb_free(&ref, FB_CUDA, 0) == FB_OK);
    expect(d.cuCtxPopCurrent(&now) == 0 && d.cuDevicePrimaryCtxRelease(1) == 0);
    expect(!mock->memories && !mock->retains && !mock->depth && !mock->strange);
    return failed != NULL;
}

static void memory_failures(void) {
    static fb_status (*const verbs[])(fb_ref *) = {do_alloc, do_free, do_write,
                                                   do_read,  do_sync, do_sync_stream};
    static const int failures[] = {FB__CU_INVALID_VALUE, FB__CU_OUT_OF_MEMORY, FB__CU_ILLEGAL_ADDRESS, 12345};
    mock_cuda_state *mock = load_driver();
    mock->devices = 2;
    for (size_t v = 0; v < sizeof verbs / sizeof *verbs; v++)
        for (size_t f = 0; f < sizeof failures / sizeof *failures; f++) {
            long n = 1;
            while (with_failure(mock, verbs[v], n, failures[f]))
                n++;
            expect(
                n >
                8); /* of init, version, count, get, retain, current, push, the call itself, pop, release */
        }
}

static void test_memory(void **state) {
    (void)state;
    in_child(memory);
    in_child(memory_refusals);
    in_child(memory_failures);
}

int main(void) {
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_absent), cmocka_unit_test(test_open),
                                       cmocka_unit_test(test_results), cmocka_unit_test(test_guard),
                                       cmocka_unit_test(test_memory)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
