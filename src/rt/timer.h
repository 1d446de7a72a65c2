/* Deadlines and sleep on reactor_now()'s clock (nanoseconds). */
#ifndef VARVE_RT_TIMER_H
#define VARVE_RT_TIMER_H

#include <stdint.h>
#include "base/list.h"
#include "rt/co.h"

#define NSEC_PER_SEC  1000000000ull
#define NSEC_PER_MSEC 1000000ull

SUSPENDS void timer_sleep(uint64_t ns);
SUSPENDS void timer_sleep_until(uint64_t deadline);

/* A callback at a deadline; embedded in its owner. Runs in plain code on the loop: it may wake
 * coroutines, it may not wait. */
struct timer {
    uint64_t deadline;
    void (*fn)(struct timer *t);
    unsigned heap_pos; /* reactor's own; 0 while not armed */
};
void timer_init(struct timer *t, void (*fn)(struct timer *t));
void timer_arm(struct timer *t, uint64_t deadline); /* also re-arms */
void timer_disarm(struct timer *t);                 /* harmless when not armed */

#endif
