/* Rebuilding refcounts from references: what an image with the dirty bit needs before use. */
#ifndef VARVE_QCOW2_REFREBUILD_H
#define VARVE_QCOW2_REFREBUILD_H

#include "qcow2/header.h"

/*
 * Counts all references, stores them as a new refcount structure in free space, corrects copied
 * flags, and switches the header to it: reftable_off and reftable_clusters change, the dirty bit
 * is cleared, in *hdr too. The old structure's clusters become free.
 *
 * A crash at any moment leaves the old header, dirty bit included, and everything it refers to.
 * Errors   -EUCLEAN: the image is damaged beyond its refcounts, nothing was changed; -ENOSPC; -EIO.
 */
SUSPENDS
int qcow2_rebuild_refcounts(struct blk *blk, struct qcow2_header *hdr, struct err *err);

#endif
