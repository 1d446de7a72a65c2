/* Timers: a binary heap a reactor, ordered by deadline: see timer.h. */
#include "rt/timer.h"
#include "rt/internal.h"

static void place(struct reactor *r, size_t i, struct timer *t)
{
    r->timers.data[i] = t;
    t->heap_pos = (unsigned)i + 1;
}

static void sift_up(struct reactor *r, size_t i, struct timer *t)
{
    while (i > 0) {
        size_t parent = (i - 1) / 2;

        if (r->timers.data[parent]->deadline <= t->deadline)
            break;
        place(r, i, r->timers.data[parent]);
        i = parent;
    }
    place(r, i, t);
}

static void sift_down(struct reactor *r, size_t i, struct timer *t)
{
    for (;;) {
        size_t child = 2 * i + 1;

        if (child >= r->timers.len)
            break;
        if (child + 1 < r->timers.len &&
            r->timers.data[child + 1]->deadline < r->timers.data[child]->deadline)
            child++;
        if (t->deadline <= r->timers.data[child]->deadline)
            break;
        place(r, i, r->timers.data[child]);
        i = child;
    }
    place(r, i, t);
}

void timer_init(struct timer *t, void (*fn)(struct timer *t))
{
    *t = (struct timer){.fn = fn};
}

void timer_arm(struct timer *t, uint64_t deadline)
{
    struct reactor *r = reactor_self();

    timer_disarm(t);
    t->deadline = deadline;
    /* A heap of pointers that cannot grow leaves nothing sensible to do. */
    int rc = vec_push(&r->timers, t);
    CHECK_THAT(rc == 0);
    sift_up(r, r->timers.len - 1, t);
}

void timer_disarm(struct timer *t)
{
    struct reactor *r = reactor_self();

    if (t->heap_pos == 0)
        return;
    size_t i = t->heap_pos - 1;
    struct timer *last = r->timers.data[--r->timers.len];
    t->heap_pos = 0;
    if (last == t)
        return;
    if (i > 0 && last->deadline < r->timers.data[(i - 1) / 2]->deadline)
        sift_up(r, i, last);
    else
        sift_down(r, i, last);
}

uint64_t timers_next(const struct reactor *r)
{
    return r->timers.len > 0 ? r->timers.data[0]->deadline : NO_DEADLINE;
}

void timers_expire(struct reactor *r)
{
    if (r->timers.len == 0)
        return;
    uint64_t now = reactor_now();
    while (r->timers.len > 0 && r->timers.data[0]->deadline <= now) {
        struct timer *t = r->timers.data[0];

        timer_disarm(t);
        t->fn(t);
    }
}

struct sleeper {
    struct timer timer;
    struct co *co;
    bool over;
};

static void end_sleep(struct timer *t)
{
    struct sleeper *s = container_of(t, struct sleeper, timer);

    s->over = true;
    reactor_wake(s->co);
}

void timer_sleep_until(uint64_t deadline)
{
    struct sleeper s = {.co = co_self()};

    timer_init(&s.timer, end_sleep);
    timer_arm(&s.timer, deadline);
    while (!s.over)
        reactor_sleep();
}

void timer_sleep(uint64_t ns)
{
    timer_sleep_until(reactor_now() + ns);
}
