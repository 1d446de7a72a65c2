/*
 * What client and server share of QMP: cutting the byte stream into JSON texts, encoding, and
 * unix socket addresses. Private to this folder.
 */
#ifndef VARVE_QMP_WIRE_H
#define VARVE_QMP_WIRE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include "base/err.h"
#include "rt/co.h"

/* Deepest nesting taken from a peer: the parser recurses, and a coroutine's stack is small. */
#define QMP_DEPTH_MAX 100u

/*
 * Cuts a stream into top-level JSON texts. Texts need no separator; white space between them is
 * skipped. Anything that does not begin with a bracket ends at the next newline, so that garbage
 * gets one error and the stream goes on behind it.
 */
struct qmp_framer {
    char *buf; /* owned */
    size_t len, cap;
    size_t begin;   /* of the text being scanned */
    size_t scanned; /* next byte to look at */
    size_t max_len; /* of one text */
    unsigned depth; /* open brackets */
    bool in_text, in_garbage, in_string, escaped;
};
void qmp_framer_init(struct qmp_framer *f, size_t max_len);
void qmp_framer_fini(struct qmp_framer *f);
/* Room for at least QMP_RECV bytes behind what is there, NULL when memory is out; then tell how
 * many were put there. */
#define QMP_RECV ((size_t)4096)
/* A peer that lives takes a connection and greets in this time: whoever waits may hold locks. */
#define QMP_ANSWER_NS (5 * NSEC_PER_SEC)
char *qmp_framer_room(struct qmp_framer *f);
void qmp_framer_added(struct qmp_framer *f, size_t len);
/* Next whole text: 1 with *ret_text borrowed until the next call of any of these, 0 when more
 * bytes are needed, -E2BIG when a text is too long or too deep (the stream cannot go on). */
int qmp_framer_next(struct qmp_framer *f, const char **ret_text, size_t *ret_len);

/* Parses one text. *ret is a new reference. -EINVAL with a text like "JSON parse error, ...". */
int qmp_parse(const char *text, size_t len, json_t **ret, struct err *err);
/* One line with CR LF; the caller frees. NULL when memory is out. */
char *qmp_encode(const json_t *msg, size_t *ret_len);
/* Writes it all, or -errno. */
SUSPENDS int qmp_send_all(int fd, const char *data, size_t len);

/* As io_recv; -ETIMEDOUT once reactor_now() has reached the deadline (0: none). */
SUSPENDS ssize_t qmp_recv_until(int fd, char *buf, size_t len, uint64_t deadline);

/* Listening unix socket, mode 0600. A socket nobody listens on is replaced; -EADDRINUSE with a
 * text when somebody does, or when the path is another kind of file. Returns the descriptor. */
SUSPENDS int qmp_listen_unix(const char *path, struct err *err);
/* Connected unix socket or -errno. */
SUSPENDS int qmp_connect_unix(const char *path, struct err *err);

#endif
