/*
 * Requests that change the top, and writes of jobs to any layer.
 *
 * Order of a guest write: the watching job's `before` (waits for the range), the image's write,
 * the flattened map, the job's `after`, then the answer. The map is told whether the write failed
 * or not: a failed write may have changed a part.
 *
 * What the top's space options make of a request is decided first, so that jobs watch what is done,
 * not what was asked for.
 */
#include "base/bits.h"
#include "base/check.h"
#include "chain/internal.h"

static const struct image_below *below_of(const struct layer *layer)
{
    return layer->lower ? &layer->below : NULL;
}

/* Keeps what the map has of the range where the write went in place, drops the rest. */
static void map_after_write(struct chain *chain, const struct layer *layer, uint64_t off,
                            uint64_t len)
{
    while (len > 0) {
        uint64_t host_off;
        uint64_t n = image_map_in_place(layer->image, off, len, &host_off);

        if (n == 0) {
            fmap_forget(&chain->fmap, off, len);
            return;
        }
        fmap_confirm(&chain->fmap, off, n, layer->slot, host_off);
        off += n;
        len -= n;
    }
}

static void map_after_zero(struct chain *chain, const struct layer *layer, uint64_t off,
                           uint64_t len)
{
    if (layer->lower || layer->index > 0)
        fmap_forget(&chain->fmap, off, len);
}

SUSPENDS static int layer_write(struct chain *chain, struct layer *layer, uint64_t off,
                                uint64_t len, struct iov_iter *iov, unsigned flags)
{
    if (!layer->image)
        return blk_writev(layer->blk, off, len, iov, flags);
    int rc = image_write(layer->image, off, len, iov, flags, below_of(layer));
    if (layer->lower && layer->index == 0)
        map_after_write(chain, layer, off, len);
    else if (layer->lower || layer->index > 0)
        fmap_forget(&chain->fmap, off, len);
    return rc;
}

SUSPENDS static int layer_zero(struct chain *chain, struct layer *layer, uint64_t off, uint64_t len,
                               unsigned flags)
{
    if (!layer->image)
        return blk_zero(layer->blk, off, len, flags);
    int rc = image_zero(layer->image, off, len, flags, below_of(layer));
    map_after_zero(chain, layer, off, len);
    return rc;
}

SUSPENDS static int layer_discard(struct chain *chain, struct layer *layer, uint64_t off,
                                  uint64_t len)
{
    if (!layer->image)
        return blk_discard(layer->blk, off, len);
    int rc = image_discard(layer->image, off, len, below_of(layer));
    map_after_zero(chain, layer, off, len);
    return rc;
}

SUSPENDS static int do_op(struct chain *chain, const struct chain_op *op, struct iov_iter *iov)
{
    struct layer *top = chain_top(chain);

    switch (op->kind) {
    case CHAIN_OP_WRITE:
        return layer_write(chain, top, op->off, op->len, iov, op->flags);
    case CHAIN_OP_ZERO:
        return layer_zero(chain, top, op->off, op->len, op->flags);
    case CHAIN_OP_DISCARD:
        return layer_discard(chain, top, op->off, op->len);
    }
    return -EINVAL;
}

SUSPENDS static int watched_op(struct chain *chain, struct chain_op *op, struct iov_iter *iov)
{
    /* set and cleared with the gate closed: the same for the whole request */
    struct chain_watch *watch = chain->watch;
    struct iov_iter data = iov ? *iov : (struct iov_iter){0};

    op->iov = iov ? &data : NULL;
    watch->before(watch->ctx, op);
    int rc = do_op(chain, op, iov);
    watch->after(watch->ctx, op, rc);
    return rc;
}

/* A write of zeroes is told as such: the check ends at the first word of other data. */
static void detect_zeroes(enum detect_zeroes mode, struct chain_op *op, struct iov_iter *iov)
{
    if (mode == DETECT_ZEROES_OFF || op->kind != CHAIN_OP_WRITE || !iov_iter_is_zero(iov, op->len))
        return;
    op->kind = CHAIN_OP_ZERO;
    op->flags |= mode == DETECT_ZEROES_UNMAP ? BLK_MAY_UNMAP : 0;
}

SUSPENDS static int allowed_op(struct chain *chain, struct chain_op *op, struct iov_iter *iov)
{
    const struct space_opts *space = &chain_top(chain)->space;

    detect_zeroes(space->detect_zeroes, op, iov);
    if (space->ignore_discard) {
        op->flags &= ~(unsigned)BLK_MAY_UNMAP;
        if (op->kind == CHAIN_OP_DISCARD)
            return 0;
    }
    if (op->kind != CHAIN_OP_WRITE)
        iov = NULL;
    return chain->watch ? watched_op(chain, op, iov) : do_op(chain, op, iov);
}

