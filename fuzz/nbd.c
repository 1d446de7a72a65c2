/*
 * Fuzzing of the NBD server: the input is what a client sends, from its first byte to its end.
 *
 * Built with -fsanitize=fuzzer this is a libFuzzer target; with NBD_REPLAY defined it has a main()
 * that replays files and directories of inputs, which is how the corpus runs as a test. Each input
 * gets a fresh server on a small raw disk in memory, with and without a "client" that has already
 * come as far as transmission (first byte odd), because a fuzzer needs long to find the handshake.
 */
#include <dirent.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include "base/check.h"
#include "export/nbd/internal.h"
#include "rt/reactor.h"

#define DISK_LEN (1u << 20)
#define SEND_MAX ((size_t)64 << 10) /* what a socket takes without a reader */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len);

struct input {
    const uint8_t *data;
    size_t len;
};

/* hello, STRUCTURED_REPLY, SET_META_CONTEXT of both, GO */
static const char prelude[] =
    "\0\0\0\3"
    "IHAVEOPT\0\0\0\10\0\0\0\0"
    "IHAVEOPT\0\0\0\12\0\0\0\60\0\0\0\4disk\0\0\0\2\0\0\0\17base:allocation"
    "\0\0\0\25qemu:allocation-depth"
    "IHAVEOPT\0\0\0\7\0\0\0\12\0\0\0\4disk\0\0";

SUSPENDS static void read_to_the_end(int fd)
{
    static char waste[4096]; /* what is in it never matters */

    while (io_recv(fd, waste, sizeof(waste)) > 0)
        ;
}

static void send_input(int fd, const struct input *in)
{
    ssize_t sent;

    if (in->len > 0 && (in->data[0] & 1)) {
        sent = send(fd, prelude, sizeof(prelude) - 1, MSG_NOSIGNAL);
        CHECK_THAT(sent == sizeof(prelude) - 1);
    }
    if (in->len > 1) {
        sent = send(fd, in->data + 1, MIN(in->len - 1, SEND_MAX), MSG_NOSIGNAL);
        CHECK_THAT(sent > 0);
    }
    shutdown(fd, SHUT_WR);
}

SUSPENDS static struct chain *make_disk(void)
{
    struct layer_opts opts = {.format = "raw", .writable = true};
    struct chain *chain = NULL;
    struct layer *layer = NULL;
    struct blk *blk = NULL;

    CHECK_THAT(blk_mem_new(DISK_LEN, 1, &blk) == 0);
    CHECK_THAT(layer_from_blk(blk, false, &opts, &layer, NULL) == 0);
    CHECK_THAT(chain_from_layers(&layer, 1, 0, &chain, NULL) == 0);
    return chain;
}

SUSPENDS_UNCHECKED static int talk(void *arg)
{
    struct nbd_server_opts opts = {.max_connections = 1, .buffer_bytes = 1 << 20};
    struct chain *chain = make_disk();
    struct nbd_export_opts export = {
        .name = "disk", .chain = chain, .writable = true, .depth_context = true};
    struct nbd_server *server = NULL;
    int fds[2];

    CHECK_THAT(nbd_server_start(&opts, &server, NULL) == 0);
    CHECK_THAT(nbd_export_add(server, &export, NULL, NULL) == 0);
    CHECK_THAT(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds) == 0);
    send_input(fds[0], arg);
    CHECK_THAT(nbd_server_adopt(server, fds[1]) == 0);
    read_to_the_end(fds[0]);
    close(fds[0]);
    nbd_server_stop(server);
    CHECK_THAT(chain_close(chain, NULL) == 0);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t len)
{
    struct input in = {data, len};

    reactor_run(talk, &in);
    return 0;
}

#ifdef NBD_REPLAY
static int replay_file(const char *path)
{
    static uint8_t buf[SEND_MAX + 1];
    FILE *f = fopen(path, "rb");

    if (!f)
        return 1;
    size_t len = fread(buf, 1, sizeof(buf), f);
    fclose(f);
    return LLVMFuzzerTestOneInput(buf, len);
}

static int replay_dir(const char *path, unsigned *nr)
{
    DIR *dir = opendir(path);
    const struct dirent *e;
    static char name[4096];
    int rc = dir ? 0 : 1;

    while (dir && rc == 0 && (e = readdir(dir))) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(name, sizeof(name), "%s/%s", path, e->d_name);
        rc = replay_file(name);
        ++*nr;
    }
    if (dir)
        closedir(dir);
    return rc;
}

int main(int argc, char **argv)
{
    unsigned nr = 0;
    int rc = 0;

    for (int i = 1; i < argc && rc == 0; i++) {
        struct stat st;

        if (stat(argv[i], &st) < 0)
            return 1;
        rc = S_ISDIR(st.st_mode) ? replay_dir(argv[i], &nr) : (nr++, replay_file(argv[i]));
    }
    printf("%u inputs\n", nr);
    return rc || nr == 0;
}
#endif
