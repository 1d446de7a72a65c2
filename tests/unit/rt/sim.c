/* The simulator replays a seed exactly, differs between seeds, and finds lost wakes. */
#include <alloca.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/own.h"
#include "rt/offload.h"
#include "rt/reactor.h"
#include "rt/sim.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "test.h"

struct history {
    uint64_t hash;
    unsigned order[8], nr;
};
struct actor {
    struct history *h;
    unsigned index;
};

static SUSPENDS int act(void *arg)
{
    struct actor *a = arg;

    for (unsigned i = 0; i < 20; i++) {
        io_point();
        a->h->hash = (a->h->hash ^ (a->index + reactor_now())) * 0x100000001b3ull;
        if (sim_random() % 3 == 0)
            reactor_yield();
    }
    a->h->order[a->h->nr++] = a->index;
    return 0;
}

static SUSPENDS int run_actors(void *arg)
{
    struct history *h = arg;
    struct actor actors[8];
    struct co_group g;

    co_group_init(&g);
    for (unsigned i = 0; i < 8; i++) {
        actors[i] = (struct actor){h, i};
        co_group_spawn(&g, act, &actors[i]);
    }
    CHECK_STR(reactor_backend(), "sim");
    co_group_wait(&g);
    CHECK_EQ(sim_io_count(), 160);
    return 0;
}

static struct history history_of(struct sim_opts opts)
{
    struct history h = {0};

    sim_run(&opts, run_actors, &h);
    return h;
}

TEST(sim_replays_a_seed)
{
    unsigned equal = 0;

    for (uint64_t seed = 0; seed < 20; seed++) {
        uint64_t first = history_of((struct sim_opts){.seed = seed}).hash;

        CHECK_EQ(history_of((struct sim_opts){.seed = seed}).hash, first);
        equal += history_of((struct sim_opts){.seed = seed + 1}).hash == first;
    }
    CHECK_EQ(equal, 0);
}

static SUSPENDS int note_order(void *arg)
{
    struct actor *a = arg;

    a->h->order[a->h->nr++] = a->index;
    return 0;
}

static SUSPENDS int run_noters(void *arg)
{
    struct actor actors[8];
    struct co_group g;

    co_group_init(&g);
    for (unsigned i = 0; i < 8; i++) {
        actors[i] = (struct actor){arg, i};
        co_group_spawn(&g, note_order, &actors[i]);
    }
    return co_group_wait(&g);
}

TEST(sim_in_order_is_first_come_first_served)
{
    bool shuffled = false;

    for (uint64_t seed = 0; seed < 20; seed++) {
        struct history h = {0}, r = {0};
        struct sim_opts opts = {.seed = seed, .in_order = true};

        sim_run(&opts, run_noters, &h);
        opts.in_order = false;
        sim_run(&opts, run_noters, &r);
        for (unsigned i = 0; i < 8; i++) {
            CHECK_EQ(h.order[i], i);
            shuffled |= r.order[i] != i;
        }
    }
    CHECK(shuffled);
}

static SUSPENDS int count_until_stop(void *arg)
{
    for (unsigned i = 1; i <= 10; i++) {
        io_point();
        CHECK_EQ(sim_stopped(), i >= 7);
    }
    return 0;
}

TEST(sim_stops_after_the_given_io)
{
    struct sim_opts opts = {.seed = 1, .stop_after_io = 7};

    sim_run(&opts, count_until_stop, NULL);
}

static SUSPENDS int sleep_for_ever(void *arg)
{
    reactor_sleep();
    return 0;
}

TEST(sim_aborts_on_a_deadlock_and_names_the_seed)
{
    int fds[2], status;
    char text[256] = {0};

    CHECK_EQ(pipe2(fds, O_CLOEXEC), 0);
    pid_t pid = fork();
    if (pid == 0) {
        struct sim_opts opts = {.seed = 4711};

        dup2(fds[1], 2);
        sim_run(&opts, sleep_for_ever, NULL);
        _exit(0);
    }
    close(fds[1]);
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
    CHECK(read(fds[0], text, sizeof(text) - 1) > 0);
    CHECK(strstr(text, "deadlock") && strstr(text, "seed 4711"));
    close(fds[0]);
}

static int big_frame(void *arg)
{
    static volatile size_t len = 256 * 1024; /* or the compiler sees the frame and objects */
    char *big = alloca(len);

    memset(big, 1, len);
    __asm__ volatile("" : : "r"(big) : "memory");
    CHECK(co_self() == NULL);
    return *(int *)arg + big[1000];
}

static SUSPENDS int call_offload(void *arg)
{
    return offload(big_frame, arg);
}

TEST(sim_offloads_to_a_full_stack)
{
    struct sim_opts opts = {.seed = 3};
    int v = 41;

    CHECK_EQ(sim_run(&opts, call_offload, &v), 42);
}

/* A coroutine that polls must not keep time from moving. */
static SUSPENDS int poll_the_clock(void *arg)
{
    uint64_t end = reactor_now() + NSEC_PER_MSEC;

    while (reactor_now() < end)
        reactor_yield();
    return 0;
}

TEST(sim_time_moves_while_coroutines_yield)
{
    struct sim_opts opts = {.seed = 3};

    CHECK_EQ(sim_run(&opts, poll_the_clock, NULL), 0);
}
