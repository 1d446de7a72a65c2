/*
 * Writes.
 *
 * In place, where the host clusters are this image's alone: one lookup, one device write, no
 * claim, no lock. Everything else changes the map and goes through write_new().
 *
 * Order of an allocating write: claim, host clusters (their refcounts are on disk), data with what
 * it leaves open, then the entries in memory; flush.c brings them to the disk behind the data. An
 * error before the last step changes no mapping, and the clusters go back to the pool.
 *
 *  1. Between the claim and the update of the entries nobody else changes them: what was read
 *     from them before the waits still holds behind them.
 *  2. A subcluster that is already allocated in place is never filled from its old content: a
 *     write in place may be going on there.
 *  3. Writes that join (claim.c) become head or tail of the one they join, as long as what lies
 *     between has to be filled anyway: it stays one range on the device, of these clusters alone.
 */
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/internal.h"
#include "rt/reactor.h"

/* What one step of an allocating write covers. */
struct plan {
    uint64_t guest_off, len;
    uint64_t first, nr;  /* guest clusters */
    bool reuse;          /* they have host clusters of their own: only bits change */
    struct host_run run; /* where the data goes */
    uint64_t head, tail; /* to be filled before and behind the data */
};

static bool has_own_cluster(struct l2_entry e)
{
    return !l2_is_compressed(e) && l2_host_off(e) && e.word & ENTRY_COPIED;
}

/* Its old content cannot stay where it is: all of it moves to the new cluster. */
static bool moves_whole(const struct image *img, struct l2_entry e)
{
    return !img->hdr.extended_l2 || l2_is_compressed(e) || (l2_host_off(e) && !has_own_cluster(e));
}

static struct l2_entry entry_at(const struct image *img, const struct slice *s, uint64_t guest_off)
{
    return slice_entry(&img->hdr, s, slice_index(img, guest_off));
}

/* ---- planning ---- */

SUSPENDS static int check_entry(struct image *img, const struct slice *s, uint64_t guest_off)
{
    if (!s->suspect || map_entry_is_sane(img, entry_at(img, s, guest_off)))
        return 0;
    return image_corrupt(img, "the L2 entry of guest offset %llu points where no data may be",
                         (unsigned long long)guest_off);
}

/* As many clusters from the first on as go the same way: all new, or all in their own contiguous
 * host clusters. Does not wait unless it fails. */
SUSPENDS static int make_plan(struct image *img, const struct slice *s, uint64_t guest_off,
                              uint64_t len, struct plan *p)
{
    uint64_t cs = img->hdr.cluster_size, end = MIN(guest_off + len, slice_end(img, guest_off));
    uint64_t at = align_down(guest_off, cs);
    struct l2_entry e = entry_at(img, s, at);
    int rc = check_entry(img, s, at);

    *p = (struct plan){.guest_off = guest_off,
                       .first = guest_cluster(img, guest_off),
                       .reuse = has_own_cluster(e),
                       .run = {l2_host_off(e) >> img->hdr.cluster_bits, 0, false}};
    while (rc == 0) {
        p->nr++;
        at += cs;
        if (at >= end)
            break;
        e = entry_at(img, s, at);
        if (has_own_cluster(e) != p->reuse ||
            (p->reuse && l2_host_off(e) >> img->hdr.cluster_bits != p->run.first + p->nr))
            break;
        rc = check_entry(img, s, at);
    }
    p->len = MIN(end, at) - guest_off;
    return rc;
}

/* Bytes to fill between a unit's edge and the data, which lie in the cluster of entry e. */
static uint64_t open_bytes(const struct image *img, const struct plan *p, struct l2_entry e,
                           unsigned sub, uint64_t to_cluster_edge)
{
    if (p->reuse && l2_kind(&img->hdr, e, sub) == CLUSTER_NORMAL)
        return 0;
    if (moves_whole(img, e))
        return to_cluster_edge;
    return to_cluster_edge & ((1ull << img->hdr.subcluster_bits) - 1);
}

