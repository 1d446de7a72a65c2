/*
 * Accepts connections, bounds their number, ends them.
 *
 *   accepted -> negotiating -> transmission -> (answers sent) -> gone
 *
 * Invariants: 1. a connection is on server->conns from adoption to its end; at most max_conns have
 * a slot, which one takes that asks for an export; at most NBD_NEGOTIATORS have none, and of those
 * the one that was silent for longest makes room for another; 2. its coroutine alone closes its
 * socket, everybody else shuts it down; 3. its timer runs while it negotiates and while it is being
 * closed;
 * 4. all of this is the home reactor's; only nbd_session() may run on another.
 */
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include "base/check.h"
#include "export/nbd/internal.h"
#include "rt/buf.h"
#include "rt/reactor.h"

#define DEFAULT_CONNECTIONS  16u
#define DEFAULT_BUFFER_BYTES ((uint64_t)16 << 20)
#define ACCEPT_RETRY_NS      (100 * NSEC_PER_MSEC)
#define NO_SILENCE           UINT64_MAX /* as heard_at: it waits for us */

/* ---- one connection ---- */

void nbd_conn_fail(struct nbd_conn *conn)
{
    conn->closing = conn->failed = true;
    shutdown(conn->fd, SHUT_RDWR);
}

static void cancel_receiver(struct mail *m)
{
    const struct nbd_conn *conn = container_of(m, struct nbd_conn, cancel);

    if (conn->receiver)
        io_cancel(conn->receiver);
}

/* Once is enough: with `closing` set nothing is received any more. */
static void stop_receiving(struct nbd_conn *conn)
{
    if (conn->reactor == conn->server->home) {
        io_cancel(conn->co);
    } else if (!conn->cancel_sent) {
        conn->cancel_sent = true;
        conn->cancel.fn = cancel_receiver;
        mail_send(conn->reactor, &conn->cancel);
    }
}

void nbd_conn_close(struct nbd_conn *conn, uint64_t limit_ns)
{
    uint64_t deadline = reactor_now() + limit_ns;

    if (!conn->exp) {
        nbd_conn_fail(conn);
        return;
    }
    if (!conn->closing || deadline < conn->timer.deadline)
        timer_arm(&conn->timer, deadline);
    conn->closing = true;
    stop_receiving(conn);
}

static void conn_timeout(struct timer *t)
{
    nbd_conn_fail(container_of(t, struct nbd_conn, timer));
}

/* Closing a TCP socket with unread input resets it, and the peer may lose its last answers. */
SUSPENDS
static void linger(struct nbd_conn *conn)
{
    if (!conn->is_tcp || conn->failed)
        return;
    shutdown(conn->fd, SHUT_WR);
    timer_arm(&conn->timer, reactor_now() + NBD_LINGER_NS);
    conn->in.stop = NULL;
    nbd_input_skip(&conn->in, UINT64_MAX);
}

static void conn_free(struct nbd_conn *conn)
{
    struct nbd_server *server = conn->server;

    timer_disarm(&conn->timer);
    close(conn->fd);
    buf_put(conn->in.buf, NBD_INPUT_LEN);
    vec_free(&conn->reply);
    list_remove(&conn->node);
    server->nr_conns--;
    server->nr_slots -= conn->has_slot;
    free(conn);
    wait_queue_wake_one(&server->slot_wait);
    co_cond_broadcast(&server->room);
}

int nbd_conn_take_slot(struct nbd_conn *conn)
{
    struct nbd_server *server = conn->server;

    if (conn->has_slot)
        return 0;
    if (server->nr_slots >= server->max_conns) {
        /* it is not late: it waits for others */
        timer_disarm(&conn->timer);
        conn->heard_at = NO_SILENCE;
        while (server->nr_slots >= server->max_conns && !conn->closing)
            wait_queue_sleep(&server->slot_wait);
        if (!conn->closing)
            timer_arm(&conn->timer, reactor_now() + server->handshake_ns);
    }
    if (conn->closing)
        return -ESHUTDOWN;
    conn->has_slot = true;
    server->nr_slots++;
    co_cond_broadcast(&server->room);
    return 0;
}

SUSPENDS
static int nothing(void *arg)
{
    return 0;
}

