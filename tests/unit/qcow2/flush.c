/* How many device flushes a flush takes, what they are shared by, and what a failure leaves. */
#include "base/bits.h"
#include "engine.h"
#include "rt/reactor.h"

static struct engine e;

SUSPENDS static void start(void)
{
    e = (struct engine){0};
    engine_start(&e, &(struct image_create_opts){.virtual_len = 64 * MIB}, 0);
}

static uint64_t flushes(void)
{
    return blk_fault_count(e.fault, BLK_REQ_FLUSH);
}

CO_TEST(a_clean_image_takes_one_device_flush_or_none)
{
    start();
    CHECK_EQ(engine_write(&e, 0, 65536, 1, 0, NULL), 0);
    CHECK_EQ(image_flush(e.img), 0);
    uint64_t n = flushes();
    CHECK_EQ(image_flush(e.img), 0);
    CHECK_EQ(flushes(), n); /* nothing was written */
    CHECK_EQ(engine_write(&e, 4096, 4096, 2, 0, NULL), 0);
    CHECK_EQ(image_flush(e.img), 0);
    CHECK_EQ(flushes(), n + 1); /* in place */
    image_note_write(e.img);
    CHECK_EQ(image_flush(e.img), 0);
    CHECK_EQ(flushes(), n + 2); /* somebody wrote past the image */
    CHECK_EQ(engine_write(&e, 65536, 4096, 2, 0, NULL), 0);
    CHECK(image_is_unwritten(e.img));
    CHECK_EQ(image_flush(e.img), 0);
    CHECK_EQ(flushes(), n + 4); /* data, then L2 */
    CHECK(!image_is_unwritten(e.img));
    engine_end(&e);
}

SUSPENDS static int flush_it(void *arg)
{
    return image_flush(e.img);
}

CO_TEST(flushes_at_once_share_device_flushes)
{
    struct co_group group;

    start();
    CHECK_EQ(engine_write(&e, 0, 65536, 1, 0, NULL), 0);
    uint64_t n = flushes();
    co_group_init(&group);
    for (unsigned i = 0; i < 20; i++)
        CHECK_EQ(co_group_spawn(&group, flush_it, NULL), 0);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK(flushes() - n <= 3);
    engine_end(&e);
}

/* A write that ends while a flush runs is not covered by it: the next flush reaches the device. */
CO_TEST(a_guest_that_flushes_takes_no_flush_more)
{
    start();
    CHECK_EQ(engine_write(&e, 0, 65536, 1, 0, NULL), 0);
    CHECK_EQ(image_write_back_old(e.img), 0); /* notes what is there */
    CHECK_EQ(image_flush(e.img), 0);
    CHECK_EQ(engine_write(&e, 1 * MIB, 65536, 1, 0, NULL), 0);
    uint64_t n = flushes();
    CHECK_EQ(image_write_back_old(e.img), 0); /* what is there now was not */
    CHECK_EQ(flushes(), n);
    CHECK_EQ(image_write_back_old(e.img), 0);
    CHECK_EQ(flushes(), n + 2);
    engine_end(&e);
}

CO_TEST(a_write_behind_a_running_flush_is_flushed_again)
{
    struct co_group group;

    start();
    CHECK_EQ(engine_write(&e, 0, 65536, 1, 0, NULL), 0);
    CHECK_EQ(image_flush(e.img), 0);
    CHECK_EQ(engine_write(&e, 0, 4096, 2, 0, NULL), 0);
    co_group_init(&group);
    blk_fault_break(e.fault, BLK_REQ_FLUSH, 0, UINT64_MAX);
    CHECK_EQ(co_group_spawn(&group, flush_it, NULL), 0);
    blk_fault_wait_stopped(e.fault);
    CHECK_EQ(engine_write(&e, 8192, 4096, 3, 0, NULL), 0);
    blk_fault_resume(e.fault);
    CHECK_EQ(co_group_wait(&group), 0);
    uint64_t n = flushes();
    CHECK_EQ(image_flush(e.img), 0);
    CHECK_EQ(flushes(), n + 1);
    engine_end(&e);
}

