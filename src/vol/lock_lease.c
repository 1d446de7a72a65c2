/*
 * Leases of pools: where they are, who has them, and those of open disks.
 *
 *   pool        whoever has the pool's lock
 *   op-<vol>    an operation on the volume, or its server while it starts
 *   disk-<vol>  whoever serves the volume, all its life
 *   copy-<vol>  shared: whoever copies it for hours; taken under op, which is then given back
 *
 * An operation takes op, then looks whether another host has disk or copy; a server takes disk,
 * then looks whether another host has op. Both write before they look, so that of two at least one
 * sees the other. Within one host an operation and the server go on side by side, through QMP.
 */
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include "rt/offload.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "vol/internal.h"
#include "vol/lvm.h"

#define NODE_WAIT_MS   5000u
#define SERVER_WAIT_NS (5 * NSEC_PER_SEC) /* for a killed server's lease on this host */
#define SERVER_POLL_NS (50 * NSEC_PER_MSEC)

static struct vol_ctx listener;

void lock_tell(const struct vol_ctx *ctx)
{
    listener = *ctx;
}

/* ---- how a pool's hosts are kept apart ---- */

struct known {
    char *images;
    struct locking locking;
};
static VEC(struct known) all_known;

/* LVM's own lockspace of that group: its name follows from the group's. */
static void lvm_lockspace(const struct pool *pool, char *ret, size_t len)
{
    snprintf(ret, len, "lvm_%s", pool->vgname);
}

static bool dlm_has(const char *lockspace)
{
    char path[200];

    snprintf(path, sizeof(path), "/sys/kernel/dlm/%s", lockspace);
    return access(path, F_OK) == 0;
}

struct joined_call {
    const char *name, *path;
};

static int call_joined(void *arg)
{
    const struct joined_call *c = arg;

    return leases_is_joined(c->name, c->path);
}

SUSPENDS static bool is_joined(const char *name, const char *path)
{
    struct joined_call call = {name, path};

    return offload(call_joined, &call) == 1;
}

int lock_provider_of(const struct pool *pool, enum lock_provider *ret, struct err *err)
{
    char lockspace[160];

    if (pool->lock) {
        *ret = strcmp(pool->lock, "none") == 0      ? BY_NONE
               : strcmp(pool->lock, "sanlock") == 0 ? BY_SANLOCK
                                                    : BY_FLOCK;
        if (pool->type != POOL_LVM || *ret != BY_SANLOCK)
            return 0;
    } else {
        *ret = BY_FLOCK;
        if (pool->type != POOL_LVM)
            return 0;
    }
    lvm_lockspace(pool, lockspace, sizeof(lockspace));
    if (is_joined(lockspace, NULL))
        *ret = BY_LVMLOCKD;
    else if (!pool->lock && dlm_has(lockspace))
        return err_set(
            err, -ENOTSUP,
            "storage '%s': the volume group '%s' is locked by lvmlockd with dlm, which "
            "has no leases for operations: use sanlock, or say 'lock flock' if this host "
            "alone changes volumes",
            pool->id, pool->vgname);
    return 0;
}

static char *leases_path(const struct pool *pool, const char *images)
{
    return path_join(images, pool->type == POOL_LVM ? LEASES_LV : OWN_DIR "/" LEASES_FILE);
}

bool lock_provider_joined(const struct pool *pool, const char *images, enum lock_provider by)
{
    _cleanup_(freep) char *path = leases_path(pool, images);

    return by == BY_LVMLOCKD || (path && is_joined(NULL, path));
}

static int no_leases(const struct pool *pool, struct err *err)
{
    return err_set(
        err, -ENOENT,
        "storage '%s' has no leases yet: make them, once and on one host, with 'varve pool "
        "init-locks %s'",
        pool->id, pool->id);
}

/* The LV with the leases, active; it stays so for the daemon. */
SUSPENDS static int activate(const struct pool *pool, bool shared, char **path, struct err *err)
{
    struct lvm lvm = {.vg = pool->vgname, .shared = shared};
    const char *const names[] = {LEASES_LV, NULL};
    char *node = NULL;
    int rc = lvm_activate(&lvm, names, shared ? LVM_SHARED : LVM_PLAIN, err);

    if (rc == -ENOENT)
        return no_leases(pool, err);
    if (rc == 0)
        rc = lvm_device(&lvm, LEASES_LV, NODE_WAIT_MS, &node, err);
    if (rc < 0)
        return err_prefix(err, rc, "storage '%s': leases", pool->id);
    free(*path);
    *path = node;
    return 0;
}

