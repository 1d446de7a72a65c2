/*
 * The order in which an image reaches the disk.
 *
 *   device flush     data, refcounts, new L2 tables (empty, or copies), new refcount blocks
 *   refcount table   entries of new blocks; device flush if there were any
 *   L2 slices        in batches sorted by place, neighbours merged; a device flush between batches
 *   L1               entries of new L2 tables
 *   device flush
 *   then             what was unmapped may be reused (alloc_release)
 *
 * so that whatever subset of unflushed writes survives a power cut, no entry on disk points to
 * something that is not there. No flush stands between L2 and L1: what the new L1 entry points to
 * was flushed as an empty table or as a copy of the old one, which says the same as the old L1
 * entry.
 *
 *  1. What is written is a copy made before the first flush: an entry that changes while a flush
 * runs points to data which that flush does not cover; it goes with the next run.
 *  2. One run at a time. A flush that comes while one runs waits for the next one, which all that
 * wait share.
 *  3. A run that fails for want of space leaves everything dirty and can be tried again; any other
 *     failure is sticky: nobody knows what the disk holds.
 *  4. With nothing dirty a flush is one device flush, and none at all when nothing was written.
 */
#include <string.h>
#include "base/be.h"
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/format.h"
#include "qcow2/internal.h"

#define BATCH_BYTES  ((size_t)2 << 20)
#define BATCH_WRITES 8u /* at once */

enum flush_mutation flush_mutation;

/* ---- a batch: copies of what is to be written, in the order of their place ---- */

struct piece {
    uint64_t off; /* in the file */
    size_t at, len;
};
struct batch {
    char *buf;
    size_t used, cap;
    VEC(struct piece) pieces;
};

static int batch_init(struct batch *b, size_t cap)
{
    *b = (struct batch){.buf = buf_get(cap), .cap = cap};
    return b->buf ? 0 : -ENOMEM;
}

static void batch_fini(struct batch *b)
{
    buf_put(b->buf, b->cap);
    vec_free(&b->pieces);
}

/* Room for a copy of [off, off + len); merged with the piece before if it follows it. */
static char *batch_add(struct batch *b, uint64_t off, size_t len)
{
    struct piece *last = b->pieces.len ? &b->pieces.data[b->pieces.len - 1] : NULL;
    char *to = b->buf + b->used;

    if (b->used + len > b->cap)
        return NULL;
    if (last && last->off + last->len == off)
        last->len += len;
    else if (vec_push(&b->pieces, {off, b->used, len}) < 0)
        return NULL;
    b->used += len;
    return to;
}

struct piece_job {
    struct image *img;
    struct batch *b;
    size_t next;
};

SUSPENDS static int write_pieces(void *arg)
{
    struct piece_job *job = arg;
    int rc = 0;

    while (rc == 0 && job->next < job->b->pieces.len) {
        struct piece *p = &job->b->pieces.data[job->next++];

        rc = blk_write(job->img->blk, p->off, job->b->buf + p->at, p->len);
    }
    return rc;
}

SUSPENDS static int batch_write(struct image *img, struct batch *b)
{
    struct piece_job job = {img, b, 0};
    struct co_group group;

    img->unflushed = true;
    co_group_init(&group);
    for (unsigned i = 1; i < MIN(b->pieces.len, (size_t)BATCH_WRITES); i++)
        if (co_group_spawn(&group, write_pieces, &job) < 0)
            break;
    int rc = write_pieces(&job);
    int rc_others = co_group_wait(&group);
    img->unflushed = true; /* again: a device flush by others may lie between */
    return rc < 0 ? rc : rc_others;
}

SUSPENDS static int device_flush(struct image *img)
{
    img->unflushed = false; /* what is written from here on needs another one */
    img->stats.flushes++;
    return blk_flush(img->blk);
}

/* ---- tables of 8-byte entries: L1 and refcount table ---- */

static int by_index(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

    return x < y ? -1 : x > y;
}

