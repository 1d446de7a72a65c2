/*
 * The simulator: a seeded stand-in for reactor and ring. Time is virtual; which runnable
 * coroutine runs next and when an I/O point completes is drawn from the seed, so a failure
 * replays from the seed in its message. Real descriptors are not used under it: devices are
 * blk/mem and blk/crash, whose requests pass io_point().
 */
#ifndef VARVE_RT_SIM_H
#define VARVE_RT_SIM_H

#include <stdbool.h>
#include <stdint.h>

struct sim_opts {
    uint64_t seed;
    uint64_t max_delay_ns;  /* of an I/O point; 0 = 1 ms */
    bool in_order;          /* run queue first come, first served (for order tests) */
    uint64_t stop_after_io; /* > 0: after that many I/O points sim_stopped() becomes true */
};

/* Runs fn(arg) as the main coroutine in a simulated reactor. Returns its result. A run queue
 * and timer heap that are both empty while coroutines still sleep is a deadlock: it prints the
 * seed and aborts. */
int sim_run(const struct sim_opts *opts, int (*fn)(void *arg), void *arg);
/* The seeded generator of the running simulation (any use draws from the same sequence). */
uint64_t sim_random(void);
uint64_t sim_io_count(void); /* I/O points passed so far */
bool sim_stopped(void);      /* stop_after_io reached: devices refuse (-EIO) from then on */

/* A small generator for tests outside the simulator too (xorshift64*); never 0 state. */
static inline uint64_t rng_next(uint64_t *state)
{
    uint64_t x = *state ? *state : 0x9e3779b97f4a7c15ull;

    x ^= x >> 12;
    x ^= x << 25;
    x ^= x >> 27;
    *state = x;
    return x * 0x2545f4914f6cdd1dull;
}
static inline uint64_t rng_below(uint64_t *state, uint64_t n)
{
    return rng_next(state) % n;
}

#endif
