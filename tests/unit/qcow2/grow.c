/*
 * Devices that grow ahead of the allocator, in the simulator: who waits and who does not, how much
 * is asked for, what happens when there is no room.
 */
#include "../../model/keep.h"
#include "base/bits.h"
#include "qcow2/internal.h"
#include "rt/reactor.h"
#include "rt/sim.h"
#include "rt/timer.h"
#include "rt/wait.h"
#include "test.h"

#define CHUNK   (16 * MIB)
#define EXTENT  (4 * MIB)
#define DISK    (1 * GIB)
#define MEM_LEN (2 * GIB)

struct world {
    struct blk *mem;
    struct image *img;
    struct image_opts opts;
    struct image_create_opts create;
    uint64_t len;       /* of the device */
    uint64_t room;      /* it cannot become longer */
    uint64_t extend_ns; /* an extension takes */
    int extend_rc;      /* it gives */
    unsigned extends, failed;
    uint64_t asked; /* last */
    enum image_room told[64];
    unsigned nr_told;
    int rc; /* of a single write */
    uint64_t took;
    unsigned running;
    bool stop;
};

SUSPENDS_UNCHECKED static int extend(void *ctx, uint64_t *len)
{
    struct world *w = ctx;

    if (!*len) {
        *len = w->len;
        return 0;
    }
    w->extends++;
    w->asked = *len;
    timer_sleep(w->extend_ns);
    if (w->extend_rc < 0 || *len > w->room) {
        w->failed++;
        return w->extend_rc < 0 ? w->extend_rc : -ENOSPC;
    }
    w->len = *len = align_up(MAX(*len, w->len), EXTENT);
    return 0;
}

static void told(void *ctx, enum image_room room, const char *why)
{
    struct world *w = ctx;

    CHECK(w->nr_told < ARRAY_SIZE(w->told));
    CHECK_EQ(*why != 0, room != IMAGE_ROOM_OK);
    w->told[w->nr_told++] = room;
}

static struct blk *device(struct world *w)
{
    return keep_new_as(
        w->mem, &(struct keep_opts){.fixed_len = true, .len = w->len, .extend = extend, .ctx = w});
}

SUSPENDS static void open_world(struct world *w)
{
    struct err err = {0};

    w->opts.writable = true;
    w->opts.grow.told = told;
    w->opts.grow.ctx = w;
    if (image_open(device(w), &w->opts, &w->img, &err) < 0)
        test_fail(__FILE__, __LINE__, "open: %s", err_text(&err));
}

SUSPENDS static void start(struct world *w)
{
    struct err err = {0};

    w->mem = NULL;
    CHECK_EQ(blk_mem_new(MEM_LEN, 512, &w->mem), 0);
    if (!w->opts.grow.chunk)
        w->opts.grow.chunk = CHUNK;
    if (!w->room)
        w->room = MEM_LEN;
    if (!w->create.virtual_len)
        w->create.virtual_len = DISK;
    if (!w->len)
        w->len = CHUNK;
    struct blk *blk = device(w);
    if (image_create(blk, &w->create, &err) < 0)
        test_fail(__FILE__, __LINE__, "create: %s", err_text(&err));
    blk_close(blk);
    open_world(w);
}

SUSPENDS static void close_world(struct world *w)
{
    struct err err = {0};

    if (image_close(w->img, &err) < 0)
        test_fail(__FILE__, __LINE__, "close: %s", err_text(&err));
}

static void finding(void *ctx, const char *line)
{
    fprintf(stderr, "  %s\n", line);
}

/* Closes; sound, and without leaks. */
SUSPENDS static void end(struct world *w)
{
    struct image_opts opts = {0};
    struct image_check res;

    close_world(w);
    CHECK_EQ(image_open(device(w), &opts, &w->img, NULL), 0);
    CHECK_EQ(image_check(w->img, &res, finding, NULL, NULL), 0);
    CHECK_EQ(res.corruptions + res.leaks + res.check_errors, 0);
    close_world(w);
    blk_close(w->mem);
}

