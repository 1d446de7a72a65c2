/* Metadata slices: see cache.h. */
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/format.h"
#include "qcow2/internal.h"

/* Slices read at once, and for how many useless such reads in a row it is kept up. */
#define GROUP_SLICES 4ull
#define GROUP_WIDE   16ull /* where they cost a descriptor each */
#define GROUP_SCORE  4
#define GROUP_RETRY  64u

static unsigned slice_entries(const struct image *img)
{
    return 1u << img->slice_bits;
}

/* ---- accounts ---- */

static void account(struct cache *c, int64_t bytes)
{
    bound_add(c->bound, &c->member, bytes);
    c->bytes_max = MAX(c->bytes_max, c->member.bytes);
}

/* After every change of the index. */
static void account_index(struct cache *c)
{
    uint64_t now = c->index.cap ? heap_cost(c->index.cap * sizeof(struct table_slot)) : 0;

    if (now == c->index_bytes)
        return;
    account(c, (int64_t)(now - c->index_bytes));
    c->index_bytes = now;
}

/* Tables that are always in memory, as long as they are now. */
static void account_fixed(struct image *img)
{
    struct cache *c = &img->cache;
    uint64_t slots = img->meta.cap + img->meta_chunks.cap;
    uint64_t now = (img->hdr.l1_entries + img->reftable_entries) * sizeof(uint64_t) +
                   slots * sizeof(struct table_slot);

    if (now != c->fixed_bytes)
        bound_add_fixed(c->bound, (int64_t)(now - c->fixed_bytes));
    c->fixed_bytes = now;
}

/* What a slice has beside its descriptor. */
static uint64_t content_cost(const struct image *img, const struct slice *s)
{
    if (s->form == SLICE_TABLE)
        return s->table ? heap_cost(img->slice_bytes) : 0;
    return s->form == SLICE_PACKED ? heap_cost(s->packed->len) : 0;
}

/* ---- forms ---- */

/* All words of the table alike (in units of 8 or 16 bytes)? */
static bool is_uniform(const void *table, size_t unit, size_t len)
{
    return memcmp(table, (const char *)table + unit, len - unit) == 0;
}

static bool is_linear(const struct qcow2_header *hdr, const void *table, unsigned entries)
{
    struct l2_entry first = l2_get(hdr, table, 0);

    for (unsigned i = 1; i < entries; i++) {
        struct l2_entry e = l2_get(hdr, table, i);

        if (e.word != first.word + ((uint64_t)i << hdr->cluster_bits) || e.bits != first.bits)
            return false;
    }
    return true;
}

/* The form a table could take; TABLE if none. */
static enum slice_form compact_form(const struct image *img, uint64_t key, const void *table,
                                    enum cluster_kind *ret_kind)
{
    const struct qcow2_header *hdr = &img->hdr;

    if (key & SLICE_REFCOUNT)
        return is_uniform(table, 8, img->slice_bytes) ? SLICE_SAME : SLICE_TABLE;
    struct l2_entry first = l2_get(hdr, table, 0);
    enum cluster_kind kind = l2_kind(hdr, first, 0);
    if (kind == CLUSTER_INVALID || kind == CLUSTER_COMPRESSED ||
        l2_run(hdr, first, 0) != hdr->subclusters)
        return SLICE_TABLE;
    *ret_kind = kind;
    if (l2_host_off(first))
        return is_linear(hdr, table, slice_entries(img)) ? SLICE_LINEAR : SLICE_TABLE;
    return is_uniform(table, hdr->l2_entry_size, img->slice_bytes) ? SLICE_SAME : SLICE_TABLE;
}

static void set_first(const struct image *img, struct slice *s, const void *table,
                      enum slice_form form, enum cluster_kind kind)
{
    if (s->key & SLICE_REFCOUNT)
        memcpy(&s->first.word, table, 8);
    else
        s->first = l2_get(&img->hdr, table, 0);
    s->table = NULL;
    s->form = (uint8_t)(form & 15);
    s->kind = (uint8_t)kind;
}

