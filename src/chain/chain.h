/*
 * Images stacked by backing file: layers[0] is the top (the only one written), the last one the
 * base (qcow2 or raw). One flattened map gives (layer, host offset) for a guest range in one
 * lookup, whatever the depth; design.md "Chain map" has its rules (a) to (f).
 *
 * A gate surrounds every request: closing it (pivot) waits for those inside, new ones wait.
 * One reactor. Lengths: a layer shorter than the ones above reads as zero past its end.
 */
#ifndef VARVE_CHAIN_CHAIN_H
#define VARVE_CHAIN_CHAIN_H

#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "qcow2/image.h"

struct chain;
struct layer;

/* What becomes of space that a guest does not need any more, while the layer is the top. */
enum detect_zeroes {
    DETECT_ZEROES_OFF,
    DETECT_ZEROES_ON,    /* a write of zeroes takes no space, and gives none back */
    DETECT_ZEROES_UNMAP, /* it gives space back, too */
};
struct space_opts {
    bool ignore_discard; /* nothing is given back; zeroes keep their space */
    enum image_discard discard;
    enum detect_zeroes detect_zeroes;
};
/* QEMU's words: ignore, off, unmap, on; and off, on, unmap. -EINVAL: none of them. */
int space_parse_discard(const char *word, struct space_opts *ret);
int space_parse_detect_zeroes(const char *word, struct space_opts *ret);
const char *space_detect_zeroes_name(const struct space_opts *space);
/* Refuses what contradicts itself. */
int space_check(const struct space_opts *space, struct err *err);

/* ---- layers ---- */
struct layer_opts {
    /* "qcow2", "raw"; NULL: probe (raw if no magic, or the name ends in .raw) */
    const char *format;
    bool writable;
    bool buffered; /* not O_DIRECT */
    bool no_lock;  /* take no image lock (info of a running disk) */
    bool no_open_checks;
    uint64_t cache_bytes;   /* share of this layer; 0 default */
    uint64_t prealloc_step; /* image.h */
    struct space_opts space;
    struct image_grow_opts grow; /* image.h */
    bool ack;                    /* image.h; journals are in the runtime directory */
};
/* Opens one file as a layer that belongs to no chain yet. */
SUSPENDS int layer_open(const char *path, const struct layer_opts *opts, struct layer **ret,
                        struct err *err);
/* Takes blk (memory, fault, crash devices in tests); is_qcow2 tells the format. */
SUSPENDS int layer_from_blk(struct blk *blk, bool is_qcow2, const struct layer_opts *opts,
                            struct layer **ret, struct err *err);
SUSPENDS int layer_close(struct layer *layer, struct err *err);
/* Journals: of a file that is gone, by the numbers it had; of earlier boots. */
void layer_forget_journal(uint64_t dev, uint64_t ino);
void layer_sweep_journals(void);
const char *layer_path(const struct layer *layer);
void layer_set_path(struct layer *layer, const char *path); /* the file was renamed */
const char *layer_format(const struct layer *layer);        /* "qcow2" or "raw" */
const char *layer_node_name(const struct layer *layer); /* QMP; never NULL, unique in a process */
void layer_set_node_name(struct layer *layer, const char *name);
struct image *layer_image(const struct layer *layer); /* NULL for raw */
struct blk *layer_blk(const struct layer *layer);
uint64_t layer_len(const struct layer *layer);
/* How many bytes of its file or device the layer uses: image_end(); a raw one: all. */
SUSPENDS int layer_end(struct layer *layer, uint64_t *ret, struct err *err);
const struct space_opts *layer_space(const struct layer *layer);
/* The backing file as recorded, made absolute relative to the layer's own directory; NULL: none.
 * The caller frees. json: and protocol names other than file: are refused (-ENOTSUP). */
int layer_backing_path(const struct layer *layer, char **ret, struct err *err);
/* First extent of what this layer alone has (raw: data or zero by the file's holes). */
SUSPENDS int layer_map(struct layer *layer, uint64_t off, uint64_t len, struct extent *ret);
/* Guest data that would have to be copied if this layer were merged away: what a hole of its file
 * holds is none. */
SUSPENDS int layer_allocated_bytes(struct layer *layer, uint64_t *ret);

/* ---- chains ---- */
struct chain_opts {
    const char *format; /* of the top; NULL: probe */
    bool writable;
    bool buffered, no_lock, no_backing /* top alone */;
    uint64_t cache_bytes; /* one bound over the flattened map and all layers' metadata; 0: covers
                             the disk, at most 32 MiB */
    uint64_t prealloc_step;
    struct space_opts space;     /* of the top */
    struct image_grow_opts grow; /* of all layers */
};
/* Opens a file and everything below it. Loops are found by device and inode (-ELOOP), depth is
 * limited to 1024. Only the top is writable. */
SUSPENDS int chain_open(const char *path, const struct chain_opts *opts, struct chain **ret,
                        struct err *err);
/* From open layers, top first; takes them on success. */
SUSPENDS int chain_from_layers(struct layer *const *layers, unsigned nr, uint64_t cache_bytes,
                               struct chain **ret, struct err *err);
/* Drains, closes all layers (top first), frees in any case. */
SUSPENDS int chain_close(struct chain *chain, struct err *err);
uint64_t chain_len(const struct chain *chain);
bool chain_is_writable(const struct chain *chain);
unsigned chain_depth(const struct chain *chain);
struct layer *chain_layer(const struct chain *chain, unsigned index);   /* 0 = top */
int chain_find_layer(const struct chain *chain, const char *node_name); /* index or -ENOENT */

