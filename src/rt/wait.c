/*
 * Waiting for each other: see wait.h.
 *
 * A waiter is a node in the frame of the coroutine that sleeps. Whoever wakes it hands over what
 * it waits for, then sets `woken`: nobody can slip in between, and a stray wake changes nothing.
 */
#include "rt/wait.h"
#include "rt/internal.h"

struct waiter {
    struct list link;
    struct co *co;
    bool woken;
    uint64_t wants; /* a group's limit, a budget's units */
};

SUSPENDS static void wait_in(struct list *waiters, struct waiter *w)
{
    w->co = co_self();
    w->woken = false;
    DEBUG_CHECK(w->co);
    list_push_back(waiters, &w->link);
    while (!w->woken)
        reactor_sleep();
}

static void wake(struct waiter *w)
{
    list_remove(&w->link);
    w->woken = true;
    reactor_wake(w->co);
}

static struct waiter *oldest(const struct list *waiters)
{
    return list_empty(waiters) ? NULL : list_entry(waiters->next, struct waiter, link);
}

void wait_queue_init(struct wait_queue *q)
{
    list_init(&q->waiters);
}

void wait_queue_sleep(struct wait_queue *q)
{
    struct waiter w;

    wait_in(&q->waiters, &w);
}

bool wait_queue_wake_one(struct wait_queue *q)
{
    struct waiter *w = oldest(&q->waiters);

    if (w)
        wake(w);
    return w != NULL;
}

void wait_queue_wake_all(struct wait_queue *q)
{
    while (wait_queue_wake_one(q))
        ;
}

/* ---- mutex ---- */

/* `locking`: it will wait for what it cannot have, so the order of ranks must hold. */
static void rank_take(struct co *co, enum lock_rank rank, bool locking)
{
#ifndef NDEBUG
    CHECK_THAT(rank > 0 && rank < RANK_MAX);
    CHECK_THAT(!locking || co->ranks >> rank == 0);
    co->rank_count[rank]++;
    co->ranks |= UINT32_C(1) << rank;
#endif
}

static void rank_drop(struct co *co, enum lock_rank rank)
{
#ifndef NDEBUG
    CHECK_THAT(co->rank_count[rank] > 0);
    if (--co->rank_count[rank] == 0)
        co->ranks &= ~(UINT32_C(1) << rank);
#endif
}

void co_mutex_init(struct co_mutex *m, enum lock_rank rank)
{
    m->owner = NULL;
    m->rank = rank;
    wait_queue_init(&m->queue);
}

void co_mutex_lock(struct co_mutex *m)
{
    struct co *co = co_self();

    DEBUG_CHECK(co && m->owner != co);
    rank_take(co, m->rank, true);
    if (!m->owner) {
        m->owner = co;
        return;
    }
    wait_queue_sleep(&m->queue);
    DEBUG_CHECK(m->owner == co);
}

bool co_mutex_trylock(struct co_mutex *m)
{
    if (m->owner)
        return false;
    m->owner = co_self();
    DEBUG_CHECK(m->owner);
    rank_take(m->owner, m->rank, false);
    return true;
}

void co_mutex_unlock(struct co_mutex *m)
{
    struct waiter *w = oldest(&m->queue.waiters);

    DEBUG_CHECK(m->owner && m->owner == co_self());
    rank_drop(m->owner, m->rank);
    m->owner = w ? w->co : NULL;
    if (w)
        wake(w);
}

/* ---- condition ---- */

void co_cond_init(struct co_cond *c)
{
    wait_queue_init(&c->queue);
}

void co_cond_wait(struct co_cond *c, struct co_mutex *m)
{
    if (m)
        co_mutex_unlock(m);
    wait_queue_sleep(&c->queue);
    if (m)
        co_mutex_lock(m);
}

struct timed_waiter {
    struct waiter w;
    struct timer timer;
    bool timed_out;
};

static void time_out(struct timer *t)
{
    struct timed_waiter *tw = container_of(t, struct timed_waiter, timer);

    if (tw->w.woken)
        return;
    tw->timed_out = true;
    wake(&tw->w);
}

