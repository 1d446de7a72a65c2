#include "keep.h"
#include "base/check.h"
#include "rt/sim.h"

struct keep {
    struct blk blk;
    struct blk *child;
    struct keep_opts opts;
};

static struct keep *keep_of(struct blk *blk)
{
    return container_of(blk, struct keep, blk);
}

static struct blk *child_of(struct blk *blk)
{
    return keep_of(blk)->child;
}

/* The result of a request. */
static int seen(struct blk *blk, int rc)
{
    struct keep *k = keep_of(blk);

    if (rc == -EIO && k->opts.refused && sim_stopped())
        k->opts.refused(k->opts.ctx);
    return rc;
}

SUSPENDS static int keep_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    return seen(blk, blk_readv(child_of(blk), off, len, iov));
}

SUSPENDS static int keep_writev(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                                unsigned flags)
{
    return seen(blk, blk_writev(child_of(blk), off, len, iov, flags));
}

SUSPENDS static int keep_flush(struct blk *blk)
{
    const bool *drop = keep_of(blk)->opts.drop_flushes;

    return drop && *drop ? 0 : seen(blk, blk_flush(child_of(blk)));
}

SUSPENDS static int keep_zero(struct blk *blk, uint64_t off, uint64_t len, unsigned flags)
{
    return seen(blk, blk_zero(child_of(blk), off, len, flags));
}

SUSPENDS static int keep_discard(struct blk *blk, uint64_t off, uint64_t len)
{
    return seen(blk, blk_discard(child_of(blk), off, len));
}

SUSPENDS static int keep_resize(struct blk *blk, uint64_t len)
{
    return seen(blk, blk_resize(child_of(blk), len));
}

SUSPENDS static int keep_preallocate(struct blk *blk, uint64_t off, uint64_t len)
{
    return seen(blk, blk_preallocate(child_of(blk), off, len));
}

SUSPENDS static int keep_extend(struct blk *blk, uint64_t len, uint64_t *ret_len, struct err *err)
{
    struct keep *k = keep_of(blk);
    int rc = k->opts.extend(k->opts.ctx, &len);

    if (rc < 0)
        return err_errno(err, rc, "extend");
    *ret_len = len;
    CHECK_THAT(*ret_len <= k->child->len);
    return 0;
}

static int keep_identity(struct blk *blk, uint64_t *ret_dev, uint64_t *ret_ino)
{
    *ret_dev = 1;
    *ret_ino = keep_of(blk)->opts.ino;
    return *ret_ino ? 0 : -ENOTSUP;
}

static void keep_close(struct blk *blk)
{
    free(keep_of(blk));
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
    .extend = keep_extend,
    .identity = keep_identity,
    .close = keep_close,
};

struct blk *keep_new_as(struct blk *child, const struct keep_opts *opts)
{
    struct keep *k = calloc(1, sizeof(*k));

    CHECK_THAT(k && blk_init(&k->blk, &keep_ops, child->name) == 0);
    k->child = child;
    k->opts = *opts;
    k->blk.len = opts->len ? opts->len : child->len;
    k->blk.extendable = opts->extend;
    k->blk.align = child->align;
    k->blk.mem_align = child->mem_align;
    k->blk.io_unit = child->io_unit;
    k->blk.writable = child->writable;
    k->blk.fixed_len = opts->fixed_len;
    k->blk.zero_tail = child->zero_tail && !opts->fixed_len;
    k->blk.fresh_zero = child->fresh_zero && !opts->fixed_len;
    return &k->blk;
}

struct blk *keep_new(struct blk *child, bool fixed_len)
{
    return keep_new_as(child, &(struct keep_opts){.fixed_len = fixed_len});
}
