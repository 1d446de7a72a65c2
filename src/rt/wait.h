/*
 * Waiting for each other: coroutine mutex, condition, group of children, gate, byte budget.
 *
 * All of them belong to one reactor: no atomics, no threads. A co_mutex may be held over a
 * wait. All hand-offs are first come, first served. Lock ranks, in the order of taking
 * (debug builds check that a coroutine takes them in rising order):
 */
#ifndef VARVE_RT_WAIT_H
#define VARVE_RT_WAIT_H

#include <stdbool.h>
#include <stdint.h>
#include "base/list.h"
#include "rt/co.h"

enum lock_rank {
    RANK_JOB = 1,  /* a job's control */
    RANK_CHAIN,    /* shape of a chain: pivots, jobs that end */
    RANK_IMAGE,    /* an image's slow operations: flush, resize */
    RANK_L1,       /* linking a new L2 table */
    RANK_SLICE,    /* loading or writing one metadata slice */
    RANK_ALLOC,    /* the cluster allocator */
    RANK_REFCOUNT, /* refcount blocks and their table */
    RANK_BLK,      /* read-modify-write of a device block */
    RANK_SEND,     /* a socket's output */
    RANK_VOLUMES,  /* what is known of a volume group, while LVM's commands run */
    RANK_MAX = 32,
};

struct wait_queue { /* coroutines asleep, oldest first */
    struct list waiters;
};
void wait_queue_init(struct wait_queue *q);
SUSPENDS void wait_queue_sleep(struct wait_queue *q);
bool wait_queue_wake_one(struct wait_queue *q); /* true if there was one */
void wait_queue_wake_all(struct wait_queue *q);

struct co_mutex {
    struct co *owner;
    struct wait_queue queue;
    enum lock_rank rank;
};
void co_mutex_init(struct co_mutex *m, enum lock_rank rank);
SUSPENDS void co_mutex_lock(struct co_mutex *m);
bool co_mutex_trylock(struct co_mutex *m);
void co_mutex_unlock(struct co_mutex *m); /* by the owner; hands over to the oldest waiter */

/* Condition: sleep releases the mutex (may be NULL) and takes it again before it returns. */
struct co_cond {
    struct wait_queue queue;
};
void co_cond_init(struct co_cond *c);
SUSPENDS void co_cond_wait(struct co_cond *c, struct co_mutex *m);
/* The same with a deadline on reactor_now()'s clock: 0, or -ETIMEDOUT. */
SUSPENDS int co_cond_wait_until(struct co_cond *c, struct co_mutex *m, uint64_t deadline);
void co_cond_signal(struct co_cond *c);
void co_cond_broadcast(struct co_cond *c);

/* Children of a coroutine. The parent cannot go before them; the first error wins. */
struct co_group {
    unsigned running;
    int rc; /* first error, 0 while none */
    struct wait_queue waiting;
};
typedef int co_group_fn(void *arg);
void co_group_init(struct co_group *g);
/* Starts fn(arg) as a child on this reactor; 0 or -ENOMEM (then fn was not called). */
int co_group_spawn(struct co_group *g, co_group_fn *fn, void *arg);
/* Waits until fewer than `limit` children run (bounds the fan-out). */
SUSPENDS void co_group_wait_below(struct co_group *g, unsigned limit);
/* Waits for all children; returns the first error or 0. The group may be used again. */
SUSPENDS int co_group_wait(struct co_group *g);

/* Gate: requests pass in and out; closing waits until all inside have left, new ones wait. */
struct gate {
    unsigned inside;
    unsigned closed; /* depth: closers queue up one after the other */
    struct wait_queue entering, closing, draining;
};
void gate_init(struct gate *g);
SUSPENDS void gate_enter(struct gate *g);
void gate_leave(struct gate *g);
SUSPENDS void gate_close(struct gate *g); /* returns when nobody is inside; exclusive */
void gate_open(struct gate *g);
static inline bool gate_is_closed(const struct gate *g)
{
    return g->closed != 0;
}

/* Budget: a pool of units (bytes, requests). take waits until n units are there, in order;
 * n above the whole is cut to the whole: the same n must be given back. */
struct co_budget {
    uint64_t whole, left;
    struct list waiters;
};
void co_budget_init(struct co_budget *b, uint64_t whole);
SUSPENDS uint64_t co_budget_take(struct co_budget *b, uint64_t n); /* units taken */
void co_budget_give(struct co_budget *b, uint64_t n);

#endif
