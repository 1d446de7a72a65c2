/*
 * One command of LVM's tools: arguments, environment, time limit, and what its words mean.
 *
 * LVM has one exit status for all failures, so the code comes from its messages, which LC_ALL=C
 * keeps in English. They are looked for by parts that have been the same from 2.03.11 to 2.03.39.
 */
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include "rt/offload.h"
#include "rt/reactor.h"
#include "vol/lvm_run.h"

#define OUT_MAX      ((size_t)256 << 20)
#define GRACE_MS     10000u /* LVM puts SIGTERM off while it writes metadata or an LV is suspended */
#define STATUS_USAGE 3      /* EINVALID_CMD_LINE of LVM */
#define COMPLAINT    300    /* bytes of a message that are shown */

/* What every command is told, whatever lvm.conf says: no copy of the metadata in /etc/lvm for each
 * of many changes a minute, and reports in the form that lvm_report.c reads. */
#define CONFIG                                                                                     \
    "backup/backup=0 backup/archive=0 log/command_names=0 report/compact_output=0 "                \
    "report/list_item_separator=\",\" report/time_format=\"%s\""

bool lvm_udev_runs(void)
{
    return access("/run/udev/control", F_OK) == 0;
}

void lvm_cmd_add(struct lvm_cmd *cmd, const char *arg)
{
    char *copy = strdup(arg);

    if (copy && vec_push(&cmd->args, copy) == 0)
        return;
    free(copy);
    cmd->no_memory = true;
}

void lvm_cmd_addf(struct lvm_cmd *cmd, const char *fmt, ...)
{
    char *arg = NULL;
    va_list ap;

    va_start(ap, fmt);
    int n = vasprintf(&arg, fmt, ap);
    va_end(ap);
    if (n >= 0 && vec_push(&cmd->args, arg) == 0)
        return;
    if (n >= 0)
        free(arg);
    cmd->no_memory = true;
}

void lvm_cmd_init(struct lvm_cmd *cmd, const struct lvm *lvm, const char *verb)
{
    *cmd = (struct lvm_cmd){.verb = verb};
    lvm_cmd_add(cmd, "lvm");
    lvm_cmd_add(cmd, verb);
    lvm_cmd_add(cmd, "--config");
    lvm_cmd_add(cmd, CONFIG);
    if (lvm->devices) {
        lvm_cmd_add(cmd, "--devices");
        lvm_cmd_add(cmd, lvm->devices);
    }
    if (lvm->devices_file) {
        lvm_cmd_add(cmd, "--devicesfile");
        lvm_cmd_add(cmd, lvm->devices_file);
    }
}

void lvm_cmd_fini(struct lvm_cmd *cmd)
{
    vec_for_each(arg, &cmd->args)
        free(*arg);
    vec_free(&cmd->args);
}

/* ---- what LVM says ---- */

struct phrase {
    const char *part;
    int rc;
};
/* The first of these that any line has decides. 0: says that there is nothing to do. */
static const struct phrase phrases[] = {
    {"while PVs are missing", -ENODEV},
    {"Refusing activation of partial", -ENODEV},
    {"LV locked by other host", -EBUSY},
    {"already locked with incompatible mode", -EBUSY},
    {"with system ID", -EBUSY},
    {" in use.", -EBUSY},
    {"is used by another device", -EBUSY},
    {"filesystem in use", -EBUSY},
    {"Device or resource busy", -EBUSY},
    {"insufficient free space", -ENOSPC},
    {"Insufficient free space", -ENOSPC},
    {"Insufficient suitable", -ENOSPC},
    {"too large for circular buffer", -ENOSPC},
    {"exceeds maximum metadata size", -ENOSPC},
    {"No sanlock space for lock", -ENOSPC},
    {"Permission denied", -EACCES},
    {"Can't get lock for", -EAGAIN},
    {" lock failed", -EAGAIN},
    {"due to failed lock", -EAGAIN},
    {"Locking failed for LV", -EAGAIN},
    {"requires lvmlockd", -EAGAIN},
    {"already exists in", -EEXIST},
    {"Names starting ", -EINVAL},
    {"Names including ", -EINVAL},
    {"is not supported.", -EINVAL},
    {"matches existing size", 0},
    {"not larger than existing size", 0},
    {"not less than existing size", 0},
};
/* Lines that are no complaint, whatever they say, or go with another. */
static const char *const asides[] = {
    "WARNING:",   "Cannot process volume group", "Run `", "File descriptor", "Consider ", "See ",
    "Reading VG "};

static bool is_aside(const char *line)
{
    for (size_t i = 0; i < ARRAY_SIZE(asides); i++)
        if (strstr(line, asides[i]))
            return true;
    return false;
}

/* "Volume group "x" not found", 'Logical volume x not found in volume group y', and kin. */
static bool says_not_found(const char *line)
{
    return strstr(line, "Failed to find logical volume") ||
           (strstr(line, " not found") && strstr(line, "olume "));
}

static size_t phrase_of(const char *line)
{
    size_t i = 0;

    while (i < ARRAY_SIZE(phrases) && !strstr(line, phrases[i].part))
        i++;
    return i;
}

