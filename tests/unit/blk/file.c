/* file.c and file_open.c: regular files, direct and buffered, tmpfs, loop devices, errors. */
#include <fcntl.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#include "base/bits.h"
#include "blk/internal.h"
#include "devices.h"
#include "rt/reactor.h"

CO_TEST(direct_file_matches_an_array)
{
    struct blk *blk = new_file(NULL, "direct", 777777, true);

    CHECK(fcntl(blk_file_fd(blk), F_GETFL) & O_DIRECT);
    CHECK(blk->align >= 512 && blk->io_unit >= 512 && !blk->fixed_len && blk->fresh_zero);
    check_against_array(blk, 1200);
    CHECK(blk->stats.bounced > 100);
    blk_close(blk);
}

CO_TEST(buffered_file_matches_an_array)
{
    struct blk *blk = new_file(NULL, "buffered", 777777, false);

    CHECK_EQ(blk->align, 1);
    check_against_array(blk, 1200);
    CHECK_EQ(blk->stats.bounced, 0);
    blk_close(blk);
}

CO_TEST(tmpfs_file_matches_an_array)
{
    struct blk *blk = new_file("/dev/shm", "varve-test-blk", 777777, true);

    unlink("/dev/shm/varve-test-blk");
    check_against_array(blk, 1200);
    blk_close(blk);
}

CO_TEST(loop_device_matches_an_array)
{
    static const unsigned sectors[] = {512, 4096};

    for (size_t i = 0; i < ARRAY_SIZE(sectors); i++) {
        struct blk *blk = new_loop(2 * MIB, sectors[i]);

        if (!blk) {
            printf("  no loop devices here\n");
            return;
        }
        CHECK_EQ(blk->len, 2 * MIB);
        CHECK_EQ(blk->align, sectors[i]);
        CHECK(blk->io_unit >= sectors[i] && blk->fixed_len && !blk->fresh_zero);
        check_against_array(blk, 800);
        check_neighbours(blk);
        CHECK_EQ(blk_write(blk, 2 * MIB - 100, sectors, 101), -ENOSPC);
        CHECK_EQ(blk_resize(blk, MIB), -ENOTSUP);
        blk_close(blk);
        drop_loop();
    }
}

CO_TEST(neighbours_on_a_direct_file)
{
    struct blk *blk = new_file(NULL, "neighbours", 0, true);

    for (unsigned i = 0; i < 5; i++)
        check_neighbours(blk);
    blk_close(blk);
}

/* ---- opening ---- */

static const char *path_of(const char *name)
{
    static char path[300];

    snprintf(path, sizeof(path), "%s/%s", test_dir(), name);
    return path;
}

SUSPENDS static int open_rc(const char *path, struct blk_file_opts opts, struct err *err)
{
    struct blk *blk = NULL;
    int rc = blk_file_open(path, &opts, &blk, err);

    if (rc == 0)
        blk_close(blk);
    return rc;
}

CO_TEST(only_files_and_block_devices_are_opened)
{
    struct err err = {0};

    CHECK_EQ(open_rc(path_of("none"), (struct blk_file_opts){0}, &err), -ENOENT);
    CHECK(strstr(err_text(&err), "/none") && strstr(err_text(&err), "No such file"));
    CHECK_EQ(open_rc(test_dir(), (struct blk_file_opts){0}, &err), -EINVAL);
    CHECK(strstr(err_text(&err), "neither a regular file nor a block device"));
    CHECK_EQ(open_rc("/dev/zero", (struct blk_file_opts){0}, &err), -EINVAL);
    CHECK_EQ(mkfifo(path_of("fifo"), 0600), 0);
    CHECK_EQ(open_rc(path_of("fifo"), (struct blk_file_opts){0}, &err), -EINVAL);
    CHECK_EQ(open_rc(test_dir(), (struct blk_file_opts){.writable = true}, &err), -EISDIR);
}

CO_TEST(create_refuses_or_empties_what_is_there)
{
    struct blk_file_opts opts = {.writable = true, .create = true, .lock = BLK_LOCK_WRITE};
    struct err err = {0};

    blk_close(new_file(NULL, "there", 10000, false));
    CHECK_EQ(open_rc(path_of("there"), opts, &err), -EEXIST);
    struct stat st;
    CHECK(stat(path_of("there"), &st) == 0 && st.st_size == 10000);
    opts.truncate = true;
    CHECK_EQ(open_rc(path_of("there"), opts, &err), 0);
    CHECK(stat(path_of("there"), &st) == 0 && st.st_size == 0 && (st.st_mode & 0777) == 0644);
}

