/*
 * Commit: what the layers top..(above base) hold goes into base.
 *
 * Inactive: the merged layers are read-only and hide everything that is written to base, so the
 * chain reads the same at any instant. Order at the end: base durable; the header of the image
 * above `top` names base, durably; the layers leave the chain; they are closed.
 *
 * Active (top is the chain's top): one pass from start to end. The frontier is where the pass has
 * not begun to look. Invariants:
 *  1. A guest write holds its range from before it touches the top until base has it too, so base
 *     takes overlapping writes in the top's order.
 *  2. A write that begins below the frontier goes to both; one behind it to the top alone, and
 *     the pass, which waits for the range before it looks, will find it.
 * So one pass is enough, however fast the guest writes. Once it is done both read the same and
 * stay so: READY. The pivot flushes base with the gate closed and takes the layers out.
 *
 * A failure of the second write never reaches the guest: it ends the job.
 */
#include <assert.h>
#include "base/bits.h"
#include "base/check.h"
#include "job/internal.h"
#include "rt/reactor.h"

#define ZERO_PIECE (4 * MIB)   /* longest range zeroed, and kept locked, at once */
#define SCAN_PIECE (256 * MIB) /* the frontier goes ahead by so much */

struct guest_op { /* lives in chain_op.watcher */
    struct range range;
    bool both;
};
static_assert(sizeof(struct guest_op) <= sizeof(((struct chain_op *)0)->watcher), "watcher space");

/* ---- one range from the merged layers into base ---- */

SUSPENDS static int copy_data(struct job *job, uint64_t off, uint64_t len, unsigned flags)
{
    _cleanup_(buf_drop) struct buf b = {buf_get(len), len};

    if (!b.data)
        return job_fail(job, -ENOMEM, "copy", job->top, off);
    IOV_ITER_BUF(in, in_vec, b.data, len);
    int rc = chain_merge_read(job->chain, job->top, off, len, &in);
    if (rc < 0)
        return job_fail(job, rc, "read the view of", job->top, off);
    IOV_ITER_BUF(out, out_vec, b.data, len);
    rc = chain_merge_write(job->chain, job->base, off, len, &out, flags);
    return rc < 0 ? job_fail(job, rc, "write", job->base, off) : 0;
}

/* What base would have to get at off: EXTENT_UNALLOCATED where there is nothing to do, also where
 * it reads as zero already. */
SUSPENDS static int commit_map(struct job *job, uint64_t off, uint64_t len, struct extent *ret)
{
    uint64_t unit = copy_hole_unit(job->base);
    int rc = chain_merge_map(job->chain, job->top, job->base, off, len, unit, ret);
    bool zero = false;

    if (rc < 0)
        return job_fail(job, rc, "read the map of", job->top, off);
    if (ret->kind != EXTENT_ZERO)
        return 0;
    rc = chain_merge_is_zero(job->chain, job->base, off, ret->len, unit, &zero, &ret->len);
    if (rc < 0)
        return job_fail(job, rc, "read the map of", job->base, off);
    if (zero)
        ret->kind = EXTENT_UNALLOCATED;
    return 0;
}

/* Neighbouring data extents are copied as one: *len grows up to end. */
SUSPENDS static int data_run(struct job *job, uint64_t off, uint64_t end, uint64_t *len)
{
    while (off + *len < end) {
        struct extent next;
        int rc = commit_map(job, off + *len, end - off - *len, &next);

        if (rc < 0)
            return rc;
        if (next.kind != EXTENT_DATA && next.kind != EXTENT_COMPRESSED)
            break;
        *len += next.len;
    }
    return 0;
}

SUSPENDS static int copy_extent(struct job *job, uint64_t off, uint64_t len, unsigned flags,
                                uint64_t *ret_len)
{
    struct extent ext;
    int rc = commit_map(job, off, len, &ext);

    if (rc < 0)
        return rc;
    *ret_len = ext.len;
    switch (ext.kind) {
    case EXTENT_UNALLOCATED:
        /* what made base read as zero earlier need not be durable */
        return flags & BLK_FUA ? chain_merge_flush(job->base) : 0;
    case EXTENT_ZERO:
        *ret_len = MIN(ext.len, ZERO_PIECE);
        rc = chain_merge_zero(job->chain, job->base, off, *ret_len, flags | BLK_MAY_UNMAP);
        return rc < 0 ? job_fail(job, rc, "write zeroes to", job->base, off) : 0;
    case EXTENT_DATA:
    case EXTENT_COMPRESSED:
        break;
    }
    rc = data_run(job, off, off + len, ret_len);
    if (rc == 0)
        rc = copy_data(job, off, *ret_len, flags);
    return rc;
}

SUSPENDS static int copy_range(struct job *job, uint64_t off, uint64_t len, unsigned flags)
{
    while (len > 0) {
        uint64_t n = 0;
        int rc = copy_extent(job, off, MIN(len, COPY_STEP_MAX), flags, &n);

        if (rc < 0)
            return rc;
        off += n;
        len -= n;
    }
    return 0;
}

/* ---- the pass ---- */

