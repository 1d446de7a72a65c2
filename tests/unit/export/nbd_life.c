/*
 * Connections' life: peers that vanish or do not read, bounds on memory and connections, stop,
 * suspend, listening sockets.
 */
#include <errno.h>
#include <netdb.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include "nbd_client.h"
#include "base/bits.h"
#include "rt/reactor.h"
#include "test.h"

#define LEN (64 * MIB)

/* ---- peers that vanish ---- */

CO_TEST(a_peer_that_vanishes_in_mid_write_changes_nothing)
{
    static const uint32_t lens[] = {512, 4096, 100000, 1 << 20, 8 << 20};
    static uint8_t part[8000];
    struct rig rig;
    struct client c;

    memset(part, 'v', sizeof(part));
    rig_start(&rig, LEN, NULL);
    for (unsigned i = 0; i < ARRAY_SIZE(lens); i++) {
        client_enter(&c, rig.server, "disk", i & 1);
        CHECK_EQ(client_request(&c, NBD_CMD_WRITE, 0, 0, lens[i]), 0);
        CHECK_EQ(client_send(&c, part, MIN(lens[i] - 1, (uint32_t)sizeof(part))), 0);
        reactor_yield();
        client_close(&c);
        rig_await_conns(&rig, 0);
    }
    CHECK_EQ(blk_fault_count(rig.blk, BLK_REQ_WRITE), 0);
    CHECK_EQ(rig.server->memory.used, 0);
    rig_stop(&rig);
}

CO_TEST(a_peer_that_vanishes_with_requests_in_flight)
{
    struct rig rig;
    struct client c;
    uint8_t byte = 'w';

    rig_start(&rig, LEN, NULL);
    client_enter(&c, rig.server, "disk", true);
    blk_fault_break(rig.blk, BLK_REQ_WRITE, 0, 4096);
    CHECK_EQ(client_request(&c, NBD_CMD_WRITE, 0, 0, 1), 0);
    CHECK_EQ(client_send(&c, &byte, 1), 0);
    for (unsigned i = 0; i < 50; i++)
        CHECK_EQ(client_request(&c, NBD_CMD_READ, 0, i * 65536, 65536), 0);
    blk_fault_wait_stopped(rig.blk);
    client_close(&c);
    timer_sleep(5 * NSEC_PER_MSEC);
    CHECK_EQ(rig.server->nr_conns, 1); /* it may not go before its request */
    blk_fault_resume(rig.blk);
    rig_await_conns(&rig, 0);
    byte = 0;
    CHECK_EQ(blk_read(rig.blk, 0, &byte, 1), 0);
    CHECK_EQ(byte, 'w');
    CHECK_EQ(rig.server->memory.used, 0);
    rig_stop(&rig);
}

/* ---- memory ---- */

struct flood {
    struct client *c;
    unsigned type;
    uint32_t len;
};

/* Asks for much and never reads an answer, until the connection breaks. */
SUSPENDS_UNCHECKED static int flood_reads(void *arg)
{
    struct flood *f = arg;
    unsigned i = 0;

    while (client_request(f->c, NBD_CMD_READ, 0, (i++ % 32) * (uint64_t)f->len, f->len) == 0)
        ;
    return 0;
}

SUSPENDS static void others_go_on(struct rig *rig, struct client *other)
{
    static uint8_t buf[MIB];

    for (unsigned i = 0; i < 50; i++) {
        CHECK_EQ(client_do(other, NBD_CMD_READ, 0, i * 4096, 4096, buf), 0);
        CHECK_EQ(client_do(other, NBD_CMD_WRITE, 0, 33 * MIB, 4096, buf), 0);
    }
    CHECK_EQ(client_do(other, NBD_CMD_WRITE, 0, 33 * MIB, sizeof(buf), buf), 0);
    CHECK_EQ(client_do(other, NBD_CMD_READ, 0, 33 * MIB, sizeof(buf), buf), 0);
    CHECK(rig->server->memory.used_max <= rig->server->memory.whole);
}

