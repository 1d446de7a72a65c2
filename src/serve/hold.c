/*
 * A pause for one instant over several disks. Each disk is served by a process of its own, so
 * whoever snapshots several together first holds them all, then takes the snapshots, each of which
 * ends its hold.
 *
 *   x-varve-hold        what is slow is done (dirty tables, a device flush), then the gate closes
 * and the requests inside finish blockdev-snapshot   is done behind the closed gate, which then
 * opens; so is a transaction x-varve-release     the gate opens, nothing has changed
 *
 * A hold ends by itself after its time: whoever asked for it may be dead, and a guest must not wait
 * for it. A snapshot that comes later is refused if it says that it belongs to a hold: the instant
 * has passed. One coroutine closes the gate, waits, pushes and opens it again.
 */
#include "rt/reactor.h"
#include "serve/internal.h"

#define HOLD_MS_DEFAULT 1000
#define HOLD_MS_MAX     10000

SUSPENDS static int wait_held(struct serve *s)
{
    struct serve_hold *h = &s->hold;
    uint64_t deadline = reactor_now() + h->ms * NSEC_PER_MSEC;

    h->state = HOLD_HELD;
    co_cond_broadcast(&h->changed);
    while (h->state == HOLD_HELD)
        if (co_cond_wait_until(&h->changed, NULL, deadline) == -ETIMEDOUT && h->state == HOLD_HELD)
            return -ETIMEDOUT;
    return 0;
}

SUSPENDS static int hold_main(void *arg)
{
    struct serve *s = arg;
    struct serve_hold *h = &s->hold;

    h->rc = chain_hold_flushed(s->chain, &h->err);
    if (h->rc == 0) {
        if (wait_held(s) < 0)
            serve_warn(s, "held for a snapshot that did not come");
        else if (h->state == HOLD_PUSHING)
            h->rc = chain_push_held(s->chain, h->overlay, &h->pivot, &h->err);
        chain_release(s->chain);
    }
    h->state = HOLD_NONE;
    co_cond_broadcast(&h->changed);
    return 0;
}

bool serve_is_held(const struct serve *s)
{
    return s->hold.state != HOLD_NONE;
}

int serve_refuse_held(const struct serve *s, struct err *err)
{
    return serve_is_held(s) ? err_set(err, -EBUSY, "The disk is held for a snapshot") : 0;
}

SUSPENDS static int wait_end(struct serve *s)
{
    while (s->hold.state != HOLD_NONE)
        co_cond_wait(&s->hold.changed, NULL);
    co_group_wait(&s->hold.group);
    return s->hold.rc;
}

void serve_hold_end(struct serve *s)
{
    struct serve_hold *h = &s->hold;

    while (h->state == HOLD_CLOSING)
        co_cond_wait(&h->changed, NULL);
    if (h->state == HOLD_HELD) {
        h->state = HOLD_ENDING;
        co_cond_broadcast(&h->changed);
    }
    (void)wait_end(s);
}

int serve_hold_push(struct serve *s, struct layer *overlay, struct pivot_stats *ret,
                    struct err *err)
{
    struct serve_hold *h = &s->hold;

    if (h->state != HOLD_HELD)
        return err_set(err, -ETIMEDOUT, "The disk is not held any more");
    h->overlay = overlay;
    h->state = HOLD_PUSHING;
    co_cond_broadcast(&h->changed);
    int rc = wait_end(s);
    *ret = h->pivot;
    return rc < 0 ? err_set(err, rc, "%s", err_text(&h->err)) : 0;
}

int cmd_hold(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    struct serve_hold *h = &s->hold;
    int64_t ms = arg_int(args, "timeout-ms", HOLD_MS_DEFAULT);
    int rc = serve_refuse_held(s, err);

    if (rc < 0)
        return rc;
    if (ms < 1 || ms > HOLD_MS_MAX)
        return err_set(err, -EINVAL, "Parameter 'timeout-ms' expects 1 to %u", HOLD_MS_MAX);
    if (!chain_is_writable(s->chain))
        return err_set(err, -EROFS, "The disk is served read-only");
    h->ms = (uint64_t)ms;
    h->err = (struct err){0};
    h->state = HOLD_CLOSING;
    rc = co_group_spawn(&h->group, hold_main, s);
    if (rc < 0) {
        h->state = HOLD_NONE;
        return err_errno(err, rc, "hold");
    }
    while (h->state == HOLD_CLOSING)
        co_cond_wait(&h->changed, NULL);
    if (h->state == HOLD_NONE) /* it failed, or its time is over already */
        return h->rc < 0 ? err_set(err, h->rc, "%s", err_text(&h->err))
                         : err_set(err, -ETIMEDOUT, "The disk was not held in time");
    return 0;
}

int cmd_release(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;

    if (!serve_is_held(s))
        return err_set(err, -ENOENT, "The disk is not held");
    serve_hold_end(s);
    return 0;
}
