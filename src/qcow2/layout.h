/* How large the metadata of a new image is. Spec: "Host cluster management". */
#ifndef VARVE_QCOW2_LAYOUT_H
#define VARVE_QCOW2_LAYOUT_H

#include "qcow2/header.h"
#include "qcow2/image.h"

/* Header values of a new image, tables not yet placed; opts passed image_create_check(). Names are
 * borrowed from opts: no qcow2_header_fini. */
void qcow2_create_header(const struct image_create_opts *opts, struct qcow2_header *ret);

/* Clusters of refcount blocks and refcount table that count `clusters` others and themselves; the
 * table has at least min_table clusters. */
void qcow2_refcount_clusters(const struct qcow2_header *hdr, uint64_t clusters, uint64_t min_table,
                             uint64_t *ret_blocks, uint64_t *ret_table);

/* All clusters of an image whose guest clusters are all allocated: what image_measure calls full.
 */
uint64_t qcow2_full_clusters(const struct qcow2_header *hdr);

#endif
