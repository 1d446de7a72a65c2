/*
 * Guest range -> extent.
 *
 * A hit takes no lock and does not wait: one look at the index, one at the slice. Compact slices
 * answer for all their entries at once.
 *
 *  1. What a lookup returns is true until the caller waits; its host clusters are not reused until
 *     the caller's request has left (image_enter).
 *  2. Entries of a slice not marked suspect are sane: checked when it was loaded, or made here.
 *
 * Order for a new L2 table: its content is on disk and flushed before the L1 entry is written
 * (flush.c); until then the entry is L1_PENDING.
 */
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/format.h"
#include "qcow2/internal.h"

/* Further slices or tables that one lookup may merge: it does not wait, nor hold others up. */
#define MERGE_STEPS 512u

bool map_entry_is_sane(struct image *img, struct l2_entry e)
{
    const struct qcow2_header *hdr = &img->hdr;
    uint64_t off = l2_host_off(e), len = 1;

    switch (l2_kind(hdr, e, 0)) {
    case CLUSTER_INVALID:
        return false;
    case CLUSTER_COMPRESSED:
        l2_compressed_range(hdr, e, &off, &len);
        break;
    default:
        if (!off)
            return true;
    }
    uint64_t last = (off + len - 1) >> hdr->cluster_bits;
    for (uint64_t c = off >> hdr->cluster_bits; c <= last; c++)
        if (!meta_may_hold_data(img, c))
            return false;
    return true;
}

/* ---- in one slice ---- */

static enum extent_kind extent_kind_of(enum cluster_kind kind)
{
    switch (kind) {
    case CLUSTER_NORMAL:
        return EXTENT_DATA;
    case CLUSTER_COMPRESSED:
        return EXTENT_COMPRESSED;
    case CLUSTER_ZERO_PLAIN:
    case CLUSTER_ZERO_ALLOC:
        return EXTENT_ZERO;
    default:
        return EXTENT_UNALLOCATED;
    }
}

static bool kind_has_host(enum cluster_kind kind)
{
    return kind == CLUSTER_NORMAL || kind == CLUSTER_ZERO_ALLOC;
}

/* The extent that starts at guest_off and lies in one cluster. */
static int map_in_entry(struct image *img, const struct slice *slice, uint64_t guest_off,
                        uint64_t len, struct extent *ret, struct l2_entry *ret_entry)
{
    const struct qcow2_header *hdr = &img->hdr;
    unsigned sub = sub_index(img, guest_off);
    struct l2_entry e = slice_entry(hdr, slice, slice_index(img, guest_off));
    enum cluster_kind kind = l2_kind(hdr, e, sub);

    /* the length of a compressed stream is a bound: it may reach over others when it is read */
    if (kind == CLUSTER_INVALID ||
        (slice->suspect && kind != CLUSTER_COMPRESSED && !map_entry_is_sane(img, e)))
        return -EUCLEAN;
    uint64_t end = (uint64_t)(sub + l2_run(hdr, e, sub)) << hdr->subcluster_bits;
    uint64_t in = in_cluster(img, guest_off);
    *ret = (struct extent){extent_kind_of(kind), MIN(len, end - in), 0, kind_has_host(kind)};
    if (ret->host_valid)
        ret->host_off = l2_host_off(e) + in;
    *ret_entry = e;
    return 0;
}

static bool can_merge(const struct extent *a, const struct extent *b)
{
    if (a->kind != b->kind || a->host_valid != b->host_valid)
        return false;
    return !a->host_valid || b->host_off == a->host_off + a->len;
}

static uint64_t len_in_slice(const struct image *img, uint64_t guest_off, uint64_t len)
{
    return MIN(len, slice_end(img, guest_off) - guest_off);
}

/* All of its entries say the same: one answer for what is left of it. */
static bool is_descriptor(const struct slice *slice)
{
    return slice->form == SLICE_SAME || slice->form == SLICE_LINEAR;
}

