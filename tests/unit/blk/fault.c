/* fault.c: chosen requests fail or stop; blk.c's sticky flush failure. */
#include "base/bits.h"
#include "devices.h"
#include "rt/reactor.h"

SUSPENDS static struct blk *new_fault(uint64_t len, uint32_t align)
{
    struct blk *mem = NULL, *blk = NULL;

    CHECK_EQ(blk_mem_new(len, align, &mem), 0);
    CHECK_EQ(blk_fault_new(mem, &blk), 0);
    return blk;
}

CO_TEST(without_rules_nothing_changes)
{
    struct blk *blk = new_fault(777777, 512);

    check_against_array(blk, 1000);
    CHECK(blk_fault_count(blk, BLK_REQ_READ) == blk->stats.reads && blk->stats.reads > 100);
    blk_close(blk);
}

CO_TEST(the_nth_request_fails_once_or_for_ever)
{
    struct blk *blk = new_fault(65536, 1);
    char b = 1;

    blk_fault_fail(blk, BLK_REQ_WRITE, 3, -EIO, false);
    for (int i = 1; i <= 5; i++)
        CHECK_EQ(blk_write(blk, 0, &b, 1), i == 3 ? -EIO : 0);
    CHECK_EQ(blk_fault_count(blk, BLK_REQ_WRITE), 5);
    blk_fault_fail(blk, BLK_REQ_READ | BLK_REQ_ZERO, 2, -ENOMEM, true);
    CHECK_EQ(blk_read(blk, 0, &b, 1), 0);
    CHECK_EQ(blk_write(blk, 0, &b, 1), 0);
    CHECK_EQ(blk_zero(blk, 0, 10, 0), -ENOMEM);
    CHECK_EQ(blk_read(blk, 0, &b, 1), -ENOMEM);
    blk_fault_clear(blk);
    CHECK_EQ(blk_read(blk, 0, &b, 1), 0);
    blk_fault_fail(blk, BLK_REQ_RESIZE, 1, -ENOSPC, false);
    CHECK_EQ(blk_preallocate(blk, 0, 1 << 20), -ENOSPC);
    CHECK_EQ(blk->len, 65536);
    blk_fault_fail(blk, BLK_REQ_DISCARD, 1, -EIO, false);
    CHECK_EQ(blk_discard(blk, 0, 512), -EIO);
    CHECK_EQ(blk_fault_count(blk, BLK_REQ_ANY), 5 + 1 + 1 + 1 + 1 + 1 + 1 + 1);
    blk_close(blk);
}

CO_TEST(a_failed_read_stops_a_read_modify_write)
{
    struct blk *blk = new_fault(65536, 4096);
    uint8_t buf[200];

    blk_fault_fail(blk, BLK_REQ_READ, 1, -EIO, false);
    CHECK_EQ(blk_write(blk, 100, buf, sizeof(buf)), -EIO);
    CHECK_EQ(blk_fault_count(blk, BLK_REQ_WRITE), 0);
    CHECK(list_empty(&blk->changes) && blk->nr_rmw == 0);
    CHECK_EQ(blk_write(blk, 100, buf, sizeof(buf)), 0);
    blk_close(blk);
}

CO_TEST(a_failed_flush_is_for_ever)
{
    struct blk *blk = new_fault(65536, 1);
    char b = 1;

    CHECK_EQ(blk_write(blk, 0, &b, 1), 0);
    blk_fault_fail(blk, BLK_REQ_FLUSH, 1, -ENOSPC, false);
    CHECK_EQ(blk_flush(blk), -ENOSPC);
    CHECK_EQ(blk_flush(blk), -EIO);
    CHECK_EQ(blk_write(blk, 0, &b, 1), -EIO);
    CHECK_EQ(blk_zero(blk, 0, 1, 0), -EIO);
    CHECK_EQ(blk_discard(blk, 0, 1), -EIO);
    CHECK_EQ(blk_resize(blk, 0), -EIO);
    CHECK_EQ(blk_preallocate(blk, 0, 1), -EIO);
    CHECK_EQ(blk_read(blk, 0, &b, 1), 0);
    CHECK_EQ(blk_fault_count(blk, BLK_REQ_FLUSH), 1); /* no second flush was tried */
    blk_close(blk);
}

CO_TEST(a_failed_durable_write_counts_as_a_failed_flush)
{
    static const struct {
        int rc;
        bool sticky;
    } cases[] = {{-ENOSPC, false}, {-EIO, true}};
    char b = 1;

    for (unsigned i = 0; i < 2; i++) {
        struct blk *blk = new_fault(65536, 1);

        blk_fault_fail(blk, BLK_REQ_WRITE, 1, cases[i].rc, false);
        IOV_ITER_BUF(it, vec, &b, 1);
        CHECK_EQ(blk_writev(blk, 0, 1, &it, BLK_FUA), cases[i].rc);
        CHECK_EQ(blk_write(blk, 0, &b, 1), cases[i].sticky ? -EIO : 0);
        blk_close(blk);
    }
}

