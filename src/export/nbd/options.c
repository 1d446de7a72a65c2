/*
 * One option of the negotiation in, its replies out. Nothing here waits while it looks at an
 * export, but for one that is suspended.
 *
 * Spec: "Option types", "Option reply types", "Metadata querying". Data is parsed through a
 * cursor that never passes the option's end; a malformed option is answered with
 * NBD_REP_ERR_INVALID and negotiation goes on.
 */
#include <errno.h>
#include <string.h>
#include "export/nbd/internal.h"

static const char *const context_names[NBD_CONTEXTS] = {
    [NBD_CONTEXT_BASE] = "base:allocation",
    [NBD_CONTEXT_DEPTH] = "qemu:allocation-depth",
};

/* ---- parsing ---- */

struct cursor {
    const uint8_t *at;
    size_t left;
};

static bool take_bytes(struct cursor *c, size_t len, const uint8_t **ret)
{
    if (len > c->left)
        return false;
    *ret = c->at;
    c->at += len;
    c->left -= len;
    return true;
}

static bool take_u16(struct cursor *c, unsigned *ret)
{
    const uint8_t *p;
    be16 v;

    if (!take_bytes(c, sizeof(v), &p))
        return false;
    memcpy(&v, p, sizeof(v));
    *ret = be16_get(v);
    return true;
}

static bool take_u32(struct cursor *c, uint32_t *ret)
{
    const uint8_t *p;
    be32 v;

    if (!take_bytes(c, sizeof(v), &p))
        return false;
    memcpy(&v, p, sizeof(v));
    *ret = be32_get(v);
    return true;
}

struct text {
    const uint8_t *at;
    uint32_t len;
};

static bool take_text(struct cursor *c, struct text *ret)
{
    return take_u32(c, &ret->len) && take_bytes(c, ret->len, &ret->at);
}

static bool text_is(const struct text *t, const char *s)
{
    return t->len == strlen(s) && memcmp(t->at, s, t->len) == 0;
}

/* ---- replies ---- */

static int reply_head(struct nbd_conn *conn, const struct nbd_option *opt, uint32_t type,
                      size_t len)
{
    struct nbd_wire_option_reply head = {be64_make(NBD_MAGIC_OPTREPLY), be32_make(opt->type),
                                         be32_make(type), be32_make((uint32_t)len)};

    return nbd_reply_put(conn, &head, sizeof(head));
}

static int ack(struct nbd_conn *conn, const struct nbd_option *opt)
{
    return reply_head(conn, opt, NBD_REP_ACK, 0);
}

/* What this option has queued so far is taken back: an error stands alone. */
static int refuse(struct nbd_conn *conn, const struct nbd_option *opt, enum nbd_option_reply type,
                  const char *why)
{
    conn->reply.len = 0;
    int rc = reply_head(conn, opt, (uint32_t)type, strlen(why));

    return rc < 0 ? rc : nbd_reply_put(conn, why, strlen(why));
}

static int reply_info(struct nbd_conn *conn, const struct nbd_option *opt, unsigned info,
                      const void *data, size_t len)
{
    be16 type = be16_make((uint16_t)info);
    int rc = reply_head(conn, opt, NBD_REP_INFO, sizeof(type) + len);

    if (rc == 0)
        rc = nbd_reply_put(conn, &type, sizeof(type));
    return rc < 0 ? rc : nbd_reply_put(conn, data, len);
}

/* ---- LIST ---- */

static int list_one(struct nbd_conn *conn, const struct nbd_option *opt,
                    const struct nbd_export *exp)
{
    size_t name_len = strlen(exp->name), text_len = strlen(exp->description);
    be32 len = be32_make((uint32_t)name_len);
    int rc = reply_head(conn, opt, NBD_REP_SERVER, sizeof(len) + name_len + text_len);

    if (rc == 0)
        rc = nbd_reply_put(conn, &len, sizeof(len));
    if (rc == 0)
        rc = nbd_reply_put(conn, exp->name, name_len);
    return rc < 0 ? rc : nbd_reply_put(conn, exp->description, text_len);
}

