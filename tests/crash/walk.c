/* Sessions, and what is left of them: see walk.h. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "../model/keep.h"
#include "base/bits.h"
#include "base/own.h"
#include "load.h"
#include "qcow2/internal.h"
#include "rt/reactor.h"
#include "rt/sim.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "test.h"
#include "walk.h"

#define WRITERS      6u
#define LEGS         14u
#define TICK_NS      (400 * NSEC_PER_MSEC) /* the server's */
#define RING_RECORDS 256u                  /* small: it fills up */
#define PIECE        (32 * KIB)            /* of a look at everything */

struct file_copy {
    uint8_t *bytes; /* NULL: there is no file */
    size_t len;
};

struct walk {
    const struct config *cfg;
    enum mutation mutation;
    uint64_t seed, rng, ino;
    bool quiet;
    struct totals *t;
    struct blk *crash;
    uint64_t dev_len; /* of a volume that grows */
    struct sectors sectors;
    char dir[200], journal_path[300];
    uint64_t base_ns, now_ns; /* all sessions' time until this one, and until the last one's end */

    /* one session */
    struct image *img;
    bool is_foreign, is_slow, has_flushes, opened, dead, is_opening;
    uint64_t died_ns, records;
    struct file_copy journal; /* when it died */
    unsigned writers;

    /* between sessions */
    bool pending;     /* killed, with a journal that nobody replayed yet */
    uint64_t kill_ns; /* then: when */
    bool was_cut;     /* the last session that wrote ended so */
    uint64_t cut_ns;  /* then: when, by the clock of what it wrote */
    bool unknown;     /* others had it: what the file shows need not be on the device */
    unsigned events;  /* that may have taken answers */
    bool restore_epoch;
    uint8_t header[512];
};

static uint64_t pick(struct walk *w, uint64_t n)
{
    return rng_below(&w->rng, n);
}

static void violation(struct walk *w, const char *what, uint64_t a, uint64_t b)
{
    w->t->violations++;
    if (!w->quiet)
        test_fail(__FILE__, __LINE__, "%s, seed %llu: %s (%llu, %#llx)", w->cfg->name,
                  (unsigned long long)w->seed, what, (unsigned long long)a, (unsigned long long)b);
}

/* ---- the journal's file ---- */

static struct file_copy copy_file(const char *path)
{
    struct file_copy copy = {0};
    struct stat st;
    _cleanup_(closep) int fd = open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0)
        return copy;
    CHECK_EQ(fstat(fd, &st), 0);
    copy.len = (size_t)st.st_size;
    copy.bytes = malloc(copy.len);
    CHECK(read(fd, copy.bytes, copy.len) == (ssize_t)copy.len);
    return copy;
}

static void put_file(const char *path, const struct file_copy *copy)
{
    (void)unlink(path);
    if (!copy->bytes)
        return;
    _cleanup_(closep) int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    CHECK(fd >= 0 && write(fd, copy->bytes, copy->len) == (ssize_t)copy->len);
}

/* The runtime directory was on a disk: the journal is there, of an earlier boot. */
static void age_boot(struct file_copy *copy)
{
    char boot[40] = {0};
    _cleanup_(closep) int fd = open("/proc/sys/kernel/random/boot_id", O_RDONLY | O_CLOEXEC);

    CHECK(fd >= 0 && read(fd, boot, 36) == 36);
    for (uint8_t *at = copy->bytes;
         (at = memmem(at, (size_t)(copy->bytes + copy->len - at), boot, 36)); at++)
        memset(at, '0', 8);
}

/* A small ring, so that writers meet its end. */
static void make_small_journal(struct walk *w)
{
    struct journal *j;

    if (access(w->journal_path, F_OK) == 0)
        return;
    CHECK_EQ(
        journal_open(w->journal_path, &(struct journal_opts){.nr_records = RING_RECORDS}, &j, NULL),
        0);
    journal_close(j);
}

/* ---- one session ---- */

/* The first request that is refused: from here on the process does not exist. */
static void died(void *ctx)
{
    struct walk *w = ctx;

    if (w->dead)
        return;
    w->dead = true;
    w->died_ns = w->base_ns + reactor_now();
    w->journal = copy_file(w->journal_path);
    w->records = w->img && !w->is_foreign ? image_records(w->img) : 0;
}

static const struct image_below *below_of(const struct walk *w)
{
    return w->cfg->has_below ? &sectors_below : NULL;
}

/* An extension is there, whoever asked for it; or it is not. */
SUSPENDS_UNCHECKED static int extend(void *ctx, uint64_t *len)
{
    struct walk *w = ctx;

    if (*len) {
        timer_sleep(rng_below(&w->rng, 3000000));
        if (sim_stopped())
            return -EIO;
        w->dev_len = MAX(w->dev_len, align_up(*len, 64 * KIB));
    }
    *len = w->dev_len;
    return 0;
}

