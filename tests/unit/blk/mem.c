/* blk.c and mem.c: the common path on memory of every alignment, and in the simulator. */
#include "base/bits.h"
#include "base/own.h"
#include "devices.h"
#include "rt/sim.h"

SUSPENDS static struct blk *new_mem(uint64_t len, uint32_t align)
{
    struct blk *blk = NULL;

    CHECK_EQ(blk_mem_new(len, align, &blk), 0);
    return blk;
}

CO_TEST(mem_matches_an_array)
{
    static const uint32_t aligns[] = {1, 512, 4096};

    for (size_t i = 0; i < ARRAY_SIZE(aligns); i++) {
        struct blk *blk = new_mem(1000000, aligns[i]);

        check_against_array(blk, 1500);
        CHECK(aligns[i] == 1 ? blk->stats.bounced == 0 : blk->stats.bounced > 100);
        blk_close(blk);
    }
}

SUSPENDS static int sim_neighbours(void *arg)
{
    struct blk *blk = new_mem(*(uint64_t *)arg, 4096);

    check_neighbours(blk);
    blk_close(blk);
    return 0;
}

TEST(no_neighbour_is_lost_in_any_order)
{
    for (uint64_t seed = 1; seed <= 20; seed++) {
        /* a device that has its length, and one that grows block by block */
        uint64_t len = seed % 2 ? 2 * MIB : 0;

        CHECK_EQ(sim_run(&(struct sim_opts){.seed = test_seed() + seed}, sim_neighbours, &len), 0);
    }
}

/* ---- growth: unaligned ends and aligned appends at once ---- */

struct append {
    struct blk *blk;
    uint64_t off, len;
    uint8_t fill;
};

SUSPENDS static int do_append(void *arg)
{
    struct append *a = arg;
    char *buf = buf_get(a->len);

    memset(buf, a->fill, a->len);
    int rc = blk_write(a->blk, a->off, buf, a->len);
    buf_put(buf, a->len);
    return rc;
}

SUSPENDS static int sim_appends(void *arg)
{
    struct blk *blk = new_mem(0, 512);
    struct append a[32];
    struct co_group group;
    uint64_t off = 0;

    co_group_init(&group);
    for (unsigned i = 0; i < ARRAY_SIZE(a); i++) {
        a[i] = (struct append){
            blk, off, sim_random() % 2 ? 512 * (1 + sim_random() % 4) : 1 + sim_random() % 3000,
            (uint8_t)(i + 1)};
        off += a[i].len;
        CHECK_EQ(co_group_spawn(&group, do_append, &a[i]), 0);
    }
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(blk->len, off);
    for (unsigned i = 0; i < ARRAY_SIZE(a); i++) {
        static uint8_t got[3000];

        CHECK_EQ(blk_read(blk, a[i].off, got, a[i].len), 0);
        for (uint64_t j = 0; j < a[i].len; j++)
            CHECK_EQ(got[j], a[i].fill);
    }
    blk_close(blk);
    return 0;
}

TEST(appends_of_any_length_at_once_lose_nothing)
{
    for (uint64_t seed = 0; seed < 50; seed++)
        CHECK_EQ(sim_run(&(struct sim_opts){.seed = test_seed() + seed}, sim_appends, NULL), 0);
}

/* ---- edges ---- */

CO_TEST(reads_behind_the_end_give_zeroes)
{
    struct blk *blk = new_mem(1000, 512);
    static uint8_t buf[3000];

    memset(buf, 7, sizeof(buf));
    CHECK_EQ(blk_write(blk, 0, buf, 1000), 0);
    CHECK_EQ(blk_read(blk, 500, buf, 2500), 0);
    for (unsigned i = 0; i < 2500; i++)
        CHECK_EQ(buf[i], i < 500 ? 7 : 0);
    memset(buf, 7, sizeof(buf));
    CHECK_EQ(blk_read(blk, 1ull << 40, buf, 3000), 0);
    CHECK(buf_is_zero(buf, 3000));
    CHECK_EQ(blk_read(blk, UINT64_MAX - 5, buf, 100), -EINVAL);
    CHECK_EQ(blk->len, 1000);
    blk_close(blk);
}

