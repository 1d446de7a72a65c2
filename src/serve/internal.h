/*
 * The server of one disk: what its files share. One reactor; no field needs a lock. QMP runs one
 * changing command at a time, so a command may wait with the lists in a sound state; jobs may
 * change the chain's shape meanwhile, so layers are looked up again after a wait.
 */
#ifndef VARVE_SERVE_INTERNAL_H
#define VARVE_SERVE_INTERNAL_H

#include <jansson.h>
#include "base/list.h"
#include "base/vec.h"
#include "chain/chain.h"
#include "export/export.h"
#include "job/job.h"
#include "qmp/qmp.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "serve/serve.h"

struct serve_nbd { /* one listening NBD server */
    struct list link;
    struct nbd_server *nbd; /* owned */
    bool by_qmp;            /* nbd-server-start */
};

struct serve_export_on { /* an export as one server has it */
    struct serve_nbd *server;
    struct nbd_export *exp; /* owned by the server */
};
struct serve_export { /* one name, offered by every server */
    struct list link;
    char *id, *name, *description; /* owned; description may be NULL */
    bool writable;
    bool by_qmp;         /* block-export-add */
    struct layer *layer; /* a fixed view (in use as long as we have it); NULL: the live disk */
    VEC(struct serve_export_on) on;
};

struct serve_node { /* added by blockdev-add, not part of the disk yet */
    struct list link;
    struct layer *layer; /* owned; opened without what is below it, or */
    struct chain *chain; /* owned; with it */
};

struct serve_job { /* what job_info does not tell */
    struct list link;
    char *id;
    bool auto_finalize, auto_dismiss;
};

enum hold_state {
    HOLD_NONE,
    HOLD_CLOSING, /* requests inside finish */
    HOLD_HELD,
    HOLD_PUSHING, /* a snapshot is taken */
    HOLD_ENDING,
};
struct serve_hold { /* hold.c */
    enum hold_state state;
    uint64_t ms;           /* how long at most */
    struct layer *overlay; /* HOLD_PUSHING: the disk's new top */
    struct pivot_stats pivot;
    struct err err;
    int rc;
    struct co_cond changed;
    struct co_group group;
};

struct serve {
    const struct serve_opts *opts;
    struct chain *chain; /* owned; the disk */
    struct jobs *jobs;
    struct qmp_server *qmp;    /* NULL: no control socket */
    struct reactors *reactors; /* owned; where NBD sessions run */
    struct list nbds, exports, nodes, job_notes;
    struct pivot_stats last_pivot;
    struct serve_hold hold;
    struct co_group group; /* signals */
    struct co *signal_co;
    int signal_fd;
    bool incoming;           /* incoming.c: the chain is a stand-in */
    const char *stop_reason; /* set: the end was asked for */
    struct wait_queue stop_wait;
    struct timer watch;
    struct co_group write_back_group; /* writes changes of the map back in the background */
    struct co_cond write_back_kick;
    bool write_back_stop;
    struct { /* loads the map in the background */
        struct co_group group;
        bool stop;
    } preload;
    char ack_note[256]; /* told last */
    bool damage_told;
};

/* ---- serve.c ---- */
void serve_ask_stop(struct serve *s, const char *reason);
/* Sends an event if there is a control socket. Takes data. */
void serve_event(struct serve *s, const char *name, json_t *data);
/* For every layer that is opened. */
struct image_grow_opts serve_grow_opts(struct serve *s);
/* One line on stderr. */
void serve_warn(const struct serve *s, const char *fmt, ...) PRINTF_LIKE(2, 3);

/* Opens an image with what is below it, by the options. */
SUSPENDS int serve_open_chain(struct serve *s, const char *path, const char *format,
                              struct chain **ret, struct err *err);

/* ---- incoming.c ---- */
SUSPENDS int serve_open_incoming(struct serve *s, struct err *err);
extern const struct qmp_command serve_incoming_commands[];

/* ---- hold.c ---- */
/* No other change of the disk's shape now: -EBUSY. */
int serve_refuse_held(const struct serve *s, struct err *err);
bool serve_is_held(const struct serve *s);
/* Puts the overlay on top and ends the hold; takes it on success. */
SUSPENDS int serve_hold_push(struct serve *s, struct layer *overlay, struct pivot_stats *ret,
                             struct err *err);
/* Ends a hold, if there is one: nothing has changed. */
SUSPENDS void serve_hold_end(struct serve *s);

