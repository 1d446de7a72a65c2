/*
 * A device that can be made longer: it is, before the allocator comes to its end.
 *
 *   |<------- used ------->|<-- left -->|  - - - - - - - - - - ->|
 *   0                     end          len        target
 *
 * The allocator tells each step of its end. When what is left is less than was used in the last
 * SAFE_TIMES times that an extension takes, or less than a quarter of a chunk, a coroutine asks for
 * more: a chunk from the end on, or what is wanted to be left and half a chunk if that is more;
 * twice what is wanted if somebody had to wait since the last time.
 *
 *  1. Nobody waits for an extension but requests that need space behind the device's end, and these
 *     hold nothing meanwhile: no lock, no claim, no room in the journal. The allocator never waits:
 *     it says -ENOBUFS, notes in `need` how far it would have gone, and who asked it lets go of
 *     everything before it waits here, and begins its step anew afterwards.
 *  2. One extension at a time; all that wait share it. Whatever ends their wait, they look again
 *     whether there is room now.
 *  3. The image may go once those who wait were woken: a waiter is on its own stack, and touches
 *     nothing else behind that.
 *
 * When there is no room for an extension, less is asked for, down to what is needed. Then
 * those who cannot wait for long fail; the others wait until a later try succeeds, or clusters
 * become free.
 */
#include "base/bits.h"
#include "qcow2/internal.h"
#include "rt/reactor.h"
#include "rt/timer.h"

#define CHUNK_DEFAULT GIB
#define SAFE_TIMES    3u
#define FIRST_NS      (500 * NSEC_PER_MSEC) /* an extension is expected to take, before the first */
#define LEAD_CHUNKS   4u                    /* never more is wanted to be left */
#define SMALL_PARTS   64u /* of a chunk: smaller extensions are not tried, but for what is needed */
#define OVER_BYTES    (64 * MIB)          /* at most, behind the size of the full image */
#define RETRY_NS      (3 * NSEC_PER_SEC)  /* between tries while writes wait */
#define FULL_NS       (1 * NSEC_PER_SEC)  /* a failed try answers for who may not wait */
#define AHEAD_NS      (10 * NSEC_PER_SEC) /* between tries while there is room left */

enum grow_mutation grow_mutation;

struct room_wait { /* on the stack of who waits */
    struct list link;
    struct wait_queue queue;
    uint64_t since;
    bool patient; /* also while there is no room */
    bool done;
    int rc;
};

static uint64_t chunk_of(const struct image *img)
{
    return img->opts.grow.chunk ? img->opts.grow.chunk : CHUNK_DEFAULT;
}

static uint64_t end_bytes(const struct image *img)
{
    return img->end << img->hdr.cluster_bits;
}

uint64_t image_used_hint(const struct image *img)
{
    return end_bytes(img);
}

void grow_init(struct image *img)
{
    struct grow *g = &img->grow;

    *g = (struct grow){.step = chunk_of(img), .extend_ns = FIRST_NS};
    list_init(&g->waiters);
    co_group_init(&g->group);
    co_cond_init(&g->kick);
}

/* ---- who waits ---- */

static void wake(struct image *img, struct room_wait *w, int rc)
{
    img->stats.room_wait_ns += reactor_now() - w->since;
    list_remove(&w->link);
    w->rc = rc;
    w->done = true;
    wait_queue_wake_all(&w->queue);
}

static void wake_all(struct image *img, int rc)
{
    while (!list_empty(&img->grow.waiters))
        wake(img, list_entry(img->grow.waiters.next, struct room_wait, link), rc);
}

static void fail_impatient(struct image *img)
{
    list_for_each_safe(it, &img->grow.waiters) {
        struct room_wait *w = list_entry(it, struct room_wait, link);

        if (!w->patient)
            wake(img, w, -ENOSPC);
    }
}

void grow_look_again(struct image *img)
{
    if (grow_mutation != GROW_NO_WAKE)
        wake_all(img, 0);
}

void image_fail_waits(struct image *img)
{
    wake_all(img, -ENOSPC);
    co_cond_broadcast(&img->grow.kick);
}

