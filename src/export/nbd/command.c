/*
 * What each command does on the chain, and how it is answered.
 *
 * Spec: "Request types", "Command flags", "Error values". nbd_command_check() is the session's and
 * asks nothing of the disk; all else runs on the home reactor. The payload memory of a request that
 * comes here is taken. Once the last part of its answer is queued, a request is not touched again:
 * another thread may be sending it.
 */
#include <errno.h>
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "export/nbd/internal.h"
#include "rt/reactor.h"

/* Zeroing and discarding pass the chain's gate in steps, so that a pivot need not wait for long. */
#define RANGE_STEP (128 * MIB)

static unsigned error_of(int rc)
{
    switch (-rc) {
    case 0:
        return NBD_OK;
    case EPERM:
    case EROFS:
        return NBD_EPERM;
    case ENOMEM:
        return NBD_ENOMEM;
    case EINVAL:
        return NBD_EINVAL;
    case ENOSPC:
    case EDQUOT:
    case EFBIG:
        return NBD_ENOSPC;
    case ENOTSUP:
        return NBD_ENOTSUP;
    case ESHUTDOWN:
        return NBD_ESHUTDOWN;
    default:
        return NBD_EIO;
    }
}

/* ---- before it runs ---- */

static unsigned allowed_flags(const struct nbd_request *req)
{
    switch (req->type) {
    case NBD_CMD_READ:
        return NBD_CMD_FLAG_FUA | (req->conn->structured ? NBD_CMD_FLAG_DF : 0);
    case NBD_CMD_WRITE_ZEROES:
        return NBD_CMD_FLAG_FUA | NBD_CMD_FLAG_NO_HOLE | NBD_CMD_FLAG_FAST_ZERO;
    case NBD_CMD_BLOCK_STATUS:
        return NBD_CMD_FLAG_FUA | NBD_CMD_FLAG_REQ_ONE;
    default:
        return NBD_CMD_FLAG_FUA;
    }
}

static bool changes_data(unsigned type)
{
    return type == NBD_CMD_WRITE || type == NBD_CMD_TRIM || type == NBD_CMD_WRITE_ZEROES;
}

/* FAST_ZERO asks for a refusal where zeroing would cost as much as writing: whole clusters of a
 * version 3 image get a mark each, everything else may be written. */
static bool zero_is_cheap(const struct nbd_request *req)
{
    struct image *img = layer_image(chain_layer(req->conn->exp->chain, 0));
    const struct qcow2_header *h = img ? image_header(img) : NULL;
    uint64_t end = req->off + req->len;

    return h && h->version >= 3 && is_aligned(req->off, h->cluster_size) &&
           (is_aligned(end, h->cluster_size) || end == nbd_export_len(req->conn->exp));
}

/* What depends on the disk as it is now. */
static unsigned check_disk(const struct nbd_request *req)
{
    bool fills = req->type == NBD_CMD_WRITE || req->type == NBD_CMD_WRITE_ZEROES;

    if (req->type == NBD_CMD_FLUSH)
        return NBD_OK;
    if (!range_ok(req->off, req->len, nbd_export_len(req->conn->exp)))
        return fills ? NBD_ENOSPC : NBD_EINVAL;
    if ((req->type == NBD_CMD_READ || req->type == NBD_CMD_WRITE) && req->len > NBD_MAX_REQUEST_LEN)
        return NBD_EINVAL;
    if ((req->flags & NBD_CMD_FLAG_FAST_ZERO) && !zero_is_cheap(req))
        return NBD_ENOTSUP;
    return NBD_OK;
}

unsigned nbd_command_check(const struct nbd_request *req)
{
    const struct nbd_conn *conn = req->conn;

    if (req->type > NBD_CMD_BLOCK_STATUS || req->type == NBD_CMD_DISC ||
        (req->flags & ~allowed_flags(req)))
        return NBD_EINVAL;
    if (changes_data(req->type) && !conn->exp->writable)
        return NBD_EPERM;
    if (conn->exp->away)
        return NBD_ESHUTDOWN;
    if (req->type == NBD_CMD_BLOCK_STATUS &&
        (req->len == 0 || !(conn->contexts[NBD_CONTEXT_BASE] || conn->contexts[NBD_CONTEXT_DEPTH])))
        return NBD_EINVAL;
    return NBD_OK;
}

