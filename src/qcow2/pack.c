/*
 * Packing a slice: see pack.h.
 *
 * Two passes over the table, no memory but the result: the first one finds the items, the range of
 * the values and so the layout, the second one fills it. Where the bitmaps of an extended L2 slice
 * are more than the items can tell, a second try stores them.
 */
#include "qcow2/pack.h"
#include <stdlib.h>
#include "base/check.h"
#include "base/own.h"

#define ITEMS_MAX 16u
/* The table stays as it is where a packed one has more than this of its length. */
#define PAYS_NUM 3u
#define PAYS_DEN 4u

struct packer {
    const struct qcow2_header *hdr;
    const void *table;
    unsigned nr;
    bool keep_bitmaps; /* in the array, not in the items */
    bool any_compressed;
    struct l2_entry items[ITEMS_MAX];
    unsigned nr_items, last; /* last: number of the item found last */
    unsigned nr_stored;
    uint64_t min, max; /* values */
    bool wide_bitmaps; /* some have bits in the upper half */
};

/* ---- what an entry is made of ---- */

/* l2_get() for a loop: packing is paid at each write-back of a slice. */
static inline struct l2_entry entry_at(const struct packer *pk, unsigned index)
{
    uint64_t words[2] = {0};
    size_t len = pk->hdr->l2_entry_size;

    if (len == 16)
        memcpy(words, (const char *)pk->table + (size_t)index * 16, 16);
    else
        memcpy(words, (const char *)pk->table + (size_t)index * 8, 8);
    return (struct l2_entry){be64toh(words[0]), be64toh(words[1])};
}

static inline bool has_value(const struct packer *pk, struct l2_entry e)
{
    return l2_is_compressed(e) || l2_host_off(e) ||
           (pk->keep_bitmaps && e.bits && e.bits != (uint64_t)UINT32_MAX << 32);
}

static inline uint64_t value_of(const struct packer *pk, struct l2_entry e)
{
    unsigned sector_bits = pk->hdr->cluster_bits - 8;

    if (!pk->any_compressed)
        return l2_host_off(e) >> pk->hdr->cluster_bits;
    if (!l2_is_compressed(e))
        return l2_host_off(e) << sector_bits;
    uint64_t word = e.word & (ENTRY_COMPRESSED - 1), off_bits = 62 - sector_bits;
    return (word & ((1ull << off_bits) - 1)) << sector_bits | word >> off_bits;
}

static inline struct l2_entry item_of(const struct packer *pk, struct l2_entry e)
{
    bool compressed = l2_is_compressed(e), host = compressed || l2_host_off(e);

    if (!has_value(pk, e))
        return e;
    uint64_t flags = e.word & (compressed ? ENTRY_COMPRESSED | ENTRY_COPIED : ~L2_OFFSET_MASK);
    return (struct l2_entry){flags | PACKED_STORED | (host ? PACKED_HOST : 0),
                             pk->keep_bitmaps ? 0 : e.bits};
}

static inline bool is_item(const struct packer *pk, unsigned i, struct l2_entry item)
{
    return pk->items[i].word == item.word && pk->items[i].bits == item.bits;
}

static unsigned search_item(struct packer *pk, struct l2_entry item)
{
    for (unsigned i = 0; i < pk->nr_items; i++)
        if (is_item(pk, i, item))
            return pk->last = i;
    if (pk->nr_items == ITEMS_MAX)
        return ITEMS_MAX;
    pk->items[pk->nr_items] = item;
    return pk->last = pk->nr_items++;
}

/* Number of the item, made if it is new; ITEMS_MAX: there is no room. */
static inline unsigned find_item(struct packer *pk, struct l2_entry item)
{
    if (pk->last < pk->nr_items && is_item(pk, pk->last, item))
        return pk->last; /* neighbours are mostly alike */
    return search_item(pk, item);
}

static inline bool survey_entry(struct packer *pk, struct l2_entry e)
{
    struct l2_entry item = item_of(pk, e);

    if (find_item(pk, item) == ITEMS_MAX)
        return false;
    if (!(item.word & PACKED_STORED))
        return true;
    pk->nr_stored++;
    pk->wide_bitmaps |= e.bits >> 32 != 0;
    if (item.word & PACKED_HOST) {
        uint64_t v = value_of(pk, e);

        pk->min = MIN(pk->min, v);
        pk->max = MAX(pk->max, v);
    }
    pk->any_compressed |= l2_is_compressed(e);
    /* such an offset leaves no bits for the length of a compressed cluster beside it */
    return !pk->any_compressed || l2_is_compressed(e) || l2_host_off(e) < 1ull << 48;
}

static bool survey_once(struct packer *pk)
{
    pk->nr_items = pk->last = pk->nr_stored = 0;
    pk->min = UINT64_MAX;
    pk->max = 0;
    pk->wide_bitmaps = false;
    for (unsigned i = 0; i < pk->nr; i++)
        if (!survey_entry(pk, entry_at(pk, i)))
            return false;
    if (pk->max < pk->min)
        pk->min = pk->max = 0;
    return true;
}

