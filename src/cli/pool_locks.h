/* The locks of a pool, for `pool status`. */
#ifndef VARVE_CLI_POOL_LOCKS_H
#define VARVE_CLI_POOL_LOCKS_H

#include "cli/volcmd.h"

SUSPENDS int pool_locks_print(struct volcmd *cmd, const char *pool_id, struct err *err);
/* {"by", "joined", "held": [...]}, or {"error"}. */
SUSPENDS json_t *pool_locks_json(const struct pool *pool);

#endif
