/*
 * Chains and jobs on volumes that grow (loop devices): snapshots and merges while writes wait for
 * room, journals that follow a volume from device to device, volumes cut to what is used.
 */
#include <sys/wait.h>
#include <unistd.h>
#include "../../model/loopvol.h"
#include "base/bits.h"
#include "chain/internal.h"
#include "job/job.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "test.h"

#define CHUNK (16 * MIB)
#define DISK  (256 * MIB)

static const struct job_opts auto_opts = {.id = "j", .auto_finalize = true, .auto_dismiss = true};

static struct loopvol *volume(const char *name, uint64_t len)
{
    struct loopvol *v;

    if (!loopvol_new(test_dir(), name, len, &v)) {
        printf("SKIP: no loop devices\n");
        exit(77);
    }
    return v;
}

SUSPENDS static void make(struct loopvol *v, const struct loopvol *backing, bool raw_backing)
{
    struct image_create_opts opts = {.virtual_len = DISK};
    struct blk_file_opts file = {.writable = true, .direct = true, .lock = BLK_LOCK_WRITE};
    struct err err = {0};
    struct blk *blk;

    if (backing) {
        opts.backing_name = strrchr(backing->path, '/') + 1;
        opts.backing_format = raw_backing ? "raw" : "qcow2";
        opts.cluster_size = 128 * KIB;
        opts.extended_l2 = true;
    }
    CHECK_EQ(blk_file_open(v->path, &file, &blk, &err), 0);
    if (image_create(blk, &opts, &err) < 0)
        test_fail(__FILE__, __LINE__, "create: %s", err_text(&err));
    blk_close(blk);
}

static struct image_grow_opts grow_opts(enum image_on_full on_full)
{
    return (struct image_grow_opts){.chunk = CHUNK, .on_full = on_full};
}

