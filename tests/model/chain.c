/*
 * Random operations on random chains against a plain array: guests read, write, zero, discard and
 * flush in coroutines of their own while layers are pushed, committed, streamed, resized, rolled
 * back to and reopened. In the simulator every device is memory with a volatile cache: at
 * random moments the power is cut on a copy of all devices, and what was flushed must be there.
 *
 * Layers are files of a made-up directory: a backing name is a device's name, so that what a
 * reopened chain consists of is what the headers say, as after a real crash.
 *
 * VARVE_SEED chooses another run; VARVE_MODEL_OPS the operations of one (default below);
 * VARVE_MODEL_CAREFUL=1 looks at the whole disk after every change of shape.
 */
#include "chain_world.h"
#include <stdio.h>
#include "rt/reactor.h"

#define GUESTS 6u

/* ---- guests ---- */

SUSPENDS static void guest_read(struct world *w, uint64_t first, uint64_t nr)
{
    struct buf b = {buf_get(nr * RIG_SECTOR), nr * RIG_SECTOR};

    CHECK_EQ(rig_read(w->chain, first * RIG_SECTOR, b.data, b.len), 0);
    for (uint64_t i = 0; i < nr; i++) {
        uint64_t got = rig_stamp((char *)b.data + i * RIG_SECTOR, (first + i) * RIG_SECTOR);
        if (got != w->sectors[first + i].stamp) {
            trail_print(first + i);
            test_fail(__FILE__, __LINE__, "sector %llu of %llu: read %llu, written %llu, depth %u",
                      (unsigned long long)(first + i), (unsigned long long)w->len / RIG_SECTOR,
                      (unsigned long long)got, (unsigned long long)w->sectors[first + i].stamp,
                      chain_depth(w->chain));
        }
    }
    buf_drop(&b);
}

SUSPENDS static void guest_put(struct world *w, uint64_t first, uint64_t nr, uint64_t stamp)
{
    uint64_t off = first * RIG_SECTOR, len = nr * RIG_SECTOR;

    trail_add(stamp ? OP_WRITE : OP_ZERO, first, nr, stamp);
    history_begin(w, first, nr, stamp);
    if (stamp || rnd(w, 2) == 0) /* zeroes, too, are written: with detect-zeroes that is the same */
        CHECK_EQ(rig_write(w->chain, off, len, stamp), 0);
    else
        CHECK_EQ(chain_zero(w->chain, off, len, rnd(w, 2) ? BLK_MAY_UNMAP : 0), 0);
    for (uint64_t i = first; i < first + nr; i++)
        sector_set(w, i, stamp);
    history_done(w, first, nr);
}

/* Whole clusters become zero, edges stay: each sector is one of the two. */
SUSPENDS static void guest_discard(struct world *w, uint64_t first, uint64_t nr)
{
    struct buf b = {buf_get(nr * RIG_SECTOR), nr * RIG_SECTOR};

    trail_add(OP_DISCARD, first, nr, 0);
    history_begin(w, first, nr, 0);
    CHECK_EQ(chain_discard(w->chain, first * RIG_SECTOR, b.len), 0);
    CHECK_EQ(rig_read(w->chain, first * RIG_SECTOR, b.data, b.len), 0);
    for (uint64_t i = 0; i < nr; i++) {
        uint64_t got = rig_stamp((char *)b.data + i * RIG_SECTOR, (first + i) * RIG_SECTOR);
        CHECK(got == 0 || got == w->sectors[first + i].stamp);
        sector_set(w, first + i, got);
        if (w->cuts) /* the edge that stayed */
            w->sectors[first + i].history.data[w->sectors[first + i].history.len - 1].stamp = got;
    }
    history_done(w, first, nr);
    buf_drop(&b);
}

SUSPENDS static void guest_flush(struct world *w)
{
    uint64_t since = ++w->clock;

    CHECK_EQ(chain_flush(w->chain), 0);
    history_flushed(w, since);
}

