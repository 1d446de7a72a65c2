/*
 * Reactors on threads of their own: see reactors.h.
 *
 *   none --get--> starting --its letter--> running --free--> none
 *                    `----- no ring, no thread -----> none
 *
 * A thread runs reactor_run() with a main coroutine that sleeps until a letter tells it to stop.
 */
#include <pthread.h>
#include <signal.h>
#include "rt/internal.h"

struct member {
    struct reactors *set;
    struct reactor *reactor; /* the thread's; NULL: not running */
    pthread_t thread;
    unsigned users;
    bool starting, failed;
    struct mail up;   /* to the home: it runs, or it failed */
    struct mail stop; /* to the thread */
    /* the thread's own */
    struct reactor *own;
    struct co *main;
    bool stopping;
};

struct reactors {
    struct reactor *home;
    unsigned max; /* fixed; the home among them */
    unsigned home_users;
    struct wait_queue start_wait;
    struct member members[REACTORS_MAX - 1];
};

/* ---- the thread ---- */

SUSPENDS static int member_main(void *arg)
{
    struct member *m = arg;

    m->own = reactor_self();
    m->main = co_self();
    mail_post(m->set->home, &m->up);
    while (!m->stopping)
        reactor_sleep();
    return 0;
}

static void *member_thread(void *arg)
{
    struct member *m = arg;

    /* without a reactor the main coroutine, and its letter, never was */
    if (reactor_run(member_main, m) < 0)
        mail_post(m->set->home, &m->up);
    return NULL;
}

static void take_stop(struct mail *mail)
{
    struct member *m = container_of(mail, struct member, stop);

    m->stopping = true;
    reactor_wake(m->main);
}

/* ---- the home ---- */

struct reactors *reactors_new(unsigned max)
{
    struct reactors *set = calloc(1, sizeof(*set));

    CHECK_THAT(max >= 1 && max <= REACTORS_MAX);
    if (!set)
        return NULL;
    set->home = reactor_self();
    set->max = max;
    wait_queue_init(&set->start_wait);
    for (unsigned i = 0; i < ARRAY_SIZE(set->members); i++)
        set->members[i].set = set;
    return set;
}

static void take_up(struct mail *mail)
{
    struct member *m = container_of(mail, struct member, up);

    m->starting = false;
    m->failed = !m->own;
    m->reactor = m->own;
    wait_queue_wake_all(&m->set->start_wait);
}

static bool start_thread(struct member *m)
{
    sigset_t all, old;

    m->up.fn = take_up;
    m->stop.fn = take_stop;
    /* Signals are the program's business. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    m->starting = pthread_create(&m->thread, NULL, member_thread, m) == 0;
    m->failed = !m->starting;
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return m->starting;
}

SUSPENDS static bool ensure_running(struct member *m)
{
    if (!m->reactor && !m->starting && !m->failed)
        start_thread(m);
    while (m->starting)
        wait_queue_sleep(&m->set->start_wait);
    if (m->failed && m->thread) {
        pthread_join(m->thread, NULL);
        m->thread = 0;
    }
    return m->reactor != NULL;
}

static struct member *least_used(struct reactors *set)
{
    struct member *best = NULL;

    for (unsigned i = 0; i + 1 < set->max; i++) {
        struct member *m = &set->members[i];

        if (!m->failed && (!best || m->users < best->users))
            best = m;
    }
    return best;
}

static bool nobody_has_one(const struct reactors *set)
{
    unsigned users = set->home_users;

    for (unsigned i = 0; i + 1 < set->max; i++)
        users += set->members[i].users;
    return users == 0;
}

struct reactor *reactors_get(struct reactors *set)
{
    struct member *m = nobody_has_one(set) ? NULL : least_used(set);

    if (m && m->users <= set->home_users) {
        m->users++; /* those who come while it starts see it taken */
        if (ensure_running(m))
            return m->reactor;
        m->users--;
    }
    set->home_users++;
    return set->home;
}

void reactors_put(struct reactors *set, struct reactor *r)
{
    if (r == set->home) {
        set->home_users--;
        return;
    }
    for (unsigned i = 0; i + 1 < set->max; i++)
        if (set->members[i].reactor == r)
            set->members[i].users--;
}

unsigned reactors_started(const struct reactors *set)
{
    unsigned nr = 0;

    for (unsigned i = 0; i + 1 < set->max; i++)
        nr += set->members[i].reactor != NULL;
    return nr;
}

void reactors_free(struct reactors *set)
{
    if (!set)
        return;
    for (unsigned i = 0; i + 1 < set->max; i++) {
        struct member *m = &set->members[i];

        DEBUG_CHECK(m->users == 0 && !m->starting);
        if (!m->reactor)
            continue;
        mail_post(m->reactor, &m->stop);
        pthread_join(m->thread, NULL);
    }
    free(set);
}

/* ---- calls ---- */

struct call {
    struct mail mail;
    struct reactor *from;
    struct co *caller;
    co_group_fn *fn;
    void *arg;
    int rc;
    bool done; /* the caller's own */
};

static void call_done(struct mail *m)
{
    struct call *c = container_of(m, struct call, mail);

    c->done = true;
    reactor_wake(c->caller);
}

static void call_answer(struct call *c)
{
    c->mail.fn = call_done;
    mail_send(c->from, &c->mail);
}

SUSPENDS_UNCHECKED static void call_run(void *arg)
{
    struct call *c = arg;

    c->rc = c->fn(c->arg);
    call_answer(c);
}

static void call_start(struct mail *m)
{
    struct call *c = container_of(m, struct call, mail);

    if (reactor_spawn(call_run, c) < 0) {
        c->rc = -ENOMEM;
        call_answer(c);
    }
}

int reactor_call(struct reactor *r, co_group_fn *fn, void *arg)
{
    struct call c = {
        .mail.fn = call_start, .from = reactor_self(), .caller = co_self(), .fn = fn, .arg = arg};

    DEBUG_CHECK(c.caller);
    mail_send(r, &c.mail);
    while (!c.done)
        reactor_sleep();
    return c.rc;
}
