/* Timers against a plain sorted list, on the simulator's clock. */
#include "base/own.h"
#include "rt/reactor.h"
#include "rt/sim.h"
#include "rt/timer.h"
#include "test.h"

enum { NR = 200 };

struct record {
    struct timer timer;
    uint64_t due; /* 0: not armed */
    unsigned fired;
};

static uint64_t last_due;

static void fire(struct timer *t)
{
    struct record *r = container_of(t, struct record, timer);

    CHECK(r->due != 0 && t->deadline == r->due && t->heap_pos == 0);
    CHECK(reactor_now() >= r->due);
    CHECK(r->due >= last_due || last_due > reactor_now());
    r->due = 0;
    r->fired++;
}

static SUSPENDS int random_timers(void *arg)
{
    static struct record records[NR];
    unsigned armed = 0, fired = 0, disarmed = 0;

    memset(records, 0, sizeof(records));
    for (unsigned i = 0; i < NR; i++)
        timer_init(&records[i].timer, fire);
    for (unsigned i = 0; i < 3000; i++) {
        struct record *r = &records[sim_random() % NR];

        if (sim_random() % 4 == 0) {
            disarmed += r->due != 0;
            timer_disarm(&r->timer);
            r->due = 0;
        } else {
            disarmed += r->due != 0;
            r->due = reactor_now() + 1 + sim_random() % NSEC_PER_MSEC;
            timer_arm(&r->timer, r->due);
            armed++;
        }
        if (sim_random() % 8 == 0)
            timer_sleep(sim_random() % (NSEC_PER_MSEC / 4));
        for (unsigned k = 0; k < NR; k++)
            CHECK(records[k].due == 0 || records[k].due + NSEC_PER_MSEC > reactor_now());
    }
    timer_sleep(2 * NSEC_PER_MSEC);
    for (unsigned i = 0; i < NR; i++) {
        CHECK_EQ(records[i].due, 0);
        fired += records[i].fired;
    }
    CHECK_EQ(armed, fired + disarmed);
    return 0;
}

TEST(timer_heap_fires_each_once_and_on_time)
{
    for (uint64_t seed = 0; seed < 10; seed++) {
        struct sim_opts opts = {.seed = test_seed() + seed};

        sim_run(&opts, random_timers, NULL);
    }
}

struct ordered {
    struct timer timer;
    unsigned *next;
    unsigned index;
};

static void check_order(struct timer *t)
{
    struct ordered *o = container_of(t, struct ordered, timer);

    CHECK_EQ((*o->next)++, o->index);
}

CO_TEST(timer_order_is_that_of_deadlines)
{
    static struct ordered timers[50];
    unsigned next = 0;
    uint64_t base = reactor_now() + NSEC_PER_MSEC;

    for (unsigned i = 0; i < 50; i++) {
        unsigned at = i * 7 % 50;

        timers[at] = (struct ordered){.next = &next, .index = at};
        timer_init(&timers[at].timer, check_order);
        timer_arm(&timers[at].timer, base + at);
    }
    timer_sleep(5 * NSEC_PER_MSEC);
    CHECK_EQ(next, 50);
}

static SUSPENDS int sleep_a_day(void *arg)
{
    uint64_t start = reactor_now();

    timer_sleep(86400 * NSEC_PER_SEC);
    CHECK_EQ(reactor_now() - start, 86400 * NSEC_PER_SEC);
    return 0;
}

TEST(timer_sleep_is_virtual_in_the_simulator)
{
    struct sim_opts opts = {.seed = 1};

    sim_run(&opts, sleep_a_day, NULL);
}
