/*
 * A slice of an L2 table, packed: what a fragmented slice costs while nobody changes it.
 *
 *   header | items | places | codes | values | bitmaps
 *
 *   items     the different entries without their host cluster (at most 16): kind, flags, bitmap
 *   codes     for each entry the number of its item
 *   values    of entries with a host cluster: its number, less the lowest one of the slice, in as
 *             many bits as the highest needs; of compressed ones the whole descriptor
 *   places    which entries have a value, and how many before each word of that: only if some have
 *             none. Where the items are two and tell the same, this is codes, too.
 *   bitmaps   extended L2: of entries with a value, if they are too many different ones for items
 *
 * 64k clusters in random order: 3.2 bytes an entry with 4 million of them, the slice's descriptor
 * included, instead of 8. Any entry is decoded alone, in a few ns.
 */
#ifndef VARVE_QCOW2_PACK_H
#define VARVE_QCOW2_PACK_H

#include <endian.h>
#include <string.h>
#include "qcow2/entry.h"

/* In an item's word, where a host offset would be. */
#define PACKED_STORED 0x200ull /* there is a value (and a bitmap) of it */
#define PACKED_HOST   0x400ull /* the value is a place */
/* Bytes read behind the last field. */
#define PACKED_SLACK 8u

struct packed_slice {
    uint64_t base;   /* least value */
    uint16_t len;    /* bytes, all included */
    uint16_t places; /* offsets from the start; 0: each entry has a value, or none has */
    uint16_t codes, values, bitmaps;
    uint8_t code_bits;  /* 0, 1, 2, 4 */
    uint8_t width;      /* bits of a value */
    uint8_t bitmap_len; /* bytes of one: 0 (items tell), 4 (allocated), 8 */
    uint8_t nr_words;   /* of places */
    uint8_t nr_items;
    uint8_t shift;       /* value << shift is a host offset; 0: see below */
    uint8_t sector_bits; /* values are host offset << sector_bits | sectors (compressed) */
    struct l2_entry items[];
};

/* Packs a table of nr entries (64 to 512) in disk order, all of them valid. NULL: it would not pay,
 * or there is no memory. */
struct packed_slice *pack_slice(const struct qcow2_header *hdr, const void *table, unsigned nr);

/* Bits [bit, bit + nr) of a little-endian array, nr <= 56. */
static inline uint64_t packed_bits(const uint8_t *array, size_t bit, unsigned nr)
{
    uint64_t word;

    memcpy(&word, array + bit / 8, 8);
    return le64toh(word) >> bit % 8 & ((1ull << nr) - 1);
}

/* How many entries before `index` have a value. */
static inline unsigned packed_rank(const struct packed_slice *p, unsigned index)
{
    const uint8_t *at = (const uint8_t *)p + p->places;
    uint16_t before;
    uint64_t word;

    memcpy(&word, at + 8 * (index / 64), 8);
    memcpy(&before, at + 8 * p->nr_words + 2 * (index / 64), 2);
    return before + (unsigned)__builtin_popcountll(le64toh(word) & ((1ull << index % 64) - 1));
}

/* The entry's word of a value: flags are in already. */
static inline uint64_t packed_word(const struct packed_slice *p, uint64_t word, uint64_t value)
{
    if (p->shift)
        return word | value << p->shift;
    uint64_t off = value >> p->sector_bits, sectors = value & ((1ull << p->sector_bits) - 1);
    return word | off | (word & ENTRY_COMPRESSED ? sectors << (62 - p->sector_bits) : 0);
}

static inline struct l2_entry packed_get(const struct packed_slice *p, unsigned index)
{
    const uint8_t *at = (const uint8_t *)p;
    unsigned code =
        (unsigned)packed_bits(at + p->codes, (size_t)index * p->code_bits, p->code_bits);
    struct l2_entry e = p->items[code];

    if (!(e.word & PACKED_STORED))
        return e;
    size_t n = p->places ? packed_rank(p, index) : index;
    bool host = e.word & PACKED_HOST;
    e.word &= ~(PACKED_STORED | PACKED_HOST);
    if (host)
        e.word =
            packed_word(p, e.word, p->base + packed_bits(at + p->values, n * p->width, p->width));
    if (p->bitmap_len)
        e.bits = packed_bits(at + p->bitmaps + n * p->bitmap_len, 0, 32);
    if (p->bitmap_len == 8)
        e.bits |= packed_bits(at + p->bitmaps + n * 8 + 4, 0, 32) << 32;
    return e;
}

#endif
