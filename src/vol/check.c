/*
 * What a crash, of this program or of another one that keeps volumes in the same layout, has left
 * in a pool: reported, and repaired where no guest data can be lost by it.
 *
 * Repaired: a lost current image, or one that was created and never completed, is replaced by an
 * empty overlay on the snapshot it stood on; what cannot be thrown away is kept beside it under
 * another name. Everything else is only reported, and files that belong to nothing are never
 * deleted.
 */
#include <stdio.h>
#include <string.h>
#include "base/check.h"
#include "vol/internal.h"

struct checking {
    const struct vol_ctx *ctx;
    const struct pool *pool;
    bool repair;
    struct vol_findings found;
};

/* ---- repair of one volume ---- */

static bool is_repairable(const struct catalog *cat, const struct cvol *vol)
{
    return vol->broken && !vol->base && (!vol->current || vol->current->unfinished) &&
           cvol_last_leaf(cat, vol);
}

/* The unfinished image makes room; one that holds more than nothing is kept under another name. */
static int put_aside(struct op *op, const struct cfile *current, struct err *err)
{
    _cleanup_(freep) char *aside = NULL;

    if (!current->backing) /* blank */
        return 0;
    if (asprintf(&aside, "%s.damaged-%s", current->path, op->id) < 0)
        return err_set(err, -ENOMEM, "out of memory");
    op_say(op->ctx, "the damaged image is kept as '%s'", aside);
    return store_link(current->path, aside, err);
}

SUSPENDS static int replace_current(struct op *op, const struct cvol *vol, const struct cfile *leaf,
                                    struct err *err)
{
    _cleanup_(freep) char *backing = path_relative(leaf->dir, leaf->path);
    _cleanup_(freep) char *tmp = op_tmp_path(op, leaf->dir, "0");
    _cleanup_(freep) char *file = file_join(leaf->dir, vol->stem, "qcow2");
    _cleanup_(freep) char *path = file ? path_join(leaf->dir, file) : NULL;

    if (!backing || !tmp || !path)
        return err_set(err, -ENOMEM, "out of memory");
    int rc =
        op_intent(op, "repair",
                  json_pack("{s:[{s:s, s:s}]}", "vols", "vmid", vol->vmid, "stem", vol->stem), err);
    if (rc == 0)
        rc =
            overlay_create(op->pool, tmp, backing, leaf->format, leaf->virtual_len, &leaf->st, err);
    crash_point("repair-prepared");
    if (rc == 0 && vol->current)
        rc = put_aside(op, vol->current, err);
    if (rc == 0)
        rc = vol->current ? store_rename(tmp, path, err) : store_publish(tmp, path, err);
    crash_point("repair-switched");
    if (rc < 0)
        store_unlink(tmp, NULL);
    int done_rc = op_done(op, rc < 0 ? NULL : err);
    return rc < 0 ? rc : done_rc;
}

SUSPENDS static int repair_volume(const struct checking *c, const struct cvol *seen,
                                  struct err *err)
{
    struct vol_name name = {0};
    struct op op;

    snprintf(name.pool, sizeof(name.pool), "%s", c->pool->id);
    snprintf(name.vmid, sizeof(name.vmid), "%s", seen->vmid);
    snprintf(name.name, sizeof(name.name), "%.255s", seen->stem);
    int rc = op_begin(c->ctx, c->pool->id, &name, 1, &op, err);
    if (rc < 0)
        return rc;
    /* looked at again, under its lock */
    const struct cvol *vol = catalog_vol(op.cat, seen->vmid, seen->stem, "qcow2");
    _cleanup_(freep) char *qmp = vol ? cvol_qmp_path(op.cat, vol) : NULL;
    if (qmp && socket_is_served(qmp))
        rc = err_set(err, -EBUSY, "%s is served: stop its server first", seen->stem);
    else if (vol && is_repairable(op.cat, vol))
        rc = replace_current(&op, vol, cvol_last_leaf(op.cat, vol), err);
    op_end(&op);
    return rc;
}

