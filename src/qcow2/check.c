/*
 * Full consistency check.
 *
 *   1. the refcount structure: each block counted, clusters with refcount one noted
 *   2. every other reference counted (refscan.c)
 *   3. each cluster's stored refcount held against its references
 *
 * Too few stored is a corruption: the cluster may be given to a second owner. Too many is a leak.
 *
 * Of an image whose server was killed the file is looked at as replay will make it: replay itself
 * runs, into memory.
 */
#include <stdlib.h>
#include <string.h>
#include "base/bits.h"
#include "base/own.h"
#include "qcow2/format.h"
#include "qcow2/internal.h"
#include "qcow2/refbits.h"
#include "qcow2/refscan.h"

/* Called for the refcount block that covers clusters [first, first + n); block NULL: there is
 * none, refcounts are zero. */
typedef int block_fn(struct refscan *s, const void *block, uint64_t first, uint64_t n);

/* The refcount table in memory: at most 8 MiB. */
struct reftable {
    be64 *entries; /* owned */
    uint64_t nr;
};

SUSPENDS
static int load_reftable(struct refscan *s, struct reftable *ret)
{
    const struct qcow2_header *hdr = s->hdr;
    uint64_t len = (uint64_t)hdr->reftable_clusters << hdr->cluster_bits;

    *ret = (struct reftable){0};
    if (hdr->reftable_off == 0 || len == 0) {
        refscan_corrupt(s, "the image has no refcount table");
        return 0;
    }
    if (!range_ok(hdr->reftable_off, len, align_up(s->blk->len, hdr->cluster_size))) {
        refscan_corrupt(s, "the refcount table lies beyond the end of the file");
        return 0;
    }
    int rc = refscan_add(s, REF_METADATA, hdr->reftable_off, len, "refcount table");

    if (rc < 0)
        return rc;
    ret->entries = malloc(len);
    if (!ret->entries)
        return -ENOMEM;
    rc = blk_read(s->blk, hdr->reftable_off, ret->entries, len);
    if (rc < 0)
        refscan_unreadable(s, "refcount table", hdr->reftable_off, rc);
    else
        ret->nr = len / 8;
    return 0;
}

/* A usable block offset, or 0. */
static uint64_t block_off(const struct refscan *s, uint64_t word)
{
    uint64_t off = word & QCOW2_REFTABLE_OFFSET_MASK;

    return is_aligned(off, s->hdr->cluster_size) && range_ok(off, 1, s->blk->len) ? off : 0;
}

