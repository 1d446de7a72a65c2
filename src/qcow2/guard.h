/*
 * The guard in an image's header: says that an image has a map journal, and which one.
 *
 * An autoclear bit that other programs do not know, and a random epoch in a header extension that
 * they keep. A program that opens the image to write, and does not know the bit, clears it (spec:
 * "autoclear_features"); one that knows it sets another epoch. Either makes a journal void.
 *
 * Only version 3 has the bit. The header is written in one piece of 512 bytes or not at all.
 */
#ifndef VARVE_QCOW2_GUARD_H
#define VARVE_QCOW2_GUARD_H

#include "qcow2/header.h"

#define QCOW2_AUTOCLEAR_JOURNAL (1ull << 62)

struct guard_epoch {
    uint64_t hi, lo;
};

/* A new one that nobody had before. */
int guard_epoch_make(struct guard_epoch *ret);
/* The image's; false if it has none, or the bit is clear. */
bool guard_get(const struct qcow2_header *hdr, struct guard_epoch *ret);
/* Writes bit and epoch, and clears all other autoclear bits. -ENOTSUP in version 2, -ENOSPC where
 * the header has no room for it: then nothing has changed. No flush: it speaks to this boot only.
 */
SUSPENDS int guard_set(struct blk *blk, struct qcow2_header *hdr, struct guard_epoch epoch,
                       struct err *err);
/* Clears all autoclear bits; the journal is empty. No flush, for the same reason. */
SUSPENDS int guard_clear(struct blk *blk, struct qcow2_header *hdr);

#endif
