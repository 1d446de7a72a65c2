/* Reactors on several threads that wake each other; run under ThreadSanitizer too. */
#include <pthread.h>
#include "rt/offload.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "test.h"

enum { ROUNDS = 3000, THREADS = 3 };

/* A token goes round; whoever has it counts and passes it on. */
struct ring {
    struct co *cos[THREADS];
    unsigned turn;    /* atomic: whose it is */
    unsigned ready;   /* atomic */
    unsigned counted; /* the token's holder's */
};
struct player {
    struct ring *ring;
    unsigned index;
    pthread_t thread;
};

static SUSPENDS int play(void *arg)
{
    struct player *p = arg;
    struct ring *r = p->ring;

    r->cos[p->index] = co_self();
    __atomic_fetch_add(&r->ready, 1, __ATOMIC_SEQ_CST);
    while (__atomic_load_n(&r->ready, __ATOMIC_SEQ_CST) < THREADS)
        timer_sleep(NSEC_PER_MSEC / 10);
    for (unsigned i = 0; i < ROUNDS; i++) {
        while (__atomic_load_n(&r->turn, __ATOMIC_ACQUIRE) % THREADS != p->index)
            reactor_sleep();
        r->counted++;
        struct co *next = r->cos[(p->index + 1) % THREADS];
        /* The last pass wakes nobody: the first has ended or needs no wake any more. */
        bool last = i == ROUNDS - 1 && p->index == THREADS - 1;
        __atomic_fetch_add(&r->turn, 1, __ATOMIC_RELEASE);
        if (!last)
            reactor_wake(next);
    }
    return 0;
}

static void *run_player(void *arg)
{
    CHECK_EQ(reactor_run(play, arg), 0);
    return NULL;
}

TEST(threads_pass_a_token)
{
    static struct ring ring;
    static struct player players[THREADS];

    for (unsigned i = 0; i < THREADS; i++) {
        players[i] = (struct player){.ring = &ring, .index = i};
        CHECK_EQ(pthread_create(&players[i].thread, NULL, run_player, &players[i]), 0);
    }
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(players[i].thread, NULL);
    CHECK_EQ(ring.counted, ROUNDS * THREADS);
}

static int count_up(void *arg)
{
    __atomic_fetch_add((unsigned *)arg, 1, __ATOMIC_RELAXED);
    return 0;
}

static SUSPENDS int offload_often(void *arg)
{
    for (unsigned i = 0; i < 50; i++)
        offload(count_up, arg);
    return 0;
}

static SUSPENDS int offload_from_many(void *arg)
{
    struct co_group g;

    co_group_init(&g);
    for (unsigned i = 0; i < 20; i++)
        co_group_spawn(&g, offload_often, arg);
    return co_group_wait(&g);
}

static void *run_offloads(void *arg)
{
    CHECK_EQ(reactor_run(offload_from_many, arg), 0);
    return NULL;
}

/* Several reactors share the helper threads. */
TEST(threads_share_the_offload_pool)
{
    pthread_t ids[THREADS];
    unsigned count = 0;

    for (unsigned i = 0; i < THREADS; i++)
        CHECK_EQ(pthread_create(&ids[i], NULL, run_offloads, &count), 0);
    for (unsigned i = 0; i < THREADS; i++)
        pthread_join(ids[i], NULL);
    CHECK_EQ(count, THREADS * 20 * 50);
}

/* A coroutine ends while the letter that woke it early is still on its way; often, to meet it. */
struct early {
    struct co *co;
    bool done;
};

static void *wake_at_once(void *arg)
{
    struct early *e = arg;

    __atomic_store_n(&e->done, true, __ATOMIC_RELEASE);
    reactor_wake(e->co);
    return NULL;
}

static SUSPENDS int end_early(void *arg)
{
    struct early e = {co_self(), false};
    pthread_t id;

    CHECK_EQ(pthread_create(&id, NULL, wake_at_once, &e), 0);
    while (!__atomic_load_n(&e.done, __ATOMIC_ACQUIRE))
        reactor_yield();
    pthread_join(id, NULL);
    return 0;
}

TEST(threads_wake_what_ends)
{
    for (unsigned i = 0; i < 300; i++)
        CHECK_EQ(reactor_run(end_early, NULL), 0);
}
