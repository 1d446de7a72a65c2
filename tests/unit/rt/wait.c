/* Mutex, condition, group, gate and budget: order of hand-over, stray wakes, deadlines. */
#include <errno.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include "base/own.h"
#include "rt/reactor.h"
#include "rt/sim.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "test.h"

enum { NR = 20 };
#ifdef NDEBUG
enum { RANKS_CHECKED = 0 };
#else
enum { RANKS_CHECKED = 1 };
#endif

struct order {
    struct co_mutex m;
    struct co_cond c;
    struct gate gate;
    struct co_budget budget;
    unsigned next, inside, most;
    unsigned log[NR];
    unsigned started;
};

static SUSPENDS int lock_in_turn(void *arg)
{
    struct order *o = arg;
    unsigned me = o->started++;

    co_mutex_lock(&o->m);
    CHECK_EQ(o->inside++, 0);
    reactor_yield();
    o->inside--;
    o->log[o->next++] = me;
    co_mutex_unlock(&o->m);
    return 0;
}

CO_TEST(mutex_hands_over_in_order)
{
    struct order o = {.next = 0};
    struct co_group g;

    co_mutex_init(&o.m, RANK_ALLOC);
    co_group_init(&g);
    for (unsigned i = 0; i < NR; i++)
        co_group_spawn(&g, lock_in_turn, &o);
    co_group_wait(&g);
    for (unsigned i = 0; i < NR; i++)
        CHECK_EQ(o.log[i], i);
    CHECK(o.m.owner == NULL);
    CHECK(co_mutex_trylock(&o.m));
    CHECK(!co_mutex_trylock(&o.m));
    co_mutex_unlock(&o.m);
}

/* A body that breaks a promise must abort: run in a child process, its message thrown away. */
static void check_aborts(void (*fn)(void *arg))
{
    pid_t pid = fork();
    int status;

    CHECK(pid >= 0);
    if (pid == 0) {
        struct co *co = co_new(fn, NULL);

        if (!freopen("/dev/null", "w", stderr))
            _exit(3);
        signal(SIGABRT, SIG_DFL);
        co_enter(co);
        _exit(0);
    }
    CHECK_EQ(waitpid(pid, &status, 0), pid);
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT);
}

static SUSPENDS void take_wrong_order(void *arg)
{
    struct co_mutex a, b;

    co_mutex_init(&a, RANK_ALLOC);
    co_mutex_init(&b, RANK_L1);
    co_mutex_lock(&a);
    co_mutex_lock(&b);
}

static SUSPENDS void take_same_rank(void *arg)
{
    struct co_mutex a, b;

    co_mutex_init(&a, RANK_SLICE);
    co_mutex_init(&b, RANK_SLICE);
    co_mutex_lock(&a);
    co_mutex_lock(&b);
}

static SUSPENDS void take_right_order(void *arg)
{
    struct co_mutex a, b;

    co_mutex_init(&a, RANK_L1);
    co_mutex_init(&b, RANK_ALLOC);
    co_mutex_lock(&a);
    co_mutex_lock(&b);
    co_mutex_unlock(&a);
    /* trylock cannot wait, so it may go back */
    CHECK(co_mutex_trylock(&a));
    co_mutex_unlock(&b);
    co_mutex_unlock(&a);
    co_mutex_lock(&b);
    co_mutex_unlock(&b);
}

TEST(mutex_ranks_are_checked)
{
    struct co *co = co_new(take_right_order, NULL);

    co_enter(co);
    CHECK(co_ended(co));
    co_free(co);
    if (RANKS_CHECKED) {
        check_aborts(take_wrong_order);
        check_aborts(take_same_rank);
    }
}

struct cond_test {
    struct co_mutex m;
    struct co_cond c;
    bool go;
    unsigned through;
};

static SUSPENDS int wait_for_go(void *arg)
{
    struct cond_test *t = arg;

    co_mutex_lock(&t->m);
    while (!t->go)
        co_cond_wait(&t->c, &t->m);
    CHECK(t->m.owner == co_self());
    t->through++;
    co_mutex_unlock(&t->m);
    return 0;
}

