/*
 * Refcounts of host clusters, of any width.
 *
 * Written through: when a call returns, what it changed has been written to the file. Everything
 * runs under alloc_lock, so a refcount slice never changes while it is being written.
 *
 *  1. A cluster counts as used on disk before anybody uses it (refcount_take comes first).
 *  2. A new refcount block is whole in the file before the table names it: in memory at once, on
 *     disk by flush.c, which flushes the block first and writes L2 entries last.
 *  3. A block counts itself, or is counted by a block that existed before.
 *
 * Spec: "Host cluster management".
 */
#include <string.h>
#include "base/be.h"
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/format.h"
#include "qcow2/internal.h"
#include "qcow2/refbits.h"

static uint64_t block_index(const struct image *img, uint64_t cluster)
{
    return cluster >> img->hdr.refcount_block_bits;
}

static uint64_t block_off(const struct image *img, uint64_t index)
{
    return index < img->reftable_entries ? img->reftable[index] & QCOW2_REFTABLE_OFFSET_MASK : 0;
}

static uint64_t ref_key(const struct image *img, uint64_t cluster)
{
    return SLICE_REFCOUNT | cluster >> img->ref_slice_bits;
}

static uint64_t in_slice(const struct image *img, uint64_t cluster)
{
    return cluster & ((1ull << img->ref_slice_bits) - 1);
}

/* First cluster behind the slice of `cluster`. */
static uint64_t ref_slice_end(const struct image *img, uint64_t cluster)
{
    return ((cluster >> img->ref_slice_bits) + 1) << img->ref_slice_bits;
}

/* -ENOENT: no block, all its refcounts are 0. */
SUSPENDS static int pin_slice(struct image *img, uint64_t cluster, struct slice **ret)
{
    uint64_t index = block_index(img, cluster), off = block_off(img, index);

    if (!off)
        return -ENOENT;
    if (!is_aligned(off, img->hdr.cluster_size) || img->reftable[index] & 0x1ff ||
        off >> img->hdr.cluster_bits >= image_host_limit(img))
        return image_corrupt(img, "refcount block %llu lies at an impossible place",
                             (unsigned long long)index);
    return cache_get(img, ref_key(img, cluster), ret);
}

static uint64_t slice_count(const struct image *img, const struct slice *s, uint64_t cluster)
{
    uint64_t i = in_slice(img, cluster);

    if (s->form == SLICE_TABLE)
        return refbits_get(s->table, img->hdr.refcount_order, i);
    return refbits_get(&s->first.word, img->hdr.refcount_order,
                       i & ((64u >> img->hdr.refcount_order) - 1));
}

int refcount_get(struct image *img, uint64_t cluster, uint64_t *ret)
{
    struct slice *s;
    int rc = pin_slice(img, cluster, &s);

    if (rc == -ENOENT)
        *ret = 0;
    if (rc < 0)
        return rc == -ENOENT ? 0 : rc;
    *ret = slice_count(img, s, cluster);
    cache_put(img, s);
    return 0;
}

/* SAME slices only: every refcount of the repeated pattern is above 0. */
static bool all_used(const struct image *img, const struct slice *s)
{
    for (unsigned i = 0; i < 64u >> img->hdr.refcount_order; i++)
        if (!refbits_get(&s->first.word, img->hdr.refcount_order, i))
            return false;
    return true;
}

int refcount_find_free(struct image *img, uint64_t cluster, uint64_t limit, struct host_run *ret,
                       uint64_t *ret_next)
{
    struct slice *s;
    uint64_t end = MIN(limit, ref_slice_end(img, cluster)), c = cluster;
    int rc = pin_slice(img, cluster, &s);

    *ret_next = end;
    *ret = (struct host_run){cluster, rc == -ENOENT ? end - cluster : 0, false};
    if (rc < 0)
        return rc == -ENOENT ? 0 : rc;
    if (s->form == SLICE_SAME && all_used(img, s))
        c = end;
    while (c < end && slice_count(img, s, c))
        c++;
    ret->first = c;
    while (c < end && !slice_count(img, s, c))
        c++;
    ret->nr = c - ret->first;
    *ret_next = c;
    cache_put(img, s);
    return 0;
}

