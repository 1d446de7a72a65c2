/*
 * Host clusters: given out from a private pool, taken back through a quarantine.
 *
 *   free --refill: refcount 1 on disk--> pool --alloc_clusters--> in use
 *    ^                                    ^ `------alloc_give_back----'  |
 *    |                                    unused                     alloc_free
 *    |                                                                   v
 *    `--alloc_release: refcount down-- ready <--flush: unmapped on disk-- freed
 *
 *  1. The pool's clusters are counted on disk before they are used, a run (RUN_BYTES) at a time:
 *     the common write updates no refcount. A kill leaks what is left of the pool.
 *  2. A freed cluster is not reused, nor given back to the device, before its unmapping is durable
 *     (else a power cut brings the old mapping back with somebody else's data) and before every
 *     request that could have looked it up has left (else it reads or writes there).
 *  3. Nothing that is known as metadata is ever given out, whatever the refcounts say.
 */
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/format.h"
#include "qcow2/internal.h"
#include "qcow2/layout.h"

#define RUN_BYTES     (4 * MIB)
#define RUN_MIN       16u
#define POOL_RUNS     2u  /* with more than so many runs in small pieces, take a piece */
#define SCAN_SLICES   16u /* refcount slices looked through for free clusters, a refill */
#define PREALLOC_STEP (128 * MIB)

/* ---- the pool ---- */

static uint64_t run_clusters(const struct image *img)
{
    return MAX(RUN_BYTES >> img->hdr.cluster_bits, (uint64_t)RUN_MIN);
}

static bool near_full(const struct image *img, uint64_t run)
{
    return img->end + run > img->full_end && img->end < img->full_end + run;
}

static uint64_t pool_clusters(const struct image *img)
{
    uint64_t nr = 0;

    vec_for_each(r, &img->pool)
        nr += r->nr;
    return nr;
}

static void pool_add(struct image *img, uint64_t first, uint64_t nr, bool fresh)
{
    vec_for_each(r, &img->pool) {
        if (r->first + r->nr != first || r->fresh != fresh)
            continue;
        r->nr += nr;
        record_run(img, r);
        return;
    }
    if (vec_push(&img->pool, {first, nr, fresh}) == 0) /* without memory: leaked until a repair */
        record_run(img, &img->pool.data[img->pool.len - 1]);
}

/* A piece that holds `want` clusters, else (any) the largest. */
static struct host_run *pool_find(struct image *img, uint64_t want, bool any)
{
    struct host_run *best = NULL;

    vec_for_each(r, &img->pool) {
        if (r->nr >= want)
            return r;
        if (any && (!best || r->nr > best->nr))
            best = r;
    }
    return best;
}

static void pool_take(struct image *img, struct host_run *r, uint64_t want, struct host_run *ret)
{
    uint64_t n = MIN(want, r->nr);

    *ret = (struct host_run){r->first, n, r->fresh};
    r->first += n;
    r->nr -= n;
    record_run(img, r); /* before it is used */
    if (r->nr == 0)
        vec_remove_at(&img->pool, r - img->pool.data);
    img->stats.clusters_allocated += n;
    img->allocated = true;
}

/* What is used before more is asked for. Where the image comes near the size that it has when all
 * of it is allocated, every piece is, so that it ends at that size and not a run behind it. */
static struct host_run *pool_pick(struct image *img, uint64_t want)
{
    uint64_t have = pool_clusters(img), run = run_clusters(img);

    return pool_find(img, want, have >= POOL_RUNS * run || near_full(img, run));
}

void alloc_give_back(struct image *img, uint64_t first, uint64_t nr)
{
    if (!nr)
        return;
    pool_add(img, first, nr, false);
    grow_look_again(img);
}

/* ---- refilling it ---- */

/* Refcounts that call a table free would have it overwritten. */
SUSPENDS static int check_no_meta(struct image *img, uint64_t first, uint64_t nr)
{
    for (uint64_t c = first; c < first + nr; c++)
        if (meta_get(img, c) != META_NONE)
            return image_corrupt(img, "cluster %llu holds metadata but counts as free",
                                 (unsigned long long)c);
    return 0;
}

