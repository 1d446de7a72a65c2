#include "keep.h"
#include "base/check.h"

struct keep {
    struct blk blk;
    struct blk *child;
};

static struct blk *child_of(struct blk *blk)
{
    return container_of(blk, struct keep, blk)->child;
}

SUSPENDS static int keep_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    return blk_readv(child_of(blk), off, len, iov);
}

SUSPENDS static int keep_writev(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                                unsigned flags)
{
    return blk_writev(child_of(blk), off, len, iov, flags);
}

SUSPENDS static int keep_flush(struct blk *blk)
{
    return blk_flush(child_of(blk));
}

SUSPENDS static int keep_zero(struct blk *blk, uint64_t off, uint64_t len, unsigned flags)
{
    return blk_zero(child_of(blk), off, len, flags);
}

SUSPENDS static int keep_discard(struct blk *blk, uint64_t off, uint64_t len)
{
    return blk_discard(child_of(blk), off, len);
}

SUSPENDS static int keep_resize(struct blk *blk, uint64_t len)
{
    return blk_resize(child_of(blk), len);
}

SUSPENDS static int keep_preallocate(struct blk *blk, uint64_t off, uint64_t len)
{
    return blk_preallocate(child_of(blk), off, len);
}

static void keep_close(struct blk *blk)
{
    free(container_of(blk, struct keep, blk));
}

static const struct blk_ops keep_ops = {
    .name = "keep",
    .readv = keep_readv,
    .writev = keep_writev,
    .flush = keep_flush,
    .zero = keep_zero,
    .discard = keep_discard,
    .resize = keep_resize,
    .preallocate = keep_preallocate,
    .close = keep_close,
};

struct blk *keep_new(struct blk *child, bool fixed_len)
{
    struct keep *k = calloc(1, sizeof(*k));

    CHECK_THAT(k && blk_init(&k->blk, &keep_ops, child->name) == 0);
    k->child = child;
    k->blk.len = child->len;
    k->blk.align = child->align;
    k->blk.mem_align = child->mem_align;
    k->blk.io_unit = child->io_unit;
    k->blk.writable = child->writable;
    k->blk.fixed_len = fixed_len;
    k->blk.zero_tail = child->zero_tail && !fixed_len;
    k->blk.fresh_zero = child->fresh_zero && !fixed_len;
    return &k->blk;
}
