/*
 * Taking a snapshot: of one volume, or of several of one guest at once.
 *
 *   step                          a kill after it leaves                              recovery
 *   1 intent                      nothing done                                       undo
 *   2 overlay under a hidden name one file too many                                  undo
 *   3 link current as snapshot    two names of the old image                         undo
 *   4 (served) blockdev-add       an unused node in the server                       undo
 *   5 rename overlay to current   the chain: reads the same as before                finish
 *   6 (served) blockdev-snapshot  the same, the server writes to the overlay         finish
 *   7 (raw) unlink the raw name   the same                                           finish
 *   8 intent removed
 *
 * Between 5 and 6 the server still writes to the old image while the current name is the empty
 * overlay on top of it: a server that is killed and started there by name reads everything. The
 * other order would leave the guest's newest writes in a file under a hidden name.
 *
 * Several volumes: 1-4 for all, then 5 for all, then all servers are held, so that no disk answers
 * a write which another one's snapshot could not know of, then 6 for all at once; as soon as one of
 * them has passed 5, recovery finishes all. Once the servers are pivoting, one that fails keeps its
 * volume without the snapshot while the others have it; the error says so.
 */
#include <stdio.h>
#include <string.h>
#include "base/check.h"
#include "blk/blk.h"
#include "rt/wait.h"
#include "vol/internal.h"

struct snap_vol {
    struct op *op;
    const struct vol_name *name;
    struct cvol *vol;
    struct stat like; /* of the image that becomes the snapshot */
    char *cur, *tmp;  /* paths: current before, overlay in the making */
    char *snap, *top; /* paths: snapshot, current after */
    char node[32];
    char *top_node;
    struct remote *remote; /* NULL: idle */
    struct blk *hold;      /* idle: nobody opens the image meanwhile */
    bool added, switched, held, pivoted;
    struct err err;
};

static void snap_vol_fini(struct snap_vol *sv) SUSPENDS_UNCHECKED
{
    free(sv->cur);
    free(sv->tmp);
    free(sv->snap);
    free(sv->top);
    free(sv->top_node);
    remote_close(sv->remote);
}

static bool is_raw(const struct snap_vol *sv)
{
    return strcmp(sv->cur, sv->top) != 0;
}

/* Paths and node name of volume i of an operation. */
static int fill_paths(struct snap_vol *sv, const char *dir, const char *cur, const char *snap,
                      const char *stem, const char *id, unsigned i)
{
    _cleanup_(freep) char *top = file_join(dir, stem, "qcow2");

    snprintf(sv->node, sizeof(sv->node), "ov-%.16s-%u", id, i % 1000);
    sv->cur = path_join(dir, cur);
    sv->snap = path_join(dir, snap);
    sv->top = top ? path_join(dir, top) : NULL;
    if (asprintf(&sv->tmp, "%s/" OWN_PREFIX "%s-%u", dir, id, i) < 0)
        sv->tmp = NULL;
    return sv->cur && sv->snap && sv->top && sv->tmp ? 0 : -ENOMEM;
}

SUSPENDS static int plan(struct op *op, const struct vol_name *name, unsigned i,
                         struct snap_vol *sv, struct err *err)
{
    int rc = vol_snap_name_check(name->snap, err);

    sv->op = op;
    sv->name = name;
    if (rc == 0)
        rc = op_volume_to_change(op, name, "snapshotted", &sv->vol, err);
    if (rc == 0)
        rc = catalog_check_new_snap(op->cat, sv->vol, name->snap, err);
    if (rc < 0)
        return rc;
    struct cfile *cur = sv->vol->current;
    _cleanup_(freep) char *snap = snap_file(cur->dir, name->snap, sv->vol->stem, cur->format);
    sv->like = cur->st;
    if (!snap || fill_paths(sv, cur->dir, cur->name, snap, sv->vol->stem, op->id, i) < 0)
        return err_set(err, -ENOMEM, "out of memory");
    if (is_raw(sv) && store_exists(sv->top))
        return err_set(err, -EEXIST, "'%s' is there already: the volume's next name", sv->top);
    if (op->ctx->dry_run)
        return 0;
    rc = remote_open(op->cat, sv->vol, &sv->remote, err);
    if (rc == 0 && sv->remote)
        rc = remote_node(sv->remote, sv->cur, NULL, &sv->top_node, err);
    else if (rc == 0)
        rc = overlay_settle(cur->path, cur->format, err);
    if (rc == 0 && !sv->remote)
        rc = overlay_hold(cur->path, &sv->hold, err);
    return rc;
}

