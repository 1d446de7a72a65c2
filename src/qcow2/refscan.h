/*
 * Counting every reference to every host cluster of an image: what check compares with the stored
 * refcounts and what a rebuild of them starts from.
 *
 * Needs one byte a cluster of the file, whatever the tables say. Findings go to `report`.
 */
#ifndef VARVE_QCOW2_REFSCAN_H
#define VARVE_QCOW2_REFSCAN_H

#include "base/table.h"
#include "qcow2/entry.h"
#include "qcow2/image.h"

enum ref_kind {
    REF_DATA,    /* may be shared with snapshots */
    REF_L2,      /* an L2 table: shared with snapshots, by nothing else */
    REF_METADATA /* exactly one owner */
};

struct refscan {
    struct blk *blk;                /* borrowed */
    const struct qcow2_header *hdr; /* borrowed */
    struct image_check *res;        /* borrowed: corruptions, check_errors and figures are added */
    void (*report)(void *ctx, const char *line);
    void *ctx;

    uint64_t nr_clusters; /* of the file, the last one may be cut */
    uint8_t *counts;      /* packed, see refscan.c; owned */
    struct table more;    /* counts that do not fit into a byte */
    /* Bit a cluster: its stored refcount is exactly one. With it COPIED flags are held against
     * the stored refcounts; NULL: flags are ignored. Owned. */
    uint8_t *stored_one;
};

/* -EFBIG for a file of more clusters than can be counted; -ENOMEM. */
int refscan_init(struct refscan *s, struct blk *blk, const struct qcow2_header *hdr,
                 struct image_check *res, struct err *err);
void refscan_fini(struct refscan *s);
/* Header, L1 and L2 tables, data, snapshots, bitmaps, encryption header: all but the refcount
 * structure itself. Findings are counted; 0 or -ENOMEM. */
SUSPENDS
int refscan_all(struct refscan *s);
/* One reference to each cluster of a host range; a range that leaves the file is a finding. */
int refscan_add(struct refscan *s, enum ref_kind kind, uint64_t off, uint64_t len,
                const char *what);
/* Room to count clusters behind the file's end. */
int refscan_grow(struct refscan *s, uint64_t nr_clusters);
uint64_t refscan_count(const struct refscan *s, uint64_t cluster);
/* One finding: a line for the reader, and a corruption counted. */
void refscan_corrupt(struct refscan *s, const char *fmt, ...) PRINTF_LIKE(2, 3);
/* A table could not be read: the result is incomplete. */
void refscan_unreadable(struct refscan *s, const char *what, uint64_t off, int rc);
void refscan_say(struct refscan *s, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* ---- check.c: image_check() of a file that is not open as an image ---- */
SUSPENDS int qcow2_check(struct blk *blk, const struct qcow2_header *hdr, struct image_check *ret,
                         void (*report)(void *ctx, const char *line), void *ctx, struct err *err);

#endif
