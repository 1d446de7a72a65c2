/* What the commands on pools and volumes share: configuration, names, how an operation reports. */
#ifndef VARVE_CLI_VOLCMD_H
#define VARVE_CLI_VOLCMD_H

#include "cli/command.h"
#include "cli/render.h"
#include "vol/vol.h"

struct volcmd {
    const struct args *args;
    struct config *cfg; /* owned */
    struct vol_ctx ctx;
    struct progress progress;
    json_t *messages; /* with --json: what was said, owned */
    bool json;
};

/* Loads the configuration and runs `fn` in a reactor; a negative result is reported. Warnings and
 * broken sections of the configuration go to stderr unless -q. Returns the exit status. */
int volcmd_run(const struct args *args, const char *what,
               int (*fn)(struct volcmd *cmd, struct err *err));
/* Parses operand n as a volume or snapshot. */
int volcmd_name(const struct volcmd *cmd, unsigned n, struct vol_name *ret, struct err *err);
/* Calls fn for each pool that can be used. One that fails is told, does not hide the others, and
 * makes the result EXIT_FAILED. */
typedef int volcmd_pool_fn(const struct pool *pool, void *ctx, struct err *err);
SUSPENDS int volcmd_each_pool(struct volcmd *cmd, volcmd_pool_fn *fn, void *ctx, struct err *err);
/* Ends an operation: with --json an object with the command, the volumes and what was said. */
void volcmd_done(struct volcmd *cmd);

/* --format and -o cluster_size=..,extended_l2=..,preallocation=..; `text` is a copy of the latter's
 * value, cut up here and referred to by *ret. */
int volcmd_create_options(const struct args *args, char *text, struct vol_create_opts *ret,
                          struct err *err);

#define VOL_OPT_CREATE                                                                             \
    {                                                                                              \
        'o', "options", "K=V,...",                                                                 \
            "cluster_size, extended_l2, preallocation (off, metadata, falloc, full)"               \
    }
#define VOL_OPT_CONFIG                                                                             \
    {                                                                                              \
        0, "config", "FILE",                                                                       \
            "storage.cfg to use (default: $VARVE_CONFIG, /etc/varve/storage.cfg, "                 \
            "/etc/pve/storage.cfg)",                                                               \
            COMPLETE_FILE                                                                          \
    }
#define VOL_OPT_JSON                                                                               \
    {                                                                                              \
        0, "json", NULL, "print JSON"                                                              \
    }
#define VOL_OPT_DRY_RUN                                                                            \
    {                                                                                              \
        0, "dry-run", NULL, "say what would be done, change nothing"                               \
    }

#endif
