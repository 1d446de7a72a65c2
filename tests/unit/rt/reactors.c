/* Letters between reactors, calls, reads and writes on another's ring; also under ThreadSanitizer.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <unistd.h>
#include "base/own.h"
#include "rt/mail.h"
#include "rt/reactor.h"
#include "rt/reactors.h"
#include "rt/sim.h"
#include "rt/timer.h"
#include "test.h"

/* ---- letters ---- */

enum { LETTERS = 2000, BATCH = 32 };

struct ping {
    struct mail mail;
    struct reactor *home, *away;
    unsigned nr;
    unsigned *next_away, *next_home; /* of the reactor they name */
};

static void came_back(struct mail *m)
{
    struct ping *p = container_of(m, struct ping, mail);

    CHECK(reactor_self() == p->home);
    CHECK_EQ(p->nr, (*p->next_home)++);
}

static void came(struct mail *m)
{
    struct ping *p = container_of(m, struct ping, mail);

    CHECK(reactor_self() == p->away);
    CHECK_EQ(p->nr, (*p->next_away)++);
    p->mail.fn = came_back;
    mail_send(p->home, &p->mail);
}

SUSPENDS static void exchange(struct reactor *away)
{
    static struct ping pings[LETTERS];
    unsigned next_away = 0, next_home = 0;

    for (unsigned i = 0; i < LETTERS; i++) {
        pings[i] = (struct ping){{.fn = came}, reactor_self(), away, i, &next_away, &next_home};
        mail_send(away, &pings[i].mail);
        if (i % BATCH == BATCH - 1)
            reactor_yield();
    }
    while (next_home < LETTERS)
        timer_sleep(NSEC_PER_MSEC / 10);
    CHECK_EQ(next_away, LETTERS);
}

/* A reactor of another thread, for the time of fn. */
SUSPENDS static void with_another(void (*fn)(struct reactor *away))
{
    struct reactors *set = reactors_new(2);
    struct reactor *home = reactors_get(set), *away = reactors_get(set);

    CHECK(home == reactor_self() && away != home);
    fn(away);
    reactors_put(set, home);
    reactors_put(set, away);
    reactors_free(set);
}

CO_TEST(letters_arrive_in_order)
{
    exchange(reactor_self());
    with_another(exchange);
}

SUSPENDS_UNCHECKED static int in_the_simulator(void *arg)
{
    exchange(reactor_self());
    return reactor_call(reactor_self(), arg, NULL);
}

static int forty_two(void *arg)
{
    return 42;
}

TEST(letters_in_the_simulator)
{
    for (unsigned seed = 1; seed < 20; seed++) {
        struct sim_opts opts = {.seed = seed};

        CHECK_EQ(sim_run(&opts, in_the_simulator, (void *)forty_two), 42);
    }
}

/* ---- calls ---- */

struct where {
    struct reactor *reactor;
    atomic_uint calls;
};

SUSPENDS static int note_where(void *arg)
{
    struct where *w = arg;

    CHECK(reactor_self() == w->reactor);
    timer_sleep(NSEC_PER_MSEC / 10); /* it may wait there */
    CHECK(reactor_self() == w->reactor);
    return (int)atomic_fetch_add(&w->calls, 1);
}

SUSPENDS static int call_often(void *arg)
{
    struct where *w = arg;
    int sum = 0;

    for (unsigned i = 0; i < 100; i++)
        sum += reactor_call(w->reactor, note_where, w);
    return sum > 0 ? 0 : -EIO;
}

SUSPENDS static void call_from_many(struct reactor *away)
{
    struct where w = {.reactor = away};
    struct co_group group;

    co_group_init(&group);
    for (unsigned i = 0; i < 8; i++)
        CHECK_EQ(co_group_spawn(&group, call_often, &w), 0);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(atomic_load(&w.calls), 800);
}

CO_TEST(calls_run_there_and_return_here)
{
    call_from_many(reactor_self());
    with_another(call_from_many);
}

/* ---- the set ---- */

CO_TEST(users_are_spread)
{
    struct reactors *set = reactors_new(3);
    struct reactor *home = reactor_self(), *got[6];
    unsigned at_home = 0;

    got[0] = reactors_get(set);
    CHECK(got[0] == home); /* alone: no letters */
    CHECK_EQ(reactors_started(set), 0);
    for (unsigned i = 1; i < 6; i++)
        got[i] = reactors_get(set);
    CHECK_EQ(reactors_started(set), 2);
    for (unsigned i = 0; i < 6; i++) {
        unsigned same = 0;

        for (unsigned j = 0; j < 6; j++)
            same += got[i] == got[j];
        CHECK_EQ(same, 2);
        at_home += got[i] == home;
    }
    CHECK_EQ(at_home, 2);
    for (unsigned i = 0; i < 6; i++)
        reactors_put(set, got[i]);
    CHECK(reactors_get(set) == home);
    reactors_put(set, home);
    reactors_free(set);
    reactors_free(NULL);

    set = reactors_new(1);
    for (unsigned i = 0; i < 4; i++)
        CHECK(reactors_get(set) == home);
    for (unsigned i = 0; i < 4; i++)
        reactors_put(set, home);
    reactors_free(set);
}

