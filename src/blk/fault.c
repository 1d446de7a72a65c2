/*
 * Errors and breakpoints on chosen requests of a child.
 *
 * The wrapper has the child's alignment, so the reads and writes of a read-modify-write are
 * requests here too, each to be counted, failed or stopped. A request is first counted, then
 * stops at a breakpoint if one fits, then fails or goes on to the child. Preallocation counts as a
 * resize. Rules and breakpoints are few and in fixed tables.
 */
#include "base/bits.h"
#include "base/check.h"
#include "blk/internal.h"

#define MAX_RULES  16u
#define MAX_BREAKS 8u
#define NR_KINDS   6u

struct fail_rule {
    unsigned reqs; /* 0: free */
    uint64_t left; /* requests of these kinds until it strikes, that one included */
    int rc;
    bool sticky;
};

struct breakpoint {
    unsigned reqs; /* 0: free */
    uint64_t off, len;
};

struct fault_blk {
    struct blk blk;
    struct blk *child; /* owned */
    uint64_t seen[NR_KINDS];
    struct fail_rule rules[MAX_RULES];
    struct breakpoint breaks[MAX_BREAKS];
    unsigned stopped;              /* requests at a breakpoint, not resumed yet */
    uint64_t resumes;              /* how often blk_fault_resume was called */
    struct wait_queue at_break;    /* stopped requests */
    struct wait_queue for_stopped; /* who waits until there is one */
};

static struct fault_blk *fault_of(const struct blk *blk)
{
    return container_of((struct blk *)(uintptr_t)blk, struct fault_blk, blk);
}

/* ---- what happens to a request ---- */

/* Takes away a breakpoint that fits: it works once. */
static bool break_fits(struct fault_blk *f, enum blk_req req, uint64_t off, uint64_t len)
{
    for (unsigned i = 0; i < MAX_BREAKS; i++) {
        struct breakpoint *b = &f->breaks[i];

        if (!(b->reqs & req))
            continue;
        if (req != BLK_REQ_FLUSH && req != BLK_REQ_RESIZE &&
            !(off < b->off + b->len && b->off < off + len))
            continue;
        b->reqs = 0;
        return true;
    }
    return false;
}

SUSPENDS static void stop_at_break(struct fault_blk *f)
{
    uint64_t resumes = f->resumes;

    f->stopped++;
    wait_queue_wake_all(&f->for_stopped);
    while (f->resumes == resumes)
        wait_queue_sleep(&f->at_break);
}

/* The code of the first rule that strikes; every rule counts. */
static int rule_strikes(struct fault_blk *f, enum blk_req req)
{
    int rc = 0;

    for (unsigned i = 0; i < MAX_RULES; i++) {
        struct fail_rule *rule = &f->rules[i];

        if (!(rule->reqs & req))
            continue;
        if (rule->left > 1) {
            rule->left--;
            continue;
        }
        if (rc == 0)
            rc = rule->rc;
        if (!rule->sticky)
            rule->reqs = 0;
    }
    return rc;
}

SUSPENDS static int pass(struct blk *blk, enum blk_req req, uint64_t off, uint64_t len)
{
    struct fault_blk *f = fault_of(blk);

    f->seen[__builtin_ctz(req)]++;
    int rc = rule_strikes(f, req);
    if (break_fits(f, req, off, len))
        stop_at_break(f);
    return rc;
}

/* ---- requests ---- */

SUSPENDS static int fault_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    int rc = pass(blk, BLK_REQ_READ, off, len);

    return rc < 0 ? rc : blk_readv(fault_of(blk)->child, off, len, iov);
}

SUSPENDS static int fault_writev(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                                 unsigned flags)
{
    int rc = pass(blk, BLK_REQ_WRITE, off, len);

    return rc < 0 ? rc : blk_writev(fault_of(blk)->child, off, len, iov, flags);
}

SUSPENDS static int fault_flush(struct blk *blk)
{
    int rc = pass(blk, BLK_REQ_FLUSH, 0, 0);

    return rc < 0 ? rc : blk_flush(fault_of(blk)->child);
}

SUSPENDS static int fault_zero(struct blk *blk, uint64_t off, uint64_t len, unsigned flags)
{
    int rc = pass(blk, BLK_REQ_ZERO, off, len);

    return rc < 0 ? rc : blk_zero(fault_of(blk)->child, off, len, flags);
}