static struct blk *device(struct walk *w)
{
    return keep_new_as(w->crash, &(struct keep_opts){.fixed_len = w->cfg->fixed_len,
                                                     .len = w->cfg->chunk ? w->dev_len : 0,
                                                     .extend = w->cfg->chunk ? extend : NULL,
                                                     .ino = w->ino,
                                                     .refused = died,
                                                     .ctx = w,
                                                     .drop_flushes = &w->is_opening});
}

SUSPENDS static int open_image(struct walk *w, bool writable, struct image **ret, struct err *err)
{
    struct image_opts opts = {.writable = writable,
                              .ack = writable && !w->is_foreign,
                              .journal_dir = w->is_foreign ? NULL : w->dir,
                              .cache_bytes = w->cfg->cache_bytes,
                              .grow.chunk = w->cfg->chunk,
                              .prealloc_step = MIB};
    struct blk *blk = device(w);
    int rc = image_open(blk, &opts, ret, err);

    if (rc < 0)
        blk_close(blk);
    return rc;
}

static void look_at_sector(struct walk *w, uint64_t s, const uint64_t *words, bool settle)
{
    for (unsigned i = 1; i < SECTOR / 8; i++)
        if (words[i] != words[0])
            return violation(w, "a sector is of two pieces", s, words[i]);
    struct op *op = op_shown(&w->sectors, s, words[0]);
    if (!op) {
        if (!w->quiet)
            ops_print(&w->sectors, s);
        return violation(w, "a sector holds what it must not", s, words[0]);
    }
    if (w->pending && ops_lost_since(&w->sectors, s, op, 0) != NEVER) {
        if (!w->quiet)
            ops_print(&w->sectors, s);
        violation(w, "an answered write is lost by a kill", s, words[0]);
    }
    uint64_t since = w->was_cut ? ops_lost_since(&w->sectors, s, op, w->events) : NEVER;
    if (since != NEVER)
        w->t->oldest_ns = MAX(w->t->oldest_ns, w->cut_ns - since);
    if (settle)
        op_stays(&w->sectors, s, op);
}

/* settle: what is there is on the device, too, and stays. */
SUSPENDS static void look(struct walk *w, struct image *img, bool settle)
{
    uint8_t *buf = malloc(PIECE);

    for (uint64_t off = 0; off < w->sectors.nr * SECTOR && !w->dead; off += PIECE) {
        uint64_t len = MIN((uint64_t)PIECE, w->sectors.nr * SECTOR - off);

        IOV_ITER_BUF(it, vec, buf, len);
        int rc = image_read(img, off, len, &it, below_of(w));
        if (rc < 0 && !w->dead)
            violation(w, "what is there cannot be read", off, (uint64_t)-rc);
        for (uint64_t at = 0; rc == 0 && at < len; at += SECTOR)
            look_at_sector(w, (off + at) / SECTOR, (const uint64_t *)(buf + at), settle);
    }
    free(buf);
}

static void print_finding(void *ctx, const char *line)
{
    struct walk *w = ctx;

    if (!w->quiet && !w->dead && strncmp(line, "leaked", 6) != 0)
        fprintf(stderr, "  %s\n", line);
}

SUSPENDS static void check(struct walk *w, struct image *img)
{
    struct image_check res;
    int rc = image_check(img, &res, print_finding, w, NULL);

    if (w->dead)
        return;
    if (rc < 0)
        violation(w, "the check fails", (uint64_t)-rc, 0);
    else if (res.corruptions || res.check_errors)
        violation(w, "the check finds corruption", res.corruptions, res.check_errors);
}

/* As QEMU finds the file, or as replay would make it. */
SUSPENDS static void check_file(struct walk *w)
{
    struct image_opts opts = {.no_open_checks = true, .journal_dir = pick(w, 2) ? w->dir : NULL};
    struct blk *blk = device(w);
    struct image *img;

    if (image_open(blk, &opts, &img, NULL) < 0) {
        blk_close(blk);
        if (!w->dead)
            violation(w, "the image does not open for the check", 0, 0);
        return;
    }
    check(w, img);
    (void)image_close(img, NULL);
}

SUSPENDS static void look_read_only(struct walk *w)
{
    struct image *img;
    struct err err = {0};

    if (open_image(w, false, &img, &err) < 0) {
        if (!w->dead)
            violation(w, err_text(&err), 0, 0);
        return;
    }
    look(w, img, false);
    (void)image_close(img, NULL);
    w->t->views++;
}