CO_TEST(slow_readers_stall_nobody_and_memory_is_bounded)
{
    struct nbd_server_opts opts = {.max_connections = 8, .buffer_bytes = 4 * MIB};
    struct client slow[7], other;
    struct flood floods[7];
    struct co_group group;
    struct rig rig;

    rig_start(&rig, LEN, &opts);
    CHECK_EQ(rig.server->memory.whole, 4 * MIB);
    co_group_init(&group);
    for (unsigned i = 0; i < ARRAY_SIZE(slow); i++) {
        client_enter(&slow[i], rig.server, "disk", i & 1);
        floods[i] = (struct flood){.c = &slow[i], .len = 4096u << (2 * i % 10)};
        CHECK_EQ(co_group_spawn(&group, flood_reads, &floods[i]), 0);
    }
    timer_sleep(20 * NSEC_PER_MSEC);
    CHECK(rig.server->memory.used > 0);
    client_enter(&other, rig.server, "disk", true);
    others_go_on(&rig, &other);
    client_close(&other);
    for (unsigned i = 0; i < ARRAY_SIZE(slow); i++)
        shutdown(slow[i].fd, SHUT_RDWR);
    co_group_wait(&group);
    for (unsigned i = 0; i < ARRAY_SIZE(slow); i++)
        client_close(&slow[i]);
    rig_await_conns(&rig, 0);
    CHECK_EQ(rig.server->memory.used, 0);
    rig_stop(&rig);
}

CO_TEST(slow_writers_stall_nobody)
{
    struct nbd_server_opts opts = {.max_connections = 8, .buffer_bytes = 4 * MIB};
    struct client slow[7], other;
    struct rig rig;

    rig_start(&rig, LEN, &opts);
    for (unsigned i = 0; i < ARRAY_SIZE(slow); i++) {
        client_enter(&slow[i], rig.server, "disk", true);
        CHECK_EQ(client_request(&slow[i], NBD_CMD_WRITE, 0, 0, i < 4 ? 1 << 20 : 32 << 20), 0);
        CHECK_EQ(client_send(&slow[i], "slow", 4), 0);
    }
    timer_sleep(5 * NSEC_PER_MSEC);
    client_enter(&other, rig.server, "disk", true);
    others_go_on(&rig, &other);
    client_close(&other);
    for (unsigned i = 0; i < ARRAY_SIZE(slow); i++)
        client_close(&slow[i]);
    rig_await_conns(&rig, 0);
    CHECK_EQ(rig.server->memory.used, 0);
    rig_stop(&rig);
}

/* ---- connections ---- */

