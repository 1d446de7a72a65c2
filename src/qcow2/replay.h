/*
 * What a journal's records mean for the image that they are found with: the decision, apart from
 * where tables and entries lie. It is the same function that the model in tests/model runs.
 *
 * For each guest cluster the records in the journal are a chain of values v0 -> v1 -> ... -> vn.
 * What stands in the image is one of them, since the writer brought entries to the disk at moments
 * of its own: it becomes vn. If anything else stands there, for any cluster, somebody changed the
 * image behind the guard's back, and no record of the journal can be trusted: nothing is applied.
 *
 *  1. All is looked at before anything is changed.
 *  2. Applied twice, or again after any part of it, it gives the same.
 *  3. No refcount is changed. What a record took out of the map stays counted; the caller may use
 *     those clusters for something else once this function has returned.
 *  4. A cluster that a new entry names is counted, and no other entry of the journal names it.
 *
 * Order: flush (data, refcounts, tables of the dead process); entries of the refcount table, flush;
 * L2 entries, flush; L1 entries, flush. A power cut in it finds nothing that points to nothing.
 */
#ifndef VARVE_QCOW2_REPLAY_H
#define VARVE_QCOW2_REPLAY_H

#include <stddef.h>
#include "base/err.h"
#include "qcow2/journal.h"

/* The image's tables. All may wait; 0 or an error, which ends the replay. Words as on the disk, in
 * host order. L2 tables and refcount blocks are named by the word that points to them, which need
 * not be on the disk yet; it is never 0. */
struct replay_map {
    int (*get_l1)(void *ctx, uint64_t index, uint64_t *ret_word);
    int (*get_block)(void *ctx, uint64_t index, uint64_t *ret_word);
    int (*get)(void *ctx, uint64_t l1_word, uint64_t guest_cluster, struct l2_entry *ret);
    int (*refcount)(void *ctx, uint64_t block_word, uint64_t host_cluster, uint64_t *ret);
    int (*set_block)(void *ctx, uint64_t index, uint64_t word);
    int (*set)(void *ctx, uint64_t l1_word, uint64_t guest_cluster, struct l2_entry entry);
    int (*set_l1)(void *ctx, uint64_t index, uint64_t word);
    int (*flush)(void *ctx);
    void *ctx;
};

struct replay_result {
    bool is_void;    /* nothing was applied */
    char why[120];   /* then: for a person */
    uint64_t nr_set; /* entries that changed */
    /* Host clusters, ascending, that the map had alone and names no more: still counted. */
    uint64_t *unused;
    size_t nr_unused;
};

/* Errors: of the map, -ENOMEM. Then some entries may have been set; doing it again is right. */
SUSPENDS int replay_run(const struct qcow2_header *hdr, const struct journal_rec *recs, size_t nr,
                        const struct replay_map *map, struct replay_result *ret);
void replay_result_fini(struct replay_result *res);

#endif
