/*
 * An NBD client for tests, in coroutines of the server's own reactor. It can also misbehave: every
 * step is a call of its own. A failed step returns -errno (-ECONNRESET: the server closed).
 */
#ifndef VARVE_TESTS_NBD_CLIENT_H
#define VARVE_TESTS_NBD_CLIENT_H

#include "blk/blk.h"
#include "chain/chain.h"
#include "export/nbd/internal.h"

struct client {
    int fd;
    bool structured;
    uint64_t len;   /* of the export, after client_go */
    unsigned flags; /* transmission flags */
    uint64_t cookie;
};

struct option_reply {
    uint32_t type;
    uint32_t len;
    uint8_t data[64]; /* the first bytes */
};
struct option_replies {
    unsigned nr;
    struct option_reply at[8];
};

struct answer {
    uint64_t cookie;
    unsigned error;
    unsigned chunks;
    uint8_t *data; /* where a read's data goes; may be NULL: thrown away */
    uint64_t off;  /* of data[0] */
    size_t data_got;
    unsigned nr_extents[NBD_CONTEXTS];
    struct {
        uint32_t len, flags;
    } extents[NBD_CONTEXTS][32];
};

/* A server on a chain of one raw layer of memory, behind a fault device. */
struct rig {
    struct blk *blk; /* the fault device */
    struct chain *chain;
    struct nbd_server *server;
    struct nbd_export *exp; /* "disk", writable */
    struct reactors *reactors;
};
/* Reactors for the sessions: $NBD_TEST_THREADS of them (default 1), all data routed; this one
 * counts as used, so that the first session gets another. The caller gives them to the server. */
SUSPENDS struct reactors *rig_reactors(struct rig *rig);
/* Once the server was started with them. */
void rig_route_all(struct rig *rig);
SUSPENDS void rig_free_reactors(struct rig *rig);
SUSPENDS void rig_start(struct rig *rig, uint64_t len, const struct nbd_server_opts *opts);
/* The same on another device (taken), for which rig->blk stands then. */
SUSPENDS void rig_start_on(struct rig *rig, struct blk *blk, const struct nbd_server_opts *opts);
SUSPENDS void rig_stop(struct rig *rig);
/* Waits until the server has so many connections (negotiating ones too). */
SUSPENDS void rig_await_conns(struct rig *rig, unsigned nr);

/* One end of a socket pair is given to the server. */
void client_open(struct client *c, struct nbd_server *server);
void client_close(struct client *c);
SUSPENDS int client_send(struct client *c, const void *data, size_t len);
SUSPENDS int client_recv(struct client *c, void *data, size_t len);
SUSPENDS int client_hello(struct client *c, uint32_t flags);
SUSPENDS int client_option_raw(struct client *c, uint64_t magic, uint32_t type, const void *data,
                               size_t data_len, uint32_t len);
/* Sends an option and takes all its replies; returns the type of the last one (as int64: error
 * bits included), or -errno. */
SUSPENDS int64_t client_option(struct client *c, uint32_t type, const void *data, size_t len,
                               struct option_replies *ret);
SUSPENDS int64_t client_replies(struct client *c, struct option_replies *ret);
/* Builds the data of GO and INFO; returns its length. */
size_t client_go_data(uint8_t *buf, const char *name, unsigned nr_infos, const uint16_t *infos);
size_t client_meta_data(uint8_t *buf, const char *name, unsigned nr, const char *const *queries);
SUSPENDS int client_go(struct client *c, const char *name);
/* hello, STRUCTURED_REPLY and both contexts if asked, GO */
SUSPENDS void client_enter(struct client *c, struct nbd_server *server, const char *name,
                           bool structured);

SUSPENDS int client_request(struct client *c, unsigned type, unsigned flags, uint64_t off,
                            uint32_t len);
/* Takes one whole answer of a request of this type (len: of a read). */
SUSPENDS int client_answer(struct client *c, unsigned type, uint32_t len, struct answer *ret);
/* A request and its answer; payload is sent (WRITE) or filled (READ). Returns the wire error. */
SUSPENDS unsigned client_do(struct client *c, unsigned type, unsigned flags, uint64_t off,
                            uint32_t len, void *payload);
SUSPENDS bool client_alive(struct client *c); /* reads a byte */

#endif
