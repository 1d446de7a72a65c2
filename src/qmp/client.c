/*
 * The QMP client. One coroutine at a time uses a client; commands are numbered, so an answer is
 * known by its id and whatever comes between is kept as an event.
 *
 * Once the stream is broken (end, garbage, too long) every later call fails with -EPIPE.
 */
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include "base/vec.h"
#include "qmp/qmp.h"
#include "qmp/wire.h"
#include "rt/reactor.h"
#include "rt/timer.h"

#define TEXT_MAX   ((size_t)64 << 20)
#define EVENTS_MAX 65536u

struct qmp_client {
    int fd;
    bool broken;
    json_int_t last_id;
    struct qmp_framer framer;
    VEC(json_t *) events; /* owned references, oldest first */
};

pid_t qmp_peer_pid(const struct qmp_client *qmp)
{
    struct ucred peer = {.pid = -1};
    socklen_t len = sizeof(peer);

    return getsockopt(qmp->fd, SOL_SOCKET, SO_PEERCRED, &peer, &len) < 0 ? -1 : peer.pid;
}

static int broken(struct qmp_client *qmp, struct err *err, const char *why)
{
    qmp->broken = true;
    return err_set(err, -EPIPE, "QMP connection lost: %s", why);
}

/* Next message of the peer; *ret is a new reference to an object. */
SUSPENDS static int recv_message(struct qmp_client *qmp, uint64_t deadline, json_t **ret,
                                 struct err *err)
{
    const char *text;
    size_t len;

    for (;;) {
        int rc = qmp_framer_next(&qmp->framer, &text, &len);

        if (rc < 0)
            return broken(qmp, err, "the peer's message is too long or too deep");
        if (rc > 0)
            break;
        char *room = qmp_framer_room(&qmp->framer);
        if (!room)
            return broken(qmp, err, "out of memory");
        ssize_t n = qmp_recv_until(qmp->fd, room, QMP_RECV, deadline);
        if (n == -ETIMEDOUT)
            return err_set(err, -ETIMEDOUT, "no answer in time");
        if (n == -EINTR)
            continue;
        if (n <= 0)
            return broken(qmp, err, n < 0 ? strerror((int)-n) : "the peer closed it");
        qmp_framer_added(&qmp->framer, (size_t)n);
    }
    json_t *msg;
    int rc = qmp_parse(text, len, &msg, NULL);
    if (rc < 0)
        return broken(qmp, err, "the peer does not speak JSON");
    if (!json_is_object(msg)) {
        json_decref(msg);
        return broken(qmp, err, "the peer does not speak QMP");
    }
    *ret = msg;
    return 0;
}

/* Takes msg. */
static void keep_event(struct qmp_client *qmp, json_t *msg)
{
    if (qmp->events.len >= EVENTS_MAX) {
        json_decref(qmp->events.data[0]);
        vec_remove_at(&qmp->events, 0);
    }
    if (vec_push(&qmp->events, msg) < 0)
        json_decref(msg);
}

/* What a QMP error means as a code: QEMU gives a class only in few cases, the text in others. */
static int code_of(const char *class, const char *desc)
{
    static const struct {
        const char *part;
        int rc;
    } parts[] = {
        {"busy", -EBUSY},           {"in use", -EBUSY},     {"Failed to find", -ENOENT},
        {"Cannot find", -ENOENT},   {"not found", -ENOENT}, {"is not found", -ENOENT},
        {"No space left", -ENOSPC}, {"is being ", -EBUSY},  {"is open on host", -EBUSY},
    };

    if (strcmp(class, "DeviceNotFound") == 0 || strcmp(class, "DeviceNotActive") == 0)
        return -ENOENT;
    if (strcmp(class, "CommandNotFound") == 0)
        return -EOPNOTSUPP;
    for (size_t i = 0; i < ARRAY_SIZE(parts); i++)
        if (strcasestr(desc, parts[i].part))
            return parts[i].rc;
    return -EREMOTEIO;
}

static int remote_error(const json_t *error, struct err *err)
{
    const char *class = json_string_value(json_object_get(error, "class"));
    const char *desc = json_string_value(json_object_get(error, "desc"));

    if (!desc)
        desc = "unknown QMP error";
    return err_set(err, code_of(class ? class : "", desc), "%s", desc);
}

SUSPENDS static int send_command(struct qmp_client *qmp, const char *command, json_t *args,
                                 struct err *err)
{
    json_t *msg = json_pack("{s:s, s:I}", "execute", command, "id", ++qmp->last_id);
    size_t len;

