/*
 * Destroying a snapshot of a volume. (The whole volume: destroy_volume.c.)
 *
 * A snapshot nothing stands on is unlinked. With one child of its own volume the two are merged, in
 * the direction that copies fewer bytes: the child into the snapshot (commit.c), or the snapshot
 * into the child (stream). Several children, or a clone in another volume, are refused; --flatten
 * streams into each.
 *
 *   stream                                        a kill after it leaves     recovery
 *   1 intent                                      nothing done               undo
 *   2 copy into each child; each child's header   some children stand lower  undo: the snapshot is
 *     names what the snapshot stood on                                       whole
 *   3 unlink the snapshot                         done                       finish
 */
#include <stdio.h>
#include <string.h>
#include "base/check.h"
#include "blk/blk.h"
#include "job/job.h"
#include "vol/internal.h"

struct destroy {
    struct op *op;
    const struct vol_name *name;
    struct cvol *vol;
    struct cfile *snap;
    struct cfile **kids;
    unsigned nr_kids;
    bool commit;
    uint64_t bytes; /* to copy */
};

/* ---- a snapshot: plan ---- */

/* Only a child of its own volume may be merged with the snapshot unasked: a clone would grow by all
 * that it shares. */
static bool is_shared(const struct destroy *d)
{
    return d->nr_kids > 1 || (d->nr_kids == 1 && d->kids[0]->vol != d->vol);
}

/* Names what stands on the snapshot, and what it would take to give each its own copy. */
static int refuse_shared(const struct destroy *d, struct err *err)
{
    char list[380] = "";
    size_t used = 0;

    for (unsigned i = 0; i < d->nr_kids && used < sizeof(list); i++) {
        _cleanup_(freep) char *id = cfile_id(d->op->cat, d->kids[i]);

        used += (size_t)snprintf(list + used, sizeof(list) - used, "%s%s", i ? ", " : "",
                                 id ? id : "?");
    }
    return err_set(err, -EBUSY,
                   "%u %s based on '%s': %s; --flatten would copy up to %llu MiB into each",
                   d->nr_kids, d->nr_kids == 1 ? "is" : "are", d->name->snap, list,
                   (unsigned long long)d->snap->st.st_blocks / 2048);
}

static int check_kids(const struct destroy *d, struct err *err)
{
    for (unsigned i = 0; i < d->nr_kids; i++) {
        const struct cfile *kid = d->kids[i];

        if (!kid->vol)
            return err_set(err, -EBUSY, "'%s' is based on the snapshot and belongs to no volume",
                           kid->path);
        if (kid->vol->broken)
            return err_set(err, -EUCLEAN, "'%s', based on the snapshot, is broken: %s",
                           kid->vol->stem, kid->vol->broken);
        if (kid->vol->base)
            return err_set(err, -EPERM,
                           "the base image '%s' stands on the snapshot and is never changed",
                           kid->path);
    }
    return 0;
}

/* An LV is longer than what is used of it. */
SUSPENDS static int size_of_served(struct remote *remote, const char *node, struct cfile *f,
                                   struct err *err)
{
    uint64_t bytes;
    int rc = remote_node_size(remote, node, &bytes, err);

    if (rc == 0 && bytes)
        f->st.st_blocks = (blkcnt_t)(bytes / 512);
    return rc;
}

/* Committing needs the snapshot to itself, and its file in the child's place. */
SUSPENDS static int choose(struct destroy *d, struct err *err)
{
    _cleanup_(remote_closep) struct remote *remote = NULL;
    _cleanup_(freep) char *node = NULL;
    struct cfile *kid = d->kids[0];
    struct job_direction dir;
    bool raw = strcmp(d->snap->format, "raw") == 0, last = d->vol->snaps.len == 1;

    if (d->nr_kids != 1 || kid->vol != d->vol) {
        d->bytes = (uint64_t)d->snap->st.st_blocks * 512 * d->nr_kids;
        return 0;
    }
    int rc = remote_open(d->op->cat, d->vol, &remote, err);
    if (rc == 0 && remote)
        rc = remote_node(remote, kid->path, NULL, &node, err);
    if (rc == 0 && node && name_form(kid->dir) == FORM_LV)
        rc = size_of_served(remote, node, kid, err);
    if (rc == 0)
        rc = merge_direction(kid, d->snap, node != NULL, &dir, err);
    if (rc < 0)
        return rc;
    d->commit =
        (raw && last) || dir.commit; /* a raw volume becomes one again with its last snapshot */
    d->bytes = d->commit ? dir.commit_bytes : dir.stream_bytes;
    return 0;
}

