/* Which host this is, for leases: a number that no other host of the pool has. */
#ifndef VARVE_VOL_LOCK_HOST_H
#define VARVE_VOL_LOCK_HOST_H

#include <stdint.h>
#include "base/err.h"

#define HOST_ID_FILE "/etc/varve/host-id"
#define HOST_ID_MAX  2000u

/* $VARVE_HOST_ID, else /etc/varve/host-id, else local/host_id of LVM's lvmlocal.conf. -EINVAL says
 * what to write where. */
int host_id(uint64_t *ret, struct err *err);

#endif
