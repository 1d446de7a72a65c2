/*
 * The flattened map. Invariants:
 *
 * 1. Extents of a slice are sorted, do not overlap, are not empty and lie inside the slice.
 * 2. An extent whose epoch is not its slot's epoch is dead: never returned, replaced by inserts.
 * 3. An insert takes place only if no mapping in the slice's hash class changed since the walk
 *    began (the generation noted before it), so a stale walk never enters the map.
 * 4. bytes is the sum over all slices of their fixed part and their array.
 */
#include "chain/fmap.h"
#include "base/bits.h"
#include "base/check.h"

#define SLICE_EXTENTS_AIM 1024u /* extents of a slice that is all fragments */
#define SLICE_EXTENTS_MAX 8192u /* then the slice starts anew: units became smaller since */
#define SLICE_BITS_MIN    19u
#define SLICE_BITS_MAX    26u

void fmap_init(struct fmap *m, uint64_t unit, uint64_t bound)
{
    unsigned bits = SLICE_BITS_MIN;

    while (bits < SLICE_BITS_MAX && (1ull << bits) < unit * SLICE_EXTENTS_AIM)
        bits++;
    memset(m, 0, sizeof(*m)); /* too large for a compound literal on a coroutine's stack */
    m->slice_bits = bits;
    m->bound = bound;
    list_init(&m->lru);
}

static uint64_t slice_cost(const struct fmap_slice *s)
{
    return sizeof(*s) + 2 * sizeof(struct table_slot) + s->extents.cap * sizeof(struct fmap_extent);
}

static void slice_free(struct fmap *m, struct fmap_slice *s)
{
    m->bytes -= slice_cost(s);
    table_remove(&m->slices, s->index);
    list_remove(&s->lru);
    vec_free(&s->extents);
    free(s);
}

void fmap_fini(struct fmap *m)
{
    list_for_each_safe(it, &m->lru)
        slice_free(m, list_entry(it, struct fmap_slice, lru));
    table_fini(&m->slices);
    vec_free(&m->epochs);
}

int fmap_add_layer(struct fmap *m, unsigned slot)
{
    while (m->epochs.len <= slot) {
        int rc = vec_push(&m->epochs, 1);
        if (rc < 0)
            return rc;
    }
    m->epochs.data[slot]++;
    return 0;
}

void fmap_drop_layer(struct fmap *m, unsigned slot)
{
    m->epochs.data[slot]++;
}

uint64_t fmap_slice_end(const struct fmap *m, uint64_t off)
{
    return ((off >> m->slice_bits) + 1) << m->slice_bits;
}

static unsigned gen_class(const struct fmap *m, uint64_t off)
{
    return (unsigned)(off >> m->slice_bits) % FMAP_GENS;
}

uint32_t fmap_gen(const struct fmap *m, uint64_t off)
{
    return m->gens[gen_class(m, off)];
}

static bool extent_is_live(const struct fmap *m, const struct fmap_extent *e)
{
    return e->epoch == m->epochs.data[e->slot];
}

/* Index of the first extent that ends behind rel. */
static size_t find_extent(const struct fmap_slice *s, uint32_t rel)
{
    size_t lo = 0, hi = s->extents.len;

    while (lo < hi) {
        size_t mid = (lo + hi) / 2;
        const struct fmap_extent *e = &s->extents.data[mid];

        if (e->rel + e->len <= rel)
            lo = mid + 1;
        else
            hi = mid;
    }
    return lo;
}

bool fmap_lookup(struct fmap *m, uint64_t off, struct fmap_entry *ret)
{
    uint32_t rel = (uint32_t)(off & ((1ull << m->slice_bits) - 1));
    struct fmap_slice *s = table_get(&m->slices, off >> m->slice_bits);

    if (s) {
        size_t i = find_extent(s, rel);
        const struct fmap_extent *e = &s->extents.data[i];

        if (i < s->extents.len && e->rel <= rel && extent_is_live(m, e)) {
            uint32_t front = rel - e->rel;

            s->used = true;
            *ret = (struct fmap_entry){e->kind, e->slot, off, e->len - front,
                                       e->kind == FMAP_DATA ? e->host_off + front : 0};
            m->hits++;
            return true;
        }
    }
    m->misses++;
    return false;
}