SUSPENDS static void guest_op(struct world *w)
{
    uint64_t sectors = w->len / RIG_SECTOR, what = rnd(w, 100);
    uint64_t first = rnd(w, sectors), nr = 1 + rnd(w, rnd(w, 6) ? 24 : 1024);
    struct range r;

    if (rnd(w, 3) == 0) { /* aligned ones are the common case */
        first = align_down(first, 8);
        nr = align_up(nr, 8);
    }
    nr = MIN(nr, sectors - first);
    unsigned op = what < 35   ? OP_READ
                  : what < 78 ? OP_WRITE
                  : what < 87 ? OP_ZERO
                  : what < 94 ? OP_DISCARD
                              : OP_FLUSH;
    w->counts[op]++;
    w->ops++;
    if (op == OP_FLUSH) {
        guest_flush(w);
        return;
    }
    range_lock(&w->ranges, &r, first * RIG_SECTOR, nr * RIG_SECTOR);
    if (op == OP_READ)
        guest_read(w, first, nr);
    else if (op == OP_DISCARD)
        guest_discard(w, first, nr);
    else
        guest_put(w, first, nr, op == OP_WRITE ? ++w->next_stamp : 0);
    range_unlock(&r);
}

SUSPENDS static int guest(void *arg)
{
    struct world *w = arg;

    while (!w->stop) {
        gate_enter(&w->gate);
        guest_op(w);
        gate_leave(&w->gate);
        if (rnd(w, 2) == 0)
            timer_sleep(rnd(w, 2000000));
    }
    return 0;
}

/* ---- checks of the whole ---- */

SUSPENDS static void check_view(struct world *w)
{
    CHECK_EQ(chain_len(w->chain), w->len);
    for (uint64_t i = 0; i < w->len / RIG_SECTOR; i += 512)
        guest_read(w, i, MIN((uint64_t)512, w->len / RIG_SECTOR - i));
}

/* What a snapshot showed when it was taken. */
SUSPENDS static void check_snapshot(struct world *w, unsigned index)
{
    struct disk *d = w->disks.data[index];
    uint8_t *view = rig_view(w->chain, chain_layer(w->chain, index));

    CHECK_EQ(layer_len(chain_layer(w->chain, index)), d->len);
    for (uint64_t off = 0; off < d->len; off += RIG_SECTOR) {
        uint64_t got = rig_stamp(view + off, off), want = rig_stamp(d->view + off, off);

        if (got == want)
            continue;
        trail_print(off / RIG_SECTOR);
        test_fail(__FILE__, __LINE__, "snapshot %s at depth %u, sector %llu: %llu was %llu",
                  d->name, index, (unsigned long long)off / RIG_SECTOR, (unsigned long long)got,
                  (unsigned long long)want);
    }
    free(view);
}

/* ---- changes of shape; the main coroutine, guests going on unless drained ---- */

static uint64_t random_len(struct world *w)
{
    uint64_t len = 256 * KIB + rnd(w, LEN_MAX - 256 * KIB);

    return rnd(w, 2) ? align_down(len, 64 * KIB) : align_down(len, RIG_SECTOR);
}

static void set_len(struct world *w, uint64_t len)
{
    for (uint64_t i = MIN(len, w->len) / RIG_SECTOR; i < LEN_MAX / RIG_SECTOR; i++)
        sector_set(w, i, 0);
    history_reset(w, MIN(len, w->len) / RIG_SECTOR);
    w->len = len;
}

/* The array as bytes. Guests are drained. */
static uint8_t *array_view(const struct world *w)
{
    uint8_t *view = malloc(w->len + 1);

    CHECK(view);
    for (uint64_t i = 0; i < w->len / RIG_SECTOR; i++)
        rig_fill(view + i * RIG_SECTOR, i * RIG_SECTOR, RIG_SECTOR, w->sectors[i].stamp);
    return view;
}

static void insert_top(struct world *w, struct disk *d)
{
    CHECK_EQ(vec_reserve(&w->disks, w->disks.len + 1), 0);
    memmove(w->disks.data + 1, w->disks.data, w->disks.len * sizeof(*w->disks.data));
    w->disks.data[0] = d;
    w->disks.len++;
}

