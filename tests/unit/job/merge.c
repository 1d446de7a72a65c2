/* What commit and stream make of lengths, zeroes, discards, raw bases and running guests. */
#include "base/bits.h"
#include "job/job.h"
#include "rig.h"
#include "rt/reactor.h"

static const struct job_opts job_auto = {.id = "j", .auto_finalize = true, .auto_dismiss = true};
/* in virtual time a job is as fast as memory: slow enough to be met by guests */
static const struct job_opts job_slow = {
    .id = "j", .speed = 32 * MIB, .auto_finalize = true, .auto_dismiss = true};

struct stack { /* top first */
    struct blk *dev[8];
    bool qcow2[8];
    unsigned nr;
    struct chain *chain;
    struct jobs *jobs;
};

SUSPENDS static void add(struct stack *s, const struct rig_shape *shape)
{
    struct blk *dev;

    CHECK_EQ(blk_mem_new(0, 1, &dev), 0);
    rig_create(dev, shape, s->nr ? "below" : NULL, "qcow2");
    memmove(s->dev + 1, s->dev, s->nr * sizeof(*s->dev));
    memmove(s->qcow2 + 1, s->qcow2, s->nr * sizeof(*s->qcow2));
    s->dev[0] = dev;
    s->qcow2[0] = !shape->raw;
    s->nr++;
}

SUSPENDS static void open_chain(struct stack *s)
{
    s->chain = rig_chain(s->dev, s->qcow2, s->nr);
    if (!s->jobs)
        CHECK_EQ(jobs_new(NULL, NULL, &s->jobs), 0);
}

SUSPENDS static void close_chain(struct stack *s)
{
    CHECK_EQ(chain_close(s->chain, NULL), 0);
    s->chain = NULL;
}

SUSPENDS static void write_top(struct stack *s, uint64_t off, uint64_t len, uint64_t stamp)
{
    open_chain(s);
    CHECK_EQ(rig_write(s->chain, off, len, stamp), 0);
    close_chain(s);
}

SUSPENDS static void end(struct stack *s)
{
    if (s->chain)
        close_chain(s);
    jobs_free(s->jobs);
    for (unsigned i = 0; i < s->nr; i++) {
        if (s->qcow2[i])
            CHECK_EQ(rig_check(s->dev[i], "layer"), 0);
        blk_close(s->dev[i]);
    }
}

/* Active or not, to its end. */
SUSPENDS static void commit(struct stack *s, unsigned top, unsigned base,
                            const struct job_opts *opts)
{
    struct err err = {0};

    CHECK_EQ(job_commit(s->jobs, s->chain, chain_layer(s->chain, top), chain_layer(s->chain, base),
                        &job_auto, &err),
             0);
    if (top == 0)
        while (job_complete(s->jobs, "j", NULL) == -EBUSY)
            reactor_yield();
    if (job_wait(s->jobs, "j", &err) < 0)
        test_fail(__FILE__, __LINE__, "commit: %s", err_text(&err));
}

SUSPENDS static void stream(struct stack *s, unsigned top, struct layer *base,
                            const struct job_opts *opts)
{
    struct err err = {0};

    CHECK_EQ(job_stream(s->jobs, s->chain, chain_layer(s->chain, top), base, opts, &err), 0);
    if (job_wait(s->jobs, "j", &err) < 0)
        test_fail(__FILE__, __LINE__, "stream: %s", err_text(&err));
}

/* Base 1 MiB, overlay grown to 3 MiB: nothing is lost, nothing shows through. */
SUSPENDS static void commit_into_shorter(bool raw, bool active)
{
    struct stack s = {0};

    add(&s, &(struct rig_shape){.raw = raw, .len = MIB, .cluster_size = 65536});
    write_top(&s, 0, MIB, 1);
    add(&s, &(struct rig_shape){.len = 3 * MIB, .cluster_size = 65536});
    write_top(&s, 64 * KIB, 64 * KIB, 2);
    write_top(&s, 2 * MIB, 64 * KIB, 3);
    if (!active)
        add(&s, &(struct rig_shape){.len = 3 * MIB, .cluster_size = 4096});
    open_chain(&s);
    rig_expect(s.chain, MIB, MIB, 0);
    commit(&s, active ? 0 : 1, active ? 1 : 2, &job_auto);
    CHECK_EQ(chain_len(s.chain), 3 * MIB);
    CHECK_EQ(layer_len(chain_layer(s.chain, chain_depth(s.chain) - 1)), 3 * MIB);
    for (unsigned round = 0; round < 2; round++) {
        rig_expect(s.chain, 0, 64 * KIB, 1);
        rig_expect(s.chain, 64 * KIB, 64 * KIB, 2);
        rig_expect(s.chain, 128 * KIB, MIB - 128 * KIB, 1);
        rig_expect(s.chain, MIB, MIB, 0);
        rig_expect(s.chain, 2 * MIB, 64 * KIB, 3);
        rig_expect(s.chain, 2 * MIB + 64 * KIB, MIB - 64 * KIB, 0);
    }
    end(&s);
}

