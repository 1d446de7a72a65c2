/*
 * The common path of all devices: bounds, alignment, growth, sticky flush failure, statistics.
 *
 * A request that fits the device (offset, length and memory aligned, inside the device) goes
 * straight to its ops. All others are cut into windows and pass through a bounce buffer; a write
 * that covers a device block in part reads that block first (read-modify-write, RMW).
 *
 * Writes under way are on blk->changes, oldest first, where they could disturb each other:
 *  1. On a device with align > 1, an RMW and any other write of the same block never overlap in
 *     time: the RMW would put stale bytes over what the other wrote.
 *  2. A change that sets the length absolutely (resize, the cut after an unaligned tail) and one
 *     that grows the file never overlap in time: the first would cut off what the second wrote.
 * A change waits only for older ones, so there is no cycle. On devices that take any alignment a
 * write inside the device is not even listed.
 */
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "blk/blk.h"

/* Longest piece that passes through a bounce buffer at once. */
#define BOUNCE_MAX ((uint64_t)1 << 20)

struct change {
    struct list link;
    uint64_t off, end; /* rounded out to device blocks */
    bool rmw;          /* reads before it writes */
    bool grows;        /* ends behind the device's length */
    bool sets_len;     /* changes the length to a value it knows; implies grows */
};

int blk_init(struct blk *blk, const struct blk_ops *ops, const char *name)
{
    *blk = (struct blk){.ops = ops, .align = 1, .mem_align = 1, .io_unit = 512};
    list_init(&blk->changes);
    wait_queue_init(&blk->changes_wait);
    blk->name = strdup(name);
    return blk->name ? 0 : -ENOMEM;
}

void blk_close(struct blk *blk)
{
    if (!blk)
        return;
    DEBUG_CHECK(list_empty(&blk->changes));
    char *name = blk->name;
    blk->ops->close(blk);
    free(name);
}

/* ---- changes under way ---- */

static bool changes_conflict(const struct change *a, const struct change *b)
{
    if ((a->sets_len && b->grows) || (a->grows && b->sets_len))
        return true;
    return (a->rmw || b->rmw) && a->off < b->end && b->off < a->end;
}

static bool change_must_wait(struct blk *blk, const struct change *ch)
{
    list_for_each(it, &blk->changes) {
        if (it == &ch->link)
            return false;
        if (changes_conflict(list_entry(it, struct change, link), ch))
            return true;
    }
    return false;
}

/* Lists the change and waits until no older one conflicts with it. */
SUSPENDS static void change_begin(struct blk *blk, struct change *ch)
{
    list_push_back(&blk->changes, &ch->link);
    blk->nr_rmw += ch->rmw;
    if (!blk->nr_rmw && !ch->grows)
        return;
    while (change_must_wait(blk, ch))
        wait_queue_sleep(&blk->changes_wait);
}

static void change_end(struct blk *blk, struct change *ch)
{
    list_remove(&ch->link);
    blk->nr_rmw -= ch->rmw;
    wait_queue_wake_all(&blk->changes_wait);
}

/* The change that a write or zero of this range is. */
static struct change change_of_write(const struct blk *blk, uint64_t off, uint64_t len)
{
    uint64_t end = off + len, out = align_up(end, blk->align);

    return (struct change){
        .off = align_down(off, blk->align),
        .end = out,
        .rmw = !is_aligned(off | end, blk->align),
        .grows = out > blk->len,
        .sets_len = end != out && out > blk->len,
    };
}

/* ---- requests that fit the device ---- */

/* Every piece of the next len bytes of memory may be given to the device. */
static bool memory_fits(const struct blk *blk, const struct iov_iter *iov, uint64_t len)
{
    const struct iovec *v = iov->iov;
    uint64_t bad = 0;

    for (size_t skip = iov->skip; len > 0; v++, skip = 0) {
        uint64_t n = MIN((uint64_t)(v->iov_len - skip), len);

        bad |= ((uintptr_t)v->iov_base + skip) & (blk->mem_align - 1);
        bad |= n & (blk->align - 1);
        len -= n;
    }
    return bad == 0;
}