static void connect_unix(struct client *c, const char *path)
{
    struct sockaddr_un addr = {.sun_family = AF_UNIX};

    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
    *c = (struct client){.fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0)};
    CHECK(c->fd >= 0);
    CHECK_EQ(connect(c->fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
}

static const char *socket_path(void)
{
    static char path[100];

    snprintf(path, sizeof(path), "%s/nbd.sock", test_dir());
    return path;
}

static unsigned served;

SUSPENDS_UNCHECKED static int one_go(void *arg)
{
    struct client *c = arg;

    CHECK_EQ(client_go(c, "disk"), 0);
    CHECK(client_alive(c));
    served++;
    client_request(c, NBD_CMD_DISC, 0, 0, 0);
    client_close(c);
    return 0;
}

SUSPENDS_UNCHECKED static int one_visit(void *arg)
{
    CHECK_EQ(client_hello(arg, NBD_FLAG_FIXED_NEWSTYLE), 0);
    return one_go(arg);
}

CO_TEST(three_hundred_clients_at_once)
{
    enum { NR = 300 };
    struct nbd_server_opts opts = {.unix_path = socket_path(), .max_connections = 16};
    static struct client clients[NR];
    struct co_group group;
    struct rig rig;

    rig_start(&rig, LEN, &opts);
    co_group_init(&group);
    for (unsigned i = 0; i < NR; i++) {
        connect_unix(&clients[i], opts.unix_path);
        CHECK_EQ(co_group_spawn(&group, one_visit, &clients[i]), 0);
    }
    for (unsigned i = 0; i < 200; i++) {
        CHECK(rig.server->nr_slots <= 16);
        CHECK(rig.server->nr_conns - rig.server->nr_slots <= NBD_NEGOTIATORS);
        reactor_yield();
    }
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(served, NR);
    rig_await_conns(&rig, 0);
    rig_stop(&rig);
    CHECK(access(opts.unix_path, F_OK) < 0);
}

CO_TEST(half_open_peers_do_not_keep_the_slots)
{
    struct nbd_server_opts opts = {.unix_path = socket_path(), .max_connections = 4};
    struct client idle[12], c;
    struct rig rig;

    rig_start(&rig, LEN, &opts);
    rig.server->handshake_ns = 50 * NSEC_PER_MSEC;
    for (unsigned i = 0; i < ARRAY_SIZE(idle); i++)
        connect_unix(&idle[i], opts.unix_path);
    connect_unix(&c, opts.unix_path);
    CHECK_EQ(client_hello(&c, NBD_FLAG_FIXED_NEWSTYLE), 0);
    CHECK_EQ(client_go(&c, "disk"), 0);
    CHECK(client_alive(&c));
    client_close(&c);
    for (unsigned i = 0; i < ARRAY_SIZE(idle); i++)
        client_close(&idle[i]);
    rig_stop(&rig);
}

/* More than may negotiate at once, and none of them says a word. */
CO_TEST(silent_peers_keep_nobody_out)
{
    struct nbd_server_opts opts = {.unix_path = socket_path(), .max_connections = 4};
    static struct client idle[3 * NBD_NEGOTIATORS];
    struct client old, c;
    struct rig rig;

    rig_start(&rig, LEN, &opts);
    connect_unix(&old, opts.unix_path);
    CHECK_EQ(client_hello(&old, NBD_FLAG_FIXED_NEWSTYLE), 0);
    CHECK_EQ(client_go(&old, "disk"), 0);
    uint64_t begin = reactor_now();
    for (unsigned i = 0; i < ARRAY_SIZE(idle); i++)
        connect_unix(&idle[i], opts.unix_path);
    connect_unix(&c, opts.unix_path);
    CHECK_EQ(client_hello(&c, NBD_FLAG_FIXED_NEWSTYLE), 0);
    CHECK_EQ(client_go(&c, "disk"), 0);
    CHECK(reactor_now() - begin < rig.server->handshake_ns / 2);
    CHECK(client_alive(&c));
    CHECK(client_alive(&old)); /* one with an export is not dropped for others */
    client_close(&c);
    client_close(&old);
    for (unsigned i = 0; i < ARRAY_SIZE(idle); i++)
        client_close(&idle[i]);
    rig_stop(&rig);
}

/* Those who came too late wait with their handshake done, and are not late themselves. */
CO_TEST(who_waits_for_a_slot_is_not_dropped)
{
    struct nbd_server_opts opts = {.unix_path = socket_path(), .max_connections = 1};
    struct client first, second;
    struct co_group group;
    struct rig rig;

    rig_start(&rig, LEN, &opts);
    rig.server->handshake_ns = 30 * NSEC_PER_MSEC;
    connect_unix(&second, opts.unix_path);
    CHECK_EQ(client_hello(&second, NBD_FLAG_FIXED_NEWSTYLE), 0);
    connect_unix(&first, opts.unix_path);
    CHECK_EQ(client_hello(&first, NBD_FLAG_FIXED_NEWSTYLE), 0);
    CHECK_EQ(client_go(&first, "disk"), 0);
    served = 0;
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, one_go, &second), 0);
    timer_sleep(100 * NSEC_PER_MSEC);
    CHECK_EQ(served, 0);
    CHECK_EQ(rig.server->nr_slots, 1);
    client_close(&first);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(served, 1);
    rig_await_conns(&rig, 0);
    rig_stop(&rig);
}

