/*
 * What the files of rt share: the coroutine, the reactor, and what a backend must offer.
 *
 * Everything in struct reactor belongs to its thread but the mailbox, which any thread may fill.
 */
#ifndef VARVE_RT_INTERNAL_H
#define VARVE_RT_INTERNAL_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include "base/check.h"
#include "base/list.h"
#include "base/vec.h"
#include "rt/co.h"
#include "rt/mail.h"
#include "rt/reactor.h"
#include "rt/reactors.h"
#include "rt/timer.h"
#include "rt/wait.h"

#if defined(__SANITIZE_ADDRESS__)
#define HAVE_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define HAVE_ASAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define HAVE_TSAN 1
#elif defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define HAVE_TSAN 1
#endif
#endif

#define NO_DEADLINE UINT64_MAX

/* A blocking call for a thread of a pool. */
struct work {
    struct work *next;
    void (*fn)(struct work *w); /* w may be gone when it returns */
};
enum work_pool {
    WORK_OFFLOAD,
    WORK_IO,
};

/*
 *            co_new           co_enter              fn returns          co_free
 *   pooled ---------> ready ----------> running --------------> ended ---------> pooled
 *                                        |    ^
 *                             co_suspend v    | co_enter
 *                                      suspended
 */
struct co {
    void *sp;       /* where it left off */
    void *plain_sp; /* of the code that entered it */
    co_fn *fn;
    void *arg;
    struct co *next;      /* in a run queue, or in the pool */
    struct reactor *home; /* NULL: entered by hand */
    bool ended;
    bool queued;           /* on the run queue */
    atomic_bool posted;    /* in the mailbox, or about to be */
    bool used;             /* handed out by co_new; for debuggers */
    struct io_req *io;     /* what it waits for, if it is I/O */
    struct reactor *route; /* whose ring its reads and writes take; NULL: its own */
    struct mail mail;      /* a wake from another thread */
    /* A child of a group needs no record of its own. */
    struct co_group *group;
    co_group_fn *group_fn;
    void *group_arg;
    uint32_t ranks;               /* of the mutexes it holds; debug builds */
    uint8_t rank_count[RANK_MAX]; /* the same, counted: trylock may take a rank twice */
    /* fixed for the life of the stack */
    char *stack_low;
    size_t stack_len;
    struct co_slab *slab;
    void *fiber;           /* of TSan */
    void *fake_stack;      /* of ASan: this coroutine's, while it is away */
    void *plain_fake;      /* the same of the code that entered it */
    const void *plain_low; /* that code's stack */
    size_t plain_len;
};

struct co_queue {
    struct co *head, **tail;
};
static inline void co_queue_init(struct co_queue *q)
{
    q->head = NULL;
    q->tail = &q->head;
}
static inline void co_queue_push(struct co_queue *q, struct co *co)
{
    co->next = NULL;
    *q->tail = co;
    q->tail = &co->next;
}
static inline struct co *co_queue_pop(struct co_queue *q)
{
    struct co *co = q->head;

    if (co) {
        q->head = co->next;
        if (!q->head)
            q->tail = &q->head;
    }
    return co;
}

enum io_kind {
    IO_READV,
    IO_WRITEV,
    IO_FSYNC,
    IO_FALLOCATE,
    IO_ACCEPT,
    IO_RECV,
    IO_SENDMSG,
    IO_CONNECT,
    IO_POLL,
};
/* One call of io_*; lives in the frame of the coroutine that waits for it. */
struct io_req {
    enum io_kind kind;
    int fd;
    int flags;       /* RWF_*, FALLOC_*, MSG_*, poll events, fsync: data only */
    unsigned nr;     /* iovecs; length of an address */
    const void *ptr; /* iovecs, buffer, msghdr, sockaddr */
    uint64_t off, len;
    struct co *co;
    struct reactor *reactor; /* that performs it */
    ssize_t res;
    bool done;
    bool cancelled;
    /* the backend's own */
    struct list link;
    struct work work;
    struct mail mail;
};
/* On the thread of the reactor that performed it: the result is there. */
void io_come_back(struct io_req *req);
static inline void io_complete(struct io_req *req, ssize_t res)
{
    req->res = res;
    if (__builtin_expect(req->co->home != req->reactor, 0)) {
        io_come_back(req);
        return;
    }
    req->done = true;
    reactor_wake(req->co);
}

/* All functions run on the reactor's thread, in plain code or in a coroutine; none waits. */
struct backend {
    const char *name;
    bool has_ring; /* a reactor's requests are performed by what belongs to its thread */
    int (*init)(struct reactor *r); /* sets r->priv */
    void (*fini)(struct reactor *r);
    void (*submit)(struct reactor *r, struct io_req *req); /* may complete it at once */
    void (*cancel)(struct reactor *r, struct io_req *req);
    /* Submits what is pending and takes what is done; if `wait`, sleeps until something is
     * done, the mailbox's descriptor is signalled, or the deadline has come. */
    void (*turn)(struct reactor *r, bool wait, uint64_t deadline);
    /* Tells the kernel of memory that buffers will be cut from: the index-th piece, right behind
     * the one before. 0 or -errno. May be NULL. */
    int (*fix_buffers)(struct reactor *r, unsigned index, void *mem, size_t len);
};
#define ARENA_CHUNK_LEN ((size_t)2 << 20)
#define ARENA_CHUNKS    8u
extern const struct backend uring_backend, threads_backend, sim_backend;

/* Letters of this turn to one reactor. */
struct outbox {
    struct reactor *to;
    struct mail *newest, *oldest;
};

struct reactor {
    const struct backend *backend;
    void *priv; /* the backend's */
    struct co_queue run, yielded;
    unsigned live;    /* coroutines that have not ended */
    unsigned zombies; /* ended, but a letter about them is under way */
    struct reactor_hook *hooks, *hook_next;
    VEC(struct timer *) timers;      /* binary heap; element i is at heap_pos i + 1 */
    struct sim *sim;                 /* NULL but in the simulator */
    struct outbox out[REACTORS_MAX]; /* the first nr_out are in use */
    unsigned nr_out;
    int event_fd; /* signalled when there is mail and the reactor sleeps */
    /* atomic: written by any thread */
    _Atomic(struct mail *) mailbox; /* newest first */
    atomic_bool sleeping;
    atomic_uint posters; /* threads inside mail_post() */
};

/* ---- co.c ---- */
bool on_valgrind(void);
/* ---- reactor.c ---- */
int reactor_run_sim(struct sim *sim, int (*fn)(void *arg), void *arg);
struct co *reactor_new_co(co_fn *fn, void *arg); /* queued on this reactor */
/* ---- buf.c ---- */
void buf_arena_end(void); /* the reactor ends: its registered memory is nobody's */
/* ---- timer.c ---- */
uint64_t timers_next(const struct reactor *r); /* NO_DEADLINE if none */
void timers_expire(struct reactor *r);
/* ---- pool.c ---- */
ssize_t io_perform(const struct io_req *req); /* the blocking call, on the thread that calls */
/* ---- sim.c ---- */
uint64_t sim_now(const struct sim *sim);
struct co *sim_pick(struct sim *sim, struct co_queue *run);
SUSPENDS void sim_point(struct sim *sim);
SUSPENDS int sim_offload(struct sim *sim, int (*fn)(void *arg), void *arg);
bool sim_run_plain(struct sim *sim);
/* ---- offload.c ---- */
void work_submit(enum work_pool pool, struct work *w);

#endif
