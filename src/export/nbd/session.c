/*
 * Transmission: requests in, one coroutine for each, answers out (output.c). On whatever reactor
 * the connection was given; the requests run at home.
 *
 * Invariants: 1. at most NBD_REQUESTS of a connection are taken and not yet sent; 2. the payload of
 * a write has been received whole before any of it is written, unless payload memory is too short
 * for it (then in pieces); 3. whatever is refused, its payload is skipped, so the stream stays in
 * step.
 */
#include <errno.h>
#include "base/check.h"
#include "export/nbd/internal.h"
#include "rt/reactor.h"

#define EXTENTS_LEN ((size_t)16 << 10) /* buffer for one context's extents */

/* ---- requests ---- */

struct nbd_request *nbd_request_get(struct nbd_conn *conn)
{
    while (list_empty(&conn->free_requests))
        wait_queue_sleep(&conn->free_wait);
    conn->nr_taken++;
    return list_entry(list_pop_front(&conn->free_requests), struct nbd_request, node);
}

void nbd_request_free(struct nbd_request *req)
{
    nbd_share_give(&req->conn->share, &req->grant);
    list_push_front(&req->conn->free_requests, &req->node);
    req->conn->nr_taken--;
    wait_queue_wake_one(&req->conn->free_wait);
}

static int alloc_requests(struct nbd_conn *conn)
{
    conn->requests = calloc(NBD_REQUESTS, sizeof(*conn->requests));
    if (!conn->requests)
        return -ENOMEM;
    for (unsigned i = 0; i < NBD_REQUESTS; i++) {
        conn->requests[i].conn = conn;
        wait_queue_init(&conn->requests[i].sent);
        list_push_back(&conn->free_requests, &conn->requests[i].node);
    }
    return 0;
}

/* ---- receiving ---- */

/* The next request's header: 1 and *ret, 0 when no more may be taken, -errno. */
SUSPENDS
static int next_header(struct nbd_conn *conn, struct nbd_wire_request *ret)
{
    int rc = conn->closing ? 0 : nbd_input_need(&conn->in, sizeof(*ret));

    if (rc < 0 || conn->closing)
        return rc < 0 && !conn->closing ? rc : 0;
    rc = nbd_input_copy(&conn->in, ret, sizeof(*ret));
    if (rc < 0)
        return rc;
    if (be32_get(ret->magic) != NBD_MAGIC_REQUEST)
        return -EPROTO;
    return be16_get(ret->type) != NBD_CMD_DISC;
}

/* Payload that does not fit into memory: received and written piece by piece, in this coroutine. */
SUSPENDS
static int write_in_pieces(struct nbd_request *req, unsigned *ret_error)
{
    struct nbd_input *in = &req->conn->in;

    for (uint32_t done = 0; done < req->len;) {
        size_t n = MIN(req->grant.len, (size_t)(req->len - done));
        int rc = nbd_input_copy(in, req->grant.data, n);

        if (rc < 0)
            return rc;
        if (*ret_error == NBD_OK)
            *ret_error = nbd_command_write(req, req->off + done, req->grant.data, n);
        done += (uint32_t)n;
    }
    return 0;
}

/* 0: *ret_run tells whether the request is to be run, else it was answered. -errno: close. */
SUSPENDS
static int take_write(struct nbd_request *req, unsigned error, bool *ret_run)
{
    struct nbd_conn *conn = req->conn;
    bool too_long = req->len > NBD_MAX_REQUEST_LEN; /* it is refused where it would be run */
    int rc = 0;

    if (error == NBD_OK && req->len > 0 && !too_long &&
        nbd_share_take(&conn->share, req->len, &req->grant) < 0)
        error = NBD_ENOMEM;
    *ret_run = error == NBD_OK && (too_long || req->grant.len >= req->len);
    if (error != NBD_OK || too_long)
        rc = nbd_input_skip(&conn->in, req->len);
    else if (*ret_run)
        rc = nbd_input_copy(&conn->in, req->grant.data, req->len);
    else
        rc = write_in_pieces(req, &error);
    if (rc == 0 && !*ret_run)
        nbd_answer(req, error);
    return rc;
}

static size_t memory_wanted(const struct nbd_request *req)
{
    const struct nbd_conn *conn = req->conn;

    switch (req->type) {
    case NBD_CMD_READ:
        return MIN((size_t)req->len, NBD_PIECE_LEN);
    case NBD_CMD_BLOCK_STATUS:
        return EXTENTS_LEN * (conn->contexts[NBD_CONTEXT_BASE] + conn->contexts[NBD_CONTEXT_DEPTH]);
    default:
        return 0;
    }
}

SUSPENDS
static void take_other(struct nbd_request *req, unsigned error, bool *ret_run)
{
    size_t want = error == NBD_OK ? memory_wanted(req) : 0;

    if (want > 0 && nbd_share_take(&req->conn->share, want, &req->grant) < 0)
        error = NBD_ENOMEM;
    *ret_run = error == NBD_OK;
    if (!*ret_run)
        nbd_answer(req, error);
}

/* On the home reactor. */
static void start_request(struct nbd_request *req)
{
    if (co_group_spawn(&req->conn->running, nbd_command_run, req) < 0)
        nbd_answer(req, NBD_ENOMEM);
}

static void request_came_home(struct mail *m)
{
    start_request(container_of(m, struct nbd_request, mail));
}

static void hand_over(struct nbd_request *req)
{
    const struct nbd_server *server = req->conn->server;

    req->came_ns = reactor_now();
    if (req->conn->reactor == server->home) {
        start_request(req);
        return;
    }
    req->routed = req->conn->nr_taken >= server->route_from;
    req->mail.fn = request_came_home;
    mail_send(server->home, &req->mail);
}

SUSPENDS
static int take_request(struct nbd_conn *conn, const struct nbd_wire_request *head)
{
    struct nbd_request *req = nbd_request_get(conn);
    bool run = false;
    int rc = 0;

    req->cookie = be64_get(head->cookie);
    req->off = be64_get(head->off);
    req->len = be32_get(head->len);
    req->type = be16_get(head->type);
    req->flags = be16_get(head->flags);
    unsigned error = nbd_command_check(req);
    if (req->type == NBD_CMD_WRITE)
        rc = take_write(req, error, &run);
    else
        take_other(req, error, &run);
    if (rc < 0)
        nbd_request_free(req);
    else if (run)
        hand_over(req);
    return rc;
}

SUSPENDS
static void receive_all(struct nbd_conn *conn)
{
    struct nbd_wire_request head;
    int rc;

    while ((rc = next_header(conn, &head)) > 0) {
        rc = take_request(conn, &head);
        if (rc < 0)
            break;
    }
    /* a broken stream has no reader for answers */
    if (rc < 0 && !conn->closing)
        nbd_conn_fail(conn);
}

SUSPENDS_UNCHECKED int nbd_session(void *arg)
{
    struct nbd_conn *conn = arg;

    conn->receiver = co_self();
    nbd_share_init(&conn->share, &conn->server->memory);
    if (alloc_requests(conn) < 0 || co_group_spawn(&conn->sending, nbd_sender, conn) < 0) {
        nbd_conn_fail(conn);
    } else {
        receive_all(conn);
        while (conn->nr_taken > 0)
            wait_queue_sleep(&conn->free_wait);
        conn->out_done = true;
        wait_queue_wake_one(&conn->out_wait);
        co_group_wait(&conn->sending);
    }
    nbd_share_fini(&conn->share);
    free(conn->requests);
    conn->receiver = NULL;
    return 0;
}
