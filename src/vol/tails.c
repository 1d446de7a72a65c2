/*
 * What an LV has behind the end of its image is given back: of a snapshot all of it, of a current
 * image what is more than two chunks, but for one.
 *
 *  1. Nobody writes to the image meanwhile, and nobody begins to: it is held by the image lock of a
 *     reader, which a server that has it below its disk has as well. Who makes such an image
 *     writable later looks how long its device is then.
 *  2. The end is told by the refcounts, of an image that was closed (no journal, no dirty bit), and
 *     checked against the tables that the header names. An LV that is not that image's any more is
 *     not touched.
 *  3. The volume's lock is held, so that no other host has the disk open.
 *  4. One command: a kill leaves the LV as long as before, or cut.
 *
 * With `saferemove` the tail is zeroed before. Nothing here fails an operation: what is not cut now
 * is when the image is next left.
 */
#include <stdlib.h>
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "blk/blk.h"
#include "chain/chain.h"
#include "vol/store_lvm.h"

#define ZERO_STEP  (32 * MIB)
#define KEEP_TAILS 2u /* chunks behind a current image's end are left alone */

struct tail {
    const struct pool *pool;
    struct lvm_store *s;
    const char *path;
    bool is_snap;
    struct layer *layer;
    uint64_t end; /* of the image, in its device */
};

static uint64_t chunk_of(const struct pool *pool)
{
    return pool->thin_given ? pool->thin_chunk : THIN_CHUNK;
}

/* The tables that the header names, as a listing reads it. */
SUSPENDS static int check_tables(struct tail *t, struct err *err)
{
    struct blk *blk = layer_blk(t->layer);
    size_t len = (size_t)MIN(blk->len, 2 * MIB), need;
    _cleanup_(freep) void *buf = NULL;
    struct head head;

    if (posix_memalign(&buf, HEAD_LEN, len) != 0)
        return err_set(err, -ENOMEM, "out of memory");
    int rc = blk_read(blk, 0, buf, len);
    if (rc < 0)
        return err_errno(err, rc, "read the header of '%s'", t->path);
    rc = head_parse(buf, len, &head, &need, err);
    if (rc < 0)
        return rc;
    if (head.tables_end > t->end)
        rc = err_set(err, -EUCLEAN, "refcounts of '%s' end before its tables: nothing is cut off",
                     t->path);
    head_fini(&head);
    return rc;
}

/* So long the LV is to be; its present length: nothing is to be cut. */
static uint64_t wanted_len(const struct tail *t, uint64_t len)
{
    uint64_t chunk = chunk_of(t->pool), want;

    if (t->end > len || (!t->is_snap && len - t->end <= KEEP_TAILS * chunk))
        return len;
    if (lvm_round_up(t->end + (t->is_snap ? 0 : chunk), t->s->dir.vg->extent_len, &want, NULL) < 0)
        return len;
    return MIN(want, len);
}

/* Nothing in the image refers to it, and nobody else looks there. */
SUSPENDS static int zero_tail(const struct tail *t, uint64_t from, uint64_t len, struct err *err)
{
    const struct blk_file_opts opts = {.writable = true, .direct = true};
    struct blk *blk;
    int rc = blk_file_open(t->path, &opts, &blk, err);

    if (rc < 0)
        return rc;
    for (uint64_t off = from; off < len && rc == 0; off += ZERO_STEP)
        rc = blk_zero(blk, off, MIN(ZERO_STEP, len - off), BLK_MAY_UNMAP);
    if (rc == 0)
        rc = blk_flush(blk);
    blk_close(blk);
    return rc < 0 ? err_errno(err, rc, "zero the end of '%s'", t->path) : 0;
}