int refcount_find_last(struct image *img, uint64_t limit, uint64_t *ret_end)
{
    while (limit > 0) {
        struct slice *s;
        uint64_t start = (limit - 1) >> img->ref_slice_bits << img->ref_slice_bits;
        int rc = pin_slice(img, limit - 1, &s);

        if (rc == -ENOENT) {
            limit = start;
            continue;
        }
        if (rc < 0)
            return rc;
        if (s->form == SLICE_SAME && !s->first.word)
            limit = start;
        while (limit > start && !slice_count(img, s, limit - 1))
            limit--;
        cache_put(img, s);
        if (limit > start)
            break;
    }
    *ret_end = limit;
    return 0;
}

/* ---- changing ---- */

/* The sectors of a slice that changed, in one write. */
SUSPENDS static int write_slice(struct image *img, struct slice *s)
{
    unsigned first = (unsigned)__builtin_ctz(s->dirty_sectors);
    unsigned last = 31 - (unsigned)__builtin_clz(s->dirty_sectors);
    unsigned io_unit = MAX(img->blk->io_unit, SLICE_SECTOR);
    unsigned unit = MIN(io_unit, (unsigned)img->slice_bytes);
    size_t from = align_down((uint64_t)first * SLICE_SECTOR, unit);
    size_t to = align_up((uint64_t)(last + 1) * SLICE_SECTOR, unit);

    s->dirty_sectors = 0;
    img->stats.refcount_writes++;
    if (flush_mutation == FLUSH_SKIP_REFCOUNTS)
        return 0;
    int rc =
        blk_write(img->blk, cache_disk_off(img, s->key) + from, (char *)s->table + from, to - from);
    img->unflushed = true;
    return rc;
}

static void set_count(struct image *img, struct slice *s, uint64_t cluster, uint64_t value)
{
    uint64_t i = in_slice(img, cluster);

    refbits_set(s->table, img->hdr.refcount_order, i, value);
    cache_mark_dirty(img, s, (unsigned)((i << img->hdr.refcount_order) / 8),
                     MAX(1u << img->hdr.refcount_order >> 3, 1u));
}

/* Clusters of one slice: 0 -> 1. Undone in memory if it cannot be written. */
SUSPENDS static int take_in_slice(struct image *img, struct slice *s, uint64_t first, uint64_t nr)
{
    int rc = cache_expand(img, s);

    if (rc < 0)
        return rc;
    for (uint64_t c = first; c < first + nr; c++)
        if (slice_count(img, s, c))
            return image_corrupt(img, "cluster %llu is counted behind the end of the image",
                                 (unsigned long long)c);
    for (uint64_t c = first; c < first + nr; c++)
        set_count(img, s, c, 1);
    rc = write_slice(img, s);
    if (rc == 0)
        return 0;
    for (uint64_t c = first; c < first + nr; c++)
        set_count(img, s, c, 0);
    s->dirty_sectors = 0; /* the file may count them: a leak, corrected by the next write */
    return rc;
}

int refcount_take(struct image *img, uint64_t first, uint64_t nr, uint64_t *ret_done)
{
    uint64_t end = first + nr;

    *ret_done = 0;
    while (first < end) {
        struct slice *s;
        uint64_t n = MIN(end, ref_slice_end(img, first)) - first;
        int rc = pin_slice(img, first, &s);

        DEBUG_CHECK(rc != -ENOENT);
        if (rc < 0)
            return rc;
        rc = take_in_slice(img, s, first, n);
        cache_put(img, s);
        if (rc < 0)
            return rc;
        cache_compact(img, s);
        first += n;
        *ret_done += n;
    }
    return 0;
}

