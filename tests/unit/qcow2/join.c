/* Writes that arrive together in one cluster go to the device together. */
#include <string.h>
#include "base/bits.h"
#include "engine.h"
#include "rt/reactor.h"

#define CLUSTER 65536ull
#define JOBS    32u

static struct engine e;

/* What lies below is 0xbb; its reads may be held up. */
static struct {
    struct image_below below;
    bool hold, held;
    unsigned reads;
    uint64_t read_bytes;
} low;

SUSPENDS static int low_read(void *ctx, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    static uint8_t bytes[2 * CLUSTER];

    CHECK(len <= sizeof(bytes));
    memset(bytes, 0xbb, len);
    low.reads++;
    low.read_bytes += len;
    for (low.held = low.hold; low.hold;)
        reactor_yield();
    iov_iter_write(iov, bytes, len);
    return 0;
}

SUSPENDS static void start(bool extended, uint64_t fixed_len)
{
    e = (struct engine){0};
    memset(&low, 0, sizeof(low));
    low.below.read = low_read;
    engine_start(&e, &(struct image_create_opts){.virtual_len = 64 * MIB, .extended_l2 = extended},
                 fixed_len);
    CHECK_EQ(engine_write(&e, 32 * MIB, 512, 1, 0, NULL), 0); /* makes table and run */
}

/* ---- several writes at once ---- */

struct write {
    uint64_t off, len;
    uint8_t value;
    const struct image_below *below;
    int rc;
};

struct batch {
    struct write writes[JOBS];
    unsigned nr;
    struct co_group group;
};

SUSPENDS static int write_one(void *arg)
{
    struct write *w = arg;

    w->rc = engine_write(&e, w->off, w->len, w->value, 0, w->below);
    return 0;
}

SUSPENDS static void add(struct batch *b, uint64_t off, uint64_t len,
                         const struct image_below *below)
{
    struct write *w = &b->writes[b->nr];

    if (b->nr == 0)
        co_group_init(&b->group);
    b->nr++;
    *w = (struct write){off, len, (uint8_t)b->nr, below, 0};
    CHECK_EQ(co_group_spawn(&b->group, write_one, w), 0);
}

SUSPENDS static void finish(struct batch *b)
{
    CHECK_EQ(co_group_wait(&b->group), 0);
    for (unsigned i = 0; i < b->nr; i++)
        CHECK_EQ(b->writes[i].rc, 0);
}

SUSPENDS static void expect_all(const struct batch *b)
{
    for (unsigned i = 0; i < b->nr; i++)
        engine_expect(&e, b->writes[i].off, b->writes[i].len, b->writes[i].value,
                      b->writes[i].below);
}

static uint64_t writes(void)
{
    return blk_fault_count(e.fault, BLK_REQ_WRITE);
}

/* ---- */

CO_TEST(writes_that_fill_a_cluster_are_one_and_copy_nothing)
{
    static const unsigned orders[][4] = {{0, 1, 2, 3}, {3, 2, 1, 0}, {2, 0, 3, 1}};

    for (unsigned o = 0; o < ARRAY_SIZE(orders); o++) {
        struct batch b = {0};

        start(false, 0);
        uint64_t before = writes();
        for (unsigned i = 0; i < 16; i++)
            add(&b, CLUSTER + (orders[o][i / 4] * 4 + i % 4) * 4096, 4096, &low.below);
        finish(&b);
        CHECK_EQ(writes() - before, 1);
        CHECK_EQ(low.reads, 0);
        CHECK_EQ(engine_stats(&e).write_joins, 15);
        CHECK_EQ(engine_stats(&e).cow_write_bytes, 0);
        expect_all(&b);
        engine_end(&e);
    }
}

CO_TEST(what_they_leave_open_is_read_once)
{
    struct batch b = {0};

    start(false, 0);
    uint64_t before = writes();
    for (unsigned i = 0; i < 16; i++)
        if (i != 5 && i != 11)
            add(&b, CLUSTER + i * 4096, 4096, &low.below);
    finish(&b);
    CHECK_EQ(writes() - before, 1);
    CHECK_EQ(low.reads, 1);
    CHECK_EQ(low.read_bytes, 7 * 4096);
    CHECK_EQ(engine_stats(&e).cow_write_bytes, 2 * 4096);
    expect_all(&b);
    engine_expect(&e, CLUSTER + 5 * 4096, 4096, 0xbb, &low.below);
    engine_expect(&e, CLUSTER + 11 * 4096, 4096, 0xbb, &low.below);
    engine_end(&e);
}

CO_TEST(one_that_comes_during_the_copy_goes_along)
{
    struct batch b = {0};

    start(false, 0);
    uint64_t before = writes();
    low.hold = true;
    add(&b, CLUSTER + 8192, 4096, &low.below);
    while (!low.held)
        reactor_yield();
    add(&b, CLUSTER, 512, &low.below);
    add(&b, CLUSTER + 20480, 8192, &low.below);
    for (unsigned i = 0; i < 10; i++)
        reactor_yield();
    low.hold = false;
    finish(&b);
    CHECK_EQ(writes() - before, 1);
    CHECK_EQ(low.reads, 1);
    expect_all(&b);
    engine_expect(&e, CLUSTER + 512, 8192 - 512, 0xbb, &low.below);
    engine_expect(&e, CLUSTER + 28672, CLUSTER - 28672, 0xbb, &low.below);
    engine_end(&e);
}