CO_TEST(cond_wakes_one_or_all)
{
    struct cond_test t = {.go = false};
    struct co_group g;

    co_mutex_init(&t.m, RANK_JOB);
    co_cond_init(&t.c);
    co_group_init(&g);
    for (unsigned i = 0; i < 3; i++)
        co_group_spawn(&g, wait_for_go, &t);
    reactor_yield();
    CHECK_EQ(t.through, 0);
    t.go = true;
    co_cond_signal(&t.c);
    reactor_yield();
    CHECK_EQ(t.through, 1);
    co_cond_broadcast(&t.c);
    CHECK_EQ(co_group_wait(&g), 0);
    CHECK_EQ(t.through, 3);
}

static SUSPENDS int signal_later(void *arg)
{
    timer_sleep(5 * NSEC_PER_MSEC);
    co_cond_signal(arg);
    return 0;
}

CO_TEST(cond_has_deadlines)
{
    struct co_mutex m;
    struct co_cond c;
    struct co_group g;

    co_mutex_init(&m, RANK_JOB);
    co_cond_init(&c);
    co_group_init(&g);
    co_mutex_lock(&m);
    uint64_t start = reactor_now();
    CHECK_EQ(co_cond_wait_until(&c, &m, start + 10 * NSEC_PER_MSEC), -ETIMEDOUT);
    CHECK(reactor_now() >= start + 10 * NSEC_PER_MSEC);
    CHECK(m.owner == co_self());
    co_group_spawn(&g, signal_later, &c);
    CHECK_EQ(co_cond_wait_until(&c, &m, reactor_now() + 60 * NSEC_PER_SEC), 0);
    CHECK_EQ(co_cond_wait_until(&c, NULL, 0), -ETIMEDOUT);
    co_mutex_unlock(&m);
    co_group_wait(&g);
}

static SUSPENDS int fail_in_turn(void *arg)
{
    unsigned i = (unsigned)(uintptr_t)arg;

    timer_sleep(i * NSEC_PER_MSEC);
    return i == 3 ? -EIO : i == 5 ? -ENOSPC : 0;
}

CO_TEST(group_keeps_the_first_error)
{
    struct co_group g;

    co_group_init(&g);
    for (uintptr_t i = 7; i > 0; i--)
        co_group_spawn(&g, fail_in_turn, (void *)i);
    CHECK_EQ(co_group_wait(&g), -EIO);
    CHECK_EQ(co_group_wait(&g), 0);
}

struct crowd {
    unsigned inside, most, total;
};

static SUSPENDS int join_crowd(void *arg)
{
    struct crowd *c = arg;

    c->most = MAX(c->most, ++c->inside);
    c->total++;
    reactor_yield();
    reactor_yield();
    c->inside--;
    return 0;
}

CO_TEST(group_bounds_its_fan_out)
{
    struct crowd c = {0};
    struct co_group g;

    co_group_init(&g);
    for (unsigned i = 0; i < 100; i++) {
        co_group_wait_below(&g, 4);
        co_group_spawn(&g, join_crowd, &c);
    }
    CHECK_EQ(co_group_wait(&g), 0);
    CHECK_EQ(c.total, 100);
    CHECK_EQ(c.most, 4);
}

struct gate_test {
    struct gate gate;
    unsigned inside, passed, closings;
    bool closed;
};

static SUSPENDS int pass_gate(void *arg)
{
    struct gate_test *t = arg;

    for (unsigned i = 0; i < 20; i++) {
        gate_enter(&t->gate);
        CHECK(!t->closed);
        t->inside++;
        timer_sleep(sim_random() % NSEC_PER_MSEC);
        CHECK(!t->closed);
        t->inside--;
        t->passed++;
        gate_leave(&t->gate);
        timer_sleep(sim_random() % NSEC_PER_MSEC);
    }
    return 0;
}

