/*
 * Listening sockets: a unix socket, or every address that a host name stands for.
 *
 * A unix socket that a dead server left behind is replaced; one that answers is refused. At the
 * end the name is removed only while it is still our socket.
 */
#include <errno.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include "export/nbd/internal.h"
#include "rt/offload.h"

#define BACKLOG 512

static int add_listener(struct nbd_server *server, int fd)
{
    if (listen(fd, BACKLOG) < 0)
        return -errno;
    server->listeners[server->nr_listeners++] = (struct nbd_listener){server, fd, NULL};
    return 0;
}

/* ---- unix ---- */

/* -EADDRINUSE when somebody listens there; a name without a listener is removed. */
static int remove_stale(const struct sockaddr_un *addr)
{
    struct stat st;

    if (lstat(addr->sun_path, &st) < 0)
        return errno == ENOENT ? 0 : -errno;
    if (!S_ISSOCK(st.st_mode))
        return -EEXIST;
    _cleanup_(closep) int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (fd < 0)
        return -errno;
    if (connect(fd, (const struct sockaddr *)addr, sizeof(*addr)) == 0 || errno == EAGAIN)
        return -EADDRINUSE;
    if (errno != ECONNREFUSED)
        return -errno;
    return unlink(addr->sun_path) < 0 && errno != ENOENT ? -errno : 0;
}

static int bind_unix(struct nbd_server *server, int fd, const struct sockaddr_un *addr)
{
    struct stat st;
    int rc = remove_stale(addr);

    if (rc < 0)
        return rc;
    if (bind(fd, (const struct sockaddr *)addr, sizeof(*addr)) < 0)
        return -errno;
    if (lstat(addr->sun_path, &st) < 0)
        return -errno;
    server->unix_dev = st.st_dev;
    server->unix_ino = st.st_ino;
    server->unix_path = strdup(addr->sun_path);
    server->address = strdup(addr->sun_path);
    return server->unix_path && server->address ? 0 : -ENOMEM;
}

static int listen_unix(struct nbd_server *server, const char *path, struct err *err)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};

    if (strlen(path) >= sizeof(addr.sun_path))
        return err_set(err, -ENAMETOOLONG, "socket path '%s' is longer than %zu bytes", path,
                       sizeof(addr.sun_path) - 1);
    memcpy(addr.sun_path, path, strlen(path) + 1);
    _cleanup_(closep) int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    int rc = fd < 0 ? -errno : bind_unix(server, fd, &addr);
    if (rc == 0)
        rc = add_listener(server, fd);
    if (rc < 0)
        return err_errno(err, rc, "listen on '%s'", path);
    (void)TAKE_FD(fd);
    return 0;
}

/* ---- TCP ---- */

struct resolve {
    const char *host, *port;
    struct addrinfo *found;
};

static int resolve_blocking(void *arg)
{
    struct resolve *r = arg;
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_ADDRCONFIG};
    int rc = getaddrinfo(r->host, r->port, &hints, &r->found);

    /* AI_ADDRCONFIG hides loopback addresses on a machine without a network */
    if (rc == EAI_NONAME || rc == EAI_ADDRFAMILY) {
        hints.ai_flags = 0;
        rc = getaddrinfo(r->host, r->port, &hints, &r->found);
    }
    return rc;
}

static uint16_t bound_port(int fd)
{
    struct sockaddr_storage addr;
    socklen_t len = sizeof(addr);

    if (getsockname(fd, (struct sockaddr *)&addr, &len) < 0)
        return 0;
    return addr.ss_family == AF_INET6 ? ntohs(((struct sockaddr_in6 *)&addr)->sin6_port)
                                      : ntohs(((struct sockaddr_in *)&addr)->sin_port);
}

/* port=0: all addresses of the host get the port that the first one was given. */
static void set_port(struct sockaddr *addr, uint16_t port)
{
    if (addr->sa_family == AF_INET6)
        ((struct sockaddr_in6 *)addr)->sin6_port = htons(port);
    else
        ((struct sockaddr_in *)addr)->sin_port = htons(port);
}

