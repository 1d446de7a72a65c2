/*
 * The one copy loop: skips what needs no copy, runs a bounded number of steps at once, and copies
 * from one chain to another.
 *
 * Steps end at multiples of the chunk, so that no two of them meet in a cluster of the target.
 */
#include "base/bits.h"
#include "base/check.h"
#include "job/internal.h"
#include "rt/reactor.h"
#include "rt/timer.h"

#define COPY_CHUNK_MIN (256 * KIB)
#define COPY_CHUNK_MAX (2 * MIB)
#define HOLE_MIN       (64 * KIB)
#define SCANS_A_TURN   16u /* then others run: a scan of cached maps need not wait */
#define CONVERT_CHUNK  MIB

uint64_t copy_chunk(uint64_t cluster_size)
{
    return MAX(COPY_CHUNK_MIN, MIN(cluster_size, COPY_CHUNK_MAX));
}

uint64_t copy_hole_unit(const struct layer *target)
{
    return MAX(HOLE_MIN, layer_unit(target));
}

struct step {
    struct copy_loop *loop;
    uint64_t off, len;
    bool busy;
};

SUSPENDS static int run_step(void *arg)
{
    struct step *step = arg;
    struct copy_loop *loop = step->loop;
    int rc = loop->copy(loop->ctx, step->off, step->len);

    if (rc == 0 && loop->progress)
        loop->progress(loop->ctx, step->len);
    step->busy = false;
    return rc;
}

static struct step *free_step(struct step *steps, unsigned nr)
{
    for (unsigned i = 0; i < nr; i++)
        if (!steps[i].busy)
            return &steps[i];
    return NULL;
}

/* Starts the step at loop->off once there is room for it. */
SUSPENDS static int start_step(struct copy_loop *loop, struct co_group *group, struct step *steps)
{
    uint64_t stop = MIN(align_down(loop->off, loop->chunk) + loop->chunk, loop->end);
    uint64_t len = stop - loop->off;
    int rc = loop->pace ? loop->pace(loop->ctx, len) : 0;

    if (rc < 0)
        return rc;
    co_group_wait_below(group, loop->parallel);
    if (group->rc < 0)
        return group->rc;
    struct step *step = free_step(steps, loop->parallel);
    DEBUG_CHECK(step);
    *step = (struct step){loop, loop->off, len, true};
    rc = co_group_spawn(group, run_step, step);
    if (rc == 0)
        loop->off += len;
    return rc;
}

SUSPENDS static int next_piece(struct copy_loop *loop, struct co_group *group, struct step *steps)
{
    bool skip;
    uint64_t len;
    int rc = loop->pace ? loop->pace(loop->ctx, 0) : 0;

    if (rc == 0)
        rc = group->rc;
    if (rc == 0)
        rc = loop->scan(loop->ctx, loop->off, loop->end - loop->off, &skip, &len);
    if (rc < 0)
        return rc;
    if (!skip)
        return start_step(loop, group, steps);
    loop->off += len;
    if (loop->progress)
        loop->progress(loop->ctx, len);
    return 0;
}

int copy_run(struct copy_loop *loop)
{
    unsigned scans = 0;
    struct co_group group;

    CHECK_THAT(loop->parallel > 0 && loop->parallel <= COPY_PARALLEL_MAX && is_pow2(loop->chunk));
    _cleanup_(freep) struct step *steps = calloc(loop->parallel, sizeof(*steps));
    if (!steps)
        return -ENOMEM;
    co_group_init(&group);
    int rc = 0;
    while (rc == 0 && loop->off < loop->end) {
        rc = next_piece(loop, &group, steps);
        if (++scans % SCANS_A_TURN == 0)
            reactor_yield();
    }
    int steps_rc = co_group_wait(&group);
    return steps_rc < 0 ? steps_rc : rc;
}

/* ---- from one chain to another ---- */

struct conversion {
    struct chain *src, *dst;
    struct layer *layer;
    const struct copy_opts *opts;
    uint64_t hole_unit;
    uint64_t done, total;
    uint64_t next_ns; /* when the rate allows the next step */
    int rc;           /* first failure and where it was */
    uint64_t at;
    const char *what;
};

static int conversion_fail(struct conversion *c, int rc, const char *what, uint64_t off)
{
    if (c->rc == 0) {
        c->rc = rc;
        c->what = what;
        c->at = off;
    }
    return rc;
}

static bool is_zero(const struct extent *ext)
{
    return ext->kind == EXTENT_UNALLOCATED || ext->kind == EXTENT_ZERO;
}

static bool is_there(const struct conversion *c, const struct extent *ext)
{
    return (c->opts->until || c->opts->keep_holes) && ext->kind == EXTENT_UNALLOCATED;
}

SUSPENDS static int convert_map(struct conversion *c, uint64_t off, uint64_t len,
                                struct extent *ret)
{
    chain_work_enter(c->src);
    struct layer *from = c->layer ? c->layer : chain_layer(c->src, 0);
    int rc = chain_merge_map(c->src, from, c->opts->until, off, len, c->hole_unit, ret);
    chain_work_leave(c->src);
    return rc < 0 ? conversion_fail(c, rc, "read the map", off) : 0;
}

