/* varve pool init-locks; the locks that pool status shows. */
#include "cli/pool_locks.h"
#include <stdio.h>
#include "vol/lock.h"

json_t *pool_locks_json(const struct pool *pool)
{
    struct lock_list list = {0};
    struct err err = {0};
    int rc = locks_list_of(pool, &list, &err);

    if (rc < 0) {
        lock_list_fini(&list);
        return json_pack("{s:s}", "error", err_text(&err));
    }
    json_t *held = json_array();
    vec_for_each(it, &list.list)
        json_array_append_new(held, json_pack("{s:s, s:s, s:s, s:s, s:b, s:b}", "what", it->what,
                                              "name", it->name, "host", it->host, "mode",
                                              it->shared ? "shared" : "exclusive", "this-host",
                                              it->here, "silent", it->silent));
    json_t *o = json_pack("{s:s, s:s, s:b, s:o}", "by", lock_provider_name(list.by), "excluded",
                          lock_provider_reach(pool, list.by), "joined", list.joined, "held", held);
    lock_list_fini(&list);
    return o;
}

int pool_locks_print(struct volcmd *cmd, const char *pool_id, struct err *err)
{
    _cleanup_(table_out_fini) struct table_out table = {.cols = 4};
    struct lock_list list = {0};
    const struct pool *pool;
    int rc = config_pool(cmd->cfg, pool_id, &pool, err);

    if (rc == 0)
        rc = locks_list_of(pool, &list, err);
    if (rc == 0)
        printf("locks: %s (%s)%s\n", lock_provider_name(list.by),
               lock_provider_reach(pool, list.by),
               list.by != BY_NONE && !list.joined
                   ? "; this host has not joined yet, and does not know who holds them"
                   : "");
    table_out_row(&table, "LOCK", "NAME", "HOST", "MODE");
    vec_for_each(it, &list.list)
        table_out_row(&table, it->what, it->name, it->host,
                      it->silent   ? "not renewed"
                      : it->shared ? "shared"
                                   : "exclusive");
    if (list.list.len)
        table_out_print(&table, "llll");
    lock_list_fini(&list);
    return rc;
}

SUSPENDS static int init_locks(struct volcmd *cmd, struct err *err)
{
    int rc = vol_pool_init_locks(&cmd->ctx, args_operand(cmd->args, 0), err);

    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_init_locks(const struct args *args)
{
    return volcmd_run(args, "pool init-locks", init_locks);
}

const struct command command_pool_init_locks = {
    .name = "pool init-locks",
    .summary = "make the leases by which hosts exclude each other",
    .text = "Once, on one host, for a pool with 'lock sanlock', and for a volume group under "
            "lvmlockd: makes the LV varve-leases, or the file images/.varve/leases, with room for "
            "lock-leases leases of 1 MiB (default 1000; a volume takes two). Leases that are there "
            "stay as they are, whether in use or not. Each host needs the sanlock daemon and, in "
            "/etc/varve/host-id, a number of its own.",
    .operands = (const struct operand[]){{"POOL", COMPLETE_POOL}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, VOL_OPT_DRY_RUN, {0}},
    .example = "  varve pool init-locks san",
    .run = run_init_locks,
};