/* One reference less, in memory. */
SUSPENDS static int drop_one(struct image *img, struct slice *s, uint64_t cluster)
{
    uint64_t count = slice_count(img, s, cluster);

    if (count == 0)
        return image_corrupt(img, "cluster %llu is freed more often than counted",
                             (unsigned long long)cluster);
    set_count(img, s, cluster, count - 1);
    if (count == 1) {
        img->scan_pos = MIN(img->scan_pos, cluster);
        img->scan_stop = MAX(img->scan_stop, cluster + 1);
    }
    return 0;
}

/* As much of a sorted list of clusters as lies in the first one's slice: one write. */
SUSPENDS static int drop_in_slice(struct image *img, struct slice *s, const struct host_free *list,
                                  size_t nr, size_t *ret_at, uint64_t *ret_cluster)
{
    uint64_t end = ref_slice_end(img, *ret_cluster);
    int rc = cache_expand(img, s);

    while (rc == 0 && *ret_at < nr && *ret_cluster < end) {
        rc = drop_one(img, s, *ret_cluster);
        if (++*ret_cluster < list[*ret_at].first + list[*ret_at].nr)
            continue;
        if (++*ret_at < nr)
            *ret_cluster = list[*ret_at].first;
    }
    if (!s->dirty_sectors)
        return rc;
    int write_rc = write_slice(img, s);
    return rc < 0 ? rc : write_rc;
}

int refcount_drop(struct image *img, const struct host_free *list, size_t nr)
{
    size_t at = 0;
    uint64_t cluster = nr ? list[0].first : 0;

    while (at < nr) {
        struct slice *s;
        int rc = pin_slice(img, cluster, &s);

        if (rc == -ENOENT)
            return image_corrupt(img, "cluster %llu is freed but not counted",
                                 (unsigned long long)cluster);
        if (rc < 0)
            return rc;
        rc = drop_in_slice(img, s, list, nr, &at, &cluster);
        cache_put(img, s);
        if (rc < 0)
            return rc;
        cache_compact(img, s);
    }
    return 0;
}

/* ---- new blocks ---- */

static void add_empty_slices(struct image *img, uint64_t index)
{
    unsigned shift = img->hdr.refcount_block_bits - img->ref_slice_bits;

    for (uint64_t i = 0; i < 1ull << shift; i++)
        cache_add_empty(img, SLICE_REFCOUNT | index << shift | i);
}

static void forget_block(struct image *img, uint64_t index, uint64_t cluster)
{
    unsigned shift = img->hdr.refcount_block_bits - img->ref_slice_bits;

    img->reftable[index] = 0;
    meta_remove(img, cluster, 1);
    for (uint64_t i = 0; i < 1ull << shift; i++)
        cache_drop(img, SLICE_REFCOUNT | index << shift | i);
}

int refcount_block_in(struct image *img, uint64_t index, uint64_t cluster)
{
    uint64_t off = cluster << img->hdr.cluster_bits, old = img->reftable[index], done;
    bool room = false;

    DEBUG_CHECK(index < img->reftable_entries && !block_off(img, index));
    int rc = vec_reserve(&img->reftable_dirty, img->reftable_dirty.len + 1);
    /* fresh space too: a power cut must not leave the table pointing behind the file's end */
    if (rc == 0)
        rc = meta_write_zeroes(img->blk, off, off + img->hdr.cluster_size);
    if (rc == 0)
        rc = meta_add(img, cluster, 1, META_REFBLOCK);
    if (rc < 0)
        return rc;
    img->unflushed = true;
    img->fresh_from = MAX(img->fresh_from, cluster + 1);
    img->end = MAX(img->end, cluster + 1);
    img->reftable[index] = off;
    /* a flush that copies this sector of the table for another entry leaves this one out */
    img->reftable_making = index + 1;
    add_empty_slices(img, index);
    rc = refcount_take(img, cluster, 1, &done);
    if (rc == 0)
        room = (rc = room_for_block(img)) == 0;
    if (rc == 0)
        rc = vec_push(&img->reftable_dirty, (uint32_t)index);
    img->reftable_making = 0;
    if (rc == 0) {
        record_block(img, index, old);
        return 0;
    }
    if (room && img->ack.is_on)
        journal_unreserve(img->ack.journal, 1);
    forget_block(img, index, cluster);
    return rc;
}