SUSPENDS static int writer(void *arg)
{
    struct walk *w = arg;
    struct load load = {.sectors = &w->sectors,
                        .img = w->img,
                        .below = below_of(w),
                        .rng = &w->rng,
                        .max_sectors = w->cfg->max_sectors,
                        .flushes = w->has_flushes ? 2 : 0,
                        .base_ns = w->base_ns,
                        .over = &w->dead};

    for (unsigned i = 0; i < 120 && !w->dead; i++) {
        int rc = load_op(&load);

        /* leaks of kills may have filled a small volume */
        if (rc < 0 && !w->dead && !(rc == -ENOSPC && w->cfg->fixed_len)) {
            violation(w, "an operation failed", i, (uint64_t)-rc);
            break;
        }
        timer_sleep(pick(w, (w->is_slow ? 120 : 4) * NSEC_PER_MSEC));
    }
    w->writers--;
    return 0;
}

/* What the server does every now and then. */
SUSPENDS static int write_back(void *arg)
{
    struct walk *w = arg;

    for (uint64_t next = TICK_NS; w->writers > 0 && !w->dead;) {
        timer_sleep(20 * NSEC_PER_MSEC);
        if ((next -= MIN(next, 20 * NSEC_PER_MSEC)) > 0)
            continue;
        next = TICK_NS;
        if (!w->is_foreign && w->mutation != NO_WRITE_BACK)
            (void)image_write_back_old(w->img);
    }
    return 0;
}

SUSPENDS static void run_writers(struct walk *w)
{
    struct co_group group;

    co_group_init(&group);
    w->writers = WRITERS;
    for (unsigned i = 0; i < WRITERS; i++)
        CHECK_EQ(co_group_spawn(&group, writer, w), 0);
    CHECK_EQ(co_group_spawn(&group, write_back, w), 0);
    CHECK_EQ(co_group_wait(&group), 0);
}

/* The image is open: what that settles. */
SUSPENDS static void opened(struct walk *w)
{
    bool settle = !w->is_foreign && !w->unknown;

    w->opened = true;
    if (w->pending) /* replayed, and flushed */
        ops_durable_until(&w->sectors, w->kill_ns);
    look(w, w->img, settle);
    if (w->is_foreign || w->dead)
        return;
    w->pending = w->was_cut = w->unknown = false;
    if (settle && pick(w, 3) == 0)
        check(w, w->img);
}

SUSPENDS static void put_epoch_back(struct walk *w)
{
    w->restore_epoch = false;
    (void)blk_write(w->crash, 0, w->header, sizeof(w->header));
}

SUSPENDS static int session(void *arg)
{
    struct walk *w = arg;
    struct err err = {0};

    if (w->restore_epoch && !w->is_foreign)
        put_epoch_back(w);
    if (w->mutation == ANY_EPOCH && w->is_foreign)
        w->restore_epoch = blk_read(w->crash, 0, w->header, sizeof(w->header)) == 0;
    if (pick(w, 2))
        check_file(w);
    if (!w->is_foreign && !w->unknown && pick(w, 3) == 0)
        look_read_only(w);
    w->is_opening = w->mutation == UNFLUSHED_OPEN;
    int rc = w->dead ? -EIO : open_image(w, true, &w->img, &err);
    w->is_opening = false;
    if (rc < 0) {
        if (!w->dead)
            violation(w, err_text(&err), 0, 0);
        w->now_ns = w->base_ns + reactor_now();
        return 0;
    }
    if (!w->dead)
        opened(w);
    if (!w->dead && !w->t->violations)
        run_writers(w);
    rc = image_close(TAKE_PTR(w->img), &err);
    if (rc < 0 && !w->dead)
        violation(w, err_text(&err), 0, 0);
    w->now_ns = w->base_ns + reactor_now();
    return 0;
}

/* ---- what is left of it ---- */

static void was_killed(struct walk *w)
{
    w->t->kills++;
    w->t->in_open_kills += !w->opened;
    w->t->records += w->records;
    w->t->kills_with_records += w->records > 0;
    CHECK_EQ(blk_crash_kill(w->crash, w->rng), 0);
    if (w->mutation == NO_JOURNAL)
        w->journal.len = 0;
    if (!w->opened || w->is_foreign)
        return; /* as pending as it was */
    w->pending = true;
    w->kill_ns = w->died_ns;
}

