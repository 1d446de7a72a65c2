/* States, events, verbs and rate of jobs, in virtual time. */
#include <stdio.h>
#include "base/bits.h"
#include "job/job.h"
#include "rig.h"
#include "rt/reactor.h"
#include "rt/timer.h"

struct bench {
    struct blk *dev[3]; /* top first */
    struct chain *chain;
    struct jobs *jobs;
    char log[1024]; /* events, as words */
};

static void note(void *ctx, const struct job_info *info, enum job_event event)
{
    static const char *const names[] = {"", "READY", "COMPLETED", "CANCELLED", "ERROR"};
    struct bench *b = ctx;
    size_t used = strlen(b->log);

    snprintf(b->log + used, sizeof(b->log) - used, "%s ",
             event == JOB_EVENT_STATE ? job_state_name(info->state) : names[event]);
}

#define DISK (8 * MIB)

SUSPENDS static void bench_open(struct bench *b)
{
    static const bool qcow2[3] = {true, true, true};

    *b = (struct bench){0};
    for (int i = 2; i >= 0; i--) {
        CHECK_EQ(blk_mem_new(0, 1, &b->dev[i]), 0);
        rig_create(b->dev[i], &(struct rig_shape){.len = DISK, .cluster_size = 65536},
                   i < 2 ? "below" : NULL, "qcow2");
        struct chain *chain = rig_chain(b->dev + i, qcow2, (unsigned)(3 - i));
        CHECK_EQ(rig_write(chain, (uint64_t)i * MIB, 4 * MIB, (uint64_t)i + 1), 0);
        CHECK_EQ(chain_close(chain, NULL), 0);
    }
    b->chain = rig_chain(b->dev, qcow2, 3);
    CHECK_EQ(jobs_new(note, b, &b->jobs), 0);
}

SUSPENDS static void bench_check_view(struct bench *b)
{
    for (uint64_t mib = 0; mib < 8; mib++)
        rig_expect(b->chain, mib * MIB, MIB, mib < 4 ? 1 : mib < 5 ? 2 : mib < 6 ? 3 : 0);
}

SUSPENDS static void bench_close(struct bench *b)
{
    jobs_free(b->jobs);
    bench_check_view(b);
    CHECK_EQ(chain_close(b->chain, NULL), 0);
    for (unsigned i = 0; i < 3; i++) {
        CHECK_EQ(rig_check(b->dev[i], "layer"), 0);
        blk_close(b->dev[i]);
    }
}

SUSPENDS static void start_commit(struct bench *b, unsigned index, const struct job_opts *opts)
{
    struct err err = {0};

    if (job_commit(b->jobs, b->chain, chain_layer(b->chain, index),
                   chain_layer(b->chain, index + 1), opts, &err) < 0)
        test_fail(__FILE__, __LINE__, "commit: %s", err_text(&err));
}

static const struct job_opts job_auto = {.id = "j", .auto_finalize = true, .auto_dismiss = true};

SUSPENDS static int commit_events(void *arg)
{
    struct bench *b = arg;

    bench_open(b);
    start_commit(b, 1, &job_auto);
    CHECK_EQ(job_wait(b->jobs, "j", NULL), 0);
    CHECK_STR(b->log, "created running waiting pending COMPLETED concluded null ");
    CHECK_EQ(chain_depth(b->chain), 2);
    CHECK_EQ(job_wait(b->jobs, "j", NULL), -ENOENT);
    bench_close(b);
    return 0;
}

SUSPENDS static int active_events(void *arg)
{
    struct bench *b = arg;
    struct err err = {0};

    bench_open(b);
    start_commit(b, 0, &job_auto);
    CHECK_EQ(job_complete(b->jobs, "j", &err), -EBUSY);
    while (!strstr(b->log, "READY"))
        timer_sleep(NSEC_PER_MSEC);
    CHECK_EQ(job_pause(b->jobs, "j", NULL), 0);
    timer_sleep(NSEC_PER_MSEC);
    CHECK_EQ(job_complete(b->jobs, "j", &err), -EBUSY); /* standby */
    CHECK_EQ(job_resume(b->jobs, "j", NULL), 0);
    timer_sleep(NSEC_PER_MSEC);
    CHECK_EQ(chain_depth(b->chain), 3);
    CHECK_EQ(job_complete(b->jobs, "j", NULL), 0);
    CHECK_EQ(job_wait(b->jobs, "j", NULL), 0);
    CHECK_STR(b->log, "created running ready READY standby ready waiting pending COMPLETED "
                      "concluded null ");
    CHECK_EQ(chain_depth(b->chain), 2);
    CHECK_EQ(rig_write(b->chain, 0, 512, 1), 0); /* the base is the disk now */
    bench_close(b);
    return 0;
}

SUSPENDS static int manual_ends(void *arg)
{
    struct bench *b = arg;
    struct job_opts opts = {.id = "j"};

    bench_open(b);
    CHECK_EQ(job_stream(b->jobs, b->chain, chain_layer(b->chain, 0), NULL, &opts, NULL), 0);
    CHECK(jobs_busy(b->jobs, b->chain));
    CHECK_EQ(job_stream(b->jobs, b->chain, chain_layer(b->chain, 0), NULL, &opts, NULL), -EBUSY);
    while (!strstr(b->log, "pending"))
        timer_sleep(NSEC_PER_MSEC);
    CHECK_EQ(chain_depth(b->chain), 3);
    CHECK_EQ(job_dismiss(b->jobs, "j", NULL), -EBUSY);
    CHECK_EQ(job_finalize(b->jobs, "j", NULL), 0);
    CHECK_EQ(job_wait(b->jobs, "j", NULL), 0);
    CHECK_EQ(chain_depth(b->chain), 1);
    CHECK(!jobs_busy(b->jobs, b->chain));
    CHECK_EQ(job_finalize(b->jobs, "j", NULL), -EBUSY);
    CHECK_EQ(job_dismiss(b->jobs, "j", NULL), 0);
    CHECK_EQ(job_dismiss(b->jobs, "j", NULL), -ENOENT);
    CHECK_STR(b->log, "created running waiting pending COMPLETED concluded null ");
    bench_close(b);
    return 0;
}

