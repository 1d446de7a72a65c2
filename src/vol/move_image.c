/*
 * An element of a volume on its way between storages of which one is a volume group, or both are.
 *
 * Bytes of one are not those of the other: an LV is longer than its image, has old content where
 * nothing was written, and grows by extents. So a new image is made, as the target makes them, with
 * version, cluster size and length of the old one, and gets what that one has: data, zeroes, and
 * holes that show what lies below. Of the chain the element alone is opened, in the source and in
 * the target, where what lies below is still under hidden names. Units of both are the same, and
 * whole ones are copied: nothing below is ever read.
 *
 * A raw element is copied in full. An LV is written to its very end, as somebody's data was there.
 */
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "blk/blk.h"
#include "chain/merge.h"
#include "job/job.h"
#include "vol/create.h"
#include "vol/move.h"

#define ZERO_RUN  (4 * KIB) /* of data that is not written as such */
#define ZERO_STEP (256 * MIB)

static bool is_raw(const struct moved_file *f)
{
    return strcmp(f->src->format, "raw") == 0;
}

/* What lies below a current element is not written to any more. */
static int choose_prealloc(const struct move *m, const struct moved_file *f,
                           struct image_create_opts *image, struct err *err)
{
    const struct pool *pool = m->dst.pool;

    image->prealloc = PREALLOC_OFF;
    if (f->src->snap || f->src->vol->base)
        return 0;
    if (!f->backing)
        return pool_preallocation(pool, NULL, &image->prealloc, err);
    /* as overlays are made */
    if (image->extended_l2 &&
        (pool->preallocation ? strcmp(pool->preallocation, "off") != 0 : !store_is_thin(pool)))
        image->prealloc = PREALLOC_METADATA;
    return 0;
}

static int image_opts(const struct move *m, const struct moved_file *f, struct chain *src,
                      struct image_create_opts *ret, struct err *err)
{
    const struct qcow2_header *hdr = image_header(layer_image(chain_layer(src, 0)));

    if (hdr->nb_snapshots)
        return err_set(err, -ENOTSUP,
                       "'%s' has internal snapshots, which would be lost: delete them first "
                       "(qemu-img snapshot)",
                       f->src->path);
    if (hdr->autoclear & QCOW2_AUTOCLEAR_BITMAPS)
        op_say(m->ctx, "the persistent bitmaps of '%s' are not copied", f->src->path);
    *ret = (struct image_create_opts){
        .virtual_len = chain_len(src),
        .version = hdr->version,
        .cluster_size = hdr->cluster_size,
        .extended_l2 = hdr->extended_l2,
        .refcount_bits = 1u << hdr->refcount_order,
        .backing_name = f->backing,
        .backing_format = f->backing ? f->backing_format : NULL,
    };
    return choose_prealloc(m, f, ret, err);
}

SUSPENDS static int make_qcow2(const struct move *m, const struct moved_file *f, struct chain *src,
                               struct err *err)
{
    struct image_create_opts image;
    uint64_t room;
    struct blk *blk;
    int rc = image_opts(m, f, src, &image, err);

    if (rc == 0)
        rc = image_create_check(&image, err);
    if (rc == 0)
        rc = store_image_len(m->dst.pool, &image, &room, err);
    if (rc == 0)
        rc = store_create(f->tmp, room, &blk, err);
    if (rc < 0)
        return rc;
    crash_point("move-empty");
    rc = image_create(blk, &image, err);
    if (rc == -EFBIG && image.prealloc) { /* no files as long as the disk */
        image.prealloc = PREALLOC_OFF;
        rc = image_create(blk, &image, err);
    }
    blk_close(blk);
    return rc < 0 ? err_prefix(err, rc, "make '%s'", f->tmp) : 0;
}

SUSPENDS static int make_raw(const struct moved_file *f, struct chain *src, struct err *err)
{
    struct blk *blk;
    int rc = store_create(f->tmp, chain_len(src), &blk, err);

    if (rc < 0)
        return rc;
    crash_point("move-empty");
    rc = blk->fixed_len ? 0 : blk_resize(blk, chain_len(src));
    blk_close(blk);
    return rc < 0 ? err_errno(err, rc, "make '%s'", f->tmp) : 0;
}

/* ---- copying ---- */

struct progress {
    struct copy_meter *meter;
    uint64_t before; /* bytes of earlier elements */
};

static void show(void *ctx, uint64_t done, uint64_t total)
{
    struct progress *p = ctx;

    (void)total;
    p->meter->done = p->before;
    copy_meter_add(p->meter, done);
}

/* In steps, for requests that long time out. */
SUSPENDS static int zero_rest(struct chain *dst, uint64_t off, struct err *err)
{
    int rc = 0;

    for (uint64_t len = chain_len(dst), n; off < len && rc == 0; off += n) {
        n = MIN(len - off, ZERO_STEP);
        rc = chain_zero(dst, off, n, BLK_MAY_UNMAP);
    }
    return rc < 0 ? err_errno(err, rc, "write zeroes") : 0;
}

SUSPENDS static int copy_data(struct move *m, const struct moved_file *f, struct chain *src,
                              struct chain *dst, struct err *err)
{
    struct progress progress = {&m->meter, m->meter.done};
    bool fresh = !is_raw(f) || !layer_blk(chain_layer(dst, 0))->fixed_len;
    struct copy_opts copy = {
        .target_is_zero = fresh && !f->backing,
        .keep_holes = f->backing != NULL,
        .min_zero = MAX(ZERO_RUN, layer_unit(chain_layer(dst, 0))),
        .speed = m->meter.speed,
        .progress = show,
        .ctx = &progress,
    };
    int rc = copy_chain(src, NULL, dst, &copy, err);

    if (rc == 0)
        rc = zero_rest(dst, chain_len(src), err);
    crash_point("move-filled");
    if (rc == 0 && (rc = chain_flush(dst)) < 0)
        err_errno(err, rc, "flush");
    return rc;
}

SUSPENDS static int fill(struct move *m, const struct moved_file *f, struct chain *src,
                         struct err *err)
{
    struct chain_opts opts = {.format = f->src->format,
                              .writable = true,
                              .no_backing = true,
                              .grow = store_grow_opts(m->dst.pool)};
    struct chain *dst;
    int rc = chain_open(f->tmp, &opts, &dst, err);

    if (rc < 0)
        return rc;
    rc = copy_data(m, f, src, dst, err);
    int close_rc = chain_close(dst, rc < 0 ? NULL : err);
    return rc < 0 ? rc : close_rc;
}

int move_copy_image(struct move *m, struct moved_file *f, struct err *err)
{
    /* its lock is held already */
    struct chain_opts opts = {.format = f->src->format, .no_lock = true, .no_backing = true};
    struct chain *src;
    int rc = chain_open(f->src->path, &opts, &src, err);

    if (rc < 0)
        return rc;
    rc = is_raw(f) ? make_raw(f, src, err) : make_qcow2(m, f, src, err);
    if (rc == 0)
        rc = fill(m, f, src, err);
    chain_close(src, NULL);
    return rc < 0 ? err_prefix(err, rc, "copy '%s'", f->src->path) : 0;
}