/* ---- findings ---- */

static void say_broken(const struct checking *c, const struct catalog *cat, const struct cvol *vol)
{
    const struct cfile *leaf = cvol_last_leaf(cat, vol);
    _cleanup_(freep) char *id = cvol_id(cat, vol);
    bool lost = !vol->current || vol->current->unfinished;
    const char *name = id ? id : vol->stem;

    if (is_repairable(cat, vol))
        op_say(c->ctx, "%s: %s; an empty overlay on snapshot '%s' can take its place (--repair)",
               name, vol->broken, leaf->snap);
    else if (lost && vol->snaps.len > 1)
        op_say(c->ctx, "%s: %s; it stood on one of several snapshots: choose with 'varve rollback'",
               name, vol->broken);
    else
        op_say(c->ctx, "%s: %s", name, vol->broken);
}

SUSPENDS static void check_volume(struct checking *c, const struct catalog *cat,
                                  const struct cvol *vol)
{
    struct err err = {0};

    if (!vol->broken)
        return;
    say_broken(c, cat, vol);
    if (!is_repairable(cat, vol)) {
        c->found.hopeless++;
    } else if (!c->repair) {
        c->found.repairable++;
    } else if (repair_volume(c, vol, &err) < 0) {
        op_say(c->ctx, "%s: not repaired: %s", vol->stem, err_text(&err));
        c->found.repairable++;
    } else {
        op_say(c->ctx, "%s: repaired", vol->stem);
    }
}

/* Two images that a name without a suffix would both mean. */
static void check_twins(struct checking *c, const struct catalog *cat)
{
    for (size_t i = 1; i < cat->vols.len; i++) {
        const struct cvol *a = cat->vols.data[i - 1], *b = cat->vols.data[i];

        if (strcmp(a->vmid, b->vmid) != 0 || strcmp(a->stem, b->stem) != 0)
            continue;
        op_say(c->ctx, "note: %s exists as .%s and as .%s", a->stem, a->format, b->format);
        c->found.notes++;
    }
}

/* Hidden files of operations that are long over: of an intent they would bear the number. */
static int check_leftovers(struct checking *c, const struct catalog *cat,
                           const struct intents *intents, struct err *err)
{
    vec_for_each(it, &cat->leftovers) {
        const char *name = strrchr(*it, '/') + 1 + strlen(OWN_PREFIX);
        bool owned = false;

        vec_for_each(in, &intents->list)
            owned |= strncmp(name, (*in)->id, strlen((*in)->id)) == 0;
        if (owned)
            continue;
        op_say(c->ctx, "note: '%s' is a leftover of an operation%s", *it,
               c->repair ? ", removed" : "");
        int rc = c->repair ? store_unlink(*it, err) : 0;
        if (rc < 0)
            return rc;
        c->found.notes += !c->repair;
    }
    return 0;
}

static void say_intents(struct checking *c, const struct intents *intents)
{
    vec_for_each(it, &intents->list) {
        const json_t *vol = json_array_get(json_object_get((*it)->json, "vols"), 0);
        const char *stem = intent_str(vol, "stem"), *snap = intent_str((*it)->json, "snap");
        bool live = (*it)->fd < 0;
        char what[200];

        intent_describe(*it, what, sizeof(what));
        if ((*it)->foreign)
            op_say(c->ctx,
                   "note: an operation on %s%s%s is under way, %s; if that host is down: --repair",
                   stem, *snap ? "@" : "", snap, what);
        else
            op_say(c->ctx,
                   live ? "note: an operation on %s%s%s is under way: %s"
                        : "%s%s%s: an operation was cut off: %s",
                   stem, *snap ? "@" : "", snap, intent_op(*it));
        c->found.notes += live;
        c->found.repairable += !live;
    }
}

