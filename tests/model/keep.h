/* A device that outlives the image opened on it: forwards to a child and does not close it. */
#ifndef VARVE_TESTS_KEEP_H
#define VARVE_TESTS_KEEP_H

#include "blk/blk.h"

/* The child stays the caller's. fixed_len: the device does not grow (as a volume). */
struct blk *keep_new(struct blk *child, bool fixed_len);

struct keep_opts {
    bool fixed_len;
    uint64_t len; /* a part of the child; 0: all */
    /* Makes it longer, and may wait: *len is what was asked for (0: nothing), then what it has.
     * NULL: cannot. */
    int (*extend)(void *ctx, uint64_t *len);
    uint64_t ino; /* its blk_identity, on device 1; 0: it has none */
    /* Called when the device has refused a request because the simulation was stopped. */
    void (*refused)(void *ctx);
    void *ctx;
    const bool *drop_flushes; /* while true they do nothing; may be NULL */
};
struct blk *keep_new_as(struct blk *child, const struct keep_opts *opts);

#endif