SUSPENDS static int fault_discard(struct blk *blk, uint64_t off, uint64_t len)
{
    int rc = pass(blk, BLK_REQ_DISCARD, off, len);

    return rc < 0 ? rc : blk_discard(fault_of(blk)->child, off, len);
}

SUSPENDS static int fault_resize(struct blk *blk, uint64_t len)
{
    int rc = pass(blk, BLK_REQ_RESIZE, 0, 0);

    return rc < 0 ? rc : blk_resize(fault_of(blk)->child, len);
}

SUSPENDS static int fault_preallocate(struct blk *blk, uint64_t off, uint64_t len)
{
    int rc = pass(blk, BLK_REQ_RESIZE, 0, 0);

    return rc < 0 ? rc : blk_preallocate(fault_of(blk)->child, off, len);
}

SUSPENDS static int fault_status(struct blk *blk, uint64_t off, uint64_t len, bool *ret_data,
                                 uint64_t *ret_len)
{
    return blk_status(fault_of(blk)->child, off, len, ret_data, ret_len);
}

SUSPENDS static uint64_t fault_hole_bytes(struct blk *blk)
{
    return blk_hole_bytes(fault_of(blk)->child);
}

SUSPENDS static void fault_close(struct blk *blk)
{
    blk_close(fault_of(blk)->child);
    free(fault_of(blk));
}

static const struct blk_ops fault_ops = {
    .name = "fault",
    .readv = fault_readv,
    .writev = fault_writev,
    .flush = fault_flush,
    .zero = fault_zero,
    .discard = fault_discard,
    .resize = fault_resize,
    .status = fault_status,
    .hole_bytes = fault_hole_bytes,
    .preallocate = fault_preallocate,
    .close = fault_close,
};

int blk_fault_new(struct blk *child, struct blk **ret)
{
    struct fault_blk *f = calloc(1, sizeof(*f));

    if (!f)
        return -ENOMEM;
    if (blk_init(&f->blk, &fault_ops, child->name) < 0) {
        free(f);
        return -ENOMEM;
    }
    f->child = child;
    f->blk.len = child->len;
    f->blk.align = child->align;
    f->blk.mem_align = child->mem_align;
    f->blk.io_unit = child->io_unit;
    f->blk.writable = child->writable;
    f->blk.fixed_len = child->fixed_len;
    f->blk.zero_tail = child->zero_tail;
    f->blk.fresh_zero = child->fresh_zero;
    wait_queue_init(&f->at_break);
    wait_queue_init(&f->for_stopped);
    *ret = &f->blk;
    return 0;
}

/* ---- control ---- */

void blk_fault_fail(struct blk *blk, unsigned reqs, uint64_t nth, int rc, bool sticky)
{
    struct fault_blk *f = fault_of(blk);
    unsigned i = 0;

    CHECK_THAT(blk->ops == &fault_ops && rc < 0 && nth > 0);
    for (; f->rules[i].reqs; i++)
        CHECK_THAT(i + 1 < MAX_RULES);
    f->rules[i] = (struct fail_rule){reqs, nth, rc, sticky};
}

void blk_fault_clear(struct blk *blk)
{
    struct fault_blk *f = fault_of(blk);

    for (unsigned i = 0; i < MAX_RULES; i++)
        f->rules[i].reqs = 0;
    for (unsigned i = 0; i < MAX_BREAKS; i++)
        f->breaks[i].reqs = 0;
}

void blk_fault_break(struct blk *blk, unsigned reqs, uint64_t off, uint64_t len)
{
    struct fault_blk *f = fault_of(blk);
    unsigned i = 0;

    CHECK_THAT(blk->ops == &fault_ops);
    for (; f->breaks[i].reqs; i++)
        CHECK_THAT(i + 1 < MAX_BREAKS);
    f->breaks[i] = (struct breakpoint){reqs, off, MIN(len, UINT64_MAX - off)};
}

void blk_fault_wait_stopped(struct blk *blk)
{
    struct fault_blk *f = fault_of(blk);

    while (f->stopped == 0)
        wait_queue_sleep(&f->for_stopped);
}

void blk_fault_resume(struct blk *blk)
{
    struct fault_blk *f = fault_of(blk);

    f->resumes++;
    f->stopped = 0;
    wait_queue_wake_all(&f->at_break);
}

uint64_t blk_fault_count(const struct blk *blk, unsigned reqs)
{
    const struct fault_blk *f = fault_of(blk);
    uint64_t nr = 0;

    for (unsigned i = 0; i < NR_KINDS; i++)
        if (reqs & 1u << i)
            nr += f->seen[i];
    return nr;
}