    if (args && msg)
        json_object_set(msg, "arguments", args);
    _cleanup_(freep) char *text = msg ? qmp_encode(msg, &len) : NULL;
    json_decref(msg);
    if (!text)
        return err_errno(err, -ENOMEM, "encode '%s'", command);
    int rc = qmp_send_all(qmp->fd, text, len);
    return rc < 0 ? broken(qmp, err, strerror(-rc)) : 0;
}

SUSPENDS static int recv_answer(struct qmp_client *qmp, json_t **ret, struct err *err)
{
    for (;;) {
        json_t *msg;
        int rc = recv_message(qmp, 0, &msg, err);

        if (rc < 0)
            return rc;
        if (json_object_get(msg, "event")) {
            keep_event(qmp, msg);
            continue;
        }
        json_t *error = json_object_get(msg, "error");
        json_t *value = json_object_get(msg, "return");
        const json_t *id = json_object_get(msg, "id");
        bool ours = id ? json_integer_value(id) == qmp->last_id : error != NULL;
        if (ours && error)
            rc = remote_error(error, err);
        else if (ours && value && ret)
            *ret = json_incref(value);
        json_decref(msg);
        if (ours && (error || value))
            return rc;
    }
}

SUSPENDS int qmp_execute(struct qmp_client *qmp, const char *command, json_t *args, json_t **ret,
                         struct err *err)
{
    int rc = qmp->broken ? err_set(err, -EPIPE, "QMP connection lost") : 0;

    if (rc == 0)
        rc = send_command(qmp, command, args, err);
    json_decref(args);
    if (rc == 0)
        rc = recv_answer(qmp, ret, err);
    return rc;
}

static bool event_matches(const json_t *msg, const char *name, const char *key, const char *value)
{
    const char *event = json_string_value(json_object_get(msg, "event"));
    const char *got =
        key ? json_string_value(json_object_get(json_object_get(msg, "data"), key)) : NULL;

    if (!event || (name && strcmp(event, name) != 0))
        return false;
    return !key || (got && strcmp(got, value) == 0);
}

SUSPENDS int qmp_wait_event(struct qmp_client *qmp, const char *name, const char *key,
                            const char *value, uint64_t timeout_ns, json_t **ret, struct err *err)
{
    uint64_t deadline = timeout_ns ? reactor_now() + timeout_ns : 0;

    for (size_t i = 0; i < qmp->events.len; i++) {
        if (event_matches(qmp->events.data[i], name, key, value)) {
            *ret = qmp->events.data[i];
            vec_remove_at(&qmp->events, i);
            return 0;
        }
    }
    if (qmp->broken)
        return err_set(err, -EPIPE, "QMP connection lost");
    for (;;) {
        json_t *msg;
        int rc = recv_message(qmp, deadline, &msg, err);

        if (rc < 0)
            return rc;
        if (event_matches(msg, name, key, value)) {
            *ret = msg;
            return 0;
        }
        if (json_object_get(msg, "event"))
            keep_event(qmp, msg);
        else
            json_decref(msg);
    }
}

void qmp_client_free(struct qmp_client *qmp)
{
    if (!qmp)
        return;
    vec_for_each(event, &qmp->events)
        json_decref(*event);
    vec_free(&qmp->events);
    qmp_framer_fini(&qmp->framer);
    if (qmp->fd >= 0)
        close(qmp->fd);
    free(qmp);
}

static void qmp_client_freep(struct qmp_client **qmp)
{
    qmp_client_free(*qmp);
}

SUSPENDS int qmp_connect(const char *path, struct qmp_client **ret, struct err *err)
{
    _cleanup_(qmp_client_freep) struct qmp_client *qmp = calloc(1, sizeof(*qmp));
    json_t *greeting;

    if (!qmp)
        return err_errno(err, -ENOMEM, "connect to '%s'", path);
    qmp_framer_init(&qmp->framer, TEXT_MAX);
    qmp->fd = qmp_connect_unix(path, err);
    if (qmp->fd < 0)
        return qmp->fd;
    int rc = recv_message(qmp, reactor_now() + QMP_ANSWER_NS, &greeting, err);
    if (rc < 0)
        return err_prefix(err, rc, "QMP socket '%s'", path);
    bool ok = json_is_object(json_object_get(greeting, "QMP"));
    json_decref(greeting);
    if (!ok)
        return err_set(err, -EPROTO, "'%s' is not a QMP socket", path);
    rc = qmp_execute(qmp, "qmp_capabilities", NULL, NULL, err);
    if (rc < 0)
        return err_prefix(err, rc, "QMP socket '%s'", path);
    *ret = TAKE_PTR(qmp);
    return 0;
}