/* As a guest's write goes. */
SUSPENDS static int guest_write(struct world *w, uint64_t off, uint64_t len, uint8_t value)
{
    uint8_t *buf = malloc(len);
    int rc;

    memset(buf, value, len);
    do {
        IOV_ITER_BUF(it, vec, buf, len);
        rc = image_write(w->img, off, len, &it, IMAGE_NO_WAIT, NULL);
    } while (rc == -ENOBUFS && (rc = image_wait_room(w->img)) == 0);
    free(buf);
    return rc;
}

SUSPENDS static void expect(struct world *w, uint64_t off, uint64_t len, uint8_t value)
{
    uint8_t *buf = malloc(len);
    IOV_ITER_BUF(it, vec, buf, len);

    CHECK_EQ(image_read(w->img, off, len, &it, NULL), 0);
    for (uint64_t i = 0; i < len; i++)
        if (buf[i] != value)
            test_fail(__FILE__, __LINE__, "byte %llu is %02x, not %02x",
                      (unsigned long long)(off + i), buf[i], value);
    free(buf);
}

static struct image_stats stats(struct world *w)
{
    struct image_stats st;

    image_get_stats(w->img, &st);
    return st;
}

static int run(struct world *w, int (*fn)(void *arg))
{
    return sim_run(&(struct sim_opts){.seed = test_seed(), .max_delay_ns = 100000}, fn, w);
}

/* ---- ahead ---- */

#define STREAM (400 * MIB)

/* 1 MiB every `pause`; *ret_first: waits up to the end of the first chunk. */
SUSPENDS static uint64_t stream(struct world *w, uint64_t pause, uint64_t *ret_first)
{
    for (uint64_t off = 0; off < STREAM; off += MIB) {
        if (off + 2 * MIB <= CHUNK)
            *ret_first = stats(w).room_waits;
        CHECK_EQ(guest_write(w, off, MIB, 1), 0);
        timer_sleep(pause);
    }
    return stats(w).room_waits;
}

SUSPENDS_UNCHECKED static int at_a_moderate_rate(void *arg)
{
    struct world *w = arg;
    uint64_t first;

    start(w);
    w->extend_ns = 50 * NSEC_PER_MSEC;
    uint64_t waits = stream(w, 20 * NSEC_PER_MSEC, &first); /* 16 MiB in 320 ms */
    struct image_stats st = stats(w);
    printf("  moderate: %llu waits, %llu extensions, %llu ahead; %llu MiB of device for %u\n",
           (unsigned long long)waits, (unsigned long long)st.extensions,
           (unsigned long long)st.extensions_ahead, (unsigned long long)(w->len / MIB),
           (unsigned)(STREAM / MIB));
    w->rc = (int)waits;
    if (grow_mutation == GROW_AS_IS) {
        CHECK_EQ(waits, 0);
        CHECK_EQ(st.extensions, st.extensions_ahead);
        CHECK_EQ(st.room_wait_ns, 0);
        CHECK(w->len <= STREAM + 2 * MIB + CHUNK + EXTENT);
    }
    end(w);
    return 0;
}

TEST(a_writer_at_a_moderate_rate_never_waits)
{
    struct world w = {0};

    run(&w, at_a_moderate_rate);
}

TEST(what_is_not_asked_for_ahead_is_noticed)
{
    struct world w = {0};

    grow_mutation = GROW_NOT_AHEAD;
    run(&w, at_a_moderate_rate);
    grow_mutation = GROW_AS_IS;
    CHECK(w.rc > 10);
}

SUSPENDS_UNCHECKED static int with_slow_extensions(void *arg)
{
    struct world *w = arg;
    uint64_t first, waits;

    start(w);
    w->extend_ns = 600 * NSEC_PER_MSEC; /* longer than a chunk lasts */
    waits = stream(w, 20 * NSEC_PER_MSEC, &first);
    printf("  slow extensions: %llu waits, %llu extensions, %llu ahead, device %llu MiB\n",
           (unsigned long long)waits, (unsigned long long)stats(w).extensions,
           (unsigned long long)stats(w).extensions_ahead, (unsigned long long)(w->len / MIB));
    CHECK(waits <= 4); /* until rate and time are known */
    CHECK(w->len <= STREAM + 2 * MIB + 2 * 4 * CHUNK + EXTENT);
    end(w);
    return 0;
}