SUSPENDS static int convert_scan(void *ctx, uint64_t off, uint64_t len, bool *ret_skip,
                                 uint64_t *ret_len)
{
    struct conversion *c = ctx;
    struct extent ext;
    int rc = convert_map(c, off, len, &ext);

    if (rc < 0)
        return rc;
    *ret_skip = is_there(c, &ext) || (is_zero(&ext) && c->opts->target_is_zero);
    *ret_len = ext.len;
    return 0;
}

SUSPENDS static int convert_zero(struct conversion *c, uint64_t off, uint64_t len)
{
    if (c->opts->target_is_zero)
        return 0;
    int rc = chain_zero(c->dst, off, len, BLK_MAY_UNMAP);
    return rc < 0 ? conversion_fail(c, rc, "write zeroes", off) : 0;
}

/* Bytes at the front of buf that are all zero, or all not, in blocks of min_zero. */
static size_t same_run(const char *buf, size_t len, size_t min_zero, bool *ret_zero)
{
    size_t n = MIN(len, min_zero);

    if (!min_zero) {
        *ret_zero = false;
        return len;
    }
    *ret_zero = buf_is_zero(buf, n);
    while (n < len && buf_is_zero(buf + n, MIN(len - n, min_zero)) == *ret_zero)
        n += MIN(len - n, min_zero);
    return n;
}

SUSPENDS static int write_runs(struct conversion *c, uint64_t off, char *buf, size_t len)
{
    while (len > 0) {
        bool zero;
        size_t n = same_run(buf, len, c->opts->min_zero, &zero);
        int rc = 0;

        if (zero) {
            rc = convert_zero(c, off, n);
        } else {
            IOV_ITER_BUF(it, vec, buf, n);
            rc = chain_write(c->dst, off, n, &it, 0);
            if (rc < 0)
                conversion_fail(c, rc, "write", off);
        }
        if (rc < 0)
            return rc;
        off += n;
        buf += n;
        len -= n;
    }
    return 0;
}

SUSPENDS static int convert_data(struct conversion *c, uint64_t off, size_t len)
{
    _cleanup_(buf_drop) struct buf b = {buf_get(len), len};

    if (!b.data)
        return conversion_fail(c, -ENOMEM, "copy", off);
    IOV_ITER_BUF(it, vec, b.data, len);
    int rc = chain_read_layer(c->src, c->layer, off, len, &it);
    if (rc < 0)
        return conversion_fail(c, rc, "read", off);
    return write_runs(c, off, b.data, len);
}

/* Neighbouring data is copied as one: *len grows up to end. */
SUSPENDS static int data_run(struct conversion *c, uint64_t off, uint64_t end, uint64_t *len)
{
    while (off + *len < end) {
        struct extent next;
        int rc = convert_map(c, off + *len, end - off - *len, &next);

        if (rc < 0)
            return rc;
        if (is_zero(&next))
            break;
        *len += next.len;
    }
    return 0;
}

SUSPENDS static int convert_step(void *ctx, uint64_t off, uint64_t len)
{
    struct conversion *c = ctx;
    uint64_t end = off + len;

    while (off < end) {
        struct extent ext;
        int rc = convert_map(c, off, end - off, &ext);

        if (rc < 0)
            return rc;
        if (is_zero(&ext)) {
            rc = is_there(c, &ext) ? 0 : convert_zero(c, off, ext.len);
        } else {
            rc = data_run(c, off, end, &ext.len);
            if (rc == 0)
                rc = convert_data(c, off, ext.len);
        }
        if (rc < 0)
            return rc;
        off += ext.len;
    }
    return 0;
}

SUSPENDS static int convert_pace(void *ctx, uint64_t bytes)
{
    struct conversion *c = ctx;

    if (bytes == 0 || c->opts->speed == 0)
        return 0;
    timer_sleep_until(c->next_ns);
    c->next_ns = MAX(c->next_ns, reactor_now()) +
                 (uint64_t)((double)bytes * (double)NSEC_PER_SEC / (double)c->opts->speed);
    return 0;
}

static void convert_progress(void *ctx, uint64_t bytes)
{
    struct conversion *c = ctx;

    c->done += bytes;
    if (c->opts->progress)
        c->opts->progress(c->opts->ctx, c->done, c->total);
}

int copy_chain(struct chain *src, struct layer *layer, struct chain *dst,
               const struct copy_opts *opts, struct err *err)
{
    static const struct copy_opts defaults;
    struct conversion c = {.src = src, .dst = dst, .layer = layer, .opts = opts ? opts : &defaults};
    c.total = layer ? layer_len(layer) : chain_len(src);
    c.hole_unit = copy_hole_unit(chain_layer(dst, 0));
    if (chain_len(dst) < c.total)
        return err_set(err, -EINVAL, "the target is shorter than the source");
    unsigned parallel = c.opts->parallel ? c.opts->parallel : COPY_PARALLEL;
    struct copy_loop loop = {
        .end = c.total,
        .chunk = MAX(CONVERT_CHUNK, copy_chunk(layer_cluster(chain_layer(dst, 0)))),
        .parallel = MIN(parallel, COPY_PARALLEL_MAX),
        .scan = convert_scan,
        .copy = convert_step,
        .pace = convert_pace,
        .progress = convert_progress,
        .ctx = &c,
    };
    int rc = copy_run(&loop);
    if (rc < 0 && c.rc < 0)
        return err_errno(err, c.rc, "%s at byte %llu", c.what, (unsigned long long)c.at);
    return rc < 0 ? err_errno(err, rc, "copy") : 0;
}