static void map_in_compact(const struct image *img, const struct slice *slice, uint64_t guest_off,
                           uint64_t len, struct extent *ret)
{
    enum cluster_kind kind = (enum cluster_kind)slice->kind;

    *ret = (struct extent){extent_kind_of(kind), len_in_slice(img, guest_off, len), 0,
                           kind_has_host(kind)};
    if (ret->host_valid)
        ret->host_off = l2_host_off(slice->first) + in_cluster(img, guest_off) +
                        ((uint64_t)slice_index(img, guest_off) << img->hdr.cluster_bits);
}

int map_in_slice(struct image *img, const struct slice *slice, uint64_t guest_off, uint64_t len,
                 struct extent *ret)
{
    struct l2_entry e;

    if (is_descriptor(slice)) {
        map_in_compact(img, slice, guest_off, len, ret);
        return 0;
    }
    len = len_in_slice(img, guest_off, len);
    int rc = map_in_entry(img, slice, guest_off, len, ret, &e);
    while (rc == 0 && ret->len < len) {
        struct extent next;

        /* an entry that is wrong is the next lookup's error */
        if (map_in_entry(img, slice, guest_off + ret->len, len - ret->len, &next, &e) < 0 ||
            !can_merge(ret, &next))
            break;
        ret->len += next.len;
    }
    return rc;
}

uint64_t map_in_place(struct image *img, const struct slice *slice, uint64_t guest_off,
                      uint64_t len, uint64_t *ret_host)
{
    struct extent ext = {0}, next;
    struct l2_entry e;

    if (is_descriptor(slice)) {
        map_in_compact(img, slice, guest_off, len, &ext);
        *ret_host = ext.host_off;
        return ext.kind == EXTENT_DATA && slice->first.word & ENTRY_COPIED ? ext.len : 0;
    }
    len = len_in_slice(img, guest_off, len);
    while (ext.len < len) {
        if (map_in_entry(img, slice, guest_off + ext.len, len - ext.len, &next, &e) < 0 ||
            next.kind != EXTENT_DATA || !(e.word & ENTRY_COPIED) ||
            (ext.len && !can_merge(&ext, &next)))
            break;
        next.len += ext.len;
        next.host_off -= ext.len;
        ext = next;
    }
    *ret_host = ext.host_off;
    return ext.len;
}

/* ---- from the L1 on ---- */

int map_pin(struct image *img, uint64_t guest_off, struct slice **ret)
{
    uint64_t entry = img->l1[l1_index(img, guest_off)];

    if (entry & L1_BAD)
        return -EUCLEAN;
    if (!(entry & L1_OFFSET_MASK))
        return -ENOENT;
    return cache_get(img, slice_key(img, guest_off), ret);
}

int map_cached(struct image *img, uint64_t guest_off, uint64_t len, struct extent *ret)
{
    struct slice *slice = cache_peek(img, slice_key(img, guest_off));

    if (slice)
        return map_in_slice(img, slice, guest_off, len, ret);
    uint64_t index = l1_index(img, guest_off);
    if (img->l1[index] & L1_BAD)
        return -EUCLEAN;
    if (img->l1[index] & L1_OFFSET_MASK)
        return -EAGAIN;
    uint64_t end = (index + 1) << (img->hdr.cluster_bits + img->hdr.l2_bits);
    *ret = (struct extent){EXTENT_UNALLOCATED, MIN(len, end - guest_off), 0, false};
    return 0;
}

int image_map(struct image *img, uint64_t guest_off, uint64_t len, struct extent *ret)
{
    struct slice *slice;
    struct extent next;
    int rc = map_cached(img, guest_off, len, ret);

    DEBUG_CHECK(len > 0 && range_ok(guest_off, len, img->hdr.virtual_len));
    if (rc == -EAGAIN) {
        rc = map_pin(img, guest_off, &slice);
        if (rc < 0)
            return rc;
        rc = map_in_slice(img, slice, guest_off, len, ret);
        cache_put(img, slice);
    }
    for (unsigned i = 0; rc == 0 && ret->len < len && i < MERGE_STEPS; i++) {
        if (map_cached(img, guest_off + ret->len, len - ret->len, &next) < 0 ||
            !can_merge(ret, &next))
            break;
        ret->len += next.len;
    }
    return rc;
}

