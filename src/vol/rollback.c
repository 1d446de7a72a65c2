/*
 * Rolling a volume back to one of its snapshots: a new overlay on the snapshot takes the volume's
 * name.
 *
 *   idle                                              a kill after it leaves         recovery
 *   1 intent                                          nothing done                   undo
 *   2 overlay on the snapshot, hidden name "-new",    a file too many                undo
 *     durable, then renamed to "-0": complete
 *   3 (--keep) link current as snapshot T             two names of one image         undo
 *   4 rename overlay over current                     rolled back                    nothing left
 * to do
 *
 *   served: 1 to 3 as above, then
 *   4 blockdev-add, with what is below it             an unused node                 undo
 *   5 x-varve-rollback                                the server is on the overlay   finish
 *   6 rename overlay over current                     rolled back                    nothing left
 * to do
 *
 * Between 5 and 6 the guest writes to the overlay under its hidden name. If server and manager both
 * die there, the overlay tells: with anything written to it the rollback is finished, empty it is
 * undone (no caller was told of it, nothing is lost either way). The order 6 before 5 would take
 * the name away from the old image while the guest goes on writing to that.
 */
#include <stdio.h>
#include <string.h>
#include "base/check.h"
#include "blk/blk.h"
#include "vol/internal.h"

struct rollback {
    struct op *op;
    struct cvol *vol;
    struct cfile *to;
    char *dir, *cur, *fresh, *tmp, *kept; /* paths; kept: NULL without --keep */
    char node[32];
    struct remote *remote; /* NULL: idle */
    struct blk *hold;
};

SUSPENDS static void rollback_fini(struct rollback *rb)
{
    blk_close(rb->hold);
    remote_close(rb->remote);
    free(rb->dir);
    free(rb->cur);
    free(rb->fresh);
    free(rb->tmp);
    free(rb->kept);
}

static int fill_paths(struct rollback *rb, const char *dir, const char *stem, const char *kept,
                      const char *id)
{
    _cleanup_(freep) char *cur = file_join(dir, stem, "qcow2");

    snprintf(rb->node, sizeof(rb->node), "rb-%.16s", id);
    rb->dir = strdup(dir);
    rb->cur = cur ? path_join(dir, cur) : NULL;
    rb->kept = kept && *kept ? path_join(dir, kept) : NULL;
    if (asprintf(&rb->fresh, "%s/" OWN_PREFIX "%s-new", dir, id) < 0)
        rb->fresh = NULL;
    if (asprintf(&rb->tmp, "%s/" OWN_PREFIX "%s-0", dir, id) < 0)
        rb->tmp = NULL;
    return rb->dir && rb->cur && rb->fresh && rb->tmp && (rb->kept || !kept || !*kept) ? 0
                                                                                       : -ENOMEM;
}

/* A volume that has lost its current image may be rolled back: that is how its owner chooses. */
static int find_volume(struct rollback *rb, const struct vol_name *name, struct err *err)
{
    struct cvol *vol;
    int rc = catalog_find(rb->op->cat, name, &vol, err);

    if (rc < 0)
        return rc;
    rb->vol = vol;
    if (!vol->current && !vol->base)
        return 0;
    return op_volume_to_change(rb->op, name, "rolled back", &rb->vol, err);
}

static int find_snapshot(struct rollback *rb, const struct vol_name *name, struct err *err)
{
    struct cfile *to = cvol_snap(rb->vol, name->snap);

    if (!to)
        return err_set(err, -ENOENT, "%s:%s%s%s has no snapshot '%s'", name->pool, name->vmid,
                       *name->vmid ? "/" : "", name->name, name->snap);
    if (to->deleting)
        return err_set(err, -EBUSY, "the snapshot '%s' is being deleted", name->snap);
    if (to->bad || to->link_bad)
        return err_set(err, -EUCLEAN, "the snapshot '%s' cannot be used: %s", name->snap,
                       to->bad ? to->bad : to->link_bad);
    rb->to = to;
    return 0;
}

SUSPENDS static int plan(struct rollback *rb, const struct vol_name *name, const char *keep,
                         struct err *err)
{
    _cleanup_(freep) char *kept =
        keep ? snap_file(rb->op->images, keep, name->name, "qcow2") : NULL;
    int rc = find_volume(rb, name, err);

