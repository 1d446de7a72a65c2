/*
 * The QMP server: a listener, and for each client a reader and a writer.
 *
 *   reader   receives, cuts, checks, runs the command, queues the answer; then the next one
 *   writer   sends what is queued: answers and events in the order in which they came up
 *
 * Invariants:
 * 1. A client's answers stand in its queue in the order of its commands.
 * 2. One command at a time runs in the whole server, apart from those marked out_of_band_safe.
 * 3. Nothing that a client does or omits makes another one wait, except through 2.
 * 4. The queue is bounded: a reader starts no command while too much is unsent, and a client
 *    whose events pile up is dropped.
 */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>
#include "base/list.h"
#include "qmp/qmp.h"
#include "qmp/schema.h"
#include "qmp/wire.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "rt/wait.h"

#define TEXT_MAX      ((size_t)1 << 20)   /* of one command */
#define EVENTS_MAX    ((size_t)1 << 20)   /* bytes of unsent events */
#define ANSWERS_MAX   ((size_t)256 << 10) /* unsent bytes above which no command is taken */
#define CLIENTS_MAX   64u
#define STOP_GRACE_NS NSEC_PER_SEC

struct qmp_server {
    char *path; /* owned */
    int listen_fd;
    const struct qmp_command *commands;
    void *ctx;
    struct list conns;
    unsigned nb_conns;
    bool stopping;
    bool refusing;       /* qmp_server_quiesce was called */
    bool command_runs;   /* invariant 2 */
    unsigned nb_running; /* commands, safe ones included */
    struct wait_queue command_wait, idle_wait;
    struct co_group group; /* listener and clients */
    struct timer grace;
};

struct qmp_conn { /* owned by its reader's coroutine */
    struct qmp_server *server;
    struct list link;
    int fd;
    bool negotiated;
    bool dead;    /* shut down; nothing is queued any more */
    bool closing; /* the reader has left */
    struct qmp_framer framer;
    char *out; /* owned; not yet taken by the writer */
    size_t out_len, out_cap;
    size_t sending;     /* bytes in the writer's hands */
    size_t event_bytes; /* of out */
    struct wait_queue out_wait, sent_wait;
};

/* ---- output ---- */
static void conn_drop(struct qmp_conn *conn)
{
    if (conn->dead)
        return;
    conn->dead = true;
    shutdown(conn->fd, SHUT_RDWR);
    wait_queue_wake_all(&conn->out_wait);
    wait_queue_wake_all(&conn->sent_wait);
}

static void conn_queue(struct qmp_conn *conn, const char *text, size_t len)
{
    if (conn->dead)
        return;
    if (conn->out_len + len > conn->out_cap) {
        size_t cap = MAX(conn->out_cap * 2, conn->out_len + len);
        char *grown = realloc(conn->out, cap);

        if (!grown) {
            conn_drop(conn);
            return;
        }
        conn->out = grown;
        conn->out_cap = cap;
    }
    memcpy(conn->out + conn->out_len, text, len);
    conn->out_len += len;
    wait_queue_wake_all(&conn->out_wait);
}

/* Takes msg. */
static void conn_answer(struct qmp_conn *conn, json_t *msg)
{
    size_t len;
    _cleanup_(freep) char *text = msg ? qmp_encode(msg, &len) : NULL;

    json_decref(msg);
    if (text)
        conn_queue(conn, text, len);
    else
        conn_drop(conn);
}

SUSPENDS static int conn_writer(void *arg)
{
    struct qmp_conn *conn = arg;

    while (!conn->dead) {
        if (conn->out_len == 0) {
            if (conn->closing)
                break;
            wait_queue_sleep(&conn->out_wait);
            continue;
        }
        _cleanup_(freep) char *text = TAKE_PTR(conn->out);
        conn->sending = conn->out_len;
        conn->out_len = conn->out_cap = conn->event_bytes = 0;
        if (qmp_send_all(conn->fd, text, conn->sending) < 0)
            conn_drop(conn);
        conn->sending = 0;
        wait_queue_wake_all(&conn->sent_wait);
    }
    return 0;
}

static json_t *timestamp(void)
{
    struct timeval now;

    gettimeofday(&now, NULL);
    return json_pack("{s:I, s:I}", "seconds", (json_int_t)now.tv_sec, "microseconds",
                     (json_int_t)now.tv_usec);
}

