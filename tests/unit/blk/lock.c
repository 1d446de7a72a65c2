/*
 * lock.c: who may open an image beside whom, against the real QEMU programs and against
 * ourselves, and blk_file_reopen. The other program runs beside us and says when it has the file
 * open; that it was refused is told by its exit status.
 */
#include <fcntl.h>
#include <sched.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include "devices.h"

static char img[200], top[200], raw[200];

static void make_images(void)
{
    test_need("qemu-io");
    snprintf(img, sizeof(img), "%s/img.qcow2", test_dir());
    snprintf(top, sizeof(top), "%s/top.qcow2", test_dir());
    snprintf(raw, sizeof(raw), "%s/raw.img", test_dir());
    test_sh("qemu-img create -q -f qcow2 %s 1M", img);
    test_sh("qemu-img create -q -f qcow2 -b %s -F qcow2 %s", img, top);
    test_sh("qemu-img create -q -f raw %s 1M", raw);
}

SUSPENDS static int open_rc(const char *path, enum blk_lock lock, struct blk **ret, struct err *err)
{
    struct blk_file_opts opts = {.writable = lock == BLK_LOCK_WRITE, .lock = lock};

    return blk_file_open(path, &opts, ret, err);
}

SUSPENDS static struct blk *must_open(const char *path, enum blk_lock lock)
{
    struct blk *blk = NULL;
    struct err err = {0};

    if (open_rc(path, lock, &blk, &err) < 0)
        test_fail(__FILE__, __LINE__, "%s", err_text(&err));
    return blk;
}

/* Opens and closes; returns what opening said. */
SUSPENDS static int try_open(const char *path, enum blk_lock lock)
{
    struct blk *blk = NULL;
    int rc = open_rc(path, lock, &blk, NULL);

    if (rc == 0)
        blk_close(blk);
    return rc;
}

/* ---- another program that holds an image open: qemu-io on a pipe ---- */

struct holder {
    FILE *in;
};

/* args as for qemu-io; returns once it has the image open. */
static void hold(struct holder *h, const char *args, const char *path)
{
    char cmd[700];

    snprintf(cmd, sizeof(cmd), "exec stdbuf -oL qemu-io %s %s >%s/said", args, path, test_dir());
    test_sh("rm -f %s/said", test_dir());
    h->in = popen(cmd, "we");
    CHECK(h->in);
    fprintf(h->in, "read 0 512\n");
    fflush(h->in);
    for (unsigned i = 0; test_sh_rc("grep -qs 'read 512/512' %s/said", test_dir()) != 0; i++) {
        CHECK(i < 500);
        usleep(10000);
    }
}

static void let_go(struct holder *h)
{
    fputs("q\n", h->in);
    CHECK_EQ(pclose(h->in), 0);
}

/* May QEMU open it so? */
static bool qemu_may(const char *args, const char *path)
{
    return test_sh_rc("qemu-io %s -c 'read 0 512' %s >/dev/null 2>&1", args, path) == 0;
}

static bool daemon_may(const char *path)
{
    return test_sh_rc("echo '{\"execute\":\"qmp_capabilities\"}{\"execute\":\"quit\"}' | "
                      "timeout 20 qemu-storage-daemon --blockdev driver=qcow2,node-name=q,"
                      "file.driver=file,file.filename=%s --chardev stdio,id=c --monitor chardev=c "
                      ">/dev/null 2>&1",
                      path) == 0;
}

CO_TEST(we_give_way_to_qemu)
{
    struct holder h;
    struct err err = {0};
    struct blk *blk = NULL;

    make_images();
    hold(&h, "-f qcow2", img);
    CHECK_EQ(open_rc(img, BLK_LOCK_READ, &blk, &err), -EBUSY);
    CHECK(strstr(err_text(&err), "being written by qemu-io (process "));
    CHECK(strstr(err_text(&err), img));
    CHECK_EQ(try_open(img, BLK_LOCK_WRITE), -EBUSY);
    CHECK_EQ(try_open(img, BLK_LOCK_NONE), 0);
    let_go(&h);
    CHECK_EQ(try_open(img, BLK_LOCK_WRITE), 0);

    hold(&h, "-r -f qcow2", img);
    CHECK_EQ(try_open(img, BLK_LOCK_READ), 0);
    CHECK_EQ(open_rc(img, BLK_LOCK_WRITE, &blk, &err), -EBUSY);
    CHECK(strstr(err_text(&err), "in use by qemu-io (process "));
    let_go(&h);

    hold(&h, "-f qcow2", top); /* img is its backing file */
    CHECK_EQ(try_open(img, BLK_LOCK_READ), 0);
    CHECK_EQ(try_open(img, BLK_LOCK_WRITE), -EBUSY);
    CHECK_EQ(try_open(top, BLK_LOCK_READ), -EBUSY);
    let_go(&h);

    hold(&h, "-f raw", raw);
    CHECK_EQ(try_open(raw, BLK_LOCK_READ), -EBUSY);
    CHECK_EQ(try_open(raw, BLK_LOCK_WRITE), -EBUSY);
    let_go(&h);
}

