/*
 * Leases on shared storage, by the sanlock daemon of each host (docs/locks.md).
 *
 * A pool's leases lie in one file or LV, the "space". A lease is known by its name; it belongs to
 * this process: the daemon releases it when the process ends, and ends the process before another
 * host could get it. All functions block (on the daemon, which waits for the storage): they are
 * called on helper threads, but for lease_put().
 */
#ifndef VARVE_VOL_LOCK_SANLOCK_H
#define VARVE_VOL_LOCK_SANLOCK_H

#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"

#define LEASE_NAME_MAX    48u /* bytes: SANLK_NAME_LEN */
#define LEASE_HOST_MAX    64u /* of a host's name */
#define LEASE_POOL        "pool"
#define LEASES_MIN        16u
#define LEASES_MAX        16000u /* what an index of 1 MiB holds */
#define LEASES_DEFAULT    1000u
#define LEASE_TIMEOUT_MAX 60u
#define LEASES_AREA_LEN   (1ull << 20) /* of one lease, and of each part of the space's head */
#define LEASES_HEAD_LEN   (5 * LEASES_AREA_LEN)

enum lease_mode { LEASE_EXCLUSIVE, LEASE_SHARED };
struct lease_space {               /* fixed after leases_open, but for pool_depth */
    char *path;                    /* file or device */
    char name[LEASE_NAME_MAX + 1]; /* of the lockspace */
    uint64_t host_id;
    uint64_t pool_off;
    unsigned sector_len;
    unsigned pool_depth; /* atomic: leases "pool" that this process has */
};
struct lease {
    struct lease_space *space;
    char name[LEASE_NAME_MAX + 1];
    uint64_t off;
    enum lease_mode mode;
};
struct lease_owner {
    char name[LEASE_HOST_MAX + 1]; /* "host 7" if it is unknown */
    unsigned host_id;
    bool here;
    bool shared;
    bool silent; /* it has not renewed for a while: it may be about to lose what it has */
};

/* Is the daemon's lockspace of that name (NULL: at that path) joined? Quick, touches no storage.
 * false also without a daemon. */
bool leases_is_joined(const char *name, const char *path);
/* Joins it if that has not happened yet (tens of seconds), registers this process. `lockspace`: one
 * that another joins (LVM's), NULL: the one in the space. -ENOENT no leases there, -ENOTCONN no
 * daemon, -EINVAL no host id. */
struct lease_opts {
    const char *lockspace;
    unsigned io_timeout; /* seconds; 0: the daemon's */
};
int leases_open(const char *path, const struct lease_opts *opts, struct lease_space **ret,
                struct err *err);
/* Writes an empty space with room for so many leases. -EEXIST there is one. */
int leases_format(const char *path, const char *lockspace, bool own_lockspace, unsigned leases,
                  unsigned io_timeout, struct err *err);
/* How many leases it has room for, and how many names have one. */
int leases_count(struct lease_space *space, unsigned *ret_room, unsigned *ret_used,
                 struct err *err);

/* Makes the lease if there is none of that name. -EBUSY: another has it, on this host or elsewhere
 * (*ret_here). Never waits for a host that may have died. */
int lease_take(struct lease_space *space, const char *name, enum lease_mode mode,
               struct lease **ret, bool *ret_here, struct err *err);
/* -EBUSY: others have it shared. */
int lease_change(struct lease *lease, enum lease_mode mode, struct err *err);
/* Some milliseconds; frees. NULL is fine. */
void lease_put(struct lease *lease);
/* Puts it and gives its place back: nobody uses that name any more. */
void lease_drop(struct lease *lease);
/* The same of one that is not held. */
void lease_drop_name(struct lease_space *space, const char *name);
/* Who has it; those whose host is dead are left out. *ret is freed by the caller. */
int lease_owners(struct lease_space *space, const char *name, struct lease_owner **ret,
                 unsigned *ret_nr, struct err *err);

#endif