static uint64_t open_before(const struct image *img, const struct slice *s, const struct plan *p,
                            uint64_t start)
{
    return open_bytes(img, p, entry_at(img, s, start), sub_index(img, start),
                      in_cluster(img, start));
}

static uint64_t open_behind(const struct image *img, const struct slice *s, const struct plan *p,
                            uint64_t end)
{
    return open_bytes(img, p, entry_at(img, s, end - 1), sub_index(img, end - 1),
                      align_up(end, img->hdr.cluster_size) - end);
}

static void plan_edges(const struct image *img, const struct slice *s, struct plan *p)
{
    p->head = open_before(img, s, p, p->guest_off);
    p->tail = open_behind(img, s, p, p->guest_off + p->len);
}

/* ---- writes that join ---- */

static void take_joins_before(const struct image *img, const struct slice *s, struct plan *p,
                              struct claim *claim)
{
    for (struct list *it = claim->joins.prev; it != &claim->joins; it = it->prev) {
        struct join *j = list_entry(it, struct join, link);
        uint64_t start = p->guest_off - p->head, end = j->guest_off + j->len;

        if (j->guest_off > p->guest_off)
            continue;
        if (end + open_behind(img, s, p, end) < start)
            break;
        start = MIN(start, j->guest_off - open_before(img, s, p, j->guest_off));
        p->head = p->guest_off - start;
        j->taken = true;
    }
}

static void take_joins_behind(const struct image *img, const struct slice *s, struct plan *p,
                              struct claim *claim)
{
    uint64_t limit = (p->first + p->nr) << img->hdr.cluster_bits;

    list_for_each(it, &claim->joins) {
        struct join *j = list_entry(it, struct join, link);
        uint64_t end = p->guest_off + p->len + p->tail, j_end = j->guest_off + j->len;

        if (j->guest_off < p->guest_off)
            continue;
        if (j_end > limit || j->guest_off - open_before(img, s, p, j->guest_off) > end)
            break;
        end = MAX(end, j_end + open_behind(img, s, p, j_end));
        p->tail = end - p->guest_off - p->len;
        j->taken = true;
    }
}

/* What arrived together with this write and belongs to the same clusters comes in now. */
SUSPENDS static void gather_joins(struct image *img, const struct slice *s, struct plan *p,
                                  struct claim *claim)
{
    uint64_t end = p->guest_off + p->len;

    if (is_aligned(p->guest_off | end, img->hdr.cluster_size))
        return;
    claim_open(claim, p->guest_off, end);
    reactor_yield();
    take_joins_before(img, s, p, claim);
    take_joins_behind(img, s, p, claim);
}

static void joins_done(struct claim *claim)
{
    list_for_each(it, &claim->joins) {
        struct join *j = list_entry(it, struct join, link);

        j->done = j->taken;
    }
}

SUSPENDS static int plan_host(struct image *img, struct plan *p)
{
    if (p->reuse) {
        p->run.nr = p->nr;
        return 0;
    }
    int rc = alloc_clusters(img, p->nr, &p->run);
    if (rc < 0)
        return rc;
    p->nr = p->run.nr; /* a shorter run than wished: a shorter step */
    p->len = MIN(p->len, ((p->first + p->nr) << img->hdr.cluster_bits) - p->guest_off);
    return 0;
}

/* ---- the new entries ---- */

void write_free_old(struct image *img, uint64_t guest_off, struct l2_entry e, bool discard)
{
    uint64_t off = l2_host_off(e), len = 1;

    if (l2_is_compressed(e)) {
        l2_compressed_range(&img->hdr, e, &off, &len);
        read_forget_packed(img, guest_cluster(img, guest_off), 1);
        discard = false; /* shared with its neighbours */
    }
    uint64_t first = off >> img->hdr.cluster_bits;
    if (off)
        alloc_free(img, first, ((off + len - 1) >> img->hdr.cluster_bits) - first + 1, discard);
}

