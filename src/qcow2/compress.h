/* Compressed clusters: reading. Spec: "Compressed Clusters Descriptor". */
#ifndef VARVE_QCOW2_COMPRESS_H
#define VARVE_QCOW2_COMPRESS_H

#include "qcow2/entry.h"
#include "qcow2/header.h"

/*
 * Unpacks one cluster.
 *
 *   src, src_len   the stream; bytes behind its end are ignored
 *   dst            gets exactly one cluster
 *
 * Waits    for a helper thread when the cluster is large.
 * Errors   -EIO: damaged, or ends before the cluster is full (dst is then undefined); -ENOMEM.
 */
SUSPENDS
int qcow2_decompress(const struct qcow2_header *hdr, const void *src, size_t src_len, void *dst);
/* The same from the image's file: reads the stream that a compressed entry names. -EIO also when
 * it does not lie in the file. */
SUSPENDS
int qcow2_read_compressed(struct blk *blk, const struct qcow2_header *hdr, struct l2_entry e,
                          void *dst);

#endif
