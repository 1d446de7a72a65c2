/*
 * Opening and closing an image, and its state: writable, corrupt, failed.
 *
 * A read-only image reads the header, the L1 table and, as needed, slices of L2 tables. A writable
 * one also has the refcount table and knows where its metadata lies (meta.c).
 *
 * Order at close: flush (data, refcounts, L2, L1), then unused clusters are given back and the
 * file's end is cut off, then flush. A cut between leaves leaks at most.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/be.h"
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/format.h"
#include "qcow2/internal.h"
#include "qcow2/refrebuild.h"
#include "qcow2/snapshots.h"

/* ---- state ---- */

const struct qcow2_header *image_header(const struct image *img)
{
    return &img->hdr;
}

struct blk *image_blk(const struct image *img)
{
    return img->blk;
}

void image_share_bound(struct image *img, struct bound *bound)
{
    cache_set_bound(img, bound);
}

void image_map_is_passing(struct image *img, bool passing)
{
    img->cache.passing = passing;
}

uint64_t image_map_estimate(const struct image *img)
{
    return cache_estimate(img);
}

uint64_t image_len(const struct image *img)
{
    return img->hdr.virtual_len;
}

bool image_is_writable(const struct image *img)
{
    return img->writable;
}

bool image_is_corrupt(const struct image *img)
{
    return img->corrupt;
}

bool image_is_unwritten(const struct image *img)
{
    return !list_empty(&img->cache.dirty) || img->l1_dirty.len || img->reftable_dirty.len ||
           img->flush_running;
}

int image_check_writable(const struct image *img)
{
    if (img->failed)
        return -EIO;
    if (img->corrupt)
        return -EUCLEAN;
    return img->writable ? 0 : -EROFS;
}

int image_fail(struct image *img, int rc)
{
    if (!img->failed)
        img->failed = rc;
    if (img->ack.is_on)
        journal_void(img->ack.journal); /* nobody knows what the disk holds */
    return -EIO;
}

int image_poke_header(struct image *img, unsigned off, const void *buf, size_t len)
{
    img->unflushed = true;
    return blk_write(img->blk, off, buf, len);
}

int image_corrupt(struct image *img, const char *fmt, ...)
{
    va_list ap;

    if (img->corrupt)
        return -EUCLEAN;
    va_start(ap, fmt);
    vsnprintf(img->corrupt_why, sizeof(img->corrupt_why), fmt, ap);
    va_end(ap);
    img->corrupt = true;
    if (!img->writable || img->hdr.version < 3)
        return -EUCLEAN;
    /* Spec: "Corrupt bit": no one may write to the image before it was repaired. Best effort. */
    img->hdr.incompatible |= QCOW2_INCOMPAT_CORRUPT;
    be64 features = be64_make(img->hdr.incompatible);
    if (image_poke_header(img, offsetof(struct qcow2_disk_header, incompatible), &features,
                          sizeof(features)) == 0)
        (void)blk_flush(img->blk);
    return -EUCLEAN;
}

void image_get_stats(const struct image *img, struct image_stats *ret)
{
    *ret = img->stats;
    ret->cache_hits = img->cache.hits;
    ret->cache_misses = img->cache.misses;
    ret->cache_bytes = img->cache.member.bytes;
    ret->cache_bytes_max = img->cache.bytes_max;
}

/* ---- requests inside ---- */

void image_enter(struct image *img, struct image_req *req)
{
    req->seq = ++img->req_seq;
    list_push_back(&img->reqs, &req->link);
}

void image_leave(struct image *img, struct image_req *req)
{
    list_remove(&req->link);
}

void image_note_write(struct image *img)
{
    img->unflushed = true;
}

/* ---- opening ---- */

/* Covers the whole image if that fits into the default bound. */
static uint64_t default_cache_bytes(const struct qcow2_header *hdr)
{
    uint64_t clusters = div_up(hdr->virtual_len, hdr->cluster_size);
    uint64_t tables = clusters * hdr->l2_entry_size + (clusters << hdr->refcount_order) / 8;

    return MIN(32 * MIB, tables + tables / 4 + MIB);
}

static int check_supported(const struct image *img, struct err *err)
{
    if (img->hdr.crypt_method)
        return err_set(err, -ENOTSUP, "encrypted images are not supported");
    if (img->hdr.incompatible & QCOW2_INCOMPAT_DATA_FILE)
        return err_set(err, -ENOTSUP, "images with an external data file are not supported");
    return 0;
}

