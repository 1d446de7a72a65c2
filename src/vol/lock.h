/*
 * Locks of pools and volumes: whoever changes names or images holds them (docs/locks.md).
 *
 * The pool's lock is held while names are looked at and an intent is written; a volume's for a
 * whole operation on it, and while its server starts. They go with the process that has them.
 */
#ifndef VARVE_VOL_LOCK_H
#define VARVE_VOL_LOCK_H

#include "base/err.h"
#include "rt/co.h"
#include "vol/vol.h"

struct pool_lock {
    int fd; /* -1: not held */
};

/* Folder of the locks that are this host's alone: $VARVE_LOCK_DIR, else /run/lock/varve. */
const char *lock_dir(void);
/* Waits up to ten seconds; -EBUSY. Pools with `lock none` take none. */
SUSPENDS int lock_pool(const struct pool *pool, const char *images, struct pool_lock *ret,
                       struct err *err);
/* Does not wait: -EBUSY with the volume's name. */
int lock_volume(const struct pool *pool, const char *images, const char *vmid, const char *stem,
                struct pool_lock *ret, struct err *err);
void lock_release(struct pool_lock *lock); /* harmless when not held */

#endif
