/*
 * The flattened map. Invariants:
 *
 * 1. Extents of a slice are sorted, do not overlap, are not empty and lie inside the slice.
 * 2. A slice is swept before it is looked at: an extent of a slot that was dropped since the last
 *    sweep is never returned. Each sweep notes the count of drops, so a slot used again is clean.
 * 3. An insert takes place only if no mapping in the slice's hash class changed since the walk
 *    began (the generation noted before it), so a stale walk never enters the map.
 * 4. The bound knows what all slices and the index take from the heap.
 */
#include "chain/fmap.h"
#include "base/bits.h"
#include "base/check.h"

#define SLICE_EXTENTS_AIM 4096u                   /* extents of a slice that is all fragments */
#define SLICE_EXTENTS_MAX (4 * SLICE_EXTENTS_AIM) /* then it starts anew: units became smaller */
#define SLICE_BITS_MIN    19u
#define SLICE_BITS_MAX    26u

/* ---- accounts ---- */

static void account(struct fmap *m, int64_t bytes)
{
    bound_add(m->bound, &m->member, bytes);
    m->bytes_max = MAX(m->bytes_max, m->member.bytes);
}

static void account_index(struct fmap *m)
{
    uint64_t now = m->slices.cap ? heap_cost(m->slices.cap * sizeof(struct table_slot)) : 0;

    if (now != m->index_bytes)
        account(m, (int64_t)(now - m->index_bytes));
    m->index_bytes = now;
}

static uint64_t array_cost(uint32_t cap)
{
    return cap ? heap_cost(cap * sizeof(struct fmap_extent)) : 0;
}

/* Room for so many extents; without slack when it shrinks. */
static int slice_reserve(struct fmap *m, struct fmap_slice *s, uint32_t len, bool exactly)
{
    if (len <= s->cap && !exactly)
        return 0;
    uint32_t cap = exactly ? len : MAX(len, 2u) + len / 8;
    struct fmap_extent *extents = reallocarray(s->extents, MAX(cap, 2u), sizeof(*extents));
    if (!extents)
        return -ENOMEM;
    cap = MAX(cap, 2u);
    s->extents = extents;
    account(m, (int64_t)(array_cost(cap) - array_cost(s->cap)));
    s->cap = cap;
    return 0;
}

static void slice_free(struct fmap *m, struct fmap_slice *s)
{
    account(m, -(int64_t)(heap_cost(sizeof(*s)) + array_cost(s->cap)));
    table_remove(&m->slices, s->index);
    list_remove(&s->lru);
    free(s->extents);
    free(s);
}

/* ---- the bound ---- */

/* The slice that was not used for longest. One that stays gives back what it has too much. */
static bool evict_step(struct bound_member *member, bool force)
{
    struct fmap *m = container_of(member, struct fmap, member);

    if (list_empty(&m->lru))
        return true;
    struct fmap_slice *s = list_entry(m->lru.next, struct fmap_slice, lru);
    if (s == m->keep || (s->lives && !force)) {
        s->lives -= s->lives > 0;
        list_remove(&s->lru);
        list_push_back(&m->lru, &s->lru);
        if (s != m->keep && s->cap > MAX(s->len, 2u))
            (void)slice_reserve(m, s, s->len, true);
    } else {
        slice_free(m, s);
        m->evictions++;
    }
    if (m->to_look > 1) {
        m->to_look--;
        return false;
    }
    table_trim(&m->slices);
    account_index(m);
    m->to_look = (unsigned)m->slices.used;
    return true;
}

void fmap_init(struct fmap *m, uint64_t unit, struct bound *bound)
{
    unsigned bits = SLICE_BITS_MIN;

    while (bits < SLICE_BITS_MAX && (1ull << bits) < unit * SLICE_EXTENTS_AIM)
        bits++;
    memset(m, 0, sizeof(*m)); /* too large for a compound literal on a coroutine's stack */
    m->slice_bits = bits;
    m->lives = 1;
    m->bound = bound;
    m->member.step = evict_step;
    list_init(&m->lru);
    bound_join(bound, &m->member);
}

