/*
 * How a guest gets in: exports of a chain. One coroutine a request, bounded pools, accounting.
 */
#ifndef VARVE_EXPORT_EXPORT_H
#define VARVE_EXPORT_EXPORT_H

#include <stdbool.h>
#include <stdint.h>
#include "base/err.h"
#include "base/histogram.h"
#include "chain/chain.h"
#include "rt/reactors.h"

struct export_stats {
    uint64_t reads, writes, flushes, trims, zeroes, status, errors;
    uint64_t read_bytes, write_bytes;
    unsigned connections, connections_total;
};
/* From the time a request was received, a write's payload with it, to its answer. */
struct export_latency {
    struct histogram read_ns, write_ns, flush_ns;
};

/* ---- NBD (doc/proto.md of the NBD project): fixed newstyle, structured replies ---- */
struct nbd_server;
struct nbd_export;

struct nbd_server_opts {
    const char *unix_path;    /* a stale socket is replaced, a live one refused (-EADDRINUSE) */
    const char *host, *port;  /* or TCP; host NULL: loopback */
    unsigned max_connections; /* 0 = 16 */
    uint64_t buffer_bytes;    /* payload memory shared by all connections; 0 = 16 MiB */
    /* where sessions may run, made on this reactor; borrowed. NULL: on this one */
    struct reactors *reactors;
};
/* Listens and accepts until stopped. */
SUSPENDS int nbd_server_start(const struct nbd_server_opts *opts, struct nbd_server **ret,
                              struct err *err);
/* Stops listening, lets requests in flight finish (at most 10 s for peers that do not read), drops
 * clients, frees server and exports. */
SUSPENDS void nbd_server_stop(struct nbd_server *server);
/* For "port=0": what was bound, "host:port" or the socket's path. */
const char *nbd_server_address(const struct nbd_server *server);

struct nbd_export_opts {
    const char *name; /* "" is the default export */
    const char *description;
    struct chain *chain;
    struct layer *layer; /* NULL: the live top; else a read-only view (layer_use is called) */
    bool writable;
    bool depth_context; /* offer qemu:allocation-depth beside base:allocation */
};
/* Adds an export; names are unique (-EEXIST). The server owns it. */
int nbd_export_add(struct nbd_server *server, const struct nbd_export_opts *opts,
                   struct nbd_export **ret, struct err *err);
/* Drops its clients (mode "safe" refuses with -EBUSY while there are any: force false). */
SUSPENDS int nbd_export_remove(struct nbd_export *exp, bool force, struct err *err);
struct nbd_export *nbd_export_find(struct nbd_server *server, const char *name);
/* For a rollback: drops clients that may write; new ones wait at the handshake until resumed. */
SUSPENDS void nbd_export_suspend(struct nbd_export *exp);
void nbd_export_resume(struct nbd_export *exp);
/* Puts another chain under a suspended export (its length may differ). */
void nbd_export_set_chain(struct nbd_export *exp, struct chain *chain);
/* The disk is elsewhere: clients are let in, their requests fail (NBD_ESHUTDOWN). Before clients,
 * or while it is suspended. */
void nbd_export_set_away(struct nbd_export *exp, bool away);
void nbd_export_get_stats(const struct nbd_export *exp, struct export_stats *ret);
void nbd_export_add_latency(const struct nbd_export *exp, struct export_latency *sum);
const char *nbd_export_name(const struct nbd_export *exp);
bool nbd_export_writable(const struct nbd_export *exp);
/* Connections that could write now. */
unsigned nbd_export_writers(const struct nbd_export *exp);

#endif