TEST(the_rate_makes_up_for_slow_extensions)
{
    struct world w = {0};

    run(&w, with_slow_extensions);
}

SUSPENDS_UNCHECKED static int small_changes(void *arg)
{
    struct world *w = arg;

    start(w);
    w->extend_ns = 500 * NSEC_PER_MSEC;
    for (uint64_t off = 0; off < 100 * MIB; off += MIB) /* as fast as it goes */
        CHECK_EQ(guest_write(w, off, MIB, 1), 0);
    timer_sleep(5 * NSEC_PER_SEC);
    CHECK(w->extends > 0);
    printf("  100 MiB in a burst: device %llu MiB\n", (unsigned long long)(w->len / MIB));
    CHECK(w->len <= 100 * MIB + MIB + 512 * MIB + EXTENT);
    end(w);
    return 0;
}

TEST(a_burst_takes_no_more_than_a_chunk_above_what_it_uses)
{
    struct world w = {.opts.grow.chunk = 512 * MIB, .len = 64 * MIB};

    run(&w, small_changes);
}

SUSPENDS_UNCHECKED static int all_of_it(void *arg)
{
    struct world *w = arg;

    start(w);
    w->extend_ns = 10 * NSEC_PER_MSEC;
    for (uint64_t off = 0; off < w->create.virtual_len; off += MIB) {
        CHECK_EQ(guest_write(w, off, MIB, 1), 0);
        timer_sleep(10 * NSEC_PER_MSEC);
    }
    uint64_t full = w->img->full_end << w->img->hdr.cluster_bits;
    printf("  full image: %llu KiB by measure, %llu used, %llu device, %llu waits\n",
           (unsigned long long)(full / KIB),
           (unsigned long long)(w->img->end << w->img->hdr.cluster_bits) / KIB,
           (unsigned long long)(w->len / KIB), (unsigned long long)stats(w).room_waits);
    CHECK(w->len >= w->img->end << w->img->hdr.cluster_bits);
    CHECK(w->len <= align_up(full, EXTENT));
    CHECK_EQ(stats(w).room_waits, 0);
    end(w);
    return 0;
}

TEST(no_more_is_asked_for_than_the_full_image_needs)
{
    struct world w = {.create.virtual_len = 100 * MIB};

    run(&w, all_of_it);
}

/* ---- who waits ---- */

SUSPENDS_UNCHECKED static int crossing_writer(void *arg)
{
    struct world *w = arg;
    uint64_t start_ns = reactor_now();

    w->running++;
    w->rc = guest_write(w, 512 * MIB, 4 * MIB, 9);
    w->took = reactor_now() - start_ns;
    w->running--;
    return 0;
}

/* Everything that needs no new space, while `running` says that somebody waits. */
SUSPENDS static unsigned use_what_is_there(struct world *w)
{
    unsigned nr = 0;

    for (; w->running && nr < 200; nr++) {
        uint64_t before = reactor_now();

        expect(w, 0, 64 * KIB, (uint8_t)nr);
        CHECK_EQ(guest_write(w, 0, 64 * KIB, (uint8_t)(nr + 1)), 0);
        CHECK_EQ(image_flush(w->img), 0);
        CHECK(reactor_now() - before < 10 * NSEC_PER_MSEC);
        timer_sleep(10 * NSEC_PER_MSEC);
    }
    return nr;
}

/* To the end of the device, with nothing asked ahead. */
SUSPENDS static void fill(struct world *w)
{
    uint64_t off = MIB;

    grow_mutation = GROW_NOT_AHEAD;
    CHECK_EQ(guest_write(w, 0, 64 * KIB, 0), 0);
    for (;; off += 64 * KIB) {
        uint8_t buf[4096];
        IOV_ITER_BUF(it, vec, buf, sizeof(buf));

        memset(buf, 5, sizeof(buf));
        int rc = image_write(w->img, off, sizeof(buf), &it, IMAGE_NO_WAIT, NULL);
        if (rc == -ENOBUFS)
            break;
        CHECK_EQ(rc, 0);
    }
    CHECK(w->len - (w->img->end << w->img->hdr.cluster_bits) < 64 * KIB);
    grow_mutation = GROW_AS_IS;
}

