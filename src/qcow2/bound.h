/*
 * One bound of bytes over several caches, and one clock: its hand goes through the members in turn,
 * entry by entry, spares what was used since it passed and lets go of the rest. So the bytes lie
 * where they are used, and no member has a share of its own.
 *
 *  1. bytes is the sum of what the members have told.
 *  2. What cannot go (pinned, dirty, loading) is passed by: for that long bytes may be above limit.
 *
 * One reactor; nothing waits. The owner outlives the members.
 */
#ifndef VARVE_QCOW2_BOUND_H
#define VARVE_QCOW2_BOUND_H

#include <stdbool.h>
#include <stdint.h>
#include "base/list.h"

struct bound_member {
    struct list link;
    uint64_t bytes;
    /* One step of the hand in this member: lets one entry go, or spares it for now (force: only
     * if it cannot go). True: the hand has come round. */
    bool (*step)(struct bound_member *m, bool force);
};

struct bound {
    uint64_t limit, bytes, bytes_max;
    uint64_t fixed; /* of bytes: what no step gives back (tables that are always there) */
    uint64_t evictions;
    struct list members; /* the hand is in the first one */
    /* What it has can be had again without I/O: it gives first, down to a sixteenth of the bound.
     * NULL: none. */
    struct bound_member *first;
};

void bound_init(struct bound *b, uint64_t limit);
void bound_join(struct bound *b, struct bound_member *m);
void bound_part(struct bound *b, struct bound_member *m);
void bound_add(struct bound *b, struct bound_member *m, int64_t bytes);
void bound_add_fixed(struct bound *b, int64_t bytes);
/* Bytes that may still come before something has to go. Fixed bytes take at most a half. */
uint64_t bound_left(const struct bound *b);
/* Lets entries go until `need` bytes are left, if enough of them can. Bounded work. */
void bound_make_room(struct bound *b, uint64_t need);

/* What an allocation of n bytes takes from the heap. */
static inline uint64_t heap_cost(uint64_t n)
{
    uint64_t chunk = (n + 8 + 15) & ~15ull;

    return chunk < 32 ? 32 : chunk;
}

#endif