static int option_list(struct nbd_conn *conn, const struct nbd_option *opt)
{
    int rc = 0;

    if (opt->len > 0)
        return refuse(conn, opt, NBD_REP_ERR_INVALID, "LIST takes no data");
    list_for_each(it, &conn->server->exports) {
        if (rc == 0)
            rc = list_one(conn, opt, list_entry(it, struct nbd_export, node));
    }
    return rc < 0 ? rc : ack(conn, opt);
}

/* ---- INFO, GO ---- */

struct info_request {
    struct text name;
    bool wants_name, wants_description;
};

static bool parse_info(const struct nbd_option *opt, struct info_request *ret)
{
    struct cursor c = {opt->data, opt->len};
    unsigned nr, info;

    if (!take_text(&c, &ret->name) || !take_u16(&c, &nr))
        return false;
    for (unsigned i = 0; i < nr; i++) {
        if (!take_u16(&c, &info))
            return false;
        ret->wants_name |= info == NBD_INFO_NAME;
        ret->wants_description |= info == NBD_INFO_DESCRIPTION;
    }
    return c.left == 0;
}

static int describe(struct nbd_conn *conn, const struct nbd_option *opt,
                    const struct info_request *want, const struct nbd_export *exp)
{
    struct {
        be64 len;
        be16 flags;
    } __attribute__((packed))
    size = {be64_make(nbd_export_len(exp)), be16_make(nbd_export_flags(exp, conn->structured))};
    be32 blocks[3] = {be32_make(1), be32_make(NBD_PREFERRED_LEN), be32_make(NBD_MAX_REQUEST_LEN)};
    int rc = 0;

    if (want->wants_name)
        rc = reply_info(conn, opt, NBD_INFO_NAME, exp->name, strlen(exp->name));
    if (rc == 0 && want->wants_description && exp->description[0])
        rc =
            reply_info(conn, opt, NBD_INFO_DESCRIPTION, exp->description, strlen(exp->description));
    /* also to those who did not ask: they may send any length up to the greatest then */
    if (rc == 0)
        rc = reply_info(conn, opt, NBD_INFO_BLOCK_SIZE, blocks, sizeof(blocks));
    if (rc == 0)
        rc = reply_info(conn, opt, NBD_INFO_EXPORT, &size, sizeof(size));
    return rc < 0 ? rc : ack(conn, opt);
}

SUSPENDS
static int option_info(struct nbd_conn *conn, const struct nbd_option *opt)
{
    struct info_request want = {0};

    if (!parse_info(opt, &want))
        return refuse(conn, opt, NBD_REP_ERR_INVALID, "malformed request for information");
    if (want.name.len > NBD_MAX_NAME_LEN)
        return refuse(conn, opt, NBD_REP_ERR_TOO_BIG, "export name too long");
    struct nbd_export *exp = opt->type == NBD_OPT_GO
                                 ? nbd_enter_export(conn, want.name.at, want.name.len)
                                 : nbd_await_export(conn, want.name.at, want.name.len);
    if (!exp)
        return refuse(conn, opt, NBD_REP_ERR_UNKNOWN, "no such export");
    int rc = describe(conn, opt, &want, exp);
    if (rc < 0 || opt->type == NBD_OPT_INFO)
        return rc;
    nbd_export_attach(conn, exp);
    return NBD_OPTION_TRANSMIT;
}

/* ---- metadata contexts ---- */

static bool context_offered(const struct nbd_export *exp, unsigned id)
{
    return id == NBD_CONTEXT_BASE || exp->depth_context;
}

/* A query "base:" or "qemu:" lists all of that namespace; it selects nothing. */
static bool query_matches(const struct text *query, unsigned id, bool is_list)
{
    const char *name = context_names[id];
    size_t prefix = (size_t)(strchr(name, ':') - name) + 1;

    if (text_is(query, name))
        return true;
    return is_list && query->len == prefix && memcmp(query->at, name, prefix) == 0;
}