/* Frees slices that were not used lately until the bound holds; never `keep`. */
static void evict(struct fmap *m, const struct fmap_slice *keep)
{
    unsigned chances = 0;

    while (m->bytes > m->bound && m->slices.used > 1) {
        struct fmap_slice *s = list_entry(m->lru.next, struct fmap_slice, lru);

        if (s == keep || (s->used && chances++ < 64)) {
            s->used = false;
            list_remove(&s->lru);
            list_push_back(&m->lru, &s->lru);
            continue;
        }
        slice_free(m, s);
    }
}

static struct fmap_slice *slice_make(struct fmap *m, uint64_t index)
{
    struct fmap_slice *s = table_get(&m->slices, index);

    if (s)
        return s;
    s = calloc(1, sizeof(*s));
    if (!s || table_put(&m->slices, index, s) < 0) {
        free(s);
        return NULL;
    }
    s->index = index;
    list_push_back(&m->lru, &s->lru);
    m->bytes += slice_cost(s);
    return s;
}

/* Replaces extents [from, to) by nr new ones. -ENOMEM: nothing changed. */
static int splice(struct fmap *m, struct fmap_slice *s, size_t from, size_t to,
                  const struct fmap_extent *add, size_t nr)
{
    size_t len = s->extents.len - (to - from) + nr;
    uint64_t cost = slice_cost(s);
    int rc = vec_reserve(&s->extents, len);

    m->bytes += slice_cost(s) - cost;
    if (rc < 0)
        return rc;
    memmove(s->extents.data + from + nr, s->extents.data + to,
            (s->extents.len - to) * sizeof(*add));
    if (nr)
        memcpy(s->extents.data + from, add, nr * sizeof(*add));
    s->extents.len = len;
    return 0;
}

static struct fmap_extent cut_front(struct fmap_extent e, uint32_t new_rel)
{
    uint32_t by = new_rel - e.rel;

    e.rel += by;
    e.len -= by;
    if (e.kind == FMAP_DATA)
        e.host_off += by;
    return e;
}

/* Cuts [rel, rel + len) out of the slice and puts `in` there, if given. */
static int replace_range(struct fmap *m, struct fmap_slice *s, uint32_t rel, uint32_t len,
                         const struct fmap_extent *in)
{
    struct fmap_extent add[3];
    size_t nr = 0, from = find_extent(s, rel), to = from;
    uint32_t end = rel + len;

    while (to < s->extents.len && s->extents.data[to].rel < end)
        to++;
    if (from < to && s->extents.data[from].rel < rel) {
        add[nr] = s->extents.data[from];
        add[nr].len = rel - add[nr].rel;
        nr++;
    }
    if (in)
        add[nr++] = *in;
    if (from < to) {
        const struct fmap_extent *last = &s->extents.data[to - 1];

        if (last->rel + last->len > end)
            add[nr++] = cut_front(*last, end);
    }
    if (from == to && nr == 0)
        return 0;
    return splice(m, s, from, to, add, nr);
}

static void slice_clear(struct fmap_slice *s)
{
    s->extents.len = 0;
}

static bool can_merge(const struct fmap_extent *a, const struct fmap_extent *b)
{
    return a->slot == b->slot && a->epoch == b->epoch && a->kind == b->kind &&
           a->rel + a->len == b->rel &&
           (a->kind != FMAP_DATA || a->host_off + a->len == b->host_off);
}

/* Joins extent i with the next one where they say the same. */
static bool merge_next(struct fmap_slice *s, size_t i)
{
    if (i + 1 >= s->extents.len || !can_merge(&s->extents.data[i], &s->extents.data[i + 1]))
        return false;
    s->extents.data[i].len += s->extents.data[i + 1].len;
    vec_remove_at(&s->extents, i + 1);
    return true;
}