/* 4 MiB at 1 MiB/s take about four seconds; a pause stops it; a cancel ends it at once. */
SUSPENDS static int rate_and_cancel(void *arg)
{
    struct bench *b = arg;
    struct job_opts opts = {.id = "j", .speed = MIB, .auto_finalize = true, .auto_dismiss = true};

    bench_open(b);
    uint64_t start = reactor_now();
    start_commit(b, 1, &opts);
    CHECK_EQ(job_wait(b->jobs, "j", NULL), 0);
    uint64_t took = reactor_now() - start;
    CHECK(took > 3 * NSEC_PER_SEC && took < 5 * NSEC_PER_SEC);

    b->log[0] = 0;
    opts.speed = 64 * KIB;
    start_commit(b, 0, &opts);
    timer_sleep(NSEC_PER_SEC);
    CHECK_EQ(job_pause(b->jobs, "j", NULL), 0);
    CHECK_EQ(job_pause(b->jobs, "j", NULL), -EBUSY);
    timer_sleep(100 * NSEC_PER_SEC);
    CHECK_EQ(chain_depth(b->chain), 2);
    CHECK_EQ(job_resume(b->jobs, "j", NULL), 0);
    CHECK_EQ(job_resume(b->jobs, "j", NULL), -EBUSY);
    start = reactor_now();
    CHECK_EQ(job_cancel(b->jobs, "j", false, NULL), 0);
    struct err err = {0};
    if (job_wait(b->jobs, "j", &err) != -ECANCELED)
        test_fail(__FILE__, __LINE__, "cancel: %s", err_text(&err));
    CHECK(reactor_now() - start < NSEC_PER_SEC / 10);
    CHECK_STR(b->log, "created running paused aborting CANCELLED concluded null ");
    CHECK_EQ(chain_depth(b->chain), 2);

    /* a new speed counts at once */
    start_commit(b, 0, &opts);
    timer_sleep(NSEC_PER_SEC);
    start = reactor_now();
    CHECK_EQ(job_set_speed(b->jobs, "j", 0, NULL), 0);
    b->log[0] = 0;
    while (!strstr(b->log, "READY"))
        timer_sleep(NSEC_PER_MSEC);
    CHECK(reactor_now() - start < NSEC_PER_SEC);
    bench_close(b); /* jobs_free cancels it */
    return 0;
}

SUSPENDS static int refusals(void *arg)
{
    struct bench *b = arg;
    struct err err = {0};
    struct layer *top, *mid, *base;

    bench_open(b);
    top = chain_layer(b->chain, 0);
    mid = chain_layer(b->chain, 1);
    base = chain_layer(b->chain, 2);
    CHECK_EQ(job_commit(b->jobs, b->chain, base, top, &job_auto, &err), -EINVAL);
    CHECK_EQ(job_commit(b->jobs, b->chain, mid, mid, &job_auto, &err), -EINVAL);
    CHECK_EQ(job_stream(b->jobs, b->chain, mid, base, &job_auto, &err), -EINVAL);
    CHECK_EQ(job_stream(b->jobs, b->chain, base, NULL, &job_auto, &err), -EINVAL);
    layer_use(mid);
    CHECK_EQ(job_commit(b->jobs, b->chain, mid, base, &job_auto, &err), -EBUSY);
    CHECK_EQ(job_commit(b->jobs, b->chain, top, base, &job_auto, &err), -EBUSY);
    CHECK_EQ(job_stream(b->jobs, b->chain, top, NULL, &job_auto, &err), -EBUSY);
    layer_unuse(mid);
    /* a view opened while the job runs stops its end, not the chain */
    start_commit(b, 1, &job_auto);
    layer_use(mid);
    CHECK_EQ(job_wait(b->jobs, "j", &err), -EBUSY);
    layer_unuse(mid);
    CHECK_EQ(chain_depth(b->chain), 3);
    bench_check_view(b);
    /* what a job merges at the top cannot be pushed down or resized meanwhile */
    struct job_opts slow = {.id = "slow", .speed = 1024, .auto_dismiss = true};
    CHECK_EQ(job_commit(b->jobs, b->chain, top, mid, &slow, &err), 0);
    CHECK_EQ(chain_resize(b->chain, 2 * DISK, &err), -EBUSY);
    CHECK_EQ(job_commit(b->jobs, b->chain, mid, base, &job_auto, &err), -EBUSY);
    CHECK_EQ(job_cancel(b->jobs, "slow", true, NULL), 0);
    CHECK_EQ(job_wait(b->jobs, "slow", NULL), -ECANCELED);
    bench_close(b);
    return 0;
}

static void run(int (*fn)(void *))
{
    struct bench b;
    struct sim_opts opts = {.seed = test_seed()};

    CHECK_EQ(sim_run(&opts, fn, &b), 0);
}

TEST(commit_goes_through_its_states)
{
    run(commit_events);
}

TEST(active_commit_waits_ready_and_pivots)
{
    run(active_events);
}

TEST(finalize_and_dismiss_by_hand)
{
    run(manual_ends);
}

TEST(rate_pause_and_cancel)
{
    run(rate_and_cancel);
}

TEST(refuses_what_cannot_be_merged)
{
    run(refusals);
}