SUSPENDS static int take_into_pool(struct image *img, uint64_t first, uint64_t nr, bool fresh)
{
    uint64_t done = 0;
    int rc = check_no_meta(img, first, nr);

    if (rc == 0)
        rc = refcount_take(img, first, nr, &done);
    if (done)
        pool_add(img, first, done, fresh);
    return done ? 0 : rc; /* some is better than none */
}

static bool scan_is_over(struct image *img)
{
    if (img->scan_pos < img->scan_stop)
        return false;
    if (!img->scan_again)
        return true;
    img->scan_pos = 0;
    img->scan_stop = img->scan_again;
    img->scan_again = 0;
    return false;
}

/* A free run found below the end. Its area may lack a block: then the run's first cluster gets it.
 */
SUSPENDS static int take_hole(struct image *img, struct host_run hole, uint64_t want)
{
    uint64_t index = hole.first >> img->hdr.refcount_block_bits;

    if (!(img->reftable[index] & QCOW2_REFTABLE_OFFSET_MASK)) {
        int rc = check_no_meta(img, hole.first, 1);

        if (rc == 0)
            rc = refcount_block_in(img, index, hole.first);
        if (rc < 0)
            return rc;
        img->scan_pos = ++hole.first;
        if (--hole.nr == 0)
            return 0;
    }
    hole.nr = MIN(hole.nr, want);
    int rc = take_into_pool(img, hole.first, hole.nr, false);
    if (rc == 0)
        img->scan_pos = hole.first + hole.nr;
    return rc;
}

bool alloc_knows_all(const struct image *img)
{
    return img->scan_pos >= img->scan_stop && !img->scan_again;
}

/* Looks for free clusters below the end, through a bounded number of slices a call: a large image
 * is not read as a whole before its first write. */
SUSPENDS static int refill_from_holes(struct image *img, uint64_t want, unsigned slices)
{
    uint64_t before = pool_clusters(img);

    for (unsigned i = 0; i < slices && !scan_is_over(img);) {
        uint64_t have = pool_clusters(img) - before;
        struct host_run hole;
        uint64_t next;

        if (have >= want)
            break;
        int rc =
            refcount_find_free(img, img->scan_pos, MIN(img->scan_stop, img->end), &hole, &next);
        if (rc < 0)
            return rc;
        if (hole.nr == 0) {
            i += have == 0; /* a slice without any; with some, stop at the first dry one */
            img->scan_pos = MAX(next, img->scan_pos + 1);
            if (have)
                break;
            continue;
        }
        rc = take_hole(img, hole, want - have);
        if (rc < 0)
            return rc;
    }
    return 0;
}

/* Reserves file space ahead in steps: on shared file systems each growth costs a cluster-wide lock.
 * Best effort: what the file system cannot give now, the write itself reports. */
SUSPENDS static void grow_file(struct image *img, uint64_t end)
{
    uint64_t step = img->opts.prealloc_step ? img->opts.prealloc_step : PREALLOC_STEP;
    uint64_t bytes = end << img->hdr.cluster_bits;
    uint64_t from = MAX(img->prealloc_end, img->blk->len);

    if (img->blk->fixed_len || img->no_prealloc || step == UINT64_MAX || bytes <= from)
        return;
    /* a small disk is not given more than it can ever need */
    uint64_t most = img->hdr.virtual_len + img->hdr.virtual_len / 256 + MIB;
    uint64_t to = MAX(bytes, MIN(align_up(bytes, img->hdr.cluster_size) + step, most));
    int rc = blk_preallocate(img->blk, from, to - from);
    if (rc == 0)
        img->prealloc_end = to;
    else if (rc != -ENOSPC && rc != -EFBIG && rc != -EDQUOT)
        img->no_prealloc = true;
}

