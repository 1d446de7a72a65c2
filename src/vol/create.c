/*
 * New volumes, empty or filled from an image file or a stream.
 *
 *   1 intent                                    nothing done                     undo
 *   2 the image under a hidden name, durable    a file too many                  undo
 *   3 link under the volume's name              the volume is there              finish
 *   4 unlink the hidden name, intent removed
 *
 * A volume appears when it is complete, and never in the place of another: link() does not replace.
 * A raw volume in a volume group is zeroed, as long as that may take: its space was somebody's.
 * New files have mode 0640: whoever runs guests under another user gives that one the group.
 */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <strings.h>
#include "base/bits.h"
#include "base/check.h"
#include "job/job.h"
#include "vol/create.h"

#define ZERO_STEP (256 * MIB)

static int choose_prealloc(const char *text, enum qcow2_prealloc *ret, struct err *err)
{
    static const char *const names[] = {[PREALLOC_OFF] = "off",
                                        [PREALLOC_METADATA] = "metadata",
                                        [PREALLOC_FALLOC] = "falloc",
                                        [PREALLOC_FULL] = "full"};

    for (unsigned i = 0; i < ARRAY_SIZE(names); i++) {
        if (strcmp(text, names[i]) == 0) {
            *ret = (enum qcow2_prealloc)i;
            return 0;
        }
    }
    return err_set(err, -EINVAL, "preallocation '%s' is none of off, metadata, falloc, full", text);
}

static int choose_format(const struct vol_name *name, const char *format, const char **ret,
                         struct err *err)
{
    const char *wanted = format ? format : *name->format ? name->format : "qcow2";

    if (strcmp(wanted, "qcow2") != 0 && strcmp(wanted, "raw") != 0)
        return err_set(err, -EINVAL, "format '%s' is neither qcow2 nor raw", wanted);
    if (*name->format && strcmp(name->format, wanted) != 0)
        return err_set(err, -EINVAL, "the name says .%s, the format is %s", name->format, wanted);
    *ret = strcmp(wanted, "raw") == 0 ? "raw" : "qcow2";
    return 0;
}

int pool_preallocation(const struct pool *pool, const char *chosen, enum qcow2_prealloc *ret,
                       struct err *err)
{
    const char *prealloc = chosen ? chosen : pool->preallocation;
    /* a preallocated cluster of a device has to be told from what was there before: nothing gained
     */
    const char *usual = pool->type == POOL_LVM ? "off" : "metadata";

    return choose_prealloc(prealloc ? prealloc : usual, ret, err);
}

static int fill_opts(struct new_volume *nv, const struct vol_create_opts *opts, struct err *err)
{
    const struct pool *pool = nv->op->pool;
    uint64_t cluster = opts->cluster_size ? opts->cluster_size : pool->cluster_size;

    nv->image =
        (struct image_create_opts){.version = 3, .cluster_size = cluster ? cluster : 64 * KIB};
    nv->image.extended_l2 = opts->extended_l2 >= 0 ? opts->extended_l2 : pool->extended_l2 == 1;
    nv->prealloc_chosen = opts->preallocation || pool->preallocation;
    return pool_preallocation(pool, opts->preallocation, &nv->image.prealloc, err);
}

int new_volume_plan(struct op *op, const struct vol_name *name, const struct vol_create_opts *opts,
                    struct new_volume *ret, struct err *err)
{
    struct new_volume nv = {.op = op};
    _cleanup_(freep) char *file = NULL;
    int rc = choose_format(name, opts->format, &nv.format, err);

    if (rc == 0 && (*name->snap || *name->base))
        rc = err_set(err, -EINVAL, "a new volume is called POOL:[<vmid>/]<name>");
    if (rc == 0 && !op->pool->images && !op->pool->rootdir)
        rc = err_set(err, -EPERM, "the storage '%s' is not for volumes: its content is '%s'",
                     op->pool->id, op->pool->content ? op->pool->content : "");
    if (rc == 0)
        rc = stem_check_new(op->images, name->vmid, name->name, err);
    if (rc == 0)
        rc = catalog_check_new_vol(op->cat, name->vmid, name->name, err);
    if (rc == 0)
        rc = fill_opts(&nv, opts, err);
    if (rc < 0)
        return rc;
    snprintf(nv.vmid, sizeof(nv.vmid), "%s", name->vmid);
    snprintf(nv.stem, sizeof(nv.stem), "%s", name->name);
    file = file_join(op->images, name->name, nv.format);
    nv.dir = *name->vmid ? path_join(op->images, name->vmid) : strdup(op->images);
    if (file && nv.dir) {
        nv.tmp = op_tmp_path(op, nv.dir, "0");
        nv.path = path_join(nv.dir, file);
    }
    if (!nv.tmp || !nv.path) {
        new_volume_fini(&nv);
        return err_set(err, -ENOMEM, "out of memory");
    }
    *ret = nv;
    return 0;
}