void qmp_event(struct qmp_server *server, const char *name, json_t *data)
{
    json_t *msg = json_pack("{s:o, s:s}", "timestamp", timestamp(), "event", name);
    size_t len;

    if (data && msg)
        json_object_set(msg, "data", data);
    _cleanup_(freep) char *text = msg ? qmp_encode(msg, &len) : NULL;
    json_decref(msg);
    json_decref(data);
    if (!text)
        return;
    list_for_each(it, &server->conns) {
        struct qmp_conn *conn = list_entry(it, struct qmp_conn, link);

        if (!conn->negotiated || conn->closing)
            continue;
        conn->event_bytes += len;
        if (conn->event_bytes > EVENTS_MAX)
            conn_drop(conn);
        else
            conn_queue(conn, text, len);
    }
}

/* ---- built-in commands ---- */
static json_t *version(void)
{
    unsigned major = 0, minor = 0, micro = 0;

    sscanf(VARVE_VERSION, "%u.%u.%u", &major, &minor, &micro);
    return json_pack("{s:{s:i, s:i, s:i}, s:s}", "qemu", "major", major, "minor", minor, "micro",
                     micro, "package", "varve " VARVE_VERSION);
}

static int cmd_query_version(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    *ret = version();
    return 0;
}

static const struct qmp_arg capabilities_args[] = {{"enable", 'A'}, {NULL}};
static const struct qmp_command builtins[] = {
    {"qmp_capabilities", NULL, capabilities_args, true},
    {"query-version", cmd_query_version, NULL, true},
    {"query-commands", NULL, NULL, true},
    {NULL},
};

static int negotiate(struct qmp_conn *conn, const json_t *args, struct err *err)
{
    const json_t *first = json_array_get(json_object_get(args, "enable"), 0);

    if (first && !json_is_string(first))
        return err_set(err, -EINVAL, "Invalid parameter type for 'enable', expected: string");
    if (first)
        return err_set(err, -EINVAL, "Capability '%s' is not available", json_string_value(first));
    conn->negotiated = true;
    return 0;
}

static void append_names(json_t *list, const struct qmp_command *commands)
{
    for (; commands->name; commands++)
        json_array_append_new(list, json_pack("{s:s}", "name", commands->name));
}

static const struct qmp_command *find_command(const struct qmp_command *commands, const char *name)
{
    for (; commands->name; commands++)
        if (strcmp(commands->name, name) == 0)
            return commands;
    return NULL;
}

/* ---- commands ---- */
/* Keeps invariant 2. */
SUSPENDS static int run_alone(struct qmp_server *server, const struct qmp_command *cmd,
                              json_t *args, json_t **ret, struct err *err)
{
    while (server->command_runs)
        wait_queue_sleep(&server->command_wait);
    if (server->refusing)
        return err_set(err, -ECANCELED, "The server is shutting down");
    server->command_runs = true;
    int rc = cmd->fn(server->ctx, args, ret, err);
    server->command_runs = false;
    wait_queue_wake_one(&server->command_wait);
    return rc;
}

SUSPENDS static int run_command(struct qmp_conn *conn, const struct qmp_command *cmd, json_t *args,
                                json_t **ret, struct err *err)
{
    struct qmp_server *server = conn->server;
    int rc;

    if (cmd->args == capabilities_args)
        return negotiate(conn, args, err);
    if (!cmd->fn) {
        *ret = json_array();
        append_names(*ret, builtins);
        append_names(*ret, server->commands);
        return 0;
    }
    if (server->refusing)
        return err_set(err, -ECANCELED, "The server is shutting down");
    server->nb_running++;
    if (cmd->out_of_band_safe)
        rc = cmd->fn(server->ctx, args, ret, err);
    else
        rc = run_alone(server, cmd, args, ret, err);
    server->nb_running--;
    wait_queue_wake_all(&server->idle_wait);
    return rc;
}

static const char *error_class(int rc)
{
    switch (rc) {
    case -ENODEV:
        return "DeviceNotFound";
    case -ESRCH:
        return "DeviceNotActive";
    case -ENOSYS:
        return "CommandNotFound";
    default:
        return "GenericError";
    }
}

/* Checks the outer form; *ret_name, *ret_args (may be NULL) and *ret_id are borrowed from msg. */
static int check_message(const json_t *msg, const char **ret_name, json_t **ret_args,
                         struct err *err)
{
    const char *key;
    json_t *value;
    json_t *name = json_object_get(msg, "execute");

