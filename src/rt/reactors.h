/*
 * Several reactors for one thing: the home reactor, which made the set, and others on threads of
 * their own, each started when it is first asked for.
 *
 * The set is its home reactor's: all calls but reactor_call() are made there. A reactor of the set
 * lives until reactors_free().
 */
#ifndef VARVE_RT_REACTORS_H
#define VARVE_RT_REACTORS_H

#include "rt/co.h"
#include "rt/wait.h"

struct reactor;
struct reactors;

#define REACTORS_MAX 16u

/* At most `max` reactors (1 to REACTORS_MAX), the calling one among them. NULL: no memory. */
struct reactors *reactors_new(unsigned max);
/* Stops the threads; nobody holds a reactor of the set any more. NULL is fine. */
SUSPENDS void reactors_free(struct reactors *set);
/* A reactor for one more user, until reactors_put(): the home reactor while nobody else has one,
 * else the one with the fewest users, another thread's before the home. Never NULL: where a thread
 * cannot be started it is the home. */
SUSPENDS struct reactor *reactors_get(struct reactors *set);
void reactors_put(struct reactors *set, struct reactor *r);
/* Threads that run now, the home's not counted. */
unsigned reactors_started(const struct reactors *set);

/* Runs fn(arg) as a coroutine of r and waits for its result. From any reactor, the same one too.
 * -ENOMEM: fn was not called. */
SUSPENDS int reactor_call(struct reactor *r, co_group_fn *fn, void *arg);

#endif