/* The smallest form that content can take; false: that is a table. */
static bool set_small(struct image *img, struct slice *s, const void *content, bool pack)
{
    enum cluster_kind kind = CLUSTER_UNALLOCATED;
    enum slice_form form = compact_form(img, s->key, content, &kind);

    if (form != SLICE_TABLE) {
        set_first(img, s, content, form, kind);
        return true;
    }
    if (s->key & SLICE_REFCOUNT || !pack)
        return false;
    struct packed_slice *packed = pack_slice(&img->hdr, content, slice_entries(img));
    if (!packed)
        return false;
    s->packed = packed;
    s->form = SLICE_PACKED;
    img->cache.packed++;
    account(&img->cache, (int64_t)heap_cost(packed->len));
    return true;
}

void cache_compact(struct image *img, struct slice *s)
{
    if (s->pins || s->form != SLICE_TABLE || s->state != SLICE_READY || !slice_is_clean(s) ||
        !list_empty(&s->dirty) || s->suspect || s->stays_table)
        return;
    /* while half of the bound is left, what changed will not be unpacked for the next change */
    bool pack = bound_left(img->cache.bound) < img->cache.bound->limit / 2;
    void *table = s->table;
    if (!set_small(img, s, table, pack)) {
        s->stays_table = pack;
        return;
    }
    free(table);
    account(&img->cache, -(int64_t)heap_cost(img->slice_bytes));
}

static void fill_table(const struct image *img, const struct slice *s, void *table)
{
    if (s->key & SLICE_REFCOUNT) {
        for (size_t i = 0; i < img->slice_bytes; i += 8)
            memcpy((char *)table + i, &s->first.word, 8);
        return;
    }
    for (unsigned i = 0; i < slice_entries(img); i++)
        l2_put(&img->hdr, table, i, slice_entry(&img->hdr, s, i));
}

/* Takes `table`. */
static void set_table(struct image *img, struct slice *s, void *table)
{
    s->table = table;
    s->form = SLICE_TABLE;
    s->stays_table = false;
    account(&img->cache, (int64_t)heap_cost(img->slice_bytes));
}

int cache_expand(struct image *img, struct slice *s)
{
    DEBUG_CHECK(s->pins && s->state == SLICE_READY);
    if (s->form == SLICE_TABLE)
        return 0;
    void *table = malloc(img->slice_bytes);
    if (!table)
        return -ENOMEM;
    fill_table(img, s, table);
    if (s->form == SLICE_PACKED) {
        account(&img->cache, -(int64_t)heap_cost(s->packed->len));
        img->cache.packed--;
        free(s->packed);
    }
    set_table(img, s, table);
    return 0;
}

/* ---- slices ---- */

static struct slice *slice_new(struct image *img, uint64_t key)
{
    struct cache *c = &img->cache;
    struct slice *s = calloc(1, sizeof(*s));

    if (!s)
        return NULL;
    s->key = key;
    list_init(&s->dirty);
    if (table_put(&c->index, key, s) < 0) {
        free(s);
        return NULL;
    }
    account(c, (int64_t)heap_cost(sizeof(*s)));
    account_index(c);
    return s;
}

/* It is out of the index. */
static void slice_free(struct image *img, struct slice *s)
{
    struct cache *c = &img->cache;

    account(c, -(int64_t)(content_cost(img, s) + heap_cost(sizeof(*s))));
    if (!list_empty(&s->dirty))
        c->dirty_bytes -= img->slice_bytes;
    list_remove(&s->dirty);
    c->packed -= s->form == SLICE_PACKED;
    free(s->table); /* or what is packed */
    free(s);
}

static void slice_remove(struct image *img, struct slice *s)
{
    table_remove(&img->cache.index, s->key);
    slice_free(img, s);
}

static bool is_evictable(const struct slice *s)
{
    return !s->pins && s->state == SLICE_READY && slice_is_clean(s) && list_empty(&s->dirty);
}

