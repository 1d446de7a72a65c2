/*
 * The loop of a reactor: see reactor.h.
 *
 * A turn: run what is queued, call the hooks, and both again while the hooks woke somebody; then
 * submit, wait if nothing is runnable, take completions, mail and timers.
 *
 * 1. A coroutine is on the run queue at most once (`queued`).
 * 2. The reactor never waits after a coroutine ran without the hooks having been called since.
 * 3. A wake may come early or twice; whoever suspends checks what it waits for in a loop.
 * 4. The loop ends when no coroutine is left and no letter about one is under way.
 */
#include <sched.h>
#include <stdio.h>
#include <sys/eventfd.h>
#include <time.h>
#include "rt/buf.h"
#include "rt/internal.h"

#define RUNS_A_TURN 1024u /* then completions get their chance */
#define HOOK_ROUNDS 4u

static _Thread_local struct reactor *self;

struct reactor *reactor_self(void)
{
    return self;
}

const char *reactor_backend(void)
{
    return self ? self->backend->name : "none";
}

uint64_t reactor_now(void)
{
    struct timespec ts;

    if (self && self->sim)
        return sim_now(self->sim);
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * NSEC_PER_SEC + (uint64_t)ts.tv_nsec;
}

/* ---- waking and sleeping ---- */

static inline void make_runnable(struct reactor *r, struct co *co)
{
    if (co->queued)
        return;
    co->queued = true;
    co_queue_push(&r->run, co);
}

static void wake_by_mail(struct mail *m)
{
    struct co *co = container_of(m, struct co, mail);

    atomic_exchange(&co->posted, false);
    if (co->ended) {
        self->zombies--;
        if (!co->queued)
            co_free(co);
    } else {
        make_runnable(self, co);
    }
}

void reactor_wake(struct co *co)
{
    if (co->home == self) {
        make_runnable(self, co);
    } else if (!atomic_exchange(&co->posted, true)) {
        co->mail.fn = wake_by_mail;
        mail_post(co->home, &co->mail);
    }
}

void reactor_sleep(void)
{
    co_suspend();
}

void reactor_yield(void)
{
    struct co *co = co_self();

    if (!co->queued) {
        co->queued = true;
        co_queue_push(&self->yielded, co);
    }
    co_suspend();
}

/* Puts a chain of letters, linked from the newest to the oldest, into the mailbox. */
static void deliver(struct reactor *r, struct mail *newest, struct mail *oldest)
{
    /* While posters is not zero the reactor stays, even if a letter ends its last coroutine. */
    atomic_fetch_add(&r->posters, 1);
    struct mail *head = atomic_load(&r->mailbox);
    do {
        oldest->next = head;
    } while (!atomic_compare_exchange_weak(&r->mailbox, &head, newest));
    /* Whoever finds it asleep wakes it; those who come until it is awake need not. */
    if (atomic_load(&r->sleeping) && atomic_exchange(&r->sleeping, false)) {
        uint64_t one = 1;
        ssize_t rc = write(r->event_fd, &one, sizeof(one));

        (void)rc; /* fails only when the counter is full: then it is signalled already */
    }
    atomic_fetch_sub(&r->posters, 1);
}

void mail_post(struct reactor *r, struct mail *m)
{
    deliver(r, m, m);
}

void mail_send(struct reactor *r, struct mail *m)
{
    struct outbox *box = self->out;

    while (box < self->out + self->nr_out && box->to != r)
        box++;
    if (box == self->out + REACTORS_MAX) {
        mail_post(r, m);
    } else if (box == self->out + self->nr_out) {
        self->nr_out++;
        *box = (struct outbox){r, m, m};
    } else {
        m->next = box->newest;
        box->newest = m;
    }
}

static void send_mail(struct reactor *r)
{
    for (struct outbox *box = r->out; box < r->out + r->nr_out; box++)
        deliver(box->to, box->newest, box->oldest);
    r->nr_out = 0;
}

static void read_mail(struct reactor *r)
{
    struct mail *in_order = NULL;

    if (!atomic_load_explicit(&r->mailbox, memory_order_relaxed))
        return;
    struct mail *m = atomic_exchange(&r->mailbox, NULL);
    while (m) {
        struct mail *next = m->next;

        m->next = in_order;
        in_order = m;
        m = next;
    }
    while (in_order) {
        m = in_order;
        in_order = m->next;
        m->fn(m);
    }
}

/* ---- starting ---- */

struct co *reactor_new_co(co_fn *fn, void *arg)
{
    struct co *co = co_new(fn, arg);

    CHECK_THAT(self);
    if (!co)
        return NULL;
    co->home = self;
    co->io = NULL;
    co->route = NULL;
    self->live++;
    make_runnable(self, co);
    return co;
}

int reactor_spawn(co_fn *fn, void *arg)
{
    return reactor_new_co(fn, arg) ? 0 : -ENOMEM;
}

void reactor_hook_add(struct reactor_hook *hook)
{
    hook->next = self->hooks;
    hook->pprev = &self->hooks;
    if (hook->next)
        hook->next->pprev = &hook->next;
    self->hooks = hook;
}

