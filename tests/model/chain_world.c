/* The world of the chain model; see chain_world.h. */
#include "chain_world.h"
#include <unistd.h>

const char *const op_names[OPS] = {"read",     "write",  "zero",          "discard",      "flush",
                                   "snapshot", "commit", "active commit", "stream",       "resize",
                                   "rollback", "reopen", "power cut",     "cancelled job"};

/* ---- what happened last, for a failure's message ---- */

#define TRAIL 4096u

struct trail {
    unsigned op;
    uint64_t first, nr, stamp;
};

static struct trail trail[TRAIL];
static uint64_t trail_len;

void trail_add(unsigned op, uint64_t first, uint64_t nr, uint64_t stamp)
{
    trail[trail_len++ % TRAIL] = (struct trail){op, first, nr, stamp};
}

/* What concerns a sector, newest first; changes of shape concern all. */
void trail_print(uint64_t sector)
{
    for (uint64_t i = 0; i < TRAIL && i < trail_len; i++) {
        const struct trail *t = &trail[(trail_len - 1 - i) % TRAIL];

        if (t->op > OP_FLUSH || (t->first <= sector && sector < t->first + t->nr))
            fprintf(stderr, "  -%llu %s %llu+%llu %llu\n", (unsigned long long)i, op_names[t->op],
                    (unsigned long long)t->first, (unsigned long long)t->nr,
                    (unsigned long long)t->stamp);
    }
}

/* ---- history ---- */

void sector_set(struct world *w, uint64_t i, uint64_t stamp)
{
    w->sectors[i].stamp = stamp;
}

void history_begin(struct world *w, uint64_t first, uint64_t nr, uint64_t stamp)
{
    for (uint64_t i = first; w->cuts && i < first + nr; i++)
        CHECK_EQ(vec_push(&w->sectors[i].history, {stamp, 0}), 0);
}

void history_done(struct world *w, uint64_t first, uint64_t nr)
{
    uint64_t now = ++w->clock;

    for (uint64_t i = first; w->cuts && i < first + nr; i++)
        w->sectors[i].history.data[w->sectors[i].history.len - 1].done = now;
}

/* A flush issued at `since` is done: of what was answered before it only the newest may remain. */
void history_flushed(struct world *w, uint64_t since)
{
    for (uint64_t i = 0; w->cuts && i < LEN_MAX / RIG_SECTOR; i++) {
        struct sector *s = &w->sectors[i];
        size_t keep = 0;

        for (size_t k = 0; k < s->history.len; k++)
            if (s->history.data[k].done && s->history.data[k].done <= since)
                keep = k;
        memmove(s->history.data, s->history.data + keep,
                (s->history.len - keep) * sizeof(*s->history.data));
        s->history.len -= keep;
    }
}

void history_reset(struct world *w, uint64_t first)
{
    for (uint64_t i = first; i < LEN_MAX / RIG_SECTOR; i++) {
        struct sector *s = &w->sectors[i];

        s->history.len = 0;
        CHECK_EQ(vec_push(&s->history, {s->stamp, ++w->clock}), 0);
    }
}

void history_check(const struct world *w, uint64_t i, uint64_t stamp)
{
    const struct sector *s = &w->sectors[i];

    for (size_t k = 0; k < s->history.len; k++)
        if (s->history.data[k].stamp == stamp)
            return;
    test_fail(__FILE__, __LINE__, "sector %llu is %llu after a power cut, flushed was %llu",
              (unsigned long long)i, (unsigned long long)stamp,
              (unsigned long long)s->history.data[0].stamp);
}

/* ---- devices ---- */

static void disk_free(struct disk *d)
{
    free(d->view);
    free(d);
}

const char *path_of(const struct world *w, const struct disk *d)
{
    static char path[2][256];
    static unsigned turn;

    turn ^= 1;
    snprintf(path[turn], sizeof(path[turn]), "%s/%s", w->files ? test_dir() : "", d->name);
    return w->files ? path[turn] : d->name;
}

SUSPENDS struct disk *disk_new(struct world *w, const struct rig_shape *shape,
                               const struct disk *backing)
{
    struct disk *d = calloc(1, sizeof(*d));
    struct blk *dev;

    CHECK(d);
    snprintf(d->name, sizeof(d->name), "d%u", ++w->last_name);
    d->qcow2 = !shape->raw;
    d->len = shape->len;
    if (w->files) {
        struct blk_file_opts opts = {
            .writable = true, .create = true, .truncate = true, .lock = BLK_LOCK_WRITE};
        MUST(blk_file_open(path_of(w, d), &opts, &dev, &err));
    } else if (w->cuts) {
        CHECK_EQ(blk_crash_new(0, &dev), 0);
    } else {
        CHECK_EQ(blk_mem_new(0, 1, &dev), 0);
    }
    rig_create(dev, shape, backing ? backing->name : NULL,
               !backing || backing->qcow2 ? "qcow2" : "raw");
    CHECK_EQ(blk_flush(dev), 0);
    if (w->files)
        blk_close(dev);
    else
        d->dev = dev;
    return d;
}

SUSPENDS void disk_drop(struct world *w, struct disk *d)
{
    if (d->dev)
        blk_close(d->dev);
    else
        unlink(path_of(w, d));
    disk_free(d);
}