void new_volume_fini(struct new_volume *nv)
{
    free(nv->dir);
    free(nv->tmp);
    free(nv->path);
    *nv = (struct new_volume){0};
}

int new_volume_dirs(struct new_volume *nv, struct err *err)
{
    int rc = store_mkdir(nv->op->images, err);

    return rc == 0 ? store_mkdir(nv->dir, err) : rc;
}

int new_volume_begin(struct new_volume *nv, struct err *err)
{
    int rc = new_volume_dirs(nv, err);

    if (rc < 0)
        return rc;
    return op_intent(nv->op, "create",
                     json_pack("{s:[{s:s, s:s}]}", "vols", "vmid", nv->vmid, "stem", nv->stem),
                     err);
}

SUSPENDS static int write_zeroes(struct blk *blk, uint64_t len)
{
    for (uint64_t off = 0; off < len;) {
        size_t n = (size_t)MIN(len - off, (uint64_t)BUF_ZERO_LEN);
        int rc = blk_write(blk, off, buf_zeroes(), n);

        if (rc < 0)
            return rc;
        off += n;
    }
    return 0;
}

/* What a device held before is nobody's to read. In steps, for requests that long time out. */
SUSPENDS static int zero_device(const struct new_volume *nv, struct blk *blk)
{
    const struct vol_ctx *ctx = nv->op->ctx;
    uint64_t off = nv->filled ? MIN(nv->image.virtual_len, blk->len) : 0;
    int rc = 0;

    while (off < blk->len && rc == 0) {
        uint64_t n = MIN(blk->len - off, ZERO_STEP);

        rc = blk_zero(blk, off, n, BLK_MAY_UNMAP);
        off += n;
        if (ctx->progress)
            ctx->progress(ctx->ctx, off, blk->len);
    }
    return rc;
}

SUSPENDS static int make_raw(const struct new_volume *nv, struct blk *blk, struct err *err)
{
    uint64_t len = nv->image.virtual_len;
    int rc = blk->fixed_len ? zero_device(nv, blk) : blk_resize(blk, len);

    if (rc == 0 && !blk->fixed_len && nv->image.prealloc >= PREALLOC_FALLOC) {
        rc = blk_preallocate(blk, 0, len);
        if (rc == -ENOTSUP || (rc == 0 && nv->image.prealloc == PREALLOC_FULL))
            rc = write_zeroes(blk, len);
    }
    if (rc == 0)
        rc = blk_flush(blk);
    return rc < 0 ? err_errno(err, rc, "make '%s'", nv->tmp) : 0;
}

/* A preallocated disk needs a file as long as itself. Where that was nobody's wish and the file
 * system has no such files, the disk is made without. */
SUSPENDS static int make_qcow2(struct new_volume *nv, struct blk *blk, struct err *err)
{
    int rc = image_create(blk, &nv->image, err);

    if (rc != -EFBIG || nv->image.prealloc == PREALLOC_OFF)
        return rc;
    if (nv->prealloc_chosen)
        return err_prefix(err, rc, "preallocation needs a file as long as the disk");
    op_say(nv->op->ctx, "the file system has no files of that length: made without preallocation");
    nv->image.prealloc = PREALLOC_OFF;
    return image_create(blk, &nv->image, err);
}

int new_volume_make(struct new_volume *nv, uint64_t len, struct err *err)
{
    bool raw = strcmp(nv->format, "raw") == 0;
    uint64_t room = len;
    struct blk *blk;

    nv->image.virtual_len = align_up(len, 512);
    int rc = raw ? 0 : image_create_check(&nv->image, err);
    if (rc == 0 && !raw)
        rc = store_image_len(nv->op->pool, &nv->image, &room, err);
    if (rc == 0)
        rc = store_create(nv->tmp, room, &blk, err);
    if (rc < 0)
        return rc;
    crash_point("create-empty");
    rc = raw ? make_raw(nv, blk, err) : make_qcow2(nv, blk, err);
    blk_close(blk);
    crash_point("create-made");
    return rc;
}

/* Above `until`; what that has is in the image already. */
SUSPENDS static int copy_into(struct new_volume *nv, struct chain *src, struct layer *until,
                              struct err *err)
{
    struct chain_opts opts = {
        .format = nv->format, .writable = true, .grow = store_grow_opts(nv->op->pool)};
    struct copy_opts copy = {.target_is_zero = !until && !nv->filled,
                             .until = until,
                             .min_zero = 4096,
                             .speed = nv->op->pool->bwlimit,
                             .progress = nv->op->ctx->progress,
                             .ctx = nv->op->ctx->ctx};
    struct chain *dst;
    int rc = chain_open(nv->tmp, &opts, &dst, err);