int image_load_map(struct image *img, uint64_t guest_off, uint64_t *ret_end)
{
    struct slice *slice;
    uint64_t table_bytes = 1ull << (img->hdr.cluster_bits + img->hdr.l2_bits);
    int rc = map_pin(img, guest_off, &slice);

    if (rc == -ENOENT) {
        *ret_end = MIN(align_down(guest_off, table_bytes) + table_bytes, img->hdr.virtual_len);
        return 0;
    }
    if (rc < 0)
        return rc;
    cache_put(img, slice);
    *ret_end = MIN(slice_end(img, guest_off), img->hdr.virtual_len);
    return 0;
}

uint64_t image_map_in_place(struct image *img, uint64_t guest_off, uint64_t len, uint64_t *ret_host)
{
    if (image_check_writable(img) < 0)
        return 0;
    struct slice *slice = cache_peek(img, slice_key(img, guest_off));
    return slice ? map_in_place(img, slice, guest_off, len, ret_host) : 0;
}

/* ---- L2 tables ---- */

/* The slices of a table that was never written are known: empty. */
static void add_empty_slices(struct image *img, uint64_t index)
{
    unsigned shift = img->hdr.l2_bits - img->slice_bits;

    for (uint64_t i = 0; i < 1ull << shift; i++)
        cache_add_empty(img, index << shift | i);
}

SUSPENDS static int copy_table(struct image *img, uint64_t from, uint64_t to)
{
    struct buf b = {buf_get(img->hdr.cluster_size), img->hdr.cluster_size};
    int rc = b.data ? blk_read(img->blk, from, b.data, b.len) : -ENOMEM;

    if (rc == 0)
        rc = blk_write(img->blk, to, b.data, b.len);
    buf_drop(&b);
    return rc;
}

/* Fills the new table's cluster on disk; slices of an old one stay true, they are named by guest
 * address. */
SUSPENDS static int fill_table(struct image *img, const struct host_run *run, uint64_t old_off)
{
    uint64_t off = run->first << img->hdr.cluster_bits;

    return old_off ? copy_table(img, old_off, off)
                   : meta_write_zeroes(img->blk, off, off + img->hdr.cluster_size);
}

SUSPENDS static int own_table_locked(struct image *img, uint64_t index, struct room *room)
{
    uint64_t old_off = img->l1[index] & L1_OFFSET_MASK;
    struct host_run run;

    if (old_off && img->l1[index] & ENTRY_COPIED)
        return 0; /* somebody was faster */
    int rc = vec_reserve(&img->l1_dirty, img->l1_dirty.len + 1);
    if (rc == 0)
        rc = alloc_clusters(img, 1, &run);
    if (rc < 0)
        return rc;
    rc = fill_table(img, &run, old_off);
    if (rc == 0)
        rc = vec_reserve(&img->l1_dirty, img->l1_dirty.len + 1); /* it waited */
    if (rc == 0)
        rc = meta_add(img, run.first, 1, META_L2);
    if (rc < 0) {
        alloc_give_back(img, run.first, 1);
        return rc;
    }
    img->unflushed = true;
    record_table(img, room, index, img->l1[index],
                 run.first << img->hdr.cluster_bits | ENTRY_COPIED);
    img->l1[index] = run.first << img->hdr.cluster_bits | ENTRY_COPIED | L1_PENDING;
    (void)vec_push(&img->l1_dirty, (uint32_t)index); /* reserved */
    if (!old_off) {
        img->cache.tables++;
        add_empty_slices(img, index);
        return 0;
    }
    /* shared with an internal snapshot: one reference less, once the L1 on disk says so */
    meta_remove(img, old_off >> img->hdr.cluster_bits, 1);
    alloc_free(img, old_off >> img->hdr.cluster_bits, 1, false);
    return 0;
}

int map_own_table(struct image *img, uint64_t guest_off, struct room *room)
{
    uint64_t index = l1_index(img, guest_off);

    if (img->l1[index] & L1_BAD)
        return image_corrupt(img, "L1 entry %llu is invalid", (unsigned long long)index);
    if (img->l1[index] & L1_OFFSET_MASK && img->l1[index] & ENTRY_COPIED)
        return 0;
    co_mutex_lock(&img->l1_lock);
    int rc = own_table_locked(img, index, room);
    co_mutex_unlock(&img->l1_lock);
    return rc;
}