/* Copies of the sectors with these entries. `sorted` is sorted. */
static int copy_sectors(const struct image *img, const uint64_t *table, uint64_t entries,
                        uint64_t table_off, const uint32_t *sorted, size_t nr, uint64_t clear,
                        struct batch *b)
{
    uint32_t per = MAX(img->blk->io_unit, 512u) / 8;
    uint64_t done = 0; /* entries below are copied */

    for (size_t i = 0; i < nr; i++) {
        uint64_t first = sorted[i] / per * per, last = MIN(first + per, entries);

        if (first + 1 <= done)
            continue;
        be64 *to = (be64 *)batch_add(b, table_off + first * 8, (last - first) * 8);
        if (!to)
            return -ENOMEM;
        for (uint64_t e = first; e < last; e++)
            to[e - first] = be64_make(table[e] & ~clear);
        done = last;
    }
    return 0;
}

static size_t sectors_bound(const struct image *img, size_t nr)
{
    size_t unit = MAX(img->blk->io_unit, 512u);

    return MAX(nr * unit, (size_t)BUF_ALIGN);
}

/* ---- one run ---- */

struct run {
    struct list slices;     /* dirty when the run began, not yet copied */
    struct slice **written; /* copied into a batch of this run */
    uint8_t *sectors;       /* their dirty sectors */
    size_t nr_written, cap_written;
    struct batch l1; /* copied when the run began */
    uint32_t *l1_list;
    size_t nr_l1;
    uint64_t journal_next;   /* records below are in this run */
    struct host_free *freed; /* unmapped by this run */
    size_t nr_freed;
};

SUSPENDS static int write_reftable(struct image *img, struct batch *b)
{
    if (b->pieces.len == 0)
        return 0;
    int rc = batch_write(img, b);
    return rc < 0 ? rc : device_flush(img);
}

static int copy_reftable(struct image *img, struct batch *b, uint32_t **ret_list, size_t *ret_nr)
{
    size_t nr = img->reftable_dirty.len;

    *ret_nr = 0;
    *ret_list = NULL;
    int rc = batch_init(b, sectors_bound(img, nr));
    if (rc < 0 || nr == 0)
        return rc;
    sort_items(img->reftable_dirty.data, nr, sizeof(uint32_t), by_index);
    uint64_t none = 0,
             *making = img->reftable_making ? &img->reftable[img->reftable_making - 1] : &none;
    uint64_t entry = *making;
    *making = 0;
    rc = copy_sectors(img, img->reftable, img->reftable_entries, img->hdr.reftable_off,
                      img->reftable_dirty.data, nr, 0, b);
    *making = entry;
    if (rc < 0)
        return rc;
    *ret_list = img->reftable_dirty.data;
    *ret_nr = nr;
    img->reftable_dirty.data = NULL;
    img->reftable_dirty.len = img->reftable_dirty.cap = 0;
    return 0;
}

static int by_place(const void *a, const void *b)
{
    const struct slice *x = *(struct slice *const *)a, *y = *(struct slice *const *)b;

    return x->key < y->key ? -1 : x->key > y->key;
}

static int run_reserve(struct run *r, size_t nr)
{
    if (nr <= r->cap_written)
        return 0;
    size_t cap = MAX(nr, r->cap_written * 2);
    struct slice **written = reallocarray(r->written, cap, sizeof(*written));
    if (!written)
        return -ENOMEM;
    r->written = written;
    uint8_t *sectors = realloc(r->sectors, cap);
    if (!sectors)
        return -ENOMEM;
    r->sectors = sectors;
    r->cap_written = cap;
    return 0;
}

/* From the first to the last dirty sector, rounded out to the device's unit. */
static void dirty_range(const struct image *img, const struct slice *s, size_t *ret_from,
                        size_t *ret_to)
{
    size_t io_unit = MAX((size_t)img->blk->io_unit, (size_t)SLICE_SECTOR);
    size_t unit = MIN(io_unit, img->slice_bytes);
    size_t first = (size_t)__builtin_ctz(s->dirty_sectors);
    size_t last = 31 - (size_t)__builtin_clz(s->dirty_sectors);

    *ret_from = align_down(first * SLICE_SECTOR, unit);
    *ret_to = align_up((last + 1) * SLICE_SECTOR, unit);
}

