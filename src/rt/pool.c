/*
 * The thread-pool backend, for kernels and sandboxes without io_uring.
 *
 * File I/O goes to the threads of WORK_IO as plain blocking calls; their results come back by
 * mail. Sockets are tried at once without blocking, and wait in one epoll set on the reactor's
 * own thread: any number of idle connections costs no thread.
 */
#include <fcntl.h>
#include <poll.h>
#include <sys/epoll.h>
#include "base/table.h"
#include "rt/internal.h"

#define EVENTS_A_TURN 64

/* Requests that wait for one descriptor; in the epoll set while there are any. */
struct fd_wait {
    int fd;
    bool added;
    struct list reqs;
};
struct threads {
    int epoll_fd;
    struct table fds; /* fd -> struct fd_wait; kept until the end */
};

/* Where flags are not known (an emulator, a sandbox) a flush does what RWF_DSYNC asks for. */
static ssize_t write_now(const struct io_req *req)
{
    ssize_t rc = pwritev2(req->fd, req->ptr, (int)req->nr, (off_t)req->off, req->flags);

    if (rc >= 0 || req->flags == 0 || (errno != EOPNOTSUPP && errno != ENOSYS))
        return rc;
    rc = pwritev(req->fd, req->ptr, (int)req->nr, (off_t)req->off);
    return rc >= 0 && fdatasync(req->fd) < 0 ? -1 : rc;
}

ssize_t io_perform(const struct io_req *req)
{
    ssize_t rc = -1;

    errno = EINVAL;
    switch (req->kind) {
    case IO_READV:
        rc = preadv(req->fd, req->ptr, (int)req->nr, (off_t)req->off);
        break;
    case IO_WRITEV:
        rc = write_now(req);
        break;
    case IO_FSYNC:
        rc = req->flags ? fdatasync(req->fd) : fsync(req->fd);
        break;
    case IO_FALLOCATE:
        rc = fallocate(req->fd, req->flags, (off_t)req->off, (off_t)req->len);
        break;
    case IO_CONNECT:
        rc = connect(req->fd, req->ptr, req->nr);
        break;
    default:
        break;
    }
    return rc < 0 ? -errno : rc;
}

/* ---- calls on threads ---- */

static void request_done(struct mail *m)
{
    struct io_req *req = container_of(m, struct io_req, mail);

    io_complete(req, req->res);
}

static void perform(struct work *w)
{
    struct io_req *req = container_of(w, struct io_req, work);

    req->res = io_perform(req);
    mail_post(req->reactor, &req->mail);
}

static void submit_to_thread(struct io_req *req)
{
    req->work.fn = perform;
    req->mail.fn = request_done;
    work_submit(WORK_IO, &req->work);
}

/* ---- calls on this thread ---- */

static ssize_t try_poll(const struct io_req *req, short events)
{
    struct pollfd p = {.fd = req->fd, .events = events};
    int rc = poll(&p, 1, 0);

    return rc < 0 ? -errno : rc == 0 ? -EAGAIN : p.revents;
}

/* Starts to connect; what is still under way is -EINPROGRESS. */
static ssize_t start_connect(const struct io_req *req)
{
    int flags = fcntl(req->fd, F_GETFL);

    if (flags < 0 || fcntl(req->fd, F_SETFL, flags | O_NONBLOCK) < 0)
        return -errno;
    int rc = connect(req->fd, req->ptr, req->nr) < 0 ? -errno : 0;
    fcntl(req->fd, F_SETFL, flags);
    return rc;
}

/* The result, or -EAGAIN when it would block. */
static ssize_t try_now(const struct io_req *req)
{
    void *ptr = (void *)(uintptr_t)req->ptr;
    ssize_t rc;

    switch (req->kind) {
    case IO_ACCEPT:
        /* Asked first: the descriptor may be in blocking mode. */
        rc = try_poll(req, POLLIN);
        if (rc < 0)
            return rc;
        rc = accept4(req->fd, NULL, NULL, SOCK_CLOEXEC);
        break;
    case IO_RECV:
        rc = recv(req->fd, ptr, req->len, MSG_DONTWAIT);
        break;
    case IO_SENDMSG:
        rc = sendmsg(req->fd, ptr, req->flags | MSG_DONTWAIT);
        break;
    case IO_POLL:
        return try_poll(req, (short)req->flags);
    default:
        return -EINVAL;
    }
    return rc < 0 ? -errno : rc;
}

static uint32_t events_of(const struct io_req *req)
{
    if (req->kind == IO_POLL)
        return (uint32_t)req->flags & 0xffffu;
    return req->kind == IO_SENDMSG ? EPOLLOUT : EPOLLIN;
}

/* ---- the epoll set ---- */

/* Makes the set ask for what the requests of w wait for. */
static int update_set(struct threads *t, struct fd_wait *w)
{
    struct epoll_event ev = {.data.ptr = w};
    int op = list_empty(&w->reqs) ? EPOLL_CTL_DEL : w->added ? EPOLL_CTL_MOD : EPOLL_CTL_ADD;

    list_for_each(it, &w->reqs)
        ev.events |= events_of(list_entry(it, struct io_req, link));
    if (op == EPOLL_CTL_DEL && !w->added)
        return 0;
    int rc = epoll_ctl(t->epoll_fd, op, w->fd, &ev);
    /* Closed and opened again since, by whoever owns it. */
    if (rc < 0 && op == EPOLL_CTL_MOD && errno == ENOENT)
        rc = epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, w->fd, &ev);
    w->added = op != EPOLL_CTL_DEL && rc == 0;
    return rc < 0 ? -errno : 0;
}

