/* Blocking calls and programs on helper threads. */
#include <errno.h>
#include <pthread.h>
#include <unistd.h>
#include "base/own.h"
#include "rt/offload.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "test.h"

struct call {
    pthread_t thread;
    struct co *co;
    unsigned sleep_us;
};

static int call_it(void *arg)
{
    struct call *c = arg;

    c->thread = pthread_self();
    c->co = co_self();
    if (c->sleep_us)
        usleep(c->sleep_us);
    return 17;
}

CO_TEST(offload_runs_on_another_thread)
{
    struct call c = {.co = co_self()};

    CHECK_EQ(offload(call_it, &c), 17);
    CHECK(!pthread_equal(c.thread, pthread_self()));
    CHECK(c.co == NULL);
}

static SUSPENDS int offload_sleep(void *arg)
{
    struct call c = {.sleep_us = 100000};

    CHECK_EQ(offload(call_it, &c), 17);
    return 0;
}

/* Twenty calls of 100 ms side by side, and the reactor goes on meanwhile. */
CO_TEST(offload_calls_run_at_the_same_time)
{
    uint64_t start = reactor_now();
    struct co_group g;
    unsigned ticks = 0;

    co_group_init(&g);
    for (unsigned i = 0; i < 20; i++)
        co_group_spawn(&g, offload_sleep, NULL);
    while (g.running > 0) {
        timer_sleep(NSEC_PER_MSEC);
        ticks++;
    }
    CHECK_EQ(co_group_wait(&g), 0);
    CHECK(reactor_now() - start < 20 * 100 * NSEC_PER_MSEC);
    CHECK(ticks >= 3);
}

CO_TEST(offload_more_calls_than_threads)
{
    struct co_group g;

    co_group_init(&g);
    for (unsigned i = 0; i < 100; i++)
        co_group_spawn(&g, offload_sleep, NULL);
    CHECK_EQ(co_group_wait(&g), 0);
}

CO_TEST(exec_returns_status_and_output)
{
    const char *argv[] = {"sh", "-c", "echo out; echo err >&2; exit 5", NULL};
    char *out = NULL, *err = NULL;

    CHECK_EQ(offload_exec(argv, &out, &err, 1000), 5);
    CHECK_STR(out, "out\n");
    CHECK_STR(err, "err\n");
    free(out);
    free(err);
    CHECK_EQ(offload_exec(argv, NULL, NULL, 0), 5);
}

CO_TEST(exec_bounds_the_output)
{
    const char *argv[] = {"sh", "-c", "head -c 1000000 /dev/zero | tr '\\0' x", NULL};
    char *out = NULL;

    CHECK_EQ(offload_exec(argv, &out, NULL, 100), 0);
    CHECK_EQ(strlen(out), 100);
    free(out);
}

/* The build's processor is not the one whose programs run here. */
static SUSPENDS bool is_emulated(void)
{
    const char *argv[] = {"od", "-An", "-tx1", "-j18", "-N1", "/proc/self/exe", NULL};
    char *out = NULL;
    bool differs = false;

#if defined(__aarch64__)
    CHECK_EQ(offload_exec(argv, &out, NULL, 100), 0);
    differs = strcmp(out, " b7\n") != 0; /* e_machine of AArch64 */
#else
    (void)argv;
#endif
    free(out);
    return differs;
}

CO_TEST(exec_reports_signals_and_missing_programs)
{
    const char *argv[] = {"sh", "-c", "kill -TERM $$", NULL};
    const char *none[] = {"/does/not/exist", NULL};
    char *out = NULL;

    CHECK_EQ(offload_exec(argv, NULL, NULL, 0), 128 + 15);
    int rc = offload_exec(none, &out, NULL, 10);
    /* Under user emulation vfork() is fork(): then a failed exec cannot be told from exit 127. */
    CHECK(rc == -ENOENT || (rc == 127 && is_emulated()));
    CHECK(rc >= 0 || out == NULL);
    free(out);
}

CO_TEST(exec_starts_with_no_signal_blocked)
{
    const char *argv[] = {"sh", "-c", "grep SigBlk /proc/self/status", NULL};
    char *out = NULL;

    CHECK_EQ(offload_exec(argv, &out, NULL, 100), 0);
    CHECK_STR(out, "SigBlk:\t0000000000000000\n");
    free(out);
}

/* ---- time limits and environment ---- */

static SUSPENDS int exec_ms(const char *script, const struct exec_opts *opts, char **ret_out,
                            uint64_t *ret_ms)
{
    const char *argv[] = {"sh", "-c", script, NULL};
    uint64_t start = reactor_now();
    int rc = offload_exec_with(argv, opts, ret_out, NULL, 1000);

    *ret_ms = (reactor_now() - start) / NSEC_PER_MSEC;
    return rc;
}

CO_TEST(exec_ends_a_program_at_its_limit)
{
    const struct exec_opts opts = {.limit_ms = 100, .grace_ms = 100, .own_group = true};
    char *out = NULL;
    uint64_t ms;

    CHECK_EQ(exec_ms("echo begun; sleep 30", &opts, &out, &ms), -ETIMEDOUT);
    CHECK_STR(out, "begun\n");
    CHECK(ms >= 100 && ms < 5000);
    free(out);
    /* one that puts SIGTERM off and finishes has done its work */
    const struct exec_opts patient = {.limit_ms = 100, .grace_ms = 10000, .own_group = true};
    CHECK_EQ(exec_ms("trap '' TERM; sleep 0.3; echo done", &patient, &out, &ms), 0);
    CHECK_STR(out, "done\n");
    free(out);
    /* one that never ends by itself, its output closed or not */
    CHECK_EQ(exec_ms("trap '' TERM; while :; do sleep 1; done", &opts, &out, &ms), -ETIMEDOUT);
    CHECK(ms >= 200 && ms < 5000);
    free(out);
    CHECK_EQ(exec_ms("exec >&- 2>&-; sleep 30", &opts, &out, &ms), -ETIMEDOUT);
    CHECK(ms < 5000);
    free(out);
    CHECK_EQ(exec_ms("exit 3", &opts, &out, &ms), 3);
    free(out);
}

CO_TEST(exec_does_not_wait_for_what_a_program_leaves)
{
    const struct exec_opts opts = {.limit_ms = 200, .grace_ms = 100};
    char *out = NULL;
    uint64_t ms;

    CHECK_EQ(exec_ms("sleep 5 & echo done", &opts, &out, &ms), 0);
    CHECK_STR(out, "done\n");
    CHECK(ms < 3000);
    free(out);
}

CO_TEST(exec_puts_variables_over_the_environment)
{
    const char *const env[] = {"LC_ALL=C", "VARVE_TEST_X=new", NULL};
    const struct exec_opts opts = {.env = env};
    char *out = NULL;
    uint64_t ms;

    setenv("VARVE_TEST_X", "old", 1);
    setenv("VARVE_TEST_Y", "kept", 1);
    CHECK_EQ(exec_ms("echo $LC_ALL $VARVE_TEST_X $VARVE_TEST_Y", &opts, &out, &ms), 0);
    CHECK_STR(out, "C new kept\n");
    free(out);
    CHECK_STR(getenv("VARVE_TEST_X"), "old");
}