void reactor_hook_remove(struct reactor_hook *hook)
{
    if (!hook->pprev)
        return;
    if (self->hook_next == hook)
        self->hook_next = hook->next;
    *hook->pprev = hook->next;
    if (hook->next)
        hook->next->pprev = hook->pprev;
    hook->next = NULL;
    hook->pprev = NULL;
}

/* ---- the loop ---- */

/* Runs it until it suspends. One that has ended is freed by the last who holds its address: this
 * loop, or the letter that is under way. */
static void run_one(struct reactor *r, struct co *co)
{
    bool was_ended = co->ended;

    co->queued = false;
    if (!was_ended) {
        co_enter(co);
        if (r->sim)
            while (sim_run_plain(r->sim))
                co_enter(co);
        if (!co->ended)
            return;
        r->live--;
    }
    bool posted = atomic_load_explicit(&co->posted, memory_order_acquire);
    if (posted && !was_ended)
        r->zombies++;
    if (!posted && !co->queued)
        co_free(co);
}

static void run_queued(struct reactor *r)
{
    for (unsigned i = 0; i < RUNS_A_TURN; i++) {
        struct co *co = r->sim ? sim_pick(r->sim, &r->run) : co_queue_pop(&r->run);

        if (!co)
            break;
        run_one(r, co);
    }
}

static void call_hooks(struct reactor *r)
{
    for (struct reactor_hook *h = r->hooks; h; h = r->hook_next) {
        r->hook_next = h->next;
        h->fn(h->arg);
    }
}

static void turn(struct reactor *r)
{
    if (r->yielded.head) {
        *r->run.tail = r->yielded.head;
        r->run.tail = r->yielded.tail;
        co_queue_init(&r->yielded);
    }
    for (unsigned i = 0; i < HOOK_ROUNDS; i++) {
        run_queued(r);
        call_hooks(r);
        if (!r->run.head)
            break;
    }
    send_mail(r);
    if (r->live == 0 && r->zombies == 0)
        return;
    bool wait = !r->run.head && !r->yielded.head;
    uint64_t deadline = wait ? timers_next(r) : NO_DEADLINE;
    if (wait) {
        /* Either a poster sees `sleeping`, or its letter is seen here. */
        atomic_store(&r->sleeping, true);
        wait = !atomic_load(&r->mailbox);
    }
    r->backend->turn(r, wait, deadline);
    atomic_store_explicit(&r->sleeping, false, memory_order_release);
    read_mail(r);
    timers_expire(r);
}

struct main_call {
    int (*fn)(void *arg);
    void *arg;
    int rc;
};

static void call_main(void *arg)
{
    struct main_call *call = arg;

    call->rc = call->fn(call->arg);
}

static void reactor_end(struct reactor *r)
{
    /* Ended coroutines that were woken once too often. */
    for (struct co *co = co_queue_pop(&r->run); co; co = co_queue_pop(&r->run))
        run_one(r, co);
    while (atomic_load(&r->posters) > 0)
        sched_yield();
    r->backend->fini(r);
    if (r->event_fd >= 0)
        close(r->event_fd);
    vec_free(&r->timers);
    self = NULL;
    co_pool_trim();
    buf_pool_trim();
    buf_arena_end();
}

/* The kernel, a seccomp filter or the build may lack io_uring: that is seen by trying. Valgrind
 * lets no other thread run while one is in io_uring_enter(). */
static int init_real_backend(struct reactor *r)
{
#ifdef HAVE_LIBURING
    const char *want = getenv("VARVE_IO");

    if (want ? strcmp(want, "threads") != 0 : !on_valgrind()) {
        r->backend = &uring_backend;
        if (r->backend->init(r) == 0)
            return 0;
        if (want && strcmp(want, "uring") == 0)
            fprintf(stderr, "varve: io_uring is not available, using threads\n");
    }
#endif
    r->backend = &threads_backend;
    return r->backend->init(r);
}

static int loop(struct sim *sim, int (*fn)(void *arg), void *arg)
{
    struct main_call call = {fn, arg, 0};
    struct reactor r = {.backend = &sim_backend, .sim = sim, .event_fd = -1};

    CHECK_THAT(!self && !co_self());
    co_queue_init(&r.run);
    co_queue_init(&r.yielded);
    r.event_fd = eventfd(0, EFD_CLOEXEC);
    if (r.event_fd < 0)
        return -errno;
    int rc = sim ? sim_backend.init(&r) : init_real_backend(&r);
    if (rc < 0) {
        close(r.event_fd);
        return rc;
    }
    self = &r;
    rc = reactor_spawn(call_main, &call);
    while (r.live > 0 || r.zombies > 0)
        turn(&r);
    reactor_end(&r);
    return rc < 0 ? rc : call.rc;
}

int reactor_run(int (*fn)(void *arg), void *arg)
{
    return loop(NULL, fn, arg);
}

int reactor_run_sim(struct sim *sim, int (*fn)(void *arg), void *arg)
{
    return loop(sim, fn, arg);
}