/* ---- requests; ranges lie inside the length; each passes the gate ---- */
SUSPENDS int chain_read(struct chain *chain, uint64_t off, uint64_t len, struct iov_iter *iov);
SUSPENDS int chain_write(struct chain *chain, uint64_t off, uint64_t len, struct iov_iter *iov,
                         unsigned flags);
SUSPENDS int chain_zero(struct chain *chain, uint64_t off, uint64_t len, unsigned flags);
SUSPENDS int chain_discard(struct chain *chain, uint64_t off, uint64_t len);
SUSPENDS int chain_flush(struct chain *chain);
/* Until resumed no write waits for its device to have room (IMAGE_FULL_WAIT): those that do, and
 * others, fail with -ENOSPC. For who waits until requests have ended. Nests. */
void chain_stop_waits(struct chain *chain);
void chain_resume_waits(struct chain *chain);
/* For a timer: writes back what changed in the top before the last call of this. Does nothing
 * while the chain's shape changes: that is not held up, and flushes itself. */
SUSPENDS int chain_write_back_old(struct chain *chain);
/* Brings the map of the whole disk into memory, from the start on until the bound is full, with one
 * metadata read at a time and beside requests and changes of shape. *stop ends it early. */
SUSPENDS int chain_preload(struct chain *chain, const bool *stop);

enum chain_kind {
    CHAIN_HOLE /* no layer has it: zero */,
    CHAIN_ZERO,
    CHAIN_DATA,
    CHAIN_COMPRESSED
};
struct chain_status {
    enum chain_kind kind;
    unsigned depth; /* index below the asked layer (0 = that layer itself) that decides */
    uint64_t len;   /* bytes of the same answer */
    uint64_t host_off;
    bool host_valid;
    bool zero; /* reads as zero; also data that lies in a hole of its file */
};
/* Status as seen from `layer` downwards (NULL: top). */
SUSPENDS int chain_status(struct chain *chain, struct layer *layer, uint64_t off, uint64_t len,
                          struct chain_status *ret);
/* Reads as seen from `layer` downwards: a snapshot. Past that layer's length: refused (-EINVAL). */
SUSPENDS int chain_read_layer(struct chain *chain, struct layer *layer, uint64_t off, uint64_t len,
                              struct iov_iter *iov);
/* A user of a layer's view (snapshot export, job): layers that are used cannot be merged away. */
void layer_use(struct layer *layer);
void layer_unuse(struct layer *layer);
bool layer_in_use(const struct layer *layer);
/* A job merges it: its own view may be changing; no new view of it may be opened. */
bool layer_is_pinned(const struct layer *layer);

/* ---- changes of shape, under live I/O ---- */
struct pivot_stats {
    uint64_t gate_closed_ns; /* from closing to opening, waiting for requests inside included */
    uint64_t drain_ns;       /* of that: waiting for requests inside */
    uint64_t flush_ns;       /* of that: the device flush */
};
/* Puts a layer on top (its recorded backing is the old top; it is empty and at least as long).
 * Dirty metadata is written back before the gate closes; then: drain, flush, old top read-only,
 * push. On failure nothing has changed. Takes `layer` on success. */
SUSPENDS int chain_push(struct chain *chain, struct layer *layer, struct pivot_stats *ret,
                        struct err *err);
/* Removes a layer that is neither top nor needed (its data was merged up or down). Does not touch
 * any file's header. The layer is given back to the caller. */
SUSPENDS int chain_remove(struct chain *chain, struct layer *layer, struct err *err);
/* Grows or shrinks the top. */
SUSPENDS int chain_resize(struct chain *chain, uint64_t len, struct err *err);

/* Requests wait until chain_release. */
SUSPENDS void chain_hold(struct chain *chain);
/* The same, with everything slow done before: what is left for a push is little. On failure nothing
 * is held. */
SUSPENDS int chain_hold_flushed(struct chain *chain, struct err *err);
/* chain_push while the caller holds the chain; it goes on being held. */
SUSPENDS int chain_push_held(struct chain *chain, struct layer *layer, struct pivot_stats *ret,
                             struct err *err);
void chain_release(struct chain *chain);
/* The top keeps a journal from here on: answered writes survive a kill. Requests are held. Where it
 * cannot, image_ack_note() of the top says why: 0. */
SUSPENDS int chain_start_ack(struct chain *chain, struct err *err);

/* Answered writes survive a kill. */
bool chain_is_ack(const struct chain *chain);

struct chain_stats {
    /* the one bound, over the map and the metadata of all layers that are in the chain now */
    uint64_t cache_bytes, cache_bytes_max, cache_limit, cache_hits, cache_misses, cache_evictions;
    uint64_t preloads_running, preloaded_bytes; /* of the disk's length */
    uint64_t map_hits, map_misses, map_bytes, map_bytes_max, map_stale_inserts;
    uint64_t reads, writes, read_bytes, write_bytes, pivots;
    uint64_t last_gate_closed_ns, max_gate_closed_ns;
};
void chain_get_stats(const struct chain *chain, struct chain_stats *ret);

/* Test hook: called between a map walk and the insert of its result. NULL: none. May wait. */
void chain_set_walk_hook(struct chain *chain, void (*fn)(void *arg), void *arg);

#endif
