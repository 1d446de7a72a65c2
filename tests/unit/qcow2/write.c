/* What writes cost, who waits for whom, and what errors leave. */
#include "base/bits.h"
#include "engine.h"
#include "rt/reactor.h"

#define CLUSTER 65536ull

static struct engine e;
static struct engine_below below;

SUSPENDS static void start(bool extended, uint64_t fixed_len)
{
    e = (struct engine){0};
    engine_below_init(&below);
    engine_start(&e, &(struct image_create_opts){.virtual_len = 64 * MIB, .extended_l2 = extended},
                 fixed_len);
}

static uint64_t requests(unsigned reqs)
{
    return blk_fault_count(e.fault, reqs);
}

/* ---- costs ---- */

CO_TEST(cow_is_one_read_and_one_write)
{
    start(false, 0);
    CHECK_EQ(engine_write(&e, 10 * CLUSTER, 4096, 1, 0, &below.below), 0);
    below.reads = below.read_bytes = 0;
    uint64_t writes = requests(BLK_REQ_WRITE), reads = requests(BLK_REQ_READ);
    CHECK_EQ(engine_write(&e, 8192, 4096, 1, 0, &below.below), 0);
    CHECK_EQ(below.reads, 1);
    CHECK(below.read_bytes <= CLUSTER);
    CHECK_EQ(requests(BLK_REQ_WRITE) - writes, 1);
    CHECK_EQ(requests(BLK_REQ_READ) - reads, 0);
    engine_expect(&e, 0, 8192, 0xbb, &below.below);
    engine_expect(&e, 8192, 4096, 1, &below.below);
    engine_expect(&e, 12288, CLUSTER - 12288, 0xbb, &below.below);
    engine_end(&e);
}

CO_TEST(a_whole_subcluster_copies_nothing)
{
    start(true, 0);
    CHECK_EQ(engine_write(&e, 0, 2048, 1, 0, &below.below), 0);
    below.reads = 0;
    uint64_t writes = requests(BLK_REQ_WRITE);
    CHECK_EQ(engine_write(&e, CLUSTER + 4096, 4096, 1, 0, &below.below), 0);  /* new cluster */
    CHECK_EQ(engine_write(&e, CLUSTER + 16384, 4096, 1, 0, &below.below), 0); /* more of it */
    CHECK_EQ(requests(BLK_REQ_WRITE) - writes, 2);
    CHECK_EQ(below.reads, 0);
    CHECK_EQ(engine_write(&e, CLUSTER + 512, 512, 1, 0, &below.below), 0);
    CHECK_EQ(below.reads, 1);
    CHECK(below.read_bytes <= 2048);
    engine_expect(&e, CLUSTER, 512, 0xbb, &below.below);
    engine_expect(&e, CLUSTER + 2048, 2048, 0xbb, &below.below);
    engine_end(&e);
}

CO_TEST(a_long_write_is_one_device_write)
{
    start(false, 0);
    CHECK_EQ(engine_write(&e, 0, 512, 1, 0, &below.below), 0); /* makes table and run */
    uint64_t writes = requests(BLK_REQ_WRITE);
    below.reads = below.read_bytes = 0;
    CHECK_EQ(engine_write(&e, 20 * CLUSTER + 512, 10 * CLUSTER, 2, 0, &below.below), 0);
    CHECK_EQ(requests(BLK_REQ_WRITE) - writes, 1);
    CHECK(below.reads <= 2 && below.read_bytes == CLUSTER);
    engine_expect(&e, 20 * CLUSTER, 512, 0xbb, &below.below);
    engine_expect(&e, 20 * CLUSTER + 512, 10 * CLUSTER, 2, &below.below);
    engine_expect(&e, 30 * CLUSTER + 512, CLUSTER - 512, 0xbb, &below.below);
    engine_end(&e);
}

CO_TEST(fresh_space_of_a_file_is_not_zeroed_that_of_a_volume_is)
{
    start(false, 0);
    CHECK_EQ(engine_write(&e, 9 * CLUSTER, CLUSTER, 2, 0, NULL), 0); /* makes table and run */
    uint64_t bytes = e.mem->stats.write_bytes;
    CHECK_EQ(engine_write(&e, CLUSTER + 4096, 4096, 1, 0, NULL), 0);
    CHECK(e.mem->stats.write_bytes - bytes < 16384);
    engine_expect(&e, CLUSTER, 4096, 0, NULL);
    engine_end(&e);

    start(false, 16 * MIB);
    CHECK_EQ(engine_write(&e, CLUSTER + 4096, 4096, 1, 0, NULL), 0);
    engine_expect(&e, CLUSTER, 4096, 0, NULL);
    engine_expect(&e, CLUSTER + 4096, 4096, 1, NULL);
    engine_expect(&e, CLUSTER + 8192, CLUSTER - 8192, 0, NULL);
    engine_end(&e);
}