static inline bool request_fits(const struct blk *blk, uint64_t off, uint64_t len,
                                const struct iov_iter *iov)
{
    if ((blk->align | blk->mem_align) == 1)
        return true;
    return is_aligned(off | len, blk->align) && memory_fits(blk, iov, len);
}

SUSPENDS static int dev_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    blk->stats.reads++;
    blk->stats.read_bytes += len;
    return blk->ops->readv(blk, off, len, iov);
}

/* A failed durable write may have been told of the loss of earlier writes, which is told only
 * once. Lack of space is the exception: nothing was lost. */
static bool loses_writes(int rc)
{
    return rc < 0 && rc != -ENOSPC && rc != -EDQUOT && rc != -EFBIG;
}

SUSPENDS static int dev_writev(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                               unsigned flags)
{
    blk->stats.writes++;
    blk->stats.write_bytes += len;
    int rc = blk->ops->writev(blk, off, len, iov, flags & BLK_FUA);
    if ((flags & BLK_FUA) && __builtin_expect(loses_writes(rc), 0))
        blk->flush_failed = true;
    return rc;
}

SUSPENDS static int dev_flush(struct blk *blk)
{
    blk->stats.flushes++;
    int rc = blk->ops->flush ? blk->ops->flush(blk) : 0;
    if (rc < 0)
        blk->flush_failed = true;
    /* A flush beside this one may have been given the error that concerns our writes too. */
    else if (blk->flush_failed)
        rc = -EIO;
    return rc;
}

/* ---- bounce buffers ---- */

/* What of [off, off + len) the next bounce buffer holds. */
struct window {
    uint64_t start, end; /* device blocks */
    uint64_t len;        /* the caller's bytes in it, from off on */
};

static struct window window_at(const struct blk *blk, uint64_t off, uint64_t len)
{
    struct window w = {.start = align_down(off, blk->align)};

    w.end = MIN(align_up(off + len, blk->align), w.start + BOUNCE_MAX);
    w.len = MIN(len, w.end - off);
    return w;
}

/* Bytes at off that can go to the device without a bounce buffer; 0 if none. */
static uint64_t direct_len(const struct blk *blk, uint64_t off, uint64_t len,
                           const struct iov_iter *iov)
{
    uint64_t body = align_down(len, blk->align);

    return is_aligned(off, blk->align) && body > 0 && memory_fits(blk, iov, body) ? body : 0;
}

SUSPENDS static int read_window(struct blk *blk, uint64_t off, const struct window *w,
                                struct iov_iter *iov)
{
    size_t size = w->end - w->start;
    _cleanup_(buf_drop) struct buf b = {buf_get(size), size};

    if (!b.data)
        return -ENOMEM;
    blk->stats.bounced++;
    IOV_ITER_BUF(it, vec, b.data, size);
    int rc = dev_readv(blk, w->start, size, &it);
    if (rc == 0)
        iov_iter_write(iov, (char *)b.data + (off - w->start), w->len);
    return rc;
}

/* off + len lies inside the device. */
SUSPENDS static int read_bounced(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    while (len > 0) {
        uint64_t n = direct_len(blk, off, len, iov);
        int rc;

        if (n > 0) {
            rc = dev_readv(blk, off, n, iov);
        } else {
            struct window w = window_at(blk, off, len);
            n = w.len;
            rc = read_window(blk, off, &w, iov);
        }
        if (rc < 0)
            return rc;
        off += n;
        len -= n;
    }
    return 0;
}

/* One device block into the bounce buffer, zeroes behind the end of the device. */
SUSPENDS static int read_block(struct blk *blk, uint64_t off, void *buf)
{
    if (off >= blk->len) {
        memset(buf, 0, blk->align);
        return 0;
    }
    IOV_ITER_BUF(it, vec, buf, blk->align);
    return dev_readv(blk, off, blk->align, &it);
}

