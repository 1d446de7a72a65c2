/*
 * Memory with a volatile cache, for power cuts.
 *
 * `now` is what reads see. `stable` is what a cut cannot take away. Between the two stands the
 * log of changes that no flush has covered yet, in the order in which they took effect.
 *  1. stable + log, applied in order, is now.
 *  2. A flush makes durable the changes that had completed when it was issued, once it completes.
 *  3. A durable write (BLK_FUA) goes to stable itself. What the log has for the same sectors is
 *     older and dead: it can never come back. A change of length that is still in the log
 *     becomes durable with all before it, as a file system's journal would do it.
 *  4. A cut keeps, of each change in the log, all, nothing, or some 512-byte sectors. The
 *     survivors are applied in the order of the log, so each sector ends with one of the contents
 *     it had since the last flush: a cache holds one content a sector, and never goes back.
 *     Changes of length survive up to some point and not after it.
 *  5. Changes that are under way at the cut may survive likewise, in any order among themselves.
 */
#include <string.h>
#include "base/bits.h"
#include "base/check.h"
#include "base/vec.h"
#include "blk/internal.h"
#include "rt/sim.h"

#define SECTOR 512u

enum record_kind {
    RECORD_WRITE,
    RECORD_ZERO,
    RECORD_RESIZE, /* to len */
    RECORD_GROW,   /* to at least len */
    RECORD_MARK,   /* where the log stood when a flush was issued; on the flush's stack */
};

struct record {
    struct list link; /* on underway, then on log */
    enum record_kind kind;
    uint64_t off, len; /* bytes, of whole sectors */
    uint8_t *data;     /* of a write; owned */
    uint8_t *dead;     /* a bit a sector: superseded by a durable write; NULL while none */
};

struct crash_blk {
    struct blk blk;
    struct mem_pages now, stable;
    uint64_t stable_len;
    struct list log;      /* completed, oldest first */
    struct list underway; /* waiting in their I/O point */
};

static struct crash_blk *crash_of(struct blk *blk)
{
    return container_of(blk, struct crash_blk, blk);
}

/* ---- changes ---- */

static void record_free(struct record *ch)
{
    if (!ch)
        return;
    list_remove(&ch->link);
    if (ch->kind == RECORD_MARK)
        return;
    free(ch->data);
    free(ch->dead);
    free(ch);
}

static void records_free(struct list *head)
{
    while (!list_empty(head))
        record_free(list_entry(head->next, struct record, link));
}

/* data: what a write writes, taken out of iov. */
static struct record *record_new(enum record_kind kind, uint64_t off, uint64_t len,
                                 struct iov_iter *iov)
{
    struct record *ch = calloc(1, sizeof(*ch));

    if (!ch)
        return NULL;
    list_init(&ch->link);
    ch->kind = kind;
    ch->off = off;
    ch->len = len;
    if (kind != RECORD_WRITE)
        return ch;
    ch->data = malloc(len);
    if (!ch->data) {
        record_free(ch);
        return NULL;
    }
    iov_iter_read(iov, ch->data, len);
    return ch;
}

static bool has_sectors(const struct record *ch)
{
    return ch->kind == RECORD_WRITE || ch->kind == RECORD_ZERO;
}

static bool sets_len(const struct record *ch)
{
    return ch->kind == RECORD_RESIZE || ch->kind == RECORD_GROW;
}

static uint64_t nr_sectors(const struct record *ch)
{
    return has_sectors(ch) ? ch->len / SECTOR : 0;
}

static bool sector_is_dead(const struct record *ch, uint64_t i)
{
    return ch->dead && (ch->dead[i / 8] & 1u << i % 8);
}

/* [off, off + len) of the device is durable with newer content. 0 or -ENOMEM. */
static int record_kill(struct record *ch, uint64_t off, uint64_t len)
{
    if (!has_sectors(ch) || !ranges_overlap(ch->off, ch->len, off, len))
        return 0;
    if (!ch->dead)
        ch->dead = calloc(div_up(nr_sectors(ch), 8), 1);
    if (!ch->dead)
        return -ENOMEM;
    uint64_t first = (MAX(off, ch->off) - ch->off) / SECTOR;
    uint64_t end = (MIN(off + len, ch->off + ch->len) - ch->off) / SECTOR;
    for (uint64_t i = first; i < end; i++)
        ch->dead[i / 8] |= (uint8_t)(1u << i % 8);
    return 0;
}