SUSPENDS static int load_table(struct image *img, uint64_t off, uint64_t entries, const char *what,
                               uint64_t **ret, struct err *err)
{
    _cleanup_(freep) uint64_t *table = calloc(MAX(entries, 1ull), 8);

    if (!table)
        return err_errno(err, -ENOMEM, "read %s", what);
    /* zeroes behind the end of the file would hide that the table is lost */
    if (!range_ok(off, entries * 8, img->blk->len))
        return err_set(err, -EUCLEAN, "%s does not lie in the file", what);
    int rc = blk_read(img->blk, off, table, entries * 8);
    if (rc < 0)
        return err_errno(err, rc, "read %s", what);
    for (uint64_t i = 0; i < entries; i++) {
        be64 v;

        memcpy(&v, &table[i], 8);
        table[i] = be64_get(v);
    }
    *ret = TAKE_PTR(table);
    return 0;
}

SUSPENDS static int load_l1(struct image *img, struct err *err)
{
    int rc = load_table(img, img->hdr.l1_off, img->hdr.l1_entries, "the L1 table", &img->l1, err);

    if (rc == -EUCLEAN && img->opts.no_open_checks) { /* for info; check looks by itself */
        img->hdr.l1_entries = MAX(img->hdr.l1_entries, (uint32_t)img->hdr.l1_needed);
        img->l1 = calloc(img->hdr.l1_entries + 1ull, 8);
        rc = img->l1 ? 0 : -ENOMEM;
        for (uint32_t i = 0; i < img->hdr.l1_entries && rc == 0; i++)
            img->l1[i] = L1_BAD;
    }
    if (rc == 0 && img->view)
        recover_view_l1(img->view, img->l1, img->hdr.l1_entries);
    if (rc == 0)
        meta_check_l1(img);
    return rc;
}

/* Autoclear bits say that something not known here (or not kept up, as bitmaps) is in step with
 * the data; that ends with the first writable open, but for our own: the journal. */
SUSPENDS static int start_ack(struct image *img, const struct recovery *found, struct err *err)
{
    uint64_t others = img->hdr.autoclear & ~QCOW2_AUTOCLEAR_JOURNAL;
    int rc = img->opts.ack ? ack_start(&img->ack, img->opts.journal_dir, img->blk, &img->hdr,
                                       found->runs, found->nr_runs, err)
                           : ack_stop(&img->ack, img->blk, &img->hdr, err);

    if (rc == 0 && others && (rc = blk_flush(img->blk)) < 0)
        err_errno(err, rc, "clear autoclear features");
    img->old_seq = 0;
    return rc;
}

/* Counted and unused: what the journal of a killed process had left. */
static int adopt_runs(struct image *img, struct recovery *found)
{
    img->pool.len = 0;
    for (size_t i = 0; i < found->nr_runs; i++) {
        struct journal_run *run = &found->runs[i];

        if (!meta_none_in(img, run->first, run->nr))
            continue; /* whoever counts on it, it is not unused */
        int rc = vec_push(&img->pool, {run->first, run->nr, false, 0});
        if (rc < 0)
            return rc;
        img->allocated = true;
        found->runs[img->pool.len - 1] = *run;
    }
    found->nr_runs = img->pool.len;
    return 0;
}

/* What only writing needs. Slices loaded before were not checked against meta: forgotten. */
SUSPENDS static int load_writable(struct image *img, struct recovery *found, struct err *err)
{
    if (img->hdr.incompatible & QCOW2_INCOMPAT_CORRUPT)
        return err_set(err, -EUCLEAN, "the image is marked corrupt: repair it first");
    if (!img->blk->writable)
        return err_set(err, -EROFS, "the file is open read-only");
    int rc = check_supported(img, err);
    if (rc == 0)
        rc = qcow2_snapshots_check(img->blk, &img->hdr, err);
    if (rc == 0)
        rc = ack_recover(&img->ack, img->opts.journal_dir, img->blk, &img->hdr, found, err);
    if (rc == 0 && img->hdr.incompatible & QCOW2_INCOMPAT_DIRTY)
        rc = qcow2_rebuild_refcounts(img->blk, &img->hdr, err);
    if (rc < 0)
        return rc;
    if (img->hdr.reftable_off == 0 || (img->hdr.l1_off == 0 && img->hdr.l1_entries))
        return err_set(err, -EUCLEAN, "a table lies on the header: repair the image first");
    recover_view_free(TAKE_PTR(img->view)); /* it is in the file now */
    cache_drop_all(img);
    meta_clear(img); /* of an earlier time as writable: its tables would seem to overlap */
    free(TAKE_PTR(img->l1));
    free(TAKE_PTR(img->reftable));
    img->reftable_entries = ((uint64_t)img->hdr.reftable_clusters << img->hdr.cluster_bits) / 8;
    rc = load_l1(img, err);
    if (rc == 0)
        rc = load_table(img, img->hdr.reftable_off, img->reftable_entries, "the refcount table",
                        &img->reftable, err);
    if (rc == 0)
        rc = alloc_open(img, err);
    if (rc == 0)
        rc = meta_load(img, err);
    if (rc == 0)
        rc = adopt_runs(img, found);
    if (rc == 0)
        rc = start_ack(img, found, err);
    for (size_t i = 0; rc == 0 && img->ack.is_on && i < MIN(found->nr_runs, (size_t)JOURNAL_RUNS);
         i++)
        img->pool.data[i].place = (unsigned)i + 1;
    return rc;
}

