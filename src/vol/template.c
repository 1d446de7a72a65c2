/*
 * A guest's volume vm-<vmid>-x becomes the base image base-<vmid>-x: never changed again, the
 * ground of linked clones.
 *
 *   1 intent                          nothing done                         undo
 *   2 link as base-<vmid>-x           two names of one image               finish, or undo if
 *                                                                          somebody has opened it
 *   3 unlink vm-<vmid>-x              the base image, still writable       finish
 *   4 mode 0444                       done
 */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "base/check.h"
#include "blk/blk.h"
#include "vol/internal.h"

#define BASE_MODE 0444

struct templating {
    char *old, *new; /* paths */
    char stem[256];  /* the base image's */
};

static void templating_fini(struct templating *t)
{
    free(t->old);
    free(t->new);
}

static int check_name(const struct cvol *vol, struct err *err)
{
    if (strncmp(vol->stem, "vm-", 3) == 0 && stem_is_proxmox(vol->stem, vol->vmid))
        return 0;
    return err_set(err, -EINVAL,
                   "'%s' cannot become a template: that takes a guest's volume called "
                   "vm-<vmid>-...; rename it first",
                   vol->stem);
}

static int refuse_snapshots(const struct cvol *vol, struct err *err)
{
    if (!vol->snaps.len)
        return 0;
    return err_set(err, -EBUSY,
                   "'%s' has %zu snapshots and cannot become a template: destroy them, or make a "
                   "'clone --full' and take that",
                   vol->stem, vol->snaps.len);
}

SUSPENDS static int plan(struct op *op, const struct vol_name *name, struct templating *t,
                         struct cvol **ret, struct err *err)
{
    struct cvol *vol;
    int rc = op_volume_to_change(op, name, "made a template", &vol, err);

    if (rc == 0)
        rc = check_name(vol, err);
    if (rc == 0)
        rc = refuse_snapshots(vol, err);
    if (rc == 0)
        rc = op_refuse_served(op, vol, "made a template", err);
    if (rc < 0)
        return rc;
    snprintf(t->stem, sizeof(t->stem), "base-%.250s", vol->stem + 3);
    _cleanup_(freep) char *file = file_join(vol->current->dir, t->stem, vol->format);
    t->old = strdup(vol->current->path);
    t->new = file ? path_join(vol->current->dir, file) : NULL;
    if (!t->old || !t->new)
        return err_set(err, -ENOMEM, "out of memory");
    rc = catalog_check_new_vol(op->cat, vol->vmid, t->stem, err);
    if (rc == 0)
        rc = op_lock_volume(op, vol->vmid, t->stem, err);
    *ret = vol;
    return rc;
}

/* From any state on. */
static int take_name(const struct templating *t, struct err *err)
{
    int rc = 0;

    if (!store_exists(t->new))
        rc = store_link(t->old, t->new, err);
    else if (store_exists(t->old) && !store_same_file(t->old, t->new))
        rc = err_set(err, -EEXIST, "'%s' exists already, and is another image", t->new);
    crash_point("template-linked");
    if (rc == 0)
        rc = store_unlink(t->old, err);
    crash_point("template-unlinked");
    if (rc == 0)
        rc = store_set_mode(t->new, BASE_MODE, err);
    if (rc == 0)
        rc = store_sync_file(t->new, err);
    crash_point("template-read-only");
    return rc;
}

SUSPENDS static int run(struct op *op, const struct cvol *vol, const struct templating *t,
                        struct err *err)
{
    struct blk *hold;
    int rc = overlay_settle(t->old, vol->format, err);

    if (rc == 0)
        rc = overlay_hold(t->old, &hold, err);
    if (rc < 0)
        return rc;
    rc = op_intent(op, "template",
                   json_pack("{s:[{s:s, s:s}, {s:s, s:s}], s:s, s:s}", "vols", "vmid", vol->vmid,
                             "stem", vol->stem, "vmid", vol->vmid, "stem", t->stem, "old_file",
                             strrchr(t->old, '/') + 1, "new_file", strrchr(t->new, '/') + 1),
                   err);
    if (rc == 0)
        rc = take_name(t, err);
    if (rc < 0 && store_same_file(t->old, t->new))
        store_unlink(t->new, NULL);
    int done_rc = op_done(op, rc < 0 ? NULL : err);
    blk_close(hold);
    return rc < 0 ? rc : done_rc;
}

int vol_template(const struct vol_ctx *ctx, const struct vol_name *name, struct err *err)
{
    struct templating t = {0};
    struct cvol *vol = NULL;
    struct op op;
    int rc = op_begin(ctx, name->pool, name, 1, &op, err);

    if (rc < 0)
        return rc;
    rc = plan(&op, name, &t, &vol, err);
    if (rc == 0 && ctx->dry_run)
        op_say(ctx, "would make '%s' the base image '%s'", t.old, t.new);
    else if (rc == 0)
        rc = run(&op, vol, &t, err);
    if (rc == 0 && !ctx->dry_run)
        op_say(ctx, "%s:%s%s%s is a base image", name->pool, vol->vmid, *vol->vmid ? "/" : "",
               strrchr(t.new, '/') + 1);
    templating_fini(&t);
    op_end(&op);
    return rc;
}

/* ---- recovery ---- */

/* Whoever opened the image by its old name since the kill keeps it as it was. */
SUSPENDS static int settle(const struct templating *t, struct err *err)
{
    struct blk *hold = NULL;

    if (!store_exists(t->new))
        return 0;
    if (store_exists(t->old) && !store_same_file(t->old, t->new))
        return err_set(err, -EUCLEAN, "'%s' has come beside '%s'", t->old, t->new);
    if (store_exists(t->old) && overlay_hold(t->old, &hold, NULL) < 0)
        return store_unlink(t->new, err);
    int rc = take_name(t, err);
    blk_close(hold);
    return rc;
}

int template_recover(const char *images, struct intent *intent, struct err *err)
{
    const json_t *vol = json_array_get(json_object_get(intent->json, "vols"), 0);
    const char *old = intent_name(intent->json, "old_file");
    const char *new = intent_name(intent->json, "new_file");
    _cleanup_(freep) char *dir = intent_dir(images, vol);
    struct templating t = {0};

    if (!dir || !old || !new)
        return err_set(err, -EUCLEAN, "the intent is damaged");
    t.old = path_join(dir, old);
    t.new = path_join(dir, new);
    int rc = t.old && t.new ? settle(&t, err) : err_set(err, -ENOMEM, "out of memory");
    templating_fini(&t);
    return rc;
}
