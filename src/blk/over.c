/*
 * What would be written to a device, in memory over what is there.
 *
 * Units of UNIT bytes: the first write to one copies it. Reads see memory where there is some, else
 * the child. Nothing reaches the child; flushes have nothing to do.
 */
#include <string.h>
#include "base/bits.h"
#include "blk/internal.h"

#define UNIT 4096u

struct over_blk {
    struct blk blk;
    struct blk *child;  /* borrowed */
    struct table units; /* number -> UNIT bytes, owned */
};

static struct over_blk *over_of(struct blk *blk)
{
    return container_of(blk, struct over_blk, blk);
}

/* Bytes from off to the end of its unit, at most len. */
static size_t unit_piece(uint64_t off, uint64_t len)
{
    return (size_t)MIN(len, UNIT - off % UNIT);
}

SUSPENDS static int over_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    struct over_blk *o = over_of(blk);

    while (len > 0) {
        size_t n = unit_piece(off, len);
        const uint8_t *unit = table_get(&o->units, off / UNIT);
        struct iov_iter sub = *iov;

        while (!unit && n < len && !table_get(&o->units, (off + n) / UNIT))
            n += unit_piece(off + n, len - n);
        sub.left = n;
        if (unit) {
            iov_iter_write(&sub, unit + off % UNIT, n);
        } else {
            int rc = blk_readv(o->child, off, n, &sub);

            if (rc < 0)
                return rc;
        }
        iov_iter_advance(iov, n);
        off += n;
        len -= n;
    }
    return 0;
}

SUSPENDS static int get_unit(struct over_blk *o, uint64_t nr, uint8_t **ret)
{
    uint8_t *unit = table_get(&o->units, nr);

    *ret = unit;
    if (unit)
        return 0;
    unit = malloc(UNIT);
    if (!unit)
        return -ENOMEM;
    int rc = blk_read(o->child, nr * UNIT, unit, UNIT);
    if (rc == 0)
        rc = table_put(&o->units, nr, unit);
    if (rc < 0)
        free(unit);
    else
        *ret = unit;
    return rc;
}

SUSPENDS static int over_writev(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                                unsigned flags)
{
    struct over_blk *o = over_of(blk);

    while (len > 0) {
        size_t n = unit_piece(off, len);
        uint8_t *unit;
        int rc = get_unit(o, off / UNIT, &unit);

        if (rc < 0)
            return rc;
        iov_iter_read(iov, unit + off % UNIT, n);
        off += n;
        len -= n;
    }
    return 0;
}

SUSPENDS static int over_flush(struct blk *blk)
{
    return 0;
}

static int over_identity(struct blk *blk, uint64_t *ret_dev, uint64_t *ret_ino)
{
    return blk_identity(over_of(blk)->child, ret_dev, ret_ino);
}

static void over_close(struct blk *blk)
{
    struct over_blk *o = over_of(blk);
    size_t pos = 0;

    for (struct table_slot *s; (s = table_next(&o->units, &pos));)
        free(s->value);
    table_fini(&o->units);
    free(o);
}

static const struct blk_ops over_ops = {
    .name = "over",
    .readv = over_readv,
    .writev = over_writev,
    .flush = over_flush,
    .identity = over_identity,
    .close = over_close,
};

int blk_over_new(struct blk *child, struct blk **ret)
{
    struct over_blk *o = calloc(1, sizeof(*o));

    if (!o)
        return -ENOMEM;
    if (blk_init(&o->blk, &over_ops, child->name) < 0) {
        free(o);
        return -ENOMEM;
    }
    o->child = child;
    o->blk.len = child->len;
    o->blk.writable = true;
    o->blk.fixed_len = child->fixed_len;
    *ret = &o->blk;
    return 0;
}
