/*
 * What jobs that merge layers need beyond plain requests: steps inside a gate of their own,
 * a watch on guest writes, access to layers below the top, and changes of shape.
 *
 * A job's step stands between chain_work_enter and chain_work_leave and waits for nothing but I/O
 * and guest writes under way. chain_freeze waits for the steps first, then for guest requests.
 */
#ifndef VARVE_CHAIN_MERGE_H
#define VARVE_CHAIN_MERGE_H

#include "chain/chain.h"

/* ---- steps of a job ---- */
SUSPENDS void chain_work_enter(struct chain *chain);
void chain_work_leave(struct chain *chain);
/* What the layers from `from` down to, but without, `until` (NULL: all) hold of a range:
 * EXTENT_UNALLOCATED (none of them), EXTENT_ZERO (past the end of a shorter layer too), EXTENT_DATA
 * or EXTENT_COMPRESSED. Whole units of data that lie in a hole of their file are EXTENT_ZERO
 * (hole_unit 0: nobody looks). Inside a step. */
SUSPENDS int chain_merge_map(struct chain *chain, struct layer *from, const struct layer *until,
                             uint64_t off, uint64_t len, uint64_t hole_unit, struct extent *ret);
/* Whether the view of a layer (NULL: of nothing) is known to be zero at off, and for how long.
 * Inside a step. */
SUSPENDS int chain_merge_is_zero(struct chain *chain, struct layer *from, uint64_t off,
                                 uint64_t len, uint64_t hole_unit, bool *ret_zero,
                                 uint64_t *ret_len);
/* Reads the view of a layer; like chain_read_layer, inside a step. */
SUSPENDS int chain_merge_read(struct chain *chain, struct layer *from, uint64_t off, uint64_t len,
                              struct iov_iter *iov);
/* Writes to one layer, whatever its place; inside a step. The caller knows that the chain's view
 * does not change by it. */
SUSPENDS int chain_merge_write(struct chain *chain, struct layer *layer, uint64_t off, uint64_t len,
                               struct iov_iter *iov, unsigned flags);
SUSPENDS int chain_merge_zero(struct chain *chain, struct layer *layer, uint64_t off, uint64_t len,
                              unsigned flags);
/* Makes durable what was written to one layer. */
SUSPENDS int chain_merge_flush(struct layer *layer);
/* The layer below; NULL at the bottom. The layer above; NULL for the top. */
struct layer *layer_lower(const struct layer *layer);
struct layer *layer_upper(const struct layer *layer);
struct chain *layer_chain(const struct layer *layer);
uint64_t layer_cluster(const struct layer *layer); /* bytes; 64 KiB for raw */
uint64_t layer_unit(const struct layer *layer);    /* of its map: a subcluster; 4 KiB for raw */
bool layer_is_writable(const struct layer *layer);

/* ---- guest writes while a job watches ---- */
enum chain_op_kind { CHAIN_OP_WRITE, CHAIN_OP_ZERO, CHAIN_OP_DISCARD };
struct chain_op {
    enum chain_op_kind kind;
    uint64_t off, len;
    unsigned flags;
    const struct iov_iter *iov; /* CHAIN_OP_WRITE: the data, from its start */
    void *watcher[8];           /* the watcher's own while the request is under way */
};
struct chain_watch {
    void (*before)(void *ctx, struct chain_op *op);        /* may wait */
    void (*after)(void *ctx, struct chain_op *op, int rc); /* rc of the top's write; may wait */
    int (*flush)(void *ctx);                               /* after the top's flush; may be NULL */
    void *ctx;
};

/* ---- changes of shape ---- */
/* Marks layers first..last (downwards) for one job; -EBUSY if one is pinned. */
int chain_pin(struct chain *chain, struct layer *first, struct layer *last, struct err *err);
void chain_unpin(struct layer *first, struct layer *last);
/* Locks the shape, closes both gates; nothing is in flight afterwards. */
SUSPENDS void chain_freeze(struct chain *chain);
/* Opens again; returns the time the guest's gate was closed. */
uint64_t chain_thaw(struct chain *chain);
/* The rest is for the time between. */
void chain_set_watch(struct chain *chain, struct chain_watch *watch); /* NULL: none; keeps it */
/* Between writable and read-only, with the file's locks. 0, or nothing changed. */
SUSPENDS int layer_reopen(struct layer *layer, bool writable, struct err *err);
/* The long part of that, where it is a raw one on a volume: beside requests. It is open to write.
 */
SUSPENDS int chain_ready_layer(struct layer *layer, uint64_t len, struct err *err);
/* Grows a layer of the chain; what is gained reads as zero. */
SUSPENDS int chain_grow_layer(struct chain *chain, struct layer *layer, uint64_t len,
                              struct err *err);
/* Writes another backing name into the layer's header, durably; NULL: none. */
SUSPENDS int layer_set_backing(struct layer *layer, const char *name, const char *format,
                               struct err *err);
/* Name of `to` as seen from the directory of `from`: what is recorded as backing file. The caller
 * frees. */
SUSPENDS int layer_relative_name(const struct layer *from, const struct layer *to, char **ret);
/* Frozen: a layer that is the top, or is written like it, gets a journal if the chain keeps one. */
SUSPENDS int chain_ack_layer(struct chain *chain, struct layer *layer, struct err *err);
/* Behind a cut that took the top out, frozen: the new one likewise. */
SUSPENDS void chain_top_changed(struct chain *chain);
/* A killed server's journal of a read-only layer goes into its file: nothing may stand on an image
 * that has one. Errors: of opening it for writing (then nothing has changed), of the replay. */
SUSPENDS int layer_settle(struct layer *layer, struct err *err);
/* The same for a file and all below it. Those below are left as they are where others have them
 * open: whoever reads them through varve sees the journal, too. */
SUSPENDS int chain_settle(const char *path, const char *format, struct err *err);
/* Takes layers first..last (downwards) out and gives them back, linked by layer_lower. */
struct layer *chain_cut(struct chain *chain, struct layer *first, struct layer *last);

#endif
