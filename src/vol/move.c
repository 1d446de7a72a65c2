/*
 * Moving an idle volume, with all its snapshots, to another storage, or copying it there.
 *
 *   1 intent "move-in" in the target                 nothing done                        undo
 *   2 all files under hidden names, durable          files too many                      undo
 *   3 (--delete) intent "move-out" in the source     the same                            undo
 *   4 link each file to its name, current last       some snapshots                      undo, or
 *                                                                                        finish
 *   5 (--delete) unlink the source's files           the volume is in the target         finish
 *   6 (--delete) intent "move-out" removed
 *   7 unlink the hidden names, intent removed
 *
 * Between directories files are copied as they are; where a volume group is at one end, each image
 * is made anew (move_image.c). Names differ then: each intent has those of its own side.
 *
 * The target is decided by its current element: with its name there the move is finished.
 *
 * Both intents bear one id. "move-out" begins later and ends earlier than "move-in", so it always
 * has a partner to ask; whoever recovers either settles both. Only with "move-out" there is the
 * source ever deleted: it keeps the source from being opened, and so from being changed, between
 * the copying and the deletion. Where the target cannot be reached the source may take it away and
 * stay.
 */
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "base/check.h"
#include "vol/move.h"

/* ---- plan ---- */

SUSPENDS static int plan_source(struct move *m, const struct vol_name *name, struct err *err)
{
    int rc = op_volume(&m->src, name, &m->vol, err);

    if (rc == 0 && m->delete)
        rc = op_refuse_used(&m->src, m->vol, "moved away", err);
    if (rc == 0)
        rc = op_refuse_served(&m->src, m->vol, "moved", err);
    /* its volume is locked: what is known of it stays so */
    pool_let_go(&m->src.pool_lock);
    return rc;
}

static int plan_target(struct move *m, struct err *err)
{
    const struct pool *pool = m->dst.pool;
    const struct cvol *vol = m->vol;
    const char *vmid = m->there->vmid;
    int rc = 0;

    if (!pool->images && !pool->rootdir)
        rc = err_set(err, -EPERM, "the storage '%s' is not for volumes: its content is '%s'",
                     pool->id, pool->content ? pool->content : "");
    if (rc == 0)
        rc = catalog_check_new_vol(m->dst.cat, vmid, vol->stem, err);
    vec_for_each(it, &vol->snaps) {
        if (rc == 0)
            rc = catalog_check_new_snap_file(m->dst.cat, vmid, vol->stem, (*it)->snap, err);
    }
    if (rc < 0)
        return rc;
    m->dir = *vmid ? path_join(m->dst.images, vmid) : strdup(m->dst.images);
    return m->dir ? move_plan_files(m, err) : err_set(err, -ENOMEM, "out of memory");
}

static uint64_t slower(uint64_t a, uint64_t b)
{
    return a && b ? MIN(a, b) : a + b;
}

/* ---- steps ---- */

static json_t *file_names(const struct move *m, bool there)
{
    json_t *files = json_array();

    vec_for_each(f, &m->files)
        json_array_append_new(files, json_string(there ? strrchr(f->to, '/') + 1 : f->src->name));
    return files;
}

static int write_intent(struct move *m, struct err *err)
{
    int rc = store_mkdir(m->dst.images, err);

    if (rc == 0)
        rc = store_mkdir(m->dir, err);
    if (rc < 0)
        return rc;
    return op_intent(&m->dst, "move-in",
                     json_pack("{s:[{s:s, s:s}], s:s, s:b, s:o}", "vols", "vmid", m->there->vmid,
                               "stem", m->vol->stem, "source", m->src.pool->id, "delete", m->delete,
                               "files", file_names(m, true)),
                     err);
}

/* Under the id of the other one. */
static int write_source_intent(struct move *m, struct err *err)
{
    snprintf(m->src.id, sizeof(m->src.id), "%s", m->dst.id);
    return op_intent(&m->src, "move-out",
                     json_pack("{s:[{s:s, s:s}], s:s, s:o}", "vols", "vmid", m->vol->vmid, "stem",
                               m->vol->stem, "target", m->dst.pool->id, "files",
                               file_names(m, false)),
                     err);
}

static int publish(struct move *m, struct err *err)
{
    int rc = 0;

    vec_for_each(f, &m->files) {
        if (rc == 0)
            rc = store_link(f->tmp, f->to, err);
        crash_point("move-published");
    }
    return rc;
}

/* What LVs took ahead while they were written. */
SUSPENDS static void cut_tails(const struct move *m)
{
    vec_for_each(f, &m->files)
        tail_cut(m->ctx, m->dst.pool, f->to, f->src->snap || f->src->vol->base);
}

static int drop_hidden(struct move *m, struct err *err)
{
    int rc = 0;

    vec_for_each(f, &m->files) {
        if (rc == 0)
            rc = store_unlink(f->tmp, err);
        crash_point("move-hidden-unlinked");
    }
    return rc;
}

