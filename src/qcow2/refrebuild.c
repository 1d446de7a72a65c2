/*
 * A new refcount structure from the references.
 *
 * 1. Until the header is switched nothing that the old header refers to is overwritten: new
 *    blocks go to clusters without references that are no part of the old structure.
 * 2. Copied flags are corrected in place before the switch: the dirty bit covers for them.
 *
 * Order of writes: refcount blocks, table, L2 and L1 flags; flush; header; flush.
 */
#include <stdlib.h>
#include <string.h>
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/format.h"
#include "qcow2/layout.h"
#include "qcow2/refbits.h"
#include "qcow2/refrebuild.h"
#include "qcow2/refscan.h"

struct rebuild {
    struct refscan scan;
    struct qcow2_header *hdr; /* borrowed */
    uint8_t *old;             /* bit a cluster: part of the old structure; owned */
    uint64_t old_clusters;    /* bits in it */
    uint64_t cursor;          /* no free cluster below */
    be64 *table;              /* the new refcount table; owned */
    uint64_t table_off, table_clusters, table_entries;
};

/* ---- free space ---- */

static void mark_old(struct rebuild *r, uint64_t off)
{
    uint64_t cluster = off >> r->hdr->cluster_bits;

    if (cluster < r->old_clusters)
        r->old[cluster >> 3] |= (uint8_t)(1u << (cluster & 7));
}

static bool is_free(const struct rebuild *r, uint64_t cluster)
{
    if (cluster < r->old_clusters && r->old[cluster >> 3] >> (cluster & 7) & 1)
        return false;
    return cluster >= r->scan.nr_clusters || refscan_count(&r->scan, cluster) == 0;
}

/* n clusters in a row, counted as used from here on. */
SUSPENDS
static int take_clusters(struct rebuild *r, uint64_t n, uint64_t *ret_off)
{
    struct blk *blk = r->scan.blk;
    unsigned bits = r->hdr->cluster_bits;
    uint64_t first = r->cursor, have = 0;

    for (uint64_t i = first; have < n; i++) {
        if (!is_free(r, i)) {
            first = i + 1;
            have = 0;
        } else {
            have++;
        }
    }
    if (blk->fixed_len && (first + n) << bits > blk->len) {
        int rc = blk_is_extendable(blk) ? blk_extend(blk, (first + n) << bits, NULL) : -ENOSPC;

        if (rc < 0)
            return rc;
    }
    if (first + n > r->scan.nr_clusters) {
        int rc = refscan_grow(&r->scan, first + n);

        if (rc < 0)
            return rc;
    }
    if (n == 1)
        r->cursor = first + 1;
    *ret_off = first << bits;
    return refscan_add(&r->scan, REF_METADATA, *ret_off, n << bits, "refcount structure");
}

/* What is left of the old structure; how broken it is does not matter. */
SUSPENDS
static int note_old_structure(struct rebuild *r)
{
    const struct qcow2_header *hdr = r->hdr;
    struct blk *blk = r->scan.blk;
    uint64_t len = (uint64_t)hdr->reftable_clusters << hdr->cluster_bits;

    r->old_clusters = r->scan.nr_clusters;
    r->old = calloc(r->old_clusters / 8 + 1, 1);
    if (!r->old)
        return -ENOMEM;
    if (hdr->reftable_off == 0 || len == 0 || hdr->reftable_off >= blk->len)
        return 0;
    len = MIN(len, align_down(blk->len - hdr->reftable_off, 8));
    _cleanup_(freep) be64 *table = malloc(len ? len : 1);

    if (!table)
        return -ENOMEM;
    int rc = blk_read(blk, hdr->reftable_off, table, len);

    if (rc < 0)
        return rc;
    for (uint64_t off = 0; off < len; off += hdr->cluster_size)
        mark_old(r, hdr->reftable_off + off);
    for (uint64_t i = 0; i < len / 8; i++)
        mark_old(r, be64_get(table[i]) & QCOW2_REFTABLE_OFFSET_MASK);
    return 0;
}