static struct fd_wait *get_fd_wait(struct threads *t, int fd)
{
    struct fd_wait *w = table_get(&t->fds, (uint64_t)fd);

    if (w)
        return w;
    w = calloc(1, sizeof(*w));
    if (!w)
        return NULL;
    w->fd = fd;
    list_init(&w->reqs);
    if (table_put(&t->fds, (uint64_t)fd, w) < 0) {
        free(w);
        return NULL;
    }
    return w;
}

static void wait_for_fd(struct threads *t, struct io_req *req)
{
    struct fd_wait *w = get_fd_wait(t, req->fd);

    if (!w) {
        io_complete(req, -ENOMEM);
        return;
    }
    list_push_back(&w->reqs, &req->link);
    int rc = update_set(t, w);
    if (rc < 0) {
        list_remove(&req->link);
        /* Plain files cannot be in the set: they are always ready. */
        io_complete(req, rc == -EPERM && req->kind == IO_POLL ? req->flags : rc);
    }
}

static void retry(struct threads *t, struct fd_wait *w)
{
    bool changed = false;

    list_for_each_safe(it, &w->reqs) {
        struct io_req *req = list_entry(it, struct io_req, link);
        ssize_t rc = try_now(req);

        if (rc == -EAGAIN)
            continue;
        list_remove(&req->link);
        io_complete(req, rc);
        changed = true;
    }
    if (changed)
        update_set(t, w);
}

/* ---- the backend ---- */

static int threads_init(struct reactor *r)
{
    struct epoll_event ev = {.events = EPOLLIN, .data.ptr = NULL};
    struct threads *t = calloc(1, sizeof(*t));

    if (!t)
        return -ENOMEM;
    t->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    if (t->epoll_fd < 0 || epoll_ctl(t->epoll_fd, EPOLL_CTL_ADD, r->event_fd, &ev) < 0) {
        int rc = -errno;

        if (t->epoll_fd >= 0)
            close(t->epoll_fd);
        free(t);
        return rc;
    }
    r->priv = t;
    return 0;
}

static void threads_fini(struct reactor *r)
{
    struct threads *t = TAKE_PTR(r->priv);
    size_t pos = 0;

    for (struct table_slot *s; (s = table_next(&t->fds, &pos));)
        free(s->value);
    table_fini(&t->fds);
    close(t->epoll_fd);
    free(t);
}

static void threads_submit(struct reactor *r, struct io_req *req)
{
    list_init(&req->link);
    if (req->kind <= IO_FALLOCATE) {
        submit_to_thread(req);
        return;
    }
    if (req->kind == IO_CONNECT) {
        const struct sockaddr *addr = req->ptr;

        /* A local connect is at once or blocks in a way that cannot be polled for. */
        if (addr->sa_family == AF_UNIX)
            submit_to_thread(req);
        else
            io_complete(req, start_connect(req));
        return;
    }
    ssize_t rc = try_now(req);
    if (rc == -EAGAIN)
        wait_for_fd(r->priv, req);
    else
        io_complete(req, rc);
}

/* A call on a thread cannot be taken back: it returns when it is done. */
static void threads_cancel(struct reactor *r, struct io_req *req)
{
    struct threads *t = r->priv;

    if (list_empty(&req->link))
        return;
    list_remove(&req->link);
    update_set(t, get_fd_wait(t, req->fd));
    io_complete(req, -ECANCELED);
}

static void sleep_on(int epoll_fd, uint64_t deadline)
{
    struct pollfd p = {.fd = epoll_fd, .events = POLLIN};
    struct timespec ts, *limit = NULL;

    if (deadline != NO_DEADLINE) {
        uint64_t now = reactor_now();
        uint64_t ns = deadline > now ? deadline - now : 0;

        ts.tv_sec = (time_t)(ns / NSEC_PER_SEC);
        ts.tv_nsec = (long)(ns % NSEC_PER_SEC);
        limit = &ts;
    }
    ppoll(&p, 1, limit, NULL);
}

static void threads_turn(struct reactor *r, bool wait, uint64_t deadline)
{
    struct threads *t = r->priv;
    struct epoll_event ev[EVENTS_A_TURN];

    if (wait)
        sleep_on(t->epoll_fd, deadline);
    int nr = epoll_wait(t->epoll_fd, ev, EVENTS_A_TURN, 0);
    for (int i = 0; i < nr; i++) {
        if (ev[i].data.ptr) {
            retry(t, ev[i].data.ptr);
        } else {
            uint64_t count;
            ssize_t rc = read(r->event_fd, &count, sizeof(count));

            (void)rc; /* only resets the counter; the mailbox is looked at in any case */
        }
    }
}

const struct backend threads_backend = {
    .name = "threads",
    .init = threads_init,
    .fini = threads_fini,
    .submit = threads_submit,
    .cancel = threads_cancel,
    .turn = threads_turn,
};
