/*
 * Write-zeroes, discard, and unmapping behind a new end.
 *
 * Whole (sub)clusters become zero by their entries alone, under claims; the edges are written.
 * What reads as zero afterwards never shows the layers below again: with something below, a flag
 * says so, and where the format has none (version 2) zeroes are written, or the discard is ignored;
 * so is it there if clusters are to keep their place.
 *
 * A cluster that keeps its place (no unmap) may have a write in place going on: that write is
 * concurrent with this one, either order is right. Its space is given back under the claim: a write
 * that comes later waits for the claim, since the entry needs a change again.
 */
#include "base/bits.h"
#include "base/check.h"
#include "qcow2/internal.h"
#include "rt/reactor.h"

#define SLICES_A_TURN 16u

enum zero_mode {
    ZERO_KEEP,    /* reads as zero, the cluster keeps its place */
    ZERO_PUNCH,   /* the same, and the space at that place is given back to the device */
    ZERO_UNMAP,   /* reads as zero, the cluster is freed */
    ZERO_DISCARD, /* the same, and its space is given back to the device */
    ZERO_FORGET,  /* no entry at all: behind the image's end */
};

struct zero_op {
    uint64_t start, end; /* guest; whole units (subclusters) */
    enum zero_mode mode;
    bool covers;    /* something lies below: unallocated does not read as zero */
    bool advisory;  /* what cannot be done is left out */
    unsigned flags; /* the request's */
    const struct image_below *below;
};

static bool keeps_place(enum zero_mode mode)
{
    return mode == ZERO_KEEP || mode == ZERO_PUNCH;
}

static bool has_below(const struct image *img, const struct image_below *below)
{
    return below || img->hdr.backing_name;
}

/* ---- entries ---- */

static struct l2_entry zeroed(const struct image *img, uint64_t host_off)
{
    uint64_t word = host_off | (host_off ? ENTRY_COPIED : 0);

    if (img->hdr.extended_l2)
        return l2_make_ext(word, 0, UINT32_MAX);
    return (struct l2_entry){word | (img->hdr.version >= 3 ? L2_ZERO_FLAG : 0), 0};
}

static struct l2_entry zero_whole(const struct image *img, const struct zero_op *op,
                                  struct l2_entry old)
{
    bool own = !l2_is_compressed(old) && l2_host_off(old) && old.word & ENTRY_COPIED;

    if (op->mode == ZERO_FORGET)
        return (struct l2_entry){0, 0};
    if (!l2_host_off(old) && !l2_is_compressed(old) && !op->covers &&
        l2_kind(&img->hdr, old, 0) == CLUSTER_UNALLOCATED && !old.bits)
        return old; /* reads as zero already */
    /* version 2 has no flag: a kept cluster would still show its data */
    return zeroed(img,
                  own && keeps_place(op->mode) && img->hdr.version >= 3 ? l2_host_off(old) : 0);
}

/* Some subclusters of an extended entry that is not compressed. */
static struct l2_entry zero_part(const struct zero_op *op, struct l2_entry old, uint32_t mask)
{
    uint32_t alloc = l2_alloc_bits(old) & ~mask, zero = l2_zero_bits(old) | mask;
    bool frees = !alloc && !keeps_place(op->mode);

    return l2_make_ext(frees ? 0 : old.word, alloc, zero);
}

static struct l2_entry zero_entry(const struct image *img, const struct zero_op *op,
                                  uint64_t guest_off, struct l2_entry old)
{
    uint32_t all = mask32(0, img->hdr.subclusters);
    uint32_t mask = write_sub_mask(img, guest_off, op->start, op->end);

    return mask == all ? zero_whole(img, op, old) : zero_part(op, old, mask);
}

static bool same_entry(struct l2_entry a, struct l2_entry b)
{
    return a.word == b.word && a.bits == b.bits;
}

/* First cluster in [at, end) whose entry has to change; end if none. */
static uint64_t first_change(const struct image *img, const struct slice *s,
                             const struct zero_op *op, uint64_t at, uint64_t end)
{
    for (; at < end; at += img->hdr.cluster_size) {
        struct l2_entry e = slice_entry(&img->hdr, s, slice_index(img, at));

        if (!same_entry(e, zero_entry(img, op, at, e)))
            break;
    }
    return at;
}

static void change_entry(struct image *img, struct slice *s, const struct zero_op *op,
                         uint64_t guest_off, struct room *room, struct journal_rec *rec)
{
    unsigned i = slice_index(img, guest_off), size = img->hdr.l2_entry_size;
    struct l2_entry old = l2_get(&img->hdr, s->table, i), e = zero_entry(img, op, guest_off, old);

    if (same_entry(old, e))
        return;
    l2_put(&img->hdr, s->table, i, e);
    record_entry(img, room, rec, guest_off, old, e);
    cache_mark_dirty(img, s, i * size, size);
    if (l2_is_compressed(old) || l2_host_off(old) != l2_host_off(e))
        write_free_old(img, guest_off, old, op->mode == ZERO_DISCARD);
}