CO_TEST(a_stale_socket_is_replaced_a_live_one_refused)
{
    struct nbd_server_opts opts = {.unix_path = socket_path()};
    struct sockaddr_un addr = {.sun_family = AF_UNIX};
    struct nbd_server *second;
    struct err err = {0};
    struct stat st;
    struct rig rig;

    snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", opts.unix_path);
    int dead = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    CHECK_EQ(bind(dead, (struct sockaddr *)&addr, sizeof(addr)), 0);
    close(dead);
    rig_start(&rig, LEN, &opts);
    CHECK_STR(nbd_server_address(rig.server), opts.unix_path);
    CHECK_EQ(nbd_server_start(&opts, &second, &err), -EADDRINUSE);
    CHECK(strstr(err.text, opts.unix_path));
    CHECK_EQ(lstat(opts.unix_path, &st), 0); /* the loser has not removed it */
    rig_stop(&rig);

    test_sh("echo precious > %s", opts.unix_path);
    CHECK_EQ(nbd_server_start(&opts, &second, &err), -EEXIST);
    test_sh("grep -q precious %s && rm %s", opts.unix_path, opts.unix_path);
    char path[200];
    memset(path, 'x', sizeof(path));
    path[sizeof(path) - 1] = 0;
    opts.unix_path = path;
    CHECK_EQ(nbd_server_start(&opts, &second, &err), -ENAMETOOLONG);
}

CO_TEST(tcp_on_every_address_of_a_host)
{
    static const char *const hosts[] = {NULL, "127.0.0.1", "::1", "localhost"};

    for (unsigned i = 0; i < ARRAY_SIZE(hosts); i++) {
        struct nbd_server_opts opts = {.host = hosts[i], .port = "0"};
        struct addrinfo hints = {.ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICHOST}, *ai;
        char host[64] = {0}, port[16] = {0};
        struct rig rig;

        if (i == 2 && access("/proc/net/if_inet6", F_OK) < 0)
            continue; /* no IPv6 here */
        rig_start(&rig, LEN, &opts);
        const char *addr = nbd_server_address(rig.server);
        CHECK(sscanf(addr, "[%63[^]]]:%15s", host, port) == 2 ||
              sscanf(addr, "%63[^:]:%15s", host, port) == 2);
        CHECK(atoi(port) > 0);
        CHECK(i != 2 || strcmp(host, "::1") == 0);
        CHECK_EQ(getaddrinfo(host, port, &hints, &ai), 0);
        struct client c = {.fd = socket(ai->ai_family, SOCK_STREAM | SOCK_CLOEXEC, 0)};
        CHECK_EQ(io_connect(c.fd, ai->ai_addr, ai->ai_addrlen), 0);
        freeaddrinfo(ai);
        CHECK_EQ(one_visit(&c), 0);
        rig_stop(&rig);
    }
}

CO_TEST(a_host_that_does_not_exist_is_an_error)
{
    struct nbd_server_opts opts = {.host = "256.256.256.256.invalid", .port = "0"};
    struct nbd_server *server;
    struct err err = {0};

    CHECK_EQ(nbd_server_start(&opts, &server, &err), -EADDRNOTAVAIL);
    CHECK(strstr(err.text, "256.256.256.256.invalid"));
}

/* ---- several connections ---- */

/* What CAN_MULTI_CONN promises. */
CO_TEST(a_flush_covers_what_was_answered_on_all_connections)
{
    struct blk_crash_report report;
    struct client clients[4];
    struct blk *crash, *after;
    uint8_t buf[4096];
    struct rig rig;

    CHECK_EQ(blk_crash_new(LEN, &crash), 0);
    rig_start_on(&rig, crash, NULL);
    for (unsigned i = 0; i < ARRAY_SIZE(clients); i++) {
        client_enter(&clients[i], rig.server, "disk", true);
        CHECK(clients[i].flags & NBD_FLAG_CAN_MULTI_CONN);
        memset(buf, 'a' + (int)i, sizeof(buf));
        CHECK_EQ(client_do(&clients[i], NBD_CMD_WRITE, 0, i * MIB, sizeof(buf), buf), 0);
    }
    CHECK_EQ(client_do(&clients[2], NBD_CMD_FLUSH, 0, 0, 0, NULL), 0);
    CHECK_EQ(blk_crash_cut(crash, test_seed(), &after, &report), 0);
    CHECK_EQ(report.unflushed_sectors, 0);
    for (unsigned i = 0; i < ARRAY_SIZE(clients); i++) {
        CHECK_EQ(blk_read(after, i * MIB, buf, sizeof(buf)), 0);
        CHECK(buf[0] == 'a' + i && buf[sizeof(buf) - 1] == 'a' + i);
        client_close(&clients[i]);
    }
    blk_close(after);
    rig_stop(&rig);
}