/* By now the name may be another LV's. NULL: it is. */
static const struct lvm_lv *find_same(const struct tail *t)
{
    const struct lvm_lv *lv = lvm_dir_find(&t->s->dir, lvm_store_name(t->s, t->path));
    uint64_t dev, ino, its_dev, its_ino;
    _cleanup_(freep) char *handle = NULL;

    if (!lv || !lvm_dir_is_ours(lv) || asprintf(&handle, "%s/%s", t->s->dir.lvm.vg, lv->uuid) < 0)
        return NULL;
    blk_handle_identity(handle, &its_dev, &its_ino);
    bool same =
        blk_identity(layer_blk(t->layer), &dev, &ino) == 0 && dev == its_dev && ino == its_ino;
    return same ? lv : NULL;
}

SUSPENDS static int reduce(struct tail *t, struct err *err)
{
    int rc = lvm_store_begin(t->s, err);

    if (rc < 0)
        return rc;
    const struct lvm_lv *lv = find_same(t);
    uint64_t want = lv ? wanted_len(t, lv->len) : 0;
    if (lv && want < lv->len) {
        crash_point("tail-reduce");
        rc = lvm_reduce(&t->s->dir.lvm, lv->name, want, err);
        lvm_dir_forget(&t->s->dir);
        crash_point("tail-reduced");
    }
    lvm_store_end(t->s);
    return rc;
}

SUSPENDS static int cut_open(struct tail *t, struct err *err)
{
    int rc = layer_end(t->layer, &t->end, err);

    if (rc == 0)
        rc = check_tables(t, err);
    if (rc == 0)
        rc = lvm_store_look(t->s, err);
    if (rc < 0)
        return rc;
    uint64_t len = layer_blk(t->layer)->len, want = wanted_len(t, len);
    if (want == len)
        return 0;
    if (t->pool->saferemove)
        rc = zero_tail(t, want, len, err);
    return rc == 0 ? reduce(t, err) : rc;
}

/* A snapshot that is no longer than what it begins with may be cut already: a look at the report
 * saves the opening. */
SUSPENDS static bool may_have_tail(struct tail *t)
{
    const char *name = lvm_store_name(t->s, t->path), *dot = strrchr(name, '.');

    if (!dot || strcmp(dot, ".qcow2") != 0 || lvm_store_look(t->s, NULL) < 0)
        return false;
    const struct lvm_lv *lv = lvm_dir_find(&t->s->dir, name);
    uint64_t least = t->is_snap ? t->s->dir.vg->extent_len : KEEP_TAILS * chunk_of(t->pool);
    return lv && lv->len > least;
}

void tail_cut(const struct vol_ctx *ctx, const struct pool *pool, const char *path, bool is_snap)
{
    struct tail t = {.pool = pool, .s = lvm_store_of(path), .path = path, .is_snap = is_snap};
    const struct layer_opts opts = {.format = "qcow2"};
    struct err err = {0};

    if (!t.s || !store_is_thin(pool) || !may_have_tail(&t))
        return;
    int rc = layer_open(path, &opts, &t.layer, &err);
    if (rc == 0) {
        rc = cut_open(&t, &err);
        layer_close(t.layer, NULL);
    }
    if (rc < 0 && rc != -EBUSY) /* that one: somebody writes to it */
        op_say(ctx, "the space behind the end of '%s' is kept: %s", path, err_text(&err));
}

/* The volume's lock keeps a server that starts waiting, and tells of other hosts: a disk that was
 * handed over is another one's. */
SUSPENDS static void cut_closed(const struct vol_ctx *ctx, const struct pool *pool,
                                const char *path)
{
    const struct lvm_store *s = lvm_store_of(path);
    struct pool_lock lock;
    char stem[256];
    const char *format;

    if (!s || !store_is_thin(pool) ||
        !file_split(FORM_LV, lvm_store_name(s, path), stem, sizeof(stem), &format) ||
        lock_volume(pool, s->root, "", stem, &lock, NULL) < 0)
        return;
    tail_cut(ctx, pool, path, false);
    lock_release(&lock);
}

void vol_close_disk(const struct vol_ctx *ctx, const struct pool *pool, const char *path)
{
    cut_closed(ctx, pool, path);
    vol_pool_close(pool);
}