CO_TEST(commit_grows_a_shorter_base)
{
    for (unsigned i = 0; i < 4; i++)
        commit_into_shorter(i & 1, i & 2);
}

CO_TEST(active_commit_keeps_the_tail_of_a_longer_base)
{
    struct stack s = {0};

    add(&s, &(struct rig_shape){.len = 3 * MIB, .cluster_size = 65536});
    write_top(&s, 0, 3 * MIB, 1);
    add(&s, &(struct rig_shape){.len = MIB, .cluster_size = 65536});
    write_top(&s, 0, 64 * KIB, 2);
    open_chain(&s);
    commit(&s, 0, 1, &job_auto);
    CHECK_EQ(chain_len(s.chain), 3 * MIB);
    rig_expect(s.chain, 0, 64 * KIB, 2);
    rig_expect(s.chain, 64 * KIB, 3 * MIB - 64 * KIB, 1);
    end(&s);
}

/* Seen from above, the short layer is zero past its end: it must stay so. */
CO_TEST(commit_of_a_short_middle_layer_hides_the_base_s_tail)
{
    struct stack s = {0};

    add(&s, &(struct rig_shape){.raw = true, .len = 3 * MIB});
    write_top(&s, 0, 3 * MIB, 1);
    add(&s, &(struct rig_shape){.len = MIB, .cluster_size = 65536});
    write_top(&s, 0, 64 * KIB, 2);
    add(&s, &(struct rig_shape){.len = 3 * MIB, .cluster_size = 65536});
    open_chain(&s);
    rig_expect(s.chain, MIB, 2 * MIB, 0);
    commit(&s, 1, 2, &job_auto);
    CHECK_EQ(chain_depth(s.chain), 2);
    rig_expect(s.chain, 0, 64 * KIB, 2);
    rig_expect(s.chain, 64 * KIB, MIB - 64 * KIB, 1);
    rig_expect(s.chain, MIB, 2 * MIB, 0);
    end(&s);
}

CO_TEST(stream_over_a_short_layer_keeps_zeroes_over_a_longer_base)
{
    struct stack s = {0};

    add(&s, &(struct rig_shape){.raw = true, .len = 3 * MIB});
    write_top(&s, 0, 3 * MIB, 1);
    add(&s, &(struct rig_shape){.len = MIB, .cluster_size = 65536});
    write_top(&s, 0, 64 * KIB, 2);
    add(&s, &(struct rig_shape){.len = 3 * MIB, .cluster_size = 65536});
    open_chain(&s);
    stream(&s, 0, chain_layer(s.chain, 2), &job_auto);
    CHECK_EQ(chain_depth(s.chain), 2);
    rig_expect(s.chain, 0, 64 * KIB, 2);
    rig_expect(s.chain, 64 * KIB, MIB - 64 * KIB, 1);
    rig_expect(s.chain, MIB, 2 * MIB, 0);
    stream(&s, 0, NULL, &job_auto);
    CHECK_EQ(chain_depth(s.chain), 1);
    rig_expect(s.chain, 0, 64 * KIB, 2);
    rig_expect(s.chain, 64 * KIB, MIB - 64 * KIB, 1);
    rig_expect(s.chain, MIB, 2 * MIB, 0);
    end(&s);
}