SUSPENDS static int check_entries(struct image *img, const struct slice *s, uint64_t at,
                                  uint64_t end)
{
    for (; s->suspect && at < end; at += img->hdr.cluster_size)
        if (!map_entry_is_sane(img, slice_entry(&img->hdr, s, slice_index(img, at))))
            return image_corrupt(img,
                                 "the L2 entry of guest offset %llu points where no data may be",
                                 (unsigned long long)at);
    return 0;
}

/* Gives back the space of what has become zero where it is, a run at a time. Advisory. Under the
 * claim. */
SUSPENDS static void punch_in_slice(struct image *img, const struct slice *s,
                                    const struct zero_op *op, uint64_t at, uint64_t end)
{
    uint64_t cs = img->hdr.cluster_size, run = 0, len = 0;

    for (; at < end; at += cs) {
        struct l2_entry e = slice_entry(&img->hdr, s, slice_index(img, at));
        uint64_t host = l2_host_off(e);
        bool zero = host && at >= op->start && at + cs <= op->end;

        if (len && (!zero || host != run + len)) {
            (void)blk_discard(img->blk, run, len);
            len = 0;
        }
        if (zero) {
            run = len ? run : host;
            len += cs;
        }
    }
    if (len)
        (void)blk_discard(img->blk, run, len);
}

/* Clusters [start, end) of one pinned slice. *ret_done false: look again. */
SUSPENDS static int zero_in_slice(struct image *img, struct slice *s, const struct zero_op *op,
                                  uint64_t start, uint64_t end, struct room *room, bool *ret_done)
{
    struct journal_rec rec = {0};
    struct claim claim;
    int rc = check_entries(img, s, start, end);

    *ret_done = false;
    if (rc < 0)
        return rc;
    start = first_change(img, s, op, start, end);
    if (start >= end) {
        *ret_done = true;
        return 0;
    }
    if (!claim_take(img, &claim, guest_cluster(img, start), guest_cluster(img, end - 1)))
        return 0;
    rc = cache_expand(img, s);
    for (uint64_t at = start; rc == 0 && at < end; at += img->hdr.cluster_size)
        change_entry(img, s, op, at, room, &rec);
    record_put(img, room, &rec);
    if (rc == 0 && op->mode == ZERO_PUNCH)
        punch_in_slice(img, s, op, start, end);
    claim_drop(&claim);
    *ret_done = true;
    return rc;
}

/* ---- ranges ---- */

/* No L2 table, and nothing but zeroes below: a discarded empty disk needs no tables. */
static bool is_empty(struct image *img, const struct zero_op *op, uint64_t at, uint64_t n)
{
    uint64_t entry = img->l1[l1_index(img, at)];

    if (entry & (L1_OFFSET_MASK | L1_BAD))
        return false;
    return !op->covers || op->mode == ZERO_FORGET || cow_is_zero(img, at, n, op->below);
}

/* The entries of all clusters that op touches; a part of a compressed cluster must not be in it. */
SUSPENDS static int zero_entries(struct image *img, const struct zero_op *op)
{
    uint64_t cs = img->hdr.cluster_size, end = align_up(op->end, cs);
    uint64_t at = align_down(op->start, cs);

    for (unsigned steps = 1; at < end; steps++) {
        struct slice *s;
        uint64_t n = MIN(end, slice_end(img, at)) - at;
        struct room room = {0};
        bool done = true;
        int rc = image_check_writable(img);

        if (rc == 0)
            rc = write_throttle(img);
        if (rc < 0)
            return rc;
        if (is_empty(img, op, at, n)) {
            at += n;
            continue;
        }
        rc = room_take(img, at, n, &room);
        if (rc == 0)
            rc = map_own_table(img, at, &room); /* made, or copied if a snapshot shares it */
        if (rc == 0)
            rc = map_pin(img, at, &s);
        if (rc == 0) {
            rc = zero_in_slice(img, s, op, at, at + n, &room, &done);
            cache_put(img, s);
        }
        room_drop(img, &room);
        if (rc == -ENOBUFS && op->advisory) /* it would take space, a table, and give none */
            rc = 0;
        else if (rc == -ENOBUFS && (rc = write_wait_room(img, op->flags, rc)) == 0)
            continue;
        if (rc < 0)
            return rc;
        at += done ? n : 0;
        if (steps % SLICES_A_TURN == 0)
            reactor_yield(); /* a disk's worth of entries is not changed in one go */
    }
    return 0;
}

/* As data, but not where zeroes are read already. */
SUSPENDS static int write_zeroes(struct image *img, uint64_t guest_off, uint64_t len,
                                 unsigned flags, const struct image_below *below)
{
    bool durable;

    while (len > 0) {
        uint64_t n = MIN(len, (uint64_t)BUF_ZERO_LEN);
        IOV_ITER_BUF(it, vec, buf_zeroes(), n);
        int rc = 0;

        if (!cow_is_zero(img, guest_off, n, below))
            rc = write_range(img, guest_off, n, &it, flags & IMAGE_NO_WAIT, below, &durable);
        if (rc < 0)
            return rc;
        guest_off += n;
        len -= n;
    }
    return 0;
}

