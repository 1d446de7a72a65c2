/*
 * Exclusive locks on guest ranges, first come, first served: a job's copies against the guest's
 * writes of the same bytes. A node lives in the frame (or the request) of its owner.
 */
#ifndef VARVE_JOB_RANGES_H
#define VARVE_JOB_RANGES_H

#include <stdint.h>
#include "base/list.h"
#include "rt/wait.h"

struct ranges {
    struct list held; /* oldest first; waiting ones too */
};
struct range {
    struct list link;
    uint64_t off, len;
    struct wait_queue followers; /* who waits for this one to go */
};

void ranges_init(struct ranges *rs);
/* Waits for every older overlapping range to be unlocked. */
SUSPENDS void range_lock(struct ranges *rs, struct range *r, uint64_t off, uint64_t len);
void range_unlock(struct range *r);
/* Waits for what overlaps now, and holds nothing. */
SUSPENDS void range_barrier(struct ranges *rs, uint64_t off, uint64_t len);

#endif
