/*
 * Stackful coroutines. Whatever can wait runs in one; a coroutine stays on its reactor for life.
 *
 * SUSPENDS marks every function that may wait. Under clang it is a capability: plain code that
 * calls such a function does not compile. Under gcc it is empty. Calls through pointers are not
 * seen by clang; debug builds assert co_self() where waiting happens.
 */
#ifndef VARVE_RT_CO_H
#define VARVE_RT_CO_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__clang__)
struct __attribute__((capability("coroutine"))) co_role {
    char unused;
};
extern struct co_role co_role;
#define SUSPENDS __attribute__((requires_capability(co_role)))
/* For the few places that enter or fake a coroutine: trust the author. */
#define SUSPENDS_UNCHECKED __attribute__((no_thread_safety_analysis))
#else
#define SUSPENDS
#define SUSPENDS_UNCHECKED
#endif

struct co;
typedef void co_fn(void *arg);

/* Usable bytes of a coroutine's stack; a guard page lies below it. */
#define CO_STACK_LEN ((size_t)64 << 10)

/* The running coroutine, NULL in plain code. */
struct co *co_self(void);
/* Low level, for the reactor: make, enter, leave, recycle. */
struct co *co_new(co_fn *fn, void *arg); /* NULL when memory is out; stack from a pool */
void co_enter(struct co *co);            /* from plain code; returns when co suspends or ends */
SUSPENDS void co_suspend(void);          /* back to whoever entered; returns at the next co_enter */
bool co_ended(const struct co *co);
void co_free(struct co *co); /* ended or never entered */
void co_pool_trim(void);     /* frees the calling thread's pooled stacks */

#endif
