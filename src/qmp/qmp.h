/*
 * QMP: JSON objects over a unix socket. Wire: greeting {"QMP": {...}}, {"execute", "arguments",
 * "id"}, {"return"|"error", "id"}, {"event", "data", "timestamp"}; a client starts with
 * qmp_capabilities. JSON is jansson's json_t; "takes" = the reference is stolen.
 */
#ifndef VARVE_QMP_QMP_H
#define VARVE_QMP_QMP_H

#include <jansson.h>
#include <stdbool.h>
#include "base/err.h"
#include "rt/co.h"

/* ---- client ---- */
struct qmp_client;
/* Connects, reads the greeting, negotiates. -ENOENT/-ECONNREFUSED when nobody serves there. */
SUSPENDS int qmp_connect(const char *path, struct qmp_client **ret, struct err *err);
void qmp_client_free(struct qmp_client *qmp);     /* closes the socket */
pid_t qmp_peer_pid(const struct qmp_client *qmp); /* -1: unknown */
/* Executes; args may be NULL (takes). *ret (may be NULL) is a new reference to "return". A QMP
 * error gives -EREMOTEIO (or -ENOENT for class DeviceNotFound, -EOPNOTSUPP for CommandNotFound,
 * -EBUSY when desc says so) with desc as text. A dead peer gives -EPIPE. Events that arrive
 * meanwhile are kept for qmp_wait_event. */
SUSPENDS int qmp_execute(struct qmp_client *qmp, const char *command, json_t *args, json_t **ret,
                         struct err *err);
/* Next event whose name is `name` (NULL: any) and, if `key` is given, whose data[key] is the string
 * `value`. timeout in ns, 0 = none: -ETIMEDOUT. *ret is a new reference. */
SUSPENDS int qmp_wait_event(struct qmp_client *qmp, const char *name, const char *key,
                            const char *value, uint64_t timeout_ns, json_t **ret, struct err *err);

/* ---- server ---- */
struct qmp_server;
/* A command: returns 0 with *ret (new reference; NULL = {}) or negative with err set. The error
 * class is DeviceNotFound for -ENODEV, DeviceNotActive for -ESRCH, CommandNotFound is made by the
 * server, else GenericError. */
typedef int qmp_command_fn(void *ctx, json_t *args, json_t **ret, struct err *err);
/* One argument of a command; a command refuses unknown, missing and mistyped ones before it runs.
 */
struct qmp_arg {
    const char *name;
    char type; /* 's' string, 'i' integer, 'b' bool, 'o' object, 'a' array, 'n' string or null,
                  'd' any further members allowed (blockdev-add's options); upper case = optional */
};
struct qmp_command {
    const char *name;
    qmp_command_fn *fn;         /* runs in a coroutine: may wait */
    const struct qmp_arg *args; /* ends with name NULL; NULL: no arguments */
    bool out_of_band_safe;      /* may run while another command of any client runs */
};
/* Listens; commands ends with name NULL. Several clients at once; each client's commands run in
 * order. */
SUSPENDS int qmp_server_start(const char *path, const struct qmp_command *commands, void *ctx,
                              struct qmp_server **ret, struct err *err);
SUSPENDS void qmp_server_stop(struct qmp_server *server);
/* The same in two steps: from the first on clients can connect, from the second on they are heard.
 * A server that is stopped before the second drops them. */
SUSPENDS int qmp_server_listen(const char *path, const struct qmp_command *commands, void *ctx,
                               struct qmp_server **ret, struct err *err);
SUSPENDS int qmp_server_accept(struct qmp_server *server, struct err *err);
/* Another table of commands from now on; it must stay. */
void qmp_server_set_commands(struct qmp_server *server, const struct qmp_command *commands);
/* Before an orderly end: refuses further commands and waits for those that run. Events still go
 * out. */
SUSPENDS void qmp_server_quiesce(struct qmp_server *server);
/* Sends an event to every client that has negotiated. data is taken (may be NULL). Does not wait: a
 * client that does not read is dropped when its queue passes 1 MiB. */
void qmp_event(struct qmp_server *server, const char *name, json_t *data);

#endif
