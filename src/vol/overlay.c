/*
 * Making the empty overlay that a snapshot, a rollback or a repair puts on top.
 *
 * Extended L2 with 128 KiB clusters (32 subclusters of 4 KiB: no copy-on-write for a 4k write) and
 * preallocated metadata, unless the pool's keys say otherwise: without extended L2 a plain entry
 * cannot say "allocated here, read the backing file", so then nothing is preallocated. Nor is it in
 * an LV that is to take no more than what is written.
 */
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "blk/blk.h"
#include "chain/chain.h"
#include "chain/merge.h"
#include "vol/store_lvm.h"

static struct image_create_opts overlay_opts(const struct pool *pool)
{
    bool extended = pool->extended_l2 != 0, thin = store_is_thin(pool);
    bool prealloc =
        extended && (pool->preallocation ? strcmp(pool->preallocation, "off") != 0 : !thin);
    uint64_t cluster = pool->snapshot_cluster_size;

    return (struct image_create_opts){.version = 3,
                                      .cluster_size = cluster    ? cluster
                                                      : extended ? 128 * KIB
                                                                 : 64 * KIB,
                                      .extended_l2 = extended,
                                      .prealloc = prealloc ? PREALLOC_METADATA : PREALLOC_OFF};
}

int overlay_create(const struct pool *pool, const char *path, const char *backing_name,
                   const char *backing_format, uint64_t virtual_len, const struct stat *like,
                   struct err *err)
{
    struct image_create_opts opts = overlay_opts(pool);
    uint64_t len = 0;
    struct blk *blk;

    opts.virtual_len = align_up(virtual_len, 512); /* the rest of an odd raw file reads as zero */
    opts.backing_name = backing_name;
    opts.backing_format = backing_format;
    int rc = store_image_len(pool, &opts, &len, err);
    if (rc < 0)
        return rc;
    crash_point("overlay-create");
    rc = store_create(path, len, &blk, err);
    if (rc < 0)
        return rc;
    crash_point("overlay-empty");
    rc = image_create(blk, &opts, err);
    if (rc == -EFBIG && opts.prealloc) { /* no files as long as the disk: it grows as needed */
        opts.prealloc = PREALLOC_OFF;
        rc = image_create(blk, &opts, err);
    }
    blk_close(blk);
    crash_point("overlay-written");
    if (rc == 0)
        rc = store_copy_owner(path, like, err);
    if (rc == 0)
        rc = store_sync_file(path, err);
    if (rc < 0)
        store_unlink(path, NULL);
    crash_point("overlay-durable");
    return rc;
}

int overlay_hold(const char *path, struct blk **ret, struct err *err)
{
    struct blk_file_opts opts = {.lock = BLK_LOCK_WRITE};

    return blk_file_open(path, &opts, ret, err);
}

int overlay_refuse_open(const char *path, struct err *err)
{
    struct blk *blk;
    int rc = overlay_hold(path, &blk, err);

    if (rc == 0)
        blk_close(blk);
    return rc;
}

int held_add(struct held_files *held, const char *path, struct err *err)
{
    struct blk *blk;
    int rc = overlay_hold(path, &blk, err);

    if (rc == 0 && vec_push(&held->list, blk) < 0) {
        blk_close(blk);
        rc = err_set(err, -ENOMEM, "out of memory");
    }
    return rc;
}

int held_add_volume(struct held_files *held, const struct cvol *vol, struct err *err)
{
    int rc = vol->current ? held_add(held, vol->current->path, err) : 0;

    vec_for_each(it, &vol->snaps) {
        if (rc == 0)
            rc = held_add(held, (*it)->path, err);
    }
    return rc;
}

void held_drop(struct held_files *held)
{
    vec_for_each(it, &held->list)
        blk_close(*it);
    vec_free(&held->list);
}

void held_drop_device(struct held_files *held, const char *path)
{
    for (size_t i = held->list.len; lvm_store_of(path) && i-- > 0;)
        if (strcmp(held->list.data[i]->name, path) == 0) {
            blk_close(held->list.data[i]);
            vec_remove_at(&held->list, i);
        }
}

int overlay_settle(const char *path, const char *format, struct err *err)
{
    int rc = chain_settle(path, format, err);

    crash_point("overlay-settled");
    return rc;
}

int overlay_is_empty(const char *path, bool *ret, struct err *err)
{
    struct layer_opts opts = {.format = "qcow2"};
    struct layer *layer;
    bool empty = true;
    int rc = layer_open(path, &opts, &layer, err);

    if (rc < 0)
        return rc;
    for (uint64_t off = 0; rc == 0 && empty && off < layer_len(layer);) {
        struct extent ext;

        rc = layer_map(layer, off, layer_len(layer) - off, &ext);
        if (rc < 0)
            rc = err_errno(err, rc, "read the map of '%s'", path);
        else
            empty = ext.kind == EXTENT_UNALLOCATED;
        off += rc == 0 ? ext.len : 0;
    }
    layer_close(layer, NULL);
    if (rc == 0)
        *ret = empty;
    return rc;
}