static void was_cut(struct walk *w)
{
    struct blk_crash_report report;
    /* an image that was only being opened has written nothing of its own */
    uint64_t end = w->opened && !w->is_foreign ? w->died_ns : w->kill_ns;

    w->t->cuts++;
    w->t->in_open_cuts += !w->opened && w->pending;
    CHECK_EQ(blk_crash_restart(w->crash, w->rng, &report), 0);
    w->t->at_risk += report.unflushed_sectors;
    w->t->lost += report.lost_sectors;
    if ((w->opened || w->pending) && !w->is_foreign) {
        ops_durable_until(&w->sectors, end > BOUND_NS ? end - BOUND_NS : 0);
        w->was_cut = true;
        w->cut_ns = end;
    }
    ops_claim_nothing(&w->sectors, ++w->events);
    w->pending = w->unknown = false;
    if (w->mutation == ANY_BOOT || !w->journal.bytes)
        return;
    if (pick(w, 2))
        age_boot(&w->journal);
    else
        w->journal.len = 0; /* it was in memory */
}

static void settle_end(struct walk *w)
{
    w->base_ns = w->now_ns;
    if (!w->dead) {
        w->t->closed++;
        ops_durable_until(&w->sectors, w->now_ns);
        w->pending = w->was_cut = w->unknown = false;
        if (!w->is_foreign && !w->t->violations && access(w->journal_path, F_OK) == 0)
            violation(w, "a closed image has a journal", 0, 0);
        return;
    }
    if (w->is_foreign)
        ops_claim_nothing(&w->sectors, ++w->events);
    if (pick(w, 2))
        was_killed(w);
    else
        was_cut(w);
    if (!w->journal.len)
        free(TAKE_PTR(w->journal.bytes));
    put_file(w->journal_path, &w->journal);
    free(TAKE_PTR(w->journal.bytes));
}

/* Another program comes. What was old enough when the last session was killed is on the device. */
static void others_come(struct walk *w)
{
    if (w->pending)
        ops_durable_until(&w->sectors, w->kill_ns > BOUND_NS ? w->kill_ns - BOUND_NS : 0);
    ops_claim_nothing(&w->sectors, ++w->events);
    w->pending = w->was_cut = false;
    w->unknown = true;
    w->t->foreign++;
}

static void one_session(struct walk *w)
{
    struct sim_opts opts = {.seed = w->seed * LEGS + w->t->legs,
                            .stop_after_io =
                                pick(w, 3) == 0 ? 1 + pick(w, 150) : 150 + pick(w, 1500)};

    w->is_foreign = pick(w, 8) == 0;
    w->is_slow = pick(w, 2);
    w->has_flushes = pick(w, 2);
    w->opened = w->dead = false;
    w->died_ns = w->records = 0;
    w->t->legs++;
    if (w->is_foreign)
        others_come(w);
    else
        make_small_journal(w);
    CHECK_EQ(sim_run(&opts, session, w), 0);
    settle_end(w);
}

SUSPENDS static int make_image(void *arg)
{
    struct walk *w = arg;
    struct image_create_opts create = w->cfg->create;

    CHECK_EQ(blk_crash_new(w->cfg->fixed_len, &w->crash), 0);
    CHECK_EQ(load_old_data(w->crash, w->cfg->fixed_len), 0);
    w->dev_len = w->cfg->chunk;
    struct blk *blk = device(w);
    create.backing_name = w->cfg->has_below ? "below" : NULL;
    CHECK_EQ(image_create(blk, &create, NULL), 0);
    CHECK_EQ(blk_flush(blk), 0);
    blk_close(blk);
    return 0;
}

SUSPENDS static int close_device(void *arg)
{
    blk_close(arg);
    return 0;
}

void walk(const struct config *cfg, uint64_t seed, enum mutation m, bool quiet, struct totals *t)
{
    static uint64_t ino;
    struct walk w = {.cfg = cfg,
                     .mutation = m,
                     .seed = seed,
                     .rng = seed * 2654435761u + 1,
                     .ino = ++ino,
                     .quiet = quiet,
                     .t = t};
    struct journal_id id = {.dev = 1, .ino = w.ino};

    snprintf(w.dir, sizeof(w.dir), "%s/journal", test_dir());
    (void)mkdir(w.dir, 0700);
    CHECK_EQ(journal_path(w.dir, &id, w.journal_path, sizeof(w.journal_path)), 0);
    sectors_init(&w.sectors, cfg->create.virtual_len / SECTOR, cfg->has_below);
    CHECK_EQ(sim_run(&(struct sim_opts){.seed = seed}, make_image, &w), 0);
    for (unsigned i = 0; i < (cfg->legs ? cfg->legs : LEGS) && !t->violations; i++)
        one_session(&w);
    CHECK_EQ(sim_run(&(struct sim_opts){.seed = seed}, close_device, w.crash), 0);
    (void)unlink(w.journal_path);
    sectors_fini(&w.sectors);
}
