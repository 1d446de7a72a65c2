/*
 * A new volume with the contents of a base image, of a snapshot or of a volume's current state.
 *
 * Linked: an overlay on the base or snapshot, in the same storage. Both volumes are locked, so what
 * the clone stands on is there until the clone is there to be seen.
 *
 *   1 intent                                      nothing done              undo
 *   2 the overlay under a hidden name, durable    a file too many           undo
 *   3 link under the volume's name                the clone is there        finish
 *   4 intent removed
 *
 * Full: the same steps with a copy in place of the overlay. The source is not locked, for that may
 * take long: its images are held open for reading, which keeps everybody from writing to them,
 * merging them or removing them. A snapshot of a served disk can be copied; what the disk is now
 * would be torn.
 */
#include <stdio.h>
#include <string.h>
#include "base/check.h"
#include "vol/copyfile.h"
#include "vol/create.h"

/* ---- what is cloned ---- */

static int find_element(struct op *op, const struct vol_name *name, struct cfile **ret,
                        struct err *err)
{
    struct cvol *vol;
    int rc = op_volume(op, name, &vol, err);

    if (rc < 0)
        return rc;
    struct cfile *f = *name->snap ? cvol_snap(vol, name->snap) : vol->current;
    if (!f)
        return err_set(err, -ENOENT, "%s:%s%s%s has no snapshot '%s'", name->pool, name->vmid,
                       *name->vmid ? "/" : "", name->name, name->snap);
    if (f->deleting)
        return err_set(err, -EBUSY, "the snapshot '%s' is being deleted", name->snap);
    if (f->special)
        return err_set(err, -ENOTSUP, "'%s' %s: it cannot be cloned", f->path, f->special);
    *ret = f;
    return 0;
}

/* ---- linked ---- */

static int check_names(const struct vol_name *from, const struct vol_name *to, struct err *err)
{
    if (strcmp(from->pool, to->pool) != 0)
        return err_set(err, -EINVAL,
                       "a linked clone lies in the storage of what it stands on: --full copies to "
                       "another one");
    if (strcmp(to->format, "raw") == 0)
        return err_set(err, -EINVAL,
                       "a linked clone is a qcow2 image: leave the suffix out, or make it --full");
    return 0;
}

static int refuse_current(const struct cfile *f, const struct vol_name *from, struct err *err)
{
    if (f->snap || f->vol->base)
        return 0;
    return err_set(
        err, -EINVAL,
        "%s:%s%s%s goes on changing: take a snapshot and clone that, make it a template, "
        "or copy it as it is with --full",
        from->pool, from->vmid, *from->vmid ? "/" : "", from->name);
}

/* The clone's full id as Proxmox writes it may be given: it has to name this base. */
static int check_base(struct vol_name *to, const struct cfile *f, struct err *err)
{
    char id[256];

    if (!*to->base)
        return 0;
    snprintf(id, sizeof(id), "%s/%.200s", f->vmid, f->name);
    size_t n = strlen(to->base);
    if (f->snap || strncmp(id, to->base, n) != 0 || (id[n] && id[n] != '.'))
        return err_set(err, -EINVAL, "the new volume's name says that it is based on %s, not on %s",
                       to->base + (*to->base == '/'), id + (*id == '/'));
    to->base[0] = '\0';
    return 0;
}

SUSPENDS static int make_linked(struct new_volume *nv, const struct cfile *f, struct err *err)
{
    _cleanup_(freep) char *backing = path_relative(nv->dir, f->path);
    json_t *vols = json_pack("[{s:s, s:s}, {s:s, s:s}]", "vmid", nv->vmid, "stem", nv->stem, "vmid",
                             f->vol->vmid, "stem", f->vol->stem);
    int rc = backing ? new_volume_dirs(nv, err) : err_set(err, -ENOMEM, "out of memory");

    if (rc < 0) {
        json_decref(vols);
        return rc;
    }
    rc = op_intent(nv->op, "clone", json_pack("{s:o}", "vols", vols), err);
    if (rc == 0)
        rc = overlay_create(nv->op->pool, nv->tmp, backing, f->format, f->virtual_len, &f->st, err);
    if (rc == 0)
        rc = new_volume_publish(nv, err);
    if (rc < 0)
        new_volume_undo(nv);
    return rc;
}

SUSPENDS static int clone_linked(struct op *op, const struct vol_name *from, struct vol_name *to,
                                 struct err *err)
{
    struct vol_create_opts opts = {.extended_l2 = -1, .format = "qcow2"};
    struct new_volume nv = {0};
    struct cfile *f;
    int rc = find_element(op, from, &f, err);

    if (rc == 0)
        rc = refuse_current(f, from, err);
    if (rc == 0)
        rc = check_base(to, f, err);
    if (rc == 0)
        rc = new_volume_plan(op, to, &opts, &nv, err);
    if (rc == 0 && op->ctx->dry_run)
        op_say(op->ctx, "would make '%s', based on '%s'", nv.path, f->path);
    else if (rc == 0)
        rc = overlay_settle(f->path, f->format, err);
    if (rc == 0 && !op->ctx->dry_run)
        rc = make_linked(&nv, f, err);
    if (rc == 0 && !op->ctx->dry_run)
        new_volume_say(&nv, "cloned");
    new_volume_fini(&nv);
    return rc;
}

/* ---- full ---- */

/* Opens the chain that is copied; its image locks hold it when the volume's lock is given back, and
 * a lease where those reach no other host. */
SUSPENDS static int open_source(const struct vol_ctx *ctx, const struct vol_name *from,
                                struct chain **ret, struct disk_lease **ret_lease, struct err *err)
{
    struct cfile *f;
    struct op op;
    int rc = op_begin(ctx, from->pool, from, 1, &op, err);

