/*
 * What killed operations have left is finished or undone here, by the next operation on the pool.
 *
 * An intent whose lock is free belongs to nobody that lives. Its volumes are locked first: an
 * operation on them that came in between has found the intent claimed and is refused. Another
 * host's is taken over once they are, if that proves that its operation is dead, or if the user
 * says so.
 * Long merges of other volumes are left for an operation on those; their chains read right as
 * they are.
 */
#include <stdio.h>
#include <string.h>
#include "base/check.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "vol/internal.h"

#define OPENING_WAIT_NS (5 * NSEC_PER_SEC)
#define OPENING_POLL_NS (5 * NSEC_PER_MSEC)

struct recovery {
    const struct vol_ctx *ctx;
    const struct pool *pool;
    const char *images;
    const char *vmid, *stem; /* NULL: of all volumes */
    bool long_too;
    bool start; /* to open that volume: a snapshot's deletion reads right however far it came */
    bool held;  /* the caller holds that volume's lock */
    bool alone; /* somebody has said that no other host is at work */
};

/* What is known of other hosts while the volumes' locks are held. */
SUSPENDS static enum intent_proof proof(const struct recovery *r)
{
    if (r->alone)
        return PROOF_USER;
    return locks_span_hosts(r->pool, r->images) ? PROOF_LOCKS : PROOF_NONE;
}

SUSPENDS static int lock_volumes(const struct recovery *r, const struct intent *in,
                                 struct pool_lock *locks, size_t nr, struct err *err)
{
    const json_t *vols = json_object_get(in->json, "vols");
    int rc = 0;

    for (size_t i = 0; i < nr; i++)
        locks[i].fd = -1;
    for (size_t i = 0; i < nr && rc == 0; i++) {
        const json_t *vol = json_array_get(vols, i);

        if (!intent_name(vol, "stem") || strchr(intent_str(vol, "vmid"), '/'))
            return err_set(err, -EUCLEAN, "'%s' is damaged", in->path);
        if (r->held && strcmp(intent_str(vol, "vmid"), r->vmid) == 0 &&
            strcmp(intent_str(vol, "stem"), r->stem) == 0)
            continue;
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
    if (strcmp(op, "rename") == 0)
        return rename_recover(r->ctx, r->images, in, err);
    if (strcmp(op, "move-in") == 0 || strcmp(op, "move-out") == 0)
        return move_recover(r->ctx, r->pool, r->images, in, err);
    if (strcmp(op, "template") == 0)
        return template_recover(r->images, in, err);
    if (strcmp(op, "create") == 0 || strcmp(op, "clone") == 0 || strcmp(op, "repair") == 0)
        return create_recover(r->images, in, err);
    return err_set(err, -ENOTSUP, "unknown operation '%s'", op);
}

/* The volumes' locks are held. */
SUSPENDS static int recover_locked(const struct recovery *r, struct intent *in, bool *ret_left,
                                   struct err *err)
{
    bool gone;
    int rc = intent_take_over(in, proof(r), &gone, err);

