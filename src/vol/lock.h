/*
 * Locks of pools and volumes: whoever changes names or images holds them (docs/locks.md).
 *
 * The pool's lock is held while names are looked at and an intent is written; a volume's for a
 * whole operation on it, and while its server starts; a disk's lease as long as it is served. They
 * go with the process that has them.
 */
#ifndef VARVE_VOL_LOCK_H
#define VARVE_VOL_LOCK_H

#include "base/err.h"
#include "base/vec.h"
#include "rt/co.h"
#include "vol/lock_sanlock.h"
#include "vol/vol.h"

#define LEASES_LV   "varve-leases"
#define LEASES_FILE "leases"

struct pool_lock {
    int fd;              /* on this host; -1: not held */
    struct lease *lease; /* among hosts; NULL: none is taken */
    char *gone;          /* a volume that is no more: all its leases go */
};

/* Folder of the locks that are this host's alone: $VARVE_LOCK_DIR, else /run/lock/varve. */
const char *lock_dir(void);
/* What takes long is told to the operation that waits for it. */
void lock_tell(const struct vol_ctx *ctx);
/* Waits up to ten seconds, and the first time on a host for its joining; -EBUSY. Pools with `lock
 * none` take none. */
SUSPENDS int lock_pool(const struct pool *pool, const char *images, struct pool_lock *ret,
                       struct err *err);
/* Does not wait for others: -EBUSY with the volume's name, and the host that has it or its disk. */
SUSPENDS int lock_volume(const struct pool *pool, const char *images, const char *vmid,
                         const char *stem, struct pool_lock *ret, struct err *err);
/* Harmless when not held. With leases it blocks for some milliseconds. */
void lock_release(struct pool_lock *lock);
/* The same for who has other things to do meanwhile: a server. */
SUSPENDS void lock_give_back(struct pool_lock *lock);
/* If it is that volume's: the name is no longer used, its leases are given back on release. */
void lock_forget(struct pool_lock *lock, const char *vmid, const char *stem);

/* ---- lock_lease.c: leases of pools ---- */
enum lock_provider { BY_NONE, BY_FLOCK, BY_SANLOCK, BY_LVMLOCKD };
/* -ENOTSUP: a volume group under lvmlockd with dlm. */
SUSPENDS int lock_provider_of(const struct pool *pool, enum lock_provider *ret, struct err *err);
/* Is this host in the lockspace? */
SUSPENDS bool lock_provider_joined(const struct pool *pool, const char *images,
                                   enum lock_provider by);
/* How a pool's hosts are kept apart. */
struct locking {
    struct lease_space *space; /* NULL: they are not */
    bool disks;                /* disks have leases of ours (not where LVM's own locks do that) */
};
/* Joins if need be. Cached for the life of the process. */
SUSPENDS int locking_of(const struct pool *pool, const char *images, struct locking *ret,
                        struct err *err);
/* Do these locks exclude all hosts of the pool? */
SUSPENDS bool locks_span_hosts(const struct pool *pool, const char *images);
/* "op", "disk" or "copy" and the volume's name, cut and hashed if it is long. */
void lease_name(const char *what, const char *vmid, const char *stem, char ret[LEASE_NAME_MAX + 1]);
SUSPENDS int lease_try(struct lease_space *space, const char *name, enum lease_mode mode,
                       struct lease **ret, bool *ret_here, struct err *err);
/* Names of the other hosts that have it, "" if none; ret_silent: none of them renews. */
SUSPENDS int lease_others(struct lease_space *space, const char *name, char *ret, size_t len,
                          bool *ret_silent, struct err *err);

/* A disk that is open in this process. */
struct disk_lease;
SUSPENDS int disk_lease_take(const struct pool *pool, const char *images, const char *vmid,
                             const char *stem, enum lease_mode mode, struct disk_lease **ret,
                             struct err *err);
/*
 * Hand-over of an open disk: its server goes from exclusive to shared, the other host's server
 * takes it shared, the first releases, the second goes to exclusive. -EBUSY another host has it
 * still.
 */
SUSPENDS int disk_lease_change(struct disk_lease *lease, enum lease_mode mode, struct err *err);
void disk_lease_release(struct disk_lease *lease); /* NULL is fine */
/* The same for who copies a volume for hours without its lock, which is held now: operations of
 * other hosts on it are refused, servers and this host's operations are not. */
SUSPENDS int copy_lease_take(const struct pool *pool, const char *images, const char *vmid,
                             const char *stem, struct disk_lease **ret, struct err *err);

/* ---- lock_list.c: who has what ---- */
struct lock_info {
    char *name;       /* a volume's id; the pool's */
    const char *what; /* "pool", "operation", "disk", "copy" */
    char host[LEASE_HOST_MAX + 1];
    bool here, shared;
    bool silent; /* that host does not renew its leases at the moment */
};
struct lock_list {
    enum lock_provider by;
    bool joined; /* else nothing is known of leases */
    VEC(struct lock_info) list;
};
struct catalog;
SUSPENDS int locks_list(const struct catalog *cat, struct lock_list *ret, struct err *err);
SUSPENDS int locks_list_of(const struct pool *pool, struct lock_list *ret, struct err *err);
/* "none", "flock", "sanlock", "lvmlockd" */
const char *lock_provider_name(enum lock_provider by);
/* Whom they exclude, in a few words: "processes of this host only". */
const char *lock_provider_reach(const struct pool *pool, enum lock_provider by);
void lock_list_fini(struct lock_list *list);
/* lock.c: does a process of this host hold it (stem NULL: the pool)? */
bool lock_is_held(const struct pool *pool, const char *images, const char *vmid, const char *stem);

#endif