SUSPENDS static int commit_scan(void *ctx, uint64_t off, uint64_t len, bool *ret_skip,
                                uint64_t *ret_len)
{
    struct job *job = ctx;
    struct extent ext;

    chain_work_enter(job->chain);
    if (job->active) {
        len = MIN(len, SCAN_PIECE);
        job->frontier = MAX(job->frontier, off + len);
        range_barrier(&job->ranges, off, len);
    }
    int rc = commit_map(job, off, len, &ext);
    chain_work_leave(job->chain);
    if (rc < 0)
        return rc;
    *ret_skip = ext.kind == EXTENT_UNALLOCATED;
    *ret_len = ext.len;
    return 0;
}

SUSPENDS static int commit_range(struct job *job, uint64_t off, uint64_t len)
{
    return copy_range(job, off, len, 0);
}

SUSPENDS static int commit_step(void *ctx, uint64_t off, uint64_t len)
{
    return job_step(ctx, off, len, commit_range);
}

/* ---- guest writes during an active commit ---- */

SUSPENDS static void guest_before(void *ctx, struct chain_op *op)
{
    struct job *job = ctx;
    struct guest_op *g = (struct guest_op *)op->watcher;

    range_lock(&job->ranges, &g->range, op->off, op->len);
    g->both = op->off < job->frontier;
}

SUSPENDS static int mirror_op(struct job *job, const struct chain_op *op, int top_rc)
{
    unsigned flags = job->synced ? op->flags & BLK_FUA : 0;

    /* whatever the top made of it, base gets the same */
    if (top_rc < 0 || op->kind != CHAIN_OP_WRITE)
        return copy_range(job, op->off, op->len, flags);
    struct iov_iter data = *op->iov;
    int rc = chain_merge_write(job->chain, job->base, op->off, op->len, &data, flags);
    return rc < 0 ? job_fail(job, rc, "write", job->base, op->off) : 0;
}

SUSPENDS static void guest_after(void *ctx, struct chain_op *op, int rc)
{
    struct job *job = ctx;
    struct guest_op *g = (struct guest_op *)op->watcher;

    if (g->both && job->mirror_rc == 0) {
        int mirror_rc = mirror_op(job, op, rc);

        if (mirror_rc < 0 && job->mirror_rc == 0) {
            job->mirror_rc = mirror_rc;
            co_cond_broadcast(&job->kick);
        }
    }
    range_unlock(&g->range);
}

/* From READY on base may become the disk at any moment: what is flushed is durable there too. */
SUSPENDS static int guest_flush(void *ctx)
{
    struct job *job = ctx;

    if (!job->synced || job->mirror_rc < 0)
        return 0;
    int rc = chain_merge_flush(job->base);
    if (rc < 0) {
        job->mirror_rc = job_fail(job, rc, "flush", job->base, 0);
        co_cond_broadcast(&job->kick);
    }
    return 0;
}

/* ---- start, run, finish ---- */

/* A raw volume that is too short is filled with zeroes first: with the chain frozen guests would
 * wait for that. */
SUSPENDS static int ready_base(struct job *job, struct err *err)
{
    if (layer_image(job->base) || !blk_is_extendable(layer_blk(job->base)) ||
        layer_len(job->base) >= layer_len(job->top))
        return 0;
    int rc = layer_reopen(job->base, true, err);
    if (rc < 0)
        return rc;
    job->started = true; /* it is to be read-only again */
    return chain_ready_layer(job->base, layer_len(job->top), err);
}

SUSPENDS static int commit_start(struct job *job, struct err *err)
{
    job->base_was_writable = layer_is_writable(job->base);
    int rc = ready_base(job, err);

    if (rc < 0)
        return rc;
    chain_freeze(job->chain);
    rc = layer_reopen(job->base, true, err);
    if (rc == 0) {
        job->started = true;
        if (layer_len(job->base) < layer_len(job->top))
            rc = chain_grow_layer(job->chain, job->base, layer_len(job->top), err);
    }
    if (rc == 0 && job->active) {
        job->watch = (struct chain_watch){guest_before, guest_after, guest_flush, job};
        chain_set_watch(job->chain, &job->watch);
    }
    job_note_stall(job, chain_thaw(job->chain));
    return rc;
}

/* A kill behind READY may leave base as the disk: its answered writes survive as the top's do. */
SUSPENDS static int start_ack(struct job *job)
{
    chain_freeze(job->chain);
    int rc = chain_ack_layer(job->chain, job->base, NULL);
    job_note_stall(job, chain_thaw(job->chain));
    return rc < 0 ? job_fail(job, rc, "begin the journal of", job->base, 0) : 0;
}

/* Both are the same, durably: from READY on whoever opens base finds all that was ever flushed,
 * and with a journal all that was answered. Waits for job_complete. */
SUSPENDS static int wait_ready(struct job *job)
{
    job->synced = true;
    int flush_rc = chain_merge_flush(job->base);
    if (flush_rc < 0)
        return job_fail(job, flush_rc, "flush", job->base, 0);
    int ack_rc = start_ack(job);
    if (ack_rc < 0)
        return ack_rc;
    job_set_state(job, JOB_READY);
    job_event(job, JOB_EVENT_READY);
    while (!job->complete_wanted) {
        int rc = job_checkpoint(job);

        if (rc < 0)
            return rc;
        if (!job->complete_wanted)
            co_cond_wait(&job->kick, NULL);
    }
    return job_checkpoint(job);
}

