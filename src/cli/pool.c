/* varve pool list, check. */
#include <stdio.h>
#include <string.h>
#include "cli/volcmd.h"

static const char *pool_state(const struct pool *pool)
{
    if (pool->error)
        return "broken";
    if (pool->disabled)
        return "disabled";
    return pool->type == POOL_OTHER ? "not for varve" : "ok";
}

static json_t *pool_json(const struct pool *pool)
{
    json_t *o = json_pack("{s:s, s:s, s:s}", "id", pool->id, "type", pool->type_name, "state",
                          pool_state(pool));

    if (pool->path)
        json_object_set_new(o, "path", json_string(pool->path));
    if (pool->vgname)
        json_object_set_new(o, "vgname", json_string(pool->vgname));
    if (pool->content)
        json_object_set_new(o, "content", json_string(pool->content));
    if (pool->error)
        json_object_set_new(o, "error", json_string(pool->error));
    return o;
}

static int pool_list(struct volcmd *cmd, struct err *err)
{
    _cleanup_(table_out_fini) struct table_out table = {.cols = 5};
    json_t *list = json_array();

    table_out_row(&table, "POOL", "TYPE", "STATE", "CONTENT", "WHERE");
    for (unsigned i = 0; i < cmd->cfg->nb_pools; i++) {
        const struct pool *pool = &cmd->cfg->pools[i];

        json_array_append_new(list, pool_json(pool));
        table_out_row(&table, pool->id, pool->type_name, pool_state(pool), pool->content,
                      pool->path ? pool->path : pool->vgname);
    }
    if (cmd->json)
        render_json(list);
    else
        json_decref(list);
    if (cmd->json)
        return 0; /* the table was for people */
    table_out_print(&table, "lllll");
    return cmd->cfg->nb_errors ? EXIT_FAILED : EXIT_DONE;
}

static int run_pool_list(const struct args *args)
{
    return volcmd_run(args, "pool list", pool_list);
}

const struct command command_pool_list = {
    .name = "pool list",
    .summary = "list the pools of the configuration",
    .text = "Prints every section of storage.cfg with its state. The exit status is 1 when a "
            "section is broken; the others go on working.",
    .operands = (const struct operand[]){{0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, {0}},
    .run = run_pool_list,
};

SUSPENDS static int check_one(struct volcmd *cmd, const struct pool *pool, unsigned *bad,
                              struct err *err)
{
    struct vol_findings found = {0};
    int rc = vol_pool_check(&cmd->ctx, pool, args_flag(cmd->args, "repair"), &found, err);

    *bad = found.repairable + found.hopeless;
    if (rc == 0 && args_flag(cmd->args, "proxmox")) {
        unsigned foreign = 0;

        rc = vol_pool_check_proxmox(&cmd->ctx, pool, &foreign, err);
        *bad += foreign;
    }
    if (rc == 0 && !cmd->json && !args_flag(cmd->args, "quiet"))
        printf("%s: %u to repair, %u need a person, %u harmless\n", pool->id, found.repairable,
               found.hopeless, found.notes);
    return rc;
}

SUSPENDS static int pool_check(struct volcmd *cmd, struct err *err)
{
    const char *only = args_operand(cmd->args, 0);
    const struct pool *pool;
    unsigned bad = 0, sum = 0;
    int rc = 0;

    if (only) {
        rc = config_pool(cmd->cfg, only, &pool, err);
        if (rc == 0)
            rc = check_one(cmd, pool, &sum, err);
    }
    for (unsigned i = 0; !only && i < cmd->cfg->nb_pools && rc == 0; i++) {
        pool = &cmd->cfg->pools[i];
        if (pool->disabled || pool->error || pool->type == POOL_OTHER)
            continue;
        rc = check_one(cmd, pool, &bad, err);
        sum += bad;
    }
    if (rc < 0)
        return rc;
    volcmd_done(cmd);
    return sum ? EXIT_FAILED : EXIT_DONE;
}

static int run_pool_check(const struct args *args)
{
    return volcmd_run(args, "pool check", pool_check);
}

const struct command command_pool_check = {
    .name = "pool check",
    .summary = "find, and repair, what crashes have left in a pool",
    .text = "Looks for operations that were cut off, volumes without a current element, broken "
            "backing references and files that belong to nothing. --repair finishes or undoes what "
            "can be; files that belong to nothing are reported, never deleted. The exit status is "
            "1 while something needs repair or a person.\n\n"
            "--proxmox also names what Proxmox VE could not handle if it were given the pool as it "
            "is, and makes the exit status 1 if there is something: snapshots in several branches, "
            "or raw ones, volumes of no guest, clones of snapshots, and in a volume group base "
            "images, clones, logical volumes that are shorter than a full image (`thin-chunk`), "
            "missing tags, names in tags.",
    .operands = (const struct operand[]){{"[POOL]", COMPLETE_POOL}, {0}},
    .options = (const struct option[]){{0, "repair", NULL, "put right what was found"},
                                       {0, "proxmox", NULL, "name what Proxmox could not handle"},
                                       VOL_OPT_CONFIG,
                                       VOL_OPT_JSON,
                                       VOL_OPT_DRY_RUN,
                                       {0}},
    .run = run_pool_check,
};
