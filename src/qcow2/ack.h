/*
 * Durability `ack` of one open image: its journal and guard from open to close.
 *
 *        ack_recover            ack_start              ack_stop
 *   (closed) ----> recovered, ----------> changes are ----------> no journal,
 *                  not recorded           recorded                bit clear
 *
 * Order at open: what a dead process left is brought into the file and flushed; the journal is
 * begun anew, with an epoch that nobody had; the header gets that epoch and the bit. At the end:
 * everything is in the image and flushed; the bit is cleared; the journal goes. A kill between two
 * of these finds a journal that is empty, or not the image's: either is right.
 */
#ifndef VARVE_QCOW2_ACK_H
#define VARVE_QCOW2_ACK_H

#include "qcow2/recover.h"

struct ack {
    struct journal *journal; /* the file, open; NULL: none */
    struct journal_id id;
    bool is_on;     /* changes are recorded */
    char note[240]; /* for the user: answered writes that are lost, or why nothing is recorded */
};

/* Of a writable image, before its tables are loaded. dir: where journals are; NULL does nothing.
 * *ret: see recover.h. An error when there is a journal that cannot be read: the image stays as it
 * is. */
SUSPENDS int ack_recover(struct ack *a, const char *dir, struct blk *blk,
                         const struct qcow2_header *hdr, struct recovery *ret, struct err *err);
/* From here on changes are recorded; all earlier ones are in the image and flushed. Where that
 * cannot be (version 2, no room in the header, no place for the file) nothing is, a->note says why,
 * and the guard is cleared: 0, too. Runs get places 0, 1, ... Errors: of writing the header. */
SUSPENDS int ack_start(struct ack *a, const char *dir, struct blk *blk, struct qcow2_header *hdr,
                       const struct journal_run *runs, size_t nr, struct err *err);
/* Ends it: everything is in the image and flushed. Also clears a guard found at open, and all other
 * autoclear bits. No flush. */
SUSPENDS int ack_stop(struct ack *a, struct blk *blk, struct qcow2_header *hdr, struct err *err);
/* Closes the file; what is in it stays, for the next open. */
void ack_fini(struct ack *a);

/* Of a read-only image, before its tables are loaded: *ret NULL if nothing is to be laid over. */
SUSPENDS int ack_view(struct ack *a, const char *dir, struct blk *blk,
                      const struct qcow2_header *hdr, struct recover_view **ret, struct err *err);
/* Of an image that is only looked at: *ret_over is its file as the next writable open will make it,
 * in memory over `blk`, and *ret what came of it (unused runs, too). *ret_over NULL: no journal
 * speaks of it, a->note says why if there ought to be one. */
SUSPENDS int ack_preview(struct ack *a, const char *dir, struct blk *blk,
                         const struct qcow2_header *hdr, struct blk **ret_over,
                         struct recovery *ret, struct err *err);

#endif