struct open_call {
    const char *path;
    struct lease_opts opts;
    struct lease_space *space;
    struct err *err;
};

static int call_open(void *arg)
{
    struct open_call *c = arg;

    return leases_open(c->path, &c->opts, &c->space, c->err);
}

SUSPENDS static int open_space(const struct pool *pool, const char *images, enum lock_provider by,
                               struct lease_space **ret, struct err *err)
{
    bool lvm = pool->type == POOL_LVM;
    char lockspace[160];
    _cleanup_(freep) char *path = leases_path(pool, images);

    if (!path)
        return err_set(err, -ENOMEM, "out of memory");
    lvm_lockspace(pool, lockspace, sizeof(lockspace));
    bool joined = by == BY_LVMLOCKD || is_joined(NULL, path);
    if (lvm && (!joined || access(path, F_OK) < 0)) {
        int rc = activate(pool, by == BY_LVMLOCKD, &path, err);

        if (rc < 0)
            return rc;
    } else if (!lvm && access(path, F_OK) < 0) {
        return no_leases(pool, err);
    }
    if (!joined)
        op_say(&listener,
               "storage '%s': this host joins its lockspace; that takes up to a minute, once until "
               "it boots again",
               pool->id);
    struct open_call call = {.path = path,
                             .opts = {.lockspace = by == BY_LVMLOCKD ? lockspace : NULL,
                                      .io_timeout = (unsigned)pool->lease_timeout},
                             .err = err};
    int rc = offload(call_open, &call);
    if (rc == -ENOENT)
        return no_leases(pool, err);
    if (rc < 0)
        return err_prefix(err, rc, "storage '%s'", pool->id);
    *ret = call.space;
    return 0;
}

int locking_of(const struct pool *pool, const char *images, struct locking *ret, struct err *err)
{
    enum lock_provider by;

    vec_for_each(k, &all_known)
        if (strcmp(k->images, images) == 0) {
            *ret = k->locking;
            return 0;
        }
    struct known known = {.images = strdup(images)};
    int rc =
        known.images ? lock_provider_of(pool, &by, err) : err_set(err, -ENOMEM, "out of memory");
    if (rc == 0 && by >= BY_SANLOCK)
        rc = open_space(pool, images, by, &known.locking.space, err);
    known.locking.disks = rc == 0 && by == BY_SANLOCK;
    if (rc == 0 && vec_push(&all_known, known) < 0)
        rc = err_set(err, -ENOMEM, "out of memory");
    if (rc < 0)
        free(known.images);
    else
        *ret = known.locking;
    return rc;
}

bool locks_span_hosts(const struct pool *pool, const char *images)
{
    struct locking how;

    return locking_of(pool, images, &how, NULL) == 0 && how.space;
}

/* ---- single leases ---- */

void lease_name(const char *what, const char *vmid, const char *stem, char ret[LEASE_NAME_MAX + 1])
{
    char full[300];
    int n = snprintf(full, sizeof(full), "%s-%s%s%s", what, vmid, *vmid ? "/" : "", stem);

    if (n <= (int)LEASE_NAME_MAX)
        snprintf(ret, LEASE_NAME_MAX + 1, "%.*s", (int)LEASE_NAME_MAX, full);
    else
        snprintf(ret, LEASE_NAME_MAX + 1, "%.30s~%016llx", full,
                 (unsigned long long)text_hash(full));
}

struct take_call {
    struct lease_space *space;
    const char *name;
    enum lease_mode mode;
    struct lease *lease;
    bool here;
    struct err *err;
};

static int call_take(void *arg)
{
    struct take_call *c = arg;

    return lease_take(c->space, c->name, c->mode, &c->lease, &c->here, c->err);
}

int lease_try(struct lease_space *space, const char *name, enum lease_mode mode, struct lease **ret,
              bool *ret_here, struct err *err)
{
    struct take_call call = {.space = space, .name = name, .mode = mode, .err = err};
    int rc = offload(call_take, &call);

    *ret_here = call.here;
    if (rc == 0)
        *ret = call.lease;
    return rc;
}

struct owners_call {
    struct lease_space *space;
    const char *name;
    struct lease_owner *owners;
    unsigned nr;
    struct err *err;
};

static int call_owners(void *arg)
{
    struct owners_call *c = arg;

    return lease_owners(c->space, c->name, &c->owners, &c->nr, c->err);
}