void fmap_fini(struct fmap *m)
{
    list_for_each_safe(it, &m->lru)
        slice_free(m, list_entry(it, struct fmap_slice, lru));
    table_fini(&m->slices);
    account_index(m);
    vec_free(&m->dropped);
    bound_part(m->bound, &m->member);
}

/* ---- layers ---- */

int fmap_add_layer(struct fmap *m, unsigned slot)
{
    if (slot > FMAP_SLOT_MAX)
        return -ENOMEM;
    while (m->dropped.len <= slot) {
        int rc = vec_push(&m->dropped, 0);
        if (rc < 0)
            return rc;
    }
    fmap_drop_layer(m, slot);
    return 0;
}

void fmap_drop_layer(struct fmap *m, unsigned slot)
{
    m->dropped.data[slot] = ++m->drops;
}

/* Takes out what names a layer that was dropped since the last time. */
static void sweep(const struct fmap *m, struct fmap_slice *s)
{
    uint32_t nr = 0;

    for (uint32_t i = 0; i < s->len; i++)
        if (m->dropped.data[s->extents[i].slot] <= s->swept)
            s->extents[nr++] = s->extents[i];
    s->len = nr;
    s->swept = m->drops;
}

/* The slice if there is one, swept. */
static struct fmap_slice *slice_get(const struct fmap *m, uint64_t index)
{
    struct fmap_slice *s = table_get(&m->slices, index);

    if (s && s->swept != m->drops)
        sweep(m, s);
    return s;
}

/* ---- looking up ---- */

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

/* Index of the first extent that ends behind this grain. Fragments are mostly of one length: the
 * search begins where it would be then, and widens from there. */
static uint32_t find_extent(const struct fmap *m, const struct fmap_slice *s, uint32_t grain)
{
    uint32_t lo = 0, hi = s->len, step = 1;
    uint32_t at = (uint32_t)((uint64_t)grain * s->len * FMAP_GRAIN >> m->slice_bits);

    while (lo < hi) {
        at = MIN(at, hi - 1);
        bool behind = s->extents[at].last < grain;

        if (behind)
            lo = at + 1;
        else
            hi = at;
        if (step > 16) /* far off: halves from here on */
            at = lo + (hi - lo) / 2;
        else
            at = behind ? lo + step - 1 : MAX(lo, hi - MIN(step, hi));
        step *= 2;
    }
    return lo;
}

static uint32_t grain_of(const struct fmap *m, uint64_t off)
{
    return (uint32_t)((off & ((1ull << m->slice_bits) - 1)) / FMAP_GRAIN);
}

bool fmap_lookup(struct fmap *m, uint64_t off, struct fmap_entry *ret)
{
    uint32_t grain = grain_of(m, off);
    struct fmap_slice *s = slice_get(m, off >> m->slice_bits);
    uint32_t i = s ? find_extent(m, s, grain) : 0;

    if (!s || i >= s->len || s->extents[i].first > grain) {
        m->misses++;
        return false;
    }
    const struct fmap_extent *e = &s->extents[i];
    uint64_t front = (uint64_t)(grain - e->first) * FMAP_GRAIN + off % FMAP_GRAIN;
    *ret = (struct fmap_entry){
        .kind = (enum fmap_kind)e->kind,
        .slot = e->slot,
        .guest_off = off,
        .len = (uint64_t)(e->last + 1u - e->first) * FMAP_GRAIN - front,
        .host_off = e->kind == FMAP_DATA ? (uint64_t)e->host * FMAP_GRAIN + front : 0,
    };
    s->lives = m->lives;
    m->hits++;
    return true;
}

/* ---- changing ---- */

static struct fmap_slice *slice_make(struct fmap *m, uint64_t index)
{
    struct fmap_slice *s = calloc(1, sizeof(*s));

    if (!s || table_put(&m->slices, index, s) < 0) {
        free(s);
        return NULL;
    }
    s->index = index;
    s->swept = m->drops;
    list_push_back(&m->lru, &s->lru);
    account(m, (int64_t)heap_cost(sizeof(*s)));
    account_index(m);
    return s;
}

