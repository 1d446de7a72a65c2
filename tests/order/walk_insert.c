/*
 * A reader stands between its walk and the insert of the result into the flattened map while a
 * writer passes. The stale result must not enter the map; with the rule left out it does, which
 * shows that the test can see it.
 */
#include "base/bits.h"
#include "chain/internal.h"
#include "rig.h"
#include "rt/reactor.h"

enum passer { PASS_WRITE, PASS_ZERO, PASS_DISCARD, PASS_ZERO_THEN_WRITE, PASSERS };

struct meeting {
    struct blk *dev[2];
    struct chain *chain;
    enum passer passer;
    bool unchecked;
    bool stop_next; /* the next walk stops */
    bool stopped, go_on;
    struct co_cond moved;
    uint64_t stale;
};

#define OFF (256 * KIB)
#define LEN (64 * KIB)

SUSPENDS static void stop_in_walk(void *arg)
{
    struct meeting *m = arg;

    if (!m->stop_next)
        return;
    m->stop_next = false;
    m->stopped = true;
    co_cond_broadcast(&m->moved);
    while (!m->go_on)
        co_cond_wait(&m->moved, NULL);
}

SUSPENDS static int reader(void *arg)
{
    struct meeting *m = arg;
    char buf[1024];

    return rig_read(m->chain, OFF, buf, sizeof(buf));
}

SUSPENDS static uint64_t pass(struct meeting *m)
{
    switch (m->passer) {
    case PASS_WRITE:
        CHECK_EQ(rig_write(m->chain, OFF, LEN, 2), 0);
        return 2;
    case PASS_ZERO:
        CHECK_EQ(chain_zero(m->chain, OFF, LEN, 0), 0);
        return 0;
    case PASS_DISCARD:
        CHECK_EQ(chain_discard(m->chain, OFF, LEN), 0);
        return 0;
    case PASS_ZERO_THEN_WRITE:
        CHECK_EQ(chain_zero(m->chain, OFF, LEN, BLK_MAY_UNMAP), 0);
        CHECK_EQ(rig_write(m->chain, OFF, LEN, 3), 0);
        return 3;
    case PASSERS:
        break;
    }
    return 0;
}

SUSPENDS static void open_pair(struct meeting *m)
{
    static const bool qcow2[2] = {true, false};

    for (unsigned i = 0; i < 2; i++)
        CHECK_EQ(blk_mem_new(0, 1, &m->dev[i]), 0);
    rig_create(m->dev[1], &(struct rig_shape){.raw = true, .len = MIB}, NULL, NULL);
    rig_create(m->dev[0], &(struct rig_shape){.len = MIB, .cluster_size = 65536}, "raw", "raw");
    struct chain *base = rig_chain(m->dev + 1, qcow2 + 1, 1);
    CHECK_EQ(rig_write(base, 0, MIB, 1), 0);
    CHECK_EQ(chain_close(base, NULL), 0);
    m->chain = rig_chain(m->dev, qcow2, 2);
}

SUSPENDS static int meet(void *arg)
{
    struct meeting *m = arg;
    struct co_group group;
    struct chain_stats stats;
    char buf[RIG_SECTOR];

    co_cond_init(&m->moved);
    open_pair(m);
    chain_set_walk_hook(m->chain, stop_in_walk, m);
    m->chain->fmap.insert_unchecked = m->unchecked;
    m->stop_next = true;
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, reader, m), 0);
    while (!m->stopped)
        co_cond_wait(&m->moved, NULL);
    uint64_t want = pass(m);
    m->go_on = true;
    co_cond_broadcast(&m->moved);
    CHECK_EQ(co_group_wait(&group), 0);
    for (uint64_t off = OFF; off < OFF + LEN; off += RIG_SECTOR) {
        CHECK_EQ(rig_read(m->chain, off, buf, sizeof(buf)), 0);
        m->stale += rig_stamp(buf, off) != want;
    }
    chain_get_stats(m->chain, &stats);
    CHECK_EQ(stats.map_stale_inserts, 1);
    CHECK_EQ(chain_close(m->chain, NULL), 0);
    for (unsigned i = 0; i < 2; i++)
        blk_close(m->dev[i]);
    return 0;
}

static uint64_t stale_reads(enum passer passer, bool unchecked)
{
    struct meeting m = {.passer = passer, .unchecked = unchecked};
    struct sim_opts opts = {.seed = test_seed(), .in_order = true};

    CHECK_EQ(sim_run(&opts, meet, &m), 0);
    return m.stale;
}

TEST(no_stale_entry_behind_a_passing_change)
{
    for (unsigned p = 0; p < PASSERS; p++)
        CHECK_EQ(stale_reads((enum passer)p, false), 0);
}

TEST(without_the_rule_it_would_be_read)
{
    for (unsigned p = 0; p < PASSERS; p++)
        CHECK_EQ(stale_reads((enum passer)p, true), LEN / RIG_SECTOR);
}

/* ---- in-place writes leave the map alone ---- */

SUSPENDS static int write_in_place(void *arg)
{
    struct meeting *m = arg;
    struct chain_stats before, after;

    open_pair(m);
    CHECK_EQ(rig_write(m->chain, OFF, LEN, 2), 0);
    rig_expect(m->chain, OFF, LEN, 2);
    chain_get_stats(m->chain, &before);
    for (unsigned i = 0; i < 16; i++) {
        CHECK_EQ(rig_write(m->chain, OFF + i * 4096, 4096, 3 + i), 0);
        rig_expect(m->chain, OFF + i * 4096, 4096, 3 + i);
    }
    chain_get_stats(m->chain, &after);
    CHECK_EQ(after.map_misses, before.map_misses);
    CHECK_EQ(chain_close(m->chain, NULL), 0);
    for (unsigned i = 0; i < 2; i++)
        blk_close(m->dev[i]);
    return 0;
}

TEST(writes_in_place_drop_nothing)
{
    struct meeting m = {0};
    struct sim_opts opts = {.seed = test_seed()};

    CHECK_EQ(sim_run(&opts, write_in_place, &m), 0);
}