/* The hand's next slice: it goes if it was not used, or loses its table if it can. */
static bool clock_step(struct bound_member *m, bool force)
{
    struct cache *c = container_of(m, struct cache, member);
    struct image *img = container_of(c, struct image, cache);

    while (c->hand < c->index.cap && !c->index.slots[c->hand].value)
        c->hand++;
    if (c->hand >= c->index.cap) {
        c->hand = 0;
        table_trim(&c->index);
        account_index(c);
        return true;
    }
    struct slice *s = c->index.slots[c->hand].value;
    if (is_evictable(s) && (force || !s->used)) {
        slice_remove(img, s); /* another one may have moved to the hand */
        return false;
    }
    s->used = false;
    cache_compact(img, s);
    c->hand++;
    return false;
}

/* Never waits: a load inside a flush or under alloc_lock must not wait for a flush. */
static void make_room(struct image *img)
{
    account_fixed(img);
    bound_make_room(img->cache.bound, heap_cost(sizeof(struct slice)) +
                                          heap_cost(img->slice_bytes) +
                                          table_growth(&img->cache.index));
}

uint64_t cache_disk_off(const struct image *img, uint64_t key)
{
    bool ref = key & SLICE_REFCOUNT;
    unsigned table_bits = ref ? img->hdr.refcount_block_bits : img->hdr.l2_bits;
    unsigned shift = table_bits - (ref ? img->ref_slice_bits : img->slice_bits);
    uint64_t table = (key & ~SLICE_REFCOUNT) >> shift, part = key & ((1ull << shift) - 1);
    uint64_t off;

    if (ref)
        off = table < img->reftable_entries ? img->reftable[table] & QCOW2_REFTABLE_OFFSET_MASK : 0;
    else
        off = table < img->hdr.l1_entries ? img->l1[table] & L1_OFFSET_MASK : 0;
    return off ? off + part * img->slice_bytes : 0;
}

/* ---- loading ---- */

/* Entries that point at metadata or out of the file are found here once, not at each use. */
static bool is_sane(struct image *img, const void *content, enum slice_form form)
{
    struct l2_entry first = l2_get(&img->hdr, content, 0);
    uint64_t cluster = l2_host_off(first) >> img->hdr.cluster_bits;

    if (form == SLICE_SAME)
        return true; /* compact_form() took nothing but valid entries without a place */
    if (form == SLICE_LINEAR)
        return cluster + slice_entries(img) <= image_host_limit(img) &&
               meta_none_in(img, cluster, slice_entries(img));
    for (unsigned i = 0; i < slice_entries(img); i++)
        if (!map_entry_is_sane(img, l2_get(&img->hdr, content, i)))
            return false;
    return true;
}

/* The slice's content, in whatever form it can take. */
static int fill(struct image *img, struct slice *s, const void *content)
{
    enum cluster_kind kind = CLUSTER_UNALLOCATED;
    enum slice_form form = compact_form(img, s->key, content, &kind);

    s->suspect = !(s->key & SLICE_REFCOUNT) && !is_sane(img, content, form);
    if (!s->suspect && set_small(img, s, content, true))
        return 0;
    void *table = malloc(img->slice_bytes);
    if (!table)
        return -ENOMEM;
    memcpy(table, content, img->slice_bytes);
    set_table(img, s, table);
    s->stays_table = true;
    return 0;
}

/* Slices of one table that are read together, a power of two. */
static uint64_t group_slices(const struct image *img, uint64_t key)
{
    const struct qcow2_header *hdr = &img->hdr;
    unsigned bits = key & SLICE_REFCOUNT ? hdr->refcount_block_bits - img->ref_slice_bits
                                         : hdr->l2_bits - img->slice_bits;

    bool wide = key & SLICE_REFCOUNT || img->cache.group_wide;

    return MIN(wide ? GROUP_WIDE : GROUP_SLICES, 1ull << bits);
}

/* A neighbour read on the way: while there is room if it costs a descriptor alone, while there is
 * plenty of it else. */