static int listen_addr(struct nbd_server *server, const struct addrinfo *ai)
{
    int one = 1;

    if (server->nr_listeners > 0)
        set_port(ai->ai_addr, bound_port(server->listeners[0].fd));
    _cleanup_(closep) int fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -errno;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
    if (ai->ai_family == AF_INET6)
        setsockopt(fd, IPPROTO_IPV6, IPV6_V6ONLY, &one, sizeof(one));
    if (bind(fd, ai->ai_addr, ai->ai_addrlen) < 0)
        return -errno;
    int rc = add_listener(server, fd);
    if (rc == 0)
        (void)TAKE_FD(fd);
    return rc;
}

static int set_address(struct nbd_server *server)
{
    struct sockaddr_storage addr;
    socklen_t len = sizeof(addr);
    char host[NI_MAXHOST], port[NI_MAXSERV];

    if (getsockname(server->listeners[0].fd, (struct sockaddr *)&addr, &len) < 0)
        return -errno;
    if (getnameinfo((struct sockaddr *)&addr, len, host, sizeof(host), port, sizeof(port),
                    NI_NUMERICHOST | NI_NUMERICSERV) != 0)
        return -EIO;
    bool v6 = strchr(host, ':') != NULL;
    int rc = asprintf(&server->address, v6 ? "[%s]:%s" : "%s:%s", host, port);
    if (rc < 0)
        server->address = NULL;
    return rc < 0 ? -ENOMEM : 0;
}

/* An address that this machine does not have is passed over while another one works. */
static int listen_all(struct nbd_server *server, const struct addrinfo *found)
{
    int first = 0;

    for (const struct addrinfo *ai = found; ai && server->nr_listeners < NBD_MAX_LISTENERS;
         ai = ai->ai_next) {
        int rc = ai->ai_family == AF_INET || ai->ai_family == AF_INET6 ? listen_addr(server, ai)
                                                                       : -EAFNOSUPPORT;

        if (rc < 0 && rc != -EAFNOSUPPORT && rc != -EADDRNOTAVAIL)
            return rc;
        first = first ? first : rc;
    }
    return server->nr_listeners ? set_address(server) : (first ? first : -EADDRNOTAVAIL);
}

SUSPENDS
static int listen_tcp(struct nbd_server *server, const char *host, const char *port,
                      struct err *err)
{
    struct resolve r = {.host = host, .port = port};
    const char *shown = host ? host : "localhost";
    char *end;
    unsigned long number = strtoul(port, &end, 10); /* a resolver would take what is left of it */

    if (!*end && number > UINT16_MAX)
        return err_set(err, -EINVAL, "port '%s' is not one of 0 to 65535", port);
    int rc = offload(resolve_blocking, &r);
    if (rc != 0)
        return err_set(err, -EADDRNOTAVAIL, "host '%s', port '%s': %s", shown, port,
                       gai_strerror(rc));
    rc = listen_all(server, r.found);
    freeaddrinfo(r.found);
    return rc < 0 ? err_errno(err, rc, "listen on '%s', port %s", shown, port) : 0;
}

/* ---- all ---- */

int nbd_listen(struct nbd_server *server, const struct nbd_server_opts *opts, struct err *err)
{
    if (opts->unix_path)
        return listen_unix(server, opts->unix_path, err);
    if (!opts->host && !opts->port)
        return 0; /* connections are given to it */
    return listen_tcp(server, opts->host, opts->port ? opts->port : "10809", err);
}

void nbd_unlisten(struct nbd_server *server)
{
    struct stat st;

    if (server->unix_path && lstat(server->unix_path, &st) == 0 && st.st_dev == server->unix_dev &&
        st.st_ino == server->unix_ino)
        unlink(server->unix_path);
    while (server->nr_listeners > 0)
        close(server->listeners[--server->nr_listeners].fd);
}