SUSPENDS static int make_writable(struct image *img, struct err *err)
{
    struct recovery found = {0};
    int rc = load_writable(img, &found, err);

    recovery_fini(&found);
    if (rc < 0)
        ack_fini(&img->ack);
    else
        meta_back_tables(img);
    img->writable = rc == 0;
    return rc;
}

static void init_geometry(struct image *img)
{
    const struct qcow2_header *hdr = &img->hdr;

    img->slice_bytes = MIN((size_t)hdr->cluster_size, (size_t)SLICE_BYTES_MAX);
    img->slice_bits = (unsigned)__builtin_ctzll(img->slice_bytes / hdr->l2_entry_size);
    img->ref_slice_bits = (unsigned)__builtin_ctzll(img->slice_bytes * 8) - hdr->refcount_order;
}

static struct image *image_new(struct blk *blk, const struct image_opts *opts)
{
    struct image *img = calloc(1, sizeof(*img));

    if (!img)
        return NULL;
    img->blk = blk;
    img->opts = *opts;
    img->packed.cluster = UINT64_MAX;
    img->unflushed = true; /* what was written before we came is not known */
    list_init(&img->claims);
    list_init(&img->reqs);
    co_mutex_init(&img->l1_lock, RANK_L1);
    co_mutex_init(&img->alloc_lock, RANK_ALLOC);
    cache_init(img);
    grow_init(img);
    wait_queue_init(&img->flush_wait);
    wait_queue_init(&img->journal_room);
    return img;
}

/* Everything but the blk. */
static void image_free(struct image *img)
{
    if (!img)
        return;
    cache_fini(img);
    recover_view_free(img->view);
    ack_fini(&img->ack);
    meta_clear(img);
    qcow2_header_fini(&img->hdr);
    buf_put(img->packed.data, img->hdr.cluster_size);
    free(img->l1);
    free(img->reftable);
    vec_free(&img->pool);
    vec_free(&img->freed);
    vec_free(&img->ready);
    vec_free(&img->l1_dirty);
    vec_free(&img->reftable_dirty);
    free(img);
}

static void image_freep(struct image **img)
{
    image_free(*img);
}

int image_open(struct blk *blk, const struct image_opts *opts, struct image **ret, struct err *err)
{
    _cleanup_(image_freep) struct image *img = image_new(blk, opts);

    if (!img)
        return err_errno(err, -ENOMEM, "open image");
    int rc = qcow2_header_read(blk, &img->hdr, err);
    if (rc < 0)
        return rc;
    if (!opts->no_open_checks || opts->writable)
        rc = check_supported(img, err);
    if (rc < 0)
        return rc;
    init_geometry(img);
    img->corrupt = img->hdr.incompatible & QCOW2_INCOMPAT_CORRUPT;
    img->cache.own.limit = MAX(
        opts->cache_bytes ? opts->cache_bytes : default_cache_bytes(&img->hdr), CACHE_BYTES_MIN);
    if (!opts->writable && !opts->no_open_checks)
        rc = ack_view(&img->ack, opts->journal_dir, blk, &img->hdr, &img->view, err);
    if (rc < 0)
        return rc;
    rc = opts->writable ? make_writable(img, err) : load_l1(img, err);
    if (rc < 0)
        return rc;
    *ret = TAKE_PTR(img);
    return 0;
}

/* ---- the end ---- */

/* Counts are only what they seem if nothing is waiting to be repaired. */
static int check_counts(const struct image *img, struct err *err)
{
    if (img->corrupt || img->failed || img->hdr.incompatible & QCOW2_INCOMPAT_DIRTY)
        return err_set(err, -EUCLEAN, "the image's refcounts are not to be trusted");
    if (!img->writable && image_has_journal(img))
        return err_set(err, -EBUSY, "the image is in use, or was not closed");
    return 0;
}

