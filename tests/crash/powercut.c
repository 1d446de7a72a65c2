/*
 * Power cuts at random moments while writers, zeroes, discards and flushes run at once.
 *
 * What a sector may hold after the cut: sectors.h. The image must check without corruption, leaks
 * aside, and go on working.
 *
 * The mutations leave a step of the engine's order out; each must be noticed.
 * VARVE_CUTS: cuts per configuration.
 */
#include "../model/keep.h"
#include "base/bits.h"
#include "qcow2/internal.h"
#include "rt/reactor.h"
#include "rt/sim.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "load.h"
#include "test.h"

#define WRITERS 6u

struct world {
    const struct config *cfg;
    uint64_t seed, rng;
    struct sectors sectors;
    struct blk *crash, *after; /* after: what survived */
    uint64_t dev_len;          /* of a volume that grows */
    struct image *img;
    struct blk_crash_report report;
    uint64_t dirty_slices, unlinked_tables, quarantined;
    bool quiet; /* a violation is counted, not reported */
    unsigned violations;
};

struct totals {
    uint64_t cuts, unflushed, lost, torn, dirty_slices, unlinked_tables, quarantined;
    unsigned violations;
};

static uint64_t pick(struct world *w, uint64_t n)
{
    return rng_below(&w->rng, n);
}

static void violation(struct world *w, const char *what, uint64_t a, uint64_t b)
{
    w->violations++;
    if (!w->quiet)
        test_fail(__FILE__, __LINE__, "%s, seed %llu: %s (%llu, %#llx)", w->cfg->name,
                  (unsigned long long)w->seed, what, (unsigned long long)a, (unsigned long long)b);
}

static const struct image_below *below_of(const struct world *w)
{
    return w->cfg->has_below ? &sectors_below : NULL;
}

/* ---- the load ---- */

static void record_cut(struct world *w)
{
    struct image *img = w->img;

    if (w->after)
        return;
    /* the first to notice: nothing happens between the power going and this */
    CHECK_EQ(blk_crash_cut(w->crash, w->seed, &w->after, &w->report), 0);
    w->dirty_slices = img->cache.dirty_bytes / img->slice_bytes;
    w->unlinked_tables = img->l1_dirty.len;
    w->quarantined = img->freed.len + img->ready.len;
}

static struct load load_of(struct world *w)
{
    return (struct load){.sectors = &w->sectors,
                         .img = w->img,
                         .below = below_of(w),
                         .rng = &w->rng,
                         .max_sectors = w->cfg->max_sectors,
                         .flushes = 3};
}

SUSPENDS static int writer(void *arg)
{
    struct world *w = arg;
    struct load load = load_of(w);

    for (unsigned i = 0; i < 200; i++) {
        if (load_op(&load) < 0) {
            if (sim_stopped())
                record_cut(w);
            else
                violation(w, "an operation failed with the power on", i, 0);
            break;
        }
        timer_sleep(pick(w, 2000000));
    }
    return 0;
}

/* An extension is durable when it returns, or is not there. */
SUSPENDS_UNCHECKED static int extend(void *ctx, uint64_t *len)
{
    struct world *w = ctx;

    if (*len) {
        timer_sleep(pick(w, 3000000));
        if (sim_stopped())
            return -EIO;
        w->dev_len = MAX(w->dev_len, align_up(*len, 64 * KIB));
    }
    *len = w->dev_len;
    return 0;
}

static struct blk *device(struct world *w, struct blk *child)
{
    if (!w->cfg->chunk)
        return keep_new(child, w->cfg->fixed_len);
    return keep_new_as(
        child,
        &(struct keep_opts){.fixed_len = true, .len = w->dev_len, .extend = extend, .ctx = w});
}

SUSPENDS static struct image *open_image(struct world *w, struct blk *blk, struct err *err)
{
    struct image_opts opts = {.writable = true,
                              .cache_bytes = w->cfg->cache_bytes,
                              .grow.chunk = w->cfg->chunk,
                              .prealloc_step = MIB};
    struct image *img;
    int rc = image_open(blk, &opts, &img, err);

    if (rc < 0)
        blk_close(blk);
    return rc < 0 ? NULL : img;
}