int co_cond_wait_until(struct co_cond *c, struct co_mutex *m, uint64_t deadline)
{
    struct timed_waiter tw = {.timed_out = false};

    timer_init(&tw.timer, time_out);
    timer_arm(&tw.timer, deadline);
    if (m)
        co_mutex_unlock(m);
    wait_in(&c->queue.waiters, &tw.w);
    timer_disarm(&tw.timer);
    if (m)
        co_mutex_lock(m);
    return tw.timed_out ? -ETIMEDOUT : 0;
}

void co_cond_signal(struct co_cond *c)
{
    wait_queue_wake_one(&c->queue);
}

void co_cond_broadcast(struct co_cond *c)
{
    wait_queue_wake_all(&c->queue);
}

/* ---- group ---- */

void co_group_init(struct co_group *g)
{
    g->running = 0;
    g->rc = 0;
    wait_queue_init(&g->waiting);
}

static void child_main(void *arg)
{
    struct co *co = arg;
    struct co_group *g = co->group;
    int rc = co->group_fn(co->group_arg);

    if (rc < 0 && g->rc == 0)
        g->rc = rc;
    g->running--;
    list_for_each_safe(it, &g->waiting.waiters) {
        struct waiter *w = list_entry(it, struct waiter, link);

        if (g->running < w->wants)
            wake(w);
    }
}

int co_group_spawn(struct co_group *g, co_group_fn *fn, void *arg)
{
    struct co *co = reactor_new_co(child_main, NULL);

    if (!co)
        return -ENOMEM;
    co->arg = co;
    co->group = g;
    co->group_fn = fn;
    co->group_arg = arg;
    g->running++;
    return 0;
}

void co_group_wait_below(struct co_group *g, unsigned limit)
{
    while (g->running >= limit && g->running > 0) {
        struct waiter w = {.wants = MAX(limit, 1u)};

        wait_in(&g->waiting.waiters, &w);
    }
}

int co_group_wait(struct co_group *g)
{
    co_group_wait_below(g, 1);
    int rc = g->rc;
    g->rc = 0;
    return rc;
}

/* ---- gate ---- */

void gate_init(struct gate *g)
{
    g->inside = 0;
    g->closed = 0;
    wait_queue_init(&g->entering);
    wait_queue_init(&g->closing);
    wait_queue_init(&g->draining);
}

void gate_enter(struct gate *g)
{
    if (g->closed == 0)
        g->inside++;
    else
        wait_queue_sleep(&g->entering); /* gate_open() counted us in */
}

void gate_leave(struct gate *g)
{
    DEBUG_CHECK(g->inside > 0);
    if (--g->inside == 0 && g->closed > 0)
        wait_queue_wake_one(&g->draining);
}

void gate_close(struct gate *g)
{
    if (g->closed++ > 0) {
        /* The one before hands the gate over shut and empty. */
        wait_queue_sleep(&g->closing);
        return;
    }
    while (g->inside > 0)
        wait_queue_sleep(&g->draining);
}

void gate_open(struct gate *g)
{
    DEBUG_CHECK(g->closed > 0 && g->inside == 0);
    if (--g->closed > 0) {
        wait_queue_wake_one(&g->closing);
        return;
    }
    while (wait_queue_wake_one(&g->entering))
        g->inside++;
}

/* ---- budget ---- */

void co_budget_init(struct co_budget *b, uint64_t whole)
{
    b->whole = b->left = whole;
    list_init(&b->waiters);
}

uint64_t co_budget_take(struct co_budget *b, uint64_t n)
{
    n = MIN(n, b->whole);
    if (list_empty(&b->waiters) && n <= b->left) {
        b->left -= n;
    } else {
        struct waiter w = {.wants = n};

        wait_in(&b->waiters, &w); /* the units were taken for us */
    }
    return n;
}

void co_budget_give(struct co_budget *b, uint64_t n)
{
    b->left += MIN(n, b->whole);
    DEBUG_CHECK(b->left <= b->whole);
    for (struct waiter *w = oldest(&b->waiters); w && w->wants <= b->left;
         w = oldest(&b->waiters)) {
        b->left -= w->wants;
        wake(w);
    }
}