static int write_intent(struct op *op, const struct snap_vol *svs, unsigned nr, struct err *err)
{
    json_t *vols = json_array();

    for (unsigned i = 0; i < nr && vols; i++) {
        const struct cvol *v = svs[i].vol;
        _cleanup_(freep) char *snap =
            snap_file(v->current->dir, svs[i].name->snap, v->stem, v->current->format);

        json_array_append_new(vols, json_pack("{s:s, s:s, s:s, s:s, s:s}", "vmid", v->vmid, "stem",
                                              v->stem, "cur", v->current->name, "snap_file",
                                              snap ? snap : "", "snap", svs[i].name->snap));
    }
    return op_intent(op, "snapshot", json_pack("{s:o}", "vols", vols), err);
}

/* Steps 2 to 4. */
SUSPENDS static int prepare(struct snap_vol *sv, struct err *err)
{
    _cleanup_(freep) char *dir = path_dir(sv->snap);
    _cleanup_(freep) char *backing = dir ? path_relative(dir, sv->snap) : NULL;
    const struct cfile *cur = sv->vol->current;

    if (!backing)
        return err_set(err, -ENOMEM, "out of memory");
    int rc = overlay_create(sv->op->pool, sv->tmp, backing, cur->format, cur->virtual_len,
                            &sv->like, err);
    if (rc == 0)
        rc = store_link(sv->cur, sv->snap, err);
    crash_point("snapshot-linked");
    if (rc == 0 && sv->remote) {
        rc = remote_add_node(sv->remote, sv->node, sv->tmp, false, err);
        sv->added = rc == 0;
        crash_point("snapshot-node-added");
    }
    return rc;
}

/* Step 5. Asked right before: a server that was started anew meanwhile has the old image open,
 * under a name that would no longer be its. */
SUSPENDS static int switch_names(struct snap_vol *sv, struct err *err)
{
    bool there = true, linked;
    int rc = sv->remote ? remote_node_state(sv->remote, sv->node, &there, &linked, err) : 0;

    if (rc == 0 && !there)
        rc = err_set(err, -ESTALE, "the server of '%s' was started anew", sv->cur);
    if (rc == 0)
        rc = store_rename(sv->tmp, sv->top, err);
    sv->switched = rc == 0;
    crash_point("snapshot-switched");
    if (rc == 0 && sv->remote)
        rc = remote_rename(sv->remote, sv->node, sv->top, err);
    if (rc == 0 && sv->remote)
        rc = remote_rename(sv->remote, sv->top_node, sv->snap, err);
    if (rc != -EPIPE || !sv->switched)
        return rc;
    /* The server has died: one that was started since has the overlay open. There is no way back.
     */
    sv->pivoted = true;
    return 0;
}

SUSPENDS static int hold(void *arg)
{
    struct snap_vol *sv = arg;
    int rc = remote_hold(sv->remote, &sv->err);

    sv->held = rc == 0;
    return rc == -EPIPE ? 0 : rc; /* a dead server writes nothing more: see pivot */
}

/* Step 6. A server that dies here leaves what its next start reads rightly. */
SUSPENDS static int pivot(void *arg)
{
    struct snap_vol *sv = arg;
    int rc = remote_snapshot(sv->remote, sv->top_node, sv->node, sv->held, &sv->err);

    sv->pivoted = rc == 0 || rc == -EPIPE;
    sv->held &= rc != 0;
    crash_point("snapshot-pivoted");
    return sv->pivoted ? 0 : rc;
}

