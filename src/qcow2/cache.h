/*
 * Metadata in memory: slices of L2 tables and refcount blocks.
 *
 * What is cached is the meaning. A slice whose entries are all alike (SAME: nothing allocated, all
 * zero, all counted once) or go up by one cluster each (LINEAR: every preallocated image, most
 * images written in order) costs one descriptor and no table. Another L2 slice is PACKED (pack.h)
 * while that pays. It gets a table when it is about to change, and loses it again when it is on
 * disk.
 *
 * A slice is named by what it maps, not by where it lies: moving a table changes no slice.
 *
 *   (absent) --get--> LOADING --ok--> READY <--mark_dirty/written--> READY + dirty sectors
 *                        `---error--> FAILED (out of the table; freed by the last unpin)
 *
 *  1. Only READY slices without pins, dirty or unfinished sectors are evicted.
 *  2. One load a slice: whoever comes second waits for the first.
 *  3. Slices and their index are counted in a bound that several images and the map of their chain
 *     share (bound.h); what is pinned or dirty may pass it. Writers keep the dirty part below half
 *     of it (write_throttle). So are the tables that are always in memory: L1, refcount table,
 *     places of metadata.
 */
#ifndef VARVE_QCOW2_CACHE_H
#define VARVE_QCOW2_CACHE_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include "base/list.h"
#include "base/table.h"
#include "qcow2/bound.h"
#include "qcow2/entry.h"
#include "qcow2/pack.h"
#include "rt/wait.h"

struct image;

/* A bound below this is raised to it. */
#define CACHE_BYTES_MIN (64ull << 10)

/* Longest slice; the length of one is the smaller of this and the cluster. */
#define SLICE_BYTES_MAX 4096u
/* Dirty parts of a slice are tracked in so many bytes. */
#define SLICE_SECTOR 512u

/* Keys of refcount slices; the others are L2 slices. */
#define SLICE_REFCOUNT (1ull << 63)

enum slice_state { SLICE_LOADING, SLICE_READY, SLICE_FAILED };
enum slice_form { SLICE_TABLE, SLICE_SAME, SLICE_LINEAR, SLICE_PACKED };

struct slice {
    uint64_t key;
    struct list dirty; /* cache.dirty, or the list of the flush that writes it */
    union {
        void *table; /* TABLE: in disk order; SAME, LINEAR: NULL */
        struct packed_slice *packed;
    };
    union {
        struct l2_entry first;     /* SAME, LINEAR: entry 0; of refcounts: 8 bytes in disk order */
        struct wait_queue *loaded; /* while LOADING; in the frame of whoever loads */
    };
    uint32_t pins;
    uint8_t dirty_sectors; /* changed since last written */
    uint8_t kind;          /* SAME, LINEAR: enum cluster_kind of all its subclusters */
    uint8_t state : 4;     /* enum slice_state */
    uint8_t form : 4;      /* enum slice_form */
    bool unstable : 1;     /* written, not yet known to be durable */
    bool suspect : 1;      /* has entries that point where no data may be */
    bool used : 1;         /* since the clock's hand passed */
    bool stays_table : 1;  /* as it is now it has no smaller form */
};
static_assert(sizeof(struct slice) == 56, "fits the heap's 64 bytes");

struct cache {
    struct table index;
    struct list dirty;
    struct bound own; /* used while no chain gives another one */
    struct bound *bound;
    struct bound_member member;
    size_t hand;                       /* the clock goes through the slots of the index */
    uint64_t dirty_bytes;              /* of slices with a place on a dirty list */
    uint64_t index_bytes, fixed_bytes; /* as told to the bound */
    uint64_t hits, misses, bytes_max, packed;
    uint64_t tables; /* L2 tables, as far as known */
    bool passing;    /* slices are not asked for again once the chain's map has the answer */
    int group_score; /* above 0: misses read the neighbours too */
    bool group_wide; /* L2 slices that were read last cost a descriptor each: many at once */
};

void cache_init(struct image *img);
/* Counts in another bound from here on; NULL: in one of its own. */
void cache_set_bound(struct image *img, struct bound *bound);
void cache_fini(struct image *img);
/* The slice if it is here and ready, not pinned; NULL. */
struct slice *cache_peek(struct image *img, uint64_t key);
/* Bytes that all L2 slices of the image would take, going by those that are here. */
uint64_t cache_estimate(const struct image *img);
/* Pins a slice, loading it. The table it is part of must exist. -EIO, -EUCLEAN, -ENOMEM. */
SUSPENDS int cache_get(struct image *img, uint64_t key, struct slice **ret);
void cache_put(struct image *img, struct slice *slice);
/* A slice of a new table that is known to be all zero on disk. Best effort. */
void cache_add_empty(struct image *img, uint64_t key);
/* Takes a slice out that nobody pins, whatever its state. */
void cache_drop(struct image *img, uint64_t key);
/* All of them; nothing is pinned, dirty ones are lost. */
void cache_drop_all(struct image *img);
/* The slice (pinned) has a table afterwards, until it is unpinned. 0 or -ENOMEM. */
int cache_expand(struct image *img, struct slice *slice);
/* Bytes [off, off + len) of the table changed; flush.c will write them (L2 only). */
void cache_mark_dirty(struct image *img, struct slice *slice, unsigned off, unsigned len);
/* A clean slice that nobody pins gives up its table if it has a smaller form; a packed one only
 * where memory is short. */
void cache_compact(struct image *img, struct slice *slice);
/* Where the slice lies in the file; 0: its table does not exist. */
uint64_t cache_disk_off(const struct image *img, uint64_t key);

static inline bool slice_is_clean(const struct slice *s)
{
    return !s->dirty_sectors && !s->unstable;
}

/* Entry `index` of an L2 slice, in whatever form it is. */
static inline struct l2_entry slice_entry(const struct qcow2_header *hdr, const struct slice *s,
                                          unsigned index)
{
    if (s->form == SLICE_TABLE)
        return l2_get(hdr, s->table, index);
    if (s->form == SLICE_PACKED)
        return packed_get(s->packed, index);
    struct l2_entry e = s->first;
    if (s->form == SLICE_LINEAR)
        e.word += (uint64_t)index << hdr->cluster_bits;
    return e;
}

#endif