/* Wherever their sessions run. */
CO_TEST(idle_clients_are_dropped_at_once)
{
    struct client clients[4];
    struct rig rig;
    char byte;

    rig_start(&rig, LEN, NULL);
    for (unsigned i = 0; i < ARRAY_SIZE(clients); i++)
        client_enter(&clients[i], rig.server, "disk", true);
    uint64_t begin = reactor_now();
    nbd_export_suspend(rig.exp);
    CHECK(reactor_now() - begin < NBD_DROP_NS / 2);
    nbd_export_resume(rig.exp);
    for (unsigned i = 0; i < ARRAY_SIZE(clients); i++) {
        CHECK_EQ(client_recv(&clients[i], &byte, 1), -ECONNRESET);
        client_close(&clients[i]);
    }
    rig_stop(&rig);
}

/* ---- stop ---- */

SUSPENDS_UNCHECKED static int stop_server(void *arg)
{
    nbd_server_stop(arg);
    return 0;
}

CO_TEST(stop_answers_what_was_taken)
{
    struct client busy, idle, young;
    struct answer a = {0};
    struct co_group group;
    struct rig rig;
    char byte;

    rig_start(&rig, LEN, NULL);
    client_enter(&busy, rig.server, "disk", true);
    client_enter(&idle, rig.server, "disk", true);
    client_open(&young, rig.server);
    CHECK_EQ(client_hello(&young, NBD_FLAG_FIXED_NEWSTYLE), 0);
    blk_fault_break(rig.blk, BLK_REQ_READ, 0, LEN);
    CHECK_EQ(client_request(&busy, NBD_CMD_READ, 0, 0, 4096), 0);
    blk_fault_wait_stopped(rig.blk);
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, stop_server, rig.server), 0);
    CHECK_EQ(client_recv(&idle, &byte, 1), -ECONNRESET);
    CHECK(client_recv(&young, &byte, 1) < 0);
    timer_sleep(5 * NSEC_PER_MSEC);
    CHECK_EQ(group.running, 1);
    blk_fault_resume(rig.blk);
    CHECK_EQ(client_answer(&busy, NBD_CMD_READ, 4096, &a), 0);
    CHECK_EQ(a.error, 0);
    CHECK_EQ(a.data_got, 4096);
    CHECK(client_recv(&busy, &byte, 1) < 0);
    co_group_wait(&group);
    client_close(&busy);
    client_close(&idle);
    client_close(&young);
    rig_free_reactors(&rig);
    CHECK_EQ(chain_close(rig.chain, NULL), 0);
}

CO_TEST(stop_does_not_wait_for_a_peer_that_does_not_read)
{
    struct flood f;
    struct co_group group;
    struct client slow;
    struct rig rig;

    rig_start(&rig, LEN, NULL);
    rig.server->stop_ns = 50 * NSEC_PER_MSEC;
    client_enter(&slow, rig.server, "disk", true);
    f = (struct flood){.c = &slow, .len = MIB};
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, flood_reads, &f), 0);
    timer_sleep(5 * NSEC_PER_MSEC);
    uint64_t start = reactor_now();
    nbd_server_stop(rig.server);
    CHECK(reactor_now() - start < 5 * NSEC_PER_SEC);
    co_group_wait(&group);
    client_close(&slow);
    rig_free_reactors(&rig);
    CHECK_EQ(chain_close(rig.chain, NULL), 0);
}

