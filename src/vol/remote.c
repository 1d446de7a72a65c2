/*
 * A disk that another process has open: what operations ask of it, in QMP. Nodes are found by the
 * file they have open, never by an assumed name.
 */
#include <stdio.h>
#include <string.h>
#include "qmp/qmp.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "vol/internal.h"

#define JOB_POLL_NS     (20 * NSEC_PER_MSEC)
#define DYING_SERVER_NS (3 * NSEC_PER_SEC)
#define HOLD_MS         2000 /* the longest a guest waits if this process dies */

struct remote {
    struct qmp_client *qmp; /* owned */
};

/* *ret NULL: nobody serves. */
SUSPENDS static int try_open(const char *qmp_path, struct qmp_client **ret, struct err *err)
{
    *ret = NULL;
    if (!socket_is_served(qmp_path)) /* no socket, or one that its dead server left */
        return 0;
    int rc = qmp_connect(qmp_path, ret, err);
    return rc == -ENOENT || rc == -ECONNREFUSED ? 0 : rc;
}

/* The kernel ends a killed server's sockets a moment after its process: until then they can still
 * be connected to, and the connection breaks. */
int remote_open_path(const char *qmp_path, struct remote **ret, struct err *err)
{
    uint64_t deadline = reactor_now() + DYING_SERVER_NS;
    struct qmp_client *qmp;
    int rc;

    *ret = NULL;
    while ((rc = try_open(qmp_path, &qmp, err)) == -EPIPE && reactor_now() < deadline)
        timer_sleep(JOB_POLL_NS);
    if (rc < 0 || !qmp)
        return rc;
    struct remote *r = calloc(1, sizeof(*r));
    if (!r) {
        qmp_client_free(qmp);
        return err_set(err, -ENOMEM, "out of memory");
    }
    r->qmp = qmp;
    *ret = r;
    return 0;
}

int remote_open(const struct catalog *cat, const struct cvol *vol, struct remote **ret,
                struct err *err)
{
    _cleanup_(freep) char *path = cvol_qmp_path(cat, vol);
    _cleanup_(remote_closep) struct remote *r = NULL;
    _cleanup_(freep) char *node = NULL;

    *ret = NULL;
    int rc = path ? remote_open_path(path, &r, err) : err_set(err, -ENOMEM, "out of memory");
    if (rc < 0 || !r)
        return rc;
    /* the socket's name has no suffix: a server of NAME.raw is not one of NAME.qcow2 */
    rc = vol->current ? remote_node(r, vol->current->path, NULL, &node, err) : 0;
    if (rc == 0 && node)
        *ret = TAKE_PTR(r);
    return rc;
}

void remote_close(struct remote *r)
{
    if (!r)
        return;
    qmp_client_free(r->qmp);
    free(r);
}

int remote_command(struct remote *r, const char *command, json_t *args, json_t **ret,
                   struct err *err)
{
    int rc = qmp_execute(r->qmp, command, args, ret, err);

    return rc < 0 ? err_prefix(err, rc, "%s", command) : 0;
}

/* ---- nodes ---- */

static const char *node_file(const json_t *node)
{
    const char *file = json_string_value(json_object_get(node, "file"));

    return file ? file
                : json_string_value(json_object_get(json_object_get(node, "image"), "filename"));
}

/* QEMU lists the protocol node "file" below a format node under the same file name. */
static bool is_format_node(const json_t *node)
{
    const char *drv = json_string_value(json_object_get(node, "drv"));

    return !drv || strcmp(drv, "qcow2") == 0 || strcmp(drv, "raw") == 0;
}

static bool has_file(const json_t *node, const char *path, bool by_inode)
{
    const char *file = node_file(node);

    return file && is_format_node(node) &&
           (by_inode ? store_same_file(file, path) : strcmp(file, path) == 0);
}

SUSPENDS static int find_node(struct remote *r, const char *path, const char *except,
                              unsigned passes, char **ret, struct err *err)
{
    json_t *nodes = NULL, *node;
    const char *found = NULL;
    size_t i;
    int rc = remote_command(r, "query-named-block-nodes", NULL, &nodes, err);

    *ret = NULL;
    for (unsigned by_inode = 0; by_inode < passes && !found; by_inode++)
        json_array_foreach(nodes, i, node)
        {
            const char *name = intent_str(node, "node-name");

            if (!found && (!except || strcmp(name, except) != 0) && has_file(node, path, by_inode))
                found = name;
        }
    if (found) {
        *ret = strdup(found);
        rc = *ret ? 0 : err_set(err, -ENOMEM, "out of memory");
    }
    json_decref(nodes);
    return rc;
}