static int count_blocks(struct refscan *s, const struct reftable *table)
{
    for (uint64_t i = 0; i < table->nr; i++) {
        uint64_t word = be64_get(table->entries[i]), off = block_off(s, word);

        if (word & QCOW2_REFTABLE_RESERVED_MASK)
            refscan_corrupt(s, "refcount table entry %llu has reserved bits set (0x%llx)",
                            (unsigned long long)i, (unsigned long long)word);
        if (off == 0 && word & QCOW2_REFTABLE_OFFSET_MASK)
            refscan_corrupt(s, "refcount block %llu at 0x%llx is misplaced", (unsigned long long)i,
                            (unsigned long long)(word & QCOW2_REFTABLE_OFFSET_MASK));
        int rc =
            off ? refscan_add(s, REF_METADATA, off, s->hdr->cluster_size, "refcount block") : 0;

        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Blocks of clusters beyond the file's end are of no interest. */
SUSPENDS
static int for_each_block(struct refscan *s, const struct reftable *table, block_fn *fn)
{
    const struct qcow2_header *hdr = s->hdr;
    _cleanup_(buf_drop) struct buf buf = {buf_get(hdr->cluster_size), hdr->cluster_size};
    uint64_t per_block = 1ull << hdr->refcount_block_bits;

    if (!buf.data)
        return -ENOMEM;
    for (uint64_t first = 0, i = 0; first < s->nr_clusters; first += per_block, i++) {
        uint64_t off = i < table->nr ? block_off(s, be64_get(table->entries[i])) : 0;
        int rc = off ? blk_read(s->blk, off, buf.data, hdr->cluster_size) : 0;

        if (rc < 0) {
            refscan_unreadable(s, "refcount block", off, rc);
            continue;
        }
        rc = fn(s, off ? buf.data : NULL, first, MIN(per_block, s->nr_clusters - first));
        if (rc < 0)
            return rc;
    }
    return 0;
}

static int note_ones(struct refscan *s, const void *block, uint64_t first, uint64_t n)
{
    for (uint64_t i = 0; block && i < n; i++) {
        uint64_t cluster = first + i;

        if (refbits_get(block, s->hdr->refcount_order, i) == 1)
            s->stored_one[cluster >> 3] |= (uint8_t)(1u << (cluster & 7));
    }
    return 0;
}

static int compare_block(struct refscan *s, const void *block, uint64_t first, uint64_t n)
{
    for (uint64_t i = 0; i < n; i++) {
        uint64_t stored = block ? refbits_get(block, s->hdr->refcount_order, i) : 0;
        uint64_t counted = refscan_count(s, first + i);

        if (stored || counted)
            s->res->image_end_off = (first + i + 1) << s->hdr->cluster_bits;
        if (stored < counted) {
            refscan_corrupt(s, "cluster %llu: refcount %llu, references %llu",
                            (unsigned long long)(first + i), (unsigned long long)stored,
                            (unsigned long long)counted);
        } else if (stored > counted) {
            s->res->leaks++;
            refscan_say(s, "leaked cluster %llu: refcount %llu, references %llu",
                        (unsigned long long)(first + i), (unsigned long long)stored,
                        (unsigned long long)counted);
        }
    }
    return 0;
}

/* Clusters that are counted once and used by nothing: the next open for writing takes them. */
static void count_unused(struct refscan *s, const struct recovery *found)
{
    for (size_t i = 0; i < found->nr_runs; i++) {
        const struct journal_run *run = &found->runs[i];

        for (uint64_t c = run->first; c < MIN(run->first + run->nr, s->nr_clusters); c++)
            if (refscan_count(s, c) == 0)
                s->counts[c] = 1;
    }
}

SUSPENDS
static int check_with_table(struct refscan *s, const struct reftable *table,
                            const struct recovery *found)
{
    int rc = count_blocks(s, table);

    if (rc == 0)
        rc = for_each_block(s, table, note_ones);
    if (rc == 0)
        rc = refscan_all(s);
    if (rc == 0)
        count_unused(s, found);
    if (rc == 0)
        rc = for_each_block(s, table, compare_block);
    return rc;
}

SUSPENDS
static int run_check(struct refscan *s, const struct recovery *found, struct err *err)
{
    struct reftable table;

    s->stored_one = calloc(s->nr_clusters / 8 + 1, 1);
    if (!s->stored_one)
        return err_set(err, -ENOMEM, "out of memory");
    int rc = load_reftable(s, &table);

    if (rc == 0)
        rc = check_with_table(s, &table, found);
    free(table.entries);
    return rc < 0 ? err_errno(err, rc, "check") : 0;
}

/* `found`: what a journal left unused. */
SUSPENDS static int check_device(struct blk *blk, const struct qcow2_header *hdr,
                                 const struct recovery *found, struct image_check *ret,
                                 void (*report)(void *ctx, const char *line), void *ctx,
                                 struct err *err)
{
    struct refscan scan;

    *ret = (struct image_check){.total_clusters = div_up(hdr->virtual_len, hdr->cluster_size)};
    int rc = refscan_init(&scan, blk, hdr, ret, err);

    if (rc < 0)
        return rc;
    scan.report = report;
    scan.ctx = ctx;
    rc = run_check(&scan, found, err);
    refscan_fini(&scan);
    return rc;
}

int qcow2_check(struct blk *blk, const struct qcow2_header *hdr, struct image_check *ret,
                void (*report)(void *ctx, const char *line), void *ctx, struct err *err)
{
    return check_device(blk, hdr, &(struct recovery){0}, ret, report, ctx, err);
}

int image_check(struct image *img, struct image_check *ret,
                void (*report)(void *ctx, const char *line), void *ctx, struct err *err)
{
    struct recovery found = {0};
    struct blk *over = NULL;
    struct ack ack = {0};
    int rc = img->writable ? 0
                           : ack_preview(&ack, img->opts.journal_dir, img->blk, &img->hdr, &over,
                                         &found, err);

    if (rc == 0)
        rc = check_device(over ? over : img->blk, &img->hdr, &found, ret, report, ctx, err);
    if (rc == 0) {
        ret->has_journal = over;
        ret->journal_records = found.nr_records;
        memcpy(ret->journal_note, ack.note, sizeof(ack.note));
    }
    blk_close(over);
    recovery_fini(&found);
    return rc;
}