/* ---- placing ---- */

static bool block_is_needed(const struct rebuild *r, uint64_t index)
{
    uint64_t first = index << r->hdr->refcount_block_bits;
    uint64_t end = MIN(first + (1ull << r->hdr->refcount_block_bits), r->scan.nr_clusters);

    for (uint64_t i = first; i < end; i++) {
        if (r->scan.counts[i])
            return true;
    }
    return false;
}

/* Gives a place to every block that covers a cluster in use, those of blocks included. */
SUSPENDS
static int place_blocks(struct rebuild *r)
{
    bool changed = true;

    while (changed) {
        changed = false;
        for (uint64_t i = 0; i < r->table_entries; i++) {
            uint64_t off;

            if (be64_get(r->table[i]) || !block_is_needed(r, i))
                continue;
            int rc = take_clusters(r, 1, &off);

            if (rc < 0)
                return rc;
            r->table[i] = be64_make(off);
            changed = true;
        }
    }
    return 0;
}

SUSPENDS
static int place_structure(struct rebuild *r)
{
    const struct qcow2_header *hdr = r->hdr;
    uint64_t blocks, len;

    /* Enough even if all of the new structure goes behind the end of the file. */
    qcow2_refcount_clusters(hdr, r->scan.nr_clusters, 0, &blocks, &r->table_clusters);
    len = r->table_clusters << hdr->cluster_bits;
    if (len > QCOW2_REFTABLE_BYTES_MAX)
        return -EFBIG;
    r->table_entries = len / 8;
    r->table = calloc(1, len);
    if (!r->table)
        return -ENOMEM;
    int rc = take_clusters(r, r->table_clusters, &r->table_off);

    return rc < 0 ? rc : place_blocks(r);
}

/* ---- writing ---- */

static int fill_block(const struct rebuild *r, uint64_t index, void *block)
{
    unsigned order = r->hdr->refcount_order;
    uint64_t first = index << r->hdr->refcount_block_bits;
    uint64_t n = MIN(1ull << r->hdr->refcount_block_bits, r->scan.nr_clusters - first);

    memset(block, 0, r->hdr->cluster_size);
    for (uint64_t i = 0; i < n; i++) {
        uint64_t count = refscan_count(&r->scan, first + i);

        if (count > refbits_max(order))
            return -ERANGE;
        refbits_set(block, order, i, count);
    }
    return 0;
}

SUSPENDS
static int write_structure(struct rebuild *r)
{
    const struct qcow2_header *hdr = r->hdr;
    _cleanup_(buf_drop) struct buf buf = {buf_get(hdr->cluster_size), hdr->cluster_size};

    if (!buf.data)
        return -ENOMEM;
    for (uint64_t i = 0; i < r->table_entries; i++) {
        uint64_t off = be64_get(r->table[i]);

        if (off == 0)
            continue;
        int rc = fill_block(r, i, buf.data);

        if (rc == 0)
            rc = blk_write(r->scan.blk, off, buf.data, hdr->cluster_size);
        if (rc < 0)
            return rc;
    }
    return blk_write(r->scan.blk, r->table_off, r->table, r->table_entries * 8);
}

/* ---- copied flags ---- */

static uint64_t right_flag(const struct rebuild *r, uint64_t word, uint64_t host_off)
{
    bool one = refscan_count(&r->scan, host_off >> r->hdr->cluster_bits) == 1;

    return one ? word | ENTRY_COPIED : word & ~ENTRY_COPIED;
}

/* True if an entry changed. */
static bool fix_l2_flags(const struct rebuild *r, void *table)
{
    bool changed = false;

    for (unsigned i = 0; i < 1u << r->hdr->l2_bits; i++) {
        struct l2_entry e = l2_get(r->hdr, table, i);
        uint64_t word = e.word;

        if (l2_is_compressed(e))
            e.word &= ~ENTRY_COPIED;
        else if (l2_host_off(e))
            e.word = right_flag(r, e.word, l2_host_off(e));
        if (e.word != word) {
            l2_put(r->hdr, table, i, e);
            changed = true;
        }
    }
    return changed;
}