/* Transmission on the reactor that is the connection's from here on. */
SUSPENDS
static void run_session(struct nbd_conn *conn)
{
    struct nbd_server *server = conn->server;
    struct reactor *r = server->reactors ? reactors_get(server->reactors) : server->home;

    if (r == server->home) {
        nbd_session(conn);
    } else {
        conn->reactor = r;
        if (reactor_call(r, nbd_session, conn) < 0)
            nbd_conn_fail(conn);
        /* letters arrive in order: after this one, ours has been read */
        while (conn->cancel_sent && reactor_call(r, nothing, NULL) < 0)
            reactor_yield();
        conn->reactor = server->home;
    }
    co_group_wait(&conn->running);
    if (server->reactors)
        reactors_put(server->reactors, r);
}

SUSPENDS_UNCHECKED static int conn_run(void *arg)
{
    struct nbd_conn *conn = arg;

    conn->co = co_self();
    timer_arm(&conn->timer, reactor_now() + conn->server->handshake_ns);
    int rc = nbd_negotiate(conn);
    vec_free(&conn->reply);
    if (rc == 0 && !conn->closing) {
        timer_disarm(&conn->timer);
        run_session(conn);
    }
    nbd_export_detach(conn);
    linger(conn);
    conn_free(conn);
    return 0;
}