/* Makes [end, end + nr) covered by refcount blocks; blocks made for that move the end. */
SUSPENDS static int cover_end(struct image *img, uint64_t nr)
{
    uint64_t step = 1ull << img->hdr.refcount_block_bits;
    int rc = 0;

    do {
        uint64_t last = img->end + nr - 1;

        rc = refcount_cover(img, img->end);
        for (uint64_t c = align_down(img->end, step) + step; rc == 0 && c <= last; c += step)
            rc = refcount_cover(img, c);
    } while (rc > 0);
    return rc;
}

/* Clusters that still fit behind the end. */
static uint64_t room_at_end(const struct image *img)
{
    uint64_t limit = img->blk->fixed_len ? img->blk->len : QCOW2_HOST_OFF_MAX;

    limit >>= img->hdr.cluster_bits;
    return limit > img->end ? limit - img->end : 0;
}

/* No further than to the size of the full image, nor far behind it. */
static uint64_t end_run(struct image *img, uint64_t want)
{
    img->full_end = qcow2_full_clusters(&img->hdr);
    if (!near_full(img, want))
        return want;
    return img->end < img->full_end ? img->full_end - img->end : MIN(want, (uint64_t)RUN_MIN);
}

SUSPENDS static int refill_at_end(struct image *img, uint64_t want)
{
    uint64_t room = room_at_end(img);

    if (room == 0)
        return grow_no_room(img, img->end + want);
    int rc = cover_end(img, MIN(want, room));
    room = room_at_end(img); /* blocks took their part */
    if (rc < 0 || room == 0)
        return rc < 0 ? rc : grow_no_room(img, img->end + want);
    uint64_t first = img->end, nr = MIN(end_run(img, want), room);
    bool fresh = first >= img->fresh_from;
    grow_file(img, first + nr);
    rc = take_into_pool(img, first, nr, fresh);
    if (rc < 0)
        return rc;
    img->end = first + nr;
    img->fresh_from = MAX(img->fresh_from, img->end);
    img->stats.runs_allocated++;
    grow_note_end(img, first);
    return 0;
}

SUSPENDS static void release_locked(struct image *img);

static bool is_no_room(int rc)
{
    return rc == -ENOSPC || rc == -ENOBUFS;
}

SUSPENDS static int refill_locked(struct image *img, uint64_t want)
{
    uint64_t before = pool_clusters(img), run = MAX(want, run_clusters(img));

    if (img->ready.len)
        release_locked(img);
    int rc = refill_from_holes(img, run, SCAN_SLICES);
    if (rc < 0 || pool_clusters(img) > before)
        return rc;
    int at_end = refill_at_end(img, run);
    if (!is_no_room(at_end))
        return at_end;
    if (!grow_may_help(img)) /* the device is full to its end: look everywhere */
        rc = refill_from_holes(img, want, UINT32_MAX);
    return rc < 0 ? rc : pool_clusters(img) > before ? 0 : at_end;
}

SUSPENDS static int refill(struct image *img, uint64_t want)
{
    int rc = 0;

    co_mutex_lock(&img->alloc_lock);
    /* somebody may have refilled it while this one waited */
    if (!pool_pick(img, want))
        rc = refill_locked(img, want);
    co_mutex_unlock(&img->alloc_lock);
    return rc;
}

int alloc_clusters(struct image *img, uint64_t want, struct host_run *ret)
{
    bool flushed = false;

    for (;;) {
        struct host_run *r = pool_pick(img, want);

        if (!r) {
            int rc = refill(img, want);

            r = pool_find(img, want, true);
            /* a full device: what was freed may be reused after a flush */
            if (!r && is_no_room(rc) && !flushed && img->freed.len) {
                flushed = true;
                if (image_flush(img) == 0)
                    continue;
            }
            if (!r && rc < 0)
                return rc;
            if (!r)
                continue; /* others took it */
        }
        pool_take(img, r, want, ret);
        return 0;
    }
}