void chain_stop_waits(struct chain *chain)
{
    chain->no_waits++;
    if (chain_top(chain)->image)
        image_fail_waits(chain_top(chain)->image);
}

void chain_resume_waits(struct chain *chain)
{
    chain->no_waits--;
}

/* A request waits outside of the gate until the top's device has room: snapshots and jobs go on,
 * and some of them make room. */
SUSPENDS static int wait_room(struct chain *chain)
{
    if (chain->no_waits || !chain_top(chain)->image)
        return -ENOSPC;
    chain->waits++;
    int rc = image_wait_room(chain_top(chain)->image);
    if (--chain->waits == 0)
        wait_queue_wake_all(&chain->no_wait);
    return rc;
}

SUSPENDS static int try_op(struct chain *chain, struct chain_op *op, struct iov_iter *iov)
{
    int rc;

    gate_enter(&chain->gate);
    chain->stats.writes++;
    chain->stats.write_bytes += op->len;
    if (!chain->writable)
        rc = -EROFS;
    else if (!range_ok(op->off, op->len, layer_len(chain_top(chain))))
        rc = -EINVAL;
    else if (op->len == 0)
        rc = 0;
    else
        rc = allowed_op(chain, op, iov);
    gate_leave(&chain->gate);
    return rc;
}

SUSPENDS static int guest_op(struct chain *chain, struct chain_op *op, struct iov_iter *iov)
{
    struct iov_iter start = *iov;
    enum chain_op_kind kind = op->kind;
    unsigned flags = op->flags;

    for (;;) {
        int rc = try_op(chain, op, iov);

        if (__builtin_expect(rc != -ENOBUFS, 1) || (rc = wait_room(chain)) < 0)
            return rc;
        op->kind = kind;
        op->flags = flags;
        *iov = start;
        chain->stats.writes--;
        chain->stats.write_bytes -= op->len;
    }
}

int chain_write(struct chain *chain, uint64_t off, uint64_t len, struct iov_iter *iov,
                unsigned flags)
{
    struct chain_op op = {
        .kind = CHAIN_OP_WRITE, .off = off, .len = len, .flags = flags | IMAGE_NO_WAIT};

    return guest_op(chain, &op, iov);
}

int chain_zero(struct chain *chain, uint64_t off, uint64_t len, unsigned flags)
{
    struct chain_op op = {
        .kind = CHAIN_OP_ZERO, .off = off, .len = len, .flags = flags | IMAGE_NO_WAIT};

    struct iov_iter none = {0};

    return guest_op(chain, &op, &none);
}

int chain_discard(struct chain *chain, uint64_t off, uint64_t len)
{
    struct chain_op op = {.kind = CHAIN_OP_DISCARD, .off = off, .len = len};

    struct iov_iter none = {0};

    return guest_op(chain, &op, &none);
}

int chain_merge_flush(struct layer *layer)
{
    return layer->image ? image_flush(layer->image) : blk_flush(layer->blk);
}

int chain_write_back_old(struct chain *chain)
{
    int rc = 0;

    /* not through the gate: a pivot would wait for the flush with guests shut out */
    if (!co_mutex_trylock(&chain->shape))
        return 0;
    if (chain->writable && chain_top(chain)->image)
        rc = image_write_back_old(chain_top(chain)->image);
    co_mutex_unlock(&chain->shape);
    return rc;
}

int chain_flush(struct chain *chain)
{
    int rc = 0;

    gate_enter(&chain->gate);
    if (chain->writable)
        rc = chain_merge_flush(chain_top(chain));
    if (rc == 0 && chain->watch && chain->watch->flush)
        rc = chain->watch->flush(chain->watch->ctx);
    gate_leave(&chain->gate);
    return rc;
}

int chain_merge_write(struct chain *chain, struct layer *layer, uint64_t off, uint64_t len,
                      struct iov_iter *iov, unsigned flags)
{
    return layer_write(chain, layer, off, len, iov, flags);
}

int chain_merge_zero(struct chain *chain, struct layer *layer, uint64_t off, uint64_t len,
                     unsigned flags)
{
    if (!layer->image || !layer->lower)
        return layer_zero(chain, layer, off, len, flags);
    /* What lies below may be zero by a layer that the job takes out: the zeroes must be here. */
    int rc = image_zero(layer->image, off, len, flags, &layer->below_unsure);
    fmap_forget(&chain->fmap, off, len);
    return rc;
}