/* Fresh space of a file: only what lies between them is written beside. A volume's: all of it. */
CO_TEST(zeroes_between_them_are_as_without)
{
    for (unsigned volume = 0; volume < 2; volume++) {
        struct batch b = {0};

        start(false, volume ? 16 * MIB : 0);
        uint64_t before = writes(), bytes = e.mem->stats.write_bytes;
        add(&b, CLUSTER + 8192, 4096, NULL);
        add(&b, CLUSTER + 16384, 4096, NULL);
        add(&b, CLUSTER + 512, 512, NULL);
        finish(&b);
        CHECK_EQ(writes() - before, 1);
        CHECK_EQ(e.mem->stats.write_bytes - bytes, volume ? CLUSTER : 20480 - 512);
        expect_all(&b);
        engine_expect(&e, CLUSTER, 512, 0, NULL);
        engine_expect(&e, CLUSTER + 1024, 8192 - 1024, 0, NULL);
        engine_expect(&e, CLUSTER + 12288, 4096, 0, NULL);
        engine_expect(&e, CLUSTER + 20480, CLUSTER - 20480, 0, NULL);
        engine_end(&e);
    }
}

CO_TEST(neighbouring_subclusters_are_one_others_are_not_touched)
{
    struct batch b = {0}, first = {0};

    start(true, 0);
    CHECK_EQ(engine_write(&e, CLUSTER + 10240, 2048, 99, 0, &low.below), 0); /* has its place */
    uint64_t before = writes();
    for (unsigned i = 0; i < 4; i++)
        add(&first, CLUSTER + i * 2048, 2048, &low.below);
    finish(&first);
    CHECK_EQ(writes() - before, 1);
    add(&b, CLUSTER + 8192 + 512, 512, &low.below); /* up to the one that has its place */
    add(&b, CLUSTER + 14336, 2048, &low.below);     /* behind it: not the same range */
    finish(&b);
    CHECK_EQ(writes() - before, 3);
    expect_all(&first);
    expect_all(&b);
    engine_expect(&e, CLUSTER + 8192, 512, 0xbb, &low.below);
    engine_expect(&e, CLUSTER + 10240, 2048, 99, &low.below);
    engine_expect(&e, CLUSTER + 12288, 2048, 0xbb, &low.below);
    engine_expect(&e, CLUSTER + 16384, CLUSTER - 16384, 0xbb, &low.below);
    engine_end(&e);
}

/* What reaches into the next cluster goes along as far as the claim does. */
CO_TEST(one_that_reaches_further_does_the_rest_by_itself)
{
    struct batch b = {0};

    start(false, 0);
    add(&b, CLUSTER, 4096, &low.below);
    add(&b, 2 * CLUSTER - 4096, 8192, &low.below);
    add(&b, 3 * CLUSTER - 512, 1024, &low.below);
    finish(&b);
    CHECK(engine_stats(&e).write_joins >= 1);
    expect_all(&b);
    engine_expect(&e, CLUSTER + 4096, CLUSTER - 8192, 0xbb, &low.below);
    engine_expect(&e, 2 * CLUSTER + 4096, CLUSTER - 4096 - 512, 0xbb, &low.below);
    engine_expect(&e, 3 * CLUSTER + 512, CLUSTER - 512, 0xbb, &low.below);
    engine_end(&e);
}

CO_TEST(overlapping_writes_do_not_join)
{
    struct batch b = {0};
    uint8_t *buf = malloc(8192);

    start(false, 0);
    add(&b, CLUSTER, 8192, &low.below);
    add(&b, CLUSTER, 8192, &low.below);
    finish(&b);
    IOV_ITER_BUF(it, vec, buf, 8192);
    CHECK_EQ(image_read(e.img, CLUSTER, 8192, &it, &low.below), 0);
    CHECK(buf[0] == 1 || buf[0] == 2);
    for (unsigned i = 0; i < 8192; i++)
        CHECK_EQ(buf[i], buf[0]);
    CHECK_EQ(engine_stats(&e).write_joins, 0);
    free(buf);
    engine_end(&e);
}

/* The error is the first one's; the others try by themselves. */
CO_TEST(a_failure_is_not_shared)
{
    struct batch b = {0};
    unsigned failed = 0;

    start(false, 0);
    blk_fault_fail(e.fault, BLK_REQ_WRITE, 1, -ENOSPC, false);
    for (unsigned i = 0; i < 8; i++)
        add(&b, CLUSTER + i * 4096, 4096, &low.below);
    CHECK_EQ(co_group_wait(&b.group), 0);
    for (unsigned i = 0; i < b.nr; i++) {
        failed += b.writes[i].rc == -ENOSPC;
        engine_expect(&e, b.writes[i].off, 4096, b.writes[i].rc ? 0xbb : b.writes[i].value,
                      &low.below);
    }
    CHECK_EQ(failed, 1);
    engine_end(&e);
}

/* Many clusters written in order, each by writes that arrive together, lie in order. */
CO_TEST(what_is_written_in_order_lies_in_order)
{
    struct extent ext;

    for (unsigned extended = 0; extended < 2; extended++) {
        start(extended, 0);
        for (uint64_t off = 0; off < 4 * MIB; off += JOBS * 4096) {
            struct batch b = {0};

            for (unsigned i = 0; i < JOBS; i++)
                add(&b, off + i * 4096, 4096, &low.below);
            finish(&b);
        }
        CHECK_EQ(image_map(e.img, 0, 4 * MIB, &ext), 0);
        CHECK_EQ(ext.kind, EXTENT_DATA);
        CHECK_EQ(ext.len, 4 * MIB - (ext.len < 4 * MIB ? CLUSTER : 0)); /* but for the first */
        engine_end(&e);
    }
}
