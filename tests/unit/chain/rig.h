/*
 * Layers on memory for the tests of chain/ and job/: devices that outlive the images opened on
 * them, patterns that tell sector and writer, and whole-range helpers.
 */
#ifndef VARVE_TESTS_CHAIN_RIG_H
#define VARVE_TESTS_CHAIN_RIG_H

#include "blk/blk.h"
#include "chain/chain.h"
#include "chain/merge.h"
#include "job/ranges.h"
#include "rt/sim.h"
#include "test.h"

#define RIG_SECTOR 512u

/* A device that forwards to `inner` and does not close it. */
struct blk *rig_borrow(struct blk *inner);

struct rig_shape { /* of a layer */
    bool raw;
    uint64_t len;
    uint64_t cluster_size;
    bool extended_l2;
    unsigned version; /* 0 = 3 */
    enum qcow2_prealloc prealloc;
};
/* Random legal shape of an overlay or base. */
struct rig_shape rig_random_shape(uint64_t *rng, uint64_t len, bool is_base);
/* Makes an empty layer on inner, naming `backing` (NULL: none). */
SUSPENDS void rig_create(struct blk *inner, const struct rig_shape *shape, const char *backing,
                         const char *backing_format);
SUSPENDS struct layer *rig_open(struct blk *inner, bool is_qcow2, bool writable, const char *name);
SUSPENDS struct layer *rig_open_as(struct blk *inner, bool is_qcow2, const struct layer_opts *opts,
                                   const char *name);
/* Opens nr devices, top first, as a chain; the top writable. */
SUSPENDS struct chain *rig_chain(struct blk *const *inner, const bool *is_qcow2, unsigned nr);

/* Every sector of buf says its stamp and its place; stamp 0 is all zeroes. */
void rig_fill(void *buf, uint64_t off, uint64_t len, uint64_t stamp);
/* The stamp of one sector as it was read; fails the test if the sector is torn or misplaced. */
uint64_t rig_stamp(const void *sector, uint64_t off);

SUSPENDS int rig_write(struct chain *chain, uint64_t off, uint64_t len, uint64_t stamp);
SUSPENDS int rig_read(struct chain *chain, uint64_t off, void *buf, uint64_t len);
/* Fails the test unless the range reads as this stamp. */
SUSPENDS void rig_expect(struct chain *chain, uint64_t off, uint64_t len, uint64_t stamp);
/* The whole view of a layer (NULL: top); the caller frees. */
SUSPENDS uint8_t *rig_view(struct chain *chain, struct layer *layer);
/* Full check of the image on inner, read-only: corruptions must be 0; returns leaks. */
SUSPENDS uint64_t rig_check(struct blk *inner, const char *what);

#endif
