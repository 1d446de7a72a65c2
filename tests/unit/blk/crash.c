/* crash.c: what a power cut may take, and what it may not. */
#include "base/bits.h"
#include "base/vec.h"
#include "devices.h"
#include "rt/reactor.h"
#include "rt/sim.h"

#define SECTOR 512u
#define AREA   (256 * KIB)

SUSPENDS static struct blk *new_crash(uint64_t len)
{
    struct blk *blk = NULL;

    CHECK_EQ(blk_crash_new(len, &blk), 0);
    return blk;
}

SUSPENDS static void fill(struct blk *blk, uint64_t off, uint64_t len, int byte, unsigned flags)
{
    char *buf = buf_get(len);

    memset(buf, byte, len);
    IOV_ITER_BUF(it, vec, buf, len);
    CHECK_EQ(blk_writev(blk, off, len, &it, flags), 0);
    buf_put(buf, len);
}

/* First byte of a sector after a cut. */
SUSPENDS static int byte_at(struct blk *blk, uint64_t off)
{
    uint8_t b = 0;

    CHECK_EQ(blk_read(blk, off, &b, 1), 0);
    return b;
}

SUSPENDS static struct blk *cut(struct blk *blk, uint64_t seed, struct blk_crash_report *report)
{
    struct blk *after = NULL;

    CHECK_EQ(blk_crash_cut(blk, seed, &after, report), 0);
    return after;
}

CO_TEST(reads_see_what_was_written)
{
    struct blk *blk = new_crash(777777);

    check_against_array(blk, 1500);
    blk_close(blk);
}

CO_TEST(flushed_and_durable_writes_survive_every_cut)
{
    struct blk *blk = new_crash(AREA);

    fill(blk, 0, 8192, 1, 0);
    CHECK_EQ(blk_flush(blk), 0);
    fill(blk, 4096, 4096, 2, BLK_FUA);
    fill(blk, 16384, 4096, 3, 0); /* not flushed */
    for (uint64_t seed = 0; seed < 200; seed++) {
        struct blk_crash_report report;
        struct blk *after = cut(blk, seed, &report);

        for (unsigned i = 0; i < 16; i++)
            CHECK_EQ(byte_at(after, i * SECTOR), i < 8 ? 1 : 2);
        CHECK_EQ(report.unflushed_sectors, 8);
        CHECK_EQ(after->len, AREA);
        blk_close(after);
    }
    CHECK_EQ(byte_at(blk, 16384), 3); /* the device itself goes on */
    blk_close(blk);
}

/* Over many cuts: every combination that a device could leave, and no other. */
CO_TEST(cuts_lose_tear_and_reorder)
{
    struct blk *blk = new_crash(AREA);
    unsigned none = 0, all = 0, later_only = 0, torn = 0;
    struct blk_crash_report sum = {0};

    fill(blk, 0, AREA, 9, BLK_FUA);
    fill(blk, 0, 8192, 1, 0);
    fill(blk, 65536, 8192, 2, 0);
    for (uint64_t seed = 0; seed < 1000; seed++) {
        struct blk_crash_report report;
        struct blk *after = cut(blk, test_seed() + seed, &report);
        unsigned first = 0, second = 0;

        for (unsigned i = 0; i < 16; i++) {
            int a = byte_at(after, i * SECTOR), b = byte_at(after, 65536 + i * SECTOR);

            CHECK((a == 1 || a == 9) && (b == 2 || b == 9));
            first += a == 1;
            second += b == 2;
        }
        CHECK_EQ(report.unflushed_sectors, 32);
        CHECK_EQ(report.lost_sectors, 32 - first - second);
        CHECK_EQ(report.torn_writes, (first % 16 != 0) + (second % 16 != 0));
        none += first + second == 0;
        all += first + second == 32;
        later_only += first == 0 && second == 16;
        torn += report.torn_writes > 0;
        sum.lost_sectors += report.lost_sectors;
        blk_close(after);
    }
    printf("  of 1000 cuts: %u nothing, %u all, %u only the later write, %u torn\n", none, all,
           later_only, torn);
    CHECK(none > 50 && all > 50 && later_only > 30 && torn > 100);
    CHECK(sum.lost_sectors > 10000 && sum.lost_sectors < 22000);
    blk_close(blk);
}