int remote_node(struct remote *r, const char *path, const char *except, char **ret, struct err *err)
{
    return find_node(r, path, except, 2, ret, err);
}

int remote_node_size(struct remote *r, const char *node_name, uint64_t *ret, struct err *err)
{
    json_t *nodes = NULL, *node;
    size_t i;
    int rc = remote_command(r, "query-named-block-nodes", NULL, &nodes, err);

    *ret = 0;
    json_array_foreach(nodes, i, node)
    {
        const json_t *size = json_object_get(json_object_get(node, "image"), "actual-size");

        if (strcmp(intent_str(node, "node-name"), node_name) == 0)
            *ret = (uint64_t)json_integer_value(size);
    }
    json_decref(nodes);
    return rc;
}

int remote_node_called(struct remote *r, const char *path, const char *except, char **ret,
                       struct err *err)
{
    return find_node(r, path, except, 1, ret, err);
}

/* QEMU tells only what a node stands on. */
static bool in_disk(const json_t *node)
{
    return json_object_get(node, "x-varve-depth") ||
           json_object_get(json_object_get(node, "image"), "backing-image");
}

int remote_node_state(struct remote *r, const char *node_name, bool *ret_there, bool *ret_linked,
                      struct err *err)
{
    json_t *nodes = NULL, *node;
    bool tells = false;
    size_t i;
    int rc = remote_command(r, "query-named-block-nodes", NULL, &nodes, err);

    *ret_there = *ret_linked = false;
    json_array_foreach(nodes, i, node)
    {
        tells |= json_object_get(node, "x-varve-depth") != NULL;
    }
    json_array_foreach(nodes, i, node)
    {
        if (strcmp(intent_str(node, "node-name"), node_name) != 0)
            continue;
        *ret_there = true;
        *ret_linked = tells ? json_object_get(node, "x-varve-depth") != NULL : in_disk(node);
    }
    json_decref(nodes);
    return rc;
}

int remote_top(struct remote *r, char **ret, struct err *err)
{
    json_t *nodes = NULL, *node;
    size_t i;
    int rc = remote_command(r, "query-named-block-nodes", NULL, &nodes, err);

    *ret = NULL;
    json_array_foreach(nodes, i, node)
    {
        const json_t *depth = json_object_get(node, "x-varve-depth");

        if (depth && json_integer_value(depth) == 0)
            *ret = strdup(intent_str(node, "node-name"));
    }
    json_decref(nodes);
    return rc < 0 || *ret ? rc
                          : err_set(err, -ENOENT, "the server does not say which node is its disk");
}

int remote_add_node(struct remote *r, const char *node, const char *path, bool backing_chain,
                    struct err *err)
{
    json_t *args = json_pack("{s:s, s:s, s:{s:s, s:s}}", "driver", "qcow2", "node-name", node,
                             "file", "driver", "file", "filename", path);

    if (args && !backing_chain)
        json_object_set_new(args, "backing", json_null());
    return remote_command(r, "blockdev-add", args, NULL, err);
}

void remote_del_node(struct remote *r, const char *node)
{
    remote_command(r, "blockdev-del", json_pack("{s:s}", "node-name", node), NULL, NULL);
}

int remote_rename(struct remote *r, const char *node, const char *path, struct err *err)
{
    return remote_command(r, "x-varve-rename",
                          json_pack("{s:s, s:s}", "node-name", node, "filename", path), NULL, err);
}

int remote_rollback(struct remote *r, const char *node, bool force, struct err *err)
{
    return remote_command(r, "x-varve-rollback",
                          json_pack("{s:s, s:b}", "node-name", node, "force", force), NULL, err);
}

int remote_snapshot(struct remote *r, const char *top, const char *overlay, bool held,
                    struct err *err)
{
    json_t *args = json_pack("{s:s, s:s}", "node", top, "overlay", overlay);

    if (args && held)
        json_object_set_new(args, "x-varve-held", json_true());
    return remote_command(r, "blockdev-snapshot", args, NULL, err);
}

int remote_hold(struct remote *r, struct err *err)
{
    return remote_command(r, "x-varve-hold", json_pack("{s:i}", "timeout-ms", HOLD_MS), NULL, err);
}

void remote_release(struct remote *r)
{
    remote_command(r, "x-varve-release", NULL, NULL, NULL);
}

/* ---- exports of snapshots ---- */