/* Subclusters of the cluster at guest_off that [start, end) covers. */
uint32_t write_sub_mask(const struct image *img, uint64_t guest_off, uint64_t start, uint64_t end)
{
    uint64_t cs = img->hdr.cluster_size;
    unsigned bits = img->hdr.subcluster_bits;
    uint64_t from = MAX(start, guest_off) - guest_off, to = MIN(end, guest_off + cs) - guest_off;

    return mask32((unsigned)(from >> bits), (unsigned)(div_up(to, 1ull << bits) - (from >> bits)));
}

static struct l2_entry new_entry(const struct image *img, const struct plan *p, uint64_t i,
                                 struct l2_entry old)
{
    uint64_t word = (p->run.first + i) << img->hdr.cluster_bits | ENTRY_COPIED;

    if (!img->hdr.extended_l2)
        return (struct l2_entry){word, 0};
    if (moves_whole(img, old))
        return l2_make_ext(word, UINT32_MAX, 0);
    uint32_t mask = write_sub_mask(img, (p->first + i) << img->hdr.cluster_bits,
                                   p->guest_off - p->head, p->guest_off + p->len + p->tail);
    return l2_make_ext(word, l2_alloc_bits(old) | mask, l2_zero_bits(old) & ~mask);
}

static void update_entries(struct image *img, struct slice *s, const struct plan *p,
                           struct room *room)
{
    struct journal_rec rec = {0};
    unsigned size = img->hdr.l2_entry_size;
    unsigned at = slice_index(img, p->guest_off);

    for (uint64_t i = 0; i < p->nr; i++) {
        struct l2_entry old = l2_get(&img->hdr, s->table, at + (unsigned)i);

        struct l2_entry new = new_entry(img, p, i, old);

        l2_put(&img->hdr, s->table, at + (unsigned)i, new);
        record_entry(img, room, &rec, (p->first + i) << img->hdr.cluster_bits, old, new);
        if (!p->reuse)
            write_free_old(img, (p->first + i) << img->hdr.cluster_bits, old, false);
    }
    record_put(img, room, &rec);
    cache_mark_dirty(img, s, at * size, (unsigned)p->nr * size);
}

/* ---- one step ---- */

/* Under the claim. */
SUSPENDS static int write_claimed(struct image *img, struct slice *s, struct plan *p,
                                  struct claim *claim, struct iov_iter *iov,
                                  const struct image_below *below, struct room *room)
{
    /* now, so that the update cannot fail; the pin keeps the table */
    int rc = cache_expand(img, s);

    if (rc == 0)
        rc = plan_host(img, p);
    if (rc < 0)
        return rc;
    plan_edges(img, s, p);
    gather_joins(img, s, p, claim);
    struct cow_write w = {
        .guest_off = p->guest_off,
        .len = p->len,
        .host_off = (p->run.first << img->hdr.cluster_bits) + in_cluster(img, p->guest_off),
        .head = p->head,
        .tail = p->tail,
        .fresh = p->run.fresh,
        .claim = claim,
    };
    struct iov_iter sub = iter_sub(iov, p->len);
    rc = cow_write(img, &w, &sub, below);
    if (rc == 0) {
        update_entries(img, s, p, room);
        joins_done(claim);
    } else if (!p->reuse) {
        alloc_give_back(img, p->run.first, p->run.nr);
    }
    return rc;
}

/* *ret_done 0: look again, somebody else was at these clusters. */
SUSPENDS static int write_new(struct image *img, struct slice *s, uint64_t guest_off, uint64_t len,
                              struct iov_iter *iov, const struct image_below *below,
                              struct room *room, uint64_t *ret_done)
{
    struct join join = {.guest_off = guest_off, .len = len, .iov = iov};
    struct claim claim;
    struct plan p;
    int rc = make_plan(img, s, guest_off, len, &p);

    *ret_done = 0;
    if (rc == 0 && claim_join(img, &join)) {
        *ret_done = join.done ? join.len : 0;
        img->stats.write_joins += join.done;
        return 0;
    }
    if (rc < 0 || !claim_take(img, &claim, p.first, p.first + p.nr - 1))
        return rc;
    rc = write_claimed(img, s, &p, &claim, iov, below, room);
    claim_drop(&claim);
    if (rc == 0)
        *ret_done = p.len;
    return rc;
}