    if (rc == 0)
        rc = find_snapshot(rb, name, err);
    if (rc == 0 && keep)
        rc = vol_snap_name_check(keep, err);
    if (rc == 0 && keep)
        rc = rb->vol->current ? catalog_check_new_snap(rb->op->cat, rb->vol, keep, err)
                              : err_set(err, -ENOENT, "there is no current image to keep");
    if (rc == 0 && fill_paths(rb, rb->to->dir, rb->vol->stem, kept, rb->op->id) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    if (rc < 0 || rb->op->ctx->dry_run || !rb->vol->current)
        return rc;
    rc = remote_open(rb->op->cat, rb->vol, &rb->remote, err);
    if (rc == 0 && !rb->remote && keep) /* else it is thrown away, be it readable or not */
        rc = overlay_settle(rb->cur, rb->vol->current->format, err);
    else if (rc == 0 && !rb->remote)
        rc = overlay_settle(rb->to->path, rb->to->format, err);
    if (rc == 0 && !rb->remote)
        rc = overlay_hold(rb->cur, &rb->hold, err);
    return rc;
}

static int write_intent(const struct rollback *rb, struct err *err)
{
    const char *kept = rb->kept ? strrchr(rb->kept, '/') + 1 : "";
    json_t *vol =
        json_pack("{s:s, s:s, s:s}", "vmid", rb->vol->vmid, "stem", rb->vol->stem, "kept", kept);

    return op_intent(rb->op, "rollback", json_pack("{s:[o]}", "vols", vol), err);
}

SUSPENDS static int prepare(struct rollback *rb, struct err *err)
{
    _cleanup_(freep) char *backing = path_relative(rb->dir, rb->to->path);
    const struct stat *like = rb->vol->current ? &rb->vol->current->st : &rb->to->st;

    if (!backing)
        return err_set(err, -ENOMEM, "out of memory");
    int rc = overlay_create(rb->op->pool, rb->fresh, backing, rb->to->format, rb->to->virtual_len,
                            like, err);
    if (rc == 0)
        rc = store_rename(rb->fresh, rb->tmp, err);
    crash_point("rollback-prepared");
    if (rc == 0 && rb->kept)
        rc = store_link(rb->cur, rb->kept, err);
    crash_point("rollback-kept");
    return rc;
}

static int undo(struct rollback *rb, struct err *err)
{
    int rc = rb->kept && store_same_file(rb->cur, rb->kept) ? store_unlink(rb->kept, err) : 0;

    if (rc == 0)
        rc = store_unlink(rb->fresh, err);
    return rc == 0 ? store_unlink(rb->tmp, err) : rc;
}

static int take_name(struct rollback *rb, struct err *err)
{
    int rc = store_rename(rb->tmp, rb->cur, err);

    crash_point("rollback-switched");
    return rc;
}

SUSPENDS static int switch_server(struct rollback *rb, bool force, struct err *err)
{
    int rc = remote_add_node(rb->remote, rb->node, rb->tmp, true, err);

    crash_point("rollback-node-added");
    if (rc < 0)
        return rc;
    rc = remote_rollback(rb->remote, rb->node, force, err);
    crash_point("rollback-pivoted");
    if (rc < 0)
        remote_del_node(rb->remote, rb->node);
    return rc;
}

/* Snapshots that have come into the line below the disk are exported too. */
SUSPENDS static void export_line(struct rollback *rb)
{
    for (const struct cfile *f = rb->to; f && f->vol == rb->vol; f = f->parent) {
        _cleanup_(freep) char *node = NULL;

        if (remote_node(rb->remote, f->path, NULL, &node, NULL) == 0 && node)
            remote_export_snap(rb->remote, NULL, node, rb->vol->stem, f->snap);
    }
}

/* After a failure: undone if the server is surely on the old image, else left to recovery. */
SUSPENDS static int give_up(struct rollback *rb, int rc, struct err *err)
{
    if (rc == -EPIPE && rb->remote)
        return err_prefix(err, rc,
                          "the server died during the rollback; the next operation settles it");
    undo(rb, NULL);
    op_done(rb->op, NULL);
    return rc;
}

SUSPENDS static int run(struct rollback *rb, bool force, struct err *err)
{
    int rc = write_intent(rb, err);

    if (rc < 0)
        return rc;
    rc = prepare(rb, err);
    if (rc == 0 && rb->remote)
        rc = switch_server(rb, force, err);
    if (rc < 0)
        return give_up(rb, rc, err);
    rc = take_name(rb, err);
    if (rc < 0) /* a served disk is on the overlay already: recovery tries again */
        return rb->remote ? rc : give_up(rb, rc, err);
    if (rb->kept)
        taken_set(rb->kept, taken_now());
    if (rb->remote)
        rc = remote_rename(rb->remote, rb->node, rb->cur, err);
    if (rc == 0 || rc == -EPIPE)
        rc = op_done(rb->op, err);
    if (rc == 0 && rb->remote)
        export_line(rb);
    return rc;
}

int vol_rollback(const struct vol_ctx *ctx, const struct vol_name *name, const char *keep,
                 bool force, struct err *err)
{
    struct op op;
    struct rollback rb = {.op = &op};
    int rc = op_begin(ctx, name->pool, name, 1, &op, err);

    if (rc < 0)
        return rc;
    rc = plan(&rb, name, keep, err);
    if (rc == 0 && ctx->dry_run)
        op_say(ctx, "would roll '%s' back to '%s'", rb.cur, rb.to->name);
    else if (rc == 0)
        rc = run(&rb, force, err);
    if (rc == 0 && !ctx->dry_run)
        op_say(ctx, "%s rolled back to %s%s%s", name->name, name->snap,
               keep ? ", its state kept as " : "", keep ? keep : "");
    _cleanup_(freep) char *kept = rc == 0 && rb.kept ? strdup(rb.kept) : NULL;
    rollback_fini(&rb);
    if (kept && !ctx->dry_run)
        tail_cut(ctx, op.pool, kept, true);
    op_end(&op);
    return rc;
}

/* ---- recovery ---- */

/* The server is on the overlay if it knows the overlay's node and the old image no longer. */
SUSPENDS static int server_is_on_overlay(struct rollback *rb, bool *ret, struct err *err)
{
    _cleanup_(freep) char *old = NULL;
    bool there, linked;
    int rc = remote_node_state(rb->remote, rb->node, &there, &linked, err);

    if (rc == 0)
        rc = remote_node(rb->remote, rb->cur, rb->node, &old, err);
    if (rc == 0)
        *ret = there && !old;
    return rc;
}

SUSPENDS static int settle(struct rollback *rb, const struct intent *intent, const char **ret_how,
                           struct err *err)
{
    bool forward = false;
    int rc = 0;

