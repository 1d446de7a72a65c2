/*
 * The frame of an operation: pool and volume locks, a fresh catalog, what earlier operations left.
 *
 *   op_begin     finishes old intents, takes the pool's lock and the volumes' locks, scans
 *   (checks)     everything that can be refused is refused here, before a file is touched
 *   op_intent    the intent is durable; the pool's lock is given back
 *   (steps)
 *   op_done      the intent is gone
 *   op_end       locks are given back; an intent that is still there is left for recovery
 *
 * A dry run takes no lock, finishes nothing and ends after the checks.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "base/check.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "vol/store_lvm.h"

#define VOLUME_WAIT_NS (2 * NSEC_PER_SEC)
#define VOLUME_POLL_NS (5 * NSEC_PER_MSEC)

void op_say(const struct vol_ctx *ctx, const char *fmt, ...)
{
    char *line = NULL;
    va_list ap;

    if (!ctx->say)
        return;
    va_start(ap, fmt);
    int n = vasprintf(&line, fmt, ap);
    va_end(ap);
    if (n >= 0)
        ctx->say(ctx->ctx, line);
    free(line);
}

void op_forget_volume(struct op *op, const char *vmid, const char *stem)
{
    vec_for_each(lock, &op->vol_locks)
        lock_forget(lock, vmid, stem);
}

char *op_tmp_path(const struct op *op, const char *dir, const char *what)
{
    char *ret = NULL;

    return asprintf(&ret, "%s/" OWN_PREFIX "%s-%s", dir, op->id, what) < 0 ? NULL : ret;
}

int op_lock_volume(struct op *op, const char *vmid, const char *stem, struct err *err)
{
    struct pool_lock lock;

    if (op->ctx->dry_run)
        return 0;
    int rc = lock_volume(op->pool, op->images, vmid, stem, &lock, err);
    if (rc < 0)
        return rc;
    if (vec_push(&op->vol_locks, lock) < 0) {
        lock_release(&lock);
        return err_set(err, -ENOMEM, "out of memory");
    }
    return 0;
}

int pool_hold(const struct pool *pool, const char *images, struct pool_hold *ret, struct err *err)
{
    struct lvm_store *vg = lvm_store_of(images);

    *ret = (struct pool_hold){.lock = {-1}};
    if (!vg)
        return lock_pool(pool, images, &ret->lock, err);
    int rc = lvm_store_hold(vg, err);
    if (rc == 0)
        ret->vg = vg;
    return rc;
}

void pool_let_go(struct pool_hold *hold) SUSPENDS_UNCHECKED
{
    if (hold->vg)
        lvm_store_let_go(TAKE_PTR(hold->vg));
    lock_release(&hold->lock);
}

void pool_close(const char *images)
{
    struct lvm_store *vg = images ? lvm_store_of(images) : NULL;

    if (vg)
        lvm_store_close(vg);
}

void vol_pool_close(const struct pool *pool)
{
    _cleanup_(freep) char *images = NULL;

    if (store_open(pool, &images, NULL) == 0)
        pool_close(images);
}

static void release_locks(struct op *op)
{
    vec_for_each(lock, &op->vol_locks)
        lock_release(lock);
    vec_free(&op->vol_locks);
    pool_let_go(&op->pool_lock);
}

SUSPENDS static int take_locks(struct op *op, const struct vol_name *names, unsigned nr,
                               struct err *err)
{
    int rc = pool_hold(op->pool, op->images, &op->pool_lock, err);

    for (unsigned i = 0; i < nr && rc == 0; i++)
        rc = op_lock_volume(op, names[i].vmid, names[i].name, err);
    return rc;
}

/* Short operations and a server that is starting are waited for; nothing is held meanwhile. */
SUSPENDS static int take_locks_soon(struct op *op, const struct vol_name *names, unsigned nr,
                                    struct err *err)
{
    uint64_t deadline = reactor_now() + VOLUME_WAIT_NS;
    int rc;

    while ((rc = take_locks(op, names, nr, err)) == -EBUSY && reactor_now() < deadline) {
        release_locks(op);
        timer_sleep(VOLUME_POLL_NS);
    }
    return rc;
}

/* Recovery has just finished what was left; what is there now belongs to somebody who is at it. */
static int refuse_pending(struct op *op, const struct vol_name *names, unsigned nr, struct err *err)
{
    struct intents list = {0};
    int rc = intents_load(op->images, false, &list, err);

    vec_for_each(it, &list.list) {
        for (unsigned i = 0; i < nr && rc == 0; i++)
            if (intent_concerns(*it, names[i].vmid, names[i].name))
                rc = intent_refuse(*it, names[i].pool, names[i].vmid, names[i].name, err);
    }
    intents_fini(&list);
    return rc;
}

