/* varve job list, pause, resume, cancel, set-speed: the long work of served disks, by QMP. */
#include <stdio.h>
#include <string.h>
#include "cli/volcmd.h"
#include "qmp/qmp.h"

/* A disk's process as the user names it: a volume, or the path of a control socket. */
struct disk {
    char *id, *socket; /* owned */
    struct qmp_client *qmp;
};

static void disk_close(struct disk *d)
{
    qmp_client_free(d->qmp);
    free(d->id);
    free(d->socket);
}

static const char *str_of(const json_t *obj, const char *key)
{
    const char *s = json_string_value(json_object_get(obj, key));

    return s ? s : "";
}

static uint64_t u64_of(const json_t *obj, const char *key)
{
    return (uint64_t)json_integer_value(json_object_get(obj, key));
}

SUSPENDS static int find_socket(struct volcmd *cmd, const char *text, struct disk *ret,
                                struct err *err)
{
    struct vol_name name;
    struct vol_info *info;

    ret->id = strdup(text);
    if (text[0] == '/' || text[0] == '.') {
        ret->socket = strdup(text);
        return ret->id && ret->socket ? 0 : err_set(err, -ENOMEM, "out of memory");
    }
    int rc = vol_parse(text, &name, err);
    if (rc == 0 && name.snap[0])
        rc = err_set(err, -EINVAL, "'%s' is a snapshot: a disk has the jobs", text);
    if (rc == 0)
        rc = vol_info_get(cmd->cfg, &name, &info, err);
    if (rc < 0)
        return rc;
    if (info->served)
        ret->socket = TAKE_PTR(info->qmp_path);
    else
        rc = err_set(err, -ENOENT, "%s is not served: it has no jobs", info->id);
    vol_info_free(info);
    return rc;
}

SUSPENDS static int disk_open(struct volcmd *cmd, const char *text, struct disk *ret,
                              struct err *err)
{
    int rc = find_socket(cmd, text, ret, err);

    if (rc == 0)
        rc = qmp_connect(ret->socket, &ret->qmp, err);
    return rc < 0 ? err_prefix(err, rc, "%s", text) : 0;
}

/* ---- list ---- */

struct job_list {
    struct volcmd *cmd;
    struct table_out table;
    json_t *json;
};

/* QEMU's query-block-jobs: so the same goes for its processes. */
static void list_job(struct job_list *out, const struct disk *d, const json_t *job)
{
    char done[32], total[32], speed[40];
    uint64_t at = u64_of(job, "offset"), end = u64_of(job, "len"), rate = u64_of(job, "speed");
    _cleanup_(freep) char *progress = NULL;
    json_t *copy = json_deep_copy(job);

    snprintf(speed, sizeof(speed), "%s%s", rate ? render_size(rate, done, sizeof(done)) : "-",
             rate ? "/s" : "");
    if (asprintf(&progress, "%s of %s", render_size(at, done, sizeof(done)),
                 render_size(end, total, sizeof(total))) < 0)
        progress = NULL;
    table_out_row(&out->table, d->id, str_of(job, "device"), str_of(job, "type"),
                  str_of(job, "status"), progress ? progress : "-", speed);
    json_object_set_new(copy, "disk", json_string(d->id));
    json_array_append_new(out->json, copy);
}

SUSPENDS static int list_disk(struct job_list *out, const char *text, struct err *err)
{
    struct disk d = {0};
    json_t *jobs = NULL, *job;
    size_t i;
    int rc = disk_open(out->cmd, text, &d, err);

    if (rc == 0)
        rc = qmp_execute(d.qmp, "query-block-jobs", NULL, &jobs, err);
    json_array_foreach(jobs, i, job) list_job(out, &d, job);
    json_decref(jobs);
    disk_close(&d);
    return rc;
}