void remote_export_snap(struct remote *r, const struct vol_ctx *ctx, const char *node,
                        const char *vol, const char *snap)
{
    _cleanup_(freep) char *name = NULL;
    struct err err = {0};

    if (asprintf(&name, "%s@%s", vol, snap) < 0)
        return;
    int rc = remote_command(r, "block-export-add",
                            json_pack("{s:s, s:s, s:s, s:s, s:b}", "type", "nbd", "id", name,
                                      "node-name", node, "name", name, "writable", 0),
                            NULL, &err);
    if (rc < 0 && ctx)
        op_say(ctx, "the snapshot is not exported as '%s': %s", name, err_text(&err));
}

static bool is_export_of(const json_t *export, const char *node)
{
    const char *name = json_string_value(json_object_get(export, "node-name"));

    return name && strcmp(name, node) == 0 &&
           !json_is_true(json_object_get(export, "x-varve-writable"));
}

int remote_unexport(struct remote *r, const char *node, unsigned *ret_nr, struct err *err)
{
    json_t *exports = NULL, *export;
    size_t i;
    int rc = remote_command(r, "query-block-exports", NULL, &exports, err);

    *ret_nr = 0;
    json_array_foreach(exports, i, export)
    {
        const char *id = json_string_value(json_object_get(export, "id"));

        if (rc < 0 || !id || !is_export_of(export, node))
            continue;
        rc = remote_command(r, "block-export-del", json_pack("{s:s}", "id", id), NULL, err);
        *ret_nr += rc == 0;
    }
    json_decref(exports);
    return rc;
}

/* ---- jobs ---- */

/* *ret NULL: there is no such job (any more). */
SUSPENDS static int find_job(struct remote *r, const char *id, json_t **ret, struct err *err)
{
    json_t *jobs = NULL, *job;
    size_t i;
    int rc = remote_command(r, "query-jobs", NULL, &jobs, err);

    *ret = NULL;
    json_array_foreach(jobs, i, job)
    {
        if (strcmp(intent_str(job, "id"), id) == 0)
            *ret = json_incref(job);
    }
    json_decref(jobs);
    return rc;
}

int remote_job_find(struct remote *r, const char *prefix, char **ret, struct err *err)
{
    json_t *jobs = NULL, *job;
    size_t i;
    int rc = remote_command(r, "query-jobs", NULL, &jobs, err);

    *ret = NULL;
    json_array_foreach(jobs, i, job)
    {
        if (!*ret && strncmp(intent_str(job, "id"), prefix, strlen(prefix)) == 0)
            *ret = strdup(intent_str(job, "id"));
    }
    json_decref(jobs);
    return rc;
}

int remote_job_state(struct remote *r, const char *job, char **ret, struct err *err)
{
    json_t *found;
    int rc = find_job(r, job, &found, err);

    *ret = NULL;
    if (rc < 0 || !found)
        return rc;
    *ret = strdup(intent_str(found, "status"));
    json_decref(found);
    return *ret ? 0 : err_set(err, -ENOMEM, "out of memory");
}

/* A concluded job's result; dismisses it. */
SUSPENDS static int conclude(struct remote *r, const char *id, const json_t *job, struct err *err)
{
    const char *error = json_string_value(json_object_get(job, "error"));
    int rc = 0;

    if (error)
        rc = err_set(err, strstr(error, "cancel") ? -ECANCELED : -EIO, "merge: %s", error);
    remote_command(r, "job-dismiss", json_pack("{s:s}", "id", id), NULL, NULL);
    return rc;
}

int remote_job_wait(struct remote *r, const struct vol_ctx *ctx, const char *job, bool manual,
                    bool *ret_ready, struct err *err)
{
    *ret_ready = false;
    for (;;) {
        json_t *found;
        int rc = find_job(r, job, &found, err);

        if (rc < 0)
            return rc;
        if (!found) /* dismissed by somebody else: its result is lost */
            return err_set(err, -ECANCELED, "merge: job '%s' has gone", job);
        const char *state = intent_str(found, "status");
        bool over = strcmp(state, "concluded") == 0;
        bool ready = strcmp(state, "ready") == 0 || (manual && strcmp(state, "pending") == 0);
        if (ctx->progress)
            ctx->progress(ctx->ctx,
                          (uint64_t)json_integer_value(json_object_get(found, "current-progress")),
                          (uint64_t)json_integer_value(json_object_get(found, "total-progress")));
        if (over)
            rc = conclude(r, job, found, err);
        json_decref(found);
        if (over || ready) {
            *ret_ready = ready;
            return rc;
        }
        timer_sleep(JOB_POLL_NS);
    }
}
