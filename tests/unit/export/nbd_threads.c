/*
 * Sessions on several threads while the disk changes its shape: 1 to 8 connections write and read,
 * snapshots are taken, a job merges, the disk grows, all clients are dropped and come back. Every
 * answered write must be read back by whoever asks. For ThreadSanitizer above all.
 */
#include <errno.h>
#include "nbd_client.h"
#include "base/bits.h"
#include "job/job.h"
#include "rt/reactor.h"
#include "test.h"

#define LEN       (64 * MIB)
#define PART_LEN  (4 * MIB) /* each client's own */
#define BLOCK_LEN 4096u
#define BLOCKS    ((unsigned)(PART_LEN / BLOCK_LEN))
#define DEPTH     24u
#define CONNS_MAX 8u
#define ROUNDS    3u
#define UNKNOWN   (-1) /* an unanswered write was under way */

struct user {
    struct client c;
    struct rig *rig;
    unsigned index;
    uint64_t rng;
    bool *stop;
    bool in;
    unsigned long answered, dropped;
    uint8_t payload[BLOCK_LEN];
    int16_t content[BLOCKS]; /* the byte each block is full of */
    struct slot {
        unsigned type, block;
        uint8_t byte;
        bool busy;
    } slots[DEPTH];
};

static char *path_of(const char *name, unsigned nr)
{
    static char paths[8][160];
    static unsigned next;
    char *path = paths[next++ % ARRAY_SIZE(paths)];

    snprintf(path, sizeof(paths[0]), "%s/%s%u.qcow2", test_dir(), name, nr);
    return path;
}

static unsigned draw(struct user *u, unsigned below)
{
    u->rng = u->rng * 6364136223846793005ull + 1442695040888963407ull;
    return (unsigned)(u->rng >> 33) % below;
}

/* ---- one batch: DEPTH requests of different blocks, answers in any order ---- */

static bool block_is_busy(const struct user *u, unsigned block)
{
    for (unsigned i = 0; i < DEPTH; i++)
        if (u->slots[i].busy && u->slots[i].block == block)
            return true;
    return false;
}

SUSPENDS static int send_one(struct user *u, unsigned i)
{
    static const unsigned types[] = {NBD_CMD_WRITE, NBD_CMD_READ,         NBD_CMD_WRITE,
                                     NBD_CMD_READ,  NBD_CMD_WRITE_ZEROES, NBD_CMD_FLUSH};
    struct slot *s = &u->slots[i];

    do {
        s->block = draw(u, BLOCKS);
    } while (block_is_busy(u, s->block));
    s->type = types[draw(u, ARRAY_SIZE(types))];
    s->byte = s->type == NBD_CMD_WRITE ? (uint8_t)draw(u, 256) : 0;
    s->busy = true;
    bool flush = s->type == NBD_CMD_FLUSH;
    u->c.cookie = (uint64_t)i - 1; /* client_request() counts on */
    int rc = client_request(&u->c, s->type, 0,
                            flush ? 0 : u->index * PART_LEN + s->block * (uint64_t)BLOCK_LEN,
                            flush ? 0 : BLOCK_LEN);
    if (rc == 0 && s->type == NBD_CMD_WRITE) {
        memset(u->payload, s->byte, BLOCK_LEN);
        rc = client_send(&u->c, u->payload, BLOCK_LEN);
    }
    return rc;
}

SUSPENDS static int take_one(struct user *u)
{
    static uint8_t seen[CONNS_MAX][BLOCK_LEN];
    struct nbd_wire_simple head;
    int rc = client_recv(&u->c, &head, sizeof(head));

    if (rc < 0)
        return rc;
    CHECK_EQ(be32_get(head.magic), NBD_MAGIC_SIMPLE);
    CHECK_EQ(be32_get(head.error), 0);
    CHECK(be64_get(head.cookie) < DEPTH);
    struct slot *s = &u->slots[be64_get(head.cookie)];
    CHECK(s->busy);
    if (s->type == NBD_CMD_READ) {
        uint8_t *p = seen[u->index];

        rc = client_recv(&u->c, p, BLOCK_LEN);
        if (rc < 0)
            return rc;
        for (unsigned i = 1; i < BLOCK_LEN; i++)
            CHECK_EQ(p[i], p[0]);
        if (u->content[s->block] == UNKNOWN)
            u->content[s->block] = p[0];
        if (p[0] != u->content[s->block])
            test_fail(__FILE__, __LINE__, "client %u, block %u: %u, not %u", u->index, s->block,
                      p[0], (unsigned)u->content[s->block]);
    } else if (s->type != NBD_CMD_FLUSH) {
        u->content[s->block] = s->byte;
    }
    s->busy = false;
    u->answered++;
    return 0;
}