    *ret_args = json_object_get(msg, "arguments");
    json_object_foreach(
        (json_t *)(uintptr_t)msg, key,
        value) if (strcmp(key, "execute") != 0 && strcmp(key, "arguments") != 0 &&
                   strcmp(key, "id") !=
                       0) return err_set(err, -EINVAL, "QMP input member '%s' is unexpected", key);
    if (!name)
        return err_set(err, -EINVAL, "QMP input lacks member 'execute'");
    if (!json_is_string(name))
        return err_set(err, -EINVAL, "QMP input member 'execute' must be a string");
    if (*ret_args && !json_is_object(*ret_args))
        return err_set(err, -EINVAL, "QMP input member 'arguments' must be an object");
    *ret_name = json_string_value(name);
    return 0;
}

static int find_allowed(struct qmp_conn *conn, const char *name, const struct qmp_command **ret,
                        struct err *err)
{
    const struct qmp_command *cmd = find_command(builtins, name);

    if (!cmd)
        cmd = find_command(conn->server->commands, name);
    if (!conn->negotiated && (!cmd || cmd->args != capabilities_args))
        return err_set(err, -ENOSYS, "Expecting capabilities negotiation with 'qmp_capabilities'");
    if (!cmd)
        return err_set(err, -ENOSYS, "The command %s has not been found", name);
    if (conn->negotiated && cmd->args == capabilities_args)
        return err_set(err, -ENOSYS,
                       "Capabilities negotiation is already complete, command ignored");
    *ret = cmd;
    return 0;
}

SUSPENDS static int execute(struct qmp_conn *conn, const json_t *msg, json_t **ret, struct err *err)
{
    const struct qmp_command *cmd = NULL;
    const char *name = NULL;
    json_t *args = NULL;

    if (!json_is_object(msg))
        return err_set(err, -EINVAL, "QMP input must be a JSON object");
    int rc = check_message(msg, &name, &args, err);
    if (rc == 0)
        rc = find_allowed(conn, name, &cmd, err);
    if (rc < 0)
        return rc;
    json_t *given = args ? json_incref(args) : json_object();
    rc = qmp_check_args(cmd->args, given, err);
    if (rc == 0)
        rc = run_command(conn, cmd, given, ret, err);
    json_decref(given);
    return rc;
}

SUSPENDS static void handle_text(struct qmp_conn *conn, const char *text, size_t len)
{
    struct err err = {0};
    json_t *msg = NULL, *ret = NULL, *answer;
    int rc = qmp_parse(text, len, &msg, &err);

    if (rc == 0)
        rc = execute(conn, msg, &ret, &err);
    if (rc < 0) {
        answer = json_pack("{s:{s:s, s:s}}", "error", "class", error_class(rc), "desc",
                           err.rc ? err_text(&err) : strerror(-rc));
        json_decref(ret);
    } else {
        answer = json_pack("{s:o}", "return", ret ? ret : json_object());
    }
    json_t *id = json_object_get(msg, "id");
    if (id && answer)
        json_object_set(answer, "id", id);
    json_decref(msg);
    conn_answer(conn, answer);
}

/* ---- clients ---- */
static json_t *greeting(void)
{
    return json_pack("{s:{s:o, s:[]}}", "QMP", "version", version(), "capabilities");
}

SUSPENDS static void read_commands(struct qmp_conn *conn)
{
    while (!conn->dead && !conn->server->stopping) {
        const char *text;
        size_t len;
        int rc = qmp_framer_next(&conn->framer, &text, &len);

        if (rc > 0) {
            handle_text(conn, text, len);
            while (!conn->dead && conn->out_len + conn->sending > ANSWERS_MAX)
                wait_queue_sleep(&conn->sent_wait);
            continue;
        }
        if (rc < 0) {
            conn_answer(conn, json_pack("{s:{s:s, s:s}}", "error", "class", "GenericError", "desc",
                                        "JSON parse error, message is too long or too deep"));
            return;
        }
        char *room = qmp_framer_room(&conn->framer);
        ssize_t n = room ? io_recv(conn->fd, room, QMP_RECV) : -ENOMEM;
        if (n == -EINTR)
            continue;
        if (n <= 0)
            return;
        qmp_framer_added(&conn->framer, (size_t)n);
    }
}

static void conn_free(struct qmp_conn *conn)
{
    list_remove(&conn->link);
    conn->server->nb_conns--;
    qmp_framer_fini(&conn->framer);
    free(conn->out);
    close(conn->fd);
    free(conn);
}