CO_TEST(bad_ranges_and_access_are_refused)
{
    struct blk *blk = new_mem(4096, 512);
    uint8_t buf[1024] = {1};

    CHECK_EQ(blk_write(blk, UINT64_MAX - 100, buf, 512), -EFBIG);
    CHECK_EQ(blk_zero(blk, INT64_MAX - 100, 512, 0), -EFBIG);
    CHECK_EQ(blk_resize(blk, UINT64_MAX), -EFBIG);
    blk->fixed_len = true;
    CHECK_EQ(blk_write(blk, 4000, buf, 97), -ENOSPC);
    CHECK_EQ(blk_zero(blk, 4096, 1, 0), -ENOSPC);
    CHECK_EQ(blk_preallocate(blk, 0, 4097), -ENOSPC);
    CHECK_EQ(blk_preallocate(blk, 0, 4096), 0);
    CHECK_EQ(blk_resize(blk, 8192), -ENOTSUP);
    CHECK_EQ(blk_write(blk, 4000, buf, 96), 0);
    CHECK_EQ(blk_write(blk, 4096, buf, 0), 0);
    CHECK_EQ(blk_discard(blk, 4000, 1 << 20), 0);
    blk->fixed_len = blk->writable = false;
    CHECK_EQ(blk_write(blk, 0, buf, 512), -EROFS);
    CHECK_EQ(blk_zero(blk, 0, 512, 0), -EROFS);
    CHECK_EQ(blk_discard(blk, 0, 512), -EROFS);
    CHECK_EQ(blk_resize(blk, 0), -EROFS);
    CHECK_EQ(blk_read(blk, 0, buf, 512), 0);
    blk_close(blk);
}

CO_TEST(aligned_requests_go_straight_to_the_device)
{
    struct blk *blk = new_mem(1 << 20, 4096);
    char *buf = buf_get(65536);

    memset(buf, 1, 65536);
    CHECK_EQ(blk_write(blk, 8192, buf, 65536), 0);
    CHECK_EQ(blk_read(blk, 4096, buf, 65536), 0);
    CHECK_EQ(blk->stats.writes, 1);
    CHECK_EQ(blk->stats.write_bytes, 65536);
    CHECK_EQ(blk->stats.reads, 1);
    CHECK_EQ(blk->stats.bounced, 0);
    /* a write inside one block: one read, one write */
    CHECK_EQ(blk_write(blk, 100, buf, 10), 0);
    CHECK_EQ(blk->stats.reads, 2);
    CHECK_EQ(blk->stats.writes, 2);
    CHECK_EQ(blk->stats.bounced, 1);
    /* head and tail: both read, written as one */
    CHECK_EQ(blk_write(blk, 100, buf, 20000), 0);
    CHECK_EQ(blk->stats.reads, 4);
    CHECK_EQ(blk->stats.writes, 3);
    CHECK_EQ(blk->stats.write_bytes, 65536 + 4096 + 20480);
    buf_put(buf, 65536);
    blk_close(blk);
}

CO_TEST(status_tells_pages)
{
    struct blk *blk = new_mem(1 << 20, 1);
    uint64_t len;
    bool data;

    CHECK_EQ(blk_write(blk, 200000, "x", 1), 0);
    CHECK_EQ(blk_status(blk, 0, 1 << 20, &data, &len), 0);
    CHECK(!data && len == 196608);
    CHECK_EQ(blk_status(blk, 196608 + 10, 1 << 20, &data, &len), 0);
    CHECK(data && len == 65526);
    CHECK_EQ(blk_status(blk, 2 << 20, 100, &data, &len), 0);
    CHECK(!data && len == 100);
    CHECK_EQ(blk_status(blk, 0, 0, &data, &len), -EINVAL);
    blk_close(blk);
}