SUSPENDS static int commit_run(struct job *job)
{
    uint64_t end = layer_len(job->top);

    /* seen from above, `top` is zero past its end: what a longer base has there must go */
    if (!job->active)
        end = MAX(end, layer_len(job->base));
    job->total = end;
    struct copy_loop loop = {
        .end = end,
        .chunk = copy_chunk(layer_cluster(job->base)),
        .parallel = COPY_PARALLEL,
        .scan = commit_scan,
        .copy = commit_step,
        .pace = job_pace,
        .progress = job_progress,
        .ctx = job,
    };
    int rc = copy_run(&loop);
    if (rc == 0 && job->active) {
        job->frontier = UINT64_MAX;
        rc = wait_ready(job);
    }
    /* the long part of making it durable, while guests go on */
    if (rc == 0) {
        rc = chain_merge_flush(job->base);
        if (rc < 0)
            job_fail(job, rc, "flush", job->base, 0);
    }
    return rc;
}

static struct layer *last_merged(const struct job *job)
{
    return layer_upper(job->base);
}

/* The image above gets base as its backing file. Frozen; on failure nothing has changed. */
SUSPENDS static int relink_upper(struct job *job, struct err *err)
{
    _cleanup_(freep) char *name = NULL;
    struct layer *upper = layer_upper(job->top);
    bool was_writable = layer_is_writable(upper);
    int rc = job_backing_name(job, upper, job->base, &name, err);

    if (rc == 0)
        rc = layer_reopen(upper, true, err);
    if (rc < 0)
        return rc;
    rc = layer_set_backing(upper, name, layer_format(job->base), err);
    layer_reopen(upper, was_writable, NULL);
    return rc;
}

SUSPENDS static int finish_frozen(struct job *job, struct err *err)
{
    int rc = job_check_unused(job->top, job->base, err);

    if (rc < 0)
        return rc;
    if (!job->active) {
        rc = relink_upper(job, err);
        /* it stays writable if this fails, which harms nobody: the merge itself is done */
        if (rc == 0)
            layer_reopen(job->base, job->base_was_writable, NULL);
        return rc;
    }
    if (job->mirror_rc < 0)
        return job->mirror_rc;
    rc = chain_merge_flush(job->base);
    if (rc < 0)
        return err_errno(err, rc, "flush '%s'", layer_path(job->base));
    chain_set_watch(job->chain, NULL);
    return 0;
}

SUSPENDS static int commit_finish(struct job *job, struct err *err)
{
    struct layer *upper = layer_upper(job->top);
    int rc = chain_merge_flush(job->base);

    if (rc < 0)
        return err_errno(err, rc, "flush '%s'", layer_path(job->base));
    /* its header is written with the gate closed: leave that flush little to do */
    if (upper && layer_is_writable(upper))
        (void)chain_merge_flush(upper);
    chain_freeze(job->chain);
    rc = finish_frozen(job, err);
    if (rc < 0) {
        job_note_stall(job, chain_thaw(job->chain));
        return rc;
    }
    chain_unpin(job->top, job->base);
    job_drop_layers(job, job->top, last_merged(job));
    return 0;
}

SUSPENDS static void commit_clean(struct job *job)
{
    chain_freeze(job->chain);
    if (job->active)
        chain_set_watch(job->chain, NULL);
    if (job->started)
        layer_reopen(job->base, job->base_was_writable, NULL);
    chain_unpin(job->top, job->base);
    job_note_stall(job, chain_thaw(job->chain));
}

static const struct job_ops commit_ops = {commit_start, commit_run, commit_finish, commit_clean};

static bool is_below(const struct layer *top, const struct layer *base)
{
    for (const struct layer *l = layer_lower(top); l; l = layer_lower(l))
        if (l == base)
            return true;
    return false;
}

int job_commit(struct jobs *jobs, struct chain *chain, struct layer *top, struct layer *base,
               const struct job_opts *opts, struct err *err)
{
    if (!chain_is_writable(chain))
        return err_set(err, -EROFS, "'%s' is open read-only", layer_path(chain_layer(chain, 0)));
    if (layer_chain(top) != chain || layer_chain(base) != chain || !is_below(top, base))
        return err_set(err, -EINVAL, "'%s' is not below '%s'", layer_path(base), layer_path(top));
    int rc = job_check_unused(top, base, err);
    if (rc == 0)
        rc = chain_pin(chain, top, base, err);
    if (rc < 0)
        return rc;
    struct job proto = {
        .type = JOB_COMMIT,
        .ops = &commit_ops,
        .chain = chain,
        .top = top,
        .base = base,
        .active = top == chain_layer(chain, 0),
        .total = layer_len(top),
    };
    rc = job_start(jobs, &proto, opts, err);
    if (rc < 0)
        chain_unpin(top, base);
    return rc;
}
