/*
 * See wipe.h. Order: zeroes of some steps, flush, their discard. A discard that overtook its zeroes
 * in the device's cache could keep them from ever reaching the medium.
 *
 * Invariant: durable <= done; everything before durable is zero on the medium.
 */
#include <string.h>
#include <sys/uio.h>
#include "base/bits.h"
#include "blk/blk.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "vol/wipe.h"

#define STEP_MAX    (32 * MIB) /* small enough to stop at once, large enough for the device */
#define STEP_MIN    (1 * MIB)
#define FLUSH_EVERY (1 * GIB)
#define PIECES      32u
#define PIECE       (STEP_MAX / PIECES)
#define LOOK_NS     (100 * NSEC_PER_MSEC)

struct wipe {
    const struct wipe_opts *opts;
    struct blk *blk;
    uint64_t step; /* bytes of one */
    uint64_t done, durable;
    uint64_t next_ns; /* when the rate allows the next step */
    void *zeroes;     /* one piece; by_writes only */
};

static bool may_go_on(const struct wipe *w)
{
    return !w->opts->go_on || w->opts->go_on(w->opts->ctx, w->done, w->blk->len);
}

/* A step takes a quarter of a second at the rate, so that the device is not used in bursts. */
static uint64_t step_of(const struct wipe_opts *opts)
{
    if (opts->step)
        return MIN(opts->step, STEP_MAX);
    if (opts->rate == 0)
        return STEP_MAX;
    return MAX(MIN(align_down(opts->rate / 4, STEP_MIN), STEP_MAX), STEP_MIN);
}

/* -ECANCELED: not wanted any more. */
static SUSPENDS int wait_for_turn(struct wipe *w, uint64_t len)
{
    while (reactor_now() < w->next_ns) {
        timer_sleep_until(MIN(w->next_ns, reactor_now() + LOOK_NS));
        if (!may_go_on(w))
            return -ECANCELED;
    }
    if (w->opts->rate)
        w->next_ns =
            reactor_now() + (uint64_t)((double)len * (double)NSEC_PER_SEC / (double)w->opts->rate);
    return 0;
}

static SUSPENDS int write_zeroes(struct wipe *w, uint64_t off, uint64_t len)
{
    struct iovec vec[PIECES];
    struct iov_iter it;
    unsigned nr = 0;

    for (uint64_t left = len; left > 0; left -= vec[nr++].iov_len)
        vec[nr] = (struct iovec){w->zeroes, MIN(left, PIECE)};
    iov_iter_init(&it, vec, nr);
    return blk_writev(w->blk, off, len, &it, 0);
}

/* What was done becomes durable, and is then given back if asked. */
static SUSPENDS int settle(struct wipe *w)
{
    int rc = blk_flush(w->blk);

    if (rc < 0)
        return rc;
    uint64_t from = w->durable;
    w->durable = w->done;
    return w->opts->discard ? blk_discard(w->blk, from, w->done - from) : 0;
}

static SUSPENDS int wipe_all(struct wipe *w)
{
    int rc = 0;

    while (rc == 0 && w->done < w->blk->len) {
        uint64_t len = MIN(w->step, w->blk->len - w->done);

        rc = wait_for_turn(w, len);
        if (rc == 0)
            rc = w->opts->by_writes ? write_zeroes(w, w->done, len)
                                    : blk_zero(w->blk, w->done, len, BLK_MAY_UNMAP);
        if (rc < 0)
            break;
        w->done += len;
        if (w->done - w->durable >= FLUSH_EVERY)
            rc = settle(w);
        if (rc == 0 && w->done < w->blk->len && !may_go_on(w))
            rc = -ECANCELED;
    }
    int last = w->durable < w->done ? settle(w) : 0;
    if (rc == 0 && last == 0)
        may_go_on(w); /* tells the end */
    return rc < 0 ? rc : last;
}

static SUSPENDS int wipe_blk(struct blk *blk, const struct wipe_opts *opts, uint64_t *ret_done,
                             struct err *err)
{
    struct wipe w = {
        .opts = opts,
        .blk = blk,
        .step = step_of(opts),
        .done = opts->from,
        .durable = opts->from,
    };

    if (opts->from > blk->len)
        return err_set(err, -EINVAL, "%llu of %llu bytes cannot be wiped already",
                       (unsigned long long)opts->from, (unsigned long long)blk->len);
    _cleanup_(freep) void *zeroes = NULL;
    if (opts->by_writes) {
        zeroes = aligned_alloc(4096, PIECE);
        if (!zeroes)
            return err_errno(err, -ENOMEM, "wipe");
        memset(zeroes, 0, PIECE);
        w.zeroes = zeroes;
    }
    int rc = wipe_all(&w);
    *ret_done = w.durable;
    if (rc == -ECANCELED)
        return err_set(err, rc, "stopped after %llu of %llu bytes", (unsigned long long)w.durable,
                       (unsigned long long)blk->len);
    return rc < 0 ? err_errno(err, rc, "zero at byte %llu", (unsigned long long)w.done) : 0;
}

int wipe(const char *path, const struct wipe_opts *opts, uint64_t *ret_done, struct err *err)
{
    const struct blk_file_opts how = {.writable = true, .direct = true, .lock = BLK_LOCK_WRITE};
    struct blk *blk;

    *ret_done = opts->from;
    int rc = blk_file_open(path, &how, &blk, err);
    if (rc < 0)
        return rc;
    rc = wipe_blk(blk, opts, ret_done, err);
    blk_close(blk);
    return rc < 0 ? err_prefix(err, rc, "wipe '%s'", path) : 0;
}