SUSPENDS static int conn_reader(void *arg)
{
    struct qmp_conn *conn = arg;
    struct co_group group;

    co_group_init(&group);
    conn_answer(conn, greeting());
    if (co_group_spawn(&group, conn_writer, conn) == 0)
        read_commands(conn);
    conn->closing = true;
    wait_queue_wake_all(&conn->out_wait);
    co_group_wait(&group);
    conn_free(conn);
    return 0;
}

/* Takes fd. */
static void serve_client(struct qmp_server *server, int fd)
{
    struct qmp_conn *conn = server->nb_conns < CLIENTS_MAX ? calloc(1, sizeof(*conn)) : NULL;

    if (!conn) {
        close(fd);
        return;
    }
    conn->server = server;
    conn->fd = fd;
    qmp_framer_init(&conn->framer, TEXT_MAX);
    wait_queue_init(&conn->out_wait);
    wait_queue_init(&conn->sent_wait);
    list_push_back(&server->conns, &conn->link);
    server->nb_conns++;
    if (co_group_spawn(&server->group, conn_reader, conn) < 0)
        conn_free(conn);
}

SUSPENDS static int listener(void *arg)
{
    struct qmp_server *server = arg;

    while (!server->stopping) {
        int fd = io_accept(server->listen_fd);

        if (fd >= 0 && !server->stopping)
            serve_client(server, fd);
        else if (fd >= 0)
            close(fd);
        else if (fd == -EINVAL || fd == -EBADF)
            break;
        else
            timer_sleep(50 * NSEC_PER_MSEC); /* out of descriptors or memory: try again */
    }
    return 0;
}

SUSPENDS int qmp_server_listen(const char *path, const struct qmp_command *commands, void *ctx,
                               struct qmp_server **ret, struct err *err)
{
    _cleanup_(freep) char *copy = strdup(path);
    _cleanup_(freep) struct qmp_server *server = calloc(1, sizeof(*server));

    if (!server || !copy)
        return err_errno(err, -ENOMEM, "QMP socket '%s'", path);
    server->listen_fd = qmp_listen_unix(path, err);
    if (server->listen_fd < 0)
        return err_prefix(err, server->listen_fd, "QMP socket");
    server->commands = commands;
    server->ctx = ctx;
    list_init(&server->conns);
    wait_queue_init(&server->command_wait);
    wait_queue_init(&server->idle_wait);
    co_group_init(&server->group);
    server->path = TAKE_PTR(copy);
    *ret = TAKE_PTR(server);
    return 0;
}

SUSPENDS int qmp_server_accept(struct qmp_server *server, struct err *err)
{
    int rc = co_group_spawn(&server->group, listener, server);

    return rc < 0 ? err_errno(err, rc, "QMP socket '%s'", server->path) : 0;
}

void qmp_server_set_commands(struct qmp_server *server, const struct qmp_command *commands)
{
    server->commands = commands;
}

SUSPENDS int qmp_server_start(const char *path, const struct qmp_command *commands, void *ctx,
                              struct qmp_server **ret, struct err *err)
{
    struct qmp_server *server;
    int rc = qmp_server_listen(path, commands, ctx, &server, err);

    if (rc == 0 && (rc = qmp_server_accept(server, err)) < 0)
        qmp_server_stop(server);
    else if (rc == 0)
        *ret = server;
    return rc;
}

static void grace_over(struct timer *t)
{
    struct qmp_server *server = container_of(t, struct qmp_server, grace);

    list_for_each(it, &server->conns)
        conn_drop(list_entry(it, struct qmp_conn, link));
}

SUSPENDS void qmp_server_stop(struct qmp_server *server)
{
    server->stopping = true;
    unlink(server->path);
    shutdown(server->listen_fd, SHUT_RDWR);
    /* Readers see the end of the stream; a command that runs finishes, its answer is sent. */
    list_for_each(it, &server->conns)
        shutdown(list_entry(it, struct qmp_conn, link)->fd, SHUT_RD);
    timer_init(&server->grace, grace_over);
    timer_arm(&server->grace, reactor_now() + STOP_GRACE_NS);
    co_group_wait(&server->group);
    timer_disarm(&server->grace);
    close(server->listen_fd);
    free(server->path);
    free(server);
}

SUSPENDS void qmp_server_quiesce(struct qmp_server *server)
{
    server->refusing = true;
    wait_queue_wake_all(&server->command_wait);
    while (server->nb_running > 0)
        wait_queue_sleep(&server->idle_wait);
}