/* Content and length that a change is applied to. */
struct image {
    struct mem_pages *pages;
    uint64_t *len;
};

static void image_resize(struct image img, uint64_t len)
{
    if (len < *img.len)
        mem_pages_zero(img.pages, len, *img.len - len);
    *img.len = len;
}

/* Sectors [first, first + nr) of the change. */
static int apply_sectors(const struct record *ch, uint64_t first, uint64_t nr, struct image img)
{
    uint64_t off = ch->off + first * SECTOR, len = nr * SECTOR;
    int rc = 0;

    if (ch->kind == RECORD_WRITE) {
        IOV_ITER_BUF(it, vec, ch->data + first * SECTOR, len);
        rc = mem_pages_write(img.pages, off, len, &it);
    } else {
        mem_pages_zero(img.pages, off, len);
    }
    *img.len = MAX(*img.len, off + len);
    return rc;
}

/* All sectors that live. */
static int apply(const struct record *ch, struct image img)
{
    int rc = 0;

    if (ch->kind == RECORD_RESIZE)
        image_resize(img, ch->len);
    else if (ch->kind == RECORD_GROW)
        *img.len = MAX(*img.len, ch->len);
    if (!has_sectors(ch))
        return 0;
    if (!ch->dead)
        return apply_sectors(ch, 0, nr_sectors(ch), img);
    for (uint64_t i = 0; i < nr_sectors(ch) && rc == 0; i++)
        if (!sector_is_dead(ch, i))
            rc = apply_sectors(ch, i, 1, img);
    return rc;
}

static struct image stable_image(struct crash_blk *c)
{
    return (struct image){&c->stable, &c->stable_len};
}

/* Makes the oldest changes of the log durable, up to and with `last`. */
static int settle(struct crash_blk *c, const struct list *last)
{
    bool more = last != &c->log;

    while (more) {
        struct record *ch = list_entry(c->log.next, struct record, link);
        int rc = apply(ch, stable_image(c));

        if (rc < 0)
            return rc;
        more = &ch->link != last;
        record_free(ch);
    }
    return 0;
}

/* ---- requests ---- */

/* A durable write took effect: rule 3. */
static int settle_durable(struct crash_blk *c, const struct record *ch)
{
    int rc = 0;

    for (struct list *it = c->log.prev; it != &c->log && rc == 0; it = it->prev)
        if (sets_len(list_entry(it, struct record, link))) {
            rc = settle(c, it);
            break;
        }
    list_for_each(it, &c->log) {
        if (rc == 0)
            rc = record_kill(list_entry(it, struct record, link), ch->off, ch->len);
    }
    return rc < 0 ? rc : apply(ch, stable_image(c));
}

/* Takes ch: it is under way, waits, and takes effect. After a stop of the simulation it stays
 * under way: a cut may still find it on the device. */
SUSPENDS static int perform(struct blk *blk, struct record *ch, unsigned flags)
{
    struct crash_blk *c = crash_of(blk);
    uint64_t now_len = align_up(blk->len, SECTOR);

    if (!ch)
        return -ENOMEM;
    if (mem_stopped()) { /* the power is off */
        record_free(ch);
        return -EIO;
    }
    list_push_back(&c->underway, &ch->link);
    int rc = mem_point();
    if (rc < 0)
        return rc;
    list_remove(&ch->link);
    rc = apply(ch, (struct image){&c->now, &now_len});
    if (rc < 0) {
        record_free(ch);
        return rc;
    }
    if (flags & BLK_FUA) {
        rc = settle_durable(c, ch);
        record_free(ch);
        return rc;
    }
    list_push_back(&c->log, &ch->link);
    return 0;
}

SUSPENDS static int crash_readv(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov)
{
    int rc = mem_point();

    if (rc == 0)
        mem_pages_read(&crash_of(blk)->now, off, len, iov);
    return rc;
}

SUSPENDS static int crash_writev(struct blk *blk, uint64_t off, uint64_t len, struct iov_iter *iov,
                                 unsigned flags)
{
    return perform(blk, record_new(RECORD_WRITE, off, len, iov), flags);
}

SUSPENDS static int crash_zero(struct blk *blk, uint64_t off, uint64_t len, unsigned flags)
{
    return perform(blk, record_new(RECORD_ZERO, off, len, NULL), 0);
}