/* ---- reading ---- */

SUSPENDS
static int read_export(const struct nbd_export *exp, uint64_t off, void *buf, size_t len)
{
    IOV_ITER_BUF(it, iov, buf, len);

    return exp->layer ? chain_read_layer(exp->chain, exp->layer, off, len, &it)
                      : chain_read(exp->chain, off, len, &it);
}

static void queue_piece(struct nbd_request *req, size_t len, bool last)
{
    req->body = req->grant.data;
    req->body_len = len;
    req->last = last;
    nbd_queue(req);
}

/* Heads one part of a read's data; a simple answer has one head for all of them. */
static void head_data(struct nbd_request *req, uint64_t off, size_t len, bool done)
{
    if (req->conn->structured) {
        nbd_head_chunk(req, NBD_REPLY_OFFSET_DATA, sizeof(req->head.data), sizeof(be64) + len,
                       done);
        req->head.data.off = be64_make(off);
    } else {
        nbd_head_simple(req, NBD_OK);
    }
}

/* Longer than its buffer, each piece in a chunk of its own. */
SUSPENDS
static void read_chunks(struct nbd_request *req)
{
    for (uint32_t done = 0; done < req->len;) {
        size_t n = MIN(req->grant.len, (size_t)(req->len - done));
        bool last = done + n == req->len;
        int rc = read_export(req->conn->exp, req->off + done, req->grant.data, n);

        if (rc < 0) {
            nbd_answer(req, error_of(rc));
            return;
        }
        head_data(req, req->off + done, n, last);
        queue_piece(req, n, last);
        if (last)
            return;
        nbd_queue_wait(req);
        done += (uint32_t)n;
    }
}

/* Longer than its buffer, in one answer: the connection's output is ours until its end. An error
 * after its head was sent can only break the connection. */
SUSPENDS
static void read_stream(struct nbd_request *req)
{
    int rc = read_export(req->conn->exp, req->off, req->grant.data, req->grant.len);

    if (rc < 0) {
        nbd_answer(req, error_of(rc));
        return;
    }
    head_data(req, req->off, req->len, true);
    req->more = true;
    queue_piece(req, req->grant.len, false);
    size_t len = req->len;
    for (size_t done = req->grant.len; done < len;) {
        size_t n = MIN(req->grant.len, len - done);

        nbd_queue_wait(req);
        rc = req->conn->failed ? -EPIPE
                               : read_export(req->conn->exp, req->off + done, req->grant.data, n);
        if (rc < 0)
            nbd_conn_fail(req->conn);
        done = rc < 0 ? len : done + n;
        req->head_len = 0;
        req->more = done < len;
        queue_piece(req, rc < 0 ? 0 : n, !req->more);
    }
}

SUSPENDS
static void run_read(struct nbd_request *req)
{
    struct nbd_export *exp = req->conn->exp;

    exp->stats.reads++;
    exp->stats.read_bytes += req->len;
    if (req->len == 0) {
        nbd_answer(req, NBD_OK);
    } else if (req->len <= req->grant.len) {
        int rc = read_export(exp, req->off, req->grant.data, req->len);

        if (rc < 0) {
            nbd_answer(req, error_of(rc));
            return;
        }
        head_data(req, req->off, req->len, true);
        queue_piece(req, req->len, true);
    } else if (req->conn->structured && !(req->flags & NBD_CMD_FLAG_DF)) {
        read_chunks(req);
    } else {
        read_stream(req);
    }
}

/* ---- writing ---- */

SUSPENDS
static int write_export(struct nbd_request *req, uint64_t off, void *buf, size_t len)
{
    struct nbd_export *exp = req->conn->exp;
    IOV_ITER_BUF(it, iov, buf, len);

    exp->stats.writes += off == req->off;
    exp->stats.write_bytes += len;
    return chain_write(exp->chain, off, len, &it, req->flags & NBD_CMD_FLAG_FUA ? BLK_FUA : 0);
}

struct piece {
    struct nbd_request *req;
    uint64_t off;
    void *buf;
    size_t len;
};

