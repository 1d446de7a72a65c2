/*
 * The io_uring backend; the only caller of liburing.
 *
 * Requests are put on the submission queue as they come and submitted together, with the wait for
 * completions, by one io_uring_enter() a turn. The ring is used by its own thread alone, so the
 * kernel may leave completion work until that call (DEFER_TASKRUN, Linux 6.1).
 *
 * user_data is the io_req; 0 marks completions nobody waits for, EVENT_TAG the mailbox.
 */
#include <liburing.h>
#include <poll.h>
#include "rt/internal.h"

#define SQ_LEN    256u
#define CQ_LEN    4096u
#define EVENT_TAG 1u

struct uring {
    struct io_uring ring;
    const char *fixed; /* registered memory: chunk i is buffer i */
    size_t fixed_len;
    bool has_table;       /* of registered buffers */
    struct list deferred; /* requests the kernel had no room for */
};

static int ring_setup(struct io_uring *ring)
{
    static const unsigned flags[] = {
        IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_COOP_TASKRUN | IORING_SETUP_DEFER_TASKRUN |
            IORING_SETUP_TASKRUN_FLAG,
        IORING_SETUP_COOP_TASKRUN | IORING_SETUP_TASKRUN_FLAG,
        0,
    };
    int rc = -EINVAL;

    for (unsigned i = 0; i < ARRAY_SIZE(flags) && rc == -EINVAL; i++) {
        struct io_uring_params p = {.flags = flags[i] | IORING_SETUP_CQSIZE, .cq_entries = CQ_LEN};

        rc = io_uring_queue_init_params(SQ_LEN, ring, &p);
        /* Without timeouts in io_uring_enter() and a queue that never drops (Linux 5.11) the
         * threads serve better. */
        if (rc == 0 &&
            (!(p.features & IORING_FEAT_EXT_ARG) || !(p.features & IORING_FEAT_NODROP))) {
            io_uring_queue_exit(ring);
            return -ENOSYS;
        }
    }
    return rc;
}

/* NULL only when the kernel takes no submissions until completions are read. */
static struct io_uring_sqe *get_sqe(struct io_uring *ring)
{
    struct io_uring_sqe *sqe = io_uring_get_sqe(ring);

    if (!sqe) {
        io_uring_submit(ring);
        sqe = io_uring_get_sqe(ring);
    }
    return sqe;
}

static void watch_mailbox(struct reactor *r, struct uring *u)
{
    struct io_uring_sqe *sqe = get_sqe(&u->ring);

    CHECK_THAT(sqe); /* called at the start and while completions are read: there is room */
    /* Each write completes it once more; the counter is never read, so a wake costs no call here.
     */
    io_uring_prep_poll_multishot(sqe, r->event_fd, POLLIN);
    io_uring_sqe_set_data64(sqe, EVENT_TAG);
}

static int uring_init(struct reactor *r)
{
    struct uring *u = calloc(1, sizeof(*u));

    if (!u)
        return -ENOMEM;
    int rc = ring_setup(&u->ring);
    if (rc < 0) {
        free(u);
        return rc;
    }
    list_init(&u->deferred);
    r->priv = u;
    watch_mailbox(r, u);
    return 0;
}

static void uring_fini(struct reactor *r)
{
    struct uring *u = TAKE_PTR(r->priv);

    io_uring_queue_exit(&u->ring);
    free(u);
}

static int uring_fix_buffers(struct reactor *r, unsigned index, void *mem, size_t len)
{
    struct uring *u = r->priv;
    struct iovec iov = {mem, len};
    __u64 tag = 0;
    int rc = u->has_table ? 0 : io_uring_register_buffers_sparse(&u->ring, ARENA_CHUNKS);

    if (rc < 0)
        return rc; /* Linux before 5.19 */
    u->has_table = true;
    rc = io_uring_register_buffers_update_tag(&u->ring, index, &iov, &tag, 1);
    if (rc < 0)
        return rc; /* most often the limit of locked memory */
    if (index == 0)
        u->fixed = mem;
    u->fixed_len = index * ARENA_CHUNK_LEN + len;
    return 0;
}

/* -1: the memory is not registered, or not in one piece. */
static inline int fixed_index(const struct uring *u, const void *mem, size_t len)
{
    size_t at = (uintptr_t)mem - (uintptr_t)u->fixed;

    if (at >= u->fixed_len || at % ARENA_CHUNK_LEN + len > ARENA_CHUNK_LEN)
        return -1;
    return (int)(at / ARENA_CHUNK_LEN);
}

static void prep_rw(const struct uring *u, struct io_uring_sqe *sqe, const struct io_req *req)
{
    const struct iovec *iov = req->ptr;
    bool read = req->kind == IO_READV;

    if (req->nr == 1) {
        unsigned len = (unsigned)MIN(iov->iov_len, (size_t)INT32_MAX & ~4095ul);

        int fixed = fixed_index(u, iov->iov_base, len);
        int op = read ? IORING_OP_READ : IORING_OP_WRITE;

        if (fixed >= 0)
            op = read ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
        io_uring_prep_rw(op, sqe, req->fd, iov->iov_base, len, req->off);
        sqe->buf_index = (uint16_t)MAX(fixed, 0);
    } else {
        io_uring_prep_rw(read ? IORING_OP_READV : IORING_OP_WRITEV, sqe, req->fd, iov, req->nr,
                         req->off);
    }
    sqe->rw_flags = req->flags;
}

