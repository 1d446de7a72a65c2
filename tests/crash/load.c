/* One random operation: see load.h. */
#include "load.h"
#include "base/bits.h"
#include "rt/reactor.h"
#include "rt/sim.h"
#include "test.h"

static void answered(struct load *l, struct op *op)
{
    if (!l->over || !*l->over)
        op_end(l->sectors, op, l->base_ns + reactor_now());
}

SUSPENDS static int do_write(struct load *l, uint64_t first, uint64_t nr, unsigned flags)
{
    uint64_t *buf = malloc(nr * SECTOR), id = ++l->sectors->next_id;

    for (uint64_t i = 0; i < nr * SECTOR / 8; i++)
        buf[i] = id;
    struct op *op = op_begin(l->sectors, id, first, nr);
    IOV_ITER_BUF(it, vec, buf, nr * SECTOR);
    int rc = image_write(l->img, first * SECTOR, nr * SECTOR, &it, flags, l->below);
    if (rc == 0)
        answered(l, op);
    if (op->end != NEVER && flags & BLK_FUA)
        op_is_durable(l->sectors, op);
    free(buf);
    return rc;
}

SUSPENDS static int do_zero(struct load *l, uint64_t first, uint64_t nr, bool unmap)
{
    struct op *op = op_begin(l->sectors, 0, first, nr);
    int rc = image_zero(l->img, first * SECTOR, nr * SECTOR, unmap ? BLK_MAY_UNMAP : 0, l->below);

    if (rc == 0)
        answered(l, op);
    return rc;
}

SUSPENDS static int do_discard(struct load *l, uint64_t first, uint64_t nr)
{
    uint64_t per = image_header(l->img)->cluster_size / SECTOR;
    uint64_t start = align_up(first, per), end = align_down(first + nr, per);
    struct op *op = start < end ? op_begin(l->sectors, 0, start, end - start) : NULL;
    int rc = image_discard(l->img, first * SECTOR, nr * SECTOR, l->below);

    if (rc == 0 && op)
        answered(l, op);
    return rc;
}

SUSPENDS static int do_flush(struct load *l)
{
    uint64_t start = ++l->sectors->tick;
    int rc = image_flush(l->img);

    if (rc == 0 && (!l->over || !*l->over))
        ops_flushed(l->sectors, start);
    return rc;
}

int load_op(struct load *l)
{
    uint64_t per = image_header(l->img)->cluster_size / SECTOR;
    uint64_t nr = 1 + rng_below(l->rng, l->max_sectors);
    uint64_t first = rng_below(l->rng, l->sectors->nr), what = rng_below(l->rng, 64);

    if (rng_below(l->rng, 3) == 0) { /* whole clusters */
        first = align_down(first, per);
        nr = per * (1 + rng_below(l->rng, 3));
    }
    nr = MIN(nr, l->sectors->nr - first);
    if (what < l->flushes)
        return do_flush(l);
    if (what < 3 * l->flushes)
        return do_write(l, first, nr, BLK_FUA);
    if (what >= 54)
        return do_discard(l, first, nr);
    if (what >= 44)
        return do_zero(l, first, nr, what & 1);
    return do_write(l, first, nr, 0);
}

int load_old_data(struct blk *blk, uint64_t len)
{
    uint8_t *old = malloc(MIB);
    int rc = 0;

    memset(old, 0xdd, MIB);
    for (uint64_t off = 0; rc == 0 && off < len; off += MIB)
        rc = blk_write(blk, off, old, MIN(MIB, len - off));
    free(old);
    return rc;
}