/* A snapshot under running guests; its view can be told only where none is under way. */
SUSPENDS static void do_push(struct world *w)
{
    struct rig_shape shape = rig_random_shape(&w->rng, w->len, false);
    bool drained = rnd(w, 2);
    struct layer *layer;

    if (w->disks.len >= DEPTH_MAX)
        return;
    struct disk *d = disk_new(w, &shape, w->disks.data[0]);
    layer = disk_open(w, d, true);
    if (drained)
        gate_close(&w->gate);
    if (rnd(w, 4) == 0)
        do_cut(w);
    insert_top(w, d); /* it is current before it takes writes: both read the same */
    MUST(chain_push(w->chain, layer, NULL, &err));
    struct disk *old = w->disks.data[1];
    if (drained) {
        history_flushed(w, ++w->clock); /* a pivot flushes */
        old->view = array_view(w);
        gate_open(&w->gate);
    } else {
        old->view = rig_view(w->chain, chain_layer(w->chain, 1));
    }
    trail_add(OP_PUSH, shape.cluster_size, shape.extended_l2, w->last_name);
    w->counts[OP_PUSH]++;
}

SUSPENDS static void wait_drained(struct world *w)
{
    gate_close(&w->gate);
}

SUSPENDS static void do_resize(struct world *w)
{
    uint64_t len = random_len(w);

    wait_drained(w);
    w->no_cuts = true;
    MUST(chain_resize(w->chain, len, &err));
    set_len(w, len);
    w->disks.data[0]->len = len;
    /* a resize is durable on the image's side only with the next flush */
    CHECK_EQ(chain_flush(w->chain), 0);
    history_reset(w, 0);
    w->no_cuts = false;
    gate_open(&w->gate);
    trail_add(OP_RESIZE, len / RIG_SECTOR, 0, 0);
    w->counts[OP_RESIZE]++;
}

SUSPENDS static void do_reopen(struct world *w)
{
    wait_drained(w);
    w->no_cuts = true;
    MUST(chain_close(w->chain, &err));
    history_reset(w, 0);
    check_clean(w);
    open_chain(w);
    w->no_cuts = false;
    gate_open(&w->gate);
    trail_add(OP_REOPEN, 0, 0, w->disks.len);
    w->counts[OP_REOPEN]++;
}

/* Back to the snapshot at `index`: a new overlay on it; what was above is dropped. */
SUSPENDS static void do_rollback(struct world *w)
{
    if (w->disks.len < 2)
        return;
    unsigned index = 1 + (unsigned)rnd(w, w->disks.len - 1);
    struct disk *to = w->disks.data[index];
    struct rig_shape shape = rig_random_shape(&w->rng, to->len, false);

    wait_drained(w);
    w->no_cuts = true;
    MUST(chain_close(w->chain, &err));
    for (unsigned i = 0; i < index; i++)
        disk_drop(w, w->disks.data[i]);
    memmove(w->disks.data, w->disks.data + index, (w->disks.len - index) * sizeof(*w->disks.data));
    w->disks.len -= index;
    insert_top(w, disk_new(w, &shape, to));
    w->len = to->len;
    for (uint64_t i = 0; i < LEN_MAX / RIG_SECTOR; i++)
        sector_set(w, i,
                   i < to->len / RIG_SECTOR ? rig_stamp(to->view + i * RIG_SECTOR, i * RIG_SECTOR)
                                            : 0);
    history_reset(w, 0);
    free(TAKE_PTR(to->view));
    open_chain(w);
    to->view = rig_view(w->chain, chain_layer(w->chain, 1));
    check_view(w);
    w->no_cuts = false;
    gate_open(&w->gate);
    trail_add(OP_ROLLBACK, 0, 0, w->disks.len);
    w->counts[OP_ROLLBACK]++;
}

/* ---- jobs ---- */

static void job_note(void *ctx, const struct job_info *info, enum job_event event)
{
    struct world *w = ctx;

    if (event == JOB_EVENT_READY || (event == JOB_EVENT_STATE && info->state == JOB_PENDING))
        w->job_ready = true;
    if (info->state >= JOB_ABORTING)
        w->job_ready = true;
}

/* Things that happen to a running job. */
SUSPENDS static bool disturb(struct world *w)
{
    struct err err;

    for (unsigned i = (unsigned)rnd(w, 4); i > 0; i--) {
        timer_sleep(rnd(w, 3000000));
        switch (rnd(w, 5)) {
        case 0:
            (void)job_pause(w->jobs, "j", &err);
            timer_sleep(rnd(w, 1000000));
            (void)job_resume(w->jobs, "j", &err);
            break;
        case 1:
            (void)job_set_speed(w->jobs, "j", MIB << rnd(w, 8), &err);
            break;
        case 2:
            do_cut(w);
            break;
        case 3:
            if (rnd(w, 3) == 0 && job_cancel(w->jobs, "j", false, &err) == 0)
                return true;
            break;
        default:
            break;
        }
    }
    (void)job_set_speed(w->jobs, "j", 0, &err);
    return false;
}

