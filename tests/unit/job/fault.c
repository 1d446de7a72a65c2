/*
 * The n-th request of a job to one device fails, n growing until the job gets through: it fails
 * with a text, and the chain reads as before - at once and opened again.
 */
#include "base/bits.h"
#include "job/job.h"
#include "rig.h"
#include "rt/reactor.h"

#define LAYERS 4u
#define DISK   (2 * MIB)

enum what { COMMIT, ACTIVE_COMMIT, STREAM_TOP, STREAM_MIDDLE, KINDS };

struct setup {
    enum what what;
    bool raw_base, sticky;
    unsigned reqs, device; /* which requests of which device fail */
    uint64_t nth;
    bool failed; /* the job did */
    uint64_t leaks;
};

struct stack {
    struct blk *mem[LAYERS], *fault[LAYERS]; /* top first; fault wraps a borrowed mem */
    bool qcow2[LAYERS];
    struct chain *chain;
    struct jobs *jobs;
    uint8_t *want;
};

SUSPENDS static void make_layers(struct stack *s, bool raw_base)
{
    for (int i = LAYERS - 1; i >= 0; i--) {
        bool raw = i == LAYERS - 1 && raw_base;

        CHECK_EQ(blk_mem_new(0, 1, &s->mem[i]), 0);
        rig_create(s->mem[i],
                   &(struct rig_shape){
                       .raw = raw,
                       .len = i == LAYERS - 1 ? MIB : DISK, /* the base has to grow */
                       .cluster_size = i % 2 ? 4096 : 65536,
                   },
                   i < (int)LAYERS - 1 ? "below" : NULL, "qcow2");
        s->qcow2[i] = !raw;
        struct chain *chain = rig_chain(s->mem + i, s->qcow2 + i, LAYERS - (unsigned)i);
        uint64_t stamp = 1 + (uint64_t)i;
        CHECK_EQ(rig_write(chain, (uint64_t)i * 64 * KIB, 256 * KIB, stamp), 0);
        CHECK_EQ(rig_write(chain, 700 * KIB + (uint64_t)i * 16 * KIB, 4096, stamp), 0);
        if (i < (int)LAYERS - 1) {
            CHECK_EQ(rig_write(chain, MIB + (uint64_t)i * 32 * KIB, 128 * KIB, stamp), 0);
            CHECK_EQ(chain_zero(chain, (uint64_t)i * 64 * KIB + 8192, 32 * KIB, BLK_MAY_UNMAP), 0);
        }
        CHECK_EQ(chain_close(chain, NULL), 0);
    }
}

SUSPENDS static void open_stack(struct stack *s)
{
    for (unsigned i = 0; i < LAYERS; i++)
        CHECK_EQ(blk_fault_new(rig_borrow(s->mem[i]), &s->fault[i]), 0);
    s->chain = rig_chain(s->fault, s->qcow2, LAYERS);
    s->want = rig_view(s->chain, NULL);
    CHECK_EQ(jobs_new(NULL, NULL, &s->jobs), 0);
}

SUSPENDS static void check_view(const struct stack *s, struct chain *chain, const char *when)
{
    uint8_t *view = rig_view(chain, NULL);

    for (uint64_t off = 0; off < DISK; off += RIG_SECTOR)
        if (memcmp(view + off, s->want + off, RIG_SECTOR) != 0)
            test_fail(__FILE__, __LINE__, "%s: the disk reads differently at %llu", when,
                      (unsigned long long)off);
    free(view);
}

static void note_state(void *ctx, const struct job_info *info)
{
    *(bool *)ctx = info->state < JOB_ABORTING;
}

static bool job_is_running(struct jobs *jobs)
{
    bool running = false;

    jobs_each(jobs, note_state, &running);
    return running;
}

SUSPENDS static int run_job(struct stack *s, enum what what, struct err *err)
{
    static const struct job_opts opts = {.id = "j", .auto_finalize = true};
    struct layer *l[LAYERS];
    int rc = 0;

    for (unsigned i = 0; i < LAYERS; i++)
        l[i] = chain_layer(s->chain, i);
    switch (what) {
    case COMMIT:
        rc = job_commit(s->jobs, s->chain, l[1], l[3], &opts, err);
        break;
    case ACTIVE_COMMIT:
        rc = job_commit(s->jobs, s->chain, l[0], l[2], &opts, err);
        break;
    case STREAM_TOP:
        rc = job_stream(s->jobs, s->chain, l[0], l[3], &opts, err);
        break;
    case STREAM_MIDDLE:
        rc = job_stream(s->jobs, s->chain, l[1], NULL, &opts, err);
        break;
    case KINDS:
        break;
    }
    CHECK_EQ(rc, 0);
    for (rc = -EBUSY; what == ACTIVE_COMMIT && rc < 0 && job_is_running(s->jobs);) {
        rc = job_complete(s->jobs, "j", err);
        reactor_yield();
    }
    rc = job_wait(s->jobs, "j", err);
    CHECK_EQ(job_dismiss(s->jobs, "j", NULL), 0);
    return rc;
}