static void undo(struct move *m)
{
    vec_for_each(f, &m->files)
        if (store_same_file(f->tmp, f->to) && store_unlink(f->to, NULL) < 0)
            return;
    if (drop_hidden(m, NULL) < 0 || (m->src.intent && op_done(&m->src, NULL) < 0))
        return;
    op_done(&m->dst, NULL);
    if (*m->there->vmid)
        rmdir(m->dir); /* stays if anything is in it */
}

SUSPENDS static int copy_all(struct move *m, struct err *err)
{
    int rc = move_compare_bases(m, err);

    if (rc == 0)
        rc = move_copy_files(m, err);
    if (rc == 0 && m->delete)
        rc = write_source_intent(m, err);
    return rc == 0 ? publish(m, err) : rc;
}

static int delete_source(struct move *m, struct err *err)
{
    const char *dir = m->vol->current->dir;
    int rc = destroy_files(dir, json_object_get(m->src.intent->json, "files"), NULL, err);

    if (rc == 0)
        rc = op_done(&m->src, err);
    if (rc == 0)
        op_forget_volume(&m->src, m->vol->vmid, m->vol->stem);
    if (rc == 0 && *m->vol->vmid)
        rmdir(dir); /* stays if anything is in it */
    return rc;
}

SUSPENDS static int run(struct move *m, struct err *err)
{
    int rc = move_hold_files(m, err);

    if (rc == 0)
        rc = write_intent(m, err);
    if (rc < 0)
        return rc;
    rc = copy_all(m, err);
    if (rc < 0) {
        undo(m);
        return rc;
    }
    cut_tails(m);
    if (m->delete)
        rc = delete_source(m, err);
    if (rc < 0)
        return err_prefix(err, rc, "the volume is in '%s'; the next operation on it goes on",
                          m->dst.pool->id);
    rc = drop_hidden(m, err);
    return rc == 0 ? op_done(&m->dst, err) : rc;
}

static void say_done(struct move *m)
{
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    _cleanup_(freep) char *id = NULL;

    if (catalog_scan(m->dst.pool, &cat, NULL) == 0) {
        const struct cvol *vol = catalog_vol(cat, m->there->vmid, m->vol->stem, m->vol->format);

        id = vol ? cvol_id(cat, vol) : NULL;
    }
    op_say(m->ctx, "%s and %zu snapshots %s", id ? id : m->vol->stem, m->vol->snaps.len,
           m->delete ? "moved" : "copied; the source is still there");
}

SUSPENDS static int move_to(struct move *m, struct err *err)
{
    int rc = op_begin(m->ctx, m->there->pool, m->there, 1, &m->dst, err);

    if (rc < 0)
        return rc;
    m->meter = (struct copy_meter){.ctx = m->ctx,
                                   .speed = slower(m->src.pool->bwlimit, m->dst.pool->bwlimit)};
    rc = plan_target(m, err);
    if (rc == 0 && m->ctx->dry_run)
        op_say(m->ctx, "would copy '%s' and %zu snapshots, %s%llu MiB, to '%s'%s",
               m->vol->current->path, m->vol->snaps.len, m->as_images ? "at most " : "",
               (unsigned long long)m->meter.total >> 20, m->dir,
               m->delete ? " and delete them here" : "");
    else if (rc == 0)
        rc = run(m, err);
    if (rc == 0 && !m->ctx->dry_run)
        say_done(m);
    move_files_fini(m);
    free(m->dir);
    op_end(&m->dst);
    return rc;
}

static int plan_name(struct move *m, const struct vol_name *name, const char *pool, struct err *err)
{
    const struct pool *to;
    int rc = config_pool(m->ctx->cfg, pool, &to, err);

    if (rc < 0)
        return rc;
    *m->there = *name;
    snprintf(m->there->pool, sizeof(m->there->pool), "%s", pool);
    m->as_images = m->src.pool->type == POOL_LVM || to->type == POOL_LVM;
    return move_name_there(m->src.pool, to, name->vmid, name->name, m->there, err);
}

int vol_move(const struct vol_ctx *ctx, const struct vol_name *name, const char *pool,
             const struct vol_move_opts *opts, struct err *err)
{
    _cleanup_(freep) struct vol_name *there = malloc(sizeof(*there));
    _cleanup_(freep) struct move *m = calloc(1, sizeof(*m));

    if (!there || !m)
        return err_set(err, -ENOMEM, "out of memory");
    if (strcmp(name->pool, pool) == 0)
        return err_set(err, -EINVAL, "the volume is in the storage '%s': see 'varve rename'", pool);
    m->ctx = ctx;
    m->there = there;
    m->delete = opts->delete;
    m->flatten = opts->flatten;
    int rc = op_begin(ctx, name->pool, name, 1, &m->src, err);
    if (rc < 0)
        return rc;
    rc = plan_source(m, name, err);
    if (rc == 0)
        rc = plan_name(m, name, pool, err);
    if (rc == 0)
        rc = move_to(m, err);
    op_end(&m->src);
    return rc;
}