SUSPENDS static int write_window(struct blk *blk, uint64_t off, const struct window *w,
                                 struct iov_iter *iov, unsigned flags)
{
    size_t size = w->end - w->start;
    uint64_t last = w->end - blk->align;
    bool head = off > w->start, tail = off + w->len < w->end;
    _cleanup_(buf_drop) struct buf b = {buf_get(size), size};
    char *data = b.data;
    int rc = 0;

    if (!data)
        return -ENOMEM;
    blk->stats.bounced++;
    if (head)
        rc = read_block(blk, w->start, data);
    if (rc == 0 && tail && !(head && last == w->start))
        rc = read_block(blk, last, data + (last - w->start));
    if (rc < 0)
        return rc;
    iov_iter_read(iov, data + (off - w->start), w->len);
    IOV_ITER_BUF(it, vec, data, size);
    return dev_writev(blk, w->start, size, &it, flags);
}

SUSPENDS static int write_bounced(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                                  unsigned flags)
{
    while (len > 0) {
        uint64_t n = direct_len(blk, off, len, iov);
        int rc;

        if (n > 0) {
            rc = dev_writev(blk, off, n, iov, flags);
        } else {
            struct window w = window_at(blk, off, len);
            n = w.len;
            rc = write_window(blk, off, &w, iov, flags);
        }
        if (rc < 0)
            return rc;
        off += n;
        len -= n;
    }
    return 0;
}

/* ---- reads ---- */

int blk_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    DEBUG_CHECK(len <= iov->left);
    if (len == 0)
        return 0;
    if (__builtin_expect(range_ok(off, len, blk->len) && request_fits(blk, off, len, iov), 1))
        return dev_readv(blk, off, len, iov);

    if (!range_ok(off, len, INT64_MAX))
        return -EINVAL;
    uint64_t inside = off < blk->len ? MIN(len, blk->len - off) : 0;
    int rc = read_bounced(blk, off, inside, iov);
    if (rc == 0)
        iov_iter_zero(iov, len - inside);
    return rc;
}

int blk_read(struct blk *blk, uint64_t off, void *buf, size_t len)
{
    IOV_ITER_BUF(it, vec, buf, len);
    return blk_readv(blk, off, len, &it);
}

/* ---- writes ---- */

static int check_change(const struct blk *blk, uint64_t off, uint64_t len)
{
    if (!blk->writable)
        return -EROFS;
    if (blk->flush_failed)
        return -EIO;
    /* rounding out to device blocks must not wrap either */
    if (!range_ok(off, len, INT64_MAX - blk->align))
        return blk->fixed_len ? -ENOSPC : -EFBIG;
    if (blk->fixed_len && off + len > blk->len)
        return -ENOSPC;
    return 0;
}

/* Inside a change. Sets the length after growth. */
SUSPENDS static int write_range(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                                unsigned flags)
{
    uint64_t end = off + len, out = align_up(end, blk->align);
    int rc;

    if (request_fits(blk, off, len, iov))
        rc = dev_writev(blk, off, len, iov, flags);
    else
        rc = write_bounced(blk, off, len, iov, flags);
    if (rc < 0)
        return rc;
    uint64_t new_len = MAX(blk->len, end);
    /* the last device block reached behind the end of the file: cut it off again */
    if (out > new_len && blk->ops->resize)
        rc = blk->ops->resize(blk, new_len);
    if (rc == 0)
        blk->len = new_len;
    return rc;
}

int blk_writev(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov, unsigned flags)
{
    int rc = check_change(blk, off, len);

    DEBUG_CHECK(len <= iov->left);
    if (rc < 0 || len == 0)
        return rc;
    if (blk->align == 1 && off + len <= blk->len && request_fits(blk, off, len, iov))
        return dev_writev(blk, off, len, iov, flags);

    struct change ch = change_of_write(blk, off, len);
    change_begin(blk, &ch);
    rc = write_range(blk, off, len, iov, flags);
    change_end(blk, &ch);
    return rc;
}