SUSPENDS_UNCHECKED static int write_piece(void *arg)
{
    const struct piece *p = arg;
    unsigned error = check_disk(p->req);

    return (int)(error ? error : error_of(write_export(p->req, p->off, p->buf, p->len)));
}

unsigned nbd_command_write(struct nbd_request *req, uint64_t off, void *buf, size_t len)
{
    struct piece p = {req, off, buf, len};
    struct reactor *home = req->conn->server->home;
    int rc = req->conn->reactor == home ? write_piece(&p) : reactor_call(home, write_piece, &p);

    return rc < 0 ? error_of(rc) : (unsigned)rc;
}

SUSPENDS
static int run_write(struct nbd_request *req)
{
    if (req->len > 0)
        return write_export(req, req->off, req->grant.data, req->len);
    req->conn->exp->stats.writes++;
    return 0;
}

SUSPENDS
static int run_zeroes(struct nbd_request *req)
{
    struct nbd_export *exp = req->conn->exp;
    unsigned flags = req->flags & NBD_CMD_FLAG_NO_HOLE ? 0 : BLK_MAY_UNMAP;
    uint64_t off = req->off, end = req->off + req->len;
    int rc = 0;

    exp->stats.zeroes++;
    if (req->flags & NBD_CMD_FLAG_FUA)
        flags |= BLK_FUA;
    while (off < end && rc == 0) {
        uint64_t n = MIN(align_up(off + 1, RANGE_STEP), end) - off;

        rc = chain_zero(exp->chain, off, n, flags);
        off += n;
    }
    return rc;
}

SUSPENDS
static int run_trim(struct nbd_request *req)
{
    struct nbd_export *exp = req->conn->exp;
    uint64_t off = req->off, end = req->off + req->len;
    int rc = 0;

    exp->stats.trims++;
    while (off < end && rc == 0) {
        uint64_t n = MIN(align_up(off + 1, RANGE_STEP), end) - off;

        rc = chain_discard(exp->chain, off, n);
        off += n;
    }
    if (rc == 0 && (req->flags & NBD_CMD_FLAG_FUA))
        rc = chain_flush(exp->chain);
    return rc;
}

SUSPENDS
static int run_flush(struct nbd_request *req)
{
    struct nbd_export *exp = req->conn->exp;

    exp->stats.flushes++;
    return exp->writable ? chain_flush(exp->chain) : 0;
}

/* Data is not cached here; what a later read saves is finding it, so that is done ahead. */
SUSPENDS
static int run_cache(struct nbd_request *req)
{
    struct nbd_export *exp = req->conn->exp;
    uint64_t off = req->off, end = req->off + req->len;
    struct chain_status st;

    while (off < end) {
        int rc = chain_status(exp->chain, exp->layer, off, end - off, &st);

        if (rc < 0)
            return rc;
        off += st.len;
    }
    return 0;
}

/* ---- block status ---- */

struct extents {
    struct nbd_wire_extent *at;
    unsigned nr, max;
    uint32_t last_flags;
    uint64_t last_len;
    bool full;
};

/* Adds to the list; a neighbour with the same flags is made longer. */
static void add_extent(struct extents *x, uint64_t len, uint32_t flags)
{
    if (x->full)
        return;
    if (x->nr > 0 && x->last_flags == flags) {
        x->last_len += len;
    } else if (x->nr == x->max) {
        x->full = true;
        return;
    } else {
        x->nr++;
        x->last_len = len;
        x->last_flags = flags;
    }
    x->at[x->nr - 1] = (struct nbd_wire_extent){be32_make((uint32_t)x->last_len), be32_make(flags)};
}

static uint32_t base_flags(const struct chain_status *st)
{
    bool data = st->kind == CHAIN_DATA || st->kind == CHAIN_COMPRESSED;

    return (data ? 0 : NBD_STATE_HOLE) | (st->zero ? NBD_STATE_ZERO : 0);
}

static uint32_t depth_value(const struct chain_status *st)
{
    return st->kind == CHAIN_HOLE ? 0 : st->depth + 1;
}

