/* The tests' NBD client: see nbd_client.h. */
#include <errno.h>
#include <string.h>
#include <sys/socket.h>
#include "nbd_client.h"
#include "rt/reactor.h"
#include "test.h"

/* ---- rig ---- */

struct reactors *rig_reactors(struct rig *rig)
{
    const char *threads = getenv("NBD_TEST_THREADS");

    rig->reactors = reactors_new(threads ? (unsigned)atoi(threads) : 1);
    CHECK(rig->reactors);
    CHECK(reactors_get(rig->reactors) == reactor_self());
    return rig->reactors;
}

void rig_route_all(struct rig *rig)
{
    rig->server->route_from = 0;
}

void rig_free_reactors(struct rig *rig)
{
    reactors_put(rig->reactors, reactor_self());
    reactors_free(rig->reactors);
}

void rig_start_on(struct rig *rig, struct blk *blk, const struct nbd_server_opts *opts)
{
    struct nbd_server_opts all = opts ? *opts : (struct nbd_server_opts){0};
    struct layer_opts layer_opts = {.format = "raw", .writable = true};
    struct layer *layer;
    struct err err = {0};

    rig->blk = blk;
    CHECK_EQ(layer_from_blk(rig->blk, false, &layer_opts, &layer, &err), 0);
    CHECK_EQ(chain_from_layers(&layer, 1, 0, &rig->chain, &err), 0);
    all.reactors = rig_reactors(rig);
    CHECK_EQ(nbd_server_start(&all, &rig->server, &err), 0);
    rig_route_all(rig);
    struct nbd_export_opts export = {
        .name = "disk",
        .description = "test disk",
        .chain = rig->chain,
        .writable = true,
        .depth_context = true,
    };
    CHECK_EQ(nbd_export_add(rig->server, &export, &rig->exp, &err), 0);
}

void rig_start(struct rig *rig, uint64_t len, const struct nbd_server_opts *opts)
{
    struct blk *mem, *fault;

    CHECK_EQ(blk_mem_new(len, 1, &mem), 0);
    CHECK_EQ(blk_fault_new(mem, &fault), 0);
    rig_start_on(rig, fault, opts);
}

void rig_stop(struct rig *rig)
{
    struct err err = {0};

    nbd_server_stop(rig->server);
    rig_free_reactors(rig);
    CHECK_EQ(chain_close(rig->chain, &err), 0);
}

void rig_await_conns(struct rig *rig, unsigned nr)
{
    for (unsigned i = 0; rig->server->nr_conns != nr; i++) {
        CHECK(i < 5000);
        timer_sleep(NSEC_PER_MSEC);
    }
}

/* ---- socket ---- */

void client_open(struct client *c, struct nbd_server *server)
{
    int fds[2];

    CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, fds), 0);
    *c = (struct client){.fd = fds[0]};
    CHECK_EQ(nbd_server_adopt(server, fds[1]), 0);
}

void client_close(struct client *c)
{
    close(c->fd);
    c->fd = -1;
}

int client_send(struct client *c, const void *data, size_t len)
{
    struct iovec iov = {(void *)(uintptr_t)data, len};

    return nbd_send_all(c->fd, &iov, 1);
}

int client_recv(struct client *c, void *data, size_t len)
{
    static char waste[4096]; /* what is in it never matters */

    while (len > 0) {
        ssize_t n =
            data ? io_recv(c->fd, data, len) : io_recv(c->fd, waste, MIN(len, sizeof(waste)));

        if (n <= 0)
            return n == 0 ? -ECONNRESET : (int)n;
        len -= (size_t)n;
        data = data ? (char *)data + n : NULL;
    }
    return 0;
}

/* ---- negotiation ---- */

int client_hello(struct client *c, uint32_t flags)
{
    struct nbd_wire_greeting hello;
    be32 answer = be32_make(flags);
    int rc = client_recv(c, &hello, sizeof(hello));

    if (rc < 0)
        return rc;
    CHECK(be64_get(hello.init_magic) == NBD_MAGIC_INIT);
    CHECK(be64_get(hello.option_magic) == NBD_MAGIC_OPTION);
    CHECK_EQ(be16_get(hello.flags), NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES);
    return client_send(c, &answer, sizeof(answer));
}

int client_option_raw(struct client *c, uint64_t magic, uint32_t type, const void *data,
                      size_t data_len, uint32_t len)
{
    struct nbd_wire_option head = {be64_make(magic), be32_make(type), be32_make(len)};
    int rc = client_send(c, &head, sizeof(head));

    return rc < 0 || !data_len ? rc : client_send(c, data, data_len);
}