/* Several ask while the thread is still starting. */
struct asking {
    struct reactors *set;
    struct reactor *got;
};

SUSPENDS static int ask(void *arg)
{
    struct asking *a = arg;

    a->got = reactors_get(a->set);
    return 0;
}

CO_TEST(a_thread_is_started_once)
{
    struct reactors *set = reactors_new(2);
    struct asking a[5];
    struct co_group group;

    co_group_init(&group);
    for (unsigned i = 0; i < ARRAY_SIZE(a); i++) {
        a[i].set = set;
        CHECK_EQ(co_group_spawn(&group, ask, &a[i]), 0);
    }
    co_group_wait(&group);
    CHECK_EQ(reactors_started(set), 1);
    for (unsigned i = 0; i < ARRAY_SIZE(a); i++)
        reactors_put(set, a[i].got);
    reactors_free(set);
}

/* ---- I/O on another's ring ---- */

struct routed {
    int fd;
    unsigned index;
    struct reactor *away;
};

SUSPENDS static int write_and_read(void *arg)
{
    const struct routed *io = arg;
    uint8_t out[512], in[512];
    struct iovec to = {out, sizeof(out)}, from = {in, sizeof(in)};

    io_route(io->away);
    for (unsigned i = 0; i < 200; i++) {
        memset(out, (int)(io->index + i), sizeof(out));
        CHECK_EQ(io_writev(io->fd, &to, 1, io->index * sizeof(out), 0), sizeof(out));
        CHECK_EQ(io_readv(io->fd, &from, 1, io->index * sizeof(out)), sizeof(in));
        CHECK(memcmp(in, out, sizeof(in)) == 0);
        io_cancel(co_self()); /* there is none: harmless */
    }
    CHECK_EQ(io_fsync(io->fd, true), 0); /* not routed */
    CHECK_EQ(io_readv(-1, &from, 1, 0), -EBADF);
    io_route(NULL);
    CHECK_EQ(io_readv(io->fd, &from, 1, io->index * sizeof(out)), sizeof(in));
    return 0;
}

SUSPENDS static void route_many(struct reactor *away)
{
    struct routed io[32];
    struct co_group group;
    char path[128];

    snprintf(path, sizeof(path), "%s/routed", test_dir());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0);
    co_group_init(&group);
    for (unsigned i = 0; i < ARRAY_SIZE(io); i++) {
        io[i] = (struct routed){fd, i, away};
        CHECK_EQ(co_group_spawn(&group, write_and_read, &io[i]), 0);
    }
    CHECK_EQ(co_group_wait(&group), 0);
    close(fd);
}

CO_TEST(data_goes_through_another_ring)
{
    route_many(reactor_self());
    with_another(route_many);
}

/* A cancel of what another ring performs has no effect: such I/O ends by itself. */
SUSPENDS static int read_empty(void *arg)
{
    const struct routed *io = arg;
    uint8_t in[512];
    struct iovec from = {in, sizeof(in)};

    io_route(io->away);
    for (unsigned i = 0; i < 100; i++) {
        ssize_t n = io_readv(io->fd, &from, 1, 0);

        CHECK(n == 0);
    }
    return 0;
}

struct canceller {
    struct routed io;
    struct co *co;
    bool done;
};

SUSPENDS static int read_cancelled(void *arg)
{
    struct canceller *c = arg;

    c->co = co_self();
    int rc = read_empty(&c->io);
    c->done = true;
    return rc;
}

SUSPENDS static void cancel_often(struct reactor *away)
{
    struct canceller c = {.io.away = away};
    struct co_group group;
    char path[128];

    snprintf(path, sizeof(path), "%s/empty", test_dir());
    c.io.fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, read_cancelled, &c), 0);
    while (!c.done) {
        if (c.co)
            io_cancel(c.co);
        reactor_yield();
    }
    CHECK_EQ(co_group_wait(&group), 0);
    close(c.io.fd);
}

CO_TEST(routed_io_is_not_cancelled)
{
    with_another(cancel_often);
}

/* ---- cost ---- */

/* Not a check: what a letter there and back costs, for docs/rt.md. */
SUSPENDS static void measure(struct reactor *away)
{
    static struct ping pings[BATCH];
    unsigned next_away = 0, next_home = 0, rounds = 2000;
    uint64_t begin = reactor_now();

    for (unsigned r = 0; r < rounds; r++) {
        next_away = next_home = 0;
        for (unsigned i = 0; i < BATCH; i++) {
            pings[i] = (struct ping){{.fn = came}, reactor_self(), away, i, &next_away, &next_home};
            mail_send(away, &pings[i].mail);
        }
        while (next_home < BATCH)
            reactor_yield();
    }
    printf("# %.0f ns a letter there and back, %u at a time\n",
           (double)(reactor_now() - begin) / rounds / BATCH, BATCH);
}

CO_TEST(cost_of_a_letter)
{
    measure(reactor_self());
    with_another(measure);
}
