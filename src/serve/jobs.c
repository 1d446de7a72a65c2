/*
 * Jobs over QMP: starting them, the verbs, queries and events.
 *
 * A verb exists twice, as job-X {id} and block-job-X {device}; both name the job.
 */
#include <ctype.h>
#include <string.h>
#include "serve/internal.h"

/* ---- notes: what a query shows and job_info does not have ---- */
static struct serve_job *find_note(struct serve *s, const char *id)
{
    list_for_each(it, &s->job_notes) {
        struct serve_job *note = list_entry(it, struct serve_job, link);

        if (strcmp(note->id, id) == 0)
            return note;
    }
    return NULL;
}

void serve_job_note_free(struct serve_job *note)
{
    list_remove(&note->link);
    free(note->id);
    free(note);
}

static struct serve_job *note_new(struct serve *s, const struct job_opts *opts)
{
    struct serve_job *note = calloc(1, sizeof(*note));

    if (!note || !(note->id = strdup(opts->id))) {
        free(note);
        return NULL;
    }
    note->auto_finalize = opts->auto_finalize;
    note->auto_dismiss = opts->auto_dismiss;
    list_push_back(&s->job_notes, &note->link);
    return note;
}

/* ---- events ---- */
static json_t *block_job_data(const struct job_info *info)
{
    return json_pack("{s:s, s:s, s:I, s:I, s:I}", "type", job_type_name(info->type), "device",
                     info->id, "len", (json_int_t)info->total_bytes, "offset",
                     (json_int_t)info->done_bytes, "speed", (json_int_t)info->speed);
}

static void state_event(struct serve *s, const struct job_info *info)
{
    struct serve_job *note = find_note(s, info->id);

    serve_event(s, "JOB_STATUS_CHANGE",
                json_pack("{s:s, s:s}", "status", job_state_name(info->state), "id", info->id));
    if (info->state == JOB_PENDING && note && !note->auto_finalize)
        serve_event(s, "BLOCK_JOB_PENDING",
                    json_pack("{s:s, s:s}", "type", job_type_name(info->type), "id", info->id));
    if (info->state == JOB_NULL && note)
        serve_job_note_free(note);
}

/* A job that failed also "completes", with an error. */
static void failed_event(struct serve *s, const struct job_info *info)
{
    const char *text = info->error[0] ? info->error : strerror(-info->rc);
    json_t *data = block_job_data(info);

    json_object_set_new(data, "error", json_string(text));
    serve_event(s, "BLOCK_JOB_COMPLETED", data);
    serve_warn(s, "job '%s' failed: %s", info->id, text);
}

void serve_job_event(void *ctx, const struct job_info *info, enum job_event event)
{
    struct serve *s = ctx;

    switch (event) {
    case JOB_EVENT_STATE:
        state_event(s, info);
        break;
    case JOB_EVENT_READY:
        serve_event(s, "BLOCK_JOB_READY", block_job_data(info));
        break;
    case JOB_EVENT_COMPLETED:
        serve_event(s, "BLOCK_JOB_COMPLETED", block_job_data(info));
        break;
    case JOB_EVENT_CANCELLED:
        serve_event(s, "BLOCK_JOB_CANCELLED", block_job_data(info));
        break;
    case JOB_EVENT_ERROR:
        serve_event(s, "BLOCK_JOB_ERROR",
                    json_pack("{s:s, s:s, s:s}", "device", info->id, "operation",
                              info->type == JOB_COMMIT ? "write" : "read", "action", "report"));
        failed_event(s, info);
        break;
    }
}

/* ---- start ---- */
static int parse_job(struct serve *s, json_t *args, struct job_opts *ret, struct err *err)
{
    int64_t speed = arg_int(args, "speed", 0);
    const char *on_error = arg_str(args, "on-error");

    *ret = (struct job_opts){
        .id = arg_str(args, "job-id"),
        .speed = (uint64_t)speed,
        .auto_finalize = arg_bool(args, "auto-finalize", true),
        .auto_dismiss = arg_bool(args, "auto-dismiss", true),
        .backing_name = arg_str(args, "backing-file"),
    };
    int rc = serve_refuse_held(s, err);
    if (rc < 0)
        return rc;
    if (!ret->id)
        return err_set(err, -EINVAL, "An explicit job ID is required for this node");
    if (!serve_name_ok(ret->id, 255))
        return err_set(err, -EINVAL, "Invalid job ID '%s'", ret->id);
    if (find_note(s, ret->id))
        return err_set(err, -EEXIST, "Job ID '%s' already in use", ret->id);
    if (speed < 0)
        return err_set(err, -EINVAL, "Parameter 'speed' expects a non-negative value");
    if (on_error && strcmp(on_error, "report") != 0)
        return err_set(err, -EINVAL, "Parameter 'on-error' does not accept value '%s'", on_error);
    if (!chain_is_writable(s->chain))
        return err_set(err, -EROFS, "The disk is served read-only");
    return 0;
}

