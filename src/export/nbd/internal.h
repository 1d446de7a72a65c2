/*
 * The NBD server's own structs.
 *
 * All of it belongs to the home reactor, the one of the engine, but for a connection's session:
 * that may run on another reactor, and then has what stands under "transmission" for itself. A
 * request goes home by letter to be run, and its answer comes back by letter to be sent: whoever
 * holds the letter has the request. On the home reactor the same steps are plain calls.
 *
 * Coroutines of a connection:
 *   conn      negotiates, then receives: parses a whole buffer of requests, starts one coroutine
 *             for each, and stops reading while slots or memory are out (back-pressure)
 *   request   runs one command and queues its answer; then the queue owns the request
 *   sender    takes all answers that are queued and sends them with one call
 *
 *   free -> (received) [letter home] running -> (answered) [letter back] queued -> (sent) free
 *
 * Ownership: the server owns exports and connections; a connection owns its requests.
 */
#ifndef VARVE_EXPORT_NBD_INTERNAL_H
#define VARVE_EXPORT_NBD_INTERNAL_H

#include <stdatomic.h>
#include <sys/types.h>
#include <sys/uio.h>
#include "base/list.h"
#include "base/vec.h"
#include "export/export.h"
#include "export/nbd/memory.h"
#include "export/nbd/proto.h"
#include "rt/mail.h"
#include "rt/reactors.h"
#include "rt/timer.h"
#include "rt/wait.h"

#define NBD_MAX_REQUEST_LEN (32u << 20) /* the longest read or write */
#define NBD_PREFERRED_LEN   4096u
#define NBD_MAX_OPTION_LEN  (32u << 10)
#define NBD_MAX_NAME_LEN    4096u
#define NBD_REQUESTS        128u /* taken from one connection and not yet answered */
#define NBD_INPUT_LEN       ((size_t)128 << 10)
#define NBD_MAX_LISTENERS   4u
#define NBD_NEGOTIATORS     64u /* connections without a slot */
#define NBD_SEND_BATCH      64u /* answers in one call */

#define NBD_HANDSHAKE_NS (10 * NSEC_PER_SEC)   /* a peer must reach transmission in this time */
#define NBD_SILENCE_NS   (200 * NSEC_PER_MSEC) /* then one may be dropped for another that comes */
/* So many requests of a session elsewhere take the home's time; then its own ring moves the data.
 */
#define NBD_ROUTE_FROM 8u

#define NBD_STOP_NS   (10 * NSEC_PER_SEC) /* a peer may take so long to read its answers */
#define NBD_DROP_NS   (2 * NSEC_PER_SEC)  /* the same when its export goes away */
#define NBD_LINGER_NS (1 * NSEC_PER_SEC)

enum { NBD_CONTEXT_BASE, NBD_CONTEXT_DEPTH, NBD_CONTEXTS };

struct nbd_export {
    struct list node; /* in server->exports */
    struct nbd_server *server;
    uint64_t id; /* never used twice by a server */
    char *name, *description;
    struct chain *chain;
    struct layer *layer; /* NULL: the live top */
    bool writable, depth_context;
    bool suspended, removing;
    bool away; /* changed only while no client is connected */
    struct export_stats stats;     /* home's, without errors */
    struct export_latency latency; /* home's */
    atomic_ulong errors;           /* atomic: counted where a request is refused */
};

struct nbd_input {
    int fd;
    const atomic_bool *stop; /* when set, nothing more is received (-ECANCELED) */
    uint8_t *buf;            /* NBD_INPUT_LEN */
    size_t pos, end;
};

struct nbd_conn;
struct nbd_request {
    struct list node; /* conn->free_requests or conn->out */
    struct nbd_conn *conn;
    struct mail mail; /* home, to be run; back, to be sent; home again, sent in part */
    uint64_t cookie, off;
    uint64_t came_ns; /* when it was received */
    uint32_t len;
    uint16_t type, flags;
    bool routed;            /* its data goes through the ring of the session's reactor */
    struct nbd_grant grant; /* payload memory */
    /* the answer, or the part of it that is queued */
    union {
        struct nbd_wire_simple simple;
        struct nbd_wire_data data;
        struct nbd_wire_error error;
        struct nbd_wire_status status;
        struct nbd_wire_chunk chunk;
    } head;
    size_t head_len;
    const void *body;
    size_t body_len;
    bool last;   /* the request is free once this is sent */
    bool more;   /* the next bytes on the wire must be this request's too */
    bool queued; /* until it is sent; of the reactor that runs it */
    struct wait_queue sent;
};