/* One child a volume that is served and has not pivoted. */
SUSPENDS static int each_served(struct snap_vol *svs, unsigned nr, co_group_fn *fn, struct err *err)
{
    struct co_group group;
    int rc = 0;

    co_group_init(&group);
    for (unsigned i = 0; i < nr && rc == 0; i++)
        if (svs[i].remote && !svs[i].pivoted)
            rc = co_group_spawn(&group, fn, &svs[i]);
    int first = co_group_wait(&group);
    if (rc == 0)
        rc = first;
    for (unsigned i = 0; i < nr && rc < 0; i++)
        if (svs[i].err.rc && !svs[i].pivoted)
            return err_set(err, rc, "%s", err_text(&svs[i].err));
    return rc;
}

/* Several disks stand still at one instant before the first of them is switched. */
SUSPENDS static int pivot_all(struct snap_vol *svs, unsigned nr, struct err *err)
{
    unsigned served = 0;

    for (unsigned i = 0; i < nr; i++)
        served += svs[i].remote && !svs[i].pivoted;
    int rc = served > 1 ? each_served(svs, nr, hold, err) : 0;
    crash_point("snapshot-held");
    if (rc == 0)
        rc = each_served(svs, nr, pivot, err);
    for (unsigned i = 0; i < nr; i++)
        if (svs[i].held)
            remote_release(svs[i].remote);
    return rc;
}

/* Back to before the operation. A volume whose server has pivoted stays. */
SUSPENDS static void undo(struct snap_vol *sv)
{
    if (sv->pivoted)
        return;
    if (sv->switched && is_raw(sv))
        store_unlink(sv->top, NULL);
    else if (sv->switched)
        store_rename(sv->snap, sv->top, NULL);
    if (sv->remote && sv->switched)
        remote_rename(sv->remote, sv->top_node, sv->cur, NULL);
    if (sv->remote && sv->added)
        remote_del_node(sv->remote, sv->node);
    if (store_same_file(sv->cur, sv->snap))
        store_unlink(sv->snap, NULL);
    store_unlink(sv->tmp, NULL);
}

/* Step 7, and what is no matter of soundness. */
SUSPENDS static int finish(struct snap_vol *sv, struct err *err)
{
    int rc = 0;

    if (is_raw(sv)) {
        rc = store_unlink(sv->cur, err);
        if (rc == 0)
            rc = store_set_mode(sv->snap, 0444, err);
        crash_point("snapshot-raw-unlinked");
    }
    return rc;
}

static void report(struct snap_vol *sv) SUSPENDS_UNCHECKED
{
    const struct vol_ctx *ctx = sv->op->ctx;

    if (sv->remote)
        remote_export_snap(sv->remote, ctx, sv->top_node, sv->vol->stem, sv->name->snap);
    op_say(ctx, "snapshot %s@%s taken%s", sv->vol->stem, sv->name->snap,
           sv->remote ? " (served)" : "");
    if (is_raw(sv))
        op_say(ctx,
               "the volume is now '%s'; other configurations that name '%s' have to be changed",
               sv->top, sv->cur);
}

