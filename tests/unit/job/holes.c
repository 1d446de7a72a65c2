/*
 * Files that are mapped but were never written: no job fills their holes, none lets through what
 * they hide, and none misses what a guest writes into them meanwhile.
 */
#include <sys/stat.h>
#include "base/bits.h"
#include "job/job.h"
#include "rig.h"
#include "rt/reactor.h"

#define LEN   (64 * MIB)
#define SLACK (2 * MIB) /* tables, steps of growth, rests of clusters */

static const struct job_opts job_auto = {.id = "j", .auto_finalize = true, .auto_dismiss = true};

static const char *at(const char *name)
{
    static char path[4][512];
    static unsigned turn;

    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof(path[turn]), "%s/%s", test_dir(), name);
    return path[turn];
}

static uint64_t used(const char *name)
{
    struct stat st;

    CHECK_EQ(stat(at(name), &st), 0);
    return (uint64_t)st.st_blocks * 512;
}

SUSPENDS static struct chain *open_chain(const char *name, bool writable)
{
    struct chain_opts opts = {.writable = writable, .prealloc_step = MIB};
    struct chain *chain;
    struct err err = {0};

    if (chain_open(at(name), &opts, &chain, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    return chain;
}

SUSPENDS static void put(const char *name, uint64_t off, uint64_t len, uint64_t stamp)
{
    struct chain *chain = open_chain(name, true);

    CHECK_EQ(rig_write(chain, off, len, stamp), 0);
    CHECK_EQ(chain_close(chain, NULL), 0);
}

SUSPENDS static void make(const char *name, const char *backing, enum qcow2_prealloc prealloc)
{
    struct blk_file_opts opts = {.writable = true, .create = true, .truncate = true};
    struct rig_shape shape = {.len = LEN, .cluster_size = 65536, .prealloc = prealloc};
    struct err err = {0};
    struct blk *blk;

    CHECK_EQ(blk_file_open(at(name), &opts, &blk, &err), 0);
    /* a plain entry cannot be mapped and show the layer below: such an image gets its backing name
     * afterwards, and hides all of what is below */
    rig_create(blk, &shape, prealloc ? NULL : backing, "qcow2");
    blk_close(blk);
    if (!prealloc || !backing)
        return;
    struct layer_opts layer_opts = {.format = "qcow2", .writable = true};
    struct layer *layer;
    CHECK_EQ(layer_open(at(name), &layer_opts, &layer, &err), 0);
    CHECK_EQ(layer_set_backing(layer, backing, "qcow2", &err), 0);
    CHECK_EQ(layer_close(layer, &err), 0);
}

/* 8 MiB of data, then a mapped one with 1 MiB in the middle of that. */
SUSPENDS static void make_two(void)
{
    make("bottom", NULL, PREALLOC_OFF);
    put("bottom", 0, 8 * MIB, 1);
    make("mapped", "bottom", PREALLOC_METADATA);
    put("mapped", 4 * MIB, MIB, 2);
}

SUSPENDS static void expect_mapped(struct chain *chain)
{
    rig_expect(chain, 0, 4 * MIB, 0);
    rig_expect(chain, 4 * MIB, MIB, 2);
    rig_expect(chain, 5 * MIB, 11 * MIB, 0);
    rig_expect(chain, 17 * MIB, LEN - 17 * MIB, 0);
}

SUSPENDS static void finish(struct jobs *jobs, bool active)
{
    struct err err = {0};

    if (active)
        while (job_complete(jobs, "j", NULL) == -EBUSY)
            reactor_yield();
    if (job_wait(jobs, "j", &err) < 0)
        test_fail(__FILE__, __LINE__, "job: %s", err_text(&err));
    jobs_free(jobs);
}

/* Into "top" from what is below it down to the base. */
SUSPENDS static void stream(struct chain *chain, struct layer *base)
{
    struct err err = {0};
    struct jobs *jobs;

    CHECK_EQ(jobs_new(NULL, NULL, &jobs), 0);
    CHECK_EQ(job_stream(jobs, chain, chain_layer(chain, 0), base, &job_auto, &err), 0);
    finish(jobs, false);
}

SUSPENDS static void commit(struct chain *chain, unsigned top, unsigned base)
{
    struct err err = {0};
    struct jobs *jobs;

    CHECK_EQ(jobs_new(NULL, NULL, &jobs), 0);
    CHECK_EQ(
        job_commit(jobs, chain, chain_layer(chain, top), chain_layer(chain, base), &job_auto, &err),
        0);
    finish(jobs, top == 0);
}

CO_TEST(stream_of_a_preallocated_base_takes_what_was_written)
{
    struct job_direction dir;

    make("mapped", NULL, PREALLOC_METADATA);
    put("mapped", 4 * MIB, MIB, 2);
    make("top", "mapped", PREALLOC_OFF);
    put("top", 16 * MIB, 4 * MIB, 3);
    struct chain *chain = open_chain("top", true);
    CHECK_EQ(job_direction(chain, 1, &dir), 0);
    CHECK(!dir.commit && dir.stream_bytes == MIB && dir.commit_bytes == 4 * MIB);
    stream(chain, NULL);
    CHECK_EQ(chain_depth(chain), 1);
    for (unsigned round = 0; round < 2; round++) {
        rig_expect(chain, 0, 4 * MIB, 0);
        rig_expect(chain, 4 * MIB, MIB, 2);
        rig_expect(chain, 5 * MIB, 11 * MIB, 0);
        rig_expect(chain, 16 * MIB, 4 * MIB, 3);
        CHECK_EQ(chain_close(chain, NULL), 0);
        chain = open_chain("top", false);
    }
    CHECK_EQ(chain_close(chain, NULL), 0);
    CHECK(used("top") < 5 * MIB + SLACK);
}

CO_TEST(stream_keeps_a_hole_over_data_below_without_space)
{
    make_two();
    make("top", "mapped", PREALLOC_OFF);
    put("top", 16 * MIB, MIB, 3);
    struct chain *chain = open_chain("top", true);
    stream(chain, chain_layer(chain, 2));
    CHECK_EQ(chain_depth(chain), 2);
    for (unsigned round = 0; round < 2; round++) {
        expect_mapped(chain);
        rig_expect(chain, 16 * MIB, MIB, 3);
        CHECK_EQ(chain_close(chain, NULL), 0);
        chain = open_chain("top", false);
    }
    CHECK_EQ(chain_close(chain, NULL), 0);
    CHECK(used("top") < 2 * MIB + SLACK);
}

/* Active, or with an empty layer above. */
SUSPENDS static void commit_of_holes(bool active)
{
    make_two();
    if (!active)
        make("above", "mapped", PREALLOC_OFF);
    struct chain *chain = open_chain(active ? "mapped" : "above", true);
    expect_mapped(chain);
    commit(chain, active ? 0 : 1, active ? 1 : 2);
    CHECK_EQ(chain_depth(chain), active ? 1 : 2);
    for (unsigned round = 0; round < 2; round++) {
        expect_mapped(chain);
        rig_expect(chain, 16 * MIB, MIB, 0);
        CHECK_EQ(chain_close(chain, NULL), 0);
        chain = open_chain(active ? "bottom" : "above", false);
    }
    CHECK_EQ(chain_close(chain, NULL), 0);
    CHECK(used("bottom") < 8 * MIB + SLACK);
}

CO_TEST(commit_of_a_hole_makes_zero_of_the_base)
{
    commit_of_holes(false);
    commit_of_holes(true);
}

/* Nothing to do: the base stays mapped. */
CO_TEST(commit_of_holes_into_holes_writes_nothing)
{
    make("bottom", NULL, PREALLOC_METADATA);
    make("top", "bottom", PREALLOC_METADATA);
    uint64_t before = used("bottom");
    struct chain *chain = open_chain("top", true);
    struct chain_status st;
    commit(chain, 0, 1);
    rig_expect(chain, 0, 16 * MIB, 0);
    CHECK_EQ(chain_status(chain, NULL, 0, LEN, &st), 0);
    CHECK(st.kind == CHAIN_DATA && st.zero);
    CHECK_EQ(chain_close(chain, NULL), 0);
    CHECK(used("bottom") <= before + 64 * KIB);
}

CO_TEST(a_copy_takes_what_was_written)
{
    struct copy_opts opts = {.target_is_zero = true};
    struct err err = {0};

    make_two();
    make("copy", NULL, PREALLOC_OFF);
    struct chain *src = open_chain("mapped", false), *dst = open_chain("copy", true);
    CHECK_EQ(copy_chain(src, NULL, dst, &opts, &err), 0);
    CHECK_EQ(chain_close(src, NULL), 0);
    expect_mapped(dst);
    CHECK_EQ(chain_close(dst, NULL), 0);
    CHECK(used("copy") < MIB + SLACK);
}

/* ---- a guest that fills the holes meanwhile ---- */

#define GUESTS 4u

struct guest {
    struct chain *chain;
    uint64_t rng, first, end; /* sectors of its own */
    uint64_t *want;           /* stamp by sector */
    bool *stop;
};

SUSPENDS static int guest(void *arg)
{
    struct guest *g = arg;

    for (uint64_t stamp = 10; !*g->stop; stamp++) {
        uint64_t nr = 1 + rng_below(&g->rng, rng_below(&g->rng, 4) ? 16 : 256);
        uint64_t first = g->first + rng_below(&g->rng, g->end - g->first - nr);

        CHECK_EQ(rig_write(g->chain, first * RIG_SECTOR, nr * RIG_SECTOR, stamp), 0);
        for (uint64_t i = 0; i < nr; i++)
            g->want[first + i] = stamp;
        if (rng_below(&g->rng, 8) == 0)
            reactor_yield();
    }
    return 0;
}

SUSPENDS static int commit_under_guests(void *arg)
{
    struct guest *guests = arg;

    commit(guests->chain, 0, 1);
    *guests->stop = true;
    return 0;
}

CO_TEST(an_active_commit_misses_nothing_that_is_written_into_a_hole)
{
    uint64_t seed = test_seed(), nr = LEN / RIG_SECTOR;

    for (unsigned round = 0; round < 3; round++) {
        make("bottom", NULL, round == 1 ? PREALLOC_METADATA : PREALLOC_OFF);
        if (round == 2)
            put("bottom", 0, LEN, 1);
        make("top", "bottom", PREALLOC_METADATA);
        struct chain *chain = open_chain("top", true);
        uint64_t *want = calloc(nr, sizeof(*want));
        struct guest guests[GUESTS];
        struct co_group group;
        bool stop = false;

        co_group_init(&group);
        for (unsigned i = 0; i < GUESTS; i++) {
            guests[i] =
                (struct guest){chain, seed++, nr / GUESTS * i, nr / GUESTS * (i + 1), want, &stop};
            CHECK_EQ(co_group_spawn(&group, guest, &guests[i]), 0);
        }
        CHECK_EQ(co_group_spawn(&group, commit_under_guests, guests), 0);
        CHECK_EQ(co_group_wait(&group), 0);
        CHECK_EQ(chain_depth(chain), 1);
        uint8_t *view = rig_view(chain, NULL);
        for (uint64_t i = 0; i < nr; i++)
            CHECK_EQ(rig_stamp(view + i * RIG_SECTOR, i * RIG_SECTOR), want[i]);
        free(view);
        free(want);
        CHECK_EQ(chain_close(chain, NULL), 0);
    }
}
