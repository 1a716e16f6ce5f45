/* Many at once, and some of them killed: one compilation of each key, and nobody waits for the dead. */
#include "jit.h"
#include "src/jit/lock.h"
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

enum { MANY = 6, LONG = 60000 };

/* What processes share. */
static compiler *shared;

static int setup(void **state) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    memset(shared, 0, sizeof *shared);
    return jit_setup(state);
}

static int teardown(void **state) {
    munmap(shared, sizeof *shared);
    return jit_teardown(state);
}

static bool get(void) {
    fb__jit_request r = request(shared);
    fb__jit_code code;
    bool right = fb__jit_get(&r, &code) == FB_OK && code.size > 7 && memcmp(code.at, "#define", 7) == 0;
    free(code.at);
    return right;
}

/* A process that does this and says whether it went well. */
static pid_t spawn(bool (*work)(void)) {
    pid_t child = fork();
    assert_true(child >= 0);
    if (child == 0)
        _exit(work() ? 0 : 1);
    return child;
}

static int status_of(pid_t child) {
    int status;
    assert_int_equal(waitpid(child, &status, 0), child);
    return status;
}

static void nap(long ms) { nanosleep(&(struct timespec){ms / 1000, ms % 1000 * 1000000}, NULL); }

static void test_processes(void **state) {
    (void)state;
    pid_t children[MANY];
    shared->sleep_ms = 50;
    for (int i = 0; i < MANY; i++)
        children[i] = spawn(get);
    for (int i = 0; i < MANY; i++)
        assert_int_equal(status_of(children[i]), 0);
    assert_int_equal(shared->calls, 1);
}

/* A compilation that never ends. */
static fb_status hang(void *context, const char *source, const char *name, void **code, size_t *size) {
    (void)source, (void)name, (void)code, (void)size;
    atomic_fetch_add(&((compiler *)context)->calls, 1);
    for (;;)
        pause();
    return FB_OK;
}

static bool get_hanging(void) {
    fb__jit_request r = request(shared);
    fb__jit_code code;
    r.compile = hang;
    return fb__jit_get(&r, &code) == FB_OK;
}

static void wait_for_calls(int calls) {
    while (shared->calls != calls)
        sched_yield();
}

static void test_killed(void **state) {
    (void)state;
    pid_t victim = spawn(get_hanging);
    wait_for_calls(1);
    assert_int_equal(kill(victim, SIGKILL), 0);
    assert_true(WIFSIGNALED(status_of(victim)));
    assert_true(get());
    assert_int_equal(shared->calls, 2);
    assert_true(get());
    assert_int_equal(shared->calls, 2);
}

/* The same, while others wait already: one of them compiles. */
static void test_killed_with_waiters(void **state) {
    (void)state;
    pid_t victim = spawn(get_hanging), waiters[MANY];
    wait_for_calls(1);
    for (int i = 0; i < MANY; i++)
        waiters[i] = spawn(get);
    nap(50); /* until they wait, on most machines */
    assert_int_equal(shared->calls, 1);
    assert_int_equal(kill(victim, SIGKILL), 0);
    assert_true(WIFSIGNALED(status_of(victim)));
    for (int i = 0; i < MANY; i++)
        assert_int_equal(status_of(waiters[i]), 0);
    assert_int_equal(shared->calls, 2);
}

static bool idle(void) {
    for (;;)
        pause();
    return true;
}

static bool get_lock(void) {
    int lock = fb__jit_lock(path("lock"), LONG);
    if (lock < 0)
        return false;
    fb__jit_unlock(lock, path("lock"));
    return true;
}

/* A child that was forked under the lock has its file too, and keeps nobody waiting. */
static void test_forked_under_lock(void **state) {
    (void)state;
    int lock = fb__jit_lock(path("lock"), LONG);
    assert_true(lock >= 0);
    assert_int_equal(fb__jit_lock(path("lock"), 0), -1);
    assert_int_equal(fb__jit_lock(path("lock"), 30), -1); /* time is up */
    pid_t waiter = spawn(get_lock), child = spawn(idle);
    nap(50);
    fb__jit_unlock(lock, path("lock"));
    assert_int_equal(status_of(waiter), 0);
    assert_int_equal(kill(child, SIGKILL), 0);
    status_of(child);
    assert_int_equal(access(path("lock"), F_OK), -1);
    assert_int_equal(fb__jit_lock(path("no/lock"), LONG), -1);
    put("other", "");
    assert_int_equal(symlink("other", path("lock")), 0);
    assert_int_equal(fb__jit_lock(path("lock"), LONG), -1);
}

/* Files of the lock come and go all the time, and never two are inside. */
static atomic_int inside, most;

static void *lock_often(void *unused) {
    char name[512];
    snprintf(name, sizeof name, "%s/lock", top);
    for (int i = 0; i < 100; i++) {
        int lock = fb__jit_lock(name, LONG);
        if (lock < 0)
            return NULL;
        int here = atomic_fetch_add(&inside, 1) + 1;
        if (here > most)
            most = here;
        sched_yield();
        atomic_fetch_sub(&inside, 1);
        fb__jit_unlock(lock, name);
    }
    return unused;
}

static void run_threads(void *(*work)(void *)) {
    pthread_t threads[MANY];
    for (int i = 0; i < MANY; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, work, &shared), 0);
    for (int i = 0; i < MANY; i++) {
        void *result;
        assert_int_equal(pthread_join(threads[i], &result), 0);
        assert_non_null(result);
    }
}

static void test_lock(void **state) {
    (void)state;
    run_threads(lock_often);
    assert_int_equal(inside, 0);
    assert_int_equal(most, 1);
}

static void *get_in_thread(void *unused) { return get() ? unused : NULL; }

static void test_threads(void **state) {
    (void)state;
    shared->sleep_ms = 50;
    run_threads(get_in_thread);
    assert_int_equal(shared->calls, 1);
}

/* Several kernels, room for one, and all at once: files are removed while others read them. */
static void *get_many(void *unused) {
    static const char *const archs[] = {"a", "b", "c"};
    for (int i = 0; i < 30; i++) {
        fb__jit_request r = request(shared);
        fb__jit_code code;
        r.arch = archs[i % 3];
        bool right = fb__jit_get(&r, &code) == FB_OK && code.size == shared->size;
        free(code.at);
        if (!right)
            return NULL;
    }
    return unused;
}

static void test_eviction(void **state) {
    (void)state;
    shared->size = 700000;
    setenv("FLASHBACK_CACHE_MB", "1", 1);
    run_threads(get_many);
    assert_true(shared->calls >= 3);
}

/* Threads come last: an emulator may not fork once it has had any. */
int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_processes, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed, setup, teardown),
        cmocka_unit_test_setup_teardown(test_killed_with_waiters, setup, teardown),
        cmocka_unit_test_setup_teardown(test_forked_under_lock, setup, teardown),
        cmocka_unit_test_setup_teardown(test_lock, setup, teardown),
        cmocka_unit_test_setup_teardown(test_threads, setup, teardown),
        cmocka_unit_test_setup_teardown(test_eviction, setup, teardown),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