CO_TEST(a_sector_ends_with_one_of_its_contents_in_order)
{
    struct blk *blk = new_crash(AREA);
    unsigned seen[8] = {0};

    fill(blk, 0, 4096, 1, 0);
    fill(blk, 0, 4096, 2, 0);
    fill(blk, 0, 4096, 3, BLK_FUA); /* 1 and 2 can never come back */
    fill(blk, 0, 4096, 4, 0);
    CHECK_EQ(blk_zero(blk, 0, 4096, 0), 0);
    fill(blk, 0, 4096, 5, 0);
    for (uint64_t seed = 0; seed < 400; seed++) {
        struct blk *after = cut(blk, seed, NULL);

        for (unsigned i = 0; i < 8; i++)
            seen[byte_at(after, i * SECTOR)]++;
        blk_close(after);
    }
    CHECK(seen[1] == 0 && seen[2] == 0);
    CHECK(seen[3] > 0 && seen[4] > 0 && seen[0] > 0 && seen[5] > 0);
    blk_close(blk);
}

CO_TEST(changes_of_length_are_lost_or_kept_in_order)
{
    struct blk *blk = new_crash(4096);
    unsigned at[4] = {0};

    fill(blk, 0, 4096, 1, BLK_FUA);
    CHECK_EQ(blk_resize(blk, 1024), 0);
    CHECK_EQ(blk_resize(blk, 8192), 0);
    CHECK_EQ(byte_at(blk, 2048), 0);
    for (uint64_t seed = 0; seed < 400; seed++) {
        struct blk *after = cut(blk, seed, NULL);

        CHECK(after->len == 4096 || after->len == 1024 || after->len == 8192);
        at[after->len == 4096 ? 0 : after->len == 1024 ? 1 : 2]++;
        CHECK_EQ(byte_at(after, 0), 1);
        CHECK_EQ(byte_at(after, 2048), after->len == 4096);
        blk_close(after);
    }
    CHECK(at[0] > 0 && at[1] > 0 && at[2] > 0);
    CHECK_EQ(blk_flush(blk), 0);
    struct blk *after = cut(blk, 1, NULL);
    CHECK_EQ(after->len, 8192);
    blk_close(after);
    blk_close(blk);
}

/* ---- flush against writes under way, in the simulator ---- */

struct step {
    struct blk *blk;
    uint64_t off;
    bool done;
    int rc;
};

SUSPENDS static int write_step(void *arg)
{
    struct step *s = arg;
    char block[SECTOR];

    memset(block, 7, SECTOR);
    s->rc = blk_write(s->blk, s->off, block, SECTOR);
    s->done = s->rc == 0;
    return 0;
}

SUSPENDS static int flush_step(void *arg)
{
    struct step *s = arg;

    s->rc = blk_flush(s->blk);
    s->done = s->rc == 0;
    return 0;
}

#define NR_STEPS 32u

static unsigned kept_uncovered, lost_uncovered, lost_answered;

struct reboot {
    struct blk *after;
    bool covered[NR_STEPS], answered[NR_STEPS];
};

/* Writes and flushes beside each other; the power goes off somewhere. */
SUSPENDS static int sim_flushes(void *arg)
{
    struct reboot *boot = arg;
    struct blk *blk = new_crash(AREA);
    struct step writes[NR_STEPS], flushes[NR_STEPS / 4];
    bool before[NR_STEPS / 4][NR_STEPS]; /* writes completed when the flush was issued */
    struct co_group group;
    unsigned nr_flushes = 0;

    co_group_init(&group);
    for (unsigned i = 0; i < NR_STEPS; i++) {
        writes[i] = (struct step){.blk = blk, .off = i * SECTOR};
        CHECK_EQ(co_group_spawn(&group, write_step, &writes[i]), 0);
        co_group_wait_below(&group, 6);
        if (i % 4 != 3 || sim_random() % 3)
            continue;
        struct step *f = &flushes[nr_flushes];
        *f = (struct step){.blk = blk};
        for (unsigned j = 0; j < NR_STEPS; j++)
            before[nr_flushes][j] = j <= i && writes[j].done;
        nr_flushes++;
        CHECK_EQ(co_group_spawn(&group, flush_step, f), 0);
    }
    co_group_wait(&group);
    for (unsigned i = 0; i < NR_STEPS; i++) {
        boot->covered[i] = false;
        boot->answered[i] = writes[i].done;
        for (unsigned j = 0; j < nr_flushes; j++)
            boot->covered[i] |= flushes[j].done && before[j][i];
    }
    boot->after = cut(blk, sim_random(), NULL);
    blk_close(blk);
    return 0;
}

