/* varve clone, template: volumes made from others. */
#include <string.h>
#include "base/vec.h"
#include "cli/volcmd.h"

static int check_clone_options(const struct args *args, bool full, struct err *err)
{
    static const char *const names[] = {"format", "options"};

    for (unsigned i = 0; i < ARRAY_SIZE(names) && !full; i++)
        if (args_value(args, names[i], NULL))
            return err_set(err, -EINVAL,
                           "--%s is for --full: a linked clone is an overlay like a snapshot's",
                           names[i]);
    return 0;
}

SUSPENDS static int clone_volume(struct volcmd *cmd, struct err *err)
{
    _cleanup_(freep) char *text = strdup(args_value(cmd->args, "options", ""));
    struct vol_clone_opts opts = {.full = args_flag(cmd->args, "full")};
    struct vol_name from, to;
    int rc = volcmd_name(cmd, 0, &from, err);

    if (rc == 0)
        rc = volcmd_name(cmd, 1, &to, err);
    if (rc == 0)
        rc = check_clone_options(cmd->args, opts.full, err);
    if (rc == 0)
        rc = volcmd_create_options(cmd->args, text, &opts.create, err);
    if (rc == 0)
        rc = vol_clone(&cmd->ctx, &from, &to, &opts, err);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_clone(const struct args *args)
{
    return volcmd_run(args, "clone", clone_volume);
}

const struct command command_clone = {
    .name = "clone",
    .summary = "make a volume from a base image or a snapshot",
    .text =
        "The clone is linked: it is made at once, holds only what is written to it, and the base "
        "image or snapshot stays as long as a clone needs it. With --full it is a copy of its "
        "own, in any storage; then an idle volume can be copied as it is now, too. What is "
        "cloned may be served, if it is a snapshot.",
    .operands = (const struct operand[]){{"POOL:VOLUME[@SNAPSHOT]", COMPLETE_SNAPSHOT},
                                         {"POOL:VOLUME", COMPLETE_VOLUME},
                                         {0}},
    .options = (const struct option[]){{0, "full", NULL, "copy all data"},
                                       {'f', "format", "FORMAT", "of a full clone: qcow2 or raw",
                                        COMPLETE_WORDS, "qcow2 raw"},
                                       VOL_OPT_CREATE,
                                       VOL_OPT_CONFIG,
                                       VOL_OPT_JSON,
                                       VOL_OPT_DRY_RUN,
                                       {0}},
    .example = "  varve clone local:9000/base-9000-disk-0 local:100/vm-100-disk-0\n"
               "  varve clone local:100/vm-100-disk-0@nightly san:200/vm-200-disk-0 --full",
    .run = run_clone,
};

SUSPENDS static int template_volume(struct volcmd *cmd, struct err *err)
{
    struct vol_name name;
    int rc = volcmd_name(cmd, 0, &name, err);

    if (rc == 0 && name.snap[0])
        rc = err_set(err, -EINVAL, "a snapshot is no template: clone it, and make the clone one");
    if (rc == 0)
        rc = vol_template(&cmd->ctx, &name, err);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_template(const struct args *args)
{
    return volcmd_run(args, "template", template_volume);
}

const struct command command_template = {
    .name = "template",
    .summary = "make a volume a base image for linked clones",
    .text =
        "vm-<vmid>-x becomes base-<vmid>-x, which can be read by all and is never changed again. "
        "Refused for a volume that is served or has snapshots, and for names of another form.",
    .operands = (const struct operand[]){{"POOL:VOLUME", COMPLETE_VOLUME}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, VOL_OPT_DRY_RUN, {0}},
    .example = "  varve template local:9000/vm-9000-disk-0",
    .run = run_template,
};