struct nbd_conn {
    struct list node; /* in server->conns */
    struct nbd_server *server;
    int fd;
    bool is_tcp;
    struct co *co; /* negotiates and waits for the session */
    /* negotiation */
    struct nbd_export *exp; /* NULL until transmission */
    bool fixed_newstyle, no_zeroes, structured;
    bool contexts[NBD_CONTEXTS];
    uint64_t contexts_export; /* id of the export they were set for */
    VEC(uint8_t) reply;       /* option replies not yet sent */
    uint64_t heard_at;        /* when an option came last */
    bool has_slot;            /* counts as one of max_conns */
    struct timer timer;       /* handshake, then the limit of a drop: shuts the socket down */
    /* life; atomic: set by whoever ends it */
    atomic_bool closing; /* no further request is taken; what was taken is answered */
    atomic_bool failed;  /* the socket is shut down: answers are thrown away */
    /* of the session; fixed while it runs, the letter is the home's */
    struct reactor *reactor;
    struct mail cancel; /* stops its receiving */
    bool cancel_sent;
    struct co_group running; /* home's: requests */
    /* transmission */
    struct co *receiver; /* NULL: not there yet, or not any more */
    struct nbd_input in;
    struct nbd_share share;
    struct nbd_request *requests; /* NBD_REQUESTS of them */
    struct list free_requests;
    unsigned nr_taken; /* requests that are not free */
    struct wait_queue free_wait;
    struct co_group sending;
    struct list out;                      /* queued answers */
    struct nbd_request *stream;           /* has begun an answer whose rest must follow at once */
    bool out_done;                        /* nothing will be queued any more */
    struct wait_queue out_wait;           /* the sender */
    struct iovec iov[2 * NBD_SEND_BATCH]; /* the sender's */
};

struct nbd_listener {
    struct nbd_server *server;
    int fd;
    struct co *co; /* accepts */
};

struct nbd_server {
    char *address;
    char *unix_path; /* to remove at the end, while it is still ours: */
    dev_t unix_dev;
    ino_t unix_ino;
    struct nbd_listener listeners[NBD_MAX_LISTENERS];
    unsigned nr_listeners;
    struct reactor *home;
    struct reactors *reactors; /* borrowed; NULL: sessions stay at home */
    unsigned route_from;       /* NBD_ROUTE_FROM; tests change it */
    unsigned nr_conns;
    unsigned max_conns, nr_slots; /* those with an export, or that wait for one */
    bool stopping;
    uint64_t handshake_ns, stop_ns; /* NBD_HANDSHAKE_NS, NBD_STOP_NS; tests shorten them */
    uint64_t next_export_id;
    struct list exports, conns;
    struct co_group accepting, serving;
    struct wait_queue slot_wait;   /* those in negotiation while all slots are taken */
    struct co_cond room;           /* accepters while there is none */
    struct wait_queue gone_wait;   /* those who wait for connections to end */
    struct wait_queue resume_wait; /* handshakes for a suspended export */
    struct nbd_memory memory;
};

/* ---- listen.c ---- */
/* Opens the listening sockets (none when opts name none) and fills address. After a failure
 * nbd_unlisten() is still to be called. */
SUSPENDS
int nbd_listen(struct nbd_server *server, const struct nbd_server_opts *opts, struct err *err);
/* Closes them and removes the socket's name. */
void nbd_unlisten(struct nbd_server *server);

/* ---- server.c ---- */
/* Serves a connected socket (taken in any case): what the accepters call; tests and fuzzing give
 * one end of a socket pair. 0 or -ENOMEM. */
