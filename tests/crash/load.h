/* Random operations of one client on an image, noted in a `struct sectors`. */
#ifndef VARVE_TESTS_LOAD_H
#define VARVE_TESTS_LOAD_H

#include "sectors.h"

struct config { /* what image a run is about */
    const char *name;
    struct image_create_opts create;
    uint64_t cache_bytes;
    bool has_below;
    uint64_t fixed_len;   /* a volume of this length, with old data; 0: a file */
    unsigned max_sectors; /* of one operation */
    unsigned legs;        /* sessions of a walk (walk.h); 0: LEGS */
    uint64_t chunk;       /* the volume is cut to its image at first, and grows */
};

struct load {
    struct sectors *sectors;
    struct image *img;
    const struct image_below *below;
    uint64_t *rng;
    unsigned max_sectors; /* of one operation */
    unsigned flushes;     /* of 64 operations; FUA writes are twice as many */
    uint64_t base_ns;     /* the clock's time when the run began */
    const bool *over;     /* from then on nothing is answered any more; may be NULL */
};

SUSPENDS int load_op(struct load *l);
/* An old volume: somebody's data all over it. */
SUSPENDS int load_old_data(struct blk *blk, uint64_t len);

#endif