/* A layer given by node name or by file name; the one at `otherwise` when neither is given. */
static int pick_layer(struct serve *s, json_t *args, const char *by_node, const char *by_file,
                      unsigned otherwise, unsigned *ret, struct err *err)
{
    const char *node = arg_str(args, by_node), *file = arg_str(args, by_file);

    if (node && file)
        return err_set(err, -EINVAL, "'%s' and '%s' are mutually exclusive", by_node, by_file);
    *ret = otherwise;
    if (node) {
        int index = chain_find_layer(s->chain, node);

        if (index < 0)
            return serve_no_node("", node, err);
        *ret = (unsigned)index;
    }
    if (!file)
        return 0;
    for (unsigned i = 0; i < chain_depth(s->chain); i++) {
        if (strcmp(layer_path(chain_layer(s->chain, i)), file) == 0) {
            *ret = i;
            return 0;
        }
    }
    return err_set(err, -ENOENT, "Can't find '%s' in the backing chain", file);
}

static int check_below(struct serve *s, unsigned top, unsigned base, struct err *err)
{
    if (base > top)
        return 0;
    return err_set(err, -EINVAL, "Node '%s' is not a backing image of '%s'",
                   layer_node_name(chain_layer(s->chain, base)),
                   layer_node_name(chain_layer(s->chain, top)));
}

SUSPENDS int cmd_commit(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    const char *device = arg_str(args, "device");
    int index = serve_find_layer(s, device);
    unsigned top, base;
    struct job_opts opts;

    if (index < 0)
        return err_set(err, -ENODEV, "Device '%s' not found", device);
    if (index > 0)
        return err_set(err, -EINVAL, "Need a root block node");
    int rc = parse_job(s, args, &opts, err);
    if (rc == 0)
        rc = pick_layer(s, args, "top-node", "top", 0, &top, err);
    if (rc == 0)
        rc = pick_layer(s, args, "base-node", "base", chain_depth(s->chain) - 1, &base, err);
    if (rc < 0)
        return rc;
    if (top == base)
        return err_set(err, -EINVAL, "cannot commit an image into itself");
    if (top == 0 && opts.backing_name)
        return err_set(err, -EINVAL, "'backing-file' specified, but 'top' is the active layer");
    rc = check_below(s, top, base, err);
    if (rc < 0)
        return rc;
    struct serve_job *note = note_new(s, &opts);
    if (!note)
        return err_errno(err, -ENOMEM, "start job '%s'", opts.id);
    rc = job_commit(s->jobs, s->chain, chain_layer(s->chain, top), chain_layer(s->chain, base),
                    &opts, err);
    if (rc < 0 && (note = find_note(s, opts.id)))
        serve_job_note_free(note);
    return rc;
}

SUSPENDS int cmd_stream(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    const char *device = arg_str(args, "device");
    int top = serve_find_layer(s, device);
    unsigned depth = chain_depth(s->chain), base;
    struct job_opts opts;

    if (top < 0)
        return serve_no_node(device, device, err);
    int rc = parse_job(s, args, &opts, err);
    if (rc == 0)
        rc = pick_layer(s, args, "base-node", "base", depth, &base, err);
    if (rc == 0)
        rc = check_below(s, (unsigned)top, base, err);
    if (rc < 0)
        return rc;
    if (base == depth && opts.backing_name)
        return err_set(err, -EINVAL, "backing file specified, but streaming the entire chain");
    struct serve_job *note = note_new(s, &opts);
    if (!note)
        return err_errno(err, -ENOMEM, "start job '%s'", opts.id);
    rc = job_stream(s->jobs, s->chain, chain_layer(s->chain, (unsigned)top),
                    base < depth ? chain_layer(s->chain, base) : NULL, &opts, err);
    if (rc < 0 && (note = find_note(s, opts.id)))
        serve_job_note_free(note);
    return rc;
}