CO_TEST(fua_in_place_takes_no_flush)
{
    start();
    CHECK_EQ(engine_write(&e, 0, 65536, 1, BLK_FUA, NULL), 0);
    uint64_t n = flushes();
    CHECK(n > 0);
    CHECK_EQ(engine_write(&e, 0, 4096, 2, BLK_FUA, NULL), 0);
    CHECK_EQ(flushes(), n);
    CHECK_EQ(engine_write(&e, 65536, 4096, 3, 0, NULL), 0);
    CHECK_EQ(engine_write(&e, 0, 4096, 4, BLK_FUA, NULL), 0); /* its slice is dirty */
    CHECK(flushes() > n);
    CHECK(!image_is_unwritten(e.img));
    engine_end(&e);
}

CO_TEST(a_failed_flush_is_sticky_and_reads_go_on)
{
    start();
    CHECK_EQ(engine_write(&e, 0, 65536, 1, BLK_FUA, NULL), 0);
    CHECK_EQ(engine_write(&e, 65536, 65536, 2, 0, NULL), 0);
    blk_fault_fail(e.fault, BLK_REQ_FLUSH, 1, -EIO, false);
    CHECK_EQ(image_flush(e.img), -EIO);
    CHECK_EQ(image_flush(e.img), -EIO);
    CHECK_EQ(engine_write(&e, 0, 4096, 9, 0, NULL), -EIO);
    CHECK_EQ(image_zero(e.img, 0, 65536, 0, NULL), -EIO);
    engine_expect(&e, 0, 65536, 1, NULL);
    engine_expect(&e, 65536, 65536, 2, NULL);
    CHECK(image_close(e.img, NULL) < 0);
    e.opts.writable = false; /* the device has failed for good */
    engine_open(&e);
    engine_expect(&e, 0, 65536, 1, NULL);
    CHECK_EQ(image_close(e.img, NULL), 0);
    blk_close(e.fault);
    blk_close(e.mem);
}

CO_TEST(lack_of_space_in_a_flush_is_not)
{
    start();
    CHECK_EQ(engine_write(&e, 0, 65536, 1, 0, NULL), 0);
    blk_fault_fail(e.fault, BLK_REQ_WRITE, 1, -ENOSPC, false); /* the L2 slice */
    CHECK_EQ(image_flush(e.img), -ENOSPC);
    CHECK(image_is_unwritten(e.img));
    CHECK_EQ(engine_write(&e, 65536, 65536, 2, 0, NULL), 0);
    CHECK_EQ(image_flush(e.img), 0);
    engine_kill(&e);
    engine_expect(&e, 0, 65536, 1, NULL);
    engine_expect(&e, 65536, 65536, 2, NULL);
    engine_close(&e);
    blk_close(e.fault);
    blk_close(e.mem);
}

/* Rule 1 of flush.c: an entry made while the first device flush runs does not go with it. */
CO_TEST(an_entry_made_during_the_flush_waits_for_the_next)
{
    struct co_group group;
    struct image_check res;

    start();
    CHECK_EQ(engine_write(&e, 0, 65536, 1, 0, NULL), 0);
    co_group_init(&group);
    blk_fault_break(e.fault, BLK_REQ_FLUSH, 0, UINT64_MAX);
    CHECK_EQ(co_group_spawn(&group, flush_it, NULL), 0);
    blk_fault_wait_stopped(e.fault);
    CHECK_EQ(engine_write(&e, 65536, 65536, 2, 0, NULL), 0);
    blk_fault_resume(e.fault);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK(image_is_unwritten(e.img));
    engine_kill(&e);
    engine_expect(&e, 0, 65536, 1, NULL);
    engine_expect(&e, 65536, 65536, 0, NULL);
    CHECK_EQ(image_check(e.img, &res, NULL, NULL, NULL), 0);
    CHECK_EQ(res.corruptions, 0);
    engine_close(&e);
    blk_close(e.fault);
    blk_close(e.mem);
}
