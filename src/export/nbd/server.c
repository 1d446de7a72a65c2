/*
 * Accepts connections, bounds their number, ends them.
 *
 *   accepted -> negotiating -> transmission -> (answers sent) -> gone
 *
 * Invariants: 1. a connection is on server->conns from adoption to its end, and its slot is taken
 * as long; 2. its coroutine alone closes its socket, everybody else shuts it down; 3. its timer
 * runs while it negotiates and while it is being closed.
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

/* ---- one connection ---- */

void nbd_conn_fail(struct nbd_conn *conn)
{
    conn->closing = conn->failed = true;
    shutdown(conn->fd, SHUT_RDWR);
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
    io_cancel(conn->co);
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
    free(conn);
    server->nr_conns--;
    wait_queue_wake_one(&server->slot_wait);
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
        nbd_session(conn);
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
    conn->in.buf = buf_get(NBD_INPUT_LEN);
    if (!conn->in.buf) {
        free(conn);
        return NULL;
    }
    conn->server = server;
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

/* While all slots are taken, clients wait in the socket's backlog. */
SUSPENDS_UNCHECKED static int accept_run(void *arg)
{
    struct nbd_listener *l = arg;
    struct nbd_server *server = l->server;

    l->co = co_self();
    while (!server->stopping) {
        if (server->nr_conns >= server->max_conns) {
            wait_queue_sleep(&server->slot_wait);
            continue;
        }
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
    wait_queue_wake_all(&server->slot_wait);
    co_group_wait(&server->accepting);
    nbd_unlisten(server);
}

/* ---- the server ---- */

int nbd_server_start(const struct nbd_server_opts *opts, struct nbd_server **ret, struct err *err)
{
    struct nbd_server *server = calloc(1, sizeof(*server));

    if (!server)
        return err_errno(err, -ENOMEM, "NBD server");
    server->max_conns = opts->max_connections ? opts->max_connections : DEFAULT_CONNECTIONS;
    server->handshake_ns = NBD_HANDSHAKE_NS;
    server->stop_ns = NBD_STOP_NS;
    list_init(&server->exports);
    list_init(&server->conns);
    co_group_init(&server->accepting);
    co_group_init(&server->serving);
    wait_queue_init(&server->slot_wait);
    wait_queue_init(&server->gone_wait);
    wait_queue_init(&server->resume_wait);
    /* each further listener may accept one more while the others take the last slot */
    nbd_memory_init(&server->memory, opts->buffer_bytes ? opts->buffer_bytes : DEFAULT_BUFFER_BYTES,
                    server->max_conns + NBD_MAX_LISTENERS - 1);
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
    co_group_wait(&server->serving);
    while (!list_empty(&server->exports))
        nbd_export_free(list_entry(server->exports.next, struct nbd_export, node));
    free(server->address);
    free(server->unix_path);
    free(server);
}

const char *nbd_server_address(const struct nbd_server *server)
{
    return server->address ? server->address : "";
}
