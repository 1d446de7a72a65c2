/* varve rename: volumes under other names. */
#include <stdio.h>
#include <string.h>
#include "base/vec.h"
#include "cli/volcmd.h"

/* NEW is written like a volume's name; its storage may be left out. */
static int parse_new(const char *text, const char *pool, struct vol_name *ret, struct err *err)
{
    _cleanup_(freep) char *whole = NULL;

    if (strchr(text, ':'))
        return vol_parse(text, ret, err);
    if (asprintf(&whole, "%s:%s", pool, text) < 0)
        return err_set(err, -ENOMEM, "out of memory");
    return vol_parse(whole, ret, err);
}

SUSPENDS static int rename_volume(struct volcmd *cmd, struct err *err)
{
    struct vol_name name, new;
    int rc = volcmd_name(cmd, 0, &name, err);

    if (rc == 0 && name.snap[0])
        rc = err_set(err, -EINVAL, "a volume is renamed with all its snapshots, not one of them");
    if (rc == 0)
        rc = parse_new(args_operand(cmd->args, 1), name.pool, &new, err);
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
