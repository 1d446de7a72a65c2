/*
 * A walk: one image through many sessions in durability `ack`, each ended by a kill, a power cut or
 * a close. answered.c says what must hold.
 */
#ifndef VARVE_TESTS_WALK_H
#define VARVE_TESTS_WALK_H

#include "rt/timer.h"
#include "load.h"

#define BOUND_NS (1000 * NSEC_PER_MSEC) /* what docs/durability.md promises */

enum mutation { /* of the world; those of the product are flush_mutation */
                AS_IS,
                NO_WRITE_BACK,  /* nothing is written back by age */
                NO_JOURNAL,     /* it is gone after a kill */
                ANY_BOOT,       /* it is of this boot after a power cut */
                ANY_EPOCH,      /* it is taken for the image's after others had it */
                UNFLUSHED_OPEN, /* the device does not flush while the image opens */
};

struct totals {
    uint64_t legs, kills, cuts, in_open_kills, in_open_cuts, closed, foreign, views;
    uint64_t kills_with_records, records, at_risk, lost, oldest_ns, violations;
};

/* Its findings are counted in t; quiet: only that, and the walk ends with the first. */
void walk(const struct config *cfg, uint64_t seed, enum mutation m, bool quiet, struct totals *t);

#endif