/* ---- verbs ---- */
/* The job's name from either form of the command; checks that there is one. */
static int job_id(struct serve *s, json_t *args, const char **ret, struct err *err)
{
    const char *id = arg_str(args, "id"), *device = arg_str(args, "device");

    *ret = id ? id : device;
    if (find_note(s, *ret))
        return 0;
    if (id)
        return err_set(err, -ENOENT, "Job not found");
    return err_set(err, -ESRCH, "Block job '%s' not found", device);
}

/* The engine's texts begin in lower case, QEMU's do not. */
static int as_qemu(int rc, struct err *err)
{
    if (rc < 0 && err)
        err->text[0] = (char)toupper((unsigned char)err->text[0]);
    return rc;
}

#define VERB(name, call)                                                                           \
    int cmd_job_##name(void *ctx, json_t *args, json_t **ret, struct err *err)                     \
    {                                                                                              \
        struct serve *s = ctx;                                                                     \
        const char *id;                                                                            \
        int rc = job_id(s, args, &id, err);                                                        \
                                                                                                   \
        return rc < 0 ? rc : as_qemu((call), err);                                                 \
    }
VERB(pause, job_pause(s->jobs, id, err))
VERB(resume, job_resume(s->jobs, id, err))
/* job-cancel always means it; block-job-cancel of a ready job only ends the mirroring of writes */
VERB(cancel, job_cancel(s->jobs, id, arg_bool(args, "force", arg_str(args, "id") != NULL), err))
VERB(complete, job_complete(s->jobs, id, err))
VERB(finalize, job_finalize(s->jobs, id, err))
VERB(dismiss, job_dismiss(s->jobs, id, err))

int cmd_job_set_speed(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    int64_t speed = arg_int(args, "speed", 0);
    const char *id;
    int rc = job_id(s, args, &id, err);

    if (rc < 0)
        return rc;
    if (speed < 0)
        return err_set(err, -EINVAL, "Parameter 'speed' expects a non-negative value");
    return as_qemu(job_set_speed(s->jobs, id, (uint64_t)speed, err), err);
}

/* ---- queries ---- */
struct job_list {
    struct serve *s;
    json_t *list;
};

static void set_error(json_t *obj, const struct job_info *info)
{
    if (info->rc < 0)
        json_object_set_new(obj, "error",
                            json_string(info->error[0] ? info->error : strerror(-info->rc)));
}

static void add_job(void *ctx, const struct job_info *info)
{
    struct job_list *jobs = ctx;
    json_t *obj = json_pack("{s:s, s:s, s:s, s:I, s:I, s:I}", "id", info->id, "type",
                            job_type_name(info->type), "status", job_state_name(info->state),
                            "current-progress", (json_int_t)info->done_bytes, "total-progress",
                            (json_int_t)info->total_bytes, "x-varve-max-stall-ns",
                            (json_int_t)info->max_stall_ns);

    set_error(obj, info);
    json_array_append_new(jobs->list, obj);
}

static void add_block_job(void *ctx, const struct job_info *info)
{
    struct job_list *jobs = ctx;
    struct serve_job *note = find_note(jobs->s, info->id);
    json_t *obj = block_job_data(info);
    bool ready = info->state == JOB_READY || info->state == JOB_STANDBY;

    json_object_set_new(obj, "status", json_string(job_state_name(info->state)));
    json_object_set_new(obj, "ready", json_boolean(ready));
    json_object_set_new(obj, "paused", json_boolean(info->paused));
    json_object_set_new(obj, "busy", json_boolean(info->state == JOB_RUNNING));
    json_object_set_new(obj, "io-status", json_string("ok"));
    json_object_set_new(obj, "auto-finalize", json_boolean(!note || note->auto_finalize));
    json_object_set_new(obj, "auto-dismiss", json_boolean(!note || note->auto_dismiss));
    set_error(obj, info);
    json_array_append_new(jobs->list, obj);
}

int cmd_query_jobs(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct job_list jobs = {ctx, json_array()};

    jobs_each(jobs.s->jobs, add_job, &jobs);
    *ret = jobs.list;
    return 0;
}

int cmd_query_block_jobs(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct job_list jobs = {ctx, json_array()};

    jobs_each(jobs.s->jobs, add_block_job, &jobs);
    *ret = jobs.list;
    return 0;
}
