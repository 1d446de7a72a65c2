/* The table of QMP commands; query-commands shows it. */
#include "serve/internal.h"

int cmd_quit(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    serve_ask_stop(ctx, "host-qmp-quit");
    return 0;
}

static const struct qmp_arg flat_args[] = {{"flat", 'B'}, {NULL}};
static const struct qmp_arg add_args[] = {
    {"driver", 's'},        {"node-name", 'S'},
    {"file", 'o'},          {"read-only", 'B'},
    {"backing", 'N'},       {"cache", 'O'},
    {"discard", 'S'},       {"discard-no-unref", 'B'},
    {"detect-zeroes", 'S'}, {NULL},
};
static const struct qmp_arg node_args[] = {{"node-name", 's'}, {NULL}};
static const struct qmp_arg snapshot_args[] = {
    {"node", 's'}, {"overlay", 's'}, {"x-varve-held", 'B'}, {NULL}};
static const struct qmp_arg hold_args[] = {{"timeout-ms", 'I'}, {NULL}};
static const struct qmp_arg transaction_args[] = {{"actions", 'a'}, {NULL}};
static const struct qmp_arg resize_args[] = {
    {"device", 'S'}, {"node-name", 'S'}, {"size", 'i'}, {NULL}};
static const struct qmp_arg rollback_args[] = {{"node-name", 's'}, {"force", 'B'}, {NULL}};
static const struct qmp_arg rename_args[] = {{"node-name", 's'}, {"filename", 's'}, {NULL}};
static const struct qmp_arg commit_args[] = {
    {"job-id", 'S'},   {"device", 's'},        {"base-node", 'S'},    {"base", 'S'},
    {"top-node", 'S'}, {"top", 'S'},           {"backing-file", 'S'}, {"speed", 'I'},
    {"on-error", 'S'}, {"auto-finalize", 'B'}, {"auto-dismiss", 'B'}, {NULL},
};
static const struct qmp_arg stream_args[] = {
    {"job-id", 'S'},       {"device", 's'}, {"base-node", 'S'}, {"base", 'S'},
    {"backing-file", 'S'}, {"speed", 'I'},  {"on-error", 'S'},  {"auto-finalize", 'B'},
    {"auto-dismiss", 'B'}, {NULL},
};
static const struct qmp_arg id_args[] = {{"id", 's'}, {NULL}};
static const struct qmp_arg device_args[] = {{"device", 's'}, {NULL}};
static const struct qmp_arg cancel_args[] = {{"device", 's'}, {"force", 'B'}, {NULL}};
static const struct qmp_arg speed_args[] = {{"device", 's'}, {"speed", 'i'}, {NULL}};
static const struct qmp_arg nbd_start_args[] = {{"addr", 'o'}, {"max-connections", 'I'}, {NULL}};
static const struct qmp_arg export_add_args[] = {
    {"type", 's'},     {"id", 's'}, {"node-name", 's'}, {"name", 'S'}, {"description", 'S'},
    {"writable", 'B'}, {NULL},
};
static const struct qmp_arg export_del_args[] = {{"id", 's'}, {"mode", 'S'}, {NULL}};

const struct qmp_command serve_commands[] = {
    {"query-named-block-nodes", cmd_query_nodes, flat_args, true},
    {"query-block-exports", cmd_query_exports, NULL, true},
    {"query-jobs", cmd_query_jobs, NULL, true},
    {"query-block-jobs", cmd_query_block_jobs, NULL, true},
    {"x-varve-stats", cmd_stats, NULL, true},
    {"blockdev-add", cmd_blockdev_add, add_args, false},
    {"blockdev-del", cmd_blockdev_del, node_args, false},
    {"blockdev-snapshot", cmd_snapshot, snapshot_args, false},
    {"x-varve-hold", cmd_hold, hold_args, false},
    {"x-varve-release", cmd_release, NULL, false},
    {"transaction", cmd_transaction, transaction_args, false},
    {"block_resize", cmd_resize, resize_args, false},
    {"x-varve-rollback", cmd_rollback, rollback_args, false},
    {"x-varve-rename", cmd_rename, rename_args, false},
    {"block-commit", cmd_commit, commit_args, false},
    {"block-stream", cmd_stream, stream_args, false},
    {"job-pause", cmd_job_pause, id_args, true},
    {"job-resume", cmd_job_resume, id_args, true},
    {"job-cancel", cmd_job_cancel, id_args, true},
    {"job-complete", cmd_job_complete, id_args, true},
    {"job-finalize", cmd_job_finalize, id_args, true},
    {"job-dismiss", cmd_job_dismiss, id_args, true},
    {"block-job-pause", cmd_job_pause, device_args, true},
    {"block-job-resume", cmd_job_resume, device_args, true},
    {"block-job-cancel", cmd_job_cancel, cancel_args, true},
    {"block-job-complete", cmd_job_complete, device_args, true},
    {"block-job-finalize", cmd_job_finalize, id_args, true},
    {"block-job-dismiss", cmd_job_dismiss, id_args, true},
    {"block-job-set-speed", cmd_job_set_speed, speed_args, true},
    {"nbd-server-start", cmd_nbd_start, nbd_start_args, false},
    {"nbd-server-stop", cmd_nbd_stop, NULL, false},
    {"block-export-add", cmd_export_add, export_add_args, false},
    {"block-export-del", cmd_export_del, export_del_args, false},
    {"quit", cmd_quit, NULL, true},
    {NULL},
};