/* Replaces extents [from, to) by nr new ones. -ENOMEM: nothing changed. */
static int splice(struct fmap *m, struct fmap_slice *s, uint32_t from, uint32_t to,
                  const struct fmap_extent *add, uint32_t nr)
{
    uint32_t len = s->len - (to - from) + nr;
    int rc = slice_reserve(m, s, len, false);

    if (rc < 0)
        return rc;
    memmove(s->extents + from + nr, s->extents + to, (s->len - to) * sizeof(*add));
    if (nr)
        memcpy(s->extents + from, add, nr * sizeof(*add));
    s->len = len;
    return 0;
}

static struct fmap_extent cut_front(struct fmap_extent e, uint32_t first)
{
    if (e.kind == FMAP_DATA)
        e.host += first - e.first;
    e.first = first & 0x1ffff;
    return e;
}

/* Cuts grains [first, last] out of the slice and puts `in` there, if given. */
static int replace_range(struct fmap *m, struct fmap_slice *s, uint32_t first, uint32_t last,
                         const struct fmap_extent *in)
{
    struct fmap_extent add[3];
    uint32_t nr = 0, from = find_extent(m, s, first), to = from;

    while (to < s->len && s->extents[to].first <= last)
        to++;
    if (from < to && s->extents[from].first < first) {
        add[nr] = s->extents[from];
        add[nr++].last = (first - 1) & 0x1ffff;
    }
    if (in)
        add[nr++] = *in;
    if (from < to && s->extents[to - 1].last > last)
        add[nr++] = cut_front(s->extents[to - 1], last + 1);
    if (from == to && nr == 0)
        return 0;
    return splice(m, s, from, to, add, nr);
}

static bool can_merge(const struct fmap_extent *a, const struct fmap_extent *b)
{
    return a->slot == b->slot && a->kind == b->kind && a->last + 1u == b->first &&
           (a->kind != FMAP_DATA || a->host + (b->first - a->first) == b->host);
}

/* Joins extent i with the next one where they say the same. */
static void merge_next(struct fmap_slice *s, uint32_t i)
{
    if (i + 1 >= s->len || !can_merge(&s->extents[i], &s->extents[i + 1]))
        return;
    s->extents[i].last = s->extents[i + 1].last;
    memmove(s->extents + i + 1, s->extents + i + 2, (s->len - i - 2) * sizeof(*s->extents));
    s->len--;
}

/* e, up to `end`, as it is kept; false: it does not lie on grains, or too far away. */
static bool make_extent(const struct fmap *m, const struct fmap_entry *e, uint64_t end,
                        struct fmap_extent *ret)
{
    uint64_t host = e->kind == FMAP_DATA ? e->host_off : 0;

    if ((e->guest_off | host) % FMAP_GRAIN || end - e->guest_off < FMAP_GRAIN || host >> 56)
        return false;
    uint32_t first = grain_of(m, e->guest_off);
    uint32_t nr = (uint32_t)((end - e->guest_off) / FMAP_GRAIN); /* the rest is asked for again */
    *ret = (struct fmap_extent){
        .last = (first + nr - 1) & 0x1ffff,
        .host = host / FMAP_GRAIN & ((1ull << 47) - 1),
        .first = first & 0x1ffff,
        .slot = e->slot & FMAP_SLOT_MAX,
        .kind = (unsigned)e->kind & 7,
    };
    return true;
}

static bool insert_extent(struct fmap *m, struct fmap_slice *s, const struct fmap_extent *in)
{
    if (s->len > SLICE_EXTENTS_MAX)
        s->len = 0;
    if (replace_range(m, s, in->first, in->last, in) < 0)
        return false;
    uint32_t i = find_extent(m, s, in->first);
    merge_next(s, i);
    if (i > 0)
        merge_next(s, i - 1);
    s->lives = m->lives;
    return true;
}

