/*
 * Stream: what the layers below `top` down to, but without, `base` hold and top does not goes into
 * top.
 *
 * The chain reads the same at any instant: top gets only what it shows already. If top is the
 * chain's top, a copy holds its range against guest writes while it looks, reads and writes, so it
 * never puts older data over a guest's; top never gives an allocated cluster back to "unallocated",
 * so what was skipped stays skipped.
 *
 * Order at the end: top durable; its header names base (or none), durably; the layers leave the
 * chain; they are closed.
 */
#include <assert.h>
#include "base/bits.h"
#include "base/check.h"
#include "job/internal.h"
#include "rt/reactor.h"

static_assert(sizeof(struct range) <= sizeof(((struct chain_op *)0)->watcher), "watcher space");

#define ZERO_PIECE (4 * MIB)

/* Where the layers that go read as zero, and what stays below reads as zero too: nothing. */
SUSPENDS static int drop_needless_zero(struct job *job, uint64_t off, uint64_t unit,
                                       struct extent *ext)
{
    bool zero;
    uint64_t len;
    int rc = chain_merge_is_zero(job->chain, job->base, off, ext->len, unit, &zero, &len);

    if (rc < 0)
        return job_fail(job, rc, "read the map of", job->base, off);
    ext->len = len;
    if (zero)
        ext->kind = EXTENT_UNALLOCATED;
    return 0;
}

/* What top would have to get at off: EXTENT_UNALLOCATED where there is nothing to do. */
SUSPENDS static int stream_map(struct job *job, uint64_t off, uint64_t len, struct extent *ret)
{
    struct layer *below = layer_lower(job->top);
    uint64_t unit = copy_hole_unit(job->top);
    int rc = chain_merge_map(job->chain, job->top, below, off, len, 0, ret);

    if (rc < 0)
        return job_fail(job, rc, "read the map of", job->top, off);
    if (ret->kind != EXTENT_UNALLOCATED) {
        ret->kind = EXTENT_UNALLOCATED;
        return 0;
    }
    rc = chain_merge_map(job->chain, below, job->base, off, ret->len, unit, ret);
    if (rc < 0)
        return job_fail(job, rc, "read the map of", below, off);
    return ret->kind == EXTENT_ZERO ? drop_needless_zero(job, off, unit, ret) : 0;
}

SUSPENDS static int stream_data(struct job *job, uint64_t off, uint64_t len)
{
    struct layer *below = layer_lower(job->top);
    _cleanup_(buf_drop) struct buf b = {buf_get(len), len};

    if (!b.data)
        return job_fail(job, -ENOMEM, "copy", job->top, off);
    IOV_ITER_BUF(in, in_vec, b.data, len);
    int rc = chain_merge_read(job->chain, below, off, len, &in);
    if (rc < 0)
        return job_fail(job, rc, "read the view of", below, off);
    IOV_ITER_BUF(out, out_vec, b.data, len);
    rc = chain_merge_write(job->chain, job->top, off, len, &out, 0);
    return rc < 0 ? job_fail(job, rc, "write", job->top, off) : 0;
}

SUSPENDS static int stream_extent(struct job *job, uint64_t off, uint64_t len, uint64_t *ret_len)
{
    struct extent ext;
    int rc = stream_map(job, off, len, &ext);

    if (rc < 0)
        return rc;
    *ret_len = ext.len;
    if (ext.kind == EXTENT_UNALLOCATED)
        return 0;
    if (ext.kind != EXTENT_ZERO)
        return stream_data(job, off, ext.len);
    *ret_len = MIN(ext.len, ZERO_PIECE);
    rc = chain_merge_zero(job->chain, job->top, off, *ret_len, 0);
    return rc < 0 ? job_fail(job, rc, "write zeroes to", job->top, off) : 0;
}

SUSPENDS static int stream_range(struct job *job, uint64_t off, uint64_t len)
{
    while (len > 0) {
        uint64_t n = 0;
        int rc = stream_extent(job, off, len, &n);

        if (rc < 0)
            return rc;
        off += n;
        len -= n;
    }
    return 0;
}

SUSPENDS static int stream_scan(void *ctx, uint64_t off, uint64_t len, bool *ret_skip,
                                uint64_t *ret_len)
{
    struct job *job = ctx;
    struct extent ext;

    chain_work_enter(job->chain);
    int rc = stream_map(job, off, len, &ext);
    chain_work_leave(job->chain);
    if (rc < 0)
        return rc;
    *ret_skip = ext.kind == EXTENT_UNALLOCATED;
    *ret_len = ext.len;
    return 0;
}

SUSPENDS static int stream_step(void *ctx, uint64_t off, uint64_t len)
{
    return job_step(ctx, off, len, stream_range);
}

SUSPENDS static void guest_before(void *ctx, struct chain_op *op)
{
    struct job *job = ctx;

    range_lock(&job->ranges, (struct range *)op->watcher, op->off, op->len);
}

