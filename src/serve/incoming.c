/*
 * A disk that comes from another host, with a guest that is being moved.
 *
 *   here                                       there
 *   1 serve --incoming: the export has the
 *     disk's length, and nothing behind it;
 *     the guest's new QEMU connects            the guest runs
 *   2                                          the guest is paused for the last time
 *   3                                          handover: requests are answered, all is written, the
 *                                              image is closed, its locks are given up
 *   4 takeover: the image is opened, with its
 *     locks; clients come again
 *   5 the guest goes on
 *
 * So at no moment two servers have the image open, and what this one reads of it, header and
 * tables, is read behind 3. Before 4 every request fails: who lets the guest go on too soon sees
 * errors, never old data.
 */
#include "serve/internal.h"

/* As long as the disk is said to be, and empty: no request comes to it. */
int serve_open_incoming(struct serve *s, struct err *err)
{
    struct layer_opts opts = {.format = "raw", .writable = true};
    struct layer *layer;
    struct blk *blk;
    int rc = blk_mem_new(s->opts->incoming_len, 512, &blk);

    if (rc < 0)
        return err_errno(err, rc, "prepare the disk");
    rc = layer_from_blk(blk, false, &opts, &layer, err);
    if (rc < 0) {
        blk_close(blk);
        return rc;
    }
    rc = chain_from_layers(&layer, 1, 0, &s->chain, err);
    if (rc < 0)
        layer_close(layer, NULL);
    s->incoming = rc == 0;
    return rc;
}

SUSPENDS static int open_taken(struct serve *s, struct chain **ret, struct err *err)
{
    struct chain *chain;
    int rc = serve_open_chain(s, s->opts->path, s->opts->format, &chain, err);

    if (rc == 0 && s->opts->durability == SERVE_ACK && (rc = chain_start_ack(chain, err)) < 0)
        chain_close(chain, NULL);
    if (rc == 0)
        *ret = chain;
    return rc;
}

SUSPENDS static int cmd_takeover(void *ctx, json_t *args, json_t **ret, struct err *err)
{
    struct serve *s = ctx;
    struct chain *old = s->chain, *chain;
    int rc = s->opts->take(s->opts->opened_ctx, err);

    if (rc == 0)
        rc = open_taken(s, &chain, err);
    s->opts->opened(s->opts->opened_ctx);
    if (rc < 0)
        return rc;
    serve_exports_suspend(s);
    s->incoming = false;
    serve_exports_switch(s, chain);
    chain_close(old, NULL);
    for (unsigned i = 0; i < s->opts->nb_snapshots; i++) {
        struct err why = {0};

        if (serve_add_snapshot(s, &s->opts->snapshots[i], &why) < 0)
            serve_warn(s, "%s", err_text(&why));
    }
    qmp_server_set_commands(s->qmp, serve_commands);
    serve_event(s, "X_VARVE_TAKEOVER", NULL);
    serve_preload_start(s);
    return 0;
}

const struct qmp_command serve_incoming_commands[] = {
    {"query-named-block-nodes", cmd_query_nodes, NULL, true},
    {"query-block-exports", cmd_query_exports, NULL, true},
    {"x-varve-stats", cmd_stats, NULL, true},
    {"x-varve-takeover", cmd_takeover, NULL, false},
    {"quit", cmd_quit, NULL, true},
    {NULL},
};