SUSPENDS static int plan(struct destroy *d, bool flatten, struct err *err)
{
    int rc = op_volume(d->op, d->name, &d->vol, err);

    if (rc < 0)
        return rc;
    if (d->vol->base)
        return err_set(err, -EPERM, "'%s' is a base image: it is never changed", d->vol->stem);
    d->snap = cvol_snap(d->vol, d->name->snap);
    if (!d->snap)
        return err_set(err, -ENOENT, "%s:%s%s%s has no snapshot '%s'", d->name->pool, d->name->vmid,
                       *d->name->vmid ? "/" : "", d->name->name, d->name->snap);
    d->kids = cfile_children(d->op->cat, d->snap, &d->nr_kids);
    if (!d->kids)
        return err_set(err, -ENOMEM, "out of memory");
    rc = check_kids(d, err);
    if (rc == 0 && is_shared(d) && !flatten)
        rc = refuse_shared(d, err);
    for (unsigned i = 0; i < d->nr_kids && rc == 0; i++) {
        bool locked = d->kids[i]->vol == d->vol;

        for (unsigned j = 0; j < i; j++)
            locked |= d->kids[j]->vol == d->kids[i]->vol;
        if (!locked)
            rc = op_lock_volume(d->op, d->kids[i]->vol->vmid, d->kids[i]->vol->stem, err);
    }
    return rc == 0 && d->nr_kids ? choose(d, err) : rc;
}

/* What nobody's server has open is open nowhere: asked before anything is recorded. */
SUSPENDS static int refuse_open_images(const struct destroy *d, struct err *err)
{
    bool served = false;

    for (unsigned i = 0; i < d->nr_kids; i++) {
        _cleanup_(remote_closep) struct remote *remote = NULL;
        _cleanup_(freep) char *node = NULL;
        int rc = remote_open(d->op->cat, d->kids[i]->vol, &remote, err);

        if (rc == 0 && remote)
            rc = remote_node(remote, d->kids[i]->path, NULL, &node, err);
        if (rc == 0 && !node)
            rc = overlay_refuse_open(d->kids[i]->path, err);
        if (rc < 0)
            return rc;
        served |= node != NULL;
    }
    return served ? 0 : overlay_refuse_open(d->snap->path, err);
}

/* ---- commit ---- */

static char *final_name(const struct destroy *d)
{
    const struct cfile *kid = d->kids[0];

    return kid->snap ? snap_file(kid->dir, kid->snap, d->vol->stem, d->snap->format)
                     : file_join(kid->dir, d->vol->stem, d->snap->format);
}