SUSPENDS static void guest_after(void *ctx, struct chain_op *op, int rc)
{
    range_unlock((struct range *)op->watcher);
}

SUSPENDS static int stream_start(struct job *job, struct err *err)
{
    chain_freeze(job->chain);
    job->top_was_writable = layer_is_writable(job->top);
    int rc = layer_reopen(job->top, true, err);
    job->started = rc == 0;
    if (rc == 0 && job->active) {
        job->watch = (struct chain_watch){guest_before, guest_after, NULL, job};
        chain_set_watch(job->chain, &job->watch);
    }
    job_note_stall(job, chain_thaw(job->chain));
    return rc;
}

SUSPENDS static int stream_run(struct job *job)
{
    struct copy_loop loop = {
        .end = job->total,
        .chunk = copy_chunk(layer_cluster(job->top)),
        .parallel = COPY_PARALLEL,
        .scan = stream_scan,
        .copy = stream_step,
        .pace = job_pace,
        .progress = job_progress,
        .ctx = job,
    };
    int rc = copy_run(&loop);
    if (rc == 0) {
        rc = chain_merge_flush(job->top);
        if (rc < 0)
            job_fail(job, rc, "flush", job->top, 0);
    }
    return rc;
}

static struct layer *last_streamed(const struct job *job)
{
    struct chain *chain = job->chain;

    return job->base ? layer_upper(job->base) : chain_layer(chain, chain_depth(chain) - 1);
}

SUSPENDS static int finish_frozen(struct job *job, struct err *err)
{
    _cleanup_(freep) char *name = NULL;
    int rc = job_check_unused(layer_lower(job->top), last_streamed(job), err);

    if (rc == 0)
        rc = job_backing_name(job, job->top, job->base, &name, err);
    if (rc == 0)
        rc = layer_set_backing(job->top, name, job->base ? layer_format(job->base) : NULL, err);
    if (rc < 0)
        return rc;
    if (job->active)
        chain_set_watch(job->chain, NULL);
    layer_reopen(job->top, job->top_was_writable, NULL);
    return 0;
}

SUSPENDS static int stream_finish(struct job *job, struct err *err)
{
    int rc = chain_merge_flush(job->top);

    if (rc < 0)
        return err_errno(err, rc, "flush '%s'", layer_path(job->top));
    chain_freeze(job->chain);
    rc = finish_frozen(job, err);
    if (rc < 0) {
        job_note_stall(job, chain_thaw(job->chain));
        return rc;
    }
    struct layer *first = layer_lower(job->top);
    chain_unpin(job->top, job->base);
    job_drop_layers(job, first, last_streamed(job));
    return 0;
}

SUSPENDS static void stream_clean(struct job *job)
{
    chain_freeze(job->chain);
    if (job->active)
        chain_set_watch(job->chain, NULL);
    if (job->started)
        layer_reopen(job->top, job->top_was_writable, NULL);
    chain_unpin(job->top, job->base);
    job_note_stall(job, chain_thaw(job->chain));
}

static const struct job_ops stream_ops = {stream_start, stream_run, stream_finish, stream_clean};

static bool base_is_below(const struct layer *top, const struct layer *base)
{
    const struct layer *l = layer_lower(top);

    while (l && l != base)
        l = layer_lower(l);
    return l == base;
}

int job_stream(struct jobs *jobs, struct chain *chain, struct layer *top, struct layer *base,
               const struct job_opts *opts, struct err *err)
{
    if (!chain_is_writable(chain))
        return err_set(err, -EROFS, "'%s' is open read-only", layer_path(chain_layer(chain, 0)));
    if (layer_chain(top) != chain || !base_is_below(top, base))
        return err_set(err, -EINVAL, "'%s' is not below '%s'", base ? layer_path(base) : "",
                       layer_path(top));
    if (layer_lower(top) == base)
        return err_set(err, -EINVAL, "there is nothing between '%s' and what is to stay below it",
                       layer_path(top));
    /* views of top and of base read the same all the time; only what is between goes away */
    struct layer *last = base ? layer_upper(base) : chain_layer(chain, chain_depth(chain) - 1);
    int rc = job_check_unused(layer_lower(top), last, err);
    if (rc == 0)
        rc = chain_pin(chain, top, base, err);
    if (rc < 0)
        return rc;
    struct job proto = {
        .type = JOB_STREAM,
        .ops = &stream_ops,
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

int job_direction(struct chain *chain, unsigned index, struct job_direction *ret)
{
    struct layer *layer = chain_layer(chain, index);
    struct layer *child = index > 0 ? chain_layer(chain, index - 1) : NULL;

    if (!layer || !child)
        return -EINVAL;
    chain_work_enter(chain);
    int rc = layer_allocated_bytes(child, &ret->commit_bytes);
    if (rc == 0)
        rc = layer_allocated_bytes(layer, &ret->stream_bytes);
    chain_work_leave(chain);
    ret->commit = rc == 0 && ret->commit_bytes <= ret->stream_bytes;
    return rc;
}
