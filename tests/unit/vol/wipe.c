/* Wiping files and loop devices: that nothing is left, that it stops and goes on, how fast. */
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/bits.h"
#include "rt/reactor.h"
#include "rt/timer.h"
#include "test.h"
#include "../../../src/vol/wipe.h"

#define LEN (150 * MIB + 4096)

static struct err err;

struct watch {
    unsigned calls, stop_at;
    uint64_t done, total;
    bool backwards;
};

static bool watch_it(void *ctx, uint64_t done, uint64_t total)
{
    struct watch *w = ctx;

    w->backwards |= done < w->done;
    w->done = done;
    w->total = total;
    return ++w->calls != w->stop_at;
}

/* A file of LEN bytes, none of them 0. */
static const char *make_file(void)
{
    static char path[128];

    snprintf(path, sizeof(path), "%s/disk", test_dir());
    test_sh("head -c %llu /dev/zero | tr '\\0' '\\125' >%s", LEN, path);
    return path;
}

/* The first byte that is not 0; LEN: none. */
static uint64_t first_data(const char *path)
{
    static unsigned char buf[MIB];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    uint64_t at = 0;

    CHECK(fd >= 0);
    for (ssize_t n; (n = read(fd, buf, sizeof(buf))) > 0; at += (uint64_t)n)
        for (ssize_t i = 0; i < n; i++)
            if (buf[i]) {
                close(fd);
                return at + (uint64_t)i;
            }
    close(fd);
    return at;
}

static uint64_t allocated(const char *path)
{
    struct stat st;

    CHECK_EQ(stat(path, &st), 0);
    return (uint64_t)st.st_blocks * 512;
}

/* A loop device on the file, whose pages go straight to it. */
static const char *make_loop(const char *file)
{
    static char dev[64];
    char path[128];

    snprintf(path, sizeof(path), "%s/loop", test_dir());
    if (geteuid() != 0 || test_sh_rc("losetup -f --show %s >%s 2>/dev/null", file, path) != 0)
        return NULL;
    FILE *f = fopen(path, "r");
    CHECK(f && fscanf(f, "%63s", dev) == 1);
    fclose(f);
    return dev;
}

static SUSPENDS void check_wiped(const char *target, const struct wipe_opts *opts)
{
    uint64_t done = 1;

    err = (struct err){0};
    if (wipe(target, opts, &done, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    CHECK_EQ(done, LEN);
    CHECK_EQ(first_data(target), LEN);
}

CO_TEST(a_file_is_wiped)
{
    const char *path = make_file();
    struct watch w = {0};

    check_wiped(path, &(struct wipe_opts){.go_on = watch_it, .ctx = &w});
    CHECK(w.calls == 5 && w.done == LEN && w.total == LEN && !w.backwards);
    path = make_file();
    check_wiped(path, &(struct wipe_opts){.by_writes = true});
    CHECK(allocated(path) >= 150 * MIB);
    path = make_file();
    check_wiped(path, &(struct wipe_opts){.by_writes = true, .discard = true});
    CHECK(allocated(path) < 4 * MIB);
}

CO_TEST(a_loop_device_is_wiped)
{
    for (unsigned i = 0; i < 3; i++) {
        const struct wipe_opts opts = {.by_writes = i > 0, .discard = i > 1};
        const char *path = make_file(), *dev = make_loop(path);

        if (!dev) {
            printf("  no loop devices here\n");
            return;
        }
        check_wiped(dev, &opts);
        /* the device can zero and discard: what it backs gives the space back */
        if (i != 1)
            CHECK(allocated(path) < 4 * MIB);
        else
            CHECK(allocated(path) >= 150 * MIB);
        test_sh("losetup -d %s", dev);
        CHECK_EQ(first_data(path), LEN);
    }
}

CO_TEST(it_stops_and_goes_on)
{
    for (unsigned by_writes = 0; by_writes < 2; by_writes++) {
        const char *path = make_file();
        uint64_t from = 0;
        unsigned runs = 0;
        int rc;

        do {
            struct watch w = {.stop_at = 2, .done = from};
            const struct wipe_opts opts = {
                .from = from, .by_writes = by_writes, .go_on = watch_it, .ctx = &w};
            uint64_t done = 0;

            rc = wipe(path, &opts, &done, &err);
            CHECK(rc == 0 || rc == -ECANCELED);
            CHECK(done > from && done - from <= 64 * MIB && !w.backwards);
            CHECK_EQ(first_data(path), done); /* what follows is not touched */
            from = done;
            runs++;
        } while (rc < 0);
        CHECK_EQ(runs, 3);
        CHECK_EQ(from, LEN);
        check_wiped(path, &(struct wipe_opts){.from = LEN});
    }
}

static bool stop_late(void *ctx, uint64_t done, uint64_t total)
{
    return reactor_now() < *(uint64_t *)ctx;
}

CO_TEST(the_rate_is_kept)
{
    const char *path = make_file();
    uint64_t start = reactor_now(), until = start + NSEC_PER_SEC, done;
    struct wipe_opts opts = {.rate = 20 * MIB, .go_on = stop_late, .ctx = &until};

    CHECK_EQ(wipe(path, &opts, &done, &err), -ECANCELED);
    uint64_t ns = reactor_now() - start;
    printf("  %llu MiB in %llu ms at 20 MiB/s\n", (unsigned long long)(done / MIB),
           (unsigned long long)(ns / NSEC_PER_MSEC));
    CHECK(done >= 5 * MIB); /* one step at least */
    CHECK(done <= 20 * MIB * (ns / NSEC_PER_MSEC) / 1000 + 10 * MIB);
    /* far too slow for a step: stopping does not wait for the next */
    opts.rate = 1000;
    start = reactor_now();
    until = start + 300 * NSEC_PER_MSEC;
    CHECK_EQ(wipe(path, &opts, &done, &err), -ECANCELED);
    CHECK_EQ(done, MIB);
    CHECK(reactor_now() - start < 5 * NSEC_PER_SEC);
}

CO_TEST(what_cannot_be_wiped)
{
    const char *path = make_file();
    uint64_t done = 7;

    CHECK_EQ(wipe("/does/not/exist", &(struct wipe_opts){0}, &done, &err), -ENOENT);
    CHECK_EQ(done, 0);
    CHECK_EQ(wipe(path, &(struct wipe_opts){.from = LEN + 1}, &done, &err), -EINVAL);
    CHECK_EQ(first_data(path), 0);
    test_need("qemu-io");
    test_sh("(cd %s; sleep 3 | qemu-io -f raw disk >/dev/null 2>&1 &) ; sleep 1", test_dir());
    CHECK_EQ(wipe(path, &(struct wipe_opts){0}, &done, &err), -EBUSY);
    CHECK_EQ(first_data(path), 0);
}