int blk_write(struct blk *blk, uint64_t off, const void *buf, size_t len)
{
    IOV_ITER_BUF(it, vec, buf, len);
    return blk_writev(blk, off, len, &it, 0);
}

int blk_flush(struct blk *blk)
{
    if (blk->flush_failed)
        return -EIO;
    return dev_flush(blk); /* also of what was written before it became read-only */
}

/* ---- zero and discard ---- */

SUSPENDS static int write_zeroes(struct blk *blk, uint64_t off, uint64_t len)
{
    while (len > 0) {
        size_t n = MIN(len, (uint64_t)BUF_ZERO_LEN);
        IOV_ITER_BUF(it, vec, buf_zeroes(), n);
        int rc = write_range(blk, off, n, &it, 0);

        if (rc < 0)
            return rc;
        off += n;
        len -= n;
    }
    return 0;
}

/* Whole device blocks. */
SUSPENDS static int zero_blocks(struct blk *blk, uint64_t off, uint64_t len, unsigned flags)
{
    if (len == 0)
        return 0;
    blk->stats.zeroes++;
    int rc = blk->ops->zero ? blk->ops->zero(blk, off, len, flags & BLK_MAY_UNMAP) : -ENOTSUP;
    if (rc == -ENOTSUP)
        return write_zeroes(blk, off, len);
    if (rc == 0)
        blk->len = MAX(blk->len, off + len);
    return rc;
}

/* Inside a change: head, whole blocks, tail. */
SUSPENDS static int zero_range(struct blk *blk, uint64_t off, uint64_t len, unsigned flags)
{
    uint64_t end = off + len;

    /* behind the end of a file zeroes come from growing it */
    if (end > blk->len && blk->zero_tail && blk->ops->resize &&
        ((flags & BLK_MAY_UNMAP) || !blk->ops->zero)) {
        uint64_t old_len = blk->len;
        int rc = blk->ops->resize(blk, end);

        if (rc < 0)
            return rc;
        blk->len = end;
        if (off >= old_len)
            return 0;
        len = old_len - off;
    }
    uint64_t head = MIN(len, align_up(off, blk->align) - off);
    uint64_t body = align_down(len - head, blk->align);
    int rc = write_zeroes(blk, off, head);

    if (rc == 0)
        rc = zero_blocks(blk, off + head, body, flags);
    if (rc == 0)
        rc = write_zeroes(blk, off + head + body, len - head - body);
    return rc;
}

int blk_zero(struct blk *blk, uint64_t off, uint64_t len, unsigned flags)
{
    int rc = check_change(blk, off, len);

    if (rc < 0 || len == 0)
        return rc;
    struct change ch = change_of_write(blk, off, len);
    ch.sets_len |= ch.grows; /* it may grow through resize */
    change_begin(blk, &ch);
    rc = zero_range(blk, off, len, flags);
    change_end(blk, &ch);
    if (rc == 0 && (flags & BLK_FUA))
        rc = dev_flush(blk);
    return rc;
}

int blk_discard(struct blk *blk, uint64_t off, uint64_t len)
{
    if (blk->writable && off < blk->len)
        len = MIN(len, blk->len - off);
    else if (blk->writable)
        return 0;
    int rc = check_change(blk, off, len);
    if (rc < 0)
        return rc;

    uint64_t start = align_up(off, blk->align), end = align_down(off + len, blk->align);
    if (start >= end || !blk->ops->discard)
        return 0;
    struct change ch = change_of_write(blk, start, end - start);
    blk->stats.discards++;
    change_begin(blk, &ch);
    rc = blk->ops->discard(blk, start, end - start);
    change_end(blk, &ch);
    return rc == -ENOTSUP ? 0 : rc;
}

/* ---- length and allocation ---- */