SUSPENDS static int until_the_cut(void *arg)
{
    struct world *w = arg;
    struct co_group group;

    CHECK_EQ(blk_crash_new(w->cfg->fixed_len, &w->crash), 0);
    if (load_old_data(w->crash, w->cfg->fixed_len) < 0)
        return 0;
    w->dev_len = w->cfg->chunk;
    struct blk *blk = device(w, w->crash);
    struct image_create_opts create = w->cfg->create;
    create.backing_name = w->cfg->has_below ? "below" : NULL;
    int rc = image_create(blk, &create, NULL);
    if (rc == 0)
        rc = blk_flush(blk);
    blk_close(blk);
    if (rc == 0)
        w->img = open_image(w, device(w, w->crash), NULL);
    if (!w->img) {
        CHECK(sim_stopped());
        blk_close(w->crash);
        return 0;
    }
    co_group_init(&group);
    for (unsigned i = 0; i < WRITERS; i++)
        CHECK_EQ(co_group_spawn(&group, writer, w), 0);
    CHECK_EQ(co_group_wait(&group), 0);
    record_cut(w);
    (void)image_close(w->img, NULL);
    blk_close(w->crash);
    return 0;
}

/* ---- after the reboot ---- */

SUSPENDS static void look_at_sectors(struct world *w)
{
    uint64_t words[SECTOR / 8];

    for (uint64_t s = 0; s < w->sectors.nr; s++) {
        IOV_ITER_BUF(it, vec, words, SECTOR);
        if (image_read(w->img, s * SECTOR, SECTOR, &it, below_of(w)) < 0) {
            violation(w, "a sector cannot be read", s, 0);
            continue;
        }
        for (unsigned i = 1; i < ARRAY_SIZE(words); i++)
            if (words[i] != words[0]) {
                violation(w, "a sector is of two pieces", s, words[i]);
                break;
            }
        bool ok = op_shown(&w->sectors, s, words[0]);
        if (!w->quiet && !ok)
            ops_print(&w->sectors, s);
        if (!ok)
            violation(w, "a sector holds what it must not", s, words[0]);
    }
}

static void print_finding(void *ctx, const char *line)
{
    struct world *w = ctx;

    if (!w->quiet && strncmp(line, "leaked", 6) != 0)
        fprintf(stderr, "  %s\n", line);
}

SUSPENDS static void check(struct world *w, struct blk *blk)
{
    struct image_opts opts = {.no_open_checks = true};
    struct image_check res;
    struct image *img;

    if (image_open(blk, &opts, &img, NULL) < 0) {
        violation(w, "the image does not open for the check", 0, 0);
        blk_close(blk);
        return;
    }
    if (image_check(img, &res, print_finding, w, NULL) < 0)
        violation(w, "the check fails", 0, 0);
    else if (res.corruptions || res.check_errors)
        violation(w, "the check finds corruption", res.corruptions, res.check_errors);
    (void)image_close(img, NULL);
}

SUSPENDS static int after_the_reboot(void *arg)
{
    struct world *w = arg;
    struct err err = {0};

    check(w, device(w, w->after));
    w->img = open_image(w, device(w, w->after), &err);
    if (!w->img) {
        violation(w, err_text(&err), 0, 0);
        blk_close(w->after);
        return 0;
    }
    look_at_sectors(w);
    struct load load = load_of(w);
    for (unsigned i = 0; i < 20 && !w->violations; i++) {
        int rc = load_op(&load);

        /* the cut's leaks may have filled a small volume */
        if (rc < 0 && !(rc == -ENOSPC && w->cfg->fixed_len))
            violation(w, "an operation after the reboot failed", i, (uint64_t)-rc);
    }
    if (image_close(w->img, &err) < 0)
        violation(w, err_text(&err), 0, 0);
    if (!w->violations)
        check(w, device(w, w->after));
    blk_close(w->after);
    return 0;
}

static void one_cut(const struct config *cfg, uint64_t seed, bool quiet, struct totals *t)
{
    struct world w = {.cfg = cfg, .seed = seed, .rng = seed * 2654435761u + 1, .quiet = quiet};
    uint64_t made = 60 + cfg->fixed_len / MIB;
    struct sim_opts opts = {.seed = seed, .stop_after_io = made + rng_below(&w.rng, 1500)};

    sectors_init(&w.sectors, cfg->create.virtual_len / SECTOR, cfg->has_below);
    CHECK_EQ(sim_run(&opts, until_the_cut, &w), 0);
    if (w.after) {
        opts.stop_after_io = 0;
        CHECK_EQ(sim_run(&opts, after_the_reboot, &w), 0);
        t->cuts++;
    }
    t->unflushed += w.report.unflushed_sectors;
    t->lost += w.report.lost_sectors;
    t->torn += w.report.torn_writes;
    t->dirty_slices += w.dirty_slices;
    t->unlinked_tables += w.unlinked_tables;
    t->quarantined += w.quarantined;
    t->violations += w.violations;
    sectors_fini(&w.sectors);
}

static unsigned cuts_wanted(unsigned usual)
{
    const char *s = getenv("VARVE_CUTS");

    return s ? (unsigned)atoi(s) : usual;
}