SUSPENDS static void wait_ready(struct world *w)
{
    while (!w->job_ready)
        timer_sleep(20000);
}

static void remove_disks(struct world *w, unsigned first, unsigned nr, struct disk **ret)
{
    memcpy(ret, w->disks.data + first, nr * sizeof(*ret));
    memmove(w->disks.data + first, w->disks.data + first + nr,
            (w->disks.len - first - nr) * sizeof(*w->disks.data));
    w->disks.len -= nr;
}

SUSPENDS static void drop_removed(struct world *w, struct disk **gone, unsigned nr)
{
    for (unsigned i = 0; i < nr; i++)
        disk_drop(w, gone[i]);
}

static const struct job_opts manual = {.id = "j"};

SUSPENDS static int finish_job(struct world *w, bool cancelled)
{
    struct err err = {0};
    int rc = job_wait(w->jobs, "j", &err);

    if (rc < 0 && rc != -ECANCELED)
        test_fail(__FILE__, __LINE__, "job: %s", err_text(&err));
    CHECK(rc == 0 || cancelled);
    CHECK_EQ(job_dismiss(w->jobs, "j", NULL), 0);
    w->counts[OP_CANCEL] += rc < 0;
    trail_add(OP_CANCEL, 0, 0, rc < 0);
    return rc;
}

/* Base got a part of what is above it, so what it and the layers between show is another thing. */
SUSPENDS static void refresh_views(struct world *w, unsigned first, unsigned last)
{
    for (unsigned i = first; i <= last; i++) {
        struct disk *d = w->disks.data[i];

        free(TAKE_PTR(d->view));
        d->len = layer_len(chain_layer(w->chain, i));
        d->view = rig_view(w->chain, chain_layer(w->chain, i));
    }
}

/* top..(base - 1) into base; top > 0. */
SUSPENDS static void do_commit(struct world *w)
{
    if (w->disks.len < 3)
        return;
    unsigned top = 1 + (unsigned)rnd(w, w->disks.len - 2);
    unsigned base = top + 1 + (unsigned)rnd(w, w->disks.len - top - 1);
    struct disk *gone[DEPTH_MAX], *to = w->disks.data[base], *from = w->disks.data[top];

    w->job_ready = false;
    MUST(job_commit(w->jobs, w->chain, chain_layer(w->chain, top), chain_layer(w->chain, base),
                    &manual, &err));
    bool cancelled = disturb(w);
    wait_ready(w);
    bool pushed = rnd(w, 3) == 0;
    if (pushed && w->disks.len < DEPTH_MAX) {
        do_push(w);
        top += w->disks.data[top] != from;
    }
    (void)job_finalize(w->jobs, "j", NULL);
    bool failed = finish_job(w, cancelled) < 0;
    base = top;
    while (w->disks.data[base] != to)
        base++;
    if (failed) {
        refresh_views(w, top + 1, base);
        return;
    }
    if (rnd(w, 2))
        do_cut(w); /* the merged ones still lie about */
    remove_disks(w, top, base - top, gone);
    refresh_views(w, top, top);
    CHECK(to->len >= from->len);
    if (memcmp(to->view, from->view, from->len) != 0)
        test_fail(__FILE__, __LINE__, "%s does not show what %s did", to->name, from->name);
    drop_removed(w, gone, base - top);
    trail_add(OP_COMMIT, 0, 0, w->disks.len);
    w->counts[OP_COMMIT]++;
}

/* After the pivot the disk is as long as the base, with what the base has behind the old end. */
static void adopt_tail(struct world *w, const uint8_t *tail, uint64_t len)
{
    for (uint64_t i = w->len / RIG_SECTOR; i < len / RIG_SECTOR; i++)
        sector_set(w, i, rig_stamp(tail + i * RIG_SECTOR, i * RIG_SECTOR));
    uint64_t first = w->len / RIG_SECTOR;
    w->len = MAX(w->len, len);
    history_reset(w, first);
}