/* What a volume held before is nobody's to see. */
SUSPENDS static int zero_new_space(struct blk *blk, uint64_t off, uint64_t len)
{
    blk->stats.zeroes++;
    int rc = blk->ops->zero ? blk->ops->zero(blk, off, len, BLK_MAY_UNMAP) : -ENOTSUP;
    if (rc != -ENOTSUP)
        return rc;
    for (rc = 0; rc == 0 && len > 0;) {
        size_t n = MIN(len, (uint64_t)BUF_ZERO_LEN);
        IOV_ITER_BUF(it, vec, buf_zeroes(), n);

        rc = dev_writev(blk, off, n, &it, 0);
        off += n;
        len -= n;
    }
    return rc;
}

int blk_resize_prepare(struct blk *blk, uint64_t len, struct err *err)
{
    uint64_t from = MAX(blk->len, blk->ready_len), now = 0;

    len = align_up(len, MAX(blk->align, 512u));
    if (!blk->extendable)
        return err_set(err, -ENOTSUP, "'%s' cannot be made longer", blk->name);
    if (!blk->writable || blk->flush_failed)
        return err_errno(err, blk->writable ? -EIO : -EROFS, "resize");
    if (len <= from)
        return 0;
    int rc = blk->ops->extend(blk, len, &now, err);
    if (rc == 0 && now < len)
        rc = err_set(err, -EIO, "'%s' did not become long enough", blk->name);
    if (rc < 0)
        return rc;
    rc = zero_new_space(blk, from, len - from);
    if (rc < 0)
        return err_errno(err, rc, "zero the new space");
    blk->ready_len = MAX(blk->ready_len, len);
    return 0;
}

SUSPENDS static int resize_volume(struct blk *blk, uint64_t len)
{
    int rc = len > blk->len ? blk_resize_prepare(blk, len, NULL) : -ENOTSUP;

    if (rc == 0)
        blk->len = align_up(len, MAX(blk->align, 512u));
    return rc;
}

int blk_resize(struct blk *blk, uint64_t len)
{
    if (len == blk->len)
        return 0;
    if (blk->extendable)
        return resize_volume(blk, len);
    int rc = blk->fixed_len || !blk->ops->resize ? -ENOTSUP : check_change(blk, 0, len);
    if (rc < 0)
        return rc;

    /* as rmw it also waits for writes of what is cut off */
    struct change ch = {.off = MIN(len, blk->len), .end = UINT64_MAX, true, true, true};
    change_begin(blk, &ch);
    rc = blk->ops->resize(blk, len);
    if (rc == 0)
        blk->len = len;
    change_end(blk, &ch);
    return rc;
}

int blk_preallocate(struct blk *blk, uint64_t off, uint64_t len)
{
    int rc = check_change(blk, off, len);

    if (rc < 0 || len == 0 || blk->fixed_len)
        return rc;
    if (!blk->ops->preallocate)
        return -ENOTSUP;
    struct change ch = {.off = off, .end = off + len, .grows = off + len > blk->len};
    change_begin(blk, &ch);
    rc = blk->ops->preallocate(blk, off, len);
    if (rc == 0)
        blk->len = MAX(blk->len, off + len);
    change_end(blk, &ch);
    return rc;
}

int blk_status(struct blk *blk, uint64_t off, uint64_t len, bool *ret_data, uint64_t *ret_len)
{
    if (len == 0)
        return -EINVAL;
    if (off >= blk->len || !blk->ops->status) {
        *ret_data = off < blk->len;
        *ret_len = *ret_data ? MIN(len, blk->len - off) : len;
        return 0;
    }
    return blk->ops->status(blk, off, MIN(len, blk->len - off), ret_data, ret_len);
}

int blk_identity(struct blk *blk, uint64_t *ret_dev, uint64_t *ret_ino)
{
    return blk->ops->identity ? blk->ops->identity(blk, ret_dev, ret_ino) : -ENOTSUP;
}

uint64_t blk_hole_bytes(struct blk *blk)
{
    if (blk->ops->hole_bytes)
        return blk->ops->hole_bytes(blk);
    return blk->ops->status ? blk->len : 0;
}