CO_TEST(a_reused_cluster_shows_nothing_of_its_earlier_owner)
{
    start(false, 0);
    CHECK_EQ(engine_write(&e, 0, 32 * CLUSTER, 0xaa, 0, NULL), 0);
    CHECK_EQ(image_discard(e.img, 0, 32 * CLUSTER, NULL), 0);
    CHECK_EQ(image_flush(e.img), 0);
    uint64_t end = e.img->end;
    for (uint64_t i = 0; i < 60; i++) { /* the first run ends with the 31st */
        CHECK_EQ(engine_write(&e, (100 + i) * CLUSTER + 4096, 512, 1, 0, NULL), 0);
        engine_expect(&e, (100 + i) * CLUSTER, 4096, 0, NULL);
        engine_expect(&e, (100 + i) * CLUSTER + 4608, CLUSTER - 4608, 0, NULL);
    }
    CHECK_EQ(e.img->end, end); /* freed space was reused */
    engine_end(&e);
}

CO_TEST(the_common_write_updates_no_refcount)
{
    start(false, 0);
    for (uint64_t i = 0; i < 512; i++)
        CHECK_EQ(engine_write(&e, i * CLUSTER, 4096, 1, 0, NULL), 0);
    struct image_stats s = engine_stats(&e);
    CHECK_EQ(s.clusters_allocated, 512 + 1);
    CHECK(s.refcount_writes <= 12 && s.runs_allocated <= 10);
    engine_end(&e);
}

/* ---- meeting each other ---- */

struct job {
    uint64_t off, len;
    uint8_t value;
    bool done;
};

SUSPENDS static int write_job(void *arg)
{
    struct job *job = arg;
    int rc = engine_write(&e, job->off, job->len, job->value, 0, &below.below);

    job->done = true;
    return rc;
}

SUSPENDS static int discard_job(void *arg)
{
    struct job *job = arg;
    int rc = image_discard(e.img, job->off, job->len, &below.below);

    job->done = true;
    return rc;
}

CO_TEST(only_writers_of_one_cluster_wait_for_each_other)
{
    struct job a = {4096, 4096, 1}, b = {8192, 4096, 2}, c = {CLUSTER, 4096, 3}, d = {0, CLUSTER};
    struct co_group group;

    start(false, 0);
    CHECK_EQ(engine_write(&e, 40 * CLUSTER, 512, 1, 0, &below.below), 0);
    co_group_init(&group);
    blk_fault_break(e.fault, BLK_REQ_WRITE, 0, UINT64_MAX);
    CHECK_EQ(co_group_spawn(&group, write_job, &a), 0);
    blk_fault_wait_stopped(e.fault); /* a is at its data */
    CHECK_EQ(co_group_spawn(&group, write_job, &b), 0);
    CHECK_EQ(co_group_spawn(&group, write_job, &c), 0);
    CHECK_EQ(co_group_spawn(&group, discard_job, &d), 0);
    for (unsigned i = 0; i < 1000 && !c.done; i++)
        reactor_yield();
    CHECK(c.done && !b.done && !a.done && !d.done);
    blk_fault_resume(e.fault);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK(engine_stats(&e).claim_waits >= 2);
    engine_expect(&e, CLUSTER, 4096, 3, &below.below);
    engine_end(&e);
}

SUSPENDS static int read_job(void *arg)
{
    struct job *job = arg;
    uint8_t *buf = malloc(job->len);
    IOV_ITER_BUF(it, vec, buf, job->len);
    int rc = image_read(e.img, job->off, job->len, &it, NULL);

    for (uint64_t i = 0; rc == 0 && i < job->len; i++)
        if (buf[i] != 0 && buf[i] != job->value)
            rc = -EBADMSG;
    job->done = true;
    free(buf);
    return rc;
}