SUSPENDS static int run(struct op *op, struct snap_vol *svs, unsigned nr, struct err *err)
{
    int rc = write_intent(op, svs, nr, err);

    for (unsigned i = 0; i < nr && rc == 0; i++)
        rc = prepare(&svs[i], err);
    for (unsigned i = 0; i < nr && rc == 0; i++)
        rc = switch_names(&svs[i], err);
    if (rc == 0)
        rc = pivot_all(svs, nr, err);
    if (rc < 0) {
        unsigned kept = 0;

        for (unsigned i = 0; i < nr; i++) {
            kept += svs[i].pivoted;
            undo(&svs[i]);
        }
        if (kept)
            err_prefix(err, rc, "%u of %u volumes have the snapshot, the others do not", kept, nr);
        op_done(op, NULL);
        return rc;
    }
    struct timespec now = taken_now();
    for (unsigned i = 0; i < nr && rc == 0; i++) {
        taken_set(svs[i].snap, now);
        rc = finish(&svs[i], err);
    }
    if (rc == 0)
        rc = op_done(op, err);
    for (unsigned i = 0; i < nr && rc == 0; i++)
        report(&svs[i]);
    return rc;
}

static int check_names(const struct vol_name *names, unsigned nr, struct err *err)
{
    for (unsigned i = 0; i < nr; i++) {
        if (strcmp(names[i].pool, names[0].pool) != 0)
            return err_set(err, -EINVAL,
                           "volumes that are snapshotted together must lie in one storage");
        if (strcmp(names[i].snap, names[0].snap) != 0)
            return err_set(err, -EINVAL,
                           "volumes that are snapshotted together get one snapshot name");
        for (unsigned j = 0; j < i; j++)
            if (strcmp(names[i].vmid, names[j].vmid) == 0 &&
                strcmp(names[i].name, names[j].name) == 0)
                return err_set(err, -EINVAL, "the volume '%s' is given twice", names[i].name);
    }
    return nr ? 0 : err_set(err, -EINVAL, "no volume is given");
}

int vol_snapshot(const struct vol_ctx *ctx, const struct vol_name *names, unsigned nr,
                 struct err *err)
{
    struct op op;
    int rc = check_names(names, nr, err);

    if (rc == 0)
        rc = op_begin(ctx, names[0].pool, names, nr, &op, err);
    if (rc < 0)
        return rc;
    struct snap_vol *svs = calloc(nr, sizeof(*svs));
    if (!svs)
        rc = err_set(err, -ENOMEM, "out of memory");
    for (unsigned i = 0; i < nr && rc == 0; i++)
        rc = plan(&op, &names[i], i, &svs[i], err);
    if (rc == 0 && ctx->dry_run)
        for (unsigned i = 0; i < nr; i++)
            op_say(ctx, "would take the snapshot '%s'", svs[i].snap);
    else if (rc == 0)
        rc = run(&op, svs, nr, err);
    for (unsigned i = 0; svs && i < nr; i++) {
        blk_close(TAKE_PTR(svs[i].hold));
        if (rc == 0 && !ctx->dry_run)
            tail_cut(ctx, op.pool, svs[i].snap, true);
        snap_vol_fini(&svs[i]);
    }
    free(svs);
    op_end(&op);
    return rc;
}

/* ---- recovery ---- */

static int plan_again(const char *images, const struct intent *in, const json_t *vol, unsigned i,
                      struct snap_vol *sv)
{
    const char *cur = intent_name(vol, "cur"), *snap = intent_name(vol, "snap_file");
    const char *stem = intent_name(vol, "stem");
    _cleanup_(freep) char *dir = intent_dir(images, vol);

    if (!dir || !cur || !snap || !stem)
        return -EUCLEAN;
    return fill_paths(sv, dir, cur, snap, stem, in->id, i);
}

SUSPENDS static int find_server(const struct pool *pool, const json_t *vol, struct snap_vol *sv,
                                struct err *err)
{
    struct vol_name name = {0};

    snprintf(name.pool, sizeof(name.pool), "%s", pool->id);
    snprintf(name.vmid, sizeof(name.vmid), "%s", intent_str(vol, "vmid"));
    snprintf(name.name, sizeof(name.name), "%.255s", intent_str(vol, "stem"));
    _cleanup_(freep) char *path = vol_qmp_path(&name);
    return path ? remote_open_path(path, &sv->remote, err) : err_set(err, -ENOMEM, "out of memory");
}