static void prepare_socket(struct nbd_conn *conn)
{
    int one = 1, domain = AF_UNIX;
    socklen_t len = sizeof(domain);

    getsockopt(conn->fd, SOL_SOCKET, SO_DOMAIN, &domain, &len);
    conn->is_tcp = domain != AF_UNIX;
    if (!conn->is_tcp)
        return;
    setsockopt(conn->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
    setsockopt(conn->fd, SOL_SOCKET, SO_KEEPALIVE, &one, sizeof(one));
}

static struct nbd_conn *conn_new(struct nbd_server *server, int fd)
{
    struct nbd_conn *conn = calloc(1, sizeof(*conn));

    if (!conn)
        return NULL;
    conn->in.buf = buf_get_kept(NBD_INPUT_LEN);
    if (!conn->in.buf) {
        free(conn);
        return NULL;
    }
    conn->server = server;
    conn->reactor = server->home;
    conn->heard_at = reactor_now();
    conn->fd = conn->in.fd = fd;
    conn->in.stop = &conn->closing;
    list_init(&conn->node);
    list_init(&conn->out);
    list_init(&conn->free_requests);
    timer_init(&conn->timer, conn_timeout);
    wait_queue_init(&conn->free_wait);
    wait_queue_init(&conn->out_wait);
    co_group_init(&conn->running);
    co_group_init(&conn->sending);
    prepare_socket(conn);
    return conn;
}

int nbd_server_adopt(struct nbd_server *server, int fd)
{
    struct nbd_conn *conn = server->stopping ? NULL : conn_new(server, fd);

    if (!conn) {
        close(fd);
        return server->stopping ? -ESHUTDOWN : -ENOMEM;
    }
    list_push_back(&server->conns, &conn->node);
    server->nr_conns++;
    int rc = co_group_spawn(&server->serving, conn_run, conn);
    if (rc < 0)
        conn_free(conn);
    return rc;
}

/* ---- accepting ---- */

static unsigned nr_without_slot(const struct nbd_server *server)
{
    return server->nr_conns - server->nr_slots;
}

/* Those that wait for a suspended export or a slot are not silent. */
static struct nbd_conn *most_silent(const struct nbd_server *server)
{
    struct nbd_conn *found = NULL;

    list_for_each(it, &server->conns) {
        struct nbd_conn *conn = list_entry(it, struct nbd_conn, node);

        if (!conn->has_slot && !conn->closing && (!found || conn->heard_at < found->heard_at))
            found = conn;
    }
    return found;
}

/*
 * Waits until one more may come. While all slots are taken clients wait in the socket's backlog,
 * and so they do while too many negotiate, but for a moment: then a silent one has to go.
 */
SUSPENDS
static void await_room(struct nbd_server *server)
{
    while (!server->stopping) {
        if (server->nr_slots >= server->max_conns) {
            co_cond_wait(&server->room, NULL);
            continue;
        }
        if (nr_without_slot(server) < NBD_NEGOTIATORS)
            return;
        struct nbd_conn *conn = most_silent(server);
        uint64_t limit = conn ? conn->heard_at : 0;
        if (conn && conn->heard_at != NO_SILENCE)
            limit += NBD_SILENCE_NS;
        if (conn && limit <= reactor_now()) {
            nbd_conn_fail(conn);
            co_cond_wait(&server->room, NULL);
            continue;
        }
        (void)co_cond_wait_until(&server->room, NULL, conn ? limit : NO_SILENCE);
    }
}

SUSPENDS_UNCHECKED static int accept_run(void *arg)
{
    struct nbd_listener *l = arg;
    struct nbd_server *server = l->server;

    l->co = co_self();
    while (!server->stopping) {
        await_room(server);
        if (server->stopping)
            break;
        int fd = io_accept(l->fd);
        if (fd >= 0)
            fd = nbd_server_adopt(server, fd);
        if (fd == -EMFILE || fd == -ENFILE || fd == -ENOMEM || fd == -ENOBUFS)
            timer_sleep(ACCEPT_RETRY_NS);
        else if (fd == -EINVAL || fd == -EBADF)
            break;
    }
    l->co = NULL;
    return 0;
}

static int start_accepting(struct nbd_server *server, struct err *err)
{
    for (unsigned i = 0; i < server->nr_listeners; i++) {
        int rc = co_group_spawn(&server->accepting, accept_run, &server->listeners[i]);

        if (rc < 0)
            return err_errno(err, rc, "NBD server");
    }
    return 0;
}

SUSPENDS
static void stop_accepting(struct nbd_server *server)
{
    for (unsigned i = 0; i < server->nr_listeners; i++) {
        struct nbd_listener *l = &server->listeners[i];

        shutdown(l->fd, SHUT_RDWR);
        if (l->co)
            io_cancel(l->co);
    }
    co_cond_broadcast(&server->room);
    co_group_wait(&server->accepting);
    nbd_unlisten(server);
}

/* ---- the server ---- */

int nbd_server_start(const struct nbd_server_opts *opts, struct nbd_server **ret, struct err *err)
{
    struct nbd_server *server = calloc(1, sizeof(*server));

    if (!server)
        return err_errno(err, -ENOMEM, "NBD server");
    server->home = reactor_self();
    server->reactors = opts->reactors;
    server->route_from = NBD_ROUTE_FROM;
    server->max_conns = opts->max_connections ? opts->max_connections : DEFAULT_CONNECTIONS;
    server->handshake_ns = NBD_HANDSHAKE_NS;
    server->stop_ns = NBD_STOP_NS;
    list_init(&server->exports);
    list_init(&server->conns);
    co_group_init(&server->accepting);
    co_group_init(&server->serving);
    wait_queue_init(&server->slot_wait);
    co_cond_init(&server->room);
    wait_queue_init(&server->gone_wait);
    wait_queue_init(&server->resume_wait);
    nbd_memory_init(&server->memory, opts->buffer_bytes ? opts->buffer_bytes : DEFAULT_BUFFER_BYTES,
                    server->max_conns);
    int rc = nbd_listen(server, opts, err);
    if (rc == 0)
        rc = start_accepting(server, err);
    if (rc < 0) {
        nbd_server_stop(server);
        return rc;
    }
    *ret = server;
    return 0;
}

void nbd_server_stop(struct nbd_server *server)
{
    if (!server)
        return;
    server->stopping = true;
    stop_accepting(server);
    list_for_each(it, &server->conns) {
        nbd_conn_close(list_entry(it, struct nbd_conn, node), server->stop_ns);
    }
    wait_queue_wake_all(&server->resume_wait);
    wait_queue_wake_all(&server->slot_wait);
    co_group_wait(&server->serving);
    while (!list_empty(&server->exports))
        nbd_export_free(list_entry(server->exports.next, struct nbd_export, node));
    free(server->address);
    free(server->unix_path);
    nbd_memory_fini(&server->memory);
    free(server);
}

const char *nbd_server_address(const struct nbd_server *server)
{
    return server->address ? server->address : "";
}