static const struct config configs[] = {
    {"64k", {.virtual_len = 2 * MIB}, 0, false, 0, 64},
    {"64k over", {.virtual_len = 2 * MIB}, 0, true, 0, 64},
    {"4k", {.virtual_len = MIB, .cluster_size = 4096}, 64 * KIB, false, 0, 32},
    {"512", {.virtual_len = 512 * KIB, .cluster_size = 512}, 64 * KIB, false, 0, 32},
    {"512 over",
     {.virtual_len = 512 * KIB, .cluster_size = 512, .refcount_bits = 64},
     64 * KIB,
     true,
     0,
     32},
    {"ext 128k",
     {.virtual_len = 2 * MIB, .cluster_size = 128 * KIB, .extended_l2 = true},
     0,
     true,
     0,
     64},
    {"ext 16k",
     {.virtual_len = MIB, .cluster_size = 16 * KIB, .extended_l2 = true, .refcount_bits = 1},
     64 * KIB,
     true,
     0,
     32},
    {"volume", {.virtual_len = 2 * MIB}, 0, false, 4 * MIB, 64},
    {"volume over", {.virtual_len = MIB, .cluster_size = 4096}, 64 * KIB, true, 1536 * KIB, 32},
    {"volume 512",
     {.virtual_len = 2 * MIB, .cluster_size = 512, .refcount_bits = 64},
     64 * KIB,
     false,
     12 * MIB,
     32},
    {"volume grows", {.virtual_len = 2 * MIB}, 0, false, 8 * MIB, 64, .chunk = 320 * KIB},
    {"volume grows 4k",
     {.virtual_len = 2 * MIB, .cluster_size = 4096},
     64 * KIB,
     true,
     6 * MIB,
     64,
     .chunk = 128 * KIB},
    {"volume ext",
     {.virtual_len = 2 * MIB,
      .cluster_size = 32 * KIB,
      .extended_l2 = true,
      .prealloc = PREALLOC_METADATA},
     0,
     true,
     4 * MIB,
     64},
};

/* Many tables on a volume with old data: where a step left out shows soonest. */
static const struct config mutation_configs[] = {
    {"volume 512",
     {.virtual_len = 4 * MIB, .cluster_size = 512, .refcount_bits = 64},
     64 * KIB,
     false,
     16 * MIB,
     32},
    {"volume 4k", {.virtual_len = 2 * MIB, .cluster_size = 4096}, 64 * KIB, true, 4 * MIB, 32},
    {"file 512",
     {.virtual_len = 4 * MIB, .cluster_size = 512, .refcount_bits = 64},
     64 * KIB,
     false,
     0,
     256},
};

TEST(flushed_data_survives_power_cuts)
{
    unsigned cuts = cuts_wanted(60);

    flush_mutation = FLUSH_AS_IS;
    for (const struct config *c = configs; c < configs + ARRAY_SIZE(configs); c++) {
        struct totals t = {0};

        for (unsigned i = 0; i < cuts; i++)
            one_cut(c, test_seed() + i, false, &t);
        printf(
            "  %-12s %3llu cuts: %llu unflushed sectors, %llu lost, %llu writes torn; %llu dirty "
            "slices, %llu tables not linked, %llu ranges in quarantine\n",
            c->name, (unsigned long long)t.cuts, (unsigned long long)t.unflushed,
            (unsigned long long)t.lost, (unsigned long long)t.torn,
            (unsigned long long)t.dirty_slices, (unsigned long long)t.unlinked_tables,
            (unsigned long long)t.quarantined);
        CHECK(t.cuts > cuts / 2 && t.lost > 0 && t.dirty_slices > 0);
    }
}

static void expect_noticed(enum flush_mutation m, const char *name)
{
    struct totals t = {0};
    unsigned i = 0;

    flush_mutation = m;
    for (; i < 4000 && t.violations == 0; i++)
        one_cut(&mutation_configs[i % ARRAY_SIZE(mutation_configs)], test_seed() + i, true, &t);
    flush_mutation = FLUSH_AS_IS;
    printf("  %-28s noticed after %u cuts\n", name, i);
    CHECK(t.violations > 0);
}

TEST(a_step_left_out_is_noticed)
{
    expect_noticed(FLUSH_SKIP_BEFORE_L2, "no flush before L2");
    expect_noticed(FLUSH_L1_FIRST, "L1 before its new table");
    expect_noticed(FLUSH_SKIP_REFCOUNTS, "refcounts not written");
    expect_noticed(FLUSH_SKIP_QUARANTINE, "no quarantine");
    expect_noticed(FLUSH_SKIP_BEFORE_REFTABLE, "no flush before reftable");
}
