/*
 * The I/O calls of reactor.h: each describes itself in an io_req and waits for the backend.
 */
#include <limits.h>
#include <poll.h>
#include "rt/internal.h"

/* ---- requests on another reactor's ring ---- */

static void submit_here(struct mail *m)
{
    struct io_req *req = container_of(m, struct io_req, mail);

    req->reactor->backend->submit(req->reactor, req);
}

static void complete_here(struct mail *m)
{
    struct io_req *req = container_of(m, struct io_req, mail);

    req->done = true;
    reactor_wake(req->co);
}

void io_come_back(struct io_req *req)
{
    req->mail.fn = complete_here;
    mail_send(req->co->home, &req->mail);
}

/* Not worth it where threads do the I/O anyway. */
static bool is_routed(const struct io_req *req)
{
    return req->co->route && req->kind <= IO_WRITEV && req->co->route->backend->has_ring;
}

void io_route(struct reactor *r)
{
    struct co *co = co_self();

    co->route = r == co->home ? NULL : r;
}

static void submit(struct io_req *req)
{
    struct reactor *home = req->co->home;

    req->reactor = home;
    if (__builtin_expect(is_routed(req), 0)) {
        req->reactor = req->co->route;
        req->mail.fn = submit_here;
        mail_send(req->reactor, &req->mail);
    } else {
        home->backend->submit(home, req);
    }
}

SUSPENDS static ssize_t io_wait(struct io_req *req)
{
    struct co *co = co_self();

    DEBUG_CHECK(co && co->home);
    req->co = co;
    co->io = req;
    do {
        req->done = false;
        submit(req);
        if (req->done)
            reactor_yield(); /* a backend that never makes us wait must not starve the others */
        while (!req->done)
            reactor_sleep();
    } while (req->res == -EINTR && !req->cancelled);
    co->io = NULL;
    /* The kernel interrupts a request that it is just working on when it is cancelled. */
    return req->res == -EINTR ? -ECANCELED : req->res;
}

/* Descriptors in non-blocking mode answer -EAGAIN where others wait. */
SUSPENDS static ssize_t io_wait_ready(struct io_req *req, short events)
{
    ssize_t rc = io_wait(req);

    while (rc == -EAGAIN) {
        rc = io_poll(req->fd, events);
        if (rc < 0)
            break;
        rc = io_wait(req);
    }
    return rc;
}

ssize_t io_readv(int fd, const struct iovec *iov, unsigned nr, uint64_t off)
{
    struct io_req req = {
        .kind = IO_READV, .fd = fd, .ptr = iov, .nr = MIN(nr, (unsigned)IOV_MAX), .off = off};

    return io_wait(&req);
}

ssize_t io_writev(int fd, const struct iovec *iov, unsigned nr, uint64_t off, unsigned flags)
{
    struct io_req req = {.kind = IO_WRITEV,
                         .fd = fd,
                         .ptr = iov,
                         .nr = MIN(nr, (unsigned)IOV_MAX),
                         .off = off,
                         .flags = flags & IO_DSYNC ? RWF_DSYNC : 0};

    return io_wait(&req);
}

int io_fsync(int fd, bool data_only)
{
    struct io_req req = {.kind = IO_FSYNC, .fd = fd, .flags = data_only};

    return (int)io_wait(&req);
}

int io_fallocate(int fd, int mode, uint64_t off, uint64_t len)
{
    struct io_req req = {.kind = IO_FALLOCATE, .fd = fd, .flags = mode, .off = off, .len = len};

    return (int)io_wait(&req);
}

int io_accept(int fd)
{
    struct io_req req = {.kind = IO_ACCEPT, .fd = fd};

    return (int)io_wait_ready(&req, POLLIN);
}

ssize_t io_recv(int fd, void *buf, size_t len)
{
    struct io_req req = {.kind = IO_RECV, .fd = fd, .ptr = buf, .len = len};

    return io_wait_ready(&req, POLLIN);
}

ssize_t io_sendmsg(int fd, const struct msghdr *msg, int flags)
{
    struct io_req req = {.kind = IO_SENDMSG, .fd = fd, .ptr = msg, .flags = flags | MSG_NOSIGNAL};

    return io_wait_ready(&req, POLLOUT);
}

int io_connect(int fd, const struct sockaddr *addr, socklen_t len)
{
    struct io_req req = {.kind = IO_CONNECT, .fd = fd, .ptr = addr, .nr = len};
    int rc = (int)io_wait(&req);

    if (rc != -EINPROGRESS)
        return rc;
    rc = io_poll(fd, POLLOUT);
    if (rc < 0)
        return rc;
    socklen_t size = sizeof(rc);
    if (getsockopt(fd, SOL_SOCKET, SO_ERROR, &rc, &size) < 0)
        return -errno;
    return -rc;
}

int io_poll(int fd, short events)
{
    struct io_req req = {.kind = IO_POLL, .fd = fd, .flags = (unsigned short)events};

    return (int)io_wait(&req);
}

void io_cancel(struct co *co)
{
    if (!co->io || co->io->done || co->io->reactor != co->home)
        return;
    co->io->cancelled = true;
    co->home->backend->cancel(co->home, co->io);
}

void io_point(void)
{
    struct reactor *r = reactor_self();

    if (r->sim)
        sim_point(r->sim);
    else
        reactor_yield();
}