/* What a chain consists of after the job, by device. */
SUSPENDS static void reopen_and_check(struct stack *s, const struct setup *set)
{
    struct blk *dev[LAYERS];
    bool qcow2[LAYERS];
    unsigned nr = 0;

    for (unsigned i = 0; i < LAYERS; i++) {
        static const bool gone[KINDS][LAYERS] = {
            [COMMIT] = {0, 1, 1, 0},
            [ACTIVE_COMMIT] = {1, 1, 0, 0},
            [STREAM_TOP] = {0, 1, 1, 0},
            [STREAM_MIDDLE] = {0, 0, 1, 1},
        };
        if (!set->failed && gone[set->what][i])
            continue;
        dev[nr] = s->mem[i];
        qcow2[nr++] = s->qcow2[i];
    }
    struct chain *chain = rig_chain(dev, qcow2, nr);
    check_view(s, chain, "opened again");
    CHECK_EQ(chain_close(chain, NULL), 0);
}

SUSPENDS static int run_setup(void *arg)
{
    struct setup *set = arg;
    struct stack s = {0};
    struct err err = {0};

    make_layers(&s, set->raw_base);
    open_stack(&s);
    blk_fault_fail(s.fault[set->device], set->reqs, set->nth, -EIO, set->sticky);
    int rc = run_job(&s, set->what, &err);
    set->failed = rc < 0;
    if (rc < 0)
        CHECK(strlen(err_text(&err)) > 10);
    if (!set->failed || set->what != ACTIVE_COMMIT)
        CHECK(chain_depth(s.chain) == (set->failed ? LAYERS : LAYERS - 2));
    for (unsigned i = 0; i < LAYERS; i++) {
        struct layer *layer = chain_layer(s.chain, i);
        if (layer)
            CHECK(!layer_is_pinned(layer));
    }
    blk_fault_clear(s.fault[set->device]);
    check_view(&s, s.chain, set->failed ? "after the failure" : "after the job");
    jobs_free(s.jobs);
    chain_close(s.chain, NULL); /* a device that failed a flush goes on failing */
    reopen_and_check(&s, set);
    for (unsigned i = 0; i < LAYERS; i++) {
        if (s.qcow2[i])
            set->leaks += rig_check(s.mem[i], "layer");
        blk_close(s.fault[i]);
        blk_close(s.mem[i]);
    }
    free(s.want);
    return 0;
}

static void fail_each(enum what what, unsigned reqs, bool sticky)
{
    for (unsigned device = 0; device < LAYERS; device++) {
        for (uint64_t nth = 1;; nth += nth > 40 ? 7 : 1) {
            struct setup set = {what, nth % 2, sticky, reqs, device, nth, false, 0};
            struct sim_opts opts = {.seed = test_seed() + nth};

            CHECK_EQ(sim_run(&opts, run_setup, &set), 0);
            if (!set.failed && nth > 8)
                break;
            CHECK(nth < 2000);
        }
    }
}

TEST(commit_fails_at_any_request)
{
    fail_each(COMMIT, BLK_REQ_ANY, false);
}

TEST(active_commit_fails_at_any_request)
{
    fail_each(ACTIVE_COMMIT, BLK_REQ_ANY, false);
}

TEST(stream_into_the_top_fails_at_any_request)
{
    fail_each(STREAM_TOP, BLK_REQ_ANY, false);
}

TEST(stream_into_the_middle_fails_at_any_request)
{
    fail_each(STREAM_MIDDLE, BLK_REQ_ANY, false);
}

TEST(a_device_that_went_away_fails_jobs_only)
{
    for (unsigned what = 0; what < KINDS; what++)
        fail_each((enum what)what, BLK_REQ_WRITE | BLK_REQ_FLUSH | BLK_REQ_ZERO | BLK_REQ_RESIZE,
                  true);
}
