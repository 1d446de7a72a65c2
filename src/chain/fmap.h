/*
 * The flattened map of a chain: guest range -> (layer, kind, host offset), whatever the depth.
 *
 * The guest address space is cut into slices of equal length; a slice holds sorted extents that
 * do not overlap. A linear run of a whole slice is one extent. Entries name a layer by slot and
 * epoch, so that dropping a layer is one increment. Bytes are bounded; the least recently used
 * slices go first.
 *
 * One reactor; no call waits. Results are copies and hold while the caller is inside the gate.
 */
#ifndef VARVE_CHAIN_FMAP_H
#define VARVE_CHAIN_FMAP_H

#include <stdbool.h>
#include <stdint.h>
#include "base/list.h"
#include "base/table.h"
#include "base/vec.h"

#define FMAP_GENS 4096u

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

struct fmap_extent {   /* as kept */
    uint32_t rel, len; /* bytes from the slice's start; a slice is at most 1 GiB */
    uint32_t epoch;
    uint16_t slot, kind;
    uint64_t host_off;
};

struct fmap_slice {
    struct list lru;
    uint64_t index;
    bool used; /* since the evictor last looked */
    VEC(struct fmap_extent) extents;
};

struct fmap {
    struct table slices;
    struct list lru; /* oldest first */
    unsigned slice_bits;
    uint64_t bytes, bytes_max, bound;
    VEC(uint32_t) epochs;     /* by slot */
    uint32_t gens[FMAP_GENS]; /* by a hash of the slice: bumped by every change of mapping */
    uint64_t hits, misses, stale_inserts;
    bool insert_unchecked; /* tests only: leaves rule (a) out */
};

/* unit: bytes of the chain's smallest (sub)cluster. */
void fmap_init(struct fmap *m, uint64_t unit, uint64_t bound);
void fmap_fini(struct fmap *m);
/* Makes the slot usable (contents named by its earlier owner are gone); 0 or -ENOMEM. */
int fmap_add_layer(struct fmap *m, unsigned slot);
/* O(1): whatever names the slot is no longer found. */
void fmap_drop_layer(struct fmap *m, unsigned slot);

/* The extent at off, cut at its front to off. */
bool fmap_lookup(struct fmap *m, uint64_t off, struct fmap_entry *ret);
/* To be noted before a walk and given to the insert of its result. */
uint32_t fmap_gen(const struct fmap *m, uint64_t off);
/* Inserts what lies inside the slice of e->guest_off. False: the range changed meanwhile, or no
 * memory. */
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