SUSPENDS static void do_active(struct world *w)
{
    if (w->disks.len < 2)
        return;
    unsigned base = 1 + (unsigned)rnd(w, w->disks.len - 1);
    struct disk *gone[DEPTH_MAX], *to = w->disks.data[base];
    uint64_t old_len = to->len;

    w->job_ready = false;
    MUST(job_commit(w->jobs, w->chain, chain_layer(w->chain, 0), chain_layer(w->chain, base),
                    &manual, &err));
    bool cancelled = disturb(w);
    wait_ready(w);
    if (!cancelled) {
        w->job_ready = false;
        while (job_complete(w->jobs, "j", NULL) == -EBUSY) /* coming back from standby */
            timer_sleep(20000);
        if (rnd(w, 2))
            do_cut(w);
        wait_ready(w); /* pending: both are the same, and what is flushed is so in both */
    }
    bool drained = old_len > w->len; /* or else guests would not know of the new end */
    if (drained)
        wait_drained(w);
    w->no_cuts = drained;
    if (!cancelled) {
        remove_disks(w, 0, base, gone); /* base is current from here on */
        w->cut_len = layer_len(chain_layer(w->chain, base));
        if (rnd(w, 2))
            do_cut(w);
        w->cut_len = 0;
        CHECK_EQ(job_finalize(w->jobs, "j", NULL), 0);
    }
    if (finish_job(w, cancelled) < 0) {
        refresh_views(w, 1, base);
    } else {
        to->len = chain_len(w->chain);
        if (drained)
            adopt_tail(w, to->view, to->len);
        free(TAKE_PTR(to->view));
        drop_removed(w, gone, base);
        trail_add(OP_ACTIVE, 0, 0, w->disks.len);
        w->counts[OP_ACTIVE]++;
    }
    w->no_cuts = false;
    if (drained)
        gate_open(&w->gate);
}

/* Everything between `top` and base goes into top; base may be none. */
SUSPENDS static void do_stream(struct world *w)
{
    if (w->disks.len < 2)
        return;
    unsigned top = (unsigned)rnd(w, w->disks.len - 1);
    unsigned base = top + 2 + (unsigned)rnd(w, w->disks.len - top - 1);
    struct disk *gone[DEPTH_MAX], *into = w->disks.data[top];

    w->job_ready = false;
    MUST(job_stream(w->jobs, w->chain, chain_layer(w->chain, top), chain_layer(w->chain, base),
                    &manual, &err));
    bool cancelled = disturb(w);
    wait_ready(w);
    (void)job_finalize(w->jobs, "j", NULL);
    if (finish_job(w, cancelled) < 0)
        return;
    if (rnd(w, 2))
        do_cut(w);
    remove_disks(w, top + 1, base - top - 1, gone);
    drop_removed(w, gone, base - top - 1);
    CHECK(w->disks.data[top] == into);
    if (top > 0)
        check_snapshot(w, top);
    trail_add(OP_STREAM, 0, 0, w->disks.len);
    w->counts[OP_STREAM]++;
}

/* ---- the run ---- */

SUSPENDS static void step(struct world *w)
{
    switch (rnd(w, 16)) {
    case 0:
    case 1:
    case 2:
    case 3:
        do_push(w);
        break;
    case 4:
    case 5:
        do_commit(w);
        break;
    case 6:
    case 7:
        do_active(w);
        break;
    case 8:
    case 9:
        do_stream(w);
        break;
    case 10:
        do_resize(w);
        break;
    case 11:
        do_reopen(w);
        break;
    case 12:
        do_rollback(w);
        break;
    case 13:
        if (w->disks.len > 1)
            check_snapshot(w, 1 + (unsigned)rnd(w, w->disks.len - 1));
        break;
    default:
        do_cut(w);
        break;
    }
    w->ops++;
    CHECK_EQ(chain_depth(w->chain), w->disks.len);
    if (w->careful) {
        wait_drained(w);
        check_view(w);
        gate_open(&w->gate);
    }
}