static bool keep_neighbour(struct image *img, uint64_t key, const void *content)
{
    struct cache *c = &img->cache;
    enum cluster_kind kind;

    if (table_get(&c->index, key))
        return false;
    bool compact = compact_form(img, key, content, &kind) != SLICE_TABLE;
    if (bound_left(c->bound) < c->bound->limit / (compact ? 16 : 4))
        return false;
    struct slice *s = slice_new(img, key);
    if (!s)
        return false;
    if (fill(img, s, content) < 0) {
        cache_drop(img, key);
        return false;
    }
    s->state = SLICE_READY;
    return true;
}

/* What a journal says of the slices that were read. */
static void lay_over(const struct image *img, uint64_t first, void *content, uint64_t nr)
{
    if (img->view && !(first & SLICE_REFCOUNT))
        recover_view_l2(img->view, &img->hdr, content, first << img->slice_bits,
                        (unsigned)(nr << img->slice_bits));
}

/*
 * Reads the slice with its neighbours. A neighbour that is not here when the read begins is as
 * on disk; one that was loaded, changed, written and evicted meanwhile would come back old: then
 * l2_writes or refcount_writes has moved.
 */
SUSPENDS static int load_group(struct image *img, struct slice *s, uint64_t nr)
{
    size_t len = nr * img->slice_bytes;
    uint64_t first = align_down(s->key, nr);
    uint64_t writes = img->stats.l2_writes + img->stats.refcount_writes;
    struct buf b = {buf_get(len), len};
    unsigned kept = 0;

    if (!b.data)
        return -ENOMEM;
    int rc = blk_read(img->blk, cache_disk_off(img, first), b.data, len);
    if (rc == 0)
        lay_over(img, first, b.data, nr);
    if (rc == 0)
        rc = fill(img, s, (char *)b.data + (s->key - first) * img->slice_bytes);
    if (rc == 0 && writes == img->stats.l2_writes + img->stats.refcount_writes)
        for (uint64_t i = 0; i < nr; i++)
            kept += first + i != s->key &&
                    keep_neighbour(img, first + i, (char *)b.data + i * img->slice_bytes);
    img->cache.group_score = kept ? GROUP_SCORE : img->cache.group_score - 1;
    if (!(s->key & SLICE_REFCOUNT))
        img->cache.group_wide = rc == 0 && (s->form == SLICE_SAME || s->form == SLICE_LINEAR);
    buf_drop(&b);
    return rc;
}

SUSPENDS static int load(struct image *img, struct slice *s)
{
    uint64_t nr = group_slices(img, s->key);

    /* while neighbours are worth keeping; now and then look whether they are again */
    if (nr > 1 && (img->cache.group_score > 0 || img->cache.misses % GROUP_RETRY == 0)) {
        img->cache.group_score = MAX(img->cache.group_score, 1);
        return load_group(img, s, nr);
    }
    void *content = buf_get(img->slice_bytes);
    int rc = content ? blk_read(img->blk, cache_disk_off(img, s->key), content, img->slice_bytes)
                     : -ENOMEM;
    if (rc == 0)
        lay_over(img, s->key, content, 1);
    if (rc == 0)
        rc = fill(img, s, content);
    buf_put(content, img->slice_bytes);
    return rc;
}

/* The caller's pin keeps the slice over the wait. */
SUSPENDS static int load_new(struct image *img, uint64_t key, struct slice **ret)
{
    struct wait_queue loaded;

    make_room(img);
    struct slice *s = slice_new(img, key);
    if (!s)
        return -ENOMEM;
    img->cache.misses++;
    wait_queue_init(&loaded);
    s->loaded = &loaded;
    s->pins = 1;
    int rc = load(img, s); /* its last step replaces s->loaded, and waits no more */
    s->state = rc < 0 ? SLICE_FAILED : SLICE_READY;
    if (rc < 0)
        table_remove(&img->cache.index, key);
    wait_queue_wake_all(&loaded);
    *ret = s;
    return rc;
}

struct slice *cache_peek(struct image *img, uint64_t key)
{
    struct slice *s = table_get(&img->cache.index, key);

    if (!s || s->state != SLICE_READY)
        return NULL;
    s->used = !img->cache.passing;
    img->cache.hits++;
    return s;
}