/* The most that an insert may take: two extents more, in a slice that may be new. */
static uint64_t growth(const struct fmap *m, const struct fmap_slice *s)
{
    uint32_t len = s ? s->len + 2 : 2;

    if (!s)
        return heap_cost(sizeof(*s)) + array_cost(len + len / 8) + table_growth(&m->slices);
    return len > s->cap ? array_cost(len + len / 8) - array_cost(s->cap) : 0;
}

bool fmap_insert(struct fmap *m, uint32_t gen, const struct fmap_entry *e)
{
    uint64_t end = MIN(e->guest_off + e->len, fmap_slice_end(m, e->guest_off));
    struct fmap_extent in;

    if (gen != fmap_gen(m, e->guest_off)) {
        m->stale_inserts++;
        if (!m->insert_unchecked)
            return false;
    }
    if (!make_extent(m, e, end, &in))
        return false;
    m->keep = slice_get(m, e->guest_off >> m->slice_bits);
    bound_make_room(m->bound, growth(m, m->keep));
    struct fmap_slice *s = m->keep ? m->keep : slice_make(m, e->guest_off >> m->slice_bits);
    m->keep = NULL;
    return s && insert_extent(m, s, &in);
}

/* Entries of one slice; without memory to split an extent the whole slice goes. */
static void forget_in_slice(struct fmap *m, struct fmap_slice *s, uint64_t off, uint64_t end)
{
    uint64_t start = s->index << m->slice_bits;
    uint64_t from = MAX(off, start) - start, to = MIN(end - start, 1ull << m->slice_bits);

    if (replace_range(m, s, (uint32_t)(from / FMAP_GRAIN), (uint32_t)((to - 1) / FMAP_GRAIN),
                      NULL) < 0)
        s->len = 0;
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
        struct fmap_slice *s = slice_get(m, i);
        if (s)
            forget_in_slice(m, s, off, off + len);
    }
}

/* Everything known of the range in the slice is data of `slot` at host_off. */
static bool slice_agrees(const struct fmap *m, const struct fmap_slice *s, uint64_t off,
                         uint64_t len, unsigned slot, uint64_t host_off)
{
    uint32_t first = grain_of(m, off), last = first + (uint32_t)(len / FMAP_GRAIN) - 1;
    uint64_t host = host_off / FMAP_GRAIN;

    if ((off | len | host_off) % FMAP_GRAIN)
        return false;
    for (uint32_t i = find_extent(m, s, first); i < s->len && s->extents[i].first <= last; i++) {
        const struct fmap_extent *e = &s->extents[i];

        /* host place of the slice's start as each side has it; wraps alike on both */
        if (e->slot != slot || e->kind != FMAP_DATA || (uint64_t)e->host - e->first != host - first)
            return false;
    }
    return true;
}

void fmap_confirm(struct fmap *m, uint64_t off, uint64_t len, unsigned slot, uint64_t host_off)
{
    while (len > 0) {
        uint64_t n = MIN(len, fmap_slice_end(m, off) - off);
        struct fmap_slice *s = slice_get(m, off >> m->slice_bits);

        m->gens[gen_class(m, off)]++;
        if (s && !slice_agrees(m, s, off, n, slot, host_off))
            forget_in_slice(m, s, off, off + n);
        off += n;
        host_off += n;
        len -= n;
    }
}

void fmap_check_invariants(const struct fmap *m)
{
    uint64_t bytes = m->index_bytes;

    for (struct list *it = m->lru.next; it != &m->lru; it = it->next) {
        const struct fmap_slice *s = list_entry(it, struct fmap_slice, lru);
        uint64_t end = 0;

        for (uint32_t i = 0; i < s->len; i++) {
            const struct fmap_extent *e = &s->extents[i];

            CHECK_THAT(e->first >= end && e->last >= e->first && e->slot < m->dropped.len);
            end = e->last + 1u;
        }
        CHECK_THAT(end * FMAP_GRAIN <= 1ull << m->slice_bits && s->len <= s->cap);
        CHECK_THAT(table_get(&m->slices, s->index) == s);
        bytes += heap_cost(sizeof(*s)) + array_cost(s->cap);
    }
    CHECK_THAT(bytes == m->member.bytes && bytes <= m->bound->bytes);
}