    if (rc < 0)
        return rc;
    if (chain_len(dst) < chain_len(src))
        rc = chain_resize(dst, chain_len(src), err);
    if (rc == 0)
        rc = copy_chain(src, NULL, dst, &copy, err);
    if (rc == 0 && nv->len && nv->len < chain_len(dst))
        rc = chain_resize(dst, nv->len, err);
    crash_point("volume-copied");
    if (rc == 0 && (rc = chain_flush(dst)) < 0)
        err_errno(err, rc, "write '%s'", nv->tmp);
    int close_rc = chain_close(dst, rc < 0 ? NULL : err);
    return rc < 0 ? rc : close_rc;
}

int new_volume_fill(struct new_volume *nv, struct chain *src, struct err *err)
{
    /* zeroes are written once, with the rest */
    nv->filled = strcmp(nv->format, "raw") == 0 && name_form(nv->tmp) == FORM_LV;
    int rc = new_volume_make(nv, chain_len(src), err);

    return rc == 0 ? copy_into(nv, src, NULL, err) : rc;
}

int new_volume_fill_above(struct new_volume *nv, struct chain *src, struct err *err)
{
    return copy_into(nv, src, chain_layer(src, chain_depth(src) - 1), err);
}

int new_image_fill(struct op *op, const char *tmp, const char *format, struct chain *src,
                   struct err *err)
{
    struct vol_create_opts opts = {.extended_l2 = -1};
    struct new_volume nv = {.op = op, .format = format, .tmp = strdup(tmp)};
    int rc = nv.tmp ? fill_opts(&nv, &opts, err) : err_set(err, -ENOMEM, "out of memory");

    if (rc == 0)
        rc = new_volume_fill(&nv, src, err);
    new_volume_fini(&nv);
    return rc;
}

int new_volume_publish(struct new_volume *nv, struct err *err)
{
    int rc = store_set_mode(nv->tmp, NEW_MODE, err);

    if (rc == 0)
        rc = store_sync_file(nv->tmp, err);
    crash_point("create-durable");
    if (rc == 0)
        rc = store_publish(nv->tmp, nv->path, err);
    crash_point("create-published");
    return rc == 0 ? op_done(nv->op, err) : rc;
}

/* Removes every hidden file of this operation. */
static int drop_hidden(const char *dir, const char *id, struct err *err)
{
    char prefix[64];

    snprintf(prefix, sizeof(prefix), OWN_PREFIX "%.20s-", id);
    return store_unlink_all(dir, prefix, err);
}

void new_volume_undo(struct new_volume *nv)
{
    if (!nv->op->intent || drop_hidden(nv->dir, nv->op->id, NULL) < 0)
        return;
    op_done(nv->op, NULL);
    if (*nv->vmid)
        rmdir(nv->dir); /* stays if anything is in it */
}

void new_volume_say(const struct new_volume *nv, const char *what)
{
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    _cleanup_(freep) char *id = NULL;

    if (catalog_scan(nv->op->pool, &cat, NULL) == 0) {
        const struct cvol *vol = catalog_vol(cat, nv->vmid, nv->stem, nv->format);

        id = vol ? cvol_id(cat, vol) : NULL;
    }
    op_say(nv->op->ctx, "%s %s", id ? id : nv->path, what);
}

int create_recover(const char *images, struct intent *intent, struct err *err)
{
    const json_t *vol = json_array_get(json_object_get(intent->json, "vols"), 0);
    _cleanup_(freep) char *dir = intent_dir(images, vol);

    if (!dir)
        return err_set(err, -EUCLEAN, "the intent is damaged");
    return drop_hidden(dir, intent->id, err);
}

int vol_create(const struct vol_ctx *ctx, const struct vol_name *name,
               const struct vol_create_opts *opts, struct err *err)
{
    struct new_volume nv = {0};
    struct op op;

    if (opts->len == 0)
        return err_set(err, -EINVAL, "a volume cannot have the size 0");
    if (opts->len > INT64_MAX - 512)
        return err_set(err, -EFBIG, "the size is too large");
    int rc = op_begin(ctx, name->pool, name, 1, &op, err);
    if (rc < 0)
        return rc;
    rc = new_volume_plan(&op, name, opts, &nv, err);
    if (rc == 0 && ctx->dry_run)
        op_say(ctx, "would create '%s'", nv.path);
    if (rc == 0 && !ctx->dry_run) {
        rc = new_volume_begin(&nv, err);
        if (rc == 0)
            rc = new_volume_make(&nv, opts->len, err);
        if (rc == 0)
            rc = new_volume_publish(&nv, err);
        if (rc == 0)
            op_say(ctx, "'%s' created", nv.path);
        else
            new_volume_undo(&nv);
    }
    new_volume_fini(&nv);
    op_end(&op);
    return rc;
}