/* Takes up to a batch of slices off the list; they are the run's from there on. */
static int take_slices(struct image *img, struct run *r, size_t *ret_first)
{
    size_t most = BATCH_BYTES / img->slice_bytes, nr = 0;

    *ret_first = r->nr_written;
    list_for_each(it, &r->slices)
        if (++nr == most)
            break;
    int rc = run_reserve(r, r->nr_written + nr);
    if (rc < 0)
        return rc;
    for (; nr > 0; nr--) {
        struct slice *s = list_entry(list_pop_front(&r->slices), struct slice, dirty);

        img->cache.dirty_bytes -= img->slice_bytes;
        r->written[r->nr_written++] = s;
    }
    /* keys go up with guest addresses; tables made in order lie in order */
    sort_items(r->written + *ret_first, r->nr_written - *ret_first, sizeof(*r->written), by_place);
    return 0;
}

static int copy_slices(struct image *img, struct run *r, size_t first, struct batch *b)
{
    for (size_t i = first; i < r->nr_written; i++) {
        struct slice *s = r->written[i];
        size_t from, to;

        r->sectors[i] = s->dirty_sectors;
        s->unstable = true;
        if (!s->dirty_sectors)
            continue;
        dirty_range(img, s, &from, &to);
        char *copy = batch_add(b, cache_disk_off(img, s->key) + from, to - from);
        if (!copy)
            return -ENOMEM;
        memcpy(copy, (char *)s->table + from, to - from);
        s->dirty_sectors = 0;
        img->stats.l2_writes++;
    }
    return 0;
}

/* One batch: everything it refers to first. */
SUSPENDS static int write_batch(struct image *img, struct run *r)
{
    struct batch slices, reftable;
    uint32_t *ref_list;
    size_t first, nr_ref;

    /* rule 1: both copies before the flush, with no wait between */
    int rc = batch_init(&slices, BATCH_BYTES);
    if (rc == 0)
        rc = take_slices(img, r, &first);
    if (rc == 0)
        rc = copy_slices(img, r, first, &slices);
    if (rc < 0) {
        batch_fini(&slices);
        return rc;
    }
    rc = copy_reftable(img, &reftable, &ref_list, &nr_ref);
    if (rc == 0 && flush_mutation == FLUSH_SKIP_BEFORE_REFTABLE)
        rc = write_reftable(img, &reftable);
    if (rc == 0 && flush_mutation != FLUSH_SKIP_BEFORE_L2)
        rc = device_flush(img);
    if (rc == 0 && flush_mutation != FLUSH_SKIP_BEFORE_REFTABLE)
        rc = write_reftable(img, &reftable);
    if (rc == 0)
        rc = batch_write(img, &slices);
    for (size_t i = 0; rc < 0 && i < nr_ref; i++)
        (void)vec_push(&img->reftable_dirty, ref_list[i]);
    free(ref_list);
    batch_fini(&reftable);
    batch_fini(&slices);
    return rc;
}

/* What the run is to bring to the disk is fixed here, without a wait. */
static int run_begin(struct image *img, struct run *r)
{
    *r = (struct run){0};
    list_init(&r->slices);
    int rc = batch_init(&r->l1, sectors_bound(img, img->l1_dirty.len));
    if (rc < 0)
        return rc;
    if (img->l1_dirty.len)
        sort_items(img->l1_dirty.data, img->l1_dirty.len, sizeof(uint32_t), by_index);
    rc = copy_sectors(img, img->l1, img->hdr.l1_entries, img->hdr.l1_off, img->l1_dirty.data,
                      img->l1_dirty.len, L1_MEMORY_BITS, &r->l1);
    if (rc < 0)
        return rc;
    r->l1_list = img->l1_dirty.data;
    r->nr_l1 = img->l1_dirty.len;
    img->l1_dirty.data = NULL;
    img->l1_dirty.len = img->l1_dirty.cap = 0;
    r->freed = img->freed.data;
    r->nr_freed = img->freed.len;
    img->freed.data = NULL;
    img->freed.len = img->freed.cap = 0;
    list_splice_back(&r->slices, &img->cache.dirty);
    r->journal_next = img->ack.is_on ? journal_next(img->ack.journal) : 0;
    if (flush_mutation == ACK_TRIM_EARLY)
        record_trim(img, r->journal_next);
    return 0;
}