/* A disk whose server ends meanwhile has no jobs. */
SUSPENDS static int list_pool(struct job_list *out, const struct pool *pool, struct err *err)
{
    struct vol_list *list;
    int rc = vol_list_get(out->cmd->cfg, pool, &list, err);

    if (rc < 0)
        return rc;
    for (unsigned i = 0; i < list->nb_vols; i++)
        if (list->vols[i]->served)
            (void)list_disk(out, list->vols[i]->id, NULL);
    vol_list_free(list);
    return 0;
}

SUSPENDS static int list_all(struct job_list *out, struct err *err)
{
    const struct config *cfg = out->cmd->cfg;
    const struct pool *pool;
    int status = EXIT_DONE;

    for (unsigned i = 0; i < cfg->nb_pools; i++) {
        if (config_pool(cfg, cfg->pools[i].id, &pool, NULL) < 0)
            continue;
        if (list_pool(out, pool, err) < 0) {
            fprintf(stderr, "varve job list: %s: %s\n", pool->id, err_text(err));
            status = EXIT_FAILED;
        }
    }
    return status;
}

SUSPENDS static int job_list(struct volcmd *cmd, struct err *err)
{
    struct job_list out = {.cmd = cmd, .table = {.cols = 6}, .json = json_array()};
    const char *disk = args_operand(cmd->args, 0);

    table_out_row(&out.table, "DISK", "JOB", "TYPE", "STATE", "DONE", "LIMIT");
    int rc = disk ? list_disk(&out, disk, err) : list_all(&out, err);
    if (rc >= 0 && cmd->json)
        render_json(json_incref(out.json));
    else if (rc >= 0)
        table_out_print(&out.table, "llllrr");
    json_decref(out.json);
    table_out_fini(&out.table);
    return rc;
}

static int run_list(const struct args *args)
{
    return volcmd_run(args, "job list", job_list);
}

#define DISK_OPERAND "POOL:VOLUME|SOCKET"

const struct command command_job_list = {
    .name = "job list",
    .summary = "list the merges that run on served disks",
    .text = "Of one disk, or of all served volumes of all pools. A path is taken for a control "
            "socket, of varve serve or of QEMU.",
    .operands = (const struct operand[]){{"[" DISK_OPERAND "]", COMPLETE_VOLUME}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, {0}},
    .example = "  varve job list local:100/vm-100-disk-0",
    .run = run_list,
};

/* ---- verbs ---- */

/* The job that is named, or the only one. The caller frees. */
SUSPENDS static int pick_job(const struct disk *d, const char *name, char **ret, struct err *err)
{
    json_t *jobs = NULL;
    int rc = 0;

    *ret = NULL;
    if (!name)
        rc = qmp_execute(d->qmp, "query-block-jobs", NULL, &jobs, err);
    size_t nr = json_array_size(jobs);
    if (rc == 0 && !name && nr == 0)
        rc = err_set(err, -ENOENT, "%s has no jobs", d->id);
    else if (rc == 0 && !name && nr > 1)
        rc = err_set(err, -EINVAL, "%s has %zu jobs: say which ('varve job list' shows them)",
                     d->id, nr);
    if (rc == 0) {
        *ret = strdup(name ? name : str_of(json_array_get(jobs, 0), "device"));
        rc = *ret ? 0 : err_set(err, -ENOMEM, "out of memory");
    }
    json_decref(jobs);
    return rc;
}

SUSPENDS static int do_verb(struct volcmd *cmd, const char *command, const char *job, json_t *more,
                            const char *said, struct err *err)
{
    _cleanup_(freep) char *id = NULL;
    _cleanup_(freep) char *line = NULL;
    struct disk d = {0};
    int rc = disk_open(cmd, args_operand(cmd->args, 0), &d, err);

    if (rc == 0)
        rc = pick_job(&d, job, &id, err);
    if (rc == 0) {
        json_object_set_new(more, "device", json_string(id));
        rc = qmp_execute(d.qmp, command, json_incref(more), NULL, err);
    }
    json_decref(more);
    if (rc == 0 && asprintf(&line, "job '%s' of %s %s", id, d.id, said) > 0)
        cmd->ctx.say(cmd->ctx.ctx, line);
    disk_close(&d);
    if (rc == 0)
        volcmd_done(cmd);
    return rc;
}