SUSPENDS static int crash_discard(struct blk *blk, uint64_t off, uint64_t len)
{
    return crash_zero(blk, off, len, 0);
}

SUSPENDS static int crash_resize(struct blk *blk, uint64_t len)
{
    return perform(blk, record_new(RECORD_RESIZE, 0, len, NULL), 0);
}

SUSPENDS static int crash_preallocate(struct blk *blk, uint64_t off, uint64_t len)
{
    return perform(blk, record_new(RECORD_GROW, 0, off + len, NULL), 0);
}

SUSPENDS static int crash_flush(struct blk *blk)
{
    struct crash_blk *c = crash_of(blk);
    struct record mark = {.kind = RECORD_MARK};

    list_push_back(&c->log, &mark.link);
    int rc = mem_point();
    /* a flush beside this one may have passed the mark already */
    if (rc == 0 && !list_empty(&mark.link))
        rc = settle(c, &mark.link);
    list_remove(&mark.link);
    return rc;
}

static int crash_status(struct blk *blk, uint64_t off, uint64_t len, bool *ret_data,
                        uint64_t *ret_len)
{
    *ret_len = mem_pages_status(&crash_of(blk)->now, off, len, ret_data);
    return 0;
}

static void crash_close(struct blk *blk)
{
    struct crash_blk *c = crash_of(blk);

    records_free(&c->log);
    records_free(&c->underway);
    mem_pages_fini(&c->now);
    mem_pages_fini(&c->stable);
    free(c);
}

static const struct blk_ops crash_ops = {
    .name = "crash",
    .readv = crash_readv,
    .writev = crash_writev,
    .flush = crash_flush,
    .zero = crash_zero,
    .discard = crash_discard,
    .resize = crash_resize,
    .status = crash_status,
    .preallocate = crash_preallocate,
    .close = crash_close,
};

int blk_crash_new(uint64_t len, struct blk **ret)
{
    struct crash_blk *c = calloc(1, sizeof(*c));

    if (!c)
        return -ENOMEM;
    if (blk_init(&c->blk, &crash_ops, "crash") < 0) {
        free(c);
        return -ENOMEM;
    }
    list_init(&c->log);
    list_init(&c->underway);
    c->blk.len = c->stable_len = len;
    c->blk.align = SECTOR;
    c->blk.writable = c->blk.zero_tail = c->blk.fresh_zero = true;
    *ret = &c->blk;
    return 0;
}

/* ---- power cuts ---- */

/* How one cut treats the log; drawn from its seed. In 64ths. */
struct mood {
    uint64_t rng;
    unsigned keep; /* how likely a change survives as a whole */
    unsigned tear; /* how likely it is torn instead */
    bool len_lost; /* a change of length was lost: so are the later ones */
};

static struct mood mood_of(uint64_t seed)
{
    static const unsigned keeps[] = {0, 8, 32, 32, 56, 64}, tears[] = {0, 16, 32};
    struct mood mood = {.rng = hash64(seed + 1)};

    mood.keep = keeps[rng_below(&mood.rng, ARRAY_SIZE(keeps))];
    mood.tear = tears[rng_below(&mood.rng, ARRAY_SIZE(tears))];
    return mood;
}

static bool chance(struct mood *mood, unsigned in_64)
{
    return rng_below(&mood->rng, 64) < in_64;
}

/* A torn change: its beginning, its end, or sectors here and there. */
static int apply_torn(const struct record *ch, struct mood *mood, struct image img,
                      uint64_t *ret_kept)
{
    uint64_t how = rng_below(&mood->rng, 3), nr = nr_sectors(ch);
    uint64_t at = rng_below(&mood->rng, nr + 1);
    int rc = 0;

    for (uint64_t i = 0; i < nr && rc == 0; i++) {
        bool keep = how == 0 ? i < at : how == 1 ? i >= at : chance(mood, 32);

        if (!keep || sector_is_dead(ch, i))
            continue;
        rc = apply_sectors(ch, i, 1, img);
        ++*ret_kept;
    }
    return rc;
}

static uint64_t nr_living(const struct record *ch)
{
    uint64_t nr = nr_sectors(ch);

    for (uint64_t i = 0; ch->dead && i < nr_sectors(ch); i++)
        nr -= sector_is_dead(ch, i);
    return nr;
}

static int survive(const struct record *ch, struct mood *mood, struct image img,
                   struct blk_crash_report *report)
{
    uint64_t living = nr_living(ch), kept = 0;
    int rc = 0;