static bool survey(struct packer *pk)
{
    bool compressed, fits;

    do { /* values are others where one is compressed */
        compressed = pk->any_compressed;
        fits = survey_once(pk);
    } while (compressed != pk->any_compressed);
    return fits;
}

/* ---- layout ---- */

static unsigned bits_for(uint64_t max)
{
    return max ? 64 - (unsigned)__builtin_clzll(max) : 0;
}

/* Two items, one of them with values: the entry's code says whether it has one. */
static bool codes_are_places(struct packer *pk)
{
    if (pk->nr_items != 2)
        return false;
    if (pk->items[0].word & PACKED_STORED) {
        struct l2_entry first = pk->items[0];

        pk->items[0] = pk->items[1];
        pk->items[1] = first;
    }
    return true;
}

static bool lay_out(struct packer *pk, struct packed_slice *p)
{
    unsigned code_bits = bits_for(pk->nr_items - 1), width = bits_for(pk->max - pk->min);
    bool mixed = pk->nr_stored > 0 && pk->nr_stored < pk->nr;
    size_t at = sizeof(*p) + pk->nr_items * sizeof(struct l2_entry);

    *p = (struct packed_slice){
        .base = pk->min,
        .code_bits = (uint8_t)(code_bits == 3 ? 4 : code_bits),
        .width = (uint8_t)width,
        .bitmap_len = pk->keep_bitmaps ? pk->wide_bitmaps ? 8 : 4 : 0,
        .nr_words = (uint8_t)(pk->nr / 64),
        .nr_items = (uint8_t)pk->nr_items,
        .shift = (uint8_t)(pk->any_compressed ? 0 : pk->hdr->cluster_bits),
        .sector_bits = (uint8_t)(pk->hdr->cluster_bits - 8),
    };
    p->codes = (uint16_t)at;
    if (mixed) {
        p->places = (uint16_t)at;
        at += p->nr_words * 10u;
        if (!codes_are_places(pk))
            p->codes = (uint16_t)at;
    }
    if (p->codes >= at)
        at += (size_t)pk->nr * p->code_bits / 8;
    p->values = (uint16_t)at;
    at += ((size_t)pk->nr_stored * width + 7) / 8;
    p->bitmaps = (uint16_t)at;
    at += (size_t)pk->nr_stored * p->bitmap_len + PACKED_SLACK;
    p->len = (uint16_t)at;
    return width <= 56 && at * PAYS_DEN <= (size_t)pk->nr * pk->hdr->l2_entry_size * PAYS_NUM;
}

/* ---- filling ---- */

/* Into zeroed memory. */
static void put_bits(uint8_t *array, size_t bit, uint64_t value)
{
    uint64_t word;

    memcpy(&word, array + bit / 8, 8);
    word = htole64(le64toh(word) | value << bit % 8);
    memcpy(array + bit / 8, &word, 8);
}

static void fill_entry(struct packer *pk, struct packed_slice *p, unsigned index, unsigned n)
{
    uint8_t *at = (uint8_t *)p;
    struct l2_entry e = entry_at(pk, index), item = item_of(pk, e);

    put_bits(at + p->codes, (size_t)index * p->code_bits, find_item(pk, item));
    if (!(item.word & PACKED_STORED))
        return;
    if (p->places && p->codes != p->places)
        put_bits(at + p->places, index, 1);
    if (item.word & PACKED_HOST)
        put_bits(at + p->values, (size_t)n * p->width, value_of(pk, e) - p->base);
    if (p->bitmap_len)
        put_bits(at + p->bitmaps + (size_t)n * p->bitmap_len, 0, l2_alloc_bits(e));
    if (p->bitmap_len == 8)
        put_bits(at + p->bitmaps + (size_t)n * 8 + 4, 0, l2_zero_bits(e));
}

static void fill(struct packer *pk, struct packed_slice *p)
{
    unsigned n = 0;

    memcpy(p->items, pk->items, pk->nr_items * sizeof(struct l2_entry));
    for (unsigned i = 0; i < pk->nr; i++) {
        if (p->places && i % 64 == 0) {
            uint16_t before = (uint16_t)n;
            memcpy((uint8_t *)p + p->places + 8 * p->nr_words + 2 * (i / 64), &before, 2);
        }
        fill_entry(pk, p, i, n);
        n += (pk->items[pk->last].word & PACKED_STORED) != 0;
    }
}

struct packed_slice *pack_slice(const struct qcow2_header *hdr, const void *table, unsigned nr)
{
    struct packer pk = {.hdr = hdr, .table = table, .nr = nr};
    struct packed_slice head;

    DEBUG_CHECK(nr % 64 == 0 && nr <= 512);
    bool fits = survey(&pk);
    if (!fits && hdr->extended_l2) {
        pk.keep_bitmaps = true;
        fits = survey(&pk);
    }
    if (!fits || !lay_out(&pk, &head))
        return NULL;
    struct packed_slice *p = calloc(1, head.len);
    if (!p)
        return NULL;
    *p = head;
    fill(&pk, p);
    return p;
}