SUSPENDS static struct chain *open_chain(const struct loopvol *v)
{
    struct chain_opts opts = {.writable = true, .grow = grow_opts(IMAGE_FULL_WAIT)};
    struct err err = {0};
    struct chain *chain;

    if (chain_open(v->path, &opts, &chain, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    return chain;
}

SUSPENDS static struct layer *open_layer(const struct loopvol *v)
{
    struct layer_opts opts = {.writable = true, .grow = grow_opts(IMAGE_FULL_WAIT)};
    struct err err = {0};
    struct layer *layer;

    if (layer_open(v->path, &opts, &layer, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    return layer;
}

SUSPENDS static void close_chain(struct chain *chain)
{
    struct err err = {0};

    if (chain_close(chain, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
}

SUSPENDS static int write_at(struct chain *chain, uint64_t off, uint64_t len, uint8_t value)
{
    uint8_t *buf = malloc(len);

    memset(buf, value, len);
    IOV_ITER_BUF(it, vec, buf, len);
    int rc = chain_write(chain, off, len, &it, 0);
    free(buf);
    return rc;
}

SUSPENDS static void expect(struct chain *chain, uint64_t off, uint64_t len, uint8_t value)
{
    uint8_t *buf = malloc(len);
    IOV_ITER_BUF(it, vec, buf, len);

    CHECK_EQ(chain_read(chain, off, len, &it), 0);
    for (uint64_t i = 0; i < len; i++)
        if (buf[i] != value)
            test_fail(__FILE__, __LINE__, "byte %llu is %02x, not %02x",
                      (unsigned long long)(off + i), buf[i], value);
    free(buf);
}

static struct image_stats top_stats(struct chain *chain)
{
    struct image_stats st;

    image_get_stats(layer_image(chain_layer(chain, 0)), &st);
    return st;
}

static void qemu_check(const struct loopvol *v)
{
    if (test_sh_rc("command -v qemu-img >/dev/null") == 0)
        test_sh("qemu-img check -q 'json:{\"driver\":\"qcow2\",\"backing\":null,\"file\":"
                "{\"driver\":\"host_device\",\"filename\":\"%s\"}}'",
                v->dev);
}

/* ---- a kill; first, since it forks ---- */

SUSPENDS static int write_and_die(void *arg)
{
    const struct loopvol *v = arg;
    struct chain *chain = open_chain(v);
    struct err err = {0};

    chain_hold(chain);
    CHECK_EQ(chain_start_ack(chain, &err), 0);
    chain_release(chain);
    CHECK(chain_is_ack(chain));
    for (uint64_t off = 0; off < 40 * MIB; off += MIB) /* across the end */
        CHECK_EQ(write_at(chain, off, MIB, (uint8_t)(off / MIB)), 0);
    CHECK(top_stats(chain).extensions > 0);
    _exit(0);
}

SUSPENDS static int look_after(void *arg)
{
    struct chain *chain = open_chain(arg);

    CHECK_STR(image_ack_note(layer_image(chain_layer(chain, 0))), "");
    for (uint64_t off = 0; off < 40 * MIB; off += MIB)
        expect(chain, off, MIB, (uint8_t)(off / MIB));
    CHECK_EQ(write_at(chain, 100 * MIB, MIB, 1), 0);
    close_chain(chain);
    return 0;
}

SUSPENDS static int make_main(void *arg)
{
    make(arg, NULL, false);
    return 0;
}

/* Its device is another one's then, and it has another one. */
TEST(a_journal_is_found_by_the_volume_on_whatever_device)
{
    struct loopvol *v = volume("killed", CHUNK), *other;
    char first[32];
    int status;

    setenv("VARVE_RUNTIME", test_dir(), 1);
    pid_t child = fork(); /* this process has no threads as yet */
    if (child == 0) {
        reactor_run(make_main, v);
        reactor_run(write_and_die, v);
    }
    CHECK(waitpid(child, &status, 0) == child && status == 0);
    memcpy(first, v->dev, sizeof(first));
    loopvol_drop(v);
    other = volume("other", CHUNK);
    reactor_run(make_main, other);
    CHECK(loopvol_attach(test_dir(), "killed", &v));
    reactor_run(look_after, v);
    qemu_check(v);
    loopvol_drop(v);
    loopvol_drop(other);
}

/* ---- a stream ---- */

CO_TEST(a_stream_onto_a_volume_waits_for_nothing)
{
    struct loopvol *v = volume("stream", CHUNK);
    uint64_t first = 0;

    v->delay_ns = 100 * NSEC_PER_MSEC;
    make(v, NULL, false);
    struct chain *chain = open_chain(v);
    for (uint64_t off = 0; off < 160 * MIB; off += MIB) { /* 40 MiB a second at most */
        if (off == CHUNK)
            first = top_stats(chain).room_waits;
        CHECK_EQ(write_at(chain, off, MIB, (uint8_t)(off / MIB)), 0);
        timer_sleep(25 * NSEC_PER_MSEC);
    }
    struct image_stats st = top_stats(chain);
    printf(
        "  %llu extensions, %llu ahead, %llu ms each; %llu waits in the first chunk, %llu later; "
        "volume %llu MiB\n",
        (unsigned long long)st.extensions, (unsigned long long)st.extensions_ahead,
        (unsigned long long)(st.extend_ns / NSEC_PER_MSEC / MAX(st.extensions, 1ull)),
        (unsigned long long)first, (unsigned long long)(st.room_waits - first),
        (unsigned long long)(loopvol_len(v) / MIB));
    CHECK_EQ(st.room_waits - first, 0);
    for (uint64_t off = 0; off < 160 * MIB; off += MIB)
        expect(chain, off, MIB, (uint8_t)(off / MIB));
    close_chain(chain);
    qemu_check(v);
    loopvol_drop(v);
}

/* ---- full ---- */

struct writer {
    struct chain *chain;
    uint64_t off;
    int rc;
    bool done;
};

SUSPENDS static int write_main(void *arg)
{
    struct writer *w = arg;

    w->rc = write_at(w->chain, w->off, MIB, 9);
    w->done = true;
    return 0;
}

#define WRITERS 6u

struct crowd {
    struct writer w[WRITERS];
    struct co_group group;
};

/* Writers that find no room; returns when all of them wait. */
SUSPENDS static void crowd_start(struct crowd *c, struct chain *chain)
{
    co_group_init(&c->group);
    for (unsigned i = 0; i < WRITERS; i++) {
        c->w[i] = (struct writer){.chain = chain, .off = 200 * MIB + i * 2 * MIB};
        CHECK_EQ(co_group_spawn(&c->group, write_main, &c->w[i]), 0);
    }
    while (chain->waits < WRITERS)
        timer_sleep(NSEC_PER_MSEC);
}

SUSPENDS static void fill(struct chain *chain, struct loopvol *v)
{
    v->room = loopvol_len(v);
    chain->no_waits++; /* fail */
    for (uint64_t off = 0; write_at(chain, off, 64 * KIB, 5) == 0; off += 64 * KIB)
        ;
    chain->no_waits--;
}

CO_TEST(a_snapshot_is_taken_while_writes_wait_for_room)
{
    struct loopvol *base = volume("full", CHUNK), *top = volume("fresh", CHUNK);
    struct pivot_stats st;
    struct err err = {0};
    struct crowd c;

    make(base, NULL, false);
    make(top, base, false);
    struct chain *chain = open_chain(base);
    fill(chain, base);
    crowd_start(&c, chain);
    expect(chain, 0, MIB, 5);
    CHECK_EQ(write_at(chain, MIB, MIB, 6), 0); /* in place */
    CHECK_EQ(chain_flush(chain), 0);
    struct layer *layer = open_layer(top);
    if (chain_push(chain, layer, &st, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    CHECK_EQ(co_group_wait(&c.group), 0);
    CHECK(st.gate_closed_ns < NSEC_PER_SEC);
    for (unsigned i = 0; i < WRITERS; i++) {
        CHECK_EQ(c.w[i].rc, 0);
        expect(chain, c.w[i].off, MIB, 9);
    }
    expect(chain, 0, MIB, 5);
    expect(chain, MIB, MIB, 6);
    CHECK_EQ(loopvol_len(base), CHUNK);
    close_chain(chain);
    qemu_check(base);
    qemu_check(top);
    loopvol_drop(base);
    loopvol_drop(top);
}

CO_TEST(closing_fails_those_that_wait)
{
    struct loopvol *v = volume("close", CHUNK);
    struct crowd c;

    make(v, NULL, false);
    struct chain *chain = open_chain(v);
    fill(chain, v);
    crowd_start(&c, chain);
    chain_stop_waits(chain);
    CHECK_EQ(co_group_wait(&c.group), 0);
    for (unsigned i = 0; i < WRITERS; i++)
        CHECK_EQ(c.w[i].rc, -ENOSPC);
    CHECK_EQ(write_at(chain, 220 * MIB, MIB, 1), -ENOSPC); /* at once, from now on */
    chain_resume_waits(chain);
    v->room = UINT64_MAX;
    CHECK_EQ(write_at(chain, 220 * MIB, MIB, 1), 0);
    expect(chain, 0, MIB, 5);
    close_chain(chain);
    qemu_check(v);
    loopvol_drop(v);
}

CO_TEST(those_that_wait_go_on_when_there_is_room)
{
    struct loopvol *v = volume("again", CHUNK);
    struct crowd c;

    make(v, NULL, false);
    struct chain *chain = open_chain(v);
    fill(chain, v);
    crowd_start(&c, chain);
    timer_sleep(100 * NSEC_PER_MSEC);
    CHECK_EQ(chain->waits, WRITERS);
    v->room = UINT64_MAX;
    CHECK_EQ(co_group_wait(&c.group), 0);
    for (unsigned i = 0; i < WRITERS; i++) {
        CHECK_EQ(c.w[i].rc, 0);
        expect(chain, c.w[i].off, MIB, 9);
    }
    close_chain(chain);
    qemu_check(v);
    loopvol_drop(v);
}

/* ---- merges ---- */

SUSPENDS static void commit_top(struct chain *chain)
{
    struct err err = {0};
    struct jobs *jobs;

    CHECK_EQ(jobs_new(NULL, NULL, &jobs), 0);
    CHECK_EQ(
        job_commit(jobs, chain, chain_layer(chain, 0), chain_layer(chain, 1), &auto_opts, &err), 0);
    while (job_complete(jobs, "j", NULL) == -EBUSY)
        reactor_yield();
    if (job_wait(jobs, "j", &err) < 0)
        test_fail(__FILE__, __LINE__, "commit: %s", err_text(&err));
    jobs_free(jobs);
}

/* The lower volume was cut to what it used. */
CO_TEST(a_merge_extends_the_lower_volume)
{
    struct loopvol *base = volume("lower", CHUNK), *top = volume("upper", CHUNK);
    struct pivot_stats st;
    struct err err = {0};
    uint64_t used;

    make(base, NULL, false);
    make(top, base, false);
    struct chain *chain = open_chain(base);
    for (uint64_t off = 0; off < 20 * MIB; off += MIB)
        CHECK_EQ(write_at(chain, off, MIB, 1), 0);
    struct layer *layer = open_layer(top);
    CHECK_EQ(chain_push(chain, layer, &st, &err), 0);
    CHECK_EQ(layer_end(chain_layer(chain, 1), &used, &err), 0);
    CHECK(used > 20 * MIB && used < 22 * MIB && loopvol_len(base) > used + 4 * MIB);
    loopvol_set_len(base, used);
    qemu_check(base);
    for (uint64_t off = 10 * MIB; off < 60 * MIB; off += MIB)
        CHECK_EQ(write_at(chain, off, MIB, 2), 0);
    commit_top(chain);
    CHECK_EQ(chain_depth(chain), 1);
    CHECK(loopvol_len(base) > 60 * MIB);
    for (uint64_t off = 60 * MIB; off < 80 * MIB; off += MIB)
        CHECK_EQ(write_at(chain, off, MIB, 3), 0);
    expect(chain, 0, 10 * MIB, 1);
    expect(chain, 10 * MIB, 50 * MIB, 2);
    expect(chain, 60 * MIB, 20 * MIB, 3);
    close_chain(chain);
    qemu_check(base);
    loopvol_drop(base);
    loopvol_drop(top);
}

CO_TEST(a_merge_into_a_full_group_fails_and_leaves_the_disk)
{
    struct loopvol *base = volume("narrow", CHUNK), *top = volume("wide", CHUNK);
    struct err err = {0};
    struct jobs *jobs;

    make(base, NULL, false);
    make(top, base, false);
    struct chain *chain = open_chain(top);
    for (uint64_t off = 0; off < 40 * MIB; off += MIB)
        CHECK_EQ(write_at(chain, off, MIB, 2), 0);
    base->room = loopvol_len(base);
    CHECK_EQ(jobs_new(NULL, NULL, &jobs), 0);
    CHECK_EQ(
        job_commit(jobs, chain, chain_layer(chain, 0), chain_layer(chain, 1), &auto_opts, &err), 0);
    CHECK_EQ(job_wait(jobs, "j", &err), -ENOSPC);
    jobs_free(jobs);
    expect(chain, 0, 40 * MIB, 2);
    base->room = UINT64_MAX;
    timer_sleep(NSEC_PER_SEC + NSEC_PER_SEC / 10);
    commit_top(chain);
    expect(chain, 0, 40 * MIB, 2);
    close_chain(chain);
    qemu_check(base);
    loopvol_drop(base);
    loopvol_drop(top);
}

CO_TEST(a_merge_extends_a_raw_volume)
{
    struct loopvol *base = volume("disk.raw", 32 * MIB), *top = volume("over", CHUNK);
    struct err err = {0};

    test_sh(
        "tr '\\0' x </dev/zero | dd of=%s bs=1M count=32 iflag=fullblock conv=fsync 2>/dev/null",
        base->dev);
    make(top, base, true);
    struct chain *chain = open_chain(top);
    expect(chain, 0, 32 * MIB, 'x');
    expect(chain, 32 * MIB, MIB, 0);
    CHECK_EQ(write_at(chain, 100 * MIB, MIB, 4), 0);
    commit_top(chain);
    CHECK_EQ(chain_len(chain), DISK);
    expect(chain, 0, 32 * MIB, 'x');
    expect(chain, 32 * MIB, 68 * MIB, 0);
    expect(chain, 100 * MIB, MIB, 4);
    expect(chain, 101 * MIB, DISK - 101 * MIB, 0);
    if (chain_resize(chain, DISK + MIB, &err) < 0) /* not a whole extent */
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    CHECK_EQ(chain_len(chain), DISK + MIB);
    CHECK_EQ(loopvol_len(base), DISK + LOOPVOL_EXTENT);
    expect(chain, DISK, MIB, 0);
    CHECK_EQ(write_at(chain, DISK, MIB, 7), 0);
    base->room = loopvol_len(base);
    CHECK_EQ(chain_resize(chain, 2 * DISK, &err), -ENOSPC);
    CHECK_EQ(chain_len(chain), DISK + MIB);
    close_chain(chain);
    loopvol_drop(base);
    loopvol_drop(top);
}
