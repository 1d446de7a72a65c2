/*
 * Claims: whoever changes the mapping of guest clusters holds a claim on them.
 *
 * A write in place needs none. Writers of different clusters never meet here. A request holds
 * one claim at a time and waits for nobody's claim while it holds one: there is no cycle.
 */
#include "qcow2/internal.h"

static struct claim *find_conflict(struct image *img, uint64_t first, uint64_t last)
{
    list_for_each(it, &img->claims) {
        struct claim *c = list_entry(it, struct claim, link);

        if (c->first <= last && first <= c->last)
            return c;
    }
    return NULL;
}

bool claim_take(struct image *img, struct claim *claim, uint64_t first, uint64_t last)
{
    struct claim *other = find_conflict(img, first, last);

    if (other) {
        img->stats.claim_waits++;
        wait_queue_sleep(&other->waiters);
        return false;
    }
    claim->first = first;
    claim->last = last;
    wait_queue_init(&claim->waiters);
    list_push_back(&img->claims, &claim->link);
    return true;
}

void claim_drop(struct claim *claim)
{
    list_remove(&claim->link);
    wait_queue_wake_all(&claim->waiters);
}