int lease_others(struct lease_space *space, const char *name, char *ret, size_t len,
                 bool *ret_silent, struct err *err)
{
    struct owners_call call = {.space = space, .name = name, .err = err};
    int rc = offload(call_owners, &call);
    size_t used = 0;

    *ret = '\0';
    *ret_silent = true;
    for (unsigned i = 0; rc == 0 && i < call.nr; i++) {
        if (call.owners[i].here)
            continue;
        *ret_silent &= call.owners[i].silent;
        if (used < len)
            used += (size_t)snprintf(ret + used, len - used, "%s%s", used ? ", " : "",
                                     call.owners[i].name);
    }
    free(call.owners);
    return rc;
}

/* ---- open disks ---- */

struct disk_lease {
    struct lease *lease; /* NULL: the pool's disks have none */
};

static int give_up(struct disk_lease *disk, int rc)
{
    disk_lease_release(disk);
    return rc;
}

SUSPENDS static int disk_taken(const struct pool *pool, struct lease_space *space, const char *name,
                               const char *vmid, const char *stem, bool here, struct err *err)
{
    const char *slash = *vmid ? "/" : "";
    char hosts[300] = "";
    bool silent = false;

    if (!here)
        lease_others(space, name, hosts, sizeof(hosts), &silent, NULL);
    if (here)
        return err_set(err, -EBUSY, "%s:%s%s%s is open in another process of this host", pool->id,
                       vmid, slash, stem);
    return err_set(err, -EBUSY, "%s:%s%s%s is open on host %s%s", pool->id, vmid, slash, stem,
                   *hosts ? hosts : "(unknown)",
                   silent ? ", which does not renew its lease: it can be taken once that has ended"
                          : "");
}

int disk_lease_take(const struct pool *pool, const char *images, const char *vmid, const char *stem,
                    enum lease_mode mode, struct disk_lease **ret, struct err *err)
{
    struct disk_lease *disk = calloc(1, sizeof(*disk));
    uint64_t deadline = reactor_now() + SERVER_WAIT_NS;
    char name[LEASE_NAME_MAX + 1], hosts[300];
    struct locking how;
    bool here, silent;
    int rc = disk ? locking_of(pool, images, &how, err) : err_set(err, -ENOMEM, "out of memory");

    if (rc < 0)
        return give_up(disk, rc);
    if (!how.disks) {
        *ret = disk;
        return 0;
    }
    lease_name("disk", vmid, stem, name);
    while ((rc = lease_try(how.space, name, mode, &disk->lease, &here, err)) == -EBUSY && here &&
           reactor_now() < deadline)
        timer_sleep(SERVER_POLL_NS); /* of a server that has just ended */
    if (rc == -EBUSY)
        rc = disk_taken(pool, how.space, name, vmid, stem, here, err);
    if (rc == 0) {
        lease_name("op", vmid, stem, name);
        rc = lease_others(how.space, name, hosts, sizeof(hosts), &silent, err);
    }
    if (rc == 0 && *hosts)
        rc = err_set(err, -EBUSY, "%s:%s%s%s is being changed on host %s", pool->id, vmid,
                     *vmid ? "/" : "", stem, hosts);
    if (rc < 0)
        return give_up(disk, rc);
    *ret = disk;
    return 0;
}

int copy_lease_take(const struct pool *pool, const char *images, const char *vmid, const char *stem,
                    struct disk_lease **ret, struct err *err)
{
    struct disk_lease *copy = calloc(1, sizeof(*copy));
    char name[LEASE_NAME_MAX + 1];
    struct locking how;
    bool here;
    int rc = copy ? locking_of(pool, images, &how, err) : err_set(err, -ENOMEM, "out of memory");

    lease_name("copy", vmid, stem, name);
    if (rc == 0 && how.disks)
        rc = lease_try(how.space, name, LEASE_SHARED, &copy->lease, &here, err);
    if (rc < 0)
        return give_up(copy, rc);
    *ret = copy;
    return 0;
}

struct change_call {
    struct lease *lease;
    enum lease_mode mode;
    struct err *err;
};

static int call_change(void *arg)
{
    struct change_call *c = arg;

    return lease_change(c->lease, c->mode, c->err);
}

int disk_lease_change(struct disk_lease *disk, enum lease_mode mode, struct err *err)
{
    struct change_call call = {disk->lease, mode, err};

    return disk->lease ? offload(call_change, &call) : 0;
}

void disk_lease_release(struct disk_lease *disk)
{
    if (disk)
        lease_put(disk->lease);
    free(disk);
}