static void prep(const struct uring *u, struct io_uring_sqe *sqe, const struct io_req *req)
{
    void *ptr = (void *)(uintptr_t)req->ptr;

    switch (req->kind) {
    case IO_READV:
    case IO_WRITEV:
        prep_rw(u, sqe, req);
        break;
    case IO_FSYNC:
        io_uring_prep_fsync(sqe, req->fd, req->flags ? IORING_FSYNC_DATASYNC : 0);
        break;
    case IO_FALLOCATE:
        /* Directly: liburing's helper takes 32-bit lengths in some versions. */
        io_uring_prep_rw(IORING_OP_FALLOCATE, sqe, req->fd, NULL, (unsigned)req->flags, req->off);
        sqe->addr = req->len;
        break;
    case IO_ACCEPT:
        io_uring_prep_accept(sqe, req->fd, NULL, NULL, SOCK_CLOEXEC);
        break;
    case IO_RECV:
        io_uring_prep_recv(sqe, req->fd, ptr, MIN(req->len, (size_t)INT32_MAX), req->flags);
        break;
    case IO_SENDMSG:
        io_uring_prep_sendmsg(sqe, req->fd, ptr, (unsigned)req->flags);
        break;
    case IO_CONNECT:
        io_uring_prep_connect(sqe, req->fd, ptr, req->nr);
        break;
    case IO_POLL:
        io_uring_prep_poll_add(sqe, req->fd, (unsigned)req->flags);
        break;
    }
}

static void uring_submit(struct reactor *r, struct io_req *req)
{
    struct uring *u = r->priv;
    struct io_uring_sqe *sqe = list_empty(&u->deferred) ? get_sqe(&u->ring) : NULL;

    if (!sqe) {
        list_push_back(&u->deferred, &req->link);
        return;
    }
    list_init(&req->link);
    prep(u, sqe, req);
    io_uring_sqe_set_data(sqe, req);
}

static void submit_deferred(struct uring *u)
{
    while (!list_empty(&u->deferred)) {
        struct io_req *req = list_entry(u->deferred.next, struct io_req, link);
        struct io_uring_sqe *sqe = get_sqe(&u->ring);

        if (!sqe)
            break;
        list_remove(&req->link);
        prep(u, sqe, req);
        io_uring_sqe_set_data(sqe, req);
    }
}

static void uring_cancel(struct reactor *r, struct io_req *req)
{
    struct uring *u = r->priv;

    if (!list_empty(&req->link)) {
        list_remove(&req->link);
        io_complete(req, -ECANCELED);
        return;
    }
    struct io_uring_sqe *sqe = get_sqe(&u->ring);
    if (!sqe)
        return;
    io_uring_prep_cancel64(sqe, (uintptr_t)req, 0);
    io_uring_sqe_set_data64(sqe, 0);
}

static void take_completions(struct reactor *r, struct uring *u)
{
    struct io_uring_cqe *cqe;
    bool rearm = false;
    unsigned head, nr = 0;

    io_uring_for_each_cqe(&u->ring, head, cqe)
    {
        uint64_t data = cqe->user_data;

        nr++;
        if (data > EVENT_TAG)
            io_complete((struct io_req *)(uintptr_t)data, cqe->res);
        else if (data == EVENT_TAG)
            rearm = !(cqe->flags & IORING_CQE_F_MORE);
    }
    io_uring_cq_advance(&u->ring, nr);
    if (rearm) { /* kernels that end it after one, or ran out of room */
        uint64_t count;
        ssize_t rc = read(r->event_fd, &count, sizeof(count));

        (void)rc; /* only resets the counter; the mailbox is looked at in any case */
        watch_mailbox(r, u);
    }
}

static void enter(struct io_uring *ring, bool wait, uint64_t deadline)
{
    struct io_uring_cqe *cqe;
    uint64_t now = deadline == NO_DEADLINE ? 0 : reactor_now();

    /* Failures (-ETIME, -EINTR, -EBUSY, -EAGAIN) mean: look at completions, come again. */
    if (!wait || deadline <= now) {
        unsigned pending =
            IO_URING_READ_ONCE(*ring->sq.kflags) & (IORING_SQ_TASKRUN | IORING_SQ_CQ_OVERFLOW);
        if (pending || io_uring_sq_ready(ring))
            io_uring_submit_and_get_events(ring);
    } else if (deadline == NO_DEADLINE) {
        io_uring_submit_and_wait(ring, 1);
    } else {
        uint64_t ns = deadline - now;
        struct __kernel_timespec ts = {.tv_sec = (long long)(ns / NSEC_PER_SEC),
                                       .tv_nsec = (long long)(ns % NSEC_PER_SEC)};

        io_uring_submit_and_wait_timeout(ring, &cqe, 1, &ts, NULL);
    }
}

static void uring_turn(struct reactor *r, bool wait, uint64_t deadline)
{
    struct uring *u = r->priv;

    enter(&u->ring, wait, deadline);
    take_completions(r, u);
    submit_deferred(u);
}

const struct backend uring_backend = {
    .name = "io_uring",
    .has_ring = true,
    .init = uring_init,
    .fini = uring_fini,
    .submit = uring_submit,
    .cancel = uring_cancel,
    .fix_buffers = uring_fix_buffers,
    .turn = uring_turn,
};
