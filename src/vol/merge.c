/*
 * Merging an image with the one it stands on, in this process, by the same jobs that a server runs.
 * The chain that is opened begins at the merged child, so nothing above it is touched: what the
 * child's own children see is the same at any instant.
 */
#include <stdio.h>
#include <string.h>
#include "base/check.h"
#include "chain/chain.h"
#include "job/job.h"
#include "rt/timer.h"
#include "vol/internal.h"

#define JOB_ID  "merge"
#define POLL_NS (10 * NSEC_PER_MSEC)

struct watch {
    const struct vol_ctx *ctx;
    enum job_state state;
    bool seen;
};

static void no_event(void *ctx, const struct job_info *info, enum job_event event)
{
}

static void look(void *arg, const struct job_info *info)
{
    struct watch *w = arg;

    w->state = info->state;
    w->seen = true;
    if (w->ctx->progress)
        w->ctx->progress(w->ctx->ctx, info->done_bytes, info->total_bytes);
}

/* Until it is concluded; a commit that is READY is completed. */
SUSPENDS static int run_job(const struct vol_ctx *ctx, struct jobs *jobs, struct err *err)
{
    struct watch w = {.ctx = ctx};
    bool completed = false;

    for (;;) {
        w.seen = false;
        jobs_each(jobs, look, &w);
        if (!w.seen || w.state == JOB_CONCLUDED || w.state == JOB_NULL)
            return job_wait(jobs, JOB_ID, err);
        if (w.state == JOB_READY && !completed) {
            int rc = job_complete(jobs, JOB_ID, err);

            if (rc < 0)
                return rc;
            completed = true;
            crash_point("merge-ready");
        }
        timer_sleep(POLL_NS);
    }
}

SUSPENDS static int run_merge(const struct vol_ctx *ctx, const struct pool *pool,
                              struct chain *chain, bool commit, const char *backing_name,
                              bool *ret_begun, struct err *err)
{
    struct job_opts opts = {
        .id = JOB_ID, .auto_finalize = true, .speed = pool->bwlimit, .backing_name = backing_name};
    struct layer *child = chain_layer(chain, 0), *snap = chain_layer(chain, 1);
    struct layer *below = chain_depth(chain) > 2 ? chain_layer(chain, 2) : NULL;
    struct jobs *jobs;

    if (!snap)
        return err_set(err, -EUCLEAN, "'%s' stands on nothing", layer_path(child));
    int rc = jobs_new(no_event, NULL, &jobs);
    if (rc < 0)
        return err_set(err, rc, "out of memory");
    rc = commit ? job_commit(jobs, chain, child, snap, &opts, err)
                : job_stream(jobs, chain, child, below, &opts, err);
    *ret_begun = rc == 0;
    crash_point("merge-started");
    if (rc == 0)
        rc = run_job(ctx, jobs, err);
    jobs_free(jobs);
    return rc;
}

SUSPENDS static int merge(const struct vol_ctx *ctx, const struct pool *pool, const char *path,
                          bool commit, const char *backing_name, bool *ret_begun, struct err *err)
{
    struct chain_opts opts = {.format = "qcow2", .writable = true, .grow = store_grow_opts(pool)};
    struct chain *chain;
    int rc = chain_open(path, &opts, &chain, err);

    *ret_begun = false;
    if (rc < 0)
        return rc;
    rc = run_merge(ctx, pool, chain, commit, backing_name, ret_begun, err);
    int close_rc = chain_close(chain, rc < 0 ? NULL : err);
    return rc < 0 ? rc : close_rc;
}

int merge_commit(const struct vol_ctx *ctx, const struct pool *pool, const char *child,
                 bool *ret_begun, struct err *err)
{
    return merge(ctx, pool, child, true, NULL, ret_begun, err);
}

int merge_stream(const struct vol_ctx *ctx, const struct pool *pool, const char *child,
                 const char *backing_name, struct err *err)
{
    bool begun;

    return merge(ctx, pool, child, false, backing_name, &begun, err);
}

int merge_direction(const struct cfile *child, const struct cfile *snap, bool served,
                    struct job_direction *ret, struct err *err)
{
    struct chain_opts opts = {.format = "qcow2", .no_lock = true};
    struct chain *chain;

    if (served) { /* its tables change under us: what the files occupy is near enough */
        ret->commit_bytes = (uint64_t)child->st.st_blocks * 512;
        ret->stream_bytes = (uint64_t)snap->st.st_blocks * 512;
        ret->commit = ret->commit_bytes <= ret->stream_bytes;
        return 0;
    }
    int rc = chain_open(child->path, &opts, &chain, err);
    if (rc < 0)
        return rc;
    rc = job_direction(chain, 1, ret);
    if (rc < 0)
        err_errno(err, rc, "read the maps of '%s' and what it stands on", child->path);
    chain_close(chain, NULL);
    return rc;
}

int merge_set_backing(const char *path, const char *name, const char *format, struct err *err)
{
    struct layer_opts opts = {.format = "qcow2", .writable = true};
    struct layer *layer;
    int rc = layer_open(path, &opts, &layer, err);

    if (rc < 0)
        return rc;
    rc = image_set_backing(layer_image(layer), name, format, err);
    int close_rc = layer_close(layer, rc < 0 ? NULL : err);
    return rc < 0 ? rc : close_rc;
}
