/*
 * The exports of a server: names, properties, suspend and resume. An export is attached to a
 * connection when it enters transmission; from then on it outlives the connection, because removal
 * and suspension wait for all of its connections to end.
 */
#include <errno.h>
#include <string.h>
#include "base/check.h"
#include "export/nbd/internal.h"

struct nbd_export *nbd_export_lookup(struct nbd_server *server, const void *name, size_t len)
{
    list_for_each(it, &server->exports) {
        struct nbd_export *exp = list_entry(it, struct nbd_export, node);

        if (!exp->removing && strlen(exp->name) == len && memcmp(exp->name, name, len) == 0)
            return exp;
    }
    return NULL;
}

struct nbd_export *nbd_export_find(struct nbd_server *server, const char *name)
{
    return nbd_export_lookup(server, name, strlen(name));
}

uint64_t nbd_export_len(const struct nbd_export *exp)
{
    return exp->layer ? layer_len(exp->layer) : chain_len(exp->chain);
}

/* All connections reach one chain, so a flush on one covers what was answered on any other:
 * multi-conn is true for every export. */
uint16_t nbd_export_flags(const struct nbd_export *exp, bool structured)
{
    unsigned flags = NBD_FLAG_HAS_FLAGS | NBD_FLAG_SEND_FLUSH | NBD_FLAG_SEND_FUA |
                     NBD_FLAG_CAN_MULTI_CONN | NBD_FLAG_SEND_CACHE;

    if (structured)
        flags |= NBD_FLAG_SEND_DF;
    if (exp->writable)
        flags |= NBD_FLAG_SEND_TRIM | NBD_FLAG_SEND_WRITE_ZEROES | NBD_FLAG_SEND_FAST_ZERO;
    else
        flags |= NBD_FLAG_READ_ONLY;
    return (uint16_t)flags;
}

static int check_opts(struct nbd_server *server, const struct nbd_export_opts *opts,
                      struct err *err)
{
    if (!opts->name || strlen(opts->name) > NBD_MAX_NAME_LEN ||
        (opts->description && strlen(opts->description) > NBD_MAX_NAME_LEN))
        return err_set(err, -EINVAL, "export name or description longer than %u bytes",
                       NBD_MAX_NAME_LEN);
    if (nbd_export_find(server, opts->name))
        return err_set(err, -EEXIST, "export '%s' exists", opts->name);
    if (opts->writable && (opts->layer || !chain_is_writable(opts->chain)))
        return err_set(err, -EROFS, "export '%s' cannot be writable", opts->name);
    return 0;
}

int nbd_export_add(struct nbd_server *server, const struct nbd_export_opts *opts,
                   struct nbd_export **ret, struct err *err)
{
    int rc = check_opts(server, opts, err);

    if (rc < 0)
        return rc;
    struct nbd_export *exp = calloc(1, sizeof(*exp));
    if (!exp)
        return err_errno(err, -ENOMEM, "export '%s'", opts->name);
    list_init(&exp->node);
    exp->server = server;
    exp->id = ++server->next_export_id;
    exp->name = strdup(opts->name);
    exp->description = strdup(opts->description ? opts->description : "");
    exp->chain = opts->chain;
    exp->writable = opts->writable;
    exp->depth_context = opts->depth_context;
    if (!exp->name || !exp->description) {
        nbd_export_free(exp);
        return err_errno(err, -ENOMEM, "export '%s'", opts->name);
    }
    exp->layer = opts->layer;
    if (exp->layer)
        layer_use(exp->layer);
    list_push_back(&server->exports, &exp->node);
    if (ret)
        *ret = exp;
    return 0;
}

void nbd_export_free(struct nbd_export *exp)
{
    list_remove(&exp->node);
    if (exp->layer)
        layer_unuse(exp->layer);
    free(exp->name);
    free(exp->description);
    free(exp);
}

void nbd_export_attach(struct nbd_conn *conn, struct nbd_export *exp)
{
    if (conn->contexts_export != exp->id)
        memset(conn->contexts, 0, sizeof(conn->contexts));
    conn->exp = exp;
    exp->stats.connections++;
    exp->stats.connections_total++;
}

void nbd_export_detach(struct nbd_conn *conn)
{
    if (!conn->exp)
        return;
    conn->exp->stats.connections--;
    conn->exp = NULL;
    wait_queue_wake_all(&conn->server->gone_wait);
}

/* Requests that were taken are answered; a peer that does not read is cut off after a while. */
SUSPENDS
static void drop_clients(struct nbd_export *exp)
{
    list_for_each(it, &exp->server->conns) {
        struct nbd_conn *conn = list_entry(it, struct nbd_conn, node);

        if (conn->exp == exp)
            nbd_conn_close(conn, NBD_DROP_NS);
    }
    while (exp->stats.connections > 0)
        wait_queue_sleep(&exp->server->gone_wait);
}

int nbd_export_remove(struct nbd_export *exp, bool force, struct err *err)
{
    if (exp->removing)
        return err_set(err, -EBUSY, "export '%s' is being removed", exp->name);
    if (exp->stats.connections > 0 && !force)
        return err_set(err, -EBUSY, "export '%s' has %u clients", exp->name,
                       exp->stats.connections);
    exp->removing = true;
    wait_queue_wake_all(&exp->server->resume_wait);
    drop_clients(exp);
    nbd_export_free(exp);
    return 0;
}

/* Readers go as well: what they have read is of the old chain. */
void nbd_export_suspend(struct nbd_export *exp)
{
    exp->suspended = true;
    drop_clients(exp);
}

void nbd_export_resume(struct nbd_export *exp)
{
    exp->suspended = false;
    wait_queue_wake_all(&exp->server->resume_wait);
}

void nbd_export_set_chain(struct nbd_export *exp, struct chain *chain)
{
    CHECK_THAT(exp->suspended && exp->stats.connections == 0 && !exp->layer);
    exp->chain = chain;
}

void nbd_export_get_stats(const struct nbd_export *exp, struct export_stats *ret)
{
    *ret = exp->stats;
    ret->errors = atomic_load_explicit(&exp->errors, memory_order_relaxed);
}

void nbd_export_add_latency(const struct nbd_export *exp, struct export_latency *sum)
{
    histogram_merge(&sum->read_ns, &exp->latency.read_ns);
    histogram_merge(&sum->write_ns, &exp->latency.write_ns);
    histogram_merge(&sum->flush_ns, &exp->latency.flush_ns);
}

const char *nbd_export_name(const struct nbd_export *exp)
{
    return exp->name;
}

void nbd_export_set_away(struct nbd_export *exp, bool away)
{
    CHECK_THAT(exp->stats.connections == 0);
    exp->away = away;
}

bool nbd_export_writable(const struct nbd_export *exp)
{
    return exp->writable;
}

unsigned nbd_export_writers(const struct nbd_export *exp)
{
    return exp->writable ? exp->stats.connections : 0;
}
