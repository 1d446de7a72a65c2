/*
 * Claims: whoever changes the mapping of guest clusters holds a claim on them.
 *
 * A write in place needs none. Writers of different clusters never meet here. A request holds
 * one claim at a time and waits for nobody's claim while it holds one: there is no cycle.
 *
 * Writes that arrive together often want parts of one cluster. Instead of waiting for the first one
 * and its copy, they join it: their data takes the place of what would be copied, and one device
 * write brings all of it. A join does not overlap the holder's data, nor another join.
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
    claim->open = false;
    list_init(&claim->joins);
    list_push_back(&img->claims, &claim->link);
    return true;
}

void claim_open(struct claim *claim, uint64_t start, uint64_t end)
{
    claim->open = true;
    claim->start = start;
    claim->end = end;
}

/* Where a join of [start, end) belongs in the list; NULL: it overlaps what is written already. */
static struct list *join_place(struct claim *claim, uint64_t start, uint64_t end)
{
    struct list *place = &claim->joins;

    if (start < claim->end && claim->start < end)
        return NULL;
    list_for_each(it, &claim->joins) {
        const struct join *j = list_entry(it, struct join, link);

        if (start < j->guest_off + j->len && j->guest_off < end)
            return NULL;
        if (j->guest_off < start)
            place = it;
    }
    return place;
}

bool claim_join(struct image *img, struct join *join)
{
    uint64_t cluster = guest_cluster(img, join->guest_off);
    struct claim *claim = find_conflict(img, cluster, cluster);

    if (!claim || !claim->open)
        return false;
    uint64_t end = (claim->last + 1) << img->hdr.cluster_bits;
    join->len = MIN(join->len, end - join->guest_off);
    struct list *place = join_place(claim, join->guest_off, join->guest_off + join->len);
    if (!place)
        return false;
    list_add_after(place, &join->link);
    wait_queue_sleep(&claim->waiters); /* the claim is gone then */
    return true;
}

void claim_drop(struct claim *claim)
{
    list_remove(&claim->link);
    wait_queue_wake_all(&claim->waiters);
}