    if (rc < 0 || gone)
        return rc;
    crash_point("recover");
    rc = dispatch(r, in, ret_left, err);
    return rc < 0 ? err_prefix(err, rc, "finishing an interrupted operation (%s)", in->path) : 0;
}

/* Takes the intent. */
SUSPENDS static int recover_one(const struct recovery *r, struct intent *in, struct err *err)
{
    size_t nr = json_array_size(json_object_get(in->json, "vols"));
    _cleanup_(freep) struct pool_lock *locks = calloc(nr + 1, sizeof(*locks));
    bool left = false;
    int rc = locks ? lock_volumes(r, in, locks, nr, err) : err_set(err, -ENOMEM, "out of memory");

    if (rc == 0)
        rc = recover_locked(r, in, &left, err);
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
    struct pool_hold hold;
    int rc = pool_hold(pool, images, &hold, err);

    if (rc == 0)
        rc = intents_load(images, true, ret, err);
    pool_let_go(&hold);
    return rc;
}

/* Another volume's trouble stops nobody else. */
SUSPENDS static int recover_all(struct recovery r, struct err *err)
{
    struct intents list = {0};
    bool long_too = r.long_too;

    if (!intents_any(r.images))
        return 0;
    int rc = claim_all(r.pool, r.images, &list, err);
    if (rc == -EUCLEAN && r.start) { /* nobody can follow it: no guest has to wait for that */
        op_say(r.ctx, "%s", err ? err_text(err) : "an intent is damaged");
        return 0;
    }
    if (rc < 0)
        return rc;
    vec_for_each(it, &list.list) {
        struct intent *in = TAKE_PTR(*it);
        struct err why = {0};

        bool mine = !r.stem || intent_concerns(in, r.vmid, r.stem);
        enum intent_life life = intent_life(in, proof(&r));
        if (life == INTENT_UNKNOWN && mine && rc == 0)
            rc = intent_refuse(in, r.pool->id, r.vmid, r.stem, err);
        if (life != INTENT_DEAD || (in->foreign && !mine)) {
            intent_leave(in);
            continue;
        }
        bool harmless = !mine || (r.start && strcmp(intent_op(in), "destroy-snapshot") == 0);
        r.long_too = long_too && mine;
        int one = recover_one(&r, in, &why);
        if (one < 0 && harmless)
            op_say(r.ctx, "%s", err_text(&why));
        else if (one < 0 && rc == 0)
            rc = err_set(err, one, "%s", err_text(&why));
    }
    intents_fini(&list);
    return rc;
}

int recover_pool(const struct vol_ctx *ctx, const struct pool *pool, const char *images,
                 const char *vmid, const char *stem, struct err *err)
{
    return recover_all((struct recovery){ctx, pool, images, vmid, stem, .long_too = stem != NULL},
                       err);
}

int recover_alone(const struct vol_ctx *ctx, const struct pool *pool, const char *images,
                  const char *vmid, const char *stem, struct err *err)
{
    return recover_all(
        (struct recovery){ctx, pool, images, vmid, stem, .long_too = true, .alone = true}, err);
}

/* ---- before a volume is opened ---- */

struct vol_opening {
    struct pool_lock lock;
    const struct pool *pool;
    char *images;
    struct vol_name name;
    struct vol_ctx ctx;
    char beside[400]; /* why its lock is not held; "": it is */
};

/* An operation of hours, or a storage that is full or read-only, keeps no disk from starting: the
 * images' own locks, and their openers' look at the names, exclude what would do harm. */
SUSPENDS static void lock_to_open(struct vol_opening *opening)
{
    const struct vol_name *name = &opening->name;
    uint64_t deadline = reactor_now() + OPENING_WAIT_NS;
    struct err err = {0};
    int rc;

    while ((rc = lock_volume(opening->pool, opening->images, name->vmid, name->name, &opening->lock,
                             &err)) == -EBUSY &&
           reactor_now() < deadline)
        timer_sleep(OPENING_POLL_NS);
    if (rc < 0 && rc != -EROFS)
        snprintf(opening->beside, sizeof(opening->beside), "%s", err_text(&err));
}

/* All at once; who opens would have them activated one by one. */
SUSPENDS static int activate(const struct pool *pool, const struct vol_name *name, struct err *err)
{
    _cleanup_(catalog_freep) struct catalog *cat = NULL;
    struct cvol *vol;

    if (pool->type != POOL_LVM)
        return 0;
    int rc = catalog_scan(pool, &cat, err);
    if (rc == 0 && catalog_find(cat, name, &vol, NULL) == 0)
        rc = cvol_activate(cat, vol, err);
    return rc;
}

int vol_opening_begin(const struct vol_ctx *ctx, const struct vol_name *name,
                      struct vol_opening **ret, struct err *err)
{
    struct vol_opening *opening = calloc(1, sizeof(*opening));
    const struct pool *pool;
    struct locking how;
    char *images;
    int rc = opening ? config_pool(ctx->cfg, name->pool, &pool, err)
                     : err_set(err, -ENOMEM, "out of memory");

    if (rc == 0)
        rc = store_open(pool, &images, err);
    if (rc < 0) {
        free(opening);
        return rc;
    }
    lock_tell(ctx);
    opening->lock.fd = -1;
    opening->pool = pool;
    opening->images = images;
    opening->name = *name;
    opening->ctx = *ctx;
    rc = locking_of(pool, images, &how, err);
    if (rc < 0) {
        vol_opening_end(opening);
        return rc;
    }
    lock_to_open(opening);
    rc = recover_all((struct recovery){ctx, pool, images, name->vmid, name->name, .start = true,
                                       .held = opening->lock.fd >= 0},
                     err);
    if (rc == 0)
        rc = activate(pool, name, err);
    if (rc < 0)
        vol_opening_end(opening);
    else
        *ret = opening;
    return rc;
}

int vol_opening_lease(struct vol_opening *opening, bool read_only, struct disk_lease **ret,
                      struct err *err)
{
    int rc = disk_lease_take(opening->pool, opening->images, opening->name.vmid, opening->name.name,
                             read_only ? LEASE_SHARED : LEASE_EXCLUSIVE, ret, err);

    if (rc == 0 && *opening->beside)
        op_say(&opening->ctx, "%s; the volume is opened beside it", opening->beside);
    return rc;
}

void vol_opening_end(struct vol_opening *opening)
{
    if (!opening)
        return;
    lock_release(&opening->lock);
    free(opening->images);
    free(opening);
}
