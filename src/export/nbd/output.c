/*
 * Answers: built in the request, queued, and sent many at a time by one coroutine a connection.
 *
 * The sender is woken by the first answer and runs after everything that was ready to run, so all
 * answers of one turn leave in one call; what is queued while it sends goes with the next.
 *
 * Invariants: 1. a request is on the queue at most once; 2. while conn->stream is set, the next
 * bytes sent are that request's; 3. a queued request is freed (last) or woken by the sender alone.
 */
#include <errno.h>
#include "base/check.h"
#include "export/nbd/internal.h"
#include "rt/reactor.h"

int nbd_send_all(int fd, struct iovec *iov, unsigned nr)
{
    while (nr > 0) {
        struct msghdr msg = {.msg_iov = iov, .msg_iovlen = nr};
        ssize_t sent = io_sendmsg(fd, &msg, 0);

        if (sent < 0)
            return (int)sent;
        size_t left = (size_t)sent;
        while (nr > 0 && left >= iov->iov_len) {
            left -= iov->iov_len;
            iov++;
            nr--;
        }
        if (nr > 0) {
            iov->iov_base = (char *)iov->iov_base + left;
            iov->iov_len -= left;
        }
    }
    return 0;
}

/* ---- building ---- */

void nbd_head_simple(struct nbd_request *req, unsigned error)
{
    req->head.simple = (struct nbd_wire_simple){be32_make(NBD_MAGIC_SIMPLE), be32_make(error),
                                                be64_make(req->cookie)};
    req->head_len = sizeof(req->head.simple);
    req->body_len = 0;
}

/* head_len: bytes of the head with what this type has before the body; len: of the whole payload */
void nbd_head_chunk(struct nbd_request *req, unsigned type, size_t head_len, size_t len, bool done)
{
    req->head.chunk = (struct nbd_wire_chunk){
        .magic = be32_make(NBD_MAGIC_STRUCTURED),
        .flags = be16_make(done ? NBD_REPLY_FLAG_DONE : 0),
        .type = be16_make((uint16_t)type),
        .cookie = be64_make(req->cookie),
        .len = be32_make((uint32_t)len),
    };
    req->head_len = head_len;
    req->body_len = 0;
}

static void finish(struct nbd_request *req)
{
    req->last = true;
    req->more = false;
    nbd_queue(req);
}

void nbd_answer_simple(struct nbd_request *req, unsigned error)
{
    nbd_head_simple(req, error);
    finish(req);
}

static void answer_chunk(struct nbd_request *req, unsigned error)
{
    if (error == NBD_OK) {
        nbd_head_chunk(req, NBD_REPLY_NONE, sizeof(req->head.chunk), 0, true);
    } else {
        nbd_head_chunk(req, NBD_REPLY_ERROR, sizeof(req->head.error), 6, true);
        req->head.error.error = be32_make(error);
        req->head.error.text_len = be16_make(0);
    }
    finish(req);
}

void nbd_answer(struct nbd_request *req, unsigned error)
{
    bool chunk = req->type == NBD_CMD_READ || req->type == NBD_CMD_BLOCK_STATUS;

    if (error != NBD_OK) /* counted where it is refused, which may be another thread */
        atomic_fetch_add_explicit(&req->conn->exp->errors, 1, memory_order_relaxed);
    if (chunk && req->conn->structured)
        answer_chunk(req, error);
    else
        nbd_answer_simple(req, error);
}

/* ---- queue ---- */

static void queue_here(struct nbd_request *req)
{
    struct nbd_conn *conn = req->conn;

    if (conn->stream == req)
        list_push_front(&conn->out, &req->node);
    else
        list_push_back(&conn->out, &req->node);
    wait_queue_wake_one(&conn->out_wait);
}

static void answer_came_back(struct mail *m)
{
    queue_here(container_of(m, struct nbd_request, mail));
}

void nbd_queue(struct nbd_request *req)
{
    CHECK_THAT(!req->queued);
    req->queued = true;
    if (req->conn->reactor == reactor_self()) {
        queue_here(req);
    } else {
        req->mail.fn = answer_came_back;
        mail_send(req->conn->reactor, &req->mail);
    }
}

void nbd_queue_wait(struct nbd_request *req)
{
    while (req->queued)
        wait_queue_sleep(&req->sent);
}

static struct nbd_request *next_to_send(struct nbd_conn *conn)
{
    if (list_empty(&conn->out))
        return NULL;
    struct nbd_request *req = list_entry(conn->out.next, struct nbd_request, node);
    return conn->stream && conn->stream != req ? NULL : req;
}

/* Moves what can be sent at once to `batch` and describes it in conn->iov. */
static unsigned gather(struct nbd_conn *conn, struct list *batch)
{
    unsigned nr_iov = 0;

    for (unsigned i = 0; i < NBD_SEND_BATCH; i++) {
        struct nbd_request *req = next_to_send(conn);

        if (!req)
            break;
        list_remove(&req->node);
        list_push_back(batch, &req->node);
        if (req->head_len)
            conn->iov[nr_iov++] = (struct iovec){&req->head, req->head_len};
        if (req->body_len)
            conn->iov[nr_iov++] = (struct iovec){(void *)(uintptr_t)req->body, req->body_len};
        conn->stream = req->more ? req : NULL;
    }
    return nr_iov;
}

/* A part of its answer has left. */
static void part_is_sent(struct mail *m)
{
    struct nbd_request *req = container_of(m, struct nbd_request, mail);

    req->queued = false;
    wait_queue_wake_all(&req->sent);
}

static void release(struct list *batch)
{
    struct list *node;

    while ((node = list_pop_front(batch))) {
        struct nbd_request *req = list_entry(node, struct nbd_request, node);

        if (req->last) {
            req->queued = false;
            nbd_request_free(req);
        } else if (req->conn->reactor == req->conn->server->home) {
            part_is_sent(&req->mail);
        } else {
            req->mail.fn = part_is_sent;
            mail_send(req->conn->server->home, &req->mail);
        }
    }
}

int nbd_sender(void *arg)
{
    struct nbd_conn *conn = arg;
    struct list batch = LIST_INIT(batch);

    for (;;) {
        unsigned nr_iov = gather(conn, &batch);

        if (list_empty(&batch)) {
            if (conn->out_done)
                return 0;
            wait_queue_sleep(&conn->out_wait);
            continue;
        }
        if (!conn->failed && nbd_send_all(conn->fd, conn->iov, nr_iov) < 0)
            nbd_conn_fail(conn);
        release(&batch);
    }
}