/* Walks the range until every list is full. x[] of contexts that were not set are full. */
SUSPENDS
static int walk_status(struct nbd_request *req, struct extents x[NBD_CONTEXTS])
{
    const struct nbd_export *exp = req->conn->exp;
    uint64_t off = req->off, end = req->off + req->len;
    struct chain_status st;

    for (unsigned i = 1; off < end; i++) {
        int rc = chain_status(exp->chain, exp->layer, off, end - off, &st);

        if (rc < 0)
            return rc;
        add_extent(&x[NBD_CONTEXT_BASE], st.len, base_flags(&st));
        add_extent(&x[NBD_CONTEXT_DEPTH], st.len, depth_value(&st));
        if (x[NBD_CONTEXT_BASE].full && x[NBD_CONTEXT_DEPTH].full)
            return 0;
        off += st.len;
        if (i % 64 == 0)
            reactor_yield(); /* a cached walk never waits by itself */
    }
    return 0;
}

/* One chunk for each context; the last one ends the request. */
SUSPENDS
static void answer_status(struct nbd_request *req, const struct extents x[NBD_CONTEXTS])
{
    const bool *set = req->conn->contexts;

    for (unsigned id = 0; id < NBD_CONTEXTS; id++) {
        bool last = id == NBD_CONTEXT_DEPTH || !set[NBD_CONTEXT_DEPTH];
        size_t len = x[id].nr * sizeof(*x[id].at);

        if (!set[id])
            continue;
        nbd_head_chunk(req, NBD_REPLY_BLOCK_STATUS, sizeof(req->head.status), sizeof(be32) + len,
                       last);
        req->head.status.context = be32_make(id);
        req->body = x[id].at;
        req->body_len = len;
        req->last = last;
        nbd_queue(req);
        if (last)
            return;
        nbd_queue_wait(req);
    }
}

SUSPENDS
static void run_status(struct nbd_request *req)
{
    const bool *set = req->conn->contexts;
    unsigned nr = set[NBD_CONTEXT_BASE] + set[NBD_CONTEXT_DEPTH];
    unsigned room = (unsigned)(req->grant.len / nr / sizeof(struct nbd_wire_extent));
    struct nbd_wire_extent *at = req->grant.data;
    struct extents x[NBD_CONTEXTS] = {0};

    req->conn->exp->stats.status++;
    for (unsigned id = 0; id < NBD_CONTEXTS; id++) {
        x[id].full = !set[id];
        x[id].at = at;
        x[id].max = req->flags & NBD_CMD_FLAG_REQ_ONE ? 1 : room;
        if (set[id])
            at += room;
    }
    int rc = walk_status(req, x);
    if (rc < 0)
        nbd_answer(req, error_of(rc));
    else
        answer_status(req, x);
}

/* ---- all ---- */

SUSPENDS
static int run_changing(struct nbd_request *req)
{
    switch (req->type) {
    case NBD_CMD_WRITE:
        return run_write(req);
    case NBD_CMD_WRITE_ZEROES:
        return run_zeroes(req);
    case NBD_CMD_TRIM:
        return run_trim(req);
    case NBD_CMD_FLUSH:
        return run_flush(req);
    default:
        return run_cache(req);
    }
}

static struct histogram *histogram_of(struct export_latency *latency, uint16_t type)
{
    switch (type) {
    case NBD_CMD_READ:
        return &latency->read_ns;
    case NBD_CMD_WRITE:
        return &latency->write_ns;
    case NBD_CMD_FLUSH:
        return &latency->flush_ns;
    default:
        return NULL;
    }
}

SUSPENDS_UNCHECKED int nbd_command_run(void *arg)
{
    struct nbd_request *req = arg;
    const struct nbd_conn *conn = req->conn;
    struct histogram *h = histogram_of(&conn->exp->latency, req->type);
    uint64_t came_ns = req->came_ns;
    unsigned error = check_disk(req);

    if (req->routed)
        io_route(conn->reactor);
    if (error != NBD_OK)
        nbd_answer(req, error);
    else if (req->type == NBD_CMD_READ)
        run_read(req);
    else if (req->type == NBD_CMD_BLOCK_STATUS)
        run_status(req);
    else
        nbd_answer(req, error_of(run_changing(req)));
    if (h)
        histogram_add(h, reactor_now() - came_ns);
    return 0;
}