SUSPENDS static int take_reply(struct client *c, struct option_reply *ret)
{
    struct nbd_wire_option_reply head;
    int rc = client_recv(c, &head, sizeof(head));

    if (rc < 0)
        return rc;
    CHECK(be64_get(head.magic) == NBD_MAGIC_OPTREPLY);
    ret->type = be32_get(head.type);
    ret->len = be32_get(head.len);
    uint32_t kept = MIN(ret->len, (uint32_t)sizeof(ret->data));
    rc = client_recv(c, ret->data, kept);
    return rc < 0 ? rc : client_recv(c, NULL, ret->len - kept);
}

int64_t client_replies(struct client *c, struct option_replies *ret)
{
    struct option_replies unused;
    struct option_replies *to = ret ? ret : &unused;

    to->nr = 0;
    for (;;) {
        CHECK(to->nr < ARRAY_SIZE(to->at));
        struct option_reply *r = &to->at[to->nr++];
        int rc = take_reply(c, r);

        if (rc < 0)
            return rc;
        if (r->type == NBD_REP_ACK || (r->type & NBD_REP_ERROR))
            return r->type;
    }
}

int64_t client_option(struct client *c, uint32_t type, const void *data, size_t len,
                      struct option_replies *ret)
{
    int rc = client_option_raw(c, NBD_MAGIC_OPTION, type, data, len, (uint32_t)len);

    return rc < 0 ? rc : client_replies(c, ret);
}

static uint8_t *put_text(uint8_t *p, const char *s)
{
    be32 len = be32_make((uint32_t)strlen(s));

    memcpy(p, &len, sizeof(len));
    memcpy(p + sizeof(len), s, strlen(s));
    return p + sizeof(len) + strlen(s);
}

size_t client_go_data(uint8_t *buf, const char *name, unsigned nr_infos, const uint16_t *infos)
{
    uint8_t *p = put_text(buf, name);
    be16 v = be16_make((uint16_t)nr_infos);

    memcpy(p, &v, sizeof(v));
    p += sizeof(v);
    for (unsigned i = 0; i < nr_infos; i++, p += sizeof(v)) {
        v = be16_make(infos[i]);
        memcpy(p, &v, sizeof(v));
    }
    return (size_t)(p - buf);
}

size_t client_meta_data(uint8_t *buf, const char *name, unsigned nr, const char *const *queries)
{
    uint8_t *p = put_text(buf, name);
    be32 v = be32_make(nr);

    memcpy(p, &v, sizeof(v));
    p += sizeof(v);
    for (unsigned i = 0; i < nr; i++)
        p = put_text(p, queries[i]);
    return (size_t)(p - buf);
}

int client_go(struct client *c, const char *name)
{
    uint8_t data[300];
    struct option_replies replies;
    int64_t last =
        client_option(c, NBD_OPT_GO, data, client_go_data(data, name, 0, NULL), &replies);

    if (last != NBD_REP_ACK)
        return last < 0 ? (int)last : -ENOENT;
    for (unsigned i = 0; i < replies.nr; i++) {
        const uint8_t *d = replies.at[i].data;
        be64 len;
        be16 flags;

        if (replies.at[i].type != NBD_REP_INFO || d[0] || d[1] != NBD_INFO_EXPORT)
            continue;
        memcpy(&len, d + 2, sizeof(len));
        memcpy(&flags, d + 10, sizeof(flags));
        c->len = be64_get(len);
        c->flags = be16_get(flags);
    }
    return 0;
}

void client_enter(struct client *c, struct nbd_server *server, const char *name, bool structured)
{
    static const char *const queries[] = {"base:allocation", "qemu:allocation-depth"};
    uint8_t data[300];

    client_open(c, server);
    CHECK_EQ(client_hello(c, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES), 0);
    if (structured) {
        CHECK_EQ(client_option(c, NBD_OPT_STRUCTURED_REPLY, NULL, 0, NULL), NBD_REP_ACK);
        c->structured = true;
        CHECK_EQ(client_option(c, NBD_OPT_SET_META_CONTEXT, data,
                               client_meta_data(data, name, 2, queries), NULL),
                 NBD_REP_ACK);
    }
    CHECK_EQ(client_go(c, name), 0);
}

/* ---- transmission ---- */

int client_request(struct client *c, unsigned type, unsigned flags, uint64_t off, uint32_t len)
{
    struct nbd_wire_request req = {
        be32_make(NBD_MAGIC_REQUEST),
        be16_make((uint16_t)flags),
        be16_make((uint16_t)type),
        be64_make(++c->cookie),
        be64_make(off),
        be32_make(len),
    };

    return client_send(c, &req, sizeof(req));
}