SUSPENDS struct layer *disk_open(struct world *w, struct disk *d, bool writable)
{
    struct layer_opts opts = {.writable = writable,
                              .format = d->qcow2 ? "qcow2" : "raw",
                              .prealloc_step = rnd(w, 2) ? UINT64_MAX : 256 * KIB,
                              .space = {.ignore_discard = rnd(w, 8) == 0,
                                        .discard = (enum image_discard)rnd(w, 2),
                                        .detect_zeroes = (enum detect_zeroes)rnd(w, 3)}};
    struct layer *layer;

    if (!w->files)
        return rig_open_as(d->dev, d->qcow2, &opts, d->name);
    MUST(layer_open(path_of(w, d), &opts, &layer, &err));
    return layer;
}

SUSPENDS void open_chain(struct world *w)
{
    struct layer *layers[DEPTH_MAX + 1];

    for (size_t i = 0; i < w->disks.len; i++)
        layers[i] = disk_open(w, w->disks.data[i], i == 0);
    MUST(chain_from_layers(layers, (unsigned)w->disks.len, rnd(w, 2) ? 0 : 64 * KIB, &w->chain,
                           &err));
}

SUSPENDS void check_clean(struct world *w)
{
    for (size_t i = 0; i < w->disks.len; i++) {
        struct disk *d = w->disks.data[i];

        if (!d->qcow2)
            continue;
        if (w->files)
            test_sh("qemu-img check -q %s", path_of(w, d));
        else
            CHECK_EQ(rig_check(d->dev, d->name), 0);
    }
}

/* ---- power cuts ---- */

struct copies {
    struct blk *dev[DEPTH_MAX + 1];
    char name[DEPTH_MAX + 1][NAME_LEN]; /* the disks themselves may be dropped meanwhile */
    bool qcow2[DEPTH_MAX + 1];
    unsigned nr;
};

static unsigned find_copy(const struct copies *c, const char *name)
{
    unsigned i = 0;

    while (i < c->nr && strcmp(c->name[i], name) != 0)
        i++;
    if (i == c->nr)
        test_fail(__FILE__, __LINE__, "backing file %s is gone", name);
    return i;
}

/* The chain as the surviving headers have it. */
SUSPENDS static struct chain *open_survivors(struct copies *c)
{
    struct layer *layers[DEPTH_MAX + 1];
    struct chain *chain;
    unsigned nr = 0, next = 0;

    for (bool more = true; more;) {
        const char *name = NULL;

        layers[nr] = rig_open(c->dev[next], c->qcow2[next], nr == 0, c->name[next]);
        if (layer_image(layers[nr]))
            name = image_header(layer_image(layers[nr]))->backing_name;
        nr++;
        more = name && *name;
        if (more)
            next = find_copy(c, name);
    }
    CHECK_EQ(chain_from_layers(layers, nr, 0, &chain, NULL), 0);
    return chain;
}

/* The histories as they were at the cut: guests go on while the copy is looked at. */
static struct sector *copy_sectors(const struct world *w)
{
    struct sector *copy = calloc(LEN_MAX / RIG_SECTOR, sizeof(*copy));

    CHECK(copy);
    for (uint64_t i = 0; i < LEN_MAX / RIG_SECTOR; i++) {
        const struct sector *s = &w->sectors[i];

        CHECK_EQ(vec_reserve(&copy[i].history, s->history.len), 0);
        memcpy(copy[i].history.data, s->history.data, s->history.len * sizeof(struct value));
        copy[i].history.len = s->history.len;
    }
    return copy;
}

void free_sectors(struct sector *sectors)
{
    for (uint64_t i = 0; i < LEN_MAX / RIG_SECTOR; i++)
        vec_free(&sectors[i].history);
    free(sectors);
}

SUSPENDS static void check_survivors(struct world *w, struct copies *c)
{
    for (unsigned i = 0; i < c->nr; i++)
        if (c->qcow2[i])
            w->leaks_seen += rig_check(c->dev[i], c->name[i]);
    struct chain *chain = open_survivors(c);
    CHECK_EQ(chain_len(chain), w->cut_len);
    uint8_t *view = rig_view(chain, NULL);
    for (uint64_t i = 0; i < w->len / RIG_SECTOR; i++)
        history_check(w, i, rig_stamp(view + i * RIG_SECTOR, i * RIG_SECTOR));
    free(view);
    CHECK_EQ(chain_close(chain, NULL), 0);
    for (unsigned i = 0; i < c->nr; i++)
        blk_close(c->dev[i]);
}

/* The disks that exist; the first is the current one. No wait: one instant. */
static void cut_power(struct world *w, struct copies *c)
{
    struct blk_crash_report report;

    c->nr = 0;
    for (size_t i = 0; i < w->disks.len; i++) {
        const struct disk *d = w->disks.data[i];

        CHECK_EQ(blk_crash_cut(d->dev, rng_next(&w->rng), &c->dev[c->nr], &report), 0);
        memcpy(c->name[c->nr], d->name, NAME_LEN);
        c->qcow2[c->nr++] = d->qcow2;
        w->unflushed_seen += report.unflushed_sectors;
    }
    w->cuts_done++;
    w->counts[OP_CUT]++;
}

SUSPENDS void do_cut(struct world *w)
{
    struct copies c;
    struct world then = {.len = w->len, .cut_len = w->cut_len ? w->cut_len : w->len};

    if (!w->cuts)
        return;
    cut_power(w, &c);
    then.sectors = copy_sectors(w);
    check_survivors(&then, &c);
    w->leaks_seen += then.leaks_seen;
    free_sectors(then.sectors);
}

/* At any moment: in the middle of a push, of the end of a job, of a flush. */
SUSPENDS int cutter(void *arg)
{
    struct world *w = arg;

    while (!w->stop) {
        timer_sleep(rnd(w, 6000000));
        if (!w->no_cuts)
            do_cut(w);
    }
    return 0;
}