/* ---- preload.c ---- */
void serve_preload_start(struct serve *s); /* if it was asked for */
SUSPENDS void serve_preload_end(struct serve *s);

/* ---- notify.c ---- */
/* Tells the service manager, if there is one ($NOTIFY_SOCKET): "READY=1", ... */
void serve_notify(const char *text);

/* ---- exports.c ---- */
/* Starts the servers of opts->exports and offers the disk and its snapshots on them. */
SUSPENDS int serve_exports_start(struct serve *s, struct err *err);
/* Requests in flight finish, clients are dropped. */
SUSPENDS void serve_exports_stop(struct serve *s);
/* Offers a layer of the disk read-only. */
SUSPENDS int serve_add_snapshot(struct serve *s, const struct serve_snapshot *snap,
                                struct err *err);
void serve_exports_print(const struct serve *s);
struct serve_export *serve_export_find(struct serve *s, const char *id);
/* Offers a new export on every server. layer NULL: the live disk. */
SUSPENDS int serve_export_add(struct serve *s, const char *id, const char *name,
                              const char *description, struct layer *layer, bool writable,
                              struct serve_export **ret, struct err *err);
/* force false: -EBUSY while it has clients. */
SUSPENDS int serve_export_remove(struct serve *s, struct serve_export *e, bool force,
                                 struct err *err);
SUSPENDS int serve_nbd_start(struct serve *s, const struct nbd_server_opts *opts, bool by_qmp,
                             struct err *err);
SUSPENDS void serve_nbd_stop(struct serve *s, struct serve_nbd *n);
unsigned serve_export_clients(const struct serve_export *e);
void serve_export_stats(const struct serve_export *e, struct export_stats *ret);
/* Clients that may write to the disk now. */
unsigned serve_writers(const struct serve *s);
/* For a rollback: drops clients of the live disk, puts `chain` under it, moves snapshot exports to
 * its layers of the same files and drops those it does not have; then lets clients in again. */
SUSPENDS void serve_exports_suspend(struct serve *s);
SUSPENDS void serve_exports_switch(struct serve *s, struct chain *chain);

/* ---- nodes.c ---- */
/* Index of the disk's layer with this name (also "", the volume's name for the top), or -ENOENT. */
int serve_find_layer(const struct serve *s, const char *name);
struct serve_node *serve_find_node(struct serve *s, const char *name);
/* Any layer that this process has open. */
struct layer *serve_any_layer(struct serve *s, const char *name);
int serve_no_node(const char *device, const char *name, struct err *err); /* QEMU's text */
SUSPENDS int serve_node_close(struct serve_node *node, struct err *err);  /* frees */
void serve_node_free(struct serve_node *node);        /* what is open was taken elsewhere */
bool serve_name_ok(const char *name, size_t max_len); /* as QEMU's ids */

/* ---- commands, a file each group ---- */
int cmd_query_nodes(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_query_exports(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_query_jobs(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_query_block_jobs(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_stats(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_blockdev_add(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_blockdev_del(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_hold(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_release(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_snapshot(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_transaction(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_resize(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_rollback(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_rename(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_commit(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_stream(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_job_pause(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_job_resume(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_job_cancel(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_job_complete(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_job_finalize(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_job_dismiss(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_job_set_speed(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_nbd_start(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_nbd_stop(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_export_add(void *ctx, json_t *args, json_t **ret, struct err *err);
SUSPENDS int cmd_export_del(void *ctx, json_t *args, json_t **ret, struct err *err);
int cmd_quit(void *ctx, json_t *args, json_t **ret, struct err *err);
extern const struct qmp_command serve_commands[];
/* The jobs' callback. */
void serve_job_event(void *ctx, const struct job_info *info, enum job_event event);
void serve_job_note_free(struct serve_job *note);

/* Arguments that the table has checked already; NULL or the default when absent. */
static inline const char *arg_str(const json_t *args, const char *name)
{
    return json_string_value(json_object_get(args, name));
}
static inline bool arg_bool(const json_t *args, const char *name, bool otherwise)
{
    const json_t *v = json_object_get(args, name);

    return v ? json_is_true(v) : otherwise;
}
static inline int64_t arg_int(const json_t *args, const char *name, int64_t otherwise)
{
    const json_t *v = json_object_get(args, name);

    return v ? (int64_t)json_integer_value(v) : otherwise;
}
static inline json_t *json_u64(uint64_t v)
{
    return json_integer((json_int_t)v);
}

#endif
