/*
 * Opening an image whose process was killed: its journal against its file.
 *
 * Works on the file and the header alone, before any table is loaded: what opens the image
 * afterwards finds it as if the last write had been flushed. A writable image is changed; for a
 * read-only one the changes are kept in memory and laid over what is read.
 *
 * The caller has the image's lock: requests of the dead process that were still under way hold its
 * descriptor, and with it the lock, so none of them comes later.
 */
#ifndef VARVE_QCOW2_RECOVER_H
#define VARVE_QCOW2_RECOVER_H

#include <stddef.h>
#include "blk/blk.h"
#include "qcow2/journal.h"

struct recovery {
    bool is_void;  /* the journal says nothing about this image: what was flushed is there */
    char why[160]; /* then */
    uint64_t nr_records, nr_set;
    /* Host clusters counted once and used by nothing, ascending: for the pool. */
    struct journal_run *runs;
    size_t nr_runs;
};

/* id: file and epoch of the header's guard. On success everything is in the file and flushed, and
 * the journal may be begun anew; on an error it stays as it is, and opening again is right. */
SUSPENDS int recover_image(struct blk *blk, const struct qcow2_header *hdr, const struct journal *j,
                           const struct journal_id *id, struct recovery *ret, struct err *err);
void recovery_fini(struct recovery *r);

/* Changes laid over the tables of a read-only image. */
struct recover_view;
/* *ret NULL if there is nothing to lay over. */
SUSPENDS int recover_view_new(struct blk *blk, const struct qcow2_header *hdr,
                              const struct journal *j, const struct journal_id *id,
                              struct recovery *ret_recovery, struct recover_view **ret,
                              struct err *err);
void recover_view_free(struct recover_view *view);
/* The L1 table as loaded, in host order. */
void recover_view_l1(const struct recover_view *view, uint64_t *l1, uint64_t entries);
/* Part of an L2 table as read (disk order): entries of nr guest clusters from `first` on. */
void recover_view_l2(const struct recover_view *view, const struct qcow2_header *hdr, void *table,
                     uint64_t first, unsigned nr);

#endif
