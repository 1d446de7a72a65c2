/* varve create, import, snapshot, rollback, destroy, resize. */
#include <stdio.h>
#include <string.h>
#include "base/vec.h"
#include "cli/volcmd.h"

SUSPENDS static int create(struct volcmd *cmd, struct err *err)
{
    _cleanup_(freep) char *text = strdup(args_value(cmd->args, "options", ""));
    struct vol_create_opts opts;
    struct vol_name name;
    int rc = volcmd_name(cmd, 0, &name, err);

    if (rc == 0)
        rc = volcmd_create_options(cmd->args, text, &opts, err);
    if (rc == 0)
        rc = parse_size(args_operand(cmd->args, 1), &opts.len, err);
    if (rc == 0)
        rc = vol_create(&cmd->ctx, &name, &opts, err);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_create(const struct args *args)
{
    return volcmd_run(args, "create", create);
}

const struct command command_create = {
    .name = "create",
    .summary = "make a new, empty volume",
    .text = "SIZE takes the suffixes k, M, G and T. The format is qcow2 unless --format or the "
            "name's suffix says raw.",
    .operands = (const struct operand[]){{"POOL:VOLUME", COMPLETE_VOLUME}, {"SIZE"}, {0}},
    .options = (const struct option[]){{'f', "format", "FORMAT", "qcow2 or raw", COMPLETE_WORDS,
                                        "qcow2 raw"},
                                       VOL_OPT_CREATE,
                                       VOL_OPT_CONFIG,
                                       VOL_OPT_JSON,
                                       VOL_OPT_DRY_RUN,
                                       {0}},
    .example = "  varve create local:100/vm-100-disk-0 32G",
    .run = run_create,
};

SUSPENDS static int import(struct volcmd *cmd, struct err *err)
{
    _cleanup_(freep) char *text = strdup(args_value(cmd->args, "options", ""));
    const char *format = args_value(cmd->args, "source-format", NULL);
    struct vol_create_opts opts;
    struct vol_name name;
    int rc = volcmd_name(cmd, 1, &name, err);

    if (rc == 0)
        rc = volcmd_create_options(cmd->args, text, &opts, err);
    if (rc == 0)
        rc = vol_import(&cmd->ctx, args_operand(cmd->args, 0), format, &name, &opts, err);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_import(const struct args *args)
{
    return volcmd_run(args, "import", import);
}

const struct command command_import = {
    .name = "import",
    .summary = "make a volume from an image file or from standard input",
    .text = "FILE is a qcow2 or raw image; - reads raw data from standard input. An image that "
            "names a backing file or a data file is refused: it could make the host read files of "
            "its author's choice. The volume appears when it is complete.",
    .operands =
        (const struct operand[]){{"FILE", COMPLETE_FILE}, {"POOL:VOLUME", COMPLETE_VOLUME}, {0}},
    .options =
        (const struct option[]){
            {0, "source-format", "FORMAT",
             "format of FILE (default: by its content; a .raw file is raw)", COMPLETE_WORDS,
             "qcow2 raw"},
            {'f', "format", "FORMAT", "of the volume: qcow2 or raw", COMPLETE_WORDS, "qcow2 raw"},
            VOL_OPT_CREATE,
            VOL_OPT_CONFIG,
            VOL_OPT_JSON,
            VOL_OPT_DRY_RUN,
            {0}},
    .example = "  zcat disk.raw.gz | varve import - local:100/vm-100-disk-0",
    .run = run_import,
};

SUSPENDS static int snapshot(struct volcmd *cmd, struct err *err)
{
    unsigned nr = cmd->args->nb_operands;
    _cleanup_(freep) struct vol_name *names = calloc(nr, sizeof(*names));
    int rc = names ? 0 : -ENOMEM;

    for (unsigned i = 0; i < nr && rc == 0; i++) {
        rc = volcmd_name(cmd, i, &names[i], err);
        if (rc == 0 && !names[i].snap[0])
            rc = err_set(err, -EINVAL, "'%s' names no snapshot (POOL:VOLUME@SNAPSHOT)",
                         args_operand(cmd->args, i));
    }
    if (rc == 0)
        rc = vol_snapshot(&cmd->ctx, names, nr, err);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_snapshot(const struct args *args)
{
    return volcmd_run(args, "snapshot", snapshot);
}

const struct command command_snapshot = {
    .name = "snapshot",
    .summary = "take a snapshot of one or several volumes",
    .text = "Puts a new overlay on top of the volume; what it held until now is the snapshot. "
            "Works on idle and on served volumes; the guest goes on.",
    .operands = (const struct operand[]){{"POOL:VOLUME@SNAPSHOT...", COMPLETE_VOLUME}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, VOL_OPT_DRY_RUN, {0}},
    .example = "  varve snapshot local:100/vm-100-disk-0@before-upgrade",
    .run = run_snapshot,
};

SUSPENDS static int rollback(struct volcmd *cmd, struct err *err)
{
    const char *keep = args_value(cmd->args, "keep", NULL);
    struct vol_name name;
    int rc = volcmd_name(cmd, 0, &name, err);

    if (rc == 0 && !name.snap[0])
        rc = err_set(err, -EINVAL, "'%s' names no snapshot (POOL:VOLUME@SNAPSHOT)",
                     args_operand(cmd->args, 0));
    if (rc == 0 && keep)
        rc = vol_snap_name_check(keep, err);
    if (rc == 0)
        rc = vol_rollback(&cmd->ctx, &name, keep, args_flag(cmd->args, "force"), err);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_rollback(const struct args *args)
{
    return volcmd_run(args, "rollback", rollback);
}

const struct command command_rollback = {
    .name = "rollback",
    .summary = "make a volume what it was at a snapshot",
    .text = "Any snapshot of the volume will do, not only the newest. What was written since the "
            "last snapshot is dropped unless --keep makes it a snapshot first; all snapshots stay. "
            "Refused while a client that may write is connected, unless --force drops it.",
    .operands = (const struct operand[]){{"POOL:VOLUME@SNAPSHOT", COMPLETE_SNAPSHOT}, {0}},
    .options =
        (const struct option[]){{0, "keep", "SNAPSHOT", "keep the present state as this snapshot"},
                                {0, "force", NULL, "drop clients that are connected"},
                                VOL_OPT_CONFIG,
                                VOL_OPT_JSON,
                                VOL_OPT_DRY_RUN,
                                {0}},
    .example = "  varve rollback local:100/vm-100-disk-0@before-upgrade --keep broken",
    .run = run_rollback,
};

SUSPENDS static int destroy(struct volcmd *cmd, struct err *err)
{
    struct vol_name name;
    int rc = volcmd_name(cmd, 0, &name, err);

    if (rc == 0)
        rc = vol_destroy(&cmd->ctx, &name, args_flag(cmd->args, "flatten"), err);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_destroy(const struct args *args)
{
    return volcmd_run(args, "destroy", destroy);
}

const struct command command_destroy = {
    .name = "destroy",
    .summary = "delete a snapshot, or a volume with its snapshots",
    .text = "A snapshot is merged with the one element based on it, in the direction that copies "
            "fewer bytes, while the guest goes on. Where several elements are based on it the "
            "command is refused; --flatten copies the snapshot into each of them instead. A volume "
            "is deleted with all its snapshots, unless clones are based on it.",
    .operands = (const struct operand[]){{"POOL:VOLUME[@SNAPSHOT]", COMPLETE_SNAPSHOT}, {0}},
    .options = (const struct option[]){{0, "flatten", NULL,
                                        "copy the snapshot into everything based on it"},
                                       VOL_OPT_CONFIG,
                                       VOL_OPT_JSON,
                                       VOL_OPT_DRY_RUN,
                                       {0}},
    .example = "  varve destroy local:100/vm-100-disk-0@before-upgrade",
    .run = run_destroy,
};

SUSPENDS static int resize(struct volcmd *cmd, struct err *err)
{
    const char *size = args_operand(cmd->args, 1);
    bool relative = size[0] == '+';
    struct vol_name name;
    uint64_t len;
    int rc = volcmd_name(cmd, 0, &name, err);

    if (rc == 0)
        rc = parse_size(size + relative, &len, err);
    if (rc == 0)
        rc = vol_resize(&cmd->ctx, &name, len, relative, err);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

static int run_resize(const struct args *args)
{
    return volcmd_run(args, "resize", resize);
}

const struct command command_resize = {
    .name = "resize",
    .summary = "grow a volume",
    .text = "SIZE is the new size, +SIZE what is added. Volumes are not made smaller. Snapshots "
            "keep their size.",
    .operands = (const struct operand[]){{"POOL:VOLUME", COMPLETE_VOLUME}, {"SIZE"}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, VOL_OPT_DRY_RUN, {0}},
    .example = "  varve resize local:100/vm-100-disk-0 +10G",
    .run = run_resize,
};