/* ---- how fast, and how much ---- */

/* A little more than was used in the last SAFE_TIMES times an extension: a burst asks for no more
 * than it has used itself, and a stream soon for what it will use until there is more. */
static uint64_t used_lately(const struct image *img)
{
    const struct grow *g = &img->grow;
    uint64_t now = reactor_now(), used = 0;

    for (unsigned i = g->nr_marks; i > 0 && i + GROW_MARKS > g->nr_marks; i--) {
        const struct grow_mark *m = &g->marks[(i - 1) % GROW_MARKS];

        if (m->ns + SAFE_TIMES * g->extend_ns < now)
            break;
        used = end_bytes(img) - m->end;
    }
    return used;
}

/* The size of the full image. Behind that there is more that will be free after a flush than is
 * needed: it is not asked for ahead. */
static uint64_t full_bytes(const struct image *img)
{
    return img->full_end << img->hdr.cluster_bits;
}

/* So much is wanted to be left. */
static uint64_t lead_of(const struct image *img)
{
    uint64_t chunk = chunk_of(img), lead = MAX(chunk / 4, used_lately(img));
    uint64_t end = end_bytes(img), full = full_bytes(img);

    lead = MIN(lead, LEAD_CHUNKS * chunk);
    return end < full ? MIN(lead, (full - end) / 2) : 0;
}

static bool is_short(const struct image *img)
{
    return img->blk->len < end_bytes(img) + lead_of(img);
}

/* So much behind the end is asked for. */
static uint64_t ahead_of(const struct image *img)
{
    const struct grow *g = &img->grow;
    uint64_t chunk = chunk_of(img), lead = lead_of(img);

    if (g->step < chunk)
        return g->step;
    uint64_t more = g->late ? MAX(lead, chunk / 2) : chunk / 2;
    return MAX(chunk, lead + more);
}

/* How long the device should become; 0: it is long enough. */
static uint64_t target_of(const struct image *img)
{
    const struct grow *g = &img->grow;
    uint64_t target = MIN(end_bytes(img) + ahead_of(img), full_bytes(img));

    if (list_empty(&g->waiters))
        return is_short(img) && target > img->blk->len ? target : 0;
    if (g->need <= img->blk->len)
        return 0;
    return g->need <= full_bytes(img) ? MAX(g->need, target) : g->need + MIN(g->step, OVER_BYTES);
}

/* ---- extending ---- */

static void tell(struct image *img, enum image_room room, const char *why)
{
    if (img->grow.room == room)
        return;
    img->grow.room = room;
    if (img->opts.grow.told)
        img->opts.grow.told(img->opts.grow.ctx, room, why);
}

SUSPENDS static int extend(struct image *img, uint64_t target, struct err *err)
{
    struct grow *g = &img->grow;
    uint64_t start = reactor_now();
    bool ahead = list_empty(&g->waiters);

    g->late = false;
    int rc = blk_extend(img->blk, target, err);
    uint64_t ns = reactor_now() - start;

    if (rc < 0) {
        img->stats.extend_failures++;
        return rc;
    }
    /* the average, but the last one if it was slower: what is slow is mostly slow again */
    g->extend_avg_ns = g->extend_avg_ns ? (3 * g->extend_avg_ns + ns) / 4 : ns;
    g->extend_ns = MAX(g->extend_avg_ns, ns);
    img->stats.extensions++;
    img->stats.extensions_ahead += ahead;
    img->stats.extend_ns += ns;
    return 0;
}

/* Asks for less and less. 1: there is nothing to ask for. */
SUSPENDS static int extend_some(struct image *img, struct err *err)
{
    struct grow *g = &img->grow;
    uint64_t small = chunk_of(img) / SMALL_PARTS, failed = UINT64_MAX, target;
    int rc = 1;

    while ((target = target_of(img)) && target < failed) {
        rc = extend(img, target, err);
        if (rc == 0)
            g->step = MIN(chunk_of(img), MAX(g->step, small) * 4);
        if (rc != -ENOSPC)
            return rc;
        failed = target;
        g->step = g->step / 4 < small ? 0 : g->step / 4;
    }
    g->step = MAX(g->step, small);
    return rc;
}

