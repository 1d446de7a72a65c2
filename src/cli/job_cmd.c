/* varve job list, pause, resume, cancel, set-speed: the long work of served disks, by QMP. */
#include <stdio.h>
#include <string.h>
#include "cli/served.h"

/* ---- list ---- */

struct job_list {
    struct table_out table;
    json_t *json;
};

/* QEMU's query-block-jobs: so the same goes for its processes. */
static void list_job(struct job_list *out, const struct served *d, const json_t *job)
{
    char done[32], total[32], speed[40];
    uint64_t at = json_num(job, "offset"), end = json_num(job, "len"),
             rate = json_num(job, "speed");
    _cleanup_(freep) char *progress = NULL;
    json_t *copy = json_deep_copy(job);

    snprintf(speed, sizeof(speed), "%s%s", rate ? render_size(rate, done, sizeof(done)) : "-",
             rate ? "/s" : "");
    if (asprintf(&progress, "%s of %s", render_size(at, done, sizeof(done)),
                 render_size(end, total, sizeof(total))) < 0)
        progress = NULL;
    table_out_row(&out->table, d->id, json_str(job, "device"), json_str(job, "type"),
                  json_str(job, "status"), progress ? progress : "-", speed);
    json_object_set_new(copy, "disk", json_string(d->id));
    json_array_append_new(out->json, copy);
}

SUSPENDS_UNCHECKED static int list_disk(struct served *d, void *ctx, struct err *err)
{
    struct job_list *out = ctx;
    json_t *jobs = NULL, *job;
    size_t i;
    int rc = qmp_execute(d->qmp, "query-block-jobs", NULL, &jobs, err);

    json_array_foreach(jobs, i, job) list_job(out, d, job);
    json_decref(jobs);
    return rc;
}

SUSPENDS static int job_list(struct volcmd *cmd, struct err *err)
{
    struct job_list out = {.table = {.cols = 6}, .json = json_array()};

    table_out_row(&out.table, "DISK", "JOB", "TYPE", "STATE", "DONE", "LIMIT");
    int rc = served_each(cmd, list_disk, &out, err);
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

const struct command command_job_list = {
    .name = "job list",
    .summary = "list the merges that run on served disks",
    .text = "Of one disk, or of all served volumes of all pools. A path is taken for a control "
            "socket, of varve serve or of QEMU.",
    .operands = (const struct operand[]){{"[" SERVED_OPERAND "]", COMPLETE_VOLUME}, {0}},
    .options = (const struct option[]){VOL_OPT_CONFIG, VOL_OPT_JSON, {0}},
    .example = "  varve job list local:100/vm-100-disk-0",
    .run = run_list,
};

/* ---- verbs ---- */

/* The job that is named, or the only one. The caller frees. */
SUSPENDS static int pick_job(const struct served *d, const char *name, char **ret, struct err *err)
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
        *ret = strdup(name ? name : json_str(json_array_get(jobs, 0), "device"));
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
    struct served d;
    int rc = served_open(cmd, args_operand(cmd->args, 0), &d, err);

    if (rc == 0)
        rc = pick_job(&d, job, &id, err);
    if (rc == 0) {
        json_object_set_new(more, "device", json_string(id));
        rc = qmp_execute(d.qmp, command, json_incref(more), NULL, err);
    }
    json_decref(more);
    if (rc == 0 && asprintf(&line, "job '%s' of %s %s", id, d.id, said) > 0)
        cmd->ctx.say(cmd->ctx.ctx, line);
    served_close(&d);
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
        {SERVED_OPERAND, COMPLETE_VOLUME}, {"[JOB]"},                                              \
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
    .operands =
        (const struct operand[]){{SERVED_OPERAND, COMPLETE_VOLUME}, {"[JOB]"}, {"RATE"}, {0}},
    .options = VERB_OPTIONS,
    .example = "  varve job set-speed local:100/vm-100-disk-0 50M",
    .run = run_set_speed,
};