int alloc_contiguous(struct image *img, uint64_t nr, struct host_run *ret)
{
    uint64_t first = 0, done = 0;

    co_mutex_lock(&img->alloc_lock);
    int rc = room_at_end(img) < nr ? grow_no_room(img, img->end + nr) : cover_end(img, nr);
    if (rc == 0 && room_at_end(img) < nr)
        rc = grow_no_room(img, img->end + nr);
    if (rc == 0) {
        first = img->end;
        *ret = (struct host_run){first, nr, first >= img->fresh_from};
        rc = refcount_take(img, first, nr, &done);
        img->end += done;
        img->fresh_from = MAX(img->fresh_from, img->end);
        img->allocated = true;
        grow_note_end(img, first);
    }
    co_mutex_unlock(&img->alloc_lock);
    if (rc < 0)
        alloc_give_back(img, first, done);
    return rc;
}

/* ---- taking back ---- */

void alloc_free(struct image *img, uint64_t first, uint64_t nr, bool discard)
{
    struct host_free f = {first, nr, img->req_seq, discard};
    struct host_free *last = img->freed.len ? &img->freed.data[img->freed.len - 1] : NULL;

    img->stats.clusters_freed += nr;
    if (flush_mutation == FLUSH_SKIP_QUARANTINE) {
        f.seq = 0;
        (void)vec_push(&img->ready, f);
        return;
    }
    if (last && last->first + last->nr == first && last->discard == discard) {
        last->nr += nr;
        last->seq = f.seq;
        return;
    }
    (void)vec_push(&img->freed, f); /* without memory it is leaked until a repair */
}

static int by_first(const void *a, const void *b)
{
    const struct host_free *x = a, *y = b;

    return x->first < y->first ? -1 : x->first > y->first;
}

/* Gives the space of clusters that nobody else counts back to the device. Advisory. */
SUSPENDS static void discard_free(struct image *img, const struct host_free *f)
{
    uint64_t run = 0, count;

    for (uint64_t c = f->first; c <= f->first + f->nr; c++) {
        if (c < f->first + f->nr && refcount_get(img, c, &count) == 0 && count == 1) {
            run++;
            continue;
        }
        if (run)
            (void)blk_discard(img->blk, (c - run) << img->hdr.cluster_bits,
                              run << img->hdr.cluster_bits);
        run = 0;
    }
}

/* Moves what no request can reach any more out of img->ready; the caller frees *ret. */
static size_t take_unreachable(struct image *img, struct host_free **ret)
{
    uint64_t oldest = UINT64_MAX;
    VEC(struct host_free) out = {0};
    size_t kept = 0;

    if (!list_empty(&img->reqs))
        oldest = list_entry(img->reqs.next, struct image_req, link)->seq;
    vec_for_each(f, &img->ready) {
        if (f->seq >= oldest || vec_push(&out, *f) < 0)
            img->ready.data[kept++] = *f;
    }
    img->ready.len = kept;
    if (out.len)
        sort_items(out.data, out.len, sizeof(*out.data), by_first);
    *ret = out.data;
    return out.len;
}

/* An error leaves leaks, or has made the image corrupt. */
SUSPENDS static void release_locked(struct image *img)
{
    struct host_free *list;
    size_t nr = take_unreachable(img, &list);

    for (size_t i = 0; i < nr; i++)
        if (list[i].discard)
            discard_free(img, &list[i]);
    (void)refcount_drop(img, list, nr);
    free(list);
    if (nr)
        grow_look_again(img);
}

int alloc_release(struct image *img)
{
    if (!img->ready.len || image_check_writable(img) < 0)
        return 0;
    co_mutex_lock(&img->alloc_lock);
    release_locked(img);
    co_mutex_unlock(&img->alloc_lock);
    return 0;
}

/* ---- open and close ---- */

SUSPENDS static int check_counted(struct image *img, uint64_t off, const char *what,
                                  struct err *err)
{
    uint64_t count;
    int rc = refcount_get(img, off >> img->hdr.cluster_bits, &count);