int op_begin(const struct vol_ctx *ctx, const char *pool_id, const struct vol_name *names,
             unsigned nr, struct op *ret, struct err *err)
{
    struct op op = {.ctx = ctx, .pool_lock = {.lock = {-1}}};
    int rc = config_pool(ctx->cfg, pool_id, &op.pool, err);

    if (rc == 0)
        rc = store_open(op.pool, &op.images, err);
    if (rc < 0)
        return rc;
    lock_tell(ctx);
    intent_new_id(op.id);
    lvm_store_set_owner(op.images, nr ? names[0].name : "");
    for (unsigned i = 0; i < nr && rc == 0 && !ctx->dry_run; i++)
        rc = recover_pool(ctx, op.pool, op.images, names[i].vmid, names[i].name, err);
    if (rc == 0 && !ctx->dry_run)
        rc = take_locks_soon(&op, names, nr, err);
    if (rc == 0 && !ctx->dry_run)
        rc = refuse_pending(&op, names, nr, err);
    if (rc == 0)
        rc = catalog_scan(op.pool, &op.cat, err);
    if (rc < 0) {
        op_end(&op);
        return rc;
    }
    *ret = op;
    return 0;
}

void op_end(struct op *op)
{
    intent_leave(TAKE_PTR(op->intent));
    if (op->images)
        pool_close(op->images);
    release_locks(op);
    catalog_free(TAKE_PTR(op->cat));
    free(TAKE_PTR(op->images));
}

int op_volume(struct op *op, const struct vol_name *name, struct cvol **ret, struct err *err)
    SUSPENDS_UNCHECKED
{
    struct cvol *vol;
    int rc = catalog_find(op->cat, name, &vol, err);

    if (rc < 0)
        return rc;
    if (vol->broken)
        return err_set(err, -EUCLEAN, "%s:%s%s%s is broken: %s; see 'varve pool check %s'",
                       name->pool, name->vmid, *name->vmid ? "/" : "", name->name, vol->broken,
                       name->pool);
    *ret = vol;
    return op->ctx->dry_run ? 0 : cvol_activate(op->cat, vol, err);
}

int op_volume_to_change(struct op *op, const struct vol_name *name, const char *what,
                        struct cvol **ret, struct err *err)
{
    struct cvol *vol;
    unsigned nr = 0;
    int rc = op_volume(op, name, &vol, err);

    if (rc < 0)
        return rc;
    if (vol->base)
        return err_set(err, -EPERM, "%s:%s/%s is a base image: it cannot be %s", name->pool,
                       name->vmid, name->name, what);
    if (vol->current->special)
        return err_set(err, -ENOTSUP, "%s:%s%s%s %s: it cannot be %s", name->pool, name->vmid,
                       *name->vmid ? "/" : "", name->name, vol->current->special, what);
    /* a change would show through in whatever stands on it */
    _cleanup_(freep) struct cfile **kids = cfile_children(op->cat, vol->current, &nr);
    if (!kids)
        return err_set(err, -ENOMEM, "out of memory");
    if (nr)
        return err_set(err, -EBUSY, "%s:%s%s%s cannot be %s: '%s' is based on its current state",
                       name->pool, name->vmid, *name->vmid ? "/" : "", name->name, what,
                       kids[0]->path);
    *ret = vol;
    return 0;
}

int op_refuse_used(struct op *op, const struct cvol *vol, const char *what, struct err *err)
{
    char users[300] = "";
    size_t used = 0;

    vec_for_each(it, &op->cat->files) {
        const struct cfile *f = *it;

        if (!f->parent || f->parent->vol != vol || f->vol == vol)
            continue;
        _cleanup_(freep) char *id = cfile_id(op->cat, f);
        if (used < sizeof(users))
            used += (size_t)snprintf(users + used, sizeof(users) - used, "%s%s", used ? ", " : "",
                                     id ? id : "?");
    }
    if (!used)
        return 0;
    return err_set(err, -EBUSY, "the volume '%s' cannot be %s: based on it: %s", vol->stem, what,
                   users);
}

int op_refuse_served(struct op *op, const struct cvol *vol, const char *what, struct err *err)
{
    _cleanup_(remote_closep) struct remote *remote = NULL;
    int rc = remote_open(op->cat, vol, &remote, err);

    if (rc == 0 && remote)
        rc = err_set(err, -EBUSY,
                     "the volume '%s' is served and cannot be %s: stop its server first", vol->stem,
                     what);
    return rc;
}

int op_intent(struct op *op, const char *name, json_t *body, struct err *err)
{
    int rc = intent_begin(op->images, op->id, name, body, &op->intent, err);

    pool_let_go(&op->pool_lock);
    if (rc == 0)
        crash_point("intent-written");
    return rc;
}

int op_done(struct op *op, struct err *err)
{
    crash_point("intent-remove");
    int rc = intent_end(TAKE_PTR(op->intent), err);

    crash_point("intent-removed");
    return rc;
}