SUSPENDS static int one_batch(struct user *u)
{
    int rc = 0;

    for (unsigned i = 0; i < DEPTH && rc == 0; i++)
        rc = send_one(u, i);
    for (unsigned i = 0; i < DEPTH && rc == 0; i++)
        rc = take_one(u);
    return rc;
}

/* The connection broke: what was not answered is there or not. */
SUSPENDS static void was_dropped(struct user *u)
{
    for (unsigned i = 0; i < DEPTH; i++) {
        struct slot *s = &u->slots[i];

        if (s->busy && s->type != NBD_CMD_READ && s->type != NBD_CMD_FLUSH)
            u->content[s->block] = UNKNOWN;
        s->busy = false;
    }
    client_close(&u->c);
    u->dropped++;
}

SUSPENDS_UNCHECKED static int use(void *arg)
{
    struct user *u = arg;

    while (!*u->stop) {
        client_enter(&u->c, u->rig->server, "disk", false);
        u->in = true;
        int rc = 0;
        while (rc == 0 && !*u->stop)
            rc = one_batch(u);
        u->in = false;
        if (rc < 0)
            was_dropped(u);
        else
            client_close(&u->c);
    }
    return 0;
}

/* ---- what happens meanwhile ---- */

SUSPENDS static void serve(struct rig *rig, struct jobs **ret_jobs)
{
    struct chain_opts opts = {.writable = true};
    struct nbd_server_opts server = {0};
    struct err err = {0};

    test_sh("cd %s && rm -f *.qcow2 && qemu-img create -q -f qcow2 disk0.qcow2 %llu", test_dir(),
            LEN);
    if (chain_open(path_of("disk", 0), &opts, &rig->chain, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    CHECK_EQ(jobs_new(NULL, NULL, ret_jobs), 0);
    server.reactors = rig_reactors(rig);
    CHECK_EQ(nbd_server_start(&server, &rig->server, &err), 0);
    struct nbd_export_opts export = {.name = "disk", .chain = rig->chain, .writable = true};
    CHECK_EQ(nbd_export_add(rig->server, &export, &rig->exp, &err), 0);
}

SUSPENDS static void take_snapshot(struct rig *rig, unsigned nr)
{
    struct layer_opts opts = {.format = "qcow2", .writable = true};
    struct layer *layer;
    struct err err = {0};

    test_sh("cd %s && qemu-img create -q -u -f qcow2 -b disk%u.qcow2 -F qcow2 disk%u.qcow2 %llu",
            test_dir(), nr - 1, nr, (unsigned long long)chain_len(rig->chain));
    if (layer_open(path_of("disk", nr), &opts, &layer, &err) < 0 ||
        chain_push(rig->chain, layer, NULL, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
}

SUSPENDS static void merge(struct rig *rig, struct jobs *jobs)
{
    struct job_opts opts = {.id = "merge", .auto_finalize = true, .auto_dismiss = true};
    struct err err = {0};

    if (job_commit(jobs, rig->chain, chain_layer(rig->chain, 1), chain_layer(rig->chain, 2), &opts,
                   &err) < 0 ||
        job_wait(jobs, "merge", &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
}

/* Everybody has done something since. */
SUSPENDS static void await_progress(struct user *users, unsigned nr)
{
    for (unsigned i = 0; i < nr; i++) {
        unsigned long before = users[i].answered;

        while (users[i].answered < before + 2 * DEPTH)
            timer_sleep(NSEC_PER_MSEC);
    }
}

SUSPENDS static void drop_all(struct rig *rig, struct user *users, unsigned nr)
{
    struct export_stats stats;
    unsigned long before = 0, after = 0;

    for (unsigned i = 0; i < nr; i++)
        before += users[i].dropped;
    nbd_export_suspend(rig->exp);
    nbd_export_get_stats(rig->exp, &stats);
    CHECK_EQ(stats.connections, 0);
    for (unsigned i = 0; i < nr; i++)
        while (users[i].in)
            timer_sleep(NSEC_PER_MSEC);
    for (unsigned i = 0; i < nr; i++)
        after += users[i].dropped;
    CHECK_EQ(after, before + nr);
    nbd_export_resume(rig->exp);
}

SUSPENDS static void check_stats(struct rig *rig, const struct user *users, unsigned nr)
{
    unsigned long answered = 0;
    struct export_stats stats;

    for (unsigned i = 0; i < nr; i++)
        answered += users[i].answered;
    nbd_export_get_stats(rig->exp, &stats);
    CHECK_EQ(stats.errors, 0);
    CHECK(stats.reads + stats.writes + stats.zeroes + stats.flushes >= answered);
    CHECK_EQ(stats.read_bytes, stats.reads * BLOCK_LEN);
    CHECK_EQ(stats.write_bytes, stats.writes * BLOCK_LEN);
}

SUSPENDS static void try_conns(unsigned nr, unsigned route_from)
{
    static struct user users[CONNS_MAX];
    struct co_group group;
    struct jobs *jobs;
    struct rig rig;
    bool stop = false;

    serve(&rig, &jobs);
    rig.server->route_from = route_from;
    memset(users, 0, sizeof(users));
    co_group_init(&group);
    for (unsigned i = 0; i < nr; i++) {
        users[i] = (struct user){
            .rig = &rig, .index = i, .rng = test_seed() * 31 + nr * 8 + i, .stop = &stop};
        CHECK_EQ(co_group_spawn(&group, use, &users[i]), 0);
    }
    for (unsigned round = 0; round < ROUNDS; round++) {
        await_progress(users, nr);
        take_snapshot(&rig, 2 * round + 1);
        await_progress(users, nr);
        take_snapshot(&rig, 2 * round + 2);
        merge(&rig, jobs);
        CHECK_EQ(chain_resize(rig.chain, chain_len(rig.chain) + MIB, NULL), 0);
        drop_all(&rig, users, nr);
    }
    await_progress(users, nr);
    stop = true;
    co_group_wait(&group);
    rig_await_conns(&rig, 0);
    check_stats(&rig, users, nr);
    CHECK_EQ(rig.server->memory.used, 0);
    jobs_free(jobs);
    rig_stop(&rig);
    test_sh("cd %s && qemu-img check -q $(ls -v *.qcow2 | tail -1)", test_dir());
}

CO_TEST(sessions_on_threads_while_the_disk_changes_shape)
{
    static const unsigned conns[] = {1, 2, 3, 5, 8};

    test_need("qemu-img");
    for (unsigned i = 0; i < ARRAY_SIZE(conns); i++)
        try_conns(conns[i], i % 2 ? 0 : NBD_ROUTE_FROM);
}

/* A server that is stopped while all are busy. */
CO_TEST(stop_under_load)
{
    static struct user users[CONNS_MAX];
    struct co_group group;
    struct jobs *jobs;
    struct rig rig;
    bool stop = false;

    test_need("qemu-img");
    serve(&rig, &jobs);
    co_group_init(&group);
    for (unsigned i = 0; i < CONNS_MAX; i++) {
        users[i] = (struct user){.rig = &rig, .index = i, .rng = i, .stop = &stop};
        CHECK_EQ(co_group_spawn(&group, use, &users[i]), 0);
    }
    await_progress(users, CONNS_MAX);
    stop = true; /* nobody comes again */
    jobs_free(jobs);
    rig_stop(&rig);
    co_group_wait(&group);
}