    if (rc < 0)
        return err_errno(err, rc, "read refcounts");
    if (count == 0)
        return err_set(err, -EUCLEAN, "%s is not counted as used: repair the image first", what);
    return 0;
}

/* In clusters; under alloc_lock, or before anybody could take it. */
SUSPENDS static int find_counted(struct image *img, uint64_t *ret)
{
    uint64_t last = img->reftable_entries;

    while (last > 0 && !(img->reftable[last - 1] & QCOW2_REFTABLE_OFFSET_MASK))
        last--;
    return refcount_find_last(img, last << img->hdr.refcount_block_bits, ret);
}

int alloc_end(struct image *img, uint64_t *ret)
{
    co_mutex_lock(&img->alloc_lock);
    int rc = find_counted(img, ret);
    co_mutex_unlock(&img->alloc_lock);
    *ret <<= img->hdr.cluster_bits;
    return rc;
}

SUSPENDS static int find_end(struct image *img, struct err *err)
{
    uint64_t counted;
    int rc = find_counted(img, &counted);

    if (rc < 0)
        return err_errno(err, rc, "read refcounts");
    img->end = counted;
    /* a file may hold, behind the last counted cluster, what an earlier process reserved or wrote
     */
    if (!img->blk->fixed_len)
        img->end = MAX(counted, div_up(img->blk->len, img->hdr.cluster_size));
    img->fresh_from = img->blk->fresh_zero ? img->end : UINT64_MAX;
    img->scan_pos = counted;
    img->scan_stop = MIN(img->end, img->reftable_entries << img->hdr.refcount_block_bits);
    img->scan_again = counted;
    return 0;
}

int alloc_open(struct image *img, struct err *err)
{
    const struct qcow2_header *hdr = &img->hdr;

    img->end = 0;
    img->allocated = img->no_prealloc = false;
    img->prealloc_end = 0;
    img->grow.nr_marks = 0;
    img->full_end = qcow2_full_clusters(hdr);
    int rc = check_counted(img, 0, "the header", err);
    if (rc == 0 && hdr->l1_entries)
        rc = check_counted(img, hdr->l1_off, "the L1 table", err);
    if (rc == 0)
        rc = check_counted(img, hdr->reftable_off, "the refcount table", err);
    return rc < 0 ? rc : find_end(img, err);
}

/* All unused clusters of the pool are free again. */
SUSPENDS static int empty_pool_locked(struct image *img)
{
    VEC(struct host_free) list = {0};
    int rc = 0;

    vec_for_each(r, &img->pool) {
        rc = vec_push(&list, {.first = r->first, .nr = r->nr});
        if (rc < 0)
            break;
        r->nr = 0;
        record_run(img, r); /* before it is free for others */
    }
    if (list.len)
        sort_items(list.data, list.len, sizeof(*list.data), by_first);
    if (rc == 0)
        rc = refcount_drop(img, list.data, list.len);
    img->pool.len = 0;
    vec_free(&list);
    return rc;
}

SUSPENDS static int trim_locked(struct image *img)
{
    uint64_t end;
    int rc = refcount_find_last(img, img->end, &end);

    if (rc < 0 || img->blk->fixed_len || end << img->hdr.cluster_bits >= img->blk->len)
        return rc;
    img->unflushed = true;
    rc = blk_resize(img->blk, end << img->hdr.cluster_bits);
    if (rc < 0)
        return rc == -ENOTSUP ? 0 : rc;
    img->end = end;
    img->fresh_from = img->blk->fresh_zero ? end : UINT64_MAX;
    return 0;
}

int alloc_finish(struct image *img)
{
    co_mutex_lock(&img->alloc_lock);
    release_locked(img);
    int rc = empty_pool_locked(img);
    if (rc == 0 && img->allocated)
        rc = trim_locked(img);
    co_mutex_unlock(&img->alloc_lock);
    return rc;
}