    if (sets_len(ch)) {
        mood->len_lost |= !chance(mood, mood->keep);
        return mood->len_lost ? 0 : apply(ch, img);
    }
    if (chance(mood, mood->tear)) {
        rc = apply_torn(ch, mood, img, &kept);
    } else if (chance(mood, mood->keep)) {
        rc = apply(ch, img);
        kept = living;
    }
    report->unflushed_sectors += living;
    report->lost_sectors += living - kept;
    report->torn_writes += kept > 0 && kept < living;
    return rc;
}

/* What is under way, in random order. */
static int survive_underway(struct crash_blk *c, struct mood *mood, struct image img,
                            struct blk_crash_report *report)
{
    _cleanup_(freep) const struct record **order = NULL;
    size_t nr = 0;
    int rc = 0;

    list_for_each(it, &c->underway)
        nr++;
    order = calloc(nr + 1, sizeof(struct record *));
    if (!order)
        return -ENOMEM;
    nr = 0;
    list_for_each(it, &c->underway) {
        size_t at = rng_below(&mood->rng, nr + 1);

        order[nr++] = order[at];
        order[at] = list_entry(it, struct record, link);
    }
    for (size_t i = 0; i < nr && rc == 0; i++)
        rc = survive(order[i], mood, img, report);
    return rc;
}

int blk_crash_cut(struct blk *blk, uint64_t seed, struct blk **ret, struct blk_crash_report *report)
{
    struct crash_blk *c = crash_of(blk);
    struct mood mood = mood_of(seed);
    struct blk_crash_report counts = {0};
    struct blk *after;
    int rc = blk_mem_new(c->stable_len, SECTOR, &after);

    CHECK_THAT(blk->ops == &crash_ops);
    if (rc < 0)
        return rc;
    struct image img = {mem_pages_of(after), &after->len};
    rc = mem_pages_copy(img.pages, &c->stable);
    list_for_each(it, &c->log) {
        if (rc == 0)
            rc = survive(list_entry(it, struct record, link), &mood, img, &counts);
    }
    if (rc == 0)
        rc = survive_underway(c, &mood, img, &counts);
    if (rc < 0) {
        mem_free(after);
        return rc;
    }
    if (report)
        *report = counts;
    *ret = after;
    return 0;
}

int blk_crash_restart(struct blk *blk, uint64_t seed, struct blk_crash_report *report)
{
    struct crash_blk *c = crash_of(blk);
    struct blk *after;
    int rc = blk_crash_cut(blk, seed, &after, report);

    if (rc < 0)
        return rc;
    records_free(&c->log);
    records_free(&c->underway);
    mem_pages_fini(&c->now);
    mem_pages_fini(&c->stable);
    c->now = c->stable = (struct mem_pages){0};
    blk->len = c->stable_len = after->len;
    blk->flush_failed = false;
    rc = mem_pages_copy(&c->now, mem_pages_of(after));
    if (rc == 0)
        rc = mem_pages_copy(&c->stable, mem_pages_of(after));
    mem_free(after);
    return rc;
}

/* ---- kills ---- */

/* Leaves sectors of it out, or none, or all. False: nothing of it took effect. */
static bool thin_out(struct record *ch, struct mood *mood)
{
    unsigned keep = (unsigned)rng_below(&mood->rng, 3) * 32; /* in 64ths */

    if (!has_sectors(ch))
        return chance(mood, 32);
    for (uint64_t i = 0; i < nr_sectors(ch); i++)
        if (!chance(mood, keep) && record_kill(ch, ch->off + i * SECTOR, SECTOR) < 0)
            return false;
    return nr_living(ch) > 0;
}

int blk_crash_kill(struct blk *blk, uint64_t seed)
{
    struct crash_blk *c = crash_of(blk);
    struct mood mood = mood_of(seed);
    uint64_t len = blk->len;
    int rc = 0;

    CHECK_THAT(blk->ops == &crash_ops);
    while (rc == 0 && !list_empty(&c->underway)) {
        struct record *ch = list_entry(c->underway.next, struct record, link);

        list_remove(&ch->link);
        if (!thin_out(ch, &mood)) {
            record_free(ch);
            continue;
        }
        rc = apply(ch, (struct image){&c->now, &len});
        list_push_back(&c->log, &ch->link);
    }
    blk->len = len;
    blk->flush_failed = false;
    return rc;
}