static bool parse_queries(struct cursor *c, uint32_t nr, const struct nbd_export *exp, bool is_list,
                          bool found[NBD_CONTEXTS])
{
    struct text query;

    for (uint32_t i = 0; i < nr; i++) {
        if (!take_text(c, &query))
            return false;
        for (unsigned id = 0; id < NBD_CONTEXTS; id++)
            found[id] |= context_offered(exp, id) && query_matches(&query, id, is_list);
    }
    return c->left == 0;
}

static int reply_contexts(struct nbd_conn *conn, const struct nbd_option *opt,
                          const bool found[NBD_CONTEXTS])
{
    int rc = 0;

    for (unsigned id = 0; id < NBD_CONTEXTS && rc == 0; id++) {
        be32 wire_id = be32_make(id);
        size_t len = strlen(context_names[id]);

        if (!found[id])
            continue;
        rc = reply_head(conn, opt, NBD_REP_META_CONTEXT, sizeof(wire_id) + len);
        if (rc == 0)
            rc = nbd_reply_put(conn, &wire_id, sizeof(wire_id));
        if (rc == 0)
            rc = nbd_reply_put(conn, context_names[id], len);
    }
    return rc < 0 ? rc : ack(conn, opt);
}

SUSPENDS
static int option_contexts(struct nbd_conn *conn, const struct nbd_option *opt)
{
    bool is_list = opt->type == NBD_OPT_LIST_META_CONTEXT;
    bool found[NBD_CONTEXTS] = {0};
    struct cursor c = {opt->data, opt->len};
    struct text name;
    uint32_t nr;

    if (!is_list)
        memset(conn->contexts, 0, sizeof(conn->contexts));
    if (!conn->structured)
        return refuse(conn, opt, NBD_REP_ERR_INVALID, "structured replies come first");
    if (!take_text(&c, &name) || !take_u32(&c, &nr))
        return refuse(conn, opt, NBD_REP_ERR_INVALID, "malformed metadata query");
    if (name.len > NBD_MAX_NAME_LEN)
        return refuse(conn, opt, NBD_REP_ERR_TOO_BIG, "export name too long");
    struct nbd_export *exp = nbd_await_export(conn, name.at, name.len);
    if (!exp)
        return refuse(conn, opt, NBD_REP_ERR_UNKNOWN, "no such export");
    if (!parse_queries(&c, nr, exp, is_list, found))
        return refuse(conn, opt, NBD_REP_ERR_INVALID, "malformed metadata query");
    for (unsigned id = 0; is_list && nr == 0 && id < NBD_CONTEXTS; id++)
        found[id] = context_offered(exp, id);
    if (!is_list) {
        memcpy(conn->contexts, found, sizeof(found));
        conn->contexts_export = exp->id;
    }
    return reply_contexts(conn, opt, found);
}

/* ---- all ---- */

static int option_structured(struct nbd_conn *conn, const struct nbd_option *opt)
{
    if (opt->len > 0)
        return refuse(conn, opt, NBD_REP_ERR_INVALID, "STRUCTURED_REPLY takes no data");
    conn->structured = true;
    return ack(conn, opt);
}

int nbd_option_answer(struct nbd_conn *conn, const struct nbd_option *opt)
{
    switch (opt->type) {
    case NBD_OPT_ABORT: {
        int rc = ack(conn, opt);
        return rc < 0 ? rc : -ESHUTDOWN; /* the answer is still sent */
    }
    case NBD_OPT_LIST:
        return option_list(conn, opt);
    case NBD_OPT_INFO:
    case NBD_OPT_GO:
        return option_info(conn, opt);
    case NBD_OPT_STRUCTURED_REPLY:
        return option_structured(conn, opt);
    case NBD_OPT_LIST_META_CONTEXT:
    case NBD_OPT_SET_META_CONTEXT:
        return option_contexts(conn, opt);
    default:
        return refuse(conn, opt, NBD_REP_ERR_UNSUP, "option not supported");
    }
}