static void no_room(struct image *img, const struct err *err)
{
    struct grow *g = &img->grow;
    uint64_t now = reactor_now();

    g->ahead_at = now + AHEAD_NS;
    if (list_empty(&g->waiters)) {
        tell(img, IMAGE_ROOM_SHORT, err_text(err));
        return;
    }
    g->full_until = now + FULL_NS;
    tell(img, IMAGE_ROOM_FULL, err_text(err));
    if (!alloc_knows_all(img)) /* with a full device it pays to look everywhere for free clusters */
        grow_look_again(img);
    fail_impatient(img);
}

SUSPENDS static int grow_main(void *arg)
{
    struct image *img = arg;
    struct grow *g = &img->grow;

    while (!g->stopping) {
        struct err err = {0};
        int rc = extend_some(img, &err);

        if (rc > 0)
            break;
        if (rc == 0) {
            g->need = 0; /* who needs more yet says so again */
            tell(img, IMAGE_ROOM_OK, "");
            grow_look_again(img);
            continue;
        }
        no_room(img, &err);
        if (list_empty(&g->waiters))
            break;
        (void)co_cond_wait_until(&g->kick, NULL, reactor_now() + RETRY_NS);
    }
    g->running = false;
    grow_look_again(img);
    return 0;
}

static void start(struct image *img)
{
    struct grow *g = &img->grow;

    if (g->running || g->stopping)
        return;
    g->running = true;
    if (co_group_spawn(&g->group, grow_main, img) == 0)
        return;
    g->running = false;
    wake_all(img, -ENOSPC); /* without memory nobody would */
}

void grow_stop(struct image *img)
{
    struct grow *g = &img->grow;

    g->stopping = true;
    co_cond_broadcast(&g->kick);
    (void)co_group_wait(&g->group);
    g->stopping = false;
    wake_all(img, 0);
    tell(img, IMAGE_ROOM_OK, ""); /* nobody writes to it any more */
}

/* ---- the allocator's side ---- */

void grow_note_end(struct image *img, uint64_t old_end)
{
    struct grow *g = &img->grow;
    uint64_t now = reactor_now();

    if (!img->blk->extendable)
        return;
    if (!g->nr_marks || now - g->marks[(g->nr_marks - 1) % GROW_MARKS].ns >=
                            2 * SAFE_TIMES * g->extend_ns / GROW_MARKS)
        g->marks[g->nr_marks++ % GROW_MARKS] =
            (struct grow_mark){now, old_end << img->hdr.cluster_bits};
    if (grow_mutation != GROW_NOT_AHEAD && !g->running && is_short(img) && now >= g->ahead_at)
        start(img);
}

int grow_no_room(struct image *img, uint64_t clusters)
{
    uint64_t bytes = clusters << img->hdr.cluster_bits;

    if (!img->blk->extendable)
        return -ENOSPC;
    img->grow.need = MAX(img->grow.need, bytes);
    return -ENOBUFS;
}

bool grow_may_help(const struct image *img)
{
    return img->blk->extendable && img->grow.room != IMAGE_ROOM_FULL;
}

int grow_wait(struct image *img, bool patient)
{
    struct grow *g = &img->grow;
    struct room_wait w = {.since = reactor_now(), .patient = patient};

    if (g->stopping)
        return 0;
    if (!patient && w.since < g->full_until)
        return -ENOSPC;
    g->late = true; /* and the rate is not what it would be */
    img->stats.room_waits++;
    wait_queue_init(&w.queue);
    list_push_back(&g->waiters, &w.link);
    start(img);
    if (g->room == IMAGE_ROOM_FULL && !patient)
        co_cond_broadcast(&g->kick);
    while (!w.done)
        wait_queue_sleep(&w.queue);
    return w.rc;
}

int image_wait_room(struct image *img)
{
    return grow_wait(img, img->opts.grow.on_full == IMAGE_FULL_WAIT);
}