struct flusher {
    struct blk *blk;
    int rc;
};

SUSPENDS static int do_flush(void *arg)
{
    struct flusher *f = arg;

    f->rc = blk_flush(f->blk);
    return 0;
}

/* The device tells an error once: of two flushes at once both must fail. */
CO_TEST(a_flush_beside_a_failed_one_fails_too)
{
    struct blk *blk = new_fault(65536, 1);
    struct flusher first = {blk, 1}, second = {blk, 1};
    struct co_group group;

    blk_fault_break(blk, BLK_REQ_FLUSH, 0, 0);
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, do_flush, &first), 0);
    blk_fault_wait_stopped(blk);
    blk_fault_fail(blk, BLK_REQ_FLUSH, 1, -EIO, false);
    CHECK_EQ(co_group_spawn(&group, do_flush, &second), 0);
    while (second.rc == 1)
        reactor_yield();
    CHECK_EQ(second.rc, -EIO);
    CHECK_EQ(first.rc, 1);
    blk_fault_resume(blk);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(first.rc, -EIO);
    blk_close(blk);
}

/* ---- breakpoints ---- */

struct writer {
    struct blk *blk;
    uint64_t off;
    size_t len;
    bool done;
};

SUSPENDS static int do_write(void *arg)
{
    struct writer *w = arg;
    uint8_t *data = buf_get(w->len);

    memset(data, 5, w->len);
    int rc = blk_write(w->blk, w->off, data, w->len);
    buf_put(data, w->len);
    w->done = true;
    return rc;
}

SUSPENDS static void let_others_run(void)
{
    for (unsigned i = 0; i < 50; i++)
        reactor_yield();
}

CO_TEST(a_request_stops_before_it_reaches_the_device)
{
    struct blk *blk = new_fault(65536, 1);
    struct writer hit = {.blk = blk, .off = 4000, .len = 200}, miss = {.blk = blk, .len = 10};
    struct co_group group;
    uint8_t b;

    blk_fault_break(blk, BLK_REQ_WRITE, 4096, 4096);
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, do_write, &miss), 0);
    CHECK_EQ(co_group_spawn(&group, do_write, &hit), 0);
    blk_fault_wait_stopped(blk);
    let_others_run();
    CHECK(miss.done && !hit.done);
    CHECK_EQ(blk_read(blk, 4000, &b, 1), 0);
    CHECK_EQ(b, 0);
    blk_fault_resume(blk);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(blk_read(blk, 4000, &b, 1), 0);
    CHECK_EQ(b, 5);
    CHECK_EQ(blk_write(blk, 4096, &b, 1), 0); /* a breakpoint works once */
    blk_close(blk);
}

/* A read-modify-write holds back whole writes of its block, and of no other. */
CO_TEST(a_whole_write_waits_for_a_read_modify_write_of_its_block)
{
    struct blk *blk = new_fault(65536, 4096);
    struct writer rmw = {.blk = blk, .off = 4196, .len = 10};
    struct writer same = {.blk = blk, .off = 4096, .len = 4096};
    struct writer other = {.blk = blk, .off = 8192, .len = 4096};
    struct co_group group;

    blk_fault_break(blk, BLK_REQ_WRITE, 4096, 4096);
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, do_write, &rmw), 0);
    blk_fault_wait_stopped(blk);
    CHECK_EQ(co_group_spawn(&group, do_write, &same), 0);
    CHECK_EQ(co_group_spawn(&group, do_write, &other), 0);
    let_others_run();
    CHECK(other.done && !same.done);
    blk_fault_resume(blk);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK(same.done && rmw.done);

    /* and the other way round */
    same.done = rmw.done = false;
    blk_fault_break(blk, BLK_REQ_WRITE, 4096, 4096);
    CHECK_EQ(co_group_spawn(&group, do_write, &same), 0);
    blk_fault_wait_stopped(blk);
    uint64_t reads = blk_fault_count(blk, BLK_REQ_READ);
    CHECK_EQ(co_group_spawn(&group, do_write, &rmw), 0);
    let_others_run();
    CHECK(!rmw.done);
    CHECK_EQ(blk_fault_count(blk, BLK_REQ_READ), reads); /* not even read */
    blk_fault_resume(blk);
    CHECK_EQ(co_group_wait(&group), 0);
    blk_close(blk);
}
