/*
 * Decode and encode of L1 and L2 entries: pure, no I/O, no trust in the input.
 * Spec: "Cluster mapping", "Extended L2 Entries", "Compressed Clusters Descriptor".
 */
#ifndef VARVE_QCOW2_ENTRY_H
#define VARVE_QCOW2_ENTRY_H

#include <stdbool.h>
#include <stdint.h>
#include "base/bits.h"
#include "qcow2/header.h"

#define L2_OFFSET_MASK   0x00fffffffffffe00ull
#define L1_OFFSET_MASK   0x00fffffffffffe00ull
#define ENTRY_COPIED     (1ull << 63) /* refcount is exactly one: may be written in place */
#define ENTRY_COMPRESSED (1ull << 62)
#define L2_ZERO_FLAG     1ull /* standard entries, v3: reads as zeroes */

/* One cluster's mapping in host order: what is cached is this meaning. `bits` is the extended
 * entry's bitmap: low word = allocated subclusters, high word = subclusters that read as zero. */
struct l2_entry {
    uint64_t word; /* as in the table, host order */
    uint64_t bits; /* extended L2 only, else 0 */
};

enum cluster_kind {
    CLUSTER_UNALLOCATED, /* read the backing file */
    CLUSTER_ZERO_PLAIN,  /* zeroes, no host cluster */
    CLUSTER_ZERO_ALLOC,  /* zeroes, host cluster kept */
    CLUSTER_NORMAL,
    CLUSTER_COMPRESSED,
    CLUSTER_INVALID, /* reserved bits, misaligned, both bitmap bits of a subcluster */
};

static inline uint64_t l2_host_off(struct l2_entry e)
{
    return e.word & L2_OFFSET_MASK;
}
static inline bool l2_is_compressed(struct l2_entry e)
{
    return e.word & ENTRY_COMPRESSED;
}
static inline uint32_t l2_alloc_bits(struct l2_entry e)
{
    return (uint32_t)e.bits;
}
static inline uint32_t l2_zero_bits(struct l2_entry e)
{
    return (uint32_t)(e.bits >> 32);
}
static inline struct l2_entry l2_make_ext(uint64_t word, uint32_t alloc, uint32_t zero)
{
    return (struct l2_entry){word, (uint64_t)zero << 32 | alloc};
}

/* Kind of (sub)cluster `sub` (0 without extended L2). */
enum cluster_kind l2_kind(const struct qcow2_header *hdr, struct l2_entry e, unsigned sub);
/* Number of subclusters from `sub` on that have the same kind (1 without extended L2). */
unsigned l2_run(const struct qcow2_header *hdr, struct l2_entry e, unsigned sub);
/* Compressed descriptor: host byte offset and the most bytes the stream may take. */
void l2_compressed_range(const struct qcow2_header *hdr, struct l2_entry e, uint64_t *ret_off,
                         uint64_t *ret_len);
/* From and to the table in disk order: entry number `index`. */
struct l2_entry l2_get(const struct qcow2_header *hdr, const void *table, unsigned index);
void l2_put(const struct qcow2_header *hdr, void *table, unsigned index, struct l2_entry e);

#endif
