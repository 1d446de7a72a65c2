/*
 * Fixed newstyle negotiation: greeting, then options until one of them starts transmission.
 * Spec: "Fixed newstyle negotiation", "Option types". Options are bounded before anything is
 * stored; the connection's timer bounds the whole of it.
 */
#include <errno.h>
#include <string.h>
#include "base/check.h"
#include "export/nbd/internal.h"
#include "rt/reactor.h"

/* Longer options than this are not even read to their end. */
#define SKIP_MAX (1u << 20)

int nbd_reply_put(struct nbd_conn *conn, const void *data, size_t len)
{
    size_t need = conn->reply.len + len;
    int rc = need > conn->reply.cap ? vec_reserve(&conn->reply, need) : 0;

    if (rc < 0 || len == 0)
        return rc;
    memcpy(conn->reply.data + conn->reply.len, data, len);
    conn->reply.len = need;
    return 0;
}

int nbd_reply_flush(struct nbd_conn *conn)
{
    struct iovec iov = {conn->reply.data, conn->reply.len};
    int rc = conn->reply.len ? nbd_send_all(conn->fd, &iov, 1) : 0;

    conn->reply.len = 0;
    return rc;
}

/* A client that waits for a suspended export is not late. */
struct nbd_export *nbd_await_export(struct nbd_conn *conn, const void *name, size_t len)
{
    struct nbd_server *server = conn->server;
    struct nbd_export *exp = nbd_export_lookup(server, name, len);

    if (!exp || !exp->suspended)
        return exp;
    if (nbd_conn_take_slot(conn) < 0)
        return NULL;
    timer_disarm(&conn->timer);
    exp = nbd_export_lookup(server, name, len);
    while (exp && exp->suspended && !conn->closing) {
        wait_queue_sleep(&server->resume_wait);
        exp = nbd_export_lookup(server, name, len);
    }
    if (conn->closing)
        return NULL;
    timer_arm(&conn->timer, reactor_now() + server->handshake_ns);
    return exp;
}

struct nbd_export *nbd_enter_export(struct nbd_conn *conn, const void *name, size_t len)
{
    /* a name that is none takes no slot */
    if (!nbd_export_lookup(conn->server, name, len) || nbd_conn_take_slot(conn) < 0)
        return NULL;
    return nbd_await_export(conn, name, len);
}

SUSPENDS
static int greet(struct nbd_conn *conn)
{
    struct nbd_wire_greeting hello = {
        be64_make(NBD_MAGIC_INIT),
        be64_make(NBD_MAGIC_OPTION),
        be16_make(NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES),
    };
    be32 answer;
    int rc = nbd_reply_put(conn, &hello, sizeof(hello));

    if (rc == 0)
        rc = nbd_reply_flush(conn);
    if (rc == 0)
        rc = nbd_input_copy(&conn->in, &answer, sizeof(answer));
    if (rc < 0)
        return rc;
    uint32_t flags = be32_get(answer);
    if (flags & ~(uint32_t)(NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES))
        return -EPROTO;
    conn->fixed_newstyle = flags & NBD_FLAG_FIXED_NEWSTYLE;
    conn->no_zeroes = flags & NBD_FLAG_NO_ZEROES;
    return 0;
}

/* The old way into transmission: it has no way to say no but closing. */
SUSPENDS
static int export_name(struct nbd_conn *conn, const struct nbd_option *opt)
{
    static const uint8_t zeroes[124];

    if (opt->len > NBD_MAX_NAME_LEN)
        return -EPROTO;
    struct nbd_export *exp = nbd_enter_export(conn, opt->data, opt->len);
    if (!exp)
        return -ENOENT;
    be64 len = be64_make(nbd_export_len(exp));
    be16 flags = be16_make(nbd_export_flags(exp, conn->structured));
    int rc = nbd_reply_put(conn, &len, sizeof(len));
    if (rc == 0)
        rc = nbd_reply_put(conn, &flags, sizeof(flags));
    if (rc == 0 && !conn->no_zeroes)
        rc = nbd_reply_put(conn, zeroes, sizeof(zeroes));
    if (rc < 0)
        return rc;
    nbd_export_attach(conn, exp);
    return NBD_OPTION_TRANSMIT;
}

static int too_big(struct nbd_conn *conn, uint32_t type)
{
    struct nbd_wire_option_reply head = {be64_make(NBD_MAGIC_OPTREPLY), be32_make(type),
                                         be32_make((uint32_t)NBD_REP_ERR_TOO_BIG), be32_make(0)};

    return nbd_reply_put(conn, &head, sizeof(head));
}

SUSPENDS
static int one_option(struct nbd_conn *conn)
{
    struct nbd_wire_option head;
    int rc = nbd_input_copy(&conn->in, &head, sizeof(head));

    if (rc < 0)
        return rc;
    conn->heard_at = reactor_now();
    struct nbd_option opt = {.type = be32_get(head.type), .len = be32_get(head.len)};
    bool old_way = opt.type == NBD_OPT_EXPORT_NAME;
    if (be64_get(head.magic) != NBD_MAGIC_OPTION || (!old_way && !conn->fixed_newstyle))
        return -EPROTO;
    if (opt.len > NBD_MAX_OPTION_LEN) {
        if (old_way || opt.len > SKIP_MAX)
            return -EMSGSIZE;
        rc = nbd_input_skip(&conn->in, opt.len);
        return rc < 0 ? rc : too_big(conn, opt.type);
    }
    rc = nbd_input_need(&conn->in, opt.len);
    if (rc < 0)
        return rc;
    opt.data = conn->in.buf + conn->in.pos;
    rc = old_way ? export_name(conn, &opt) : nbd_option_answer(conn, &opt);
    conn->in.pos += opt.len;
    return rc;
}

int nbd_negotiate(struct nbd_conn *conn)
{
    int rc = greet(conn);

    while (rc == 0) {
        rc = one_option(conn);
        int sent = rc < 0 && rc != -ESHUTDOWN ? 0 : nbd_reply_flush(conn);
        if (sent < 0)
            rc = sent;
    }
    if (rc < 0)
        return rc;
    CHECK_THAT(conn->exp);
    return 0;
}