CO_TEST(a_descriptor_is_taken_on_success_only)
{
    struct blk_file_opts opts = {.writable = true, .lock = BLK_LOCK_WRITE};
    struct blk *blk = NULL;
    struct err err = {0};
    int fd = open("/dev/zero", O_RDWR | O_CLOEXEC);

    CHECK_EQ(blk_file_from_fd(fd, "zero", &opts, &blk, &err), -EINVAL);
    CHECK_EQ(close(fd), 0);
    fd = open(path_of("from-fd"), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    CHECK_EQ(blk_file_from_fd(fd, "from-fd", &opts, &blk, &err), 0);
    CHECK_EQ(blk_file_fd(blk), fd);
    CHECK_EQ(blk_write(blk, 3, "abc", 3), 0);
    blk_close(blk);
    CHECK_EQ(fcntl(fd, F_GETFD), -1);
}

/* ---- what the file system says ---- */

CO_TEST(holes_data_and_zeroes_are_told_apart)
{
    struct blk *blk = new_file(NULL, "holes", 1 << 20, true);
    uint64_t len;
    bool data;
    struct stat st;
    char *buf = buf_get(65536);

    memset(buf, 1, 65536);
    CHECK_EQ(blk_status(blk, 0, 1 << 20, &data, &len), 0);
    CHECK(!data && len == 1 << 20);
    CHECK_EQ(blk_write(blk, 131072, buf, 65536), 0);
    CHECK_EQ(blk_status(blk, 0, 1 << 20, &data, &len), 0);
    CHECK(!data && len == 131072);
    CHECK_EQ(blk_status(blk, 131072 + 4096, 1 << 20, &data, &len), 0);
    CHECK(data && len == 65536 - 4096);
    CHECK_EQ(blk_zero(blk, 131072, 65536, BLK_MAY_UNMAP), 0);
    CHECK(fstat(blk_file_fd(blk), &st) == 0 && st.st_blocks < 64);
    CHECK_EQ(blk_preallocate(blk, 0, 2 << 20), 0);
    CHECK_EQ(blk->len, 2 << 20);
    CHECK(fstat(blk_file_fd(blk), &st) == 0 && st.st_blocks >= 4096);
    CHECK_EQ(blk_zero(blk, 0, 65536, 0), 0); /* stays allocated */
    CHECK(fstat(blk_file_fd(blk), &st) == 0 && st.st_blocks >= 4096);
    CHECK_EQ(blk_discard(blk, 0, 1 << 20), 0);
    CHECK(fstat(blk_file_fd(blk), &st) == 0 && st.st_blocks < 4096);
    buf_put(buf, 65536);
    blk_close(blk);
}

/* ---- an answered write is no hole ---- */

struct hole_race {
    struct blk *blk;
    uint64_t at; /* is being written */
    bool stop;
};

SUSPENDS static int ask_for_holes(void *arg)
{
    struct hole_race *race = arg;
    uint64_t len;
    bool data;

    while (!race->stop) {
        CHECK_EQ(blk_status(race->blk, race->at, 4096, &data, &len), 0);
        reactor_yield();
    }
    return 0;
}

SUSPENDS static int fill_holes(void *arg)
{
    struct hole_race *race = arg;
    char *buf = buf_get(4096);
    uint64_t len;
    bool data;

    memset(buf, 1, 4096);
    for (uint64_t off = 0; off < race->blk->len; off += 8192) {
        race->at = off;
        CHECK_EQ(blk_write(race->blk, off, buf, 4096), 0);
        CHECK_EQ(blk_status(race->blk, off, 4096, &data, &len), 0);
        if (!data)
            test_fail(__FILE__, __LINE__, "a hole at %llu", (unsigned long long)off);
    }
    buf_put(buf, 4096);
    race->stop = true;
    return 0;
}

CO_TEST(a_write_is_no_hole_once_it_is_answered)
{
    static const char *const names[] = {"race0", "race1", "race2", "race3"};

    for (unsigned i = 0; i < 4; i++) {
        struct hole_race race = {.blk = new_file(NULL, names[i], 4 << 20, i & 1)};
        struct co_group group;

        /* as on the network: asked on a helper thread, writes go on */
        file_of(race.blk)->place = i & 2 ? PLACE_NETWORK : PLACE_LOCAL;
        co_group_init(&group);
        for (unsigned k = 0; k < 8; k++)
            CHECK_EQ(co_group_spawn(&group, ask_for_holes, &race), 0);
        CHECK_EQ(co_group_spawn(&group, fill_holes, &race), 0);
        CHECK_EQ(co_group_wait(&group), 0);
        blk_close(race.blk);
    }
}

CO_TEST(a_file_cut_by_another_reads_as_zeroes)
{
    struct blk *blk = new_file(NULL, "cut", 65536, true);
    char *buf = buf_get(65536);

    memset(buf, 1, 65536);
    CHECK_EQ(blk_write(blk, 0, buf, 65536), 0);
    CHECK_EQ(truncate(path_of("cut"), 1000), 0);
    CHECK_EQ(blk_read(blk, 0, buf, 65536), 0);
    CHECK(buf[999] == 1 && buf_is_zero(buf + 1000, 64536));
    buf_put(buf, 65536);
    blk_close(blk);
}

/* More pieces than one system call takes, and vectors that end before the request's end. */
CO_TEST(long_vectors_are_split)
{
    static const bool direct[] = {false, true};
    unsigned nr = 3000;
    struct iovec *iov = calloc(nr, sizeof(*iov));
    size_t len = (size_t)nr * 512;
    uint8_t *out = buf_get(len), *in = buf_get(len);

    for (unsigned d = 0; d < 2; d++) {
        struct blk *blk = new_file(NULL, d ? "vec-direct" : "vec", 0, direct[d]);
        struct iov_iter it;

        for (unsigned i = 0; i < nr; i++)
            memset(out + i * 512, (int)(i * 7 + d), 512);
        for (unsigned i = 0; i < nr; i++) /* from the last piece to the first */
            iov[i] = (struct iovec){out + (nr - 1 - i) * 512, 512};
        iov_iter_init(&it, iov, nr);
        CHECK_EQ(blk_writev(blk, 0, 512 * 1500, &it, 0), 0);
        CHECK_EQ(blk_writev(blk, 512 * 1500, 512 * 1500, &it, BLK_FUA), 0);
        CHECK_EQ(it.left, 0);
        CHECK_EQ(blk->len, len);
        CHECK_EQ(blk_read(blk, 0, in, len), 0);
        for (unsigned i = 0; i < nr; i++)
            CHECK(memcmp(in + i * 512, out + (nr - 1 - i) * 512, 512) == 0);
        memset(in, 0, len);
        for (unsigned i = 0; i < nr; i++)
            iov[i].iov_base = in + (nr - 1 - i) * 512;
        iov_iter_init(&it, iov, nr);
        CHECK_EQ(blk_readv(blk, 0, len, &it), 0);
        CHECK(memcmp(in, out, len) == 0);
        blk_close(blk);
    }
    buf_put(out, len);
    buf_put(in, len);
    free(iov);
}

/* ---- no space ---- */

CO_TEST(a_file_size_limit_is_an_error_not_a_signal_of_success)
{
    struct blk *blk = new_file(NULL, "limit", 0, false);
    struct rlimit old, low;
    char *buf = buf_get(65536);

    signal(SIGXFSZ, SIG_IGN);
    CHECK_EQ(getrlimit(RLIMIT_FSIZE, &old), 0);
    low = old;
    low.rlim_cur = 100000;
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
    CHECK_EQ(blk_write(blk, 0, buf, 65536), 0);
    /* short at first, then refused: the whole request failed */
    CHECK_EQ(blk_write(blk, 65536, buf, 65536), -EFBIG);
    CHECK_EQ(blk->len, 65536);
    CHECK_EQ(blk_resize(blk, 200000), -EFBIG);
    CHECK_EQ(setrlimit(RLIMIT_FSIZE, &old), 0);
    CHECK_EQ(blk_write(blk, 65536, buf, 65536), 0);
    CHECK_EQ(blk_flush(blk), 0);
    buf_put(buf, 65536);
    blk_close(blk);
}

CO_TEST(a_full_file_system_is_told)
{
    static const bool direct[] = {true, false};
    char dir[300];
    char *buf = buf_get(1 << 20);

    snprintf(dir, sizeof(dir), "%s/mnt", test_dir());
    test_sh("mkdir %s && truncate -s 16M %s.img && mkfs.ext4 -q -m 0 %s.img", dir, dir, dir);
    if (test_sh_rc("mount -o loop %s.img %s 2>/dev/null", dir, dir) != 0) {
        printf("  no loop mounts here\n");
        return;
    }
    memset(buf, 1, 1 << 20);
    for (unsigned d = 0; d < 2; d++) {
        struct blk *blk = new_file(dir, "full", 0, direct[d]);
        int rc = 0;

        for (unsigned i = 0; i < 64 && rc == 0; i++)
            rc = blk_write(blk, i * MIB, buf, 1 << 20);
        CHECK_EQ(rc, -ENOSPC);
        CHECK_EQ(blk_preallocate(blk, 0, 64 * MIB), -ENOSPC);
        /* nothing was lost: what was written is there, and it goes on once there is space */
        CHECK_EQ(blk_flush(blk), 0);
        CHECK_EQ(blk_resize(blk, MIB), 0);
        CHECK_EQ(blk_write(blk, MIB, buf, 1 << 20), 0);
        CHECK_EQ(blk_flush(blk), 0);
        blk_close(blk);
        test_sh("rm %s/full", dir);
    }
    buf_put(buf, 1 << 20);
    test_sh("umount %s", dir);
}