/* The part of an extended cluster at [off, off + len): by bits, or as data where it is compressed.
 */
SUSPENDS static int zero_subclusters(struct image *img, const struct zero_op *op,
                                     const struct image_below *below)
{
    uint64_t len = MIN(op->end, img->hdr.virtual_len) - op->start;
    struct extent ext;
    int rc = image_map(img, op->start, len, &ext);

    if (rc == -EUCLEAN)
        return image_corrupt(img, "the L2 entry of guest offset %llu is invalid",
                             (unsigned long long)op->start);
    if (rc < 0)
        return rc;
    /* a claim is not needed to look: no cluster ever becomes compressed here */
    if (ext.kind == EXTENT_COMPRESSED)
        return write_zeroes(img, op->start, len, op->flags, below);
    return zero_entries(img, op);
}

/* Whole units. Partial clusters at both ends exist with extended L2 only. */
SUSPENDS static int zero_units(struct image *img, struct zero_op op,
                               const struct image_below *below)
{
    uint64_t cs = img->hdr.cluster_size, end = op.end;
    uint64_t body = MIN(align_up(op.start, cs), end), body_end = MAX(align_down(end, cs), body);
    int rc = 0;

    op.end = body;
    if (op.start < op.end)
        rc = zero_subclusters(img, &op, below);
    op.start = body;
    op.end = body_end;
    if (rc == 0 && op.start < op.end)
        rc = zero_entries(img, &op);
    op.start = body_end;
    op.end = end;
    if (rc == 0 && op.start < op.end)
        rc = zero_subclusters(img, &op, below);
    return rc;
}

/* What a request does that may give space back; for_zeroes: it must read as zero afterwards, also
 * when a power cut forgets the new entries while the device has done the rest. */
static enum zero_mode unmap_mode(const struct image *img, bool for_zeroes)
{
    if (img->opts.discard != IMAGE_DISCARD_KEEP)
        return ZERO_DISCARD;
    return for_zeroes && !img->blk->fresh_zero ? ZERO_KEEP : ZERO_PUNCH;
}

SUSPENDS static int zero_range(struct image *img, uint64_t guest_off, uint64_t len, unsigned flags,
                               const struct image_below *below)
{
    uint64_t unit = 1ull << img->hdr.subcluster_bits, end = guest_off + len;
    struct zero_op op = {
        .start = align_up(guest_off, unit),
        .end = align_down(end, unit),
        .mode = flags & BLK_MAY_UNMAP ? unmap_mode(img, true) : ZERO_KEEP,
        .covers = has_below(img, below),
        .flags = flags,
        .below = below,
    };

    if (end == img->hdr.virtual_len)
        op.end = align_up(end, img->hdr.cluster_size); /* nothing but zeroes behind the end */
    if (img->hdr.version < 3 && (op.covers || keeps_place(op.mode)))
        return write_zeroes(img, guest_off, len, flags, below);
    if (op.start >= MIN(op.end, end))
        return write_zeroes(img, guest_off, len, flags, below);
    int rc = write_zeroes(img, guest_off, op.start - guest_off, flags, below);
    if (rc == 0)
        rc = zero_units(img, op, below);
    if (rc == 0 && end > op.end)
        rc = write_zeroes(img, op.end, end - op.end, flags, below);
    return rc;
}

int image_zero(struct image *img, uint64_t guest_off, uint64_t len, unsigned flags,
               const struct image_below *below)
{
    struct image_req req;
    int rc = image_check_writable(img);

    if (rc < 0)
        return rc;
    if (!range_ok(guest_off, len, img->hdr.virtual_len))
        return -EINVAL;
    image_enter(img, &req);
    rc = zero_range(img, guest_off, len, flags, below);
    image_leave(img, &req);
    if (rc == 0 && flags & BLK_FUA)
        rc = image_flush(img);
    return rc;
}

int image_discard(struct image *img, uint64_t guest_off, uint64_t len,
                  const struct image_below *below)
{
    uint64_t cs = img->hdr.cluster_size, end = guest_off + len;
    struct zero_op op = {
        .start = align_up(guest_off, cs),
        .end = end == img->hdr.virtual_len ? align_up(end, cs) : align_down(end, cs),
        .mode = unmap_mode(img, false),
        .covers = has_below(img, below),
        .advisory = true,
        .below = below,
    };
    struct image_req req;
    int rc = image_check_writable(img);

    if (rc < 0)
        return rc;
    if (!range_ok(guest_off, len, img->hdr.virtual_len))
        return -EINVAL;
    if (op.start >= MIN(op.end, end) ||
        (img->hdr.version < 3 && (op.covers || keeps_place(op.mode))))
        return 0;
    image_enter(img, &req);
    rc = zero_entries(img, &op);
    image_leave(img, &req);
    return rc;
}

int zero_unmap(struct image *img, uint64_t guest_off, uint64_t len)
{
    struct zero_op op = {.start = guest_off, .end = guest_off + len, .mode = ZERO_FORGET};

    return len ? zero_entries(img, &op) : 0;
}
