/* varve rename, move: volumes under other names, and in other storages. */
#include <stdio.h>
#include <string.h>
#include "base/vec.h"
#include "cli/volcmd.h"

/* NEW is written like a volume's name; its storage may be left out. */
static int parse_new(const struct volcmd *cmd, const char *text, const char *pool,
                     struct vol_name *ret, struct err *err)
{
    _cleanup_(freep) char *whole = NULL;

    if (strchr(text, ':'))
        return vol_parse_in(cmd->cfg, text, ret, err);
    if (asprintf(&whole, "%s:%s", pool, text) < 0)
        return err_set(err, -ENOMEM, "out of memory");
    return vol_parse_in(cmd->cfg, whole, ret, err);
}

SUSPENDS static int rename_volume(struct volcmd *cmd, struct err *err)
{
    struct vol_name name, new;
    int rc = volcmd_name(cmd, 0, &name, err);

    if (rc == 0 && name.snap[0])
        rc = err_set(err, -EINVAL, "a volume is renamed with all its snapshots, not one of them");
    if (rc == 0)
        rc = parse_new(cmd, args_operand(cmd->args, 1), name.pool, &new, err);
    if (rc == 0)
        rc = vol_rename(&cmd->ctx, &name, &new, err);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_rename(const struct args *args)
{
    return volcmd_run(args, "rename", rename_volume);
}

const struct command command_rename = {
    .name = "rename",
    .summary = "give a volume another name",
    .text =
        "The volume keeps its snapshots. NEW is written [<vmid>/]<name>, as in the volume's id: a "
        "volume can be given to another guest. Refused for a volume that is served, for base "
        "images, and while clones stand on it.",
    .operands = (const struct operand[]){{"POOL:VOLUME", COMPLETE_VOLUME}, {"NEW"}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, VOL_OPT_DRY_RUN, {0}},
    .example = "  varve rename local:100/vm-100-disk-0 200/vm-200-disk-0",
    .run = run_rename,
};

/* "POOL2:" or "POOL2"; the volume keeps its name. */
static int parse_pool(const char *text, char *ret, size_t len, struct err *err)
{
    const char *colon = strchr(text, ':');
    size_t n = colon ? (size_t)(colon - text) : strlen(text);

    if (colon && colon[1])
        return err_set(err, -EINVAL,
                       "'%s': give the storage alone, as %.*s: (the volume keeps its name; 'varve "
                       "rename' changes it)",
                       text, (int)n, text);
    if (n == 0 || n >= len)
        return err_set(err, -EINVAL, "'%s' is not a storage", text);
    snprintf(ret, len, "%.*s", (int)n, text);
    return 0;
}

SUSPENDS static int move_volume(struct volcmd *cmd, struct err *err)
{
    struct vol_move_opts opts = {.delete = args_flag(cmd->args, "delete"),
                                 .flatten = args_flag(cmd->args, "flatten")};
    struct vol_name name;
    char pool[64];
    int rc = volcmd_name(cmd, 0, &name, err);

    if (rc == 0 && name.snap[0])
        rc = err_set(err, -EINVAL,
                     "a volume is moved with all its snapshots; 'varve clone --full' copies one");
    if (rc == 0)
        rc = parse_pool(args_operand(cmd->args, 1), pool, sizeof(pool), err);
    if (rc == 0)
        rc = vol_move(&cmd->ctx, &name, pool, &opts, err);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_move(const struct args *args)
{
    return volcmd_run(args, "move", move_volume);
}

const struct command command_move = {
    .name = "move",
    .summary = "copy or move a volume to another storage",
    .text =
        "The volume has the same name there, and all its snapshots. It appears when it is "
        "complete; then --delete removes the source, which stays otherwise. What a linked clone "
        "stands on has to be in the other storage under the same name, and is compared; "
        "--flatten copies its data into the volume instead. The volume must not be in use, and "
        "with --delete no clone may stand on it.",
    .operands =
        (const struct operand[]){{"POOL:VOLUME", COMPLETE_VOLUME}, {"POOL2:", COMPLETE_POOL}, {0}},
    .options = (const struct option[]){{0, "delete", NULL, "delete the source afterwards"},
                                       {0, "flatten", NULL, "copy in what the volume stands on"},
                                       VOL_OPT_CONFIG,
                                       VOL_OPT_JSON,
                                       VOL_OPT_DRY_RUN,
                                       {0}},
    .example = "  varve move local:100/vm-100-disk-0 backup: --delete",
    .run = run_move,
};