    if (rc < 0)
        return rc;
    rc = find_element(&op, from, &f, err);
    if (rc == 0 && !f->snap && !f->vol->base) {
        rc = op_refuse_served(&op, f->vol, "copied as it is", err);
        if (rc < 0)
            err_prefix(err, rc, "take a snapshot and clone that");
    }
    if (rc == 0) {
        struct chain_opts opts = {.format = f->format};

        rc = chain_open(f->path, &opts, ret, err);
    }
    if (rc == 0 && !ctx->dry_run) {
        rc = copy_lease_take(op.pool, op.images, f->vol->vmid, f->vol->stem, ret_lease, err);
        if (rc < 0)
            chain_close(TAKE_PTR(*ret), NULL);
    }
    op_end(&op);
    return rc;
}

/* The lowest image of the chain is of the wanted kind: it can be copied as a file. */
static bool can_copy_lowest(const struct new_volume *nv, struct chain *src, bool chosen)
{
    const struct layer *layer = chain_layer(src, chain_depth(src) - 1);
    const struct pool *pool = nv->op->pool;
    struct image *img = layer_image(layer);

    if (name_form(nv->dir) == FORM_LV || name_form(layer_path(layer)) == FORM_LV)
        return false; /* lengths differ, and what was there before */
    if (strcmp(layer_format(layer), nv->format) != 0 || chosen || pool->preallocation ||
        pool->cluster_size || pool->extended_l2 == 1 || layer_len(layer) > chain_len(src))
        return false;
    if (!img)
        return layer_len(layer) % 512 == 0;
    return !image_has_journal(img) && image_header(img)->nb_snapshots == 0;
}

/* Shared blocks cost nothing; to copy data that is then written over would cost more than it saves.
 */
static bool share_lowest(struct new_volume *nv, struct chain *src)
{
    return file_share(layer_path(chain_layer(src, chain_depth(src) - 1)), nv->tmp);
}

SUSPENDS static int copy_as_file(struct new_volume *nv, const struct layer *layer, struct err *err)
{
    struct copy_meter meter = {.ctx = nv->op->ctx, .speed = nv->op->pool->bwlimit};
    struct stat st;

    if (stat(layer_path(layer), &st) == 0)
        meter.total = (uint64_t)st.st_blocks * 512;
    return file_copy(layer_path(layer), nv->tmp, &meter, err);
}

SUSPENDS static int make_full(struct new_volume *nv, struct chain *src, bool chosen,
                              struct err *err)
{
    int rc = new_volume_begin(nv, err);

    if (rc < 0)
        return rc;
    bool can = can_copy_lowest(nv, src, chosen);
    if (can && chain_depth(src) == 1)
        rc = copy_as_file(nv, chain_layer(src, 0), err);
    else if (can && share_lowest(nv, src))
        rc = new_volume_fill_above(nv, src, err);
    else
        rc = new_volume_fill(nv, src, err);
    if (rc == 0)
        rc = new_volume_publish(nv, err);
    if (rc < 0)
        new_volume_undo(nv);
    else
        tail_cut(nv->op->ctx, nv->op->pool, nv->path, false);
    return rc;
}

SUSPENDS static int clone_full(const struct vol_ctx *ctx, struct chain *src,
                               const struct vol_name *from, const struct vol_name *to,
                               const struct vol_create_opts *opts, struct err *err)
{
    bool chosen = opts->cluster_size || opts->extended_l2 >= 0 || opts->preallocation;
    struct new_volume nv = {0};
    struct op op;
    int rc = op_begin(ctx, to->pool, to, 1, &op, err);

    if (rc < 0)
        return rc;
    rc = new_volume_plan(&op, to, opts, &nv, err);
    if (rc == 0 && ctx->dry_run)
        op_say(ctx, "would copy '%s' to '%s'", layer_path(chain_layer(src, 0)), nv.path);
    else if (rc == 0)
        rc = make_full(&nv, src, chosen, err);
    if (rc == 0 && !ctx->dry_run)
        new_volume_say(&nv, "cloned");
    new_volume_fini(&nv);
    op_end(&op);
    return rc;
}

SUSPENDS static int begin_linked(const struct vol_ctx *ctx, const struct vol_name *from,
                                 const struct vol_name *to, struct err *err)
{
    _cleanup_(freep) struct vol_name *names = calloc(2, sizeof(*names));
    struct op op;
    int rc = names ? check_names(from, to, err) : err_set(err, -ENOMEM, "out of memory");

    if (rc < 0)
        return rc;
    names[0] = *to;
    names[1] = *from;
    rc = op_begin(ctx, from->pool, names, 2, &op, err);
    if (rc < 0)
        return rc;
    rc = clone_linked(&op, from, &names[0], err);
    op_end(&op);
    return rc;
}

SUSPENDS static void close_source(const struct vol_ctx *ctx, const struct vol_name *from)
{
    const struct pool *pool;

    if (config_pool(ctx->cfg, from->pool, &pool, NULL) == 0)
        vol_pool_close(pool);
}

int vol_clone(const struct vol_ctx *ctx, const struct vol_name *from, const struct vol_name *to,
              const struct vol_clone_opts *opts, struct err *err)
{
    struct disk_lease *lease = NULL;
    struct chain *src;

    if (!opts->full)
        return begin_linked(ctx, from, to, err);
    int rc = open_source(ctx, from, &src, &lease, err);
    if (rc < 0)
        return rc;
    rc = clone_full(ctx, src, from, to, &opts->create, err);
    chain_close(src, NULL);
    disk_lease_release(lease);
    close_source(ctx, from);
    return rc;
}