int image_end(struct image *img, uint64_t *ret, struct err *err)
{
    bool is_loaded = img->reftable;
    int rc = check_counts(img, err);

    if (rc < 0)
        return rc;
    if (!is_loaded) { /* never writable */
        uint64_t entries = ((uint64_t)img->hdr.reftable_clusters << img->hdr.cluster_bits) / 8;

        rc = load_table(img, img->hdr.reftable_off, entries, "the refcount table", &img->reftable,
                        err);
        if (rc < 0)
            return rc;
        img->reftable_entries = entries;
    }
    if (img->writable)
        rc = image_flush(img);
    if (rc == 0)
        rc = alloc_end(img, ret);
    if (!is_loaded) {
        free(TAKE_PTR(img->reftable));
        img->reftable_entries = 0;
    }
    return rc < 0 ? err_errno(err, rc, "read refcounts") : 0;
}

/* ---- closing ---- */

/* Leaves the writable state: everything on disk, nothing reserved. */
SUSPENDS static int finish_writing(struct image *img, struct err *err)
{
    DEBUG_CHECK(list_empty(&img->claims) && list_empty(&img->reqs));
    grow_stop(img);
    if (img->failed)
        return err_errno(err, -EIO, "the image failed before");
    int rc = image_flush(img);
    /* a corrupt image gets what was written before; its refcounts are not to be trusted */
    if (rc == 0 && !img->corrupt)
        rc = alloc_finish(img);
    if (rc == 0)
        rc = ack_stop(&img->ack, img->blk, &img->hdr, err);
    if (rc == 0)
        rc = image_flush(img);
    return rc < 0 ? err_errno(err, rc, "flush image") : 0;
}

int image_close(struct image *img, struct err *err)
{
    if (!img)
        return 0;
    int rc = img->writable ? finish_writing(img, err) : 0;

    blk_close(img->blk);
    image_free(img);
    return rc;
}

SUSPENDS static int reopen_file(struct image *img, bool writable, struct err *err)
{
    if (blk_file_fd(img->blk) < 0)
        return 0; /* a file changes its lock and descriptor, others need not */
    return blk_file_reopen(img->blk, writable, writable ? BLK_LOCK_WRITE : BLK_LOCK_READ, err);
}

int image_reopen(struct image *img, bool writable, struct err *err)
{
    if (writable == img->writable)
        return 0;
    int rc = writable ? 0 : finish_writing(img, err);
    if (rc == 0)
        rc = reopen_file(img, writable, err);
    if (rc < 0 && !writable && img->opts.ack && !img->ack.is_on)
        (void)start_ack(img, &(struct recovery){0}, NULL); /* it stays writable */
    if (rc < 0)
        return rc;
    if (writable) {
        /* who looks after the device may have taken back what was not used */
        rc = img->blk->extendable ? blk_extend(img->blk, 0, err) : 0;
        if (rc == 0)
            rc = make_writable(img, err);
        if (rc < 0)
            (void)reopen_file(img, false, NULL);
        return rc;
    }
    img->writable = false;
    return 0;
}

/* ---- answered writes ---- */

void image_want_ack(struct image *img, bool on)
{
    img->opts.ack = on && img->opts.journal_dir;
}

int image_start_ack(struct image *img, struct err *err)
{
    DEBUG_CHECK(list_empty(&img->reqs));
    img->ack.note[0] = 0; /* of the opening: told */
    image_want_ack(img, true);
    if (!img->writable || img->ack.is_on || !img->opts.ack)
        return 0;
    int rc = image_flush(img); /* what is not in the image has no record */
    if (rc < 0)
        return err_errno(err, rc, "flush image");
    rc = start_ack(img, &(struct recovery){0}, err);
    vec_for_each(r, &img->pool)
        record_run(img, r);
    return rc;
}

bool image_is_recorded(const struct image *img)
{
    return img->ack.is_on;
}

bool image_has_journal(const struct image *img)
{
    return img->hdr.version >= 3 && img->hdr.autoclear & QCOW2_AUTOCLEAR_JOURNAL;
}

uint64_t image_records(const struct image *img)
{
    return img->ack.is_on ? journal_next(img->ack.journal) - journal_oldest(img->ack.journal) : 0;
}

const char *image_ack_note(const struct image *img)
{
    return img->ack.note;
}
