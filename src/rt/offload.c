/*
 * Blocking calls on helper threads: see offload.h.
 *
 * Two pools a process, one for offloaded calls and one for file I/O where io_uring is missing,
 * so that a slow program cannot hold up a disk. Threads start when work waits and none is idle,
 * and end after a while without work. After fork() the child starts with empty pools.
 */
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <spawn.h>
#include <string.h>
#include <sys/wait.h>
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

/* ---- exec ---- */

struct output {
    int fd; /* our end of the pipe, -1 at its end */
    char *text;
    size_t len, max;
};
struct exec {
    const char *const *argv;
    struct output out[2]; /* stdout, stderr */
    bool want[2];
};

/* The program's end of each wanted pipe replaces its descriptor, the others get /dev/null. */
static int spawn(const struct exec *e, const int ends[2], pid_t *ret_pid)
{
    posix_spawn_file_actions_t fa;
    posix_spawnattr_t attr;
    sigset_t none;

    posix_spawn_file_actions_init(&fa);
    posix_spawnattr_init(&attr);
    posix_spawn_file_actions_addopen(&fa, 0, "/dev/null", O_RDONLY, 0);
    for (int i = 0; i < 2; i++) {
        if (ends[i] >= 0)
            posix_spawn_file_actions_adddup2(&fa, ends[i], i + 1);
        else
            posix_spawn_file_actions_addopen(&fa, i + 1, "/dev/null", O_WRONLY, 0);
    }
    sigemptyset(&none); /* this thread blocks all signals, the program must not */
    posix_spawnattr_setsigmask(&attr, &none);
    posix_spawnattr_setflags(&attr, POSIX_SPAWN_SETSIGMASK);
    int rc =
        posix_spawnp(ret_pid, e->argv[0], &fa, &attr, (char *const *)(uintptr_t)e->argv, environ);
    posix_spawnattr_destroy(&attr);
    posix_spawn_file_actions_destroy(&fa);
    return -rc;
}

/* Takes what is in the pipe; what exceeds max is read and dropped, so that the program ends. */
static void take_output(struct output *o)
{
    char chunk[1024];
    ssize_t n = read(o->fd, chunk, sizeof(chunk));

    if (n < 0 && errno == EINTR)
        return;
    if (n <= 0) {
        close(TAKE_FD(o->fd));
        return;
    }
    size_t keep = MIN((size_t)n, o->max - o->len);
    memcpy(o->text + o->len, chunk, keep);
    o->len += keep;
}

static void drain(struct exec *e)
{
    for (;;) {
        struct pollfd p[2] = {{.fd = e->out[0].fd, .events = POLLIN},
                              {.fd = e->out[1].fd, .events = POLLIN}};

        if (p[0].fd < 0 && p[1].fd < 0)
            break;
        if (poll(p, 2, -1) < 0 && errno != EINTR)
            break;
        for (int i = 0; i < 2; i++)
            if (p[i].revents)
                take_output(&e->out[i]);
    }
}

static int exec_child(struct exec *e)
{
    int ends[2] = {-1, -1}, status;
    pid_t pid;
    int rc = 0;

    for (int i = 0; i < 2 && rc == 0; i++) {
        int fds[2];

        if (!e->want[i])
            continue;
        e->out[i].text = calloc(1, e->out[i].max + 1);
        if (!e->out[i].text)
            rc = -ENOMEM;
        else if (pipe2(fds, O_CLOEXEC) < 0)
            rc = -errno;
        else
            e->out[i].fd = fds[0], ends[i] = fds[1];
    }
    if (rc == 0)
        rc = spawn(e, ends, &pid);
    closep(&ends[0]);
    closep(&ends[1]);
    if (rc == 0)
        drain(e);
    closep(&e->out[0].fd);
    closep(&e->out[1].fd);
    if (rc < 0)
        return rc;
    while (waitpid(pid, &status, 0) < 0)
        if (errno != EINTR)
            return -errno;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int exec_work(void *arg)
{
    return exec_child(arg);
}

int offload_exec(const char *const argv[], char **ret_out, char **ret_err, size_t max)
{
    struct exec e = {
        .argv = argv,
        .out = {{.fd = -1, .max = max}, {.fd = -1, .max = max}},
        .want = {ret_out != NULL, ret_err != NULL},
    };
    int rc = offload(exec_work, &e);

    if (rc < 0) {
        free(e.out[0].text);
        free(e.out[1].text);
        return rc;
    }
    if (ret_out)
        *ret_out = e.out[0].text;
    if (ret_err)
        *ret_err = e.out[1].text;
    return rc;
}