SUSPENDS_UNCHECKED static int one_waits(void *arg)
{
    struct world *w = arg;
    struct co_group group;

    start(w);
    w->extend_ns = 2 * NSEC_PER_SEC;
    fill(w);
    struct image_stats before = stats(w);
    co_group_init(&group);
    CHECK_EQ(co_group_spawn(&group, crossing_writer, w), 0);
    reactor_yield();
    unsigned nr = use_what_is_there(w);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(w->rc, 0);
    CHECK(w->took >= 2 * NSEC_PER_SEC && w->took < 3 * NSEC_PER_SEC);
    CHECK(nr > 100);
    CHECK_EQ(stats(w).room_waits - before.room_waits, 1);
    CHECK(stats(w).room_wait_ns - before.room_wait_ns <= w->took);
    expect(w, 512 * MIB, 4 * MIB, 9);
    end(w);
    return 0;
}

TEST(nothing_waits_but_the_write_that_crosses_the_end)
{
    struct world w = {0};

    run(&w, one_waits);
}

struct one_of {
    struct world *w;
    uint64_t off, len;
    int rc;
};

SUSPENDS_UNCHECKED static int write_one(void *arg)
{
    struct one_of *o = arg;

    o->rc = guest_write(o->w, o->off, o->len, (uint8_t)(o->off / MIB));
    o->w->running--;
    return 0;
}

#define CROWD 24u

SUSPENDS static void spawn_crowd(struct world *w, struct one_of *crowd, struct co_group *group,
                                 uint64_t len)
{
    co_group_init(group);
    w->running = CROWD;
    for (unsigned i = 0; i < CROWD; i++) {
        crowd[i] = (struct one_of){w, 300 * MIB + i * 2 * MIB, len, 1};
        CHECK_EQ(co_group_spawn(group, write_one, &crowd[i]), 0);
    }
}

SUSPENDS_UNCHECKED static int many_wait(void *arg)
{
    struct world *w = arg;
    struct one_of crowd[CROWD];
    struct co_group group;

    start(w);
    w->extend_ns = NSEC_PER_SEC;
    fill(w);
    spawn_crowd(w, crowd, &group, 64 * KIB);
    for (unsigned i = 0; i < 60 && w->running; i++)
        timer_sleep(NSEC_PER_SEC);
    w->rc = (int)w->running; /* they ought to be done */
    while (w->running) {
        image_fail_waits(w->img);
        timer_sleep(NSEC_PER_SEC);
    }
    CHECK_EQ(co_group_wait(&group), 0);
    if (grow_mutation == GROW_AS_IS) {
        CHECK_EQ(stats(w).extensions, 1); /* shared */
        for (unsigned i = 0; i < CROWD; i++) {
            CHECK_EQ(crowd[i].rc, 0);
            expect(w, crowd[i].off, crowd[i].len, (uint8_t)(crowd[i].off / MIB));
        }
    }
    end(w);
    return 0;
}

TEST(those_that_wait_share_one_extension)
{
    struct world w = {0};

    run(&w, many_wait);
    CHECK_EQ(w.rc, 0);
}

/* fill() leaves the mutation as it is to be: set again when the crowd waits. */
SUSPENDS_UNCHECKED static int many_wait_in_vain(void *arg)
{
    struct world *w = arg;
    struct one_of crowd[CROWD];
    struct co_group group;

    start(w);
    w->extend_ns = NSEC_PER_SEC;
    fill(w);
    grow_mutation = GROW_NO_WAKE;
    spawn_crowd(w, crowd, &group, 64 * KIB);
    for (unsigned i = 0; i < 60 && w->running; i++)
        timer_sleep(NSEC_PER_SEC);
    w->rc = (int)w->running;
    grow_mutation = GROW_AS_IS;
    while (w->running) {
        image_fail_waits(w->img);
        timer_sleep(NSEC_PER_SEC);
    }
    CHECK_EQ(co_group_wait(&group), 0);
    end(w);
    return 0;
}

