/*
 * What killed operations have left is finished or undone here, by the next operation on the pool.
 *
 * An intent whose lock is free belongs to nobody that lives. Its volumes are locked first: an
 * operation on them that came in between has found the intent claimed and is refused.
 * Long merges of other volumes are left for an operation on those; their chains read right as
 * they are.
 */
#include <dirent.h>
#include <string.h>
#include "base/check.h"
#include "vol/internal.h"

struct recovery {
    const struct vol_ctx *ctx;
    const struct pool *pool;
    const char *images;
    const char *vmid, *stem; /* NULL: of all volumes */
    bool long_too;
};

static bool any_intent(const char *images)
{
    _cleanup_(freep) char *dir = path_join(images, OWN_DIR);
    DIR *d = dir ? opendir(dir) : NULL;
    bool found = false;

    for (struct dirent *e; d && !found && (e = readdir(d));)
        found = strncmp(e->d_name, "intent-", 7) == 0 || strncmp(e->d_name, "new-", 4) == 0;
    if (d)
        closedir(d);
    return found;
}

static int lock_volumes(const struct recovery *r, const struct intent *in, struct flock_file *locks,
                        size_t nr, struct err *err)
{
    const json_t *vols = json_object_get(in->json, "vols");
    int rc = 0;

    for (size_t i = 0; i < nr; i++)
        locks[i].fd = -1;
    for (size_t i = 0; i < nr && rc == 0; i++) {
        const json_t *vol = json_array_get(vols, i);

        if (!intent_name(vol, "stem") || strchr(intent_str(vol, "vmid"), '/'))
            return err_set(err, -EUCLEAN, "'%s' is damaged", in->path);
        rc = lock_volume(r->pool, r->images, intent_str(vol, "vmid"), intent_str(vol, "stem"),
                         &locks[i], err);
    }
    return rc;
}

SUSPENDS static int dispatch(const struct recovery *r, struct intent *in, bool *ret_left,
                             struct err *err)
{
    const char *op = intent_op(in);

    if (strcmp(op, "snapshot") == 0)
        return snapshot_recover(r->ctx, r->pool, r->images, in, err);
    if (strcmp(op, "rollback") == 0)
        return rollback_recover(r->ctx, r->pool, r->images, in, err);
    if (strcmp(op, "destroy-snapshot") == 0 || strcmp(op, "destroy-volume") == 0)
        return destroy_recover(r->ctx, r->pool, r->images, in, r->long_too, ret_left, err);
    if (strcmp(op, "create") == 0 || strcmp(op, "repair") == 0)
        return create_recover(r->images, in, err);
    return err_set(err, -ENOTSUP, "unknown operation '%s'", op);
}

/* Takes the intent. */
SUSPENDS static int recover_one(const struct recovery *r, struct intent *in, struct err *err)
{
    size_t nr = json_array_size(json_object_get(in->json, "vols"));
    _cleanup_(freep) struct flock_file *locks = calloc(nr + 1, sizeof(*locks));
    bool left = false;
    int rc = locks ? lock_volumes(r, in, locks, nr, err) : err_set(err, -ENOMEM, "out of memory");

    if (rc == 0) {
        crash_point("recover");
        rc = dispatch(r, in, &left, err);
        if (rc < 0)
            rc = err_prefix(err, rc, "finishing an interrupted operation (%s)", in->path);
    }
    if (rc == 0 && !left) {
        rc = intent_end(in, err);
        crash_point("recovered");
    } else {
        intent_leave(in);
    }
    for (size_t i = 0; locks && i < nr; i++)
        lock_release(&locks[i]);
    return rc;
}

SUSPENDS static int claim_all(const struct pool *pool, const char *images, struct intents *ret,
                              struct err *err)
{
    struct flock_file lock = {-1, NULL};
    int rc = lock_pool(pool, images, &lock, err);

    if (rc == 0)
        rc = intents_load(images, true, ret, err);
    lock_release(&lock);
    return rc;
}

SUSPENDS static int recover_all(const struct vol_ctx *ctx, const struct pool *pool,
                                const char *images, const char *vmid, const char *stem,
                                bool long_too, struct err *err)
{
    struct recovery r = {ctx, pool, images, vmid, stem, false};
    struct intents list = {0};

    if (!any_intent(images))
        return 0;
    int rc = claim_all(pool, images, &list, err);
    if (rc < 0)
        return rc;
    vec_for_each(it, &list.list) {
        struct intent *in = TAKE_PTR(*it);
        struct err why = {0};

        if (in->fd < 0) { /* its operation runs */
            intent_leave(in);
            continue;
        }
        bool mine = !stem || intent_concerns(in, vmid, stem);
        r.long_too = long_too && mine;
        int one = recover_one(&r, in, &why);
        if (one < 0 && !mine)
            op_say(ctx, "%s", err_text(&why)); /* another volume's trouble stops nobody else */
        else if (one < 0 && rc == 0)
            rc = err_set(err, one, "%s", err_text(&why));
    }
    intents_fini(&list);
    return rc;
}

int recover_pool(const struct vol_ctx *ctx, const struct pool *pool, const char *images,
                 const char *vmid, const char *stem, struct err *err)
{
    return recover_all(ctx, pool, images, vmid, stem, stem != NULL, err);
}

int vol_recover(const struct vol_ctx *ctx, const struct pool *pool, struct err *err)
{
    _cleanup_(freep) char *images = NULL;
    int rc = store_open(pool, &images, err);

    return rc < 0 ? rc : recover_pool(ctx, pool, images, NULL, NULL, err);
}

int vol_recover_volume(const struct vol_ctx *ctx, const struct vol_name *name, struct err *err)
{
    _cleanup_(freep) char *images = NULL;
    const struct pool *pool;
    int rc = config_pool(ctx->cfg, name->pool, &pool, err);

    if (rc == 0)
        rc = store_open(pool, &images, err);
    return rc < 0 ? rc : recover_all(ctx, pool, images, name->vmid, name->name, false, err);
}