static void say_taken(const struct checking *c, const struct intent *in, const char *stem)
{
    char what[200];

    intent_describe(in, what, sizeof(what));
    op_say(c->ctx, "%s: taking over an operation that was begun elsewhere: %s", stem, what);
}

/* Finishes what was cut off, long merges too: each as an operation on its volume would. */
SUSPENDS static void repair_intents(struct checking *c, const char *images, struct intents *intents)
{
    vec_for_each(it, &intents->list) {
        const json_t *vol = json_array_get(json_object_get((*it)->json, "vols"), 0);
        _cleanup_(freep) char *vmid = strdup(intent_str(vol, "vmid"));
        _cleanup_(freep) char *stem = strdup(intent_str(vol, "stem"));
        struct err err = {0};

        if (intent_life(*it, PROOF_USER) != INTENT_DEAD || !vmid || !stem)
            continue;
        if ((*it)->foreign)
            say_taken(c, *it, stem);
        else
            close(TAKE_FD((*it)->fd)); /* for recovery to claim */
        if (recover_alone(c->ctx, c->pool, images, vmid, stem, &err) < 0) {
            op_say(c->ctx, "%s: %s", stem, err_text(&err));
            c->found.repairable++;
        }
    }
}

SUSPENDS static int check_intents(struct checking *c, const char *images, struct err *err)
{
    struct intents intents = {0};
    int rc = intents_load(images, true, &intents, err);

    if (rc == 0 && c->repair)
        repair_intents(c, images, &intents);
    else if (rc == 0)
        say_intents(c, &intents);
    intents_fini(&intents);
    return rc;
}

/* Somebody is at it, was when the catalog was read, or begins now: it may look like anything. */
static bool is_worked_on(const struct intents lists[2], const struct cvol *vol)
{
    for (unsigned i = 0; i < 2; i++)
        vec_for_each(it, &lists[i].list)
            if (intent_concerns(*it, vol->vmid, vol->stem))
                return true;
    return false;
}

/* After the intents were gone through: those that are left are of operations that go on, or could
 * not be finished, and were told. */
SUSPENDS static int check_volumes(struct checking *c, const char *images, struct catalog **ret,
                                  struct err *err)
{
    struct intents lists[2] = {0};
    int rc = intents_load(images, false, &lists[0], err);

    if (rc == 0)
        rc = catalog_scan(c->pool, ret, err);
    if (rc == 0)
        rc = intents_load(images, false, &lists[1], err);
    if (rc == 0)
        vec_for_each(it, &(*ret)->vols)
            if (!is_worked_on(lists, *it))
                check_volume(c, *ret, *it);
    intents_fini(&lists[0]);
    intents_fini(&lists[1]);
    return rc;
}

SUSPENDS static int check_files(struct checking *c, const char *images, struct err *err)
{
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    struct intents intents = {0};
    int rc = check_volumes(c, images, &cat, err);

    if (rc < 0)
        return rc;
    check_twins(c, cat);
    vec_for_each(it, &cat->strays) {
        op_say(c->ctx, "note: %s", *it);
        c->found.notes++;
    }
    rc = intents_load(cat->images, false, &intents, err);
    if (rc == 0)
        rc = check_leftovers(c, cat, &intents, err);
    intents_fini(&intents);
    return rc;
}

int vol_pool_check(const struct vol_ctx *ctx, const struct pool *pool, bool repair,
                   struct vol_findings *ret, struct err *err)
{
    struct checking c = {.ctx = ctx, .pool = pool, .repair = repair && !ctx->dry_run};
    _cleanup_(freep) char *images = NULL;
    int rc = config_pool(ctx->cfg, pool->id, &c.pool, err);

    if (rc == 0)
        rc = store_open(c.pool, &images, err);
    if (rc == 0)
        rc = check_intents(&c, images, err);
    if (rc == 0)
        rc = check_files(&c, images, err);
    if (c.repair)
        pool_close(images); /* also what a killed process has left active */
    if (rc < 0)
        return rc;
    *ret = c.found;
    return 0;
}
