/*
 * The simulator: see sim.h. A backend with a clock of its own.
 *
 * 1. Nothing here depends on real time, addresses or threads: a seed gives one run.
 * 2. Time moves only while no coroutine runs: a little at every turn, and to the next timer when
 *    nothing is runnable.
 * Requests on real descriptors are performed at once, blocking; sockets are refused.
 */
#include <stdio.h>
#include "rt/internal.h"
#include "rt/sim.h"

struct sim {
    struct sim_opts opts;
    uint64_t state; /* of the generator */
    uint64_t now;
    uint64_t io_count;
    /* a blocking call on the thread's own stack, asked for by a coroutine */
    int (*plain_fn)(void *arg);
    void *plain_arg;
    int plain_rc;
};

static struct sim *self_sim(void)
{
    struct reactor *r = reactor_self();

    CHECK_THAT(r && r->sim);
    return r->sim;
}

uint64_t sim_random(void)
{
    return rng_next(&self_sim()->state);
}

uint64_t sim_io_count(void)
{
    return self_sim()->io_count;
}

bool sim_stopped(void)
{
    const struct sim *sim = self_sim();

    return sim->opts.stop_after_io > 0 && sim->io_count >= sim->opts.stop_after_io;
}

uint64_t sim_now(const struct sim *sim)
{
    return sim->now;
}

/* Takes the coroutine to run next off the queue. */
struct co *sim_pick(struct sim *sim, struct co_queue *run)
{
    unsigned nr = 0;

    if (sim->opts.in_order)
        return co_queue_pop(run);
    for (const struct co *co = run->head; co; co = co->next)
        nr++;
    if (nr <= 1)
        return co_queue_pop(run);
    struct co **at = &run->head;
    for (uint64_t skip = rng_below(&sim->state, nr); skip > 0; skip--)
        at = &(*at)->next;
    struct co *co = *at;
    *at = co->next;
    if (run->tail == &co->next)
        run->tail = at;
    return co;
}

SUSPENDS static void random_delay(struct sim *sim)
{
    timer_sleep(rng_below(&sim->state, sim->opts.max_delay_ns + 1));
}

void sim_point(struct sim *sim)
{
    sim->io_count++;
    random_delay(sim);
}

/* The blocking call needs a real stack: the loop makes it as soon as we are off ours. */
int sim_offload(struct sim *sim, int (*fn)(void *arg), void *arg)
{
    sim->plain_arg = arg;
    sim->plain_fn = fn;
    co_suspend();
    int rc = sim->plain_rc;
    random_delay(sim);
    return rc;
}

bool sim_run_plain(struct sim *sim)
{
    int (*fn)(void *arg) = TAKE_PTR(sim->plain_fn);

    if (fn)
        sim->plain_rc = fn(sim->plain_arg);
    return fn != NULL;
}

static int sim_init(struct reactor *r)
{
    return 0;
}

static void sim_fini(struct reactor *r)
{
}

static void sim_submit(struct reactor *r, struct io_req *req)
{
    r->sim->io_count++;
    if (req->kind <= IO_FALLOCATE)
        io_complete(req, io_perform(req));
    else
        io_complete(req, -ENOTSUP);
}

static void sim_cancel(struct reactor *r, struct io_req *req)
{
}

static void sim_turn(struct reactor *r, bool wait, uint64_t deadline)
{
    struct sim *sim = r->sim;

    if (!wait) {
        sim->now += 1 + rng_below(&sim->state, 1000);
    } else if (deadline == NO_DEADLINE) {
        fprintf(stderr, "varve: simulator: deadlock of %u coroutines, seed %llu, I/O %llu\n",
                r->live, (unsigned long long)sim->opts.seed, (unsigned long long)sim->io_count);
        abort();
    } else {
        sim->now = MAX(sim->now, deadline);
    }
}

const struct backend sim_backend = {
    .name = "sim",
    .init = sim_init,
    .fini = sim_fini,
    .submit = sim_submit,
    .cancel = sim_cancel,
    .turn = sim_turn,
};

int sim_run(const struct sim_opts *opts, int (*fn)(void *arg), void *arg)
{
    struct sim sim = {.opts = *opts, .state = opts->seed ^ 0x6a09e667f3bcc909ull, .now = 1};

    if (sim.opts.max_delay_ns == 0)
        sim.opts.max_delay_ns = NSEC_PER_MSEC;
    /* Neighbouring seeds start far apart. */
    for (unsigned i = 0; i < 8; i++)
        rng_next(&sim.state);
    return reactor_run_sim(&sim, fn, arg);
}