/* Without margins, the full stop, and our own name. */
static void show_line(const char *line, char *to, size_t to_len)
{
    line += strspn(line, " \t");
    size_t len = strlen(line);
    while (len && (line[len - 1] == ' ' || line[len - 1] == '.'))
        len--;
    snprintf(to, to_len, "%.*s", (int)MIN(len, to_len - 1), line);
}

int lvm_complaint(const char *said, char *line, size_t line_len)
{
    _cleanup_(freep) char *copy = strdup(said ? said : "");
    size_t best = ARRAY_SIZE(phrases);
    const char *missing = NULL, *other = NULL, *chosen = NULL;
    char *save = NULL;

    snprintf(line, line_len, "no reason given");
    if (!copy)
        return -ENOMEM;
    for (char *l = strtok_r(copy, "\n", &save); l; l = strtok_r(NULL, "\n", &save)) {
        size_t p = phrase_of(l);

        if (is_aside(l))
            continue;
        if (p < best)
            best = p, chosen = l;
        else if (p < ARRAY_SIZE(phrases))
            continue;
        else if (says_not_found(l))
            missing = missing ? missing : l;
        else
            other = other ? other : l;
    }
    /* "nothing to do" does not excuse another complaint */
    if (chosen && phrases[best].rc == 0 && (missing || other))
        chosen = NULL;
    int rc = chosen ? phrases[best].rc : missing && !other ? -ENOENT : -EIO;
    chosen = chosen ? chosen : other ? other : missing;
    if (chosen)
        show_line(chosen, line, line_len);
    return rc;
}

/* ---- run ---- */

/* The tools are in sbin, which is not in everybody's PATH. */
static SUSPENDS int spawn(struct lvm_cmd *cmd, const struct exec_opts *opts, char **ret_out,
                          char **ret_said)
{
    static const char *const dirs[] = {"", "/usr/sbin/", "/sbin/"};
    size_t nr = cmd->args.len;
    _cleanup_(freep) const char **argv = calloc(nr + 1, sizeof(*argv));
    int rc = -ENOMEM;

    if (!argv)
        return -ENOMEM;
    memcpy(argv, cmd->args.data, nr * sizeof(*argv));
    for (size_t i = 0; i < ARRAY_SIZE(dirs); i++) {
        char path[64];

        snprintf(path, sizeof(path), "%s%s", dirs[i], cmd->args.data[0]);
        argv[0] = path;
        rc = offload_exec_with(argv, opts, ret_out, ret_said, OUT_MAX);
        if (rc != -ENOENT)
            return rc;
    }
    return -ENOPKG;
}

static int judge(const struct lvm_cmd *cmd, const struct lvm *lvm, int status, const char *said,
                 struct err *err)
{
    char line[COMPLAINT];

    if (status == 0)
        return 0;
    if (status == -ENOPKG)
        return err_set(err, status, "%s: lvm is not installed (package lvm2)", cmd->verb);
    if (status == -ETIMEDOUT)
        return err_set(err, status, "%s: no answer from VG '%s' within %u s; ended", cmd->verb,
                       lvm->vg, (lvm->limit_ms ? lvm->limit_ms : LVM_LIMIT_MS) / 1000);
    if (status < 0)
        return err_errno(err, status, "run lvm %s", cmd->verb);
    if (status > 128)
        return err_set(err, -EIO, "lvm %s was killed by signal %d", cmd->verb, status - 128);
    int rc = lvm_complaint(said, line, sizeof(line));
    if (rc == -EIO && status == STATUS_USAGE)
        rc = -EINVAL;
    return rc == 0 ? 0 : err_set(err, rc, "%s: %s", cmd->verb, line);
}

int lvm_cmd_run(struct lvm_cmd *cmd, struct lvm *lvm, char **ret_out, char **ret_said,
                struct err *err)
{
    /* Without udev LVM has to make the nodes itself, and must not wait for it. */
    const char *const env[] = {"LC_ALL=C", "LVM_SUPPRESS_FD_WARNINGS=1",
                               lvm_udev_runs() ? NULL : "DM_DISABLE_UDEV=1", NULL};
    const struct exec_opts opts = {
        .env = env,
        .limit_ms = lvm->limit_ms ? lvm->limit_ms : LVM_LIMIT_MS,
        .grace_ms = GRACE_MS,
        .own_group = true, /* Ctrl-C ends us between two commands, not LVM in the middle of one */
    };
    _cleanup_(freep) char *out = NULL;
    _cleanup_(freep) char *said = NULL;

    if (cmd->no_memory)
        return err_errno(err, -ENOMEM, "run lvm %s", cmd->verb);
    uint64_t start = reactor_now();
    int status = spawn(cmd, &opts, ret_out ? &out : NULL, &said);
    int rc = judge(cmd, lvm, status, said, err);
    lvm->counts.commands++;
    lvm->counts.ns += reactor_now() - start;
    lvm->counts.failed += rc < 0;
    lvm->counts.timed_out += rc == -ETIMEDOUT;
    if (rc < 0)
        return rc;
    if (ret_out)
        *ret_out = TAKE_PTR(out);
    if (ret_said)
        *ret_said = TAKE_PTR(said);
    return 0;
}