CO_TEST(qemu_gives_way_to_us)
{
    make_images();
    CHECK(qemu_may("-f qcow2", img) && qemu_may("-f qcow2", top) && daemon_may(img));

    struct blk *blk = must_open(img, BLK_LOCK_WRITE);
    CHECK(!qemu_may("-f qcow2", img) && !qemu_may("-r -f qcow2", img) && !daemon_may(img));
    CHECK(!qemu_may("-f qcow2", top)); /* our image as its backing file */
    CHECK(test_sh_rc("qemu-img info %s >/dev/null 2>&1", img) != 0);
    CHECK(test_sh_rc("qemu-img check %s >/dev/null 2>&1", img) != 0);
    CHECK(test_sh_rc("qemu-img info -U %s >/dev/null 2>&1", img) == 0);
    blk_close(blk);

    blk = must_open(img, BLK_LOCK_READ);
    CHECK(!qemu_may("-f qcow2", img) && qemu_may("-r -f qcow2", img) && !daemon_may(img));
    CHECK(qemu_may("-f qcow2", top));
    CHECK(test_sh_rc("qemu-img convert -O raw %s %s.copy", img, img) == 0);
    blk_close(blk);

    blk = must_open(raw, BLK_LOCK_WRITE);
    CHECK(!qemu_may("-f raw", raw));
    blk_close(blk);
    blk = must_open(raw, BLK_LOCK_READ);
    CHECK(!qemu_may("-f raw", raw) && qemu_may("-r -f raw", raw));
    blk_close(blk);

    blk = must_open(img, BLK_LOCK_NONE);
    CHECK(qemu_may("-f qcow2", img));
    blk_close(blk);
}

/* The same between two of us: every pair of locks, on two descriptors. */
CO_TEST(we_give_way_to_ourselves)
{
    static const enum blk_lock locks[] = {BLK_LOCK_NONE, BLK_LOCK_READ, BLK_LOCK_WRITE};

    make_images();
    for (unsigned a = 0; a < 3; a++)
        for (unsigned b = 0; b < 3; b++) {
            struct blk *first = must_open(img, locks[a]);

            CHECK_EQ(try_open(img, locks[b]), a && b && a + b > 2 ? -EBUSY : 0);
            CHECK_EQ(try_open(img, locks[b]), a && b && a + b > 2 ? -EBUSY : 0);
            blk_close(first);
            CHECK_EQ(try_open(img, locks[b]), 0);
        }
}

CO_TEST(many_readers_share)
{
    struct blk *readers[20];
    struct holder h;

    make_images();
    hold(&h, "-r -f qcow2", img);
    for (unsigned i = 0; i < 20; i++)
        readers[i] = must_open(img, BLK_LOCK_READ);
    CHECK(qemu_may("-f qcow2", top));
    CHECK_EQ(try_open(img, BLK_LOCK_WRITE), -EBUSY);
    let_go(&h);
    for (unsigned i = 0; i < 20; i++) {
        CHECK_EQ(try_open(img, BLK_LOCK_WRITE), -EBUSY);
        blk_close(readers[i]);
    }
    CHECK_EQ(try_open(img, BLK_LOCK_WRITE), 0);
}

/* A refused one leaves nothing behind: neither locks nor content changed. */
CO_TEST(a_refused_open_changes_nothing)
{
    struct blk_file_opts opts = {
        .writable = true, .create = true, .truncate = true, .lock = BLK_LOCK_WRITE};
    struct blk *other = NULL;

    make_images();
    struct blk *blk = must_open(img, BLK_LOCK_READ);
    CHECK_EQ(blk_file_open(img, &opts, &other, NULL), -EBUSY);
    CHECK(blk->len > 0 && lseek(blk_file_fd(blk), 0, SEEK_END) == (off_t)blk->len);
    CHECK_EQ(try_open(img, BLK_LOCK_READ), 0); /* its write lock is gone */
    blk_close(blk);
    test_sh("qemu-img check -q %s", img);
}

/* ---- change of access ---- */