/* Zeroes of the overlay reach the base and free its space; no block of zeroes is written. */
SUSPENDS static void commit_zeroes(const struct rig_shape *base, bool active)
{
    struct stack s = {0};
    uint64_t bytes;

    add(&s, base);
    write_top(&s, 0, 4 * MIB, 1);
    add(&s, &(struct rig_shape){.len = 4 * MIB, .cluster_size = 65536});
    open_chain(&s);
    CHECK_EQ(chain_zero(s.chain, 0, MIB, BLK_MAY_UNMAP), 0);
    CHECK_EQ(chain_discard(s.chain, MIB, MIB), 0);
    CHECK_EQ(chain_zero(s.chain, 2 * MIB, 512 * KIB, 0), 0);
    CHECK_EQ(rig_write(s.chain, 3 * MIB, 64 * KIB, 2), 0);
    close_chain(&s);
    if (!active)
        add(&s, &(struct rig_shape){.len = 4 * MIB, .cluster_size = 65536});
    open_chain(&s);
    commit(&s, active ? 0 : 1, active ? 1 : 2, &job_auto);
    rig_expect(s.chain, 0, 2560 * KIB, 0);
    rig_expect(s.chain, 2560 * KIB, 512 * KIB, 1);
    rig_expect(s.chain, 3 * MIB, 64 * KIB, 2);
    rig_expect(s.chain, 3 * MIB + 64 * KIB, MIB - 64 * KIB, 1);
    struct layer *layer = chain_layer(s.chain, chain_depth(s.chain) - 1);
    CHECK_EQ(layer_allocated_bytes(layer, &bytes), 0);
    CHECK_EQ(bytes, 1536 * KIB);
    end(&s);
}

CO_TEST(zeroes_and_discards_reach_the_base)
{
    static const struct rig_shape bases[] = {
        {.len = 4 * MIB, .cluster_size = 65536},
        {.len = 4 * MIB, .cluster_size = 65536, .version = 2},
        {.len = 4 * MIB, .cluster_size = 16384, .extended_l2 = true},
        {.len = 4 * MIB, .raw = true},
    };

    for (unsigned i = 0; i < ARRAY_SIZE(bases); i++) {
        commit_zeroes(&bases[i], false);
        commit_zeroes(&bases[i], true);
    }
}

CO_TEST(direction_is_the_one_with_fewer_bytes)
{
    struct stack s = {0};
    struct job_direction dir;

    add(&s, &(struct rig_shape){.raw = true, .len = 4 * MIB});
    write_top(&s, 0, 4 * MIB, 1);
    add(&s, &(struct rig_shape){.len = 4 * MIB, .cluster_size = 65536});
    write_top(&s, 0, MIB, 2);
    add(&s, &(struct rig_shape){.len = 4 * MIB, .cluster_size = 65536});
    write_top(&s, 0, 2 * MIB, 3);
    open_chain(&s);
    CHECK_EQ(job_direction(s.chain, 1, &dir), 0);
    CHECK(!dir.commit);
    CHECK_EQ(dir.commit_bytes, 2 * MIB);
    CHECK_EQ(dir.stream_bytes, MIB);
    CHECK_EQ(job_direction(s.chain, 2, &dir), 0);
    CHECK(dir.commit);
    CHECK_EQ(dir.stream_bytes, 4 * MIB);
    end(&s);
}

CO_TEST(copy_chain_keeps_data_and_leaves_zeroes_out)
{
    struct stack s = {0}, t = {0};
    uint64_t bytes;

    add(&s, &(struct rig_shape){.raw = true, .len = 4 * MIB});
    write_top(&s, 0, MIB, 1);
    add(&s, &(struct rig_shape){.len = 4 * MIB, .cluster_size = 4096});
    write_top(&s, 512 * KIB, 4096, 2);
    open_chain(&s);
    CHECK_EQ(rig_write(s.chain, 2 * MIB, MIB, 0), 0); /* written zeroes */
    CHECK_EQ(chain_zero(s.chain, 0, 128 * KIB, 0), 0);
    add(&t, &(struct rig_shape){.len = 4 * MIB, .cluster_size = 65536});
    open_chain(&t);
    struct copy_opts opts = {.target_is_zero = true, .min_zero = 4096};
    CHECK_EQ(copy_chain(s.chain, NULL, t.chain, &opts, NULL), 0);
    rig_expect(t.chain, 0, 128 * KIB, 0);
    rig_expect(t.chain, 128 * KIB, 384 * KIB, 1);
    rig_expect(t.chain, 512 * KIB, 4096, 2);
    rig_expect(t.chain, 516 * KIB, 508 * KIB, 1);
    rig_expect(t.chain, MIB, 3 * MIB, 0);
    CHECK_EQ(layer_allocated_bytes(chain_layer(t.chain, 0), &bytes), 0);
    CHECK_EQ(bytes, MIB - 128 * KIB);
    /* a snapshot's view, over old content, zeroes too */
    CHECK_EQ(copy_chain(s.chain, chain_layer(s.chain, 1), t.chain, NULL, NULL), 0);
    rig_expect(t.chain, 0, MIB, 1);
    rig_expect(t.chain, MIB, 3 * MIB, 0);
    end(&s);
    end(&t);
}

