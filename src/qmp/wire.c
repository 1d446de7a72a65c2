/*
 * QMP on the wire. See wire.h.
 *
 * Invariants of the framer:
 * 1. begin <= scanned <= len; bytes before begin were handed out or skipped.
 * 2. in_text: buf[begin] starts a text; depth > 0 unless it is garbage up to a newline.
 */
#include "qmp/wire.h"

#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>
#include "rt/reactor.h"
#include "rt/timer.h"

#define STALE_TRIES   40u
#define STALE_WAIT_NS (25 * NSEC_PER_MSEC)

void qmp_framer_init(struct qmp_framer *f, size_t max_len)
{
    *f = (struct qmp_framer){.max_len = max_len};
}

void qmp_framer_fini(struct qmp_framer *f)
{
    free(f->buf);
    f->buf = NULL;
}

char *qmp_framer_room(struct qmp_framer *f)
{
    if (f->begin > 0) {
        memmove(f->buf, f->buf + f->begin, f->len - f->begin);
        f->len -= f->begin;
        f->scanned -= f->begin;
        f->begin = 0;
    }
    if (f->len + QMP_RECV > f->cap) {
        size_t cap = MAX(f->cap * 2, f->len + QMP_RECV);
        char *grown = realloc(f->buf, cap);

        if (!grown)
            return NULL;
        f->buf = grown;
        f->cap = cap;
    }
    return f->buf + f->len;
}

void qmp_framer_added(struct qmp_framer *f, size_t len)
{
    f->len += len;
}

/* Looks at the first byte of what may become a text. */
static void frame_begin(struct qmp_framer *f, char c)
{
    f->begin = f->scanned;
    if (strchr(" \t\r\n\xff", c) && c != '\0') { /* 0xff: some clients send it to resynchronise */
        f->begin++;
        return;
    }
    f->in_text = true;
    f->in_garbage = c != '{' && c != '[';
    f->depth = f->in_garbage ? 0 : 1;
    f->in_string = f->escaped = false;
}

/* True when c ends the text that began at f->begin. */
static bool frame_step(struct qmp_framer *f, char c)
{
    if (f->in_garbage)
        return c == '\n';
    if (f->in_string) {
        if (f->escaped)
            f->escaped = false;
        else if (c == '\\')
            f->escaped = true;
        else if (c == '"')
            f->in_string = false;
        return false;
    }
    if (c == '"')
        f->in_string = true;
    else if (c == '{' || c == '[')
        f->depth++;
    else if (c == '}' || c == ']')
        f->depth--;
    return f->depth == 0;
}

int qmp_framer_next(struct qmp_framer *f, const char **ret_text, size_t *ret_len)
{
    for (; f->scanned < f->len; f->scanned++) {
        char c = f->buf[f->scanned];

        if (!f->in_text) {
            frame_begin(f, c);
            continue;
        }
        if (frame_step(f, c)) {
            f->scanned++;
            f->in_text = false;
            *ret_text = f->buf + f->begin;
            *ret_len = f->scanned - f->begin;
            f->begin = f->scanned;
            return 1;
        }
        if (f->depth > QMP_DEPTH_MAX)
            return -E2BIG;
    }
    return f->len - f->begin > f->max_len ? -E2BIG : 0;
}

int qmp_parse(const char *text, size_t len, json_t **ret, struct err *err)
{
    json_error_t why;
    json_t *msg = json_loadb(text, len, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY, &why);

    if (!msg)
        return err_set(err, -EINVAL, "JSON parse error, %s", why.text);
    *ret = msg;
    return 0;
}

char *qmp_encode(const json_t *msg, size_t *ret_len)
{
    size_t len = json_dumpb(msg, NULL, 0, 0);
    char *text = len > 0 ? malloc(len + 2) : NULL;

    if (!text)
        return NULL;
    json_dumpb(msg, text, len, 0);
    memcpy(text + len, "\r\n", 2);
    *ret_len = len + 2;
    return text;
}

SUSPENDS int qmp_send_all(int fd, const char *data, size_t len)
{
    while (len > 0) {
        struct iovec iov = {(void *)(uintptr_t)data, len};
        struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
        ssize_t n = io_sendmsg(fd, &msg, 0);

        if (n == -EINTR || n == -EAGAIN)
            continue;
        if (n <= 0)
            return n < 0 ? (int)n : -EPIPE;
        data += n;
        len -= (size_t)n;
    }
    return 0;
}

/* A deadline for one receive: cancels it from the loop. */
struct deadline {
    struct timer timer;
    struct co *co;
    bool passed;
};

static void deadline_passed(struct timer *t)
{
    struct deadline *d = container_of(t, struct deadline, timer);

    d->passed = true;
    io_cancel(d->co);
}

SUSPENDS ssize_t qmp_recv_until(int fd, char *buf, size_t len, uint64_t deadline)
{
    struct deadline d = {.co = co_self()};

    if (deadline == 0)
        return io_recv(fd, buf, len);
    if (reactor_now() >= deadline)
        return -ETIMEDOUT;
    timer_init(&d.timer, deadline_passed);
    timer_arm(&d.timer, deadline);
    ssize_t n = io_recv(fd, buf, len);
    timer_disarm(&d.timer);
    return n == -ECANCELED && d.passed ? -ETIMEDOUT : n;
}