/* ---- a larger table ---- */

/*
 * The new table and the blocks that its own clusters need stand at the file's end:
 *
 *   end: | table ... | block | block |
 *
 * Order: blocks and table, flush, header, flush; the old table is freed after the next flush (a
 * flush that is under way may still write into it).
 */
struct new_table {
    uint64_t *entries; /* host order */
    uint64_t nr, clusters;
    uint64_t first;  /* cluster of the table */
    uint64_t blocks; /* new ones behind it */
};

static uint64_t entries_in(const struct image *img, uint64_t clusters)
{
    return (clusters << img->hdr.cluster_bits) / 8;
}

/* Places blocks until everything new is covered. */
static int plan_table(struct image *img, uint64_t min_entries, struct new_table *t)
{
    t->first = img->end;
    t->clusters =
        div_up(MAX(min_entries, img->reftable_entries * 3 / 2) * 8, img->hdr.cluster_size);
    for (;;) {
        uint64_t last = block_index(img, t->first + t->clusters + t->blocks);

        t->nr = entries_in(img, t->clusters);
        if (last < t->nr)
            break;
        t->clusters++;
    }
    if (t->clusters << img->hdr.cluster_bits > QCOW2_REFTABLE_BYTES_MAX)
        return -EFBIG;
    t->entries = calloc(t->nr, 8);
    if (!t->entries)
        return -ENOMEM;
    memcpy(t->entries, img->reftable, img->reftable_entries * 8);
    for (uint64_t c = t->first; c < t->first + t->clusters + t->blocks; c++) {
        if (block_index(img, c) >= t->nr)
            return -EFBIG;
        if (t->entries[block_index(img, c)])
            continue;
        t->entries[block_index(img, c)] = (t->first + t->clusters + t->blocks++)
                                          << img->hdr.cluster_bits;
    }
    uint64_t end = t->first + t->clusters + t->blocks;
    if (img->blk->fixed_len && end << img->hdr.cluster_bits > img->blk->len)
        return grow_no_room(img, end);
    return 0;
}

/* A new block with the part of [first, end) that it counts. */
SUSPENDS static int write_new_block(struct image *img, uint64_t off, uint64_t index, uint64_t first,
                                    uint64_t end)
{
    uint64_t base = index << img->hdr.refcount_block_bits;
    uint64_t block_end = base + (1ull << img->hdr.refcount_block_bits);
    struct buf b = {buf_get(img->hdr.cluster_size), img->hdr.cluster_size};

    if (!b.data)
        return -ENOMEM;
    memset(b.data, 0, b.len);
    for (uint64_t c = MAX(first, base); c < MIN(end, block_end); c++)
        refbits_set(b.data, img->hdr.refcount_order, c - base, 1);
    int rc = blk_write(img->blk, off, b.data, b.len);
    buf_drop(&b);
    return rc;
}

/* *ret_taken: clusters from t->first on that an old block counts now. */
SUSPENDS static int write_blocks(struct image *img, const struct new_table *t, uint64_t *ret_taken)
{
    uint64_t end = t->first + t->clusters + t->blocks, done;

    for (uint64_t c = t->first; c < end;) {
        uint64_t index = block_index(img, c);
        uint64_t next = MIN(end, (index + 1) << img->hdr.refcount_block_bits);
        int rc;

        if (block_off(img, index)) {
            rc = refcount_take(img, c, next - c, &done);
            *ret_taken += done;
        } else {
            rc = write_new_block(img, t->entries[index], index, t->first, end);
        }
        if (rc < 0)
            return rc;
        c = next;
    }
    return 0;
}

