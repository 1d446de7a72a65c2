/*
 * In steady state a request allocates nothing, from the socket to the file: requests, coroutines,
 * payload, letters and lookups come from pools. Also: many requests are taken by one system call
 * and many answers leave with one. The linker leads the allocator's calls through the counters here
 * (--wrap).
 */
#include <errno.h>
#include <sys/syscall.h>
#include "nbd_client.h"
#include "base/bits.h"
#include "rt/reactor.h"
#include "test.h"

#define LEN       (64 * MIB)
#define BLOCK_LEN 4096u
#define DEPTH     32u

static unsigned long calls; /* atomic */
static bool trace;

#define WRAP(name, params, args)                                                                   \
    void *__real_##name params;                                                                    \
    void *__wrap_##name params;                                                                    \
    void *__wrap_##name params                                                                     \
    {                                                                                              \
        __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);                                           \
        if (trace)                                                                                 \
            abort(); /* NBD_STEADY_TRACE=1: the core or debugger names the caller */               \
        return __real_##name args;                                                                 \
    }
WRAP(malloc, (size_t len), (len))
WRAP(calloc, (size_t nr, size_t len), (nr, len))
WRAP(realloc, (void *old, size_t len), (old, len))
WRAP(aligned_alloc, (size_t align, size_t len), (align, len))
WRAP(reallocarray, (void *old, size_t nr, size_t len), (old, nr, len))

/* The server's calls on its socket; the client's are not counted. */
static int client_fd = -1;
static unsigned long receives, sends; /* atomic */

SUSPENDS ssize_t __real_io_recv(int fd, void *buf, size_t len);
SUSPENDS ssize_t __wrap_io_recv(int fd, void *buf, size_t len);
SUSPENDS ssize_t __real_io_sendmsg(int fd, const struct msghdr *msg, int flags);
SUSPENDS ssize_t __wrap_io_sendmsg(int fd, const struct msghdr *msg, int flags);

ssize_t __wrap_io_recv(int fd, void *buf, size_t len)
{
    if (fd != client_fd)
        __atomic_fetch_add(&receives, 1, __ATOMIC_RELAXED);
    return __real_io_recv(fd, buf, len);
}

ssize_t __wrap_io_sendmsg(int fd, const struct msghdr *msg, int flags)
{
    if (fd != client_fd)
        __atomic_fetch_add(&sends, 1, __ATOMIC_RELAXED);
    return __real_io_sendmsg(fd, msg, flags);
}

static char *path_of(const char *name)
{
    static char paths[2][160];
    static unsigned next;
    char *path = paths[next++ % ARRAY_SIZE(paths)];

    snprintf(path, sizeof(paths[0]), "%s/%s", test_dir(), name);
    return path;
}

SUSPENDS static void serve(struct rig *rig)
{
    struct chain_opts opts = {.writable = true};
    struct nbd_server_opts server = {0};
    struct err err = {0};

    test_sh("cd %s && rm -f *.qcow2 && qemu-img create -q -f qcow2 base.qcow2 64M && "
            "qemu-io -c 'write -q -P 7 0 64M' base.qcow2 && "
            "qemu-img create -q -f qcow2 -b base.qcow2 -F qcow2 top.qcow2",
            test_dir());
    setenv("VARVE_RUNTIME", test_dir(), 1);
    if (chain_open(path_of("top.qcow2"), &opts, &rig->chain, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    chain_hold(rig->chain);
    int rc = chain_start_ack(rig->chain, &err);
    chain_release(rig->chain);
    CHECK_EQ(rc, 0);
    server.reactors = rig_reactors(rig);
    CHECK_EQ(nbd_server_start(&server, &rig->server, &err), 0);
    struct nbd_export_opts export = {.name = "disk", .chain = rig->chain, .writable = true};
    CHECK_EQ(nbd_export_add(rig->server, &export, &rig->exp, &err), 0);
}

static unsigned long count(void)
{
    return __atomic_load_n(&calls, __ATOMIC_RELAXED);
}

static unsigned long count_socket(void)
{
    return __atomic_load_n(&receives, __ATOMIC_RELAXED) + __atomic_load_n(&sends, __ATOMIC_RELAXED);
}

/* DEPTH requests in one send, then all their answers. The same places again and again. */
SUSPENDS static void one_batch(struct client *c, unsigned type, unsigned first)
{
    static struct {
        struct nbd_wire_request head;
        uint8_t data[BLOCK_LEN];
    } out[DEPTH];
    static uint8_t in[DEPTH * (sizeof(struct nbd_wire_simple) + BLOCK_LEN)];
    bool write = type == NBD_CMD_WRITE;
    struct iovec iov[DEPTH];

    for (unsigned i = 0; i < DEPTH; i++) {
        out[i].head = (struct nbd_wire_request){
            .magic = be32_make(NBD_MAGIC_REQUEST),
            .type = be16_make((uint16_t)type),
            .cookie = be64_make(i),
            .off = be64_make((first + i * 37) % (LEN / BLOCK_LEN) * (uint64_t)BLOCK_LEN),
            .len = be32_make(BLOCK_LEN),
        };
        iov[i] = (struct iovec){&out[i], sizeof(out[i].head) + (write ? BLOCK_LEN : 0)};
    }
    CHECK_EQ(nbd_send_all(c->fd, iov, DEPTH), 0);
    size_t answer = sizeof(struct nbd_wire_simple) + (write ? 0 : BLOCK_LEN);
    CHECK_EQ(client_recv(c, in, DEPTH * answer), 0);
    for (unsigned i = 0; i < DEPTH; i++) {
        const struct nbd_wire_simple *s = (const void *)(in + i * answer);

        CHECK_EQ(be32_get(s->magic), NBD_MAGIC_SIMPLE);
        CHECK_EQ(be32_get(s->error), 0);
    }
}

CO_TEST(the_data_path_allocates_nothing)
{
    static const unsigned types[] = {NBD_CMD_READ, NBD_CMD_WRITE};
    struct client c;
    struct rig rig;

    test_need("qemu-img");
    test_need("qemu-io");
    serve(&rig);
    client_enter(&c, rig.server, "disk", false);
    client_fd = c.fd;
    for (unsigned t = 0; t < ARRAY_SIZE(types); t++) {
        for (unsigned i = 0; i < 100; i++)
            one_batch(&c, types[t], i % 10 * 1000);
        unsigned long before = count(), socket_before = count_socket();
        CHECK(before > 0 && socket_before > 0); /* the counters do count */
        trace = getenv("NBD_STEADY_TRACE");
        for (unsigned i = 0; i < 200; i++)
            one_batch(&c, types[t], i % 10 * 1000);
        trace = false;
        CHECK_EQ(count(), before);
        double each = (double)(count_socket() - socket_before) / (200 * DEPTH);
        printf("# %s: %.3f calls on the socket a request\n",
               types[t] == NBD_CMD_READ ? "reads" : "writes", each);
        CHECK(each < 1.5); /* one by one it is 2; the less, the quicker the client gets the CPU */
    }
    /* what is written for the first time takes space: bounded, not none */
    unsigned long before = count();
    for (unsigned i = 0; i < 100; i++)
        one_batch(&c, NBD_CMD_WRITE, 400 + i * 131);
    printf("# %lu allocations in %u first writes\n", count() - before, 100 * DEPTH);
    client_close(&c);
    rig_await_conns(&rig, 0);
    rig_stop(&rig);
}
