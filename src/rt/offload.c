/*
 * Blocking calls on helper threads: see offload.h.
 *
 * Two pools a process, one for offloaded calls and one for file I/O where io_uring is missing,
 * so that a slow program cannot hold up a disk. Threads start when work waits and none is idle,
 * and end after a while without work. After fork() the child starts with empty pools.
 */
#include <pthread.h>
#include <signal.h>
#include <time.h>
#include "rt/internal.h"
#include "rt/offload.h"

#define IDLE_SECONDS 5

struct work_queue {
    pthread_mutex_t lock;
    pthread_cond_t more;
    struct work *head, **tail;            /* under lock */
    unsigned threads, idle, max, waiting; /* under lock; waiting = length of the queue */
};
static struct work_queue pools[] = {
    [WORK_OFFLOAD] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, .max = 32},
    [WORK_IO] = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, .max = 32},
};

/* With the lock held: the next piece of work, NULL when none came for a while. */
static struct work *next_work(struct work_queue *q)
{
    while (!q->head) {
        struct timespec until;

        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_sec += IDLE_SECONDS;
        q->idle++;
        int rc = pthread_cond_timedwait(&q->more, &q->lock, &until);
        q->idle--;
        if (rc == ETIMEDOUT && !q->head)
            return NULL;
    }
    struct work *w = q->head;
    q->head = w->next;
    if (!q->head)
        q->tail = &q->head;
    q->waiting--;
    return w;
}

static void *work_main(void *arg)
{
    struct work_queue *q = arg;

    pthread_mutex_lock(&q->lock);
    for (struct work *w; (w = next_work(q));) {
        pthread_mutex_unlock(&q->lock);
        w->fn(w);
        pthread_mutex_lock(&q->lock);
    }
    q->threads--;
    pthread_mutex_unlock(&q->lock);
    return NULL;
}

static int start_thread(struct work_queue *q)
{
    pthread_attr_t attr;
    pthread_t id;
    sigset_t all, old;

    pthread_attr_init(&attr);
    pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
    /* Signals are the program's business, not that of a helper. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int rc = pthread_create(&id, &attr, work_main, q);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    pthread_attr_destroy(&attr);
    return -rc;
}

static void reset_pools(void)
{
    for (unsigned i = 0; i < ARRAY_SIZE(pools); i++) {
        unsigned max = pools[i].max;

        pools[i] =
            (struct work_queue){PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, .max = max};
        pools[i].tail = &pools[i].head;
    }
}

static void init_pools(void)
{
    reset_pools();
    pthread_atfork(NULL, NULL, reset_pools);
}

void work_submit(enum work_pool pool, struct work *w)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct work_queue *q = &pools[pool];

    pthread_once(&once, init_pools);
    pthread_mutex_lock(&q->lock);
    w->next = NULL;
    *q->tail = w;
    q->tail = &w->next;
    q->waiting++;
    if (q->waiting > q->idle && q->threads < q->max) {
        q->threads++;
        if (start_thread(q) < 0) {
            /* With no thread at all the work would wait for ever. */
            q->threads--;
            CHECK_THAT(q->threads > 0);
        }
    }
    pthread_cond_signal(&q->more);
    pthread_mutex_unlock(&q->lock);
}

/* ---- offload ---- */

struct offload {
    struct work work;
    struct mail mail;
    int (*fn)(void *arg);
    void *arg;
    struct co *co;
    struct reactor *reactor;
    int rc;
    bool done;
};

static void offload_done(struct mail *m)
{
    struct offload *o = container_of(m, struct offload, mail);

    o->done = true;
    reactor_wake(o->co);
}

static void offload_work(struct work *w)
{
    struct offload *o = container_of(w, struct offload, work);

    o->rc = o->fn(o->arg);
    mail_post(o->reactor, &o->mail);
}

int offload(int (*fn)(void *arg), void *arg)
{
    struct reactor *r = reactor_self();
    struct offload o = {
        .work.fn = offload_work,
        .mail.fn = offload_done,
        .fn = fn,
        .arg = arg,
        .co = co_self(),
        .reactor = r,
    };

    DEBUG_CHECK(o.co);
    if (r->sim)
        return sim_offload(r->sim, fn, arg);
    work_submit(WORK_OFFLOAD, &o.work);
    while (!o.done)
        reactor_sleep();
    return o.rc;
}
