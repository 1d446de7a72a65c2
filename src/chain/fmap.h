/*
 * The flattened map of a chain: guest range -> (layer, kind, host offset), whatever the depth.
 *
 * The guest address space is cut into slices of equal length; a slice holds sorted extents that do
 * not overlap, 12 bytes each. A linear run of a whole slice is one extent. An extent names its
 * layer by slot. A layer that goes marks its slot with the next number of a count; a slice notes
 * the count when it was last swept, and is swept before it is used again: dropping a layer is O(1),
 * and no extent needs a number of its own. Bytes are counted in the chain's bound; slices not used
 * lately go first.
 *
 * The grain is 512 bytes: what does not begin and end there is not kept.
 *
 * One reactor; no call waits. Results are copies and hold while the caller is inside the gate.
 */
#ifndef VARVE_CHAIN_FMAP_H
#define VARVE_CHAIN_FMAP_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>
#include "base/list.h"
#include "base/table.h"
#include "base/vec.h"
#include "qcow2/bound.h"

#define FMAP_GENS      4096u
#define FMAP_GRAIN     512u
#define FMAP_SLOT_BITS 11u /* slots are below 2048 */
#define FMAP_SLOT_MAX  ((1u << FMAP_SLOT_BITS) - 1)

enum fmap_kind {
    FMAP_DATA,       /* at host_off of the layer's file */
    FMAP_COMPRESSED, /* in the layer; read by guest offset */
    FMAP_ZERO,       /* the layer says zero */
    FMAP_EOF,        /* past the end of a shorter layer: zero, never what is below it */
    FMAP_HOLE,       /* no layer has it: zero; named by the lowest layer */
};

struct fmap_entry {
    enum fmap_kind kind;
    unsigned slot; /* of the layer that decides */
    uint64_t guest_off, len;
    uint64_t host_off; /* FMAP_DATA: of guest_off */
};

struct fmap_extent {    /* as kept; in grains from the slice's start: a slice is at most 64 MiB */
    uint64_t last : 17; /* the last one that is in it */
    uint64_t host : 47; /* FMAP_DATA: offset of the first one in the file */
    uint32_t first : 17;
    uint32_t slot : FMAP_SLOT_BITS;
    uint32_t kind : 3;
} __attribute__((packed, aligned(4)));
static_assert(sizeof(struct fmap_extent) == 12, "what a fragment costs");

struct fmap_slice {
    struct list lru;
    uint64_t index;
    struct fmap_extent *extents; /* owned */
    uint32_t len, cap;
    uint32_t swept; /* fmap.drops when extents of dropped layers were last taken out */
    unsigned lives; /* turns of the evictor that it survives */
};

struct fmap {
    struct table slices;
    struct list lru; /* oldest first */
    unsigned slice_bits;
    struct bound *bound;
    struct bound_member member;
    unsigned lives; /* of a slice that is used; set by the owner */
    uint64_t evictions;
    unsigned to_look;        /* slices before the evictor has come round */
    struct fmap_slice *keep; /* is being inserted to: not to be evicted */
    uint64_t index_bytes, bytes_max;
    uint32_t drops;           /* layers dropped or added so far */
    VEC(uint32_t) dropped;    /* by slot: drops at its last one */
    uint32_t gens[FMAP_GENS]; /* by a hash of the slice: bumped by every change of mapping */
    uint64_t hits, misses, stale_inserts;
    bool insert_unchecked; /* tests only: leaves rule (a) out */
};

/* unit: bytes of the chain's smallest (sub)cluster. */
void fmap_init(struct fmap *m, uint64_t unit, struct bound *bound);
void fmap_fini(struct fmap *m);
/* Makes the slot usable (contents named by its earlier owner are gone); 0 or -ENOMEM. */
int fmap_add_layer(struct fmap *m, unsigned slot);
/* O(1): whatever names the slot is no longer found. */
void fmap_drop_layer(struct fmap *m, unsigned slot);

/* The extent at off, cut at its front to off. */
bool fmap_lookup(struct fmap *m, uint64_t off, struct fmap_entry *ret);
/* To be noted before a walk and given to the insert of its result. */
uint32_t fmap_gen(const struct fmap *m, uint64_t off);
/* Inserts what lies inside the slice of e->guest_off. False: the range changed meanwhile, it cannot
 * be kept, or no memory. */
bool fmap_insert(struct fmap *m, uint32_t gen, const struct fmap_entry *e);
/* End of the slice that holds off. */
uint64_t fmap_slice_end(const struct fmap *m, uint64_t off);
/* The mapping of the range changed: walks under way will not be inserted, entries are dropped. */
void fmap_forget(struct fmap *m, uint64_t off, uint64_t len);
/* The range was written and lies at host_off of `slot` now: walks under way will not be inserted;
 * entries that say so already stay, others are dropped. */
void fmap_confirm(struct fmap *m, uint64_t off, uint64_t len, unsigned slot, uint64_t host_off);
/* Asserts order, bounds and accounting. */
void fmap_check_invariants(const struct fmap *m);

#endif
