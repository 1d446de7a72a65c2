/*
 * A linear list: it holds the writes in flight and a handful of copies, and only while a job needs
 * it. Each waits only for older ones, so there is no cycle.
 */
#include "job/ranges.h"
#include "base/bits.h"

void ranges_init(struct ranges *rs)
{
    list_init(&rs->held);
}

static struct range *older_overlap(struct ranges *rs, const struct range *r)
{
    list_for_each(it, &rs->held) {
        struct range *o = list_entry(it, struct range, link);

        if (o == r)
            return NULL;
        if (ranges_overlap(o->off, o->len, r->off, r->len))
            return o;
    }
    return NULL;
}

void range_lock(struct ranges *rs, struct range *r, uint64_t off, uint64_t len)
{
    struct range *o;

    r->off = off;
    r->len = len;
    wait_queue_init(&r->followers);
    list_push_back(&rs->held, &r->link);
    while ((o = older_overlap(rs, r)))
        wait_queue_sleep(&o->followers);
}

void range_unlock(struct range *r)
{
    list_remove(&r->link);
    wait_queue_wake_all(&r->followers);
}

void range_barrier(struct ranges *rs, uint64_t off, uint64_t len)
{
    struct range r;

    range_lock(rs, &r, off, len);
    range_unlock(&r);
}