/* A raw dump of the array, for qemu-img compare. */
static void check_with_qemu(struct world *w)
{
    char path[256];
    uint8_t *view = array_view(w);

    snprintf(path, sizeof(path), "%s/want.raw", test_dir());
    FILE *f = fopen(path, "w");
    CHECK(f);
    CHECK_EQ(fwrite(view, 1, w->len, f), w->len);
    CHECK_EQ(fclose(f), 0);
    free(view);
    test_sh("qemu-img compare -q -f %s -F raw %s %s", w->disks.data[0]->qcow2 ? "qcow2" : "raw",
            path_of(w, w->disks.data[0]), path);
}

SUSPENDS static void compare_now(struct world *w)
{
    wait_drained(w);
    w->no_cuts = true;
    check_view(w);
    MUST(chain_close(w->chain, &err));
    check_clean(w);
    if (w->files)
        check_with_qemu(w);
    history_reset(w, 0);
    open_chain(w);
    w->no_cuts = false;
    gate_open(&w->gate);
}

SUSPENDS static int run_world(void *arg)
{
    struct world *w = arg;
    struct co_group group;
    uint64_t next_compare = 0;

    w->sectors = calloc(LEN_MAX / RIG_SECTOR, sizeof(*w->sectors));
    CHECK(w->sectors);
    w->careful = getenv("VARVE_MODEL_CAREFUL");
    ranges_init(&w->ranges);
    gate_init(&w->gate);
    CHECK_EQ(jobs_new(job_note, w, &w->jobs), 0);
    w->len = random_len(w);
    history_reset(w, 0);
    struct rig_shape shape = rig_random_shape(&w->rng, w->len, true);
    insert_top(w, disk_new(w, &shape, NULL));
    open_chain(w);
    co_group_init(&group);
    for (unsigned i = 0; i < GUESTS; i++)
        CHECK_EQ(co_group_spawn(&group, guest, w), 0);
    if (w->cuts)
        CHECK_EQ(co_group_spawn(&group, cutter, w), 0);
    while (w->ops < w->ops_wanted) {
        timer_sleep(rnd(w, 1000000));
        step(w);
        if (w->ops >= next_compare) {
            compare_now(w);
            next_compare = w->ops + w->ops_wanted / 8;
        }
    }
    w->stop = true;
    CHECK_EQ(co_group_wait(&group), 0);
    jobs_free(w->jobs);
    check_view(w);
    for (unsigned i = 1; i < w->disks.len; i++)
        check_snapshot(w, i);
    MUST(chain_close(w->chain, &err));
    check_clean(w);
    if (w->files)
        check_with_qemu(w);
    while (w->disks.len > 0) {
        disk_drop(w, w->disks.data[0]);
        vec_remove_at(&w->disks, 0);
    }
    vec_free(&w->disks);
    free_sectors(w->sectors);
    return 0;
}

static uint64_t ops_of_run(uint64_t otherwise)
{
    const char *text = getenv("VARVE_MODEL_OPS");

    return text ? strtoull(text, NULL, 10) : otherwise;
}

static void report(const struct world *w)
{
    printf("  %llu operations:", (unsigned long long)w->ops);
    for (unsigned i = 0; i < OPS; i++)
        printf(" %s %llu%s", op_names[i], (unsigned long long)w->counts[i],
               i + 1 < OPS ? "," : "\n");
    if (w->cuts)
        printf("  power cuts: %llu unflushed sectors at risk, %llu leaked clusters\n",
               (unsigned long long)w->unflushed_seen, (unsigned long long)w->leaks_seen);
}

static void run_sim(uint64_t seed, bool cuts, uint64_t ops)
{
    struct world w = {.rng = seed, .cuts = cuts, .ops_wanted = ops_of_run(ops)};
    struct sim_opts opts = {.seed = seed, .max_delay_ns = 100000};

    CHECK_EQ(sim_run(&opts, run_world, &w), 0);
    CHECK(w.ops >= w.ops_wanted);
    report(&w);
}

TEST(random_chains_in_the_simulator)
{
    for (uint64_t i = 0; i < 4; i++)
        run_sim(test_seed() * 1000 + i + 1, false, 10000);
}

TEST(random_chains_with_power_cuts)
{
    for (uint64_t i = 0; i < 3; i++)
        run_sim(test_seed() * 2000 + i + 1, true, 10000);
}

CO_TEST(random_chains_on_files)
{
    struct world w = {.rng = test_seed(), .files = true, .ops_wanted = ops_of_run(3000)};

    test_need("qemu-img");
    run_world(&w);
    report(&w);
}