    *ret_how = "undone";
    if (store_exists(rb->tmp) && rb->remote) {
        rc = server_is_on_overlay(rb, &forward, err);
        if (rc == 0 && !forward)
            remote_del_node(rb->remote, rb->node);
    } else if (store_exists(rb->tmp)) {
        bool empty = true;

        rc = overlay_is_empty(rb->tmp, &empty, err);
        forward = !empty;
    } else {
        forward = store_exists(rb->cur) && !store_exists(rb->fresh) &&
                  !(rb->kept && store_same_file(rb->cur, rb->kept));
    }
    if (rc == 0 && !forward)
        return undo(rb, err);
    *ret_how = "finished";
    /* somebody may have opened the old image meanwhile: it keeps its name then */
    if (rc == 0 && store_exists(rb->tmp) && !rb->remote && store_exists(rb->cur))
        rc = overlay_hold(rb->cur, &rb->hold, err);
    if (rc == 0 && store_exists(rb->tmp))
        rc = take_name(rb, err);
    if (rc == 0 && rb->kept)
        taken_set_not_before(rb->kept, intent);
    if (rc == 0 && rb->remote)
        remote_rename(rb->remote, rb->node, rb->cur, NULL); /* unknown to a server started since */
    return rc;
}

int rollback_recover(const struct vol_ctx *ctx, const struct pool *pool, const char *images,
                     struct intent *intent, struct err *err)
{
    const json_t *vol = json_array_get(json_object_get(intent->json, "vols"), 0);
    const char *stem = intent_name(vol, "stem"), *kept = intent_str(vol, "kept");
    _cleanup_(freep) char *dir = intent_dir(images, vol), *qmp = NULL;
    struct rollback rb = {0};
    struct vol_name name = {0};
    const char *how = "";

    if (!dir || !stem || (*kept && !intent_name(vol, "kept")))
        return err_set(err, -EUCLEAN, "the intent is damaged");
    snprintf(name.pool, sizeof(name.pool), "%s", pool->id);
    snprintf(name.vmid, sizeof(name.vmid), "%s", intent_str(vol, "vmid"));
    snprintf(name.name, sizeof(name.name), "%.255s", stem);
    qmp = vol_qmp_path(&name);
    int rc = !qmp || fill_paths(&rb, dir, stem, kept, intent->id) < 0
                 ? err_set(err, -ENOMEM, "out of memory")
                 : 0;
    if (rc == 0)
        rc = remote_open_path(qmp, &rb.remote, err);
    if (rc == 0)
        rc = settle(&rb, intent, &how, err);
    if (rc == 0)
        op_say(ctx, "an interrupted rollback of %s was %s", stem, how);
    blk_close(TAKE_PTR(rb.hold));
    if (rc == 0 && rb.kept && store_exists(rb.kept))
        tail_cut(ctx, pool, rb.kept, true);
    rollback_fini(&rb);
    return rc;
}