TEST(waiters_that_are_not_woken_are_noticed)
{
    struct world w = {0};

    run(&w, many_wait_in_vain);
    CHECK_EQ(w.rc, CROWD);
}

SUSPENDS_UNCHECKED static int large_requests(void *arg)
{
    struct world *w = arg;

    start(w);
    w->extend_ns = 10 * NSEC_PER_MSEC;
    CHECK_EQ(guest_write(w, 100 * MIB, 60 * MIB, 7), 0); /* nearly four chunks */
    CHECK(stats(w).extensions <= 16);
    expect(w, 100 * MIB, 60 * MIB, 7);
    end(w);
    return 0;
}

TEST(a_request_may_need_more_than_a_chunk)
{
    struct world w = {0};

    run(&w, large_requests);
}

SUSPENDS_UNCHECKED static int small_clusters(void *arg)
{
    struct world *w = arg;

    start(w);
    w->extend_ns = 10 * NSEC_PER_MSEC;
    uint32_t clusters = w->img->hdr.reftable_clusters;
    for (uint64_t off = 0; off < w->create.virtual_len; off += 256 * KIB)
        CHECK_EQ(guest_write(w, off, 256 * KIB, (uint8_t)(off / MIB)), 0);
    for (uint64_t off = 0; off < w->create.virtual_len; off += 256 * KIB)
        expect(w, off, 256 * KIB, (uint8_t)(off / MIB));
    printf("  refcount table: %u clusters, then %u; %llu extensions\n", clusters,
           w->img->hdr.reftable_clusters, (unsigned long long)stats(w).extensions);
    CHECK(w->img->hdr.reftable_clusters > 0);
    end(w);
    return 0;
}

TEST(tables_grow_across_the_end_of_the_device)
{
    struct world w = {.create = {.virtual_len = 24 * MIB, .cluster_size = 512, .refcount_bits = 64},
                      .opts.grow.chunk = 256 * KIB,
                      .len = 512 * KIB};

    run(&w, small_clusters);
}

/* ---- no room ---- */

SUSPENDS_UNCHECKED static int wait_for_room(void *arg)
{
    struct world *w = arg;
    struct one_of crowd[CROWD];
    struct co_group group;

    start(w);
    w->extend_ns = 100 * NSEC_PER_MSEC;
    fill(w);
    w->room = w->len;
    unsigned before = w->extends;
    spawn_crowd(w, crowd, &group, 64 * KIB);
    uint64_t since = reactor_now();
    CHECK_EQ(use_what_is_there(w), 200);
    timer_sleep(30 * NSEC_PER_SEC);
    CHECK_EQ(w->running, CROWD);
    uint64_t secs = (reactor_now() - since) / NSEC_PER_SEC;
    printf("  full for %llu s: %u extensions tried\n", (unsigned long long)secs,
           w->extends - before);
    CHECK(w->extends - before <= 2 * secs / 3 + 8);
    CHECK(w->nr_told == 1 && w->told[0] == IMAGE_ROOM_FULL);
    w->room = MEM_LEN;
    since = reactor_now();
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK(reactor_now() - since < 4 * NSEC_PER_SEC);
    CHECK(w->nr_told == 2 && w->told[1] == IMAGE_ROOM_OK);
    for (unsigned i = 0; i < CROWD; i++) {
        CHECK_EQ(crowd[i].rc, 0);
        expect(w, crowd[i].off, crowd[i].len, (uint8_t)(crowd[i].off / MIB));
    }
    end(w);
    return 0;
}

TEST(with_no_room_writes_wait_and_go_on_by_themselves)
{
    struct world w = {.opts.grow.on_full = IMAGE_FULL_WAIT};

    run(&w, wait_for_room);
}

