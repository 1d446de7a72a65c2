/*
 * A bare NBD server for tests: nbd-serve [-r] [-f FORMAT] [-x NAME] [-n CONNECTIONS] [-m BYTES] [-t
 * THREADS] FILE SOCKET | FILE HOST PORT Serves the file's chain as "" and NAME until SIGTERM or
 * SIGINT, then stops gracefully. Prints the address once it listens.
 */
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/signalfd.h>
#include <poll.h>
#include "export/export.h"
#include "rt/reactor.h"

struct options {
    const char *file, *name;
    bool read_only;
    struct chain_opts chain;
    struct nbd_server_opts server;
    unsigned threads;
};

static int fail(const struct err *err)
{
    fprintf(stderr, "nbd-serve: %s\n", err_text(err));
    return 1;
}

SUSPENDS static void wait_for_signal(void)
{
    sigset_t set;

    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    int fd = signalfd(-1, &set, SFD_CLOEXEC);
    io_poll(fd, POLLIN);
    close(fd);
}

SUSPENDS static int serve(const struct options *o, struct chain *chain)
{
    struct err err = {0};
    struct nbd_server *server;

    if (nbd_server_start(&o->server, &server, &err) < 0)
        return fail(&err);
    for (unsigned i = 0; i < 2; i++) {
        struct nbd_export_opts export = {
            .name = i == 0 ? "" : o->name,
            .description = "the disk",
            .chain = chain,
            .writable = !o->read_only,
            .depth_context = true,
        };

        if (nbd_export_add(server, &export, NULL, &err) < 0) {
            nbd_server_stop(server);
            return fail(&err);
        }
    }
    printf("%s\n", nbd_server_address(server));
    fflush(stdout);
    wait_for_signal();
    nbd_server_stop(server);
    return 0;
}

SUSPENDS_UNCHECKED static int run(void *arg)
{
    const struct options *o = arg;
    struct chain *chain;
    struct err err = {0};

    if (chain_open(o->file, &o->chain, &chain, &err) < 0)
        return fail(&err);
    struct options with = *o;
    with.server.reactors = reactors_new(o->threads);
    int status = serve(&with, chain);
    reactors_free(with.server.reactors);
    if (chain_close(chain, &err) < 0)
        return fail(&err);
    return status;
}

int main(int argc, char **argv)
{
    struct options o = {.name = "disk", .threads = 1};
    sigset_t set;
    int c;

    while ((c = getopt(argc, argv, "rf:x:n:m:t:")) != -1) {
        o.read_only |= c == 'r';
        o.chain.format = c == 'f' ? optarg : o.chain.format;
        o.name = c == 'x' ? optarg : o.name;
        o.server.max_connections = c == 'n' ? (unsigned)atoi(optarg) : o.server.max_connections;
        o.threads = c == 't' ? (unsigned)atoi(optarg) : o.threads;
        o.server.buffer_bytes = c == 'm' ? strtoull(optarg, NULL, 0) : o.server.buffer_bytes;
    }
    if (argc - optind < 2)
        return 2;
    o.file = argv[optind];
    if (argc - optind == 2) {
        o.server.unix_path = argv[optind + 1];
    } else {
        o.server.host = argv[optind + 1];
        o.server.port = argv[optind + 2];
    }
    o.chain.writable = !o.read_only;
    sigemptyset(&set);
    sigaddset(&set, SIGTERM);
    sigaddset(&set, SIGINT);
    sigprocmask(SIG_BLOCK, &set, NULL);
    return reactor_run(run, &o);
}