int write_wait_room(struct image *img, unsigned flags, int rc)
{
    return rc == -ENOBUFS && !(flags & IMAGE_NO_WAIT) ? grow_wait(img, false) : rc;
}

static bool write_is_durable(const struct image *img, const struct slice *s, uint64_t guest_off)
{
    return slice_is_clean(s) && !(img->l1[l1_index(img, guest_off)] & L1_PENDING);
}

SUSPENDS static int write_in_place(struct image *img, const struct slice *s, uint64_t guest_off,
                                   uint64_t host_off, uint64_t len, struct iov_iter *iov,
                                   unsigned flags, bool *ret_durable)
{
    struct iov_iter sub = iter_sub(iov, len);

    if (!write_is_durable(img, s, guest_off))
        *ret_durable = false;
    int rc = blk_writev(img->blk, host_off, len, &sub, flags & BLK_FUA);
    if (!(flags & BLK_FUA))
        img->unflushed = true;
    return rc;
}

/* Behind a miss, or where there is something to allocate. *ret_done 0: look again. */
SUSPENDS static int write_slow(struct image *img, uint64_t guest_off, uint64_t len,
                               struct iov_iter *iov, unsigned flags,
                               const struct image_below *below, bool *ret_durable,
                               uint64_t *ret_done)
{
    struct slice *s;
    uint64_t host_off;
    struct room room = {0};
    int rc = write_throttle(img);

    if (rc == 0)
        rc = room_take(img, guest_off, len, &room);
    if (rc == 0)
        rc = map_own_table(img, guest_off, &room);
    if (rc == 0)
        rc = map_pin(img, guest_off, &s);
    if (rc < 0) {
        room_drop(img, &room);
        return write_wait_room(img, flags, rc);
    }
    *ret_done = map_in_place(img, s, guest_off, len, &host_off);
    if (*ret_done) {
        rc = write_in_place(img, s, guest_off, host_off, *ret_done, iov, flags, ret_durable);
    } else {
        *ret_durable = false;
        rc = write_new(img, s, guest_off, len, iov, below, &room, ret_done);
    }
    room_drop(img, &room);
    cache_put(img, s);
    return write_wait_room(img, flags, rc);
}

int write_range(struct image *img, uint64_t guest_off, uint64_t len, struct iov_iter *iov,
                unsigned flags, const struct image_below *below, bool *ret_durable)
{
    while (len > 0) {
        struct slice *s = cache_peek(img, slice_key(img, guest_off));
        uint64_t host_off, n = s ? map_in_place(img, s, guest_off, len, &host_off) : 0;
        int rc = image_check_writable(img);

        if (rc < 0)
            return rc;
        if (n)
            rc = write_in_place(img, s, guest_off, host_off, n, iov, flags, ret_durable);
        else
            rc = write_slow(img, guest_off, len, iov, flags, below, ret_durable, &n);
        if (rc < 0)
            return rc;
        iov_iter_advance(iov, n);
        guest_off += n;
        len -= n;
    }
    return 0;
}

/* From a quarter of the cache on, or half of the journal, one writer writes back while the others
 * go on; from half of the cache on all wait, so that there is always something to evict. */
int write_throttle(struct image *img)
{
    uint64_t dirty = img->cache.dirty_bytes, limit = img->cache.bound->limit;
    bool much = dirty > limit / 4 || image_records(img) > JOURNAL_RECORDS / 2;

    if (dirty > limit / 2 || (much && !img->flush_running))
        return image_flush(img);
    return 0;
}

int image_write(struct image *img, uint64_t guest_off, uint64_t len, struct iov_iter *iov,
                unsigned flags, const struct image_below *below)
{
    struct image_req req;
    bool durable = true;
    int rc = image_check_writable(img);

    if (rc < 0)
        return rc;
    if (!range_ok(guest_off, len, img->hdr.virtual_len))
        return -EINVAL;
    image_enter(img, &req);
    rc = write_range(img, guest_off, len, iov, flags, below, &durable);
    image_leave(img, &req);
    if (rc == 0 && flags & BLK_FUA && !durable)
        rc = image_flush(img);
    return rc;
}