/* Rule 2 of alloc.c: a read that has looked up its place keeps it from being reused. */
CO_TEST(a_slow_read_never_sees_the_next_owner)
{
    struct job r = {0, CLUSTER, 0xaa};
    struct co_group group;

    start(false, 16 * MIB);
    CHECK_EQ(engine_write(&e, 0, CLUSTER, 0xaa, 0, NULL), 0);
    CHECK_EQ(image_flush(e.img), 0);
    co_group_init(&group);
    blk_fault_break(e.fault, BLK_REQ_READ, 0, UINT64_MAX);
    CHECK_EQ(co_group_spawn(&group, read_job, &r), 0);
    blk_fault_wait_stopped(e.fault);
    CHECK_EQ(image_discard(e.img, 0, CLUSTER, NULL), 0);
    CHECK_EQ(image_flush(e.img), 0);
    for (uint64_t i = 1; i < 160; i++) /* more than a run: what can be reused is */
        CHECK_EQ(engine_write(&e, i * CLUSTER, CLUSTER, 0xcc, 0, NULL), 0);
    CHECK(!r.done);
    blk_fault_resume(e.fault);
    CHECK_EQ(co_group_wait(&group), 0);
    engine_end(&e);
}

/* ---- errors ---- */

CO_TEST(a_failed_write_changes_no_mapping_and_can_be_repeated)
{
    static const int errors[] = {-ENOSPC, -EFBIG, -EIO};

    start(false, 0);
    CHECK_EQ(engine_write(&e, 0, CLUSTER, 1, BLK_FUA, &below.below), 0);
    for (unsigned i = 0; i < ARRAY_SIZE(errors); i++) {
        uint64_t off = (1 + i) * 4 * CLUSTER;

        blk_fault_fail(e.fault, BLK_REQ_WRITE, 1, errors[i], false);
        CHECK_EQ(engine_write(&e, off + 512, 2 * CLUSTER, 2, 0, &below.below), errors[i]);
        engine_expect(&e, off, 4 * CLUSTER, 0xbb, &below.below);
        CHECK_EQ(engine_write(&e, off + 512, 2 * CLUSTER, 2, 0, &below.below), 0);
        engine_expect(&e, off + 512, 2 * CLUSTER, 2, &below.below);
        engine_expect(&e, off, 512, 0xbb, &below.below);
    }
    engine_end(&e);
}

/* The n-th request fails, n growing until there are fewer: no corruption, and the image goes on.
 * What failed was reported, or is a leak. False when nothing failed any more. */
SUSPENDS static bool fail_nth(unsigned nth, unsigned kinds, int rc,
                              const struct image_create_opts *create)
{
    bool reported = false;

    e = (struct engine){.opts.cache_bytes = 64 * KIB};
    engine_start(&e, create, 0);
    uint64_t before = requests(kinds);
    blk_fault_fail(e.fault, kinds, nth, rc, false);
    for (uint64_t off = 0; off < create->virtual_len; off += 96 * KIB) {
        reported |= engine_write(&e, off, 32 * KIB, 1, 0, NULL) < 0;
        reported |= image_discard(e.img, off / 2, 16 * KIB, NULL) < 0;
        if (off % (4 * 96 * KIB) == 0)
            reported |= image_flush(e.img) < 0;
    }
    bool failed = requests(kinds) - before >= nth;
    blk_fault_clear(e.fault);
    reported |= image_flush(e.img) < 0;
    uint64_t leaks = engine_leaks(&e);
    reported |= image_close(e.img, NULL) < 0;
    engine_open(&e);
    leaks = engine_leaks(&e);
    CHECK(failed || (!reported && leaks == 0));
    CHECK_EQ(engine_write(&e, 0, 64 * KIB, 5, 0, NULL), 0);
    engine_expect(&e, 0, 64 * KIB, 5, NULL);
    engine_leaks(&e);
    engine_close(&e);
    blk_close(e.fault);
    blk_close(e.mem);
    return failed;
}

CO_TEST(any_write_may_fail)
{
    struct image_create_opts create = {.virtual_len = 3 * MIB, .cluster_size = 4096};
    struct image_create_opts small = {.virtual_len = MIB, .cluster_size = 512, .refcount_bits = 64};
    unsigned n;

    for (n = 1; fail_nth(n, BLK_REQ_WRITE, -ENOSPC, &create); n++)
        ;
    printf("  %u writes failed in turn with ENOSPC\n", n - 1);
    for (n = 1; fail_nth(n, BLK_REQ_WRITE, -EIO, &create); n++)
        ;
    printf("  %u writes failed in turn with EIO\n", n - 1);
    for (n = 1; n < 2000 && fail_nth(n, BLK_REQ_WRITE, -ENOSPC, &small); n += 7)
        ;
    for (n = 1; fail_nth(n, BLK_REQ_READ, -EIO, &create); n++)
        ;
}