SUSPENDS_UNCHECKED static int fail_without_room(void *arg)
{
    struct world *w = arg;

    start(w);
    w->extend_ns = 100 * NSEC_PER_MSEC;
    fill(w);
    w->room = w->len;
    for (unsigned i = 0; i < 5; i++) {
        uint64_t before = reactor_now();
        unsigned tried = w->extends;

        CHECK_EQ(guest_write(w, 400 * MIB, 64 * KIB, 1), -ENOSPC);
        CHECK(reactor_now() - before < NSEC_PER_SEC);
        CHECK(w->extends > tried);
        tried = w->extends;
        CHECK_EQ(guest_write(w, 400 * MIB, 64 * KIB, 1), -ENOSPC); /* not asked again so soon */
        CHECK_EQ(w->extends, tried);
        CHECK_EQ(guest_write(w, 0, 64 * KIB, 1), 0);
        CHECK_EQ(image_flush(w->img), 0);
        timer_sleep(2 * NSEC_PER_SEC);
    }
    CHECK(w->nr_told == 1 && w->told[0] == IMAGE_ROOM_FULL);
    w->room = MEM_LEN;
    CHECK_EQ(guest_write(w, 400 * MIB, 64 * KIB, 1), 0);
    CHECK_EQ(w->nr_told, 2);
    expect(w, 400 * MIB, 64 * KIB, 1);
    end(w);
    return 0;
}

TEST(with_no_room_writes_fail_if_they_are_to)
{
    struct world w = {.opts.grow.on_full = IMAGE_FULL_FAIL};

    run(&w, fail_without_room);
}

SUSPENDS_UNCHECKED static int little_room(void *arg)
{
    struct world *w = arg;
    uint64_t off = MIB;

    start(w);
    w->extend_ns = 10 * NSEC_PER_MSEC;
    w->room = 3 * CHUNK - EXTENT; /* no whole chunk in the end */
    while (guest_write(w, off, 64 * KIB, 1) == 0) {
        off += 64 * KIB;
        timer_sleep(2 * NSEC_PER_MSEC);
    }
    CHECK_EQ(w->len, w->room);
    CHECK(off >= w->room - 2 * MIB); /* to the last cluster */
    CHECK(w->nr_told >= 2 && w->told[0] == IMAGE_ROOM_SHORT);
    CHECK_EQ(w->told[w->nr_told - 1], IMAGE_ROOM_FULL);
    printf("  %u extensions failed on the way to a full group\n", w->failed);
    CHECK(w->failed < 40);
    end(w);
    return 0;
}

TEST(what_is_left_of_a_group_is_used_up)
{
    struct world w = {0};

    run(&w, little_room);
}

SUSPENDS_UNCHECKED static int close_while_waiting(void *arg)
{
    struct world *w = arg;
    struct one_of crowd[CROWD];
    struct co_group group;

    start(w);
    w->extend_ns = NSEC_PER_SEC;
    fill(w);
    w->room = w->len;
    spawn_crowd(w, crowd, &group, 64 * KIB);
    timer_sleep(20 * NSEC_PER_SEC);
    CHECK_EQ(w->running, CROWD);
    uint64_t before = reactor_now();
    image_fail_waits(w->img);
    CHECK_EQ(co_group_wait(&group), 0);
    for (unsigned i = 0; i < CROWD; i++)
        CHECK_EQ(crowd[i].rc, -ENOSPC);
    expect(w, MIB, 4096, 5);
    end(w);
    CHECK(reactor_now() - before < 3 * NSEC_PER_SEC);
    return 0;
}

TEST(closing_ends_the_wait)
{
    struct world w = {.opts.grow.on_full = IMAGE_FULL_WAIT};

    run(&w, close_while_waiting);
}