SUSPENDS static int take_extents(struct client *c, size_t len, struct answer *ret)
{
    be32 context;
    int rc = client_recv(c, &context, sizeof(context));
    unsigned id = be32_get(context);

    CHECK(rc < 0 || (id < NBD_CONTEXTS && ret->nr_extents[id] == 0));
    for (len -= sizeof(context); rc == 0 && len > 0; len -= sizeof(struct nbd_wire_extent)) {
        struct nbd_wire_extent x;
        unsigned n = ret->nr_extents[id]++;

        rc = client_recv(c, &x, sizeof(x));
        if (n < ARRAY_SIZE(ret->extents[id])) {
            ret->extents[id][n].len = be32_get(x.len);
            ret->extents[id][n].flags = be32_get(x.flags);
        }
    }
    return rc;
}

SUSPENDS static int take_data(struct client *c, size_t len, struct answer *ret)
{
    be64 off;
    int rc = client_recv(c, &off, sizeof(off));

    if (rc < 0)
        return rc;
    len -= sizeof(off);
    ret->data_got += len;
    return client_recv(c, ret->data ? ret->data + (be64_get(off) - ret->off) : NULL, len);
}

/* The rest of a chunk behind its magic: 1 when it was the last one, 0, -errno. */
SUSPENDS static int take_chunk(struct client *c, struct answer *ret)
{
    struct nbd_wire_chunk head;
    be32 error;
    int rc = client_recv(c, (char *)&head + sizeof(head.magic), sizeof(head) - sizeof(head.magic));

    if (rc < 0)
        return rc;
    size_t len = be32_get(head.len);
    ret->cookie = be64_get(head.cookie);
    ret->chunks++;
    switch (be16_get(head.type)) {
    case NBD_REPLY_OFFSET_DATA:
        rc = take_data(c, len, ret);
        break;
    case NBD_REPLY_BLOCK_STATUS:
        rc = take_extents(c, len, ret);
        break;
    case NBD_REPLY_NONE:
        CHECK_EQ(len, 0);
        break;
    default:
        CHECK(be16_get(head.type) & 0x8000);
        rc = client_recv(c, &error, sizeof(error));
        ret->error = be32_get(error);
        if (rc == 0)
            rc = client_recv(c, NULL, len - sizeof(error));
    }
    return rc < 0 ? rc : (be16_get(head.flags) & NBD_REPLY_FLAG_DONE) != 0;
}

int client_answer(struct client *c, unsigned type, uint32_t len, struct answer *ret)
{
    be32 magic;
    int rc;

    do {
        rc = client_recv(c, &magic, sizeof(magic));
        if (rc < 0)
            return rc;
        if (be32_get(magic) == NBD_MAGIC_STRUCTURED) {
            CHECK(c->structured);
            rc = take_chunk(c, ret);
            continue;
        }
        struct nbd_wire_simple s;
        CHECK_EQ(be32_get(magic), NBD_MAGIC_SIMPLE);
        CHECK(!c->structured || (type != NBD_CMD_READ && type != NBD_CMD_BLOCK_STATUS));
        rc = client_recv(c, (char *)&s + sizeof(magic), sizeof(s) - sizeof(magic));
        ret->error = be32_get(s.error);
        ret->cookie = be64_get(s.cookie);
        if (rc == 0 && type == NBD_CMD_READ && ret->error == 0) {
            rc = client_recv(c, ret->data, len);
            ret->data_got = len;
        }
        rc = rc < 0 ? rc : 1;
    } while (rc == 0);
    return rc < 0 ? rc : 0;
}

unsigned client_do(struct client *c, unsigned type, unsigned flags, uint64_t off, uint32_t len,
                   void *payload)
{
    struct answer a = {.off = off, .data = type == NBD_CMD_READ ? payload : NULL};

    CHECK_EQ(client_request(c, type, flags, off, len), 0);
    if (type == NBD_CMD_WRITE)
        CHECK_EQ(client_send(c, payload, len), 0);
    CHECK_EQ(client_answer(c, type, len, &a), 0);
    CHECK_EQ(a.cookie, c->cookie);
    CHECK(a.error || type != NBD_CMD_READ || a.data_got == len);
    return a.error;
}

bool client_alive(struct client *c)
{
    uint8_t byte;

    return client_do(c, NBD_CMD_READ, 0, 0, 1, &byte) == 0;
}