SUSPENDS static int job_pause(struct volcmd *cmd, struct err *err)
{
    return do_verb(cmd, "block-job-pause", args_operand(cmd->args, 1), json_object(), "pauses",
                   err);
}

SUSPENDS static int job_resume(struct volcmd *cmd, struct err *err)
{
    return do_verb(cmd, "block-job-resume", args_operand(cmd->args, 1), json_object(), "goes on",
                   err);
}

SUSPENDS static int job_cancel(struct volcmd *cmd, struct err *err)
{
    return do_verb(cmd, "block-job-cancel", args_operand(cmd->args, 1), json_object(),
                   "is cancelled", err);
}

SUSPENDS static int job_set_speed(struct volcmd *cmd, struct err *err)
{
    const char *last = args_operand(cmd->args, 2);
    const char *job = last ? args_operand(cmd->args, 1) : NULL;
    const char *text = last ? last : args_operand(cmd->args, 1);
    uint64_t speed;
    int rc = parse_size(text, &speed, err);

    if (rc == 0 && speed > INT64_MAX)
        rc = err_set(err, -ERANGE, "'%s' is too much", text);
    if (rc < 0)
        return rc;
    return do_verb(cmd, "block-job-set-speed", job, json_pack("{s:I}", "speed", (json_int_t)speed),
                   speed ? "has a new limit" : "has no limit", err);
}

#define RUN(verb)                                                                                  \
    static int run_##verb(const struct args *args)                                                 \
    {                                                                                              \
        return volcmd_run(args, "job", job_##verb);                                                \
    }
RUN(pause)
RUN(resume)
RUN(cancel)
RUN(set_speed)

#define DISK_AND_JOB                                                                               \
    (const struct operand[])                                                                       \
    {                                                                                              \
        {DISK_OPERAND, COMPLETE_VOLUME}, {"[JOB]"},                                                \
        {                                                                                          \
            0                                                                                      \
        }                                                                                          \
    }
#define VERB_OPTIONS                                                                               \
    (const struct option[])                                                                        \
    {                                                                                              \
        VOL_OPT_CONFIG, VOL_OPT_JSON,                                                              \
        {                                                                                          \
            0                                                                                      \
        }                                                                                          \
    }
#define JOB_TEXT "JOB may be left out where the disk has one job only. "

const struct command command_job_pause = {
    .name = "job pause",
    .summary = "let a job rest",
    .text = JOB_TEXT "What it has merged stays merged; the guest goes on writing.",
    .operands = DISK_AND_JOB,
    .options = VERB_OPTIONS,
    .example = "  varve job pause local:100/vm-100-disk-0",
    .run = run_pause,
};

const struct command command_job_resume = {
    .name = "job resume",
    .summary = "let a job go on that rests",
    .text = JOB_TEXT,
    .operands = DISK_AND_JOB,
    .options = VERB_OPTIONS,
    .example = "  varve job resume local:100/vm-100-disk-0",
    .run = run_resume,
};

const struct command command_job_cancel = {
    .name = "job cancel",
    .summary = "end a job before it is done",
    .text = JOB_TEXT "The disk reads the same as before. A deletion whose merge is cancelled has "
                     "failed; the snapshot stays until it is deleted again.",
    .operands = DISK_AND_JOB,
    .options = VERB_OPTIONS,
    .example = "  varve job cancel local:100/vm-100-disk-0",
    .run = run_cancel,
};

const struct command command_job_set_speed = {
    .name = "job set-speed",
    .summary = "limit how much a job copies a second",
    .text = JOB_TEXT "RATE is in bytes and takes the suffixes k, M, G and T; 0 is no limit.",
    .operands = (const struct operand[]){{DISK_OPERAND, COMPLETE_VOLUME}, {"[JOB]"}, {"RATE"}, {0}},
    .options = VERB_OPTIONS,
    .example = "  varve job set-speed local:100/vm-100-disk-0 50M",
    .run = run_set_speed,
};