int cache_get(struct image *img, uint64_t key, struct slice **ret)
{
    struct slice *s = table_get(&img->cache.index, key);
    int rc = 0;

    if (!s) {
        rc = load_new(img, key, &s);
        if (rc < 0 && s)
            cache_put(img, s);
        if (rc < 0)
            return rc;
    } else {
        s->pins++;
        img->cache.hits++;
        while (s->state == SLICE_LOADING)
            wait_queue_sleep(s->loaded);
        if (s->state == SLICE_FAILED) {
            cache_put(img, s);
            return -EIO;
        }
    }
    s->used = !img->cache.passing;
    *ret = s;
    return 0;
}

void cache_put(struct image *img, struct slice *s)
{
    DEBUG_CHECK(s->pins);
    if (--s->pins == 0 && s->state == SLICE_FAILED)
        slice_free(img, s);
}

void cache_add_empty(struct image *img, uint64_t key)
{
    if (table_get(&img->cache.index, key))
        return;
    make_room(img);
    struct slice *s = slice_new(img, key);
    if (!s)
        return;
    s->form = SLICE_SAME;
    s->kind = CLUSTER_UNALLOCATED;
    s->state = SLICE_READY;
}

void cache_drop(struct image *img, uint64_t key)
{
    struct slice *s = table_remove(&img->cache.index, key);

    if (!s)
        return;
    DEBUG_CHECK(!s->pins);
    slice_free(img, s);
}

void cache_drop_all(struct image *img)
{
    struct cache *c = &img->cache;
    struct table_slot *slot;

    for (size_t pos = 0; (slot = table_next(&c->index, &pos));) {
        struct slice *s = slot->value;

        DEBUG_CHECK(!s->pins);
        slice_free(img, s);
    }
    table_fini(&c->index);
    c->hand = 0;
    account_index(c);
}

/* ---- dirt ---- */

void cache_mark_dirty(struct image *img, struct slice *s, unsigned off, unsigned len)
{
    struct cache *c = &img->cache;

    DEBUG_CHECK(s->form == SLICE_TABLE && len > 0 && off + len <= img->slice_bytes);
    unsigned first = off / SLICE_SECTOR, last = (off + len - 1) / SLICE_SECTOR;
    s->dirty_sectors |= (uint8_t)mask32(first, last - first + 1);
    s->stays_table = false;
    if (s->key & SLICE_REFCOUNT || !list_empty(&s->dirty))
        return;
    list_push_back(&c->dirty, &s->dirty);
    c->dirty_bytes += img->slice_bytes;
}

void cache_init(struct image *img)
{
    struct cache *c = &img->cache;

    *c = (struct cache){.group_score = GROUP_SCORE, .member.step = clock_step};
    list_init(&c->dirty);
    bound_init(&c->own, CACHE_BYTES_MIN);
    c->bound = &c->own;
    bound_join(c->bound, &c->member);
}

void cache_set_bound(struct image *img, struct bound *bound)
{
    struct cache *c = &img->cache;

    bound_add_fixed(c->bound, -(int64_t)c->fixed_bytes);
    bound_part(c->bound, &c->member);
    c->fixed_bytes = 0;
    c->bound = bound ? bound : &c->own;
    bound_join(c->bound, &c->member);
    account_fixed(img);
    c->passing = false;
    c->tables = 0;
    for (uint32_t i = 0; img->l1 && i < img->hdr.l1_entries; i++) /* a failed reopen has none */
        c->tables += (img->l1[i] & L1_OFFSET_MASK) != 0;
}

uint64_t cache_estimate(const struct image *img)
{
    const struct cache *c = &img->cache;
    uint64_t nr = MAX(c->index.used, (size_t)1);

    return (c->tables << (img->hdr.l2_bits - img->slice_bits)) * (c->member.bytes / nr);
}

void cache_fini(struct image *img)
{
    struct cache *c = &img->cache;

    cache_drop_all(img);
    bound_add_fixed(c->bound, -(int64_t)c->fixed_bytes);
    bound_part(c->bound, &c->member);
}