SUSPENDS
static int fix_l2(struct rebuild *r, uint64_t off, void *table)
{
    int rc = blk_read(r->scan.blk, off, table, r->hdr->cluster_size);

    if (rc < 0 || r->hdr->incompatible & QCOW2_INCOMPAT_DATA_FILE)
        return rc;
    return fix_l2_flags(r, table) ? blk_write(r->scan.blk, off, table, r->hdr->cluster_size) : 0;
}

/* The scan found nothing wrong: all offsets are good. */
SUSPENDS
static int fix_flags(struct rebuild *r)
{
    const struct qcow2_header *hdr = r->hdr;
    size_t l1_len = hdr->l1_entries * 8ul;
    _cleanup_(buf_drop) struct buf table = {buf_get(hdr->cluster_size), hdr->cluster_size};
    _cleanup_(freep) be64 *l1 = malloc(l1_len ? l1_len : 1);
    bool changed = false;

    if (!l1 || !table.data)
        return -ENOMEM;
    int rc = blk_read(r->scan.blk, hdr->l1_off, l1, l1_len);

    for (uint32_t i = 0; i < hdr->l1_entries && rc == 0; i++) {
        uint64_t word = be64_get(l1[i]), off = word & L1_OFFSET_MASK;
        uint64_t right = off ? right_flag(r, word, off) : word;

        if (off)
            rc = fix_l2(r, off, table.data);
        changed |= right != word;
        l1[i] = be64_make(right);
    }
    if (rc == 0 && changed)
        rc = blk_write(r->scan.blk, hdr->l1_off, l1, l1_len);
    return rc;
}

/* ---- all of it ---- */

SUSPENDS
static int switch_header(struct rebuild *r, struct err *err)
{
    struct qcow2_header next = *r->hdr; /* owned members stay the caller's */
    int rc = blk_flush(r->scan.blk);

    if (rc < 0)
        return err_errno(err, rc, "flush");
    next.reftable_off = r->table_off;
    next.reftable_clusters = (uint32_t)r->table_clusters;
    next.incompatible &= ~QCOW2_INCOMPAT_DIRTY;
    rc = qcow2_header_write(r->scan.blk, &next, err);
    if (rc < 0)
        return rc;
    rc = blk_flush(r->scan.blk);
    if (rc < 0)
        return err_errno(err, rc, "flush");
    *r->hdr = next;
    return 0;
}

SUSPENDS
static int rebuild(struct rebuild *r, struct err *err)
{
    const struct image_check *res = r->scan.res;
    int rc = refscan_all(&r->scan);

    if (rc < 0)
        return err_errno(err, rc, "count references");
    if (res->corruptions || res->check_errors)
        return err_set(err, res->corruptions ? -EUCLEAN : -EIO,
                       "refcounts cannot be rebuilt: %llu other errors in the image",
                       (unsigned long long)(res->corruptions + res->check_errors));
    rc = note_old_structure(r);
    if (rc == 0)
        rc = place_structure(r);
    if (rc == 0)
        rc = write_structure(r);
    if (rc == 0)
        rc = fix_flags(r);
    if (rc < 0)
        return err_errno(err, rc, "rebuild refcounts");
    return switch_header(r, err);
}

int qcow2_rebuild_refcounts(struct blk *blk, struct qcow2_header *hdr, struct err *err)
{
    struct rebuild r = {.hdr = hdr};
    struct image_check res = {0};
    int rc = refscan_init(&r.scan, blk, hdr, &res, err);

    if (rc == 0)
        rc = rebuild(&r, err);
    refscan_fini(&r.scan);
    free(r.old);
    free(r.table);
    return rc;
}