SUSPENDS_UNCHECKED static int space_becomes_free(void *arg)
{
    struct world *w = arg;
    struct one_of crowd[CROWD];
    struct co_group group;

    start(w);
    w->extend_ns = 100 * NSEC_PER_MSEC;
    fill(w);
    w->room = w->len;
    spawn_crowd(w, crowd, &group, 64 * KIB);
    timer_sleep(10 * NSEC_PER_SEC);
    CHECK_EQ(w->running, CROWD);
    CHECK_EQ(image_discard(w->img, MIB, 8 * MIB, NULL), 0);
    CHECK_EQ(image_flush(w->img), 0);
    CHECK_EQ(co_group_wait(&group), 0);
    CHECK_EQ(w->len, w->room);
    for (unsigned i = 0; i < CROWD; i++)
        expect(w, crowd[i].off, crowd[i].len, (uint8_t)(crowd[i].off / MIB));
    end(w);
    return 0;
}

TEST(a_discard_makes_room_for_those_that_wait)
{
    struct world w = {.opts.grow.on_full = IMAGE_FULL_WAIT};

    run(&w, space_becomes_free);
}

/* ---- slow operations ---- */

SUSPENDS_UNCHECKED static int tables(void *arg)
{
    struct world *w = arg;
    struct err err = {0};

    start(w); /* the L1 table and preallocated L2 tables do not fit into the first length */
    CHECK(w->extends > 0 && w->len > 2 * MIB);
    w->room = w->len;
    CHECK_EQ(image_resize(w->img, 2048 * GIB, NULL, &err), -ENOSPC);
    CHECK_EQ(image_len(w->img), w->create.virtual_len);
    w->room = MEM_LEN;
    timer_sleep(2 * NSEC_PER_SEC);
    if (image_resize(w->img, 2048 * GIB, NULL, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    CHECK_EQ(guest_write(w, 2047 * GIB, 64 * KIB, 3), 0);
    expect(w, 2047 * GIB, 64 * KIB, 3);
    end(w);
    return 0;
}

TEST(create_and_resize_extend_what_they_need)
{
    struct world w = {
        .create = {.virtual_len = 64 * MIB, .cluster_size = 4096, .prealloc = PREALLOC_METADATA},
        .opts.grow.chunk = MIB,
        .len = MIB};

    run(&w, tables);
}

SUSPENDS_UNCHECKED static int cut_and_go_on(void *arg)
{
    struct world *w = arg;
    uint64_t used, whole;

    start(w);
    w->extend_ns = 10 * NSEC_PER_MSEC;
    for (uint64_t off = 0; off < 40 * MIB; off += MIB)
        CHECK_EQ(guest_write(w, off, MIB, 1), 0);
    CHECK_EQ(image_discard(w->img, 30 * MIB, 10 * MIB, NULL), 0);
    CHECK_EQ(image_reopen(w->img, false, NULL), 0);
    CHECK_EQ(image_end(w->img, &used, NULL), 0);
    whole = w->len;
    CHECK(used >= 30 * MIB && used < 32 * MIB && whole > 40 * MIB);
    w->len = used; /* under the open image, as its manager does */
    expect(w, 0, 30 * MIB, 1);
    CHECK_EQ(image_reopen(w->img, true, NULL), 0);
    CHECK_EQ(w->img->blk->len, used);
    CHECK_EQ(guest_write(w, 200 * MIB, MIB, 4), 0);
    CHECK_EQ(image_discard(w->img, 200 * MIB, MIB, NULL), 0);
    close_world(w);
    CHECK_EQ(image_open(device(w), &(struct image_opts){0}, &w->img, NULL), 0);
    CHECK_EQ(image_end(w->img, &whole, NULL), 0); /* of one that was never writable */
    CHECK(whole >= used && whole <= used + MIB);
    close_world(w);
    w->len = whole;
    open_world(w);
    for (uint64_t off = 100 * MIB; off < 140 * MIB; off += MIB)
        CHECK_EQ(guest_write(w, off, MIB, 2), 0);
    expect(w, 0, 30 * MIB, 1);
    expect(w, 30 * MIB, 10 * MIB, 0);
    expect(w, 100 * MIB, 40 * MIB, 2);
    end(w);
    return 0;
}

TEST(a_device_cut_to_what_is_used_goes_on_growing)
{
    struct world w = {0};

    run(&w, cut_and_go_on);
}