/*
 * Fills addr. A path longer than sun_path is reached through an open descriptor of its
 * directory (*ret_dir, -1 when not needed), which must stay open while addr is used.
 */
static int unix_addr(const char *path, struct sockaddr_un *addr, int *ret_dir, struct err *err)
{
    *addr = (struct sockaddr_un){.sun_family = AF_UNIX};
    *ret_dir = -1;
    if (strlen(path) < sizeof(addr->sun_path)) {
        memcpy(addr->sun_path, path, strlen(path) + 1);
        return 0;
    }
    const char *base = strrchr(path, '/');
    _cleanup_(freep) char *dir = base ? strndup(path, (size_t)(base - path)) : NULL;
    if (!dir || strlen(base) + sizeof("/proc/self/fd/2147483647") > sizeof(addr->sun_path))
        return err_set(err, -ENAMETOOLONG, "socket path '%s' is too long", path);
    int fd = open(dir, O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (fd < 0)
        return err_errno(err, -errno, "open directory '%s'", dir);
    snprintf(addr->sun_path, sizeof(addr->sun_path), "/proc/self/fd/%d%s", fd, base);
    *ret_dir = fd;
    return 0;
}

static int new_socket(struct err *err)
{
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

    return fd < 0 ? err_errno(err, -errno, "create a unix socket") : fd;
}

/* A blocking connect waits without end where a stopped server's queue is full. */
SUSPENDS static int connect_soon(int fd, const struct sockaddr_un *addr)
{
    uint64_t deadline = reactor_now() + QMP_ANSWER_NS;

    fcntl(fd, F_SETFL, O_NONBLOCK);
    while (connect(fd, (const struct sockaddr *)addr, sizeof(*addr)) < 0) {
        if (errno != EAGAIN && errno != EINTR)
            return -errno;
        if (reactor_now() > deadline)
            return -ETIMEDOUT;
        timer_sleep(20 * NSEC_PER_MSEC);
    }
    fcntl(fd, F_SETFL, 0);
    return 0;
}

SUSPENDS int qmp_connect_unix(const char *path, struct err *err)
{
    struct sockaddr_un addr;
    _cleanup_(closep) int dir = -1;
    _cleanup_(closep) int fd = -1;
    int rc = unix_addr(path, &addr, &dir, err);

    if (rc < 0)
        return rc;
    fd = new_socket(err);
    if (fd < 0)
        return fd;
    rc = connect_soon(fd, &addr);
    if (rc == -ETIMEDOUT)
        return err_set(err, rc, "'%s' has many clients that wait: its server does not answer",
                       path);
    if (rc < 0)
        return err_errno(err, rc, "connect to '%s'", path);
    return TAKE_FD(fd);
}

/* Does somebody answer there? A QMP server speaks first. 1 yes, 0 nobody, -EAGAIN not any more. */
SUSPENDS static int is_live(const char *path, struct err *err)
{
    _cleanup_(closep) int peer = qmp_connect_unix(path, NULL);
    char byte;

    if (peer == -ECONNREFUSED || peer == -ENOENT)
        return 0;
    if (peer < 0)
        return err_errno(err, peer, "'%s' is in the way", path);
    ssize_t n = qmp_recv_until(peer, &byte, 1, reactor_now() + NSEC_PER_SEC);
    return n > 0 || n == -ETIMEDOUT ? 1 : -EAGAIN;
}

/* Removes a socket that nobody listens on. */
SUSPENDS static int remove_stale(const char *path, struct err *err)
{
    struct stat st;
    int live = -EAGAIN;

    if (lstat(path, &st) < 0)
        return errno == ENOENT ? 0 : err_errno(err, -errno, "look at '%s'", path);
    if (!S_ISSOCK(st.st_mode))
        return err_set(err, -EADDRINUSE, "'%s' is in the way: not a socket", path);
    /* The kernel closes a killed process's ring, and what hangs on it, some time after its end. */
    for (unsigned i = 0; i < STALE_TRIES && live == -EAGAIN; i++) {
        live = is_live(path, err);
        if (live == -EAGAIN)
            timer_sleep(STALE_WAIT_NS);
    }
    if (live > 0 || live == -EAGAIN)
        return err_set(err, -EADDRINUSE, "'%s' is in use: another server listens there", path);
    if (live < 0)
        return live;
    if (unlink(path) < 0 && errno != ENOENT)
        return err_errno(err, -errno, "remove stale socket '%s'", path);
    return 0;
}

SUSPENDS int qmp_listen_unix(const char *path, struct err *err)
{
    struct sockaddr_un addr;
    _cleanup_(closep) int dir = -1;
    _cleanup_(closep) int fd = -1;
    int rc = remove_stale(path, err);

    if (rc == 0)
        rc = unix_addr(path, &addr, &dir, err);
    if (rc < 0)
        return rc;
    fd = new_socket(err);
    if (fd < 0)
        return fd;
    /* On Linux the new inode takes the socket's mode: there is no moment with a wider one. */
    if (fchmod(fd, 0600) < 0)
        return err_errno(err, -errno, "set the mode of '%s'", path);
    if (bind(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0)
        return err_errno(err, -errno, "bind '%s'", path);
    if (listen(fd, 16) < 0)
        return err_errno(err, -errno, "listen on '%s'", path);
    return TAKE_FD(fd);
}