SUSPENDS static int look_after(void *arg)
{
    const struct reboot *boot = arg;

    for (unsigned i = 0; i < NR_STEPS; i++) {
        bool there = byte_at(boot->after, i * SECTOR) == 7;

        CHECK(there || !boot->covered[i]);
        kept_uncovered += there && !boot->covered[i];
        lost_uncovered += !there && !boot->covered[i];
        lost_answered += !there && boot->answered[i];
    }
    blk_close(boot->after);
    return 0;
}

TEST(a_flush_covers_what_had_completed_before_it)
{
    for (uint64_t seed = 0; seed < 300; seed++) {
        struct sim_opts opts = {.seed = test_seed() + seed, .stop_after_io = seed % 45};
        struct reboot boot;

        CHECK_EQ(sim_run(&opts, sim_flushes, &boot), 0);
        CHECK_EQ(sim_run(&(struct sim_opts){.seed = 1}, look_after, &boot), 0);
    }
    printf("  not covered by a flush: %u kept, %u lost (%u of them answered)\n", kept_uncovered,
           lost_uncovered, lost_answered);
    CHECK(kept_uncovered > 500 && lost_uncovered > 500 && lost_answered > 200);
}

/* A flush does not cover a write that completes while the flush is on its way. */
SUSPENDS static int sim_late_write(void *arg)
{
    unsigned *lost = arg;
    struct blk *blk = new_crash(AREA);
    struct step flush = {.blk = blk}, write = {.blk = blk};
    struct co_group group;

    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, flush_step, &flush), 0);
    CHECK_EQ(co_group_spawn(&group, write_step, &write), 0);
    CHECK_EQ(co_group_wait(&group), 0);
    for (uint64_t seed = 0; seed < 20; seed++) {
        struct blk *after = cut(blk, seed, NULL);

        *lost += byte_at(after, 0) != 7;
        blk_close(after);
    }
    blk_close(blk);
    return 0;
}

TEST(a_flush_does_not_cover_what_completes_during_it)
{
    unsigned lost = 0;

    for (uint64_t seed = 0; seed < 20; seed++) {
        struct sim_opts opts = {.seed = seed, .in_order = true};

        CHECK_EQ(sim_run(&opts, sim_late_write, &lost), 0);
    }
    CHECK(lost > 50);
}

/* ---- after the power went off ---- */

SUSPENDS static int sim_dead(void *arg)
{
    struct blk **ret = arg;
    char block[SECTOR] = {1};
    unsigned failed = 0;

    *ret = new_crash(AREA);
    for (unsigned i = 0; i < 20; i++)
        failed += blk_write(*ret, i * SECTOR, block, SECTOR) == -EIO;
    CHECK(failed >= 10 && failed <= 11);
    CHECK_EQ(blk_flush(*ret), -EIO);
    return 0;
}

/* Sectors 0 to 9 were sent in time, the last of them without an answer. */
SUSPENDS static int look_at_dead(void *arg)
{
    struct blk *blk = arg;
    unsigned unanswered = 0;

    for (uint64_t seed = 0; seed < 100; seed++) {
        struct blk *after = cut(blk, seed, NULL);

        for (unsigned i = 10; i < 20; i++)
            CHECK_EQ(byte_at(after, i * SECTOR), 0);
        unanswered += byte_at(after, 9 * SECTOR);
        blk_close(after);
    }
    CHECK(unanswered > 10 && unanswered < 90);
    blk_close(blk);
    return 0;
}

TEST(nothing_reaches_a_device_without_power)
{
    struct blk *blk = NULL;

    CHECK_EQ(sim_run(&(struct sim_opts){.seed = 5, .stop_after_io = 10}, sim_dead, &blk), 0);
    CHECK_EQ(sim_run(&(struct sim_opts){.seed = 1}, look_at_dead, blk), 0);
}
