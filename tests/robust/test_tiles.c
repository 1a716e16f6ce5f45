/* AMX is asked for by plans that multiply with it, and by nothing else: Linux refuses small alternate signal
 * stacks to a process that may use tiles, and tiles to one that has such a stack. */
#include "robust.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { SMALL_STACK = 8192 }; /* SIGSTKSZ before it became a function */

static bool small_stack_allowed(void) {
    static char memory[SMALL_STACK];
    const stack_t small = {.ss_sp = memory, .ss_size = sizeof memory}, none = {.ss_flags = SS_DISABLE};
    const bool allowed = sigaltstack(&small, NULL) == 0;
    sigaltstack(&none, NULL);
    return allowed;
}

static fb_desc desc_of(fb_dtype dtype) {
    fb_desc d;
    fb_desc_init(&d, sizeof d);
    d.batch = d.heads_q = d.heads_kv = 1;
    d.len_q = d.len_k = d.head_dim = d.head_dim_v = 64;
    d.dtype = dtype;
    return d;
}

/* Permission is for ever, so each test runs in a process of its own. */
static void in_child(void (*test)(void)) {
    int status = 0;
    const pid_t child = fork();
    if (child == 0) {
        test();
        _exit(0);
    }
    assert_true(child > 0);
    assert_true(waitpid(child, &status, 0) == child);
    assert_int_equal(status, 0);
}

#define CHECK(x)                                                                                             \
    do {                                                                                                     \
        if (!(x)) {                                                                                          \
            fprintf(stderr, "line %d: %s\n", __LINE__, #x);                                                  \
            _exit(1);                                                                                        \
        }                                                                                                    \
    } while (0)

static void asks_for_nothing(void) {
    char text[8192];
    const fb_desc f32 = desc_of(FB_F32), bf16 = desc_of(FB_BF16);
    fb_plan *plan;
    CHECK(small_stack_allowed());
    fb_info(text, sizeof text);
    CHECK(fb_supported(&bf16) == FB_OK);
    CHECK(fb_plan_create(&plan, &f32) == FB_OK);
    fb_plan_destroy(plan);
    setenv("FLASHBACK_ISA", "avx512", 1);
    CHECK(fb_plan_create(&plan, &bf16) == FB_OK);
    fb_plan_destroy(plan);
    CHECK(small_stack_allowed());
}

/* A plan is made all the same, and says what it takes instead. */
static void is_refused(void) {
    static char memory[SMALL_STACK];
    const stack_t small = {.ss_sp = memory, .ss_size = sizeof memory};
    char text[8192];
    const fb_desc bf16 = desc_of(FB_BF16);
    fb_plan *plan;
    fb_info(text, sizeof text);
    const bool tiles = strstr(text, "cpu instruction sets: amx ") != NULL;
    CHECK(sigaltstack(&small, NULL) == 0);
    CHECK(fb_plan_create(&plan, &bf16) == FB_OK);
    fb_plan_explain(plan, text, sizeof text);
    CHECK(strstr(text, "kernels: cpu amx,") == NULL);
    CHECK(!tiles || strstr(text, "amx: passed over, the system does not permit tiles"));
    fb_plan_destroy(plan);
}

static void test_nothing_asked(void **state) {
    (void)state;
    in_child(asks_for_nothing);
}

static void test_refused(void **state) {
    (void)state;
    in_child(is_refused);
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_nothing_asked),
        cmocka_unit_test(test_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