static SUSPENDS int close_gate(void *arg)
{
    struct gate_test *t = arg;

    for (unsigned i = 0; i < 10; i++) {
        timer_sleep(sim_random() % (2 * NSEC_PER_MSEC));
        gate_close(&t->gate);
        CHECK(!t->closed && t->inside == 0 && gate_is_closed(&t->gate));
        t->closed = true;
        t->closings++;
        timer_sleep(sim_random() % NSEC_PER_MSEC);
        CHECK_EQ(t->inside, 0);
        t->closed = false;
        gate_open(&t->gate);
    }
    return 0;
}

static SUSPENDS int gate_main(void *arg)
{
    struct gate_test t = {.inside = 0};
    struct co_group g;

    gate_init(&t.gate);
    co_group_init(&g);
    for (unsigned i = 0; i < 8; i++)
        co_group_spawn(&g, pass_gate, &t);
    for (unsigned i = 0; i < 3; i++)
        co_group_spawn(&g, close_gate, &t);
    CHECK_EQ(co_group_wait(&g), 0);
    CHECK_EQ(t.passed, 160);
    CHECK_EQ(t.closings, 30);
    CHECK(!gate_is_closed(&t.gate) && t.gate.inside == 0);
    return 0;
}

TEST(gate_keeps_requests_and_closers_apart)
{
    for (uint64_t seed = 0; seed < 200; seed++) {
        struct sim_opts opts = {.seed = test_seed() + seed};

        CHECK_EQ(sim_run(&opts, gate_main, NULL), 0);
    }
}

struct budget_test {
    struct co_budget b;
    uint64_t out;
    unsigned next;
};
struct buyer {
    struct budget_test *t;
    unsigned index;
    uint64_t wants;
};

static SUSPENDS int buy(void *arg)
{
    struct buyer *b = arg;
    uint64_t n = co_budget_take(&b->t->b, b->wants);

    CHECK_EQ(b->t->next++, b->index);
    CHECK_EQ(n, MIN(b->wants, (uint64_t)100));
    b->t->out += n;
    CHECK(b->t->out <= 100);
    timer_sleep(NSEC_PER_MSEC / 10);
    b->t->out -= n;
    co_budget_give(&b->t->b, b->wants);
    return 0;
}

CO_TEST(budget_serves_in_order)
{
    struct budget_test t = {.next = 0};
    struct buyer buyers[NR];
    uint64_t state = test_seed();
    struct co_group g;

    co_budget_init(&t.b, 100);
    co_group_init(&g);
    for (unsigned i = 0; i < NR; i++) {
        buyers[i] = (struct buyer){&t, i, 1 + rng_below(&state, 150)};
        co_group_spawn(&g, buy, &buyers[i]);
    }
    CHECK_EQ(co_group_wait(&g), 0);
    CHECK_EQ(t.b.left, 100);
}

static SUSPENDS int wait_in_queue(void *arg)
{
    wait_queue_sleep(arg);
    return 0;
}

static SUSPENDS int note_and_sleep(void *arg)
{
    *(struct co **)arg = co_self();
    struct wait_queue q;

    wait_queue_init(&q);
    timer_sleep(2 * NSEC_PER_MSEC);
    return 0;
}

CO_TEST(stray_wakes_change_nothing)
{
    struct wait_queue q;
    struct co_group g;
    struct co *co = NULL;

    wait_queue_init(&q);
    co_group_init(&g);
    CHECK(!wait_queue_wake_one(&q));
    co_group_spawn(&g, wait_in_queue, &q);
    reactor_yield();
    CHECK(wait_queue_wake_one(&q));
    CHECK_EQ(co_group_wait(&g), 0);
    uint64_t start = reactor_now();
    co_group_spawn(&g, note_and_sleep, &co);
    reactor_yield();
    for (unsigned i = 0; i < 3; i++) {
        reactor_wake(co);
        reactor_yield();
    }
    CHECK_EQ(co_group_wait(&g), 0);
    CHECK(reactor_now() - start >= 2 * NSEC_PER_MSEC);
}