SUSPENDS static int write_table(struct image *img, const struct new_table *t)
{
    be64 *disk = buf_get(t->nr * 8);

    if (!disk)
        return -ENOMEM;
    for (uint64_t i = 0; i < t->nr; i++)
        disk[i] = be64_make(t->entries[i]);
    int rc = blk_write(img->blk, t->first << img->hdr.cluster_bits, disk, t->nr * 8);
    buf_put(disk, t->nr * 8);
    return rc;
}

/* Spec: offset and length of the table lie side by side in the header: one sector, one write. */
SUSPENDS static int switch_table(struct image *img, const struct new_table *t)
{
    struct {
        be64 off;
        be32 clusters;
    } __attribute__((packed))
    field = {be64_make(t->first << img->hdr.cluster_bits), be32_make((uint32_t)t->clusters)};
    int rc = blk_flush(img->blk);

    if (rc == 0)
        rc = image_poke_header(img, offsetof(struct qcow2_disk_header, reftable_off), &field,
                               sizeof(field));
    if (rc == 0)
        rc = blk_flush(img->blk);
    return rc < 0 ? image_fail(img, rc) : 0; /* which table is the valid one is not known */
}

static int adopt_table(struct image *img, struct new_table *t)
{
    int rc = meta_add(img, t->first, t->clusters, META_REFTABLE);

    for (uint64_t i = 0; i < t->nr && rc == 0; i++)
        if (!block_off(img, i) && t->entries[i])
            rc = meta_add(img, t->entries[i] >> img->hdr.cluster_bits, 1, META_REFBLOCK);
    meta_remove(img, img->hdr.reftable_off >> img->hdr.cluster_bits, img->hdr.reftable_clusters);
    alloc_free(img, img->hdr.reftable_off >> img->hdr.cluster_bits, img->hdr.reftable_clusters,
               false);
    img->hdr.reftable_off = t->first << img->hdr.cluster_bits;
    img->hdr.reftable_clusters = (uint32_t)t->clusters;
    free(img->reftable);
    img->reftable = TAKE_PTR(t->entries);
    img->reftable_entries = t->nr;
    img->reftable_dirty.len = 0; /* all in the new table */
    return rc;
}

SUSPENDS static int grow_table(struct image *img, uint64_t min_entries)
{
    struct new_table t = {0};
    uint64_t taken = 0;
    int rc = plan_table(img, min_entries, &t);

    if (rc == 0)
        rc = write_blocks(img, &t, &taken);
    if (rc == 0)
        rc = write_table(img, &t);
    if (rc < 0 && taken) {
        struct host_free unused = {.first = t.first, .nr = taken};

        (void)refcount_drop(img, &unused, 1); /* else it is leaked */
    }
    if (rc == 0)
        rc = switch_table(img, &t);
    if (rc == 0) {
        img->end = t.first + t.clusters + t.blocks;
        img->fresh_from = MAX(img->fresh_from, img->end);
        rc = adopt_table(img, &t);
    }
    free(t.entries);
    return rc;
}

int refcount_cover(struct image *img, uint64_t cluster)
{
    uint64_t index = block_index(img, cluster);
    int rc;

    if (index < img->reftable_entries && block_off(img, index))
        return 0;
    if (index >= img->reftable_entries)
        rc = grow_table(img, index + 1);
    else if (img->blk->fixed_len && (img->end + 1) << img->hdr.cluster_bits > img->blk->len)
        rc = grow_no_room(img, img->end + 1);
    else /* at the end, which this block counts itself, or an older one: it was covered first */
        rc = refcount_block_in(img, index, img->end);
    return rc < 0 ? rc : 1;
}