bool fmap_insert(struct fmap *m, uint32_t gen, const struct fmap_entry *e)
{
    uint64_t end = MIN(e->guest_off + e->len, fmap_slice_end(m, e->guest_off));

    if (gen != fmap_gen(m, e->guest_off)) {
        m->stale_inserts++;
        if (!m->insert_unchecked)
            return false;
    }
    struct fmap_slice *s = slice_make(m, e->guest_off >> m->slice_bits);
    if (!s)
        return false;
    if (s->extents.len > SLICE_EXTENTS_MAX)
        slice_clear(s);
    struct fmap_extent in = {
        .rel = (uint32_t)(e->guest_off & ((1ull << m->slice_bits) - 1)),
        .len = (uint32_t)(end - e->guest_off),
        .epoch = m->epochs.data[e->slot],
        .slot = (uint16_t)e->slot,
        .kind = (uint16_t)e->kind,
        .host_off = e->kind == FMAP_DATA ? e->host_off : 0,
    };
    if (replace_range(m, s, in.rel, in.len, &in) < 0)
        return false;
    size_t i = find_extent(s, in.rel);
    merge_next(s, i);
    if (i > 0)
        merge_next(s, i - 1);
    s->used = true;
    evict(m, s);
    m->bytes_max = MAX(m->bytes_max, m->bytes);
    return true;
}

/* Entries of one slice; without memory to split an extent the whole slice goes. */
static void forget_in_slice(struct fmap *m, struct fmap_slice *s, uint64_t off, uint64_t end)
{
    uint64_t start = s->index << m->slice_bits;
    uint32_t rel = (uint32_t)(MAX(off, start) - start);
    uint64_t stop = MIN(end, start + (1ull << m->slice_bits)) - start;

    if (replace_range(m, s, rel, (uint32_t)(stop - rel), NULL) < 0)
        slice_clear(s);
}

void fmap_forget(struct fmap *m, uint64_t off, uint64_t len)
{
    if (len == 0)
        return;
    uint64_t first = off >> m->slice_bits, last = (off + len - 1) >> m->slice_bits;
    uint64_t nr = last - first + 1;

    for (uint64_t i = 0; i < MIN(nr, (uint64_t)FMAP_GENS); i++)
        m->gens[(first + i) % FMAP_GENS]++;
    if (nr > m->slices.used) {
        list_for_each_safe(it, &m->lru) {
            struct fmap_slice *s = list_entry(it, struct fmap_slice, lru);
            if (s->index >= first && s->index <= last)
                forget_in_slice(m, s, off, off + len);
        }
        return;
    }
    for (uint64_t i = first; i <= last; i++) {
        struct fmap_slice *s = table_get(&m->slices, i);
        if (s)
            forget_in_slice(m, s, off, off + len);
    }
}

/* Everything known of the slice's part [rel, rel + len) is data of `slot` at host_off. */
static bool slice_agrees(const struct fmap *m, const struct fmap_slice *s, uint32_t rel,
                         uint32_t len, unsigned slot, uint64_t host_off)
{
    for (size_t i = find_extent(s, rel); i < s->extents.len; i++) {
        const struct fmap_extent *e = &s->extents.data[i];

        if (e->rel >= rel + len)
            break;
        if (!extent_is_live(m, e))
            continue;
        /* host offset of rel as this extent has it; wraps alike on both sides */
        if (e->slot != slot || e->kind != FMAP_DATA || e->host_off - e->rel != host_off - rel)
            return false;
    }
    return true;
}

void fmap_confirm(struct fmap *m, uint64_t off, uint64_t len, unsigned slot, uint64_t host_off)
{
    while (len > 0) {
        uint64_t n = MIN(len, fmap_slice_end(m, off) - off);
        uint32_t rel = (uint32_t)(off & ((1ull << m->slice_bits) - 1));
        struct fmap_slice *s = table_get(&m->slices, off >> m->slice_bits);

        m->gens[gen_class(m, off)]++;
        if (s && !slice_agrees(m, s, rel, (uint32_t)n, slot, host_off))
            forget_in_slice(m, s, off, off + n);
        off += n;
        host_off += n;
        len -= n;
    }
}

void fmap_check_invariants(const struct fmap *m)
{
    uint64_t bytes = 0;

    for (struct list *it = m->lru.next; it != &m->lru; it = it->next) {
        const struct fmap_slice *s = list_entry(it, struct fmap_slice, lru);
        uint64_t end = 0;

        for (size_t i = 0; i < s->extents.len; i++) {
            const struct fmap_extent *e = &s->extents.data[i];

            CHECK_THAT(e->len > 0 && e->rel >= end && e->slot < m->epochs.len);
            end = (uint64_t)e->rel + e->len;
        }
        CHECK_THAT(end <= 1ull << m->slice_bits);
        CHECK_THAT(table_get(&m->slices, s->index) == s);
        bytes += slice_cost(s);
    }
    CHECK_THAT(bytes == m->bytes);
}