/* ---- a guest that never stops ---- */

struct guest {
    struct chain *chain;
    struct ranges *ranges;
    uint64_t *want; /* stamp by sector */
    uint64_t nr_sectors, seed, next_stamp, ops;
    bool stop;
};

SUSPENDS static int guest(void *arg)
{
    struct guest *g = arg;
    struct range r;

    while (!g->stop) {
        uint64_t first = rng_below(&g->seed, g->nr_sectors - 256);
        uint64_t nr = 1 + rng_below(&g->seed, rng_below(&g->seed, 8) ? 16 : 256);
        uint64_t stamp = rng_below(&g->seed, 10) ? ++g->next_stamp : 0;
        uint64_t off = first * RIG_SECTOR, len = nr * RIG_SECTOR;

        range_lock(g->ranges, &r, off, len);
        if (stamp || rng_below(&g->seed, 2))
            CHECK_EQ(rig_write(g->chain, off, len, stamp), 0);
        else
            CHECK_EQ(chain_zero(g->chain, off, len, BLK_MAY_UNMAP), 0);
        for (uint64_t i = 0; i < nr; i++)
            g->want[first + i] = stamp;
        range_unlock(&r);
        g->ops++;
    }
    return 0;
}

SUSPENDS static void check_want(struct chain *chain, const struct guest *g)
{
    uint8_t *view = rig_view(chain, NULL);

    for (uint64_t i = 0; i < g->nr_sectors; i++)
        CHECK_EQ(rig_stamp(view + i * RIG_SECTOR, i * RIG_SECTOR), g->want[i]);
    free(view);
}

struct race {
    bool active_commit; /* else stream into the top */
    struct rig_shape base, top;
};

SUSPENDS static int run_race(void *arg)
{
    const struct race *race = arg;
    struct stack s = {0};
    struct ranges ranges;
    struct co_group group;

    add(&s, &race->base);
    write_top(&s, 0, race->base.len, 1);
    add(&s, &race->top);
    write_top(&s, MIB, MIB, 2);
    add(&s, &race->top);
    open_chain(&s);
    ranges_init(&ranges);
    struct guest g = {s.chain, &ranges, NULL, race->top.len / RIG_SECTOR, test_seed(), 100};
    g.want = calloc(g.nr_sectors, 8);
    for (uint64_t i = 0; i < g.nr_sectors; i++)
        g.want[i] = i * RIG_SECTOR / MIB == 1 ? 2 : 1;
    co_group_init(&group);
    for (unsigned i = 0; i < 8; i++)
        CHECK_EQ(co_group_spawn(&group, guest, &g), 0);
    if (race->active_commit)
        commit(&s, 0, 2, &job_slow);
    else
        stream(&s, 0, NULL, &job_slow);
    CHECK_EQ(chain_depth(s.chain), 1);
    uint64_t ops = g.ops;
    CHECK(ops > 20);
    while (g.ops < ops + 50) /* after the pivot too */
        reactor_yield();
    g.stop = true;
    CHECK_EQ(co_group_wait(&group), 0);
    check_want(s.chain, &g);
    close_chain(&s);
    /* the survivor alone, opened again */
    bool qcow2 = race->active_commit ? !race->base.raw : true;
    struct chain *again = rig_chain(&s.dev[race->active_commit ? 2 : 0], &qcow2, 1);
    check_want(again, &g);
    CHECK_EQ(chain_close(again, NULL), 0);
    free(g.want);
    end(&s);
    return 0;
}

static void race_all(bool active_commit)
{
    static const struct rig_shape shapes[] = {
        {.len = 4 * MIB, .cluster_size = 65536},
        {.len = 4 * MIB, .cluster_size = 4096},
        {.len = 4 * MIB, .cluster_size = 131072, .extended_l2 = true},
        {.len = 4 * MIB, .cluster_size = MIB},
        {.len = 4 * MIB, .raw = true},
    };

    for (unsigned i = 0; i < 5; i++)
        for (unsigned k = 0; k < 4; k++) {
            struct race race = {active_commit, shapes[i], shapes[k]};
            struct sim_opts opts = {.seed = test_seed() + i * 4 + k, .max_delay_ns = 100000};

            CHECK_EQ(sim_run(&opts, run_race, &race), 0);
        }
}

TEST(active_commit_converges_under_a_saturating_guest)
{
    race_all(true);
}

TEST(stream_never_puts_old_data_over_a_guest_s)
{
    race_all(false);
}
