/* Exports of a qcow2 chain: a snapshot's view while the top changes, fast zeroes, growing. */
#include <errno.h>
#include "nbd_client.h"
#include "base/bits.h"
#include "rt/reactor.h"
#include "test.h"

#define LEN (16 * MIB)

static uint8_t buf[65536], seen[65536];

static char *path_of(const char *name)
{
    static char paths[4][128];
    static unsigned next;
    char *path = paths[next++ % ARRAY_SIZE(paths)];

    snprintf(path, sizeof(paths[0]), "%s/%s", test_dir(), name);
    return path;
}

SUSPENDS static void serve_file(struct rig *rig, const char *name)
{
    struct nbd_server_opts none = {0};
    struct chain_opts opts = {.writable = true};
    struct err err = {0};

    if (chain_open(path_of(name), &opts, &rig->chain, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    none.reactors = rig_reactors(rig);
    CHECK_EQ(nbd_server_start(&none, &rig->server, &err), 0);
    rig_route_all(rig);
    struct nbd_export_opts export = {
        .name = "disk", .chain = rig->chain, .writable = true, .depth_context = true};
    CHECK_EQ(nbd_export_add(rig->server, &export, &rig->exp, &err), 0);
}

SUSPENDS static void push_overlay(struct rig *rig, const char *name, const char *below)
{
    struct layer_opts opts = {.format = "qcow2", .writable = true};
    struct layer *layer;
    struct err err = {0};

    test_sh("qemu-img create -q -f qcow2 -b %s -F qcow2 %s", path_of(below), path_of(name));
    if (layer_open(path_of(name), &opts, &layer, &err) < 0 ||
        chain_push(rig->chain, layer, NULL, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
}

struct load {
    struct client *c;
    bool stop;
    unsigned writes;
};

/* Writes its count into every place, one after the other, and checks what it reads back. */
SUSPENDS_UNCHECKED static int write_load(void *arg)
{
    static uint8_t out[4096], in[4096];
    struct load *load = arg;

    while (!load->stop) {
        uint64_t off = 8 * MIB + load->writes % 512 * 4096;

        memset(out, (int)++load->writes, sizeof(out));
        CHECK_EQ(client_do(load->c, NBD_CMD_WRITE, 0, off, sizeof(out), out), 0);
        CHECK_EQ(client_do(load->c, NBD_CMD_READ, 0, off, sizeof(in), in), 0);
        CHECK(memcmp(in, out, sizeof(in)) == 0);
    }
    return 0;
}

CO_TEST(a_snapshot_is_served_while_the_top_changes)
{
    struct client top, snap, loaded;
    struct load load = {.c = &loaded};
    struct co_group group;
    struct answer a = {0};
    struct rig rig;

    test_need("qemu-img");
    test_sh("qemu-img create -q -f qcow2 %s %llu", path_of("base.qcow2"), LEN);
    serve_file(&rig, "base.qcow2");
    client_enter(&top, rig.server, "disk", true);
    client_enter(&loaded, rig.server, "disk", true);
    memset(buf, 'A', sizeof(buf));
    CHECK_EQ(client_do(&top, NBD_CMD_WRITE, 0, 0, sizeof(buf), buf), 0);
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, write_load, &load), 0);
    timer_sleep(10 * NSEC_PER_MSEC);
    push_overlay(&rig, "top.qcow2", "base.qcow2");
    unsigned before = load.writes;
    CHECK(before > 0);
    while (load.writes < before + 50) /* it goes on */
        timer_sleep(NSEC_PER_MSEC);
    load.stop = true;
    co_group_wait(&group);

    struct layer *layer = chain_layer(rig.chain, 1);
    struct nbd_export_opts opts = {
        .name = "disk@s", .chain = rig.chain, .layer = layer, .depth_context = true};
    struct nbd_export *exp;
    CHECK_EQ(nbd_export_add(rig.server, &opts, &exp, NULL), 0);
    CHECK(layer_in_use(layer));
    opts.name = "wrong";
    opts.writable = true;
    CHECK_EQ(nbd_export_add(rig.server, &opts, NULL, NULL), -EROFS);
    memset(buf, 'B', sizeof(buf));
    CHECK_EQ(client_do(&top, NBD_CMD_WRITE, 0, 4096, 8192, buf), 0);
    client_enter(&snap, rig.server, "disk@s", true);
    CHECK(snap.len == LEN && (snap.flags & NBD_FLAG_READ_ONLY));
    memset(buf, 'A', sizeof(buf));
    CHECK_EQ(client_do(&snap, NBD_CMD_READ, 0, 0, sizeof(seen), seen), 0);
    CHECK(memcmp(buf, seen, sizeof(seen)) == 0);
    CHECK_EQ(client_request(&snap, NBD_CMD_BLOCK_STATUS, 0, 0, 2 * sizeof(buf)), 0);
    CHECK_EQ(client_answer(&snap, NBD_CMD_BLOCK_STATUS, 0, &a), 0);
    CHECK_EQ(a.nr_extents[NBD_CONTEXT_DEPTH], 2);
    CHECK_EQ(a.extents[NBD_CONTEXT_DEPTH][0].len, sizeof(buf));
    CHECK_EQ(a.extents[NBD_CONTEXT_DEPTH][0].flags, 1); /* of the snapshot itself */
    CHECK_EQ(a.extents[NBD_CONTEXT_DEPTH][1].flags, 0);
    CHECK_EQ(nbd_export_remove(exp, true, NULL), 0);
    CHECK(!layer_in_use(layer));
    client_close(&top);
    client_close(&loaded);
    client_close(&snap);
    rig_stop(&rig);
    test_sh("qemu-img check -q %s && qemu-img check -q %s", path_of("base.qcow2"),
            path_of("top.qcow2"));
}

CO_TEST(fast_zero_takes_whole_clusters_of_version_3_only)
{
    static const struct {
        const char *compat;
        uint64_t off;
        uint32_t len;
        unsigned error;
    } cases[] = {{"1.1", 65536, 131072, 0},
                 {"1.1", 65536, 1000, NBD_ENOTSUP},
                 {"1.1", 4096, 65536, NBD_ENOTSUP},
                 {"1.1", LEN, 512, 0}, /* ends with the disk */
                 {"0.10", 65536, 131072, NBD_ENOTSUP}};

    test_need("qemu-img");
    memset(buf, 7, sizeof(buf));
    for (unsigned i = 0; i < ARRAY_SIZE(cases); i++) {
        struct client c;
        struct rig rig;

        test_sh("qemu-img create -q -f qcow2 -o compat=%s %s %llu", cases[i].compat,
                path_of("fast.qcow2"), LEN + 512);
        serve_file(&rig, "fast.qcow2");
        client_enter(&c, rig.server, "disk", true);
        CHECK_EQ(client_do(&c, NBD_CMD_WRITE, 0, 65536, sizeof(buf), buf), 0);
        CHECK_EQ(client_do(&c, NBD_CMD_WRITE_ZEROES, NBD_CMD_FLAG_FAST_ZERO, cases[i].off,
                           cases[i].len, NULL),
                 cases[i].error);
        CHECK_EQ(client_do(&c, NBD_CMD_READ, 0, 65536, sizeof(seen), seen), 0);
        CHECK_EQ(buf_is_zero(seen, sizeof(seen)), i == 0);
        client_close(&c);
        rig_stop(&rig);
    }
}

CO_TEST(a_disk_that_grew_is_served_to_its_new_end)
{
    struct client old, new;
    struct rig rig;

    test_need("qemu-img");
    test_sh("qemu-img create -q -f qcow2 %s %llu", path_of("grow.qcow2"), LEN);
    serve_file(&rig, "grow.qcow2");
    client_enter(&old, rig.server, "disk", false);
    CHECK_EQ(client_do(&old, NBD_CMD_READ, 0, LEN, 512, seen), NBD_EINVAL);
    CHECK_EQ(chain_resize(rig.chain, LEN + 4096, NULL), 0);
    client_enter(&new, rig.server, "disk", false);
    CHECK_EQ(new.len, LEN + 4096);
    CHECK_EQ(client_do(&new, NBD_CMD_WRITE, 0, LEN, 4096, buf), 0);
    CHECK_EQ(client_do(&old, NBD_CMD_READ, 0, LEN, 4096, seen), 0);
    CHECK(memcmp(seen, buf, 4096) == 0);
    client_close(&old);
    client_close(&new);
    rig_stop(&rig);
}