CO_TEST(a_layer_turns_read_only_and_back)
{
    char block[512] = "data";

    make_images();
    struct blk *blk = must_open(raw, BLK_LOCK_WRITE);
    CHECK_EQ(blk_write(blk, 0, block, sizeof(block)), 0);
    int fd = blk_file_fd(blk);

    CHECK_EQ(blk_file_reopen(blk, false, BLK_LOCK_READ, NULL), 0);
    CHECK_EQ(blk_file_fd(blk), fd);
    CHECK_EQ(fcntl(fd, F_GETFL) & O_ACCMODE, O_RDONLY);
    CHECK(fcntl(fd, F_GETFD) & FD_CLOEXEC);
    CHECK_EQ(blk_write(blk, 0, block, sizeof(block)), -EROFS);
    CHECK_EQ(blk_flush(blk), 0);
    CHECK_EQ(blk_read(blk, 0, block, sizeof(block)), 0);
    CHECK_STR(block, "data");
    CHECK(qemu_may("-r -f raw", raw) && !qemu_may("-f raw", raw));
    CHECK_EQ(try_open(raw, BLK_LOCK_READ), 0);

    /* back: refused while another reads, and then it is still a reader */
    struct blk *reader = must_open(raw, BLK_LOCK_READ);
    struct err err = {0};
    CHECK_EQ(blk_file_reopen(blk, true, BLK_LOCK_WRITE, &err), -EBUSY);
    CHECK(!blk->writable);
    CHECK_EQ(try_open(raw, BLK_LOCK_READ), 0);
    blk_close(reader);
    CHECK_EQ(blk_file_reopen(blk, true, BLK_LOCK_WRITE, &err), 0);
    CHECK_EQ(fcntl(blk_file_fd(blk), F_GETFL) & O_ACCMODE, O_RDWR);
    CHECK_EQ(blk_write(blk, 0, block, sizeof(block)), 0);
    CHECK_EQ(try_open(raw, BLK_LOCK_READ), -EBUSY);

    /* only the lock */
    CHECK_EQ(blk_file_reopen(blk, true, BLK_LOCK_NONE, &err), 0);
    CHECK(qemu_may("-f raw", raw));
    blk_close(blk);
}

CO_TEST(a_direct_file_stays_direct_and_finds_its_renamed_self)
{
    struct blk *blk = new_file(NULL, "old-name", 8192, true);
    char path[300];

    test_sh("mv %s/old-name %s/new-name", test_dir(), test_dir());
    CHECK_EQ(blk_file_reopen(blk, false, BLK_LOCK_READ, NULL), 0);
    CHECK(fcntl(blk_file_fd(blk), F_GETFL) & O_DIRECT);
    snprintf(path, sizeof(path), "%s/new-name", test_dir());
    blk_file_set_name(blk, path);
    CHECK_STR(blk->name, path);
    CHECK_EQ(blk_file_reopen(blk, true, BLK_LOCK_WRITE, NULL), 0);
    CHECK_EQ(blk_write(blk, 5, "x", 1), 0);
    blk_close(blk);
}

/* ---- many processes at once ---- */

struct shared {
    atomic_int writers, readers, wins, mixed;
};

/* Locks and unlocks in a loop; counts whom it meets inside. */
static void contend(struct shared *sh, bool writer)
{
    for (unsigned i = 0; i < 100; i++) {
        int fd = open(raw, (writer ? O_RDWR : O_RDONLY) | O_CLOEXEC);

        if (blk_lock_fd(fd, writer ? BLK_LOCK_WRITE : BLK_LOCK_READ, raw, NULL) == 0) {
            atomic_fetch_add(writer ? &sh->writers : &sh->readers, 1);
            sh->wins++;
            for (unsigned j = 0; j < 20; j++) {
                if (sh->writers > 1 || (sh->writers && sh->readers))
                    sh->mixed++;
                sched_yield();
            }
            atomic_fetch_sub(writer ? &sh->writers : &sh->readers, 1);
        }
        close(fd);
        usleep(100);
    }
}

TEST(a_writer_is_alone_whatever_the_moment)
{
    struct shared *sh =
        mmap(NULL, sizeof(*sh), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    pid_t pids[5];

    make_images();
    fflush(stdout);
    for (unsigned i = 0; i < 5; i++) {
        pids[i] = fork();
        CHECK(pids[i] >= 0);
        if (pids[i] == 0) {
            contend(sh, i < 3);
            _exit(0);
        }
    }
    for (unsigned i = 0; i < 5; i++)
        CHECK_EQ(waitpid(pids[i], NULL, 0), pids[i]);
    printf("  %d times somebody had the lock\n", sh->wins);
    CHECK(sh->wins > 50 && sh->mixed == 0);
    munmap(sh, sizeof(*sh));
}
