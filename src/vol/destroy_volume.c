/*
 * Destroying a whole volume with its snapshots.
 *
 *   1 intent with all files' names            nothing done                    finish
 *   2 unlink current, then the snapshots      a part of the files             finish
 */
#include <string.h>
#include <unistd.h>
#include "base/check.h"
#include "vol/internal.h"

/* A broken volume is destroyed like any other: what is removed follows from names alone. */
SUSPENDS static int check_volume(struct op *op, const struct cvol *vol, struct held_files *held,
                                 struct err *err)
{
    int rc = op_refuse_used(op, vol, "destroyed", err);

    if (rc == 0)
        rc = op_refuse_served(op, vol, "destroyed", err);
    return rc < 0 || op->ctx->dry_run ? rc : held_add_volume(held, vol, err);
}

int destroy_files(const char *dir, const json_t *files, struct held_files *held, struct err *err)
    SUSPENDS_UNCHECKED
{
    const json_t *file;
    int rc = 0;
    size_t i;

    json_array_foreach(files, i, file)
    {
        const char *name = json_string_value(file);

        if (!name || strchr(name, '/'))
            return err_set(err, -EUCLEAN, "the intent is damaged");
        _cleanup_(freep) char *path = path_join(dir, name);
        if (path && held)
            held_drop_device(held, path);
        rc = path ? store_unlink(path, err) : err_set(err, -ENOMEM, "out of memory");
        crash_point("destroy-unlinked");
        if (rc < 0)
            return rc;
    }
    return 0;
}

SUSPENDS static int remove_volume(struct op *op, const struct cvol *vol, struct held_files *held,
                                  struct err *err)
{
    const struct cfile *any = vol->current ? vol->current : vol->snaps.data[0];
    json_t *files = json_array();

    if (vol->current)
        json_array_append_new(files, json_string(vol->current->name));
    vec_for_each(it, &vol->snaps)
        json_array_append_new(files, json_string((*it)->name));
    int rc = op_intent(op, "destroy-volume",
                       json_pack("{s:[{s:s, s:s}], s:O}", "vols", "vmid", vol->vmid, "stem",
                                 vol->stem, "files", files),
                       err);
    if (rc == -ENOSPC || rc == -EDQUOT) { /* to make room is what it is for */
        op_say(op->ctx, "the storage is full: no record of the destruction is kept");
        rc = 0;
    }
    if (rc == 0)
        rc = destroy_files(any->dir, files, held, err);
    json_decref(files);
    if (rc == 0)
        rc = op_done(op, err);
    if (rc == 0)
        op_forget_volume(op, vol->vmid, vol->stem);
    if (rc == 0 && *vol->vmid)
        rmdir(any->dir); /* stays if anything else is in it */
    return rc;
}

int destroy_volume(struct op *op, const struct vol_name *name, struct err *err)
{
    struct held_files held = {0};
    struct cvol *vol;
    int rc = catalog_find(op->cat, name, &vol, err);

    if (rc < 0)
        return rc;
    rc = check_volume(op, vol, &held, err);
    if (rc == 0 && op->ctx->dry_run) {
        op_say(op->ctx, "would destroy %s and %zu snapshots", vol->stem, vol->snaps.len);
    } else if (rc == 0) {
        rc = remove_volume(op, vol, &held, err);
        if (rc == 0)
            op_say(op->ctx, "%s destroyed", vol->stem);
    }
    held_drop(&held);
    return rc;
}