/* A server that was not restarted meanwhile knows the overlay's node and may still write to the old
 * image; one that was has opened the overlay by its name. */
SUSPENDS static int pivot_again(struct snap_vol *sv, struct err *err)
{
    bool there, linked;
    int rc = remote_node_state(sv->remote, sv->node, &there, &linked, err);

    if (rc < 0 || !there || linked)
        return rc;
    rc = remote_node(sv->remote, sv->snap, sv->node, &sv->top_node, err);
    if (rc == 0 && !sv->top_node)
        rc = remote_node(sv->remote, sv->cur, sv->node, &sv->top_node, err);
    if (rc == 0 && !sv->top_node)
        rc = err_set(err, -ENOENT, "the server of '%s' has neither the old nor the new image open",
                     sv->top);
    if (rc == 0)
        rc = remote_rename(sv->remote, sv->node, sv->top, err);
    if (rc == 0)
        rc = remote_rename(sv->remote, sv->top_node, sv->snap, err);
    if (rc == 0)
        rc = remote_snapshot(sv->remote, sv->top_node, sv->node, false, err);
    return rc;
}

/* Somebody may have opened the image since the operation was killed: it keeps its name then. */
SUSPENDS static int redo(struct snap_vol *sv, struct err *err)
{
    bool loses_name = store_exists(sv->tmp) || is_raw(sv);
    int rc = 0;

    if (!sv->remote && loses_name && store_exists(sv->cur))
        rc = overlay_hold(sv->cur, &sv->hold, err);
    if (rc == 0 && store_exists(sv->tmp))
        rc = store_rename(sv->tmp, sv->top, err);
    if (rc == 0 && sv->remote)
        rc = pivot_again(sv, err);
    if (rc == 0)
        rc = finish(sv, err);
    blk_close(TAKE_PTR(sv->hold));
    return rc;
}

SUSPENDS static int undo_killed(struct snap_vol *sv, struct err *err)
{
    if (sv->remote)
        remote_del_node(sv->remote, sv->node);
    int rc = store_same_file(sv->cur, sv->snap) ? store_unlink(sv->snap, err) : 0;

    return rc == 0 ? store_unlink(sv->tmp, err) : rc;
}

static bool has_switched(const struct snap_vol *sv)
{
    return !store_exists(sv->tmp) && store_exists(sv->top) && store_exists(sv->snap) &&
           !store_same_file(sv->top, sv->snap);
}

int snapshot_recover(const struct vol_ctx *ctx, const struct pool *pool, const char *images,
                     struct intent *intent, struct err *err)
{
    const json_t *vols = json_object_get(intent->json, "vols");
    unsigned nr = (unsigned)json_array_size(vols);
    struct snap_vol *svs = calloc(nr + 1, sizeof(*svs));
    bool forward = false;
    int rc = svs ? 0 : err_set(err, -ENOMEM, "out of memory");

    for (unsigned i = 0; i < nr && rc == 0; i++) {
        if (plan_again(images, intent, json_array_get(vols, i), i, &svs[i]) < 0)
            rc = err_set(err, -EUCLEAN, "the intent is damaged");
        else
            rc = find_server(pool, json_array_get(vols, i), &svs[i], err);
        forward |= rc == 0 && has_switched(&svs[i]);
    }
    for (unsigned i = 0; i < nr && rc == 0; i++)
        rc = forward ? redo(&svs[i], err) : undo_killed(&svs[i], err);
    for (unsigned i = 0; i < nr && rc == 0 && forward; i++)
        taken_set_not_before(svs[i].snap, intent);
    for (unsigned i = 0; i < nr && rc == 0 && forward; i++)
        tail_cut(ctx, pool, svs[i].snap, true);
    if (rc == 0)
        op_say(ctx, "an interrupted snapshot was %s", forward ? "finished" : "undone");
    for (unsigned i = 0; svs && i < nr; i++)
        snap_vol_fini(&svs[i]);
    free(svs);
    return rc;
}