int nbd_server_adopt(struct nbd_server *server, int fd);
/* Takes no further request of this connection; its socket is shut down after `limit_ns`. */
void nbd_conn_close(struct nbd_conn *conn, uint64_t limit_ns);
/* Breaks the connection at once. Any thread that it cannot end under. */
void nbd_conn_fail(struct nbd_conn *conn);
/* Waits for a slot among max_conns and takes it, once a connection. -ESHUTDOWN: it is closing. */
SUSPENDS
int nbd_conn_take_slot(struct nbd_conn *conn);

/* ---- exports.c ---- */
struct nbd_export *nbd_export_lookup(struct nbd_server *server, const void *name, size_t len);
uint64_t nbd_export_len(const struct nbd_export *exp);
uint16_t nbd_export_flags(const struct nbd_export *exp, bool structured);
void nbd_export_free(struct nbd_export *exp);
/* The connection enters transmission, and leaves it. Contexts of another export are dropped. */
void nbd_export_attach(struct nbd_conn *conn, struct nbd_export *exp);
void nbd_export_detach(struct nbd_conn *conn);

/* ---- negotiate.c, options.c ---- */
/* From the greeting to transmission: 0 with conn->exp set, or -errno (also when the client just
 * left): close. */
SUSPENDS
int nbd_negotiate(struct nbd_conn *conn);
struct nbd_option {
    uint32_t type;
    const uint8_t *data;
    size_t len;
};
enum { NBD_OPTION_NEXT = 0, NBD_OPTION_TRANSMIT = 1 };
/* Answers one option; NBD_OPTION_* or -errno to close. Replies are left in conn->reply. */
SUSPENDS
int nbd_option_answer(struct nbd_conn *conn, const struct nbd_option *opt);
/* NULL when there is none; waits while it is suspended. */
SUSPENDS
struct nbd_export *nbd_await_export(struct nbd_conn *conn, const void *name, size_t len);
/* The same for one that is to be attached: it takes a slot. */
SUSPENDS
struct nbd_export *nbd_enter_export(struct nbd_conn *conn, const void *name, size_t len);
int nbd_reply_put(struct nbd_conn *conn, const void *data, size_t len);
SUSPENDS
int nbd_reply_flush(struct nbd_conn *conn);

/* ---- input.c ---- */
/* Makes n contiguous bytes available at buf + pos; -ECONNRESET at the end of the stream. */
SUSPENDS
int nbd_input_need(struct nbd_input *in, size_t n);
SUSPENDS
int nbd_input_copy(struct nbd_input *in, void *dst, size_t n);
SUSPENDS
int nbd_input_skip(struct nbd_input *in, uint64_t n);

/* ---- output.c ---- */
SUSPENDS
int nbd_send_all(int fd, struct iovec *iov, unsigned nr); /* changes iov */
SUSPENDS
int nbd_sender(void *conn);
/* Answers that end the request. */
void nbd_answer_simple(struct nbd_request *req, unsigned error);
void nbd_answer(struct nbd_request *req, unsigned error); /* as the command and client demand */
/* Queues what head, body, last and more say. */
void nbd_queue(struct nbd_request *req);
SUSPENDS
void nbd_queue_wait(struct nbd_request *req); /* until it was sent or thrown away */
void nbd_head_simple(struct nbd_request *req, unsigned error);
void nbd_head_chunk(struct nbd_request *req, unsigned type, size_t head_len, size_t len, bool done);

/* ---- session.c ---- */
/* The whole of transmission (co_group_fn), on the reactor it is to stay on. */
int nbd_session(void *conn);
SUSPENDS
struct nbd_request *nbd_request_get(struct nbd_conn *conn);
void nbd_request_free(struct nbd_request *req);

/* ---- command.c ---- */
/* The wire error of a request that may not run, whatever the disk is like, or NBD_OK. */
unsigned nbd_command_check(const struct nbd_request *req);
/* Runs a request (co_group_fn) and queues its answer. Home. */
int nbd_command_run(void *req);
/* Writes one buffer of a write request; for those received in pieces, first to last. A wire error.
 * Any reactor. */
SUSPENDS
unsigned nbd_command_write(struct nbd_request *req, uint64_t off, void *buf, size_t len);

#endif