/* ---- exports come and go ---- */

CO_TEST(an_export_with_clients_is_removed_only_by_force)
{
    struct nbd_export_opts opts = {.name = "second", .writable = true};
    struct nbd_export *second;
    struct client on_first, on_second;
    struct rig rig;
    char byte;

    rig_start(&rig, LEN, NULL);
    opts.chain = rig.chain;
    CHECK_EQ(nbd_export_add(rig.server, &opts, &second, NULL), 0);
    client_enter(&on_first, rig.server, "disk", true);
    client_enter(&on_second, rig.server, "second", true);
    CHECK_EQ(nbd_export_remove(second, false, NULL), -EBUSY);
    CHECK(client_alive(&on_second));
    CHECK_EQ(nbd_export_remove(second, true, NULL), 0);
    CHECK(client_recv(&on_second, &byte, 1) < 0);
    CHECK(client_alive(&on_first));
    CHECK(!nbd_export_find(rig.server, "second"));
    CHECK(nbd_export_find(rig.server, "disk") == rig.exp);
    client_close(&on_first);
    client_close(&on_second);
    rig_stop(&rig);
}

SUSPENDS_UNCHECKED static int late_client(void *arg)
{
    struct client *c = arg;

    CHECK_EQ(client_hello(c, NBD_FLAG_FIXED_NEWSTYLE | NBD_FLAG_NO_ZEROES), 0);
    CHECK_EQ(client_go(c, "disk"), 0);
    return 0;
}

CO_TEST(a_suspended_export_lets_clients_wait_and_changes_its_chain)
{
    struct client old, late;
    struct co_group group;
    struct rig rig, other;
    char byte;

    rig_start(&rig, LEN, NULL);
    rig_start(&other, LEN / 2, NULL);
    rig.server->handshake_ns = 50 * NSEC_PER_MSEC;
    client_enter(&old, rig.server, "disk", true);
    CHECK_EQ(nbd_export_writers(rig.exp), 1);
    nbd_export_suspend(rig.exp);
    CHECK_EQ(nbd_export_writers(rig.exp), 0);
    CHECK(client_recv(&old, &byte, 1) < 0);
    client_open(&late, rig.server);
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, late_client, &late), 0);
    timer_sleep(150 * NSEC_PER_MSEC); /* longer than a handshake may take */
    CHECK_EQ(group.running, 1);
    nbd_export_set_chain(rig.exp, other.chain);
    nbd_export_resume(rig.exp);
    co_group_wait(&group);
    CHECK_EQ(late.len, LEN / 2);
    CHECK_EQ(client_do(&late, NBD_CMD_WRITE, 0, 0, 1, "n"), 0);
    CHECK_EQ(blk_fault_count(rig.blk, BLK_REQ_WRITE), 0);
    CHECK_EQ(blk_fault_count(other.blk, BLK_REQ_WRITE), 1);
    client_close(&old);
    client_close(&late);
    rig_stop(&rig);
    rig_stop(&other);
}

CO_TEST(stop_and_removal_end_the_wait_for_a_suspended_export)
{
    for (unsigned remove = 0; remove < 2; remove++) {
        struct client late;
        struct rig rig;
        char byte;

        rig_start(&rig, LEN, NULL);
        nbd_export_suspend(rig.exp);
        client_open(&late, rig.server);
        CHECK_EQ(client_hello(&late, NBD_FLAG_FIXED_NEWSTYLE), 0);
        CHECK_EQ(client_option_raw(&late, NBD_MAGIC_OPTION, NBD_OPT_GO, "\0\0\0\4disk\0\0", 10, 10),
                 0);
        timer_sleep(5 * NSEC_PER_MSEC);
        if (remove) {
            CHECK_EQ(nbd_export_remove(rig.exp, false, NULL), 0);
            CHECK_EQ(client_replies(&late, NULL), (uint32_t)NBD_REP_ERR_UNKNOWN);
        }
        rig_stop(&rig);
        CHECK(client_recv(&late, &byte, 1) < 0);
        client_close(&late);
    }
}