SUSPENDS static int run_commit(struct destroy *d, struct err *err)
{
    _cleanup_(freep) char *final = final_name(d);
    const struct cfile *kid = d->kids[0];
    struct commit_plan cp = {.ctx = d->op->ctx, .pool = d->op->pool};
    bool left;

    if (!final)
        return err_set(err, -ENOMEM, "out of memory");
    json_t *body =
        json_pack("{s:[{s:s, s:s}], s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:s, s:o}", "vols", "vmid",
                  d->vol->vmid, "stem", d->vol->stem, "vmid", d->vol->vmid, "stem", d->vol->stem,
                  "how", "commit", "snap", d->snap->snap, "snap_file", d->snap->name, "child_file",
                  kid->name, "child_snap", kid->snap ? kid->snap : "", "final_file", final, "taken",
                  taken_record(d->op->cat, d->kids, 1, final));
    int rc = op_intent(d->op, "destroy-snapshot", body, err);
    if (rc == 0 && commit_plan_fill(&cp, d->snap->dir, d->op->id, d->vol->stem, d->snap->snap,
                                    d->snap->name, kid->name, kid->snap, final) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    if (rc == 0)
        rc = remote_open(d->op->cat, d->vol, &cp.remote, err);
    if (rc == 0)
        rc = commit_run(&cp, true, &left, err);
    if (rc == 0)
        tail_cut(d->op->ctx, d->op->pool, cp.final, kid->snap);
    bool begun = cp.begun;
    remote_close(cp.remote);
    commit_plan_fini(&cp);
    if (rc < 0 && begun)
        return err_prefix(
            err, rc,
            "the snapshot is half merged and no longer usable; destroying it again goes on");
    if (d->op->intent)
        taken_restore(d->op->images, d->op->intent);
    int done_rc = op_done(d->op, rc < 0 ? NULL : err);
    return rc < 0 ? rc : done_rc;
}

/* ---- stream ---- */

SUSPENDS static int stream_served(struct destroy *d, struct remote *r, unsigned i,
                                  const char *child_node, const char *backing, struct err *err)
{
    _cleanup_(freep) char *snap_node = NULL, *base_node = NULL;
    unsigned nr = 0;
    char job[40];
    bool ready;

    snprintf(job, sizeof(job), "flatten-%.16s-%u", d->op->id, i);
    int rc = remote_node(r, d->snap->path, NULL, &snap_node, err);
    if (rc == 0 && d->snap->backing_path)
        rc = remote_node(r, d->snap->backing_path, NULL, &base_node, err);
    if (rc == 0 && (!snap_node || (d->snap->backing_path && !base_node)))
        rc = err_set(err, -ENOENT, "the volume's server does not have '%s' open", d->snap->path);
    if (rc == 0)
        rc = remote_unexport(r, snap_node, &nr, err);
    if (rc < 0)
        return rc;
    json_t *args =
        json_pack("{s:s, s:s, s:b}", "job-id", job, "device", child_node, "auto-dismiss", 0);
    if (args && base_node) {
        json_object_set_new(args, "base-node", json_string(base_node));
        json_object_set_new(args, "backing-file", json_string(backing));
    }
    if (args && d->op->pool->bwlimit)
        json_object_set_new(args, "speed", json_integer((json_int_t)d->op->pool->bwlimit));
    rc = remote_command(r, "block-stream", args, NULL, err);
    crash_point("stream-job-started");
    if (rc == 0)
        rc = remote_job_wait(r, d->op->ctx, job, false, &ready, err);
    if (rc < 0 && nr)
        remote_export_snap(r, NULL, snap_node, d->vol->stem, d->name->snap);
    return rc;
}

SUSPENDS static int stream_into(struct destroy *d, unsigned i, struct err *err)
{
    const struct cfile *kid = d->kids[i];
    _cleanup_(remote_closep) struct remote *remote = NULL;
    _cleanup_(freep) char *backing = NULL, *node = NULL;

    if (d->snap->backing_path) {
        backing = path_relative(kid->dir, d->snap->backing_path);
        if (!backing)
            return err_set(err, -ENOMEM, "out of memory");
    }
    int rc = remote_open(d->op->cat, kid->vol, &remote, err);
    if (rc == 0 && remote)
        rc = remote_node(remote, kid->path, NULL, &node, err);
    if (rc < 0)
        return rc;
    crash_point("stream-begin");
    rc = node ? stream_served(d, remote, i, node, backing, err)
              : merge_stream(d->op->ctx, d->op->pool, kid->path, backing, err);
    crash_point("stream-merged");
    return rc;
}

/* Nothing stands on it: one step, which needs no intent, and so no room. */
SUSPENDS static int run_unlink(struct destroy *d, struct err *err)
{
    int rc = overlay_refuse_open(d->snap->path, err);

    crash_point("destroy-unlink");
    return rc == 0 ? store_unlink(d->snap->path, err) : rc;
}

SUSPENDS static int run_stream(struct destroy *d, struct err *err)
{
    json_t *vols = json_pack("[{s:s, s:s}]", "vmid", d->vol->vmid, "stem", d->vol->stem);

    for (unsigned i = 0; i < d->nr_kids; i++)
        if (d->kids[i]->vol != d->vol)
            json_array_append_new(vols, json_pack("{s:s, s:s}", "vmid", d->kids[i]->vol->vmid,
                                                  "stem", d->kids[i]->vol->stem));
    int rc = op_intent(d->op, "destroy-snapshot",
                       json_pack("{s:o, s:s, s:s, s:s, s:s, s:s, s:o}", "vols", vols, "vmid",
                                 d->vol->vmid, "stem", d->vol->stem, "how", "stream", "snap",
                                 d->snap->snap, "snap_file", d->snap->name, "taken",
                                 taken_record(d->op->cat, d->kids, d->nr_kids, NULL)),
                       err);
    if (rc < 0)
        return rc;
    for (unsigned i = 0; i < d->nr_kids && rc == 0; i++)
        rc = stream_into(d, i, err);
    if (rc == 0)
        rc = overlay_refuse_open(d->snap->path, err);
    if (rc == 0)
        rc = store_unlink(d->snap->path, err);
    crash_point("stream-unlinked");
    for (unsigned i = 0; i < d->nr_kids && rc == 0; i++)
        tail_cut(d->op->ctx, d->op->pool, d->kids[i]->path, d->kids[i]->snap);
    taken_restore(d->op->images, d->op->intent);
    if (rc < 0) { /* the snapshot is whole; children that are done just stand lower */
        op_done(d->op, NULL);
        return rc;
    }
    return op_done(d->op, err);
}

SUSPENDS static int destroy_snapshot(struct op *op, const struct vol_name *name, bool flatten,
                                     struct err *err)
{
    struct destroy d = {.op = op, .name = name};
    int rc = plan(&d, flatten, err);

    if (rc == 0 && !op->ctx->dry_run)
        rc = refuse_open_images(&d, err);
    if (rc == 0)
        op_say(op->ctx, "%s snapshot %s@%s: %s %llu MiB",
               op->ctx->dry_run ? "would delete" : "deleting", d.vol->stem, name->snap,
               !d.nr_kids ? "nothing is based on it, copies"
               : d.commit ? "commit copies"
                          : "stream copies",
               (unsigned long long)(d.bytes >> 20));
    if (rc == 0 && !op->ctx->dry_run)
        rc = !d.nr_kids ? run_unlink(&d, err)
             : d.commit ? run_commit(&d, err)
                        : run_stream(&d, err);
    if (rc == 0 && !op->ctx->dry_run)
        op_say(op->ctx, "snapshot %s@%s deleted", d.vol->stem, name->snap);
    free(d.kids);
    return rc;
}

/* A deletion that was cut off is finished by op_begin: then there is nothing left to do. */
static bool being_deleted(const struct vol_ctx *ctx, const struct vol_name *name)
{
    _cleanup_(freep) char *images = NULL;
    struct intents intents = {0};
    const struct pool *pool;
    bool found = false;

    if (!*name->snap || config_pool(ctx->cfg, name->pool, &pool, NULL) < 0 ||
        store_open(pool, &images, NULL) < 0 || intents_load(images, false, &intents, NULL) < 0)
        return false;
    vec_for_each(it, &intents.list) {
        const json_t *json = (*it)->json;

        found |= strcmp(intent_op(*it), "destroy-snapshot") == 0 &&
                 strcmp(intent_str(json, "vmid"), name->vmid) == 0 &&
                 strcmp(intent_str(json, "stem"), name->name) == 0 &&
                 strcmp(intent_str(json, "snap"), name->snap) == 0;
    }
    intents_fini(&intents);
    return found;
}

int vol_destroy(const struct vol_ctx *ctx, const struct vol_name *name, bool flatten,
                struct err *err)
{
    bool was_begun = being_deleted(ctx, name);
    struct cvol *vol;
    struct op op;
    int rc = op_begin(ctx, name->pool, name, 1, &op, err);

    if (rc < 0)
        return rc;
    bool done =
        was_begun && catalog_find(op.cat, name, &vol, NULL) == 0 && !cvol_snap(vol, name->snap);
    if (done)
        op_say(ctx, "snapshot %s@%s deleted", name->name, name->snap);
    else
        rc = *name->snap ? destroy_snapshot(&op, name, flatten, err)
                         : destroy_volume(&op, name, err);
    op_end(&op);
    return rc;
}

/* ---- recovery ---- */

SUSPENDS static int recover_commit(const struct vol_ctx *ctx, const struct pool *pool,
                                   const char *dir, const struct intent *in, bool long_too,
                                   bool *ret_left, struct err *err)
{
    const char *stem = intent_name(in->json, "stem"), *snap = intent_name(in->json, "snap_file");
    const char *child = intent_name(in->json, "child_file"),
               *final = intent_name(in->json, "final_file");
    struct commit_plan cp = {.ctx = ctx, .pool = pool};
    struct vol_name name = {0};

    if (!stem || !snap || !child || !final)
        return err_set(err, -EUCLEAN, "the intent is damaged");
    snprintf(name.pool, sizeof(name.pool), "%s", pool->id);
    snprintf(name.vmid, sizeof(name.vmid), "%s", intent_str(in->json, "vmid"));
    snprintf(name.name, sizeof(name.name), "%.255s", stem);
    _cleanup_(freep) char *qmp = vol_qmp_path(&name);
    int rc = qmp ? commit_plan_fill(&cp, dir, in->id, stem, intent_str(in->json, "snap"), snap,
                                    child, intent_str(in->json, "child_snap"), final)
                 : -ENOMEM;
    if (rc < 0)
        err_set(err, rc, "out of memory");
    if (rc == 0)
        rc = remote_open_path(qmp, &cp.remote, err);
    if (rc == 0)
        rc = commit_run(&cp, long_too, ret_left, err);
    if (rc == 0 && !*ret_left)
        tail_cut(ctx, pool, cp.final, cp.child_snap);
    if (rc == 0 && !*ret_left)
        op_say(ctx, "an interrupted deletion of %s@%s was finished", stem,
               intent_str(in->json, "snap"));
    remote_close(cp.remote);
    commit_plan_fini(&cp);
    return rc;
}

/* A server goes on with its job when the manager dies: waited for, or left if that may take long.
 */
SUSPENDS static int settle_stream_job(const struct vol_ctx *ctx, const char *qmp,
                                      const char *prefix, bool long_too, bool *ret_left,
                                      struct err *err)
{
    _cleanup_(remote_closep) struct remote *r = NULL;
    _cleanup_(freep) char *job = NULL, *state = NULL;
    bool ready;
    int rc = remote_open_path(qmp, &r, err);

    if (rc == 0 && r)
        rc = remote_job_find(r, prefix, &job, err);
    if (rc == 0 && job)
        rc = remote_job_state(r, job, &state, err);
    if (rc < 0 || !state)
        return rc;
    if (!long_too && strcmp(state, "concluded") != 0) {
        *ret_left = true;
        return 0;
    }
    remote_job_wait(r, ctx, job, false, &ready, NULL); /* whatever came of it: the files tell */
    return 0;
}

SUSPENDS static int settle_stream_jobs(const struct vol_ctx *ctx, const struct pool *pool,
                                       const struct intent *in, bool long_too, bool *ret_left,
                                       struct err *err)
{
    const json_t *vols = json_object_get(in->json, "vols"), *vol;
    char prefix[40];
    int rc = 0;
    size_t i;

    snprintf(prefix, sizeof(prefix), "flatten-%.16s-", in->id);
    json_array_foreach(vols, i, vol)
    {
        struct vol_name name = {0};

        snprintf(name.pool, sizeof(name.pool), "%s", pool->id);
        snprintf(name.vmid, sizeof(name.vmid), "%.15s", intent_str(vol, "vmid"));
        snprintf(name.name, sizeof(name.name), "%.255s", intent_str(vol, "stem"));
        _cleanup_(freep) char *qmp = vol_qmp_path(&name);
        if (rc == 0)
            rc = qmp ? settle_stream_job(ctx, qmp, prefix, long_too, ret_left, err)
                     : err_set(err, -ENOMEM, "out of memory");
    }
    return rc;
}

SUSPENDS static int recover_stream(const struct vol_ctx *ctx, const struct pool *pool,
                                   const char *dir, const struct intent *in, bool long_too,
                                   bool *ret_left, struct err *err)
{
    const char *snap = intent_name(in->json, "snap_file");
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    _cleanup_(freep) char *path = snap ? path_join(dir, snap) : NULL;

    if (!path)
        return err_set(err, -EUCLEAN, "the intent is damaged");
    int rc = settle_stream_jobs(ctx, pool, in, long_too, ret_left, err);
    if (rc == 0 && !*ret_left)
        rc = catalog_scan(pool, &cat, err);
    if (rc < 0 || *ret_left)
        return rc;
    const struct cfile *f = catalog_file(cat, path);
    bool unused = f && f->nb_children == 0 && overlay_refuse_open(path, NULL) == 0;
    if (unused)
        rc = store_unlink(path, err);
    op_say(ctx, "an interrupted deletion of %s@%s was %s", intent_str(in->json, "stem"),
           intent_str(in->json, "snap"), f && !unused ? "undone" : "finished");
    return rc;
}

int destroy_recover(const struct vol_ctx *ctx, const struct pool *pool, const char *images,
                    struct intent *in, bool long_too, bool *ret_left, struct err *err)
{
    bool volume = strcmp(intent_op(in), "destroy-volume") == 0;
    const json_t *vol = volume ? json_array_get(json_object_get(in->json, "vols"), 0) : in->json;
    _cleanup_(freep) char *dir = intent_dir(images, vol);

    if (!dir)
        return err_set(err, -EUCLEAN, "the intent is damaged");
    if (volume)
        return destroy_files(dir, json_object_get(in->json, "files"), NULL, err);
    int rc = strcmp(intent_str(in->json, "how"), "commit") == 0
                 ? recover_commit(ctx, pool, dir, in, long_too, ret_left, err)
                 : recover_stream(ctx, pool, dir, in, long_too, ret_left, err);
    if (rc == 0 && !*ret_left)
        taken_restore(images, in);
    return rc;
}