SUSPENDS static int run_write(struct image *img, struct run *r)
{
    bool dirty = !list_empty(&r->slices) || r->nr_l1 || img->reftable_dirty.len;
    int rc = 0;

    if (!dirty)
        return img->unflushed ? device_flush(img) : 0;
    if (flush_mutation == FLUSH_L1_FIRST)
        rc = batch_write(img, &r->l1);
    if (rc < 0)
        return rc;
    do {
        rc = write_batch(img, r);
    } while (rc == 0 && !list_empty(&r->slices));
    if (rc == 0 && r->l1.pieces.len)
        rc = batch_write(img, &r->l1);
    return rc < 0 ? rc : device_flush(img);
}

/* The run's slices are on disk. */
static void run_done(struct image *img, struct run *r)
{
    for (size_t i = 0; i < r->nr_written; i++) {
        r->written[i]->unstable = false;
        cache_compact(img, r->written[i]);
    }
    for (size_t i = 0; i < r->nr_l1; i++)
        img->l1[r->l1_list[i]] &= ~L1_PENDING;
    record_trim(img, r->journal_next); /* before what it unmapped can be reused */
    for (size_t i = 0; i < r->nr_freed; i++)
        (void)vec_push(&img->ready, r->freed[i]); /* without memory it is leaked until a repair */
}

/* All of it is to be done by a later run. */
static void run_undo(struct image *img, struct run *r)
{
    for (size_t i = 0; i < r->nr_written; i++) {
        struct slice *s = r->written[i];

        s->unstable = false;
        s->dirty_sectors |= r->sectors[i];
        if (!list_empty(&s->dirty))
            continue;
        list_push_back(&img->cache.dirty, &s->dirty);
        img->cache.dirty_bytes += img->slice_bytes;
    }
    list_splice_back(&img->cache.dirty, &r->slices);
    for (size_t i = 0; i < r->nr_l1; i++)
        (void)vec_push(&img->l1_dirty, r->l1_list[i]);
    for (size_t i = 0; i < r->nr_freed; i++)
        (void)vec_push(&img->freed, r->freed[i]);
}

static bool is_lack_of_space(int rc)
{
    return rc == -ENOSPC || rc == -EFBIG || rc == -EDQUOT || rc == -ENOMEM;
}

SUSPENDS static int flush_run(struct image *img)
{
    struct run r;
    int rc = run_begin(img, &r);

    if (rc == 0)
        rc = run_write(img, &r);
    if (rc == 0) {
        run_done(img, &r);
    } else {
        run_undo(img, &r);
        if (!is_lack_of_space(rc))
            rc = image_fail(img, rc);
    }
    batch_fini(&r.l1);
    free(r.written);
    free(r.sectors);
    free(r.l1_list);
    free(r.freed);
    return rc;
}

/* Runs until one that began after this call has ended: rule 2. */
int flush_to_disk(struct image *img)
{
    uint64_t want = img->flush_started + 1;

    while (img->flush_done < want) {
        if (img->failed)
            return -EIO;
        if (img->flush_running) {
            wait_queue_sleep(&img->flush_wait);
            continue;
        }
        img->flush_running = true;
        uint64_t run = ++img->flush_started;
        img->flush_rc = flush_run(img);
        img->flush_done = run;
        img->flush_running = false;
        wait_queue_wake_all(&img->flush_wait);
    }
    return img->flush_rc;
}

int image_flush(struct image *img)
{
    int rc = flush_to_disk(img);

    return rc < 0 ? rc : alloc_release(img);
}

int image_write_back(struct image *img)
{
    return image_flush(img);
}
